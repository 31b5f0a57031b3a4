"""Files that are no record, of another version, or damaged: each is named, with what to do."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigpool.errors import ReportError
from bigpool.report import kinds
from bigpool.report.read import read
from test_report import SPEED, load, save

WANTED, GIVE = "expected a record, a JSON file that bigpool wrote, got", "give the file of --json"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", f"{WANTED} no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1); {GIVE}"),
        ('{"schema": "bigpool-bench/1", "seconds": NaN}', f"{WANTED} no JSON: NaN is no JSON number; {GIVE}"),
        ("[" * 100_000, f"{WANTED} JSON that is nested too deep; {GIVE}"),
        (b"\xff\xfe", f"{WANTED} bytes that are no UTF-8; {GIVE}"),
        ('{"schema": "bigpool-bench/2"}', "expected bigpool-bench/1, got the newer bigpool-bench/2; update bigpool"),
        (
            '{"schema": "bigpool-bench/0"}',
            "expected bigpool-bench/1, got the older bigpool-bench/0; make it anew with bigpool bench verify --json",
        ),
        (
            '{"schema": "bigpool-proof/1"}',
            "expected a record that follows bigpool-proof/1, got $: 'bigpool' is a required property; "
            "make it anew with bigpool prove --json",
        ),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ReportError) as caught:
        read(path)
    assert str(caught.value) == f"{path}: {said}"


@pytest.mark.parametrize("content", ["[]", "3", "null", '{"schema": 3}', '{"schema": "bigpool-triage/1"}', '{"schema": "x"}'])
def test_a_file_of_somebody_else_is_named(tmp_path: Path, content: str) -> None:
    data = json.loads(content)
    path = save(data, tmp_path / "other.json")
    got = data["schema"] if isinstance(data, dict) else None
    with pytest.raises(ReportError) as caught:
        read(path)
    known = ", ".join(kind.schema for kind in kinds.every().values())
    assert str(caught.value) == f"{path}: expected a record of {known}, got schema {got!r}; leave this file out"


def damage(how: str) -> Callable[[Any], None]:
    def cut(data: Any) -> None:
        del data["shapes"][0]["gates"]

    def text(data: Any) -> None:
        data["shapes"][0]["speeds"]["ours"]["seconds"] = "27 us"

    def more(data: Any) -> None:
        data["surprise"] = 1

    return {"cut": cut, "text": text, "more": more}[how]


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("cut", "$.shapes[0]: 'gates' is a required property"),
        ("text", "$.shapes[0].speeds.ours.seconds: '27 us' is not of type 'number'"),
        ("more", "$: Additional properties are not allowed ('surprise' was unexpected)"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, how: str, fault: str) -> None:
    data = copy.deepcopy(load(SPEED))
    damage(how)(data)
    with pytest.raises(ReportError) as caught:
        read(save(data, tmp_path / "bad.json"))
    remedy = "make it anew with bigpool bench verify --json"
    assert str(caught.value) == f"{tmp_path / 'bad.json'}: expected a record that follows bigpool-bench/1, got {fault}; {remedy}"
