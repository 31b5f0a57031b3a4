"""Masks and logits of verify attention through Triton's interpreter (or the GPU) against the float64 oracle."""

from pathlib import Path

import pytest
import torch

import bigpool
from bigpool import reference
from bigpool.ops.verify import pack_tree_mask, unpack_tree_mask, verify_attention
from verify_inputs import check, make, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES = {
    "window": {"window_size": 37},
    "window of one": {"window_size": 1},
    "window and sinks": {"window_size": 40, "num_sink_tokens": 5},
    "more sinks than keys": {"window_size": 3, "num_sink_tokens": 10_000},
    "chunk": {"chunk_size": 64},
    "chunk and window": {"chunk_size": 50, "window_size": 30},
    "chunk and sinks": {"chunk_size": 33, "num_sink_tokens": 20},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "window_size": 25},
    "not causal, chunk and sinks": {"causal": False, "chunk_size": 40, "num_sink_tokens": 3},
    "softcap": {"softcap": 2.0},
}


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("page_size", [16, 432])
@pytest.mark.parametrize("rule", RULES)
def test_rules(rule, page_size, num_splits):
    """1,000 keys are more than the tiles at the edges, so that all three phases of the loop run."""
    check(make([1_000, 3, 0, 90], [5, 7, 2, 3], page_size=page_size, device=DEVICE, **RULES[rule]), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_windows_and_chunks_that_begin_beside_a_tile(num_splits):
    """The first key of some tokens is before a tile, that of others in it: no tile counts as seen whole that one sees in part."""
    sizes = {"heads": (2, 1), "head_dim": 32, "page_size": 256, "device": DEVICE}
    check(make([855, 857, 859], [5] * 3, window_size=600, **sizes), num_splits=num_splits)
    check(make([513, 515, 517], [4] * 3, chunk_size=256, **sizes), num_splits=num_splits)
    check(make([513, 515, 517], [4] * 3, chunk_size=256, num_sink_tokens=300, **sizes), num_splits=num_splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_alibi(dtype):
    slopes = torch.tensor([0.5, 0.01, 0.0, -0.1], device=DEVICE)
    check(make([600, 3], [5, 7], dtype=dtype, device=DEVICE, alibi_slopes=slopes), num_splits=2)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_learned_sinks(num_splits):
    sinks = torch.tensor([1.0, -2.0, 30.0, float("-inf")], device=DEVICE)
    call = make([300, 3, 0], [5, 7, 2], device=DEVICE, sinks=sinks)
    out, lse = check(call, num_splits=num_splits)
    expected = sinks[:3].expand(2, 3)
    assert torch.allclose(lse[12:, :3], expected, rtol=1e-6), "no key is seen: lse is the sink"
    assert (lse[12:, 3] == float("-inf")).all()
    assert (out[12:] == 0).all()


def test_every_logit_option_at_once():
    """The order matters: scale, soft cap, ALiBi, masks, sinks."""
    heads = {
        "sinks": torch.tensor([0.5, 2.0, -1.0, 3.0], device=DEVICE),
        "alibi_slopes": torch.linspace(0, 0.2, 4, device=DEVICE),
    }
    options = {"softcap": 1.5, "softmax_scale": 0.5, "window_size": 100, "num_sink_tokens": 4, **heads}
    check(make([500, 60], [5, 3], device=DEVICE, **options), num_splits=2)


def tree_of(parents):
    """bool [len(parents), len(parents)]: each token sees itself and its ancestors; parent -1 is a root."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            seen[token] |= seen[parent]
    return seen


TREE = [-1, 0, 0, 1, 1, 2, 2, 5]


@pytest.mark.parametrize("num_splits", [1, 2])
def test_tree_mask(num_splits):
    visible = torch.cat((tree_of(TREE), tree_of([-1, 0, 1]).new_zeros(3, 8)))
    visible[8:, :3] = tree_of([-1, -1, 0])
    call = make([300, 40], [8, 3], device=DEVICE, tree_mask=pack_tree_mask(visible).to(DEVICE))
    out, _ = check(call, num_splits=num_splits)
    chain, _ = run({**call, "tree_mask": None}, num_splits=num_splits)
    assert same_bits(out[0], chain[0]), "a root sees what the causal rule shows it"
    assert not same_bits(out[2], chain[2])


def test_a_tree_that_is_a_chain_is_the_causal_rule():
    call = make([300, 40], [8, 3], device=DEVICE)
    chain = torch.tril(torch.ones(8, 8, dtype=torch.bool))
    visible = torch.cat((chain, chain[:3]))
    assert torch.equal(*(run(c)[0] for c in (call, {**call, "tree_mask": pack_tree_mask(visible).to(DEVICE)})))


def test_tree_mask_of_more_than_one_word_with_a_window():
    rng = torch.Generator().manual_seed(1)
    visible = torch.rand(70, 70, generator=rng) < 0.5
    mask = pack_tree_mask(visible).to(DEVICE)
    assert mask.shape == (70, 3)
    call = make([400], [70], heads=(2, 1), device=DEVICE, tree_mask=mask, window_size=90, num_sink_tokens=7)
    check(call, num_splits=2)


def test_pack_tree_mask():
    visible = torch.zeros(2, 40, dtype=torch.bool)
    visible[0, 0] = visible[0, 31] = visible[1, 33] = True
    assert pack_tree_mask(visible).tolist() == [[1 - 2**31, 0], [0, 2]]
    noise = torch.rand(9, 70) < 0.5
    assert torch.equal(unpack_tree_mask(pack_tree_mask(noise), 70), noise)


@pytest.mark.parametrize("poison", ["nan page", "page out of the pool"])
@pytest.mark.parametrize(
    ("rule", "hidden"),
    [
        ({"window_size": 100}, range(180)),
        ({"window_size": 100, "num_sink_tokens": 20}, range(2, 180)),
        ({"chunk_size": 1_000}, range(125)),
        ({"chunk_size": 1_000, "num_sink_tokens": 17}, range(2, 125)),
    ],
)
def test_pages_that_nobody_sees_are_not_read(rule, hidden, poison):
    """3,000 keys on pages of 16. What a page outside the pool gives where it is read shows in the last lines."""
    call = make([3_000], [3], heads=(2, 1), head_dim=32, device=DEVICE, **rule)
    good = run(call, num_splits=3)
    nan_page = 0
    for name in ("k_cache", "v_cache"):
        call[name] = torch.cat((torch.full_like(call[name][:1], float("nan")), call[name]))
    call["block_table"] = call["block_table"] + 1
    call["block_table"][0, list(hidden)] = nan_page if poison == "nan page" else 2**31 - 1
    for ours, theirs in zip(run(call, num_splits=3), good, strict=True):
        assert same_bits(ours, theirs)
    call["block_table"][0, hidden.stop - 1 + 8] = nan_page
    assert run(call, num_splits=3)[0].isnan().any(), "a page in the window is read"


def test_tiles_visited_do_not_grow_with_the_context(monkeypatch):
    """Counts the pages that a launch looks up, through the one place that does."""
    if DEVICE != "cpu":
        pytest.skip("counts in Triton's interpreter, which this machine with a GPU does not use")
    from bigpool.kernels import _paging

    looked_up = []
    plain = _paging.load_page_idx

    def counted(table_row_ptr, page_col, mask):
        looked_up.append(page_col)
        return plain(table_row_ptr, page_col, mask)

    monkeypatch.setattr(_paging, "load_page_idx", counted)
    counts = []
    for length in (3_000, 12_000):
        looked_up.clear()
        run(make([length], [3], heads=(2, 1), head_dim=16, window_size=500, num_sink_tokens=4), num_splits=2)
        counts.append(len(looked_up))
    assert counts[0] == counts[1] > 0
    looked_up.clear()
    run(make([12_000], [3], heads=(2, 1), head_dim=16), num_splits=2)
    assert len(looked_up) > 3 * counts[0], "without a window all tiles are visited"


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("rule", RULES)
def test_a_nan_that_a_token_does_not_see_never_reaches_it(name, rule):
    """One key after another becomes NaN: exactly the tokens that see it change."""
    call = make([75], [6], heads=(2, 1), head_dim=32, device=DEVICE, **RULES[rule])
    good, good_lse = run(call)
    for position in (0, 4, 30, 40, 68, 71, 74):
        bad = {**call, name: call[name].clone()}
        bad[name][call["block_table"][0, position // 16], position % 16] = float("nan")
        out, lse = run(bad)
        twin, _ = reference.verify_attention(**{key: value for key, value in bad.items() if key != "max_seqlen_q"})
        sees = twin.isnan().any(-1).any(-1)
        assert out[sees].isnan().all()
        assert same_bits(out[~sees], good[~sees])
        assert same_bits(lse[~sees], good_lse[~sees])


def test_a_nan_reaches_only_its_branch_of_the_tree():
    call = make([75], [8], heads=(2, 1), head_dim=32, device=DEVICE, tree_mask=pack_tree_mask(tree_of(TREE)).to(DEVICE))
    good, _ = run(call)
    call["v_cache"][call["block_table"][0, 4], (67 + 2) % 16] = float("nan")
    out, _ = run(call)
    below_2 = tree_of(TREE)[:, 2]
    assert below_2.tolist() == [False, False, True, False, False, True, True, True]
    assert out[below_2].isnan().all()
    assert same_bits(out[~below_2], good[~below_2])


def test_the_example_of_the_docs():
    """docs/verify.md: token 3 follows 1, so that the key of its cousin 2 is nothing to it."""
    text = (Path(__file__).parent.parent / "docs" / "verify.md").read_text("utf-8")
    names = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    assert names["out"].shape == (4, 8, 64)
    assert names["visible"].tolist()[3] == [True, True, False, True]
    names["cache"][:, 3, (38 - 32)] = float("nan")
    again = bigpool.verify_attention(
        names["q"], *names["cache"], names["table"], names["lengths"], names["starts"], max_seqlen_q=4,
        tree_mask=names["tree_mask"],
    )  # fmt: skip
    assert again.isnan().any(-1).any(-1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("rule", RULES)
def test_cpu_backend_is_the_twin(rule):
    call = make([300, 3], [5, 7], **RULES[rule])
    inputs = {name: value for name, value in call.items() if name != "max_seqlen_q"}
    for ours, theirs in zip(verify_attention(**call, return_lse=True), reference.verify_attention(**inputs), strict=True):
        assert same_bits(ours, theirs)
