"""Compiles the writer and the merge of states for cards that are not here, ptxas included, within each card's shared memory."""

import json
import os
import subprocess
import sys

import pytest

from test_compile_targets import CARDS

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bigpool.kernels.cache import write_kv_kernel
from bigpool.kernels.merge import merge_states_kernel

def compile_kernel(kernel, sm, pointers, constants):
    names = kernel.arg_names
    def kind(name):
        if name.isupper():
            return "constexpr"
        return pointers.get(name, "*fp32") if name.endswith("_ptr") else "i32"
    signature = {name: kind(name) for name in names}
    aligned = [name for name in names if name.endswith("_ptr") or name.startswith("stride")]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, attrs)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options={"num_warps": 4})

sm = int(sys.argv[1])
rows = []
formats = (
    ("plain", "none", "*i16", "*i16"), ("int8", "token_head", "*i8", "*i16"), ("int4", "token_head", "*u8", "*fp16"),
    ("fp8_e4m3", "head", "*u8", "*i16"), ("fp8_e5m2", "token_head", "*u8", "*fp32"), ("fp8_e4m3", "none", "*u8", "*i16"),
)
for name, scales, stored, given in formats:
    for head_dim, head_dim_pad, stages in ((256, 256, 8), (80, 128, 4))[: 2 if name == "int4" else 1]:
        pointers = {"slot_mapping_ptr": "*i64"}
        pointers |= dict.fromkeys(("k_ptr", "v_ptr"), given) | dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), stored)
        pointers |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), stored if scales == "none" else "*fp32")
        constants = dict(PAGE_SIZE=880, NUM_KV_HEADS=4, HEAD_DIM=head_dim, HEAD_DIM_PAD=head_dim_pad, HEAD_TILE=4, FORMAT=name,
                         SCALES=scales, STAGES=stages)
        compiled = compile_kernel(write_kv_kernel, sm, pointers, constants)
        rows.append([name, scales, head_dim, compiled.metadata.shared, len(compiled.asm["cubin"])])
merge = dict(HEAD_DIM=256, HEAD_DIM_PAD=256, HEAD_TILE=4)
compiled = compile_kernel(merge_states_kernel, sm, {"outs_ptr": "*bf16", "out_ptr": "*bf16"}, merge)
rows.append(["merge", "", 256, compiled.metadata.shared, len(compiled.asm["cubin"])])
print(json.dumps(rows))
"""


@pytest.mark.parametrize("sm", CARDS)
def test_kernels_compile_and_fit(sm, tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    # A kernel's source has to be in a file.
    script = tmp_path / "compile_card.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(sm)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 8
    for *shape, shared, cubin_bytes in rows:
        assert shared <= CARDS[sm][1], f"sm{sm} {shape}: {shared} bytes of shared memory"
        assert cubin_bytes > 1000
