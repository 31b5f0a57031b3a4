"""The Hopper kernels of verify attention, held to the error rule, to the plain kernel's meaning of NaN, and to far pages."""

import pytest
import torch

from bigpool import SparsePool, attention, formats
from bigpool.ops import _verify_sm90
from bigpool.ops.verify import verify_attention
from bigpool.workspace import Workspace
from verify_inputs import QUANTISED, judge, make, run, same_bits

on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and _verify_sm90.has_gluon()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not on_hopper, reason="needs compute capability 9.0 and a Triton of tuning_sm90.TRITON_VERSIONS"),
]
FORMATS = [(None, None), *QUANTISED]
HEADS = (24, 4)


@pytest.fixture
def taken(monkeypatch):
    """Calls that the Hopper kernel took."""
    calls = []
    launch = _verify_sm90.launch
    monkeypatch.setattr(_verify_sm90, "launch", lambda *arguments: (calls.append(1), launch(*arguments)))
    return calls


def hopper(call, **options):
    return verify_attention(**call, return_lse=True, **options)


def batch(kv_format, scales, **options):
    defaults = {"seq_lens": [1_800, 700, 65, 0], "q_lens": [3, 2, 1, 0], "page_size": 880, "heads": HEADS, "head_dim": 256}
    return make(kv_format=kv_format, scales=scales, device="cuda", **(defaults | {"dtype": torch.bfloat16} | options))


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 880])
def test_every_format_and_layout(taken, kv_format, scales, kv_layout, page_size):
    call = batch(kv_format, scales, kv_layout=kv_layout, page_size=page_size)
    judge(call, *hopper(call))
    assert taken


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("q_len", [1, 2, 5, 6, 8, 11, 16, 21, 22])
def test_every_number_of_rows(taken, kv_format, scales, q_len):
    call = batch(kv_format, scales, seq_lens=[1_500, 300, 3], q_lens=[q_len, 1, 3])
    judge(call, *hopper(call))
    assert bool(taken) == (q_len * 6 <= 128)


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1), (16, 2), (32, 2)])
@pytest.mark.parametrize("page_size", [16, 880])
def test_every_head_dim_and_group(taken, kv_format, scales, head_dim, heads, page_size):
    for q_len in (2, 8):
        call = batch(
            kv_format, scales, head_dim=head_dim, heads=heads, seq_lens=[1_500, 129], q_lens=[q_len, 2], page_size=page_size
        )
        judge(call, *hopper(call))
    assert len(taken) == 2


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("page_size", [16, 880])
def test_one_split_and_many_of_specialised_warps(taken, kv_format, scales, page_size):
    call = batch(kv_format, scales, q_lens=[16, 9, 1, 0], page_size=page_size)
    for num_splits in (1, 2, 7):
        judge(call, *hopper(call, num_splits=num_splits))
    assert len(taken) == 3


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits(taken, kv_format, scales, dtype, num_splits):
    call = batch(kv_format, scales, dtype=dtype)
    judge(call, *hopper(call, num_splits=num_splits))
    assert taken


@pytest.mark.parametrize("kv_format", [None, "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("page_size", "q_len"), [(880, 5), (880, 8), (880, 16), (16, 5), (32, 16)])
def test_nan_in_later_draft_tokens_never_reaches_earlier_rows(taken, kv_format, page_size, q_len):
    scales = None if kv_format is None else "tensor"
    call = batch(kv_format, scales, seq_lens=[901], q_lens=[q_len], page_size=page_size)
    clean, clean_lse = hopper(call)
    for name in ("k_cache", "v_cache"):
        page, slot = call["block_table"][0, (901 - 2) // page_size], (901 - 2) % page_size
        bits = call[name] if kv_format is None else call[name].view(torch.uint8)
        bits[page, slot] = float("nan") if kv_format is None else 0x7F
    out, lse = hopper(call)
    assert same_bits(out[:-2], clean[:-2])
    assert same_bits(lse[:-2], clean_lse[:-2])
    assert torch.isnan(out[-2:]).all()
    assert taken


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize(("page_size", "q_len"), [(880, 2), (880, 16), (16, 2)])
def test_a_page_outside_the_pool_makes_nan(taken, kv_format, scales, page_size, q_len):
    call = batch(kv_format, scales, seq_lens=[2_000, 1_900], q_lens=[q_len, 2], page_size=page_size)
    clean, _ = hopper(call)
    for bad in (len(call["k_cache"]), -1, 2**31 - 1, -(2**31)):
        call["block_table"][0, 1] = bad
        out, _ = hopper(call)
        assert torch.isnan(out[:q_len]).all()
        assert same_bits(out[q_len:], clean[q_len:])
    assert len(taken) == 5


def test_a_table_without_columns_goes_to_the_plain_kernel(taken):
    call = batch(None, None, seq_lens=[5], q_lens=[2])
    call["block_table"] = call["block_table"][:, :0]
    out, lse = hopper(call)
    assert not taken
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
def test_a_scale_of_one_side_only(taken, which):
    call = batch("fp8_e4m3", "tensor")
    call[which] = None
    judge(call, *hopper(call))
    assert taken


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
@pytest.mark.parametrize("which", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("page_size", "q_len"), [(880, 4), (880, 16), (16, 4)])
def test_a_nan_scale_reaches_the_rows_that_see_its_key(taken, kv_format, which, page_size, q_len):
    call = batch(kv_format, "token_head", seq_lens=[901], q_lens=[q_len], page_size=page_size)
    clean, _ = hopper(call)
    page, slot = call["block_table"][0, (901 - 2) // page_size], (901 - 2) % page_size
    call[which][page, slot] = float("nan")
    out, _ = hopper(call)
    assert same_bits(out[:-2], clean[:-2])
    assert torch.isnan(out[-2:]).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kv_format", [None, "int8", "int4"])
@pytest.mark.parametrize("q_len", [4, 16])
def test_a_query_that_is_not_finite_stays_in_its_row(taken, kv_format, q_len, value):
    call = batch(kv_format, kv_format and "token_head", seq_lens=[901], q_lens=[q_len])
    clean, _ = hopper(call)
    call["q"][1, 3, 7] = value
    out, _ = hopper(call)
    assert torch.isnan(out[1, 3]).all()
    out[1, 3] = clean[1, 3]
    # Rows share the moments at which running maxima are raised, so last bits may differ.
    assert float((out - clean).abs().max()) <= 2e-3
    assert taken


@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
@pytest.mark.parametrize("q_len", [2, 16])
def test_scales_of_any_size(taken, kv_format, scales, q_len):
    call = batch(kv_format, scales, seq_lens=[1_000], q_lens=[q_len])
    call["k_scale"] *= 1e-2
    sizes = 10.0 ** torch.linspace(-6, 4, call["v_scale"].numel(), device="cuda").view_as(call["v_scale"])
    call["v_scale"].mul_(sizes)
    call["v_scale"].nan_to_num_(1.0)
    judge(call, *hopper(call))
    assert taken


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize(("page_size", "q_len"), [(880, 3), (880, 16), (16, 3)])
def test_the_top_of_a_far_pool_gives_the_bits_of_the_bottom(taken, kv_format, scales, page_size, q_len):
    call = batch(kv_format, scales, q_lens=[q_len, 2, 1, 0], page_size=page_size)
    pages = len(call["k_cache"])
    num_pages = 20_000 * 880 // page_size
    ids = torch.arange(num_pages - pages, num_pages, device="cuda")
    far = dict(call)
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        near = call.get(name)
        if near is None or near.dim() < 3:
            continue
        pool = SparsePool((num_pages, *near.shape[1:]), near.dtype, pages=range(num_pages - pages, num_pages), device="cuda")
        pool.tensor[num_pages - pages :] = near
        far[name] = pool.tensor
    assert (num_pages - pages) * far["k_cache"].stride(0) > 2**31
    valid = (call["block_table"] >= 0) & (call["block_table"] < pages)
    far["block_table"] = torch.where(valid, call["block_table"] + int(ids[0]), call["block_table"])
    for got, expected in zip(hopper(far), hopper(call), strict=True):
        assert same_bits(got, expected)
    assert len(taken) == 2


def test_graph_replay_and_a_small_workspace(taken):
    call = batch("int8", "token_head", seq_lens=[9_000, 700, 65, 0], q_lens=[4, 3, 1, 0])
    workspace = Workspace(torch.empty(8 * 24 * 3 * 260, device="cuda"))
    eager = hopper(call, workspace=workspace)
    judge(call, *eager)
    out = torch.empty_like(call["q"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = hopper(call, workspace=workspace, out=out)
    for seed in (5, 6):
        other = batch("int8", "token_head", seed=seed, seq_lens=[8_800, 5, 64, 333], q_lens=[2, 4, 1, 1])
        for name in ("q", "k_cache", "v_cache", "k_scale", "v_scale", "seq_lens", "cu_seqlens_q"):
            call[name][: len(other[name])] = other[name]
        call["block_table"].fill_(-1)
        call["block_table"][:, : other["block_table"].shape[1]] = other["block_table"]
        workspace.part.fill_(float("nan"))
        graph.replay()
        again = hopper(call)
        torch.cuda.synchronize()
        judge(call, out, lse)
        assert again[0].isfinite().all()


def test_the_plain_kernel_is_what_backend_triton_means(taken):
    run(batch("int8", "token_head"))
    assert not taken


def test_inline_scales_go_to_the_plain_kernel(taken):
    call = batch("int8", "token_head", inline=True)
    judge(call, *hopper(call))
    assert not taken, "rows of 260 bytes cannot be copied by TMA"


def test_rotation_in_one_launch_is_the_twin_s():
    q = torch.randn(7, 24, 256, device="cuda").bfloat16()
    assert same_bits(_verify_sm90.rotate_queries(q), formats.rotate(q))


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("page_size", [16, 880])
@pytest.mark.parametrize("verify_seqlen_q", [4, 16])
def test_the_short_requests_of_a_mixed_batch(taken, kv_format, scales, page_size, verify_seqlen_q):
    """Scratch for short requests only, and none of a long one's rows."""
    call = batch(kv_format, scales, seq_lens=[1_800, 9_000, 700, 65], q_lens=[30, 4, 3, 1], page_size=page_size)
    part = torch.full((4 * verify_seqlen_q, 24, 33, 260), float("nan"), device="cuda")
    workspace = Workspace(part)
    judge(call, *attention(**call, return_lse=True, verify_seqlen_q=verify_seqlen_q, workspace=workspace))
    assert taken
    assert part[:verify_seqlen_q].isnan().all(), "rows of the long request"
    assert part[verify_seqlen_q].isfinite().any()
