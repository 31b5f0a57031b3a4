"""Compiles the Hopper kernels of prefill attention without a GPU: `python tests/prefill_sm90_compile.py`, JSON last."""

import json
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from bigpool.kernels.prefill_fp8_sm90 import prefill_fp8_sm90_kernel
from bigpool.kernels.prefill_sm90 import prefill_sm90_kernel
from bigpool.ops._prefill_sm90 import prefill_shape_sm90

# (head dim, page size, int8, window, softcap, fp8)
CASES = [
    (256, 880, False, 0, 0.0),
    (256, 880, True, 0, 0.0),
    (256, 16, False, 0, 0.0),
    (128, 880, False, 0, 0.0),
    (128, 880, True, 0, 0.0),
    (128, 64, False, 4_096, 30.0),
    (64, 16, False, 0, 0.0),
    (256, 880, True, 0, 0.0, True),
    (256, 16, True, 0, 0.0, True),
    (128, 880, True, 0, 0.0, True),
]
ALIGNED = ("stride_q_token", "stride_q_head", "stride_out_token", "stride_out_head")
TYPES = {
    "q_ptr": "*bf16",
    "out_ptr": "*bf16",
    "lse_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "k_mean_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "scale_log2": "fp32",
}


def descriptor(shape, dtype, bits):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=5)
    width = 1024 // bits
    whole = shape.tiles_per_page != 0 or bits == 8
    box = [1, 1, shape.head_dim // width, shape.tile, width] if whole else [1, 1, 1, shape.box, width]
    return f"tensordesc<{dtype}[{', '.join(map(str, box))}],{layout!r}>"


def compile_case(head_dim, page_size, int8, window, softcap, fp8=False):
    shape = prefill_shape_sm90(head_dim, 6, page_size, int8, True, window, softcap, fp8)
    kernel = prefill_fp8_sm90_kernel if fp8 else prefill_sm90_kernel
    tiles = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=4)
    constants = {"CFG": shape, "num_warps": 4}
    types = {
        "k_desc": descriptor(shape, "i8", 8) if int8 else descriptor(shape, "bf16", 16),
        "v_desc": f"tensordesc<fp8e4nv[1, 1, {head_dim}, 64],{tiles!r}>" if fp8 else descriptor(shape, "bf16", 16),
        **TYPES,
    }
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i32" if name.endswith("_ptr") else "i32") for name in names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name.endswith("_ptr") or name in ALIGNED
    }
    source = GluonASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = subprocess.run([tool, "-sass", cubin.name], capture_output=True, text=True, check=True).stdout
    return {
        "case": [head_dim, page_size, int8, window, softcap, fp8],
        "shared": compiled.metadata.shared,
        "spills": sass.count("STL") + sass.count("LDL"),
        "products": sum(sass.count(name) for name in ("HGMMA", "IGMMA", "QGMMA")),
        "waits": sass.count("WARPGROUP.DEPBAR"),
    }


if __name__ == "__main__":
    print(json.dumps([compile_case(*case) for case in CASES]))
