"""Times prefill attention on one GPU beside FlashAttention 3 (as vLLM ships it, if it can be imported), and prints a table.

`python docs/measured/time_prefill.py`. Rates count the operations of exact causal attention; int8 and fp8 (int8 scores, fp8
weights) are timed with their passes over keys and values. Each result is held to float32 on some query tokens before it is
timed. Medians of rounds in which all take turns.
"""

import statistics
import time

import torch
from triton.testing import do_bench

import bigpool
from bigpool.ops.prefill import PrefillWorkspace

SHAPES = [(24_000, 880, 256), (47_000, 880, 256), (128_000, 880, 256), (24_000, 16, 256), (47_000, 16, 256), (47_000, 880, 128)]
Q_LEN, HEADS, KV_HEADS = 2_048, 24, 4
MODES = {"exact": {}, "int8": {"qk": "int8"}, "fp8": {"qk": "int8", "pv": "fp8"}}
LARGEST_ERROR = {"exact": 0.005, "FA3": 0.005, "int8": 0.03, "fp8": 0.06}


def inputs(length, page_size, head_dim):
    count = -(-length // page_size)
    k, v = (torch.randn(count + 3, page_size, KV_HEADS, head_dim, device="cuda").bfloat16() for _ in range(2))
    table = torch.randperm(count + 3, device="cuda")[:count].int()[None]
    q = torch.randn(Q_LEN, HEADS, head_dim, device="cuda").bfloat16()
    lengths = torch.tensor([length], device="cuda", dtype=torch.int32)
    return q, k, v, table, lengths, torch.tensor([0, Q_LEN], device="cuda", dtype=torch.int32)


def errors(out, call, length):
    q, k, v, table, _, _ = call
    tokens = torch.tensor([0, 7, 1_000, Q_LEN - 1], device="cuda")
    rows_k, rows_v = (cache[table[0].long()].flatten(0, 1)[:length].float() for cache in (k, v))
    group = HEADS // KV_HEADS
    scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), rows_k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    seen = torch.arange(length, device="cuda")[None] <= (length - Q_LEN + tokens)[:, None]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    want = torch.einsum("hqk,khd->qhd", weights, rows_v.repeat_interleave(group, 1))
    return float((out[tokens].float() - want).norm() / want.norm())


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    print(torch.cuda.get_device_name(), torch.__version__, bigpool.__version__)
    for length, page_size, head_dim in SHAPES:
        call = inputs(length, page_size, head_dim)
        sizes = {"max_num_reqs": 1, "max_num_keys": length, "num_kv_heads": KV_HEADS, "head_dim": head_dim}
        outs = {name: torch.empty_like(call[0]) for name in LARGEST_ERROR}
        arms = {}
        for name, modes in MODES.items():
            scratch = PrefillWorkspace.empty(**sizes, **modes, page_size=page_size, device="cuda") if modes else None
            options = {"max_seqlen_q": Q_LEN, "out": outs[name], "workspace": scratch, **modes}
            arms[name] = lambda call=call, options=options: bigpool.prefill_attention(*call, **options)
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func

            arms["FA3"] = lambda call=call, outs=outs, length=length: flash_attn_varlen_func(
                call[0], call[1], call[2], max_seqlen_q=Q_LEN, cu_seqlens_q=call[5], max_seqlen_k=length, seqused_k=call[4],
                block_table=call[3], causal=True, fa_version=3, out=outs["FA3"],
            )  # fmt: skip
        except ImportError:
            pass
        flops = 4 * HEADS * head_dim * (Q_LEN * (length - Q_LEN) + Q_LEN * (Q_LEN + 1) / 2)
        found = {}
        for name, arm in arms.items():
            arm()
            found[name] = errors(outs[name], call, length)
            assert found[name] < LARGEST_ERROR[name], (name, found)
        times = {name: [] for name in arms}
        for _ in range(3):
            for name, arm in arms.items():
                time.sleep(0.05)  # Rests the card: at its power limit, what ran before slows what runs after.
                times[name].append(do_bench(arm, warmup=3, rep=15, return_mode="median"))
        medians = {name: statistics.median(t) for name, t in times.items()}
        text = ", ".join(
            f"{name} {flops / ms / 1e9:.0f} TFLOP/s ({ms * 1e3:.0f} us, error {found[name]:.4f})" for name, ms in medians.items()
        )
        print(f"context {length}, page {page_size}, D {head_dim}: {text}", flush=True)


if __name__ == "__main__":
    main()
