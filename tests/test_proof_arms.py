"""Arms are files: where they come from, that they are kept apart, and that a child loads its own."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bigpool.errors import ProofError
from bigpool.proof import registry
from bigpool.proof.arms import Arm, ArmFinder, ArmStore, kernel_modules, module_name
from bigpool.proof.runner import Options, choose, choose_arms, dtypes_of

WIDE = "import triton.language as tl\n\n\ndef kernel(p):\n    return tl.load(p).to(tl.int64)\n"
PLAIN = WIDE.replace(".to(tl.int64)", "")


@pytest.fixture
def user(tmp_path: Path) -> dict[str, Path]:
    file = tmp_path / "user" / "my_kernel.py"
    file.parent.mkdir()
    file.write_text(WIDE)
    return {"my_kernel": file}


@pytest.fixture
def store(tmp_path: Path) -> ArmStore:
    return ArmStore(tmp_path / "store")


def source(arm: Arm, module: str = "my_kernel") -> str:
    return arm.modules[module].read_text()


def test_the_narrowed_arm_is_a_copy_without_widenings(store: ArmStore, user: dict[str, Path]) -> None:
    shipped = store.shipped(user, "the current files")
    narrowed = store.narrowed(shipped)
    assert narrowed is not None
    assert source(narrowed) == PLAIN
    assert user["my_kernel"].read_text() == WIDE, "the user's file was touched"
    assert narrowed.modules["my_kernel"].name == "my_kernel.py", "a crash line names the user's file"
    assert shipped.cache != narrowed.cache
    assert [arm.describe()["files"][0]["widenings"] for arm in store.arms] == [1, 0]
    assert narrowed.describe()["origin"] == "shipped without its widening"
    assert shipped.describe()["files"][0]["sha256"] == hashlib.sha256(WIDE.encode()).hexdigest()


def test_nothing_to_narrow_gives_no_arm(store: ArmStore, user: dict[str, Path]) -> None:
    user["my_kernel"].write_text(PLAIN)
    assert store.narrowed(store.shipped(user, "")) is None
    _, broken, why = choose_arms(store, {"my_kernel": str(user["my_kernel"])}, Options())
    assert broken is None
    assert why == (
        "my_kernel.py widens nothing to 64 bits, so there is no 32-bit arm that could fail; "
        "name one with --before FILE or --before git:REV"
    )


def test_a_mutant_lacks_one_widening(store: ArmStore, user: dict[str, Path]) -> None:
    user["my_kernel"].write_text(WIDE + "\n\n" + WIDE)
    mutant = store.mutant(store.shipped(user, ""), "my_kernel", 1)
    assert source(mutant) == WIDE + "\n\n" + PLAIN
    assert mutant.name == "mutant-my_kernel-1"


@pytest.mark.parametrize("given", [{"before": "old.py"}, {"after": "old.py"}])
def test_before_and_after_stand_for_the_current_file_where_one_is_missing(
    store: ArmStore, user: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.py").write_text(PLAIN)
    fixed, broken, _ = choose_arms(store, {"my_kernel": str(user["my_kernel"])}, Options(**given))
    assert broken is not None
    assert (fixed.name, fixed.expect, broken.name, broken.expect) == ("after", "holds", "before", "fails")
    names = {"before": broken.modules["my_kernel"].name, "after": fixed.modules["my_kernel"].name}
    assert names == {"before": "my_kernel.py", "after": "my_kernel.py"} | dict.fromkeys(given, "old.py")
    expected = {"before": PLAIN, "after": WIDE} if "before" in given else {"before": WIDE, "after": PLAIN}
    assert {"before": source(broken), "after": source(fixed)} == expected


def test_a_git_revision_gives_the_file_of_then(store: ArmStore, user: dict[str, Path]) -> None:
    file = user["my_kernel"]
    file.write_text(PLAIN)
    git = ["git", "-C", str(file.parent), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    file.write_text(WIDE)
    assert source(store.given("before", "fails", "git:HEAD", user)) == PLAIN
    with pytest.raises(ProofError, match=r"^git:nope: expected a revision that holds my_kernel.py, got: fatal: "):
        store.given("before", "fails", "git:nope", user)


def test_a_folder_stands_for_several_files(store: ArmStore, tmp_path: Path) -> None:
    modules = kernel_modules()
    other = tmp_path / "other"
    other.mkdir()
    for path in modules.values():
        (other / path.name).write_text("# other\n" + path.read_text())
    arm = store.given("after", "holds", str(other), modules)
    assert all(path.read_text().startswith("# other\n") for path in arm.modules.values())
    (other / "verify.py").unlink()
    with pytest.raises(ProofError, match=r"^--after: expected a file, a folder or git:REV, got .*; .*verify.py does not exist$"):
        store.given("after", "holds", str(other), modules)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("gone.py", "--before: expected a file, a folder or git:REV, got gone.py; gone.py/__init__.py does not exist"),
        ("here.py", "--before: expected a folder or git:REV for {} kernel files, got the file here.py"),
    ],
)
def test_a_bad_before_is_refused(store: ArmStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.py").write_text(PLAIN)
    with pytest.raises(ProofError) as caught:
        store.given("before", "fails", spec, kernel_modules())
    assert str(caught.value) == text.format(len(kernel_modules()))


@pytest.fixture
def clean_import(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("clean_import")
def test_the_finder_loads_the_arm_s_file_and_leaves_siblings(tmp_path: Path) -> None:
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("VALUE = 7")
    (package / "kernel.py").write_text("from . import helper\nARM = 'original'\nVALUE = helper.VALUE")
    (tmp_path / "arm.py").write_text("from . import helper\nARM = 'arm'\nVALUE = helper.VALUE")
    name, folder = module_name(package / "kernel.py")
    assert (name, folder) == ("their_package.kernel", tmp_path)
    sys.path.insert(0, str(folder))
    ArmFinder({name: str(tmp_path / "arm.py")}).install()
    loaded = importlib.import_module(name)
    assert (loaded.ARM, loaded.VALUE) == ("arm", 7)


def test_a_module_that_is_loaded_already_cannot_get_an_arm() -> None:
    with pytest.raises(ProofError, match=r"^arm modules were loaded before their arm was chosen: json$"):
        ArmFinder({"json": "json.py"}).install()


# Case files.

CASE = "class C:\n    name = 'c'\n    def build(self, ctx): ...\n    def run(self, ctx, inputs): ...\n"


def case_file(folder: Path, text: str) -> str:
    file = folder / "their_cases.py"
    file.write_text(text)
    return str(file)


@pytest.mark.usefixtures("clean_import")
def test_a_case_needs_no_base_class_and_gets_defaults(tmp_path: Path) -> None:
    found = registry.discover(case_file(tmp_path, CASE + "CASES = [C()]"))
    (case,) = found["cases"]
    assert case == {
        "name": "c",
        "op": "",
        "describe": "",
        "fast": True,
        "dtypes": ["float16", "float32"],
        "placements": ["bottom", "top", "across"],
        "not_exercised": [],
        "module": "their_cases",
    }
    assert found["kernels"] == {"their_cases": str((tmp_path / "their_cases.py").resolve())}


@pytest.mark.usefixtures("clean_import")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "their_cases.py: expected a list CASES of bigpool.proof.Case, got None; see docs/prove-your-kernel.md"),
        ("CASES = []", "their_cases.py: expected a list CASES of bigpool.proof.Case, got []; see docs/prove-your-kernel.md"),
        ("CASES = [3]", "their_cases.py: expected cases with name, build, run, got 3 without name, build, run"),
        (CASE + "CASES = [C(), C()]", "CASES: expected unique names, got c more than once"),
        (CASE + "CASES = [C]", "their_cases.py: CASES: expected instances, got the class C; write C() in the list"),
        (
            CASE + "C.placements = 5\nC.describe = None\nCASES = [C()]",
            "their_cases.py: case c: describe: expected a string, got None; "
            "placements: expected a list or tuple of strings, got 5",
        ),
        (
            CASE + "C.dtypes = 'float16'\nCASES = [C()]",
            "their_cases.py: case c: dtypes: expected a list or tuple of strings, got 'float16'; write ('float16',)",
        ),
        (
            CASE + "KERNELS = 5\nCASES = [C()]",
            "their_cases.py: KERNELS: expected the name of a file beside it, or a list of such, got 5; "
            "leave it out if the kernel is in the case file",
        ),
        (
            CASE + "C.placements = ('top',)\nCASES = [C()]",
            "case c: expected placements with bottom and top out of ('bottom', 'top', 'across'), got ('top',)",
        ),
        (
            CASE + "KERNELS = 'gone.py'\nCASES = [C()]",
            "KERNELS: expected a file beside their_cases.py, got 'gone.py', which does not exist",
        ),
    ],
)
def test_a_bad_case_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ProofError) as caught:
        registry.discover(case_file(tmp_path, text))
    assert str(caught.value) == complaint


# What is chosen.


def described(name: str, fast: bool = True, dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")) -> dict[str, Any]:
    return {"name": name, "fast": fast, "dtypes": list(dtypes), "placements": ["bottom", "top"], "module": "m"}


FOUND = [described("small"), described("big", fast=False), described("fp8", dtypes=("float8_e4m3fn",))]


@pytest.mark.parametrize(
    ("options", "interpreted", "chosen"),
    [
        (Options(), True, [("small", "float16"), ("fp8", "float8_e4m3fn")]),
        (Options(), False, [("small", "bfloat16"), ("big", "bfloat16"), ("fp8", "float8_e4m3fn")]),
        (Options(cases=("big",)), True, [("big", "float16")]),
        (Options(cases=("big",), everything=True), True, [("big", "float16"), ("big", "float32")]),
        (Options(cases=("small",), everything=True), False, [("small", d) for d in ("bfloat16", "float16", "float32")]),
    ],
)
def test_cases_and_dtypes_are_chosen_by_the_backend(options: Options, interpreted: bool, chosen: list[tuple[str, str]]) -> None:
    assert [(unit.case["name"], unit.dtype) for unit in choose(FOUND, options, interpreted)] == chosen


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: choose(FOUND, Options(cases=("bog",)), True), "--case: expected one of big, fp8, small, got bog"),
        (lambda: choose(FOUND[1:2], Options(), True), "no case is in the fast subset; use --all, or --case NAME"),
    ],
)
def test_a_choice_of_nothing_is_refused(work: Callable[[], Any], text: str) -> None:
    with pytest.raises(ProofError) as caught:
        work()
    assert str(caught.value) == text


def test_a_dtype_that_cannot_run_is_kept_to_say_why() -> None:
    assert dtypes_of(FOUND[2], True, True) == ["float8_e4m3fn"]
