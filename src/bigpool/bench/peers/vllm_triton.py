"""vLLM's Triton unified attention, its 2D path. Not run: written against the signature of vLLM 0.11 and later.

Its 3D path needs scratch that a serving backend allocates; it is off for more than one query token unless that is passed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer
from bigpool.bench.work import Work

MODULES = ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")


def _attend() -> Any:
    for module in MODULES:
        try:
            return import_module(module).unified_attention
        except ModuleNotFoundError as missing:
            if missing.name == "vllm":
                raise
    raise ModuleNotFoundError(f"no module of {', '.join(MODULES)}", name=MODULES[0])


def _prepare(work: Work) -> Call:
    attend = _attend()
    arguments = {
        "q": work.q, "k": work.k_cache, "v": work.v_cache, "cu_seqlens_q": work.cu_seqlens_q, "max_seqlen_q": work.shape.q_len,
        "seqused_k": work.seq_lens, "max_seqlen_k": work.shape.seq_len, "softmax_scale": work.scale, "causal": True,
        "window_size": (-1, -1), "block_table": work.block_table, "softcap": 0.0, "q_descale": None, "k_descale": None,
        "v_descale": None,
    }  # fmt: skip

    def call() -> torch.Tensor:
        out = torch.empty_like(work.q)
        attend(out=out, **arguments)
        return out

    return call


PEERS = (Peer("vllm-triton", ("vllm",), _prepare),)
