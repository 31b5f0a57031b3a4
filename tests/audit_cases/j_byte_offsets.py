"""Class J: 32-bit BYTE offsets, on caches that are addressed by the byte and on AMD's buffer loads."""

import triton
import triton.language as tl


@triton.jit
def byte_cache(pool_ptr, out_ptr, table_ptr, stride_page_bytes, N: tl.constexpr):
    # A cache of bytes: the wall of the elements is the wall of the bytes.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    row_ptr = (pool_ptr + page * stride_page_bytes).to(tl.pointer_type(tl.float16))  # expect: BP101|BP110 page 1,192
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(row_ptr + offs_n))


@triton.jit
def byte_cache_fixed(pool_ptr, out_ptr, table_ptr, stride_page_bytes, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    row_ptr = (pool_ptr + page * stride_page_bytes).to(tl.pointer_type(tl.float16))
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(row_ptr + offs_n))


@triton.jit
def bytes_in_kernel(pool_ptr, out_ptr, slots_ptr, row_bytes, N: tl.constexpr):
    # fp8 rows with their scale behind them: the byte offset is formed in the kernel.
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid)
    offs_n = tl.arange(0, N)
    byte = slot * row_bytes + 512 + offs_n  # expect: BP101|BP102|BP110 slot 4,067,203
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + byte))


@triton.jit
def bytes_in_kernel_fixed(pool_ptr, out_ptr, slots_ptr, row_bytes, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid).to(tl.int64)
    offs_n = tl.arange(0, N)
    byte = slot * row_bytes + 512 + offs_n
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + byte))


@triton.jit
def buffer_bytes(x_ptr, out_ptr, stride_row, N: tl.constexpr):
    # The element offset fits on every backend; in 4-byte elements the byte offset of a buffer load does not.
    row = tl.program_id(0)
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + (row * stride_row + offs_n))  # expect: BP110 row 131,072 byte
    tl.store(out_ptr + offs_n, x)


@triton.jit
def buffer_bytes_fixed(x_ptr, out_ptr, stride_row, N: tl.constexpr):  # expect: clean
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, N)
    x = tl.load(x_ptr + row * stride_row + offs_n)
    tl.store(out_ptr + offs_n, x)


META = {
    "byte_cache": {
        "klass": "J",
        "report": "a cache strided in bytes",
        "args": {"pool_ptr": "*u8", "out_ptr": "*fp16", "table_ptr": "*i32", "stride_page_bytes": 1802240, "N": 128},
        "grid": [4096],
        "walls": [["page", "page * 1802240", {}]],
        "safe": ["4095 * 128 + 127"],
    },
    "bytes_in_kernel": {
        "klass": "J",
        "report": "inline scales behind a row",
        "args": {"pool_ptr": "*u8", "out_ptr": "*u8", "slots_ptr": "*i32", "row_bytes": 528, "N": 16},
        "grid": [4096],
        "walls": [["slot", "slot * 528 + 512 + offs_n", {"offs_n": 15}]],
        "safe": ["4095 * 16 + 15"],
    },
    "buffer_bytes": {
        "source": False,
        "klass": "J",
        "report": "aiter and AMD buffer loads",
        "backend": "hip",
        "args": {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride_row": 4096, "N": 64},
        "grid": [262144],
        "walls": [["row", "(row * 4096 + offs_n) * 4", {"offs_n": 0}]],
        "debug_asserts": False,
        "safe": ["262143 * 4096 + 63"],
    },
}
