"""One HTML page from records: what it says, what it must not say, and that records are untrusted."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bigpool.audit.report import FORMATS
from bigpool.audit.run import Options, audit
from bigpool.bench.serving import record, runner
from bigpool.bench.serving.arms import ServingArm
from bigpool.bench.serving.measure import Decode, Prefill, Run
from bigpool.cli import main
from bigpool.errors import ReportError
from bigpool.report.kinds.audit import MOST_FINDINGS
from bigpool.report.page import page
from bigpool.report.read import read

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "measured"
PROOF = MEASURED / "2026-11-30-h200-proof-verify.json"
SPEED = MEASURED / "2026-11-30-h200-bench-verify.json"
COST = MEASURED / "2026-11-30-h200-bench-int64-page-id.json"
EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;"
# Strings that the schemas hold to a list or a pattern.
FIXED = {"schema", "sha256", "git_sha", "word", "rule", "severity", "confidence", "form", "fingerprint", "method", "device"}
FIXED |= {"mode", "prompt", "kind", "id", "place"} | {
    "backend",
    "expect",
    "placement",
    "guard",
    "outcome",
    "role",
    "status",
    "bound",
}


def load(path: Path) -> Any:
    return json.loads(path.read_text())


def save(data: Any, path: Path) -> Path:
    path.write_text(json.dumps(data))
    return path


def audited(folder: Path) -> Path:
    """What bigpool audit says of the example with the bug."""
    report = audit([ROOT / "examples" / "naive_gather" / "naive_gather.py"], Options())
    path = folder / "audit.json"
    path.write_text("\n".join(FORMATS["json"](report, False)))
    return path


@pytest.fixture
def example(tmp_path: Path) -> Path:
    return audited(tmp_path)


def html_of(*files: Path) -> str:
    return page([read(file) for file in files])


def text_of(html: str) -> str:
    """Without style and tags, entities as they are, blanks folded."""
    body = re.sub(r"<style>.*?</style>", "", html, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


class Parsed(HTMLParser):
    """The names of tags and attributes of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def section(html: str, name: str) -> str:
    found = re.search(rf'<section id="{name}".*?</section>', html, flags=re.S)
    assert found, name
    return text_of(found[0])


def test_a_page_of_all_kinds(example: Path) -> None:
    html = html_of(SPEED, example, PROOF, COST)
    summary = section(html, "summary")
    assert "proven: 10 of 10 cases give the same right bits wherever they lie in the pool" in summary
    assert "2 errors in 1 kernel in 1 file" in summary
    assert "after: slower by 0.5% (0.5..0.6), over 24 shapes" in summary
    assert summary.index("Proof on") < summary.index("Audit of") < summary.index("Speed of"), "the order of the files is no order"
    assert "Proof: proven; audit: 2 findings; speed: measured, slower;" in text_of(html)
    walls = section(html, "walls")
    assert "The first wall is at 4 GiB." in walls
    assert "gather_kernel: page_idx * stride_cache_page" in walls
    for size, share in ((24, "16.7%"), (80, "5.0%"), (141, "2.8%"), (288, "1.4%")):
        assert re.search(rf"{size} GB .*?the first wall is at {share} of it", walls)
    sources = section(html, "sources")
    assert "bigpool bench verify --before narrowed:_paging --after shipped --original-geometries" in sources
    assert "8d2172f3a1c3" in sources
    assert "SM 1,980 MHz, memory 3,201 MHz, 44 C, 127 W" in sources


def test_the_matrix_of_a_proof() -> None:
    text = section(html_of(PROOF), "record-1")
    assert re.search(
        r"verify-big-pool bfloat16 .*? right same bits same bits killed: CUDA illegal access in verify_partial_kernel at "
        r"verify.py:70 \(unmapped\) NaN in out, lse \(poison\) proven", text
    )  # fmt: skip
    assert re.search(r"verify-far-rows bfloat16 [^(]*? right not run same bits", text)


def test_a_refuted_proof_is_not_called_proven(tmp_path: Path) -> None:
    data = load(PROOF)
    data |= {"status": 1, "summary": "refuted: 1 of 10 cases: verify-big-pool"}
    data["verdicts"][0] |= {"status": "refuted", "findings": ["shipped at the top (unmapped): not the bits of the bottom: far"]}
    run = next(run for run in data["runs"] if (run["placement"], run["arm"], run["guard"]) == ("top", "shipped", "unmapped"))
    run["digests"] = dict.fromkeys(run["digests"], "0" * 64)
    html = html_of(save(data, tmp_path / "red.json"), SPEED)
    assert "Proof: not proven" in text_of(html)
    assert "other bits" in section(html, "record-1")
    assert "verify-big-pool (bfloat16): refuted: shipped at the top (unmapped)" in section(html, "unproven")
    assert "no green proof here is of: __init__.py of ours, _paging.py of ours, verify.py of ours" in section(html, "unproven")


def test_what_is_unproven(example: Path) -> None:
    alone = section(html_of(SPEED), "unproven")
    assert "that any kernel is right past its wall: no record of bigpool prove is here" in alone
    assert "that no other index of the source wraps: no report of bigpool audit is here" in alone
    assert "no green proof here is of: __init__.py of ours, _paging.py of ours, verify.py of ours" in alone
    assert "speed on any card other than NVIDIA H200" in alone
    assert "not timed: fa3 on all shapes: ModuleNotFoundError: No module named &#39;flash_attn_interface&#39;" in alone
    assert "any speed of a kernel: no record of bigpool bench is here" in section(html_of(PROOF), "unproven")
    proven = section(html_of(SPEED, PROOF), "unproven")
    assert "no green proof" not in proven, "these very files were proven"
    assert "not run in verify-far-rows, verify-far-heads" in proven
    for line in load(PROOF)["not_exercised"]:
        assert line in proven
    assert "that a finding breaks on a card" in section(html_of(example), "unproven")


def red(data: Any, how: str) -> Any:
    """A record whose gate is red: refused as it should be, let through by --no-gate, or with the reasons cut out."""
    wrong = "ours is wrong on b1: off by 3"
    data["shapes"][0]["gates"][0] |= {"ok": False, "text": "off by 3"}
    if how == "refused":
        data |= {"refusals": [wrong], "status": 1, "summary": f"no numbers: {wrong}"}
        return data
    data["settings"]["gated"] = False
    if how == "no gate":
        data |= {"refusals": [wrong], "status": 1, "summary": f"these numbers mean nothing: {wrong}"}
    return data


@pytest.mark.parametrize("how", ["refused", "no gate", "cut"])
def test_no_number_without_its_gate(tmp_path: Path, how: str) -> None:
    data = load(COST if how == "cut" else SPEED)
    green = html_of(save(data, tmp_path / "green.json"))
    numbers = set(re.findall(r"\d+(?:\.\d+)? us|[-+]\d\.\d%|\d\.\d\d TB/s|SM [\d,]+ MHz", text_of(green)))
    assert len(numbers) > 15
    html = html_of(save(red(data, how), tmp_path / "red.json"))
    text = text_of(html)
    assert {number for number in numbers if number in text} == set()
    assert "No numbers" in text
    assert "off by 3" in text
    assert '<circle class="at"' not in html
    assert "any speed: ours is wrong" in section(html, "unproven") or "any speed: before is wrong" in section(html, "unproven")


def test_a_wrong_peer_has_no_number(tmp_path: Path) -> None:
    """Let through by --no-gate, it has speeds in the record."""
    data = load(SPEED)
    data["shapes"][0]["speeds"]["fa3"] = {"seconds": 1.25e-4, "of_floor": 0.1, "bytes_per_second": 1.0, "flops_per_second": 1.0}
    assert "125 us" not in text_of(html_of(save(data, tmp_path / "peer.json")))
    data["shapes"][0]["gates"][2]["ok"] = True
    assert "125 us" in text_of(html_of(save(data, tmp_path / "peer.json")))


def poisoned(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: poisoned(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, key) for item in value]
    free = isinstance(value, str) and key not in FIXED and not re.fullmatch("[0-9a-f]{64}", value)
    return value + EVIL if free else value


@pytest.mark.parametrize("which", ["proof", "speed", "cost", "audit", "served", "swept"])
def test_records_are_text_and_nothing_else(tmp_path: Path, example: Path, which: str) -> None:
    made = {"served": served(), "swept": swept(example)}
    data = poisoned(
        made[which] if which in made else load({"proof": PROOF, "speed": SPEED, "cost": COST, "audit": example}[which])
    )
    # Names of arms are keys too.
    text = json.dumps(data)
    for name in ("ours", "ours again", "before again"):
        text = text.replace(f'"{name}":', json.dumps(name + EVIL) + ":")
    path = tmp_path / "evil<b>.json"
    path.write_text(text)
    html = page([read(path)], title=f"title{EVIL}")
    assert "evil&lt;b&gt;.json" in html
    assert html.count("&lt;script&gt;alert(1)") > 10, "it is not shown at all"
    assert "<script" not in html
    assert "<img" not in html
    assert "evil<b>" not in html
    others = [save(made[name], tmp_path / f"{name}.json") for name in made]
    parsed, clean = Parsed(html), Parsed(html_of(PROOF, SPEED, COST, example, *others))
    assert parsed.tags <= clean.tags
    assert parsed.attributes <= clean.attributes


def test_the_page_loads_nothing(example: Path) -> None:
    html = html_of(PROOF, SPEED, COST, example)
    assert not re.search(r"<(?:link|script|img|iframe|object|embed|base)\b", html)
    assert not re.search(r"url\(|@import|@font-face|https?://", html)
    assert re.findall(r'(?:href|src)="([^#"][^"]*)"', html) == []
    assert "default-src 'none'" in html


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(PROOF), str(SPEED)]) == 0
    assert re.fullmatch(r"report\.html: 2 records, \d+ KiB\n", capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html"], "no partial file is left"
    assert main(["report", str(PROOF), "-o", "-", "--title", "mine & yours"]) == 0
    assert "<h1>mine &amp; yours</h1>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "bigpool report: FILE: expected one record or more, got nothing; such as bigpool report proof.json"),
        (
            ["x", "-o", "no/x.html"],
            "bigpool report: -o: expected a file in an existing folder, got no/x.html; make the folder first",
        ),
        (["no.json"], "no.json: expected a record, a JSON file that bigpool wrote, got no such file; see bigpool report --help"),
        (["."], ".: expected a record, a JSON file that bigpool wrote, got Is a directory; see bigpool report --help"),
    ],
)
def test_what_the_command_refuses(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *args]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"
    assert list(tmp_path.iterdir()) == []


def served(faults: list[str] | None = None) -> Any:
    """A record of bigpool bench serving without a server: b decodes 10% slower, and a's acceptance is known."""
    arms = [ServingArm("a", "a.env", command="serve --port {port}"), ServingArm("b", "b.env", base_url="http://me:pw@far:1/v1")]
    made = runner.Serving(
        runner.Options(tuple(arms), (Prefill(512), Decode(4, 64)), command=("bigpool", "bench", "serving")),
        [arms[0], arms[0].again(), arms[1]],
        {},
        faults=faults or [],
        rounds=10,
    )
    for measure, base in (("prefill 512", 0.25), ("decode 4x64", 0.004)):
        slow = {"a": 1.0, "a again": 1.0, "b": 1.1 if measure.startswith("decode") else 1.0}
        made.runs[measure] = {
            name: [
                [Run(base * factor * (1 + 1e-4 * (at % 3)), 513, base, 10 if name == "a" else None, 7 if name == "a" else None)]
                * 2
                for at in range(10)
            ]
            for name, factor in slow.items()
        }
    return record.build(made)


def test_servers(tmp_path: Path) -> None:
    html = html_of(save(served(), tmp_path / "serving.json"))
    text = section(html, "record-1")
    assert "Served: a, b" in text
    assert re.search(r"b against a .*? decode 4x64 slower by 10\.0% \(10\.0\.\.10\.0\)", text)
    assert re.search(r"decode 4x64 a 513 250\.0 250\.0 70\.0% b 513 227\.3 250\.0 not reported", text)
    assert "pw" not in html
    assert "that the servers answer right: only their speed was asked" in section(html, "unproven")
    red = html_of(save(served(["b: prefill 512: HTTP 500"]), tmp_path / "serving.json"))
    assert "No numbers" in text_of(red)
    assert "b: prefill 512: HTTP 500" in section(red, "summary")
    assert not re.search(r"slower|250|227\.3|70\.0%", section(red, "record-1"))


def swept(example: Path) -> Any:
    """A record of bigpool sweep of the example: one fault confirmed and fixed, one that could not be reproduced."""
    audit_ = load(example)
    first, second = (found["fingerprint"] for found in audit_["findings"])
    blank = {"variable": "page_idx", "below": 2383, "at": 2384, "top": 9000, "along": [], "device": "interpreter", "shadowed": ""}
    run = {"place": "at", "guard": "mapped", "outcome": "killed", "detail": "SIGSEGV at k.py:3"}
    return {
        "schema": "bigpool-sweep/1", "status": 1, "script": "run.py",
        "machine": {"device": "interpreter", "versions": {"triton": "3.9.0"}}, "audit": audit_,
        "confirmations": [
            {"id": first, "outcome": "confirmed", "text": "right at 2,383, died at 2,384", "runs": [run], **blank},
            {"id": second, "outcome": "could not reproduce", "text": "no memory", "runs": [], **blank},
        ],
        "fix": {"diff": "--- a\n+++ b\n@@ -1 +1 @@\n-old <line>\n+new\n", "fixed": 1, "left": 0},
        "proofs": [{"id": first, "proven": True, "text": "top equals bottom", "runs": [run]}],
        "prices": [{"kernel": "gather_kernel", "text": "no cost", "verdict": None, "interpreted": True}],
        "script_stopped": "", "written": [],
    }  # fmt: skip


def test_a_sweep(tmp_path: Path, example: Path) -> None:
    html = html_of(save(swept(example), tmp_path / "sweep.json"))
    assert "1 of 2 faults confirmed by a run, 1 of these proven right after the fix" in section(html, "summary")
    text = section(html, "record-1")
    assert "confirmed right at 2,383, died at 2,384 1 run at the wall, canaries around it: killed (SIGSEGV at k.py:3)" in text
    assert '<span class="minus">-old &lt;line&gt;' in html
    assert '<span class="head">+++ b' in html
    unproven = section(html, "unproven")
    assert "could not reproduce: no memory" in unproven
    assert "what the fix costs on a GPU: this was Triton&#39;s interpreter" in unproven
    assert "proven right past it" in section(html, "walls")
    bad = swept(example)
    bad["audit"]["findings"][0]["severity"] = "worse"
    with pytest.raises(ReportError, match=r"got audit: \$\.findings\[0\]\.severity: 'worse' is not one of"):
        html_of(save(bad, tmp_path / "sweep.json"))


def test_many_findings_are_cut_and_counted(tmp_path: Path, example: Path) -> None:
    data = load(example)
    one = data["findings"][0]
    data["findings"] = [{**one, "kernel": f"kernel_{at}", "fingerprint": f"{at:016x}"} for at in range(MOST_FINDINGS + 7)]
    data["findings"].append({**one, "kernel": "no_wall", "wall": None, "fix": None})
    data |= {
        "suppressed": 2,
        "skipped_files": [{"file": f"f{at}.py", "reason": "no syntax"} for at in range(11)],
        "trusted": ["k: E"],
    }
    html = html_of(save(data, tmp_path / "many.json"))
    assert "8 more findings are in the file, and not on this page." in section(html, "record-1")
    unproven = section(html, "unproven")
    assert "2 findings suppressed by comments" in unproven
    assert "file not read: f0.py: no syntax" in unproven
    assert "3 more: file not read" in unproven
    assert "left to the host to check: k: E" in unproven
    assert f"gather_kernel: {one['wall']['formula']}" not in section(html, "walls")
    assert "kernel_0: page_idx * stride_cache_page" in section(html, "walls")


def test_a_wall_beyond_every_card(tmp_path: Path, example: Path) -> None:
    data = load(example)
    for found in data["findings"]:
        found["wall"]["tensor_bytes"] = 2**40
    walls = section(html_of(save(data, tmp_path / "far.json")), "walls")
    assert "1,024 GiB" in walls
    assert "more than any card below has" in walls
    assert walls.count("smaller than the first wall") == 2 * 8, "a name and words for each card"


@pytest.mark.parametrize("module", ["jinja2", "jsonschema"])
def test_what_is_not_installed_is_named(module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["report", str(PROOF), "-o", "-"]) == 2
    text = f"bigpool report: expected {module} to be installed, got no such module; pip install 'bigpool[report]'"
    assert capsys.readouterr() == ("", f"error: {text}\n")
