"""fp8 weights and values in prefill attention: Triton's interpreter computes the same numbers as fp32; a GPU has its own test."""

import pytest
import torch

from bigpool.errors import BackendError
from bigpool.ops import _prefill_check, _prefill_launch
from bigpool.ops._prefill_plan import VALUE_TILE, KeyPasses, PrefillConfig
from bigpool.ops.prefill import PrefillWorkspace, prefill_attention
from bigpool.tuning import DeviceProps
from prefill_inputs import check, errors_of, judge, make, outlier_call, run, same_bits
from test_prefill_kept import codes_for, twin_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
MODES = ("exact", "int8")


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 16, 48, 880])
def test_page_sizes(page_size, dtype, qk):
    check(make([331, 70], [45, 33], page_size=page_size, dtype=dtype, device=DEVICE, qk=qk, pv="fp8"))


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("head_dim", [16, 40, 128, 256, 512])
def test_head_dims(head_dim, qk):
    check(make([70, 33], [23, 33], head_dim=head_dim, device=DEVICE, qk=qk, pv="fp8"))


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_ragged_batch_with_empty_rows(kv_layout, qk):
    call = make([300, 0, 45, 5, 16, 0, 7], [80, 0, 0, 5, 1, 3, 9], kv_layout=kv_layout, device=DEVICE, qk=qk, pv="fp8")
    out, lse = check(call)
    assert (out[86:91] == 0).all(), "no key is seen"
    assert (lse[86:91] == float("-inf")).all()
    assert (out[91:] != 0).any(-1).all()


SINKS = torch.tensor([0.5, 2.0, -1.0, 3.0], device=DEVICE)
RULES = [
    {"causal": False}, {"window_size": 37}, {"window_size": 37, "num_sink_tokens": 9}, {"softcap": 2.0}, {"sinks": SINKS},
    {"sinks": SINKS, "softcap": 2.0},
]  # fmt: skip


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(rules))
def test_rules(rules, qk):
    check(make([300, 45, 7], [100, 45, 9], page_size=48, device=DEVICE, qk=qk, pv="fp8", **rules))


def test_with_codes_that_are_kept():
    call = make([300, 150], [100, 20], device=DEVICE, qk="int8", pv="fp8")
    head = {**call, "q": call["q"].repeat(4, 1, 1)[:330], "seq_lens": torch.tensor([200, 130], dtype=torch.int32, device=DEVICE)}
    head |= {"cu_seqlens_q": torch.tensor([0, 200, 330], dtype=torch.int32, device=DEVICE), "max_seqlen_q": 200}
    ours, theirs = codes_for(call), codes_for(call)
    for part in (head, call):
        judge(twin_of(part, theirs), *run(part, key_codes=ours))


@pytest.mark.skipif(DEVICE == "cuda", reason="these tiles are for the interpreter; a GPU has its own")
def test_other_tiles_and_shares(monkeypatch):
    monkeypatch.setattr(_prefill_launch, "pick_prefill_config", lambda *a, **k: PrefillConfig(16, VALUE_TILE, 1, 1))
    monkeypatch.setattr(_prefill_launch, "pick_key_passes", lambda *a: KeyPasses(VALUE_TILE, 4, 3, 1))
    for page_size in (40, 120):
        check(make([450, 40], [20, 9], heads=(6, 2), page_size=page_size, head_dim=32, qk="int8", pv="fp8"))


def test_what_is_not_seen_is_not_read():
    call = make([100], [20], heads=(4, 2), device=DEVICE, pv="fp8")
    clean, _ = run(call)
    page, slot = int(call["block_table"][0, 95 // 16]), 95 % 16
    for value in (float("nan"), float("inf")):
        spoiled = {**call, "v_cache": call["v_cache"].clone()}
        spoiled["v_cache"][page, slot] = value
        out, lse = run(spoiled)
        assert (out[:15] - clean[:15]).abs().max() < 0.05
        assert out[15:].isnan().all()
        assert torch.isfinite(lse).all()
    table = call["block_table"].clone()
    table[0, 6] = -1
    out, _ = run({**call, "block_table": table})
    assert torch.isfinite(out[:16]).all(), "page 6 begins at position 96, which is token 16"
    assert out[16:].isnan().all()


@pytest.mark.parametrize("qk", MODES)
def test_a_workspace_gives_the_same_bits_and_what_does_not_fit_is_nan(qk):
    call = make([300, 45, 20], [80, 0, 9], page_size=48, device=DEVICE, qk=qk, pv="fp8")
    sizes = {"max_num_reqs": 3, "max_num_keys": 320, "num_kv_heads": 2, "head_dim": 64, "qk": qk, "pv": "fp8", "device": DEVICE}
    for page_size in (None, 48):
        scratch = PrefillWorkspace.empty(**sizes, page_size=page_size)
        for tensor in scratch.tensors:
            if tensor is not None:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        for ours, theirs in zip(run(call, workspace=scratch), run(call), strict=True):
            assert same_bits(ours, theirs)
    tight = PrefillWorkspace.empty(**sizes | {"max_num_keys": 319})
    out, _ = run(call, workspace=tight)
    assert same_bits(out[:80], run(call)[0][:80])
    assert out[80:].isnan().all(), "the second request with query tokens does not fit"


# (relative error, 1 - cosine) at most; an output of zeros has (1, nan).
BOUNDS = {"normal": (0.042, 9e-4), "offset": (0.042, 9e-4), "channels": (0.046, 1.1e-3), "turning": (0.042, 9e-4)}


@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("kind", BOUNDS)
def test_against_the_unrounded_truth(kind, qk):
    call = {**outlier_call(kind, qk, DEVICE), "pv": "fp8"}
    out, _ = run(call)
    relative, angle = errors_of(call, out)
    most_relative, most_angle = BOUNDS[kind]
    assert relative <= most_relative, relative
    assert angle <= most_angle, angle
    for wrong in (torch.zeros_like(out), out.roll(1, 0), out * 1.1):
        relative, angle = errors_of(call, wrong)
        assert not (relative <= most_relative and angle <= most_angle)


def test_one_scale_a_channel():
    """A channel that is 10,000 times larger does not take the others' digits."""
    call = make([300], [40], device=DEVICE, pv="fp8")
    call["v_cache"][..., 5] *= 1e4
    out, _ = check(call)
    call["v_cache"], out = call["v_cache"][..., :5], out[..., :5]
    assert out.abs().min() > 0
    small = {**call, "v_cache": torch.nn.functional.pad(call["v_cache"], (0, 59))}
    assert same_bits(run(small)[0][..., :5], out)


@pytest.mark.parametrize("qk", MODES)
def test_planted_keys(qk):
    call = make([300], [8], heads=(4, 2), device=DEVICE, qk=qk, pv="fp8")
    wanted = []
    for token in range(8):
        position = (token * 40_503 + 77) % 292
        page, slot = int(call["block_table"][0, position // 16]), position % 16
        call["k_cache"][page, slot, 0] = 4 * call["q"][token, 0]
        wanted.append((token, call["v_cache"][page, slot, 0]))
    out, _ = check(call)
    for token, value in wanted:
        assert ((out[token, 0] - value).abs() <= 0.07 * value.abs() + 0.02).all(), token


def test_cards_without_products_of_fp8_are_told(monkeypatch):
    monkeypatch.setattr(_prefill_check, "device_props", lambda device: DeviceProps("RTX 3090", 86, 82, 101_376))
    with pytest.raises(BackendError) as caught:
        prefill_attention(**make([40], [4], pv="fp8"))
    assert str(caught.value) == (
        "pv: expected a card of compute capability 8.9 or later for 'fp8', got 8.6 (RTX 3090); pass pv='exact'"
    )
    prefill_attention(**make([40], [4], pv="exact"))


@pytest.mark.parametrize("modes", [{"qk": "int8"}, {"pv": "fp8"}, {"qk": "int8", "pv": "fp8"}], ids=str)
def test_a_workspace_of_both_modes_serves_each(modes):
    call = make([300, 45], [40, 9], device=DEVICE, **modes)
    scratch = PrefillWorkspace.empty(max_num_reqs=2, max_num_keys=345, num_kv_heads=2, head_dim=64, pv="fp8", device=DEVICE)
    for ours, theirs in zip(run(call, workspace=scratch), run(call), strict=True):
        assert same_bits(ours, theirs)
