"""Whole runs on the CPU: gates, refusals, records, the command line."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'bigpool[test]'")

from bench_sim import SimulatedTimer  # noqa: E402
from bigpool.bench import peers, record, report, runner, watch  # noqa: E402
from bigpool.bench.compare import compare  # noqa: E402
from bigpool.bench.peers._peer import Peer, PeerCannot  # noqa: E402
from bigpool.bench.roofline import Roofline  # noqa: E402
from bigpool.bench.runner import Options, bench  # noqa: E402
from bigpool.bench.shapes import Shape  # noqa: E402
from bigpool.cli import main  # noqa: E402
from bigpool.errors import ProofError  # noqa: E402
from bigpool.proof.arms import kernel_modules  # noqa: E402

SMALL = Shape(1, 2, 20, 16, 2, 1, 16)
OTHER = Shape(2, 1, 16, 16, 2, 1, 16)
TWINS = (("a", "backend:torch"), ("b", "backend:torch"))


class Silent:
    def on_plan(self, rounds: int, text: str) -> None:
        self.plan = text

    def on_step(self, text: str) -> None: ...

    def on_round(self) -> None: ...


class InstantTimer(SimulatedTimer):
    """Runs nothing: every arm takes 50 us and a little noise; the arms of `slow` take 10% more."""

    slow: tuple[int, ...] = ()

    def prepare(self, call: Callable[[], object]) -> Callable[[], object]:
        self.prepared = getattr(self, "prepared", -1) + 1
        seconds = 55e-6 if self.prepared in self.slow else 50e-6
        return lambda: seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> type[InstantTimer]:
    """A simulated timer and ceilings, so that no test depends on the load of its machine."""
    made = type("Made", (InstantTimer,), {})
    monkeypatch.setattr(runner, "make_timer", lambda method: made(0))
    monkeypatch.setattr(runner.roofline, "measure", lambda device: Roofline(1e10, 1e10, {"float16": 1e12}, "made up"))
    return made


def options(**changes: Any) -> Options:
    usual: dict[str, Any] = {
        "shapes": (SMALL,), "arms": TWINS, "repeats": 20, "method": "cpu", "device": "cpu", "dtype": "float16",
        "command": ("bigpool",),
    }  # fmt: skip
    return Options(**(usual | changes))


def checked(**changes: Any) -> dict[str, Any]:
    """The record of a run, which follows its schema and survives JSON."""
    made = bench(options(**changes), Silent())
    assert json.loads(json.dumps(made)) == made
    jsonschema.validate(made, json.loads(record.SCHEMA_FILE.read_text()))
    return made


def wrong_kernel(folder: Path) -> str:
    file = folder / "verify.py"
    source = kernel_modules()["bigpool.kernels.verify"].read_text()
    file.write_text(source.replace("sums / l[:, None]", "sums / l[:, None] * 1.01"))
    assert file.read_text() != source
    return str(file)


def test_two_backends_and_a_twin(quick: type[InstantTimer]) -> None:
    quick.slow = (2, 5)
    made = checked(shapes=(SMALL, OTHER))
    assert [arm["name"] for arm in made["arms"]] == ["a", "a again", "b"]
    assert [arm["same_as"] for arm in made["arms"]] == [None, "a", None]
    for shape in made["shapes"]:
        assert {name: len(rows) for name, rows in shape["samples"].items()} == {"a": 20, "a again": 20, "b": 20}
        assert shape["verdicts"]["b"]["word"] == "slower"
        assert shape["speeds"]["a"]["of_floor"] == pytest.approx(shape["floor"]["seconds"] / shape["speeds"]["a"]["seconds"])
    assert made["overall"]["b"]["estimate"] == pytest.approx(0.1, abs=0.02)
    assert made["status"] == 0
    assert made["summary"].startswith("b: slower by ")


def test_versions_of_the_kernels_run_through_the_interpreter() -> None:
    made = checked(arms=(("before", "narrowed"), ("after", "shipped")), aa=False)
    assert [made_gate["ok"] for made_gate in made["shapes"][0]["gates"]] == [True, True]
    widenings = {arm["name"]: sum(file["widenings"] for file in arm["files"]) for arm in made["arms"]}
    assert widenings["before"] == 0 < widenings["after"]
    assert set(made["overall"]) == {"after"}
    assert made["notes"][-1] == "no A/A run, so the noise is the margin alone"


def test_an_arm_alone_is_compared_with_itself(quick: type[InstantTimer]) -> None:
    made = checked(arms=TWINS[:1])
    found = made["overall"]["a again"]
    assert found["word"] == "no cost"
    assert found["noise"] == max(made["settings"]["margin"], -found["low"], found["high"])
    assert checked(arms=TWINS[:1], aa=False)["summary"] == "timed; nothing to compare it with"


def test_no_memory_for_a_shape_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    made_work = runner.Work

    def work(shape: Shape, *more: Any) -> Any:
        if shape == OTHER:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made_work(shape, *more)

    monkeypatch.setattr(runner, "Work", work)
    made = checked(shapes=(SMALL, OTHER))
    assert [shape["why_not_timed"] for shape in made["shapes"]] == ["", f"{OTHER.name} could not be set up: OutOfMemoryError"]
    assert made["status"] == 0
    nothing = checked(shapes=(OTHER,))
    assert nothing["summary"] == f"no numbers: nothing was timed: {OTHER.name} could not be set up: OutOfMemoryError"


def test_a_wrong_arm_gets_no_numbers(tmp_path: Path) -> None:
    # One split, so that the wrong line is the one that runs.
    made = checked(arms=(("before", "shipped"), ("after", wrong_kernel(tmp_path))), shapes=(Shape(4, 2, 20, 32, 2, 2, 16),))
    assert made["status"] == 1
    assert len(made["refusals"]) == 2
    assert made["refusals"][0].startswith("after is wrong on b4-q2-kv20-p32-h2/2-d16: out: max error ")
    assert made["refusals"][1] == "nothing was timed: an arm is wrong"
    shape = made["shapes"][0]
    assert (shape["samples"], shape["speeds"], shape["verdicts"], made["overall"]) == ({}, {}, {}, {})
    assert made["summary"].startswith("no numbers: after is wrong on ")
    text = "\n".join(line for line, _ in report.report(made).lines)
    assert report.report(made).tables == []
    assert "slower" not in text
    assert "no cost" not in text


def test_without_the_gate_the_numbers_say_that_they_mean_nothing(tmp_path: Path) -> None:
    arms = (("before", "shipped"), ("after", wrong_kernel(tmp_path)))
    made = checked(arms=arms, shapes=(Shape(4, 2, 20, 32, 2, 2, 16),), gated=False)
    assert made["status"] == 1
    assert made["overall"]["after"]["word"] in ("no cost", "undecided")
    assert made["summary"].startswith("these numbers mean nothing: after is wrong on ")


def test_an_arm_that_cannot_run_is_red(tmp_path: Path) -> None:
    file = tmp_path / "verify.py"
    file.write_text("verify_partial_kernel = None\n")
    made = checked(arms=(("a", "backend:torch"), ("b", str(file))))
    assert made["refusals"][0] == "b is wrong on b1-q2-kv20-p16-h2/1-d16: TypeError: 'NoneType' object is not subscriptable"


@pytest.fixture
def two_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(work: Any) -> Callable[[], torch.Tensor]:
        return lambda: torch.zeros_like(work.q)

    def unable(work: Any) -> Callable[[], torch.Tensor]:
        raise PeerCannot("pages of 16 slots")

    made = (Peer("wrong", ("torch",), wrong), Peer("unable", ("torch",), unable), Peer("gone", ("no-such-package",), wrong))
    known = {peer.name: peer for peer in made} | {"sdpa": peers.every()["sdpa"]}
    monkeypatch.setattr(peers, "every", lambda: known)


@pytest.mark.usefixtures("two_peers")
def test_peers_are_timed_where_they_are_right_and_listed_where_they_are_not() -> None:
    made = checked(arms=(("torch", "backend:torch"),), peers=True)
    assert set(made["shapes"][0]["samples"]) == {"torch", "torch again", "sdpa"}
    assert made["absent"] == [{"name": "gone", "why": "not installed: no-such-package"}]
    assert made["status"] == 0, "a peer's fault is not ours"
    lines = [line for line, _ in report.report(made).lines]
    assert "peer gone: not installed: no-such-package" in lines
    assert "peer unable not timed on b1-q2-kv20-p16-h2/1-d16: PeerCannot: pages of 16 slots" in lines
    assert any(line.startswith("peer wrong not timed on b1-q2-kv20-p16-h2/1-d16: out: max error ") for line in lines)


def test_what_cannot_be_timed_is_put_down(quick: type[InstantTimer], monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(self: InstantTimer, call: Callable[[], object]) -> Callable[[], object]:
        self.prepared = getattr(self, "prepared", -1) + 1
        if self.prepared == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: 50e-6

    monkeypatch.setattr(quick, "prepare", prepare)
    peer = checked(arms=(("torch", "backend:torch"), ("peer", "peer:sdpa")))
    assert set(peer["shapes"][0]["samples"]) == {"torch", "torch again"}
    said = "cannot be timed: RuntimeError: operation not permitted when stream is capturing"
    assert peer["shapes"][0]["gates"][-1] == {"arm": "peer", "ok": False, "text": said}
    assert peer["status"] == 0
    ours = checked()
    assert ours["shapes"][0]["samples"] == {}
    assert f"b is wrong on {SMALL.name}: {said}" in ours["refusals"]


@pytest.mark.parametrize("name", ["sdpa", "sdpa-flash"])
def test_peers_that_a_cpu_has_are_right(name: str) -> None:
    made = checked(arms=(("torch", "backend:torch"), ("peer", f"peer:{name}")), shapes=(SMALL, OTHER))
    assert all(made_gate["ok"] for shape in made["shapes"] for made_gate in shape["gates"])


def test_no_peer_imports_its_library_before_it_is_prepared() -> None:
    assert len(peers.every()) >= 13
    assert all(peer.packages for peer in peers.every().values())
    missing = [peer for peer in peers.every().values() if peers.version_of(peer) is None]
    for peer in missing:
        made = checked(arms=(("torch", "backend:torch"), (peer.name, f"peer:{peer.name}")), repeats=8)
        assert peer.name not in made["shapes"][0]["samples"]
        assert (
            "ModuleNotFoundError" in made["shapes"][0]["gates"][-1]["text"]
            or "PeerCannot" in made["shapes"][0]["gates"][-1]["text"]
        )


def test_moved_clocks_refuse_the_numbers_but_keep_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: watch.Watch, load: object) -> None:
        self.before, self.after = {"clocks.sm": 1980.0, "clocks.mem": 3201.0}, {"clocks.sm": 1605.0, "clocks.mem": 3201.0}

    monkeypatch.setattr(watch.Watch, "stop", stop)
    made = checked()
    assert made["refusals"] == [
        "clocks.sm moved from 1,980 to 1,605 MHz (allowed: 3%); let the card cool, or lock its clocks with nvidia-smi -lgc"
    ]
    shape = made["shapes"][0]
    assert len(shape["samples"]["b"]) == 20
    assert (shape["speeds"], shape["verdicts"], made["overall"], made["status"]) == ({}, {}, {}, 1)


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        ({"clocks.sm": 1980.0}, {"clocks.sm": 1935.0}, 0),
        ({"clocks.sm": 1980.0, "clocks.mem": 3201.0}, {"clocks.sm": 1900.0, "clocks.mem": 1593.0}, 2),
        (None, {"clocks.sm": 1980.0}, 0),
        ({}, {}, 0),
    ],
)
def test_which_clocks_moved(before: watch.Clocks | None, after: watch.Clocks, count: int) -> None:
    assert len(watch.clock_faults(before, after)) == count


def test_what_nvidia_smi_says_is_read() -> None:
    assert watch.parse_clocks("1980, 3201, 40, [N/A]\n") == {"clocks.sm": 1980, "clocks.mem": 3201, "temperature.gpu": 40}
    assert watch.parse_clocks("No devices were found\n") is None


@pytest.mark.parametrize(
    ("pids", "has_context", "others"),
    [([7], True, []), ([7, 8], True, [8]), ([3], True, []), ([3, 4], True, [4]), ([3], False, [3]), ([], True, [])],
)
def test_who_else_uses_the_gpu(pids: list[int], has_context: bool, others: list[int]) -> None:
    """Process 7 is this one; in a container it may be listed under another number."""
    assert watch.foreign(pids, 7, has_context) == others


def test_a_proof_record_gates_the_arms_that_it_is_of(tmp_path: Path) -> None:
    arms = (("a", "shipped"),)
    hashes = [file["sha256"] for file in checked(arms=arms)["arms"][0]["files"]]
    proof = json.loads((Path(__file__).parent.parent / "docs/measured/2026-11-30-h200-proof-verify.json").read_text())
    holds = next(arm for arm in proof["arms"] if arm["expect"] == "holds")
    holds["files"] = [holds["files"][0] | {"sha256": sha} for sha in hashes]
    file = tmp_path / "proof.json"
    file.write_text(json.dumps(proof))
    assert checked(arms=arms, proofs=(file,))["refusals"] == []
    file.write_text(json.dumps(proof | {"status": 1, "summary": "refuted: big"}))
    assert checked(arms=arms, proofs=(file,))["refusals"] == ["the proof proof.json is red: refuted: big"]
    for made in holds["files"]:
        made["sha256"] = "0" * 64
    file.write_text(json.dumps(proof))
    assert checked(arms=arms, proofs=(file,))["refusals"] == [
        "the proof proof.json is of other files than these arms; prove them anew"
    ]
    with pytest.raises(ProofError, match=r"^--proof: expected a record of bigpool prove --json, got .*nowhere.json, which does"):
        checked(arms=arms, proofs=(tmp_path / "nowhere.json",))


def test_two_records_side_by_side(quick: type[InstantTimer]) -> None:
    old = checked(aa=False)
    quick.slow = (1,)
    new = checked(aa=False)
    made = compare(old, new)
    assert [row[1] for row in made.tables[0].rows] == ["a", "b"]
    assert made.lines[1][0].startswith("b1-q2-kv20-p16-h2/1-d16: b: slower by ")
    assert not any("not the same" in line for line, _ in made.lines)
    changed = copy.deepcopy(new)
    changed["versions"]["triton"] = "9.9"
    assert f"not the same: versions.triton: {new['versions']['triton']} and 9.9" in [
        line for line, _ in compare(old, changed).lines
    ]
    refused = new | {"refusals": ["an arm is wrong"]}
    with pytest.raises(ProofError, match=r"^B: expected a record with numbers, got one that refuses them: an arm is wrong$"):
        compare(old, refused)
    with pytest.raises(ProofError, match=r"^A, B: expected a shape and an arm that both hold, got none; "):
        compare(old, new | {"shapes": []})


def test_the_command_line_writes_a_record_and_says_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = tmp_path / "speed.json"
    arguments = ["--arm", "a=backend:torch", "--arm", "b=backend:torch", "--shapes", SMALL.name, "--device", "cpu"]
    assert main(["bench", "verify", *arguments, "--repeats", "20", "--json", str(file)]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert said.err.splitlines()[0] == "a, a again, b: 1 shape, 20 rounds each, cpu, float16, on the CPU"
    assert f"{SMALL.name}: b against a: " in said.out
    assert list(tmp_path.iterdir()) == [file]
    assert main(["bench", "compare", str(file), str(file)]) == 0
    assert "+0.0%" in capsys.readouterr().out


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def interrupted(*arguments: object) -> None:
        assert list(tmp_path.glob("bigpool-bench-*")), "the arms were put somewhere else"
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "measure", interrupted)
    file = tmp_path / "speed.json"
    assert main(["bench", "verify", "--shapes", SMALL.name, "--device", "cpu", "--json", str(file)]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--dtype", "int4"], "--dtype: expected bf16, fp16, fp32, got 'int4'; bf16 is what servers use"),
        (["--device", "tpu"], "--device: expected cpu, cuda or auto, got 'tpu'; auto takes the GPU if there is one"),
        (["--margin", "-1"], "--margin: expected 0 or more percent, got -1; the default is 0.5"),
        (["--arm", "x"], "--arm: expected NAME=SPEC, got 'x'; write --arm new=git:HEAD or the like"),
        (
            ["--arm", "a=shipped", "--before", "narrowed"],
            "--arm: expected either --arm or --before and --after, got both; name every version with --arm",
        ),
        (
            ["--json", "/nowhere/x.json"],
            "--json: expected a file in an existing folder, got /nowhere/x.json; make the folder first",
        ),
    ],
)
def test_wrong_arguments(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "verify", *arguments]) == 2
    assert capsys.readouterr().err == f"error: bigpool bench verify: {error}\n"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "speed"]) == 2
    wanted = "COMMAND: expected one of compare, prefill, serving, verify, got 'speed'; see bigpool bench --help\n"
    assert capsys.readouterr().err == f"error: bigpool bench: {wanted}"


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "verify", "--help"]) == 0
    assert "bigpool bench verify --before narrowed:_paging --original-geometries --json int64.json" in capsys.readouterr().out


def test_too_few_rounds_and_names_twice() -> None:
    with pytest.raises(ProofError, match=r"^--repeats: expected at least 8, got 3; an interval needs them$"):
        checked(repeats=3)
    with pytest.raises(
        ProofError, match=r"^--arm: expected a name for each arm, got a, a; write NAME=SPEC with different names$"
    ):
        checked(arms=(TWINS[0], TWINS[0]))


def test_a_record_of_another_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"schema": "bigpool-bench/9"}')
    assert main(["bench", "compare", str(file), str(file)]) == 2
    assert f"A: expected schema bigpool-bench/1, got 'bigpool-bench/9' in {file}; make the record anew" in capsys.readouterr().err
