"""docs/prefill.md: its table of errors is that of its record, its bytes are the library's, its example runs, its bits hold."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

from bigpool.ops import prefill
from prefill_inputs import make, run, same_bits
from test_prefill_kept import SIZES, chunk

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "prefill.md").read_text("utf-8")
RECORD = DOCS / "measured/2026-12-01-prefill-accuracy.json"


@pytest.fixture(scope="module")
def accuracy():
    spec = importlib.util.spec_from_file_location("prefill_accuracy", DOCS / "measured/prefill_accuracy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_that_of_the_record(accuracy):
    record = json.loads(RECORD.read_text("utf-8"))
    assert [(row["data"], row["head_dim"], row["context"], tuple(row["sizes"])) for row in record["rows"]] == accuracy.CASES
    assert record["data"] == accuracy.DATA
    assert accuracy.table(record["rows"]) in TEXT


def test_the_smallest_case_of_the_record_comes_out_again(accuracy):
    row = json.loads(RECORD.read_text("utf-8"))["rows"][0]
    errors, _ = accuracy.measure(*accuracy.CASES[0])
    assert errors.keys() == row["errors"].keys()
    for mode, found in errors.items():
        for name, value in found.items():
            # Sums of other libraries and thread counts round a few codes otherwise.
            assert value == pytest.approx(row["errors"][mode][name], rel=0.05), (mode, name)


def test_bytes():
    names = {"prefill_scratch_bytes": prefill.prefill_scratch_bytes, "key_codes_bytes": prefill.key_codes_bytes}
    sizes = eval(re.search(r"^sizes = (\{\"max_num_reqs.*\})$", TEXT, re.M)[1])
    stated = re.findall(r"^((?:prefill_scratch|key_codes)_bytes\(.*\))  # ([\d,]+)", TEXT, re.M)
    assert len(stated) == 4
    for call, value in stated:
        assert f"{eval(call, {**names, 'sizes': sizes}):,}" == value, call


def test_the_example_of_kept_codes_runs():
    blocks = [block for block in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "KeyCodes.empty" in block]
    assert len(blocks) == 1
    assert "assert torch.equal" in blocks[0]
    torch.manual_seed(0)
    exec(compile(blocks[0], "docs/prefill.md", "exec"), {})


@pytest.mark.parametrize(
    ("modes", "same"),
    [({}, True), ({"qk": "int8"}, False), ({"pv": "fp8"}, False), ({"qk": "int8", "pv": "fp8"}, False)],
    ids=str,
)
def test_whether_bits_depend_on_chunks(modes, same):
    """The row of the table of modes; tests/test_prefill_kept.py has that of kept codes."""
    call = make([200], [200], device="cuda" if torch.cuda.is_available() else "cpu", **SIZES, **modes)
    whole, _ = run(call)
    parts = [run(chunk(call, begin, min(begin + 64, 200)))[0] for begin in range(0, 200, 64)]
    assert same_bits(torch.cat(parts), whole) == same
