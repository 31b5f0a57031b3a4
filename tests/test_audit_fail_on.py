"""`--fail-on`: which findings make exit status 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import HEADER
from bigpool.audit import Options, Report, audit
from bigpool.audit.finding import FAIL_ON, Confidence
from bigpool.cli import main

# Nothing is known about what `elsewhere` returns: a finding of low confidence.
LOW = "from elsewhere import index\n@triton.jit\ndef low(x_ptr, stride):\n    tl.store(x_ptr + index(1) * stride, 1.0)\n"
HIGH = (
    "@triton.jit\ndef high(x_ptr, n, stride, BLOCK: tl.constexpr):\n    cols = tl.arange(0, BLOCK)\n"
    "    tl.store(x_ptr + tl.program_id(0) * stride + cols, 1.0, mask=cols < n)\n"
)


def audited(path: Path, text: str, fail_on: str) -> Report:
    path.write_text(HEADER + text)
    return audit([path], Options(fail_on=FAIL_ON[fail_on]))


@pytest.mark.parametrize(
    ("text", "confidence", "statuses"),
    [
        (LOW, Confidence.LOW, {"low": 1, "medium": 0, "high": 0, "never": 0}),
        (HIGH, Confidence.HIGH, {"low": 1, "medium": 1, "high": 1, "never": 0}),
        (LOW + HIGH, None, {"low": 1, "medium": 1, "high": 1, "never": 0}),
    ],
    ids=["low", "high", "both"],
)
def test_the_confidence_that_counts(tmp_path: Path, text: str, confidence: Confidence | None, statuses: dict[str, int]) -> None:
    for fail_on, status in statuses.items():
        report = audited(tmp_path / "k.py", text, fail_on)
        assert report.status == status, fail_on
        assert len(report.faults) == (1 if confidence is not None else 2), "all are reported"
        assert confidence is None or report.faults[0].confidence is confidence


def test_what_cannot_be_audited_is_still_2(tmp_path: Path) -> None:
    assert audit([tmp_path / "missing.py"], Options(fail_on=None)).status == 2


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "k.py").write_text(HEADER + LOW)
    assert main(["audit", str(tmp_path / "k.py")]) == 1
    assert main(["audit", str(tmp_path / "k.py"), "--fail-on", "medium"]) == 0
    assert "warning[BP" in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "k.py"), "--fail-on", "some"]) == 2
    text = "--fail-on: expected one of low, medium, high, never, got 'some'; low counts every finding"
    assert capsys.readouterr().err == f"error: bigpool audit: {text}\n"
