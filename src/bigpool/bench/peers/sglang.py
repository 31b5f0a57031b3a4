"""SGLang's Triton kernels: extend attention, which a verify step runs, its split-KV form, and decode. Not run: written against
the signatures of SGLang 0.5.23.

The pool is addressed by token rows; the new tokens come as tensors of their own beside the cached ones, but for decode.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer, PeerCannot, first_module
from bigpool.bench.work import Work

# Where the kernels lie now, and where they lay until 2025.
FOLDERS = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
# The server's default.
KV_SPLITS = 8


def _function(module: str, name: str) -> Any:
    return getattr(first_module(*(f"{folder}.{module}" for folder in FOLDERS)), name)


def _rows(work: Work) -> torch.Tensor:
    """int64 [num_reqs, seq_len]: the row of each token in the flat pool."""
    slots = torch.arange(work.shape.page_size, device=work.device)
    rows = work.block_table.long()[:, :, None] * work.shape.page_size + slots
    return rows.flatten(1)[:, : work.shape.seq_len]


def _extend(module: str, name: str, work: Work) -> Call:
    attend, shape, rows = _function(module, name), work.shape, _rows(work)
    prefix = shape.seq_len - shape.q_len
    k_pool, v_pool = (cache.flatten(0, 1) for cache in (work.k_cache, work.v_cache))
    k_new, v_new = (pool[rows[:, prefix:].flatten()].contiguous() for pool in (k_pool, v_pool))
    out, scales = torch.empty_like(work.q), _unit_scales(attend)
    arguments = {
        "q_extend": work.q, "k_extend": k_new, "v_extend": v_new, "o_extend": out, "k_buffer": k_pool, "v_buffer": v_pool,
        "qo_indptr": work.cu_seqlens_q, "kv_indices": rows[:, :prefix].flatten().contiguous(),
        "kv_indptr": torch.arange(shape.num_reqs + 1, dtype=torch.int32, device=work.device) * prefix,
        "custom_mask": None, "is_causal": True, "mask_indptr": None, "max_len_extend": shape.q_len, "sm_scale": work.scale,
    }  # fmt: skip

    def call() -> torch.Tensor:
        if attend(**arguments, **scales) is False:
            raise PeerCannot(f"{name} declines {shape.name}")
        return out

    return call


def _decode(work: Work) -> Call:
    shape = work.shape
    if shape.q_len != 1:
        raise PeerCannot(f"decode takes one query token, not {shape.q_len}")
    attend = _function("decode_attention", "decode_attention_fwd")
    out, scales = torch.empty_like(work.q), _unit_scales(attend)
    partial = (shape.num_reqs, shape.num_q_heads, KV_SPLITS)
    k_pool, v_pool = (cache.flatten(0, 1) for cache in (work.k_cache, work.v_cache))
    arguments = {
        "q": work.q, "k_buffer": k_pool, "v_buffer": v_pool, "o": out, "kv_indices": _rows(work).flatten().contiguous(),
        "kv_indptr": torch.arange(shape.num_reqs + 1, dtype=torch.int32, device=work.device) * shape.seq_len,
        "attn_logits": torch.empty(*partial, shape.head_dim, dtype=torch.float32, device=work.device),
        "attn_lse": torch.empty(partial, dtype=torch.float32, device=work.device),
        "num_kv_splits": torch.full((shape.num_reqs,), KV_SPLITS, dtype=torch.int32, device=work.device),
        "max_kv_splits": KV_SPLITS, "sm_scale": work.scale,
    }  # fmt: skip

    def call() -> torch.Tensor:
        attend(**arguments, **scales)
        return out

    return call


def _unit_scales(attend: Any) -> dict[str, float]:
    """Newer versions take the scales of an 8-bit cache, without a default."""
    return {name: 1.0 for name in ("k_scale", "v_scale") if name in inspect.signature(attend).parameters}


PEERS = (
    Peer("sglang-extend", ("sglang",), lambda work: _extend("extend_attention", "extend_attention_fwd", work)),
    Peer("sglang-verify", ("sglang",), lambda work: _extend("verify_splitkv", "verify_splitkv_fwd", work)),
    Peer("sglang-decode", ("sglang",), _decode),
)
