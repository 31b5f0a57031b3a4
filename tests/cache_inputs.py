"""Caches and rows for tests of the writer."""

import math

import torch

from bigpool.cache import KVCache

# (format, scales, inline)
KINDS = [
    ("bf16", None, False), ("fp16", None, False), ("fp32", None, False),
    ("fp8_e4m3", "tensor", False), ("fp8_e4m3", "head", False), ("fp8_e4m3", "token_head", True),
    ("fp8_e5m2", "tensor", False), ("fp8_e5m2", "head", False), ("fp8_e5m2", "token_head", False),
    ("int8", None, False), ("int8", None, True), ("int4", None, False), ("int4", None, True),
]  # fmt: skip
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FILL = {1: 0x01, 2: 0x0101, 4: 0x01010101}


def bits(tensor):
    return tensor.contiguous().view(BITS[tensor.element_size()])


def cache(kind, head_dim=48, *, kv_heads=3, page_size=16, num_pages=7, kv_layout="NHD", device="cpu"):
    """A cache of a known pattern, its given scales small enough for values to saturate."""
    name, scales, inline = kind
    options = {"format": name, "scales": scales, "inline_scales": inline, "kv_layout": kv_layout, "device": device}
    made = KVCache.empty(num_pages, page_size, kv_heads, head_dim, **options)
    for tensor in (*made.kv, made.k_scale, made.v_scale):
        if tensor is not None and tensor.dim() > 1:
            tensor.view(BITS[tensor.element_size()]).fill_(FILL[tensor.element_size()])
        elif tensor is not None:
            tensor.copy_(torch.linspace(0.003, 0.7, len(tensor)))
    return made


def rows(kind, num_tokens=20, head_dim=48, *, kv_heads=3, dtype=torch.float16, bad=True, seed=0, device="cpu"):
    """(k, v) of `num_tokens`, with an outlier channel, rows of zeros, tiny values, NaN and infinity."""
    rng = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(num_tokens, kv_heads, head_dim, generator=rng) * 3 for _ in range(2))
    k[..., 5] *= 25
    if bad:
        k[3, 1, 7], v[4, 2, 0], v[4, 1, 1] = math.nan, math.inf, -math.inf
        k[5], v[5] = 0.0, -0.0
        k[6, 0], v[6, 1] = 1e-7, 3e-8
    dtype = PLAIN.get(kind[0], dtype)
    return k.to(dtype).to(device), v.to(dtype).to(device)


def tensors(made):
    return [tensor for tensor in (*made.kv, made.k_scale, made.v_scale) if tensor is not None]


def assert_same(ours, theirs):
    for a, b in zip(tensors(ours), tensors(theirs), strict=True):
        assert torch.equal(bits(a), bits(b))
