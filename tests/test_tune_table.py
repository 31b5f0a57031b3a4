"""Tables of configurations: what a plan takes from them, what it never takes, and how a malformed one is refused. No GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigpool import tuning_tables
from bigpool.errors import ArgumentError
from bigpool.tuning import (
    BATCH_SPLIT_TOKENS,
    INTERPRETER,
    DeviceProps,
    TunedKey,
    VerifyConfig,
    batch_splits,
    pick_verify_config,
    plan_verify,
    tuned_key,
)
from bigpool.tuning_tables import in_force, parse_table, trying, tuned_for
from bigpool.workspace import verify_scratch_bytes

RTX3090 = DeviceProps("NVIDIA GeForce RTX 3090", 86, 82, 99 * 1024)
RTX4090 = DeviceProps("NVIDIA GeForce RTX 4090", 89, 128, 99 * 1024)
H200 = DeviceProps("H200", 90, 132, 227 * 1024)
KEY = TunedKey(16, 128, 2, None, 16, False)
CONFIG = VerifyConfig(16, 16, 2, 4)
CALL = {"rows": 4, "head_dim_pad": 128, "itemsize": 2, "page_size": 16}
PLAN = {
    "num_reqs": 1, "max_seqlen_q": 1, "num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "itemsize": 2, "page_size": 16,
    "max_seq_len": 2**17,
}  # fmt: skip
REMEDY = "make the table with bigpool tune verify --out FILE"


@pytest.fixture(autouse=True)
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No table has been read, and none is named."""
    monkeypatch.delenv("BIGPOOL_TUNED", raising=False)
    tuned_for.cache_clear()
    yield
    tuned_for.cache_clear()


def pick(props: DeviceProps) -> VerifyConfig:
    """What a launch of CALL on that card picks."""
    return pick_verify_config(props, **CALL, tuned=in_force(props))


def table(**changes: Any) -> dict[str, Any]:
    names = ("name", "sm", "num_sms", "smem_bytes")
    entry = {**KEY._asdict(), "config": {"block_m": 16, "tile": 16, "num_warps": 2, "num_stages": 4}}
    made = {"schema": "bigpool-tuned/1", "card": {name: getattr(RTX3090, name) for name in names}, "entries": [entry]}
    return made | changes


def written(folder: Path, data: Any) -> str:
    file = folder / "card.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(file)


def test_a_named_table_is_used_on_its_card_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = pick(RTX3090)
    assert rule != CONFIG
    tuned_for.cache_clear()
    monkeypatch.setenv("BIGPOOL_TUNED", written(tmp_path, table()))
    assert pick(RTX3090) == CONFIG
    assert plan_verify(RTX3090, **PLAN, tuned=in_force(RTX3090)).config == CONFIG  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match=r"^BIGPOOL_TUNED: the table is of DeviceProps\(name='NVIDIA GeForce RTX 3090'"):
        assert pick(RTX4090) == pick_verify_config(RTX4090, **CALL, tuned={})


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 17},
        {"head_dim_pad": 64},
        {"itemsize": 4},
        {"page_size": 32},
        {"page_size": 1},
        {"kv_bytes": 1.0},
        {"heavy": True},
    ],
    ids=str,
)
def test_a_call_of_another_class_keeps_the_rule(changes: dict[str, Any]) -> None:
    tuned = {KEY: CONFIG}
    assert pick_verify_config(RTX3090, **CALL, tuned=tuned) == CONFIG
    call: dict[str, Any] = CALL | changes
    assert pick_verify_config(RTX3090, **call, tuned=tuned) == pick_verify_config(RTX3090, **call, tuned={})


@pytest.mark.parametrize(
    ("rows", "page_size", "expected"),
    [(1, 16, (16, 16)), (16, 12, (16, 16)), (17, 20, (32, 0)), (33, 880, (64, 128)), (129, 64, (256, 64)), (4_000, 48, (256, 64)),
     (8, 8, (16, 0)), (8, 32, (16, 32)), (8, 256, (16, 128))],
)  # fmt: skip
def test_classes_of_rows_and_pages(rows: int, page_size: int, expected: tuple[int, int]) -> None:
    key = tuned_key(rows, 128, 2, page_size, None, False)
    assert (key.rows, key.page_tile) == expected


def test_the_interpreter_is_never_changed_by_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = pick(INTERPRETER)
    monkeypatch.setenv("BIGPOOL_TUNED", written(tmp_path, "no table at all"))
    assert pick(INTERPRETER) == rule, "a CPU does not read the file"
    with trying({KEY: CONFIG}):
        assert pick(INTERPRETER) == CONFIG
    assert pick(INTERPRETER) == rule


def test_a_trial_goes_before_every_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGPOOL_TUNED", written(tmp_path, table()))
    other = VerifyConfig(16, 32, 8, 2)
    with trying({KEY: other}):
        assert pick(RTX3090) == other
    with trying({}):
        assert pick(RTX3090) == pick_verify_config(RTX3090, **CALL, tuned={})
    assert pick(RTX3090) == CONFIG


def test_the_file_is_read_once_and_not_at_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, table())
    monkeypatch.setenv("BIGPOOL_TUNED", file)
    assert pick(RTX3090) == CONFIG
    Path(file).unlink()
    assert pick(RTX3090) == CONFIG
    code = "import os; os.environ['BIGPOOL_TUNED'] = '/nowhere'; import bigpool, bigpool.tuning, bigpool.workspace"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_workspace_that_was_sized_before_holds_what_a_table_asks_for() -> None:
    """Splits are bounded by those of pages of one slot, which workspaces are sized for; and the bound binds."""
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    key = tuned_key(4, 128, 2, 880, None, False)
    rule = plan_verify(H200, **(PLAN | {"page_size": 880}), tuned={})  # type: ignore[arg-type]
    lean, fat = VerifyConfig(16, 16, 4, 2), VerifyConfig(16, 64, 4, 6)
    for tuned in ({key: lean}, {tuned_key(4, 128, 2, 1, None, False): fat}):
        sized = plan_verify(H200, **(PLAN | {"page_size": 1, "max_seq_len": 2**31}), tuned=tuned)  # type: ignore[arg-type]
        for heavy in (False, True):
            plan = plan_verify(H200, **(PLAN | {"page_size": 880}), tuned=tuned, heavy=heavy)  # type: ignore[arg-type]
            assert plan.num_splits <= sized.num_splits
    fat_everywhere = plan_verify(H200, **PLAN | {"page_size": 880}, tuned={tuned_key(4, 128, 2, 1, None, False): fat})  # type: ignore[arg-type]
    assert fat_everywhere.num_splits < rule.num_splits
    with trying({}):
        needed = verify_scratch_bytes(H200, max_num_reqs=1, max_seqlen_q=1, **sizes)
    assert needed >= 4 * rule.num_splits * 32 * (128 + 4)


def test_without_tables_plans_are_what_they_were() -> None:
    for props in (RTX3090, RTX4090, H200):
        for page_size in (1, 16, 880):
            for heavy in (False, True):
                call: dict[str, Any] = PLAN | {"page_size": page_size, "heavy": heavy}
                assert plan_verify(props, **call, tuned=in_force(props)) == plan_verify(props, **call)


@pytest.mark.parametrize("tile", [16, 32, 64, 128])
def test_every_tile_divides_the_splits_of_the_batch_mode(tile: int) -> None:
    assert batch_splits(10_000, 880, tile)[0] * tile == BATCH_SPLIT_TOKENS
    assert set(tuning_tables._CONFIG["tile"]) == {16, 32, 64, 128}


def test_shipped_tables_load_and_a_named_one_goes_before_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = sorted(tuning_tables.SHIPPED_TABLES.glob("*.json"))
    assert (tuning_tables.SHIPPED_TABLES / "README.md").is_file()
    for path in shipped:
        assert parse_table(path.read_text(), path.name)[1]
    folder = tmp_path / "tuned"
    folder.mkdir()
    ours = table()
    ours["entries"] = [*ours["entries"], {**KEY._replace(rows=32)._asdict(), "config": ours["entries"][0]["config"]}]
    (folder / "3090.json").write_text(json.dumps(ours))
    monkeypatch.setattr(tuning_tables, "SHIPPED_TABLES", folder)
    named = table()
    named["entries"][0]["config"]["num_warps"] = 8
    monkeypatch.setenv("BIGPOOL_TUNED", written(tmp_path, named))
    assert tuned_for(RTX3090) == {KEY: VerifyConfig(16, 16, 8, 4), KEY._replace(rows=32): CONFIG}


def fault_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any) -> str:
    monkeypatch.setenv("BIGPOOL_TUNED", written(tmp_path, data))
    with pytest.raises(ArgumentError) as caught:
        pick(RTX3090)
    with pytest.raises(ArgumentError):
        pick(RTX3090)
    return str(caught.value)


def entry(**changes: Any) -> dict[str, Any]:
    made = table()["entries"][0]
    config = made["config"] | {name: changes.pop(name) for name in list(changes) if name in made["config"]}
    return {**made, **changes, "config": config}


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("{", "file: expected JSON, got Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ([], "schema: expected 'bigpool-tuned/1', got nothing"),
        (table(schema="bigpool-tuned/2"), "schema: expected 'bigpool-tuned/1', got 'bigpool-tuned/2'"),
        (table(entries={}), "entries: expected a list, got {}"),
        (table(entries=[entry(tile=48)]), "entries[0].config.tile: expected one of 16, 32, 64, 128, got 48"),
        (table(entries=[entry(rows=True)]), "entries[0].rows: expected one of 16, 32, 64, 128, 256, got True"),
        (table(entries=[entry(num_warps=True)]), "entries[0].config.num_warps: expected one of 1, 2, 4, 8, 16, got True"),
        (table(entries=[entry(num_warps=4.0)]), "entries[0].config.num_warps: expected one of 1, 2, 4, 8, 16, got 4.0"),
        (table(op="prefill_attention"), "op: expected 'verify_attention', got 'prefill_attention'"),
        (table(refusals=["moved"]), "refusals: expected no entries of a run whose numbers were refused, got ['moved']"),
        (table(entries=[entry(heavy=0)]), "entries[0].heavy: expected one of False, True, got 0"),
        (table(entries=[entry(kv_bytes="int8")]), "entries[0].kv_bytes: expected one of None, 0.5, 1.0, got 'int8'"),
        (table(entries=[entry(), entry()]), "entries[1]: expected a key once, got that of an entry before it"),
        (
            table(entries=[entry(block_m=128, tile=128, num_stages=4)]),
            "entries[0].config: expected at most 101376 bytes of shared memory, got 294912",
        ),
        (table(card={"name": "x", "sm": 86, "num_sms": 82, "smem_bytes": 1.5}), "card.smem_bytes: expected int, got 1.5"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, fault: str) -> None:
    assert fault_of(tmp_path, monkeypatch, data) == f"BIGPOOL_TUNED: {fault}; {REMEDY}"


def test_deep_nesting_is_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_of(tmp_path, monkeypatch, "[" * 200_000).startswith("BIGPOOL_TUNED: file: expected JSON, got maximum recursion")


def test_all_faults_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = fault_of(tmp_path, monkeypatch, table(entries=[entry(tile=48, rows=17), "x"])).splitlines()
    assert said[0] == f"BIGPOOL_TUNED: {2 + 6 + 4} faults"
    assert said[1] == f"  entries[0].rows: expected one of 16, 32, 64, 128, 256, got 17; {REMEDY}"
    assert said[3].startswith("  entries[1].rows: expected one of 16, 32, 64, 128, 256, got nothing; ")
    no_card = fault_of(tmp_path, monkeypatch, table(card=None)).splitlines()
    assert no_card[1] == f"  card.name: expected str, got nothing; {REMEDY}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "nowhere.json"
    monkeypatch.setenv("BIGPOOL_TUNED", str(missing))
    with pytest.raises(ArgumentError) as caught:
        tuned_for(RTX3090)
    assert str(caught.value) == (
        f"BIGPOOL_TUNED: file: expected one that can be read, got {missing}: No such file or directory; {REMEDY}"
    )
    missing.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"got .*nowhere.json: UnicodeDecodeError; "):
        tuned_for(RTX3090)
