"""What this machine reaches before anything of ours runs: read rate, copy rate, matrix rates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bigpool.bench.pairs import Call
from bigpool.bench.timer import event_pair
from bigpool.cost import Ceilings

RUNS = 12
GPU_STREAM_BYTES, CPU_STREAM_BYTES = 4 << 30, 32 << 20
GPU_MATRIX, CPU_MATRIX = 8_192, 256
READ_BLOCK, READ_PROGRAMS_PER_SM, READ_WARPS = 8_192, 4, 8


@dataclass(frozen=True)
class Roofline:
    """Bytes a second read and copied (read + written), and operations a second of matrix products by operand dtype."""

    read: float
    copy: float
    matrix: dict[str, float]
    how: str

    def ceilings(self, dtype: torch.dtype) -> Ceilings:
        """For operands of `dtype`, or the fastest that was measured if that dtype was not."""
        name = str(dtype).removeprefix("torch.")
        return Ceilings(self.read, self.copy, self.matrix.get(name, max(self.matrix.values())))

    def to_json(self) -> dict[str, Any]:
        return {"read": self.read, "copy": self.copy, "matrix": dict(self.matrix), "how": self.how}


def measure(device: torch.device) -> Roofline:
    """Medians over a few runs of buffers far larger than any cache (on a CPU: larger than most)."""
    return _on_gpu(device) if device.type == "cuda" else _on_cpu()


def _on_gpu(device: torch.device) -> Roofline:
    read, copy, size = _streams(device)
    matrix = {}
    for name, product in _products(device).items():
        try:
            matrix[name] = 2 * GPU_MATRIX**3 / _gpu_seconds(product)
        except RuntimeError:
            continue
    return Roofline(read, copy, matrix, f"medians of {RUNS} runs, CUDA events; read: a Triton kernel, {size >> 20:,} MiB")


def _streams(device: torch.device) -> tuple[float, float, int]:
    """(bytes a second read, bytes a second copied, bytes of the buffer)"""
    from bigpool.bench._stream import read_kernel

    free = torch.cuda.mem_get_info(device)[0]
    count = min(GPU_STREAM_BYTES, free // 4) // (8 * READ_BLOCK) * 2 * READ_BLOCK
    x = torch.zeros(count, dtype=torch.float32, device=device)
    sink = torch.zeros((), dtype=torch.float32, device=device)
    programs = torch.cuda.get_device_properties(device).multi_processor_count * READ_PROGRAMS_PER_SM
    launch: Any = read_kernel[(programs,)]
    read = _gpu_seconds(lambda: launch(x, sink, count // READ_BLOCK, BLOCK=READ_BLOCK, num_warps=READ_WARPS))
    source, target = x.view(2, -1)
    return 4 * count / read, 4 * count / _gpu_seconds(lambda: target.copy_(source)), 4 * count


def _products(device: torch.device) -> dict[str, Call]:
    """A square product for each operand dtype; a card without one of them refuses it when it is run."""
    size = (GPU_MATRIX, GPU_MATRIX)
    calls: dict[str, Call] = {}
    for dtype in (torch.bfloat16, torch.float16):
        a = torch.randn(size, dtype=dtype, device=device)
        calls[str(dtype).removeprefix("torch.")] = lambda a=a: torch.mm(a, a)  # type: ignore[misc]
    whole = torch.randint(-127, 128, size, dtype=torch.int8, device=device)
    calls["int8"] = lambda: torch._int_mm(whole, whole.t())
    eight = torch.randn(size, device=device).to(torch.float8_e4m3fn)
    unit = torch.ones((), dtype=torch.float32, device=device)
    calls["float8_e4m3fn"] = lambda: torch._scaled_mm(
        eight, eight.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return calls


def _gpu_seconds(call: Call) -> float:
    for _ in range(3):
        call()
    events = [event_pair() for _ in range(RUNS)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(stop) for start, stop in events)) / 1e3


def _on_cpu() -> Roofline:
    x = torch.ones(CPU_STREAM_BYTES // 4)
    y = torch.empty_like(x)
    a = torch.randn(CPU_MATRIX, CPU_MATRIX)
    read = CPU_STREAM_BYTES / _cpu_seconds(x.sum)
    copy = 2 * CPU_STREAM_BYTES / _cpu_seconds(lambda: y.copy_(x))
    matrix = 2 * CPU_MATRIX**3 / _cpu_seconds(lambda: a @ a)
    return Roofline(read, copy, {"float32": matrix}, f"medians of {RUNS} runs on the CPU, {torch.get_num_threads()} threads")


def _cpu_seconds(call: Call, clock: Callable[[], float] = time.perf_counter) -> float:
    call()
    times = []
    for _ in range(RUNS):
        began = clock()
        call()
        times.append(clock() - began)
    return median(times)
