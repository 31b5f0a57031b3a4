"""Records: loading, hygiene, the table and the picture, all from a made-up record that follows the schema."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'bigpool[test]'")

from rich.console import Console  # noqa: E402

from bigpool.cli import main  # noqa: E402
from bigpool.errors import BackendError, ProofError  # noqa: E402
from bigpool.proof import figure, record, report  # noqa: E402

SHA = "ab" * 32
POOL = {
    "name": "k", "role": "read", "shape": [2600, 880, 4, 256], "dtype": "float16", "page_stride": 901_120, "wall": 2384,
    "ids_in_use": 23, "virtual_bytes": 4_685_824_000, "mapped_bytes": 41_451_520,
}  # fmt: skip
FIRST = {"bottom": 0, "across": 2373, "top": 2577}
ERROR = {"output": "out", "error": 1e-4, "bound": 5e-4, "ok": True, "text": "out: max error 0.0001 <= bound 0.0005"}


def run(arm: str, placement: str, guard: str = "unmapped", outcome: str = "ok", **more: Any) -> dict[str, Any]:
    first = FIRST[placement]
    tensor = {**POOL, "first_id": first, "last_id": first + 22, "max_offset": (first + 23) * 901_120 - 1}
    made = {
        "case": "big", "dtype": "float16", "arm": arm, "placement": placement, "guard": guard, "outcome": outcome, "detail": "",
        "where": "", "seconds": 1.0, "rss_mib": 300, "log": "", "digests": {"out": SHA}, "nan": {"out": 0}, "tensors": [tensor],
        "launches": [{"kernel": "gather_kernel", "file": "verify.py", "count": 1}],
    }  # fmt: skip
    return {**made, **more}


def arm(name: str, expect: str, widenings: int, uncut: list[str] | None = None) -> dict[str, Any]:
    file = {"module": "m", "file": "verify.py", "sha256": SHA, "widenings": widenings, "uncut": uncut or []}
    return {"name": name, "expect": expect, "origin": "the installed files", "files": [file]}


def made_record(**changes: Any) -> dict[str, Any]:
    killed = {"outcome": "killed", "detail": "SIGSEGV", "where": "verify.py:88", "digests": {}, "nan": {}}
    data = {
        "schema": record.SCHEMA,
        "bigpool": {"version": "0.1", "git_sha": "c" * 40, "git_dirty": False},
        "date": "2026-11-30T00:00:00+00:00",
        "command": ["bigpool", "prove"],
        "backend": "interpreter",
        "machine": {"cpu": "a cpu", "cores": 2, "system": "Linux", "gpu": None},
        "versions": {"bigpool": "0.1", "python": "3.11", "torch": "2.13", "triton": "3.9", "numpy": "2.3", "cuda": None},
        "jobs": 2,
        "seconds": 10.0,
        "peak_rss_mib_of_one_run": 300,
        "arms": [arm("shipped", "holds", 6, ["verify.py:4: WIDE = tl.int64"]), arm("narrowed", "fails", 0)],
        "cases": [{"name": "big", "op": "verify", "describe": "20,000 tokens", "dtype": "float16"}],
        "runs": [
            run("shipped", "bottom"), run("shipped", "top"), run("shipped", "across"), run("shipped", "top", "poison"),
            run("narrowed", "bottom"), run("narrowed", "top", **killed),
            run("narrowed", "top", "poison", digests={"out": "cd" * 32}, nan={"out": 9}),
        ],
        "verdicts": [
            {
                "case": "big", "dtype": "float16", "status": "proven", "findings": [], "errors": [ERROR], "oracle": True,
                "broken": {"unmapped": "killed: SIGSEGV at verify.py:88", "poison": "NaN in out"},
            },
        ],
        "notes": ["the interpreter was used"],
        "not_exercised": ["compiled kernels on any card: this was Triton's interpreter"],
        "summary": "proven: 1 of 1 cases",
        "status": 0,
    }  # fmt: skip
    return {**copy.deepcopy(data), **changes}


def shown(data: dict[str, Any], **options: Any) -> str:
    out = io.StringIO()
    report.show(data, Console(file=out, highlight=False, **options))
    return out.getvalue()


def test_the_made_up_record_follows_the_schema() -> None:
    schema = json.loads(record.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(made_record(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made_record(status=7), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made_record(more=1), schema)


def test_the_table_in_a_pipe() -> None:
    lines = [line.rstrip() for line in shown(made_record()).splitlines()]
    cells = [cell.strip() for cell in lines[2].split("   ") if cell.strip()]
    assert cells == [
        "big", "2,600 pages, wall 2,384", "ok", "same bits", "same bits",
        "killed: SIGSEGV at verify.py:88 / NaN", "0.0001 <= 0.0005", "proven",
    ]  # fmt: skip
    assert lines[3:] == [
        "",
        "arm shipped: the installed files; verify.py abababab (6 widenings); "
        "64-bit types that narrowing does not cut: verify.py:4: WIDE = tl.int64",
        "arm narrowed: the installed files; 1 file without a widening",
        "note: the interpreter was used",
        "",
        "not exercised here:",
        "  compiled kernels on any card: this was Triton's interpreter",
        "",
        "proven: 1 of 1 cases",
    ]


def test_a_terminal_gets_colours_unless_it_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[32m" in shown(made_record(), force_terminal=True, width=160)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in shown(made_record(), force_terminal=True, width=160)


def test_what_went_wrong_stands_in_its_cell() -> None:
    data = made_record()
    data["runs"][1] = run("shipped", "top", outcome="killed", detail="SIGSEGV", where="verify.py:88")
    data["runs"][2] = run("shipped", "across", digests={"out": "ef" * 32})
    data["runs"][3] = run("shipped", "top", "poison", outcome="canary", detail="out: guard: ...")
    data["verdicts"][0] |= {"status": "refuted", "findings": ["one", "two"], "errors": [{**ERROR, "ok": False}]}
    (row,) = report.rows(data)
    assert row["top"] == "killed: SIGSEGV at verify.py:88"
    assert row["across"] == "other\nbits"
    assert row["error"] == "0.0001\n> 0.0005"
    assert "\nbig (float16): refuted\n  one\n  two\n" in shown(data)
    data["runs"][1] = run("shipped", "top")
    assert report.rows(data)[0]["top"] == "canary broken", "the poison run at the top counts as well"


def test_a_narrow_terminal_gets_a_list() -> None:
    text = shown(made_record(), force_terminal=True, color_system=None, width=80)
    assert text.splitlines()[0] == "big: proven"
    assert " ".join(text.partition("\narm ")[0].split()[2:]) == (
        "pool: 2,600 pages, wall 2,384; bottom: ok; top: same bits; across: same bits; narrowed at top (unmapped / poison): "
        "killed: SIGSEGV at verify.py:88 / NaN; error: 0.0001 <= 0.0005"
    )


def test_a_wide_terminal_gets_stacked_cells() -> None:
    lines = shown(made_record(), force_terminal=True, color_system=None, width=112).splitlines()
    assert " ".join(lines[3].split()) == "big 2,600 pages, ok same same killed: SIGSEGV at verify.py:88 / 0.0001 proven"
    assert " ".join(lines[4].split()) == "wall 2,384 bits bits NaN <= 0.0005"


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("NaN in out, lse", "NaN"),
        ("killed: CUDA illegal access in verify_partial_kernel at verify.py:67", "killed: CUDA illegal access"),
        ("killed: SIGSEGV at verify.py:44", "killed: SIGSEGV at verify.py:44"),
        ("unequal (out: 3 of 9 elements differ)", "unequal"),
        ("error: CompilationError: no such thing", "error"),
        ("wrote outside its tensors", "wrote outside its tensors"),
    ],
)
def test_a_cell_leaves_particulars_to_the_record(text: str, short: str) -> None:
    assert report.brief(text) == short


def test_a_case_without_an_oracle_says_so() -> None:
    data = made_record()
    data["verdicts"][0] |= {"errors": [], "oracle": False}
    assert report.rows(data)[0]["error"] == "no oracle"


def test_paths_of_the_machine_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/opt/venv/lib/site-packages", "/opt/venv/lib"])
    text = 'File "/opt/venv/lib/site-packages/triton/core.py", line 3\nFile "/tmp/proof-x/arms/a/kernel.py", line 4, 1/2, a/b'
    assert record.shorten_paths(text) == 'File "triton/core.py", line 3\nFile "kernel.py", line 4, 1/2, a/b'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "--from-json: expected a record of bigpool prove --json, got {file}, which does not exist"),
        ("[1", "--from-json: expected a record of bigpool prove --json, got {file}, which is no JSON: Expecting"),
        ("{}", "--from-json: expected schema bigpool-proof/1, got None in {file}; make the record anew with --json"),
        (
            '{"schema": "x/2"}',
            "--from-json: expected schema bigpool-proof/1, got 'x/2' in {file}; make the record anew with --json",
        ),
        (
            json.dumps(made_record(status=7)),
            "--from-json: expected a record that follows bigpool-proof/1, got {file}: $.status: 7 is not one of [0, 1, 2]; "
            "make it anew with --json",
        ),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str | None, text: str) -> None:
    file = tmp_path / "r.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ProofError) as caught:
        record.load(file)
    assert str(caught.value).startswith(text.format(file=file))


def test_a_record_without_its_keys_is_refused_without_jsonschema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    data = made_record()
    del data["runs"], data["status"]
    (tmp_path / "r.json").write_text(json.dumps(data))
    with pytest.raises(ProofError, match=r": runs, status missing; make it anew with --json$"):
        record.load(tmp_path / "r.json")


# The picture.


def texts_of(data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that the picture shows."""
    axes = pytest.importorskip("matplotlib.axes", reason="needs matplotlib: pip install 'bigpool[plot]'")
    seen: list[str] = []
    original = axes.Axes.text
    monkeypatch.setattr(axes.Axes, "text", lambda self, x, y, s, **more: (seen.append(s), original(self, x, y, s, **more))[1])
    figure.draw(data, tmp_path / "f.svg")
    return seen


def test_the_picture_shows_what_the_record_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of(made_record(), tmp_path, monkeypatch)
    for text in (
        "big: proven", "wall: page 2,384", "pool: 2,600 pages", "at the bottom, pages 0..22",
        "across the wall, pages 2,373..2,395",
        "at the top, pages 2,577..2,599", "the offset of page 2,577 in 32 bits", "right", "same bits",
        "killed: SIGSEGV at verify.py:88 (unmapped)\nNaN in out (poison)",
        "Triton's interpreter on a cpu, triton 3.9, torch 2.13, bigpool 0.1, cccccccccc, 2026-11-30",
    ):  # fmt: skip
        assert text in texts


def test_the_picture_does_not_show_what_the_record_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = made_record()
    data["runs"] = [run("shipped", "bottom"), run("shipped", "top", outcome="killed", detail="SIGSEGV")]
    data["verdicts"][0] |= {"status": "refuted", "broken": {}, "errors": []}
    texts = texts_of(data, tmp_path, monkeypatch)
    assert "big: refuted" in texts
    assert "ran" in texts
    assert "right" not in texts
    assert "killed: SIGSEGV" in texts
    assert not any("across" in text or "32 bits" in text or "same bits" in text for text in texts)


def test_the_same_record_gives_the_same_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'bigpool[plot]'")
    for name in ("one.svg", "two.svg"):
        figure.draw(made_record(), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    figure.draw(made_record(), tmp_path / "three.png")
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("f.pdf", {}, "--figure: expected a file that ends in .svg or .png, got f.pdf; both are drawn alike"),
        ("f.svg", {"runs": []}, "--figure: expected a record with a run at the top of a paged pool, got none; nothing is drawn"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path: Path, name: str, changes: dict[str, Any], text: str) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'bigpool[plot]'")
    with pytest.raises(ProofError) as caught:
        figure.draw(made_record(**changes), tmp_path / name)
    assert str(caught.value) == text
    assert not (tmp_path / name).exists()


# The command line, as far as it runs nothing.


def test_a_record_can_be_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(made_record(status=1, summary="refuted: 1 of 1 cases: big")))
    assert main(["prove", "--from-json", str(file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "refuted: 1 of 1 cases: big"


def test_a_picture_can_be_made_from_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'bigpool[plot]'")
    file = tmp_path / "r.json"
    file.write_text(json.dumps(made_record()))
    assert main(["prove", "--from-json", str(file), "--figure", str(tmp_path / "f.svg")]) == 0
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")
    assert main(["prove", "--from-json", str(file), "--figure", str(tmp_path / "f.pdf")]) == 2
    assert "--figure: expected a file that ends in .svg or .png, got f.pdf; both are drawn alike" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError) as caught:
        figure.check_target(tmp_path / "f.svg")
    assert str(caught.value) == ("--figure: expected matplotlib to be installed, got no such module; pip install 'bigpool[plot]'")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "tpu"], "--device: expected cpu, cuda or auto, got 'tpu'; auto takes the GPU if there is one"),
        (["--timeout", "0"], "--timeout: expected more than 0 seconds, got 0; the default is 300"),
        (["--json", "no/r.json"], "--json: expected a file in an existing folder, got no/r.json; make the folder first"),
        (
            ["k.py", "--from-json", "r.json"],
            "--from-json: expected no case file beside it, got k.py; a record holds its own cases",
        ),
        (
            ["--from-json", "r.json", "--case", "a"],
            "--from-json: expected no --case beside it, got both; leave it out, it would be ignored",
        ),
        (
            ["--mutants", "--json", "r.json"],
            "--mutants: expected no --json beside it, got both; leave it out, it would be ignored",
        ),
        (["--list", "--all"], "--list: expected no --all beside it, got both; leave it out, it would be ignored"),
        (
            ["--json", "/proc/r.json"],
            "--json: expected a file that can be written, got /proc/r.json: No such file or directory; name another one",
        ),
    ],
)
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["prove", *arguments]) == 2
    assert capsys.readouterr().err == f"error: bigpool prove: {text}\n"


def test_looking_whether_a_file_can_be_written_leaves_none(tmp_path: Path) -> None:
    assert main(["prove", "--json", str(tmp_path / "r.json"), "--timeout", "0"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_report_is_shown_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "r.json"
    file.write_text(json.dumps(made_record()))
    monkeypatch.setattr(Path, "write_text", lambda self, text: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main(["prove", "--from-json", str(file), "--json", str(tmp_path / "s.json")]) == 2
    shown = capsys.readouterr()
    assert "proven: 1 of 1 cases" in shown.out
    assert shown.err == "error: bigpool: No space left on device\n"


def test_help_has_examples_and_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "bigpool prove my_kernel.py --before git:HEAD~1" in text
    assert "Exit status: 0 proven, 1 refuted or without power, 2 could not run, 130 interrupted." in text
