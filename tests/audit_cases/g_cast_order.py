"""Class G: the cast comes too late, or narrows what was wide."""

import triton
import triton.language as tl


@triton.jit
def cast_after_product(out_ptr, in_ptr, stride_row, N: tl.constexpr):
    row = tl.program_id(0)
    offs = (row * stride_row).to(tl.int64)  # expect: BP107 row 524,288
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + offs_n, tl.load(in_ptr + offs + offs_n))


@triton.jit
def cast_after_product_fixed(out_ptr, in_ptr, stride_row, N: tl.constexpr):  # expect: clean
    row = tl.program_id(0)
    offs = row.to(tl.int64) * stride_row
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + offs_n, tl.load(in_ptr + offs + offs_n))


@triton.jit
def cast_function_after_product(out_ptr, in_ptr, ids_ptr, stride_row, N: tl.constexpr):
    pid = tl.program_id(0)
    token = tl.load(ids_ptr + pid)
    offs_n = tl.arange(0, N)
    base = tl.cast(token * stride_row, tl.int64) + offs_n  # expect: BP107 token 524,288
    tl.store(out_ptr + pid * N + offs_n, tl.load(in_ptr + base))


@triton.jit
def cast_function_after_product_fixed(out_ptr, in_ptr, ids_ptr, stride_row, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    token = tl.load(ids_ptr + pid)
    offs_n = tl.arange(0, N)
    base = tl.cast(token, tl.int64) * stride_row + offs_n
    tl.store(out_ptr + pid * N + offs_n, tl.load(in_ptr + base))


@triton.jit
def cast_of_the_wrong_term(out_ptr, pool_ptr, table_ptr, stride_page, N: tl.constexpr):
    # Only the small term is wide when the large product is formed.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs_n = tl.arange(0, N).to(tl.int64)
    x = tl.load(pool_ptr + (page * stride_page + offs_n))  # expect: BP101|BP107 page 2,384
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def cast_of_the_wrong_term_fixed(out_ptr, pool_ptr, table_ptr, stride_page, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    offs_n = tl.arange(0, N)
    x = tl.load(pool_ptr + (page * stride_page + offs_n))
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def cast_one_step_late(out_ptr, in_ptr, rows, stride_row, H: tl.constexpr, N: tl.constexpr):
    # The first product of the chain is still narrow.
    pid = tl.program_id(0)
    line = pid * rows * H  # expect: BP103|BP105|BP107 pid 2,048
    offs = line.to(tl.int64) * stride_row
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + offs_n, tl.load(in_ptr + offs + offs_n))


@triton.jit
def cast_one_step_late_fixed(out_ptr, in_ptr, rows, stride_row, H: tl.constexpr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0).to(tl.int64)
    line = pid * rows * H
    offs = line * stride_row
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + offs_n, tl.load(in_ptr + offs + offs_n))


@triton.jit
def narrowed_load(out_ptr, pool_ptr, slots_ptr, N: tl.constexpr):
    # The slot map is int64, the kernel throws that away.
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid).to(tl.int32)
    offs_n = tl.arange(0, N)
    x = tl.load(pool_ptr + slot * 1152 + offs_n)  # expect: BP101|BP102|BP108 slot 1,864,136
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def narrowed_load_fixed(out_ptr, pool_ptr, slots_ptr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid)
    offs_n = tl.arange(0, N)
    x = tl.load(pool_ptr + slot * 1152 + offs_n)
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def narrowed_offset(out_ptr, pool_ptr, slots_ptr, stride_slot, N: tl.constexpr):
    # Multiplied in 64 bits and then cut down.
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid)
    offs = (slot * stride_slot).to(tl.int32)  # expect: BP108 slot 2,097,152
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + offs + offs_n))


@triton.jit
def narrowed_offset_fixed(out_ptr, pool_ptr, slots_ptr, stride_slot, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid)
    offs = slot * stride_slot
    offs_n = tl.arange(0, N)
    tl.store(out_ptr + pid * N + offs_n, tl.load(pool_ptr + offs + offs_n))


@triton.jit
def shifted_page(out_ptr, pool_ptr, table_ptr, N: tl.constexpr):
    # A shift is a product.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs_n = tl.arange(0, N)
    x = tl.load(pool_ptr + (page << 17) + offs_n)  # expect: BP101 page 16,384
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def shifted_page_fixed(out_ptr, pool_ptr, table_ptr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    offs_n = tl.arange(0, N)
    x = tl.load(pool_ptr + (page << 17) + offs_n)
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def ored_lane(out_ptr, pool_ptr, table_ptr, N: tl.constexpr):
    # The lane is joined by `|`, which cannot carry.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    lane = tl.arange(0, N)
    offs = (page * 262144) | lane  # expect: BP101 page 8,192
    tl.store(out_ptr + pid * N + lane, tl.load(pool_ptr + offs))


@triton.jit
def ored_lane_fixed(out_ptr, pool_ptr, table_ptr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    lane = tl.arange(0, N)
    offs = (page * 262144) | lane
    tl.store(out_ptr + pid * N + lane, tl.load(pool_ptr + offs))


META = {
    "cast_after_product": {
        "klass": "G",
        "report": "torchao #4201",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "stride_row": 4096, "N": 64},
        "grid": [2147483647],
        "walls": [["row", "row * 4096", {}]],
        "safe": ["63"],
    },
    "cast_function_after_product": {
        "klass": "G",
        "report": "sglang #39948",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "ids_ptr": "*i32", "stride_row": 4096, "N": 64},
        "grid": [65536],
        "walls": [["token", "token * 4096", {}]],
        "safe": ["65535 * 64 + 63"],
    },
    "cast_of_the_wrong_term": {
        "klass": "G",
        "report": "the small term is cast",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "stride_page": 901120, "N": 64},
        "grid": [65536],
        "walls": [["page", "page * 901120", {}]],
        "safe": ["65535 * 64 + 63"],
    },
    "cast_one_step_late": {
        "klass": "G",
        "report": "the cast stands between two products",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "rows": 65536, "stride_row": 16, "H": 16, "N": 64},
        "grid": [2147483647],
        "walls": [["pid", "pid * 65536 * 16", {}]],
        "safe": ["63"],
    },
    "narrowed_load": {
        "source": False,
        "klass": "G",
        "report": "x.to(tl.int32) of an int64 load",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "slots_ptr": "*i64", "N": 64},
        "grid": [65536],
        "ranges": {"slot": [0, 2147483647]},
        "walls": [["slot", "slot * 1152", {}]],
        "safe": ["65535 * 64 + 63"],
    },
    "narrowed_offset": {
        "source": False,
        "klass": "G",
        "report": "a wide offset cut to int32",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "slots_ptr": "*i64", "stride_slot": 1024, "N": 64},
        "grid": [65536],
        "ranges": {"slot": [0, 2147483647]},
        "walls": [["slot", "slot * 1024", {}]],
        "debug_asserts": False,
        "safe": ["65535 * 64 + 63"],
    },
    "shifted_page": {
        "klass": "G",
        "report": "a shift instead of a product",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "N": 64},
        "grid": [65536],
        "walls": [["page", "page << 17", {}]],
        "debug_asserts": False,
        "safe": ["65535 * 64 + 63"],
    },
    "ored_lane": {
        "klass": "G",
        "report": "a lane joined by |",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "N": 64},
        "grid": [65536],
        "walls": [["page", "page * 262144", {}]],
        "safe": ["65535 * 64 + 63"],
    },
}
