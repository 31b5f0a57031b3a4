"""From what the runs did to a verdict, in words. Plain values only: no torch, no processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bigpool.proof.isolate import Exit

PROVEN, REFUTED, NO_POWER, SKIPPED, UNABLE = "proven", "refuted", "no power", "skipped", "could not run"
EXIT_CODES = {PROVEN: 0, SKIPPED: 0, REFUTED: 1, NO_POWER: 1, UNABLE: 2}
WHERE = {"bottom": "at the bottom", "top": "at the top", "across": "across the wall"}


@dataclass(frozen=True)
class Run:
    """One isolated run.

    `outcome`: ok, killed (a memory fault), canary, error, timeout, skip, or unable (which says nothing about the kernel).
    """

    case: str
    dtype: str
    arm: str
    placement: str
    guard: str
    outcome: str
    detail: str = ""
    where: str = ""
    seconds: float = 0.0
    rss_mib: int = 0
    log: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)
    nan: Mapping[str, int] = field(default_factory=dict)
    tensors: Sequence[Mapping[str, Any]] = ()
    launches: Sequence[Mapping[str, Any]] = ()

    @property
    def key(self) -> str:
        return f"{self.arm}/{self.placement}/{self.guard}"

    @property
    def label(self) -> str:
        return f"{self.arm} {WHERE[self.placement]} ({self.guard})"

    @property
    def text(self) -> str:
        """`killed: SIGSEGV at verify.py:88`, or "ok"."""
        detail = f": {self.detail}" if self.detail else ""
        return f"{self.outcome}{detail}{f' at {self.where}' if self.where else ''}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_of(job: Mapping[str, Any], ended: Exit) -> Run:
    """What a job's end means for the proof. A death that no memory fault explains says nothing about an index."""
    result = ended.result if ended.outcome == "done" else {}
    outcome = {"done": result.get("outcome", ""), "killed": "killed", "timeout": "timeout", "died": "error"}[ended.outcome]
    if "SIGKILL" in ended.detail:
        outcome = "unable"
    return Run(
        case=job["case"],
        dtype=job["dtype"],
        arm=job["arm"],
        placement=job["placement"],
        guard=job["guard"],
        outcome=outcome,
        detail=result.get("detail", "") or ended.detail,
        where=result.get("where", "") or ended.where,
        seconds=round(ended.seconds, 3),
        rss_mib=ended.rss_mib,
        log=ended.log,
        digests=result.get("digests", {}),
        nan=result.get("nan", {}),
        tensors=ended.tensors,
        launches=result.get("launches", ()),
    )


@dataclass(frozen=True)
class Verdict:
    """`findings`: why, a line each. `broken`: what the arm that must fail did at the top, by guard. `errors`: the fixed arm's.

    `unjudged`: outputs that the oracle says nothing about.
    """

    case: str
    dtype: str
    status: str
    findings: tuple[str, ...] = ()
    broken: Mapping[str, str] = field(default_factory=dict)
    errors: Sequence[Mapping[str, Any]] = ()
    oracle: bool = True
    unjudged: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """All that a verdict is made from. `compared`: run key -> {"difference" from its arm's bottom run, "errors"}."""

    case: str
    dtype: str
    fixed: str
    broken: str | None
    runs: Mapping[str, Run]
    compared: Mapping[str, Mapping[str, Any]]
    oracle: bool = True
    unjudged: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    no_broken_arm: str = ""


def judge(evidence: Evidence) -> Verdict:
    """Proven needs both: the fixed arm right at every placement, and the broken arm seen to fail at the top."""
    runs = evidence.runs.values()
    fixed = [run for run in runs if run.arm == evidence.fixed]
    skips = [run for run in runs if run.outcome == "skip"]
    if skips and skips[0].placement == "bottom" and len(fixed) == 1:
        return Verdict(evidence.case, evidence.dtype, SKIPPED, (skips[0].detail,))
    broken, power, weak = _broken_arm(evidence)
    wrong = [line for run in fixed for line in _wrong(run, evidence.compared.get(run.key, {}))]
    unable = [*evidence.faults, *(f"{run.label}: {run.detail}" for run in runs if run.outcome == "unable")]
    unable += [
        f"{run.label}: skipped ({run.detail}), but not at the bottom; a skip must not depend on the placement" for run in skips
    ]
    if wrong:
        status, findings = REFUTED, wrong
        if not any(" at the bottom " in line for line in wrong):
            findings.append(
                f"{evidence.fixed} is right at the bottom with the same bytes: look for an index that is multiplied in 32 bits"
            )
    elif unable:
        status, findings = UNABLE, unable
    elif not power:
        status, findings = NO_POWER, weak
    else:
        status, findings = PROVEN, []
    top = evidence.compared.get(f"{evidence.fixed}/top/unmapped", {})
    errors = tuple(top.get("errors", ()))
    return Verdict(evidence.case, evidence.dtype, status, tuple(findings), broken, errors, evidence.oracle, evidence.unjudged)


def _wrong(run: Run, compared: Mapping[str, Any]) -> list[str]:
    """What speaks against the fixed arm in one run."""
    if run.outcome in ("killed", "canary", "error", "timeout"):
        return [f"{run.label}: {run.text}"]
    if run.outcome != "ok":
        return []
    lines = []
    if compared.get("difference"):
        hint = "; poison shows in the output, so memory outside the request was read" if run.guard == "poison" else ""
        lines.append(f"{run.label}: not the bits of the bottom: {compared['difference']}{hint}")
    return lines + [f"{run.label}: {error['text']}" for error in compared.get("errors", ()) if not error["ok"]]


def _broken_arm(evidence: Evidence) -> tuple[dict[str, str], bool, list[str]]:
    """(what the broken arm did at the top by guard, whether that gives the case power, why not)."""
    if evidence.broken is None:
        return {}, False, [f"holds, but the case has no power: {evidence.no_broken_arm}"]
    name = evidence.broken
    mine = [run for run in evidence.runs.values() if run.arm == name]
    bottom = next((run for run in mine if run.placement == "bottom"), None)
    seen = {run.guard: _failure(run, evidence) for run in mine if run.placement == "top"}
    texts = {guard: text for guard, (text, _) in seen.items()}
    if bottom is not None and (faults := _wrong(bottom, evidence.compared.get(bottom.key, {}))):
        return texts, False, [f"{faults[0]}; it has to be right there, so that only the placement makes it fail"]
    if any(failed for _, failed in seen.values()):
        return texts, True, []
    what = "; ".join(f"{guard}: {text}" for guard, text in texts.items()) or "it was not run"
    return texts, False, [f"{name} at the top did not fail as a wrapped index does ({what}), so this case would not see the bug"]


def _failure(run: Run, evidence: Evidence) -> tuple[str, bool]:
    """(what happened in short, whether it is a failure that a wrapped index causes)."""
    if run.outcome == "killed":
        return run.text, True
    if run.outcome == "canary":
        return "wrote outside its tensors", True
    if run.outcome != "ok":
        return run.text, False
    difference = evidence.compared.get(run.key, {}).get("difference", "")
    if not difference:
        return "same bits", False
    reference = evidence.runs[f"{run.arm}/bottom/unmapped"]
    more_nan = [name for name, count in run.nan.items() if count > reference.nan.get(name, 0)]
    return (f"NaN in {listed(more_nan)}" if more_nan else f"unequal ({difference})"), True


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def summary(verdicts: Sequence[Verdict]) -> tuple[str, int]:
    """(the last line of a proof, its exit status)."""
    by_status = {status: [v for v in verdicts if v.status == status] for status in EXIT_CODES}
    count = len(verdicts) - len(by_status[SKIPPED])
    skipped = f"; {len(by_status[SKIPPED])} skipped by design" if by_status[SKIPPED] else ""
    for status, words in (
        (REFUTED, "refuted: {n} of {count} cases: {names}"),
        (NO_POWER, "not proven: {n} of {count} cases have no power: {names}"),
        (UNABLE, "could not run: {n} of {count} cases: {names}"),
    ):
        if by_status[status]:
            names = ", ".join(sorted({verdict.case for verdict in by_status[status]}))
            return words.format(n=len(by_status[status]), count=count, names=names) + skipped, EXIT_CODES[status]
    if not by_status[PROVEN]:
        return "could not run: every case was skipped by design", EXIT_CODES[UNABLE]
    proven = len(by_status[PROVEN])
    unseen = sorted({verdict.case for verdict in by_status[PROVEN] if not verdict.oracle or verdict.unjudged})
    right, rest = (" right", "") if not unseen else ("", f"; not all values were judged: {', '.join(unseen)}")
    words = f"give the same{right} bits wherever they lie in the pool, and each sees the 32-bit arm fail{rest}"
    return f"proven: {proven} of {count} cases {words}{skipped}", EXIT_CODES[PROVEN]
