"""Times one call after another, the L2 cache emptied in between: CUDA-graph replay, CUDA events, or the CPU's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigpool.bench.pairs import Call, Timer
from bigpool.errors import BackendError

METHODS = ("graph", "events", "cpu")
WARMUPS = 3
# A GPU that waited for a compiler has clocked down; it is back up long before this.
GPU_WARM_SECONDS = 0.05
# Enough to push everything out of a cache that keeps some lines back.
L2_FACTOR = 4
# A run on the CPU that is shorter than this is repeated within its sample.
MIN_CPU_SAMPLE = 2e-4
MAX_CPU_INNER = 1_000


def make_timer(method: str) -> Timer:
    """The timer of this name; BackendError where it cannot run."""
    if method not in METHODS:
        raise BackendError(f"--method: expected {', '.join(METHODS)}, got {method!r}; graph is what a server runs")
    if method == "cpu":
        return CpuTimer()
    if not torch.cuda.is_available():
        raise BackendError(f"--method: expected a CUDA device for {method}, got none; use --method cpu")
    return GraphTimer() if method == "graph" else EventTimer()


def event_pair() -> tuple[Any, Any]:
    """A start and a stop."""
    make: Any = torch.cuda.Event
    return make(enable_timing=True), make(enable_timing=True)


class CpuTimer:
    """`time.perf_counter` around a call, or around as many as make a sample that its resolution does not show in."""

    method = "cpu"

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock

    def prepare(self, call: Call) -> Call:
        for _ in range(WARMUPS):
            began = self.clock()
            call()
            took = self.clock() - began
        inner = min(max(round(MIN_CPU_SAMPLE / max(took, 1e-9)), 1), MAX_CPU_INNER)

        def sample() -> float:
            began = self.clock()
            for _ in range(inner):
                call()
            return (self.clock() - began) / inner

        return sample

    def run_round(self, calls: Sequence[Call]) -> list[float]:
        return [float(call()) for call in calls]  # type: ignore[arg-type]


class EventTimer:
    """CUDA events around each call. The flush before it keeps the GPU busy while the host launches."""

    method = "events"

    def __init__(self) -> None:
        size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flush_bytes = L2_FACTOR * max(size, 1 << 20)
        self.buffer = torch.zeros(self.flush_bytes // 4, dtype=torch.float32, device="cuda")
        self.sink = torch.zeros((), dtype=torch.float32, device="cuda")

    def prepare(self, call: Call) -> Call:
        runs, began = 0, time.perf_counter()
        while runs < WARMUPS or time.perf_counter() - began < GPU_WARM_SECONDS:
            call()
            torch.cuda.synchronize()
            runs += 1
        return call

    def run_round(self, calls: Sequence[Call]) -> list[float]:
        events = [event_pair() for _ in calls]
        for call, (start, stop) in zip(calls, events, strict=True):
            self.flush()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) / 1e3 for start, stop in events]

    def flush(self) -> None:
        """Reads rather than writes: lines that were written would be written back during the call that is timed."""
        torch.sum(self.buffer, dim=0, out=self.sink)


class GraphTimer(EventTimer):
    """The same around the replay of a CUDA graph that holds one call."""

    method = "graph"

    def prepare(self, call: Call) -> Call:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()

        def replay() -> object:
            graph.replay()
            return kept

        return super().prepare(replay)
