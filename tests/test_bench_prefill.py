"""`bigpool bench prefill`: its shapes, its gates in both modes, and the arm without the int64 page id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'bigpool[test]'")

from bigpool.bench import prefill, record, shapes  # noqa: E402
from bigpool.bench.load import Loader  # noqa: E402
from bigpool.bench.prefill import PrefillShape, PrefillWork, parse  # noqa: E402
from bigpool.cli import main  # noqa: E402
from bigpool.errors import ArgumentError  # noqa: E402
from bigpool.proof.arms import kernel_modules  # noqa: E402

SMALL = "b2-q12-kv30-p16-h2/1-d16"
MODULE = "bigpool.kernels.prefill"


def test_a_name_without_a_mode_stands_for_both() -> None:
    both = parse("b1-kv24000")
    assert [shape.name for shape in both] == [
        f"b1-q2k-kv24000-p880-h24/4-d256-{mode}".replace("q2k", "q2048") for mode in prefill.MODES
    ]
    assert parse("kv47000-int8") == (PrefillShape(seq_len=47_000, qk="int8"),)


def test_names_round_trip() -> None:
    for shape in (*prefill.TABLE, *prefill.TINY):
        assert parse(shape.name) == (shape,)
        assert "qk" not in shape.to_json()
    shapes.check(prefill.TABLE)
    with pytest.raises(ArgumentError) as caught:
        parse("b1-fp8")
    assert str(caught.value) == (
        "bigpool bench: --shapes: expected parts b q kv p h d with numbers, got 'fp8'; write the parts that differ, such as "
        "b16-q8-kv32k-p880-h24/4-d256"
    )


def test_the_narrowed_arm_is_the_page_id_alone() -> None:
    with Loader(op_module=MODULE) as loader:
        shipped, narrowed = loader.load("after", "shipped"), loader.load("before", "narrowed:_paging")
        assert shipped.kernels is not None
        assert narrowed.kernels is not None
        assert shipped.kernels.prefill_attention_kernel is not narrowed.kernels.prefill_attention_kernel
        widenings = {file["module"].rpartition(".")[2]: file["widenings"] for file in narrowed.facts["files"]}
        assert widenings["_paging"] == 0 < widenings["prefill"]
        assert "verify" not in widenings


def work(mode: str) -> PrefillWork:
    return PrefillWork(parse(f"{SMALL}-{mode}")[0], torch.float16, torch.device("cpu"))


@pytest.mark.parametrize("mode", prefill.MODES)
def test_right_outputs_pass_and_wrong_ones_do_not(mode: str) -> None:
    made = work(mode)
    given = made.backend_call("torch")()
    assert isinstance(given, dict)
    ok, text = made.check(given)
    assert ok, text
    wrongs = {
        "zeros": {"out": torch.zeros_like(given["out"]), "lse": given["lse"]},
        "other rows": {"out": given["out"].roll(1, 0), "lse": given["lse"]},
        "lse": {"out": given["out"], "lse": given["lse"] + 0.1},
        "a little": {"out": given["out"] * 1.05, "lse": given["lse"]},
    }
    for name, wrong in wrongs.items():
        assert not made.check(wrong)[0], name


def test_kernels_of_an_arm_and_the_public_function_agree() -> None:
    for mode in prefill.MODES:
        made = work(mode)
        with Loader(op_module=MODULE) as loader:
            kernels = loader.load("a", "shipped").kernels
            assert kernels is not None
            ours, theirs = made.kernels_call(kernels)(), made.backend_call("triton")()
        assert isinstance(ours, dict)
        assert isinstance(theirs, dict)
        assert torch.equal(ours["out"], theirs["out"])


def test_the_command_line_prices_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prefill.json"
    arguments = ["--arm", "a=backend:torch", "--arm", "b=backend:torch", "--shapes", SMALL, "--device", "cpu", "--repeats", "20"]
    assert main(["bench", "prefill", *arguments, "--json", str(file)]) == 0
    made = json.loads(file.read_text())
    jsonschema.validate(made, json.loads(record.SCHEMA_FILE.read_text()))
    assert made["op"] == "prefill_attention"
    assert [shape["name"] for shape in made["shapes"]] == [f"{SMALL}-exact", f"{SMALL}-int8"]
    assert all(shape["verdicts"]["b"]["text"] for shape in made["shapes"])
    assert "prefill_attention float16" in capsys.readouterr().out


def test_a_wrong_kernel_gets_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "prefill.py"
    source = kernel_modules()[MODULE].read_text()
    wrong.write_text(source.replace("/ l[:, None]", "/ l[:, None] * 1.05"))
    assert wrong.read_text() != source
    arguments = ["--after", str(wrong), "--shapes", SMALL, "--device", "cpu", "--repeats", "8"]
    assert main(["bench", "prefill", *arguments]) == 1
    said = capsys.readouterr().out
    assert f"after is wrong on {SMALL}-exact: out: max error" in said
    assert f"after is wrong on {SMALL}-int8: out: relative error 0.05" in said
