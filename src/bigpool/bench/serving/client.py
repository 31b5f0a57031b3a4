"""Requests to an OpenAI-compatible server, streamed and timed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

# Prometheus counters of vLLM.
DRAFTED, ACCEPTED = "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
SAID = 160


class RequestFailed(Exception):
    """A request without a usable answer; the text says what came instead."""


@dataclass(frozen=True)
class Answer:
    """Times of `time.perf_counter`. What is not reported is None; `tokens` are then chunks, and `counted` is False."""

    sent: float
    first: float
    last: float
    tokens: int
    counted: bool
    prompt_tokens: int | None
    cached_tokens: int | None


async def complete(client: httpx.AsyncClient, url: str, model: str, prompt: str | Sequence[int], tokens: int) -> Answer:
    """One completion of exactly `tokens` tokens; RequestFailed where it is anything else."""
    import httpx

    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    stream = _Stream(time.perf_counter())
    try:
        async with client.stream("POST", f"{url}/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise RequestFailed(f"HTTP {answer.status_code}: {_short((await answer.aread()).decode('utf-8', 'replace'))}")
            async for line in answer.aiter_lines():
                stream.take(line, time.perf_counter())
    except httpx.HTTPError as error:
        raise RequestFailed(f"{type(error).__name__}: {_short(str(error))}".rstrip(": ")) from None
    return stream.answer(tokens)


class _Stream:
    """What has come of one answer so far."""

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.empty: list[float] = []
        self.texts: list[float] = []
        self.usage: dict[str, Any] = {}
        self.ended = False

    def take(self, line: str, now: float) -> None:
        if not line.startswith("data:"):
            return
        text = line.removeprefix("data:").strip()
        if text == "[DONE]":
            self.ended = True
            return
        try:
            event = json.loads(text)
        except ValueError:
            raise RequestFailed(f"an event that is no JSON: {_short(text)}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise RequestFailed(f"an error within the answer: {_short(text)}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            (self.texts if choice.get("text") else self.empty).append(now)
            self.ended = self.ended or bool(choice.get("finish_reason"))

    def answer(self, tokens: int) -> Answer:
        if not self.ended:
            raise RequestFailed("the answer broke off")
        # A token may be a part of a letter, and its text empty.
        times = self.texts or self.empty
        if not times:
            raise RequestFailed("an answer without a token")
        reported = self.usage.get("completion_tokens")
        made = reported if isinstance(reported, int) else len(times)
        if reported is not None and made != tokens:
            raise RequestFailed(f"{made} of {tokens} tokens; the server has to honour ignore_eos")
        details = self.usage.get("prompt_tokens_details") or {}
        prompt, cached = self.usage.get("prompt_tokens"), details.get("cached_tokens")
        return Answer(self.sent, times[0], times[-1], made, reported is not None, prompt, cached)


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    """The name of the model that a server lists first."""
    import httpx

    try:
        listed = (await client.get(f"{url}/models")).json()["data"]
        return str(listed[0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise RequestFailed(f"no model in the list of {url}/models ({type(error).__name__}); name it with --model") from None


async def speculation(client: httpx.AsyncClient, url: str) -> tuple[float, float] | None:
    """(tokens drafted, tokens accepted) so far, or None where the server tells no such thing."""
    import httpx

    try:
        answer = await client.get(f"{url.removesuffix('/v1')}/metrics")
    except httpx.HTTPError:
        return None
    drafted, accepted = (_counter(answer.text, name) for name in (DRAFTED, ACCEPTED))
    return None if answer.status_code != httpx.codes.OK or drafted is None or accepted is None else (drafted, accepted)


def _counter(text: str, name: str) -> float | None:
    """The sum of a counter over its labels."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)", text, flags=re.MULTILINE)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SAID else text[: SAID - 3] + "..."
