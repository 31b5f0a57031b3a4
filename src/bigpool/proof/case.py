"""What a proof case is made of: the protocol that built-in cases and a user's file share. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from bigpool.proof.context import Context

PLACEMENTS = ("bottom", "top", "across")
# Triton's interpreter computes these without an error and wrongly; the value is the short name.
WRONG_IN_INTERPRETER = {"bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}


@dataclass(frozen=True)
class Oracle:
    """What the outputs should be.

    `expected`: float64 CPU tensors by output name. NaN and infinities in it must appear in the output at exactly the same
    places. `baseline`: the same quantity computed in the output's own dtype in another order (house rule 5); its error
    against `expected` sets the bound. An output without a baseline is held to 2 ulp.
    """

    expected: Mapping[str, torch.Tensor]
    baseline: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Case:
    """One input for a kernel, built at any placement. Subclass it, or give an object with the same attributes.

    `name`: unique, lower case with dashes. `op`: what is called. `describe`: one line. `fast`: part of the subset that
    runs without a GPU. `dtypes`: names of torch dtypes in order of preference; the first one that the backend computes
    right is `ctx.dtype`. `placements`: leave "across" out where the case has no paged pool. `not_exercised`: lines on what
    the case does not place or vary, for the list that is printed with the result.
    """

    name: str = ""
    op: str = ""
    describe: str = ""
    fast: bool = True
    dtypes: Sequence[str] = ("float16", "float32")
    placements: Sequence[str] = PLACEMENTS
    not_exercised: Sequence[str] = ()

    def build(self, ctx: Context) -> Any:
        """Make the inputs, with the same bytes at every placement (draw from `ctx`, never from a global generator)."""
        raise NotImplementedError(f"{type(self).__name__}.build")

    def run(self, ctx: Context, inputs: Any) -> Mapping[str, torch.Tensor]:
        """Launch the kernel and return every output that has to be right, by name."""
        raise NotImplementedError(f"{type(self).__name__}.run")

    def oracle(self, ctx: Context, inputs: Any) -> Oracle | None:
        """The float64 answer, computed once per case at the bottom, without the kernel. None: only placements are compared."""
        return None


class DesignedSkip(Exception):
    """Raised by `ctx.skip(reason)`: the case cannot run here by design, and the output names the reason."""
