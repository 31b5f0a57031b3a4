"""Batches for the tests of verify attention, and the judgement by the project's error rule."""

import torch

from bigpool import reference
from bigpool.ops.verify import verify_attention
from bigpool.proof.judge import judge_errors


def make(
    seq_lens, q_lens, *, page_size=16, heads=(4, 2), head_dim=64, dtype=torch.float16, kv_layout="NHD", seed=0, device="cpu"
):
    """Keyword arguments of one call. Everything that must not be read is NaN, or garbage in the table."""
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(counts) + 3
    shape = (num_pages, page_size, heads[1], head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    order = torch.randperm(num_pages, generator=rng).int()
    table = torch.randint(-(2**31), 2**31, (len(seq_lens), max([*counts, 1])), generator=rng).int()
    taken = 0
    for req, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[req, :count] = order[taken : taken + count]
        for col in range(count):
            rows = min(page_size, length - col * page_size)
            for cache in (k, v):
                cache[order[taken + col], :rows] = torch.randn(rows, heads[1], head_dim, generator=rng).to(dtype)
        taken += count
    if kv_layout == "HND":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    tensors = {
        "q": torch.randn(sum(q_lens), heads[0], head_dim, generator=rng).to(dtype),
        "k_cache": k,
        "v_cache": v,
        "block_table": table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {"max_seqlen_q": max(q_lens), "kv_layout": kv_layout}


def run(call, **options):
    """(out, lse) of the Triton kernel."""
    return verify_attention(**call, return_lse=True, backend="triton", **options)


def check(call, **options):
    """Runs the kernel and holds out and lse to the error rule; returns both."""
    out, lse = run(call, **options)
    inputs = {name: value for name, value in call.items() if name != "max_seqlen_q"}
    expected = dict(zip(("out", "lse"), reference.verify_attention(**inputs, compute_dtype=torch.float64), strict=True))
    baseline = dict(zip(("out", "lse"), reference.verify_attention_baseline(**inputs), strict=True))
    for entry in judge_errors(*({k: v.cpu() for k, v in d.items()} for d in ({"out": out, "lse": lse}, expected, baseline))):
        assert entry["ok"], entry["text"]
    return out, lse


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
