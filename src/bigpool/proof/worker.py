"""What a child process does: one run of one case, its oracle, a comparison, or a look at the machine. Writes result.json."""

from __future__ import annotations

import json
import platform
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from bigpool.errors import BackendError, CanaryError, PoolError, ProofError
from bigpool.proof import judge
from bigpool.proof.case import WRONG_IN_INTERPRETER, DesignedSkip, Oracle
from bigpool.proof.context import Context, digest
from bigpool.proof.registry import discover, find_case

# The texts by which CUDA reports a wild access, and what they are called here; anything else is an ordinary error.
CUDA_FAULTS = {
    "an illegal memory access was encountered": "CUDA illegal access",
    "misaligned address": "CUDA misaligned address",
    "unspecified launch failure": "CUDA launch failure",
}


@dataclass
class LaunchLog:
    """The kernels that this process launched: (file, name) -> count, and the code of the last one."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    last: CodeType | None = None

    def add(self, code: CodeType) -> None:
        self.counts[code.co_filename, code.co_name] += 1
        self.last = code


# A child does one job, so that there is one log.
LAUNCHED = LaunchLog()


def perform(job: Mapping[str, Any]) -> int:
    """Entry point of a forked child; the answer is left in the job's folder."""
    print(f"{job['kind']}: {job.get('meaning', '')}", flush=True)
    result = _guarded(KINDS[job["kind"]], job)
    _write_json(Path(job["folder"]) / "result.json", result)
    return 0


def _write_json(target: Path, value: Any) -> None:
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.rename(target)


def _guarded(work: Callable[[Mapping[str, Any]], dict[str, Any]], job: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return work(job)
    except DesignedSkip as skip:
        return {"outcome": "skip", "detail": str(skip)}
    except (ProofError, BackendError, PoolError, MemoryError, torch.OutOfMemoryError) as error:
        return {"outcome": "unable", "detail": f"{_prefix(error)}{error}", "where": _where(error, job)}
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split()) or "no text"
        fault = next((name for said, name in CUDA_FAULTS.items() if said in text), None)
        if fault is not None:
            return {"outcome": "killed", **_cuda_fault(fault, error, job)}
        return {"outcome": "error", "detail": f"{type(error).__name__}: {text[:400]}", "where": _where(error, job)}
    except SystemExit as stop:
        return {"outcome": "error", "detail": f"sys.exit({stop.code!r}) was called", "where": _where(stop, job)}


def _cuda_fault(fault: str, error: BaseException, job: Mapping[str, Any]) -> dict[str, str]:
    """Launches block, so the kernel that was launched last is the one that died; CUDA does not name a line in it."""
    code = LAUNCHED.last
    if code is None:
        return {"detail": fault, "where": _where(error, job)}
    return {"detail": f"{fault} in {code.co_name}", "where": f"{Path(code.co_filename).name}:{code.co_firstlineno}"}


def _prefix(error: BaseException) -> str:
    return "" if isinstance(error, (ProofError, BackendError, PoolError)) else f"{type(error).__name__}: "


def _where(error: BaseException, job: Mapping[str, Any]) -> str:
    """`file:line` of the innermost frame in the arm's files or the case file, else of the innermost frame."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = {*job.get("arm_modules", {}).values(), job.get("file")}
    chosen = next((frame for frame in reversed(frames) if frame.filename in ours), frames[-1] if frames else None)
    return f"{Path(chosen.filename).name}:{chosen.lineno}" if chosen is not None else ""


def _context(job: Mapping[str, Any], kernels: Any) -> Context:
    import triton

    short = WRONG_IN_INTERPRETER.get(job["dtype"])
    if job["interpreted"] and short is not None:
        raise DesignedSkip(
            f"{short} arithmetic is silently wrong in Triton's interpreter (triton {triton.__version__}); needs a GPU"
        )
    dtype = getattr(torch, job["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ProofError(f"case {job['case']}: expected names of torch dtypes in dtypes, got {job['dtype']!r}")
    return Context(
        case=job["case"],
        placement=job["placement"],
        guard=job["guard"],
        arm=job["arm"],
        dtype=dtype,
        device=job["device"],
        interpreted=job["interpreted"],
        kernels=kernels,
        versions=f" (triton {triton.__version__})",
    )


def run_case(job: Mapping[str, Any]) -> dict[str, Any]:
    """Build, launch, save the outputs, check the canaries."""
    case, kernels = find_case(job["file"], job["case_module"], job["case"], job["arm_modules"])
    with _context(job, kernels) as ctx:
        inputs = case.build(ctx)
        # Left behind before anything can die, so that the record knows the pool of a killed run.
        _write_json(Path(job["folder"]) / "tensors.json", [placed.facts() for placed in ctx.placed])
        ctx.seal()
        with counted_launches(LAUNCHED):
            given = case.run(ctx, inputs)
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
        outputs = _outputs(case.name, given)
        torch.save(outputs, Path(job["folder"]) / "outputs.pt")
        result: dict[str, Any] = {
            "outcome": "ok",
            "detail": "",
            "digests": {name: digest(tensor) for name, tensor in outputs.items()},
            "nan": {name: int(tensor.float().isnan().sum()) for name, tensor in outputs.items()},
            "launches": [
                {"kernel": name, "file": file, "count": count} for (file, name), count in sorted(LAUNCHED.counts.items())
            ],
        }
        found = []
        for check in (ctx.check_canaries, lambda: ctx.check_inputs(list(given.values()))):
            try:
                check()
            except CanaryError as error:
                found.append(str(error))
        if found:
            result |= {"outcome": "canary", "detail": "; ".join(found)}
    _require_launch(case.name, job["arm"], job["arm_modules"], LAUNCHED.counts)
    for launch in result["launches"]:
        launch["file"] = Path(launch["file"]).name
    return result


def run_oracle(job: Mapping[str, Any]) -> dict[str, Any]:
    """The expected values, saved; {"oracle": False} where the case has none."""
    case, kernels = find_case(job["file"], job["case_module"], job["case"], job["arm_modules"])
    with _context(job, kernels) as ctx:
        oracle = case.oracle(ctx, case.build(ctx)) if hasattr(case, "oracle") else None
        if oracle is None:
            return {"outcome": "ok", "detail": "", "oracle": False}
        saved = _check_oracle(case.name, oracle)
        torch.save(saved, Path(job["folder"]) / "oracle.pt")
    return {"outcome": "ok", "detail": "", "oracle": True}


def _outputs(case: str, given: Any) -> dict[str, torch.Tensor]:
    if not isinstance(given, Mapping) or not given or not all(isinstance(value, torch.Tensor) for value in given.values()):
        raise ProofError(
            f"case {case}: expected run() to return a dict of tensors with at least one entry, got {type(given).__name__}"
        )
    return {str(name): tensor.detach().cpu().contiguous() for name, tensor in given.items()}


def _check_oracle(case: str, oracle: Oracle) -> dict[str, dict[str, torch.Tensor]]:
    if not oracle.expected:
        raise ProofError(
            f"case {case}: expected at least one output in Oracle.expected, got none; return None where there is no oracle"
        )
    for name, tensor in oracle.expected.items():
        if tensor.dtype != torch.float64:
            raise ProofError(f"case {case}: expected float64 in Oracle.expected[{name!r}], got {tensor.dtype}; call .double()")
        if not torch.isfinite(tensor).any():
            raise ProofError(
                f"case {case}: expected a finite value in Oracle.expected[{name!r}], got none of {tensor.numel()}; "
                "fresh memory is NaN: was a tensor not filled with .write()?"
            )
    return {
        "expected": {name: tensor.cpu().contiguous() for name, tensor in oracle.expected.items()},
        "baseline": {name: tensor.cpu().contiguous() for name, tensor in oracle.baseline.items()},
    }


@contextmanager
def counted_launches(log: LaunchLog) -> Iterator[None]:
    """Notes kernel launches while it is open, compiled and interpreted ones."""
    from triton.runtime.interpreter import GridExecutor
    from triton.runtime.jit import JITFunction

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.add(self.fn.__code__)
            return original(self, *args, **kwargs)

        return counted

    run, call = JITFunction.run, GridExecutor.__call__
    JITFunction.run, GridExecutor.__call__ = counting(run), counting(call)
    try:
        yield
    finally:
        JITFunction.run, GridExecutor.__call__ = run, call


def _require_launch(case: str, arm: str, modules: Mapping[str, str], launches: Counter[tuple[str, str]]) -> None:
    """A case that runs something else than the arm's files proves nothing about them."""
    if any(file in modules.values() for file, _ in launches):
        return
    files = ", ".join(sorted({Path(file).name for file in modules.values()}))
    elsewhere = ", ".join(sorted({f"{name} from {Path(file).name}" for file, name in launches}))
    ran = f"it launched {elsewhere} instead" if elsewhere else "it launched no Triton kernel"
    raise ProofError(
        f"case {case}, arm {arm}: expected a kernel launch from {files}; {ran}; "
        "name the kernel file in KERNELS and use ctx.kernels"
    )


def look_for_cases(job: Mapping[str, Any]) -> dict[str, Any]:
    return {"outcome": "ok", "detail": "", **discover(job["file"])}


def probe(job: Mapping[str, Any]) -> dict[str, Any]:
    """Versions and the device; refuses combinations that are known not to work."""
    import numpy
    import triton

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
    }
    gpu = None
    reason = ""
    if job["interpreted"]:
        require_working_interpreter(triton.__version__, numpy.__version__)
    elif not torch.cuda.is_available():
        reason = f"torch {torch.__version__} sees no CUDA device"
    else:
        props = torch.cuda.get_device_properties(0)
        gpu = {"name": props.name, "sm": props.major * 10 + props.minor, "memory_bytes": props.total_memory, "driver": _driver()}
    return {"outcome": "ok", "detail": "", "versions": versions, "gpu": gpu, "no_gpu": reason, "cuda": torch.version.cuda}


def require_working_interpreter(triton_version: str, numpy_version: str) -> None:
    triton_numbers, numpy_numbers = (tuple(int(part) for part in text.split(".")[:2]) for text in (triton_version, numpy_version))
    if triton_numbers < (3, 7) and numpy_numbers >= (2, 4):
        raise BackendError(
            f"backend: expected numpy < 2.4 for the interpreter of triton {triton_version}, got numpy {numpy_version}; "
            "pip install 'numpy<2.4', or 'triton>=3.7'"
        )


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    words = text.split("\n", 1)[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


KINDS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "run": run_case,
    "oracle": run_oracle,
    "compare": judge.compare_job,
    "discover": look_for_cases,
    "probe": probe,
}
