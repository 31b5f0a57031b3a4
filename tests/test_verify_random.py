"""Random calls of verify attention against the float64 oracle: shapes, formats, rules, strides, page maps, garbage.

`BIGPOOL_RANDOM_EXAMPLES=3000` is the nightly size; the seed is printed with a failure, and `BIGPOOL_RANDOM_SEED` repeats it.
hypothesis shrinks what it finds to the fewest requests, keys and options that still fail.
"""

import os
import random

import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from bigpool import reference
from bigpool.ops.verify import pack_tree_mask
from verify_inputs import QUANTISED, judge, make, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = int(os.environ.get("BIGPOOL_RANDOM_EXAMPLES", "40"))
SEED = int(os.environ.get("BIGPOOL_RANDOM_SEED", random.randrange(2**32)))
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
HEAD_DIMS = [16, 32, 64, 80, 96, 128, 192, 256]


@st.composite
def shapes(draw):
    num_reqs = draw(st.integers(1, 4))
    return {
        "seq_lens": [draw(st.one_of(st.integers(0, 40), st.integers(0, 900))) for _ in range(num_reqs)],
        "q_lens": [draw(st.integers(0, 9)) for _ in range(num_reqs - 1)] + [draw(st.integers(1, 9))],
        "page_size": draw(st.one_of(st.integers(1, 40), st.sampled_from([48, 100, 432, 880]))),
        "heads": draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3), (6, 1), (8, 2)])),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "kv_layout": draw(st.sampled_from(["NHD", "HND"])),
        "seed": draw(st.integers(0, 1_000)),
        "outliers": draw(st.booleans()),
    }


@st.composite
def formats(draw):
    if draw(st.booleans()):
        return {}
    kv_format, scales = draw(st.sampled_from(QUANTISED))
    inline = scales == "token_head" and draw(st.booleans())
    return {"kv_format": kv_format, "scales": scales, "inline": inline}


@st.composite
def rules(draw):
    """Tensors are drawn as True, and made when their sizes are known."""
    optional = {
        "window_size": st.integers(1, 300),
        "chunk_size": st.integers(1, 300),
        "num_sink_tokens": st.integers(0, 70),
        "softcap": st.sampled_from([0.5, 5.0, 50.0, 1e5]),
        "softmax_scale": st.sampled_from([0.01, 0.3]),
        "alibi_slopes": st.just(True),
        "sinks": st.just(True),
        "out_scale": st.just(True),
    }
    drawn = {name: draw(values) for name, values in optional.items() if draw(st.integers(0, 3)) == 0}
    order = draw(st.sampled_from(["causal", "causal", "tree", "all"]))
    return drawn | ({"tree_mask": True} if order == "tree" else {"causal": order == "causal"})


def tensors(rules, shape):
    rng = torch.Generator().manual_seed(shape["seed"])
    heads = shape["heads"][0]
    made = {
        "alibi_slopes": torch.rand(heads, generator=rng) * 0.1,
        "sinks": torch.randn(heads, generator=rng) * 3,
        "out_scale": torch.tensor([0.02]),
        "tree_mask": pack_tree_mask(torch.rand(sum(shape["q_lens"]), max(shape["q_lens"]), generator=rng) < 0.6),
    }
    return {name: made[name].to(DEVICE) if value is True and name in made else value for name, value in rules.items()}


def with_strides(call, apart):
    """K one element of padding a slot apart, q and table as parts of larger tensors: no number changes."""
    if not apart:
        return call
    k = call["k_cache"]
    room = torch.zeros((*k.shape[:3], k.shape[3] + 16), dtype=torch.uint8 if k.element_size() == 1 else k.dtype, device=DEVICE)
    view = room[..., 16:].view(k.dtype) if k.element_size() == 1 else room[..., 16:]
    view.copy_(k)
    q = torch.full(
        (len(call["q"]), call["q"].shape[1] + 2, call["q"].shape[2]), float("nan"), dtype=call["q"].dtype, device=DEVICE
    )
    q[:, 1:-1] = call["q"]
    table = torch.full((len(call["block_table"]), call["block_table"].shape[1] + 3), -7, dtype=torch.int32, device=DEVICE)
    table[:, :-3] = call["block_table"]
    return {**call, "k_cache": view, "q": q[:, 1:-1], "block_table": table[:, :-3]}


def one(shape, kv_format, drawn, num_splits, apart, lost):
    call = make(**shape, **kv_format, **tensors(drawn, shape), device=DEVICE)
    if lost and max(shape["seq_lens"]) > 0:
        longest = shape["seq_lens"].index(max(shape["seq_lens"]))
        last = -(-max(shape["seq_lens"]) // shape["page_size"]) - 1
        call["block_table"][longest, last // 2] = -5
    given_call = with_strides(call, apart)
    mode = {"deterministic": "batch"} if num_splits == "batch" else {"num_splits": num_splits}
    out, lse = run(given_call, **mode)
    judge(call, out, lse)


def call_strategy():
    splits = st.sampled_from([None, 1, 2, 5, "batch"])
    return given(shapes(), formats(), rules(), splits, st.booleans(), st.integers(0, 5).map(lambda n: n == 0))


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
@call_strategy()
def test_random_calls(shape, kv_format, drawn, num_splits, apart, lost):
    note(f"BIGPOOL_RANDOM_SEED={SEED}")
    one(shape, kv_format, drawn, num_splits, apart, lost)


def test_the_random_test_sees_a_wrong_mask(monkeypatch):
    """A window one key too long in the oracle is found."""
    plain = reference._seen

    def wrong(positions, position, tree, window_size=None, **rules):
        return plain(positions, position, tree, window_size=None if window_size is None else window_size + 1, **rules)

    monkeypatch.setattr(reference, "_seen", wrong)
    shape = {"seq_lens": [30], "q_lens": [2], "heads": (2, 1), "head_dim": 16}
    with pytest.raises(AssertionError, match="max error"):
        one(shape | {"page_size": 16, "seed": 0, "dtype": torch.float16}, {}, {"window_size": 3}, 1, False, False)


def test_padding_that_hides_nothing():
    """`with_strides` changes strides, not numbers."""
    call = make([40], [3], kv_format="int8", device=DEVICE)
    for ours, theirs in zip(run(call), run(with_strides(call, True)), strict=True):
        assert same_bits(ours, theirs)
