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
    "too-small": "could not run",
    "returns-nothing": "could not run",
}
CASES = [
    Holds(), Skips(), NeedsBf16(), AsksForFp8(), SkipsAtTheTop(), Raises(), NoLaunch(), NoPower(), WrongValues(), RoughOracle(),
    TooSmall(), ReturnsNothing(), Sleeps(),
]  # fmt: skip
