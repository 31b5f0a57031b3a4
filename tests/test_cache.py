"""KVCache: what it checks, what it says of itself, and views of the one-tensor layouts."""

import pytest
import torch

from bigpool import KeyCodes, KVCache, PrefillWorkspace, Workspace, write_kv
from bigpool.errors import ArgumentError
from cache_inputs import KINDS, assert_same, bits, cache, rows


def data(shape=(7, 16, 3, 48), dtype=torch.int8):
    return torch.zeros(shape, dtype=dtype)


def scale(shape=(7, 16, 3), dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


MESSAGES = {
    "kv_layout": (lambda: KVCache(data(), data(), scale(), scale(), "DNH"), "KVCache: kv_layout: expected 'NHD' or 'HND', got 'DNH'; name the order of the axes of a page"),
    "k dtype": (lambda: KVCache(data(dtype=torch.int16), data()), "KVCache: k: expected bfloat16|float16|float32|float8_e4m3fn|float8_e5m2|int8|uint8 [num_pages, page_size, num_kv_heads, row_elements], got int16 [7, 16, 3, 48]; see docs/formats.md"),
    "v shape": (lambda: KVCache(data(), data((7, 16, 3, 40)), scale(), scale()), "KVCache: v: expected int8 [num_pages=7, page_size=16, num_kv_heads=3, row_elements=48], got int8 [7, 16, 3, 40]; K and V share a format and a shape"),
    "no scale": (lambda: KVCache(data(), data(), scale()), "KVCache: v_scale: expected a scale per token and head, of the cache's axes without the last for a cache of int8, got None; see docs/formats.md"),
    "scale too many": (lambda: KVCache(data(dtype=torch.float16), data(dtype=torch.float16), scale(()), None), "KVCache: k_scale: expected None for a cache of float16, got []; see docs/formats.md"),
    "scale order": (lambda: KVCache(data(), data(), scale((7, 3, 16)), scale()), "KVCache: k_scale: expected float32 [num_pages=7, page_size=16, num_kv_heads=3], got float32 [7, 3, 16]; keep scales in float32 beside their cache"),
    "scale dtype": (lambda: KVCache(data(), data(), scale(), scale(dtype=torch.float16)), "KVCache: v_scale: expected float32 [num_pages=7, page_size=16, num_kv_heads=3], got float16 [7, 16, 3]; keep scales in float32 beside their cache"),
    "scale device": (lambda: KVCache(data(), data(), scale(), scale().to("meta")), "KVCache: v_scale: expected device cpu, got meta; call v_scale.to('cpu')"),
    "heads of scale": (lambda: KVCache(*[data(dtype=torch.float8_e5m2)] * 2, scale(4), scale(3)), "KVCache: k_scale: expected float32 [num_kv_heads=3], got float32 [4]; keep scales in float32 beside their cache"),
    "two kinds": (lambda: KVCache(*[data(dtype=torch.float8_e5m2)] * 2, scale(3), scale()), "KVCache: v_scale: expected scales of the same kind as k_scale, got 'head' and 'token_head'; K and V share a format"),
    "overlap": (lambda: KVCache(data().expand(7, 16, 3, 48), data((1, 16, 3, 48)).expand(7, -1, -1, -1), scale(), scale()), "KVCache: v: expected strides that hold no element twice, got [0, 144, 48, 1]; call v.contiguous()"),
    "no pages": (lambda: KVCache(data((0, 16, 3, 48)), data((0, 16, 3, 48)), scale((0, 16, 3)), scale((0, 16, 3))), "KVCache: k: expected num_pages 1..2^31 - 1, got 0; page ids are int32"),
    "span": (lambda: KVCache(*[torch.empty_strided((2, 16, 3, 48), (48, 2**28, 96, 1), dtype=torch.float16, device="meta")] * 2), "KVCache: 2 faults\n  k: expected one page of one head within 2^31 elements, got 4,026,531,888; make the slots of a page adjacent\n  v: expected one page of one head within 2^31 elements, got 4,026,531,888; make the slots of a page adjacent"),
    "empty counts": (lambda: KVCache.empty(0, 16, 2.0, 48, device="cpu"), "KVCache.empty: 2 faults\n  num_pages: expected an int of 1 or more, got 0; see help(bigpool.KVCache.empty)\n  num_kv_heads: expected an int of 1 or more, got 2.0; see help(bigpool.KVCache.empty)"),
    "odd int4": (lambda: KVCache.empty(7, 16, 2, 47, format="int4", device="cpu"), "KVCache.empty: head_dim: expected a multiple of 2 for int4, got 47; pad the heads"),
    "inline bf16": (lambda: KVCache.empty(7, 16, 2, 48, inline_scales=True, device="cpu"), "KVCache.empty: inline_scales: expected scales per token and head, got bf16 with scales 'none'; leave it out, or pass scales='token_head'"),
    "inline odd": (lambda: KVCache.empty(7, 16, 2, 44, format="int4", inline_scales=True, device="cpu"), "KVCache.empty: head_dim: expected a multiple of 8 for int4 with inline scales, which are fp32 and aligned, got 44; pad the heads"),
    "tensor axes": (lambda: KVCache.from_tensor(data((7, 16, 48)), format="int8", head_dim=48, kv_layout="NHD"), "KVCache.from_tensor: tensor: expected 4 axes, the last one of K and V, or 5 axes with one of 2 among the first two, got [7, 16, 48]; see help(bigpool.KVCache.from_tensor)"),
    "tensor row": (lambda: KVCache.from_tensor(data((7, 16, 3, 96)), format="int8", head_dim=48, kv_layout="NHD"), "KVCache.from_tensor: tensor: expected rows of 52 or more elements for the data and a scale, got 48 in [7, 16, 3, 96]; check head_dim"),
    "tensor dtype": (lambda: KVCache.from_tensor(data((7, 16, 3, 96)), format="bf16", head_dim=48, kv_layout="NHD"), "KVCache.from_tensor: tensor: expected bfloat16, got int8; pass the tensor that the cache is in"),
    "tensor alignment": (lambda: KVCache.from_tensor(data((7, 16, 3, 108)), format="int8", head_dim=48, kv_layout="NHD"), "KVCache.from_tensor: tensor: expected rows that begin at multiples of 4 bytes, which fp32 scales need, got strides [5184, 324, 108, 1]; pad the rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    make, text = MESSAGES[name]
    with pytest.raises(ArgumentError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_a_cache_says_of_itself(kind, kv_layout):
    made = cache(kind, kv_layout=kv_layout)
    assert (made.num_pages, made.page_size, made.num_kv_heads, made.head_dim) == (7, 16, 3, 48)
    assert made.format.name == kind[0]
    assert kind[1] in (None, made.format.scales)
    given = {"tensor": 8, "head": 24}.get(made.format.scales, 0)
    assert made.nbytes == 7 * 16 * 3 * 2 * made.format.row_bytes(48) + given
    assert made.inline_scales is kind[2]
    assert made.kv == (made.k, made.v)
    assert made.options == {"kv_layout": kv_layout, "k_scale": made.k_scale, "v_scale": made.v_scale}
    assert made.k.data_ptr() != made.v.data_ptr()
    assert [tensor.shape[:3] for tensor in made.nhd()[:2]] == [(7, 16, 3)] * 2


def written(made):
    k, v = rows(KINDS[9])
    write_kv(k, v, made, torch.arange(20))
    return made


def test_one_tensor_layouts_are_views_with_k_its_scale_v_its_scale_in_a_slot():
    """vLLM's logical axes are HND, its memory NHD: the same bytes seen either way."""
    memory = torch.zeros(7, 16, 3, 2 * 52, dtype=torch.uint8)
    hnd = written(KVCache.from_tensor(memory.transpose(1, 2), format="int8", head_dim=48, kv_layout="HND"))
    apart = written(KVCache.empty(7, 16, 3, 48, format="int8", device="cpu"))
    slot = memory[1, 2, 1]
    for ours, begin in ((apart.k, 0), (apart.v, 52)):
        assert torch.equal(slot[begin : begin + 48].view(torch.int8), ours[1, 2, 1])
    for ours, begin in ((apart.k_scale, 48), (apart.v_scale, 100)):
        assert slot[begin : begin + 4].view(torch.float32).item() == ours[1, 2, 1].item()
    nhd = KVCache.from_tensor(memory, format="int8", head_dim=48, kv_layout="NHD")
    for one, other in zip(hnd.nhd(), nhd.nhd(), strict=True):
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("first", [True, False])
def test_older_layouts_hold_k_and_v_one_after_another(first):
    shape = (7, 2, 16, 3, 52) if first else (2, 7, 16, 3, 52)
    memory = torch.zeros(shape, dtype=torch.int8)
    made = written(KVCache.from_tensor(memory, format="int8", head_dim=48, kv_layout="NHD"))
    again = memory.unbind(1 if first else 0)
    for tensor, rows_of in zip(made.kv, again, strict=True):
        assert tensor.data_ptr() == rows_of.data_ptr()
        assert torch.equal(tensor, rows_of[..., :48])
        assert tensor[1, 2].any()


def test_scales_may_lie_in_tensors_of_their_own():
    memory = torch.zeros(7, 16, 3, 96, dtype=torch.int8)
    scales = [scale(), scale()]
    options = {"format": "int8", "head_dim": 48, "kv_layout": "NHD", "k_scale": scales[0], "v_scale": scales[1]}
    made = written(KVCache.from_tensor(memory, **options))
    assert made.k_scale is scales[0]
    assert not made.inline_scales
    plain = written(KVCache.empty(7, 16, 3, 48, format="int8", device="cpu"))
    assert torch.equal(made.k[1, 2], plain.k[1, 2])
    part = [KVCache(*(tensor[1:2, :4] for tensor in (*one.kv, one.k_scale, one.v_scale))) for one in (made, plain)]
    assert_same(*part)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: KVCache.empty(8, 16, 8, 128, format="int8"), "KVCache.empty"),
        (lambda: KeyCodes.empty(num_pages=2, page_size=16, num_kv_heads=1, head_dim=64, max_num_reqs=1), "KeyCodes.empty"),
        (lambda: PrefillWorkspace.empty(max_num_reqs=1, max_num_keys=9, num_kv_heads=1, head_dim=64), "PrefillWorkspace.empty"),
        (
            lambda: Workspace.for_verify(max_num_reqs=1, max_seqlen_q=1, num_q_heads=1, num_kv_heads=1, head_dim=64),
            "Workspace.for_verify",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_a_gpu_the_device_has_to_be_named(make, function):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert str(caught.value) == (
        f"{function}: device: expected one of this machine, got cuda, and torch finds no GPU; pass 'cpu'"
    )


def test_a_device_that_is_none():
    with pytest.raises(ArgumentError) as caught:
        KVCache.empty(8, 16, 8, 128, format="int8", device="gpu")
    assert str(caught.value) == "KVCache.empty: device: expected a device of torch, got 'gpu'; pass 'cuda' or 'cpu'"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda k: KVCache(k, k.clone(), 1.0, None),
            "KVCache: k_scale: expected None or a float32 tensor, got float; pass torch.tensor([scale]) beside its cache",
        ),
        (
            lambda k: KVCache.from_tensor(None, format="int8", head_dim=16, kv_layout="NHD"),
            "KVCache.from_tensor: tensor: expected a tensor, got NoneType; pass what the engine allocated",
        ),
        (lambda k: Workspace(None), "Workspace: part: expected a tensor [values], got NoneType; pass a torch.Tensor"),
    ],
    ids=["scale", "tensor", "part"],
)
def test_what_is_no_tensor_is_said(make, text):
    with pytest.raises(ArgumentError) as caught:
        make(torch.zeros(2, 16, 1, 16).to(torch.float8_e4m3fn))
    assert str(caught.value) == text
