"""What the runs of a reproduction mean, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CONFIRMED, REFUTED, COULD_NOT = "confirmed", "refuted", "could not reproduce"
PLACE_WORDS = {"bottom": "as captured", "below": "just below the wall", "at": "at the wall", "top": "far above the wall"}
GUARD_WORDS = {"unmapped": "nothing around it", "mapped": "canaries around it"}


@dataclass(frozen=True, slots=True)
class Run:
    """One launch. `outcome`: "same bits", "killed", "nan", "unequal", "canary", or "unable" where it could not be judged."""

    place: str
    guard: str
    outcome: str
    detail: str

    @property
    def good(self) -> bool:
        return self.outcome == "same bits"

    @property
    def text(self) -> str:
        said = {"killed": "died", "nan": "NaN", "unequal": "other bits", "canary": "wrote outside its tensors"}
        word = said.get(self.outcome, self.outcome)
        return f"{PLACE_WORDS[self.place]}, {GUARD_WORDS[self.guard]}: {word}" + (f" ({self.detail})" if self.detail else "")

    def to_json(self) -> dict[str, str]:
        return {"place": self.place, "guard": self.guard, "outcome": self.outcome, "detail": self.detail}


@dataclass(slots=True)
class Confirmation:
    """What became of a finding. `id` is its fingerprint.

    Attributes:
        outcome: "confirmed", "refuted" or "could not reproduce"; `text` says why.
        variable: what was made larger, `below` its last good value and `at` its first bad one, `top` its value far above.
        along: other arguments that had to grow with it.
        shadowed: the other fault that comes first, and then the runs had 64 bits everywhere but in the finding's operation.
        device: where it ran: "interpreter" or the name of a GPU.
    """

    id: str
    outcome: str
    text: str
    variable: str = ""
    below: int | None = None
    at: int | None = None
    top: int | None = None
    along: tuple[str, ...] = ()
    device: str = ""
    shadowed: str = ""
    runs: list[Run] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "outcome": self.outcome,
            "text": self.text,
            "variable": self.variable,
            "below": self.below,
            "at": self.at,
            "top": self.top,
            "along": list(self.along),
            "device": self.device,
            "shadowed": self.shadowed,
            "runs": [run.to_json() for run in self.runs],
        }


def judge(made: Confirmation, wall: int | None) -> Confirmation:
    """Fills in the outcome. `wall` is what the auditor said of the same variable, None if it said nothing."""
    before = [run for run in made.runs if run.place in ("bottom", "below")]
    after = [run for run in made.runs if run.place in ("at", "top")]
    unable = next((run for run in made.runs if run.outcome == "unable"), None)
    spoilt = next((run for run in before if not run.good), None)
    wrong = [run for run in after if not run.good and run.outcome != "unable"]
    if spoilt is not None and spoilt.outcome != "unable":
        made.outcome, made.text = COULD_NOT, f"it is wrong before it reaches its wall: {spoilt.text}"
    elif unable is not None and (unable in before or not wrong):
        made.outcome, made.text = COULD_NOT, unable.text
    elif wrong:
        last = f"right with {made.variable} at {made.below:,}"
        shown = f"{made.variable} at {made.at if wrong[0].place == 'at' else made.top:,}"
        made.outcome, made.text = CONFIRMED, f"{last}; with {shown}: {wrong[0].text}"
    else:
        made.outcome = REFUTED
        made.text = (
            f"the auditor was wrong: {made.variable} at {made.at:,} and at {made.top:,} gives the same bits as {made.below:,}"
        )
    if made.shadowed:
        made.text += f"; every other operation was held in 64 bits, since another one fails first ({made.shadowed})"
    if made.outcome == CONFIRMED and wall is not None and made.at is not None and made.at != wall:
        made.text += f"; the auditor says {wall:,}, of any launch"
    return made


def one_file(detail: str, where: str) -> str:
    """How a process died, and in which line."""
    return f"{detail} at {where}" if where else detail
