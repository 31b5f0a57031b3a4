"""SageAttention, on dense copies. Not run: written against the functions of 1.0.6 and of the sources of 2.x.

Its causal mask is aligned to the top left, so that only one query token a request (decode) can be right; and it quantises Q and
K to 8 bits, which the project's error rule for 16 bits does not let pass. It is here so that the list says so.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from bigpool.bench.pairs import Call
from bigpool.bench.peers._peer import Peer, PeerCannot
from bigpool.bench.work import Work


def _prepare(work: Work) -> Call:
    attend: Any = import_module("sageattention").sageattn
    if work.shape.q_len != 1:
        raise PeerCannot(f"no bottom-right mask, so no {work.shape.q_len} query tokens over {work.shape.seq_len} keys")
    q, (k, v) = work.queries(), work.dense()
    return lambda: attend(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=work.scale)


PEERS = (Peer("sage", ("sageattention",), _prepare, paged=False),)
