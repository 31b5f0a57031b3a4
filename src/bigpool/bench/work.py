"""One shape of verify attention made real: its inputs, the calls that arms make of it, and what they must give."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

import torch

from bigpool import reference
from bigpool.bench.pairs import Call
from bigpool.bench.shapes import Shape
from bigpool.cost import Cost
from bigpool.formats import KVFormat
from bigpool.ops import verify
from bigpool.proof.judge import judge_errors

Outputs: TypeAlias = Mapping[str, torch.Tensor]


class Work:
    """Random keys, values and queries, on pages in random order. Nothing else is read, so nothing is poisoned.

    `q` [num_tokens, num_q_heads, head_dim]; caches NHD [num_pages, page_size, num_kv_heads, head_dim]; `block_table`, `seq_lens`,
    `cu_seqlens_q` int32. `scale` is head_dim ** -0.5. `kv_format`: that of a quantised cache, with `k_scale` and `v_scale`; None
    for a cache in q's dtype.
    """

    kv_format: KVFormat | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        rng = torch.Generator(device).manual_seed(seed)
        self.shape, self.dtype, self.device = shape, dtype, device
        page = (shape.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.k_cache, self.v_cache = (torch.randn(page, generator=rng, dtype=dtype, device=device) for _ in range(2))
        tokens = shape.num_reqs * shape.q_len
        self.q = torch.randn(tokens, shape.num_q_heads, shape.head_dim, generator=rng, dtype=dtype, device=device)
        order = torch.randperm(shape.num_pages, generator=rng, device=device).int()
        self.block_table = order.view(shape.num_reqs, shape.pages_per_req)
        self.seq_lens = torch.full((shape.num_reqs,), shape.seq_len, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.arange(0, tokens + 1, shape.q_len, dtype=torch.int32, device=device)
        self.scale = shape.head_dim**-0.5
        self._oracle: tuple[Outputs, Outputs] | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What the op takes, in its order."""
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens, self.cu_seqlens_q

    @property
    def scales(self) -> dict[str, Any]:
        """What the op takes besides `arguments` where the cache is quantised."""
        return {} if self.kv_format is None else {"k_scale": self.k_scale, "v_scale": self.v_scale}

    @property
    def cost(self) -> Cost:
        return self.shape.cost(self.dtype.itemsize)

    def kernels_call(self, kernels: ModuleType) -> Call:
        """The op's own launcher with the kernels of one arm."""
        launch: Any = verify._launch

        def call() -> Outputs:
            out = torch.empty_like(self.q)
            lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.device)
            sizes = self.shape.q_len, 0, self.scale
            launch(*self.arguments, out, lse, None, *sizes, self.k_scale, self.v_scale, kernels=kernels)
            return {"out": out, "lse": lse}

        return call

    def backend_call(self, backend: str) -> Call:
        """The public function."""

        def call() -> Outputs:
            answer = verify.verify_attention(
                *self.arguments, max_seqlen_q=self.shape.q_len, return_lse=True, backend=backend, **self.scales
            )
            return dict(zip(("out", "lse"), answer, strict=True))

        return call

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values without pages, [num_reqs, num_kv_heads, seq_len, head_dim]: for peers that know no pages."""
        rows = self.shape.num_reqs, self.shape.pages_per_req * self.shape.page_size
        caches = (cache[self.block_table.long()] for cache in (self.k_cache, self.v_cache))
        k, v = (cache.reshape(*rows, *cache.shape[3:])[:, : self.shape.seq_len] for cache in caches)
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()

    def queries(self) -> torch.Tensor:
        """[num_reqs, num_q_heads, q_len, head_dim]"""
        return self.q.view(self.shape.num_reqs, self.shape.q_len, *self.q.shape[1:]).transpose(1, 2).contiguous()

    def check(self, given: object) -> tuple[bool, str]:
        """(whether what a call gave agrees with the float64 oracle by the project's error rule, in words)."""
        outputs: Outputs = given if isinstance(given, Mapping) else {"out": given}  # type: ignore[dict-item]
        expected, baseline = self._expected()
        outputs = {name: self._flat(tensor).detach().cpu() for name, tensor in outputs.items()}
        entries = judge_errors(outputs, {name: expected[name] for name in outputs if name in expected}, baseline)
        return bool(entries) and all(entry["ok"] for entry in entries), "; ".join(entry["text"] for entry in entries)

    def _flat(self, out: torch.Tensor) -> torch.Tensor:
        """Of the form of `queries` back to that of q. Not a part of what is timed."""
        return out.transpose(1, 2).reshape(self.q.shape) if out.dim() == 4 else out

    def _expected(self) -> tuple[Outputs, Outputs]:
        if self._oracle is None:
            oracle = reference.verify_attention(*self.arguments, compute_dtype=torch.float64, **self.scales)
            baseline = reference.verify_attention_baseline(*self.arguments, **self.scales)
            expected, base = ({"out": out.cpu(), "lse": lse.cpu()} for out, lse in (oracle, baseline))
            self._oracle = expected, base
        return self._oracle
