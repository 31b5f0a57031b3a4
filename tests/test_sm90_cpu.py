"""The Hopper kernels on the CPU (gluon_cpu): held to the error rule, to the meaning of NaN, and to their waits and barriers.

BIGPOOL_SEEDS: orders of warps and of copies for each call.
"""

import os

import pytest
import torch

from bigpool import prefill_attention, verify_attention
from gluon_cpu.hopper import hopper
from prefill_inputs import check as check_prefill
from verify_inputs import QUANTISED, judge, make, same_bits

SEEDS = range(int(os.environ.get("BIGPOOL_SEEDS", "1")))
FORMATS = [(None, None), *QUANTISED]
# The others differ from these in scales alone.
CHOSEN = FORMATS if len(SEEDS) > 1 else [
    (None, None), ("int8", "token_head"), ("int4", "token_head"), ("fp8_e4m3", "head"), ("fp8_e5m2", "token_head"),
]  # fmt: skip
PARTIAL, SPECIALISED = "verify_partial_sm90_kernel", "verify_partial_ws_sm90_kernel"


@pytest.fixture(params=SEEDS)
def card(monkeypatch, request):
    """Copies land late, early, or in between."""
    return hopper(monkeypatch, seed=request.param, haste=(0.5, 0.0, 1.0)[request.param % 3])


def batch(kv_format, scales, **options):
    defaults = {"seq_lens": [200, 130, 65, 0], "q_lens": [3, 2, 1, 0], "page_size": 880, "heads": (6, 1), "head_dim": 256}
    return make(kv_format=kv_format, scales=scales, **(defaults | {"dtype": torch.bfloat16} | options))


def verify(call, **options):
    return verify_attention(**call, backend="triton", return_lse=True, **options)


@pytest.mark.parametrize(("kv_format", "scales"), CHOSEN)
@pytest.mark.parametrize(("page_size", "q_len"), [(880, 3), (880, 9), (880, 16), (16, 3), (32, 16)])
def test_verify_formats_pages_and_rows(card, kv_format, scales, page_size, q_len):
    call = batch(kv_format, scales, page_size=page_size, q_lens=[q_len, 2, 1, 0])
    judge(call, *verify(call))
    assert card.launched[0] in (PARTIAL, SPECIALISED)
    assert (card.launched[0] == SPECIALISED) == (page_size < 64 or q_len == 16 or (q_len == 9 and kv_format in (None, "int4")))


@pytest.mark.parametrize(("kv_format", "scales"), CHOSEN)
@pytest.mark.parametrize(("head_dim", "heads", "kv_layout"), [(64, (8, 2), "NHD"), (128, (4, 4), "HND"), (128, (16, 2), "NHD")])
@pytest.mark.parametrize("page_size", [16, 880])
def test_verify_head_dims_and_groups(card, kv_format, scales, head_dim, heads, kv_layout, page_size):
    call = batch(
        kv_format, scales, head_dim=head_dim, heads=heads, kv_layout=kv_layout, page_size=page_size, seq_lens=[150, 33],
        q_lens=[8, 2], dtype=torch.float16,
    )  # fmt: skip
    judge(call, *verify(call, num_splits=1 if page_size == 16 else None))
    assert card.launched


@pytest.mark.parametrize("kv_format", [None, "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("page_size", "q_len"), [(880, 5), (880, 16), (16, 5)])
def test_nan_in_a_later_draft_token(card, kv_format, page_size, q_len):
    call = batch(kv_format, kv_format and "tensor", seq_lens=[101], q_lens=[q_len], page_size=page_size)
    clean, clean_lse = verify(call)
    for name in ("k_cache", "v_cache"):
        page, slot = call["block_table"][0, (101 - 2) // page_size], (101 - 2) % page_size
        bits = call[name] if kv_format is None else call[name].view(torch.uint8)
        bits[page, slot] = float("nan") if kv_format is None else 0x7F
    out, lse = verify(call)
    assert same_bits(out[:-2], clean[:-2])
    assert same_bits(lse[:-2], clean_lse[:-2])
    assert torch.isnan(out[-2:]).all()


@pytest.mark.parametrize(
    ("kv_format", "scales"), [(None, None), ("int8", "token_head"), ("int4", "token_head"), ("fp8_e4m3", "head")]
)
@pytest.mark.parametrize(("page_size", "q_len"), [(880, 2), (880, 16), (16, 2)])
def test_a_page_outside_the_pool_makes_nan(card, kv_format, scales, page_size, q_len):
    call = batch(kv_format, scales, seq_lens=[page_size + 40, 9], q_lens=[q_len, 2], page_size=page_size)
    clean, _ = verify(call)
    for bad in (len(call["k_cache"]), -1) if kv_format else (2**31 - 1, -(2**31)):
        call["block_table"][0, 1] = bad
        out, _ = verify(call)
        assert torch.isnan(out[:q_len]).all()
        assert same_bits(out[q_len:], clean[q_len:])


@pytest.mark.parametrize("rules", [{}, {"window_size": 100}, {"softcap": 2.0}, {"causal": False}], ids=str)
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 256), (880, 256), (64, 128), (880, 64)])
def test_prefill_exact(card, rules, page_size, head_dim):
    call = make(
        [230, 65, 0, 17], [60, 65, 0, 1], page_size=page_size, heads=(6, 1), head_dim=head_dim, dtype=torch.bfloat16, **rules
    )
    check_prefill(call)
    assert card.launched == ["prefill_sm90_kernel"]


@pytest.mark.parametrize(
    ("rules", "page_size", "head_dim"),
    [({}, 880, 256), ({"window_size": 100}, 16, 256), ({"softcap": 2.0}, 64, 128), ({"causal": False}, 880, 128)],
    ids=str,
)
@pytest.mark.parametrize("pv", ["exact", "fp8"])
def test_prefill_int8(card, rules, page_size, head_dim, pv):
    """fp16: the passes over keys and values run in Triton's interpreter."""
    call = make(
        [230, 65, 0, 17], [60, 65, 0, 1], page_size=page_size, heads=(6, 1), head_dim=head_dim, dtype=torch.float16, qk="int8",
        pv=pv, **rules,
    )  # fmt: skip
    check_prefill(call)
    assert card.launched == ["prefill_sm90_kernel" if pv == "exact" else "prefill_fp8_sm90_kernel"]


@pytest.mark.parametrize("modes", [{}, {"qk": "int8", "pv": "fp8"}], ids=str)
def test_prefill_with_nan_in_later_tokens(card, modes):
    """int8 takes the mean of all keys, so only V has one there; its scales count what is not finite as 0."""
    call = make([230, 65], [60, 65], page_size=880, heads=(6, 1), head_dim=256, dtype=torch.float16, **modes)
    page, slot = call["block_table"][0, 0], 230 - 3
    results = []
    for value in (0.0, float("nan")):
        for name in ("v_cache",) if modes else ("k_cache", "v_cache"):
            call[name][page, slot] = value
        results.append(prefill_attention(**call, backend="triton", return_lse=True))
    (clean, clean_lse), (out, lse) = results
    assert torch.isnan(out[57:60]).all()
    for got, expected in ((out, clean), (lse, clean_lse)):
        assert same_bits(got[:57], expected[:57])
        assert same_bits(got[60:], expected[60:])


def test_prefill_pages_outside_the_pool_make_nan(card):
    call = make([2_000, 65], [10, 65], page_size=880, heads=(6, 1), head_dim=64, dtype=torch.bfloat16)
    clean, _ = prefill_attention(**call, backend="triton", return_lse=True)
    for bad in (len(call["k_cache"]), -1, 2**31 - 1, -(2**31)):
        call["block_table"][0, 1] = bad
        out, _ = prefill_attention(**call, backend="triton", return_lse=True)
        assert torch.isnan(out[:10]).all()
        assert same_bits(out[10:], clean[10:])
