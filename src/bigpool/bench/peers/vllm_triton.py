"""vLLM's Triton unified attention. Not run: written against the signature and the backend of vLLM 0.33.

`vllm-triton` is its 2D path; `vllm-triton-3d` splits the context too, with the scratch that vLLM's backend allocates for
decode and, since 2026, for verification. It takes the 2D path by itself where the grid is large enough; older versions do so
where there is more than one query token.
"""

from __future__ import annotations

from typing import Any

import torch

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer, first_module
from bigpool.bench.work import Work

MODULES = ("vllm.v1.attention.ops.triton_unified_attention", "vllm.attention.ops.triton_unified_attention")
# Of vLLM's backend.
SEGMENTS, LEAST_GRID = 16, 128


def _prepare(work: Work, **more: Any) -> Call:
    attend = first_module(*MODULES).unified_attention
    arguments = {
        "q": work.q, "k": work.k_cache, "v": work.v_cache, "cu_seqlens_q": work.cu_seqlens_q, "max_seqlen_q": work.shape.q_len,
        "seqused_k": work.seq_lens, "max_seqlen_k": work.shape.seq_len, "softmax_scale": work.scale, "causal": True,
        "window_size": (-1, -1), "block_table": work.block_table, "softcap": 0.0, "q_descale": None, "k_descale": None,
        "v_descale": None, **more,
    }  # fmt: skip

    def call() -> torch.Tensor:
        out = torch.empty_like(work.q)
        attend(out=out, **arguments)
        return out

    return call


def _split(work: Work) -> Call:
    tokens, heads, dim = work.q.shape
    padded = 1 << (dim - 1).bit_length()
    scratch = torch.empty(tokens, heads, SEGMENTS, padded, dtype=torch.float32, device=work.device)
    largest, total = (torch.empty(tokens, heads, SEGMENTS, dtype=torch.float32, device=work.device) for _ in range(2))
    return _prepare(
        work, seq_threshold_3D=LEAST_GRID // work.shape.num_kv_heads, num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=scratch, softmax_segm_max=largest, softmax_segm_expsum=total,
    )  # fmt: skip


PEERS = (Peer("vllm-triton", ("vllm",), _prepare), Peer("vllm-triton-3d", ("vllm",), _split))
