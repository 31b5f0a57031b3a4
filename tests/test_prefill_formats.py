"""Quantised caches, learned sinks and sink tokens in prefill attention, against float64 on what the cache stands for."""

import pytest
import torch

from bigpool.ops import _prefill_launch
from bigpool.ops._prefill_plan import PrefillConfig
from bigpool.ops.prefill import prefill_attention
from bigpool.ops.verify import verify_attention
from prefill_inputs import check, make, run, same_bits
from verify_inputs import QUANTISED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Q_DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
PER_ROW = [(name, scales) for name, scales in QUANTISED if scales == "token_head"]
SINKS = torch.tensor([0.5, 2.0, -1.0, 3.0], device=DEVICE)


@pytest.mark.parametrize("dtype", Q_DTYPES)
@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
def test_formats(kv_format, scales, dtype):
    check(make([331, 0, 70, 5], [45, 0, 33, 7], kv_format=kv_format, scales=scales, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("head_dim", [16, 40, 96, 128, 256, 512])
@pytest.mark.parametrize("kv_format", [None, "int8", "int4", "fp8_e4m3"])
def test_head_dims(kv_format, head_dim):
    check(make([70, 33], [23, 33], head_dim=head_dim, kv_format=kv_format, device=DEVICE))


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 48, 880])
@pytest.mark.parametrize(("kv_format", "scales"), PER_ROW)
def test_scales_apart_and_inline(kv_format, scales, page_size, kv_layout, inline):
    layout = {"page_size": page_size, "kv_layout": kv_layout, "kv_format": kv_format, "scales": scales}
    call = make([200, 33], [23, 9], heads=(6, 2), device=DEVICE, inline=inline, **layout)
    out = check(call)
    for ours, theirs in zip(out, run(make([200, 33], [23, 9], heads=(6, 2), device=DEVICE, **layout)), strict=True):
        assert same_bits(ours, theirs), "where scales lie changes no bit"


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_without_scales_is_scale_one(kv_format):
    call = make([200, 33], [23, 9], kv_format=kv_format, scales="tensor", device=DEVICE)
    ones = torch.ones(1, device=DEVICE)
    bare, one, only_k = (check({**call, "k_scale": k, "v_scale": v}) for k, v in ((None, None), (ones, ones), (ones, None)))
    for same in zip(bare, one, only_k, strict=True):
        assert same_bits(same[0], same[1])
        assert same_bits(same[0], same[2])


@pytest.mark.parametrize("size", [2.0**-60, 1e-9, 1e9])
@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_scales_of_any_size(kv_format, size):
    call = make([300, 45], [23, 9], kv_format=kv_format, scales="token_head", dtype=torch.float32, device=DEVICE)
    call["v_scale"] = call["v_scale"] * size
    if kv_format == "int4":
        call["v_scale"] = call["v_scale"].view(torch.int32).bitwise_and(-16).bitwise_or(5).view(torch.float32)
    check(call)


@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_scale_zero_and_scales_that_differ_by_powers(kv_format):
    call = make([90], [23], kv_format=kv_format, scales="token_head", device=DEVICE)
    page = call["block_table"][0, 1]
    call["k_scale"][page, 3], call["v_scale"][page, 5] = 0.0, 0.0
    if kv_format != "int4":
        call["v_scale"] *= torch.logspace(-6, 2, call["v_scale"].numel(), device=DEVICE).view_as(call["v_scale"])
    check(call)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("kv_format", "scales"), PER_ROW)
def test_a_nan_scale_reaches_only_rows_that_see_it(kv_format, scales, name):
    call = make([75], [6], kv_format=kv_format, scales=scales, device=DEVICE)
    good, good_lse = run(call)
    call[name][call["block_table"][0, 4], 72 % 16, 1] = float("nan")
    out, lse = run(call)
    assert out[3:, 2:].isnan().all(), "the query heads of kv head 1, from position 72 on"
    if name == "k_scale":
        assert lse[3:, 2:].isnan().all()
    else:
        assert torch.allclose(lse, good_lse, rtol=1e-6), "lse does not know of values"
    out[3:, 2:] = good[3:, 2:]
    assert same_bits(out, good)
    assert torch.isfinite(good).all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("scales", ["tensor", "token_head"])
@pytest.mark.parametrize(("kv_format", "bad"), [("fp8_e4m3", 0x7F), ("fp8_e5m2", 0x7E)])
def test_a_bad_fp8_code_reaches_only_rows_that_see_it(kv_format, bad, scales, name):
    call = make([75], [6], kv_format=kv_format, scales=scales, device=DEVICE)
    good, _ = run(call)
    call[name].view(torch.uint8)[call["block_table"][0, 4], 72 % 16, 1, 7] = bad
    out, _ = run(call)
    assert same_bits(out[:3], good[:3])
    assert same_bits(out[3:, :2], good[3:, :2])
    assert out[3:, 2:].isnan().all()


@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
def test_page_id_outside_the_pool(kv_format, scales):
    call = make([75, 40], [6, 1], page_size=8, kv_format=kv_format, scales=scales, device=DEVICE)
    good, _ = run(call)
    call["block_table"][0, 9] = 10**6
    out, lse = check(call)
    assert same_bits(out[:3], good[:3])
    assert out[3:6].isnan().all()
    assert lse[3:6].isnan().all()


@pytest.mark.parametrize("qk", ["exact", "int8"])
@pytest.mark.parametrize(
    "rules", [{"window_size": 37, "num_sink_tokens": 4}, {"window_size": 37, "num_sink_tokens": 100}, {}], ids=str
)
def test_sinks(rules, qk):
    call = make([300, 45, 7], [100, 45, 9], page_size=48, device=DEVICE, qk=qk, sinks=SINKS, **rules)
    out, _ = check(call)
    bare = {name: value for name, value in call.items() if name != "sinks"}
    assert not same_bits(out, check(bare)[0])
    check({**call, "softcap": 2.0})


def test_sink_tokens_beyond_a_window_are_read():
    call = make([300], [20], device=DEVICE, window_size=30, num_sink_tokens=3)
    out, _ = check(call)
    call["v_cache"][call["block_table"][0, 0], 2] += 1
    assert not same_bits(out, run(call)[0])
    call["v_cache"][call["block_table"][0, 0], 3] += 1
    again, _ = run(call)
    call["v_cache"][call["block_table"][0, 0], 3] = float("nan")
    assert same_bits(again, run(call)[0]), "the key after the sinks is not seen"


@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_every_option_at_once(kv_format):
    options = {"softcap": 1.5, "softmax_scale": 0.5, "window_size": 100, "num_sink_tokens": 4, "sinks": SINKS}
    check(make([500, 60], [50, 30], kv_format=kv_format, device=DEVICE, **options))


@pytest.mark.skipif(DEVICE == "cuda", reason="these tiles are for the interpreter; a GPU has its own")
@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_other_tiles(kv_format, monkeypatch):
    monkeypatch.setattr(_prefill_launch, "pick_prefill_config", lambda *a, **k: PrefillConfig(32, 16, 1, 1))
    for page_size in (40, 48):
        call = make([150, 40], [20, 9], heads=(6, 2), page_size=page_size, head_dim=32, kv_format=kv_format)
        check(call)
        check({**call, "window_size": 50, "num_sink_tokens": 20})


@pytest.mark.parametrize(("kv_format", "scales"), [*QUANTISED, (None, None)])
def test_same_numbers_as_verify(kv_format, scales):
    """Two kernels, two twins, one meaning of a cache and its options."""
    options = {"window_size": 60, "num_sink_tokens": 4, "sinks": SINKS, "softcap": 20.0}
    call = make([300, 45], [5, 3], kv_format=kv_format, scales=scales, device=DEVICE, **options)
    ours, theirs = run(call), verify_attention(**call, return_lse=True, backend="triton")
    for one, other in zip(ours, theirs, strict=True):
        assert (one.float() - other.float()).abs().max() <= 2e-3 * other.float().abs().max()
    twins = [{**call, "backend": "torch", "return_lse": True, "k_scale": call.get("k_scale")} for _ in range(2)]
    for one, other in zip(prefill_attention(**twins[0]), verify_attention(**twins[1]), strict=True):
        assert (one.float() - other.float()).abs().max() <= 1e-3 * other.float().abs().max()
