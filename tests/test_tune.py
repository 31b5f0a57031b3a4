"""The tuner with a simulated timer: what is found, what is not taken, what is refused, and what is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench_sim import Noise, SimulatedTimer
from bigpool.bench import watch
from bigpool.bench.formats import FormatShape
from bigpool.bench.load import OP_MODULE, closure, import_kernels
from bigpool.bench.shapes import Shape
from bigpool.bench.stats import Effect
from bigpool.bench.tune import candidates as tried
from bigpool.bench.tune import runner, table
from bigpool.bench.tune.runner import Cell, Options, tune
from bigpool.bench.tune.trial import MOST_SPILLS, Trial, check, spill_fault
from bigpool.bench.verdict import FASTER, SLOWER, Verdict
from bigpool.cli import main
from bigpool.errors import ProofError
from bigpool.proof.arms import kernel_modules
from bigpool.tuning import INTERPRETER, DeviceProps, VerifyConfig, config_supports, pick_verify_config
from bigpool.tuning_tables import parse_table
from test_cli_shell import COLOUR, on_a_terminal

# One split, so that the line that a wrong kernel changes is the one that runs.
ONE_SPLIT = Shape(4, 2, 20, 32, 2, 2, 16)
NAME = f"{ONE_SPLIT.name}-fp16"
OTHER = Shape(4, 2, 40, 32, 2, 2, 16)
RTX3090 = DeviceProps("NVIDIA GeForce RTX 3090", 86, 82, 99 * 1024)
H200 = DeviceProps("H200", 90, 132, 227 * 1024)
QUIET = Noise()


class Listener:
    def __init__(self) -> None:
        self.plan, self.steps, self.rounds = "", list[str](), 0

    def on_plan(self, rounds: int, text: str) -> None:
        self.plan = text

    def on_step(self, text: str) -> None:
        self.steps.append(text)

    def on_round(self) -> None:
        self.rounds += 1


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, float]], None]:
    """A timer that runs nothing: the rule takes 100 us, a candidate of `tile` keys what is planted for it (else 120 us)."""

    def planted(by_tile: Mapping[int, float], noise: Noise = QUIET, shapes: tuple[Mapping[int, float], ...] = ()) -> None:
        class Timer(SimulatedTimer):
            def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
                assert isinstance(call, Trial)
                keys = call.call.__closure__ and [cell.cell_contents for cell in call.call.__closure__]
                work = next(item for item in keys or () if hasattr(item, "seq_lens"))
                times = shapes[0] if shapes and work.shape.seq_len == OTHER.seq_len else by_tile
                seconds = 1e-6 * (100 if call.config is None else times.get(call.config.tile, 120))
                return lambda: seconds

        monkeypatch.setattr(runner, "make_timer", lambda method: Timer(0, noise))

    return planted


def tuned(*shapes: Shape, listener: Listener | None = None, **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "shapes": shapes or (ONE_SPLIT,), "formats": ("fp16",), "dtype": "float16", "device": "cpu", "method": "cpu",
        "repeats": 40, "command": ("bigpool", "tune"),
    }  # fmt: skip
    made = tune(Options(**(usual | changes)), listener or Listener())
    assert json.loads(json.dumps(made)) == made
    parse_table(json.dumps(made), "made")
    return made


def wrong_kernels(folder: Path, factor: str) -> ModuleType:
    """The kernels with results that are off by `factor`, an expression of the kernel's constants."""
    file = folder / "verify.py"
    modules = closure(OP_MODULE, kernel_modules())
    source = modules[OP_MODULE].read_text()
    file.write_text(source.replace("sums / l[:, None]", f"sums / l[:, None] * ({factor})"))
    assert file.read_text() != source
    return import_kernels({**modules, OP_MODULE: file})


def test_a_planted_fast_candidate_is_found(plant: Any) -> None:
    plant({64: 80.0, 32: 90.0})
    listener = Listener()
    made = tuned(listener=listener)
    cell = made["tried"][0]
    assert [found["config"]["tile"] for found in cell["candidates"]] == [128, 64, 32, 16]
    assert all(list(found["seconds"]) == [NAME] and found["why_not_timed"] == "" for found in cell["candidates"])
    assert cell["candidates"][1]["seconds"][NAME] == pytest.approx(80e-6, rel=0.05)
    assert cell["best"] == {"block_m": 16, "tile": 64, "num_warps": 1, "num_stages": 1}
    assert cell["verdict"]["word"] == "faster"
    assert made["entries"] == [{**cell["key"], "config": cell["best"]}]
    assert (made["summary"], made["status"]) == ("1 of 1 entries beat the rule", 0)
    assert listener.plan == "1 entry, 4 candidates to compile and run, cpu, float16, on triton interpreter"
    assert listener.rounds == 8 + 40
    assert f"16x64 w1 s1: faster by {cell['verdict']['estimate'] * -1:.1%}" in "\n".join(
        text for text, _ in table.report(made).lines
    )


def test_a_candidate_inside_the_noise_is_not_taken(plant: Any) -> None:
    plant({64: 99.7}, Noise(jitter=0.03))
    made = tuned()
    cell = made["tried"][0]
    assert cell["verdict"] is None or cell["verdict"]["word"] != "faster"
    assert (made["entries"], made["summary"], made["status"]) == ([], "0 of 1 entries beat the rule", 0)


def test_the_verdict_comes_from_rounds_of_its_own(plant: Any) -> None:
    """Among many equal candidates the one that chance favours looks faster in the screening."""
    plant(dict.fromkeys((128, 64, 32, 16), 100.0), Noise(jitter=0.05))
    for seed in range(3):
        assert tuned(seed=seed)["entries"] == []


def test_slower_candidates_leave_the_rule(plant: Any) -> None:
    plant({})
    made = tuned()
    assert made["tried"][0]["why"] == "no candidate was faster in the screening"
    assert made["tried"][0]["best"] is None
    assert made["entries"] == []


def test_a_candidate_that_is_slower_on_one_shape_is_not_taken(plant: Any) -> None:
    plant({64: 60.0}, shapes=({64: 110.0},))
    made = tuned(ONE_SPLIT, OTHER)
    cell = made["tried"][0]
    assert cell["shapes"] == [NAME, f"{OTHER.name}-fp16"]
    assert [found["word"] for found in cell["verdicts"].values()] == ["faster", "slower"]
    assert not cell["taken"]
    assert made["entries"] == []


def test_one_shape_that_is_slower_outweighs_the_mean() -> None:
    """With many shapes the mean may be "faster" although one of them is not."""
    effect = Effect(-0.3, -0.31, -0.29, 40)
    faster, slower = Verdict(FASTER, "", effect, 0.005), Verdict(SLOWER, "", effect, 0.005)
    cell = Cell(tried.key_of(FormatShape(), 2), [], VerifyConfig(16, 64, 4, 3), verdict=faster)
    cell.by_shape = {"a": faster, "b": faster}
    assert cell.is_taken
    cell.by_shape = {"a": faster, "b": slower}
    assert not cell.is_taken


def test_the_noise_is_that_of_the_rule_against_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gain of 2% is nothing where the rule differs from itself by 5%."""

    class Timer(SimulatedTimer):
        rules = 0

        def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
            assert isinstance(call, Trial)
            self.rules += call.config is None
            # Once in the screening, then as the rule, then as the rule again.
            seconds = 1e-6 * ((95 if self.rules == 3 else 100) if call.config is None else 98)
            return lambda: seconds

    monkeypatch.setattr(runner, "make_timer", lambda method: Timer(0, Noise(jitter=0.001, wander=0.0, outliers=0.0, tick=0.0)))
    made = tuned()
    assert made["tried"][0]["verdict"]["noise"] > 0.04
    assert made["tried"][0]["verdict"]["word"] == "undecided"
    assert made["entries"] == []


def test_a_wrong_candidate_is_refused_and_named(plant: Any, tmp_path: Path) -> None:
    plant({32: 50.0, 64: 80.0})
    made = tuned(kernels=wrong_kernels(tmp_path, "1.01 if TILE == 32 else 1.0"))
    found = made["tried"][0]["candidates"][2]
    assert found["why_not_timed"].startswith(f"on {NAME}: wrong: out: max error ")
    assert found["seconds"] == {}
    assert made["entries"][0]["config"]["tile"] == 64, "the next best that is right"
    assert any(f"16x32 w1 s1 refused on {NAME}: wrong: out: max error " in text for text, _ in table.report(made).lines)
    assert made["status"] == 0


def test_a_rule_that_is_wrong_refuses_the_run(plant: Any, tmp_path: Path) -> None:
    plant({64: 80.0})
    made = tuned(kernels=wrong_kernels(tmp_path, "1.01"))
    assert made["status"] == 1
    assert made["entries"] == []
    assert made["refusals"][0].startswith(f"rows<=16 d16 q2 kv2 pages32: the configuration of today on {NAME}: wrong: out: max")
    assert made["summary"].startswith("no numbers: rows<=16")
    assert table.report(made).tables == []


def test_a_candidate_that_does_not_compile_is_put_down(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant({64: 80.0, 16: 70.0})
    kernels = import_kernels(closure(OP_MODULE, kernel_modules()))
    launched = kernels.verify_partial_kernel

    class Kernel:
        arg_names = launched.arg_names

        def __getitem__(self, grid: Any) -> Callable[..., object]:
            def run(*arguments: Any, **options: Any) -> object:
                if options["TILE"] == 16:
                    raise RuntimeError("out of resource: shared memory")
                return launched[grid](*arguments, **options)

            return run

    monkeypatch.setattr(kernels, "verify_partial_kernel", Kernel())
    made = tuned(kernels=kernels)
    assert made["tried"][0]["candidates"][3]["why_not_timed"] == f"on {NAME}: RuntimeError: out of resource: shared memory"
    assert made["entries"][0]["config"]["tile"] == 64
    said = [text for text, _ in table.report(made).lines]
    assert any("1 of 4 not timed, such as 16x16 w1 s1 on " in text for text in said)


def test_a_candidate_that_spills_is_not_timed(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant({64: 80.0, 16: 70.0})

    def spilling(work: Any, kernels: Any, key: Any, config: VerifyConfig | None, sync: Any) -> Any:
        spills = {None: 10, 16: 10 + MOST_SPILLS + 1, 64: 10 + MOST_SPILLS}
        return replace(check(work, kernels, key, config, sync), spills=spills.get(config and config.tile))

    monkeypatch.setattr(runner, "check", spilling)
    made = tuned()
    assert made["tried"][0]["candidates"][3]["why_not_timed"] == f"on {NAME}: spills 75 registers a thread, more than 74"
    assert made["entries"][0]["config"]["tile"] == 64
    assert made["tried"][0]["candidates"][1]["spills"] == 74
    assert spill_fault(None, 0) == ""


def test_spills_are_read_from_what_triton_has_just_compiled() -> None:
    kernel = SimpleNamespace(device_caches={0: ({"old": SimpleNamespace(n_spills=99)}, None)})

    class Work:
        def kernels_call(self, kernels: Any) -> Callable[[], object]:
            def call() -> object:
                kernel.device_caches[0][0]["new"] = SimpleNamespace(n_spills=7)
                return None

            return call

        def check(self, given: object) -> tuple[bool, str]:
            return True, ""

    kernels: Any = SimpleNamespace(verify_partial_kernel=kernel)
    made: Any = Work()
    key = tried.key_of(FormatShape(), 2)
    assert check(made, kernels, key, None, lambda: None).spills == 7
    assert check(made, kernels, key, None, lambda: None).spills is None, "nothing was compiled the second time"


def test_no_memory_is_put_down_and_a_run_without_times_is_refused(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant({64: 80.0})
    made_work = runner.FormatWork

    def work(shape: FormatShape, *more: Any) -> Any:
        if shape.kv_format == "int4":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made_work(shape, *more)

    monkeypatch.setattr(runner, "FormatWork", work)
    made = tuned(formats=("fp16", "int4"))
    assert [cell["why"] for cell in made["tried"]] == ["", "could not be timed: OutOfMemoryError: CUDA out of memory"]
    assert (len(made["entries"]), made["status"]) == (1, 0)
    nothing = tuned(formats=("int4",))
    said = "nothing was timed: could not be timed: OutOfMemoryError: CUDA out of memory"
    assert (nothing["refusals"], nothing["status"]) == ([said], 1)


def test_moved_clocks_refuse_the_entries(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant({64: 80.0})

    def stop(self: watch.Watch, load: object) -> None:
        self.before, self.after = {"clocks.sm": 1980.0}, {"clocks.sm": 1605.0}

    monkeypatch.setattr(watch.Watch, "stop", stop)
    made = tuned()
    assert (made["entries"], made["status"]) == ([], 1)
    assert made["refusals"][0].startswith("clocks.sm moved from 1,980 to 1,605 MHz")
    assert made["tried"][0]["verdict"] is None
    assert not made["tried"][0]["taken"]


def test_what_is_tried_is_what_is_launched() -> None:
    """A trial reaches the kernel's constants, and nothing of it is left afterwards."""
    seen = []

    class Kernel:
        arg_names = ("SPEC",)

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *arguments, **options: seen.append((options["TILE"], options["BLOCK_M"]))

    from bigpool.bench.formats import FormatWork

    shape = FormatShape(4, 2, 20, 32, 2, 2, 16, "fp16")
    call = FormatWork(shape, torch.float16, torch.device("cpu")).kernels_call(
        SimpleNamespace(verify_partial_kernel=Kernel())  # type: ignore[arg-type]
    )
    key = tried.key_of(shape, 2)
    Trial(key, VerifyConfig(32, 64, 1, 1), call)()
    Trial(key._replace(head_dim_pad=32), VerifyConfig(32, 64, 1, 1), call)()
    Trial(key, None, call)()
    call()
    assert seen == [(64, 32), (256, 16), (256, 16), (256, 16)]


def test_shapes_and_formats_become_entries() -> None:
    """8-bit formats share an entry, so that both are timed for it; shapes of one class too."""
    shapes = (Shape(1, 1, 8_192, 16, 32, 8, 128), Shape(16, 4, 1_024, 16, 32, 8, 128), Shape(1, 8, 8_192, 880, 24, 4, 256))
    made = tried.cells(shapes, ("bf16", "int8"), 2)
    assert [(key.rows, key.head_dim_pad, key.kv_bytes, key.page_tile) for key in made] == [
        (16, 128, None, 16), (16, 128, 1.0, 16), (64, 256, None, 128), (64, 256, 1.0, 128),
    ]  # fmt: skip
    assert [len(found) for found in made.values()] == [2, 4, 1, 2]
    assert {shape.kv_format for shape in list(made.values())[1]} == {"int8", "fp8_e4m3"}
    assert tried.with_siblings(("fp8_e4m3",)) == ("fp8_e4m3", "int8")
    assert tried.with_siblings(("int4",)) == ("int4",)


@pytest.mark.parametrize("props", [RTX3090, H200, INTERPRETER], ids=lambda props: str(props.sm))
def test_candidates_fit_the_card_and_are_not_the_rule(props: DeviceProps) -> None:
    for key, shapes in tried.cells(tried.TABLE, ("bf16", "int8", "int4"), 2).items():
        rule = tried.rule_of(props, key, shapes[0])
        made = tried.candidates(props, key, rule)
        assert made
        assert len(set(made)) == len(made)
        assert rule not in made
        for config in made:
            assert config_supports(config, props, key.head_dim_pad, key.itemsize, key.kv_bytes)
            sums = config.block_m * key.head_dim_pad / (32 * config.num_warps)
            assert props.interpreted or sums <= 128, "sums over values alone would fill the registers"
        assert rule == pick_verify_config(
            props, rows=shapes[0].q_len * shapes[0].num_q_heads // shapes[0].num_kv_heads, head_dim_pad=key.head_dim_pad,
            itemsize=2, page_size=shapes[0].page_size, kv_bytes=key.kv_bytes, tuned={},
        )  # fmt: skip
    tiles = {config.tile for config in tried.candidates(INTERPRETER, key, rule)}
    assert tiles == {128, 64, 32, 16}


def test_how_many_candidates_the_docs_promise() -> None:
    props, total = DeviceProps("of the docs", 89, 128, 99 * 1024), 0
    for key, shapes in tried.cells(tried.TABLE, ("bf16", "fp8_e4m3", "int8", "int4"), 2).items():
        total += len(shapes) * len(tried.candidates(props, key, tried.rule_of(props, key, shapes[0])))
    assert f"these are {total:,} on an sm 89 card" in (Path(__file__).parent.parent / "docs/tune.md").read_text()


def test_the_command_line_writes_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, plant: Any
) -> None:
    plant({64: 80.0})
    monkeypatch.setenv("NO_COLOR", "1")
    file = tmp_path / "card.json"
    arguments = ["--device", "cpu", "--shapes", ONE_SPLIT.name, "--format", "fp16", "--out", str(file)]
    assert main(["tune", "verify", *arguments]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert said.err.splitlines()[0] == "1 entry, 4 candidates to compile and run, cpu, float16, on triton interpreter"
    assert said.out.endswith("1 of 1 entries beat the rule\n")
    assert "a rehearsal" in said.out
    assert list(tmp_path.iterdir()) == [file]
    card, configs = parse_table(file.read_text(), "card")
    assert card == replace(INTERPRETER, interpreted=False)
    assert list(configs.values()) == [VerifyConfig(16, 64, 1, 1)]
    data = json.loads(file.read_text())
    assert {"machine", "versions", "command", "files", "clocks", "settings"} <= set(data)


def test_an_interrupt_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "measure", interrupted)
    file = tmp_path / "card.json"
    file.write_text("old")
    arguments = ["--device", "cpu", "--shapes", ONE_SPLIT.name, "--format", "fp16", "--out", str(file)]
    assert main(["tune", "verify", *arguments]) == 130
    assert capsys.readouterr().err.endswith("error: interrupted\n")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_terminal_gets_a_bar_and_no_color_is_kept() -> None:
    arguments = ["--device", "cpu", "--shapes", "b1-q1-kv16-p16-h1/1-d16", "--format", "fp16", "--repeats", "8"]
    shown = on_a_terminal("tune", "verify", *arguments, columns=200, NO_COLOR="1")
    assert "0 of 1 entries beat the rule" in shown or "1 of 1 entries beat the rule" in shown
    assert "━" in shown, "no bar"
    assert not COLOUR.search(shown)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--format", "int3"],
            "--format: expected one of bf16, fp16, fp8_e4m3, int8, int4, got 'int3'; repeat the option for several",
        ),
        (["--device", "tpu"], "--device: expected cpu, cuda or auto, got 'tpu'; auto takes the GPU if there is one"),
        (["--margin", "-1"], "--margin: expected 0 or more percent, got -1; the default is 0.5"),
        (
            ["--out", "/nowhere/x.json"],
            "--out: expected a file in an existing folder, got /nowhere/x.json; make the folder first",
        ),
    ],
)
def test_wrong_arguments(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "verify", *arguments]) == 2
    assert capsys.readouterr().err == f"error: bigpool tune verify: {error}\n"


def test_an_unknown_command_and_bf16_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "prefill"]) == 2
    assert capsys.readouterr().err == ("error: bigpool tune: COMMAND: expected verify, got 'prefill'; see bigpool tune --help\n")
    assert main(["tune", "verify", "--device", "cpu", "--format", "bf16"]) == 2
    assert "expected float16|float32 in Triton's interpreter, got bfloat16" in capsys.readouterr().err
    with pytest.raises(ProofError, match=r"^--repeats: expected at least 8, got 3; an interval needs them$"):
        tuned(repeats=3)


def test_help_names_the_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 0
    assert "bigpool tune verify --out my-card.json" in capsys.readouterr().out
    assert main(["tune", "verify", "--help"]) == 0
    assert "BIGPOOL_TUNED" in capsys.readouterr().out
