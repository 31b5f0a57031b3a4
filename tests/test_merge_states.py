"""Merging states: the error rule, empty and bad states, cascades of verify attention, messages, compiled graphs."""

import math

import pytest
import torch

import bigpool
from bigpool import merge_states, reference, reference_merge, verify_attention
from bigpool.errors import ArgumentError
from bigpool.proof.judge import judge_errors
from verify_inputs import make, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
BACKENDS = ["triton", "torch"]
INF = math.inf


def states(num_states=3, num_tokens=5, num_heads=6, head_dim=48, dtype=torch.float16, seed=0, spread=3.0):
    rng = torch.Generator().manual_seed(seed)
    outs = torch.randn(num_states, num_tokens, num_heads, head_dim, generator=rng).to(dtype)
    lses = torch.randn(num_states, num_tokens, num_heads, generator=rng) * spread
    return outs.to(DEVICE), lses.to(DEVICE)


def check(outs, lses, **options):
    """Merges and holds both results to the error rule; returns them."""
    merged = dict(zip(("out", "lse"), merge_states(outs, lses, **options), strict=True))
    expected = reference_merge.merge_states(outs.cpu(), lses.cpu(), compute_dtype=torch.float64)
    baseline = reference_merge.merge_states(outs.cpu(), lses.cpu(), reverse=True)
    named = [dict(zip(("out", "lse"), pair, strict=True)) for pair in (expected, baseline)]
    for entry in judge_errors({name: value.cpu() for name, value in merged.items()}, *named):
        assert entry["ok"], entry["text"]
    return merged["out"], merged["lse"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_states", [1, 2, 3, 17])
def test_states_and_dtypes(num_states, dtype, backend):
    check(*states(num_states, dtype=dtype), backend=backend)


@pytest.mark.parametrize("num_heads", [1, 3, 24, 40])
@pytest.mark.parametrize("head_dim", [1, 16, 80, 256, 512])
def test_geometries(head_dim, num_heads):
    check(*states(num_heads=num_heads, head_dim=head_dim, num_tokens=3), backend="triton")


@pytest.mark.parametrize("shift", [-1e4, 80.0, 1e4])
def test_lses_far_from_zero(shift):
    outs, lses = states(dtype=torch.float32)
    check(outs, lses + shift, backend="triton")


def test_kernel_and_twin_agree_in_the_definition():
    outs, lses = states(dtype=torch.float64)
    weights = torch.softmax(lses.double(), 0).unsqueeze(-1)
    out, lse = reference_merge.merge_states(outs, lses, compute_dtype=torch.float64)
    assert torch.allclose(out, (weights * outs).sum(0), rtol=0, atol=1e-12)
    assert torch.allclose(lse, torch.logsumexp(lses.double(), 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_without_keys_adds_nothing_even_if_it_is_nan(backend):
    outs, lses = states()
    lses[1] = -INF
    clean = merge_states(outs[[0, 2]], lses[[0, 2]], backend=backend)
    outs[1] = math.nan
    for ours, theirs in zip(merge_states(outs, lses, backend=backend), clean, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_at_all_give_zero(backend):
    outs, lses = states()
    lses[:, 2, 3] = -INF
    outs[:, 2, 3] = math.nan
    out, lse = merge_states(outs, lses, backend=backend)
    assert (out[2, 3] == 0).all()
    assert lse[2, 3] == -INF
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).sum() == lse.numel() - 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("rest", [0.5, -INF])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_bad_lse_makes_its_row_nan_and_no_other(bad, rest, backend):
    outs, lses = states()
    clean, clean_lse = merge_states(outs, lses, backend=backend)
    lses[:, 2, 3] = rest
    lses[1, 2, 3] = bad
    out, lse = merge_states(outs, lses, backend=backend)
    assert out[2, 3].isnan().all()
    assert lse[2, 3].isnan()
    out[2, 3], lse[2, 3] = clean[2, 3], clean_lse[2, 3]
    assert same_bits(out, clean)
    assert same_bits(lse, clean_lse)


def test_strides_and_lists_give_the_same_bits():
    outs, lses = states()
    plain = merge_states(outs, lses, backend="triton")
    wide = torch.full((6, 3, 5, 60), math.nan, dtype=outs.dtype, device=DEVICE)
    wide[..., 7:55] = outs.permute(2, 0, 1, 3)
    out = torch.full((5, 6, 50), math.nan, dtype=outs.dtype, device=DEVICE)
    strided = wide[..., 7:55].permute(1, 2, 0, 3)
    lses_strided = lses.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for given in ((strided, lses_strided), (list(outs), tuple(lses))):
        merged, lse = merge_states(*given, out=out[..., :48], backend="triton")
        assert merged.data_ptr() == out.data_ptr()
        assert same_bits(out[..., :48], plain[0])
        assert same_bits(lse, plain[1])
    assert out[..., 48:].isnan().all()


def test_no_tokens():
    outs, lses = states(num_tokens=0)
    out, lse = merge_states(outs, lses, backend="triton")
    assert (out.shape, lse.shape) == ((0, 6, 48), (0, 6))


def part_of(call, first_page, last_page, visible_in_full):
    """The same queries over pages [first_page, last_page) of each request; all of them seen by every query, or causally."""
    page_size = call["k_cache"].shape[1]
    part = {**call, "block_table": call["block_table"][:, first_page:last_page].contiguous()}
    part["seq_lens"] = (call["seq_lens"] - first_page * page_size).clamp(0, (last_page - first_page) * page_size)
    if not visible_in_full:
        return part
    # Each query token is a request of its own, so that it sees the whole prefix.
    tokens = call["cu_seqlens_q"].diff().long()
    for name in ("block_table", "seq_lens"):
        part[name] = part[name].repeat_interleave(tokens, 0)
    part["cu_seqlens_q"] = torch.arange(len(call["q"]) + 1, dtype=torch.int32, device=DEVICE)
    return part | {"max_seqlen_q": 1}


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefix_and_suffix_equal_the_whole(backend):
    """A shared prefix of 3 pages once, suffixes per request, merged: attention over everything (cascade)."""
    call = make([120, 75, 64], [4, 1, 3], page_size=16, device=DEVICE)
    call["block_table"][1:, :3] = call["block_table"][0, :3]
    parts = [part_of(call, 0, 3, True), part_of(call, 3, call["block_table"].shape[1], False)]
    pairs = [verify_attention(**part, return_lse=True, backend=backend) for part in parts]
    out, lse = merge_states([out for out, _ in pairs], [lse for _, lse in pairs], backend=backend)
    inputs = {name: value for name, value in call.items() if name != "max_seqlen_q"}
    expected, expected_lse = reference.verify_attention(**inputs, compute_dtype=torch.float64)
    # The parts are rounded to fp16 before they are merged: half an ulp of each, once more than the whole.
    bound = 4 * torch.finfo(torch.float16).eps * expected.abs().max()
    assert (out.double() - expected).abs().max() <= bound
    assert (lse.double() - expected_lse).abs().max() <= 1e-5
    alone = pairs[1][0].double()
    assert (alone - expected).abs().max() > 10 * bound, "the prefix matters"


MESSAGES = {
    "rank": (lambda o, x: (o[0], x), {}, "outs: expected bfloat16|float16|float32 [num_states, num_tokens, num_heads, head_dim], got float16 [5, 6, 48]; stack the states in the first axis"),
    "lse dtype": (lambda o, x: (o, x.half()), {}, "lses: expected float32 [num_states=3, num_tokens=5, num_heads=6], got float16 [3, 5, 6]; pass one lse per state, token and head"),
    "lse shape": (lambda o, x: (o, x[:2]), {}, "lses: expected float32 [num_states=3, num_tokens=5, num_heads=6], got float32 [2, 5, 6]; pass one lse per state, token and head"),
    "no states": (lambda o, x: (o[:0], x[:0]), {}, "outs: expected 1 state or more, got 0; pass the states to merge"),
    "empty list": (lambda o, x: ([], []), {}, "outs: expected a tensor or a list of tensors, got []; pass one per state"),
    "mixed list": (lambda o, x: ([o[0], o[1].float()], x[:2]), {}, f"outs: expected states of one shape, dtype and device, got float16 [5, 6, 48] on {DEVICE}{':0' * (DEVICE == 'cuda')} and float32 [5, 6, 48] on {DEVICE}{':0' * (DEVICE == 'cuda')}; pass the same tokens and heads in each state"),
    "head_dim": (lambda o, x: (o[..., :1].expand(3, 5, 6, 600).contiguous(), x), {}, "outs: expected head_dim 1..512, got 600; split the heads"),
    "out": (lambda o, x: (o, x), {"out": torch.empty(5, 6, 48, device=DEVICE)}, "out: expected float16 [num_tokens=5, num_heads=6, head_dim=48], got float32 [5, 6, 48]; pass torch.empty_like(outs[0])"),
    "backend": (lambda o, x: (o, x), {"backend": "cuda"}, "backend: expected 'auto' or 'triton' or 'torch', got 'cuda'; 'auto' chooses"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    change, options, text = MESSAGES[name]
    with pytest.raises(ArgumentError) as caught:
        merge_states(*change(*states()), **options)
    assert str(caught.value) == f"merge_states: {text}"


def test_torch_compile_fullgraph():
    outs, lses = states()

    def step(outs, lses):
        out, lse = merge_states(outs * 2, lses)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(compiled(outs, lses), step(outs, lses), strict=True):
        assert same_bits(ours, theirs)


def test_operator_passes_opcheck():
    outs, lses = (tensor.cpu() for tensor in states())
    arguments = (outs, lses, torch.empty_like(outs[0]), torch.empty_like(lses[0]))
    report = torch.library.opcheck(torch.ops.bigpool.merge_states, arguments)
    assert set(report.values()) == {"SUCCESS"}, report


def test_it_is_public():
    assert bigpool.merge_states is merge_states
