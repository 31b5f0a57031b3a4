"""What only a GPU can show of the writer and of merging: compiled bits against the twin, CUDA graphs, far pages, no host sync."""

import pytest
import torch

from bigpool import gather_kv, merge_states, reference_merge, write_kv
from bigpool.cache import KVCache
from bigpool.pools import SparsePool
from bigpool.proof.judge import judge_errors
from cache_inputs import KINDS, PLAIN, assert_same, cache, rows
from test_write_kv import names

pytestmark = pytest.mark.gpu


def copy_to_cpu(made):
    """The same cache on the CPU, its tensors apart from each other."""
    return KVCache(
        *(None if tensor is None else tensor.cpu() for tensor in (*made.kv, made.k_scale, made.v_scale)), made.kv_layout
    )


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_bits_are_those_of_the_twin_on_the_cpu(kind, head_dim, kv_layout):
    for dtype in {PLAIN.get(kind[0], dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}:
        k, v = rows(kind, num_tokens=600, head_dim=head_dim, kv_heads=4, dtype=dtype)
        slots = torch.randperm(7 * 880)[:600]
        slots[40:44] = torch.tensor([-1, 7 * 880, 2**40, -(2**40)])
        ours, twin = (
            cache(kind, head_dim, kv_heads=4, page_size=880, kv_layout=kv_layout, device=device) for device in ("cuda", "cpu")
        )
        write_kv(k.cuda(), v.cuda(), ours, slots.cuda())
        write_kv(k, v, twin, slots)
        assert_same(copy_to_cpu(ours), twin)


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_graph_replay_writes_the_rows_and_slots_of_the_moment(kind):
    k, v = rows(kind, bad=False, device="cuda")
    captured, eager = cache(kind, device="cuda"), cache(kind, device="cuda")
    slots = torch.arange(20, device="cuda")
    write_kv(k, v, captured, slots)
    write_kv(k, v, eager, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_kv(k, v, captured, slots)
    for seed in (1, 2):
        new_k, new_v = rows(kind, bad=False, seed=seed, device="cuda")
        k.copy_(new_k)
        v.copy_(new_v)
        slots.copy_(torch.randperm(7 * 16, device="cuda")[:20])
        slots[seed] = -1
        graph.replay()
        write_kv(k, v, eager, slots)
        torch.cuda.synchronize()
        assert_same(captured, eager)


def test_no_host_sync():
    outs, lses = torch.randn(3, 8, 4, 64, device="cuda"), torch.randn(3, 8, 4, device="cuda")
    calls = [(*rows(kind, bad=False, device="cuda"), cache(kind, device="cuda")) for kind in KINDS]
    slots = torch.arange(20, device="cuda")
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for k, v, made in calls:
                write_kv(k, v, made, slots)
            merge_states(outs, lses)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_pages_beyond_2_31_elements():
    """int4 rows in one tensor of 16 GiB of addresses; the last page lies past 2^33 bytes."""
    page_size, heads, head_dim, num_pages = 880, 4, 256, 2**34 // (880 * 4 * 264)
    with SparsePool((num_pages, page_size, heads, 264), torch.uint8, torch.device("cuda"), pages=[0, num_pages - 1]) as pool:
        far = KVCache.from_tensor(pool.tensor, format="int4", head_dim=head_dim, kv_layout="NHD")
        assert far.k.stride(0) * (num_pages - 1) > 2**33
        near = cache(("int4", None, True), head_dim, kv_heads=heads, page_size=page_size, num_pages=1, device="cuda")
        k, v = rows(("int4", None, True), num_tokens=page_size, head_dim=head_dim, kv_heads=heads, device="cuda")
        slots = torch.randperm(page_size, device="cuda")
        write_kv(k, v, near, slots)
        write_kv(k, v, far, slots + (num_pages - 1) * page_size)
        last = [tensor[-1:] for tensor in (*far.kv, far.k_scale, far.v_scale)]
        assert_same(KVCache(*last), near)
        table = torch.tensor([[num_pages - 1]], dtype=torch.int32, device="cuda")
        lens = torch.tensor([page_size], dtype=torch.int32, device="cuda")
        for got, expected in zip(gather_kv(far, table, lens), gather_kv(near, table * 0, lens), strict=True):
            assert torch.equal(got.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 256, 512])
def test_merge(head_dim, dtype):
    outs, lses = torch.randn(9, 300, 24, head_dim).to(dtype), torch.randn(9, 300, 24) * 4
    lses[2:5, 17], outs[2:5, 17] = float("-inf"), float("nan")
    merged = dict(zip(("out", "lse"), (tensor.cpu() for tensor in merge_states(outs.cuda(), lses.cuda())), strict=True))
    expected = dict(zip(("out", "lse"), reference_merge.merge_states(outs, lses, compute_dtype=torch.float64), strict=True))
    baseline = dict(zip(("out", "lse"), reference_merge.merge_states(outs, lses, reverse=True), strict=True))
    for entry in judge_errors(merged, expected, baseline):
        assert entry["ok"], entry["text"]


def test_merge_in_a_graph():
    outs, lses = torch.randn(3, 8, 4, 64, device="cuda"), torch.randn(3, 8, 4, device="cuda")
    merge_states(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = merge_states(outs, lses)
    outs.normal_()
    lses.normal_()
    graph.replay()
    for ours, theirs in zip((out, lse), merge_states(outs, lses), strict=True):
        assert torch.equal(ours, theirs)
