"""Non-fault 1: 32-bit offsets into a block pointer or a descriptor are multiplied in 64 bits. The base before them is not.

`tl.make_block_ptr` is gone from Triton 3.9; META says which kernels need an older one.
"""

import triton
import triton.language as tl


@triton.jit
def block_pointer(in_ptr, out_ptr, rows, stride_row, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    src = tl.make_block_ptr(in_ptr, (rows, N), (stride_row, 1), (pid * M, 0), (M, N), (1, 0))
    x = tl.load(src, boundary_check=(0,))
    src = tl.advance(src, (M, 0))
    y = tl.load(src, boundary_check=(0,))
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, x + y)


@triton.jit
def block_pointer_base(in_ptr, out_ptr, batch_stride, rows, stride_row, M: tl.constexpr, N: tl.constexpr):
    # The base is plain pointer arithmetic.
    batch = tl.program_id(1)
    src = tl.make_block_ptr(
        in_ptr + batch * batch_stride,  # expect: BP103 batch 16
        (rows, N),
        (stride_row, 1),
        (tl.program_id(0) * M, 0),
        (M, N),
        (1, 0),
    )
    x = tl.load(src, boundary_check=(0,))
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, x)


@triton.jit
def block_pointer_base_fixed(in_ptr, out_ptr, batch_stride, rows, stride_row, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    batch = tl.program_id(1).to(tl.int64)
    src = tl.make_block_ptr(
        in_ptr + batch * batch_stride,
        (rows, N),
        (stride_row, 1),
        (tl.program_id(0) * M, 0),
        (M, N),
        (1, 0),
    )
    x = tl.load(src, boundary_check=(0,))
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, x)


@triton.jit
def descriptor_rows(in_ptr, out_ptr, rows, stride_row, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    desc = tl.make_tensor_descriptor(in_ptr, shape=[rows, N], strides=[stride_row, 1], block_shape=[M, N])
    x = desc.load([pid * M, 0])
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, x)


@triton.jit
def descriptor_flat(in_ptr, out_ptr, heads, M: tl.constexpr, N: tl.constexpr):
    # The coordinate itself is an int32: a flattened row index can leave it.
    pid = tl.program_id(0)
    desc = tl.make_tensor_descriptor(in_ptr, shape=[2147483647, N], strides=[N, 1], block_shape=[M, N])
    row = pid * heads * M  # expect: BP103|BP105|BP106 pid 262,144
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, desc.load([row, 0]))


@triton.jit
def descriptor_flat_fixed(in_ptr, out_ptr, heads, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    # Coordinates are int32 by definition: the fix moves the base.
    pid = tl.program_id(0).to(tl.int64)
    desc = tl.make_tensor_descriptor(in_ptr + pid * heads * M * N, shape=[heads * M, N], strides=[N, 1], block_shape=[M, N])
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, desc.load([0, 0]))


@triton.jit
def host_descriptor(desc, out_ptr, M: tl.constexpr, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    x = desc.load([pid * M, 0])
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + offs, x)


META = {
    "block_pointer": {
        "klass": "1",
        "report": "xformers #1464",
        "triton": "<3.9",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "rows": 16777216, "stride_row": 8192, "M": 64, "N": 64},
        "grid": [262144],
        "safe": ["262143 * 64 + 64"],
    },
    "block_pointer_base": {
        "klass": "1",
        "report": "the base before a block pointer",
        "triton": "<3.9",
        "args": {
            "in_ptr": "*bf16",
            "out_ptr": "*bf16",
            "batch_stride": 134217728,
            "rows": 16384,
            "stride_row": 8192,
            "M": 64,
            "N": 64,
        },
        "grid": [256, 64],
        "walls": [["batch", "batch * 134217728", {}]],
        "safe": ["255 * 64"],
    },
    "descriptor_rows": {
        "klass": "1",
        "report": "rows of a descriptor",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "rows": 16777216, "stride_row": 8192, "M": 64, "N": 64},
        "grid": [262144],
        "safe": ["262143 * 64"],
    },
    "descriptor_flat": {
        "klass": "1",
        "report": "a flattened coordinate",
        "args": {"in_ptr": "*bf16", "out_ptr": "*bf16", "heads": 128, "M": 64, "N": 64},
        "grid": [2147483647],
        "walls": [["pid", "pid * 128 * 64", {}]],
        "safe": ["128 * 64"],
    },
    "host_descriptor": {
        "klass": "1",
        "report": "a descriptor made by the host",
        "args": {"desc": "tensordesc<bf16[64, 64]>", "out_ptr": "*bf16", "M": 64, "N": 64},
        "grid": [262144],
        "safe": ["262143 * 64"],
    },
}
