"""The writer: codes and scales of kernel and twin bit by bit, what is skipped, layouts, messages, compiled graphs."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bigpool
from bigpool import formats, gather_kv, verify_attention, write_kv
from bigpool.cache import KVCache
from bigpool.errors import ArgumentError
from cache_inputs import BITS, FILL, KINDS, PLAIN, assert_same, bits, cache, rows, tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP8 = ["fp8_e4m3", "fp8_e5m2"]
BACKENDS = ["triton", "torch"]
PER_ROW = [kind for kind in KINDS if kind[0] in ("int8", "int4") or kind[1] == "token_head"]


def names(kind):
    return "-".join(str(part) for part in kind)


def slots_of(num_tokens=20, num_slots=7 * 16, seed=0):
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens].to(DEVICE)


def both(kind, k, v, slots, head_dim=48, **options):
    """The cache that the kernel wrote and the cache that the twin wrote."""
    made = [cache(kind, head_dim, kv_heads=k.shape[1], device=DEVICE, **options) for _ in BACKENDS]
    for one, backend in zip(made, BACKENDS, strict=True):
        write_kv(k, v, one, slots, backend=backend)
    return made


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_kernel_and_twin_give_the_same_bits(kind, kv_layout):
    for dtype in {PLAIN.get(kind[0], dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}:
        k, v = rows(kind, num_tokens=8, dtype=dtype, device=DEVICE)
        assert_same(*both(kind, k, v, slots_of(8), kv_layout=kv_layout))


@pytest.mark.parametrize("head_dim", [16, 40, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("kind", [("int8", None, True), ("int4", None, True), ("fp8_e4m3", "head", False)], ids=names)
def test_head_dims(kind, head_dim):
    k, v = rows(kind, head_dim=head_dim, num_tokens=8, kv_heads=5, device=DEVICE)
    assert_same(*both(kind, k, v, slots_of(8), head_dim))


@pytest.mark.parametrize("page_size", [1, 880])
@pytest.mark.parametrize("kv_heads", [1, 17])
def test_pages_and_heads(kv_heads, page_size):
    k, v = rows(KINDS[9], kv_heads=max(kv_heads, 3), num_tokens=8, device=DEVICE)
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    num_tokens = min(8, 7 * page_size)
    assert_same(*both(KINDS[9], k[:num_tokens], v[:num_tokens], slots_of(num_tokens, 7 * page_size), page_size=page_size))


def fp8_in_kernel(name, values, **options):
    """Codes of `values` [n] out of the kernel, with scale 1, as rows of 1,024."""
    tokens = values.reshape(-1, 1, 1024)
    made = KVCache.empty(-(-len(tokens) // 16), 16, 1, 1024, format=name, device=DEVICE)
    write_kv(tokens, tokens, made, torch.arange(len(tokens), device=DEVICE), backend="triton", **options)
    return made.k.view(-1, 1024)[: len(tokens)].reshape(-1)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FP8)
def test_every_16_bit_value_becomes_what_torch_makes_of_it(name, dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    largest = torch.finfo(formats.named(name).dtype).max
    expected = values.float().clamp(-largest, largest).to(formats.named(name).dtype).view(torch.uint8)
    expected = torch.where(values.float().isfinite(), expected, 0x7F)
    assert torch.equal(fp8_in_kernel(name, values).view(torch.uint8), expected)


@pytest.mark.parametrize("name", FP8)
def test_fp32_values_around_every_tie(name):
    dtype = formats.named(name).dtype
    table = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    table = table[table.isfinite()]
    middles = (table[1:] + table[:-1]) / 2
    near = [middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(9e9)), table, table * 0.999]
    values = torch.cat([*near, *(-part for part in near), torch.randn(4096) * 100, torch.randn(4096) * 1e-3])
    values = values[: len(values) // 1024 * 1024].to(DEVICE)
    largest = torch.finfo(dtype).max
    expected = values.clamp(-largest, largest).to(dtype).view(torch.uint8)
    assert torch.equal(fp8_in_kernel(name, values).view(torch.uint8), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_negative_slots_and_slots_beyond_the_pool_write_nothing(kind, backend):
    k, v = rows(kind, num_tokens=5, bad=False, device=DEVICE)
    made = cache(kind, device=DEVICE)
    before = [tensor.clone() for tensor in tensors(made)]
    skipped = torch.tensor([-1, -(2**63), 7 * 16, 2**40, 2**63 - 1], device=DEVICE)
    write_kv(k, v, made, skipped, backend=backend)
    for tensor, old in zip(tensors(made), before, strict=True):
        assert torch.equal(bits(tensor), bits(old))
    write_kv(k, v, made, torch.tensor([-1, 3, -1, 7 * 16 - 1, -5], device=DEVICE), backend=backend)
    changed = (bits(made.k) != bits(before[0])).any(-1).any(-1)
    assert changed.nonzero().tolist() == [[0, 3], [6, 15]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_bytes_between_rows_stay(kind, backend):
    """A padded one-tensor cache: what is neither data nor scale keeps its bits."""
    name, scales, _ = kind
    kv_format = formats.named(name, scales)
    inline = kv_format.scales == "token_head"
    row = kv_format.row_elements(48) + 4 * inline + 8
    tensor = torch.empty(7, 16, 3, 2 * row, dtype=kv_format.dtype, device=DEVICE)
    raw = tensor.view(BITS[tensor.element_size()]).fill_(FILL[tensor.element_size()])
    given = None if inline or kv_format.scales == "none" else torch.ones(1 if scales == "tensor" else 3, device=DEVICE)
    options = {"k_scale": given, "v_scale": given, "scales": scales}
    made = KVCache.from_tensor(tensor, format=name, head_dim=48, kv_layout="NHD", **options)
    assert made.k.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    k, v = rows(kind, device=DEVICE)
    write_kv(k, v, made, slots_of(), backend=backend)
    gaps = raw.view(7, 16, 3, 2, row)[..., row - 8 :]
    assert (gaps == FILL[tensor.element_size()]).all()
    if inline:
        apart = cache((name, scales, False), device=DEVICE)
        write_kv(k, v, apart, slots_of(), backend=backend)
        assert_same(made, apart)


@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_slices_of_a_fused_projection(kind):
    """q, k and v of one projection: rows of 14,336 elements, of which k and v are slices."""
    k, v = rows(kind, num_tokens=4, head_dim=48, bad=False, device=DEVICE)
    fused = torch.full((4, 14_336), math.nan, dtype=k.dtype, device=DEVICE)
    fused[:, 6_144:6_288], fused[:, 7_168:7_312] = k.flatten(1), v.flatten(1)
    sliced = [fused[:, begin : begin + 144].unflatten(1, (3, 48)) for begin in (6_144, 7_168)]
    assert not sliced[0].is_contiguous()
    plain, strided = cache(kind, device=DEVICE), cache(kind, device=DEVICE)
    write_kv(k, v, plain, slots_of(4), backend="triton")
    write_kv(*sliced, strided, slots_of(4), backend="triton")
    assert_same(plain, strided)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS, ids=names)
def test_gather_gives_back_what_was_written(kind, backend):
    k, v = rows(kind, bad=False, device=DEVICE)
    made = cache(kind, device=DEVICE)
    if made.format.scales in ("tensor", "head"):
        made.k_scale.fill_(0.5)
        made.v_scale.fill_(0.25)
    table = torch.tensor([[5, 2], [3, 1]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([18, 2], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([*range(80, 96), 32, 33, 48, 49], device=DEVICE)
    write_kv(k, v, made, slots, backend=backend)
    keys, values = gather_kv(made, table, lens)
    assert keys.dtype == torch.float32
    bound = {"bf16": 0, "fp16": 0, "fp32": 0, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 1 / 200, "int4": 2 / 15}[kind[0]]
    for got, given in ((keys, k), (values, v)):
        largest = given.float().abs().amax(-1, keepdim=True)
        assert ((got - given.float()).abs() <= bound * largest).all()
    wrong, _ = gather_kv(made, table.flip(0), lens)
    assert (wrong - k.float()).abs().max() > 1, "the table matters"
    table[0, 1] = 7
    keys, values = gather_kv(made, table, lens)
    assert keys[16:18].isnan().all()
    assert values[16:18].isnan().all()
    assert keys[18:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", PER_ROW, ids=names)
def test_rows_that_are_not_finite_become_nan_scales(kind, backend):
    k, v = rows(kind, device=DEVICE)
    made = cache(kind, device=DEVICE, page_size=20, num_pages=1)
    write_kv(k, v, made, torch.arange(20, device=DEVICE), backend=backend)
    assert made.k_scale[0].isnan().nonzero().tolist() == [[3, 1]]
    assert made.v_scale[0].isnan().nonzero().tolist() == [[4, 1], [4, 2]]
    assert (bits(made.k)[0, 3, 1] == 0).all()
    assert made.k_scale[0, 5].tolist() == [1.0] * 3, "rows of zeros"
    assert (bits(made.k)[0, 5] == 0).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[0] in FP8 and kind[1] != "token_head"], ids=names)
def test_values_that_are_not_finite_become_nan_where_scales_are_given(kind):
    k, v = rows(kind, device=DEVICE)
    for made in both(kind, k, v, torch.arange(20, device=DEVICE), page_size=20, num_pages=1):
        assert made.k.float()[0].isnan().nonzero().tolist() == [[3, 1, 7]]
        assert made.v.float()[0].isnan().nonzero().tolist() == [[4, 1, 1], [4, 2, 0]]


def test_one_scale_given_and_one_not():
    k, v = rows(KINDS[3], device=DEVICE)
    made = [cache(KINDS[3], device=DEVICE) for _ in BACKENDS]
    made = [KVCache(one.k, one.v, one.k_scale, None) for one in made]
    for one, backend in zip(made, BACKENDS, strict=True):
        write_kv(k, v, one, slots_of(), backend=backend)
    assert_same(*made)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS[1:], ids=names)
def test_attention_reads_what_the_writer_wrote(kind, kv_layout):
    """Verify attention over a written cache is attention over its dequantised rows."""
    k, v = rows(kind, bad=False, num_tokens=18, dtype=torch.float16, device=DEVICE)
    made = cache(kind, kv_layout=kv_layout, device=DEVICE)
    if made.format.scales in ("tensor", "head"):
        made.k_scale.fill_(0.4)
        made.v_scale.fill_(0.3)
    write_kv(k / 4, v, made, torch.tensor([*range(80, 96), 32, 33], device=DEVICE))
    q = torch.randn(2, 6, 48, device=DEVICE).to(k.dtype)
    table, lens, starts = (torch.tensor(data, dtype=torch.int32, device=DEVICE) for data in ([[5, 2]], [18], [0, 2]))
    out = verify_attention(q, *made.kv, table, lens, starts, max_seqlen_q=2, backend="triton", **made.options)
    keys, values = (part.double().repeat_interleave(2, 1) for part in gather_kv(made, table, lens))
    scores = torch.einsum("hd,nhd->hn", q[1].double(), keys) * 48**-0.5
    expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
    assert (out[1].double() - expected).abs().max() < 0.004 * expected.abs().max()


def test_no_tokens():
    made = cache(KINDS[9], device=DEVICE)
    k, v = rows(KINDS[9], bad=False, device=DEVICE)
    write_kv(k[:0], v[:0], made, slots_of(0), backend="triton")
    assert (bits(made.k) == FILL[1]).all()


GOOD = {"kind": ("int8", None, False)}
MESSAGES = {
    "int32 slots": (lambda k, v, c, s: (k, v, c, s.int()), "slot_mapping: expected int64 [num_tokens=512], got int32 [512]; call slot_mapping.long()"),
    "slots shape": (lambda k, v, c, s: (k, v, c, s[:-1]), "slot_mapping: expected int64 [num_tokens=512], got int64 [511]; pass one slot per token"),
    "k dtype": (lambda k, v, c, s: (k.double(), v.double(), c, s), "2 faults\n  k: expected bfloat16|float16|float32 [num_tokens, num_kv_heads=3, head_dim=48], got float64 [512, 3, 48]; the cache has these heads\n  v: expected bfloat16|float16|float32 [num_tokens, num_kv_heads=3, head_dim=48], got float64 [512, 3, 48]; the cache has these heads"),
    "k heads": (lambda k, v, c, s: (k[:, :2], v, c, s), "k: expected bfloat16|float16|float32 [num_tokens=512, num_kv_heads=3, head_dim=48], got float16 [512, 2, 48]; the cache has these heads"),
    "v dtype": (lambda k, v, c, s: (k, v.float(), c, s), "v: expected float16 [num_tokens=512, num_kv_heads=3, head_dim=48], got float32 [512, 3, 48]; k and v share dtype and shape"),
    "k stride": (lambda k, v, c, s: (k.transpose(1, 2).contiguous().transpose(1, 2), v, c, s), "k: expected stride 1 in the last axis, got 3; call k.contiguous()"),
    "plain dtype": (lambda k, v, c, s: (k, v.float(), cache(KINDS[0], device=DEVICE), s), "2 faults\n  k: expected bfloat16 [num_tokens, num_kv_heads=3, head_dim=48], got float16 [512, 3, 48]; the cache is bfloat16 and not quantised\n  v: expected bfloat16 [num_tokens, num_kv_heads=3, head_dim=48], got float32 [512, 3, 48]; the cache is bfloat16 and not quantised"),
    "cache": (lambda k, v, c, s: (k, v, c.k, s), "cache: expected a bigpool.KVCache, got Tensor; wrap its tensors: bigpool.KVCache(k, v, ...)"),
    "device": (lambda k, v, c, s: (k, v, c, s.to("meta")), f"slot_mapping: expected device {cache(KINDS[9], device=DEVICE).k.device}, got meta; call slot_mapping.to('{cache(KINDS[9], device=DEVICE).k.device}')"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    change, text = MESSAGES[name]
    k, v = rows(KINDS[9], num_tokens=512, bad=False, device=DEVICE)
    with pytest.raises(ArgumentError) as caught:
        write_kv(*change(k, v, cache(KINDS[9], num_pages=40, device=DEVICE), slots_of(512, 640)))
    assert str(caught.value) == f"write_kv: {text}"


def test_backend_message():
    k, v = rows(KINDS[9], device=DEVICE)
    with pytest.raises(ArgumentError) as caught:
        write_kv(k, v, cache(KINDS[9], device=DEVICE), slots_of(), backend="cuda")
    assert str(caught.value) == "write_kv: backend: expected 'auto' or 'triton' or 'torch', got 'cuda'; 'auto' chooses"


def test_checked_mode():
    k, v = rows(KINDS[9], num_tokens=4, bad=False, device=DEVICE)
    made = cache(KINDS[9], device=DEVICE)
    write_kv(k, v, made, torch.tensor([-1, -1, 0, 111], device=DEVICE), check=True)
    with pytest.raises(ArgumentError) as caught:
        write_kv(k, v, made, torch.tensor([3, 112, 5, 3], device=DEVICE), check=True)
    assert str(caught.value) == (
        "write_kv: 2 faults\n"
        "  slot_mapping: expected slots below num_pages * page_size = 112, got 112 at token 1; allocate the page, or pass -1\n"
        "  slot_mapping: expected each slot once, got 3 twice or more; give each token a slot of its own"
    )


GATHER = {
    "table": (lambda t, n: (t.long(), n), "block_table: expected int32 [num_reqs, max_pages_per_req], got int64 [1, 2]; call block_table.int()"),
    "lens": (lambda t, n: (t, n[:0]), "seq_lens: expected int32 [num_reqs=1], got int32 [0]; pass one entry per request"),
}  # fmt: skip


@pytest.mark.parametrize("name", GATHER)
def test_gather_messages(name):
    change, text = GATHER[name]
    table, lens = (torch.tensor(data, dtype=torch.int32, device=DEVICE) for data in ([[5, 2]], [18]))
    with pytest.raises(ArgumentError) as caught:
        gather_kv(cache(KINDS[9], device=DEVICE), *change(table, lens))
    assert str(caught.value) == f"gather_kv: {text}"


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4], KINDS[9], KINDS[11]], ids=names)
def test_torch_compile_fullgraph(kind):
    k, v = rows(kind, device=DEVICE)
    plain, traced = cache(kind, device=DEVICE), cache(kind, device=DEVICE)

    def step(k, v, made, slots):
        write_kv(k * 2, v, made, slots + 1)
        return made.k.view(BITS[made.k.element_size()])[0, 0] + 1

    slots = slots_of(num_slots=7 * 16 - 1)
    expected = step(k, v, plain, slots)
    assert torch.equal(compiled(step)(k, v, traced, slots), expected)
    assert_same(plain, traced)


def test_torch_compile_of_a_cache_with_k_and_v_in_one_tensor():
    tensors = [torch.full((7, 3, 16, 2 * 48), 1.0, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    made = [KVCache.from_tensor(tensor, format="fp16", head_dim=48, kv_layout="HND") for tensor in tensors]
    k, v = rows(KINDS[1], bad=False, device=DEVICE)
    write_kv(k, v, made[0], slots_of())
    compiled(write_kv)(k, v, made[1], slots_of())
    assert torch.equal(*tensors)


def test_torch_compile_refuses_inline_scales_in_words():
    """torch cannot trace writes through views of two dtypes of one storage."""
    k, v = rows(KINDS[10], device=DEVICE)
    with pytest.raises(Exception, match=r"cache: expected scales apart from the data under torch\.compile, got inline scales; "):
        compiled(write_kv)(k, v, cache(KINDS[10], device=DEVICE), slots_of())


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[9], KINDS[11]], ids=names)
def test_operator_passes_opcheck(kind):
    k, v = rows(kind, bad=False)
    made = cache(kind)
    report = torch.library.opcheck(torch.ops.bigpool.write_kv, (k, v, slots_of().cpu(), *made.nhd()))
    assert set(report.values()) == {"SUCCESS"}, report


def test_the_proof_sees_a_writer_with_32_bit_page_ids(tmp_path):
    """slot_mapping is int64, so that no widening in the source could be cut: this cuts the page id that comes out of it."""
    kernels = Path(bigpool.__file__).parent / "kernels"
    shutil.copytree(kernels, tmp_path / "before", ignore=shutil.ignore_patterns("__pycache__"))
    paging = tmp_path / "before" / "_paging.py"
    right, wrong = "page_idx = slot // PAGE_SIZE", "page_idx = (slot // PAGE_SIZE).to(tl.int32)"
    assert right in paging.read_text()
    paging.write_text(paging.read_text().replace(right, wrong))
    record = tmp_path / "proof.json"
    command = [sys.executable, "-m", "bigpool", "prove", "--device", "cpu", "--case", "write-kv-int8"]
    command += ["--before", str(tmp_path / "before"), "--json", str(record)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    runs = [run for run in json.loads(record.read_text())["runs"] if run["arm"] == "before" and run["placement"] == "top"]
    assert len(runs) == 2
    assert all(run["outcome"] in ("killed", "canary") for run in runs), runs


def test_they_are_public():
    assert (bigpool.write_kv, bigpool.gather_kv, bigpool.KVCache) == (write_kv, gather_kv, KVCache)


def test_gather_of_an_empty_batch():
    made = cache(KINDS[3], device=DEVICE)
    none = torch.zeros(0, 3, dtype=torch.int32, device=DEVICE), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    for gathered in gather_kv(made, *none):
        assert gathered.shape == (0, made.num_kv_heads, made.head_dim)
    one = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    assert gather_kv(made, *one)[0].shape[0] == 0
