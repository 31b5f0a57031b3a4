from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any, cast, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigpool.errors import ArgumentError
from bigpool.layout import DTYPES, INT32_MAX, SCALE_BYTES, Form, KVLayout, Wall, first_bad_index

GIB = 2**30


def where(wall: Wall) -> tuple[int, int, int, int]:
    return wall.page, wall.slot, wall.head, wall.dim


# The facts that the project starts from.


def test_the_original_wall_one_at_a_time() -> None:
    layout = KVLayout(880, 4, 256)
    assert layout.stride_page == 901_120
    assert (layout.stride_slot, layout.stride_head) == (1_024, 256)
    assert 2_383 * layout.stride_page == 2_147_368_960 <= INT32_MAX
    wall = layout.wall()
    assert where(wall) == (2_384, 0, 0, 0)
    assert wall.num_pages == 2_385
    assert wall.token == 2_384 * 880 == 2_097_920
    assert wall.element == 2_384 * 901_120 > INT32_MAX
    assert wall.byte == 2 * wall.element == 4_296_540_160


def test_the_original_wall_summed_first() -> None:
    wall = KVLayout(880, 4, 256).wall("summed")
    assert where(wall) == (2_383, 112, 0, 0)
    assert wall.element == 2**31
    assert wall.token == 2_383 * 880 + 112
    layout = KVLayout(880, 4, 256)
    crosses = [(form, pages) for form in get_args(Form) for pages in (2_384, 2_385) if layout.crosses(pages, form)]
    assert crosses == [("separate", 2_385), ("summed", 2_384), ("summed", 2_385)]
    assert layout.crosses(1_193, unit="byte")
    assert wall.byte == 4 * GIB


def test_interleaving_halves_the_wall() -> None:
    layout = KVLayout(880, 4, 256, interleaved=True)
    assert layout.stride_page == 1_802_240
    assert layout.wall().page == 1_192
    assert where(layout.wall("summed")) == (1_192, 0, 0, 0)
    # Rows of K and V side by side: the page stride is the same, but K now reaches to the end of the page.
    rows = KVLayout(880, 4, 256, interleaved="row")
    assert rows.stride_page == 1_802_240
    assert (rows.stride_slot, rows.stride_head, rows.v_offset) == (2_048, 512, 256)
    assert rows.wall().page == 1_192
    assert where(rows.wall("summed")) == (1_191, 496, 0, 0)


@pytest.mark.parametrize(
    ("layout", "stride_page", "page"),
    [
        (KVLayout(432, 4, 256), 442_368, 4_855),
        (KVLayout(432, 4, 256, interleaved=True), 884_736, 2_428),
        (KVLayout(480, 4, 256), 491_520, 4_370),
        (KVLayout(1_056, 4, 256), 1_081_344, 1_986),
        (KVLayout(880, 4, 256, "int8", inline_scales=True), 915_200, 2_347),
        (KVLayout(880, 4, 256, "int8", inline_scales=True, interleaved=True), 1_830_400, 1_174),
        (KVLayout(880, 4, 256, "int4"), 450_560, 4_767),
        (KVLayout(480, 1, 576), 276_480, 7_768),
    ],
    ids=str,
)
def test_walls_by_arithmetic(layout: KVLayout, stride_page: int, page: int) -> None:
    assert layout.stride_page == stride_page
    assert (page - 1) * stride_page <= INT32_MAX < page * stride_page
    assert layout.wall().page == page


def test_int8_rows_with_inline_scales() -> None:
    layout = KVLayout(880, 4, 256, "int8", inline_scales=True)
    assert layout.row_elements == layout.stride_head == 260
    assert layout.stride_slot == 1_040
    assert layout.page_bytes == 915_200


@pytest.mark.parametrize(
    ("what", "stride", "first_bad"),
    [
        ("vllm #47671: page x 480 x 576", 480 * 576, 7_768),
        ("sglang #20389: query row x 8,192", 8_192, 262_144),
        ("sglang #20389: query row x 16,384", 16_384, 131_072),
        ("tokenspeed #501: slot x 576", 576, 3_728_271),
        ("megablocks #185: row x 4,096", 4_096, 524_288),
        ("fla #1080: token x 64 heads x 128", 64 * 128, 262_144),
        ("Liger-Kernel #251: row x 36,864", 36_864, 58_255),
        ("int8 prefill: position x 1,024", 1_024, 2_097_152),
        ("int8 prefill: position x 2,048", 2_048, 1_048_576),
        ("int8 prefill: token x 6,144", 6_144, 349_526),
        ("int8 prefill: token x a fused row", 14_336, 149_797),
        ("draft logits: request x 7 x 248,320", 7 * 248_320, 1_236),
        ("draft logits: request x 15 x 248,320", 15 * 248_320, 577),
        ("draft logits: request x 31 x 248,320", 31 * 248_320, 279),
    ],
)
def test_walls_of_public_reports(what: str, stride: int, first_bad: int) -> None:
    assert (first_bad - 1) * stride <= INT32_MAX < first_bad * stride
    assert first_bad_index(stride) == first_bad


@pytest.mark.parametrize(
    ("what", "row", "first_bad"),
    [
        ("flash-attention c79de85: row x 50,257 + column", 50_257, 42_730),
        ("overflow.md: row x 7,168 + column", 7_168, 299_593),
        ("split-KV scratch, 10 queries, 16 splits", 24 * 10 * 16 * 256, 2_184),
        ("split-KV scratch, 16 queries, 16 splits", 24 * 16 * 16 * 256, 1_365),
        ("split-KV scratch, 32 queries, 16 splits", 24 * 32 * 16 * 256, 682),
        ("split-KV scratch, 64 queries, 16 splits", 24 * 64 * 16 * 256, 341),
        ("split-KV scratch, 16 queries, 35 splits", 24 * 16 * 35 * 256, 624),
        ("split-KV scratch, 16 queries, 64 splits", 24 * 16 * 64 * 256, 341),
        ("split-KV scratch, 64 queries, 64 splits", 24 * 64 * 64 * 256, 85),
    ],
)
def test_walls_of_public_reports_where_the_column_is_added_first(what: str, row: int, first_bad: int) -> None:
    assert first_bad * row - 1 <= INT32_MAX < (first_bad + 1) * row - 1
    assert first_bad_index(row, span=row) == first_bad


@pytest.mark.parametrize("group_size", [1, 5, 8, 16])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_wall_in_bytes_of_a_hybrid_pool(group_size: int, dtype: str) -> None:
    # K and V interleaved: pool >= group_size * 2^31 * element size, whatever the geometry, up to whole pages.
    item = DTYPES[dtype][0]
    least = group_size * 2**31 * item
    assert least == {("bf16", 5): 20, ("bf16", 8): 32, ("bf16", 16): 64}.get((dtype, group_size), least // GIB) * GIB
    assert least == {("int8", 5): 10, ("int8", 8): 16, ("int8", 16): 32}.get((dtype, group_size), least // GIB) * GIB
    for page_size in (16, 432, 880, 1_056):
        for interleaved in (True, "row"):
            layout = KVLayout(page_size, 4, 256, dtype, interleaved=cast("bool", interleaved))
            wall = layout.wall()
            page_bytes = layout.pool_bytes(1, group_size)
            assert least < layout.pool_bytes(wall.num_pages, group_size) < least + 2 * page_bytes
            assert layout.pages_in(layout.pool_bytes(wall.num_pages, group_size), group_size) == wall.num_pages
            assert layout.crosses(wall.num_pages)
            assert not layout.crosses(wall.num_pages - 1)


def test_separate_pools_reach_the_wall_at_twice_the_bytes() -> None:
    # 16 layers of a bf16 pool in groups of 8: 68.7 GB, not the 34.4 GB of an interleaved one.
    apart, shared = KVLayout(880, 4, 256), KVLayout(880, 4, 256, interleaved=True)
    assert apart.pool_bytes(apart.wall().num_pages, 8) == 68_773_478_400
    assert shared.pool_bytes(shared.wall().num_pages, 8) == 34_401_157_120
    assert (apart.kv_page_bytes, shared.kv_page_bytes) == (3_604_480, 3_604_480)
    assert (apart.page_bytes, shared.page_bytes) == (1_802_240, 3_604_480)


def test_byte_offsets_reach_the_wall_earlier() -> None:
    layout = KVLayout(880, 4, 256)
    wall = layout.wall(unit="byte")
    assert where(wall) == (1_192, 0, 0, 0)
    assert (wall.unit, wall.byte) == ("byte", 1_192 * 1_802_240)
    assert where(layout.wall("summed", "byte")) == (1_191, 496, 0, 0)
    assert KVLayout(880, 4, 256, "int8").wall(unit="byte").page == KVLayout(880, 4, 256, "int8").wall().page == 2_384


def test_byte_offsets_of_an_inline_scale() -> None:
    # 2^31 = 178,956,970 x 12 + 8: the data of that row is in reach, the scale behind it (dim 8) is not.
    layout = KVLayout(1, 1, 8, "int8", inline_scales=True)
    assert where(layout.wall("summed", "byte")) == (178_956_970, 0, 0, 8)
    assert layout.wall("summed", "byte").byte == 2**31
    assert where(layout.wall("summed")) == (178_956_971, 0, 0, 0)


def test_max_offset_is_the_last_value_of_the_pool() -> None:
    layout = KVLayout(880, 4, 256)
    assert layout.max_offset(2_600) == 2_600 * 901_120 - 1 > INT32_MAX
    assert layout.max_offset(2_383) <= INT32_MAX
    assert KVLayout(16, 2, 64, "int8", inline_scales=True, pad=4).max_offset(1) == 16 * 2 * 72 - 9


# Property tests against numpy.

LAYOUTS: Any = st.builds(
    dict,
    page_size=st.integers(1, 600),
    num_kv_heads=st.integers(1, 9),
    head_dim=st.integers(1, 70).map(lambda n: 8 * n),
    dtype=st.sampled_from(sorted(DTYPES)),
    kv_layout=st.sampled_from(["NHD", "HND"]),
    interleaved=st.sampled_from([False, "page", "row"]),
    pad=st.integers(0, 5).map(lambda n: 4 * n),
)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    values: dict[str, Any] = draw(LAYOUTS)
    inline = DTYPES[values["dtype"]][0] == 1 and draw(st.booleans())
    return KVLayout(**values, inline_scales=inline)


STORED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@settings(deadline=None)
@given(layouts())
def test_strides_are_those_of_a_real_array(layout: KVLayout) -> None:
    axes = {"NHD": (layout.page_size, layout.num_kv_heads), "HND": (layout.num_kv_heads, layout.page_size)}
    outer, inner = axes[layout.kv_layout]
    data = layout.head_dim // DTYPES[layout.dtype][1]
    row = data + (SCALE_BYTES // layout.item_bytes if layout.inline_scales else 0) + layout.pad
    axis_of_kv = 1 if layout.interleaved == "page" else 3
    shape = [3, outer, inner, row]
    if layout.interleaved:
        shape.insert(axis_of_kv, 2)
    pool: Any = np.empty(shape, STORED[layout.item_bytes])
    k, v = (pool[..., :data],) * 2 if not layout.interleaved else np.moveaxis(pool[..., :data], axis_of_kv, 0)
    item = layout.item_bytes
    assert layout.shape(3) == k.shape
    assert layout.strides == tuple(stride // item for stride in k.strides)
    assert dict(zip(layout.axes, layout.strides, strict=True)) == {
        "num_pages": layout.stride_page,
        "page_size": layout.stride_slot,
        "num_kv_heads": layout.stride_head,
        "head_dim": 1,
    }
    assert layout.v_offset * item == v.__array_interface__["data"][0] - k.__array_interface__["data"][0]
    assert layout.pool_bytes(3) == pool.nbytes * (1 if layout.interleaved else 2)
    assert 3 * layout.page_bytes == pool.nbytes
    assert layout.max_offset(3) == sum((n - 1) * s // item for n, s in zip(k.shape, k.strides, strict=True))


def wrong_elements(layout: KVLayout, page: int, form: str, unit: str) -> Any:
    """[page_size, num_kv_heads, dims]: where an int32 evaluation of the offset differs from the exact one."""
    step = 1 if unit == "element" else layout.item_bytes
    dims = layout.data_elements + (unit == "byte" and layout.inline_scales)
    factors = [
        (np.array([page]).reshape(1, 1, 1), layout.stride_page * step),
        (np.arange(layout.page_size).reshape(-1, 1, 1), layout.stride_slot * step),
        (np.arange(layout.num_kv_heads).reshape(1, -1, 1), layout.stride_head * step),
        (np.arange(dims).reshape(1, 1, -1), step),
    ]
    exact = sum(index.astype(np.int64) * stride for index, stride in factors)
    products = [index.astype(np.int32) * np.int32(stride) for index, stride in factors]
    assert all(product.dtype == np.int32 for product in products)
    if form == "separate":
        return sum(product.astype(np.int64) for product in products) != exact
    total = products[0]
    for product in products[1:]:
        total = total + product
    assert total.dtype == np.int32
    return total != exact


@settings(deadline=None, max_examples=60)
@given(layouts(), st.sampled_from(["separate", "summed"]), st.sampled_from(["element", "byte"]), st.data())
def test_the_wall_is_where_int32_arithmetic_goes_wrong(layout: KVLayout, form: Any, unit: Any, data: st.DataObject) -> None:
    wall = layout.wall(form, unit)
    wrong = wrong_elements(layout, wall.page, form, unit)
    first = np.unravel_index(int(wrong.argmax()), wrong.shape)
    assert wrong.any()
    assert (wall.slot, wall.head, wall.dim) == tuple(map(int, first))
    assert wall.element == layout.offset(wall.page, wall.slot, wall.head, wall.dim)
    assert (wall.token, wall.byte) == (wall.page * layout.page_size + wall.slot, wall.element * layout.item_bytes)
    for page in {wall.page - 1, data.draw(st.integers(0, max(wall.page - 1, 0)))} - {-1}:
        if page < wall.page:
            assert not wrong_elements(layout, page, form, unit).any()


@settings(deadline=None)
@given(st.integers(1, 2**32), st.integers(1, 2**32), st.integers(0, 2**33))
def test_first_bad_index_is_the_smallest(stride: int, span: int, limit: int) -> None:
    index = first_bad_index(stride, span, limit)
    assert index * stride + span - 1 > limit
    assert index == 0 or (index - 1) * stride + span - 1 <= limit


# Arguments.


def text_of(**values: Any) -> str:
    defaults: dict[str, Any] = {"page_size": 16, "num_kv_heads": 8, "head_dim": 128}
    with pytest.raises(ArgumentError) as caught:
        KVLayout(**(defaults | values))
    return str(caught.value)


def test_a_layout_is_a_value() -> None:
    layout = KVLayout(16, 8, 128, interleaved=True)
    assert layout == KVLayout(16, 8, 128, interleaved="page")
    assert hash(layout) == hash(KVLayout(16, 8, 128, interleaved="page"))
    assert layout.interleaved == "page"
    frozen: Any = layout
    with pytest.raises(FrozenInstanceError):
        frozen.page_size = 3


def test_every_fault_is_listed() -> None:
    values: dict[str, Any] = {
        "page_size": 0,
        "num_kv_heads": True,
        "head_dim": "wide",
        "dtype": "torch.bfloat16",
        "kv_layout": "NDH",
        "interleaved": "yes",
        "pad": -1,
    }
    assert text_of(**values) == (
        "KVLayout: 7 faults\n"
        "  page_size: expected an integer of 1 or more, got 0; pass the tokens in a page, such as 16\n"
        "  num_kv_heads: expected an integer of 1 or more, got True; pass the KV heads on one device, such as 8\n"
        "  head_dim: expected an integer of 1 or more, got 'wide'; pass the values in a row of K, such as 128\n"
        "  dtype: expected one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, int4, got 'torch.bfloat16'; pass bf16\n"
        "  kv_layout: expected NHD or HND, got 'NDH'; "
        "pass NHD for [page_size, num_kv_heads, head_dim] pages, HND for [num_kv_heads, page_size, head_dim]\n"
        "  interleaved: expected page, row or nothing, got 'yes'; "
        "pass page if a page holds K then V, row if a row of K is followed by the row of V\n"
        "  pad: expected an integer of 0 or more, got -1; pass the stored elements after each row that hold nothing"
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"dtype": "int3"},
            "KVLayout: dtype: expected one of bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, int4, got 'int3'; pass one of them",
        ),
        (
            {"dtype": "int4", "head_dim": 127},
            "KVLayout: head_dim: expected a multiple of 2 for int4, got 127; pass 128 and mask the last value",
        ),
        (
            {"dtype": "bf16", "inline_scales": True},
            "KVLayout: inline_scales: expected False for bf16, got True; "
            "leave it out, or pass a dtype that has scales, such as int8",
        ),
        (
            {"dtype": "int8", "inline_scales": True, "head_dim": 126},
            "KVLayout: head_dim: expected a multiple of 4 bytes with inline scales, which are fp32 and aligned, "
            "got 126; pass a multiple of 4",
        ),
        (
            {"dtype": "int4", "inline_scales": True, "head_dim": 100, "pad": 2},
            "KVLayout: 2 faults\n"
            "  head_dim: expected a multiple of 4 bytes with inline scales, which are fp32 and aligned, "
            "got 100; pass a multiple of 8\n"
            "  pad: expected a multiple of 4 bytes with inline scales, which are fp32 and aligned, "
            "got 2; pass a multiple of 4",
        ),
        (
            {"page_size": 2**20},
            "KVLayout: page_size: expected a page of fewer than 2^31 bytes (it has 2,147,483,648), got 1048576; "
            "pass fewer tokens to a page",
        ),
    ],
)
def test_texts_of_errors(values: dict[str, Any], text: str) -> None:
    assert text_of(**values) == text


def test_texts_of_errors_of_methods() -> None:
    layout: Any = KVLayout(16, 8, 128)
    for call, text in [
        (
            lambda: layout.wall("sum", "bytes"),
            "KVLayout.wall: 2 faults\n"
            "  form: expected one of separate, summed, got 'sum'; pass one of them\n"
            "  unit: expected one of element, byte, got 'bytes'; pass one of them",
        ),
        (
            lambda: layout.pool_bytes(3, 0),
            "KVLayout.pool_bytes: group_size: expected an integer of 1 or more, got 0; pass 1 or more",
        ),
        (
            lambda: layout.pages_in(3.5),
            "KVLayout.pages_in: pool_bytes: expected an integer of 0 or more, got 3.5; pass 0 or more",
        ),
        (
            lambda: layout.max_offset(0),
            "KVLayout.max_offset: num_pages: expected an integer of 1 or more, got 0; pass 1 or more",
        ),
        (
            lambda: layout.crosses(-1),
            "KVLayout.crosses: num_pages: expected an integer of 0 or more, got -1; pass 0 or more",
        ),
        (
            lambda: first_bad_index(0, 0),
            "first_bad_index: 2 faults\n"
            "  stride: expected an integer of 1 or more, got 0; pass 1 or more\n"
            "  span: expected an integer of 1 or more, got 0; pass 1 or more",
        ),
    ]:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert str(caught.value) == text
