"""FlashAttention 2 and 3 by their own packages. Not run: written against the signatures of their sources (2.8, 3.0 of 2026).

FlashAttention 2 takes pages of a multiple of 256 slots only; it says so itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer, first_module
from bigpool.bench.work import Work

# The module of FlashAttention 3 stood by itself before it had a package.
FA3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")


def _call(module: Any, table_name: str, work: Work) -> Call:
    attend = module.flash_attn_with_kvcache
    q = work.q.view(work.shape.num_reqs, work.shape.q_len, *work.q.shape[1:])
    options = {"cache_seqlens": work.seq_lens, table_name: work.block_table, "softmax_scale": work.scale, "causal": True}
    return lambda: attend(q, work.k_cache, work.v_cache, **options).view(work.q.shape)


PEERS = (
    Peer("fa2", ("flash-attn",), lambda work: _call(import_module("flash_attn"), "block_table", work)),
    Peer("fa3", ("flash-attn-3", "flash_attn_3"), lambda work: _call(first_module(*FA3), "page_table", work)),
)
