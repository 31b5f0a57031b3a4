"""Timers and the watch over the GPU, with a made-up clock, made-up CUDA and a made-up nvidia-smi."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_sim import SimulatedTimer
from bigpool.bench import price as price_module
from bigpool.bench import timer, watch
from bigpool.bench.pairs import measure, prepare
from bigpool.bench.price import price
from bigpool.errors import BackendError, ProofError


class Clock:
    """Moves on when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("seconds", "inner"), [(1e-5, 20), (1.0, 1), (1e-9, 1_000)])
def test_a_short_run_on_the_cpu_is_repeated_within_its_sample(seconds: float, inner: int) -> None:
    clock = Clock()
    runs = []

    def call() -> None:
        runs.append(1)
        clock.pass_by(seconds)

    made = timer.CpuTimer(clock)
    ready = made.prepare(call)
    runs.clear()
    assert made.run_round([ready]) == pytest.approx([seconds])
    assert len(runs) == inner


def test_methods_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"^--method: expected graph, events, cpu, got 'best'; graph is what a server runs$"):
        timer.make_timer("best")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"^--method: expected a CUDA device for graph, got none; use --method cpu$"):
        timer.make_timer("graph")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA that notes what is asked of it. Every event is one millisecond after the last."""
    log: list[str] = []
    clock = Clock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            clock.pass_by(1.0)
            self.at = clock()
            log.append("event")

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextlib.contextmanager
    def capture(graph: object) -> Iterator[None]:
        log.append("capture")
        yield
        log.append("captured")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes: dict[str, Any] = {
        "Event": Event, "CUDAGraph": Graph, "graph": capture, "Stream": lambda: stream, "current_stream": lambda: stream,
        "stream": lambda other: contextlib.nullcontext(), "synchronize": lambda: log.append("sync"), "is_available": lambda: True,
        "current_device": lambda: 0, "memory_reserved": lambda device: 1,
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=1 << 20, uuid="12-34"),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **more: zeros(*size, **more))
    monkeypatch.setattr(timer.EventTimer, "flush", lambda self: log.append("flush"))
    return log


@pytest.mark.parametrize("method", ["events", "graph"])
def test_on_a_gpu_every_run_follows_a_flush_and_one_sync_ends_the_round(device: list[str], method: str) -> None:
    made = timer.make_timer(method)
    assert isinstance(made, timer.EventTimer)
    assert made.flush_bytes == 4 << 20
    ready, faults = prepare(made, {"a": lambda: device.append("call"), "b": lambda: device.append("call")})
    assert faults == {}
    assert device.count("capture") == (2 if method == "graph" else 0)
    device.clear()
    samples = measure(made, ready, 8)
    ran = "replay" if method == "graph" else "call"
    assert device == ["flush", "event", ran, "event", *["flush", "event", ran, "event"] * 3, "sync"] * 9
    assert samples == {name: [[1e-3, 1e-3]] * 8 for name in ("a", "b")}


def test_what_raises_while_it_is_captured_is_named(device: list[str]) -> None:
    def call() -> None:
        raise RuntimeError("operation not permitted\n  when stream is capturing")

    ready, faults = prepare(timer.make_timer("graph"), {"a": lambda: None, "b": call})
    assert list(ready) == ["a"]
    assert faults == {"b": "RuntimeError: operation not permitted when stream is capturing"}


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, clocks: str, pids: str) -> None:
    """Puts an nvidia-smi that says this before all others."""
    file = folder / "nvidia-smi"
    file.write_text(f'#!/bin/sh\ncase "$1" in *compute-apps*) printf "{pids}";; *) echo "{clocks}";; esac\n')
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_watch_reads_clocks_under_load_and_sees_others(
    device: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getpid()
    nvidia_smi(tmp_path, monkeypatch, "1980, 3201, 40, 300", f"{own}\\n")
    watched = watch.Watch(torch.device("cuda"))
    watched.start(lambda: None)
    assert watched.before == {"clocks.sm": 1980, "clocks.mem": 3201, "temperature.gpu": 40, "power.draw": 300}
    watched.stop(lambda: None)
    assert (watched.faults, watched.notes) == ([], [])
    nvidia_smi(tmp_path, monkeypatch, "1500, 3201, 40, 300", f"{own}\\n4242\\n")
    watched.stop(lambda: None)
    assert watched.faults == [
        "clocks.sm moved from 1,980 to 1,500 MHz (allowed: 3%); let the card cool, or lock its clocks with nvidia-smi -lgc",
        "another process used the GPU (pid 4242); stop it, or choose another GPU with CUDA_VISIBLE_DEVICES",
    ]


def test_the_price_of_any_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_module, "make_timer", lambda method: SimulatedTimer(1))
    found = price(lambda: 1e-3, lambda: 1.1e-3, same=lambda a, b: True, repeats=20)
    assert found.word == "slower"
    assert found.effect.estimate == pytest.approx(0.1, abs=0.02)
    with pytest.raises(ProofError, match=r"^after: expected what before gives, got something else; a wrong answer has no price$"):
        price(lambda: 1e-3, lambda: 1.1e-3, same=lambda a, b: a == b)


def test_without_nvidia_smi_the_watch_says_that_it_is_blind(device: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    watched = watch.Watch(torch.device("cuda"))
    watched.start(lambda: None)
    assert watched.faults == []
    assert watched.notes == [
        "other processes could not be seen: nvidia-smi is missing",
        "clocks could not be read: nvidia-smi is missing or answers nothing",
    ]
