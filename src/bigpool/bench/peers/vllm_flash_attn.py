"""FlashAttention 2 and 3 as vLLM builds them. Not run: written against the signature of vLLM 0.33."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer
from bigpool.bench.work import Work


def _call(version: int, work: Work) -> Call:
    attend: Any = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    options = {
        "cu_seqlens_q": work.cu_seqlens_q, "max_seqlen_q": work.shape.q_len, "seqused_k": work.seq_lens,
        "max_seqlen_k": work.shape.seq_len, "softmax_scale": work.scale, "causal": True, "block_table": work.block_table,
        "fa_version": version,
    }  # fmt: skip
    return lambda: attend(work.q, work.k_cache, work.v_cache, **options)


PEERS = (
    Peer("vllm-fa2", ("vllm",), lambda work: _call(2, work)),
    Peer("vllm-fa3", ("vllm",), lambda work: _call(3, work)),
)
