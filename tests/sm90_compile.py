"""Compiles the Hopper kernel of verify attention without a GPU: `python tests/sm90_compile.py`, a JSON list on the last line."""

import json
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from bigpool.kernels.verify_sm90 import verify_partial_sm90_kernel as kernel
from bigpool.ops._verify_sm90 import _shape
from bigpool.tuning import DeviceProps, VerifySpec
from bigpool.tuning_sm90 import plan_sm90

H200 = DeviceProps("H200", 90, 132, 227 * 1024)
# (format, scales, head_dim, rows, output written at once)
CASES = [
    ("plain", "", 256, 24, False),
    ("plain", "", 64, 12, True),
    ("int8", "token_head", 256, 24, False),
    ("int8", "token_head", 256, 48, False),
    ("int8", "token_head", 128, 48, True),
    ("int4", "token_head", 256, 24, False),
    ("int4", "token_head", 256, 6, True),
    ("e4m3", "head", 256, 24, False),
    ("e4m3", "head", 256, 48, False),
    ("e5m2", "token_head", 128, 12, False),
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


def compile_case(kv_format, scales, head_dim, rows, one_split):
    sizes = {"num_reqs": 1, "num_kv_heads": 4, "page_size": 880, "max_seq_len": 32_768}
    plan = plan_sm90(H200, kv_format=kv_format, head_dim=head_dim, rows=rows, **sizes)
    spec = VerifySpec(kv_format=kv_format, scales=scales)
    shape = _shape(spec, head_dim, 6, 880, plan.tile, plan.rows, plan.stages, plan.num_warps)
    bits = 16 if kv_format == "plain" else 8
    cols, width = head_dim // 2 if kv_format == "int4" else head_dim, 1024 // bits
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=5)
    descriptor = f"tensordesc<{CACHE_TYPES.get(kv_format, 'u8')}[1, 1, {cols // width}, {plan.tile}, {width}],{layout!r}>"
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
        "case": [kv_format, scales, head_dim, rows, one_split],
        "shared": compiled.metadata.shared,
        "spills": sass.count("STL") + sass.count("LDL"),
        "products": sass.count("HGMMA"),
        "waits": sass.count("WARPGROUP.DEPBAR"),
    }


if __name__ == "__main__":
    print(json.dumps([compile_case(*case) for case in CASES]))
