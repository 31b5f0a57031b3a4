"""Class H: the index is harmless, the stride is the surprise."""

import triton
import triton.language as tl


@triton.jit
def fused_projection(q_ptr, out_ptr, stride_token, N: tl.constexpr):
    # q is a view of one buffer that holds q, k, v and a gate.
    token = tl.program_id(0)
    offs_n = tl.arange(0, N)
    q = tl.load(q_ptr + token * stride_token + offs_n)  # expect: BP103 token 99,865; @gated: BP103 token 61,231
    tl.store(out_ptr + token.to(tl.int64) * N + offs_n, q)


@triton.jit
def fused_projection_fixed(q_ptr, out_ptr, stride_token, N: tl.constexpr):  # expect: clean
    token = tl.program_id(0).to(tl.int64)
    offs_n = tl.arange(0, N)
    q = tl.load(q_ptr + token * stride_token + offs_n)
    tl.store(out_ptr + token * N + offs_n, q)


@triton.jit
def batch_stride(x_ptr, out_ptr, stride_batch, N: tl.constexpr):
    # The third sequence of the batch is out of reach.
    batch = tl.program_id(1)
    pid = tl.program_id(0)
    offs_n = pid * N + tl.arange(0, N)
    tl.store(out_ptr + offs_n, tl.load(x_ptr + batch * stride_batch + offs_n))  # expect: BP103 batch 2


@triton.jit
def batch_stride_fixed(x_ptr, out_ptr, stride_batch, N: tl.constexpr):  # expect: clean
    batch = tl.program_id(1).to(tl.int64)
    pid = tl.program_id(0)
    offs_n = pid * N + tl.arange(0, N)
    tl.store(out_ptr + offs_n, tl.load(x_ptr + batch * stride_batch + offs_n))


@triton.jit
def constexpr_stride(pool_ptr, out_ptr, table_ptr, STRIDE: tl.constexpr, N: tl.constexpr):
    # A constexpr below 2^31 is int32 beside an int32, whatever the host holds.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + page * STRIDE + offs_n))  # expect: BP101 page 2,384


@triton.jit
def constexpr_stride_fixed(pool_ptr, out_ptr, table_ptr, STRIDE: tl.constexpr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + page * STRIDE + offs_n))


@triton.jit
def annotated_stride(pool_ptr, out_ptr, table_ptr, stride_page: tl.int32, N: tl.constexpr):
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + page * stride_page + offs_n))  # expect: BP101 page 2,384


@triton.jit
def annotated_stride_fixed(pool_ptr, out_ptr, table_ptr, stride_page: tl.int64, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + page * stride_page + offs_n))


@triton.jit
def quoted_annotation(pool_ptr, out_ptr, table_ptr, stride_page: "i64", N: tl.constexpr):  # noqa: F821 # expect: clean
    # The spelling that survives postponed annotations.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + page * stride_page + offs_n))


@triton.jit
def column_major(x_ptr, out_ptr, stride_col, n_cols, M: tl.constexpr):
    # A transposed view: the loop over columns carries the long stride.
    pid = tl.program_id(0)
    row = pid * M + tl.arange(0, M)
    acc = tl.zeros([M], tl.float32)
    for col in range(n_cols):
        acc += tl.load(x_ptr + row + col * stride_col)  # expect: BP102|BP103|BP105|BP106 col 2,048
    tl.store(out_ptr + row, acc)


@triton.jit
def column_major_fixed(x_ptr, out_ptr, stride_col, n_cols, M: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    row = pid * M + tl.arange(0, M)
    acc = tl.zeros([M], tl.float32)
    for col in range(n_cols):
        acc += tl.load(x_ptr + row + col.to(tl.int64) * stride_col)
    tl.store(out_ptr + row, acc)


@triton.jit
def wide_by_value(x_ptr, out_ptr, stride_batch, N: tl.constexpr):  # expect: clean
    # This call's stride exceeds 2^31 by itself: Python passes it as int64 and the product is wide.
    batch = tl.program_id(1)
    pid = tl.program_id(0)
    offs_n = pid * N + tl.arange(0, N)
    tl.store(out_ptr + offs_n, tl.load(x_ptr + batch * stride_batch + offs_n))


META = {
    "fused_projection": {
        "klass": "H",
        "report": "a view of a fused projection of 21,504",
        "args": {"q_ptr": "*bf16", "out_ptr": "*bf16", "stride_token": 21504, "N": 128},
        "grid": [2147483647],
        "walls": [["token", "token * 21504", {}]],
        "safe": ["127"],
    },
    "fused_projection@gated": {
        "klass": "H",
        "report": "a view of a fused projection of 35,072",
        "args": {"q_ptr": "*bf16", "out_ptr": "*bf16", "stride_token": 35072, "N": 128},
        "grid": [2147483647],
        "walls": [["token", "token * 35072", {}]],
        "safe": ["127"],
    },
    "batch_stride": {
        "klass": "H",
        "report": "a batch stride beyond 10^9",
        "args": {"x_ptr": "*bf16", "out_ptr": "*bf16", "stride_batch": 1073741824, "N": 128},
        "grid": [65536, 8],
        "walls": [["batch", "batch * 1073741824", {}]],
        "safe": ["65535 * 128 + 127"],
    },
    "constexpr_stride": {
        "klass": "H",
        "report": "a constexpr stride",
        "args": {"pool_ptr": "*bf16", "out_ptr": "*bf16", "table_ptr": "*i32", "STRIDE": 901120, "N": 128},
        "grid": [4096],
        "walls": [["page", "page * 901120", {}]],
        "safe": ["4095 * 128 + 127"],
    },
    "annotated_stride": {
        "klass": "H",
        "report": "a stride annotated int32",
        "args": {"pool_ptr": "*bf16", "out_ptr": "*bf16", "table_ptr": "*i32", "stride_page": 901120, "N": 128},
        "grid": [4096],
        "walls": [["page", "page * 901120", {}]],
        "safe": ["4095 * 128 + 127"],
    },
    "quoted_annotation": {
        "klass": "H",
        "report": "a stride annotated int64 by a string",
        "args": {"pool_ptr": "*bf16", "out_ptr": "*bf16", "table_ptr": "*i32", "stride_page": 901120, "N": 128},
        "grid": [4096],
        "safe": ["4095 * 128 + 127"],
    },
    "column_major": {
        "klass": "H",
        "report": "a transposed view",
        "args": {"x_ptr": "*fp32", "out_ptr": "*fp32", "stride_col": 1048576, "n_cols": 4096, "M": 128},
        "grid": [8192],
        "walls": [["col", "col * 1048576", {}]],
        "safe": ["8191 * 128 + 127"],
    },
    "wide_by_value": {
        "klass": "H",
        "report": "a stride that is int64 by its value",
        "args": {"x_ptr": "*bf16", "out_ptr": "*bf16", "stride_batch": 4294967296, "N": 128},
        "grid": [65536, 8],
        "safe": ["65535 * 128 + 127"],
    },
}
