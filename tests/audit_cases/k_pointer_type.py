"""Classes K and L: the same text, right or wrong by the type of a pointer; text that is generated when it runs."""

import triton
import triton.language as tl


@triton.jit
def gather_typed(out_ptr, in_ptr, ids_ptr, stride_row, N: tl.constexpr):
    # Variant `wide` passes int64 ids.
    pid = tl.program_id(0)
    token = tl.load(ids_ptr + pid)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + token * stride_row + offs_n)  # expect: BP102|BP112 token 524,288
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def gather_wide(out_ptr, in_ptr, ids_ptr, stride_row, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    token = tl.load(ids_ptr + pid)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + token * stride_row + offs_n)
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def gather_typed_fixed(out_ptr, in_ptr, ids_ptr, stride_row, N: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    token = tl.load(ids_ptr + pid).to(tl.int64)
    offs_n = tl.arange(0, N)
    x = tl.load(in_ptr + token * stride_row + offs_n)
    tl.store(out_ptr + pid * N + offs_n, x)


@triton.jit
def poi_copy_generated(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    # The shape that a compiler of graphs writes: a flat index taken apart by // and %.
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x0 = xindex % 4096
    x1 = xindex // 4096
    tmp0 = tl.load(in_ptr0 + (x0 + (21504 * x1)), xmask)  # expect: BP103|BP105|BP106 *
    tl.store(out_ptr0 + (xindex), tmp0, xmask)


@triton.jit
def poi_copy_generated_fixed(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):  # expect: clean
    xoffset = tl.program_id(0).to(tl.int64) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:].to(tl.int64)
    xmask = xindex < xnumel
    x0 = xindex % 4096
    x1 = xindex // 4096
    tmp0 = tl.load(in_ptr0 + (x0 + (21504 * x1)), xmask)
    tl.store(out_ptr0 + (xindex), tmp0, xmask)


META = {
    "gather_typed": {
        "klass": "K",
        "report": "int32 ids where int64 was meant",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "ids_ptr": "*i32", "stride_row": 4096, "N": 128},
        "grid": [65536],
        "walls": [["token", "token * 4096", {}]],
        "safe": ["65535 * 128 + 127"],
    },
    "gather_wide": {
        "source": False,
        "klass": "K",
        "report": "the text of gather_typed with int64 ids",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "ids_ptr": "*i64", "stride_row": 4096, "N": 128},
        "grid": [65536],
        "safe": ["65535 * 128 + 127"],
    },
    "poi_copy_generated": {
        "klass": "L",
        "report": "generated code over a strided view",
        "args": {"in_ptr0": "*bf16", "out_ptr0": "*bf16", "xnumel": 1073741824, "XBLOCK": 1024},
        "grid": [1048576],
        "walls": [["x1", "21504 * x1 + x0", {"x0": 4095}, 99865]],
        "safe": ["1048575 * 1024 + 1023"],
    },
}
