"""Servers in turn, against a server without a model: verdicts, refusals, and nothing left running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bigpool.bench.serving import MIN_ROUNDS, record, runner
from bigpool.bench.serving.arms import read
from bigpool.bench.serving.client import _counter
from bigpool.bench.serving.prompts import Prompts
from bigpool.bench.serving.runner import RESTART, TOGETHER, starts_of
from bigpool.bench.stats import MIN_ROUNDS as OF_STATS
from bigpool.cli import main
from bigpool.errors import ArgumentError

FAKE = Path(__file__).with_name("serving_fake.py")
COMMAND = f"{sys.executable} {FAKE} {{port}}"
QUICK = ("--repeats", "8", "--inner", "1")
DECODE = (*QUICK, "--streams", "2", "--decode-tokens", "6")
PREFILL = (*QUICK, "--prefill", "64")


def arm(folder: Path, name: str, command: str = COMMAND, **env: object) -> str:
    """An env file; returns its path."""
    path = folder / f"{name}.env"
    lines = [f"BIGPOOL_COMMAND={command}" if command else "", *(f"{key}={value}" for key, value in env.items())]
    path.write_text("\n".join(lines))
    return str(path)


def bench(folder: Path, *args: str) -> tuple[int, Any]:
    """(exit status, record) of bigpool bench serving."""
    out = folder / "serving.json"
    out.unlink(missing_ok=True)
    status = main(["bench", "serving", *args, "--json", str(out)])
    return status, json.loads(out.read_text()) if out.exists() else None


def verdict_of(data: Any, name: str) -> str:
    assert data["refusals"] == []
    return str(data["measures"][0]["verdicts"][name]["word"])


def running(pids: Path) -> list[int]:
    """Which of the processes that the fake server wrote down still run."""
    found = []
    for pid in map(int, pids.read_text().split()):
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            found.append(pid)
    return found


def test_two_like_servers_have_no_cost_that_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Sleeps on a busy machine are no clock: what is asked is that nothing large is seen where nothing is.
    status, data = bench(tmp_path, "--arm", arm(tmp_path, "a"), "--arm", arm(tmp_path, "b"), *DECODE, "--margin", "20")
    assert status == 0
    assert verdict_of(data, "b") in ("no cost", "undecided")
    jsonschema.validate(data, json.loads(record.SCHEMA_FILE.read_text()))
    assert {name: len(rows) for name, rows in data["measures"][0]["samples"].items()} == {"a": 8, "a again": 8, "b": 8}
    out = capsys.readouterr().out
    assert re.search(r"decode 2x6 +a +33 +- +[\d,.]+ +[\d,.]+ +not reported", out)


def test_a_slower_server_is_called_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = arm(tmp_path, "slow", FAKE_STEP=0.02, FAKE_PREFILL=0.05)
    status, data = bench(tmp_path, "--arm", arm(tmp_path, "a"), "--arm", slow, *DECODE, "--prefill", "64", "--no-aa")
    assert status == 0
    prefill, decode = data["measures"]
    assert (prefill["verdicts"]["slow"]["word"], decode["verdicts"]["slow"]["word"]) == ("slower", "slower")
    assert decode["speeds"]["slow"]["per_second"] < 2 / 0.02 < decode["speeds"]["a"]["per_second"]
    assert decode["speeds"]["slow"]["per_second_of_a_stream"] < 1 / 0.02
    assert prefill["speeds"]["slow"]["seconds"] > 0.05
    assert prefill["speeds"]["a"]["prompt_tokens"] == 65
    assert "prefill 64: slow against a: slower by" in capsys.readouterr().out
    assert "no A/A run, so the noise is the margin alone" in data["notes"]


@pytest.mark.parametrize("mode", [TOGETHER, RESTART])
def test_order_and_starts(tmp_path: Path, mode: str) -> None:
    pids = tmp_path / "pids"
    a, b = arm(tmp_path, "a", FAKE_PIDS=pids), arm(tmp_path, "b", FAKE_PIDS=pids)
    status, data = bench(tmp_path, "--arm", a, "--arm", b, *PREFILL, "--mode", mode, "--no-aa")
    assert status == 0
    starts = {made["name"]: made["starts"] for made in data["arms"]}
    # A B B A, then B A A B: one that runs twice in a row within a round is kept.
    assert starts == ({"a": 1, "b": 1} if mode == TOGETHER else {"a": 12, "b": 12})
    assert sum(starts.values()) == starts_of(mode, ["a", "b"], 8)
    assert len(pids.read_text().split()) == 2 * sum(starts.values())
    assert running(pids) == [], "a server or its child outlived the bench"


def test_all_requests_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = arm(tmp_path, "b", FAKE_FAIL_AFTER=0)
    status, data = bench(tmp_path, "--arm", arm(tmp_path, "a"), "--arm", broken, *PREFILL)
    assert status == 1
    text = 'b: warm-up: nothing succeeded: HTTP 500: {"error": "out of memory"}'
    assert data["refusals"] == [text]
    out = capsys.readouterr().out
    assert f"no numbers: {text}" in out
    assert "ms" not in out.replace("not mean", "")
    assert (data["status"], data["measures"][0]["speeds"], data["measures"][0]["verdicts"]) == (1, {}, {})
    jsonschema.validate(data, json.loads(record.SCHEMA_FILE.read_text()))


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ({"FAKE_FAIL_AFTER": 5}, PREFILL, 'b: prefill 64: HTTP 500: {"error": "out of memory"}'),
        ({"FAKE_FAIL_AFTER": 6}, DECODE, "b: decode 2x6: 1 of 2 requests failed, the first with HTTP 500: "
                                         '{"error": "out of memory"}'),
        ({"FAKE_MOST_TOKENS": 3}, DECODE, "b: warm-up: 2 of 2 requests failed, the first with 3 of 6 tokens; the server has to "
                                          "honour ignore_eos"),
        ({"FAKE_BREAK_AT": 2}, DECODE, "b: warm-up: 2 of 2 requests failed, the first with the answer broke off"),
        ({"FAKE_NO_USAGE": 1}, PREFILL, "b: warm-up: it does not report prompt_tokens, so the length of a prompt is not known; "
                                        "use --prompt ids"),
        ({"FAKE_CACHED": 48}, PREFILL, "b: warm-up: 48 of 65 prompt tokens came from its prefix cache, though every prompt is "
                                       "new; turn the cache off (vLLM: --no-enable-prefix-caching)"),
    ],
)  # fmt: skip
def test_numbers_that_are_refused(tmp_path: Path, env: dict[str, Any], args: tuple[str, ...], said: str) -> None:
    status, data = bench(tmp_path, "--arm", arm(tmp_path, "a"), "--arm", arm(tmp_path, "b", **env), *args, "--no-aa")
    assert (status, [text.replace("nothing succeeded: ", "") for text in data["refusals"]]) == (1, [said])
    assert data["measures"][0]["speeds"] == {}


def test_a_prefix_cache_never_answers(tmp_path: Path) -> None:
    """The fake server says how much of each prompt had come before: at most a token by chance."""
    status, data = bench(tmp_path, "--arm", arm(tmp_path, "a"), *PREFILL)
    assert (status, data["refusals"]) == (0, [])
    prompts = Prompts("nonce")
    firsts = {tuple(str(prompts.make(16)).split()[:8]) for _ in range(2_000)}
    assert len(firsts) == 2_000
    assert Prompts("one").make(16) != Prompts("two").make(16), "a server that stayed up would know the prompts"


def test_words_that_are_two_tokens(tmp_path: Path) -> None:
    status, data = bench(tmp_path, "--arm", arm(tmp_path, "a", FAKE_TOKENS_A_WORD=2), *PREFILL)
    assert status == 0
    assert data["measures"][0]["speeds"]["a"]["prompt_tokens"] == 65


def test_token_ids_need_no_usage(tmp_path: Path) -> None:
    a = arm(tmp_path, "a", FAKE_NO_USAGE=1)
    status, data = bench(tmp_path, "--arm", a, *DECODE, "--prefill", "64", "--prompt", "ids")
    assert status == 0
    assert data["measures"][0]["speeds"]["a"]["prompt_tokens"] is None
    assert any(note.startswith("tokens were not reported") for note in data["notes"])


def test_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = arm(tmp_path, "a", FAKE_ACCEPTANCE=0.7), arm(tmp_path, "b")
    status, data = bench(tmp_path, "--arm", a, "--arm", b, *DECODE, "--no-aa")
    assert status == 0
    speeds = data["measures"][0]["speeds"]
    assert (speeds["a"]["acceptance"], speeds["b"]["acceptance"]) == (pytest.approx(0.7), None)
    assert "70.0%" in capsys.readouterr().out
    assert _counter('a_total{x="1"} 3\na_total{x="2"} 4.5\n# a_total\na_total_more 9', "a_total") == 7.5


def test_a_server_that_is_given_is_left_alone(tmp_path: Path) -> None:
    port = 18_000 + os.getpid() % 1_000
    server = subprocess.Popen([sys.executable, str(FAKE), str(port)], stdout=subprocess.DEVNULL)
    try:
        a = arm(tmp_path, "a", "", BIGPOOL_BASE_URL=f"http://127.0.0.1:{port}/v1")
        status, data = bench(tmp_path, "--arm", a, *PREFILL)
        assert status == 0
        assert data["arms"][0] | {"env": {}} == data["arms"][0]
        assert (data["arms"][0]["model"], data["arms"][0]["starts"]) == ("fake", 0)
        assert server.poll() is None
        # One that is to be started there must not be mistaken for it.
        b = arm(tmp_path, "b", f"{sys.executable} {FAKE} {port}", BIGPOOL_BASE_URL=f"http://127.0.0.1:{port}/v1")
        assert bench(tmp_path, "--arm", b, *PREFILL) == (2, None)
    finally:
        server.kill()
        server.wait()


def test_secrets_are_not_put_down(tmp_path: Path) -> None:
    a = arm(tmp_path, "a", BIGPOOL_API_KEY="sekrit1", HF_TOKEN="sekrit2", OTHER="seen")
    status, data = bench(tmp_path, "--arm", a, *PREFILL)
    assert status == 0
    assert "sekrit" not in json.dumps(data)
    assert data["arms"][0]["env"] == {"HF_TOKEN": "hidden", "OTHER": "seen"}


@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ({"FAKE_DIE": 1}, (), "error: a: expected a server that stays up, got exit status 7; its last lines:\n"
                              "  loading the model\n  CUDA out of memory\n"),
        ({"FAKE_START": 60}, ("--ready-timeout", "1"),
         "/v1/models to answer within 1 s, got nothing; raise --ready-timeout, or look at its log; its last lines:\n"
         "  loading the model\n"),
    ],
)  # fmt: skip
def test_a_server_that_never_comes_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: dict[str, Any], args: tuple[str, ...], said: str
) -> None:
    pids = tmp_path / "pids"
    assert bench(tmp_path, "--arm", arm(tmp_path, "a", FAKE_PIDS=pids, **env), *PREFILL, *args) == (2, None)
    assert said in capsys.readouterr().err
    assert running(pids) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["starting", "timing"])
def test_a_signal_leaves_no_server(tmp_path: Path, number: signal.Signals, when: str) -> None:
    pids = tmp_path / "pids"
    slow = {"FAKE_START": 60} if when == "starting" else {"FAKE_PREFILL": 0.2}
    command = [sys.executable, "-m", "bigpool", "bench", "serving", "--arm", arm(tmp_path, "a", FAKE_PIDS=pids, **slow), *PREFILL]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    wanted = "starting its server" if when == "starting" else "round 2"
    assert any(wanted in line for line in process.stderr)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        time.sleep(0.01)
    assert len(running(pids)) == 2
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err.strip().splitlines()[-1]) == (130, "error: interrupted")
    assert "Traceback" not in err
    assert running(pids) == []


def test_records_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for file, env in ((first, {}), (second, {"FAKE_PREFILL": 0.05})):
        assert main(["bench", "serving", "--arm", arm(tmp_path, "a", **env), *PREFILL, "--no-aa", "--json", str(file)]) == 0
    capsys.readouterr()
    assert main(["bench", "compare", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "prefill 64: a: slower by" in out
    assert "the records were made apart" in out
    kernels = Path(__file__).parents[1] / "docs" / "measured" / "2026-11-30-h200-bench-verify.json"
    assert main(["bench", "compare", str(first), str(kernels)]) == 2
    assert capsys.readouterr().err == (
        f"error: B: expected schema bigpool-serving/1, got 'bigpool-bench/1' in {kernels}; "
        "serving records compare with serving records only\n"
    )
    red = json.loads(first.read_text()) | {"refusals": ["a: HTTP 500"]}
    second.write_text(json.dumps(red))
    assert main(["bench", "compare", str(first), str(second)]) == 2
    assert capsys.readouterr().err == "error: B: expected a record with numbers, got one that refuses them: a: HTTP 500\n"


def test_what_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--mode", "both", "--prompt", "x", "--repeats", "3", "--streams", "0", "--margin", "-1", "--json", "no/x.json"]
    assert main(["bench", "serving", *args]) == 2
    assert capsys.readouterr().err == (
        "error: bigpool bench serving: 7 faults\n"
        "  --arm: expected a file for each server, got nothing; such as --arm old.env --arm new.env\n"
        "  --mode: expected together or restart, got 'both'; restart is for servers that do not fit at once\n"
        "  --prompt: expected text or ids, got 'x'; ids needs no tokenizer to be known\n"
        "  --repeats: expected at least 8, got 3; an interval needs them\n"
        "  --streams: expected at least 1, got 0\n"
        "  --margin: expected 0 or more percent, got -1; the default is 1\n"
        "  --json: expected a file in an existing folder, got no/x.json; make the folder first\n"
    )
    given = arm(tmp_path, "given", "", BIGPOOL_BASE_URL="http://127.0.0.1:1/v1")
    assert main(["bench", "serving", "--arm", given, "--mode", "restart"]) == 2
    assert capsys.readouterr().err == (
        "error: bigpool bench serving: --mode: expected servers that can be started for restart, got given without "
        "BIGPOOL_COMMAND; use together\n"
    )
    assert main(["bench", "serving", "--arm", given, "--arm", given]) == 2
    assert "--arm: expected files of different names, got given, given; the name is the arm's" in capsys.readouterr().err
    assert OF_STATS == MIN_ROUNDS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=1", "expected BIGPOOL_COMMAND or BIGPOOL_BASE_URL, got neither; say how to start the server, or where it is ({})"),
        ("BIGPOOL_BASE_URL=localhost:8000", "expected BIGPOOL_BASE_URL such as http://127.0.0.1:8000/v1, got 'localhost:8000'; "
                                            "name the scheme too ({})"),
        ("BIGPOOL_COMMAND=serve", "expected {{port}} in BIGPOOL_COMMAND, got 'serve'; write --port {{port}}, or set "
                                  "BIGPOOL_BASE_URL too ({})"),
        ("BIGPOOL_COMMAND=serve '{port}", "expected a command as a shell reads it, got \"serve '{{port}}\": No closing "
                                          "quotation; close the quotes ({})"),
        ("# words\n\nnot a line", "expected NAME=VALUE, got 'not a line' in line 3 of {}; # begins a comment"),
    ],
)  # fmt: skip
def test_an_env_file_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.env"
    path.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read(path)
    assert str(caught.value) == f"bigpool bench serving: --arm: {said.format(path)}"


def test_an_env_file(tmp_path: Path) -> None:
    path = tmp_path / "new.env"
    path.write_text("# a comment\nexport A='x y'\nB=\"1\"\nC=a=b\nBIGPOOL_MODEL=m\n")
    found = read(path, command="serve {port}")
    assert (found.name, found.file, found.model, found.command) == ("new", "new.env", "m", "serve {port}")
    assert found.env == {"A": "x y", "B": "1", "C": "a=b"}
    with pytest.raises(ArgumentError, match=r"got .*no\.env: No such file or directory"):
        read(tmp_path / "no.env")


def test_the_plan_says_what_it_takes(tmp_path: Path) -> None:
    arms = tuple(read(Path(arm(tmp_path, name))) for name in ("a", "b"))
    options = runner.Options(arms, (runner.Prefill(4096), runner.Decode(8, 64)), repeats=10)
    text = runner.plan_text(options, [arms[0], arms[0].again(), arms[1]])
    assert (
        text == "a, a again, b: prefill 4096, decode 8x64; 10 rounds of two runs an arm, 660 requests, 2 server starts, together"
    )
