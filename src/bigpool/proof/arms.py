"""Arms: versions of the same kernel files. Each is a set of files on disk, told from the others by hash and widening count."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from bigpool.errors import ProofError
from bigpool.proof.loops import list_loops
from bigpool.proof.narrow import list_widenings, narrow, uncut

HOLDS, FAILS = "holds", "fails"


@dataclass(frozen=True)
class Arm:
    """`modules`: module name -> the file that it is loaded from in this arm. `expect`: what a proof needs it to do at the top."""

    name: str
    expect: str
    origin: str
    modules: Mapping[str, Path]
    cache: Path

    def describe(self) -> dict[str, Any]:
        """What the record says: every file with its hash, its widenings, and the 64-bit types that were left in it."""
        files = []
        for module, path in self.modules.items():
            source = path.read_bytes()
            text = source.decode()
            files.append(
                {
                    "module": module,
                    "file": path.name,
                    "sha256": hashlib.sha256(source).hexdigest(),
                    "widenings": len(list_widenings(text)),
                    "uncut": [f"{path.name}:{line}: {code}" for line, code in uncut(text)],
                }
            )
        return {"name": self.name, "expect": self.expect, "origin": self.origin, "files": files}

    def loops(self) -> list[str]:
        """`file:line` of the loops whose variable does not wrap in the interpreter."""
        return [f"{path.name}:{line}" for path in self.modules.values() for line in list_loops(path.read_text())]


@dataclass
class ArmStore:
    """Writes the files of arms under `folder`, one folder an arm, so that no source and no Triton cache is shared."""

    folder: Path
    arms: list[Arm] = field(default_factory=list)

    def shipped(self, modules: Mapping[str, Path], origin: str) -> Arm:
        """The files where they are."""
        return self._add("shipped", HOLDS, origin, dict(modules))

    def narrowed(self, base: Arm) -> Arm | None:
        """`base` with every widening removed; None where there is none to remove."""
        sources = {module: path.read_text() for module, path in base.modules.items()}
        count = sum(len(list_widenings(text)) for text in sources.values())
        if count == 0:
            return None
        texts = {module: narrow(text) for module, text in sources.items()}
        written = self._write("narrowed", base.modules, texts)
        lost = "its widening" if count == 1 else f"its {count} widenings"
        return self._add("narrowed", FAILS, f"{base.name} without {lost}", written)

    def given(self, name: str, expect: str, spec: str | None, base: Mapping[str, Path]) -> Arm:
        """A user's --before or --after: FILE, a folder, git:REV of the same files, or None for the files as they are."""
        if spec is None:
            return self._add(name, expect, "the current files", dict(base))
        if spec.startswith("git:"):
            texts = {module: _at_revision(spec.removeprefix("git:"), path) for module, path in base.items()}
        else:
            texts = _from_disk(name, Path(spec), base)
        # Under its own name, so that a crash line names the file that was given.
        called = Path(spec).name if Path(spec).is_file() and Path(spec).suffix == ".py" else ""
        return self._add(name, expect, spec, self._write(name, base, texts, called))

    def mutant(self, base: Arm, module: str, index: int) -> Arm:
        """`base` with one widening of one file removed."""
        texts = {name: path.read_text() for name, path in base.modules.items()}
        texts[module] = narrow(texts[module], only=index)
        name = f"mutant-{module.rpartition('.')[2]}-{index}"
        return self._add(name, FAILS, f"{base.name} without widening {index} of {module}", self._write(name, base.modules, texts))

    def _write(self, name: str, base: Mapping[str, Path], texts: Mapping[str, str], called: str = "") -> dict[str, Path]:
        written = {}
        for module, text in texts.items():
            path = self.folder / "arms" / name / Path(*module.split("."))
            is_package = base[module].name == "__init__.py"
            path = path / "__init__.py" if is_package else path.parent / (called or base[module].name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            written[module] = path
        return written

    def _add(self, name: str, expect: str, origin: str, modules: Mapping[str, Path]) -> Arm:
        arm = Arm(name, expect, origin, modules, self.folder / "cache" / name)
        self.arms.append(arm)
        return arm


def _from_disk(name: str, path: Path, base: Mapping[str, Path]) -> dict[str, str]:
    """Module name -> source, from one file for one module, or from a folder that is laid out like the files of `base`."""
    if path.is_file():
        if len(base) != 1:
            raise ProofError(f"--{name}: expected a folder or git:REV for {len(base)} kernel files, got the file {path}")
        return {next(iter(base)): path.read_text()}
    root = Path(os.path.commonpath([file.parent for file in base.values()]))
    files = {module: path / file.relative_to(root) for module, file in base.items()}
    missing = [str(file) for file in files.values() if not file.is_file()]
    if missing:
        raise ProofError(f"--{name}: expected a file, a folder or git:REV, got {path}; {missing[0]} does not exist")
    return {module: file.read_text() for module, file in files.items()}


def kernel_modules() -> dict[str, Path]:
    """Module name -> file of everything under bigpool/kernels, without importing any of it."""
    folder = Path(__file__).parent.parent / "kernels"
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        modules[".".join(("bigpool", "kernels", *parts))] = path
    return modules


def module_name(path: Path) -> tuple[str, Path]:
    """(dotted name, folder for sys.path) of a file: a package's modules keep their package."""
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def _at_revision(revision: str, path: Path) -> str:
    command = ["git", "-C", str(path.parent), "show", f"{revision}:./{path.name}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ProofError("git:REV: expected git to be installed, got none; give a file instead") from error
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or ["git said nothing"]
        raise ProofError(f"git:{revision}: expected a revision that holds {path.name}, got: {said[0]}")
    return done.stdout


class ArmFinder(MetaPathFinder):
    """Loads the modules of one arm from its files, whatever else of that name is importable. Lives in one child process."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = dict(modules)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        file = self.modules.get(name)
        if file is None:
            return None
        folders = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)

    def install(self) -> None:
        early = sorted(set(self.modules) & set(sys.modules))
        if early:
            raise ProofError(f"arm modules were loaded before their arm was chosen: {', '.join(early)}")
        sys.dont_write_bytecode = True
        sys.meta_path.insert(0, self)
