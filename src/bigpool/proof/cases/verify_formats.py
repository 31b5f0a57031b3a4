"""Verify attention over quantised caches, and with masks, at the bottom, across the wall and at the top of its pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from bigpool import formats
from bigpool.ops.verify import pack_tree_mask
from bigpool.proof.case import Oracle
from bigpool.proof.cases.verify import NOT_FAR, Batch, Call, VerifyCase, oracle_of, run_calls
from bigpool.proof.context import Context, default_num_pages

# Codes are placed as bytes, which are no numbers to anything but the kernel.
BYTES = {torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
BATCHES = (Batch((300, 45, 0, 5), (6, 1, 0, 7)),)
MASKED = (Batch((150, 20), (5, 2)),)
SHAPE: dict[str, Any] = {"page_size": 16, "heads": (8, 2), "head_dim": 64}


class FormatCase(VerifyCase):
    """A quantised cache with its scales apart, as far apart as its pages, or inline behind each row."""

    def __init__(
        self, name: str, kv_format: str, scales: str, *, inline: bool = False, kv_layout: str = "NHD", **shape: Any
    ) -> None:
        where = "inline" if inline else "apart"
        describe = f"{kv_format} cache, scales per {scales.replace('_', ' and ')} {where}, {kv_layout}"
        super().__init__(name, describe, BATCHES, kv_layout=kv_layout, **(SHAPE | shape))
        self.format = formats.named(kv_format, scales)
        self.inline = inline

    def _caches(
        self, ctx: Context, pages: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], Any]:
        k = formats.rotate(k) if self.format.rotates_k else k
        given = self._given_scale()
        parts = [part for rows in (k, v) for part in self.format.quantize(rows, given)]
        if self.kv_layout == "HND":
            parts = [part if part is None or part.dim() < 3 else part.transpose(1, 2) for part in parts]
        codes = [parts[0], parts[2]]
        scales = [part for part in (parts[1], parts[3]) if part is not None]
        return self._inline(ctx, pages, codes, scales) if self.inline else self._apart(ctx, pages, codes, scales)

    def _given_scale(self) -> torch.Tensor | None:
        if self.format.scales == "head":
            return torch.linspace(0.01, 0.03, self.heads[1])
        return torch.tensor([0.02]) if self.format.scales == "tensor" else None

    def _apart(
        self, ctx: Context, pages: int, codes: list[torch.Tensor | None], scales: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], Any]:
        dtype = self.format.dtype
        bits = BYTES.get(dtype, dtype)
        first: Any = None
        tensors, options = [], {}
        for name, data in zip("kv", codes, strict=True):
            assert data is not None
            pool = ctx.pool(name, data.shape[1:], pages=pages, dtype=bits, like=first)
            pool.write(data.view(bits))
            first = first or pool
            tensors.append(pool.tensor.view(dtype))
        for name, data in zip(("k_scale", "v_scale"), scales, strict=bool(scales)):
            if self.format.scales != "token_head":
                options[name] = ctx.tensor(data)
                continue
            # As far from page to page as the codes, so that both pass 2^31 at the same page.
            strides = (first.page_stride, data.shape[2], 1)
            pool = ctx.pool(name, data.shape[1:], dtype=torch.float32, strides=strides, like=first)
            pool.write(data)
            options[name] = pool.tensor
        return tensors[0], tensors[1], options, first.table

    def _inline(
        self, ctx: Context, pages: int, codes: list[torch.Tensor | None], scales: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], Any]:
        """Bytes [K, scale, V, scale] per slot and head. The pool is so large that the fp32 views pass 2^31 elements too."""
        rows = []
        for data, scale in zip(codes, scales, strict=True):
            assert data is not None
            rows += [data.contiguous().view(torch.uint8), scale.contiguous().unsqueeze(-1).view(torch.uint8)]
        whole = torch.cat(rows, -1)
        width, row = whole.shape[-1], rows[0].shape[-1]
        words_per_page = whole[0].numel() // 4
        num_pages = default_num_pages(words_per_page, pages)
        pool = ctx.pool("kv", whole.shape[1:], pages=pages, num_pages=num_pages, dtype=torch.uint8)
        pool.write(whole)
        words = pool.tensor.view(torch.float32)
        half = width // 2
        k_cache, v_cache = (pool.tensor[..., at : at + row].view(self.format.dtype) for at in (0, half))
        options = {"k_scale": words[..., row // 4], "v_scale": words[..., (half + row) // 4]}
        return k_cache, v_cache, options, pool.table


class MaskCase(VerifyCase):
    """One batch under every rule in turn, on plain pools."""

    def __init__(self) -> None:
        self.rules: tuple[dict[str, Any], ...] = (
            {"window_size": 40, "num_sink_tokens": 5, "softcap": 2.0, "alibi_slopes": True, "sinks": True},
            {"tree_mask": True, "out_scale": True},
            {"causal": False, "chunk_size": 50, "deterministic": "batch"},
        )
        describe = "windows, chunks, sinks, ALiBi, soft cap, trees, fp8 output, batch mode"
        super().__init__("verify-masks", describe, MASKED * len(self.rules), page_size=16, heads=(4, 2), head_dim=32)

    def build(self, ctx: Context) -> list[Call]:
        calls = super().build(ctx)
        return [
            replace(call, options={**call.options, **self._rule(ctx, rule)}) for call, rule in zip(calls, self.rules, strict=True)
        ]

    def _rule(self, ctx: Context, rule: dict[str, Any]) -> dict[str, Any]:
        heads, tokens = self.heads[0], MASKED[0].num_tokens
        tensors = {
            "alibi_slopes": torch.linspace(0.0, 0.1, heads),
            "sinks": torch.linspace(-1.0, 2.0, heads),
            "tree_mask": pack_tree_mask(torch.arange(tokens)[:, None] % 5 != torch.arange(max(MASKED[0].q_lens))),
            "out_scale": torch.tensor([0.01]),
        }
        return {name: ctx.tensor(tensors[name]) if value is True else value for name, value in rule.items()}


class FarTrees(VerifyCase):
    """The rows of a tree mask 2^31 elements apart."""

    placements = ("bottom", "top")
    not_exercised = NOT_FAR

    def __init__(self) -> None:
        batch = Batch((70, 33), (4, 2))
        super().__init__("verify-far-trees", "a tree mask whose rows pass 2^31 elements", [batch], **SHAPE)

    def build(self, ctx: Context) -> list[Call]:
        k = ctx.tensor(ctx.randn(7, 16, 2, 64))
        v = ctx.tensor(ctx.randn(7, 16, 2, 64))
        tree = ctx.rows("tree_mask", (6, 1), dtype=torch.int32, role="read")
        tree.write(ctx.randint(0, 2**8, (6, 1), dtype=torch.int32))
        batch = self.batches[0]
        table = ctx.tensor(ctx.randint(0, 7, (2, 5), dtype=torch.int32))
        starts = ctx.tensor([0, 4, 6], dtype=torch.int32)
        lengths = ctx.tensor(batch.seq_lens, dtype=torch.int32)
        return [Call(ctx.tensor(ctx.randn(6, 8, 64)), k, v, table, lengths, starts, {"tree_mask": tree.tensor})]

    def run(self, ctx: Context, inputs: list[Call]) -> dict[str, torch.Tensor]:
        return run_calls(inputs)

    def oracle(self, ctx: Context, inputs: list[Call]) -> Oracle:
        return oracle_of(inputs)


CASES = [
    FormatCase("verify-int8", "int8", "token_head"),
    FormatCase("verify-int8-inline", "int8", "token_head", inline=True, kv_layout="HND"),
    FormatCase("verify-int4", "int4", "token_head", kv_layout="HND"),
    FormatCase("verify-int4-inline", "int4", "token_head", inline=True),
    FormatCase("verify-e4m3", "fp8_e4m3", "tensor"),
    FormatCase("verify-e4m3-rows", "fp8_e4m3", "token_head"),
    FormatCase("verify-e5m2", "fp8_e5m2", "head", kv_layout="HND"),
    MaskCase(),
    FarTrees(),
]
