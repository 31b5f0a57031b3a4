"""Class I: no address wraps; a mask, a loop bound or a triangular index does."""

import triton
import triton.language as tl


@triton.jit
def wrapped_mask(out_ptr, in_ptr, rows, columns, BLOCK: tl.constexpr):
    # rows * columns turns negative: the mask is false, nothing is written.
    pid = tl.program_id(0)
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = rows * columns  # expect: BP109 rows 524,288
    mask = offs < total
    tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=mask), mask=mask)


@triton.jit
def wrapped_mask_fixed(out_ptr, in_ptr, rows, columns, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = rows.to(tl.int64) * columns
    mask = offs < total
    tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=mask), mask=mask)


@triton.jit
def wrapped_loop_bound(out_ptr, in_ptr, rows, columns, BLOCK: tl.constexpr):
    # A bound that turns negative: no turn is taken.
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    src_ptr = in_ptr
    for _ in range(0, rows * columns, BLOCK):  # expect: BP109 rows 524,288
        acc += tl.load(src_ptr + offs)
        src_ptr += BLOCK
    tl.store(out_ptr + offs, acc)


@triton.jit
def wrapped_loop_bound_fixed(out_ptr, in_ptr, rows, columns, BLOCK: tl.constexpr):  # expect: clean
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    src_ptr = in_ptr
    for _ in range(0, rows.to(tl.int64) * columns, BLOCK):
        acc += tl.load(src_ptr + offs)
        src_ptr += BLOCK
    tl.store(out_ptr + offs, acc)


@triton.jit
def triangular(out_ptr, rows_ptr, BLOCK: tl.constexpr):
    # row * (row + 1) is twice the index that is meant.
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    start = row * (row + 1) // 2  # expect: BP102|BP105|BP106 row 46,341
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + start + offs, tl.zeros([BLOCK], tl.float32))


@triton.jit
def triangular_fixed(out_ptr, rows_ptr, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid).to(tl.int64)
    start = row * (row + 1) // 2
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + start + offs, tl.zeros([BLOCK], tl.float32))


@triton.jit
def mask_by_product(out_ptr, in_ptr, lens_ptr, width, BLOCK: tl.constexpr):
    # The lane is compared with a loaded length times a width.
    pid = tl.program_id(0)
    length = tl.load(lens_ptr + pid)
    offs = tl.arange(0, BLOCK)
    mask = offs < length * width  # expect: BP109 length 262,144
    tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=mask), mask=mask)


@triton.jit
def mask_by_product_fixed(out_ptr, in_ptr, lens_ptr, width, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    length = tl.load(lens_ptr + pid).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < length * width
    tl.store(out_ptr + offs, tl.load(in_ptr + offs, mask=mask), mask=mask)


@triton.jit
def while_bound(out_ptr, in_ptr, pages, page_bytes, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    done = 0
    end = pages * page_bytes  # expect: BP109 pages 16,384
    src_ptr = in_ptr
    while done < end:
        tl.store(out_ptr + offs, tl.load(src_ptr + offs))
        src_ptr += BLOCK
        done += 1


@triton.jit
def while_bound_fixed(out_ptr, in_ptr, pages, page_bytes, BLOCK: tl.constexpr):  # expect: clean
    offs = tl.arange(0, BLOCK)
    done = pages.to(tl.int64) * 0
    end = pages.to(tl.int64) * page_bytes
    src_ptr = in_ptr
    while done < end:
        tl.store(out_ptr + offs, tl.load(src_ptr + offs))
        src_ptr += BLOCK
        done += 1


META = {
    "wrapped_mask": {
        "klass": "I",
        "report": "FBGEMM #3519",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows": "i32", "columns": 4096, "BLOCK": 1024},
        "grid": [2147483647],
        "walls": [["rows", "rows * 4096", {}]],
        "safe": ["1023"],
    },
    "wrapped_loop_bound": {
        "klass": "I",
        "report": "a loop over rows x columns",
        "args": {"out_ptr": "*fp32", "in_ptr": "*bf16", "rows": "i32", "columns": 4096, "BLOCK": 1024},
        "grid": [1],
        "walls": [["rows", "rows * 4096", {}]],
        "safe": ["1023"],
    },
    "triangular": {
        "klass": "I",
        "report": "a packed lower triangle",
        "args": {"out_ptr": "*fp32", "rows_ptr": "*i32", "BLOCK": 64},
        "grid": [65536],
        "walls": [["row", "row * (row + 1)", {}]],
        "safe": ["65535"],
    },
    "mask_by_product": {
        "klass": "I",
        "report": "a mask from a loaded length",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "lens_ptr": "*i32", "width": 8192, "BLOCK": 1024},
        "grid": [65536],
        "walls": [["length", "length * 8192", {}]],
        "safe": ["1023"],
    },
    "while_bound": {
        "klass": "I",
        "report": "a while loop",
        "args": {"out_ptr": "*i8", "in_ptr": "*i8", "pages": "i32", "page_bytes": 131072, "BLOCK": 1024},
        "grid": [1],
        "walls": [["pages", "pages * 131072", {}]],
        "safe": ["1023"],
    },
}
