"""Quantised caches in verify attention: codes decoded bit by bit, scales of every kind and layout, NaN, fp8 outputs."""

import pytest
import torch
import triton
import triton.language as tl

from bigpool.kernels._formats import decode, decode_unit, encode_fp8
from bigpool.ops.verify import verify_attention
from verify_inputs import QUANTISED, check, make, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Q_DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
PER_ROW = [(name, scales) for name, scales in QUANTISED if scales == "token_head"]


@triton.jit
def decode_kernel(raw_ptr, zero_ptr, out_ptr, KV_FORMAT: tl.constexpr, HIGH: tl.constexpr, CONVERT: tl.constexpr):
    offs = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    zero = tl.load(zero_ptr + tl.arange(0, 16))
    values = decode(tl.load(raw_ptr + offs), zero, KV_FORMAT, HIGH, out_ptr.dtype.element_ty, CONVERT)
    tl.store(out_ptr + offs, values * decode_unit(KV_FORMAT, CONVERT))


def decoded(raw, kv_format, dtype, high=False, zero=None, convert="plain"):
    out = torch.empty(256, dtype=dtype, device=DEVICE)
    zero = torch.zeros(16, dtype=torch.int32) if zero is None else zero
    decode_kernel[(1,)](raw.to(DEVICE), zero.to(DEVICE), out, kv_format, high, convert)
    return out.cpu()


CONVERT = ["plain", pytest.param("asm", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("dtype", Q_DTYPES)
@pytest.mark.parametrize(("kv_format", "stored"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_every_fp8_code(kv_format, stored, dtype, convert):
    if convert == "asm" and dtype == torch.float32:
        pytest.skip("byte permutes make halves: no launch asks them for fp32")
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(stored).to(dtype)
    got = decoded(codes, kv_format, dtype, convert=convert)
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got[~want.isnan()], want[~want.isnan()])
    assert want.isnan().sum() == (2 if kv_format == "e4m3" else 6)


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("dtype", Q_DTYPES)
def test_every_int8_and_int4_code(dtype, convert):
    if convert == "asm" and dtype == torch.float32:
        pytest.skip("byte permutes make halves: no launch asks them for fp32")
    codes = torch.arange(-128, 128).to(torch.int8)
    assert torch.equal(decoded(codes, "int8", dtype, convert=convert), codes.to(dtype))
    codes, zero = torch.arange(256, dtype=torch.uint8), torch.arange(16, dtype=torch.int32)
    for high, nibbles in ((False, codes & 15), (True, codes >> 4)):
        want = (nibbles.view(16, 16).int() - zero[:, None]).to(dtype).flatten()
        assert torch.equal(decoded(codes, "int4", dtype, high, zero, convert), want)


@triton.jit
def encode_kernel(x_ptr, out_ptr, n, FP8: tl.constexpr):
    offs = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(out_ptr + offs, encode_fp8(tl.load(x_ptr + offs), FP8))


@pytest.mark.parametrize("scale", [1.0, 3.7])
@pytest.mark.parametrize(("name", "stored"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_outputs_of_every_fp16_value(name, stored, scale):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float() * scale
    out = torch.empty(2**16, dtype=torch.uint8, device=DEVICE)
    encode_kernel[(64,)](x.to(DEVICE), out, 2**16, name)
    largest = torch.finfo(stored).max
    want = x.clamp(-largest, largest).to(stored).view(torch.uint8)
    want[x.isnan()] = 0x7F
    assert same_bits(out.cpu(), want)


@pytest.mark.parametrize("dtype", Q_DTYPES)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
def test_formats(kv_format, scales, num_splits, dtype):
    call = make([700, 0, 45, 5], [8, 0, 2, 7], kv_format=kv_format, scales=scales, dtype=dtype, device=DEVICE)
    check(call, num_splits=num_splits)


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_head_dims(kv_format, head_dim):
    check(make([70, 33], [3, 2], head_dim=head_dim, kv_format=kv_format, device=DEVICE))


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 48, 880])
@pytest.mark.parametrize(("kv_format", "scales"), PER_ROW)
def test_scales_apart_and_inline(kv_format, scales, page_size, kv_layout, inline):
    layout = {"page_size": page_size, "kv_layout": kv_layout, "kv_format": kv_format, "scales": scales}
    call = make([200, 33], [3, 2], heads=(6, 2), device=DEVICE, inline=inline, **layout)
    out = check(call)
    for ours, theirs in zip(out, run(make([200, 33], [3, 2], heads=(6, 2), device=DEVICE, **layout)), strict=True):
        assert same_bits(ours, theirs), "where scales lie changes no bit"


@pytest.mark.parametrize("kv_format", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_without_scales_is_scale_one(kv_format):
    call = make([200, 33], [3, 2], kv_format=kv_format, scales="tensor", device=DEVICE)
    ones = torch.ones(1, device=DEVICE)
    bare, one, only_k = (check({**call, "k_scale": k, "v_scale": v}) for k, v in ((None, None), (ones, ones), (ones, None)))
    for same in zip(bare, one, only_k, strict=True):
        assert same_bits(same[0], same[1])
        assert same_bits(same[0], same[2])


@pytest.mark.parametrize("size", [2.0**-60, 1e-9, 1.0, 1e9])
@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_scales_of_any_size(kv_format, size):
    """Weights neither over- nor underflow fp16, whatever the scales of V."""
    call = make([300, 45], [3, 2], kv_format=kv_format, scales="token_head", dtype=torch.float32, device=DEVICE)
    call["v_scale"] = call["v_scale"] * size
    if kv_format == "int4":
        call["v_scale"] = call["v_scale"].view(torch.int32).bitwise_and(-16).bitwise_or(5).view(torch.float32)
    check(call)


def test_keys_whose_values_differ_in_size_by_powers():
    """A key with a tiny scale still counts in the softmax sum."""
    call = make([300], [3], kv_format="int8", device=DEVICE)
    call["v_scale"] *= torch.logspace(-6, 2, call["v_scale"].numel(), device=DEVICE).view_as(call["v_scale"])
    check(call)


@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_scale_zero(kv_format):
    """A key with scale 0 has score 0; a value with scale 0 is 0, and its key still counts."""
    call = make([90], [3], kv_format=kv_format, scales="token_head", device=DEVICE)
    page = call["block_table"][0, 1]
    call["k_scale"][page, 3], call["v_scale"][page, 5] = 0.0, 0.0
    check(call)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_codes_at_their_ends(kv_format):
    call = make([90], [3], kv_format=kv_format, device=DEVICE)
    raw = call["k_cache"].view(torch.uint8)
    rng = torch.Generator(DEVICE).manual_seed(1)
    raw.copy_(torch.randint(0, 2, raw.shape, generator=rng, device=DEVICE) * 254 + 1)
    check(call)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(("kv_format", "scales"), PER_ROW)
def test_a_nan_scale_reaches_only_rows_that_see_it(kv_format, scales, name):
    call = make([75], [6], kv_format=kv_format, scales=scales, device=DEVICE)
    good, good_lse = run(call)
    call[name][call["block_table"][0, 4], 72 % 16, 1] = float("nan")
    out, lse = run(call)
    assert out[3:, 2:].isnan().all(), "the query heads of kv head 1, from position 72 on"
    if name == "k_scale":
        assert lse[3:, 2:].isnan().all()
    else:
        assert torch.allclose(lse, good_lse, rtol=1e-6), "lse does not know of values"
    out[3:, 2:] = good[3:, 2:]
    assert same_bits(out, good)
    assert torch.isfinite(good).all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("scales", ["tensor", "token_head"])
@pytest.mark.parametrize(("kv_format", "bad"), [("fp8_e4m3", 0x7F), ("fp8_e5m2", 0x7E), ("fp8_e5m2", 0xFC)])
def test_a_bad_fp8_code_reaches_only_rows_that_see_it(kv_format, bad, scales, name):
    call = make([75], [6], kv_format=kv_format, scales=scales, device=DEVICE)
    good, _ = run(call)
    call[name].view(torch.uint8)[call["block_table"][0, 4], 72 % 16, 1, 7] = bad
    out, _ = run(call)
    assert same_bits(out[:3], good[:3])
    assert same_bits(out[3:, :2], good[3:, :2])
    if name == "v_cache" or bad != 0xFC:
        assert out[3:, 2:].isnan().all()


@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
def test_page_id_outside_the_pool(kv_format, scales):
    call = make([75, 40], [6, 1], page_size=8, kv_format=kv_format, scales=scales, device=DEVICE)
    good, _ = run(call)
    call["block_table"][0, 9] = 10**6
    out, lse = check(call)
    assert same_bits(out[:3], good[:3])
    assert out[3:6].isnan().all()
    assert lse[3:6].isnan().all()


@pytest.mark.parametrize("kv_format", ["int8", "int4", "fp8_e4m3"])
def test_every_logit_option_at_once(kv_format):
    heads = {
        "sinks": torch.tensor([0.5, 2.0, -1.0, 3.0], device=DEVICE),
        "alibi_slopes": torch.linspace(0, 0.2, 4, device=DEVICE),
    }
    options = {"softcap": 1.5, "softmax_scale": 0.5, "window_size": 100, "num_sink_tokens": 4, **heads}
    check(make([500, 60], [5, 3], kv_format=kv_format, device=DEVICE, **options), num_splits=2)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_outlier_channels(kv_format):
    check(make([300, 45], [3, 2], kv_format=kv_format, outliers=True, device=DEVICE))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kv_format", [None, "int8"])
def test_fp8_output(kv_format, stored, num_splits):
    """A scale so small that the largest values saturate, and a row without keys."""
    scale = torch.tensor([0.001], device=DEVICE)
    call = make([300, 3], [3, 5], kv_format=kv_format, device=DEVICE, out_scale=scale)
    out = torch.empty(8, 4, 64, dtype=stored, device=DEVICE)
    got, _ = check(call, num_splits=num_splits, out=out)
    assert got.dtype == stored
    assert got.data_ptr() == out.data_ptr()
    if stored == torch.float8_e4m3fn:
        assert (got.float().abs() == 448).any()
    assert (got[3:5].float() == 0).all()
    assert run(call)[0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
def test_cpu_tensors_of_any_dtype(kv_format, scales):
    """The twin: bf16 queries too, which the interpreter cannot do; its error against float64 is one rounding of the output."""
    from bigpool import reference

    call = make([90, 33], [3, 2], kv_format=kv_format, scales=scales, dtype=torch.bfloat16)
    inputs = {name: value for name, value in call.items() if name != "max_seqlen_q"}
    expected, _ = reference.verify_attention(**inputs, compute_dtype=torch.float64)
    out = verify_attention(**call)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 1e-5).all()
