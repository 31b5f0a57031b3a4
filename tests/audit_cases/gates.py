"""Constexpr gates: the wide branch, the narrow branch, and the host that chooses."""

import triton
import triton.language as tl


@triton.jit
def gate_right(out_ptr, in_ptr, rows_ptr, stride_row, N: tl.constexpr, WIDE: tl.constexpr):
    # The narrow branch is wrong from row 524,288 on: the host must not choose it there.
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    if WIDE:
        row = row.to(tl.int64)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + row * stride_row + offs_n)  # expect@narrow: BP102|BP111 row 524,288
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def gate_wide_branch_narrow(out_ptr, in_ptr, rows_ptr, stride_row, N: tl.constexpr, WIDE: tl.constexpr):
    # The branch that is meant to be wide multiplies before it casts.
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    if WIDE:
        base = (row * stride_row).to(tl.int64)  # expect@wide: BP107|BP111 row 524,288
    else:
        base = row * stride_row  # expect@narrow: BP102|BP111 row 524,288
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(in_ptr + base + offs_n))


@triton.jit
def gate_wide_branch_narrow_fixed(out_ptr, in_ptr, rows_ptr, stride_row, N: tl.constexpr, WIDE: tl.constexpr):
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    if WIDE:
        base = row.to(tl.int64) * stride_row
    else:
        base = row * stride_row  # expect@narrow: BP102|BP111 row 524,288
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(in_ptr + base + offs_n))


@triton.jit
def gate_by_type(out_ptr, in_ptr, rows_ptr, stride_row, N: tl.constexpr, INDEX: tl.constexpr):
    # The gate is a type.
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid).to(INDEX)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + row * stride_row + offs_n)  # expect@narrow: BP102|BP111 row 524,288
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def gate_guarded(out_ptr, in_ptr, rows_ptr, stride_row, N: tl.constexpr, WIDE: tl.constexpr):  # expect: clean
    # Non-fault 6: `launch_guarded` takes the narrow branch only where it fits.
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    if WIDE:
        row = row.to(tl.int64)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + row * stride_row + offs_n)
    tl.store(out_ptr + pid * N + offs_n, x)


def launch_guarded(out, x, rows):
    wide = x.shape[0] * x.stride(0) > 2**31 - 1
    gate_guarded[(rows.numel(),)](out, x, rows, x.stride(0), N=x.shape[1], WIDE=wide)


@triton.jit
def rows_or_ids(out_ptr, ids_ptr, stride_row, HAS_IDS: tl.constexpr, N: tl.constexpr):
    # No gate: the branch is there for another reason, and without it the row stays 32 bits wide.
    row = tl.program_id(0)
    if HAS_IDS:
        row = tl.load(ids_ptr + row).to(tl.int64)
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + row * stride_row + offs_n, 0.0)  # expect: BP103 row 262,144


@triton.jit
def rows_or_ids_fixed(out_ptr, ids_ptr, stride_row, HAS_IDS: tl.constexpr, N: tl.constexpr):  # expect: clean
    row = tl.program_id(0).to(tl.int64)
    if HAS_IDS:
        row = tl.load(ids_ptr + row).to(tl.int64)
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + row * stride_row + offs_n, 0.0)


META = {
    "rows_or_ids": {
        "klass": "gates",
        "report": "a constexpr branch of which one side is wide: found in real wheels when one cast was removed",
        "args": {"out_ptr": "*bf16", "ids_ptr": "*i32", "stride_row": 8192, "HAS_IDS": False, "N": 64},
        "grid": [1048576],
        "walls": [["row", "row * 8192", {}]],
        "safe": ["1048575", "63"],
    },
    "gate_right@narrow": {
        "source": False,
        "klass": "gates",
        "report": "exllamav3 #263",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "WIDE": False},
        "grid": [65536],
        "walls": [["row", "row * 4096", {}]],
    },
    "gate_right@wide": {
        "klass": "gates",
        "report": "exllamav3 #263",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "WIDE": True},
        "grid": [65536],
        "clean": True,
        "safe": ["65535 * 64 + 63"],
    },
    "gate_wide_branch_narrow@narrow": {
        "source": False,
        "klass": "gates",
        "report": "aiter #4474",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "WIDE": False},
        "grid": [65536],
        "walls": [["row", "row * 4096", {}]],
    },
    "gate_wide_branch_narrow@wide": {
        "klass": "gates",
        "report": "aiter #4474",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "WIDE": True},
        "grid": [65536],
        "walls": [["row", "row * 4096", {}]],
    },
    "gate_wide_branch_narrow_fixed@narrow": {
        "source": False,
        "klass": "gates",
        "report": "aiter #4474",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "WIDE": False},
        "grid": [65536],
        "walls": [["row", "row * 4096", {}]],
    },
    "gate_wide_branch_narrow_fixed@wide": {
        "klass": "gates",
        "report": "aiter #4474",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "WIDE": True},
        "grid": [65536],
        "clean": True,
        "safe": ["65535 * 64 + 63"],
    },
    "gate_by_type@narrow": {
        "source": False,
        "klass": "gates",
        "report": "a type as the gate",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "INDEX": "tl.int32"},
        "grid": [65536],
        "walls": [["row", "row * 4096", {}]],
    },
    "gate_by_type@wide": {
        "source": False,
        "klass": "gates",
        "report": "a type as the gate",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "INDEX": "tl.int64"},
        "grid": [65536],
        "clean": True,
        "safe": ["65535 * 64 + 63"],
    },
    "gate_guarded": {
        "klass": "6",
        "report": "a correct host guard: the narrow branch runs only below 524,288 rows",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 4096, "N": 64, "WIDE": False},
        "grid": [65536],
        "ranges": {"row": [0, 524287]},
        "safe": ["524287 * 4096"],
    },
}
