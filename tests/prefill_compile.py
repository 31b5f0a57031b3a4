"""Compiles the launches of prefill attention for a card that is not here, ptxas included: `prefill_compile.py SM SMS SMEM [all]`.

Prints a JSON list of {"shape", "config", "shared", "registers", "spills"}, as verify_compile does; a shape is
[qk, pv, format of the cache, dtype of q, head_dim, page_size, *names of rules].
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import verify_compile
from bigpool.kernels import prefill as kernels
from bigpool.ops._prefill_plan import (
    OLDEST_FP8,
    SUM_SHARES,
    PrefillShape,
    pick_key_passes,
    pick_prefill_config,
    prefill_head_dim_pad,
)
from bigpool.tuning import DeviceProps, VerifySpec, pick_convert, pick_tiles_per_page

FP32 = (*verify_compile.FP32, "mean_ptr", "code_scale_ptr", "sums_ptr", "means_ptr", "scales_ptr", "maxima_ptr")
WINDOW = {"window": 1_024, "softcap": 30.0}
SHAPES = [("exact", "exact", "plain", "bf16", 256, 880), ("int8", "exact", "plain", "bf16", 256, 880)]
# Of the other modes and caches, those that a card compiles by default.
SAMPLE = {
    80: [("exact", "exact", "int8", "bf16", 256, 880)],
    86: [("kept", "exact", "plain", "bf16", 256, 880)],
    89: [("exact", "fp8", "plain", "bf16", 128, 16)],
    90: [("kept", "exact", "plain", "bf16", 256, 880)],
    100: [("exact", "exact", "int4", "bf16", 128, 880)],
    120: [("int8", "fp8", "plain", "bf16", 256, 880), ("exact", "exact", "e4m3 rows", "bf16", 128, 16)],
}
MODES = [(qk, pv, "plain") for qk, pv in (("kept", "exact"), ("exact", "fp8"), ("int8", "fp8"), ("kept", "fp8"))]
CACHES = [("exact", "exact", name) for name in verify_compile.FORMATS if name != "plain"]
MORE_SHAPES = [
    ("exact", "exact", "plain", "bf16", 128, 16), ("int8", "exact", "plain", "fp16", 80, 16, WINDOW),
    ("exact", "exact", "plain", "fp32", 256, 16),
    *((*mode, "bf16", head_dim, page_size) for mode in MODES + CACHES for head_dim, page_size in ((256, 880), (128, 16))),
]  # fmt: skip
KEY_PASSES = {
    kernels.prefill_sum_keys_kernel: "exact",
    kernels.prefill_quantise_kernel: "exact",
    kernels.prefill_keep_kernel: "exact",
    kernels.prefill_max_values_kernel: "fp8",
    kernels.prefill_quantise_values_kernel: "fp8",
}
MATH = re.compile(r"\b(HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA|FFMA)\b")


def shapes_for(sm, everything):
    shapes = SHAPES + (MORE_SHAPES if everything else SAMPLE[sm])
    return [shape for shape in shapes if shape[1] != "fp8" or sm >= OLDEST_FP8]


def attention(props, qk, pv, stored, dtype, head_dim, page_size, rules=None):
    kv_format, scales, stored_dtype, kv_bytes = verify_compile.FORMATS[stored]
    itemsize, coded = 4 if dtype == "fp32" else 2, qk != "exact"
    pad = prefill_head_dim_pad(head_dim, coded, kv_format == "int4")
    config = pick_prefill_config(props, head_dim_pad=pad, itemsize=itemsize, int8=coded, kv_bytes=kv_bytes, fp8=pv == "fp8")
    convert = pick_convert(props, itemsize=itemsize, kv_format=kv_format)
    spec = VerifySpec(kv_format=kv_format, scales=scales, convert=convert, **rules or {})
    strides = {"token_head": (page_size * 4, 4, 1), "head": (0, 0, 1), "": (0, 0, 0)}[scales]
    shape = PrefillShape(
        6, head_dim, pad, page_size, config.tile, pick_tiles_per_page(page_size, config.tile), config.block_m, spec, qk, pv,
        strides, strides,
    )  # fmt: skip
    constants = {"CFG": shape, "sinks_ptr": None}
    constants |= {} if scales else {"k_scale_ptr": None} | ({} if pv == "fp8" else {"v_scale_ptr": None})
    constants |= {} if coded else {"codes_ptr": None, "code_scale_ptr": None, "mean_ptr": None}
    caches = {"k_ptr": stored_dtype or dtype, "v_ptr": "u8" if pv == "fp8" else stored_dtype or dtype}
    pointers = {"q_ptr": dtype, "out_ptr": dtype, "codes_ptr": "i8", **caches}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return config, verify_compile.compile_kernel(kernels.prefill_attention_kernel, props.sm, pointers, constants, **options)


def key_pass(props, kernel, head_dim):
    passes = pick_key_passes(props, KEY_PASSES[kernel])
    shape = PrefillShape(1, head_dim, head_dim, 880, passes.tile, pick_tiles_per_page(880, passes.tile), 1, VerifySpec())
    constants = {"CFG": shape} | ({"SHARES": SUM_SHARES} if "SHARES" in kernel.arg_names else {})
    pointers = {"k_ptr": "bf16", "v_ptr": "bf16", "codes_ptr": "u8" if KEY_PASSES[kernel] == "fp8" else "i8"}
    return passes, verify_compile.compile_kernel(kernel, props.sm, pointers, constants, num_warps=passes.num_warps)


def resources(compiled, loops):
    """(registers, spill instructions of the main loop): the last but one of the loops over tiles, which have to be `loops`."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = (
            subprocess.run([verify_compile.TOOLS / "cuobjdump", what, cubin], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    spills = loop_spills(sass)
    # What has no products has no loop of them to look for spills in.
    main = 0 if loops == 0 else spills[-2] if len(spills) == loops else -1
    return int(re.search(r"REG:(\d+)", usage)[1]), main


def loop_spills(sass):
    """STL and LDL in each innermost loop with matrix instructions, in the order of the code."""
    code = [(int(place, 16), text) for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]
    loops = []
    for place, text in code:
        target = re.search(r"\bBRA(?:\.\S+)?\s+(?:\S+,\s+)?`?\(?(?:\.L_x_\d+|0x([0-9a-f]+))", text)
        if target and target[1] and int(target[1], 16) < place:
            loops.append((int(target[1], 16), place))
    found = []
    for begin, end in sorted(loops):
        body = [text for place, text in code if begin <= place <= end]
        is_inner = not any(begin <= other[0] and other[1] < end for other in loops if other != (begin, end))
        if is_inner and sum(bool(MATH.search(text)) for text in body) >= 4:
            found.append(sum(bool(re.search(r"\b(STL|LDL)\b", text)) for text in body))
    return found


def main():
    sm, num_sms, smem = map(int, sys.argv[1:4])
    props = DeviceProps("card", sm, num_sms, smem)
    verify_compile.FP32 = FP32
    rows = []

    def add(shape, config, compiled, loops):
        registers, spills = resources(compiled, loops)
        shown = {"shape": shape, "config": str(config), "shared": compiled.metadata.shared}
        rows.append({**shown, "registers": registers, "spills": spills})

    everything = sys.argv[4:] == ["all"]
    for shape in shapes_for(sm, everything):
        # Tiles that every row sees whole, those at the last edge, and before them those at the first edge or of exact keys.
        loops = 3 if shape[0] == "kept" or shape[6:] else 2
        add([*shape[:6], *(name for rules in shape[6:] for name in rules)], *attention(props, *shape), loops)
    used = {"exact"} | {"fp8" for shape in shapes_for(sm, everything) if shape[1] == "fp8"}
    for kernel, pv in KEY_PASSES.items():
        if pv in used:
            add([kernel.__name__, 256], *key_pass(props, kernel, 256), 0)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
