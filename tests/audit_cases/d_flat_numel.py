"""Classes D and M: a flat index over all elements, and a count that is passed as a number."""

import triton
import triton.language as tl


@triton.jit
def flat_scale(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)  # expect: BP106 pid 2,097,152
    mask = offs < numel
    x = tl.load(in_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + x, mask=mask)


@triton.jit
def flat_scale_fixed(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0).to(tl.int64)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offs < numel
    x = tl.load(in_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + x, mask=mask)


@triton.jit
def flat_in_two_steps(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):
    # The sum wraps one program before the tile's start does.
    start = tl.program_id(0) * BLOCK
    lanes = tl.arange(0, BLOCK)
    offs = start + lanes + BLOCK  # expect: BP103|BP106 * 2,097,151
    x = tl.load(in_ptr + offs, mask=offs < numel)
    tl.store(out_ptr + offs, x, mask=offs < numel)


@triton.jit
def flat_in_two_steps_fixed(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):  # expect: clean
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    offs = start + lanes + BLOCK
    x = tl.load(in_ptr + offs, mask=offs < numel)
    tl.store(out_ptr + offs, x, mask=offs < numel)


@triton.jit
def strided_flat(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):
    # A grid-stride loop: the counter passes numel on the last turn.
    pid = tl.program_id(0)
    for start in range(pid * BLOCK, numel, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < numel
        x = tl.load(in_ptr + offs * 4, mask=mask)  # expect: BP102|BP103|BP106 *
        tl.store(out_ptr + offs, x, mask=mask)


@triton.jit
def strided_flat_fixed(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    for start in range(pid * BLOCK, numel, tl.num_programs(0) * BLOCK):
        offs = start.to(tl.int64) + tl.arange(0, BLOCK)
        mask = offs < numel
        x = tl.load(in_ptr + offs * 4, mask=mask)
        tl.store(out_ptr + offs, x, mask=mask)


@triton.jit
def compact(out_ptr, keep_ptr, in_ptr, base_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # Positions come out of a scan; the base of the tile was counted by another kernel.
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + offs).to(tl.int32)
    base = tl.load(base_ptr + pid)
    place = base + tl.cumsum(keep, 0)
    x = tl.load(in_ptr + offs)
    tl.store(out_ptr + place * WIDTH, x, mask=keep > 0)  # expect: BP102|BP106|BP112 base 16,776,960


@triton.jit
def compact_fixed(out_ptr, keep_ptr, in_ptr, base_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + offs).to(tl.int32)
    base = tl.load(base_ptr + pid).to(tl.int64)
    place = base + tl.cumsum(keep, 0)
    x = tl.load(in_ptr + offs)
    tl.store(out_ptr + place * WIDTH, x, mask=keep > 0)


@triton.jit
def numel_by_value(out_ptr, numel, half, BLOCK: tl.constexpr):
    # int32 while it is small: the doubled count is what wraps, and the mask with it.
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    total = numel + half  # expect: BP106|BP109 half 1,073,741,825
    tl.store(out_ptr + offs, offs, mask=offs < total)


@triton.jit
def numel_by_value_fixed(out_ptr, numel: tl.int64, half: tl.int64, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    total = numel + half
    tl.store(out_ptr + offs, offs, mask=offs < total)


META = {
    "flat_scale": {
        "klass": "D",
        "report": "an elementwise kernel",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "numel": "i64", "BLOCK": 1024},
        "grid": [2147483647],
        "walls": [["pid", "pid * 1024 + 1023", {}]],
        "safe": ["1024"],
    },
    "flat_in_two_steps": {
        "klass": "D",
        "report": "an elementwise kernel that skips the first tile",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "numel": "i64", "BLOCK": 1024},
        "grid": [2147483647],
        "walls": [["pid", "pid * 1024 + 1023 + 1024", {}, 2097151]],
        "safe": ["1024"],
    },
    "strided_flat": {
        "klass": "D",
        "report": "a grid-stride loop with four values in a group",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "numel": 1000000000, "BLOCK": 1024},
        "grid": [1024],
        "walls": [["offs", "offs * 4", {}, 536870912]],
        "safe": ["1000000000 + 1024 * 1024 + 1023"],
    },
    "compact": {
        "klass": "D",
        "report": "stream compaction: cumsum on the way to an address",
        "args": {
            "out_ptr": "*bf16",
            "keep_ptr": "*i1",
            "in_ptr": "*bf16",
            "base_ptr": "*i32",
            "WIDTH": 128,
            "BLOCK": 256,
        },
        "grid": [4096],
        "ranges": {"keep": [0, 1]},
        "walls": [["base", "(base + 256) * 128", {}]],
        "safe": ["4095 * 256 + 255"],
    },
    "numel_by_value": {
        "klass": "M",
        "report": "a count typed by its value",
        "args": {"out_ptr": "*i32", "numel": 1073741823, "half": "i32", "BLOCK": 1024},
        "grid": [1048576],
        "walls": [["half", "half + 1073741823", {}]],
    },
    "numel_by_value_fixed": {
        "klass": "M",
        "report": "a count typed by its value, annotated",
        "args": {"out_ptr": "*i32", "numel": 1073741823, "half": "i64", "BLOCK": 1024},
        "grid": [1048576],
        "safe": ["1048575 * 1024 + 1023"],
    },
}
