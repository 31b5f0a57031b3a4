"""Finds cases: every file in bigpool/proof/cases, or a user's file. Runs in a child, since a case file is anybody's code."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from bigpool.errors import ProofError
from bigpool.proof.arms import ArmFinder, module_name
from bigpool.proof.case import PLACEMENTS, Case

NEEDED = ("name", "build", "run")
BUILTIN = "bigpool.proof.cases"


def discover(file: str | None) -> dict[str, Any]:
    """{"cases": [description, ...], "kernels": {module: file}}; kernels is empty for the built-in cases."""
    if file is None:
        names = [entry.name for entry in pkgutil.iter_modules(importlib.import_module(BUILTIN).__path__)]
        modules = [importlib.import_module(f"{BUILTIN}.{name}") for name in sorted(names)]
        kernels: dict[str, str] = {}
    else:
        modules = [load_file(file, {})]
        kernels = kernel_files(modules[0], Path(file))
    found = [describe(case, module) for module in modules for case in cases_of(module)]
    names = [case["name"] for case in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ProofError(f"CASES: expected unique names, got {', '.join(twice)} more than once")
    return {"cases": found, "kernels": kernels}


def find_case(file: str | None, module: str, name: str, arm: Mapping[str, str]) -> tuple[Case, ModuleType | None]:
    """(the case, the arm's kernel module or None for a built-in case), loaded from the files of the arm."""
    if file is None:
        ArmFinder(arm).install()
        loaded, kernels = importlib.import_module(module), None
    else:
        loaded = load_file(file, arm)
        # An arm's copies lie elsewhere, but what they import lies beside the originals.
        sys.path += [str(module_name(Path(path))[1]) for path in kernel_files(loaded, Path(file)).values()]
        kernels = importlib.import_module(next(iter(arm))) if arm else loaded
    for case in cases_of(loaded):
        if case.name == name:
            return case, kernels
    raise ProofError(f"case {name}: not in CASES of {module} in this arm")


def load_file(file: str, arm: Mapping[str, str]) -> ModuleType:
    """The user's case file as a module; what lies beside it can be imported."""
    path = Path(file)
    name, folder = module_name(path)
    sys.path.insert(0, str(folder))
    # An arm's copy of the case file itself wins over the original.
    ArmFinder({name: str(path), **arm}).install()
    return importlib.import_module(name)


def kernel_files(module: ModuleType, case_file: Path) -> dict[str, str]:
    """Module name -> file of what `KERNELS` names (a file or a list of files beside the case file); default: the case file."""
    named = getattr(module, "KERNELS", case_file.name)
    entries = [named] if isinstance(named, str) else named
    if not isinstance(entries, (list, tuple)) or not entries or not all(isinstance(entry, str) for entry in entries):
        raise ProofError(
            f"{case_file.name}: KERNELS: expected the name of a file beside it, or a list of such, got {named!r}; "
            "leave it out if the kernel is in the case file"
        )
    files = {}
    for entry in entries:
        path = (case_file.parent / entry).resolve()
        if not path.is_file():
            raise ProofError(f"KERNELS: expected a file beside {case_file.name}, got {entry!r}, which does not exist")
        check_file("KERNELS", path)
        files[module_name(path)[0]] = str(path)
    return files


def check_file(argument: str, path: Path) -> None:
    """A file that Python can import by its name."""
    if path.is_dir():
        raise ProofError(f"{argument}: expected a Python file, got the folder {path.name}; name the file in it")
    if path.suffix != ".py" or "." in path.stem:
        raise ProofError(
            f"{argument}: expected a name that ends in .py and has no other dot, got {path.name}; rename or link the file"
        )


def cases_of(module: ModuleType) -> list[Case]:
    cases = getattr(module, "CASES", None)
    where = Path(module.__file__ or module.__name__).name
    if not isinstance(cases, (list, tuple)) or not cases:
        raise ProofError(f"{where}: expected a list CASES of bigpool.proof.Case, got {cases!r}; see docs/prove-your-kernel.md")
    for case in cases:
        if isinstance(case, type):
            raise ProofError(
                f"{where}: CASES: expected instances, got the class {case.__name__}; write {case.__name__}() in the list"
            )
        missing = [name for name in NEEDED if not hasattr(case, name)]
        if missing or not case.name:
            raise ProofError(
                f"{where}: expected cases with {', '.join(NEEDED)}, got {case!r} without {', '.join(missing) or 'a name'}"
            )
        faults = [fault for name in ("name", "op", "describe") if (fault := _no_text(case, name))]
        faults += [fault for name in ("dtypes", "placements", "not_exercised") if (fault := _no_texts(case, name))]
        if faults:
            raise ProofError(f"{where}: case {case.name}: {'; '.join(faults)}")
    return list(cases)


def _no_text(case: Case, name: str) -> str:
    value = getattr(case, name, "")
    return "" if isinstance(value, str) else f"{name}: expected a string, got {value!r}"


def _no_texts(case: Case, name: str) -> str:
    value = getattr(case, name, getattr(Case, name))
    good = isinstance(value, (list, tuple)) and all(isinstance(entry, str) for entry in value)
    if good and (value or name != "dtypes"):
        return ""
    remedy = f"; write ({value!r},)" if isinstance(value, str) else ""
    return f"{name}: expected a list or tuple of strings, got {value!r}{remedy}"


def describe(case: Case, module: ModuleType) -> dict[str, Any]:
    """What the parent has to know of a case, as plain values."""
    placements = tuple(getattr(case, "placements", PLACEMENTS))
    if not {"bottom", "top"} <= set(placements) <= set(PLACEMENTS):
        raise ProofError(f"case {case.name}: expected placements with bottom and top out of {PLACEMENTS}, got {placements}")
    return {
        "name": case.name,
        "op": getattr(case, "op", ""),
        "describe": getattr(case, "describe", ""),
        "fast": bool(getattr(case, "fast", True)),
        "dtypes": list(getattr(case, "dtypes", Case.dtypes)),
        "placements": [placement for placement in PLACEMENTS if placement in placements],
        "not_exercised": list(getattr(case, "not_exercised", ())),
        "module": module.__name__,
    }
