"""Random calls of prefill attention, and of mixed batches, against the float64 oracle: shapes, formats, modes, rules, strides.

`BIGPOOL_RANDOM_EXAMPLES` and `BIGPOOL_RANDOM_SEED` as in test_verify_random.py; half as many examples of each of the two tests.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from bigpool import attention, reference_prefill
from bigpool.ops.prefill import KeyCodes
from prefill_inputs import check, judge, make, run
from test_verify_random import DEVICE, DTYPES, EXAMPLES, HEAD_DIMS, SEED, formats, with_strides
from verify_inputs import judge as judge_mixed

# A mode that rounds to 8 bits takes a cache in q's dtype.
MODES = [("exact", "exact"), ("int8", "exact"), ("exact", "fp8"), ("int8", "fp8"), ("kept", "exact"), ("kept", "fp8")]


@st.composite
def shapes(draw):
    lengths = st.one_of(st.integers(0, 40), st.integers(0, 400))
    num_reqs = draw(st.integers(1, 4))
    return {
        "seq_lens": [draw(lengths) for _ in range(num_reqs)],
        "q_lens": [draw(st.integers(0, 70)) for _ in range(num_reqs - 1)] + [draw(st.integers(1, 70))],
        "page_size": draw(st.one_of(st.integers(1, 40), st.sampled_from([48, 64, 100, 880]))),
        "heads": draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 1), (8, 2)])),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "kv_layout": draw(st.sampled_from(["NHD", "HND"])),
        "seed": draw(st.integers(0, 1_000)),
        "outliers": draw(st.booleans()),
    }


@st.composite
def rules(draw):
    optional = {
        "window_size": st.integers(1, 300),
        "num_sink_tokens": st.integers(0, 70),
        "softcap": st.sampled_from([0.5, 5.0, 50.0, 1e5]),
        "softmax_scale": st.sampled_from([0.01, 0.3]),
        "sinks": st.just(True),
        "causal": st.just(False),
    }
    return {name: draw(values) for name, values in optional.items() if draw(st.integers(0, 3)) == 0}


def tensors(rules, shape):
    if "sinks" not in rules:
        return rules
    rng = torch.Generator().manual_seed(shape["seed"])
    return rules | {"sinks": (torch.randn(shape["heads"][0], generator=rng) * 3).to(DEVICE)}


def one(shape, kv_format, drawn, mode, apart, lost):
    qk, pv = mode
    if qk == "kept":
        kept(shape, drawn, pv)
        return
    if mode != ("exact", "exact"):
        kv_format = {}
    call = make(**shape, **kv_format, **tensors(drawn, shape), device=DEVICE, qk=qk, pv=pv)
    lose(call, shape, lost)
    check(with_strides(call, apart))


def kept(shape, drawn, pv):
    """Two chunks of one request from its first token on, the whole of it asked about."""
    length = max(shape["seq_lens"][0], 1)
    cut = shape["q_lens"][-1] % length
    drawn = {name: value for name, value in drawn.items() if name not in ("window_size", "causal", "num_sink_tokens")}
    whole = make(**shape | {"seq_lens": [length], "q_lens": [length]}, **tensors(drawn, shape), device=DEVICE, qk="int8", pv=pv)
    num_pages, page_size, num_kv_heads, head_dim = whole["k_cache"].shape
    if whole["kv_layout"] == "HND":
        num_kv_heads, page_size = page_size, num_kv_heads
    sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    ours, theirs = (KeyCodes.empty(**sizes, max_num_reqs=1, device=DEVICE) for _ in range(2))
    for begin, end in ((0, cut), (cut, length)):
        if begin == end:
            continue
        call = whole | {
            "q": whole["q"][begin:end], "seq_lens": torch.tensor([end], dtype=torch.int32, device=DEVICE),
            "cu_seqlens_q": torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE), "max_seqlen_q": end - begin,
        }  # fmt: skip
        out, lse = run(call, key_codes=ours)
        judge(call | {"kept": (theirs.codes, theirs.scales)}, out, lse)


def lose(call, shape, lost):
    """A page id outside the pool, in the middle of the longest request."""
    longest = max(shape["seq_lens"])
    if lost and longest:
        call["block_table"][shape["seq_lens"].index(longest), (-(-longest // shape["page_size"]) - 1) // 2] = -5


def random_calls(test):
    options = settings(
        max_examples=max(EXAMPLES // 2, 1),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    lost = st.integers(0, 5).map(lambda n: n == 0)
    return seed(SEED)(options(given(shapes(), formats(), rules(), st.sampled_from(MODES), st.booleans(), lost)(test)))


@random_calls
def test_random_calls(shape, kv_format, drawn, mode, apart, lost):
    note(f"BIGPOOL_RANDOM_SEED={SEED}")
    one(shape, kv_format, drawn, mode, apart, lost)


@random_calls
def test_random_mixed_batches(shape, kv_format, drawn, mode, apart, lost):
    """Of `attention`, which has one mode."""
    note(f"BIGPOOL_RANDOM_SEED={SEED}")
    call = make(**shape, **kv_format, **tensors(drawn, shape), device=DEVICE)
    lose(call, shape, lost)
    verify_seqlen_q = 1 + shape["seed"] % 20
    out, lse = attention(**with_strides(call, apart), verify_seqlen_q=verify_seqlen_q, return_lse=True, backend="triton")
    judge_mixed(call, out, lse)


@pytest.mark.parametrize("mode", MODES[:4], ids="-".join)
def test_the_random_test_sees_a_wrong_mask(monkeypatch, mode):
    """A window one key too long in the oracle is found."""
    plain = reference_prefill._seen

    def wrong(positions, at, causal, window_size, num_sink_tokens):
        return plain(positions, at, causal, None if window_size is None else window_size + 1, num_sink_tokens)

    monkeypatch.setattr(reference_prefill, "_seen", wrong)
    shape = {"seq_lens": [30], "q_lens": [9], "heads": (2, 1), "head_dim": 16}
    with pytest.raises(AssertionError, match="max error"):
        one(shape | {"page_size": 16, "seed": 0, "dtype": torch.float16}, {}, {"window_size": 3}, mode, False, False)
