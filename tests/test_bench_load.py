"""Arms side by side in one process: other files, other modules, other caches, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigpool.bench.load import OP_MODULE, PACKAGE, Loader, closure, triton_cache
from bigpool.errors import ProofError
from bigpool.proof.arms import kernel_modules
from bigpool.proof.narrow import list_widenings


def source_of(kernels: object) -> str:
    return Path(str(kernels.__file__)).read_text()  # type: ignore[attr-defined]


def test_two_versions_live_side_by_side() -> None:
    path, loaded = list(sys.meta_path), set(sys.modules)
    with Loader() as loader:
        shipped, narrowed = loader.load("after", "shipped"), loader.load("before", "narrowed")
        assert shipped.kernels is not None
        assert narrowed.kernels is not None
        assert shipped.kernels is not narrowed.kernels
        assert shipped.kernels.page_slot_ptrs is not narrowed.kernels.page_slot_ptrs, "the arms share the paging helper"
        assert list_widenings(source_of(shipped.kernels))
        assert not list_widenings(source_of(narrowed.kernels))
        assert shipped.arm is not None
        assert narrowed.arm is not None
        assert shipped.arm.cache != narrowed.arm.cache
        folder = loader.store.folder
        assert folder.is_dir()
    assert not folder.exists()
    assert sys.meta_path == path
    assert not {name for name in set(sys.modules) - loaded if name.startswith(PACKAGE)}
    assert sys.modules.get(OP_MODULE) is not shipped.kernels


def test_the_twin_is_another_module_with_the_same_files_name_and_cache() -> None:
    with Loader() as loader:
        arm = loader.load("a", "shipped")
        twin = loader.again(arm, "a again")
        assert twin.kernels is not arm.kernels
        assert twin.kernels is not None
        assert arm.kernels is not None
        assert (twin.arm, twin.kernels.__name__, twin.facts["files"]) == (arm.arm, arm.kernels.__name__, arm.facts["files"])


def test_a_file_stands_for_the_kernel_file_of_its_name(tmp_path: Path) -> None:
    other = tmp_path / "_paging.py"
    other.write_text(kernel_modules()["bigpool.kernels._paging"].read_text().replace("other=-1", "other=-7"))
    odd = tmp_path / "my_verify.py"
    odd.write_text(kernel_modules()[OP_MODULE].read_text() + "\nMARK = 7\n")
    with Loader() as loader:
        arm = loader.load("new", str(other))
        assert arm.kernels is not None
        assert "other=-7" in Path(str(sys.modules.get(PACKAGE, arm).arm.modules["bigpool.kernels._paging"])).read_text()  # type: ignore[union-attr]
        named = loader.load("odd", str(odd))
        assert named.kernels is not None
        assert named.kernels.MARK == 7, "a file of another name is the op's kernel file"
        assert named.facts["spec"] == "my_verify.py", "a record names no path"


def test_a_git_revision_gives_the_files_of_then(tmp_path: Path) -> None:
    files = closure(OP_MODULE, kernel_modules())
    copies = {}
    for module, path in files.items():
        copies[module] = tmp_path / path.name
        copies[module].write_text(path.read_text())
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True)
    copies[OP_MODULE].write_text(copies[OP_MODULE].read_text() + "\nMARK = 2\n")
    with Loader(copies) as loader:
        now, then = loader.load("now", "shipped"), loader.load("then", "git:HEAD")
        assert now.kernels is not None
        assert hasattr(now.kernels, "MARK")
        assert not hasattr(then.kernels, "MARK")
        with pytest.raises(ProofError, match=r"^git:nope: expected a revision that holds "):
            loader.load("x", "git:nope")


def test_only_what_the_op_imports_is_taken_along(tmp_path: Path) -> None:
    modules = {}
    for name, text in {
        "__init__": "",
        "verify": "from ._a import f\nfrom . import _b\n",
        "_a": "",
        "_b": "",
        "other": "",
    }.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        modules["bigpool.kernels" + ("" if name == "__init__" else f".{name}")] = path
    assert sorted(closure(OP_MODULE, modules)) == [
        "bigpool.kernels", "bigpool.kernels._a", "bigpool.kernels._b", "bigpool.kernels.verify",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (
            "nowhere",
            "--arm: expected shipped, narrowed, narrowed:MODULE, FILE, DIR, git:REV, backend:NAME or peer:NAME, got 'nowhere', "
            "which is no file or folder",
        ),
        ("backend:cuda", "--arm: expected backend:auto|triton|torch, got 'backend:cuda'; torch is the plain twin"),
    ],
)
def test_specs_that_are_refused(spec: str, error: str) -> None:
    with Loader() as loader, pytest.raises(ProofError) as caught:
        loader.load("x", spec)
    assert str(caught.value) == error


def test_one_file_can_be_narrowed_alone() -> None:
    with Loader() as loader:
        arm = loader.load("before", "narrowed:_paging")
        files = {file["module"].rpartition(".")[2]: file["widenings"] for file in arm.facts["files"]}
        assert files["_paging"] == 0 < files["verify"]
        with pytest.raises(
            ProofError, match=r"^--arm: expected narrowed:.*, got 'narrowed:kernels', which widens nothing; name a"
        ):
            loader.load("x", "narrowed:kernels")


def test_an_unknown_peer_is_refused_with_those_there_are() -> None:
    with Loader() as loader, pytest.raises(ProofError, match=r"^--arm: expected peer:fa2\|fa3\|.*, got 'nobody'; see bigpool"):
        loader.load("x", "peer:nobody")


def test_a_file_that_does_not_load_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "verify.py"
    broken.write_text("def f(:\n")
    with Loader() as loader, pytest.raises(ProofError, match=r"^--arm: expected kernels that load for x=.*, got SyntaxError: "):
        loader.load("x", str(broken))


def test_tritons_cache_is_the_arms_while_it_compiles(tmp_path: Path) -> None:
    from triton import knobs

    before = knobs.cache.dir
    with triton_cache(tmp_path):
        assert knobs.cache.dir == str(tmp_path)
    assert knobs.cache.dir == before


CACHE_KEYS = """
from bigpool.bench.load import Loader
with Loader() as loader:
    arm = loader.load("a", "shipped")
    arms = [arm, loader.again(arm, "a again"), loader.load("b", "narrowed:_paging")]
    for arm in arms:
        print(arm.kernels.verify_partial_kernel.cache_key)
"""


def test_the_twin_finds_what_the_arm_compiled_and_another_version_does_not(tmp_path: Path) -> None:
    """A kernel's key holds the sources of what it calls, so a change of the paging helper alone is another kernel."""
    script = tmp_path / "keys.py"
    script.write_text(CACHE_KEYS)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    arm, twin, other = done.stdout.split()
    assert arm == twin != other
