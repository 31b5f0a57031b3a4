"""Compiles the launches of verify attention for a card that is not here, ptxas included: `verify_compile.py SM SMS SMEM [all]`.

Prints a JSON list of {"shape", "shared", "registers", "spills"}: bytes of shared memory, registers a thread, and spill
instructions in the loops over tiles that every row sees whole.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bigpool.kernels.verify import verify_merge_kernel, verify_partial_kernel
from bigpool.tuning import DeviceProps, VerifySpec, pick_convert, plan_verify

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INT32 = ("block_table_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tree_ptr")
FP32 = ("dest_ptr", "part_ptr", "lse_ptr", "k_scale_ptr", "v_scale_ptr", "alibi_ptr", "sinks_ptr", "out_scale_ptr")
# kv_format, scales, Triton's name of the stored type, bytes of an element (None: as q).
FORMATS = {
    "plain": ("plain", "", None, None),
    "int8": ("int8", "token_head", "i8", 1.0),
    "int4": ("int4", "token_head", "u8", 0.5),
    "e4m3": ("e4m3", "head", "u8", 1.0),
    "e4m3 rows": ("e4m3", "token_head", "u8", 1.0),
    "e5m2": ("e5m2", "", "u8", 1.0),
}
# format, q, head_dim, page_size, query tokens, group
SAMPLE = [
    ("plain", "bf16", 256, 880, 8, 6), ("plain", "fp16", 128, 16, 1, 6), ("plain", "fp32", 64, 880, 4, 6),
    ("plain", "bf16", 512, 16, 8, 6),
    ("int8", "bf16", 256, 880, 8, 6), ("int4", "bf16", 128, 16, 8, 4), ("e4m3", "fp16", 128, 880, 4, 8),
    ("e5m2", "bf16", 80, 16, 1, 1),
]  # fmt: skip
ALL = [
    (kv_format, dtype, head_dim, page_size, seqlen_q, group)
    for kv_format in FORMATS
    for dtype, page_size in (("bf16", 880), ("bf16", 16), ("fp16", 880))
    for head_dim in (64, 128, 256)
    for seqlen_q, group in ((1, 8), (8, 6))
]
RULES = {"window": 4_096, "sink_tokens": 4, "softcap": 30.0, "alibi": True, "tree_words": 1, "out_format": "e4m3"}


def compile_kernel(kernel, sm, pointers, constants, **options):
    names = kernel.arg_names

    def kind(name):
        if name in constants:
            return "constexpr"
        if name.endswith("_ptr"):
            return "*i32" if name in INT32 else "*fp32" if name in FP32 else f"*{pointers[name]}"
        return "fp32" if name == "scale_log2" else "i32"

    signature = {name: kind(name) for name in names}
    aligned = [name for name in names if name not in constants and (name.endswith("_ptr") or name.startswith("stride"))]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name != "stride_table_req"}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, signature, constexprs, attrs), target=GPUTarget("cuda", sm, 32), options=options)


def partial(props, kv_format, dtype, head_dim, page_size, seqlen_q, group, **rules):
    kv_format, scales, stored, kv_bytes = FORMATS[kv_format]
    plan = plan_verify(
        props, num_reqs=1, max_seqlen_q=seqlen_q, num_q_heads=4 * group, num_kv_heads=4, head_dim=head_dim,
        itemsize=4 if dtype == "fp32" else 2, page_size=page_size, max_seq_len=2**17, kv_bytes=kv_bytes, heavy=bool(rules),
    )  # fmt: skip
    config = plan.config
    convert = pick_convert(props, itemsize=4 if dtype == "fp32" else 2, kv_format=kv_format)
    spec = VerifySpec(kv_format=kv_format, scales=scales, convert=convert, **rules)
    constants = {
        "GROUP": group, "HEAD_DIM": head_dim, "HEAD_DIM_PAD": plan.head_dim_pad, "PAGE_SIZE": page_size, "TILE": config.tile,
        "TILES_PER_PAGE": plan.tiles_per_page, "BLOCK_M": config.block_m, "ROW_TILES": plan.row_tiles, "SPEC": spec,
    }  # fmt: skip
    if not spec.scales:
        constants |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"))
    if scales != "token_head":
        constants |= {f"stride_{name}_scale_{axis}": 0 for name in "kv" for axis in ("page", "slot", "head")}
    if not rules:
        constants |= dict.fromkeys(("alibi_ptr", "sinks_ptr", "tree_ptr", "stride_tree_token", "out_scale_ptr"))
    pointers = {"q_ptr": dtype, "k_ptr": stored or dtype, "v_ptr": stored or dtype}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return compile_kernel(verify_partial_kernel, props.sm, pointers, constants, **options), config


def resources(compiled):
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        sass = subprocess.run([TOOLS / "cuobjdump", "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"REG:(\d+)", usage)[1]), main_loop_spills(sass)


def main_loop_spills(sass):
    """STL and LDL in the first innermost loop with matrix instructions: tiles seen whole come before those at the edge."""
    code = [(int(place, 16), text) for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    loops = []
    for place, text in code:
        target = re.search(r"\bBRA(?:\.\S+)?\s+(?:\S+,\s+)?`?\(?(?:\.L_x_\d+|0x([0-9a-f]+))", text)
        if target and target[1] and int(target[1], 16) < place:
            loops.append((int(target[1], 16), place))
    math = re.compile(r"\b(HMMA|HGMMA|QMMA|UTCHMMA|UTCMMA|FFMA)\b")
    for begin, end in sorted(loops, key=lambda loop: loop[0]):
        body = [text for place, text in code if begin <= place <= end]
        if any(begin <= other[0] and other[1] < end for other in loops if other != (begin, end)):
            continue
        if sum(bool(math.search(text)) for text in body) >= 4:
            return sum(bool(re.search(r"\b(STL|LDL)\b", text)) for text in body)
    return -1


def main():
    sm, num_sms, smem = map(int, sys.argv[1:4])
    props = DeviceProps("card", sm, num_sms, smem)
    rows = []
    shapes = [(shape, {}) for shape in (ALL if sys.argv[4:] == ["all"] else SAMPLE)] + [(SAMPLE[4], RULES)]
    for shape, rules in shapes:
        compiled, config = partial(props, *shape, **rules)
        registers, spills = resources(compiled)
        shared = compiled.metadata.shared
        rows.append(
            {"shape": [*shape, *rules], "config": str(config), "shared": shared, "registers": registers, "spills": spills}
        )
    merge = {
        "HEAD_DIM": 256,
        "HEAD_DIM_PAD": 256,
        "SPLITS_PAD": 64,
        "SPLIT_TILE": 16,
        "SPEC": VerifySpec(),
        "out_scale_ptr": None,
    }
    compiled = compile_kernel(verify_merge_kernel, sm, {"out_ptr": "bf16"}, merge)
    rows.append({"shape": ["merge"], "shared": compiled.metadata.shared, "registers": resources(compiled)[0], "spills": 0})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
