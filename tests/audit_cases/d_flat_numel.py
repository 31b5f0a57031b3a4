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


@triton.jit
def flat_two_ahead(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):
    # Two tiles ahead of its own: the sum wraps two programs before the product.
    start = tl.program_id(0) * BLOCK
    offs = tl.arange(0, BLOCK) + start + BLOCK * 2  # expect: BP103|BP106 * 2,097,150
    x = tl.load(in_ptr + offs, mask=offs < numel)
    tl.store(out_ptr + offs, x, mask=offs < numel)


@triton.jit
def flat_two_ahead_fixed(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):  # expect: clean
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offs = tl.arange(0, BLOCK) + start + BLOCK * 2
    x = tl.load(in_ptr + offs, mask=offs < numel)
    tl.store(out_ptr + offs, x, mask=offs < numel)


@triton.jit
def flat_by_parts(out_ptr, in_ptr, numel, BLOCK: tl.constexpr):
    # The lanes stay inside the tile: here the product wraps first.
    start = tl.program_id(0) * BLOCK  # expect: BP103|BP106 * 2,097,152
    lanes = tl.arange(0, BLOCK)
    offs = start + lanes
    x = tl.load(in_ptr + offs, mask=offs < numel)
    tl.store(out_ptr + offs, x, mask=offs < numel)


@triton.jit
def append(out_ptr, keep_ptr, in_ptr, base_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # The end of what a tile keeps: a sum of flags, at most one for each lane.
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + offs).to(tl.int32)
    base = tl.load(base_ptr + pid)
    end = base + tl.sum(keep, 0)
    tl.store(out_ptr + end * WIDTH, tl.load(in_ptr + pid))  # expect: BP102|BP106|BP112 base 2,097,024


@triton.jit
def append_fixed(out_ptr, keep_ptr, in_ptr, base_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + offs).to(tl.int32)
    base = tl.load(base_ptr + pid).to(tl.int64)
    end = base + tl.sum(keep, 0)
    tl.store(out_ptr + end * WIDTH, tl.load(in_ptr + pid))


@triton.jit
def rank_in_tile(out_ptr, keep_ptr, in_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    # A scan of flags over 256 lanes: the rank stays below 256, whatever was loaded.
    lanes = tl.arange(0, BLOCK)
    keep = tl.load(keep_ptr + lanes).to(tl.int32)
    rank = tl.cumsum(keep, 0)
    tl.store(out_ptr + rank * WIDTH, tl.load(in_ptr + lanes), mask=keep > 0)


@triton.jit
def numel_of_three(out_ptr, numel, half, rest, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    total = numel + half + rest  # expect: BP106|BP109 rest 147,483,648
    tl.store(out_ptr + offs, offs, mask=offs < total)


@triton.jit
def numel_of_three_fixed(out_ptr, numel: tl.int64, half, rest, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    total = numel + half + rest
    tl.store(out_ptr + offs, offs, mask=offs < total)


@triton.jit
def numel_with_a_tail(out_ptr, numel, tail, BLOCK: tl.constexpr):  # expect: clean
    # Both counts are bounded: their sum fits.
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    total = numel + tail
    tl.store(out_ptr + offs, offs, mask=offs < total)


META = {
    "flat_two_ahead": {
        "klass": "D",
        "report": "an elementwise kernel that reads two tiles ahead",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "numel": "i64", "BLOCK": 1024},
        "grid": [2147483647],
        "walls": [["pid", "pid * 1024 + 1023 + 2048", {}, 2097150]],
        "safe": ["1023 + 2048"],
    },
    "flat_by_parts": {
        "klass": "D",
        "report": "an elementwise kernel in two lines",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "numel": "i64", "BLOCK": 1024},
        "grid": [2147483647],
        "walls": [["pid", "pid * 1024 + 1023", {}, 2097152]],
    },
    "append": {
        "klass": "D",
        "report": "stream compaction: the end of a tile",
        "args": {
            "out_ptr": "*bf16",
            "keep_ptr": "*i1",
            "in_ptr": "*bf16",
            "base_ptr": "*i32",
            "WIDTH": 1024,
            "BLOCK": 128,
        },
        "grid": [4096],
        "ranges": {"keep": [0, 1]},
        "walls": [["base", "(base + 128) * 1024", {}]],
        "safe": ["4095 * 128 + 127"],
    },
    "rank_in_tile": {
        "klass": "2",
        "report": "stream compaction inside one tile",
        "args": {"out_ptr": "*bf16", "keep_ptr": "*i1", "in_ptr": "*bf16", "WIDTH": 4194304, "BLOCK": 256},
        "grid": [1],
        "ranges": {"keep": [0, 1]},
        "safe": ["256 * 4194304"],
    },
    "numel_of_three": {
        "klass": "M",
        "report": "a count typed by its value",
        "args": {"out_ptr": "*i32", "numel": 1000000000, "half": 1000000000, "rest": "i32", "BLOCK": 1024},
        "grid": [1048576],
        "walls": [["rest", "rest + 2000000000", {}]],
    },
    "numel_of_three_fixed": {
        "klass": "M",
        "report": "a count typed by its value, annotated",
        "args": {"out_ptr": "*i32", "numel": 1000000000, "half": 1000000000, "rest": "i32", "BLOCK": 1024},
        "grid": [1048576],
        "safe": ["1048575 * 1024 + 1023"],
    },
    "numel_with_a_tail": {
        "klass": "2",
        "report": "a flat index that ends at a sum of counts",
        "args": {"out_ptr": "*i32", "numel": 1000000000, "tail": "i32", "BLOCK": 1024},
        "grid": [1048576],
        "ranges": {"tail": [0, 1147483647]},
        "safe": ["1000000000 + 1147483647", "1048575 * 1024 + 1023"],
    },
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
