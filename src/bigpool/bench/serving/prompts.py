"""Prompts that no server has seen: each differs from every other in its first tokens, so that no prefix cache can answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

# One token each in the common vocabularies.
WORDS = [
    "time",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
    "side",
    "kind",
    "head",
    "house",
    "service",
    "friend",
    "father",
    "power",
    "hour",
    "game",
    "line",
    "end",
    "member",
    "law",
    "car",
    "city",
    "name",
    "team",
]
# Ids that are ordinary tokens in every vocabulary of a size that is used.
FIRST_ID, LAST_ID = 1_000, 20_000


@dataclass
class Prompts:
    """`nonce`: what tells this run from all before it, whose prompts a server that stays up may still hold."""

    nonce: str
    kind: str = "text"
    serial: int = field(default=0, init=False)

    def make(self, size: int) -> str | Sequence[int]:
        """The next prompt, of `size` words or token ids."""
        self.serial += 1
        rng = random.Random(f"{self.nonce} {self.serial}")
        if self.kind == "ids":
            return [rng.randint(FIRST_ID, LAST_ID) for _ in range(size)]
        return " ".join(rng.choice(WORDS) for _ in range(size))
