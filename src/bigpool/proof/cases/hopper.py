"""The kernels that `backend="auto"` has for Hopper: verify and prefill attention in the serving configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigpool.ops._verify_sm90 import has_gluon
from bigpool.proof.case import Case
from bigpool.proof.cases import prefill, verify, verify_formats
from bigpool.proof.cases.verify import Batch
from bigpool.proof.context import Context
from bigpool.tuning_sm90 import TRITON_VERSIONS


class OnHopper(Case):
    """Mixed into a case of the plain kernels."""

    backend = "auto"
    fast = False
    # int8 needs more than 32, and 64 is too short for its Hopper kernel.
    head_dim = 128

    def build(self, ctx: Context) -> Any:
        if ctx.capability != (9, 0) or not has_gluon():
            versions = ", ".join(f"{major}.{minor}" for major, minor in TRITON_VERSIONS)
            ctx.skip(f"the Hopper kernels need compute capability 9.0 and Triton {versions}")
        return super().build(ctx)

    def modes(self, **others: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Those of prefill attention that have a Hopper kernel."""
        return {**prefill.MODES, "fp8": {"qk": "int8", "pv": "fp8"}}


class FarTables(OnHopper):
    """TMA forms the addresses of pages: without widenings they are still right. Rows of the block table are not."""

    def _with_garbage(self, ctx: Context, table: torch.Tensor, batch: Batch) -> torch.Tensor:
        near: torch.Tensor = super()._with_garbage(ctx, table, batch)  # type: ignore[misc]
        rows = ctx.rows(f"block_table of {batch.q_lens}", near.shape, dtype=near.dtype, role="read")
        rows.write(near)
        return rows.tensor


class Verify(FarTables, verify.VerifyCase):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named, fast=False)


class Format(OnHopper, verify_formats.FormatCase):
    def __init__(self, name: str, *given: Any, **named: Any) -> None:
        super().__init__(name, *given, **named)
        self.fast = False


class VerifyRows(OnHopper, verify.FarRows):
    def __init__(self, name: str, page_size: int) -> None:
        self.name, self.page_size = name, page_size


class VerifyHeads(OnHopper, verify.FarHeads):
    def __init__(self, name: str, page_size: int) -> None:
        self.name, self.page_size = name, page_size


class Prefill(FarTables, prefill.PrefillCase):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named, fast=False)


class PrefillRows(OnHopper, prefill.FarRows):
    name = "hopper-prefill-far-rows"


class PrefillHeads(OnHopper, prefill.FarHeads):
    name = "hopper-prefill-far-heads"


class PrefillContext(OnHopper, prefill.FarContext):
    name = "hopper-prefill-far-context"

    def modes(self, **others: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        return {**others, "fp8": {**others["int8"], **others["fp8"]}}


CASES = [
    Verify(
        "hopper-verify-big-pool", "20,000 tokens, q 8 and q 4, on 23 of 2,600 pages of 880 x 4 x 256",
        [Batch((20_000, 7, 3), (q_len, 1, 1)) for q_len in (8, 4)], page_size=880, num_pages=2_600,
    ),
    Verify(
        "hopper-verify-ragged", "q lengths 8, 1, 0, 5, 16 and an empty request, HND, page 16, D 128",
        [Batch((700, 1, 45, 5, 90, 0), (8, 1, 0, 5, 16, 0))], page_size=16, heads=(8, 2), head_dim=128, kv_layout="HND",
    ),
    Format("hopper-verify-int8", "int8", "token_head", page_size=64, head_dim=128),
    Format("hopper-verify-int8-small-pages", "int8", "token_head", kv_layout="HND", head_dim=128),
    Format("hopper-verify-int4", "int4", "token_head", page_size=64, head_dim=256),
    Format("hopper-verify-e4m3", "fp8_e4m3", "token_head", page_size=64, head_dim=128),
    VerifyRows("hopper-verify-far-rows", 64),
    VerifyRows("hopper-verify-far-rows-small-pages", 16),
    VerifyHeads("hopper-verify-far-heads", 64),
    VerifyHeads("hopper-verify-far-heads-small-pages", 16),
    Prefill(
        "hopper-prefill-big-pool", "20,000 tokens, the last 2,048 new, on 2,600 pages of 880 x 4 x 256",
        [Batch((20_000, 7, 3), (2_048, 1, 1))], page_size=880, heads=(24, 4), num_pages=2_600,
    ),
    Prefill(
        "hopper-prefill-ragged", "q lengths 40, 0, 5, 16 and an empty request, HND, page 16, window 60, soft cap",
        [Batch((300, 45, 5, 90, 0), (40, 0, 5, 16, 0))], page_size=16, heads=(4, 2), head_dim=128, kv_layout="HND",
        rules={"window_size": 60, "softcap": 20.0},
    ),
    PrefillRows(),
    PrefillHeads(),
    PrefillContext(),
]  # fmt: skip
