"""Prefill attention through Triton's interpreter (or the GPU, where there is one) against the float64 oracle."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from bigpool.ops import _prefill_launch
from bigpool.ops._prefill_plan import KeyPasses, PrefillConfig
from bigpool.ops.prefill import PrefillWorkspace, prefill_attention
from bigpool.ops.verify import verify_attention
from prefill_inputs import check, errors_of, make, outlier_call, run, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter computes bf16 wrongly.
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
MODES = ("exact", "int8")


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 48, 880])
def test_page_sizes(page_size, dtype, qk):
    check(make([331, 70], [45, 33], page_size=page_size, dtype=dtype, device=DEVICE, qk=qk))


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 128, 256])
def test_head_dims(head_dim, qk):
    check(make([70, 33], [23, 33], head_dim=head_dim, device=DEVICE, qk=qk))


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (8, 2), (24, 4), (16, 1)])
def test_head_ratios(heads, qk):
    """Groups that do not divide the rows of a tile among them."""
    check(make([70, 33], [33, 9], heads=heads, device=DEVICE, qk=qk))


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_ragged_batch_with_empty_rows(kv_layout, qk):
    call = make([300, 0, 45, 5, 16, 0, 7], [80, 0, 0, 5, 1, 3, 9], kv_layout=kv_layout, device=DEVICE, qk=qk)
    out, lse = check(call)
    assert (out[86:89] == 0).all(), "seq_len 0: no key is seen"
    assert (lse[86:89] == float("-inf")).all()
    assert (out[89:91] == 0).all(), "seq_len 7 < q_len 9: the first two tokens see no key"
    assert (out[91:] != 0).any(-1).all()


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize(
    "rules",
    [{"causal": False}, {"window_size": 1}, {"window_size": 37}, {"window_size": 37, "causal": False}, {"softcap": 2.0}],
    ids=str,
)
def test_rules(rules, qk):
    check(make([300, 45, 7], [100, 45, 9], page_size=48, device=DEVICE, qk=qk, **rules))


@pytest.mark.parametrize("qk", MODES)
def test_softmax_scale(qk):
    plain, _ = check(make([90], [30], device=DEVICE, qk=qk))
    scaled, _ = check(make([90], [30], device=DEVICE, qk=qk, softmax_scale=0.5))
    assert not same_bits(plain, scaled)
    check(make([90], [30], device=DEVICE, qk=qk, softmax_scale=-0.1))


@pytest.mark.parametrize("qk", MODES)
def test_strides(qk):
    """q as a slice of a fused projection of 14,336 elements per token, K and V of one page, `out` in a wider tensor."""
    call = make([300, 77], [60, 20], page_size=48, device=DEVICE, qk=qk)
    expected = run(call)
    fused = torch.full((80, 14_336), float("nan"), dtype=torch.float16, device=DEVICE)
    fused[:, 512:768] = call["q"].flatten(1)
    whole = torch.full((*call["k_cache"].shape[:2], 2, 2, 80), float("nan"), dtype=torch.float16, device=DEVICE)
    whole[:, :, :, 0, 8:72], whole[:, :, :, 1, 16:] = call["k_cache"], call["v_cache"]
    strided = {
        "q": fused[:, 512:768].unflatten(1, (4, 64)), "k_cache": whole[:, :, :, 0, 8:72], "v_cache": whole[:, :, :, 1, 16:],
    }  # fmt: skip
    out = torch.full((80, 4, 100), float("nan"), dtype=torch.float16, device=DEVICE)
    returned, lse = run({**call, **strided}, out=out[:, :, 20:84])
    assert returned.data_ptr() == out[:, :, 20:84].data_ptr()
    assert same_bits(returned, expected[0])
    assert same_bits(lse, expected[1])
    assert out[:, :, :20].isnan().all()
    assert out[:, :, 84:].isnan().all()


@pytest.mark.parametrize("qk", MODES)
def test_a_request_has_the_same_bits_alone(qk):
    seq_lens, q_lens = [300, 45, 90], [80, 9, 33]
    call = make(seq_lens, q_lens, device=DEVICE, qk=qk)
    out, lse = run(call)
    starts = call["cu_seqlens_q"].tolist()
    for req, q_len in enumerate(q_lens):
        rows = slice(starts[req], starts[req + 1])
        lengths = {
            "seq_lens": call["seq_lens"][req : req + 1], "block_table": call["block_table"][req : req + 1],
            "cu_seqlens_q": torch.tensor([0, q_len], dtype=torch.int32, device=DEVICE), "max_seqlen_q": q_len,
        }  # fmt: skip
        alone = run({**call, **lengths, "q": call["q"][rows]})
        assert same_bits(out[rows], alone[0]), req
        assert same_bits(lse[rows], alone[1]), req


def test_more_than_128_requests_find_their_scratch():
    """Scratch rows begin where the keys of the requests before end; these are added 128 at a time."""
    lengths = [1 + req % 3 for req in range(131)]
    q_lens = [int(req % 16 in (1, 2)) for req in range(131)]
    check(make(lengths, q_lens, heads=(1, 1), head_dim=16, page_size=4, device=DEVICE, qk="int8"))


@pytest.mark.parametrize("qk", MODES)
def test_planted_keys(qk):
    """For each query token one key, each on another page, that holds nearly all of the softmax: out is that key's value."""
    call = make([300, 170], [8, 5], heads=(4, 2), device=DEVICE, qk=qk)
    token = 0
    for req, (seq_len, q_len) in enumerate(((300, 8), (170, 5))):
        for i in range(q_len):
            for head in range(2):
                position = (i * 40_503 + head * 77) % (seq_len - q_len)
                page, slot = int(call["block_table"][req, position // 16]), position % 16
                call["k_cache"][page, slot, head] = 4 * call["q"][token, 2 * head]
                want = call["v_cache"][page, slot, head]
                call.setdefault("wanted", []).append((token, 2 * head, want.clone()))
            token += 1
    wanted = call.pop("wanted")
    out, _ = check(call)
    for token, head, value in wanted:
        assert torch.allclose(out[token, head], value, atol=0.02), (token, head)


# (relative error, 1 - cosine) of int8 at most; an output of zeros has (1, nan), one of another token's values about (1.4, 1).
INT8_BOUNDS = {"normal": (0.012, 1e-4), "offset": (0.012, 1e-4), "channels": (0.03, 4e-4)}


@pytest.mark.parametrize("kind", INT8_BOUNDS)
def test_int8_against_the_unrounded_truth(kind):
    call = outlier_call(kind, "int8", DEVICE)
    out, _ = run(call)
    relative, angle = errors_of(call, out)
    most_relative, most_angle = INT8_BOUNDS[kind]
    assert relative <= most_relative, relative
    assert angle <= most_angle, angle
    for wrong in (torch.zeros_like(out), out.roll(1, 0), out * 1.05):
        relative, angle = errors_of(call, wrong)
        assert not (relative <= most_relative and angle <= most_angle)


@pytest.mark.parametrize("op", [prefill_attention, verify_attention], ids=lambda op: op.__name__)
@pytest.mark.parametrize("cap", [1e3, 1e5, 1e8])
def test_a_large_soft_cap_changes_nothing(op, cap):
    """c tanh(s / c) is s for a large c; a quotient of exponentials loses all digits there."""
    call = make([200, 40], [9, 1], dtype=torch.float32, device=DEVICE)
    bare, capped = (op(**call, backend="triton", **options) for options in ({}, {"softcap": cap}))
    assert (capped - bare).abs().max() <= 1e-5 * bare.abs().max() + 1 / cap


def test_without_the_mean_an_offset_would_ruin_int8(monkeypatch):
    """The bound of "offset" holds because the mean is taken away: without, the error is nine times larger."""
    call = outlier_call("offset", "int8", DEVICE)
    quantise = _prefill_launch._quantise_keys

    def without_mean(kernels, props, call):
        no_sums = defaultdict(lambda: lambda *arguments, **options: call.sums.zero_())
        versions = {"prefill_sum_keys_kernel": no_sums, "prefill_quantise_kernel": kernels.prefill_quantise_kernel}
        quantise(SimpleNamespace(**versions), props, call)

    monkeypatch.setattr(_prefill_launch, "_quantise_keys", without_mean)
    assert errors_of(call, run(call)[0])[0] > 0.1


@pytest.mark.skipif(DEVICE == "cuda", reason="these tiles are for the interpreter; a GPU has its own")
@pytest.mark.parametrize("tiles", [(16, 32, 5, 3), (32, 64, 3, 7), (64, 16, 64, 1)], ids=str)
def test_other_tiles_and_shares(tiles, monkeypatch):
    """Rows of a token in two tiles, several tiles a page, several shares of the mean: what the interpreter's one tile hides."""
    block_m, tile, shares, programs = tiles
    # A sum over lanes needs a power of two of them.
    shares = 1 << (shares - 1).bit_length()
    monkeypatch.setattr(_prefill_launch, "pick_prefill_config", lambda *a, **k: PrefillConfig(block_m, tile, 1, 1))
    monkeypatch.setattr(_prefill_launch, "pick_key_passes", lambda *a: KeyPasses(tile, shares, programs, 1))
    for qk in MODES:
        check(make([150, 40], [20, 9], heads=(6, 2), page_size=48, head_dim=32, qk=qk))
        check(make([150, 40], [20, 9], heads=(6, 2), page_size=40, head_dim=32, qk=qk, window_size=50))


@pytest.mark.skipif(DEVICE == "cuda", reason="these tiles are for the interpreter; a GPU has its own")
@pytest.mark.parametrize("window_size", [None, 18])
def test_every_place_of_a_chunk_in_a_tile(window_size, monkeypatch):
    """Where tiles that every row sees whole begin and end, to the key."""
    monkeypatch.setattr(_prefill_launch, "pick_prefill_config", lambda *a, **k: PrefillConfig(16, 16, 1, 1))
    lengths = list(range(33, 50))
    check(make(lengths, [20] * len(lengths), heads=(1, 1), head_dim=16, window_size=window_size))


@pytest.mark.parametrize("qk", MODES)
def test_what_is_not_seen_is_not_read(qk):
    """NaN in the key or the value of a later token, and in all rows of the pages behind the last token."""
    call = make([100], [20], heads=(4, 2), device=DEVICE, qk=qk)
    clean, _ = run(call)
    page, slot = int(call["block_table"][0, 95 // 16]), 95 % 16
    for name in ("k_cache", "v_cache"):
        spoiled = {**call, name: call[name].clone()}
        spoiled[name][page, slot] = float("nan")
        out, _ = run(spoiled)
        assert torch.isfinite(out[:15]).all(), name
        assert out[15:].isnan().all(), name
        assert (out[:15] - clean[:15]).abs().max() < 0.02, name


@pytest.mark.parametrize("qk", MODES)
def test_a_page_outside_the_pool_spoils_the_rows_that_see_it_and_is_not_read(qk):
    """The pages before and behind the pool hold numbers, which a read of them would show."""
    call = make([100], [20], heads=(4, 2), device=DEVICE, qk=qk)
    for name in ("k_cache", "v_cache"):
        around = torch.ones(len(call[name]) + 2, *call[name].shape[1:], dtype=torch.float16, device=DEVICE)
        around[1:-1] = call[name]
        call[name] = around[1:-1]
    table = call["block_table"].clone()
    table[0, 5] = len(call["k_cache"])
    out, lse = run({**call, "block_table": table})
    assert out.isnan().all()
    assert lse.isnan().all()
    table[0, 5], table[0, 6] = call["block_table"][0, 5], -1
    out, _ = run({**call, "block_table": table})
    assert torch.isfinite(out[:16]).all(), "page 6 begins at position 96, which is token 16"
    assert out[16:].isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_query_spoils_its_own_row(value):
    for qk in MODES:
        call = make([50], [9], device=DEVICE, qk=qk)
        call["q"][4, 1, 7] = value
        out, _ = run(call)
        bad = out.isnan().any(-1)
        assert bad[4, 1]
        assert int(bad.sum()) == 1


def test_a_longer_length_than_the_table_holds_counts_as_what_it_holds():
    for qk in MODES:
        call = make([80], [9], device=DEVICE, qk=qk)
        longer = {**call, "seq_lens": call["seq_lens"] + 1_000}
        assert same_bits(run(call)[0], run(longer)[0])


def test_a_workspace_gives_the_same_bits_and_states_its_bytes():
    call = make([300, 45, 20], [80, 0, 9], device=DEVICE, qk="int8")
    sizes = {"max_num_reqs": 5, "max_num_keys": 320, "num_kv_heads": 2, "head_dim": 64, "device": DEVICE}
    scratch = PrefillWorkspace.empty(**sizes)
    for tensor in (scratch.scales, scratch.sums, scratch.means):
        tensor.fill_(float("nan"))
    for ours, theirs in zip(run(call, workspace=scratch), run(call), strict=True):
        assert same_bits(ours, theirs)
    tight = PrefillWorkspace.empty(**sizes | {"max_num_keys": 319})
    tight.codes.fill_(77)
    out, lse = run(call, workspace=tight)
    assert same_bits(out[:80], run(call)[0][:80])
    assert out[80:].isnan().all(), "the second request with query tokens does not fit"
    assert lse[80:].isnan().all()
    assert (tight.codes[300:] == 77).all(), "what does not fit is not written"


def test_the_twin_runs_cpu_tensors_and_changes_no_input():
    call = {name: value.cpu() if torch.is_tensor(value) else value for name, value in make([70, 9], [20, 9], qk="int8").items()}
    before = {name: value.clone() for name, value in call.items() if torch.is_tensor(value)}
    out, lse = prefill_attention(**call, return_lse=True)
    for name, value in before.items():
        assert same_bits(value, call[name]), name
    again, _ = prefill_attention(**call, return_lse=True, backend="torch")
    assert same_bits(out, again)
    assert torch.isfinite(lse).all()
