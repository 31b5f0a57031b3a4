"""deterministic="batch": the bits of a query token depend on nothing but its own request, with splits that hold keys."""

import pytest
import torch

from bigpool import tuning
from bigpool.ops.verify import pack_tree_mask, verify_attention
from bigpool.tuning import BATCH_SPLIT_TOKENS, DeviceProps, batch_splits, plan_verify, scratch_floats
from bigpool.workspace import Workspace, verify_scratch_bytes
from verify_inputs import check, make, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = 2 * BATCH_SPLIT_TOKENS + 500
SIZES = {"heads": (4, 2), "head_dim": 32, "device": DEVICE}
RULES = {
    "causal": {},
    "window": {"window_size": 1_500, "num_sink_tokens": 20},
    "chunk": {"chunk_size": 1_700},
    "soft cap and ALiBi": {"softcap": 3.0, "alibi_slopes": torch.linspace(0.0, 0.01, 4, device=DEVICE)},
    "sinks": {"sinks": torch.linspace(-1.0, 1.0, 4, device=DEVICE)},
}
FORMATS = [None, "int8", "int4", "fp8_e4m3"]


def batch(call, **options):
    return run(call, deterministic="batch", **options)


def part_of(call, req, tokens=slice(None)):
    """The call of one request of a batch, with the query tokens `tokens` of it as the newest ones."""
    begin, end = call["cu_seqlens_q"][req : req + 2].tolist()
    rows = list(range(begin, end))[tokens]
    alone = {
        "q": call["q"][rows],
        "block_table": call["block_table"][req : req + 1],
        "seq_lens": call["seq_lens"][req : req + 1] - (end - 1 - rows[-1]),
        "cu_seqlens_q": torch.tensor([0, len(rows)], dtype=torch.int32, device=DEVICE),
        "max_seqlen_q": len(rows),
    }
    if "tree_mask" in call:
        alone["tree_mask"] = call["tree_mask"][rows]
    return {**call, **alone}, rows


def bits_are_those_of_parts(call, parts):
    out, lse = batch(call)
    for req, tokens in parts:
        alone, rows = part_of(call, req, tokens)
        got, got_lse = batch(alone)
        assert same_bits(got, out[rows])
        assert same_bits(got_lse, lse[rows])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_a_batch_of_twenty(kv_format):
    lengths, q_lens = [LONG, *(37 * i for i in range(19))], [8, *(1 + i % 5 for i in range(19))]
    call = make(lengths, q_lens, kv_format=kv_format, **SIZES | {"heads": (2, 1)})
    bits_are_those_of_parts(call, [(0, slice(None)), (0, slice(5, 8)), (0, slice(7, 8)), (12, slice(None))])


@pytest.mark.parametrize("page_size", [16, 432])
@pytest.mark.parametrize("rule", RULES)
def test_rules_in_parts(rule, page_size):
    kv_format = "int8" if page_size == 432 else None
    call = make([70, LONG], [2, 8], page_size=page_size, kv_format=kv_format, **SIZES, **RULES[rule])
    bits_are_those_of_parts(call, [(1, tokens) for tokens in (slice(5, 8), slice(0, 3), slice(7, 8))])


def test_a_wider_table_changes_no_bit():
    call = make([LONG, 70], [3, 1], **SIZES)
    garbage = torch.full((2, 5_000), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    for ours, theirs in zip(
        batch(call), batch({**call, "block_table": torch.cat((call["block_table"], garbage), 1)}), strict=True
    ):
        assert same_bits(ours, theirs)


def test_the_default_mode_is_not_batch_invariant():
    """Or the tests above would show nothing: more splits, other sums."""
    call = make([LONG] * 2, [3] * 2, **SIZES)
    assert not same_bits(run(call, num_splits=1)[0], run(call, num_splits=7)[0])


@pytest.mark.parametrize("kv_format", FORMATS)
def test_batch_mode_is_right(kv_format):
    check(make([LONG, 300, 0], [3, 8, 2], kv_format=kv_format, **SIZES), deterministic="batch")


def test_more_than_one_split_holds_keys():
    call = make([LONG, 300], [3, 8], **SIZES)
    scratch = Workspace(torch.full((11, 4, 200, 36), float("nan"), device=DEVICE))
    batch(call, workspace=scratch)
    written = ~scratch.part[0, 0, :, 0].isnan()
    assert written.sum() == LONG // BATCH_SPLIT_TOKENS + 1


def test_a_chain_in_parts_is_a_tree():
    """A tree whose rows see all before them has the bits of the causal rule, token by token."""
    call = make([LONG], [8], **SIZES)
    chain = pack_tree_mask(torch.tril(torch.ones(8, 8, dtype=torch.bool))).to(DEVICE)
    for ours, theirs in zip(batch({**call, "tree_mask": chain}), batch(call), strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("kv_bytes", [None, 1.0, 0.5])
@pytest.mark.parametrize("page_size", [1, 16, 880])
def test_plans_of_cards_do_not_depend_on_the_batch(page_size, kv_bytes, sm):
    props = DeviceProps("card", sm, 132, 227 * 1024 if sm in (90, 100) else 99 * 1024)
    sizes = {"num_q_heads": 24, "num_kv_heads": 4, "head_dim": 256, "itemsize": 2, "page_size": page_size, "kv_bytes": kv_bytes}
    plans = [
        plan_verify(props, num_reqs=num_reqs, max_seqlen_q=q_len, max_seq_len=width, batch=True, **sizes)
        for num_reqs in (1, 20)
        for q_len in (1, 3, 8, 64)
        for width in (100, 20_000)
    ]
    assert len({(plan.config, plan.tiles_per_split, plan.tiles_per_page) for plan in plans}) == 1
    assert plans[0].num_splits >= 2
    assert plans[0].tiles_per_split * plans[0].config.tile == BATCH_SPLIT_TOKENS


def test_splits_cover_the_table():
    for page_size in (1, 16, 100, 880):
        for tile in (16, 32, 64, 256):
            for length in (1, 1_000, 1_024, 1_025, 70_000):
                tiles_per_split, splits = batch_splits(length, page_size, tile)
                per_page = tuning.pick_tiles_per_page(page_size, tile)
                tiles = -(-length // page_size) * per_page if per_page else -(-length // tile)
                assert (splits - 1) * tiles_per_split < max(tiles, tiles_per_split + 1)
                assert splits * tiles_per_split >= tiles


def test_workspace_for_batch_mode():
    call = make([LONG, 70], [3, 1], **SIZES)
    held = call["block_table"].shape[1] * 16
    sizes = {"max_num_reqs": 2, "max_seqlen_q": 3, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "device": DEVICE}
    scratch = Workspace.for_verify(**sizes, batch_max_seq_len=held)
    for ours, theirs in zip(batch(call, workspace=scratch), batch(call), strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("page_size", [1, 16, 48, 100, 880, 1_056])
@pytest.mark.parametrize("kv_bytes", [None, 1.0, 0.5])
def test_workspace_holds_every_plan_of_batch_mode(kv_bytes, page_size):
    props, heads = DeviceProps("card", 90, 132, 232_448), {"num_q_heads": 24, "num_kv_heads": 4, "head_dim": 256}
    nbytes = verify_scratch_bytes(props, max_num_reqs=2, max_seqlen_q=8, batch_max_seq_len=2**20, **heads)
    for q_len in (1, 8):
        sizes = {"num_reqs": 2, "max_seqlen_q": q_len, "itemsize": 2, "page_size": page_size, "kv_bytes": kv_bytes}
        plan = plan_verify(props, max_seq_len=2**20, batch=True, **sizes, **heads)
        assert plan.num_splits >= 1_024
        assert 4 * scratch_floats(2 * q_len, 24, 256, plan.num_splits) <= nbytes


def test_cpu_twin_takes_the_mode():
    call = make([300], [3])
    assert same_bits(verify_attention(**call, deterministic="batch"), verify_attention(**call))
