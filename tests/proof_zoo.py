"""A case file in which every case ends in another way; `bigpool prove proof_zoo.py --case NAME` runs one."""

import os
import time
from pathlib import Path

import torch
import triton
import triton.language as tl

from bigpool.proof import Case, Oracle


@triton.jit
def copy_kernel(pool_ptr, table_ptr, out_ptr, stride_page, stride_out, PAGE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    page_idx = tl.load(table_ptr + row).to(tl.int64)
    offs = tl.arange(0, PAGE)
    tl.store(out_ptr + row * stride_out + offs, tl.load(pool_ptr + page_idx * stride_page + offs))


@triton.jit
def unsigned_kernel(pool_ptr, table_ptr, out_ptr, stride_page, stride_out, PAGE: tl.constexpr):
    """Wraps at 2^32 elements."""
    row = tl.program_id(0).to(tl.int64)
    page_idx = tl.load(table_ptr + row).to(tl.uint32)
    offs = tl.arange(0, PAGE)
    tl.store(out_ptr + row * stride_out + offs, tl.load(pool_ptr + page_idx * stride_page + offs))


@triton.jit
def overwriting_kernel(pool_ptr, table_ptr, out_ptr, stride_page, stride_out, PAGE: tl.constexpr):
    """Leaves zeros in the pages that it has read."""
    row = tl.program_id(0).to(tl.int64)
    page_idx = tl.load(table_ptr + row).to(tl.int64)
    offs = tl.arange(0, PAGE)
    values = tl.load(pool_ptr + page_idx * stride_page + offs)
    tl.store(out_ptr + row * stride_out + offs, values)
    tl.store(pool_ptr + page_idx * stride_page + offs, values * 0.0)


@triton.jit
def two_pools_kernel(k_ptr, v_ptr, table_ptr, out_ptr, stride_k, stride_v, stride_out, K: tl.constexpr, V: tl.constexpr):
    """Widens the page id for K and not for V."""
    row = tl.program_id(0).to(tl.int64)
    page_idx = tl.load(table_ptr + row)
    k = tl.load(k_ptr + page_idx.to(tl.int64) * stride_k + tl.arange(0, K))
    v = tl.load(v_ptr + page_idx * stride_v + tl.arange(0, V))
    tl.store(out_ptr + row * stride_out + tl.arange(0, V), v + tl.max(k) * 0.0)


@triton.jit
def loop_kernel(pool_ptr, table_ptr, out_ptr, stride_page, STRIDE_OUT: tl.constexpr, PAGE: tl.constexpr):
    """Its row comes from a loop, and wraps on a GPU only."""
    offs = tl.arange(0, PAGE)
    for row in range(3):
        page_idx = tl.load(table_ptr + row).to(tl.int64)
        tl.store(out_ptr + row * STRIDE_OUT + offs, tl.load(pool_ptr + page_idx * stride_page + offs))


class Copy(Case):
    """Copies three pages of 64; subclasses spoil it."""

    dtypes = ("float16",)
    placements = ("bottom", "top")
    num_pages = None

    def build(self, ctx):
        pool = ctx.pool("pool", (64,), pages=3, num_pages=self.num_pages)
        pool.write(ctx.randn(3, 64))
        return pool, pool.table([2, 0, 1]), ctx.rows("out", (3, 64))

    def run(self, ctx, inputs):
        pool, table, out = inputs
        self.launch(pool.tensor, table, out.tensor)
        return {"out": out.read()}

    def launch(self, pool, table, out):
        copy_kernel[(3,)](pool, table, out, pool.stride(0), out.stride(0), PAGE=64)


class Holds(Copy):
    name = "holds"
    placements = ("bottom", "top", "across")

    def oracle(self, ctx, inputs):
        return Oracle({"out": inputs[0].read()[[2, 0, 1]].double()})


class Skips(Copy):
    name = "skips"

    def build(self, ctx):
        ctx.skip("fp8 conversion needs sm89+, this is sm86")


class NeedsBf16(Copy):
    name = "needs-bf16"
    dtypes = ("bfloat16",)


class AsksForFp8(Copy):
    name = "asks-for-fp8"

    def build(self, ctx):
        return ctx.pool("k8", (64,), pages=3, dtype=torch.float8_e4m3fn)


class SkipsAtTheTop(Copy):
    name = "skips-at-the-top"

    def build(self, ctx):
        return ctx.skip("not here") if ctx.placement == "top" else super().build(ctx)


class Raises(Copy):
    name = "raises"

    def launch(self, pool, table, out):
        raise ValueError("page_size: expected 16, got 880")


class NoLaunch(Copy):
    name = "no-launch"

    def launch(self, pool, table, out):
        for row, page in enumerate(table.tolist()):
            out[row] = pool[page]


class NoPower(Copy):
    """The host adds the offset, so the kernel multiplies small numbers only."""

    name = "no-power"

    def build(self, ctx):
        return (*super().build(ctx)[:2], ctx.tensor(torch.zeros(3, 64, dtype=ctx.dtype)))

    def run(self, ctx, inputs):
        pool, table, out = inputs
        self.launch(pool.tensor[int(pool.ids[0]) :], table - int(pool.ids[0]), out)
        return {"out": out}


class WrongValues(Holds):
    name = "wrong-values"

    def oracle(self, ctx, inputs):
        return Oracle({"out": inputs[0].read().double()})


class RoughOracle(Holds):
    name = "rough-oracle"

    def oracle(self, ctx, inputs):
        return Oracle({"out": inputs[0].read()[[2, 0, 1]].float()})


class UnsignedIds(Holds):
    name = "unsigned-ids"
    placements = ("bottom", "top")

    def launch(self, pool, table, out):
        unsigned_kernel[(3,)](pool, table, out, pool.stride(0), out.stride(0), PAGE=64)


class UnsignedRows(Copy):
    """Right until a row passes 2^32 elements."""

    name = "unsigned-rows"

    def build(self, ctx):
        rows = ctx.rows("pool", (6, 64), role="read")
        rows.write(ctx.randn(6, 64))
        return rows, ctx.tensor([5, 0, 1], dtype=torch.int32), ctx.rows("out", (3, 64))

    def launch(self, pool, table, out):
        unsigned_kernel[(3,)](pool, table, out, pool.stride(0), out.stride(0), PAGE=64)


class NarrowerLike(Copy):
    """V is half as wide as K and takes its ids."""

    name = "narrower-like"

    def build(self, ctx):
        k = ctx.pool("k", (128,), pages=3)
        v = ctx.pool("v", (64,), like=k)
        k.write(ctx.randn(3, 128))
        v.write(ctx.randn(3, 64))
        return k, v, k.table([2, 0, 1]), ctx.rows("out", (3, 64))

    def run(self, ctx, inputs):
        k, v, table, out = inputs
        strides = (placed.tensor.stride(0) for placed in (k, v, out))
        two_pools_kernel[(3,)](k.tensor, v.tensor, table, out.tensor, *strides, K=128, V=64)
        return {"out": out.read()}


class TooNarrowLike(NarrowerLike):
    """The pages that K needs leave V below its wall."""

    name = "too-narrow-like"

    def build(self, ctx):
        k = ctx.pool("k", (128,), pages=3, num_pages=2**24 + 100)
        return k, ctx.pool("v", (64,), like=k), k.table([2, 0, 1]), ctx.rows("out", (3, 64))


class WritesItsInput(Holds):
    name = "writes-its-input"

    def launch(self, pool, table, out):
        overwriting_kernel[(3,)](pool, table, out, pool.stride(0), out.stride(0), PAGE=64)


class WritesItsTable(Copy):
    name = "writes-its-table"

    def launch(self, pool, table, out):
        super().launch(pool, table, out)
        table.zero_()


class Loops(Holds):
    name = "loops"
    not_exercised = ("other orders of the rows",)

    def launch(self, pool, table, out):
        loop_kernel[(1,)](pool, table, out, pool.stride(0), out.stride(0), PAGE=64)


class EmptyOracle(Copy):
    name = "empty-oracle"

    def oracle(self, ctx, inputs):
        return Oracle({})


class UnwrittenOracle(Holds):
    """Nobody filled the pool, so that NaN would agree with NaN."""

    name = "unwritten-oracle"

    def build(self, ctx):
        pool = ctx.pool("pool", (64,), pages=3)
        return pool, pool.table([2, 0, 1]), ctx.rows("out", (3, 64))


class HalfAnOracle(Holds):
    name = "half-an-oracle"

    def run(self, ctx, inputs):
        return {**super().run(ctx, inputs), "other": torch.zeros(3)}


class TooSmall(Copy):
    name = "too-small"
    num_pages = 1000


class ReturnsNothing(Copy):
    name = "returns-nothing"

    def run(self, ctx, inputs):
        super().run(ctx, inputs)


class Sleeps(Copy):
    """Never ends; the file named by PROOF_ZOO_STARTED says that it began."""

    name = "sleeps"

    def run(self, ctx, inputs):
        Path(os.environ["PROOF_ZOO_STARTED"]).write_text(str(os.getpid()))
        time.sleep(600)


ENDINGS = {
    "holds": "proven",
    "skips": "skipped",
    "needs-bf16": "skipped",
    "asks-for-fp8": "skipped",
    "skips-at-the-top": "could not run",
    "raises": "refuted",
    "no-launch": "could not run",
    "no-power": "no power",
    "wrong-values": "refuted",
    "rough-oracle": "could not run",
    "unsigned-ids": "refuted",
    "unsigned-rows": "refuted",
    "narrower-like": "refuted",
    "too-narrow-like": "could not run",
    "writes-its-input": "refuted",
    "writes-its-table": "refuted",
    "loops": "proven",
    "empty-oracle": "could not run",
    "unwritten-oracle": "could not run",
    "half-an-oracle": "proven",
    "too-small": "could not run",
    "returns-nothing": "could not run",
}
CASES = [
    Holds(), Skips(), NeedsBf16(), AsksForFp8(), SkipsAtTheTop(), Raises(), NoLaunch(), NoPower(), WrongValues(), RoughOracle(),
    UnsignedIds(), UnsignedRows(), NarrowerLike(), TooNarrowLike(), WritesItsInput(), WritesItsTable(), Loops(), EmptyOracle(),
    UnwrittenOracle(), HalfAnOracle(), TooSmall(), ReturnsNothing(), Sleeps(),
]  # fmt: skip
