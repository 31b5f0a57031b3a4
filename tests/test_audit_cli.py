"""`bigpool audit --run`, `python -m bigpool.audit`, the pytest plugin, and what an import of them costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import bigpool.audit
from bigpool.audit.launch import pytest_plugin
from bigpool.cli import main

TESTS = Path(__file__).parent
PLUGIN = "bigpool.audit.launch.pytest_plugin"
SCRIPT = """
import sys, torch, audit_launched as kernels
print("the script got", sys.argv[1:])
pool = torch.empty(66, 880, 4, 256, dtype=torch.bfloat16, device="meta")
table = torch.zeros(32, dtype=torch.int32, device="meta")
out = torch.empty(32, 128, dtype=torch.bfloat16, device="meta")
kernels.{kernel}[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
"""


def bigpool_audit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "BIGPOOL_CACHE": "0"}
    command = [sys.executable, "-W", "ignore", "-m", "bigpool", "audit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False, cwd=cwd)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "bench.py"
    path.write_text(SCRIPT.format(kernel="gather_pages"))
    return path


def test_what_follows_run_belongs_to_the_script(script: Path) -> None:
    done = bigpool_audit("--format", "json", "--run", "bench.py", "--pages", "100", "--notes", cwd=script.parent)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    (finding,) = report["findings"]
    assert (finding["rule"], finding["wall"]["value"], finding["wall"]["dtype"]) == ("BP101", 2384, "bf16")
    assert "the script got ['--pages', '100', '--notes']" in done.stderr, "stdout is for the report"


def test_bounds_baselines_and_modules(script: Path) -> None:
    # One baseline in three runs: written, known, and no longer enough when the stride is another.
    done = bigpool_audit("--write-baseline", "known.json", "--run", "bench.py", cwd=script.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the script got []" in done.stdout
    done = bigpool_audit("--baseline", "known.json", "--target", "hip:gfx942", "--run=-m", "bench", cwd=script.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in the baseline: 1" in done.stdout


def test_a_broken_pipe_is_quiet(script: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-m", "bigpool.audit", str(script)]
    try:
        done = subprocess.run(command, env=environment, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--run"], "SCRIPT: expected a script to run, got nothing; such as bigpool audit --run bench.py --pages 100"),
        (["--run", "-m"], "SCRIPT: expected a script to run, got nothing; such as bigpool audit --run bench.py --pages 100"),
        (["--run", "no.py"], "SCRIPT: expected a file, got 'no.py'; pass -m to run a module"),
        (["src", "--run", "a.py"], "PATH: expected nothing with --run, got 'src'; audit source and scripts one at a time"),
        (["--fix", "--run", "a.py"], "--fix: expected no --run with it, got both; fix the source: bigpool audit PATH --fix"),
        (["--diff", "--run", "a.py"], "--diff: expected no --run with it, got both; fix the source: bigpool audit PATH --diff"),
        (["--no-execute", "src"], "--no-execute: expected --run with it, got none; add --run SCRIPT, or leave it out"),
        (["--target", "hip:gfx942", "src"], "--target: expected --run with it, got none; add --run SCRIPT, or leave it out"),
        (["--target", "x", "--run", __file__], "--target: expected cuda:ARCH or hip:gfxARCH, got 'x'; such as cuda:90"),
        (["--max-memory", "x", "--run", __file__], "--max-memory: expected bytes or a size like 288GiB, got 'x'; pass 288GiB"),
        (["--at", "x", "--run", __file__], "--at: expected NAME=INTEGER, got 'x'; such as num_pages=100_000"),
        (["--", "--run"], None),
    ],
)  # fmt: skip
def test_combinations_that_make_no_sense(capsys: pytest.CaptureFixture[str], args: list[str], text: str | None) -> None:
    assert main(["audit", *args]) == 2
    shown = capsys.readouterr()
    assert shown.err == (f"error: bigpool audit: {text}\n" if text else "")
    assert ("file skipped: --run: " in shown.out) == (text is None), "after -- it is a path"


def test_help_names_examples_of_both_front_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "    bigpool audit src/\n" in shown
    assert "    bigpool audit --run bench.py --pages 100\n" in shown


def test_the_package_hands_out_its_names_lazily() -> None:
    code = "import sys, bigpool.audit; print(sorted(name for name in sys.modules if name.startswith('bigpool.audit')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['bigpool.audit']\n"
    for name in bigpool.audit.__all__:
        assert getattr(bigpool.audit, name) is not None
        assert name in dir(bigpool.audit)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        bigpool.audit.nothing  # noqa: B018


def test_the_plugin_is_registered_and_loads_nothing() -> None:
    assert EntryPoint(PLUGIN, PLUGIN, "pytest11").load() is pytest_plugin
    text = (TESTS.parent / "pyproject.toml").read_text("utf-8")
    assert f'[project.entry-points.pytest11]\n"{PLUGIN}" = "{PLUGIN}"\n' in text
    heavy = "{'torch', 'triton', 'numpy'}"
    code = f"import sys, {PLUGIN}; print(sorted({heavy} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_plugin_complains_before_a_test_has_run(tmp_path: Path) -> None:
    # Installed as a distribution, and named with -p as well: it must not be registered twice.
    info = tmp_path / "bigpool_planted-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bigpool-planted\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{PLUGIN} = {PLUGIN}\n")
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for options, status, text in (
        (["-p", PLUGIN], 0, "1 passed"),
        (["--bigpool-audit"], 0, "no Triton kernel was launched"),
        (["--bigpool-audit", "--bigpool-audit-assume", "page is small"], 4, "bigpool audit: --assume: expected NAME < BOUND"),
    ):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(tmp_path / "test_it.py")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert done.returncode == status, done.stdout + done.stderr
        assert text in done.stdout + done.stderr
