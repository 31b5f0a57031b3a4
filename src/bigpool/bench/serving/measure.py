"""What is measured of one server, one run at a time: fresh prefills and decode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from bigpool.bench.serving.client import Answer, RequestFailed, complete, speculation
from bigpool.bench.serving.prompts import Prompts

if TYPE_CHECKING:
    import httpx

# A prompt may have as many tokens of its length more or less, as a share and in tokens.
LENGTH_TOLERANCE, LENGTH_SLACK = 0.02, 2
# What all prompts may share: a token that begins every text.
SHARED_TOKENS = 2
CALIBRATIONS = 4
DECODE_PROMPT = 32


class Refused(Exception):
    """A run that gives no number, with the reason."""


@dataclass
class Target:
    """A server as the measures see it. `sizes`: tokens that are asked for -> words that make as many."""

    name: str
    client: httpx.AsyncClient
    url: str
    model: str
    prompts: Prompts
    sizes: dict[int, int] = field(default_factory=dict)
    succeeded: int = 0

    async def ask(self, length: int, tokens: int) -> Answer:
        """One fresh prompt of `length` tokens; Refused where a cache answered it or its length is another."""
        prompt = self.prompts.make(self.sizes.get(length, length))
        answer = await complete(self.client, self.url, self.model, prompt, tokens)
        self.succeeded += 1
        if answer.cached_tokens is not None and answer.cached_tokens > SHARED_TOKENS:
            raise Refused(
                f"{answer.cached_tokens:,} of {answer.prompt_tokens or length:,} prompt tokens came from its prefix cache, "
                "though every prompt is new; turn the cache off (vLLM: --no-enable-prefix-caching)"
            )
        if length in self.sizes and not _near(answer.prompt_tokens, length):
            raise Refused(f"a prompt of {answer.prompt_tokens} tokens, not of {length:,}; use --prompt ids")
        return answer

    async def calibrate(self, length: int) -> None:
        """Finds how many words make `length` tokens. Token ids need none of this."""
        if self.prompts.kind == "ids":
            return
        words = length
        for _ in range(CALIBRATIONS):
            answer = await complete(self.client, self.url, self.model, self.prompts.make(words), 1)
            if answer.prompt_tokens is None:
                raise Refused("it does not report prompt_tokens, so the length of a prompt is not known; use --prompt ids")
            if _near(answer.prompt_tokens, length):
                self.sizes[length] = words
                return
            words = max(words + length - answer.prompt_tokens, 1) if answer.prompt_tokens < 2 * length else max(words // 2, 1)
        raise Refused(f"no text of {length:,} tokens could be made, the last one had {answer.prompt_tokens}; use --prompt ids")


def _near(got: int | None, length: int) -> bool:
    return got is not None and abs(got - length) <= max(length * LENGTH_TOLERANCE, LENGTH_SLACK)


@dataclass(frozen=True)
class Run:
    """`seconds`: to the first token, or for each token of all streams. `stream_seconds`: for each token of the median stream.

    `drafted`, `accepted`: tokens of speculation during the run; None where the server does not tell.
    """

    seconds: float
    prompt_tokens: int | None = None
    stream_seconds: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    counted: bool = True


@dataclass(frozen=True)
class Prefill:
    """A fresh prompt of `length` tokens, one at a time: seconds to the first token, the median of `inner` requests."""

    length: int
    inner: int = 3

    kind = "prefill"

    @property
    def name(self) -> str:
        return f"prefill {self.length}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def requests(self) -> int:
        return self.inner

    async def run(self, target: Target) -> Run:
        answers = [await target.ask(self.length, 1) for _ in range(self.inner)]
        return Run(median(answer.first - answer.sent for answer in answers), answers[-1].prompt_tokens)


@dataclass(frozen=True)
class Decode:
    """`streams` short prompts at once, `tokens` tokens each: seconds per token, from the first of any stream to the last."""

    streams: int
    tokens: int

    kind = "decode"

    @property
    def name(self) -> str:
        return f"decode {self.streams}x{self.tokens}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (DECODE_PROMPT,)

    @property
    def requests(self) -> int:
        return self.streams

    async def run(self, target: Target) -> Run:
        before = await speculation(target.client, target.url)
        asked = (target.ask(DECODE_PROMPT, self.tokens) for _ in range(self.streams))
        answers = await _all(list(map(asyncio.ensure_future, asked)))
        after = await speculation(target.client, target.url)
        spent = max(answer.last for answer in answers) - min(answer.first for answer in answers)
        made = sum(answer.tokens - 1 for answer in answers)
        if spent <= 0:
            raise Refused("all tokens came at once, so that it does not stream; nothing can be said of its decode rate")
        drafted, accepted = (None, None) if before is None or after is None else (after[0] - before[0], after[1] - before[1])
        one = median((answer.last - answer.first) / (answer.tokens - 1) for answer in answers)
        counted = all(answer.counted for answer in answers)
        return Run(spent / made, answers[0].prompt_tokens, one, drafted, accepted, counted)


async def _all(tasks: Sequence[asyncio.Future[Answer]]) -> list[Answer]:
    """The answers of all; RequestFailed with how many failed, and the first error."""
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, RequestFailed):
            raise error
    if errors:
        raise RequestFailed(f"{len(errors)} of {len(tasks)} requests failed, the first with {errors[0]}")
    return [task.result() for task in tasks]
