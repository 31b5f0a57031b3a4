"""One case of the proof through the emulated Hopper kernels, in a process of its own: see `perform`."""

from __future__ import annotations

import importlib.util
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import bigpool
from bigpool.proof.cases.hopper import CASES
from bigpool.proof.context import Context, digest
from bigpool.proof.narrow import narrow

from .hopper import hopper

NAMED = {case.name: case for case in CASES}
KERNELS = Path(bigpool.__file__).parent / "kernels"


def perform(job: Mapping[str, Any]) -> int:
    """`job`: the names of a case, a dtype, a placement and a guard; `without`: files of kernels, and the index of the widening
    that is taken from each, None for all. The digests of the outputs and the kernels that were launched are the result."""
    folder = Path(job["folder"])
    instead = {f"bigpool.kernels.{name}": mutant(name, index, folder) for name, index in job["without"].items()}
    with pytest.MonkeyPatch.context() as patch:
        card = hopper(patch, instead=instead)
        case = NAMED[job["case"]]
        context = Context(
            case=case.name, placement=job["placement"], guard=job["guard"], arm="ours", dtype=getattr(torch, job["dtype"]),
            interpreted=False,
        )  # fmt: skip
        context.capability = (9, 0)
        with context as ctx:
            inputs = case.build(ctx)
            ctx.seal()
            outputs = case.run(ctx, inputs)
            ctx.check_canaries()
            ctx.check_inputs(list(outputs.values()))
    result = {"digests": {name: digest(value) for name, value in outputs.items()}, "launched": card.launched}
    (folder / "result.json").write_text(json.dumps(result))
    return 0


def mutant(name: str, index: int | None, folder: Path) -> types.ModuleType:
    """A module of bigpool.kernels without one of its widenings, or without all; its file goes into `folder`."""
    file = folder / f"{name}.py"
    file.write_text(narrow((KERNELS / f"{name}.py").read_text(), index))
    spec = importlib.util.spec_from_file_location(f"bigpool.kernels.{name}_mutant", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
