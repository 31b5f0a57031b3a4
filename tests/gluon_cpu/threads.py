"""The warps of a program that take turns, what they wait for, and what they may not do."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


class Hazard(Exception):
    """What a GPU would do in silence, or for ever."""


class _StoppedError(BaseException):
    """Another partition failed."""


class Partition:
    """Warps that run the same code."""

    def __init__(self, name: str, warps: int, serial: int) -> None:
        self.name, self.warps, self.bit = name, warps, 1 << serial
        self.turn = threading.Semaphore(0)
        self.until: Callable[[], bool] | None = None
        self.waits_for = ""
        self.done = False
        self.products: list[Any] = []
        self.unfenced: list[tuple[np.ndarray, np.ndarray]] = []
        # What other warps of it may still read: who wrote each byte of an allocation, and which bytes.
        self.reads: list[tuple[np.ndarray, np.ndarray]] = []

    def may_signal(self, what: str) -> None:
        """That others may write again what they wrote: all warps must have read it."""
        if self.warps > 1 and any((writers[places] & ~np.uint8(self.bit)).any() for writers, places in self.reads):
            raise Hazard(f"{self.name}: {what} while other warps of it may still read: no thread_barrier since the last read")


class Program:
    """One program of a grid. `haste`: the chance that a copy by TMA lands before anybody waits for it."""

    def __init__(self, ids: tuple[int, int, int], grid: tuple[int, int, int], seed: int, haste: float) -> None:
        self.ids, self.grid, self.haste = ids, grid, haste
        self.random = random.Random(f"{seed} {ids}")
        self.partitions: list[Partition] = []
        self.copies: list[Any] = []
        self.failure: BaseException | None = None
        self.ended = threading.Event()
        self.now: Partition

    def run(self, kernel: Callable[[], Any], warps: int) -> None:
        self.start("the program", kernel, warps)
        self._next()
        self.ended.wait()
        if self.failure is not None:
            raise self.failure
        if self.copies:
            raise Hazard("a copy by TMA is still under way when the program ends")

    def start(self, name: str, body: Callable[[], Any], warps: int) -> Partition:
        made = Partition(name, warps, len(self.partitions))
        self.partitions.append(made)
        threading.Thread(target=self._body, args=(made, body), daemon=True).start()
        return made

    def _body(self, own: Partition, body: Callable[[], Any]) -> None:
        own.turn.acquire()
        try:
            if self.failure is None:
                body()
                if own.products:
                    raise Hazard(f"{own.name}: ends with a product that nobody waited for")
        except _StoppedError:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        own.done = True
        self._next()

    def pause(self, until: Callable[[], bool] | None = None, waits_for: str = "") -> None:
        """Lets others run; comes back when `until` holds."""
        own = self.now
        own.until, own.waits_for = until, waits_for
        for copy in [copy for copy in self.copies if self.random.random() < self.haste]:
            self.land(copy)
        self._next()
        own.turn.acquire()
        if self.failure is not None:
            raise _StoppedError

    def land(self, copy: Any) -> None:
        self.copies.remove(copy)
        copy.land()

    def _next(self) -> None:
        waiting = [one for one in self.partitions if not one.done]
        if not waiting:
            self.ended.set()
            return
        while self.failure is None:
            ready = [one for one in waiting if one.until is None or one.until()]
            if ready:
                break
            if not self.copies:
                said = "; ".join(f"{one.name} waits for {one.waits_for}" for one in waiting)
                self.failure = Hazard(f"deadlock: {said}")
            else:
                self.land(self.random.choice(self.copies))
        chosen = self.random.choice(waiting if self.failure is not None else ready)
        chosen.until = None
        self.now = chosen
        chosen.turn.release()


current: list[Program] = []


def program() -> Program:
    return current[-1]
