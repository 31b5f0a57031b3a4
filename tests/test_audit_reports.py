"""The formats of `bigpool audit`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jsonschema
import pytest

from audit_texts import HEADER, audited
from bigpool.audit import Report, audit
from bigpool.audit.report import FORMATS, jsonfile
from sarif_subset import SUBSET

BODY = """
    @triton.jit
    def gather(k_ptr, block_table_ptr, out_ptr, stride_k_page, N: tl.constexpr):
        offs = tl.program_id(1)
        page = tl.load(block_table_ptr + offs)
        # Text with two bytes a character: é
        offs_n = tl.arange(0, N)
        k_off = page * stride_k_page + offs_n
        tl.store(out_ptr + offs_n, tl.load(k_ptr + k_off))
"""


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(tmp_path)
    return audited(Path(), BODY, "stride_k_page = 901_120")


def test_full(report: Report) -> None:
    assert "\n".join(FORMATS["full"](report, False)) == (
        "error[BP101]: 32-bit page index multiplied by a stride\n"
        "  --> kernels.py:11:13\n"
        " 8 |     page = tl.load(block_table_ptr + offs)\n"
        "   |            ------------------------------- int32 from here, if the tensor holds int32\n"
        "11 |     k_off = page * stride_k_page + offs_n\n"
        "   |             ^^^^^^^^^^^^^^^^^^^^ evaluated in 32 bits\n"
        "   = wall: page 2,384 at stride_k_page = 901,120 (a tensor of 4.00 GiB, if an element has 2 bytes)\n"
        "   = fix: widen at the load: tl.load(...).to(tl.int64)   (safe, --fix)\n"
        "   = note: assumed: block_table_ptr holds int32\n"
        "   = in: gather, confidence medium\n"
        "\n"
        "1 kernel in 1 file audited: 1 error, 0 warnings, 0 notes\n"
        "  assumed: the 32-bit variant of every scalar; index tensors of unknown type hold non-negative int32; usual tiles\n"
        "  assumed: stride_k_page = 901_120, for 2 values"
    )


def test_concise(report: Report) -> None:
    first = next(iter(FORMATS["concise"](report, False)))
    assert first == (
        "kernels.py:11:13: error[BP101] 32-bit page index multiplied by a stride; "
        "wall: page 2,384 at stride_k_page = 901,120 (a tensor of 4.00 GiB, if an element has 2 bytes)"
    )


def test_github(report: Report) -> None:
    first = next(iter(FORMATS["github"](report, False)))
    assert first.startswith("::error file=kernels.py,line=11,endLine=11,col=13,endColumn=33,title=BP101::32-bit page index")


def test_json(report: Report) -> None:
    data = json.loads("\n".join(FORMATS["json"](report, False)))
    assert (data["schema"], data["status"], data["kernels"], data["files"]) == ("bigpool-audit/1", 1, 1, 1)
    (finding,) = data["findings"]
    assert finding["span"] == {"file": "kernels.py", "line": 11, "col": 13, "end_line": 11, "end_col": 33}
    assert (finding["rule"], finding["severity"], finding["confidence"]) == ("BP101", "error", "medium")
    assert (finding["wall"]["variable"], finding["wall"]["value"], finding["wall"]["tensor_bytes"]) == ("page", 2384, 2**32)
    assert finding["fix"] == {"title": "widen at the load: tl.load(...).to(tl.int64)", "safe": True}


@pytest.mark.parametrize("notes", [False, True])
def test_json_keeps_to_its_schema(report: Report, notes: bool) -> None:
    schema = json.loads((Path(jsonfile.__file__).parent / "audit.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads("\n".join(FORMATS["json"](report, notes))), schema)


def test_sarif(report: Report) -> None:
    data = json.loads("\n".join(FORMATS["sarif"](report, False)))
    assert data["version"] == "2.1.0"
    (run,) = data["runs"]
    rules = run["tool"]["driver"]["rules"]
    (result,) = run["results"]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "BP101"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "kernels.py"
    assert place["region"] == {"startLine": 11, "startColumn": 13, "endLine": 11, "endColumn": 33}
    assert result["level"] == "error"
    assert list(result["partialFingerprints"]) == ["bigpool/1"]


@pytest.mark.parametrize("notes", [False, True])
def test_sarif_is_valid(tmp_path: Path, notes: bool) -> None:
    given = os.environ.get("BIGPOOL_SARIF_SCHEMA")
    schema = json.loads(Path(given).read_text("utf-8")) if given else SUBSET
    validator = jsonschema.validators.validator_for(schema)(schema)
    report = audit([Path(__file__).parent / "audit_cases", tmp_path / "missing.py"])
    data = json.loads("\n".join(FORMATS["sarif"](report, notes)))
    assert [error.message for error in validator.iter_errors(data)] == []
    run = data["runs"][0]
    assert len(run["results"]) > 100
    assert run["invocations"][0]["toolExecutionNotifications"], "the missing file is named"
    run["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    assert not validator.is_valid(data)


def test_sarif_addresses_are_uris(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a %#é.py").write_text(
        HEADER + "@triton.jit\ndef f(p, stride):\n    tl.store(p + tl.program_id(0) * stride, 1.0)\n", "utf-8"
    )
    data = json.loads("\n".join(FORMATS["sarif"](audit([Path("a %#é.py")]), False)))
    place = data["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "a%20%25%23%C3%A9.py"


def test_columns_count_characters(tmp_path: Path) -> None:
    body = "@triton.jit\ndef f(x_ptr, stride):\n    é = tl.program_id(0); tl.store(x_ptr + é * stride, 1.0)\n"
    (finding,) = audited(tmp_path, body).faults
    line = (tmp_path / "kernels.py").read_text("utf-8").splitlines()[finding.primary.span.line - 1]
    assert line[finding.primary.span.col - 1 : finding.primary.span.end_col - 1] == "é * stride"
