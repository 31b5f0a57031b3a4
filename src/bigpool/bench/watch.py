"""Is the GPU to ourselves, and does it hold its clocks? Asked of nvidia-smi while it works, since an idle one clocks down."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from bigpool.bench.pairs import Call

# A clock may differ by this share between the beginning and the end; arms alternate, so that less than this cancels out.
CLOCK_TOLERANCE = 0.03
FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
TIMEOUT = 20.0

Clocks: TypeAlias = dict[str, float]


class Watch:
    """`start` and `stop` around the timing; then `faults` are reasons to refuse its numbers, `notes` what could not be seen."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: Clocks | None = None
        self.after: Clocks | None = None
        self.others: set[int] = set()
        self.notes: list[str] = []
        if device.type != "cuda":
            self.notes.append("clocks and other load are not watched on a CPU; the A/A noise shows what they did")
            return
        self.gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._look_around()

    def start(self, load: Call) -> None:
        """Reads the clocks while `load` runs."""
        self.before = self._clocks(load)
        if self.device.type == "cuda" and self.before is None:
            self.notes.append("clocks could not be read: nvidia-smi is missing or answers nothing")

    def stop(self, load: Call) -> None:
        self.after = self._clocks(load)
        if self.device.type == "cuda":
            self._look_around()

    @property
    def faults(self) -> list[str]:
        found = clock_faults(self.before, self.after)
        if self.others:
            pids = ", ".join(map(str, sorted(self.others)))
            found.append(f"another process used the GPU (pid {pids}); stop it, or choose another GPU with CUDA_VISIBLE_DEVICES")
        return found

    def to_json(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "tolerance": CLOCK_TOLERANCE, "other_processes": sorted(self.others)}

    def _look_around(self) -> None:
        text = _ask(["--query-compute-apps=pid", "--format=csv,noheader", f"--id={self.gpu}"])
        if text is None:
            self.notes.append("other processes could not be seen: nvidia-smi is missing")
            return
        pids = [int(line) for line in text.split() if line.isdigit()]
        self.others |= set(foreign(pids, os.getpid(), torch.cuda.memory_reserved(self.device) > 0))

    def _clocks(self, load: Call) -> Clocks | None:
        if self.device.type != "cuda":
            return None
        command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"--id={self.gpu}"]
        try:
            asked = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except FileNotFoundError:
            return None
        while asked.poll() is None:
            load()
            torch.cuda.synchronize()
        return parse_clocks(asked.communicate()[0])


def parse_clocks(text: str) -> Clocks | None:
    """`1980, 3201, 40, 300.5` by field; what the card does not tell is left out."""
    values = text.strip().split(",")
    if len(values) != len(FIELDS):
        return None
    read = {}
    for field, value in zip(FIELDS, values, strict=True):
        try:
            read[field] = float(value)
        except ValueError:
            continue
    return read


def clock_faults(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> list[str]:
    """In words, each clock that moved."""
    faults = []
    for field in FIELDS[:2]:
        was, now = (before or {}).get(field), (after or {}).get(field)
        if was and now and abs(now / was - 1) > CLOCK_TOLERANCE:
            remedy = "let the card cool, or lock its clocks with nvidia-smi -lgc"
            faults.append(f"{field} moved from {was:,.0f} to {now:,.0f} MHz (allowed: {CLOCK_TOLERANCE:.0%}); {remedy}")
    return faults


def foreign(pids: Sequence[int], own: int, has_context: bool) -> list[int]:
    """Processes that are not this one. In a container its own pid may be listed as another number."""
    others = [pid for pid in pids if pid != own]
    return others[1:] if has_context and own not in pids else others


def _ask(arguments: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
