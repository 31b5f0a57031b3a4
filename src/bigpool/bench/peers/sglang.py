"""SGLang's Triton extend attention, which its verify step runs. Not run: written against its 2025-2026 signature.

The pool is addressed by token rows; the new tokens come as tensors of their own beside the cached ones.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer
from bigpool.bench.work import Work

MODULE = "sglang.srt.layers.attention.triton_ops.extend_attention"


def _prepare(work: Work) -> Call:
    attend: Any = import_module(MODULE).extend_attention_fwd
    shape = work.shape
    slots = torch.arange(shape.page_size, device=work.device)
    rows = (work.block_table.long()[:, :, None] * shape.page_size + slots).flatten(1)[:, : shape.seq_len]
    prefix = shape.seq_len - shape.q_len
    k_pool, v_pool = (cache.flatten(0, 1) for cache in (work.k_cache, work.v_cache))
    k_new, v_new = (pool[rows[:, prefix:].flatten()].contiguous() for pool in (k_pool, v_pool))
    out = torch.empty_like(work.q)
    arguments = {
        "q_extend": work.q, "k_extend": k_new, "v_extend": v_new, "o_extend": out, "k_buffer": k_pool, "v_buffer": v_pool,
        "qo_indptr": work.cu_seqlens_q, "kv_indices": rows[:, :prefix].flatten().contiguous(),
        "kv_indptr": torch.arange(shape.num_reqs + 1, dtype=torch.int32, device=work.device) * prefix,
        "custom_mask": None, "is_causal": True, "mask_indptr": None, "max_len_extend": shape.q_len, "sm_scale": work.scale,
    }  # fmt: skip
    # Newer versions take the scales of an 8-bit cache by position.
    unit = {name: 1.0 for name in ("k_scale", "v_scale") if name in inspect.signature(attend).parameters}

    def call() -> torch.Tensor:
        attend(**arguments, **unit)
        return out

    return call


PEERS = (Peer("sglang-extend", ("sglang",), _prepare),)
