"""One configuration on one shape: the call that is timed, whether it is right, and how many registers it spills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bigpool.bench.formats import FormatWork
from bigpool.bench.pairs import Call
from bigpool.proof.record import shorten_paths
from bigpool.tuning import TunedKey, VerifyConfig
from bigpool.tuning_tables import trying

# Registers a thread that a candidate may keep in memory beyond those of the rule's configuration.
MOST_SPILLS = 64


@dataclass(frozen=True)
class Trial:
    """A call in which plans of `key` take `config`, all others the rule; None: the rule alone."""

    key: TunedKey
    config: VerifyConfig | None
    call: Call

    def __call__(self) -> object:
        with trying({} if self.config is None else {self.key: self.config}):
            return self.call()


@dataclass(frozen=True)
class Checked:
    """`why` is "" where the trial can be timed. `spills`: registers a thread; None where nothing was compiled anew."""

    trial: Trial
    why: str = ""
    spills: int | None = None


def check(work: FormatWork, kernels: ModuleType, key: TunedKey, config: VerifyConfig | None, sync: Callable[[], None]) -> Checked:
    """Compiles, runs and judges one configuration. Whatever it raises is its verdict."""
    trial, kernel = Trial(key, config, work.kernels_call(kernels)), kernels.verify_partial_kernel
    before = set(_compiled(kernel))
    try:
        given = trial()
        sync()
        ok, text = work.check(given)
    except Exception as error:
        return Checked(trial, shorten_paths(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
    fresh = [code for name, code in _compiled(kernel).items() if name not in before]
    spills = max((int(code.n_spills) for code in fresh if getattr(code, "n_spills", None) is not None), default=None)
    return Checked(trial, "" if ok else f"wrong: {text}", spills)


def spill_fault(spills: int | None, of_rule: int) -> str:
    """In words, that a candidate spills far more than the rule's configuration; "" if it does not."""
    most = of_rule + MOST_SPILLS
    return f"spills {spills} registers a thread, more than {most}" if spills is not None and spills > most else ""


def _compiled(kernel: Any) -> dict[Any, Any]:
    """What Triton has compiled of a kernel so far; nothing in the interpreter."""
    devices = getattr(kernel, "device_caches", {})
    return {(device, name): code for device, caches in devices.items() for name, code in caches[0].items()}
