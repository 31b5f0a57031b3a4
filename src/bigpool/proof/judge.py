"""Compares outputs with each other, bit for bit, and with the oracle, by the one error rule of the project."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bigpool.errors import ProofError

Outputs = Mapping[str, torch.Tensor]


def compare_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """For each run: how it differs from its reference run, and its error against the oracle (if there is one)."""
    oracle = torch.load(job["oracle"], weights_only=True) if job["oracle"] else None
    runs = {}
    unjudged: set[str] = set()
    for key, path in job["runs"].items():
        outputs = torch.load(path, weights_only=True)
        reference = torch.load(job["runs"][job["references"][key]], weights_only=True)
        errors = [] if oracle is None else judge_errors(outputs, oracle["expected"], oracle["baseline"])
        if oracle is not None:
            unjudged |= set(outputs) - set(oracle["expected"])
        runs[key] = {"difference": difference(reference, outputs), "errors": errors}
    return {"outcome": "ok", "detail": "", "runs": runs, "unjudged": sorted(unjudged)}


def difference(reference: Outputs, outputs: Outputs) -> str:
    """The first output whose bits differ, in words; "" if none does."""
    if list(reference) != list(outputs):
        return f"outputs {', '.join(outputs)} in place of {', '.join(reference)}"
    for name, want in reference.items():
        got = outputs[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{name}: {_kind(got)} in place of {_kind(want)}"
        differ = _bits(got) != _bits(want)
        count = int(differ.sum())
        if count:
            place = _first_place(differ)
            return (
                f"{name}: {count} of {differ.numel()} elements differ, first at {list(place)}: "
                f"{_show(got[place])} in place of {_show(want[place])}"
            )
    return ""


def judge_errors(outputs: Outputs, expected: Outputs, baseline: Outputs) -> list[dict[str, Any]]:
    """For each expected output {"output", "error", "bound", "ok", "text"}; no numbers: error and bound are None."""
    return [_judge_error(name, outputs.get(name), want, baseline.get(name)) for name, want in expected.items()]


def _judge_error(name: str, got: torch.Tensor | None, want: torch.Tensor, baseline: torch.Tensor | None) -> dict[str, Any]:
    if got is None:
        return _failed(name, "the oracle expects it, but run() did not return it")
    if got.shape != want.shape:
        return _failed(name, f"shape {list(got.shape)}, the oracle has {list(want.shape)}")
    values = got.double()
    for word, test in (("nan", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(values) != test(want)
        if wrong.any():
            place = _first_place(wrong)
            return _failed(
                name,
                f"{int(wrong.sum())} of {wrong.numel()} elements are {word} on one side only, first at {list(place)}: "
                f"{_show(values[place])}, the oracle has {_show(want[place])}",
            )
    finite = torch.isfinite(want)
    error = _largest((values - want)[finite].abs())
    base_error = 0.0 if baseline is None else _baseline_error(name, baseline, want, finite)
    unit = ulp(got.dtype, _largest(want[finite].abs()))
    bound = 2 * base_error + 2 * unit
    ok = error <= bound
    made_of = f"2 * baseline error {base_error:.3g} + 2 ulp of {unit:.3g}"
    text = f"{name}: max error {error:.3g} {'<=' if ok else '>'} bound {bound:.3g} ({made_of})"
    return {"output": name, "error": error, "bound": bound, "ok": ok, "text": text}


def _baseline_error(name: str, baseline: torch.Tensor, want: torch.Tensor, finite: torch.Tensor) -> float:
    if baseline.shape != want.shape:
        raise ProofError(f"oracle: expected baseline[{name!r}] of shape {list(want.shape)}, got {list(baseline.shape)}")
    error = _largest((baseline.double() - want)[finite].abs())
    if not math.isfinite(error):
        raise ProofError(f"oracle: expected baseline[{name!r}] to be finite where the expected values are, got {error}")
    return error


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    """The distance between neighbours of `dtype` at `magnitude`; 0 for integers."""
    if not dtype.is_floating_point:
        return 0.0
    info = torch.finfo(dtype)
    exponent = math.floor(math.log2(max(magnitude, float(info.smallest_normal))))
    return float(info.eps) * 2.0**exponent


def _failed(name: str, what: str) -> dict[str, Any]:
    return {"output": name, "error": None, "bound": None, "ok": False, "text": f"{name}: {what}"}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer)


def _first_place(mask: torch.Tensor) -> tuple[int, ...]:
    flat = int(mask.flatten().to(torch.uint8).argmax())
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), mask.shape))


def _largest(values: torch.Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _show(value: torch.Tensor) -> str:
    return f"{value.item():.6g}" if value.dtype.is_floating_point else str(value.item())
