"""Merging states whose tokens, heads and states lie 2^31 elements apart."""

from __future__ import annotations

from typing import Any

import torch

from bigpool import reference_merge
from bigpool.ops.merge import merge_states
from bigpool.proof.case import Case, Oracle
from bigpool.proof.context import Context

AXES = {"token": 1, "head": 2, "state": 0}


class MergeCase(Case):
    """Outputs, lses and the merged output with one axis far apart."""

    op = "merge_states"
    dtypes = ("bfloat16", "float16", "float32")
    not_exercised = ("the merged lse of merge_states beyond 2^31 elements: it has one per token and head",)
    placements = ("bottom", "top")

    def __init__(self, axis: str, *, fast: bool = True) -> None:
        self.axis = axis
        self.name = f"merge-far-{axis}s"
        self.describe = f"6 states x 6 tokens x 6 heads, {axis}s 2^31 elements apart"
        self.fast = fast

    def build(self, ctx: Context) -> dict[str, Any]:
        axis = AXES[self.axis]
        outs = ctx.rows("outs", (6, 6, 6, 16), role="read")
        lses = ctx.rows("lses", (6, 6, 6), dtype=torch.float32, role="read")
        for rows in (outs, lses):
            rows.write(ctx.randn(*rows.tensor.shape, dtype=rows.tensor.dtype))
        return {"outs": outs, "lses": lses, "out": ctx.rows("out", (6, 6, 16)), "axis": axis}

    def run(self, ctx: Context, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        outs, lses = (inputs[name].tensor.movedim(0, inputs["axis"]) for name in ("outs", "lses"))
        # The states share one output: with far states its tokens are far, which also shows that the 32-bit arm can fail.
        placed, place = inputs["out"], max(inputs["axis"] - 1, 0)
        _, lse = merge_states(outs, lses, out=placed.tensor.movedim(0, place), backend="triton")
        return {"out": placed.read().movedim(0, place), "lse": lse}

    def oracle(self, ctx: Context, inputs: dict[str, Any]) -> Oracle:
        outs, lses = (inputs[name].read().movedim(0, inputs["axis"]) for name in ("outs", "lses"))
        exact = reference_merge.merge_states(outs, lses, compute_dtype=torch.float64)
        rounded = reference_merge.merge_states(outs, lses, reverse=True)
        expected, baseline = (dict(zip(("out", "lse"), pair, strict=True)) for pair in (exact, rounded))
        return Oracle(expected=expected, baseline=baseline)


CASES = [MergeCase("token"), MergeCase("head"), MergeCase("state", fast=False)]
