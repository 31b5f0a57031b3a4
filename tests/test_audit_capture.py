"""Launches are recorded on any machine: on the interpreter, and without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import audit_launched as kernels
from bigpool.audit import Options, capture
from bigpool.audit.launch.capture import parse_target
from bigpool.audit.launch.compile import Target
from bigpool.audit.words import wall_text
from bigpool.errors import ArgumentError
from verify_inputs import make
from verify_inputs import run as verify

TESTS = Path(__file__).parent
STRIDE = 901_120
NO_INTERPRETER = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
SCRIPT = """
import sys, torch, audit_launched as kernels
pool = torch.empty(66, 880, 4, 256, dtype=torch.bfloat16, device="meta")
table = torch.zeros(32, dtype=torch.int32, device="meta")
out = torch.empty(32, 128, dtype=torch.bfloat16, device="meta")
kernels.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
if len(sys.argv) > 1:
    raise RuntimeError(sys.argv[1])
"""


def tensors(device: str = "meta", pages: int = 66) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pool = torch.empty(pages, 880, 4, 256, dtype=torch.bfloat16, device=device)
    return torch.zeros(32, 128, dtype=torch.bfloat16, device=device), pool, torch.zeros(32, dtype=torch.int32, device=device)


def test_a_launch_on_meta_tensors_is_recorded_and_not_executed() -> None:
    out, pool, table = tensors()
    with capture() as found:
        kernels.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
    (launch,) = found.launches.values()
    assert launch.grid == (32,)
    assert launch.specialisation is not None
    assert launch.specialisation.signature == {
        "out_ptr": "*bf16",
        "pool_ptr": "*bf16",
        "table_ptr": "*i32",
        "stride_page": "i32",
        "BLOCK": "constexpr",
    }
    assert launch.arguments["stride_page"].value == STRIDE
    assert launch.arguments["pool_ptr"].strides == (STRIDE, 1024, 256, 1)
    assert launch.arguments["pool_ptr"].shape == (66, 880, 4, 256)


def test_the_report_names_rule_line_wall_and_today() -> None:
    out, pool, table = tensors()
    with capture() as found:
        kernels.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
    report = found.report()
    assert report.status == 1
    assert report.kernels == 1
    (finding,) = report.faults
    assert finding.rule == "BP101"
    assert Path(finding.primary.span.file).resolve() == TESTS / "audit_launched.py"
    assert finding.wall is not None
    assert (finding.wall.variable, finding.wall.value) == ("page", 2384)
    assert finding.wall.others == (("stride_page", STRIDE),)
    assert wall_text(finding.wall) == "page 2,384 at stride_page = 901,120 (a bf16 tensor of 4.00 GiB)"
    assert "today: pool_ptr is bfloat16 [66, 880, 4, 256] with strides [901,120, 1,024, 256, 1]" in finding.notes


def test_a_widened_kernel_is_clean() -> None:
    out, pool, table = tensors()
    with capture() as found:
        kernels.gather_pages_wide[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
    report = found.report()
    assert report.findings == []
    assert report.status == 0


def test_int64_tables_are_another_specialisation() -> None:
    out, pool, table = tensors()
    with capture() as found:
        kernels.gather_pages[(32,)](out, pool, table.long(), pool.stride(0), BLOCK=128)
    assert found.report().faults == []
    with capture() as both:
        kernels.gather_pages[(32,)](out, pool, table.long(), pool.stride(0), BLOCK=128)
        kernels.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
    assert len(both.launches) == 2
    assert len(both.report().faults) == 1


def test_specialisations_are_distinct_and_launches_counted() -> None:
    out, pool, table = tensors()
    with capture() as found:
        for grid in (4, 32, 8):
            kernels.gather_pages[(grid,)](out, pool, table, pool.stride(0), BLOCK=128)
        kernels.gather_pages[(4,)](out, pool, table, 2 * pool.stride(0), BLOCK=128)
        kernels.gather_pages[(4,)](out, pool, table, pool.stride(0), BLOCK=64)
    launches = list(found.launches.values())
    assert [(launch.count, launch.grid) for launch in launches] == [(3, (32,)), (1, (4,)), (1, (4,))]
    (finding,) = found.report().faults
    assert finding.wall is not None
    assert finding.wall.value == 1192, "the nearest wall over all specialisations"


def test_autotune_and_heuristics_record_every_config() -> None:
    x = torch.empty(1000, 21504, device="meta")
    with capture(execute=False) as found:
        kernels.copy_rows[lambda meta: (1000, 21504 // meta["BLOCK"])](torch.empty_like(x), x, 21504, x.stride(0))
    assert [(launch.grid, launch.failed) for launch in found.launches.values()] == [((1000, 336), ""), ((1000, 168), "")]
    (finding,) = found.report().faults
    assert finding.rule == "BP103"
    assert finding.wall is not None
    assert (finding.wall.variable, finding.wall.value) == ("row", 99_865)


def test_on_the_interpreter_one_config_is_executed_and_all_are_recorded() -> None:
    if not isinstance(kernels.gather_pages, InterpretedFunction):
        pytest.skip("the interpreter is off: conftest switches it on only without a GPU")
    x = torch.arange(4 * 128, dtype=torch.float32).reshape(4, 128)
    out = torch.zeros_like(x)
    with capture() as found:
        kernels.copy_rows[lambda meta: (4, 128 // meta["BLOCK"])](out, x, 128, x.stride(0))
    assert torch.equal(out, x)
    assert len(found.launches) == 2


def test_the_interpreter_still_executes_real_tensors() -> None:
    if not isinstance(kernels.gather_pages, InterpretedFunction):
        pytest.skip("the interpreter is off: conftest switches it on only without a GPU")
    out, pool, table = tensors("cpu", 2)
    pool.fill_(3)
    with capture() as found:
        kernels.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
    assert bool((out == 3).all())
    assert len(found.launches) == 1
    out.zero_()
    with capture(execute=False):
        kernels.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
    assert bool((out == 0).all())


def test_hooks_are_taken_out_again_even_after_an_error() -> None:
    before = [owner.__dict__.get("run") for owner in (JITFunction, InterpretedFunction, Autotuner)]
    with pytest.raises(ZeroDivisionError), capture():
        raise ZeroDivisionError
    assert [owner.__dict__.get("run") for owner in (JITFunction, InterpretedFunction, Autotuner)] == before


def test_comments_and_assumptions_steer() -> None:
    out, pool, table = tensors()
    with capture() as found:
        kernels.ignored[(1,)](out, pool, table, pool.stride(0), BLOCK=128)
        kernels.bounded[(1,)](out, pool, table, pool.stride(0), BLOCK=128)
    report = found.report()
    assert report.faults == []
    assert report.suppressed == 1
    assert list(report.assumed) == ["page < 2**11 (the pool is fixed)"]
    with capture() as found:
        kernels.gather_pages[(1,)](out, pool, table, pool.stride(0), BLOCK=128)
    assert found.report(Options(assumptions=("page < num_pages",), at=("num_pages=2_384",))).faults == []
    assert len(found.report(Options(assumptions=("page < num_pages",), at=("num_pages=2_385",))).faults) == 1


def test_a_comment_with_nothing_to_do_is_a_note() -> None:
    out, pool, table = tensors()
    with capture() as found:
        kernels.ignored_in_vain[(1,)](out, pool, table, pool.stride(0), BLOCK=128)
    report = found.report()
    (finding,) = report.findings
    assert (finding.rule, str(finding.severity)) == ("BP190", "note")
    assert finding.message == "nothing to ignore in what was launched: no BP101 here"
    assert report.status == 0


def test_a_bound_on_a_product() -> None:
    out, _, table = tensors()
    with capture() as found:
        kernels.bounded_product[(1,)](out, table, BLOCK=128)
    report = found.report()
    assert report.faults == []
    assert list(report.assumed) == ["first * rows < 2**30 (the host checks it)"]


@pytest.mark.skipif(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6), reason="bigpool's kernels need Triton 3.6")
def test_own_kernels_are_clean_as_they_are_launched() -> None:
    call = make([300, 70], [2, 6], device="cuda" if torch.cuda.is_available() else "cpu")
    with capture() as found:
        verify(call, num_splits=1)
        verify(call, num_splits=7)
    names = [launch.name for launch in found.launches.values()]
    assert sorted(names) == ["verify_merge_kernel", "verify_partial_kernel", "verify_partial_kernel"]
    report = found.report()
    assert report.kernels == 3
    assert (report.findings, report.skipped_kernels, report.suppressed) == ([], [], 0)


def test_a_size_of_today_may_grow() -> None:
    with capture() as found:
        kernels.masked_by_area[(1,)](torch.empty(1000, 4096, device="meta"), 1000, 4096, BLOCK=128)
    (finding,) = found.report().faults
    assert finding.rule == "BP109"
    assert finding.wall is not None
    assert (finding.wall.variable, finding.wall.value) == ("rows", 524_288)
    assert "today: rows is 1,000" in finding.notes


def test_what_cannot_be_compiled_or_bound_is_skipped_with_its_reason() -> None:
    out, pool, _table = tensors()
    with capture(execute=False) as found:
        kernels.broken[(1,)](out)
        kernels.gather_pages[(1,)](out, pool, BLOCK=128)
    report = found.report()
    assert report.findings == []
    assert report.status == 2, "nothing was audited"
    assert len(report.skipped_kernels) == 2
    (broken, broken_reason), (unbound, unbound_reason) = report.skipped_kernels
    assert "broken" in broken
    assert "not_defined" in broken_reason
    assert "gather_pages" in unbound
    assert "table_ptr" in unbound_reason


def test_targets_are_named_as_backend_and_architecture() -> None:
    assert parse_target(None) == Target("cuda", 90, 32)
    assert parse_target("hip:gfx942") == Target("hip", "gfx942", 64)
    with pytest.raises(ArgumentError) as error:
        parse_target("rocm")
    assert str(error.value) == "bigpool audit: --target: expected cuda:ARCH or hip:gfxARCH, got 'rocm'; such as cuda:90"


COMPILES = """
import triton, audit_launched as kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
types = {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "stride_page": "i32", "BLOCK": "constexpr"}
triton.compile(ASTSource(kernels.gather_pages, types, {(4,): 128}), target=GPUTarget("cuda", 90, 32))
"""


def run(*arguments: str, script: Path) -> subprocess.CompletedProcess[str]:
    environment = {**NO_INTERPRETER, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-m", "bigpool.audit", "--format", "concise", str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False, cwd=TESTS)


def test_a_script_runs_without_a_device_and_is_audited(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text(SCRIPT)
    done = run(script=script)
    assert done.returncode == 1, done.stderr
    assert "audit_launched.py:12:" in done.stdout
    assert "error[BP101]" in done.stdout
    assert "page 2,384" in done.stdout


def test_a_script_that_stops_is_audited_up_to_there(tmp_path: Path) -> None:
    script = tmp_path / "bench.py"
    script.write_text(SCRIPT)
    done = run("out of luck", script=script)
    assert done.returncode == 1
    assert "error[BP101]" in done.stdout
    assert (
        f"the script stopped early: RuntimeError: out of luck ({script}:8); what it launched until then was audited"
        in done.stderr
    )


def test_a_script_that_launches_nothing_says_so(tmp_path: Path) -> None:
    script = tmp_path / "quiet.py"
    script.write_text("print(1)\n")
    done = run(script=script)
    assert done.returncode == 2
    assert "no Triton kernel was launched" in done.stderr


def test_what_is_compiled_without_a_launch_is_captured_too(tmp_path: Path) -> None:
    """Inductor compiles this way. Nobody says what the stride is, so the wall is an example."""
    script = tmp_path / "generated.py"
    script.write_text(COMPILES)
    done = run(script=script)
    assert done.returncode == 1, done.stderr
    assert "[BP101]" in done.stdout
    assert "page * stride_page > 2^31-1" in done.stdout


def test_importing_the_front_end_loads_neither_torch_nor_triton() -> None:
    code = "import sys, bigpool.audit.launch; sys.exit(bool({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0


TEST_FILE = """
import torch, audit_launched as kernels
def test_launch():
    pool = torch.zeros(2, 880, 4, 256, dtype=torch.bfloat16)
    out, table = torch.zeros(32, 128, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.int32)
    kernels.{kernel}[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
"""


@pytest.mark.parametrize(("kernel", "status"), [("gather_pages", 1), ("gather_pages_wide", 0)])
def test_the_pytest_plugin_fails_a_session_that_launches_a_fault(tmp_path: Path, kernel: str, status: int) -> None:
    (tmp_path / "test_it.py").write_text(TEST_FILE.format(kernel=kernel))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    plugin = ["-p", "bigpool.audit.launch.pytest_plugin", "--bigpool-audit", "-W", "ignore", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == status, done.stdout
    assert "1 passed" in done.stdout
    assert ("error[BP101]" in done.stdout) == bool(status)
    assert "1 specialisation in 1 file audited" in done.stdout


@pytest.mark.gpu
def test_on_a_gpu_launches_are_recorded_and_executed() -> None:
    out, pool, table = tensors("cuda", 2)
    pool.fill_(3)
    x = torch.arange(4 * 128, dtype=torch.float32, device="cuda").reshape(4, 128)
    copied = torch.zeros_like(x)
    with capture() as found:
        kernels.gather_pages[(32,)](out, pool, table, pool.stride(0), BLOCK=128)
        kernels.copy_rows[lambda meta: (4, 128 // meta["BLOCK"])](copied, x, 128, x.stride(0))
    assert bool((out == 3).all())
    assert torch.equal(copied, x)
    walls = {finding.wall.variable: finding.wall.value for finding in found.report().faults if finding.wall is not None}
    assert walls["page"] == 2384
    assert all(not launch.failed for launch in found.launches.values())
