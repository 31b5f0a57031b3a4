"""The emulator that Hopper kernels are tested with: it computes as the card does, and each of its guards is seen red."""

import operator

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from bigpool.ops._tma import tma_descriptor
from gluon_cpu import Emulated, Hazard, ptx


@gluon.jit
def _consume(tiles, q, full, empty, out_ptr, turns, FAULT: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.full([64, 64], 0.0, gl.float32, layout)
    for turn in range(turns):
        if FAULT != "wait for the copy":
            mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
        tile = tiles.index(turn % 2)
        product = warpgroup_mma(q, tile.permute((1, 0)), acc, is_async=True)
        if FAULT == "overwrite":
            gl.thread_barrier()
            mbarrier.arrive(empty.index(turn % 2))
            mbarrier.wait(full.index(turn % 2), (turn // 2) & 1 ^ 1)
        acc = warpgroup_mma_wait(1 if FAULT == "late wait" else 0, deps=[product])
        if FAULT != "barrier":
            gl.thread_barrier()
        if FAULT != "arrival" and FAULT != "overwrite":
            mbarrier.arrive(empty.index(turn % 2))
    if FAULT == "wait for the product":
        acc = warpgroup_mma(q, tiles.index(0).permute((1, 0)), acc, is_async=True)
    else:
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        cols = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        gl.store(out_ptr + rows[:, None] * 64 + cols[None, :], acc)


@gluon.jit
def _produce(desc, boxes, full, empty, turns, FAULT: gl.constexpr):
    for turn in range(turns):
        mbarrier.wait(empty.index(turn % 2), (turn // 2) & 1 ^ 1)
        mbarrier.expect(full.index(turn % 2), 64 * 64 * 2 + (1 if FAULT == "bytes" else 0))
        tma.async_copy_global_to_shared(desc, [turn, 0, 0, 0, 0], full.index(turn % 2), boxes.index(turn % 2))


@gluon.jit
def sum_products(q_ptr, desc, out_ptr, turns, FAULT: gl.constexpr, num_warps: gl.constexpr):
    """out = the sum of q K^T over pages of 64 keys."""
    box: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, 1, 64, 64], box)
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [64, 64], flat)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=1)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    q_smem.store(gl.load(q_ptr + rows[:, None] * 64 + cols[None, :]))
    if FAULT != "fence":
        fence_async_shared()
    gl.thread_barrier()
    tiles = boxes._reinterpret(gl.bfloat16, [2, 64, 64], flat)
    gl.warp_specialize(
        [(_consume, (tiles, q_smem, full, empty, out_ptr, turns, FAULT)), (_produce, (desc, boxes, full, empty, turns, FAULT))],
        [1], [24],
    )  # fmt: skip


def launch(fault, *, turns=5, seed=0, haste=0.5):
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(64, 64, generator=rng).bfloat16()
    k = torch.randn(turns, 64, 1, 64, generator=rng).bfloat16()
    out = torch.zeros(64, 64)
    kernel = Emulated(sum_products, seed=seed, haste=haste)
    kernel[(1,)](q, tma_descriptor(k, 64, whole_rows=True), out, turns, FAULT=fault, num_warps=4)
    return out, q.float() @ k.float().sum(0)[:, 0].T


@pytest.mark.parametrize("haste", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_kernel_that_waits_for_everything(seed, haste):
    torch.testing.assert_close(*launch("", seed=seed, haste=haste), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("fence", "without fence_async_shared"),
        ("wait for the copy", "what a copy by TMA still writes"),
        ("wait for the product", "a product that nobody waited for"),
        ("late wait", "the result of a product that is still under way"),
        ("barrier", "no thread_barrier since the last read"),
        ("arrival", "deadlock: .*phase"),
        ("overwrite", "an operand changed under a product"),
        ("bytes", "deadlock: .*phase"),
    ],
)
def test_what_a_card_does_in_silence(fault, said):
    with pytest.raises(Hazard, match=said):
        launch(fault, haste=0.0)


@gluon.jit
def far_index(ids_ptr, out_ptr, stride, WIDE: gl.constexpr):
    page = gl.load(ids_ptr)
    if WIDE:
        page = page.to(gl.int64)
    gl.store(out_ptr, (page * stride).to(gl.int64))


@pytest.mark.parametrize("wide", [True, False])
def test_int32_wraps(wide):
    ids, out = torch.tensor([70_000], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    Emulated(far_index)[(1,)](ids, out, 70_000, WIDE=wide)
    assert int(out) == (4_900_000_000 if wide else 4_900_000_000 - 2**32)


@gluon.jit
def divide(a_ptr, b_ptr, quotient_ptr, remainder_ptr, COUNT: gl.constexpr):
    offs = gl.arange(0, COUNT, layout=gl.BlockedLayout([1], [32], [4], [0]))
    a, b = gl.load(a_ptr + offs), gl.load(b_ptr + offs)
    gl.store(quotient_ptr + offs, a // b)
    gl.store(remainder_ptr + offs, a % b)


def test_integer_division_is_that_of_c():
    a, b = torch.tensor([7, -7, 7, -7], dtype=torch.int32), torch.tensor([2, 2, -2, -2], dtype=torch.int32)
    quotient, remainder = torch.zeros_like(a), torch.zeros_like(a)
    Emulated(divide)[(1,)](a, b, quotient, remainder, COUNT=4)
    assert quotient.tolist() == [3, -3, -3, 3]
    assert remainder.tolist() == [1, -1, 1, -1]


def test_an_uninitialised_barrier():
    @gluon.jit
    def kernel(out_ptr):
        bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.arrive(bars.index(0))

    with pytest.raises(Hazard, match="nobody initialised"):
        Emulated(kernel)[(1,)](torch.zeros(1))


@pytest.mark.parametrize("table", [0xEA, 0x96, 0xF8])
def test_lop3_is_its_table(table):
    rng = torch.Generator().manual_seed(table)
    a, b, c = (torch.randint(0, 2**31, (64,), generator=rng).numpy().astype("uint32") for _ in range(3))
    [got] = ptx.run(f"lop3.b32 $0, $1, $2, $3, {table:#x};", [a, b, c], 1)
    for bit in range(32):
        places = [operator.and_(x >> bit, 1) for x in (a, b, c)]
        assert ((got >> bit & 1) == (table >> (places[0] * 4 + places[1] * 2 + places[2]) & 1)).all()


def test_prmt_picks_bytes():
    import numpy as np

    [got] = ptx.run("prmt.b32 $0, $1, $2, 0x7160;", [np.array([0x33221100], np.uint32), np.array([0x77665544], np.uint32)], 1)
    assert int(got[0]) == 0x77116600
