"""What launches keep: TTIR in files; and what int32 would do where int64 was passed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import audit_launched as kernels
from bigpool.audit import Options, capture
from bigpool.audit.finding import Severity
from bigpool.audit.launch import cache
from bigpool.audit.launch.capture import Capture


def launched(dtype: torch.dtype = torch.int32, *, stride: int = 0) -> Capture:
    pool = torch.empty(66, 880, 4, 256, dtype=torch.bfloat16, device="meta")
    table = torch.zeros(32, dtype=dtype, device="meta")
    out = torch.empty(32, 128, dtype=torch.bfloat16, device="meta")
    with capture(execute=False) as found:
        kernels.gather_pages[(32,)](out, pool, table, stride or pool.stride(0), BLOCK=128)
    return found


def test_a_second_audit_compiles_nothing(tmp_path: Path) -> None:
    options = Options(cache=tmp_path / "ttir")
    first = launched().report(options)
    (file,) = (tmp_path / "ttir").iterdir()
    assert file.suffix == ".ttir"
    second = launched().report(options)
    assert [(item.rule, item.wall) for item in second.findings] == [(item.rule, item.wall) for item in first.findings]
    assert len(second.faults) == 1
    file.write_text(file.read_text().replace("arith.muli", "arith.addi"))
    assert launched().report(options).faults == [], "what the file holds is what is audited"


def test_another_specialisation_has_another_file(tmp_path: Path) -> None:
    options = Options(cache=tmp_path)
    launched().report(options)
    launched(torch.int64).report(options)
    launched(stride=7).report(options)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(launched().report(Options(cache=tmp_path / "file" / "below")).faults) == 1


def test_old_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_FILES", 2)
    for place in range(3):
        file = tmp_path / f"{place}.ttir"
        cache._write(file, str(place))
        os.utime(file, (place, place)) if file.exists() else None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.ttir", "2.ttir"]


def test_where_files_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BIGPOOL_CACHE", str(tmp_path))
    assert cache.default_folder() == tmp_path / "ttir"
    monkeypatch.setenv("BIGPOOL_CACHE", "0")
    assert cache.default_folder() is None
    monkeypatch.delenv("BIGPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "bigpool" / "ttir"


def test_what_int32_would_do_is_a_note() -> None:
    found = launched(torch.int64)
    assert found.report().findings == []
    (note,) = found.report(Options(variants=True)).findings
    assert (note.rule, note.severity) == ("BP101", Severity.NOTE)
    assert "only where a caller passes int32: today table_ptr holds int64" in note.notes
    assert [item.severity for item in launched().report(Options(variants=True)).findings] == [Severity.ERROR]
