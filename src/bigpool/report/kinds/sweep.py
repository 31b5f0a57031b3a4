"""Records of `bigpool sweep`: each fault with its confirmation, the fix as a diff, the proof of it, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigpool.report.chapter import BAD, GOOD, OPEN, Chapter, Claim, Wall
from bigpool.report.kinds import Kind
from bigpool.report.words import count, gib, versions

MARKS = {"confirmed": BAD, "refuted": GOOD, "could not reproduce": OPEN}
PLACES = {"bottom": "as captured", "below": "just below the wall", "at": "at the wall", "top": "far above the wall"}
GUARDS = {"unmapped": "nothing around it", "mapped": "canaries around it"}
INTERPRETER = "interpreter"


def chapter(record: Mapping[str, Any]) -> Chapter:
    device = record["machine"]["device"]
    where = "Triton's interpreter" if device in ("cpu", INTERPRETER) else device
    findings = {found["fingerprint"]: found for found in record["audit"]["findings"]}
    proofs = {proof["id"]: proof for proof in record["proofs"]}
    rows = [_row(one, findings.get(one["id"]), proofs.get(one["id"])) for one in record["confirmations"]]
    return Chapter(
        heading=f"Sweep of {record['script']} on {where}",
        claim=_claim(record),
        template="sweep.html",
        context={"rows": rows, "diff": record["fix"]["diff"] if record["fix"] else "", "prices": record["prices"]},
        unproven=_unproven(record, where),
        walls=[wall for one in record["confirmations"] if (wall := _wall(one, findings.get(one["id"]), proofs.get(one["id"])))],
        facts=[("script", record["script"]), ("device", device), ("versions", versions(record["machine"]["versions"]))],
    )


def _claim(record: Mapping[str, Any]) -> Claim:
    confirmed = [one for one in record["confirmations"] if one["outcome"] == "confirmed"]
    total = len(record["confirmations"])
    if not total:
        return Claim(
            GOOD if record["status"] == 0 else OPEN, "no fault", "no 32-bit index that can wrap was found in what it launched"
        )
    proven = {proof["id"] for proof in record["proofs"] if proof["proven"]}
    text = f"{len(confirmed)} of {count(total, 'fault')} confirmed by a run, {len(proven)} of these proven right after the fix"
    if confirmed:
        return Claim(BAD, f"{len(confirmed)} confirmed", text)
    return Claim(GOOD, "refuted", text) if record["status"] == 0 else Claim(OPEN, "could not run", text)


def _row(one: Mapping[str, Any], found: Mapping[str, Any] | None, proof: Mapping[str, Any] | None) -> dict[str, Any]:
    wall = found["wall"] if found else None
    return {
        "id": one["id"],
        "rule": found["rule"] if found else "",
        "kernel": found["kernel"] if found else "",
        "place": f"{found['span']['file']}:{found['span']['line']}" if found else "",
        "message": found["message"] if found else "",
        "size": gib(wall["tensor_bytes"]) if wall and wall["tensor_bytes"] else "",
        "wall": wall["text"] if wall else "",
        "outcome": Claim(MARKS[one["outcome"]], one["outcome"], one["text"]),
        "runs": [_run(run) for run in one["runs"]],
        "fix": Claim(GOOD if proof["proven"] else BAD, "proven" if proof["proven"] else "not proven", proof["text"])
        if proof
        else None,
    }


def _run(run: Mapping[str, Any]) -> str:
    detail = f" ({run['detail']})" if run["detail"] else ""
    return f"{PLACES[run['place']]}, {GUARDS[run['guard']]}: {run['outcome']}{detail}"


def _wall(one: Mapping[str, Any], found: Mapping[str, Any] | None, proof: Mapping[str, Any] | None) -> Wall | None:
    if found is None or not found["wall"] or not found["wall"]["tensor_bytes"] or one["outcome"] != "confirmed":
        return None
    fixed = bool(proof and proof["proven"])
    label = f"{found['kernel']}: {found['wall']['formula']}, confirmed{' and fixed' if fixed else ''}"
    return Wall(found["wall"]["tensor_bytes"], label, fixed or None)


def _unproven(record: Mapping[str, Any], where: str) -> list[str]:
    lines = [f"cards and launches other than these: {where}, and what the script launched"]
    if record["script_stopped"]:
        lines.append(f"what the script would have launched later: it stopped early: {record['script_stopped']}")
    lines += [
        f"{one['id']}: could not reproduce: {one['text']}" for one in record["confirmations"] if MARKS[one["outcome"]] == OPEN
    ]
    lines += [f"the fix of {proof['id']}: {proof['text']}" for proof in record["proofs"] if not proof["proven"]]
    lines += [
        f"what the fix of {price['kernel']} costs: {price['text']}" for price in record["prices"] if price["verdict"] is None
    ]
    if any(price["interpreted"] for price in record["prices"]):
        lines.append("what the fix costs on a GPU: this was Triton's interpreter")
    return lines + [f"kernel not judged: {item['kernel']}: {item['reason']}" for item in record["audit"]["skipped_kernels"]]


KIND = Kind(
    "bigpool-sweep",
    1,
    "Sweep",
    "bigpool sweep --json",
    "report/sweep.schema.json",
    chapter,
    order=0,
    holds={"audit": "bigpool-audit"},
)
