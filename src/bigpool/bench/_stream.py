# mypy: ignore-errors
"""A kernel that reads and does nothing else: what a read-only stream of the card reaches."""

import triton
import triton.language as tl


@triton.jit
def read_kernel(x_ptr, sink_ptr, num_blocks, BLOCK: tl.constexpr):
    """Grid-stride over blocks of `x` fp32; a store that never happens keeps the loads alive."""
    acc = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64)
    for block in range(first, num_blocks, tl.num_programs(0)):
        acc += tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))
    if tl.max(acc, 0) > 1e30:
        tl.store(sink_ptr, 1.0)
