"""The proof's cases for the Hopper kernels without a GPU (gluon_cpu): top equals bottom, and every widening is needed."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bigpool.kernels.prefill_sm90 import _first_scratch_row
from bigpool.proof.isolate import PRELOAD, Session
from bigpool.proof.narrow import list_widenings
from gluon_cpu import Emulated
from gluon_cpu.far import KERNELS, NAMED, mutant

# What takes minutes here.
LARGE = {"hopper-verify-big-pool", "hopper-prefill-big-pool"}
ROWS, HEADS = ("hopper-verify-far-rows", "hopper-verify-far-heads")
# Without this widening a variable of the loop in _first_scratch_row changes its type.
NOT_COMPILED = "does not compile"
# The case that sees the removal of each widening, in the order of the file.
SEEN_BY = {
    "verify_sm90": ["hopper-verify-int8", ROWS, HEADS, ROWS, ROWS],
    "verify_ws_sm90": [f"{name}-small-pages" for name in (ROWS, ROWS, HEADS, ROWS)],
    "_feed_sm90": ["hopper-verify-int8-small-pages"],
    "merge_sm90": [ROWS, HEADS, ROWS],
    "prefill_sm90": [
        "hopper-prefill-far-heads", "_first_scratch_row", "hopper-prefill-far-rows", "hopper-prefill-far-rows",
    ],
    "prefill_fp8_sm90": ["hopper-prefill-far-heads", NOT_COMPILED, "hopper-prefill-far-rows"],
    "_prefill_feed_sm90": ["hopper-prefill-far-context"],
}  # fmt: skip


@pytest.fixture(scope="module")
def session():
    with Session(interpreted=True, preload=(*PRELOAD, "gluon_cpu.far")) as made:
        yield made


def run(session, case, placement, **without):
    """fp16: the passes over keys run in Triton's interpreter."""
    job = {"module": "gluon_cpu.far", "case": case, "dtype": "float16", "placement": placement, "guard": "unmapped"}
    return session.run({**job, "without": without}, timeout=120)


def is_seen(session, case, **without):
    """A wild access, a broken canary, or other bits."""
    ended = run(session, case, "top", **without)
    if ended.outcome == "done":
        return run(session, case, "bottom", **without).result["digests"] != ended.result["digests"]
    return ended.outcome == "killed" or "of the guard pattern" in ended.log


@pytest.mark.parametrize("case", sorted(set(NAMED) - LARGE))
def test_top_equals_bottom(session, case):
    bottom, top = (run(session, case, placement) for placement in ("bottom", "top"))
    for ended in (bottom, top):
        assert ended.outcome == "done", ended.log
        assert any("sm90" in name and "merge" not in name for name in ended.result["launched"])
    assert top.result["digests"] == bottom.result["digests"]


def test_every_file_with_a_widening_is_here():
    files = {path.stem for path in KERNELS.glob("*sm90.py") if list_widenings(path.read_text())}
    assert files == set(SEEN_BY)


@pytest.mark.parametrize("file", SEEN_BY)
def test_each_widening_has_its_case(file):
    assert len(list_widenings((KERNELS / f"{file}.py").read_text())) == len(SEEN_BY[file])


@pytest.mark.parametrize(
    ("file", "index"),
    [(file, index) for file, cases in SEEN_BY.items() for index, case in enumerate(cases) if case in NAMED],
)
def test_a_removed_widening_is_seen(session, file, index):
    assert is_seen(session, SEEN_BY[file][index], **{file: index})


@pytest.mark.parametrize("case", sorted(set(NAMED) - LARGE))
def test_without_its_widenings_no_case_holds(session, case):
    """Or the proof would find that it has no power."""
    assert is_seen(session, case, **dict.fromkeys(SEEN_BY))


@gluon.jit
def scratch_row(row_ptr, seq_lens_ptr, cu_seqlens_q_ptr):
    req = gl.program_id(0).to(gl.int64)
    gl.store(row_ptr + req, _first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, 2**31 - 1))


@pytest.mark.parametrize("narrowed", [False, True])
def test_a_scratch_row_past_32_bits(tmp_path, narrowed):
    """No scratch has so many rows, which is what the kernel has to find out."""
    index = SEEN_BY["prefill_sm90"].index("_first_scratch_row")
    instead = {_first_scratch_row.fn.__module__: mutant("prefill_sm90", index, tmp_path)} if narrowed else {}
    rows, lengths = torch.zeros(5, dtype=torch.int64), torch.tensor([2**30, 7, 2**30, 2**30, 1], dtype=torch.int32)
    starts = torch.tensor([0, 1, 1, 2, 3, 4], dtype=torch.int32)
    Emulated(scratch_row, instead=instead)[(5,)](rows, lengths, starts)
    assert (rows.tolist() == [0, 2**30, 2**30, 2**31, 3 * 2**30]) != narrowed
