"""What `bigpool prove` needs to know about the gather: how to build its inputs, call it, and what the answer is."""

from bigpool.proof import Case, Oracle

KERNELS = "naive_gather.py"
PICKED = [3, 0, 2, 1]


class Gather(Case):
    name = "gather"
    op = "gather"
    describe = "four pages of 16 x 64, picked in another order than they lie"

    def build(self, ctx):
        cache = ctx.pool("cache", (16, 64), pages=4)
        cache.write(ctx.randn(4, 16, 64))
        return cache, cache.table(PICKED), ctx.rows("out", (4, 16 * 64))

    def run(self, ctx, inputs):
        cache, block_table, out = inputs
        ctx.kernels.gather(cache.tensor, block_table, out.tensor)
        return {"out": out.read()}

    def oracle(self, ctx, inputs):
        cache, _, _ = inputs
        return Oracle(expected={"out": cache.read()[PICKED].flatten(1).double()})


CASES = [Gather()]
