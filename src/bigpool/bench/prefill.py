"""Shapes of prefill attention, written as `b1-q2048-kv24000-p880-h24/4-d256-int8`, and their work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from bigpool import reference_prefill
from bigpool.bench import shapes
from bigpool.bench.pairs import Call
from bigpool.bench.shapes import K, Shape
from bigpool.bench.work import Outputs, Work
from bigpool.ops import prefill
from bigpool.ops.prefill import PrefillWorkspace
from bigpool.proof.judge import judge_errors

MODES = ("exact", "int8")
# Tokens that are judged: about one of each tile of rows.
JUDGED = 128
# Of int8 scores on normal numbers, where one head dim of 256 gives 0.011; an output of zeros has 1 and 1.
MOST_RELATIVE, MOST_ANGLE, MOST_LSE = 0.02, 2e-4, 0.05


@dataclass(frozen=True)
class PrefillShape(Shape):
    """A chunk of `q_len` tokens at the end of each of `num_reqs` requests of `seq_len`; `qk` as in prefill_attention."""

    q_len: int = 2 * K
    seq_len: int = 24_000
    qk: str = "exact"

    @property
    def name(self) -> str:
        """What `parse` reads back."""
        return f"{super().name}-{self.qk}"

    def to_json(self) -> dict[str, Any]:
        """The mode is in the name."""
        return {name: value for name, value in super().to_json().items() if name != "qk"}


def both(shape: PrefillShape) -> tuple[PrefillShape, ...]:
    return tuple(replace(shape, qk=mode) for mode in MODES)


# The two contexts of the published comparison of the int64 page id, then those of the targets.
TABLE = tuple(
    shape
    for length, head_dim in ((24_000, 256), (47_000, 256), (131_072, 256), (47_000, 128))
    for shape in both(PrefillShape(seq_len=length, head_dim=head_dim))
)
TINY = both(PrefillShape(2, 24, 60, 16, 4, 2, 32))


def parse(text: str) -> tuple[PrefillShape, ...]:
    """Shapes from a name: parts that are left out are those of PrefillShape(), and without a mode it is both."""
    parts = text.lower().split("-")
    found = [part for part in parts if part in MODES]
    shape = shapes.parse("-".join(part for part in parts if part not in MODES), PrefillShape())
    assert isinstance(shape, PrefillShape)
    return both(shape) if not found else tuple(replace(shape, qk=mode) for mode in found)


class PrefillWork(Work):
    """As of verify attention; `scratch` is there for int8, so that its allocation is not timed, but its passes are."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        super().__init__(shape, dtype, device, seed)
        self.qk = shape.qk if isinstance(shape, PrefillShape) else "exact"
        self.scratch = None
        if self.qk == "int8":
            self.scratch = PrefillWorkspace.empty(
                max_num_reqs=shape.num_reqs, max_num_keys=shape.num_reqs * shape.seq_len, num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim, device=device,
            )  # fmt: skip

    def kernels_call(self, kernels: ModuleType) -> Call:
        launch: Any = prefill._launch
        scratch = self.scratch
        parts = (None,) * 4 if scratch is None else (scratch.sums, scratch.codes, scratch.scales, scratch.means)
        max_keys = 0 if scratch is None else scratch.max_num_keys

        def call() -> Outputs:
            out = torch.empty_like(self.q)
            lse = torch.empty(self.q.shape[:2], dtype=torch.float32, device=self.device)
            sizes = max_keys, self.shape.q_len, self.scale, self.qk
            launch(*self.arguments, out, lse, *parts, None, None, *sizes, kernels=kernels)
            return {"out": out, "lse": lse}

        return call

    def backend_call(self, backend: str) -> Call:
        def call() -> Outputs:
            answer = prefill.prefill_attention(
                *self.arguments, max_seqlen_q=self.shape.q_len, qk=self.qk, workspace=self.scratch, return_lse=True,
                backend=backend,
            )  # fmt: skip
            return dict(zip(("out", "lse"), answer, strict=True))

        return call

    def check(self, given: object) -> tuple[bool, str]:
        """(whether what a call gave is near the float64 oracle, in words): by the error rule, int8 by its own bounds."""
        outputs: Outputs = given if isinstance(given, Mapping) else {"out": given}  # type: ignore[dict-item]
        expected, baseline = self._expected()
        outputs = {name: self._flat(tensor).detach()[self._judged()].cpu() for name, tensor in outputs.items()}
        if self.qk == "int8":
            return _within_int8(outputs, expected)
        entries = judge_errors(outputs, {name: expected[name] for name in outputs if name in expected}, baseline)
        return bool(entries) and all(entry["ok"] for entry in entries), "; ".join(entry["text"] for entry in entries)

    def _judged(self) -> torch.Tensor:
        """Rows of q that are judged, the first and the last of them all among them."""
        tokens = len(self.q)
        count = min(tokens, JUDGED * self.shape.num_reqs)
        return torch.linspace(0, tokens - 1, count, device=self.device, dtype=torch.float64).round().long()

    def _expected(self) -> tuple[Outputs, Outputs]:
        """Each judged token as a request of its own, which ends where the token stands."""
        if self._oracle is None:
            rows = self._judged()
            req = rows // self.shape.q_len
            ends = self.seq_lens[req] - self.shape.q_len + rows % self.shape.q_len + 1
            starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=self.device)
            inputs = self.q[rows], self.k_cache, self.v_cache, self.block_table[req], ends, starts
            oracle = reference_prefill.prefill_attention(*inputs, compute_dtype=torch.float64)
            baseline = reference_prefill.prefill_attention_baseline(*inputs)
            expected, base = ({"out": out.cpu(), "lse": lse.cpu()} for out, lse in (oracle, baseline))
            self._oracle = expected, base
        return self._oracle


def _within_int8(outputs: Outputs, expected: Outputs) -> tuple[bool, str]:
    """Relative error and angle over all elements of out; lse by its largest error."""
    got, want = outputs["out"].double().flatten(), expected["out"].flatten()
    relative = float((got - want).norm() / want.norm())
    angle = 1 - float(got @ want / (got.norm() * want.norm()))
    ok = relative <= MOST_RELATIVE and angle <= MOST_ANGLE
    text = f"out: relative error {relative:.3g} (at most {MOST_RELATIVE:g}), 1 - cosine {angle:.3g} (at most {MOST_ANGLE:g})"
    if "lse" in outputs:
        error = float((outputs["lse"].double() - expected["lse"]).abs().max())
        ok, text = ok and error <= MOST_LSE, f"{text}; lse: max error {error:.3g} (at most {MOST_LSE:g})"
    return ok, text
