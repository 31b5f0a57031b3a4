"""Prefill attention, in every mode, at the bottom, across the wall and at the top of its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bigpool import reference_prefill
from bigpool._device import device_props
from bigpool.ops._prefill_plan import OLDEST_FP8, VALUE_TILE
from bigpool.ops.prefill import KeyCodes, PrefillWorkspace, prefill_attention
from bigpool.proof.case import Case, Oracle
from bigpool.proof.cases.verify import DTYPES, Batch, Call, VerifyCase, starts_of
from bigpool.proof.context import Context, default_num_pages

NOT_FAR = ("lse, lengths, sums and means of prefill_attention beyond 2^31 elements: no case places them",)
MODES: dict[str, dict[str, str]] = {"exact": {}, "int8": {"qk": "int8"}}
MODES_WITH_FP8 = {**MODES, "fp8": {"pv": "fp8"}}
OF_THE_KERNEL = ("out", "workspace", "key_codes")


def summable(k: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/32 near `k`: their sums, and so the mean that int8 scores take from keys, are the same in every order."""
    return (k.float() * 32).round().div(32).to(k.dtype)


def with_modes(ctx: Context, calls: Sequence[Call], modes: Mapping[str, Mapping[str, Any]]) -> list[Call]:
    """Every call in every mode that the device has."""
    props = device_props(torch.device(ctx.device))
    has_fp8 = props.interpreted or props.sm >= OLDEST_FP8
    return [
        replace(call, label=f"{call.label}[{name}]", options={**call.options, **mode})
        for call in calls
        for name, mode in modes.items()
        if has_fp8 or mode.get("pv") != "fp8"
    ]


def run_calls(calls: Sequence[Call], backend: str) -> dict[str, torch.Tensor]:
    outputs = {}
    for call in calls:
        longest = int(call.cu_seqlens_q.diff().max())
        given = prefill_attention(*call.arguments(), max_seqlen_q=longest, return_lse=True, backend=backend, **call.options)
        # An `out` that the caller placed is written again by the next call.
        outputs["out" + call.label], outputs["lse" + call.label] = (tensor.clone() for tensor in given)
    return outputs


def oracle_of(calls: Sequence[Call]) -> Oracle:
    """int8: of everything after the rounding to codes; how far codes are from the truth is for the tests."""
    expected: dict[str, torch.Tensor] = {}
    baseline: dict[str, torch.Tensor] = {}
    for call in calls:
        options = {name: value for name, value in call.options.items() if name not in OF_THE_KERNEL}
        if (kept := call.options.get("key_codes")) is not None:
            options["kept"] = kept.codes, kept.scales
        twins = (
            (expected, reference_prefill.prefill_attention(*call.arguments(), compute_dtype=torch.float64, **options)),
            (baseline, reference_prefill.prefill_attention_baseline(*call.arguments(), **options)),
        )
        for results, twin in twins:
            results["out" + call.label], results["lse" + call.label] = twin
    return Oracle(expected=expected, baseline=baseline)


class PrefillCase(VerifyCase):
    """One or more batches over one pair of pools, each in both modes. `on_gpu`: the batches where the kernel is compiled."""

    op = "prefill_attention"
    not_exercised = NOT_FAR

    def __init__(
        self,
        name: str,
        describe: str,
        batches: Sequence[Batch],
        *,
        on_gpu: Sequence[Batch] = (),
        rules: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(name, describe, batches, **settings)
        self.on_gpu = tuple(on_gpu)
        self.rules = dict(rules or {})

    def modes(self) -> Mapping[str, Mapping[str, Any]]:
        return MODES

    def build(self, ctx: Context) -> list[Call]:
        if self.on_gpu and not ctx.interpreted:
            self.batches = self.on_gpu
        return with_modes(ctx, super().build(ctx), self.modes())

    def _contents(self, ctx: Context, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super()._contents(ctx, pages)
        return summable(k), v

    def _plant(self, batch: Batch, q: torch.Tensor, table: torch.Tensor, k: torch.Tensor) -> None:
        super()._plant(batch, q, table, k)
        k.copy_(summable(k))

    def _options(self, ctx: Context, batch: Batch) -> dict[str, Any]:
        return self.rules

    def run(self, ctx: Context, inputs: list[Call]) -> dict[str, torch.Tensor]:
        return run_calls(inputs, self.backend)

    def oracle(self, ctx: Context, inputs: list[Call]) -> Oracle:
        return oracle_of(inputs)


class FarCase(Case):
    """Inputs that are lists of calls."""

    op = "prefill_attention"
    dtypes = DTYPES
    not_exercised = NOT_FAR
    placements = ("bottom", "top")
    backend = "triton"
    head_dim = 32

    def modes(self, **others: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        return {**MODES_WITH_FP8, **others}

    def run(self, ctx: Context, inputs: list[Call]) -> dict[str, torch.Tensor]:
        return run_calls(inputs, self.backend)

    def oracle(self, ctx: Context, inputs: list[Call]) -> Oracle:
        return oracle_of(inputs)


def kept_mode(ctx: Context, num_pages: int, page_size: int, kv_heads: int, head_dim: int, num_reqs: int) -> dict[str, Any]:
    """Of a call that keeps the codes of its keys, which lie near."""
    parts = (
        torch.zeros(num_pages, page_size, kv_heads, head_dim, dtype=torch.int8),
        torch.zeros(num_pages, page_size, kv_heads, dtype=torch.float32),
        torch.zeros(num_reqs, kv_heads, head_dim, dtype=torch.float32),
    )
    return {"qk": "int8", "key_codes": KeyCodes(*(ctx.tensor(part, part.dtype, role="write") for part in parts))}


class FarRows(FarCase):
    """Query tokens, output tokens and block-table rows 2^31 elements apart."""

    name = "prefill-far-rows"
    describe = "4 requests whose q, out and table rows pass 2^31 elements"

    def build(self, ctx: Context) -> list[Call]:
        heads, kv_heads, head_dim, page_size = 2, 1, self.head_dim, 64
        batch = Batch((70, 33, 5, 190), (2, 1, 1, 70))
        shape = 8, page_size, kv_heads, head_dim
        k, v = ctx.tensor(summable(ctx.randn(*shape))), ctx.tensor(ctx.randn(*shape))
        q = ctx.rows("q", (batch.num_tokens, heads, head_dim), role="read")
        q.write(ctx.randn(batch.num_tokens, heads, head_dim))
        out = ctx.rows("out", (batch.num_tokens, heads, head_dim))
        table = ctx.rows("block_table", (4, 6), dtype=torch.int32, role="read")
        table.write(ctx.randint(0, 8, (4, 6), dtype=torch.int32))
        lengths = ctx.tensor(batch.seq_lens, dtype=torch.int32), starts_of(ctx, batch.q_lens)
        modes = self.modes(kept=kept_mode(ctx, 8, page_size, kv_heads, head_dim, 4))
        return with_modes(ctx, [Call(q.tensor, k, v, table.tensor, *lengths, {"out": out.tensor})], modes)


class FarHeads(FarCase):
    """Head-major caches, queries and outputs: the head stride, not the page stride, passes 32 bits."""

    name = "prefill-far-heads"
    describe = "head-major K, V, q and out whose head rows pass 2^31 elements"

    def build(self, ctx: Context) -> list[Call]:
        heads, head_dim, page_size, pages = 6, self.head_dim, 64, 6
        batch = Batch((150, 33), (30, 1))
        k = ctx.rows("k", (3, pages, page_size, head_dim), role="read")
        v = ctx.rows("v", (3, pages, page_size, head_dim), role="read")
        q = ctx.rows("q", (heads, batch.num_tokens, head_dim), role="read")
        out = ctx.rows("out", (heads, batch.num_tokens, head_dim))
        for rows in (k, v, q):
            rows.write(summable(ctx.randn(*rows.tensor.shape)))
        table = ctx.tensor(ctx.randint(0, pages, (2, 4), dtype=torch.int32))
        k_cache, v_cache = (rows.tensor.permute(1, 2, 0, 3) for rows in (k, v))
        lengths = ctx.tensor(batch.seq_lens, dtype=torch.int32), starts_of(ctx, batch.q_lens)
        options = {"out": out.tensor.transpose(0, 1)}
        modes = self.modes(kept=kept_mode(ctx, pages, page_size, 3, head_dim, 2))
        return with_modes(ctx, [Call(q.tensor.transpose(0, 1), k_cache, v_cache, table, *lengths, options)], modes)


class FarContext(FarCase):
    """A window at the end of a context so long that the rows of scratch x kv heads pass 2^31; other keys are not there."""

    name = "prefill-far-context"
    describe = (
        "a window of 40 at the end of 536,870,976 tokens: positions, codes of keys and values, and scales beyond 2^31 elements"
    )

    def build(self, ctx: Context) -> list[Call]:
        heads, head_dim, page_size, keys, q_len = 4, self.head_dim, 4_096, 64, 8
        codes = ctx.pool("codes", (heads, head_dim), pages=keys, num_pages=2**29 + keys, dtype=torch.int8, role="write")
        scales = ctx.pool("scales", (heads,), like=codes, dtype=torch.float32, role="write")
        # A multiple of every tile, so that tiles hold the same keys at the bottom and at the top.
        base = int(codes.ids.min())
        # One tile, and the one that a batch may waste at a page's end.
        tiles = ctx.pool(
            "value_codes",
            (heads, head_dim, VALUE_TILE),
            pages=2,
            num_pages=2**29 // VALUE_TILE + 2,
            dtype=torch.uint8,
            role="write",
        )
        k, v = (ctx.tensor(summable(ctx.randn(1, page_size, heads, head_dim))) for _ in range(2))
        table = torch.full((1, base // page_size + 1), -1, dtype=torch.int32)
        table[0, -1] = 0
        near = PrefillWorkspace.empty(
            max_num_reqs=1, max_num_keys=1, num_kv_heads=heads, head_dim=head_dim, pv="fp8", device=ctx.device
        )  # fmt: skip
        scratch = replace(
            near, max_num_keys=base + keys, codes=codes.tensor, scales=scales.tensor, value_codes=tiles.tensor
        )  # fmt: skip
        lengths = ctx.tensor([base + keys], dtype=torch.int32), starts_of(ctx, (q_len,))
        q = ctx.tensor(ctx.randn(q_len, heads, head_dim))
        modes = self.modes(exact={}, int8={"qk": "int8", "workspace": scratch}, fp8={"pv": "fp8", "workspace": scratch})
        return with_modes(ctx, [Call(q, k, v, ctx.tensor(table), *lengths, {"window_size": 40})], modes)


class KeptCodes(PrefillCase):
    """Codes of keys that are kept, on the pages of the cache; the pool is so large that their scales pass 2^31 elements too."""

    def build(self, ctx: Context) -> list[Call]:
        return with_modes(ctx, VerifyCase.build(self, ctx), {"kept": {"qk": "int8"}})

    def _caches(
        self, ctx: Context, pages: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], Any]:
        self.num_pages = default_num_pages(self.page_size * self.heads[1], pages)
        k_cache, v_cache, options, table_of = super()._caches(ctx, pages, k, v)
        page = self.page_size, self.heads[1]
        # Both caches are of the pool that `table_of` belongs to.
        cache = table_of.__self__
        codes = ctx.pool("codes", (*page, self.head_dim), dtype=torch.int8, like=cache, role="write")
        scales = ctx.pool("scales", page, dtype=torch.float32, like=cache, role="write")
        means = ctx.tensor(torch.zeros(len(self.batches[0].seq_lens), *page[1:], self.head_dim), torch.float32, role="write")
        return k_cache, v_cache, {**options, "key_codes": KeyCodes(codes.tensor, scales.tensor, means)}, table_of


CASES = [
    PrefillCase(
        "prefill-big-pool", "20,000 tokens, the last 2,048 new (without a GPU 1,000 and 10), on 2,600 pages of 880 x 4 x 256",
        [Batch((1_000,), (10,))], on_gpu=[Batch((20_000,), (2_048,))], page_size=880, heads=(24, 4), num_pages=2_600,
    ),
    PrefillCase(
        "prefill-ragged", "q lengths 40, 0, 5, 16 and an empty request, HND, page 16, window 60, soft cap",
        [Batch((300, 45, 5, 90, 0), (40, 0, 5, 16, 0))], page_size=16, heads=(4, 2), head_dim=64, kv_layout="HND",
        rules={"window_size": 60, "softcap": 20.0},
    ),
    PrefillCase(
        "prefill-planted", "keys planted on far pages that hold nearly all of the softmax, K and V in one page of 1056",
        [Batch((1_300, 400), (6, 9))], page_size=1_056, heads=(6, 2), head_dim=128, planted=True, interleaved=True,
    ),
    KeptCodes(
        "prefill-kept", "int8 codes of keys that are kept, and their scales, on the pages of the cache",
        [Batch((300, 45, 200), (300, 9, 150))], page_size=16, heads=(4, 2), head_dim=64,
    ),
    FarRows(),
    FarHeads(),
    FarContext(),
]  # fmt: skip
