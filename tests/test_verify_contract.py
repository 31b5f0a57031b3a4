"""The contract of verify attention: every message in full, workspace, torch.compile, backends."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigpool._device import device_props
from bigpool.errors import ArgumentError, WorkspaceError
from bigpool.ops.verify import pack_tree_mask, verify_attention
from bigpool.tuning import DeviceProps, plan_verify, scratch_floats
from bigpool.workspace import Workspace, verify_scratch_bytes
from verify_inputs import make, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H200 = DeviceProps("H200", 90, 132, 232_448)


def fault(call, **options):
    with pytest.raises(ArgumentError) as caught:
        verify_attention(**call, **options)
    return str(caught.value)


def good(**options):
    return make([75, 40], [6, 1], **options)


CASES = {
    "q dtype": ({"q": lambda c: c["q"].double()}, "q: expected bfloat16|float16|float32 [num_tokens, num_q_heads, head_dim], got float64 [7, 4, 64]; flatten the tokens of all requests"),
    "q rank": ({"q": lambda c: c["q"][None]}, "q: expected bfloat16|float16|float32 [num_tokens, num_q_heads, head_dim], got float16 [1, 7, 4, 64]; flatten the tokens of all requests"),
    "k dtype": ({"k_cache": lambda c: c["k_cache"].float()}, "k_cache: expected float16 [num_pages, page_size, num_kv_heads, head_dim=64], got float32 [11, 16, 2, 64]; caches share q's dtype, head_dim and shape"),
    "v pages": ({"v_cache": lambda c: c["v_cache"][:-1]}, "v_cache: expected float16 [num_pages=11, page_size=16, num_kv_heads=2, head_dim=64], got float16 [10, 16, 2, 64]; caches share q's dtype, head_dim and shape"),
    "k stride": ({"k_cache": lambda c: c["k_cache"].transpose(2, 3).contiguous().transpose(2, 3)}, "k_cache: expected stride 1 in the last axis, got 2; call k_cache.contiguous()"),
    "table dtype": ({"block_table": lambda c: c["block_table"].long()}, "block_table: expected int32 [num_reqs, max_pages_per_req], got int64 [2, 5]; call block_table.int()"),
    "seq_lens shape": ({"seq_lens": lambda c: c["seq_lens"][:1]}, "seq_lens: expected int32 [num_reqs=2], got int32 [1]; pass one entry per request"),
    "cu_seqlens_q shape": ({"cu_seqlens_q": lambda c: c["cu_seqlens_q"][1:]}, "cu_seqlens_q: expected int32 [num_reqs+1=3], got int32 [2]; pass one entry per request"),
    "kv_layout": ({"kv_layout": lambda c: "DNH"}, "kv_layout: expected 'NHD' or 'HND', got 'DNH'; name the order of the axes of a page"),
    "max_seqlen_q": ({"max_seqlen_q": lambda c: 257}, "max_seqlen_q: expected an int 0..256, got 257; verify is for a few tokens; split longer queries"),
    "num_splits": ({"num_splits": lambda c: 129}, "num_splits: expected None or an int 1..128, got 129; None chooses"),
    "max_seqlen_q type": ({"max_seqlen_q": lambda c: 4.0}, "max_seqlen_q: expected an int 0..256, got 4.0; verify is for a few tokens; split longer queries"),
    "softmax_scale": ({"softmax_scale": lambda c: "x"}, "softmax_scale: expected None or a number, got 'x'; None is head_dim ** -0.5"),
    "no tensor": ({"block_table": lambda c: [[1]]}, "block_table: expected a tensor [num_reqs, max_pages_per_req], got list; pass a torch.Tensor"),
    "page_size": ({name: lambda c: c["k_cache"][:, :0] for name in ("k_cache", "v_cache")}, "k_cache: expected page_size 1..2^31 - 1, got 0; page_size counts the slots of a page"),
    "workspace": ({"workspace": lambda c: c["q"]}, "workspace: expected a bigpool.Workspace, got Tensor; make one with Workspace.for_verify"),
    "workspace device": ({"workspace": lambda c: Workspace(torch.empty(8, device="meta"))}, "workspace: expected device cpu, got meta; make one with Workspace.for_verify(device='cpu')"),
    "out overlaps": ({"out": lambda c: c["q"][:1].expand(7, 4, 64)}, "out: expected strides that hold no element twice, got [0, 64, 1]; call out.contiguous()"),
    "backend": ({"backend": lambda c: "cuda"}, "backend: expected 'auto' or 'triton' or 'torch', got 'cuda'; 'auto' chooses"),
    "out": ({"out": lambda c: c["q"].float()}, "out: expected float16 [num_tokens=7, num_q_heads=4, head_dim=64], got float32 [7, 4, 64]; pass torch.empty_like(q)"),
    "causal": ({"causal": lambda c: 1}, "causal: expected a bool, got 1; False lets every token see every key"),
    "window_size": ({"window_size": lambda c: 0}, "window_size: expected None or an int 1..2147418112, got 0; None is unbounded"),
    "window_size type": ({"window_size": lambda c: (4, 0)}, "window_size: expected None or an int 1..2147418112, got (4, 0); None is unbounded"),
    "chunk_size": ({"chunk_size": lambda c: -1}, "chunk_size: expected None or an int 1..2147418112, got -1; None is unbounded"),
    "num_sink_tokens": ({"num_sink_tokens": lambda c: None}, "num_sink_tokens: expected an int 0..2147418112, got None; it counts the first keys of a request"),
    "softcap": ({"softcap": lambda c: 0.0}, "softcap: expected None or a number above 0, got 0.0; None is off"),
    "softcap infinite": ({"softcap": lambda c: float("inf")}, "softcap: expected None or a number above 0, got inf; None is off"),
    "alibi dtype": ({"alibi_slopes": lambda c: torch.ones(4).half()}, "alibi_slopes: expected float32 [num_q_heads=4], got float16 [4]; pass one fp32 slope per query head"),
    "alibi heads": ({"alibi_slopes": lambda c: torch.ones(2)}, "alibi_slopes: expected float32 [num_q_heads=4], got float32 [2]; pass one fp32 slope per query head"),
    "sinks": ({"sinks": lambda c: torch.ones(1, 4)}, "sinks: expected float32 [num_q_heads=4], got float32 [1, 4]; pass one fp32 logit per query head"),
    "tree words": ({"tree_mask": lambda c: torch.ones(7, 2).int()}, "tree_mask: expected int32 [num_tokens=7, ceil(max_seqlen_q/32)=1], got int32 [7, 2]; pack bools with bigpool.pack_tree_mask"),
    "tree bools": ({"tree_mask": lambda c: torch.ones(7, 6).bool()}, "tree_mask: expected int32 [num_tokens=7, ceil(max_seqlen_q/32)=1], got bool [7, 6]; pack bools with bigpool.pack_tree_mask"),
    "tree without causal": ({"tree_mask": lambda c: torch.ones(7, 1).int(), "causal": lambda c: False}, "tree_mask: expected causal=True, got causal=False; a tree is a causal order"),
    "out_scale type": ({"out_scale": lambda c: 0.5}, "out_scale: expected float32 [1], got float; pass torch.tensor([scale], device=q.device)"),
    "out_scale size": ({"out_scale": lambda c: torch.ones(4)}, "out_scale: expected float32 [1], got float32 [4]; pass torch.tensor([scale], device=q.device)"),
    "out without scale": ({"out": lambda c: c["q"].to(torch.float8_e4m3fn)}, "out: expected float16 [num_tokens=7, num_q_heads=4, head_dim=64], got float8_e4m3fn [7, 4, 64]; pass torch.empty_like(q)"),
    "out with scale": ({"out": lambda c: c["q"], "out_scale": lambda c: torch.ones(1)}, "out: expected float8_e4m3fn|float8_e5m2 [num_tokens=7, num_q_heads=4, head_dim=64], got float16 [7, 4, 64]; pass torch.empty_like(q, dtype=torch.float8_e4m3fn)"),
    "deterministic": ({"deterministic": lambda c: True}, "deterministic: expected None or 'batch', got True; every mode gives the same bits run to run"),
    "batch and splits": ({"deterministic": lambda c: "batch", "num_splits": lambda c: 4}, "num_splits: expected None, got 4; splits have fixed bounds in deterministic='batch'"),
    "batch and width": ({"deterministic": lambda c: "batch", "block_table": lambda c: torch.zeros(2, 2**22, dtype=torch.int32)}, "block_table: expected at most 50330880 tokens a request in deterministic='batch', got 67108864; pass fewer columns or query tokens"),
    "scale of a plain cache": ({"k_scale": lambda c: torch.ones(1)}, "k_scale: expected None for a cache of float16, got [1]; see docs/formats.md"),
}  # fmt: skip
FORMAT_CASES = {
    "int8 without a scale": ("int8", {"k_scale": lambda c: None}, "k_scale: expected a scale per token and head, of the cache's axes without the last for a cache of int8, got None; see docs/formats.md"),
    "int4 with one scale": ("int4", {"v_scale": lambda c: torch.ones(1)}, "v_scale: expected a scale per token and head, of the cache's axes without the last for a cache of uint8, got [1]; see docs/formats.md"),
    "scale dtype": ("int8", {"k_scale": lambda c: c["k_scale"].half()}, "k_scale: expected float32 [num_pages=11, page_size=16, num_kv_heads=2], got float16 [11, 16, 2]; call k_scale.float()"),
    "scale axes": ("int8", {"v_scale": lambda c: c["v_scale"][:, :8]}, "v_scale: expected float32 [num_pages=11, page_size=16, num_kv_heads=2], got float32 [11, 8, 2]; see docs/formats.md"),
    "one scale dtype": ("fp8_e4m3", {"k_scale": lambda c: torch.ones((), dtype=torch.float64)}, "k_scale: expected float32 [1], got float64 [1]; call k_scale.float()"),
    "scale device": ("int8", {"v_scale": lambda c: c["v_scale"].to("meta")}, "v_scale: expected device cpu, got meta; call v_scale.to('cpu')"),
    "scale type": ("fp8_e4m3", {"k_scale": lambda c: 0.5}, "k_scale: expected None or a tensor, got float; pass a float32 tensor on q's device"),
    "scales per head": ("fp8_e4m3", {"k_scale": lambda c: torch.ones(4)}, "k_scale: expected float32 [num_kv_heads=2], got float32 [4]; see docs/formats.md"),
    "scales of two kinds": ("fp8_e4m3", {"k_scale": lambda c: torch.ones(11, 16, 2)}, "v_scale: expected scales of the same kind as k_scale, got a scale per token and head and none, one, or one per head; K and V share a format"),
    "scale rank": ("fp8_e5m2", {"k_scale": lambda c: torch.ones(2, 2)}, "k_scale: expected None or one element or [num_kv_heads] or a scale per token and head, of the cache's axes without the last for a cache of float8_e5m2, got [2, 2]; see docs/formats.md"),
    "fp8 bytes": ("fp8_e4m3", {name: lambda c: c["k_cache"].view(torch.uint8) for name in ("k_cache", "v_cache")}, "verify_attention: 2 faults\n  k_cache: expected uint8 [num_pages=11, page_size=16, num_kv_heads=2, head_dim/2=32], got uint8 [11, 16, 2, 64]; uint8 is int4; if these are fp8 bytes, call k_cache.view(torch.float8_e4m3fn)\n  v_cache: expected uint8 [num_pages=11, page_size=16, num_kv_heads=2, head_dim/2=32], got uint8 [11, 16, 2, 64]; uint8 is int4; if these are fp8 bytes, call v_cache.view(torch.float8_e4m3fn)"),
    "two formats": ("fp8_e4m3", {"v_cache": lambda c: c["v_cache"].view(torch.int8)}, "v_cache: expected float8_e4m3fn [num_pages=11, page_size=16, num_kv_heads=2, head_dim=64], got int8 [11, 16, 2, 64]; K and V share dtype and shape, and q's head_dim"),
    "odd head_dim": ("int4", {"q": lambda c: torch.zeros(7, 4, 65).half()}, "q: expected an even head_dim for int4, got 65; two codes share a byte; pad the heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMAT_CASES)
def test_format_messages(name):
    kv_format, changes, text = FORMAT_CASES[name]
    call = good(kv_format=kv_format)
    expected = text if "faults" in text else f"verify_attention: {text}"
    assert fault(call | {key: change(call) for key, change in changes.items()}) == expected


def test_pack_tree_mask_message():
    with pytest.raises(ArgumentError) as caught:
        pack_tree_mask(torch.ones(3, 4))
    assert str(caught.value) == (
        "pack_tree_mask: visible: expected bool [num_tokens, draft], got float32 [3, 4]; call visible.bool()"
    )


@pytest.mark.parametrize("name", CASES)
def test_argument_messages(name):
    changes, text = CASES[name]
    call = good()
    assert fault(call | {key: change(call) for key, change in changes.items()}) == f"verify_attention: {text}"


def test_shape_messages():
    small, heads = good(head_dim=8), good(heads=(3, 2))
    assert fault(small) == "verify_attention: q: expected head_dim 16..512, got 8; split or pad the heads"
    assert fault(heads) == (
        "verify_attention: q: expected num_q_heads a multiple of num_kv_heads, at most 2048, got 3 and 2; "
        "repeat or drop heads, or split them over calls"
    )
    call = good()
    wide = torch.empty_strided(call["k_cache"].shape, (1, 2**28, 64, 1), dtype=torch.float16, device="meta")
    call = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    assert fault(call | {"v_cache": wide}) == (
        "verify_attention: v_cache: expected one page of one head within 2^31 elements, got 4,026,531,904; "
        "make the slots of a page adjacent"
    )


def test_device_message():
    call = good()
    assert fault(call | {"seq_lens": call["seq_lens"].to("meta")}) == (
        "verify_attention: seq_lens: expected device cpu, got meta; call seq_lens.to('cpu')"
    )


def test_several_faults_are_listed_together():
    call = good()
    changed = call | {"block_table": call["block_table"].long(), "seq_lens": call["seq_lens"][:1], "num_splits": 0}
    assert fault(changed) == (
        "verify_attention: 3 faults\n"
        "  block_table: expected int32 [num_reqs, max_pages_per_req], got int64 [2, 5]; call block_table.int()\n"
        "  cu_seqlens_q: expected int32 [num_reqs+1=2], got int32 [3]; pass one entry per request\n"
        "  num_splits: expected None or an int 1..128, got 0; None chooses"
    )


VALUES = {
    "start": ("cu_seqlens_q", [1, 6, 7], "cu_seqlens_q: expected to start at 0, got 1; use exclusive prefix sums of the q_lens"),
    "end": ("cu_seqlens_q", [0, 6, 8], "cu_seqlens_q: expected at most num_tokens=7, got 8; pass all query tokens in q"),
    "order": ("cu_seqlens_q", [0, 6, 5], "cu_seqlens_q: expected non-decreasing values, got [6, 5] at request 1; use prefix sums"),
    "q_len": ("cu_seqlens_q", [0, 7, 7], "max_seqlen_q: expected at least 7, got 6 at request 0; pass the largest q_len"),
    "short": ("seq_lens", [5, 40], "seq_lens: expected at least q_len=6, got 5 at request 0; count the new tokens too"),
    "long": ("seq_lens", [81, 40], "seq_lens: expected at most 80, which the table holds, got 81 at request 0; widen block_table"),
    "page": ("block_table", [[0, 1, 2, 3, 4], [5, 11, 6, -1, -1]], "block_table: expected page ids in [0, num_pages=11), got 11 at [1, 1]; allocate the page or fix the table"),
    "negative page": ("block_table", [[0, 1, 2, 3, -1], [5, 7, 6, -1, -1]], "block_table: expected page ids in [0, num_pages=11), got -1 at [0, 4]; allocate the page or fix the table"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_checked_mode_messages(name):
    argument, value, text = VALUES[name]
    call = good() | {argument: torch.tensor(value, dtype=torch.int32)}
    assert fault(call, check=True) == f"verify_attention: {text}"


def test_checked_mode_passes_a_good_call():
    call = good()
    assert same_bits(verify_attention(**call, check=True), verify_attention(**call))


@pytest.mark.parametrize(
    ("rules", "seen"),
    [
        ({"window_size": 16}, [2, 3]),
        ({"window_size": 16, "causal": False}, [2, 3]),
        ({"chunk_size": 28}, [3]),
        ({"window_size": 25, "chunk_size": 20}, [2, 3]),
        ({"window_size": 16, "num_sink_tokens": 17}, [0, 1, 2, 3]),
        ({}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_checked_mode_asks_for_the_pages_that_tokens_see(rules, seen):
    """A request of 60 tokens on 4 pages, 4 of them new."""
    for col in range(4):
        call = make([60], [4], page_size=16, device=DEVICE, **rules)
        out = verify_attention(**call)
        call["block_table"][0, col] = -5
        if col in seen:
            assert "got -5 at [0, " in fault(call, check=True)
        else:
            assert same_bits(verify_attention(**call, check=True), out)


def workspace(**changes):
    sizes = {"max_num_reqs": 4, "max_seqlen_q": 8, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    return Workspace.for_verify(**sizes | changes, device=DEVICE)


def test_workspace_gives_the_same_bits_and_never_grows():
    call, scratch = make([300, 75, 40, 16], [8, 1, 0, 5], device=DEVICE), workspace()
    held, address = scratch.nbytes, scratch.part.data_ptr()
    scratch.part.fill_(float("nan"))
    for ours, theirs in zip(run(call, workspace=scratch), run(call), strict=True):
        assert same_bits(ours, theirs)
    assert (scratch.nbytes, scratch.part.data_ptr()) == (held, address)


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 4])
@pytest.mark.parametrize("q_len", [1, 5, 8])
def test_workspace_holds_every_batch_within_its_maxima(num_reqs, q_len):
    run(make([200] * num_reqs, [q_len] * num_reqs, device=DEVICE), workspace=workspace())


def test_workspace_says_by_how_much_it_is_short():
    call = make([300, 75], [8, 8], device=DEVICE)
    tight = Workspace(torch.empty(1_000, dtype=torch.float32, device=DEVICE))
    with pytest.raises(WorkspaceError) as caught:
        run(call, workspace=tight, num_splits=3)
    assert str(caught.value) == (
        "workspace: expected 52,224 bytes for 16 query tokens x 4 heads x 3 splits, got 4,000, 48,224 too few; "
        "state larger maxima in Workspace.for_verify, or pass a smaller num_splits"
    )
    strided = Workspace(torch.empty(8, 4, 3, 68, dtype=torch.float32, device=DEVICE))
    with pytest.raises(WorkspaceError) as caught:
        run(call, workspace=strided, num_splits=3)
    assert str(caught.value) == (
        "workspace: expected room for [16, 4, 3, 68], got [8, 4, 3, 68]; pass larger scratch, or a smaller num_splits"
    )


def test_workspace_rejects_other_dtypes():
    with pytest.raises(ArgumentError) as caught:
        Workspace(torch.empty(8, dtype=torch.float16))
    assert str(caught.value) == "Workspace: part: expected float32 [values], got float16 [8]; pass fp32 scratch"


def test_workspace_rejects_overlapping_scratch():
    with pytest.raises(ArgumentError) as caught:
        Workspace(torch.empty(1, 1, 1, 68).expand(4, 4, 3, 68))
    assert str(caught.value) == (
        "Workspace: part: expected strides that hold no element twice, got [0, 0, 0, 1]; call part.contiguous()"
    )


def test_workspace_maxima_are_checked():
    with pytest.raises(ArgumentError) as caught:
        workspace(num_kv_heads=0, max_seqlen_q=1_000, head_dim=-3, max_num_splits=0)
    assert str(caught.value) == (
        "Workspace.for_verify: 4 faults\n"
        "  max_seqlen_q: expected an int 1..256, got 1000; see help(bigpool.verify_attention)\n"
        "  num_kv_heads: expected an int 1..2048, got 0; see help(bigpool.verify_attention)\n"
        "  head_dim: expected an int 16..512, got -3; see help(bigpool.verify_attention)\n"
        "  max_num_splits: expected an int 1..128, got 0; see help(bigpool.verify_attention)"
    )
    with pytest.raises(ArgumentError) as caught:
        workspace(num_kv_heads=3)
    assert str(caught.value) == (
        "Workspace.for_verify: num_q_heads: expected a multiple of num_kv_heads, got 4 and 3; repeat or drop heads"
    )


def test_workspace_holds_padded_queries():
    call = make([200, 40], [5, 8], device=DEVICE)
    call["q"] = torch.cat([call["q"], torch.zeros_like(call["q"]), torch.zeros_like(call["q"])])
    run(call, workspace=workspace(max_num_tokens=39))
    with pytest.raises(WorkspaceError, match="39 query tokens"):
        run(call, workspace=workspace(max_num_reqs=2), num_splits=128)


A100, RTX3090 = DeviceProps("A100", 80, 108, 163 * 1024), DeviceProps("RTX 3090", 86, 82, 99 * 1024)


@pytest.mark.parametrize("card", [A100, RTX3090, H200], ids=lambda card: card.name)
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_scratch_bytes_hold_every_plan_of_a_card(head_dim, card):
    sizes = {"num_q_heads": 24, "num_kv_heads": 4, "head_dim": head_dim}
    nbytes = verify_scratch_bytes(card, max_num_reqs=8, max_seqlen_q=16, **sizes)
    widths = [(2, None), (4, None), (2, 1.0), (2, 0.5)]
    for num_reqs, seqlen_q in itertools.product((1, 2, 3, 5, 8), (1, 4, 7, 16)):
        for page_size, (itemsize, kv_bytes), heavy in itertools.product((1, 16, 880), widths, (False, True)):
            shape = {"num_reqs": num_reqs, "max_seqlen_q": seqlen_q, "page_size": page_size, "heavy": heavy}
            plan = plan_verify(card, max_seq_len=2**20, itemsize=itemsize, kv_bytes=kv_bytes, **shape, **sizes)
            assert 4 * scratch_floats(num_reqs * seqlen_q, 24, head_dim, plan.num_splits) <= nbytes, (shape, kv_bytes)


def test_workspace_rejects_splits_that_are_too_far_apart():
    with pytest.raises(ArgumentError) as caught:
        Workspace(torch.empty_strided((4, 2, 3, 68), (204, 102, 2**30, 1), device="meta"))
    assert str(caught.value) == (
        "Workspace: part: expected the splits of one token and head within 2^31 elements, got 3,221,225,472; move them closer"
    )


def test_scratch_bytes_are_known_beforehand():
    """8 requests x 16 tokens at 24 q / 4 kv heads, D 256 on a card of 132 SMs; the original took 960 MiB."""
    nbytes = verify_scratch_bytes(H200, max_num_reqs=8, max_seqlen_q=16, num_q_heads=24, num_kv_heads=4, head_dim=256)
    assert nbytes < 64 * 2**20
    sizes = {"max_num_reqs": 4, "max_seqlen_q": 8, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    assert workspace().nbytes == verify_scratch_bytes(device_props(torch.device(DEVICE)), **sizes)


@pytest.mark.parametrize("return_lse", [False, True])
def test_torch_compile_fullgraph(return_lse):
    call = make([300, 75], [8, 2], device=DEVICE)

    def step(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q):
        given = verify_attention(
            q * 2, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q=8, return_lse=return_lse
        )
        return given[0] + given[1][..., None] if return_lse else given + 1

    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(*tensors), step(*tensors), rtol=0, atol=0, equal_nan=True)


def test_torch_compile_reports_our_errors():
    call = make([300, 75], [8, 2], device=DEVICE)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q):
        return verify_attention(**call | {"q": q, "num_splits": 0})

    with pytest.raises(Exception, match=r"num_splits: expected None or an int 1\.\.128, got 0"):
        step(call["q"])


def every_option(**options):
    """A call with everything that is a tensor, and every number."""
    heads = {"sinks": torch.ones(4, device=DEVICE), "alibi_slopes": torch.full((4,), 0.01, device=DEVICE)}
    call = make([300, 75], [8, 2], device=DEVICE, kv_format="int8", **heads, **options)
    tree = torch.tril(torch.ones(8, 8, dtype=torch.bool))
    tensors = {"tree_mask": pack_tree_mask(torch.cat((tree, tree[:2]))).to(DEVICE), "out_scale": torch.ones(1, device=DEVICE)}
    return call | tensors | {"softcap": 5.0, "window_size": 40, "num_sink_tokens": 3, "chunk_size": 100}


def test_torch_compile_fullgraph_with_every_option():
    call = every_option()
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in call.items() if name not in tensors}

    def step(**tensors):
        return verify_attention(**tensors, **numbers, return_lse=True)

    for ours, theirs in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(**tensors), step(**tensors), strict=True):
        assert same_bits(ours, theirs)


def test_operator_with_every_option_passes_opcheck():
    call = every_option()
    out, lse = torch.empty_like(call["q"], dtype=torch.float8_e4m3fn), torch.empty(call["q"].shape[:2], device=DEVICE)
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    options = [call[name] for name in ("k_scale", "v_scale", "alibi_slopes", "sinks", "tree_mask", "out_scale")]
    arguments = (*(call[name] for name in names), out, lse, None, 8, 0, 0.125, *options, True, 40, 3, 100, 5.0, True)
    # The schema test compares bits by arithmetic that torch lacks for fp8 tensors.
    tests = ("test_autograd_registration", "test_faketensor")
    report = torch.library.opcheck(torch.ops.bigpool.verify_attention, arguments, test_utils=tests)
    assert set(report.values()) == {"SUCCESS"}, report


def test_outputs_carry_no_gradient():
    call = make([300, 75], [8, 2], device=DEVICE)
    call["q"].requires_grad_()
    for backend in ("auto", "torch", "triton"):
        assert not verify_attention(**call, backend=backend).requires_grad


def test_operator_passes_opcheck():
    call = make([300, 75], [8, 2])
    out, lse = torch.empty_like(call["q"]), torch.empty(call["q"].shape[:2])
    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    report = torch.library.opcheck(torch.ops.bigpool.verify_attention, (*tensors, out, lse, None, 8, 0, 0.125))
    assert set(report.values()) == {"SUCCESS"}, report


def backend_error(dtype, interpret):
    tests = Path(__file__).parent
    code = (
        f"import os; os.environ['TRITON_INTERPRET'] = '{interpret}'\n"
        "import torch; from verify_inputs import make, run\n"
        f"try: run(make([75], [6], dtype=torch.{dtype}))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tests), *sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip()


def test_triton_backend_on_cpu_needs_the_interpreter():
    assert backend_error("float16", 0) == (
        "BackendError backend: expected CUDA tensors or Triton's interpreter, got CPU tensors; "
        "set TRITON_INTERPRET=1 before triton is imported, or pass backend='torch'"
    )


def test_interpreter_refuses_bf16():
    assert backend_error("bfloat16", 1) == (
        "BackendError backend: expected float16|float32 in Triton's interpreter, got bfloat16, "
        "which it computes wrongly; call .half()"
    )
