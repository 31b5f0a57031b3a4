"""`bigpool bench verify --format`: every format right before it is timed, its own floor, ratios from the same rounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'bigpool[test]'")

from bench_sim import SimulatedTimer  # noqa: E402
from bigpool import reference  # noqa: E402
from bigpool.bench import formats, record, report, runner, shapes  # noqa: E402
from bigpool.bench.compare import compare  # noqa: E402
from bigpool.bench.formats import FormatShape, FormatWork, groups, parse, with_formats  # noqa: E402
from bigpool.bench.roofline import Roofline  # noqa: E402
from bigpool.bench.runner import Options, bench  # noqa: E402
from bigpool.bench.shapes import FORMATS, Shape  # noqa: E402
from bigpool.bench.work import Work  # noqa: E402
from bigpool.cli import main  # noqa: E402
from bigpool.cost import verify_cost  # noqa: E402
from bigpool.proof.arms import kernel_modules  # noqa: E402
from bigpool.report.page import page  # noqa: E402
from bigpool.report.read import read  # noqa: E402

SMALL = Shape(2, 2, 40, 16, 4, 2, 32)
NAMES = ("fp16", "int8", "fp8_e4m3", "int4")
# Of one arm: seconds in each format, in the order of NAMES.
SECONDS = (100e-6, 57e-6, 60e-6, 40e-6)
CPU = torch.device("cpu")


class Silent:
    def on_plan(self, rounds: int, text: str) -> None: ...

    def on_step(self, text: str) -> None: ...

    def on_round(self) -> None: ...


class TimerOfFormats(SimulatedTimer):
    """Runs nothing: calls are prepared format by format, two arms each (the second is the A/A twin)."""

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        self.prepared = getattr(self, "prepared", -1) + 1
        seconds = SECONDS[self.prepared // 2 % len(SECONDS)]
        return lambda: seconds


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.roofline, "measure", lambda device: Roofline(1e10, 1e10, {"float16": 1e15}, "made up"))


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "make_timer", lambda method: TimerOfFormats(0))


def checked(names: Sequence[str] = NAMES, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "shapes": with_formats([SMALL], names), "arms": (("ours", "backend:torch"),), "repeats": 40, "method": "cpu",
        "device": "cpu", "dtype": "float16", "command": ("bigpool",),
    }  # fmt: skip
    made = bench(Options(**(usual | changes)), Silent())
    jsonschema.validate(made, json.loads(record.SCHEMA_FILE.read_text()))
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


def test_names_round_trip_and_shapes_that_are_alike_stand_together() -> None:
    asked = with_formats([SMALL, Shape()], ["bf16", "int4", "bf16"])
    assert [shape.name.rpartition("-")[2] for shape in asked] == ["bf16", "int4"] * 2
    assert all(parse(shape.name) == shape for shape in asked)
    assert parse("b1-kv8k") == Shape()
    assert groups(asked) == [list(asked[:2]), list(asked[2:])]
    assert with_formats([SMALL], ()) == (SMALL,)
    shapes.check(asked)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_held_to_the_oracle_on_its_own_rows(name: str) -> None:
    shape = FormatShape(2, 2, 40, 16, 4, 2, 32, name)
    made = FormatWork(shape, torch.float16, CPU)
    plain = Work(SMALL, made.dtype, CPU)
    assert made.q.dtype == (torch.bfloat16 if name == "bf16" else torch.float16)
    ok, text = made.check(made.backend_call("torch")())
    assert ok, text
    values = _rows(made)
    exact = [cache.double() for cache in (plain.k_cache, plain.v_cache)]
    errors = [float((got - want).norm() / want.norm()) for got, want in zip(values, exact, strict=True)]
    lowest, highest = {"fp8_e4m3": (0.005, 0.05), "int8": (0.001, 0.01), "int4": (0.03, 0.15)}.get(name, (0.0, 0.0))
    assert all(lowest <= error <= highest for error in errors), errors
    if name not in ("bf16", "fp16"):
        wrong, _ = made.check(plain.backend_call("torch")())
        assert not wrong, "rows that were not quantised pass"
        exact_out, _ = reference.verify_attention(*plain.arguments, compute_dtype=torch.float64)
        assert not made.check({"out": exact_out.half()})[0]


def _rows(made: FormatWork) -> list[torch.Tensor]:
    """K and V of a cache, dequantised in float64."""
    if made.kv_format is None:
        return [made.k_cache.double(), made.v_cache.double()]
    from bigpool.formats import rotate

    k = made.kv_format.dequantize(made.k_cache, made.k_scale, torch.float64)
    v = made.kv_format.dequantize(made.v_cache, made.v_scale, torch.float64)
    return [rotate(k) if made.kv_format.rotates_k else k, v]


@pytest.mark.parametrize(
    ("name", "row", "more"), [("fp16", 64, 0), ("fp8_e4m3", 32, 2 * 2 * 4), ("int8", 32 + 4, 0), ("int4", 16 + 4, 0)]
)
def test_the_floor_has_the_bytes_of_the_format_with_its_scales(name: str, row: int, more: int) -> None:
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16, "itemsize": 2}
    wanted = verify_cost([40, 40], [2, 2], kv_bytes_per_row=row, **sizes)  # type: ignore[arg-type]
    shape = FormatShape(2, 2, 40, 16, 4, 2, 32, name)
    assert shape.cost(2).bytes_read == wanted.bytes_read + more
    assert (shape.cost(2).bytes_written, shape.cost(2).flops) == (wanted.bytes_written, wanted.flops)
    made = FormatWork(shape, torch.float16, CPU)
    rows = 2 * 40 * 2 * made.k_cache.shape[-1] * made.k_cache.element_size() * 2
    scales = 0 if made.k_scale is None else (2 * 40 * 2 if made.k_scale.dim() == 3 else 2) * 4 * 2
    assert wanted.bytes_read + more - (SMALL.cost(2).bytes_read - 2 * 80 * 2 * 64) == rows + scales


@pytest.mark.usefixtures("timer")
def test_ratios_come_from_the_same_rounds_and_each_format_has_its_floor() -> None:
    made = checked()
    assert [shape["kv_format"] for shape in made["shapes"]] == list(NAMES)
    assert made["shapes"][0]["ratios"] == {}
    for shape, seconds in zip(made["shapes"][1:], SECONDS[1:], strict=True):
        found = shape["ratios"]["ours"]
        assert found["to"] == made["shapes"][0]["name"]
        assert found["low"] <= found["ratio"] <= found["high"]
        assert found["ratio"] == pytest.approx(seconds / SECONDS[0], rel=0.02)
        assert found["high"] - found["low"] < 0.02
    floors = [shape["floor"]["seconds"] for shape in made["shapes"]]
    assert floors[0] > floors[1] > floors[2] > floors[3]
    assert made["status"] == 0


@pytest.mark.usefixtures("timer")
def test_the_table_has_a_column_for_each_format() -> None:
    long, wide = report.report(checked()).tables
    assert long.header[-1] == "of fp16"
    assert [row[-1] for row in long.rows] == ["-", "0.57x", "0.60x", "0.40x"]
    assert wide.header == ("shape", "arm", "fp16 us", "int8 us", "fp8_e4m3 us", "int4 us")
    assert len(wide.rows) == 1
    assert wide.rows[0][:2] == (SMALL.name, "ours")
    assert wide.rows[0][3].endswith(" (0.57x)")


@pytest.mark.usefixtures("timer")
def test_without_a_plain_cache_there_are_no_ratios() -> None:
    made = checked(("int8", "int4"))
    assert [shape["ratios"] for shape in made["shapes"]] == [{}, {}]
    assert report.report(made).tables[0].header[-1] == "of floor"


def test_shapes_without_formats_have_no_new_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "make_timer", lambda method: TimerOfFormats(0))
    made = checked((), shapes=(SMALL,))
    assert not {"kv_format", "ratios"} & set(made["shapes"][0])
    assert len(report.report(made).tables) == 1


@pytest.mark.usefixtures("timer")
def test_one_wrong_format_refuses_all_numbers(tmp_path: Path) -> None:
    wrong = tmp_path / "verify.py"
    source = kernel_modules()["bigpool.kernels.verify"].read_text()
    wrong.write_text(source.replace("sums / l[:, None]", 'sums / l[:, None] * (1.0 if SPEC.kv_format == "plain" else 1.01)'))
    assert wrong.read_text() != source
    one_split = Shape(4, 2, 20, 32, 2, 2, 16)
    arms = (("ours", "shipped"), ("new", str(wrong)))
    made = checked(("fp16", "int8"), shapes=with_formats([one_split], ("fp16", "int8")), arms=arms, repeats=8)
    assert made["status"] == 1
    assert [all(gate["ok"] for gate in shape["gates"]) for shape in made["shapes"]] == [True, False]
    assert made["refusals"][0].startswith(f"new is wrong on {one_split.name}-int8: out: max error ")
    assert all((shape["samples"], shape["ratios"]) == ({}, {}) for shape in made["shapes"])


@pytest.mark.usefixtures("timer")
def test_peers_are_given_caches_in_the_dtype_of_q_only() -> None:
    made = checked(("fp16", "int8"), arms=(("ours", "backend:torch"), ("sdpa", "peer:sdpa")), repeats=8)
    gates = [shape["gates"][-1] for shape in made["shapes"]]
    assert gates[0]["ok"]
    assert gates[1]["text"] == "PeerCannot: caches in int8: peers are given caches in q's dtype"
    assert made["status"] == 0


@pytest.mark.usefixtures("timer")
def test_no_memory_for_one_format_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made_work = formats.FormatWork

    def work(shape: FormatShape, *more: Any) -> Any:
        if shape.kv_format == "fp16":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made_work(shape, *more)

    monkeypatch.setattr(runner, "FormatWork", work)
    made = checked()
    assert [bool(shape["samples"]) for shape in made["shapes"]] == [False, True, True, True]
    assert all(shape["ratios"] == {} for shape in made["shapes"])


def test_the_command_line_times_formats_and_other_tools_read_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = tmp_path / "formats.json"
    asked = [word for name in ("fp16", "int8", "fp8_e4m3", "int4") for word in ("--format", name)]
    shape = "b1-q2-kv40-p16-h2/1-d32"
    arguments = ["--arm", "ours=backend:triton", "--shapes", shape, "--device", "cpu", "--repeats", "8", "--method", "cpu"]
    assert main(["bench", "verify", *asked, *arguments, "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert "ours, ours again: 1 shape in fp16, int8, fp8_e4m3, int4, 8 rounds each, cpu, float16, on the CPU" in said.err
    assert f"{shape}-int4" in said.out
    assert "of fp16" in said.out
    made = json.loads(file.read_text())
    assert all(gate["ok"] for found in made["shapes"] for gate in found["gates"])
    assert len(compare(made, made).tables[0].rows) == 8
    assert f"{shape}-fp8_e4m3" in page([read(file)], "")


def test_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "verify", "--format", "int3", "--dtype", "int4"]) == 2
    assert capsys.readouterr().err == (
        "error: bigpool bench verify: 2 faults\n"
        "  --format: expected one of bf16, fp16, fp8_e4m3, int8, int4, got 'int3'; repeat the option for several\n"
        "  --dtype: expected bf16, fp16, fp32, got 'int4'; bf16 is what servers use\n"
    )


def test_bf16_in_the_interpreter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--format", "bf16", "--device", "cpu", "--shapes", "b1-q2-kv40-p16-h2/1-d32"]
    assert main(["bench", "verify", *arguments]) == 2
    assert "expected float16|float32 in Triton's interpreter, got bfloat16" in capsys.readouterr().err
