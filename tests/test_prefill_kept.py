"""int8 scores with codes that are kept: the same bits whatever the chunks, the hit and the neighbours, and right ones."""

import pytest
import torch

from bigpool import reference_prefill_keys
from bigpool.errors import ArgumentError
from bigpool.ops import _prefill_launch
from bigpool.ops._prefill_plan import EXACT_KEYS, KeyPasses, PrefillConfig
from bigpool.ops.prefill import KeyCodes, key_codes_bytes, prefill_attention
from prefill_inputs import errors_of, judge, make, outlier_call, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def codes_for(call, max_num_reqs=4):
    """Codes for the cache of a call, garbage in them."""
    num_pages, page_size, num_kv_heads, head_dim = call["k_cache"].shape
    if call["kv_layout"] == "HND":
        num_kv_heads, page_size = page_size, num_kv_heads
    made = KeyCodes.empty(
        num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, max_num_reqs=max_num_reqs,
        device=call["k_cache"].device,
    )  # fmt: skip
    made.codes.fill_(77)
    made.means.fill_(float("nan"))
    return made


def chunk(call, begin, end):
    """The call of query tokens begin..end of the only request of `call`, whose query tokens are all of it."""
    device = call["q"].device
    lengths = {
        "q": call["q"][begin:end], "seq_lens": torch.tensor([end], dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, end - begin], dtype=torch.int32, device=device), "max_seqlen_q": end - begin,
    }  # fmt: skip
    return {**call, **lengths}


def in_chunks(call, ends, codes):
    """(out, lse) of a whole request in chunks that end there."""
    begin, found = 0, []
    for end in ends:
        found.append(run(chunk(call, begin, end), key_codes=codes))
        begin = end
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def twin_of(call, codes):
    """`call` as the twin takes it: with codes that only it writes."""
    return {**call, "kept": (codes.codes, codes.scales)}


def assert_same_codes(ours, theirs):
    """Sums of another order may round a mean to the neighbouring number, and a key with it: rarely, and by one step."""
    written = ~theirs.scales.isnan()
    assert torch.equal(written, ~ours.scales.isnan())
    assert torch.allclose(ours.scales[written], theirs.scales[written], rtol=1e-3)
    differ = (ours.codes[written].int() - theirs.codes[written].int()).abs()
    assert (differ <= 1).all()
    assert int((differ > 0).sum()) <= 1e-3 * differ.numel()


SIZES = {"heads": (4, 2), "head_dim": 32, "page_size": 16}


@pytest.mark.parametrize("page_size", [1, 16, 48, 880])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_a_request_in_chunks(page_size, kv_layout):
    call = make([201], [201], qk="int8", device=DEVICE, kv_layout=kv_layout, **SIZES | {"page_size": page_size})
    ours, theirs = codes_for(call), codes_for(call)
    for begin, end in ((0, 100), (100, 130), (130, 200), (200, 201)):
        part = chunk(call, begin, end)
        out, lse = run(part, key_codes=ours)
        judge(twin_of(part, theirs), out, lse)
        assert_same_codes(ours, theirs)
    assert (~ours.scales.isnan()).sum() == (201 - EXACT_KEYS) * 2


@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [
        *((dtype, None) for dtype in (torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else []))),
        (torch.float16, (16, 16)),
        (torch.float32, (16, 32)),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_chunks(dtype, tiles, monkeypatch):
    if tiles is not None:
        if DEVICE == "cuda":
            pytest.skip("these tiles are for the interpreter; a GPU has its own")
        monkeypatch.setattr(_prefill_launch, "pick_prefill_config", lambda *a, **k: PrefillConfig(*tiles, 1, 1))
    length, sizes = (200, (13, 64)) if DEVICE == "cpu" else (1_500, (7, 64, 512))
    call = make([length], [length], qk="int8", device=DEVICE, dtype=dtype, **SIZES)
    whole_codes = codes_for(call)
    whole = in_chunks(call, [length], whole_codes)
    assert torch.isfinite(whole[0]).all()
    for size in sizes:
        codes = codes_for(call)
        parts = in_chunks(call, [*range(size, length, size), length], codes)
        assert same_bits(parts[0], whole[0]), size
        assert same_bits(parts[1], whole[1]), size
        assert same_bits(codes.scales, whole_codes.scales)
        assert same_bits(codes.codes, whole_codes.codes)
    # One token at a time, as a decode step would, across the first key that has codes.
    codes = codes_for(call)
    head = in_chunks(call, [125, *range(126, 133)], codes)
    assert same_bits(head[0], whole[0][:132])


def test_a_prefix_that_requests_share_serves_both_and_neighbours_change_nothing():
    """Two requests share 11 pages; the second begins with a hit of 160 tokens, in a batch with a third."""
    call = make([230], [230], qk="int8", device=DEVICE, **SIZES)
    codes = codes_for(call)
    whole = in_chunks(call, [176, 230], codes)
    table = call["block_table"]
    pages = torch.randperm(len(call["k_cache"]), device=DEVICE)
    # The third request has pages of its own, all that are left.
    others = [int(page) for page in pages if int(page) not in table[0].tolist()]
    rng = torch.Generator().manual_seed(5)
    for name in ("k_cache", "v_cache"):
        call[name][others] = torch.randn(call[name][others].shape, generator=rng).to(call[name])
    both = {
        **call,
        "q": torch.cat((call["q"][160:176], call["q"][:20])),
        "block_table": torch.stack((table[0], torch.tensor(others + others * 10, device=DEVICE)[: table.shape[1]].int())),
        "seq_lens": torch.tensor([176, 20], dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.tensor([0, 16, 36], dtype=torch.int32, device=DEVICE), "max_seqlen_q": 20,
    }  # fmt: skip
    out, _ = run(both, key_codes=codes)
    assert same_bits(out[:16], whole[0][160:176])
    again, _ = run(chunk(call, 176, 230), key_codes=codes)
    assert same_bits(again, whole[0][176:])


def test_only_codes_of_new_keys_are_written():
    call = make([300], [300], qk="int8", device=DEVICE, **SIZES)
    codes = codes_for(call)
    in_chunks(call, [200], codes)
    flat = codes.scales[call["block_table"][0].long()].flatten(0, 1)
    assert flat[:EXACT_KEYS].isnan().all(), "the keys at the head have no codes"
    assert not flat[EXACT_KEYS:200].isnan().any()
    assert flat[200:].isnan().all()
    pages = call["block_table"][0, : 200 // 16].long()
    codes.codes[pages] = 0
    run(chunk(call, 200, 300), key_codes=codes)
    assert (codes.codes[pages] == 0).all(), "codes of earlier chunks are not written again"
    assert not codes.scales[call["block_table"][0].long()].flatten(0, 1)[200:300].isnan().any()


def test_a_key_without_codes_gives_nan():
    call = make([300], [300], qk="int8", device=DEVICE, **SIZES)
    out, _ = run(chunk(call, 200, 300), key_codes=codes_for(call))
    assert out.isnan().all(), "keys 128..199 were never query tokens of such a call"


def test_a_page_that_was_forgotten_gives_nan_and_not_the_codes_of_its_last_request():
    call = make([300], [300], qk="int8", device=DEVICE, **SIZES)
    codes = codes_for(call)
    in_chunks(call, [300], codes)
    call["k_cache"].neg_()
    out, _ = run(chunk(call, 200, 300), key_codes=codes)
    assert torch.isfinite(out).all(), "codes of other keys do not show"
    rows = torch.full((2, 40), -1, dtype=torch.int32, device=DEVICE)
    rows[0, : call["block_table"].shape[1]] = call["block_table"][0]
    rows[1, :2] = torch.tensor([len(codes.scales), 2**31 - 1])
    before = codes.scales.isnan().sum()
    codes.forget(rows[1])
    assert codes.scales.isnan().sum() == before, "ids outside the pool are passed over"
    codes.forget(rows)
    out, _ = run(chunk(call, 200, 300), key_codes=codes)
    assert out.isnan().all()
    with pytest.raises(ArgumentError) as caught:
        codes.forget(torch.zeros(2, device=DEVICE))
    assert str(caught.value) == (
        "KeyCodes.forget: page_idx: expected int32|int64 [n], got float32 [2]; pass page ids, as block_table has them"
    )


@pytest.mark.parametrize(
    "rules", [{"softcap": 2.0}, {"sinks": torch.tensor([0.5, 2.0, -1.0, 3.0], device=DEVICE)}], ids=lambda r: next(iter(r))
)
def test_rules(rules):
    call = make([200], [200], qk="int8", device=DEVICE, **SIZES, **rules)
    ours, theirs = codes_for(call), codes_for(call)
    for begin, end in ((0, 150), (150, 200)):
        part = chunk(call, begin, end)
        judge(twin_of(part, theirs), *run(part, key_codes=ours))


def test_a_bad_key_reaches_only_rows_that_see_it():
    call = make([200], [200], qk="int8", device=DEVICE, **SIZES)
    good = in_chunks(call, [200], codes_for(call))[0]
    page = int(call["block_table"][0, 150 // 16])
    for value in (float("nan"), float("inf")):
        spoiled = {**call, "k_cache": call["k_cache"].clone()}
        spoiled["k_cache"][page, 150 % 16, 1, 3] = value
        out = in_chunks(spoiled, [90, 200], codes_for(call))[0]
        assert out[150:, 2:].isnan().all()
        out[150:, 2:] = good[150:, 2:]
        assert same_bits(out, good)
    table = call["block_table"].clone()
    table[0, 150 // 16] = len(call["k_cache"])
    out = in_chunks({**call, "block_table": table}, [200], codes_for(call))[0]
    assert out[144:].isnan().all()
    assert same_bits(out[:144], good[:144])


# (relative error, 1 - cosine) at most. "turning": offsets that positions turn, as rotary embeddings do.
BOUNDS = {
    "normal": (0.012, 1e-4),
    "offset": (0.012, 1e-4),
    "channels": (0.03, 4e-4),
    "turning": (0.04, 1e-3),
    "first": (0.012, 1e-4),
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_against_the_unrounded_truth(kind):
    call = outlier_call(kind, "int8", DEVICE, q_len=500)
    out, _ = run(call, key_codes=codes_for(call))
    call, out = chunk(call, 440, 500), out[440:]
    relative, angle = errors_of(call, out)
    most_relative, most_angle = BOUNDS[kind]
    assert relative <= most_relative, relative
    assert angle <= most_angle, angle
    for wrong in (torch.zeros_like(out), out.roll(1, 0), out * 1.05):
        relative, angle = errors_of(call, wrong)
        assert not (relative <= most_relative and angle <= most_angle)


def test_a_planted_key_is_found_in_codes():
    """Of keys that have codes: out is the value of the one that holds nearly all of the softmax."""
    call = make([300], [300], qk="int8", device=DEVICE, **SIZES)
    wanted = []
    for token, position in ((250, 140), (270, 131), (299, 246)):
        page, slot = int(call["block_table"][0, position // 16]), position % 16
        call["k_cache"][page, slot, 0] = 6 * call["q"][token, 0]
        wanted.append((token, call["v_cache"][page, slot, 0]))
    out = in_chunks(call, [160, 300], codes_for(call))[0]
    for token, value in wanted:
        assert (out[token, 0] - value).abs().max() < 0.05, token


def test_shares_of_the_pass_change_no_bit(monkeypatch):
    call = make([230], [230], qk="int8", device=DEVICE, **SIZES)
    one, other = codes_for(call), codes_for(call)
    run(call, key_codes=one)
    monkeypatch.setattr(_prefill_launch, "pick_key_passes", lambda *a: KeyPasses(16, 1, 5, 1))
    run(call, key_codes=other)
    assert same_bits(one.codes, other.codes)
    assert same_bits(one.scales, other.scales)


def test_the_twin_keeps_the_same_codes_and_changes_no_input():
    call = {
        name: value.cpu() if torch.is_tensor(value) else value for name, value in make([300], [300], qk="int8", **SIZES).items()
    }
    before = {name: value.clone() for name, value in call.items() if torch.is_tensor(value)}
    ours, theirs = codes_for(call), codes_for(call)
    whole = prefill_attention(**call, key_codes=ours)
    for name, value in before.items():
        assert same_bits(value, call[name]), name
    parts = [prefill_attention(**chunk(call, begin, end), key_codes=theirs) for begin, end in ((0, 170), (170, 300))]
    assert same_bits(ours.codes, theirs.codes)
    assert same_bits(ours.scales, theirs.scales)
    assert (torch.cat(parts).float() - whole.float()).abs().max() < 2e-3


def test_bytes():
    sizes = {"num_pages": 10, "page_size": 16, "num_kv_heads": 4, "head_dim": 256, "max_num_reqs": 3}
    assert key_codes_bytes(**sizes) == 4 * (160 * 260 + 3 * 256 * 4) == KeyCodes.empty(**sizes, device="cpu").nbytes


def test_the_twin_has_the_number_of_the_kernels():
    assert reference_prefill_keys.EXACT_KEYS == EXACT_KEYS
