"""torch's FlexAttention, compiled, on dense copies. Run on a CPU; not run on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer
from bigpool.bench.work import Work


def _prepare(work: Work) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, (k, v), shape = work.queries(), work.dense(), work.shape
    offset = shape.seq_len - shape.q_len

    def visible(batch: torch.Tensor, head: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return kv_idx <= q_idx + offset

    mask = create_block_mask(visible, None, None, shape.q_len, shape.seq_len, device=str(work.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, scale=work.scale, enable_gqa=True)


PEERS = (Peer("flex-attention", ("torch",), _prepare, paged=False),)
