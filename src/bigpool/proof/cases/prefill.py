"""Prefill attention, exact and int8, at the bottom, across the wall and at the top of its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bigpool import reference_prefill
from bigpool.ops.prefill import PrefillWorkspace, prefill_attention
from bigpool.proof.case import Case, Oracle
from bigpool.proof.cases.verify import DTYPES, Batch, Call, VerifyCase, starts_of
from bigpool.proof.context import Context

NOT_FAR = ("lse, lengths, and sums, means and scales of int8, of prefill_attention beyond 2^31 elements: no case places them",)
MODES = ("exact", "int8")
OF_THE_KERNEL = ("out", "workspace")


def with_modes(calls: Sequence[Call], **scratch: Any) -> list[Call]:
    """Every call in both modes; `scratch` goes into those of int8."""
    return [
        replace(call, label=f"{call.label}[{mode}]", options={**call.options, "qk": mode, **(scratch if mode == "int8" else {})})
        for call in calls
        for mode in MODES
    ]


def run_calls(calls: Sequence[Call]) -> dict[str, torch.Tensor]:
    outputs = {}
    for call in calls:
        longest = int(call.cu_seqlens_q.diff().max())
        given = prefill_attention(*call.arguments(), max_seqlen_q=longest, return_lse=True, backend="triton", **call.options)
        # An `out` that the caller placed is written again by the next call.
        outputs["out" + call.label], outputs["lse" + call.label] = (tensor.clone() for tensor in given)
    return outputs


def oracle_of(calls: Sequence[Call]) -> Oracle:
    """int8: of everything after the rounding to codes; how far codes are from the truth is for the tests."""
    expected: dict[str, torch.Tensor] = {}
    baseline: dict[str, torch.Tensor] = {}
    for call in calls:
        options = {name: value for name, value in call.options.items() if name not in OF_THE_KERNEL}
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

    def build(self, ctx: Context) -> list[Call]:
        if self.on_gpu and not ctx.interpreted:
            self.batches = self.on_gpu
        return with_modes(super().build(ctx))

    def _options(self, ctx: Context, batch: Batch) -> dict[str, Any]:
        return self.rules

    def run(self, ctx: Context, inputs: list[Call]) -> dict[str, torch.Tensor]:
        return run_calls(inputs)

    def oracle(self, ctx: Context, inputs: list[Call]) -> Oracle:
        return oracle_of(inputs)


class FarCase(Case):
    """Inputs that are lists of calls."""

    op = "prefill_attention"
    dtypes = DTYPES
    not_exercised = NOT_FAR
    placements = ("bottom", "top")

    def run(self, ctx: Context, inputs: list[Call]) -> dict[str, torch.Tensor]:
        return run_calls(inputs)

    def oracle(self, ctx: Context, inputs: list[Call]) -> Oracle:
        return oracle_of(inputs)


class FarRows(FarCase):
    """Query tokens, output tokens and block-table rows 2^31 elements apart."""

    name = "prefill-far-rows"
    describe = "4 requests whose q, out and table rows pass 2^31 elements"

    def build(self, ctx: Context) -> list[Call]:
        heads, kv_heads, head_dim, page_size = 2, 1, 32, 16
        batch = Batch((70, 33, 5, 90), (2, 1, 1, 2))
        k, v = (ctx.tensor(ctx.randn(8, page_size, kv_heads, head_dim)) for _ in range(2))
        q = ctx.rows("q", (batch.num_tokens, heads, head_dim), role="read")
        q.write(ctx.randn(batch.num_tokens, heads, head_dim))
        out = ctx.rows("out", (batch.num_tokens, heads, head_dim))
        table = ctx.rows("block_table", (4, 6), dtype=torch.int32, role="read")
        table.write(ctx.randint(0, 8, (4, 6), dtype=torch.int32))
        lengths = ctx.tensor(batch.seq_lens, dtype=torch.int32), starts_of(ctx, batch.q_lens)
        return with_modes([Call(q.tensor, k, v, table.tensor, *lengths, {"out": out.tensor})])


class FarHeads(FarCase):
    """Head-major caches, queries and outputs: the head stride, not the page stride, passes 32 bits."""

    name = "prefill-far-heads"
    describe = "head-major K, V, q and out whose head rows pass 2^31 elements"

    def build(self, ctx: Context) -> list[Call]:
        heads, head_dim, page_size, pages = 6, 32, 16, 6
        batch = Batch((50, 33), (2, 1))
        k = ctx.rows("k", (3, pages, page_size, head_dim), role="read")
        v = ctx.rows("v", (3, pages, page_size, head_dim), role="read")
        q = ctx.rows("q", (heads, batch.num_tokens, head_dim), role="read")
        out = ctx.rows("out", (heads, batch.num_tokens, head_dim))
        for rows in (k, v, q):
            rows.write(ctx.randn(*rows.tensor.shape))
        table = ctx.tensor(ctx.randint(0, pages, (2, 4), dtype=torch.int32))
        k_cache, v_cache = (rows.tensor.permute(1, 2, 0, 3) for rows in (k, v))
        lengths = ctx.tensor(batch.seq_lens, dtype=torch.int32), starts_of(ctx, batch.q_lens)
        options = {"out": out.tensor.transpose(0, 1)}
        return with_modes([Call(q.tensor.transpose(0, 1), k_cache, v_cache, table, *lengths, options)])


class FarContext(FarCase):
    """A window at the end of a context so long that the codes of its keys pass 2^33 elements; other keys are not there."""

    name = "prefill-far-context"
    describe = "a window of 40 at the end of 16,777,280 tokens: positions, and int8 codes beyond 2^33 elements"

    def build(self, ctx: Context) -> list[Call]:
        heads, head_dim, page_size, keys, q_len = 2, 256, 16, 64, 8
        codes = ctx.pool("codes", (heads, head_dim), pages=keys, num_pages=2**24 + keys, dtype=torch.int8, role="write")
        # A multiple of every tile, so that tiles hold the same keys at the bottom and at the top.
        base = int(codes.ids.min())
        pages = keys // page_size
        k, v = (ctx.tensor(ctx.randn(pages, page_size, heads, head_dim)) for _ in range(2))
        table = torch.full((1, (base + keys) // page_size), -1, dtype=torch.int32)
        table[0, -pages:] = torch.arange(pages - 1, -1, -1)
        scales = torch.empty(len(codes.tensor), heads, dtype=torch.float32, device=ctx.device)
        made = PrefillWorkspace.empty(max_num_reqs=1, max_num_keys=1, num_kv_heads=heads, head_dim=head_dim, device=ctx.device)
        scratch = replace(made, codes=codes.tensor, scales=scales)
        lengths = ctx.tensor([base + keys], dtype=torch.int32), starts_of(ctx, (q_len,))
        q = ctx.tensor(ctx.randn(q_len, heads, head_dim))
        return with_modes([Call(q, k, v, ctx.tensor(table), *lengths, {"window_size": 40})], workspace=scratch)


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
    FarRows(),
    FarHeads(),
    FarContext(),
]  # fmt: skip
