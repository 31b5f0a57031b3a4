"""Compiles the launches of prefill attention for a card that is not here, ptxas included: `prefill_compile.py SM SMS SMEM [all]`.

Prints a JSON list of {"shape", "config", "shared", "registers", "spills"}, as verify_compile does.
"""

import json
import sys

import verify_compile
from bigpool.kernels.prefill import prefill_attention_kernel, prefill_quantise_kernel, prefill_sum_keys_kernel
from bigpool.ops._prefill_plan import PrefillShape, pick_key_passes, pick_prefill_config, prefill_head_dim_pad
from bigpool.tuning import DeviceProps, VerifySpec, pick_tiles_per_page

FP32 = (*verify_compile.FP32, "mean_ptr", "code_scale_ptr", "sums_ptr", "means_ptr", "scales_ptr")
# q, head_dim, page_size, int8, rules
SHAPES = [
    ("bf16", 256, 880, False, {}), ("bf16", 256, 880, True, {}),
]  # fmt: skip
MORE_SHAPES = [
    ("bf16", 128, 16, False, {}), ("fp16", 80, 16, True, {"window": 1_024, "softcap": 30.0}), ("fp32", 256, 16, False, {}),
]  # fmt: skip


def attention(props, dtype, head_dim, page_size, int8, rules):
    pad = prefill_head_dim_pad(head_dim, int8)
    config = pick_prefill_config(props, head_dim_pad=pad, itemsize=4 if dtype == "fp32" else 2, int8=int8)
    shape = PrefillShape(
        6, head_dim, pad, page_size, config.tile, pick_tiles_per_page(page_size, config.tile), config.block_m,
        VerifySpec(**rules), "int8" if int8 else "exact",
    )  # fmt: skip
    constants = {"CFG": shape, "k_scale_ptr": None, "v_scale_ptr": None, "sinks_ptr": None}
    constants |= {} if int8 else {"codes_ptr": None, "code_scale_ptr": None, "mean_ptr": None}
    pointers = {"q_ptr": dtype, "k_ptr": dtype, "v_ptr": dtype, "out_ptr": dtype, "codes_ptr": "i8"}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return config, verify_compile.compile_kernel(prefill_attention_kernel, props.sm, pointers, constants, **options)


def key_pass(props, kernel, head_dim):
    passes = pick_key_passes(props)
    shape = PrefillShape(1, head_dim, head_dim, 880, passes.tile, pick_tiles_per_page(880, passes.tile), 1, VerifySpec())
    constants = {"CFG": shape}
    if kernel is prefill_quantise_kernel:
        constants["SHARES"] = passes.shares
    pointers = {"k_ptr": "bf16", "codes_ptr": "i8"}
    return passes, verify_compile.compile_kernel(kernel, props.sm, pointers, constants, num_warps=passes.num_warps)


def main():
    sm, num_sms, smem = map(int, sys.argv[1:4])
    props = DeviceProps("card", sm, num_sms, smem)
    verify_compile.FP32 = FP32
    rows = []
    for *shape, rules in SHAPES + (MORE_SHAPES if sys.argv[4:] == ["all"] else []):
        config, compiled = attention(props, *shape, rules)
        registers, spills = verify_compile.resources(compiled)
        shown = {"shape": [*shape, *rules], "config": str(config)}
        rows.append({**shown, "shared": compiled.metadata.shared, "registers": registers, "spills": spills})
    for kernel in (prefill_sum_keys_kernel, prefill_quantise_kernel):
        passes, compiled = key_pass(props, kernel, 256)
        # No products, so that there is no loop of them to look for spills in.
        registers = verify_compile.resources(compiled)[0]
        shown = {"shape": [kernel.__name__, 256], "config": str(passes)}
        rows.append({**shown, "shared": compiled.metadata.shared, "registers": registers, "spills": 0})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
