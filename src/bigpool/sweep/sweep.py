"""The steps of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigpool.audit.finding import Finding
from bigpool.audit.fix import Fixes, fixes
from bigpool.audit.launch.audit import shown
from bigpool.audit.run import Options, Report, audit
from bigpool.confirm.confirm import Confirmer, Reproduction
from bigpool.confirm.outcome import CONFIRMED, Confirmation, Run
from bigpool.confirm.record import Recorder

PROOF_PLACES = ("bottom", "at", "top")
REPEATS = 100
INTERPRETED = "of Triton's interpreter, which says nothing about a GPU"


@dataclass(slots=True)
class Proof:
    """Whether the fixed kernel gives the bits of the captured launch wherever the confirmed fault failed."""

    id: str
    proven: bool
    text: str
    runs: list[Run] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "proven": self.proven, "text": self.text, "runs": [run.to_json() for run in self.runs]}


@dataclass(slots=True)
class Price:
    """What the fix costs on one captured launch. `verdict` is None where it could not be timed, and `text` says why."""

    kernel: str
    text: str
    verdict: dict[str, Any] | None
    interpreted: bool

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "text": self.text, "verdict": self.verdict, "interpreted": self.interpreted}


@dataclass(slots=True)
class Sweep:
    """Everything that a sweep found. `fixed` is None where nothing was confirmed."""

    script: str
    device: str
    report: Report
    confirmations: list[Confirmation]
    fixed: Fixes | None = None
    proofs: list[Proof] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    failed: str = ""
    written: list[str] = field(default_factory=list)

    @property
    def confirmed(self) -> list[Confirmation]:
        return [one for one in self.confirmations if one.outcome == CONFIRMED]

    @property
    def proven(self) -> bool:
        """Whether the fix holds for all that was confirmed."""
        return bool(self.proofs) and len(self.proofs) == len(self.confirmed) and all(proof.proven for proof in self.proofs)

    @property
    def status(self) -> int:
        """0 no fault, or all refuted; 1 a confirmed fault; 2 faults of which none could be judged."""
        if self.confirmed:
            return 1
        if any(one.outcome != "refuted" for one in self.confirmations):
            return 2
        return 2 if self.failed and not self.confirmations else self.report.status if self.report.status == 2 else 0

    def finding(self, id: str) -> Finding:
        return next(finding for finding in self.report.findings if self.report.fingerprint(finding) == id)


def sweep(
    found: Recorder, report: Report, script: str, device: str, options: Options, repeats: int, say: Callable[[str], None]
) -> Sweep:
    """Confirms, fixes a copy, proves and prices."""
    with found.importable(), Confirmer(device, say) as confirmer:
        made = Sweep(script, confirmer.device_name(), report, confirmer.confirm(report, found))
        if not made.confirmed:
            return made
        say("fixing a copy")
        made.fixed = fixed_copy([made.finding(one.id) for one in made.confirmed], options)
        edits = {str(path): after for path, (_, after) in made.fixed.files.items()}
        if not edits:
            made.proofs = [Proof(one.id, False, "no safe fix is known") for one in made.confirmed]
            return made
        for at, one in enumerate(made.confirmed, 1):
            say(f"proving {at} of {len(made.confirmed)}")
            made.proofs.append(_prove(confirmer, one, edits))
        made.prices = _prices(confirmer, made, edits, repeats, say)
    return made


def fixed_copy(findings: Sequence[Finding], options: Options) -> Fixes:
    """The safe fixes of the kernels that the findings are in."""
    files = {Path(label.span.file) for finding in findings for label in (finding.primary, *finding.secondary)}
    paths = sorted(path for path in files if path.is_file())
    kernels = {finding.kernel for finding in findings}
    plain = replace(options, progress=None, baseline=frozenset())
    report = audit(paths, plain)
    others = frozenset(report.fingerprint(finding) for finding in report.findings if finding.kernel not in kernels)
    chosen = replace(plain, baseline=others)
    return fixes(paths, chosen, audit(paths, chosen), unsafe=False)


def _prove(confirmer: Confirmer, one: Confirmation, edits: dict[str, bytes]) -> Proof:
    made: Reproduction = confirmer.reproductions[one.id]
    runs, _ = confirmer.runs(made.snapshot_file, made.plan_file, made.snapshot, PROOF_PLACES, edits, made.reference)
    wrong = next((run for run in runs if not run.good), None)
    if wrong is not None:
        return Proof(one.id, False, f"not proven: after the fix, {wrong.text}", runs)
    text = f"top equals bottom: {one.variable} at {one.at:,} and at {one.top:,} gives the bits of the captured launch"
    return Proof(one.id, True, text, runs)


def _prices(confirmer: Confirmer, made: Sweep, edits: dict[str, bytes], repeats: int, say: Callable[[str], None]) -> list[Price]:
    prices = []
    for kernel in dict.fromkeys(made.finding(proof.id).kernel for proof in made.proofs):
        proofs = [proof for proof in made.proofs if made.finding(proof.id).kernel == kernel]
        if not all(proof.proven for proof in proofs):
            prices.append(Price(kernel, "no price: the fix is not proven", None, confirmer.device == "cpu"))
            continue
        say(f"pricing {kernel}")
        result = confirmer.price(confirmer.reproductions[proofs[0].id], edits, repeats)
        verdict = result.get("verdict")
        interpreted = confirmer.device == "cpu"
        text = verdict["text"] if verdict is not None else f"no price: {result.get('detail', 'it could not be timed')}"
        if interpreted and verdict is not None:
            text += f"; a time {INTERPRETED}"
        prices.append(Price(kernel, text, verdict, interpreted))
    return prices


def write(made: Sweep) -> None:
    """Writes the fix to the user's files: only what is proven."""
    assert made.fixed is not None
    for path, (before, after) in made.fixed.files.items():
        if path.read_bytes() != before:
            continue
        path.write_bytes(after)
        made.written.append(shown(str(path)))
