"""Verify attention through Triton's interpreter (or the GPU, where there is one) against the float64 oracle."""

import pytest
import torch

from bigpool import reference
from bigpool.ops.verify import _launch, verify_attention
from verify_inputs import check, make, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter computes bf16 wrongly.
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 48, 432, 880, 1056])
def test_page_sizes(page_size, dtype):
    check(make([901, 430, 17], [5, 8, 1], page_size=page_size, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 96, 128, 192, 256, 512])
def test_head_dims(head_dim):
    check(make([70, 33], [3, 2], head_dim=head_dim, device=DEVICE))


@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 2), (24, 4), (16, 1), (20, 4), (160, 1)])
def test_head_ratios(heads):
    check(make([70, 33], [3, 9], heads=heads, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("seq_len", [1, 2, 40])
def test_few_keys_over_many_seeds(seq_len, head_dim, dtype):
    """With few numbers, one order may be right by luck: the bound must come from several."""
    for seed in range(12):
        check(make([seq_len], [1], heads=(2, 1), head_dim=head_dim, dtype=dtype, seed=seed, device=DEVICE))


@pytest.mark.parametrize("num_splits", [1, 2, 7])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_ragged_batch_with_empty_rows(kv_layout, num_splits):
    call = make([300, 0, 45, 5, 16, 0, 7], [8, 0, 0, 5, 1, 3, 9], kv_layout=kv_layout, device=DEVICE)
    out, lse = check(call, num_splits=num_splits)
    assert (out[14:17] == 0).all(), "seq_len 0: no key is seen"
    assert (lse[14:17] == float("-inf")).all()
    assert (out[17:19] == 0).all(), "seq_len 7 < q_len 9: the first two tokens see no key"
    assert (out[19:] != 0).any(-1).all()


def test_more_splits_than_tiles():
    check(make([300, 0, 16], [2, 0, 1], device=DEVICE), num_splits=128)


def test_strides_of_k_and_v_differ():
    call = make([300, 77], [4, 2], page_size=48, device=DEVICE)
    whole = torch.full((*call["k_cache"].shape[:2], 2, 2, 80), float("nan"), dtype=torch.float16, device=DEVICE)
    whole[:, :, :, 0, 8:72] = call["k_cache"]
    padded = {**call, "k_cache": whole[:, :, :, 0, 8:72], "v_cache": call["v_cache"].transpose(1, 2).contiguous().transpose(1, 2)}
    assert padded["k_cache"].stride() != padded["v_cache"].stride()
    for ours, theirs in zip(check(call), check(padded), strict=True):
        assert same_bits(ours, theirs)


def test_q_and_out_strides():
    call = make([300, 77], [4, 2], device=DEVICE)
    fused = torch.randn(6, 9, 64, device=DEVICE).half()
    fused[:, 2:6] = call["q"]
    out = torch.full((6, 4, 100), float("nan"), dtype=torch.float16, device=DEVICE)
    returned, _ = run({**call, "q": fused[:, 2:6]}, out=out[:, :, 20:84])
    assert returned.data_ptr() == out[:, :, 20:84].data_ptr()
    assert same_bits(out[:, :, 20:84], run(call)[0])
    assert out[:, :, :20].isnan().all()
    assert out[:, :, 84:].isnan().all()


def test_output_is_contiguous_for_queries_of_any_strides():
    """torch.empty_like keeps the order of strides, and these put the head dim in the middle."""
    call = make([40, 33], [3, 1], head_dim=32, device=DEVICE)
    call["q"] = torch.as_strided(torch.randn(1_000, device=DEVICE).half(), (4, 4, 32), (1, 1, 1))
    out, _ = check(call)
    assert out.is_contiguous()


def test_a_group_and_q_len_whose_product_wraps():
    """2^20 query tokens of 2,048 heads, all of one element: what lies beyond max_seqlen_q is undefined, the rest is not."""
    tokens, heads, head_dim = 2**20, 2_048, 16
    call = make([64], [1], heads=(1, 1), head_dim=head_dim, dtype=torch.float32, device=DEVICE)
    q = call["q"].expand(tokens, heads, head_dim)
    out = torch.full((heads, head_dim), 7.0, device=DEVICE)
    shared = torch.as_strided(out, (tokens, heads, head_dim), (0, head_dim, 1))
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    arguments = (call["k_cache"], call["v_cache"], call["block_table"], call["seq_lens"], starts)
    lse = torch.empty(heads, device=DEVICE).expand(tokens, heads)
    _launch(q, *arguments, shared, lse, None, 1, 1, 0.25)
    assert (out != 7.0).all()


def test_requests_share_pages():
    call = make([300, 300, 300], [4, 2, 4], device=DEVICE)
    call["block_table"][1:] = call["block_table"][0]
    check(call)


def test_poison_changes_no_bit():
    """What must not be read is NaN in `make`; a cache that holds 1.0 there gives the same bits."""
    call = make([300, 0, 45, 5], [8, 0, 2, 5], device=DEVICE)
    clean = {**call, **{name: call[name].nan_to_num(nan=1.0) for name in ("k_cache", "v_cache")}}
    clean["block_table"] = call["block_table"].clamp(0, len(call["k_cache"]) - 1)
    for poisoned, plain in zip(run(call), run(clean), strict=True):
        assert same_bits(poisoned, plain)
        assert not poisoned.isnan().any()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_later_token_reaches_only_rows_that_see_it(name, bad):
    call = make([75], [6], device=DEVICE)
    good, _ = run(call)
    page, slot = call["block_table"][0, 72 // 16], 72 % 16
    call[name][page, slot] = bad
    out, _ = run(call)
    assert same_bits(out[:3], good[:3]), "tokens at positions 69..71 do not see position 72"
    assert not torch.isfinite(out[3:]).any() if name == "v_cache" or bad != bad else True


def test_one_bad_value_element_makes_the_rows_that_see_it_nan():
    call = make([75], [6], device=DEVICE)
    good, _ = run(call)
    call["v_cache"][call["block_table"][0, 4], 72 % 16, 0, 5] = float("nan")
    out, lse = run(call)
    assert out[3:, :2].isnan().all(), "the query heads of kv head 0"
    assert torch.isfinite(lse).all()
    out[3:, :2] = good[3:, :2]
    assert same_bits(out, good)


@pytest.mark.parametrize("bad_id", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_page_id_outside_the_pool(bad_id):
    """Defined without a check: rows that see a key of that page are NaN, the others are untouched, nothing wild is read."""
    call = make([75, 40], [6, 1], page_size=8, device=DEVICE)
    good, _ = run(call)
    call["block_table"][0, 9] = bad_id
    out, lse = run(call)
    assert same_bits(out[:3], good[:3]), "positions 69..71 do not see page 9, which starts at 72"
    assert out[3:6].isnan().all()
    assert lse[3:6].isnan().all()
    assert same_bits(out[6:], good[6:])
    twin, _ = reference.verify_attention(**{key: value for key, value in call.items() if key != "max_seqlen_q"})
    assert torch.equal(twin.isnan(), out.isnan())


def test_seq_len_beyond_the_table_counts_as_what_the_table_holds():
    call = make([64, 40], [2, 1], device=DEVICE)
    good = run(call)
    call["seq_lens"][0] = 2**31 - 1
    for ours, theirs in zip(run(call), good, strict=True):
        assert same_bits(ours, theirs)


def test_negative_seq_len_counts_as_zero():
    call = make([64, 40], [2, 1], device=DEVICE)
    call["seq_lens"][0] = -(2**31)
    out, lse = run(call)
    assert (out[:2] == 0).all()
    assert (lse[:2] == float("-inf")).all()
    assert (out[2:] != 0).any()


def test_rows_of_no_request_are_not_written():
    call = make([64, 40], [2, 1], device=DEVICE)
    call["q"] = torch.cat([call["q"], call["q"]])
    out = torch.full_like(call["q"], 7.0)
    run(call, out=out)
    assert (out[3:] == 7.0).all()
    assert (out[:3] != 7.0).all()


def test_same_bits_every_run():
    call = make([300, 0, 45, 5], [8, 0, 2, 5], device=DEVICE)
    for first, second in zip(run(call), run(call), strict=True):
        assert same_bits(first, second)


def test_softmax_scale():
    call = make([300, 45], [8, 2], device=DEVICE)
    check({**call, "softmax_scale": 0.3})
    assert not same_bits(run({**call, "softmax_scale": 0.3})[0], run(call)[0])


def test_no_requests_and_no_tokens():
    call = make([300], [2], device=DEVICE)
    nothing = {**call, "q": call["q"][:0], "cu_seqlens_q": call["cu_seqlens_q"] * 0}
    assert run(nothing)[0].shape == (0, 4, 64)
    no_requests = {
        "block_table": call["block_table"][:0],
        "seq_lens": call["seq_lens"][:0],
        "cu_seqlens_q": call["cu_seqlens_q"][:1],
    }
    assert run(nothing | no_requests)[0].shape == (0, 4, 64)


def test_twin_changes_no_input_and_serves_cpu_tensors():
    call = make([300, 0, 45, 5], [8, 0, 2, 5])
    before = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
    out, lse = verify_attention(**call, return_lse=True)
    twin_out, twin_lse = reference.verify_attention(**{key: value for key, value in call.items() if key != "max_seqlen_q"})
    assert same_bits(out, twin_out)
    assert same_bits(lse, twin_lse)
    for name, value in before.items():
        assert same_bits(call[name], value), name


def test_an_all_zero_output_fails_the_error_rule():
    from bigpool.proof.judge import judge_errors

    call = make([900], [4])
    inputs = {key: value for key, value in call.items() if key != "max_seqlen_q"}
    expected, _ = reference.verify_attention(**inputs, compute_dtype=torch.float64)
    baseline, _ = reference.verify_attention_baseline(**inputs)
    (entry,) = judge_errors({"out": torch.zeros_like(baseline)}, {"out": expected}, {"out": baseline})
    assert not entry["ok"]
