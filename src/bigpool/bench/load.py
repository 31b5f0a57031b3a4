"""Arms: versions of the kernels side by side in one process, each with a module object and a Triton cache of its own."""

from __future__ import annotations

import ast
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from bigpool.bench import peers
from bigpool.bench.pairs import Call
from bigpool.bench.work import Work
from bigpool.errors import ProofError
from bigpool.ops.verify import BACKENDS
from bigpool.proof.arms import HOLDS, Arm, ArmFinder, ArmStore, kernel_modules
from bigpool.proof.narrow import list_widenings, narrow

# Every arm is loaded under this name, one after another: a kernel's name goes into Triton's cache key, and the A/A arm is to find
# what its twin has compiled.
PACKAGE = "bigpool_arm"
OP_MODULE = "bigpool.kernels.verify"
SPECS = "shipped, narrowed, narrowed:MODULE, FILE, DIR, git:REV, backend:NAME or peer:NAME"


@dataclass(frozen=True)
class BenchArm:
    """What is timed under a name. `kernels` is None for backends and peers."""

    name: str
    spec: str
    facts: Mapping[str, Any]
    arm: Arm | None = None
    kernels: ModuleType | None = None

    def call_for(self, work: Work) -> Call:
        """The call that is timed; peers prepare theirs here, outside of the timing."""
        kind, _, name = self.spec.partition(":")
        if kind == "peer" and work.kv_format is not None:
            raise peers.PeerCannot(f"caches in {work.kv_format.name}: peers are given caches in q's dtype")
        if self.kernels is not None:
            return work.kernels_call(self.kernels)
        return peers.named(name).prepare(work) if kind == "peer" else work.backend_call(name)

    def compiling(self) -> AbstractContextManager[None]:
        """While it is open, Triton compiles into this arm's cache."""
        return nullcontext() if self.arm is None else triton_cache(self.arm.cache)


class Loader:
    """Loads arms; their files and caches are gone when it closes."""

    def __init__(self, modules: Mapping[str, Path] | None = None, op_module: str = OP_MODULE) -> None:
        self.op_module = op_module
        self.modules = closure(op_module, kernel_modules()) if modules is None else dict(modules)
        self.folder = tempfile.TemporaryDirectory(prefix="bigpool-bench-")
        self.store = ArmStore(Path(self.folder.name))

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.folder.cleanup()

    def load(self, name: str, spec: str) -> BenchArm:
        """The arm of one `NAME=SPEC`."""
        kind, _, rest = spec.partition(":")
        if kind == "backend":
            if rest not in BACKENDS:
                raise ProofError(f"--arm: expected backend:{'|'.join(BACKENDS)}, got {spec!r}; torch is the plain twin")
            return BenchArm(name, spec, {"name": name, "spec": spec, "files": []})
        if kind == "peer":
            peers.named(rest)
            return BenchArm(name, spec, {"name": name, "spec": spec, "files": []})
        return self._loaded(name, spec, self._arm(name, spec))

    def again(self, arm: BenchArm, name: str) -> BenchArm:
        """The same arm a second time, from the same files and compiled code but as another module: for A/A."""
        facts = {**arm.facts, "name": name}
        if arm.arm is None:
            return BenchArm(name, arm.spec, facts)
        return BenchArm(name, arm.spec, facts, arm.arm, import_kernels(arm.arm.modules, self.op_module))

    def _arm(self, name: str, spec: str) -> Arm:
        if spec == "shipped":
            arm = self.store.given(name, HOLDS, None, self.modules)
            return Arm(name, HOLDS, "the installed files", arm.modules, arm.cache)
        if spec.startswith("narrowed:"):
            return self._narrowed_module(name, spec.removeprefix("narrowed:"))
        if spec == "narrowed":
            narrowed = self.store.narrowed(self.store.shipped(self.modules, "the installed files"))
            if narrowed is None:
                files = ", ".join(path.name for path in self.modules.values())
                raise ProofError(f"--arm: expected kernels with a widening for narrowed, got none in {files}; give a file")
            return Arm(name, HOLDS, narrowed.origin, narrowed.modules, self.store.folder / "cache" / name)
        if Path(spec).is_file():
            module = next((known for known, path in self.modules.items() if path.name == Path(spec).name), self.op_module)
            return Arm(name, HOLDS, spec, {**self.modules, module: Path(spec).resolve()}, self.store.folder / "cache" / name)
        if not spec.startswith("git:") and not Path(spec).is_dir():
            raise ProofError(f"--arm: expected {SPECS}, got {spec!r}, which is no file or folder")
        return self.store.given(name, HOLDS, spec, self.modules)

    def _narrowed_module(self, name: str, short: str) -> Arm:
        """The shipped files, one of them without its widenings."""
        module = f"{self.op_module.rpartition('.')[0]}.{short}"
        source = self.modules[module].read_text() if module in self.modules else ""
        if not list_widenings(source):
            with_some = [known for known, path in self.modules.items() if list_widenings(path.read_text())]
            modules = "|".join(known.rpartition(".")[2] for known in with_some)
            raise ProofError(f"--arm: expected narrowed:{modules}, got 'narrowed:{short}', which widens nothing; name a module")
        path = self.store.folder / "arms" / name / self.modules[module].name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(narrow(source))
        modules_of_arm = {**self.modules, module: path}
        return Arm(name, HOLDS, f"shipped without the widenings of {short}", modules_of_arm, self.store.folder / "cache" / name)

    def _loaded(self, name: str, spec: str, arm: Arm) -> BenchArm:
        try:
            files = arm.describe()["files"]
            kernels = import_kernels(arm.modules, self.op_module)
        except (ImportError, SyntaxError) as error:
            raise ProofError(
                f"--arm: expected kernels that load for {name}={spec}, got {type(error).__name__}: {error}"
            ) from error
        # A record names no path.
        shown = spec if spec.startswith("git:") else Path(spec).name
        return BenchArm(name, spec, {"name": name, "spec": shown, "files": files}, arm, kernels)


def closure(module: str, modules: Mapping[str, Path]) -> dict[str, Path]:
    """`module`, its package, and what it imports from that package: a revision need not hold the files of other ops."""
    package = module.rpartition(".")[0]
    wanted, found = [package, module], {}
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        found[name] = modules[name]
        for node in ast.walk(ast.parse(modules[name].read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                wanted += [f"{package}.{part}" for part in names if f"{package}.{part}" in modules]
    return found


def import_kernels(modules: Mapping[str, Path], op_module: str = OP_MODULE) -> ModuleType:
    """The op's kernel module from these files, a new object each time, not left in sys.modules."""
    package = op_module.rpartition(".")[0]
    renamed = {PACKAGE + name.removeprefix(package): str(path) for name, path in modules.items()}
    finder, wrote = ArmFinder(renamed), sys.dont_write_bytecode
    try:
        finder.install()
        return import_module(PACKAGE + op_module.removeprefix(package))
    finally:
        sys.dont_write_bytecode = wrote
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for name in renamed:
            sys.modules.pop(name, None)


@contextmanager
def triton_cache(folder: Path) -> Iterator[None]:
    """Triton's cache is `folder` while this is open."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(folder)
        yield
