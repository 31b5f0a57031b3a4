"""Class C: a program id (times a tile, plus a lane) times a row stride."""

import triton
import triton.language as tl


@triton.jit
def norm_rows(x_ptr, stride_row, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * stride_row  # expect: BP103 row 58,255
    offs = tl.arange(0, BLOCK)
    mask = offs < n_cols
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + offs, x / tl.sum(x), mask=mask)


@triton.jit
def norm_rows_fixed(x_ptr, stride_row, n_cols, BLOCK: tl.constexpr):  # expect: clean
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_row
    offs = tl.arange(0, BLOCK)
    mask = offs < n_cols
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + offs, x / tl.sum(x), mask=mask)


@triton.jit
def vocabulary_loss(logits_ptr, loss_ptr, stride_row, n_cols, BLOCK: tl.constexpr):
    # Row 42,730 starts inside the range and ends outside it.
    row = tl.program_id(0)
    block = tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    offs = row * stride_row + cols  # expect: BP103 row 42,730
    x = tl.load(logits_ptr + offs, mask=cols < n_cols, other=0.0)
    tl.store(loss_ptr + row, tl.max(x))


@triton.jit
def vocabulary_loss_fixed(logits_ptr, loss_ptr, stride_row, n_cols, BLOCK: tl.constexpr):  # expect: clean
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    offs = row * stride_row + cols
    x = tl.load(logits_ptr + offs, mask=cols < n_cols, other=0.0)
    tl.store(loss_ptr + row, tl.max(x))


@triton.jit
def padded_columns(logits_ptr, loss_ptr, stride_row, n_rows, n_cols, BLOCK: tl.constexpr):
    # Two conditions in one mask; the lanes past the last column do not count.
    row = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < n_rows) & (cols < n_cols)
    x = tl.load(logits_ptr + row * stride_row + cols, mask=live, other=0.0)  # expect: BP103 row 32,768
    offs = row * stride_row + cols  # expect: BP103 row 32,767
    tl.store(loss_ptr + offs, x, mask=live)


@triton.jit
def padded_columns_fixed(logits_ptr, loss_ptr, stride_row, n_rows, n_cols, BLOCK: tl.constexpr):  # expect: clean
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < n_rows) & (cols < n_cols)
    x = tl.load(logits_ptr + row * stride_row + cols, mask=live, other=0.0)
    offs = row * stride_row + cols
    tl.store(loss_ptr + offs, x, mask=live)


@triton.jit
def few_rows(out_ptr, in_ptr, stride_row, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    # The grid may be larger than the rows: the mask cuts the rest off.
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    live = (row < ROWS) & (cols < BLOCK)
    offs = row * stride_row + cols
    tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=live), mask=live)


@triton.jit
def vocabulary_row(logits_ptr, loss_ptr, stride_row, n_cols, BLOCK: tl.constexpr):
    # The same row by a pointer of its own, one column tile at a time: the product alone decides.
    row = tl.program_id(0)
    row_ptr = logits_ptr + row * stride_row  # expect: BP103 row 42,731
    best = -float("inf")
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        best = tl.maximum(best, tl.max(x))
    tl.store(loss_ptr + row, best)


@triton.jit
def vocabulary_row_fixed(logits_ptr, loss_ptr, stride_row, n_cols, BLOCK: tl.constexpr):  # expect: clean
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    best = -float("inf")
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < n_cols, other=-float("inf"))
        best = tl.maximum(best, tl.max(x))
    tl.store(loss_ptr + row, best)


@triton.jit
def gather_hinted(out_ptr, in_ptr, columns, BLOCK: tl.constexpr):
    # The multiply sits inside a compiler hint.
    row = tl.program_id(0)
    src_ptr = in_ptr + tl.multiple_of(row * columns, BLOCK)  # expect: BP103 row 524,288
    offs = tl.max_contiguous(tl.arange(0, BLOCK), BLOCK)
    tl.store(out_ptr + offs, tl.load(src_ptr + offs))


@triton.jit
def gather_hinted_fixed(out_ptr, in_ptr, columns, BLOCK: tl.constexpr):  # expect: clean
    row = tl.program_id(0).to(tl.int64)
    src_ptr = in_ptr + tl.multiple_of(row * columns, BLOCK)
    offs = tl.max_contiguous(tl.arange(0, BLOCK), BLOCK)
    tl.store(out_ptr + offs, tl.load(src_ptr + offs))


@triton.jit
def tile_rows(out_ptr, in_ptr, stride_in, stride_out, M: tl.constexpr, N: tl.constexpr):
    pid_m = tl.program_id(0)
    offs_m = pid_m * M + tl.arange(0, M)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + offs_m[:, None] * stride_in + offs_n[None, :])  # expect: BP103 pid_m 8,192
    tl.store(out_ptr + offs_m[:, None] * stride_out + offs_n[None, :], x)  # expect: BP103 pid_m 16,384


@triton.jit
def tile_rows_partly_fixed(out_ptr, in_ptr, stride_in, stride_out, M: tl.constexpr, N: tl.constexpr):
    # The usual half of a fix: only the load.
    pid_m = tl.program_id(0)
    offs_m = pid_m * M + tl.arange(0, M)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + offs_m[:, None].to(tl.int64) * stride_in + offs_n[None, :])
    tl.store(out_ptr + offs_m[:, None] * stride_out + offs_n[None, :], x)  # expect: BP103 pid_m 16,384


@triton.jit
def tile_rows_fixed(out_ptr, in_ptr, stride_in, stride_out, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    pid_m = tl.program_id(0)
    offs_m = pid_m.to(tl.int64) * M + tl.arange(0, M)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + offs_m[:, None] * stride_in + offs_n[None, :])
    tl.store(out_ptr + offs_m[:, None] * stride_out + offs_n[None, :], x)


@triton.jit
def persistent_rows(out_ptr, in_ptr, num_rows, stride_row, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    # The program id is small; the row that the loop reaches is not.
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    for row in range(pid, num_rows, PROGRAMS):
        x = tl.load(in_ptr + row * stride_row + offs)  # expect: BP102|BP103 row 131,072
        tl.store(out_ptr + row * stride_row + offs, x)  # expect: BP102|BP103 row 131,072


@triton.jit
def persistent_rows_fixed(out_ptr, in_ptr, num_rows, stride_row, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    for row in range(pid, num_rows, PROGRAMS):
        row_wide = row.to(tl.int64)
        x = tl.load(in_ptr + row_wide * stride_row + offs)
        tl.store(out_ptr + row_wide * stride_row + offs, x)


@triton.jit
def swizzled_matmul(a_ptr, c_ptr, tiles_m, tiles_n, stride_am, stride_cm, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    # The usual grouped order: pid_m comes out of //, min and %.
    pid = tl.program_id(0)
    per_group = GROUP * tiles_n
    group = pid // per_group
    first_m = group * GROUP
    rows = min(tiles_m - first_m, GROUP)
    pid_m = first_m + (pid % per_group) % rows
    pid_n = (pid % per_group) // rows
    offs_m = pid_m * M + tl.arange(0, M)
    offs_n = pid_n * N + tl.arange(0, N)
    a = tl.load(a_ptr + offs_m[:, None] * stride_am + tl.arange(0, N)[None, :])
    tl.store(c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :], a)  # expect: BP103 *


@triton.jit
def swizzled_matmul_fixed(
    a_ptr, c_ptr, tiles_m, tiles_n, stride_am, stride_cm, GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # expect: clean
    pid = tl.program_id(0)
    per_group = GROUP * tiles_n
    group = pid // per_group
    first_m = group * GROUP
    rows = min(tiles_m - first_m, GROUP)
    pid_m = first_m + (pid % per_group) % rows
    pid_n = (pid % per_group) // rows
    offs_m = pid_m * M + tl.arange(0, M)
    offs_n = pid_n * N + tl.arange(0, N)
    a = tl.load(a_ptr + offs_m[:, None] * stride_am + tl.arange(0, N)[None, :])
    tl.store(c_ptr + offs_m[:, None].to(tl.int64) * stride_cm + offs_n[None, :], a)


META = {
    "norm_rows": {
        "klass": "C",
        "report": "Liger-Kernel #251",
        "args": {"x_ptr": "*bf16", "stride_row": 36864, "n_cols": 36864, "BLOCK": 65536},
        "grid": [2147483647],
        "walls": [["row", "row * 36864", {}]],
        "safe": ["65535"],
    },
    "vocabulary_loss": {
        "klass": "C",
        "report": "flash-attention c79de85, columns added first; lanes past the last column are masked off",
        "args": {"logits_ptr": "*bf16", "loss_ptr": "*fp32", "stride_row": 50257, "n_cols": 50257, "BLOCK": 4096},
        "grid": [2147483647, 13],
        "walls": [["row", "row * 50257 + cols", {"cols": 50256}]],
        "safe": ["12 * 4096 + 4095"],
    },
    "padded_columns": {
        "klass": "C",
        "report": "rows of 65,536 of which 65,538 columns are read: the row after is part of the view",
        "args": {
            "logits_ptr": "*bf16",
            "loss_ptr": "*fp32",
            "stride_row": 65536,
            "n_rows": 100000,
            "n_cols": 65538,
            "BLOCK": 4096,
        },
        "grid": [2147483647, 17],
        "walls": [["row", "row * 65536", {}], ["row", "row * 65536 + cols", {"cols": 65537}]],
        "safe": ["16 * 4096 + 4095"],
    },
    "few_rows": {
        "klass": "5",
        "report": "a grid of fixed size for a few rows",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "stride_row": 16777216, "ROWS": 64, "BLOCK": 1024},
        "grid": [4096],
        "safe": ["63 * 16777216 + 1023"],
    },
    "vocabulary_row": {
        "klass": "C",
        "report": "flash-attention c79de85",
        "args": {"logits_ptr": "*bf16", "loss_ptr": "*fp32", "stride_row": 50257, "n_cols": 50257, "BLOCK": 4096},
        "grid": [2147483647],
        "walls": [["row", "row * 50257", {}]],
        "safe": ["50257 + 4096"],
    },
    "gather_hinted": {
        "klass": "C",
        "report": "megablocks #185",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "columns": 4096, "BLOCK": 128},
        "grid": [2147483647],
        "walls": [["row", "row * 4096", {}]],
        "safe": ["127"],
    },
    "tile_rows": {
        "klass": "C",
        "report": "row tiles of a copy",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "stride_in": 4096, "stride_out": 2048, "M": 64, "N": 64},
        "grid": [1048576],
        "walls": [
            ["pid_m", "(pid_m * 64 + lane) * 4096", {"lane": 0}],
            ["pid_m", "(pid_m * 64 + lane) * 2048", {"lane": 0}],
        ],
        "safe": ["1048575 * 64 + 63"],
    },
    "tile_rows_partly_fixed": {
        "klass": "C",
        "report": "row tiles of a copy, the store left as it was",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "stride_in": 4096, "stride_out": 2048, "M": 64, "N": 64},
        "grid": [1048576],
        "walls": [["pid_m", "(pid_m * 64 + lane) * 2048", {"lane": 0}]],
    },
    "persistent_rows": {
        "klass": "C",
        "report": "a persistent loop",
        "args": {
            "out_ptr": "*bf16",
            "in_ptr": "*bf16",
            "num_rows": 1000000,
            "stride_row": 16384,
            "PROGRAMS": 132,
            "BLOCK": 1024,
        },
        "grid": [132],
        "walls": [["row", "row * 16384", {}], ["row", "row * 16384", {}]],
        "safe": ["1000000 + 132"],
    },
    "swizzled_matmul": {
        "klass": "C",
        "report": "a grouped tile order with a long output",
        "args": {
            "a_ptr": "*bf16",
            "c_ptr": "*bf16",
            "tiles_m": 8192,
            "tiles_n": 64,
            "stride_am": 512,
            "stride_cm": 8192,
            "GROUP": 8,
            "M": 64,
            "N": 64,
        },
        "grid": [524288],
        "walls": [["pid_m", "pid_m * 64 * 8192", {}, 4096]],
        "safe": ["8191 * 64 + 63", "(8191 * 64 + 63) * 512"],
    },
}
