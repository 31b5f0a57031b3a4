"""Mixed batches: decode, verify and prefill rows in one call, held to the error rule and to the two ops they are made of."""

import pytest
import torch

from bigpool import attention
from bigpool.errors import ArgumentError, WorkspaceError
from bigpool.ops import _prefill_launch, _prefill_sm90, _verify_sm90
from bigpool.ops.attention import launch
from bigpool.ops.prefill import prefill_attention
from bigpool.ops.verify import verify_attention
from bigpool.workspace import Workspace
from verify_inputs import QUANTISED, judge, make, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = ([90, 300, 0, 17, 16, 7, 260], [1, 80, 0, 17, 16, 9, 5])


def run(call, **options):
    return attention(**call, return_lse=True, backend="triton", **options)


@pytest.mark.parametrize("verify_seqlen_q", [1, 16, 80])
def test_every_row_keeps_the_error_rule(verify_seqlen_q):
    call = make(*LENGTHS, device=DEVICE)
    out, lse = run(call, verify_seqlen_q=verify_seqlen_q)
    judge(call, out, lse)
    assert (out[114:116] == 0).all(), "seq_len 7 < q_len 9: the first two tokens see no key"
    assert (lse[114:116] == float("-inf")).all()


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False}, {"window_size": 37}, {"window_size": 20, "num_sink_tokens": 3}, {"softcap": 2.0},
        {"softmax_scale": 0.5}, {"kv_layout": "HND"}, {"page_size": 48}, {"heads": (3, 3)}, {"head_dim": 40},
        {"sinks": torch.linspace(-1, 1, 4, device=DEVICE)}, {"dtype": torch.float32},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options(options):
    call = make(*LENGTHS, device=DEVICE, **options)
    judge(call, *run(call))


@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
def test_formats(kv_format, scales):
    call = make(*LENGTHS, device=DEVICE, kv_format=kv_format, scales=scales)
    judge(call, *run(call))


def test_rows_have_the_bits_of_the_op_that_has_their_length():
    call = make([600, 700], [40, 3], heads=(4, 1), device=DEVICE)
    out, lse = run(call)
    prefilled, prefilled_lse = prefill_attention(**call, return_lse=True, backend="triton")
    assert same_bits(out[:40], prefilled[:40])
    assert same_bits(lse[:40], prefilled_lse[:40])
    verified, verified_lse = verify_attention(**call | {"max_seqlen_q": 16}, return_lse=True, backend="triton")
    assert same_bits(out[40:], verified[40:])
    assert same_bits(lse[40:], verified_lse[40:])
    assert not same_bits(out[40:], prefilled[40:]), "the two ops cannot be told apart"


def test_out_may_be_q():
    """The rows of short requests are read after those of long ones were written."""
    call = make([600, 700, 50], [40, 3, 1], heads=(4, 1), device=DEVICE)
    expected, _ = run(call)
    got, _ = run(call, out=call["q"])
    assert got.data_ptr() == call["q"].data_ptr()
    assert same_bits(got, expected)


def test_no_key_of_a_short_request_is_prefilled(monkeypatch):
    seen = []
    monkeypatch.setattr(_prefill_launch, "run", lambda call, kernels: seen.append(call))
    run(make([600, 700, 50], [17, 16, 1], device=DEVICE))
    assert [call.seq_lens.tolist() for call in seen] == [[600, -1, -1]]


def test_short_requests_alone_are_verify_attention():
    call = make([90, 40], [3, 16], device=DEVICE)
    expected = verify_attention(**call, return_lse=True, backend="triton")
    for got, want in zip(run(call), expected, strict=True):
        assert same_bits(got, want)


def test_scratch_has_rows_for_short_requests_only():
    """Two requests of at most 5 tokens: 10 rows, though the batch has 43. A tile of 16 rows of 3 heads holds a sixth token."""
    call = make([700, 600], [3, 40], heads=(3, 1), device=DEVICE)
    whole = torch.full((11 * 3, 8, 64 + 4), float("nan"), device=DEVICE)
    part = whole[: 10 * 3].view(10, 3, 8, 64 + 4)
    judge(call, *run(call, workspace=Workspace(part), verify_seqlen_q=5))
    assert part[:3].isfinite().any(), "no scratch was needed"
    assert whole[9:].isnan().all(), "rows of the long request, or past the end"
    with pytest.raises(WorkspaceError, match="32 query tokens x 3 heads"):
        run(call, workspace=Workspace(torch.empty(100, device=DEVICE)))


def test_long_requests_of_any_number_of_tokens_leave_short_ones_alone():
    """A long request may have any length, also keys that are NaN."""
    call = make([90, 300], [2, 40], device=DEVICE)
    clean, _ = run(call)
    call["k_cache"][call["block_table"][1, :18].long()] = float("nan")
    out, _ = run(call)
    assert same_bits(out[:2], clean[:2])
    assert torch.isnan(out[2:]).all()


def test_the_twin():
    call = make(*LENGTHS)
    judge(call, *attention(**call, return_lse=True))
    judge(call, *attention(**call, return_lse=True, backend="torch"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"verify_seqlen_q": 0}, "verify_seqlen_q: expected an int 1..256, got 0; longer requests are prefilled"),
        ({"verify_seqlen_q": 257}, "verify_seqlen_q: expected an int 1..256, got 257; longer requests are prefilled"),
        ({"workspace": 3}, "workspace: expected a bigpool.Workspace, got int; make one with Workspace.for_verify"),
        ({"backend": "cuda"}, "backend: expected 'auto' or 'triton' or 'torch', got 'cuda'; 'auto' chooses"),
        ({"sinks": torch.zeros(3)},
         "sinks: expected float32 [num_q_heads=4], got float32 [3]; pass one fp32 logit per query head"),
    ],
)  # fmt: skip
def test_arguments(changes, text):
    with pytest.raises(ArgumentError) as caught:
        attention(**make([9], [2]) | changes)
    assert str(caught.value) == f"attention: {text}"


def test_the_checked_mode():
    call = make([9], [2])
    call["seq_lens"][0] = 1
    with pytest.raises(ArgumentError, match="seq_lens: expected at least q_len=2, got 1 at request 0"):
        attention(**call, check=True)


def test_compiled_whole():
    call = make([90, 300], [2, 40])
    compiled = torch.compile(lambda: attention(**call), fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(), attention(**call))


def test_plain_triton_is_plain_on_every_card(monkeypatch):
    """backend="triton" never asks whether a kernel of the card has the call."""
    for module, name in ((_prefill_sm90, "shape_of"), (_verify_sm90, "takes")):
        monkeypatch.setattr(module, name, lambda *arguments, name=name: pytest.fail(f"asked {name}"))
    call = make([600, 700], [40, 3], heads=(4, 1), device=DEVICE)
    run(call)
    prefill_attention(**call, backend="triton")
    verify_attention(**call | {"max_seqlen_q": 16}, backend="triton")
    out, lse = torch.empty_like(call["q"]), torch.empty(call["q"].shape[:2], device=DEVICE)
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    with pytest.raises(pytest.fail.Exception, match="asked shape_of"):
        launch(*(call[name] for name in names), out, lse, None, call["max_seqlen_q"], 16, 0.125)
