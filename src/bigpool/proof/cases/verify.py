"""Verify attention at the bottom, across the wall and at the top of its pools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigpool import reference
from bigpool.ops.verify import _launch, verify_attention
from bigpool.proof.case import Case, Oracle
from bigpool.proof.context import Context
from bigpool.workspace import Workspace

DTYPES = ("bfloat16", "float16", "float32")
# Options that say where results go and how the work is cut up, not what they are.
OF_THE_KERNEL = ("out", "workspace", "num_splits", "deterministic")
NOT_FAR = ("seq_lens and cu_seqlens_q of verify_attention beyond 2^31 elements: no case places them",)


@dataclass(frozen=True)
class Batch:
    """The lengths of a batch: `seq_lens` with the new tokens counted, `q_lens` new tokens."""

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    def pages(self, page_size: int) -> list[int]:
        return [-(-length // page_size) for length in self.seq_lens]


def uniform(q_len: int, *seq_lens: int) -> Batch:
    return Batch(seq_lens, (q_len,) * len(seq_lens))


@dataclass(frozen=True)
class Call:
    """The arguments of one call, and how to read its output."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    options: Mapping[str, Any]
    label: str = ""

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens, self.cu_seqlens_q


def run_calls(calls: Sequence[Call], backend: str = "triton") -> dict[str, torch.Tensor]:
    outputs = {}
    for call in calls:
        q_lens = call.cu_seqlens_q.diff()
        out, lse = verify_attention(
            *call.arguments(), max_seqlen_q=int(q_lens.max()), return_lse=True, backend=backend, **call.options
        )
        # fp32 holds every fp8 value, and more of torch understands it.
        outputs["out" + call.label] = out.float() if out.element_size() == 1 else out
        outputs["lse" + call.label] = lse
    return outputs


def oracle_of(calls: Sequence[Call]) -> Oracle:
    expected: dict[str, torch.Tensor] = {}
    baseline: dict[str, torch.Tensor] = {}
    for call in calls:
        arguments = call.arguments()
        options = {name: value for name, value in call.options.items() if name not in OF_THE_KERNEL}
        for results, twin in (
            (expected, reference.verify_attention(*arguments, compute_dtype=torch.float64, **options)),
            (baseline, reference.verify_attention_baseline(*arguments, **options)),
        ):
            results["out" + call.label], results["lse" + call.label] = twin
        if baseline["out" + call.label].element_size() == 1:
            baseline["out" + call.label] = baseline["out" + call.label].float()
    return Oracle(expected=expected, baseline=baseline)


def starts_of(ctx: Context, q_lens: Sequence[int]) -> torch.Tensor:
    return ctx.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)


class VerifyCase(Case):
    """One or more batches over one pair of pools."""

    op = "verify_attention"
    dtypes = DTYPES
    not_exercised = NOT_FAR
    backend = "triton"

    def __init__(
        self,
        name: str,
        describe: str,
        batches: Sequence[Batch],
        *,
        page_size: int,
        heads: tuple[int, int] = (24, 4),
        head_dim: int = 256,
        num_pages: int | None = None,
        interleaved: bool = False,
        kv_layout: str = "NHD",
        shared_prefix: int = 0,
        planted: bool = False,
        fast: bool = True,
    ) -> None:
        self.name = name
        self.describe = describe
        self.batches = tuple(batches)
        self.page_size = page_size
        self.heads = heads
        self.head_dim = head_dim
        self.num_pages = num_pages
        self.interleaved = interleaved
        self.kv_layout = kv_layout
        self.shared_prefix = shared_prefix
        self.planted = planted
        self.fast = fast

    def build(self, ctx: Context) -> list[Call]:
        pages = max(sum(batch.pages(self.page_size)) for batch in self.batches)
        k, v = self._contents(ctx, pages)
        queries = [ctx.randn(batch.num_tokens, self.heads[0], self.head_dim) for batch in self.batches]
        tables = [self._logical_table(ctx, batch, pages) for batch in self.batches]
        if self.planted:
            for batch, q, table in zip(self.batches, queries, tables, strict=True):
                self._plant(batch, q, table, k)
        k_cache, v_cache, scales, table_of = self._caches(ctx, pages, k, v)
        options = [{"kv_layout": self.kv_layout, **scales, **self._options(ctx, batch)} for batch in self.batches]
        return [
            Call(
                ctx.tensor(q), k_cache, v_cache, self._with_garbage(ctx, table_of(table), batch),
                ctx.tensor(batch.seq_lens, dtype=torch.int32), starts_of(ctx, batch.q_lens), options[index],
                f"[{index}]" if len(self.batches) > 1 else "",
            )
            for index, (batch, q, table) in enumerate(zip(self.batches, queries, tables, strict=True))
        ]  # fmt: skip

    def run(self, ctx: Context, inputs: list[Call]) -> dict[str, torch.Tensor]:
        return run_calls(inputs, self.backend)

    def oracle(self, ctx: Context, inputs: list[Call]) -> Oracle:
        return oracle_of(inputs)

    def _contents(self, ctx: Context, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (pages, self.page_size, self.heads[1], self.head_dim)
        return ctx.randn(*shape), ctx.randn(*shape)

    def _options(self, ctx: Context, batch: Batch) -> dict[str, Any]:
        """What else a batch is called with."""
        return {}

    def _caches(
        self, ctx: Context, pages: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], Any]:
        """K and V as the kernel gets them, their scales, and what makes a table of logical page ids."""
        if self.kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        page_shape = tuple(k.shape[1:])
        if self.interleaved:
            pool = ctx.pool("kv", (2, *page_shape), pages=pages, num_pages=self.num_pages)
            pool.write(torch.stack((k, v), 1))
            return pool.tensor[:, 0], pool.tensor[:, 1], {}, pool.table
        k_pool = ctx.pool("k", page_shape, pages=pages, num_pages=self.num_pages)
        v_pool = ctx.pool("v", page_shape, like=k_pool)
        k_pool.write(k)
        v_pool.write(v)
        return k_pool.tensor, v_pool.tensor, {}, k_pool.table

    def _logical_table(self, ctx: Context, batch: Batch, pages: int) -> torch.Tensor:
        """Logical page ids [num_reqs, most pages]: shuffled, the first `shared_prefix` pages of every request the same."""
        order = torch.randperm(pages, generator=ctx.generator(f"table{batch}"))
        counts = batch.pages(self.page_size)
        table = torch.zeros(len(counts), max(*counts, 1), dtype=torch.int64)
        taken = 0
        for req, count in enumerate(counts):
            table[req, :count] = order[taken : taken + count]
            taken += count
            shared = min(self.shared_prefix, count)
            table[req, :shared] = table[0, :shared]
        return table

    def _with_garbage(self, ctx: Context, table: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Entries past the end of each request hold ids that no pool has."""
        garbage = ctx.randint(-(2**31), 2**31, table.shape, dtype=torch.int32).to(table.device)
        counts = torch.tensor(batch.pages(self.page_size), device=table.device)
        used = torch.arange(table.shape[1], device=table.device)[None, :] < counts[:, None]
        return ctx.tensor(torch.where(used, table, garbage))

    def _plant(self, batch: Batch, q: torch.Tensor, table: torch.Tensor, k: torch.Tensor) -> None:
        """For each query token and kv head one key that holds nearly all of the softmax, each on another page."""
        group = self.heads[0] // self.heads[1]
        token = 0
        for req, (seq_len, q_len) in enumerate(zip(batch.seq_lens, batch.q_lens, strict=True)):
            for i in range(q_len):
                for head in range(self.heads[1]):
                    position = (i * 2_654_435_761 + head * 40_503) % (seq_len - q_len)
                    page = table[req, position // self.page_size]
                    k[page, position % self.page_size, head] = q[token, head * group]
                token += 1


class FarRows(Case):
    """Query tokens, output tokens, rows of lse, scratch and block-table rows 2^31 elements apart."""

    name = "verify-far-rows"
    op = "verify_attention"
    describe = "4 requests whose q, out, lse, scratch and table rows pass 2^31 elements, also with scratch by request"
    dtypes = DTYPES
    not_exercised = NOT_FAR
    placements = ("bottom", "top")
    page_size = 16

    def build(self, ctx: Context) -> dict[str, Any]:
        heads, kv_heads, head_dim, page_size, splits = 8, 2, 64, self.page_size, 3
        batch = Batch((70, 33, 5, 90), (2, 1, 1, 2))
        k = ctx.tensor(ctx.randn(8, page_size, kv_heads, head_dim))
        v = ctx.tensor(ctx.randn(8, page_size, kv_heads, head_dim))
        q = ctx.rows("q", (batch.num_tokens, heads, head_dim), role="read")
        q.write(ctx.randn(batch.num_tokens, heads, head_dim))
        out = ctx.rows("out", (batch.num_tokens, heads, head_dim))
        # As many rows as `longest` takes: one for each token that a request may have.
        part = ctx.rows("scratch", (8, heads, splits, head_dim + 4), dtype=torch.float32)
        lse = ctx.rows("lse", (batch.num_tokens, heads), dtype=torch.float32)
        table = ctx.rows("block_table", (4, 6), dtype=torch.int32, role="read")
        table.write(ctx.randint(0, 8, (4, 6), dtype=torch.int32))
        lengths = ctx.tensor(batch.seq_lens, dtype=torch.int32), starts_of(ctx, batch.q_lens)
        call = Call(q.tensor, k, v, table.tensor, *lengths, {})
        return {"call": call, "out": out, "lse": lse, "part": part, "splits": splits}

    def run(self, ctx: Context, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """By the launcher, since the op makes its own lse."""
        call, out, lse = inputs["call"], inputs["out"], inputs["lse"]
        scale = call.q.shape[-1] ** -0.5
        outputs: dict[str, torch.Tensor] = {}
        for longest, label in ((0, ""), (2, "[by request]")):
            part = inputs["part"].tensor
            _launch(*call.arguments(), out.tensor, lse.tensor, part, 2, inputs["splits"], scale, longest=longest)
            outputs |= {"out" + label: out.read(), "lse" + label: lse.read()}
        return outputs

    def oracle(self, ctx: Context, inputs: dict[str, Any]) -> Oracle:
        return oracle_of([inputs["call"], replace(inputs["call"], label="[by request]")])


class FarHeads(Case):
    """Head-major caches, queries, outputs and scratch: the head stride, not the page stride, passes 32 bits."""

    name = "verify-far-heads"
    op = "verify_attention"
    describe = "head-major K, V, q, out and scratch whose head rows pass 2^31 elements"
    dtypes = DTYPES
    not_exercised = NOT_FAR
    placements = ("bottom", "top")
    backend = "triton"
    head_dim, page_size = 32, 16

    def build(self, ctx: Context) -> dict[str, Any]:
        heads, head_dim, page_size, pages, splits = 6, self.head_dim, self.page_size, 6, 2
        batch = Batch((50, 33), (2, 1))
        k = ctx.rows("k", (3, pages, page_size, head_dim), role="read")
        v = ctx.rows("v", (3, pages, page_size, head_dim), role="read")
        q = ctx.rows("q", (heads, batch.num_tokens, head_dim), role="read")
        out = ctx.rows("out", (heads, batch.num_tokens, head_dim))
        part = ctx.rows("scratch", (heads, batch.num_tokens, splits, head_dim + 4), dtype=torch.float32)
        for rows in (k, v, q):
            rows.write(ctx.randn(*rows.tensor.shape))
        table = ctx.tensor(ctx.randint(0, pages, (2, 4), dtype=torch.int32))
        k_cache, v_cache = (rows.tensor.permute(1, 2, 0, 3) for rows in (k, v))
        options = {
            "out": out.tensor.transpose(0, 1), "workspace": Workspace(part.tensor.transpose(0, 1)), "num_splits": splits,
        }  # fmt: skip
        lengths = ctx.tensor(batch.seq_lens, dtype=torch.int32), starts_of(ctx, batch.q_lens)
        return {"call": Call(q.tensor.transpose(0, 1), k_cache, v_cache, table, *lengths, options), "out": out}

    def run(self, ctx: Context, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        outputs = run_calls([inputs["call"]], self.backend)
        return {"out": inputs["out"].read().transpose(0, 1), "lse": outputs["lse"]}

    def oracle(self, ctx: Context, inputs: dict[str, Any]) -> Oracle:
        return oracle_of([inputs["call"]])


# The shapes of the original system's kernel test: 24 q / 4 kv heads, D 256, page 432.
SHORT_SHAPES = (
    uniform(5, 1_500),
    uniform(8, 700, 8),
    uniform(5, 432),
    uniform(3, 433, 431),
    uniform(16, 1_500),
    uniform(16, 2_000, 300),
    uniform(22, 1_500),
    uniform(64, 1_000),
)
LONG_SHAPES = (
    uniform(5, 37, 1_000, 4_321),
    uniform(1, 16_000),
    uniform(21, 9_000),
    uniform(32, 25_000),
    uniform(32, 600, 4_000),
)

CASES = [
    VerifyCase(
        "verify-big-pool", "20,000 tokens, q 8, on 23 of 2,600 pages of 880 x 4 x 256", [uniform(8, 20_000)],
        page_size=880, num_pages=2_600,
    ),
    VerifyCase(
        "verify-big-pool-interleaved", "the same with K and V in one page: twice the stride, half the wall", [uniform(8, 20_000)],
        page_size=880, num_pages=2_600, interleaved=True,
    ),
    VerifyCase("verify-shapes-short", "8 of the original's 13 shapes, page 432", SHORT_SHAPES, page_size=432),
    VerifyCase("verify-shapes-long", "the other 5 of its 13 shapes, page 432", LONG_SHAPES, page_size=432, fast=False),
    VerifyCase(
        "verify-ragged", "q lengths 8, 1, 0, 5, 16 and an empty request, HND, page 16, D 128",
        [Batch((700, 1, 45, 5, 90, 0), (8, 1, 0, 5, 16, 0))], page_size=16, heads=(8, 2), head_dim=128, kv_layout="HND",
    ),
    VerifyCase(
        "verify-shared-prefix", "four requests share three pages of 48, D 80, no grouped heads", [uniform(4, 200, 161, 144, 300)],
        page_size=48, heads=(3, 3), head_dim=80, shared_prefix=3,
    ),
    VerifyCase(
        "verify-page-one", "pages of one slot, a page per token, D 512", [Batch((40, 7), (3, 2))],
        page_size=1, heads=(16, 1), head_dim=512,
    ),
    VerifyCase(
        "verify-planted", "keys planted on far pages that hold nearly all of the softmax, page 1056", [uniform(6, 5_000, 2_300)],
        page_size=1_056, heads=(12, 2), head_dim=128, planted=True, interleaved=True,
    ),
    FarRows(),
    FarHeads(),
]  # fmt: skip
