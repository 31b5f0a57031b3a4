"""torch's scaled_dot_product_attention, on dense copies: no pages, so nothing to look up.

Run on a CPU: `sdpa` and `sdpa-flash`. Not run: either on a GPU, and `sdpa-cudnn`, which needs one.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer
from bigpool.bench.work import Work


def _any(work: Work) -> Call:
    """Whatever torch chooses, with the mask as a tensor."""
    q, (k, v), mask = work.queries(), work.dense(), _mask(work)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=work.scale, enable_gqa=True)


def _flash(work: Work) -> Call:
    q, (k, v) = work.queries(), work.dense()
    bias = causal_lower_right(work.shape.q_len, work.shape.seq_len)

    def call() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            return scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=work.scale, enable_gqa=True)

    return call


def _cudnn(work: Work) -> Call:
    """cuDNN aligns its causal mask to the top left, so the mask is a tensor."""
    q, (k, v), mask = work.queries(), work.dense(), _mask(work)

    def call() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=work.scale, enable_gqa=True)

    return call


def _mask(work: Work) -> torch.Tensor:
    """bool [q_len, seq_len], bottom-right aligned."""
    shape = work.shape
    return torch.ones(shape.q_len, shape.seq_len, dtype=torch.bool, device=work.device).tril(shape.seq_len - shape.q_len)


PEERS = (
    Peer("sdpa", ("torch",), _any, paged=False),
    Peer("sdpa-flash", ("torch",), _flash, paged=False),
    Peer("sdpa-cudnn", ("torch",), _cudnn, paged=False),
)
