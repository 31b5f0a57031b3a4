"""Which calls the Hopper kernel takes, and how it is launched: pure functions, no GPU."""

import inspect
from dataclasses import replace

import pytest
import torch

from bigpool.ops import _verify_launch, _verify_sm90
from bigpool.ops import verify as verify_op
from bigpool.ops._tma import fits_tma
from bigpool.ops._verify_sm90 import _given, _splits_that_fit
from bigpool.tuning import DeviceProps, VerifySpec
from bigpool.tuning_sm90 import pick_kernel, plan_sm90, sm90_supports
from verify_inputs import judge, make, run

H200 = DeviceProps("H200", 90, 132, 227 * 1024)
CASE = {"itemsize": 2, "head_dim": 256, "rows": 24, "page_size": 880}


@pytest.mark.parametrize("kv_format", ["plain", "int8", "int4", "e4m3", "e5m2"])
def test_causal_calls_of_few_rows_are_taken(kv_format):
    assert sm90_supports(H200, VerifySpec(kv_format=kv_format, convert="asm"), **CASE)


@pytest.mark.parametrize(
    "option",
    [{"causal": False}, {"window": 5}, {"chunk": 5}, {"softcap": 1.0}, {"alibi": True}, {"tree_words": 1},
     {"tiles_per_split": 4}, {"out_format": "e4m3"}],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_any_other_option_goes_to_the_plain_kernel(option):
    assert not sm90_supports(H200, replace(VerifySpec(), **option), **CASE)


@pytest.mark.parametrize(
    "changes",
    [{"itemsize": 4}, {"head_dim": 80}, {"head_dim": 512}, {"rows": 129}, {"page_size": 8}, {"page_size": 72}],
    ids=lambda changes: "-".join(f"{name}{value}" for name, value in changes.items()),
)
@pytest.mark.parametrize("kv_format", ["plain", "int8", "int4", "e4m3", "e5m2"])
def test_sizes_that_go_to_the_plain_kernel(kv_format, changes):
    assert not sm90_supports(H200, VerifySpec(kv_format=kv_format), **(CASE | changes))


SWAPPED, SPECIALISED = "swapped", "specialised"


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "rows", "page_size", "expected"),
    [
        ("plain", 256, 32, 880, SWAPPED), ("plain", 256, 33, 880, SPECIALISED), ("plain", 64, 96, 64, SPECIALISED),
        ("int4", 256, 32, 880, SWAPPED), ("int4", 256, 33, 880, SPECIALISED), ("int4", 128, 6, 880, SPECIALISED),
        ("int8", 256, 64, 880, SWAPPED), ("int8", 256, 65, 880, SPECIALISED), ("int8", 64, 6, 880, SPECIALISED),
        ("int8", 256, 48, 64, SPECIALISED), ("e4m3", 256, 64, 880, SWAPPED), ("e4m3", 256, 96, 880, SPECIALISED),
        ("e5m2", 128, 64, 880, SWAPPED), ("plain", 256, 6, 16, SPECIALISED), ("int8", 128, 6, 32, SPECIALISED),
        ("plain", 256, 129, 880, ""), ("int8", 256, 6, 8, ""), ("plain", 96, 6, 880, ""),
    ],
)  # fmt: skip
def test_which_kernel_has_which_rows(kv_format, head_dim, rows, page_size, expected):
    assert pick_kernel(kv_format, head_dim=head_dim, rows=rows, page_size=page_size) == expected


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "rows", "page_size", "expected"),
    [
        ("plain", 256, 48, 880, (64, 2, 4, 14, 1, 128)),
        ("plain", 256, 96, 880, (128, 2, 8, 14, 1, 56)),
        ("int8", 256, 96, 16, (128, 2, 8, 1, 4, 40)),
        ("int8", 128, 6, 32, (64, 2, 4, 1, 2, 128)),
        ("e4m3", 256, 96, 880, (128, 1, 8, 14, 1, 56)),
        ("e4m3", 128, 96, 64, (128, 2, 8, 1, 1, 56)),
    ],
)
def test_plans_of_specialised_warps(kv_format, head_dim, rows, page_size, expected):
    sizes = {"num_reqs": 1, "num_kv_heads": 4, "page_size": page_size, "max_seq_len": 131_072}
    plan = plan_sm90(H200, kv_format=kv_format, head_dim=head_dim, rows=rows, **sizes)
    assert plan.specialised
    assert (plan.tile, plan.num_splits) == (64, 33)
    assert (plan.rows, plan.stages, plan.num_warps, plan.tiles_per_page, plan.pages_per_tile, plan.decode_regs) == expected


@pytest.mark.parametrize("sm", [80, 89, 100, 120])
def test_other_cards_have_the_plain_kernel(sm):
    assert not sm90_supports(replace(H200, sm=sm), VerifySpec(), **CASE)


@pytest.mark.parametrize(
    ("kv_format", "rows", "num_reqs", "max_seq_len", "expected"),
    [
        ("plain", 24, 1, 8_192, (32, 64, 4, 33)),
        ("int8", 24, 1, 8_192, (32, 64, 4, 33)),
        ("int8", 24, 1, 131_072, (32, 64, 4, 66)),
        ("int8", 48, 1, 131_072, (64, 128, 8, 33)),
        ("int8", 6, 64, 1_024, (16, 64, 4, 1)),
        ("e4m3", 48, 16, 32_768, (64, 128, 8, 2)),
        ("plain", 24, 1, 64, (32, 64, 4, 1)),
        ("plain", 24, 1, 0, (32, 64, 4, 1)),
    ],
)
def test_plans(kv_format, rows, num_reqs, max_seq_len, expected):
    sizes = {"num_reqs": num_reqs, "num_kv_heads": 4, "page_size": 880, "max_seq_len": max_seq_len}
    plan = plan_sm90(H200, kv_format=kv_format, head_dim=256, rows=rows, **sizes)
    assert (plan.rows, plan.tile, plan.num_warps, plan.num_splits) == expected


def test_tma_wants_strides_of_16_bytes():
    pages = torch.zeros(3, 16, 2, 264, dtype=torch.int8)
    assert not fits_tma(pages[..., :256]), "rows of 264 bytes"
    assert fits_tma(torch.zeros(3, 16, 2, 272, dtype=torch.int8)[..., :256])
    assert not fits_tma(torch.zeros(2**12, dtype=torch.int8)[1:1025].view(1, 4, 1, 256)), "a base that is not aligned"


def test_scratch_limits_the_splits():
    assert _splits_that_fit(torch.empty(1_000), 300) == 3
    assert _splits_that_fit(torch.empty(2, 4, 7, 20), 300) == 7


def test_a_scale_that_is_not_given_is_one_where_the_other_is():
    unread, scale = torch.full((3,), float("nan")), torch.tensor([2.0])
    assert _given(scale, VerifySpec(scales="head"), unread) is scale
    assert _given(None, VerifySpec(scales="head"), unread).tolist() == [1.0]
    assert _given(None, VerifySpec(), unread) is unread


@pytest.fixture
def on_hopper(monkeypatch):
    """Launches as on an H200, up to its kernel: the calls that it would get, which then go nowhere."""
    calls = []

    def takes(props, spec, call):
        rows, page_size = call.max_seqlen_q * call.q.shape[1] // call.k_pages.shape[2], call.k_pages.shape[1]
        sizes = {"head_dim": call.q.shape[2], "rows": rows, "page_size": page_size}
        return sm90_supports(H200, spec, itemsize=call.q.element_size(), **sizes)

    monkeypatch.setattr(_verify_sm90, "takes", takes)
    monkeypatch.setattr(_verify_sm90, "launch", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(verify_op.OPERATOR, "plain", _verify_launch.launch)
    return calls


def test_a_bare_call_reaches_the_hopper_kernel(on_hopper):
    run(make([90, 70], [2, 1], page_size=64))
    assert len(on_hopper) == 1


OPTIONS = {
    "causal": {"causal": False},
    "window_size": {"window_size": 9},
    "chunk_size": {"chunk_size": 32},
    "softcap": {"softcap": 5.0},
    "alibi_slopes": {"alibi_slopes": torch.linspace(0.1, 1, 4)},
    "sinks": {"sinks": torch.linspace(-1, 1, 4)},
    "tree_mask": {"tree_mask": torch.tensor([[1], [3], [1]], dtype=torch.int32)},
    "out_scale": {"out_scale": torch.tensor([0.01])},
    "deterministic": {"deterministic": "batch"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_no_option_gets_lost_on_hopper(on_hopper, option):
    call = make([90, 70], [2, 1], page_size=64, **OPTIONS[option])
    judge(call, *run(call))
    assert not on_hopper


def test_every_option_of_the_rules_is_tried_above():
    other = {"kv_layout", "k_scale", "v_scale", "num_sink_tokens", "softmax_scale", "num_splits", "workspace", "out"}
    other |= {"return_lse", "check", "backend", "max_seqlen_q"}
    named = inspect.signature(verify_op.verify_attention).parameters.values()
    assert {parameter.name for parameter in named if parameter.kind is parameter.KEYWORD_ONLY} - other == set(OPTIONS)
