"""How the command line behaves in a shell: help, missing extras, interrupts, pipes, terminals."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bigpool
from bigpool import cli

SRC = Path(bigpool.__file__).parents[1]
ORIGINAL = ["wall", "--page-size", "880", "--kv-heads", "4", "--head-dim", "256"]
# An installation without extras, on a machine that happens to have them.
WITHOUT_EXTRAS = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "numpy", "cuda", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = cli.main(args)
    return status, *capsys.readouterr()


def environment(**changes: str) -> dict[str, str]:
    ours = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONUNBUFFERED"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"PYTHONPATH": str(SRC), "TERM": "xterm-256color"} | changes


def python(code: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False, **options)


def on_a_terminal(*args: str, columns: int = 100, **changes: str) -> str:
    """What `bigpool ...` writes to a terminal."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "bigpool", *args]
    with subprocess.Popen(
        command, env=environment(COLUMNS=str(columns), **changes), stdin=writer, stdout=writer, stderr=writer
    ) as process:
        os.close(writer)
        written = b""
        try:
            while chunk := os.read(reader, 4096):
                written += chunk
        except OSError:
            pass  # the terminal is gone with its last writer
        os.close(reader)
        assert process.wait(timeout=60) in (0, 2)
    return written.decode().replace("\r\n", "\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"bigpool {bigpool.__version__}\n", "")


def test_help_names_every_subcommand_without_importing_it(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys)
    assert (status, err) == (0, "")
    assert run(capsys, "--help") == (0, out, "")
    assert "Example:\n    bigpool wall --page-size 880 --kv-heads 4 --head-dim 256 --dtype bf16\n" in out
    commands = out.split("Commands:\n")[1].split("\n\n")[0]
    assert commands == (
        "  audit   Find 32-bit indices in Triton kernels, with the size at which each\n"
        "          breaks.\n"
        "  bench   Price a change: arms timed in turn, verdicts in words.\n"
        "  prove   Prove that kernels are right at any pool size.\n"
        "  report  Make one HTML page from records.\n"
        "  rule    Print what a rule of bigpool audit means.\n"
        "  sweep   Find, confirm, fix, prove and price 32-bit faults in what a script\n"
        "          launches.\n"
        "  tune    Time launch configurations on this card, and write a table of the\n"
        "          better ones.\n"
        "  wall    Print where 32-bit offsets into a paged KV cache wrap."
    )


def test_help_of_wall_has_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "wall", "--help")
    assert status == 0
    assert out.startswith(f"Usage: bigpool wall [OPTIONS]\n\n  {cli.SUBCOMMANDS['wall']}\n")
    example = re.search(r"Example:\n +bigpool (wall .*)\n", out)
    assert example
    status, out, err = run(capsys, *example[1].split())
    assert (status, err) == (0, "")
    assert out.endswith("\n8 layers, 1,489 pages, 40.00 GiB: crosses the wall\n")


def test_wall_and_help_work_without_extras() -> None:
    code = WITHOUT_EXTRAS + "from bigpool.cli import main\nsys.exit(main(sys.argv[1:]))"
    for args in (["--help"], ["--version"], ORIGINAL, [*ORIGINAL, "--json"]):
        done = python(code, *args)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout


def test_help_imports_no_subcommand() -> None:
    done = python(
        "import sys\nfrom bigpool.cli import main\nmain(['--help'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('bigpool.cli.') or name in {'rich', 'torch'}))"
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_importing_bigpool_loads_neither_torch_nor_triton() -> None:
    done = python(
        "import sys, bigpool\nassert bigpool.KVLayout(16, 8, 128)\n"
        "assert {'SparsePool', 'Workspace', 'verify_attention', '__version__'} <= set(dir(bigpool))\n"
        "print({'torch', 'triton', 'numpy', 'rich', 'click'} & set(sys.modules))"
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_lazy_name_without_extras_says_what_to_install() -> None:
    done = python(WITHOUT_EXTRAS + "import bigpool\nprint(hasattr(bigpool, 'nothing'))\nbigpool.verify_attention")
    assert done.stdout == "False\n"
    assert done.stderr.splitlines()[-1] == (
        "bigpool.errors.BackendError: bigpool.verify_attention: expected torch to be installed, got no such module; "
        "pip install 'bigpool[kernels]' on a machine with an NVIDIA GPU, 'bigpool[cpu]' on any other"
    )


# A process in which a subcommand `planted` runs a body.
PLANTED = """
import sys, time, types, click
from bigpool import cli
def body():
    {body}
cli.SUBCOMMANDS["planted"] = ""
sys.modules["bigpool.cli.planted"] = types.SimpleNamespace(planted=click.Command("planted", callback=body))
sys.exit(cli.main(["planted"]))
"""


def test_an_interrupt_ends_with_one_line() -> None:
    code = PLANTED.format(body="print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")


@pytest.mark.parametrize(
    "args",
    [
        ["-m", "bigpool", *ORIGINAL],
        ["-m", "bigpool", *ORIGINAL, "--json"],
        ["-m", "bigpool", "--help"],
        ["-c", PLANTED.format(body="print('still buffered when the subcommand ends')")],
        ["-c", PLANTED.format(body="print('larger than a buffer' * 10_000)")],
    ],
    ids=["wall", "wall --json", "--help", "buffered", "large"],
)
def test_a_broken_pipe_is_quiet(args: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *args]
    try:
        done = subprocess.run(command, env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_closed_stdout_is_no_error() -> None:
    command = f"'{sys.executable}' -m bigpool {' '.join(ORIGINAL)} >&-"
    done = subprocess.run(["sh", "-c", command], env=environment(), capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


COLOUR = re.compile(r"\x1b\[[0-9;]*(?:3[0-7]|38;[25])[0-9;]*m")
ANY_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def test_a_terminal_gets_rules_and_colours() -> None:
    args = [*ORIGINAL, "--group-size", "8", "--pages", "2384"]
    shown = on_a_terminal(*args)
    assert COLOUR.search(shown)
    assert "─" * 20 in shown
    # The same text as in a pipe.
    piped = python("import sys\nfrom bigpool.cli import main\nmain(sys.argv[1:])", *args).stdout
    lines = [line.rstrip() for line in ANY_STYLE.sub("", shown).splitlines() if "─" not in line]
    assert lines == piped.splitlines()


def test_a_terminal_with_no_color_gets_no_colours() -> None:
    shown = on_a_terminal(*ORIGINAL, NO_COLOR="1")
    assert "─" * 20 in shown
    assert not COLOUR.search(shown)
    assert "\x1b" not in on_a_terminal("wall", NO_COLOR="1")
    assert COLOUR.search(on_a_terminal("wall"))


def test_a_narrow_terminal_loses_nothing() -> None:
    shown = on_a_terminal(*ORIGINAL, columns=60)
    assert "4,294,967,296" in shown
    assert "…" not in shown
    assert "─" not in shown
