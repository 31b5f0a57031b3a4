"""Compiles the Hopper kernel of verify attention without a GPU: `python tests/sm90_compile.py`, a JSON list on the last line."""

import json
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from bigpool.kernels.verify_sm90 import verify_partial_sm90_kernel
from bigpool.kernels.verify_ws_sm90 import verify_partial_ws_sm90_kernel
from bigpool.ops._verify_sm90 import _shape
from bigpool.tuning import DeviceProps
from bigpool.tuning_sm90 import plan_sm90

H200 = DeviceProps("H200", 90, 132, 227 * 1024)
# (format, scales, head_dim, rows, page size, output written at once)
CASES = [
    ("plain", "", 256, 24, 880, False),
    ("plain", "", 64, 12, 880, True),
    ("int8", "token_head", 256, 24, 880, False),
    ("int8", "token_head", 256, 48, 880, False),
    ("int8", "token_head", 128, 48, 880, True),
    ("int4", "token_head", 256, 24, 880, False),
    ("int4", "token_head", 256, 6, 880, True),
    ("e4m3", "head", 256, 24, 880, False),
    ("e4m3", "head", 256, 48, 880, False),
    ("e5m2", "token_head", 128, 12, 880, False),
    ("plain", "", 256, 48, 880, False),
    ("plain", "", 256, 96, 880, False),
    ("plain", "", 256, 24, 16, True),
    ("plain", "", 64, 96, 32, False),
    ("int8", "token_head", 256, 96, 880, False),
    ("int8", "token_head", 128, 24, 16, True),
    ("int8", "token_head", 64, 16, 880, False),
    ("int4", "token_head", 256, 48, 880, False),
    ("int4", "token_head", 256, 96, 16, True),
    ("int4", "token_head", 128, 24, 880, False),
    ("int4", "token_head", 64, 96, 16, False),
    ("e4m3", "head", 256, 96, 880, False),
    ("e4m3", "token_head", 256, 24, 16, False),
    ("e5m2", "token_head", 64, 24, 16, True),
]
CACHE_TYPES = {"plain": "bf16", "int8": "i8"}
ALIGNED = ("stride_q_token", "stride_q_head", "stride_dest_token", "stride_dest_head", "stride_dest_split")


def type_of(name, kv_format, one_split):
    if name == "dest_ptr":
        return "*bf16" if one_split else "*fp32"
    if name == "q_ptr":
        return "*fp32" if kv_format == "int4" else "*bf16"
    if name in ("k_scale_ptr", "v_scale_ptr", "lse_ptr"):
        return "*fp32"
    if name.endswith("_ptr"):
        return "*i32"
    return "fp32" if name == "scale_log2" else "i32"


def compile_case(kv_format, scales, head_dim, rows, page_size, one_split):
    sizes = {"num_reqs": 1, "num_kv_heads": 4, "page_size": page_size, "max_seq_len": 32_768}
    plan = plan_sm90(H200, kv_format=kv_format, head_dim=head_dim, rows=rows, **sizes)
    kernel = verify_partial_ws_sm90_kernel if plan.specialised else verify_partial_sm90_kernel
    shape = _shape(kv_format, scales, head_dim, 6, page_size, plan)
    bits = 16 if kv_format == "plain" else 8
    cols = head_dim // 2 if kv_format == "int4" else head_dim
    width = min(1024 // bits, cols)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width * bits // 8, element_bitwidth=bits, rank=5)
    parts, slots = (cols // width, plan.tile) if plan.pages_per_tile == 1 else (1, page_size)
    descriptor = f"tensordesc<{CACHE_TYPES.get(kv_format, 'u8')}[1, 1, {parts}, {slots}, {width}],{layout!r}>"
    constants = {"CFG": shape, "num_warps": plan.num_warps}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else descriptor if name.endswith("_desc") else type_of(name, kv_format, one_split)
        for name in names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name.endswith("_ptr") or name in ALIGNED
    }
    source = GluonASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": plan.num_warps})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        sass = subprocess.run([tool, "-sass", cubin.name], capture_output=True, text=True, check=True).stdout
    return {
        "case": [kv_format, scales, head_dim, rows, page_size, one_split],
        "specialised": plan.specialised,
        "shared": compiled.metadata.shared,
        "spills": sass.count("STL") + sass.count("LDL"),
        "products": sass.count("HGMMA") + sass.count("IGMMA"),
        "waits": sass.count("WARPGROUP.DEPBAR"),
    }


if __name__ == "__main__":
    print(json.dumps([compile_case(*case) for case in CASES]))
