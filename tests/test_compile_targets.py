"""Compiles the verify kernels for cards that are not here, ptxas included, and holds shared memory to each card's limit."""

import json
import os
import subprocess
import sys

import pytest

# Most shared memory of one block, bytes: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
CARDS = {
    80: (108, 163 * 1024),
    86: (82, 99 * 1024),
    89: (128, 99 * 1024),
    90: (132, 227 * 1024),
    100: (148, 227 * 1024),
    120: (170, 99 * 1024),
}

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bigpool.kernels.verify import verify_merge_kernel, verify_partial_kernel
from bigpool.tuning import DeviceProps, plan_verify

INT32 = ("block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr")
FP32 = ("dest_ptr", "part_ptr", "lse_ptr")

def compile_kernel(kernel, sm, dtype, constants, **options):
    names = kernel.arg_names
    def kind(name):
        if name.isupper():
            return "constexpr"
        if name.endswith("_ptr"):
            return "*i32" if name in INT32 else "*fp32" if name in FP32 else f"*{dtype}"
        return "fp32" if name == "scale_log2" else "i32"
    signature = {name: kind(name) for name in names}
    aligned = [name for name in names if name.endswith("_ptr") or name.startswith("stride") and name != "stride_table_req"]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)

sm, num_sms, smem = map(int, sys.argv[1:])
rows = []
shapes = ("bf16", 2, 256, 880, 8), ("fp16", 2, 128, 16, 1), ("fp32", 4, 64, 880, 4), ("bf16", 2, 512, 16, 8)
for dtype, itemsize, head_dim, page_size, seqlen_q in shapes:
    plan = plan_verify(DeviceProps("card", sm, num_sms, smem), num_reqs=1, max_seqlen_q=seqlen_q, num_q_heads=24, num_kv_heads=4,
                       head_dim=head_dim, itemsize=itemsize, page_size=page_size, max_seq_len=2**17)
    config = plan.config
    constants = dict(GROUP=6, HEAD_DIM=head_dim, HEAD_DIM_PAD=plan.head_dim_pad, PAGE_SIZE=page_size, TILE=config.tile,
                     TILES_PER_PAGE=plan.tiles_per_page, BLOCK_M=config.block_m, ROW_TILES=plan.row_tiles)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    compiled = compile_kernel(verify_partial_kernel, sm, dtype, constants, **options)
    rows.append([dtype, head_dim, page_size, seqlen_q, compiled.metadata.shared, len(compiled.asm["cubin"])])
merge = dict(HEAD_DIM=256, HEAD_DIM_PAD=256, SPLITS_PAD=64, SPLIT_TILE=16)
compiled = compile_kernel(verify_merge_kernel, sm, "bf16", merge)
rows.append(["merge", 256, 0, 0, compiled.metadata.shared, len(compiled.asm["cubin"])])
print(json.dumps(rows))
"""


@pytest.mark.parametrize("sm", CARDS)
def test_kernels_compile_and_fit(sm, tmp_path):
    num_sms, smem = CARDS[sm]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    # A kernel's source has to be in a file.
    script = tmp_path / "compile_card.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(sm), str(num_sms), str(smem)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == 5
    for *shape, shared, cubin_bytes in rows:
        assert shared <= smem, f"sm{sm} {shape}: {shared} bytes of shared memory"
        assert cubin_bytes > 1000
