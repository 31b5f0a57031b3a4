"""No number without its gate: every arm is held to the oracle on the very tensors that it is timed on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bigpool.bench.load import BenchArm
from bigpool.bench.pairs import Call
from bigpool.bench.work import Work
from bigpool.errors import ProofError
from bigpool.proof import record as proof_record


@dataclass(frozen=True)
class Gate:
    """`call` is None where the arm does not run at all."""

    arm: str
    peer: bool
    ok: bool
    text: str
    call: Call | None = None

    def to_json(self) -> dict[str, object]:
        return {"arm": self.arm, "ok": self.ok, "text": self.text}


def check(arm: BenchArm, work: Work, sync: Callable[[], None]) -> Gate:
    """Compiles, runs and judges one arm on one shape. Whatever it raises is its verdict, but for a lack of memory of ours."""
    peer = arm.spec.startswith("peer:")
    try:
        with arm.compiling():
            call = arm.call_for(work)
            given = call()
            sync()
        ok, text = work.check(given)
    except torch.OutOfMemoryError as error:
        if not peer:
            raise
        return Gate(arm.name, peer, False, type(error).__name__)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        return Gate(arm.name, peer, False, proof_record.shorten_paths(f"{type(error).__name__}: {text}"))
    return Gate(arm.name, peer, ok, text, call)


def proof_faults(files: Sequence[Path], arms: Sequence[BenchArm]) -> list[str]:
    """What records of `bigpool prove` say against these arms: a red one, or one of none of these files."""
    faults = []
    for file in files:
        try:
            proof = proof_record.load(file)
        except ProofError as error:
            raise ProofError(str(error).replace("--from-json:", "--proof:")) from error
        hashes = {made["sha256"] for arm in proof["arms"] if arm["expect"] == "holds" for made in arm["files"]}
        if proof["status"] != 0:
            faults.append(f"the proof {file.name} is red: {proof['summary']}")
        ours = {hashlib.sha256(path.read_bytes()).hexdigest() for arm in arms if arm.arm for path in arm.arm.modules.values()}
        if not hashes & ours:
            faults.append(f"the proof {file.name} is of other files than these arms; prove them anew")
    return faults
