"""`bigpool prove` from the outside, on Triton's interpreter: a zoo of cases, interruption, and the worked example."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="needs triton: pip install 'bigpool[cpu]'")
numpy = pytest.importorskip("numpy", reason="needs numpy: pip install 'bigpool[cpu]'")
jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'bigpool[test]'")

import bigpool  # noqa: E402
from bigpool.errors import BackendError  # noqa: E402
from bigpool.proof.record import SCHEMA_FILE  # noqa: E402
from bigpool.proof.worker import require_working_interpreter  # noqa: E402
from proof_zoo import ENDINGS  # noqa: E402

try:
    require_working_interpreter(triton.__version__, numpy.__version__)
except BackendError as error:
    pytest.skip(str(error), allow_module_level=True)

HERE = Path(__file__).parent
ZOO = HERE / "proof_zoo.py"
EXAMPLE = HERE.parent / "examples" / "naive_gather"
SOURCE = Path(bigpool.__file__).parents[1]


def prove(*arguments: str, cwd: Path = HERE, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    command = [sys.executable, "-m", "bigpool", "prove", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def record_of(file: Path) -> dict[str, Any]:
    record = json.loads(file.read_text())
    jsonschema.validate(record, json.loads(SCHEMA_FILE.read_text()))
    return record


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path_factory.mktemp("zoo") / "zoo.json"
    wanted = [argument for name in ENDINGS for argument in ("--case", name)]
    done = prove(str(ZOO), *wanted, "--json", str(file))
    return done, record_of(file)


def test_every_case_of_the_zoo_ends_as_it_should(zoo: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    done, record = zoo
    assert {verdict["case"]: verdict["status"] for verdict in record["verdicts"]} == ENDINGS
    assert done.returncode == record["status"] == 1
    assert (
        done.stdout.splitlines()[-1]
        == record["summary"]
        == (
            "refuted: 7 of 19 cases: narrower-like, raises, unsigned-ids, unsigned-rows, writes-its-input, writes-its-table, "
            "wrong-values; 3 skipped by design"
        )
    )


LINES = {
    "raises": "raise ValueError",
    "unsigned": "page_idx = tl.load(table_ptr + row).to(tl.uint32)",
    "narrower": "v = tl.load(v_ptr",
}


def line_of(code: str) -> int:
    """Of the zoo; for a kernel that reads by unsigned ids, of its load."""
    number = next(number for number, line in enumerate(ZOO.read_text().splitlines(), 1) if code in line)
    return number + (2 if "uint32" in code else 0)


INTERPRETER = "arithmetic is silently wrong in Triton's interpreter (triton {triton});"


@pytest.mark.parametrize(
    ("case", "finding"),
    [
        ("skips", "fp8 conversion needs sm89+, this is sm86"),
        ("needs-bf16", "bf16 " + INTERPRETER.replace(";", "; needs a GPU")),
        ("asks-for-fp8", f"k8: fp8 {INTERPRETER} run this case on a GPU, or with float16 or float32"),
        (
            "skips-at-the-top",
            "shipped at the top (unmapped): skipped (not here), but not at the bottom; a skip must not depend on the placement",
        ),
        (
            "raises",
            "shipped at the bottom (unmapped): error: ValueError: page_size: expected 16, got 880 at proof_zoo.py:{raises}",
        ),
        (
            "no-launch",
            "shipped at the bottom (unmapped): case no-launch, arm shipped: expected a kernel launch from proof_zoo.py; "
            "it launched no Triton kernel; name the kernel file in KERNELS and use ctx.kernels",
        ),
        (
            "no-power",
            "narrowed at the top did not fail as a wrapped index does (unmapped: same bits; poison: same bits), "
            "so this case would not see the bug",
        ),
        (
            "rough-oracle",
            "oracle: case rough-oracle: expected float64 in Oracle.expected['out'], got torch.float32; call .double()",
        ),
        ("unsigned-ids", "shipped at the top (unmapped): killed: SIGSEGV at proof_zoo.py:{unsigned}"),
        ("narrower-like", "shipped at the top (unmapped): killed: SIGSEGV at proof_zoo.py:{narrower}"),
        (
            "too-narrow-like",
            "shipped at the top (unmapped): v: expected an offset above 2147483647 elements at top, got 1073748223 at most "
            "(num_pages=16777316 of k, page stride 64); pass num_pages=33554435 to k",
        ),
        (
            "writes-its-input",
            "shipped at the bottom (unmapped): canary: pool: expected its bits to stay, since it is only read, got others in "
            "3 of its 3 rows in use, first in logical row 0; look for a store through a wrong pointer, "
            "or make it with role='write'",
        ),
        (
            "writes-its-table",
            "shipped at the bottom (unmapped): canary: table of pool: expected its bits to stay, since it is only read, "
            "got others; look for a store through a wrong pointer, or make it with role='write'",
        ),
        (
            "empty-oracle",
            "oracle: case empty-oracle: expected at least one output in Oracle.expected, got none; "
            "return None where there is no oracle",
        ),
        (
            "unwritten-oracle",
            "oracle: case unwritten-oracle: expected a finite value in Oracle.expected['out'], got none of 192; "
            "fresh memory is NaN: was a tensor not filled with .write()?",
        ),
        (
            "too-small",
            "shipped at the top (unmapped): pool: expected an offset above 2147483647 elements at top, got 63999 at most "
            "(num_pages=1000, page stride 64); pass num_pages >= 33554435 or leave it out",
        ),
        (
            "returns-nothing",
            "shipped at the bottom (unmapped): case returns-nothing: "
            "expected run() to return a dict of tensors with at least one entry, got NoneType",
        ),
    ],
)
def test_the_zoo_s_first_findings(zoo: tuple[subprocess.CompletedProcess[str], dict[str, Any]], case: str, finding: str) -> None:
    done, record = zoo
    (verdict,) = [verdict for verdict in record["verdicts"] if verdict["case"] == case]
    text = finding.replace("{triton}", record["versions"]["triton"])
    for name, code in LINES.items():
        text = text.replace(f"{{{name}}}", str(line_of(code)))
    assert verdict["findings"][0] == text
    assert verdict["findings"][0] in done.stdout


def test_the_zoo_says_what_was_not_exercised(zoo: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    done, record = zoo
    listed = done.stdout.partition("not exercised here:\n")[2]
    for line in record["not_exercised"]:
        assert line in listed
    triton = record["versions"]["triton"]
    assert record["not_exercised"][:3] == [
        "compiled kernels on any card: this was Triton's interpreter",
        f"bf16/fp8 arithmetic: the interpreter of triton {triton} computes it wrongly without an error",
        "CUDA graph capture and replay, several streams, several devices",
    ]
    assert "case skips: skipped: fp8 conversion needs sm89+, this is sm86" in record["not_exercised"]
    assert "cases that were not asked for: sleeps" in record["not_exercised"]
    assert "other orders of the rows" in record["not_exercised"], "what the case says of itself"
    assert (
        "32-bit wraps of loop variables: the interpreter counts `for i in range(...)` with Python ints, "
        "whose products with constants do not wrap "
        f"(proof_zoo.py:{line_of('for row in range(3)')})"
    ) in record["not_exercised"]
    assert (
        "the values of outputs that the oracle leaves out, of which only the placements are compared: other of half-an-oracle"
    ) in record["not_exercised"]


def test_pools_and_rows_pass_what_32_bits_hold(zoo: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    _, record = zoo
    tops = {run["case"]: run for run in record["runs"] if (run["arm"], run["placement"]) == ("shipped", "top")}
    for case in ("holds", "unsigned-rows"):
        offsets = {tensor["name"]: tensor["max_offset"] for tensor in tops[case]["tensors"]}
        assert offsets["pool"] > 2**33
    assert not any("uint32" in line for line in record["not_exercised"])


def test_what_no_oracle_judged_is_not_called_right() -> None:
    done = prove(str(ZOO), "--case", "half-an-oracle", "--case", "holds")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "proven: 2 of 2 cases give the same bits wherever they lie in the pool, and each sees the 32-bit arm fail; "
        "not all values were judged: half-an-oracle"
    )


def test_the_record_holds_every_run_and_what_ran(zoo: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    _, record = zoo
    runs = {(run["arm"], run["placement"], run["guard"]): run for run in record["runs"] if run["case"] == "holds"}
    assert len(runs) == 7
    assert runs["narrowed", "top", "unmapped"]["outcome"] == "killed"
    assert runs["narrowed", "top", "unmapped"]["detail"] == "SIGSEGV"
    assert runs["narrowed", "top", "unmapped"]["where"].startswith("proof_zoo.py:")
    assert runs["narrowed", "top", "unmapped"]["log"].startswith(
        "run: a killed process here is the expected pre-fix outcome, not a broken test\nFatal Python error"
    )
    assert runs["shipped", "top", "poison"]["launches"] == [{"kernel": "copy_kernel", "file": "proof_zoo.py", "count": 1}]
    shipped, narrowed = record["arms"]
    assert (shipped["files"][0]["widenings"], narrowed["files"][0]["widenings"]) == (8, 0)
    assert shipped["files"][0]["sha256"] != narrowed["files"][0]["sha256"]
    assert str(HERE.parent) not in json.dumps(record["runs"]), "a record is to be shown around: no paths of this machine"


def test_lines_in_a_pipe_say_what_a_death_means_before_it_happens(
    zoo: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    done, _ = zoo
    lines = done.stderr.splitlines()
    warned = lines.index(
        "start holds: narrowed at the top (unmapped): a killed process here is the expected pre-fix outcome, not a broken test"
    )
    died = next(number for number, line in enumerate(lines) if "holds float16: narrowed at the top (unmapped): killed" in line)
    assert warned < died
    assert "\x1b" not in done.stderr + done.stdout


def test_only_skips_prove_nothing() -> None:
    done = prove(str(ZOO), "--case", "skips")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == "could not run: every case was skipped by design"


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "c.py",
            "x = 1\ndef x(:\n",
            "expected a case file that can be imported, got c.py: SyntaxError: invalid syntax at c.py:2",
        ),
        (
            "c.py",
            "import sys\nsys.exit(3)\n",
            "expected a case file that can be imported, got c.py: sys.exit(3) was called at c.py:2",
        ),
        ("c", "", "expected a name that ends in .py and has no other dot, got c; rename or link the file"),
        ("c.d.py", "", "expected a name that ends in .py and has no other dot, got c.d.py; rename or link the file"),
        ("c.py", None, "expected a Python file, got the folder c.py; name the file in it"),
    ],
    ids=["syntax", "exit", "bare", "dots", "folder"],
)
def test_a_file_that_cannot_be_a_case_file(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    if text is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(text)
    done = prove(name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"error: FILE: {complaint}"


def processes_with(text: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and text.encode() in environment:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_an_interruption_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    started, temporary = tmp_path / "started", tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(temporary), "PROOF_ZOO_STARTED": str(started)}
    command = [sys.executable, "-m", "bigpool", "prove", "--device", "cpu", str(ZOO), "--case", "sleeps"]
    parent = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started.exists()
    assert len(processes_with(str(started))) == 3
    parent.send_signal(number)
    said = parent.communicate(timeout=30)[1]
    assert parent.returncode == code
    if number == signal.SIGINT:
        assert said.splitlines()[-1] == "error: interrupted"
    deadline = time.monotonic() + 10
    while (processes_with(str(started)) or list(temporary.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_with(str(started)) == []
    assert list(temporary.iterdir()) == []


# The worked example.


def test_the_example_is_refuted_before_its_fix() -> None:
    done = prove("prove_gather.py", cwd=EXAMPLE)
    assert done.returncode == 1
    line = next(
        number for number, text in enumerate((EXAMPLE / "naive_gather.py").read_text().splitlines(), 1) if "values = " in text
    )
    assert f"  shipped at the top (unmapped): killed: SIGSEGV at naive_gather.py:{line}\n" in done.stdout
    assert (
        "  shipped is right at the bottom with the same bytes: look for an index that is multiplied in 32 bits\n" in done.stdout
    )
    assert done.stdout.splitlines()[-1] == "refuted: 1 of 1 cases: gather"


def test_the_example_is_proven_after_its_fix(tmp_path: Path) -> None:
    record = tmp_path / "gather.json"
    done = prove("prove_gather.py", "--after", "fixed_gather.py", "--json", str(record), cwd=EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "proven: 1 of 1 cases give the same right bits wherever they lie in the pool, and each sees the 32-bit arm fail"
    )
    arms = record_of(record)["arms"]
    assert [(arm["name"], arm["expect"], arm["files"][0]["widenings"]) for arm in arms] == [
        ("after", "holds", 2),
        ("before", "fails", 0),
    ]


def test_the_case_of_the_documentation_is_proven(tmp_path: Path) -> None:
    text = (HERE.parent / "docs" / "prove-your-kernel.md").read_text()
    (tmp_path / "prove_gather.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    shutil.copy(EXAMPLE / "fixed_gather.py", tmp_path / "naive_gather.py")
    done = prove("prove_gather.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\narm narrowed: shipped without its 2 widenings; 1 file without a widening\n" in done.stdout


def test_without_the_bug_to_compare_with_a_kernel_is_not_proven(tmp_path: Path) -> None:
    """A kernel that is right because its ids are 64 bits wide already: nothing to narrow, nothing to see fail."""
    shutil.copy(EXAMPLE / "naive_gather.py", tmp_path)
    cases = (EXAMPLE / "prove_gather.py").read_text()
    cases = cases.replace("cache.table(PICKED)", "cache.table(PICKED, dtype=torch.int64)")
    cases = cases.replace('ctx.rows("out", (4, 16 * 64))', "Plain(ctx.tensor(torch.zeros(4, 1024, dtype=ctx.dtype)))")
    plain = "import torch\n\nclass Plain:\n    def __init__(self, t):\n        self.tensor, self.read = t, lambda: t\n"
    (tmp_path / "prove_gather.py").write_text(plain + cases)
    done = prove("prove_gather.py", cwd=tmp_path)
    assert done.returncode == 1
    assert (
        "  holds, but the case has no power: naive_gather.py widens nothing to 64 bits, "
        "so there is no 32-bit arm that could fail; name one with --before FILE or --before git:REV\n"
    ) in done.stdout
    assert done.stdout.splitlines()[-1] == "not proven: 1 of 1 cases have no power: gather"


def test_mutants_of_the_fixed_example_are_seen(tmp_path: Path) -> None:
    for name in ("prove_gather.py", "fixed_gather.py"):
        (tmp_path / name).write_text((EXAMPLE / name).read_text().replace('"naive_gather.py"', '"fixed_gather.py"'))
    done = prove("prove_gather.py", "--mutants", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("without .to(tl.int64)  seen by gather, unmapped: wrote outside its tensors")
    assert "without .to(tl.int64)  seen by gather, unmapped: killed: SIGSEGV at fixed_gather.py:" in lines[1]
    assert lines[-1] == "proven: 2 of 2 widenings are needed, and a case sees it when one is missing"
