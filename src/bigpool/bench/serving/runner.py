"""A whole serving bench: servers up together or one after another, every measure of every arm in turn, and the record of it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

from bigpool.bench.pairs import order_of_round
from bigpool.bench.serving import record
from bigpool.bench.serving.arms import ServingArm
from bigpool.bench.serving.client import RequestFailed, first_model
from bigpool.bench.serving.measure import Decode, Prefill, Refused, Run, Target
from bigpool.bench.serving.prompts import Prompts
from bigpool.bench.serving.server import Server, headers

TOGETHER, RESTART = "together", "restart"
Measure: TypeAlias = Prefill | Decode


@dataclass(frozen=True)
class Options:
    """What `bigpool bench serving` was asked for; the first arm is what the others are compared with."""

    arms: tuple[ServingArm, ...]
    measures: tuple[Measure, ...]
    mode: str = TOGETHER
    aa: bool = True
    repeats: int = 10
    prompt: str = "text"
    model: str = ""
    ready_timeout: float = 600.0
    request_timeout: float = 600.0
    margin: float = 0.01
    seed: int = 0
    command: tuple[str, ...] = ()


class Listener(Protocol):
    """Is told as things happen."""

    def on_plan(self, rounds: int, text: str) -> None: ...

    def on_step(self, text: str) -> None: ...

    def on_round(self) -> None: ...


@dataclass
class Serving:
    """Everything of one bench that the record is made from. `runs`: measure -> arm -> a row for each round, its two runs."""

    options: Options
    arms: list[ServingArm]
    runs: dict[str, dict[str, list[list[Run]]]]
    models: dict[str, str] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0


def bench(options: Options, listener: Listener) -> dict[str, Any]:
    """Run everything and return the record (schema bigpool-serving/1). Servers that it started are gone afterwards."""
    arms = [options.arms[0], *([options.arms[0].again()] if options.aa else []), *options.arms[1:]]
    made = Serving(options, arms, {measure.name: {arm.name: [] for arm in arms} for measure in options.measures})
    listener.on_plan(options.repeats, plan_text(options, arms))
    began = time.monotonic()
    try:
        asyncio.run(_stoppable(_rounds(made, listener)))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    made.seconds = time.monotonic() - began
    return record.build(made)


def plan_text(options: Options, arms: Sequence[ServingArm]) -> str:
    """What will be done, with what it takes most of."""
    what = ", ".join(measure.name for measure in options.measures)
    runs = 2 * options.repeats * len(arms)
    requests = runs * sum(measure.requests for measure in options.measures)
    starts = starts_of(options.mode, [arm.name for arm in arms if arm.command], options.repeats)
    return (
        f"{', '.join(arm.name for arm in arms)}: {what}; {options.repeats} rounds of two runs an arm, {requests:,} requests, "
        f"{starts} server start{'s' * (starts != 1)}, {options.mode}"
    )


def starts_of(mode: str, names: Sequence[str], rounds: int) -> int:
    """How often a server is started. One that ran last is kept for the next run of the same arm."""
    if mode == TOGETHER or not names:
        return len([name for name in names if not name.endswith(" again")])
    order = [name for index in range(rounds) for name in order_of_round(names, index)]
    return 1 + sum(now != before for before, now in pairwise(order))


async def _stoppable(work: Any) -> None:
    """Runs `work`; the signals that end a program cancel it, so that its servers are stopped."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only the main thread can be told of signals.
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, task.cancel)
    await task


async def _rounds(made: Serving, listener: Listener) -> None:
    names = [arm.name for arm in made.arms]
    arms = {arm.name: arm for arm in made.arms}
    async with AsyncExitStack() as stack:
        pool: _Together | _Restart = (_Together if made.options.mode == TOGETHER else _Restart)(made, stack, listener)
        for index in range(made.options.repeats):
            listener.on_step(f"round {index + 1} of {made.options.repeats}")
            found: dict[str, dict[str, list[Run]]] = {measure: {name: [] for name in names} for measure in made.runs}
            for name in order_of_round(names, index):
                try:
                    target = await pool.target(arms[name])
                except Refused as refusal:
                    made.faults.append(str(refusal))
                    return
                if not await _run_all(made, name, target, found):
                    return
            for measure, by_arm in found.items():
                for name, runs in by_arm.items():
                    made.runs[measure][name].append(runs)
            made.rounds += 1
            listener.on_round()


async def _run_all(made: Serving, name: str, target: Target, found: dict[str, dict[str, list[Run]]]) -> bool:
    """One run of every measure; False where one gives no number, and then nothing more is worth the time."""
    for measure in made.options.measures:
        try:
            found[measure.name][name].append(await measure.run(target))
        except RequestFailed as error:
            none = "" if target.succeeded else "nothing succeeded: "
            made.faults.append(f"{name}: {measure.name}: {none}{error}")
            return False
        except Refused as refusal:
            made.faults.append(f"{name}: {measure.name}: {refusal}")
            return False
    return True


@asynccontextmanager
async def _ready(made: Serving, arm: ServingArm, listener: Listener) -> AsyncIterator[Target]:
    """A server that answers, warmed up by one run of every measure, which is not kept."""
    import httpx

    options = made.options
    if arm.command:
        listener.on_step(f"{arm.name}: starting its server")
        made.starts[arm.name] = made.starts.get(arm.name, 0) + 1
    async with Server(arm, options.ready_timeout) as server:
        timeout = httpx.Timeout(options.request_timeout, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(trust_env=False, timeout=timeout, limits=limits, headers=headers(arm.api_key)) as client:
            prompts = Prompts(secrets.token_hex(16), options.prompt)
            target = Target(arm.name, client, server.base_url, arm.model or options.model, prompts)
            listener.on_step(f"{arm.name}: warming up")
            try:
                target.model = target.model or await first_model(client, server.base_url)
                made.models[arm.name] = target.model
                for measure in options.measures:
                    for length in measure.lengths:
                        await target.calibrate(length)
                    await measure.run(target)
            except RequestFailed as error:
                raise Refused(f"{arm.name}: warm-up: {'' if target.succeeded else 'nothing succeeded: '}{error}") from None
            except Refused as refusal:
                raise Refused(f"{arm.name}: warm-up: {refusal}") from None
            yield target


class _Together:
    """All servers up at once, each started when it is first needed; a twin shares that of its arm."""

    def __init__(self, made: Serving, stack: AsyncExitStack, listener: Listener) -> None:
        self.made, self.stack, self.listener = made, stack, listener
        self.targets: dict[str, Target] = {}

    async def target(self, arm: ServingArm) -> Target:
        name = arm.same_as or arm.name
        if name not in self.targets:
            # All of them before the first run, so that none is timed while another is started.
            for other in self.made.arms:
                if other.same_as is None:
                    self.targets[other.name] = await self.stack.enter_async_context(_ready(self.made, other, self.listener))
        return self.targets[name]


class _Restart:
    """One server at a time: the one before is stopped first. A twin is started anew, so that the noise holds that too."""

    def __init__(self, made: Serving, stack: AsyncExitStack, listener: Listener) -> None:
        self.made, self.listener = made, listener
        self.open = AsyncExitStack()
        stack.push_async_exit(self._close)
        self.name = ""
        self.current: Target | None = None

    async def target(self, arm: ServingArm) -> Target:
        if self.current is None or self.name != arm.name:
            await self.open.aclose()
            self.current = None
            self.current = await self.open.enter_async_context(_ready(self.made, arm, self.listener))
            self.name = arm.name
        return self.current

    async def _close(self, *error: object) -> None:
        await self.open.aclose()
