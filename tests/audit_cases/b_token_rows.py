"""Class B: a token or row id loaded from an index tensor, times a row stride."""

import triton
import triton.language as tl


@triton.jit
def permute_rows(out_ptr, in_ptr, src2dst_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    # Row 299,593 of 7,168 values fits, the column that is added to it does not.
    pid = tl.program_id(0)
    dst = tl.load(src2dst_ptr + pid)
    for start in range(0, HIDDEN, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < HIDDEN
        x = tl.load(in_ptr + pid * HIDDEN + cols, mask=mask)
        offs = dst * HIDDEN + cols  # expect: BP102 dst 299,593
        tl.store(out_ptr + offs, x, mask=mask)


@triton.jit
def permute_rows_fixed(out_ptr, in_ptr, src2dst_ptr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    dst = tl.load(src2dst_ptr + pid).to(tl.int64)
    for start in range(0, HIDDEN, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < HIDDEN
        x = tl.load(in_ptr + pid * HIDDEN + cols, mask=mask)
        offs = dst * HIDDEN + cols
        tl.store(out_ptr + offs, x, mask=mask)


@triton.jit
def packed_queries(q_ptr, o_ptr, cu_ptr, stride_row, M: tl.constexpr, D: tl.constexpr):
    # Both the load of q and the store of o.
    req = tl.program_id(0)
    start = tl.load(cu_ptr + req)
    row = start + tl.arange(0, M)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + row[:, None] * stride_row + offs_d[None, :])  # expect: BP102 start 262,129
    tl.store(o_ptr + row[:, None] * stride_row + offs_d[None, :], q)  # expect: BP102 start 262,129


@triton.jit
def packed_queries_partly_fixed(q_ptr, o_ptr, cu_ptr, stride_row, M: tl.constexpr, D: tl.constexpr):
    req = tl.program_id(0)
    start = tl.load(cu_ptr + req)
    row = start + tl.arange(0, M)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + row[:, None].to(tl.int64) * stride_row + offs_d[None, :])
    tl.store(o_ptr + row[:, None] * stride_row + offs_d[None, :], q)  # expect: BP102 start 262,129


@triton.jit
def packed_queries_fixed(q_ptr, o_ptr, cu_ptr, stride_row, M: tl.constexpr, D: tl.constexpr):  # expect: clean
    req = tl.program_id(0)
    start = tl.load(cu_ptr + req).to(tl.int64)
    row = start + tl.arange(0, M)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + row[:, None] * stride_row + offs_d[None, :])
    tl.store(o_ptr + row[:, None] * stride_row + offs_d[None, :], q)


@triton.jit
def query_row(q_ptr, o_ptr, rows_ptr, stride_row, D: tl.constexpr):
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + row * stride_row + offs_d)  # expect: BP102 row 262,144; @wide: BP102 row 131,072
    tl.store(o_ptr + row * stride_row + offs_d, q)  # expect: BP102 row 262,144; @wide: BP102 row 131,072


@triton.jit
def query_row_fixed(q_ptr, o_ptr, rows_ptr, stride_row, D: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid).to(tl.int64)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + row * stride_row + offs_d)
    tl.store(o_ptr + row * stride_row + offs_d, q)


@triton.jit
def token_of_page(
    out_ptr, kv_ptr, table_ptr, seq_len, PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    # Page ids become token ids, K and V of all heads lie in a row: page x page size x 2 x heads x dim.
    pid = tl.program_id(0)
    pos = pid * BLOCK + tl.arange(0, BLOCK)
    mask = pos < seq_len
    page = tl.load(table_ptr + pos // PAGE, mask=mask, other=0)
    token = page * PAGE + pos % PAGE
    offs = token * (2 * HEADS * D)  # expect: BP101|BP102 page 65,536
    x = tl.load(kv_ptr + offs, mask=mask)
    tl.store(out_ptr + pos, x, mask=mask)


@triton.jit
def token_of_page_fixed(
    out_ptr, kv_ptr, table_ptr, seq_len, PAGE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # expect: clean
    pid = tl.program_id(0)
    pos = pid * BLOCK + tl.arange(0, BLOCK)
    mask = pos < seq_len
    page = tl.load(table_ptr + pos // PAGE, mask=mask, other=0).to(tl.int64)
    token = page * PAGE + pos % PAGE
    offs = token * (2 * HEADS * D)
    x = tl.load(kv_ptr + offs, mask=mask)
    tl.store(out_ptr + pos, x, mask=mask)


@triton.jit
def sorted_tokens(a_ptr, c_ptr, sorted_ptr, stride_am, stride_cm, TOP_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    # The row of the input is the pair divided by top_k; the row of the output is the pair itself and wraps first.
    pid = tl.program_id(0)
    pair = tl.load(sorted_ptr + pid * M + tl.arange(0, M))
    offs_n = tl.arange(0, N)
    a = tl.load(a_ptr + (pair[:, None] // TOP_K) * stride_am + offs_n[None, :])  # expect: BP102 pair 2,097,152
    tl.store(c_ptr + pair[:, None] * stride_cm + offs_n[None, :], a)  # expect: BP102 pair 524,288


@triton.jit
def sorted_tokens_fixed(
    a_ptr, c_ptr, sorted_ptr, stride_am, stride_cm, TOP_K: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):  # expect: clean
    pid = tl.program_id(0)
    pair = tl.load(sorted_ptr + pid * M + tl.arange(0, M)).to(tl.int64)
    offs_n = tl.arange(0, N)
    a = tl.load(a_ptr + (pair[:, None] // TOP_K) * stride_am + offs_n[None, :])
    tl.store(c_ptr + pair[:, None] * stride_cm + offs_n[None, :], a)


@triton.jit
def embedding(out_ptr, table_ptr, ids_ptr, D: tl.constexpr):
    # int64 token ids from the host: the pointer type has already widened the index.
    pid = tl.program_id(0)
    token = tl.load(ids_ptr + pid)
    offs_d = tl.arange(0, D)
    x = tl.load(table_ptr + token * D + offs_d)  # expect: BP102 token 524,288
    tl.store(out_ptr + pid * D + offs_d, x)


@triton.jit
def embedding_fixed(out_ptr, table_ptr, ids_ptr, D: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    token = tl.load(ids_ptr + pid)
    offs_d = tl.arange(0, D)
    x = tl.load(table_ptr + token * D + offs_d)
    tl.store(out_ptr + pid * D + offs_d, x)


@triton.jit
def row_atomics(grad_ptr, rows_ptr, value_ptr, stride_row, D: tl.constexpr):
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid)
    offs_d = tl.arange(0, D)
    value = tl.load(value_ptr + pid * D + offs_d)
    tl.atomic_add(grad_ptr + row * stride_row + offs_d, value)  # expect: BP102 row 524,288


@triton.jit
def row_atomics_fixed(grad_ptr, rows_ptr, value_ptr, stride_row, D: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    row = tl.load(rows_ptr + pid).to(tl.int64)
    offs_d = tl.arange(0, D)
    value = tl.load(value_ptr + pid * D + offs_d)
    tl.atomic_add(grad_ptr + row * stride_row + offs_d, value)


META = {
    "permute_rows": {
        "klass": "B",
        "report": "src2dst of an expert dispatch",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "src2dst_ptr": "*i32", "HIDDEN": 7168, "BLOCK": 1024},
        "grid": [131072],
        "walls": [["dst", "dst * 7168 + cols", {"cols": 7167}]],
        "safe": ["131071 * 7168", "7168 + 1024"],
    },
    "packed_queries": {
        "klass": "B",
        "report": "sglang #20389 with a tile of 16 rows",
        "args": {"q_ptr": "*bf16", "o_ptr": "*bf16", "cu_ptr": "*i32", "stride_row": 8192, "M": 16, "D": 128},
        "grid": [256],
        "walls": [["start", "(start + 15) * 8192", {}], ["start", "(start + 15) * 8192", {}]],
        "safe": ["255"],
    },
    "packed_queries_partly_fixed": {
        "klass": "B",
        "report": "sglang #20389, the store left as it was",
        "args": {"q_ptr": "*bf16", "o_ptr": "*bf16", "cu_ptr": "*i32", "stride_row": 8192, "M": 16, "D": 128},
        "grid": [256],
        "walls": [["start", "(start + 15) * 8192", {}]],
    },
    "query_row": {
        "klass": "B",
        "report": "sglang #20389",
        "args": {"q_ptr": "*bf16", "o_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 8192, "D": 128},
        "grid": [4096],
        "walls": [["row", "row * 8192", {}], ["row", "row * 8192", {}]],
        "safe": ["4095"],
    },
    "query_row@wide": {
        "klass": "B",
        "report": "sglang #20389",
        "args": {"q_ptr": "*bf16", "o_ptr": "*bf16", "rows_ptr": "*i32", "stride_row": 16384, "D": 128},
        "grid": [4096],
        "walls": [["row", "row * 16384", {}], ["row", "row * 16384", {}]],
        "safe": ["4095"],
    },
    "token_of_page": {
        "klass": "B",
        "report": "vllm #50427",
        "args": {
            "out_ptr": "*bf16",
            "kv_ptr": "*bf16",
            "table_ptr": "*i32",
            "seq_len": 131072,
            "PAGE": 16,
            "HEADS": 8,
            "D": 128,
            "BLOCK": 64,
        },
        "grid": [2048],
        "walls": [["page", "(page * 16 + rest) * 2048", {"rest": 0}]],
        "safe": ["2047 * 64 + 63"],
    },
    "sorted_tokens": {
        "klass": "B",
        "report": "pairs of token and expert",
        "args": {
            "a_ptr": "*bf16",
            "c_ptr": "*bf16",
            "sorted_ptr": "*i32",
            "stride_am": 4096,
            "stride_cm": 4096,
            "TOP_K": 4,
            "M": 16,
            "N": 64,
        },
        "grid": [65536],
        "walls": [["pair", "pair // 4 * 4096", {}], ["pair", "pair * 4096", {}]],
        "safe": ["65535 * 16 + 15"],
    },
    "embedding": {
        "klass": "B",
        "report": "token ids of a large vocabulary",
        "args": {"out_ptr": "*bf16", "table_ptr": "*bf16", "ids_ptr": "*i32", "D": 4096},
        "grid": [8192],
        "walls": [["token", "token * 4096", {}]],
    },
    "embedding_fixed": {
        "source": False,
        "klass": "K",
        "report": "the fix is in the caller: int64 ids",
        "args": {"out_ptr": "*bf16", "table_ptr": "*bf16", "ids_ptr": "*i64", "D": 4096},
        "grid": [8192],
        "safe": ["8191 * 4096 + 4095"],
    },
    "row_atomics": {
        "klass": "B",
        "report": "gradient rows by atomic add",
        "args": {"grad_ptr": "*fp32", "rows_ptr": "*i32", "value_ptr": "*fp32", "stride_row": 4096, "D": 128},
        "grid": [8192],
        "walls": [["row", "row * 4096", {}]],
        "safe": ["8191 * 128 + 127"],
    },
}
