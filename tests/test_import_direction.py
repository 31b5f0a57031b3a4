"""Imports point one way, kernels hold kernels only, and files stay small. Each rule is shown red on a planted tree."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bigpool

PACKAGE = Path(bigpool.__file__).parent
MAX_LINES = 400

# unit -> the units that it may import. A unit is a module or a package directly under bigpool.
# `bigpool` is the package's own __init__, which only hands out names.
BASE = {"errors", "layout"}
PURE = BASE | {"tuning", "tuning_sm90", "tuning_tables", "cost"}
TENSORS = PURE | {"_check", "_device", "formats", "workspace", "reference", "reference_logits"}
CACHE = TENSORS | {"cache", "reference_cache", "reference_merge", "reference_prefill", "reference_prefill_keys"}
OPS = CACHE | {"kernels", "ops"}
PROOF = OPS | {"pools", "bigpool", "proof"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "layout": {"errors"},
    "tuning": BASE,
    "tuning_sm90": BASE | {"tuning"},
    "tuning_tables": BASE | {"tuning"},
    "cost": BASE | {"tuning"},
    "_check": BASE,
    "_device": PURE,
    "workspace": PURE | {"_check", "_device"},
    "formats": BASE | {"formats"},
    "reference_logits": set(),
    "reference": BASE | {"tuning", "_check", "formats", "reference_logits"},
    "cache": BASE | {"_check", "formats"},
    "reference_cache": BASE | {"formats", "cache"},
    "reference_merge": BASE,
    "reference_prefill": BASE | {"tuning", "formats", "reference_logits", "reference_prefill_keys"},
    "reference_prefill_keys": BASE | {"formats"},
    "kernels": {"kernels"},
    "ops": OPS,
    "pools": OPS | {"pools"},
    "proof": PROOF,
    "bench": PROOF | {"bench"},
    "serving": PROOF | {"serving"},
    "report": PROOF | {"report"},
    "audit": BASE | {"audit"},
    "confirm": PROOF | {"audit", "bench", "confirm"},
    "sweep": PROOF | {"audit", "bench", "confirm", "sweep"},
    "series": {"errors"},
    "doctor": PROOF | {"serving"},
    "cli": PROOF | {"bench", "serving", "report", "audit", "confirm", "sweep", "series", "doctor", "cli"},
    "bigpool": OPS | {"pools"},
    "__main__": {"cli"},
}
# What a unit may import from outside, where that is limited: most of these load on any machine.
OUTSIDE = {
    **dict.fromkeys(
        ("errors", "layout", "tuning", "tuning_sm90", "tuning_tables", "cost", "audit", "series", "__main__"),
        sys.stdlib_module_names,
    ),
    "kernels": {"triton", "__future__"},
}
# Parts of a unit that may import more.
MORE_OUTSIDE = {"audit/launch/": {"triton"}, "audit/launch/pytest_plugin.py": {"pytest"}, "audit/assume.py": {"tomli", "tomllib"}}
# Imported inside functions only: the unit loads without them.
NOT_AT_THE_TOP = {"audit": {"triton", "pytest"}}
# Units in which an import by a computed name is part of the job.
MAY_IMPORT_BY_NAME = {"bigpool", "audit", "confirm", "cli", "proof", "bench", "serving", "report", "doctor"}


def imports_of(tree: ast.AST, package: str) -> Iterator[tuple[int, str | None]]:
    """(line, full name) of every import anywhere in a module of `package`; None for a computed name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in {"import_module", "__import__"} and node.args:
                name = node.args[0]
                literal = isinstance(name, ast.Constant) and isinstance(name.value, str)
                yield node.lineno, str(name.value) if literal else None  # type: ignore[attr-defined]


def target_of(name: str, units: set[str]) -> str:
    """The unit that a full name `bigpool...` lies in."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in units else "bigpool"


def python_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


def violations(root: Path) -> list[str]:
    """What breaks the direction of imports in a package `bigpool` at `root`."""
    units = {path.stem if path.suffix else path.name for path in root.iterdir()} | set(MAY_IMPORT)
    found = []
    for path in python_files(root):
        inside = path.relative_to(root)
        unit = inside.parts[0].removesuffix(".py").replace("__init__", "bigpool")
        package = ".".join(["bigpool", *inside.parts[:-1]])
        if unit not in MAY_IMPORT:
            found.append(f"{inside}: a unit without a rule; say in MAY_IMPORT what it may import")
            continue
        tree = ast.parse(path.read_text("utf-8"))
        more = {name for part, names in MORE_OUTSIDE.items() if inside.as_posix().startswith(part) for name in names}
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                tops = {str(name).split(".")[0] for _, name in imports_of(node, package)} & NOT_AT_THE_TOP.get(unit, set())
                found += [f"{inside}:{node.lineno}: {unit} imports {top} outside a function" for top in sorted(tops & more)]
        for line, name in imports_of(tree, package):
            if name is None:
                if unit not in MAY_IMPORT_BY_NAME:
                    found.append(f"{inside}:{line}: {unit} imports by a computed name")
                continue
            top = name.split(".")[0]
            if top == "bigpool":
                target = target_of(name, units)
                if target not in MAY_IMPORT[unit]:
                    found.append(f"{inside}:{line}: {unit} imports {target}")
            elif top not in OUTSIDE.get(unit, {top}) and top not in more:
                found.append(f"{inside}:{line}: {unit} imports {top}")
    return found


def not_kernels(root: Path) -> list[str]:
    """Functions and classes under kernels/ that are not @triton.jit or @gluon.jit functions, autotuned ones included."""
    found = []
    for path in python_files(root / "kernels"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                continue
            marks = [mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list]
            if isinstance(node, ast.ClassDef) or [ast.unparse(mark) for mark in marks] not in (["triton.jit"], ["gluon.jit"]):
                found.append(f"{path.relative_to(root)}:{node.lineno}: {node.name} is not just @triton.jit or @gluon.jit")
    return found


def long_files(root: Path) -> list[str]:
    lengths = {path.relative_to(root): len(path.read_text("utf-8").splitlines()) for path in python_files(root)}
    return [f"{path}: {lines} lines" for path, lines in lengths.items() if lines > MAX_LINES]


def test_imports_point_one_way() -> None:
    assert violations(PACKAGE) == []


def test_kernels_hold_kernels_only() -> None:
    assert python_files(PACKAGE / "kernels")
    assert not_kernels(PACKAGE) == []


def test_no_file_is_longer_than_its_ceiling() -> None:
    assert long_files(PACKAGE) == []


def test_the_rules_themselves_point_one_way() -> None:
    # Were two units allowed to import each other, no test could tell which way is down.
    for unit, allowed in MAY_IMPORT.items():
        assert allowed <= set(MAY_IMPORT)
        for other in allowed - {unit}:
            assert unit not in MAY_IMPORT[other], f"{unit} and {other} may import each other"


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


CLEAN = {
    "__init__.py": "from .layout import KVLayout\ndef f():\n    from .ops.verify import g",
    "errors.py": "import os.path\n",
    "layout.py": "from __future__ import annotations\nfrom .errors import E\n",
    "kernels/__init__.py": "",
    "kernels/_paging.py": "import triton\n@triton.jit(noinline=True)\ndef k(): pass\n",
    "kernels/verify.py": "import triton.language as tl\nfrom ._paging import k\n",
    "ops/verify.py": "import torch\nfrom ..kernels.verify import k\nfrom .. import reference\nfrom bigpool.errors import E\n",
    "reference.py": "import torch\nfrom . import errors\n",
    "proof/case.py": "import importlib\nfrom bigpool import pools, ops, __version__\nimportlib.import_module(name)\n",
    "audit/rules.py": "import ast\nfrom ..layout import INT32_MAX\nfrom .ranges import R\n",
    "audit/__init__.py": "import importlib\nimportlib.import_module(name)\n",
    "audit/launch/compile.py": "from ..rules import R\ndef f():\n    from triton import knobs\n",
    "cli/wall.py": "import click\nfrom .. import __version__\nfrom ..layout import KVLayout\n",
}


def test_a_clean_tree_passes(tmp_path: Path) -> None:
    plant(tmp_path, CLEAN)
    assert violations(tmp_path) == []
    assert not_kernels(tmp_path) == []
    assert long_files(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("layout.py", "import torch\n", "layout.py:1: layout imports torch"),
        ("layout.py", "import typing\nif typing.TYPE_CHECKING:\n    import torch\n", "layout.py:3: layout imports torch"),
        ("errors.py", "from . import layout\n", "errors.py:1: errors imports layout"),
        ("kernels/verify.py", "import torch\n", "kernels/verify.py:1: kernels imports torch"),
        ("kernels/verify.py", "import os\n", "kernels/verify.py:1: kernels imports os"),
        ("kernels/verify.py", "from ..tuning import P\n", "kernels/verify.py:1: kernels imports tuning"),
        ("reference.py", "def f():\n    from .ops.verify import g\n", "reference.py:2: reference imports ops"),
        ("reference.py", "import bigpool.kernels.verify\n", "reference.py:1: reference imports kernels"),
        ("ops/verify.py", "from bigpool import pools\n", "ops/verify.py:1: ops imports pools"),
        ("ops/verify.py", "from bigpool import SparsePool\n", "ops/verify.py:1: ops imports bigpool"),
        ("ops/verify.py", "from .. import proof as p\n", "ops/verify.py:1: ops imports proof"),
        ("pools/sparse.py", "from ..proof.case import C\n", "pools/sparse.py:1: pools imports proof"),
        ("pools/sparse.py", "import importlib\nimportlib.import_module('bigpool.cli')\n", "pools/sparse.py:2: pools imports cli"),
        ("pools/sparse.py", "__import__(name)\n", "pools/sparse.py:1: pools imports by a computed name"),
        ("proof/cases/a.py", "from ...cli import main\n", "proof/cases/a.py:1: proof imports cli"),
        ("audit/rules.py", "from ..ops import verify\n", "audit/rules.py:1: audit imports ops"),
        ("audit/rules.py", "def f():\n    import triton\n", "audit/rules.py:2: audit imports triton"),
        ("audit/source/a.py", "def f():\n    import triton\n", "audit/source/a.py:2: audit imports triton"),
        ("audit/launch/a.py", "import triton\n", "audit/launch/a.py:1: audit imports triton outside a function"),
        ("audit/launch/a.py", "def f():\n    import torch\n", "audit/launch/a.py:2: audit imports torch"),
        ("audit/launch/a.py", "from ...ops import verify\n", "audit/launch/a.py:1: audit imports ops"),
        ("audit/launch/a.py", "def f():\n    import pytest\n", "audit/launch/a.py:2: audit imports pytest"),
        ("audit/rules.py", "def f():\n    import tomli\n", "audit/rules.py:2: audit imports tomli"),
        ("series.py", "__import__(name)\n", "series.py:1: series imports by a computed name"),
        ("__init__.py", "from .cli import main\n", "__init__.py:1: bigpool imports cli"),
        ("helpers.py", "", "helpers.py: a unit without a rule; say in MAY_IMPORT what it may import"),
    ],
)  # fmt: skip
def test_a_planted_import_is_found(tmp_path: Path, name: str, text: str, found: str) -> None:
    plant(tmp_path, CLEAN | {name: text})
    assert violations(tmp_path) == [found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(): pass\n", "kernels/verify.py:1: f is not just @triton.jit or @gluon.jit"),
        ("class C: pass\n", "kernels/verify.py:1: C is not just @triton.jit or @gluon.jit"),
        (
            "@triton.autotune([], [])\n@triton.jit\ndef f(): pass\n",
            "kernels/verify.py:3: f is not just @triton.jit or @gluon.jit",
        ),
    ],
)
def test_a_planted_policy_is_found(tmp_path: Path, text: str, found: str) -> None:
    plant(tmp_path, CLEAN | {"kernels/verify.py": text})
    assert not_kernels(tmp_path) == [found]


def test_a_planted_long_file_is_found(tmp_path: Path) -> None:
    plant(tmp_path, CLEAN | {"reference.py": "#\n" * (MAX_LINES + 1), "errors.py": "#\n" * MAX_LINES})
    assert long_files(tmp_path) == ["reference.py: 401 lines"]
