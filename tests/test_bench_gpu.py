"""What only a GPU can show: graphs, events, the card's ceilings, and the bars once on real clocks."""

from __future__ import annotations

import json

import pytest
import torch

from bigpool.bench import record, roofline
from bigpool.bench.judgement import Judge
from bigpool.bench.pairs import measure, prepare
from bigpool.bench.runner import Options, bench
from bigpool.bench.shapes import Shape, parse
from bigpool.bench.timer import make_timer
from bigpool.bench.work import Work

pytestmark = pytest.mark.gpu
SHAPE = parse("b1-q8-kv16k")


class Silent:
    def on_plan(self, rounds: int, text: str) -> None: ...

    def on_step(self, text: str) -> None: ...

    def on_round(self) -> None: ...


@pytest.mark.parametrize("method", ["graph", "events"])
def test_identical_arms_and_one_with_three_percent_more_keys(method: str) -> None:
    timer, device = make_timer(method), torch.device("cuda")
    work, longer = (Work(Shape(seq_len=length), torch.bfloat16, device) for length in (131_072, 135_004))
    call = work.backend_call("triton")
    ready, faults = prepare(timer, {"a": call, "a again": call, "same": call, "longer": longer.backend_call("triton")})
    assert faults == {}
    found = Judge("a", "a again").shape(measure(timer, ready, 60))
    assert found["same"].word in ("no cost", "undecided"), found["same"].text
    assert found["longer"].word == "slower", found["longer"].text


def test_the_ceilings_are_those_of_a_gpu() -> None:
    made = roofline.measure(torch.device("cuda"))
    assert made.copy <= 1.2 * made.read
    assert made.matrix["bfloat16"] > 1e13


def test_two_versions_in_one_process_follow_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install 'bigpool[test]'")
    arms = (("before", "narrowed"), ("after", "shipped"))
    made = bench(Options((SHAPE, parse("b1-q8-kv1500-p432")), arms, repeats=20), Silent())
    jsonschema.validate(made, json.loads(record.SCHEMA_FILE.read_text()))
    assert all(entry["ok"] for shape in made["shapes"] for entry in shape["gates"])
    if not made["refusals"]:
        assert all(0 < speed["of_floor"] < 1.1 for shape in made["shapes"] for speed in shape["speeds"].values())
