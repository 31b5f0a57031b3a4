"""Non-faults 2, 3, 5, 7 and 8: bounded by a tile, clamped, masked off, cancelling, and casts out of caution."""

import triton
import triton.language as tl


@triton.jit
def tile_bounded(in_ptr, out_ptr, stride_row, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    # A 64-bit base and 32-bit offsets that the tile bounds: right and fast.
    pid = tl.program_id(0)
    base_ptr = in_ptr + pid.to(tl.int64) * M * stride_row
    offs = tl.arange(0, M)[:, None] * stride_row + tl.arange(0, N)[None, :]
    x = tl.load(base_ptr + offs)
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], x)


@triton.jit
def small_grid(in_ptr, out_ptr, BLOCK: tl.constexpr):  # expect: clean
    # Axis 1 of a grid has at most 65,535 programs.
    pid = tl.program_id(1)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(in_ptr + offs))


@triton.jit
def wrapped_rows(in_ptr, out_ptr, rows, stride_row, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    # % rows bounds the row, and rows x stride fits.
    pid = tl.program_id(0)
    offs_m = (pid * M + tl.arange(0, M)) % rows
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + offs_m[:, None] * stride_row + offs_n[None, :])
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + offs_n[None, :], x)


@triton.jit
def wrapped_many_rows(in_ptr, out_ptr, rows, stride_row, M: tl.constexpr, N: tl.constexpr):
    # % rows bounds the row, but rows x stride does not fit.
    pid = tl.program_id(0)
    offs_m = (pid * M + tl.arange(0, M)) % rows
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + offs_m[:, None] * stride_row + offs_n[None, :])  # expect: BP102|BP103 *
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + offs_n[None, :], x)


@triton.jit
def wrapped_many_rows_fixed(in_ptr, out_ptr, rows, stride_row, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    offs_m = (pid * M + tl.arange(0, M)) % rows
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + offs_m[:, None].to(tl.int64) * stride_row + offs_n[None, :])
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + offs_n[None, :], x)


@triton.jit
def clamped_page(out_ptr, pool_ptr, table_ptr, num_pages, stride_page, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(pool_ptr + page * stride_page + offs))


@triton.jit
def selected_row(out_ptr, in_ptr, rows_ptr, limit, stride_row, BLOCK: tl.constexpr):  # expect: clean
    # tl.where with the same bound that the mask would have.
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    row = tl.where((row >= 0) & (row < limit), row, 0)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(in_ptr + row * stride_row + offs))


@triton.jit
def masked_off(out_ptr, in_ptr, rows, stride_row, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    # Lanes past `rows` may wrap: the mask is formed from the row itself, which does not.
    pid = tl.program_id(0)
    offs_m = pid * M + tl.arange(0, M)
    mask = offs_m < rows
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + offs_m[:, None] * stride_row + offs_n[None, :], mask=mask[:, None])
    tl.store(out_ptr + tl.arange(0, M)[:, None] * N + offs_n[None, :], x)


@triton.jit
def early_return(out_ptr, in_ptr, rows, stride_row, N: tl.constexpr):  # expect: clean
    # The scalar form of the same.
    row = tl.program_id(0)
    if row >= rows:
        return
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + row * stride_row + offs_n, tl.load(in_ptr + row * stride_row + offs_n))


@triton.jit
def cancelling(out_ptr, in_ptr, start, N: tl.constexpr):  # expect: clean
    # (start + 2^30 + lane) - start: what wraps on the way comes back, and nothing was widened in between.
    offs_n = tl.arange(0, N)
    far = start * 4096 + offs_n
    near = far - start * 4096
    tl.store(out_ptr + near, tl.load(in_ptr + near))


@triton.jit
def cancelling_widened(out_ptr, in_ptr, start, N: tl.constexpr):
    # The same after an extension to 64 bits: the wrapped value is kept.
    offs_n = tl.arange(0, N)
    far = (start * 4096 + offs_n).to(tl.int64)  # expect: BP107|BP105|BP106 start 524,288
    near = far - start.to(tl.int64) * 4096
    tl.store(out_ptr + near, tl.load(in_ptr + near))


@triton.jit
def cancelling_widened_fixed(out_ptr, in_ptr, start, N: tl.constexpr):  # expect: clean
    offs_n = tl.arange(0, N)
    far = start.to(tl.int64) * 4096 + offs_n
    near = far - start.to(tl.int64) * 4096
    tl.store(out_ptr + near, tl.load(in_ptr + near))


@triton.jit
def needless_cast(out_ptr, in_ptr, N: tl.constexpr):  # expect: clean
    # Cast out of caution: 65,535 x 64 never comes near.
    pid = tl.program_id(1).to(tl.int64)
    offs = pid * N + tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(in_ptr + offs))


@triton.jit
def needless_cast_absent(out_ptr, in_ptr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(1)
    offs = pid * N + tl.arange(0, N)
    tl.store(out_ptr + offs, tl.load(in_ptr + offs))


META = {
    "tile_bounded": {
        "klass": "2",
        "report": "a 64-bit base with a 32-bit tile",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "stride_row": 8192, "M": 64, "N": 64},
        "grid": [2147483647],
        "safe": ["63 * 8192 + 63"],
    },
    "small_grid": {
        "klass": "2",
        "report": "the limit of a grid axis",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "BLOCK": 1024},
        "grid": [1, 65535],
        "safe": ["65534 * 1024 + 1023"],
    },
    "wrapped_rows": {
        "klass": "3",
        "report": "% rows",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "rows": 100000, "stride_row": 16384, "M": 64, "N": 64},
        "grid": [1563],
        "safe": ["99999 * 16384 + 63", "1562 * 64 + 63"],
    },
    "wrapped_many_rows": {
        "klass": "3",
        "report": "% rows with many rows",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "rows": 200000, "stride_row": 16384, "M": 64, "N": 64},
        "grid": [3125],
        "walls": [["offs_m", "offs_m * 16384", {}, 131072]],
        "safe": ["3124 * 64 + 63"],
    },
    "clamped_page": {
        "klass": "3",
        "report": "min and max around a page id",
        "args": {
            "out_ptr": "*bf16",
            "pool_ptr": "*bf16",
            "table_ptr": "*i32",
            "num_pages": 2000,
            "stride_page": 901120,
            "BLOCK": 128,
        },
        "grid": [4096],
        "safe": ["1999 * 901120", "4095 * 128 + 127"],
    },
    "selected_row": {
        "klass": "3",
        "report": "tl.where around a row id",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows_ptr": "*i32", "limit": 4096, "stride_row": 16384, "BLOCK": 128},
        "grid": [4096],
        "safe": ["4095 * 16384", "4095 * 128 + 127"],
    },
    "masked_off": {
        "klass": "5",
        "report": "a mask over rows",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "rows": 131040, "stride_row": 16384, "M": 64, "N": 64},
        "grid": [2048],
        "safe": ["131039 * 16384", "2047 * 64 + 63"],
    },
    "early_return": {
        "klass": "5",
        "report": "a return before the access",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "rows": 131040, "stride_row": 16384, "N": 64},
        "grid": [2147483647],
        "safe": ["131039 * 16384"],
    },
    "cancelling": {
        "klass": "7",
        "report": "an intermediate that cancels",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "start": "i32", "N": 64},
        "grid": [1],
        "debug_asserts": False,
        "safe": ["63"],
    },
    "cancelling_widened": {
        "klass": "7",
        "report": "an intermediate that is widened before it cancels",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "start": "i32", "N": 64},
        "grid": [1],
        "walls": [["start", "start * 4096 + offs_n", {"offs_n": 63}]],
        "safe": ["63"],
    },
    "needless_cast": {
        "klass": "8",
        "report": "a cast out of caution",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "N": 64},
        "grid": [1, 65535],
        "safe": ["65534 * 64 + 63"],
    },
    "needless_cast_absent": {
        "klass": "8",
        "report": "the same without the cast",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "N": 64},
        "grid": [1, 65535],
        "safe": ["65534 * 64 + 63"],
    },
}
