"""FlashInfer's batch prefill over paged caches, backends fa2 and fa3. Not run: written against the wrapper of 0.7.4.

`plan` runs outside of the timing, as in a server that plans once a step. The wrapper of CUDA graphs is not used: one batch is
planned and replayed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer
from bigpool.bench.work import Work

WORKSPACE_BYTES = 384 << 20


def _call(backend: str, work: Work) -> Call:
    library: Any = import_module("flashinfer")
    shape = work.shape
    scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=work.device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD", backend=backend)
    pages = torch.arange(0, shape.num_pages + 1, shape.pages_per_req, dtype=torch.int32, device=work.device)
    last = shape.seq_len - (shape.pages_per_req - 1) * shape.page_size
    wrapper.plan(
        work.cu_seqlens_q, pages, work.block_table.flatten(), torch.full_like(work.seq_lens, last),
        shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.page_size,
        causal=True, sm_scale=work.scale, q_data_type=work.dtype, kv_data_type=work.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(work.q, (work.k_cache, work.v_cache))


PEERS = (
    Peer("flashinfer-fa2", ("flashinfer-python",), lambda work: _call("fa2", work)),
    Peer("flashinfer-fa3", ("flashinfer-python",), lambda work: _call("fa3", work)),
)
