"""The writer of paged caches at the bottom, across the wall and at the top of its pools, every family of formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigpool import formats, reference_cache
from bigpool.cache import KVCache
from bigpool.ops.cache import write_kv
from bigpool.proof.case import Case, Oracle
from bigpool.proof.context import Context, Placed

DTYPES = ("bfloat16", "float16", "float32")
NOT_FAR = ("slot_mapping of write_kv beyond 2^31 elements: it has one per token",)
PAGES, PAGE_SIZE, KV_HEADS = 4, 3, 2
# So many pages that scales, the smallest tensor of a cache, pass 2^31 elements too.
NUM_PAGES = 2**31 // (PAGE_SIZE * KV_HEADS) + 2 * PAGES
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits as integers, which a proof compares exactly."""
    return tensor.contiguous().view(BITS[tensor.element_size()])


class WriteCase(Case):
    """Every slot of the pages in use is written once, two tokens are skipped; token rows of K and V lie far apart."""

    op = "write_kv"
    dtypes = DTYPES
    not_exercised = NOT_FAR

    def __init__(
        self, name: str, describe: str, format: str, scales: str | None = None, *, kv_layout: str = "NHD", inline: bool = False,
        head_dim: int = 32, fast: bool = True,
    ) -> None:  # fmt: skip
        self.name = name
        self.describe = describe
        self.format = format
        self.scales = scales
        self.kv_layout = kv_layout
        self.inline = inline
        self.head_dim = head_dim
        self.fast = fast

    def build(self, ctx: Context) -> dict[str, Any]:
        cache, pools = self._cache(ctx)
        num_slots = PAGES * PAGE_SIZE
        order = torch.randperm(num_slots, generator=ctx.generator("slots"))
        logical = torch.cat([order[:5], torch.tensor([-1, -(2**40)]), order[5:]])
        ids = next(iter(pools.values())).ids
        slots = torch.where(logical < 0, logical, ids[logical.clamp(min=0) // PAGE_SIZE] * PAGE_SIZE + logical % PAGE_SIZE)
        slots[6] = cache.num_pages * PAGE_SIZE
        rows = [ctx.rows(name, (len(slots), KV_HEADS, self.head_dim), role="read") for name in ("k", "v")]
        for one in rows:
            one.write(ctx.randn(*one.tensor.shape, scale=2.0))
        return {"rows": rows, "cache": cache, "pools": pools, "slots": ctx.tensor(slots), "logical": logical}

    def run(self, ctx: Context, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        k, v = inputs["rows"]
        write_kv(k.tensor, v.tensor, inputs["cache"], inputs["slots"], backend="triton")
        return {name: as_bits(pool.read()) for name, pool in inputs["pools"].items()}

    def oracle(self, ctx: Context, inputs: dict[str, Any]) -> Oracle:
        """What the twin writes into the same pages, compact."""
        twin, tensors = self._twin(inputs["pools"])
        k, v = (rows.read() for rows in inputs["rows"])
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        reference_cache.write_kv(k, v, twin, inputs["logical"])
        assert all(not torch.equal(as_bits(tensors[name]), as_bits(before[name])) for name in tensors)
        return Oracle(expected={name: as_bits(tensor).double() for name, tensor in tensors.items()})

    def _cache(self, ctx: Context) -> tuple[KVCache, dict[str, Placed]]:
        kv_format = self._format(ctx.dtype)
        dtype = ctx.dtype if kv_format.scales == "none" else torch.uint8
        page = (PAGE_SIZE, KV_HEADS) if self.kv_layout == "NHD" else (KV_HEADS, PAGE_SIZE)
        row = kv_format.row_bytes(self.head_dim) if self.inline else kv_format.row_elements(self.head_dim)
        first = ctx.pool(
            "kv" if self.inline else "k_cache", (*page, row * (2 if self.inline else 1)), pages=PAGES, num_pages=NUM_PAGES,
            dtype=dtype, role="write",
        )  # fmt: skip
        if self.inline:
            return self._from_tensor(first.tensor), {"kv": first}
        pools = {"k_cache": first, "v_cache": ctx.pool("v_cache", (*page, row), like=first, dtype=dtype, role="write")}
        if kv_format.scales == "token_head":
            for name in ("k_scale", "v_scale"):
                pools[name] = ctx.pool(name, page, like=first, dtype=torch.float32, role="write")
        given = [ctx.tensor(torch.tensor([0.031, 0.017])) for _ in range(2)] if kv_format.scales == "head" else []
        return self._separate([pool.tensor for pool in pools.values()], given), pools

    def _format(self, dtype: torch.dtype) -> formats.KVFormat:
        return formats.of(dtype, None) if self.format == "plain" else formats.named(self.format, self.scales)

    def _twin(self, pools: dict[str, Placed]) -> tuple[KVCache, dict[str, torch.Tensor]]:
        """A compact cache on the CPU of pages as fresh as those that the kernel got."""
        fresh = {name: torch.empty(PAGES, *pool.tensor.shape[1:], dtype=pool.tensor.dtype) for name, pool in pools.items()}
        if self.inline:
            return self._from_tensor(fresh["kv"]), fresh
        given = [torch.tensor([0.031, 0.017])] * 2 if self.scales == "head" else []
        return self._separate(list(fresh.values()), given), fresh

    def _from_tensor(self, tensor: torch.Tensor) -> KVCache:
        options: dict[str, Any] = {"format": self.format, "scales": self.scales}
        return KVCache.from_tensor(tensor, head_dim=self.head_dim, kv_layout=self.kv_layout, **options)

    def _separate(self, tensors: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> KVCache:
        kv_format = self._format(tensors[0].dtype)
        data = [tensor.view(kv_format.dtype) for tensor in tensors[:2]]
        scales = [*tensors[2:], *given, None, None]
        return KVCache(data[0], data[1], scales[0], scales[1], self.kv_layout)


class FarHeads(Case):
    """Head-major caches, scales and rows: the head stride, not the page stride, passes 32 bits."""

    name = "write-kv-far-heads"
    op = "write_kv"
    describe = "head-major K, V, int8 caches and scales whose head rows pass 2^31 elements"
    dtypes = DTYPES
    not_exercised = NOT_FAR
    placements = ("bottom", "top")

    def build(self, ctx: Context) -> dict[str, Any]:
        heads, head_dim, tokens = 6, 32, PAGES * PAGE_SIZE
        rows = [ctx.rows(name, (heads, tokens, head_dim), role="read") for name in ("k", "v")]
        for one in rows:
            one.write(ctx.randn(*one.tensor.shape))
        pools = {
            **{name: ctx.rows(name, (heads, PAGES, PAGE_SIZE, head_dim), dtype=torch.int8) for name in ("k_cache", "v_cache")},
            **{name: ctx.rows(name, (heads, PAGES, PAGE_SIZE), dtype=torch.float32) for name in ("k_scale", "v_scale")},
        }
        slots = ctx.tensor(torch.randperm(tokens, generator=ctx.generator("slots")))
        return {"rows": rows, "pools": pools, "slots": slots}

    def run(self, ctx: Context, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        k, v = (rows.tensor.transpose(0, 1) for rows in inputs["rows"])
        write_kv(k, v, self._cache([pool.tensor for pool in inputs["pools"].values()]), inputs["slots"], backend="triton")
        return {name: as_bits(pool.read()) for name, pool in inputs["pools"].items()}

    def oracle(self, ctx: Context, inputs: dict[str, Any]) -> Oracle:
        fresh = {name: torch.empty(pool.tensor.shape, dtype=pool.tensor.dtype) for name, pool in inputs["pools"].items()}
        k, v = (rows.read().transpose(0, 1) for rows in inputs["rows"])
        reference_cache.write_kv(k, v, self._cache(list(fresh.values())), inputs["slots"].cpu())
        return Oracle(expected={name: as_bits(tensor).double() for name, tensor in fresh.items()})

    def _cache(self, tensors: Sequence[torch.Tensor]) -> KVCache:
        k, v, k_scale, v_scale = (tensor.movedim(0, 2) for tensor in tensors)
        return KVCache(k, v, k_scale, v_scale)


CASES = [
    WriteCase("write-kv-plain", "rows copied into far pages of 3 x 2 x 32, HND", "plain", kv_layout="HND"),
    WriteCase("write-kv-fp8", "fp8 e4m3 with a scale per head", "fp8_e4m3", "head"),
    WriteCase("write-kv-int8", "int8, scales in pools of their own, HND", "int8", kv_layout="HND"),
    WriteCase("write-kv-int4-inline", "int4 with K, its word, V and its word in a row", "int4", inline=True),
    WriteCase("write-kv-fp8-e5m2", "fp8 e5m2 with a scale per token and head", "fp8_e5m2", "token_head", fast=False),
    WriteCase("write-kv-int8-inline", "int8 with K, its scale, V and its scale in a row", "int8", inline=True, fast=False),
    WriteCase("write-kv-int4", "int4, words in pools of their own, D 80", "int4", head_dim=80, fast=False),
    FarHeads(),
]  # fmt: skip
