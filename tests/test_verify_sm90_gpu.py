"""The Hopper kernel of verify attention, held to the error rule, to the plain kernel's meaning of NaN, and to far pages."""

import pytest
import torch

from bigpool import SparsePool, formats
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
@pytest.mark.parametrize("page_size", [64, 880])
def test_every_format_and_layout(taken, kv_format, scales, kv_layout, page_size):
    call = batch(kv_format, scales, kv_layout=kv_layout, page_size=page_size)
    judge(call, *hopper(call))
    assert taken


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("q_len", [1, 2, 5, 8, 10])
def test_every_number_of_rows(taken, kv_format, scales, q_len):
    call = batch(kv_format, scales, seq_lens=[1_500, 300], q_lens=[q_len, 1])
    judge(call, *hopper(call))
    assert bool(taken) == (q_len * 6 <= (32 if kv_format is None else 64))


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (32, 2)])
def test_every_head_dim_and_group(taken, kv_format, scales, head_dim, heads):
    call = batch(kv_format, scales, head_dim=head_dim, heads=heads, seq_lens=[1_500, 129], q_lens=[2, 2])
    judge(call, *hopper(call))
    assert bool(taken) == ((head_dim == 128 and kv_format != "int4") or kv_format is None)


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_splits", [1, 2, 7])
def test_splits(taken, kv_format, scales, dtype, num_splits):
    call = batch(kv_format, scales, dtype=dtype)
    judge(call, *hopper(call, num_splits=num_splits))
    assert taken


@pytest.mark.parametrize("kv_format", [None, "fp8_e4m3", "fp8_e5m2"])
def test_nan_in_later_draft_tokens_never_reaches_earlier_rows(taken, kv_format):
    scales = None if kv_format is None else "tensor"
    call = batch(kv_format, scales, seq_lens=[901], q_lens=[5])
    clean, clean_lse = hopper(call)
    for name in ("k_cache", "v_cache"):
        page, slot = call["block_table"][0, (901 - 2) // 880], (901 - 2) % 880
        bits = call[name] if kv_format is None else call[name].view(torch.uint8)
        bits[page, slot] = float("nan") if kv_format is None else 0x7F
    out, lse = hopper(call)
    assert same_bits(out[:3], clean[:3])
    assert same_bits(lse[:3], clean_lse[:3])
    assert torch.isnan(out[3:]).all()


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
def test_a_page_outside_the_pool_makes_nan(taken, kv_format, scales):
    call = batch(kv_format, scales, seq_lens=[2_000, 1_900], q_lens=[2, 2])
    clean, _ = hopper(call)
    for bad in (len(call["k_cache"]), -1, 2**31 - 1, -(2**31)):
        call["block_table"][0, 1] = bad
        out, _ = hopper(call)
        assert torch.isnan(out[:2]).all()
        assert same_bits(out[2:], clean[2:])


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
def test_a_nan_scale_reaches_the_rows_that_see_its_key(taken, kv_format, which):
    call = batch(kv_format, "token_head", seq_lens=[901], q_lens=[4])
    clean, _ = hopper(call)
    page, slot = call["block_table"][0, 1], (901 - 2) % 880
    call[which][page, slot] = float("nan")
    out, _ = hopper(call)
    assert same_bits(out[:2], clean[:2])
    assert torch.isnan(out[2:]).all()


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
def test_scales_of_any_size(taken, kv_format, scales):
    if scales is None:
        pytest.skip("no scales")
    call = batch(kv_format, scales, seq_lens=[1_000], q_lens=[2])
    call["k_scale"] *= 1e-2
    sizes = 10.0 ** torch.linspace(-6, 4, call["v_scale"].numel(), device="cuda").view_as(call["v_scale"])
    call["v_scale"].mul_(sizes)
    call["v_scale"].nan_to_num_(1.0)
    judge(call, *hopper(call))
    assert taken


@pytest.mark.parametrize(("kv_format", "scales"), FORMATS)
def test_the_top_of_a_far_pool_gives_the_bits_of_the_bottom(taken, kv_format, scales):
    call = batch(kv_format, scales)
    pages = len(call["k_cache"])
    num_pages = 20_000
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
