"""Class E: an expert id times the stride of the expert's weights."""

import triton
import triton.language as tl


@triton.jit
def expert_weights(out_ptr, w_ptr, expert_ptr, stride_expert, stride_n, N: tl.constexpr):
    pid = tl.program_id(0)
    expert = tl.load(expert_ptr + pid)
    offs_n = tl.arange(0, N)
    w = tl.load(w_ptr + expert * stride_expert + offs_n * stride_n)  # expect: BP104 expert 128
    tl.store(out_ptr + pid * N + offs_n, w)


@triton.jit
def expert_weights_fixed(out_ptr, w_ptr, expert_ptr, stride_expert, stride_n, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    expert = tl.load(expert_ptr + pid).to(tl.int64)
    offs_n = tl.arange(0, N)
    w = tl.load(w_ptr + expert * stride_expert + offs_n * stride_n)
    tl.store(out_ptr + pid * N + offs_n, w)


@triton.jit
def expert_by_scan(out_ptr, w_ptr, ends_ptr, stride_expert, EXPERTS: tl.constexpr, N: tl.constexpr):
    # The id is counted in the kernel: how many experts end at or before this row.
    row = tl.program_id(0)
    ends = tl.load(ends_ptr + tl.arange(0, EXPERTS))
    expert = tl.sum((ends <= row).to(tl.int32), 0)
    offs_n = tl.arange(0, N)
    w = tl.load(w_ptr + expert * stride_expert + offs_n)  # expect: BP104 expert 128
    tl.store(out_ptr + row * N + offs_n, w)


@triton.jit
def expert_by_scan_fixed(out_ptr, w_ptr, ends_ptr, stride_expert, EXPERTS: tl.constexpr, N: tl.constexpr):  # expect: clean
    row = tl.program_id(0)
    ends = tl.load(ends_ptr + tl.arange(0, EXPERTS))
    expert = tl.sum((ends <= row).to(tl.int32), 0).to(tl.int64)
    offs_n = tl.arange(0, N)
    w = tl.load(w_ptr + expert * stride_expert + offs_n)
    tl.store(out_ptr + row * N + offs_n, w)


@triton.jit
def expert_in_grid(out_ptr, w_ptr, rows, columns, N: tl.constexpr):
    # The shape is multiplied in the kernel.
    expert = tl.program_id(1)
    pid = tl.program_id(0)
    offs_n = pid * N + tl.arange(0, N)
    w = tl.load(w_ptr + expert * rows * columns + offs_n)  # expect: BP103|BP104|BP105 expert 147
    tl.store(out_ptr + offs_n, w)


@triton.jit
def expert_in_grid_fixed(out_ptr, w_ptr, rows, columns, N: tl.constexpr):  # expect: clean
    expert = tl.program_id(1).to(tl.int64)
    pid = tl.program_id(0)
    offs_n = pid * N + tl.arange(0, N)
    w = tl.load(w_ptr + expert * rows * columns + offs_n)
    tl.store(out_ptr + offs_n, w)


@triton.jit
def expert_few(out_ptr, w_ptr, expert_ptr, stride_expert, N: tl.constexpr):  # expect: clean
    # Declared bound: 64 local experts.
    pid = tl.program_id(0)
    expert = tl.load(expert_ptr + pid)
    offs_n = tl.arange(0, N)
    w = tl.load(w_ptr + expert * stride_expert + offs_n)
    tl.store(out_ptr + pid * N + offs_n, w)


@triton.jit
def expert_found_by_search(out_ptr, weight_ptr, ends_ptr, stride_expert, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    # The expert is the pass of a loop in which a condition was met.
    row = tl.program_id(0)
    expert = 0
    for e in range(EXPERTS):
        expert = tl.where(tl.load(ends_ptr + e) <= row, e, expert)
    offs = tl.arange(0, BLOCK)
    w = tl.load(weight_ptr + expert * stride_expert + offs)  # expect: BP103|BP104 * 128
    tl.store(out_ptr + offs, w)


@triton.jit
def expert_found_by_search_fixed(
    out_ptr, weight_ptr, ends_ptr, stride_expert, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # expect: clean
    row = tl.program_id(0)
    expert = 0
    for e in range(EXPERTS):
        expert = tl.where(tl.load(ends_ptr + e) <= row, e, expert)
    offs = tl.arange(0, BLOCK)
    w = tl.load(weight_ptr + expert.to(tl.int64) * stride_expert + offs)
    tl.store(out_ptr + offs, w)


@triton.jit
def sum_of_a_few(out_ptr, in_ptr, stride_part, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    # The loop variable itself counts a few parts.
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in range(PARTS):
        total += tl.load(in_ptr + part * stride_part + offs)
    tl.store(out_ptr + offs, total)


META = {
    "expert_found_by_search": {
        "klass": "E",
        "report": "a grouped product that looks for the expert of its tile",
        "args": {
            "out_ptr": "*bf16",
            "weight_ptr": "*bf16",
            "ends_ptr": "*i32",
            "stride_expert": 16777216,
            "EXPERTS": 256,
            "BLOCK": 1024,
        },
        "grid": [4096],
        "walls": [["e", "e * 16777216", {}, 128]],
        "safe": ["256"],
    },
    "sum_of_a_few": {
        "klass": "2",
        "report": "a sum over parts",
        "args": {"out_ptr": "*fp32", "in_ptr": "*fp32", "stride_part": 16777216, "PARTS": 8, "BLOCK": 1024},
        "grid": [1],
        "safe": ["7 * 16777216 + 1023"],
    },
    "expert_weights": {
        "klass": "E",
        "report": "experts of 4,096 x 4,096",
        "args": {
            "out_ptr": "*bf16",
            "w_ptr": "*bf16",
            "expert_ptr": "*i32",
            "stride_expert": 16777216,
            "stride_n": 4096,
            "N": 64,
        },
        "grid": [65536],
        "walls": [["expert", "expert * 16777216", {}]],
        "safe": ["63 * 4096", "65535 * 64 + 63"],
    },
    "expert_by_scan": {
        "klass": "E",
        "report": "the id comes from an in-kernel scan",
        "args": {"out_ptr": "*bf16", "w_ptr": "*bf16", "ends_ptr": "*i32", "stride_expert": 16777216, "EXPERTS": 256, "N": 64},
        "grid": [65536],
        "walls": [["expert", "expert * 16777216", {}]],
        "safe": ["65535 * 64 + 63"],
    },
    "expert_in_grid": {
        "klass": "E",
        "report": "experts of 2,048 x 7,168",
        "args": {"out_ptr": "*bf16", "w_ptr": "*bf16", "rows": 2048, "columns": 7168, "N": 64},
        "grid": [1024, 256],
        "walls": [["expert", "expert * 2048 * 7168", {}]],
        "safe": ["1023 * 64 + 63"],
    },
    "expert_few": {
        "klass": "E",
        "report": "a declared bound",
        "args": {"out_ptr": "*bf16", "w_ptr": "*bf16", "expert_ptr": "*i32", "stride_expert": 16777216, "N": 64},
        "grid": [65536],
        "ranges": {"expert": [0, 63]},
        "safe": ["63 * 16777216", "65535 * 64 + 63"],
    },
}
