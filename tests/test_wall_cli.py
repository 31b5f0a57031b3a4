from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

import bigpool
from bigpool import cli
from bigpool.errors import PoolError

SRC = Path(bigpool.__file__).parents[1]
ORIGINAL = ["wall", "--page-size", "880", "--kv-heads", "4", "--head-dim", "256"]


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    status = cli.main(args)
    return status, *capsys.readouterr()


# What it says.


def test_the_original_wall(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *ORIGINAL, "--dtype", "bf16")
    assert (status, err) == (0, "")
    assert out == (
        "bf16 pages of 880 tokens x 4 KV heads x 256, NHD, K and V in a pool each\n"
        "\n"
        "stride  elements      bytes\n"
        "page     901,120  1,802,240\n"
        "slot       1,024      2,048\n"
        "head         256        512\n"
        "\n"
        "element offsets      first bad page  slot  head  dim      token           byte\n"
        "added one at a time           2,384     0     0    0  2,097,920  4,296,540,160\n"
        "summed in int32               2,383   112     0    0  2,097,152  4,294,967,296\n"
        "\n"
        "layers on one page id  wall, added one at a time  wall, summed in int32\n"
        "1                                       8.01 GiB               8.01 GiB\n"
        "5                                      40.04 GiB              40.02 GiB\n"
        "8                                      64.06 GiB              64.03 GiB\n"
        "16                                    128.11 GiB             128.05 GiB\n"
    )


def test_interleaved_with_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *ORIGINAL, "--interleaved", "--group-size", "5", "--group-size", "8", "--pool", "24 gib")
    assert (status, err) == (0, "")
    assert out == (
        "bf16 pages of 880 tokens x 4 KV heads x 256, NHD, K then V in each page\n"
        "\n"
        "stride   elements      bytes\n"
        "page    1,802,240  3,604,480\n"
        "slot        1,024      2,048\n"
        "head          256        512\n"
        "\n"
        "element offsets      first bad page  slot  head  dim      token           byte\n"
        "added one at a time           1,192     0     0    0  1,048,960  4,296,540,160\n"
        "summed in int32               1,192     0     0    0  1,048,960  4,296,540,160\n"
        "\n"
        "layers on one page id  wall, added one at a time  wall, summed in int32\n"
        "5                                      20.03 GiB              20.03 GiB\n"
        "8                                      32.04 GiB              32.04 GiB\n"
        "\n"
        "5 layers, 1,429 pages, 24.00 GiB: crosses the wall\n"
        "8 layers, 893 pages, 24.00 GiB: stays below the wall\n"
    )


def test_every_layout_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--dtype int8 --inline-scales --kv-layout HND --interleaved row --pad 4 --byte-offsets --group-size 1"
    status, out, err = run(capsys, *ORIGINAL, *options.split())
    assert (status, err) == (0, "")
    assert out == (
        "int8 pages of 880 tokens x 4 KV heads x 256 + fp32 scale + 4 pad, HND, K then V in each row\n"
        "\n"
        "stride   elements      bytes\n"
        "page    1,858,560  1,858,560\n"
        "slot          528        528\n"
        "head      464,640    464,640\n"
        "\n"
        "byte offsets         first bad page  slot  head  dim      token           byte\n"
        "added one at a time           1,156     0     0    0  1,017,280  2,148,495,360\n"
        "summed in int32               1,155     0     2    0  1,016,400  2,147,566,080\n"
        "\n"
        "layers on one page id  wall, added one at a time  wall, summed in int32\n"
        "1                                       2.01 GiB               2.01 GiB\n"
    )


@pytest.mark.parametrize(
    ("pages", "verdict"),
    [
        ("2383", "stays below the wall"),
        ("2384", "crosses the wall where offsets are summed in int32"),
        ("2385", "crosses the wall"),
    ],
)
def test_verdicts(capsys: pytest.CaptureFixture[str], pages: str, verdict: str) -> None:
    status, out, _ = run(capsys, *ORIGINAL, "--group-size", "1", "--pages", pages)
    assert status == 0
    assert re.fullmatch(rf"1 layer, {int(pages):,} pages, 8\.\d\d GiB: {verdict}", out.splitlines()[-1])


def test_a_pool_of_the_size_that_is_shown_crosses(capsys: pytest.CaptureFixture[str]) -> None:
    for shown, verdict in [("64.06GiB", "crosses the wall"), ("64.03GiB", "crosses the wall where")]:
        _, out, _ = run(capsys, *ORIGINAL, "--group-size", "8", "--pool", shown)
        assert f": {verdict}" in out


def test_int4_elements(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *ORIGINAL, "--dtype", "int4")
    assert out.splitlines()[0] == ("int4 (2 in an element) pages of 880 tokens x 4 KV heads x 256, NHD, K and V in a pool each")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *ORIGINAL, "--group-size", "8", "--pages", "2384", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "schema": "bigpool-wall/1",
        "layout": {
            "page_size": 880,
            "num_kv_heads": 4,
            "head_dim": 256,
            "dtype": "bf16",
            "kv_layout": "NHD",
            "interleaved": False,
            "pad": 0,
            "inline_scales": False,
        },
        "strides": {
            "page": {"elements": 901_120, "bytes": 1_802_240},
            "slot": {"elements": 1_024, "bytes": 2_048},
            "head": {"elements": 256, "bytes": 512},
        },
        "kv_page_bytes": 3_604_480,
        "offsets_in": "element",
        "walls": [
            {
                "form": "separate",
                "unit": "element",
                "page": 2_384,
                "slot": 0,
                "head": 0,
                "dim": 0,
                "token": 2_097_920,
                "element": 2_148_270_080,
                "byte": 4_296_540_160,
            },
            {
                "form": "summed",
                "unit": "element",
                "page": 2_383,
                "slot": 112,
                "head": 0,
                "dim": 0,
                "token": 2_097_152,
                "element": 2_147_483_648,
                "byte": 4_294_967_296,
            },
        ],
        "groups": [
            {
                "group_size": 8,
                "pool_bytes_at_wall": {"separate": 68_773_478_400, "summed": 68_744_642_560},
                "pool": {
                    "num_pages": 2_384,
                    "pool_bytes": 68_744_642_560,
                    "crosses": {"separate": False, "summed": True},
                },
            }
        ],
    }


def test_json_without_a_pool_names_the_same_keys(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *ORIGINAL, "--interleaved", "--json")
    answer = json.loads(out)
    assert answer["layout"]["interleaved"] == "page"
    assert [group["group_size"] for group in answer["groups"]] == [1, 5, 8, 16]
    assert [group["pool"] for group in answer["groups"]] == [None] * 4


# How it complains.


def test_every_fault_of_a_command_line_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(
        capsys,
        *("wall", "--kv-heads", "0", "--head-dim", "2.5", "--dtype", "bfloat16", "--kv-layout", "nhd", "--pad", "-1"),
        *("--interleaved=rows", "--group-size", "x", "--pool", "24", "--pages", "0"),
    )
    assert (status, out) == (2, "")
    assert err == (
        "error: bigpool wall: 11 faults\n"
        "  --page-size: expected an integer of 1 or more, got nothing; pass the tokens in a page, such as 16\n"
        "  --kv-heads: expected an integer of 1 or more, got 0; pass the KV heads on one device, such as 8\n"
        "  --head-dim: expected an integer of 1 or more, got '2.5'; pass the values in a row of K, such as 128\n"
        "  --dtype: expected one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, int4, got 'bfloat16'; pass bf16\n"
        "  --kv-layout: expected NHD or HND, got 'nhd'; "
        "pass NHD for [page_size, num_kv_heads, head_dim] pages, HND for [num_kv_heads, page_size, head_dim]\n"
        "  --interleaved: expected page, row or nothing, got 'rows'; "
        "pass page if a page holds K then V, row if a row of K is followed by the row of V\n"
        "  --pad: expected an integer of 0 or more, got -1; pass the stored elements after each row that hold nothing\n"
        "  --group-size: expected an integer of 1 or more, got 'x'; "
        "pass the layers that share one space of page ids, such as 8\n"
        "  --pool: expected a number and a unit, such as 24GiB or 24GB, got '24'; "
        "pass the bytes of K and V of all layers that share the page ids\n"
        "  --pages: expected an integer of 1 or more, got 0; pass the pages of the pool\n"
        "  --pages: expected either --pool or --pages, got both; leave one of them out\n"
    )


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            ["walls"],
            "bigpool: COMMAND: expected one of audit, bench, prove, report, rule, sweep, tune, wall, got 'walls'; "
            "see bigpool --help",
        ),
        (["--loud"], "bigpool: --loud: expected an option of bigpool, got an unknown one; see bigpool --help"),
        (
            [*ORIGINAL, "--head-dims", "3"],
            "bigpool wall: --head-dims: expected an option of bigpool wall, got an unknown one; did you mean --head-dim?",
        ),
        (
            [*ORIGINAL, "--pols", "1GiB"],
            "bigpool wall: --pols: expected an option of bigpool wall, got an unknown one; did you mean --pool?",
        ),
        ([*ORIGINAL, "--pool"], "bigpool wall: --pool: expected a value, got nothing; see bigpool wall --help"),
        ([*ORIGINAL, "--json=1"], "bigpool wall: --json: expected no value, got one; see bigpool wall --help"),
        (
            [*ORIGINAL, "--pages", "1" * 19],
            f"bigpool wall: --pages: expected an integer of at most 18 digits, got '{'1' * 19}'; pass the pages of the pool",
        ),
        (
            [*ORIGINAL, "--pool", "0GiB"],
            "bigpool wall: --pool: expected a size of 1 byte or more, got '0GiB'; "
            "pass the bytes of K and V of all layers that share the page ids",
        ),
        ([*ORIGINAL, "1", "2"], "bigpool wall: arguments: expected no more, got 1 2; see bigpool wall --help"),
        (
            [*ORIGINAL, "--page-size", "9" * 30],
            f"bigpool wall: --page-size: expected an integer of 1 or more, got '{'9' * 30}'; "
            "pass the tokens in a page, such as 16",
        ),
        (
            [*ORIGINAL, "--page-size", "1048576"],
            "bigpool wall: --page-size: expected a page of fewer than 2^31 bytes (it has 2,147,483,648), got 1048576; "
            "pass fewer tokens to a page",
        ),
        (
            [*ORIGINAL, "--inline-scales"],
            "bigpool wall: --inline-scales: expected False for bf16, got True; "
            "leave it out, or pass a dtype that has scales, such as int8",
        ),
    ],
)
def test_texts_of_errors(capsys: pytest.CaptureFixture[str], args: list[str], text: str) -> None:
    if "1048576" in args:
        args = [*args, "--kv-heads", "8", "--head-dim", "128"]
    status, out, err = run(capsys, *args)
    assert (status, out, err) == (2, "", f"error: {text}\n")


def plant(monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    """Registers a subcommand `planted` that returns or raises an outcome."""

    def body() -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setitem(cli.SUBCOMMANDS, "planted", "For a test.")
    command = click.Command("planted", callback=body)
    monkeypatch.setitem(sys.modules, "bigpool.cli.planted", SimpleNamespace(planted=command))


@pytest.mark.parametrize(
    ("outcome", "status", "err"),
    [
        (None, 0, ""),
        (1, 1, ""),
        (PoolError("no room\n  at all"), 2, "error: no room\n  at all\n"),
        (click.ClickException("as click has it"), 2, "error: as click has it\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (click.Abort(), 130, "error: interrupted\n"),
        (
            ModuleNotFoundError("No module named 'torch._C'", name="torch._C"),
            2,
            "error: bigpool: expected torch to be installed, got no such module; "
            "pip install 'bigpool[kernels]' on a machine with an NVIDIA GPU, 'bigpool[cpu]' on any other\n",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_outcomes_of_a_subcommand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outcome: Any, status: int, err: str
) -> None:
    plant(monkeypatch, outcome)
    assert run(capsys, "planted") == (status, "", err)


# Exit status 1 means refuted, so nothing else may end with it.


@pytest.mark.parametrize("bug", [ValueError("a bug\nof ours"), ModuleNotFoundError("a bug of ours", name="bigpool.gone")])
def test_our_own_bugs_are_one_line_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bug: Exception
) -> None:
    plant(monkeypatch, bug)
    monkeypatch.delenv("BIGPOOL_DEBUG", raising=False)
    text = f"error: bigpool: internal error, please report it: {type(bug).__name__}: a bug of ours; BIGPOOL_DEBUG=1 shows where\n"
    assert run(capsys, "planted") == (2, "", text)
    monkeypatch.setenv("BIGPOOL_DEBUG", "1")
    status, _, err = run(capsys, "planted")
    assert status == 2
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith(text)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FileNotFoundError(2, "No such file or directory", "f.svg"), "f.svg: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("odd"), "odd"),
    ],
    ids=["file", "space", "odd"],
)
def test_an_error_of_the_system_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, text: str
) -> None:
    plant(monkeypatch, error)
    assert run(capsys, "planted") == (2, "", f"error: bigpool: {text}\n")
