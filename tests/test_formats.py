"""Formats of the cache in plain torch: exact codes, error bounds, layouts, and every message in full."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigpool import formats
from bigpool.errors import ArgumentError
from bigpool.formats import MIN_SCALE, accuracy, named, of, rotate, rotation_block, zero_points

PER_ROW = [("int8", None), ("int4", None), ("fp8_e4m3", "token_head"), ("fp8_e5m2", "token_head")]
FP8 = {"fp8_e4m3": (3, 7, 0x7E), "fp8_e5m2": (2, 15, 0x7B)}  # mantissa bits, bias, largest finite code
SPECIAL = {"fp8_e4m3": {0x7F: math.nan}, "fp8_e5m2": {0x7C: math.inf, **dict.fromkeys((0x7D, 0x7E, 0x7F), math.nan)}}


def value_of(name, code):
    """What the paper's definition of the format says that a code is worth."""
    mantissa, bias, _ = FP8[name]
    sign, low = (-1.0 if code & 0x80 else 1.0), code & 0x7F
    if low in SPECIAL[name]:
        return sign * SPECIAL[name][low]
    exponent, fraction = low >> mantissa, low & ((1 << mantissa) - 1)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)


def bits(tensor):
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FP8)
def test_all_codes_of_fp8_decode_to_their_definition(name, dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(named(name).dtype)
    expected = torch.tensor([value_of(name, code) for code in range(256)], dtype=torch.float64)
    decoded = named(name).codes_as(codes, None, dtype).double()
    assert torch.equal(decoded.nan_to_num(nan=9e9), expected.nan_to_num(nan=9e9))
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.signbit() | decoded.isnan(), expected.signbit() | expected.isnan())


def nearest_codes(name, values):
    """Codes of the nearest values, ties to the even code, found by searching the table; magnitudes saturate."""
    table = torch.tensor([value_of(name, code) for code in range(FP8[name][2] + 1)], dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    size = values.double().abs()
    down, up = torch.searchsorted(middles, size, right=False), torch.searchsorted(middles, size, right=True)
    code = torch.where((down != up) & (down % 2 == 0), down, up)
    code += 0x80 * values.signbit()
    return torch.where(values.isfinite(), code, 0x7F).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FP8)
def test_every_16_bit_value_becomes_the_nearest_fp8(name, dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    codes, scale = named(name).quantize(values)
    assert scale is None
    assert torch.equal(codes.view(torch.uint8), nearest_codes(name, values.float()))


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_fp32_near_ties(name):
    table = torch.tensor([value_of(name, code) for code in range(FP8[name][2] + 1)])
    middles = (table[1:] + table[:-1]) / 2
    values = torch.cat([middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(9e9)), table, -middles])
    assert torch.equal(bits(named(name).quantize(values)[0]), nearest_codes(name, values))


def rows_of(draw_scale, seed, heads=3, head_dim=48, outlier=1.0):
    rows = torch.randn(5, heads, head_dim, generator=torch.Generator().manual_seed(seed)) * draw_scale
    rows[..., 7] *= outlier
    return rows


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(-80, 100), st.sampled_from([1.0, 30.0, 0.0]), st.sampled_from([16, 48, 80, 128]))
def test_int8_error_is_half_a_step(seed, exponent, outlier, head_dim):
    rows = rows_of(2.0**exponent, seed, head_dim=head_dim, outlier=outlier)
    codes, scales = named("int8").quantize(rows)
    error = (named("int8").dequantize(codes, scales, torch.float64) - rows.double()).abs().amax(-1)
    assert (error <= scales.double() * (0.5 + 1e-4)).all()
    assert (scales <= (rows.abs().amax(-1) / 127 * (1 + 1e-6)).clamp(min=MIN_SCALE)).all()
    assert codes.abs().max() <= 127


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(-80, 100), st.floats(-20, 20), st.sampled_from([16, 48, 80, 128]))
def test_int4_error_is_half_a_step_and_a_zero_points_rounding(seed, exponent, shift, head_dim):
    rows = (rows_of(1.0, seed, head_dim=head_dim) + shift) * 2.0**exponent
    codes, scales = named("int4").quantize(rows)
    error = (named("int4").dequantize(codes, scales, torch.float64) - rows.double()).abs().amax(-1)
    # The zero point is rounded too, so that the ends of the row may lie half a step outside the codes.
    assert (error <= scales.double() * (1.0 + 1e-3)).all()
    span = rows.amax(-1).clamp(min=0) - rows.amin(-1).clamp(max=0)
    assert torch.allclose(scales, (span / 15).clamp(min=MIN_SCALE), rtol=2**-18)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(-60, 100), st.sampled_from(list(FP8)))
def test_fp8_error_is_relative_within_the_normal_range(seed, exponent, name):
    rows = rows_of(2.0**exponent, seed, outlier=30.0)
    kv_format = named(name, "token_head")
    codes, scales = kv_format.quantize(rows)
    error = (kv_format.dequantize(codes, scales, torch.float64) - rows.double()).abs()
    mantissa, bias, _ = FP8[name]
    smallest = 2.0 ** (1 - bias - mantissa) * scales.double().unsqueeze(-1)
    assert (error <= torch.maximum(rows.double().abs() * 2.0 ** -(mantissa + 1), smallest / 2) * (1 + 1e-6)).all()


@pytest.mark.parametrize("scale", [torch.tensor(0.37), torch.tensor([0.37])])
@pytest.mark.parametrize("name", FP8)
def test_fp8_with_a_given_scale(name, scale):
    rows = rows_of(1.0, 1)
    codes, back = named(name).quantize(rows, scale)
    assert back is scale
    assert torch.equal(bits(codes), nearest_codes(name, rows / 0.37))
    per_head = named(name, "head")
    heads = torch.tensor([0.37, 1.0, 4.0])
    codes, _ = per_head.quantize(rows, heads)
    assert torch.equal(bits(codes), nearest_codes(name, rows / heads[:, None]))
    assert torch.equal(per_head.dequantize(codes, heads), codes.float() * heads[:, None])


@pytest.mark.parametrize(("name", "scales"), PER_ROW)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_nan_and_leaves_the_others(name, scales, bad):
    kv_format, rows = named(name, scales), rows_of(1.0, 3)
    clean_codes, clean_scales = kv_format.quantize(rows)
    rows[1, 2, 5] = bad
    codes, scale = kv_format.quantize(rows)
    assert scale[1, 2].isnan()
    assert (bits(codes)[1, 2] == 0).all()
    assert kv_format.dequantize(codes, scale)[1, 2].isnan().all()
    codes[1, 2], scale[1, 2] = clean_codes[1, 2], clean_scales[1, 2]
    assert torch.equal(bits(codes), bits(clean_codes))
    assert torch.equal(scale, clean_scales)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FP8)
def test_with_a_given_scale_only_the_element_becomes_nan(name, bad):
    rows = rows_of(1.0, 3)
    rows[1, 2, 5] = bad
    rows[0, 0, 0], rows[0, 0, 1] = 1e30, -1e30
    codes, _ = named(name).quantize(rows, torch.tensor(0.5))
    values = named(name).dequantize(codes, torch.tensor(0.5))
    assert values.isnan().sum() == 1
    assert values[1, 2, 5].isnan()
    largest = torch.finfo(named(name).dtype).max / 2
    assert values[0, 0, :2].tolist() == [largest, -largest]
    # 0 / 0 is a NaN with its sign set on some machines.
    assert (bits(named(name).quantize(torch.zeros(2, 1, 16), torch.tensor(0.0))[0]) == 0x7F).all()


@pytest.mark.parametrize(("name", "scales"), PER_ROW)
def test_rows_of_zeros_and_tiny_rows(name, scales):
    rows = torch.zeros(3, 1, 16)
    rows[1, 0, 3] = 1e-44
    rows[2] = 2.0**-105
    codes, scale = named(name, scales).quantize(rows)
    assert (bits(codes)[0] == 0).all()
    assert scale[0].item() == 1.0
    assert (scale[1:] >= MIN_SCALE * (1 - 2**-18)).all()
    assert named(name, scales).dequantize(codes, scale).isfinite().all()


def test_int4_rows_whose_span_overflows_are_nan():
    rows = torch.full((1, 1, 16), 3e38)
    rows[0, 0, 0] = -3e38
    assert named("int4").quantize(rows)[1].isnan().all()


def test_int4_bytes_hold_a_dim_of_each_half_and_words_hold_the_zero_point():
    rows = torch.arange(-6.0, 10.0).reshape(1, 1, 16)
    codes, words = named("int4").quantize(rows)
    assert zero_points(words).item() == 6
    assert (words.view(torch.int32) & ~15).view(torch.float32).item() == 1.0
    assert codes.tolist() == [[[j | (j + 8) << 4 for j in range(8)]]]
    assert named("int4").codes_as(codes, words, torch.float16).tolist() == rows.tolist()


@pytest.mark.parametrize(("name", "scales"), [*PER_ROW, ("bf16", None), ("fp16", None), ("fp8_e4m3", "head")])
def test_values_are_exact_codes_times_scales(name, scales):
    kv_format = named(name, scales)
    given = torch.tensor([0.5, 0.25, 3.0]) if scales == "head" else None
    codes, scale = kv_format.quantize(rows_of(1.0, 5), given)
    exact = kv_format.codes_as(codes, scale, torch.float64)
    dtypes = (torch.float16, torch.bfloat16) if kv_format.scales != "none" else (kv_format.dtype,)
    for dtype in dtypes:
        assert torch.equal(kv_format.codes_as(codes, scale, dtype).double(), exact)
    assert torch.equal(kv_format.dequantize(codes, scale, torch.float64), exact * kv_format.row_scales(scale).double())


@pytest.mark.parametrize(("head_dim", "block"), [(16, 16), (40, 8), (80, 16), (96, 32), (112, 16), (256, 256), (17, 1)])
def test_rotation_is_its_definition(head_dim, block):
    assert rotation_block(head_dim) == block
    index = torch.arange(head_dim)
    both = index[:, None] & index[None, :] & (block - 1)
    ones = sum((both >> bit) & 1 for bit in range(10))
    same_block = index[:, None] // block == index[None, :] // block
    matrix = torch.where(same_block, 1.0 - 2.0 * (ones % 2), 0.0).double() / block**0.5
    rows = torch.randn(3, 2, head_dim, dtype=torch.float64)
    assert torch.allclose(rotate(rows), rows @ matrix, rtol=0, atol=1e-12)
    assert torch.allclose(rotate(rotate(rows)), rows, rtol=0, atol=1e-12)
    assert rotate(rows.half()).dtype == torch.float32


def test_rotation_spreads_an_outlier_channel():
    rows = rows_of(1.0, 9, head_dim=128, outlier=30.0)
    kv_format, errors = named("int4"), []
    for stored in (rows, rotate(rows)):
        errors.append((kv_format.dequantize(*kv_format.quantize(stored)) - stored).square().mean())
    assert errors[1] < errors[0] / 5


def test_bytes_of_a_row():
    sizes = {(f.name, f.scales): f.row_bytes(128) for f in formats.ALL}
    assert sizes == {
        ("bf16", "none"): 256, ("fp16", "none"): 256, ("fp32", "none"): 512,
        ("fp8_e4m3", "tensor"): 128, ("fp8_e4m3", "head"): 128, ("fp8_e4m3", "token_head"): 132,
        ("fp8_e5m2", "tensor"): 128, ("fp8_e5m2", "head"): 128, ("fp8_e5m2", "token_head"): 132,
        ("int8", "token_head"): 132, ("int4", "token_head"): 68,
    }  # fmt: skip


SCALE_SHAPES = {"none": None, "tensor": (), "head": (3,), "token_head": (2, 4, 3)}


@pytest.mark.parametrize("kv_format", formats.ALL, ids=lambda f: f"{f.name}-{f.scales}")
def test_a_format_is_inferred_from_its_tensors(kv_format):
    shape = SCALE_SHAPES[kv_format.scales]
    assert of(kv_format.dtype, None if shape is None else torch.ones(shape)) is kv_format
    assert named(kv_format.name, kv_format.scales) is kv_format
    if kv_format.scales == "tensor":
        assert of(kv_format.dtype, None) is kv_format
        assert of(kv_format.dtype, torch.ones(1)) is kv_format


def test_the_accuracy_table(tmp_path, monkeypatch, capsys):
    for name, value in {"KEYS": 512, "SEEDS": 1, "QUERIES": 4}.items():
        monkeypatch.setattr(accuracy, name, value)
    monkeypatch.setattr("sys.argv", ["accuracy", "--json", str(tmp_path / "a.json")])
    accuracy.main()
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    errors = {name: {row["format"]: row for row in rows} for name, rows in results.items()}
    assert capsys.readouterr().out.count("\n| ") == 2 * (1 + len(errors["random"]))
    for data in errors.values():
        order = [data[name]["attention"] for name in ("fp16", "bf16", "int8", "int4")]
        assert order == sorted(order)
        assert data["int4"]["bits"] == 4.25
    outliers = errors["outliers"]
    assert outliers["int4"]["k"] < 0.7 * outliers["int4, were K not rotated"]["k"]


MESSAGES = {
    "dtype": (lambda: of(torch.int16, None), "formats.of: dtype: expected bfloat16|float16|float32|float8_e4m3fn|float8_e5m2|int8|uint8, got int16; store the cache in one of them"),
    "no scale": (lambda: of(torch.int8, None, "k_scale"), "formats.of: k_scale: expected a scale per token and head, of the cache's axes without the last for a cache of int8, got None; see docs/formats.md"),
    "a scale too many": (lambda: of(torch.float16, torch.ones(1)), "formats.of: scale: expected None for a cache of float16, got [1]; see docs/formats.md"),
    "rank 2": (lambda: of(torch.float8_e5m2, torch.ones(2, 3)), "formats.of: scale: expected None or one element or [num_kv_heads] or a scale per token and head, of the cache's axes without the last for a cache of float8_e5m2, got [2, 3]; see docs/formats.md"),
    "name": (lambda: named("fp4"), "formats.named: format: expected one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, int4, got 'fp4'; pass one of them"),
    "scales": (lambda: named("int8", "head"), "formats.named: scales: expected None or 'token_head' for int8, got 'head'; None takes the first"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    make, text = MESSAGES[name]
    with pytest.raises(ArgumentError) as caught:
        make()
    assert str(caught.value) == text
