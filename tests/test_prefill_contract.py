"""The contract of prefill attention: every message in full, scratch, torch.compile, and that lengths compile nothing anew."""

import dataclasses

import pytest
import torch

import bigpool
from bigpool import KeyCodes, PrefillWorkspace
from bigpool.errors import ArgumentError, WorkspaceError
from bigpool.kernels import prefill as kernels_of_prefill
from bigpool.ops import _prefill_launch
from bigpool.ops._prefill_launch import Call
from bigpool.ops.prefill import _launch, key_codes_bytes, prefill_attention, prefill_scratch_bytes
from bigpool.tuning import DeviceProps
from prefill_inputs import make, same_bits

H200 = DeviceProps("H200", 90, 132, 232_448)
SIZES = {"max_num_reqs": 2, "max_num_keys": 115, "num_kv_heads": 2, "head_dim": 64}


def fault(call, **options):
    with pytest.raises(ArgumentError) as caught:
        prefill_attention(**call, **options)
    return str(caught.value)


def good(**options):
    return make([75, 40], [6, 1], **options)


def scratch(**changes):
    return PrefillWorkspace.empty(**SIZES | changes, device="cpu")


def key_codes(**changes):
    sizes = {"num_pages": 11, "page_size": 16, "num_kv_heads": 2, "head_dim": 64, "max_num_reqs": 2}
    return KeyCodes.empty(**sizes | changes, device="cpu")


def int8_cache(**scales):
    caches = {name: lambda c: c["k_cache"].to(torch.int8) for name in ("k_cache", "v_cache")}
    return caches | {name: lambda c: torch.ones(c["k_cache"].shape[:3]) for name in ("k_scale", "v_scale")} | scales


CASES = {
    "q dtype": ({"q": lambda c: c["q"].double()}, "q: expected bfloat16|float16|float32 [num_tokens, num_q_heads, head_dim], got float64 [7, 4, 64]; flatten the tokens of all requests"),
    "k dtype": ({"k_cache": lambda c: c["k_cache"].float()}, "k_cache: expected float16 [num_pages, page_size, num_kv_heads, head_dim=64], got float32 [11, 16, 2, 64]; caches share q's dtype, head_dim and shape"),
    "a quantised cache": (int8_cache(), "k_cache: expected q's dtype for qk='int8', pv='exact', got int8; a quantised cache is for qk='exact', pv='exact'"),
    "a quantised cache and fp8": (int8_cache(qk=lambda c: "exact", pv=lambda c: "fp8"), "k_cache: expected q's dtype for qk='exact', pv='fp8', got int8; a quantised cache is for qk='exact', pv='exact'"),
    "no scales": (int8_cache(qk=lambda c: "exact", k_scale=lambda c: None), "k_scale: expected a scale per token and head, of the cache's axes without the last for a cache of int8, got None; see docs/formats.md"),
    "pv": ({"pv": lambda c: "int8"}, "pv: expected 'exact' or 'fp8', got 'int8'; see docs/prefill.md for when to choose which"),
    "sinks": ({"sinks": lambda c: torch.zeros(3)}, "sinks: expected float32 [num_q_heads=4], got float32 [3]; pass one fp32 logit per query head"),
    "num_sink_tokens": ({"num_sink_tokens": lambda c: -1}, "num_sink_tokens: expected an int 0..2147418112, got -1; it counts the first keys of a request"),
    "key_codes type": ({"key_codes": lambda c: c["q"]}, "key_codes: expected a bigpool.KeyCodes, got Tensor; make one with KeyCodes.empty"),
    "key_codes of exact": ({"key_codes": lambda c: key_codes(), "qk": lambda c: "exact"}, "key_codes: expected None for qk='exact', got a KeyCodes; exact scores need no codes"),
    "key_codes rules": ({"key_codes": lambda c: key_codes(), "causal": lambda c: False, "window_size": lambda c: 9}, "2 faults\n  key_codes: expected causal=True, got causal=False; what a token sees besides the keys before it depends on the chunk; leave key_codes out\n  key_codes: expected window_size=None, got window_size=9; a window has few keys, and its pages may lack the head of the request; leave key_codes out"),
    "key_codes pages": ({"key_codes": lambda c: key_codes(num_pages=9, head_dim=32, max_num_reqs=1)}, "4 faults\n  key_codes.codes: expected int8 [num_pages=11, page_size=16, num_kv_heads=2, head_dim=64], got int8 [9, 16, 2, 32]; make one with KeyCodes.empty\n  key_codes.scales: expected float32 [num_pages=11, page_size=16, num_kv_heads=2], got float32 [9, 16, 2]; make one with KeyCodes.empty\n  key_codes.means: expected float32 [max_reqs=1, num_kv_heads=2, head_dim=64], got float32 [1, 2, 32]; make one with KeyCodes.empty\n  key_codes.means: expected room for 2 requests, got 1; state a larger max_num_reqs"),
    "table dtype": ({"block_table": lambda c: c["block_table"].long()}, "block_table: expected int32 [num_reqs, max_pages_per_req], got int64 [2, 5]; call block_table.int()"),
    "kv_layout": ({"kv_layout": lambda c: "DNH"}, "kv_layout: expected 'NHD' or 'HND', got 'DNH'; name the order of the axes of a page"),
    "max_seqlen_q": ({"max_seqlen_q": lambda c: -1}, "max_seqlen_q: expected an int 0..2147418112, got -1; pass the largest q_len"),
    "rows": ({"max_seqlen_q": lambda c: 2**30}, "max_seqlen_q: expected at most 1073709056, got 1073741824; split chunks"),
    "softmax_scale": ({"softmax_scale": lambda c: "x"}, "softmax_scale: expected None or a number, got 'x'; None is head_dim ** -0.5"),
    "qk": ({"qk": lambda c: "int4"}, "qk: expected 'exact' or 'int8', got 'int4'; see docs/prefill.md for when to choose which"),
    "backend": ({"backend": lambda c: "cuda"}, "backend: expected 'auto' or 'triton' or 'torch', got 'cuda'; 'auto' chooses"),
    "causal": ({"causal": lambda c: 1}, "causal: expected a bool, got 1; False lets every token see every key"),
    "window_size": ({"window_size": lambda c: 0}, "window_size: expected None or an int 1..2147418112, got 0; None is unbounded"),
    "softcap": ({"softcap": lambda c: 0.0}, "softcap: expected None or a number above 0, got 0.0; None is off"),
    "out": ({"out": lambda c: c["q"].float()}, "out: expected float16 [num_tokens=7, num_q_heads=4, head_dim=64], got float32 [7, 4, 64]; pass torch.empty_like(q)"),
    "out overlaps": ({"out": lambda c: c["q"][:1].expand(7, 4, 64)}, "out: expected strides that hold no element twice, got [0, 64, 1]; call out.contiguous()"),
    "workspace type": ({"workspace": lambda c: c["q"]}, "workspace: expected a bigpool.PrefillWorkspace, got Tensor; make one with PrefillWorkspace.empty"),
    "workspace of exact": ({"workspace": lambda c: scratch(), "qk": lambda c: "exact"}, "workspace: expected None for qk='exact', pv='exact', got a PrefillWorkspace; these modes need no scratch"),
    "workspace of codes": ({"workspace": lambda c: scratch(), "key_codes": lambda c: key_codes()}, "workspace: expected None for qk='int8', pv='exact' with key_codes, got a PrefillWorkspace; these modes need no scratch"),
    "workspace without values": ({"workspace": lambda c: scratch(), "pv": lambda c: "fp8"}, "2 faults\n  workspace.value_codes: expected a tensor for pv='fp8', got None; pass pv='fp8' to PrefillWorkspace.empty\n  workspace.value_scales: expected a tensor for pv='fp8', got None; pass pv='fp8' to PrefillWorkspace.empty"),
    "workspace of larger pages": ({"workspace": lambda c: scratch(pv="fp8", max_num_keys=1_200, page_size=64), "k_cache": lambda c: torch.zeros(11, 48, 2, 64).half(), "v_cache": lambda c: torch.zeros(11, 48, 2, 64).half(), "pv": lambda c: "fp8"}, "workspace.value_codes: expected 27 tiles, got 20; pass page_size=48 to PrefillWorkspace.empty"),
    "workspace heads": ({"workspace": lambda c: scratch(head_dim=32)}, "3 faults\n  workspace.sums: expected float32 [max_reqs=2, shares=64, num_kv_heads=2, head_dim=64], got float32 [2, 64, 2, 32]; make one with PrefillWorkspace.empty\n  workspace.codes: expected int8 [max_keys=115, num_kv_heads=2, head_dim=64], got int8 [115, 2, 32]; make one with PrefillWorkspace.empty\n  workspace.means: expected float32 [max_reqs=2, num_kv_heads=2, head_dim=64], got float32 [2, 2, 32]; make one with PrefillWorkspace.empty"),
    "workspace requests": ({"workspace": lambda c: scratch(max_num_reqs=1)}, "workspace.sums: expected room for 2 requests, got 1; state a larger max_num_reqs"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_argument_messages(name):
    changes, text = CASES[name]
    call = good(qk="int8")
    found = fault(call | {key: change(call) for key, change in changes.items()}).removeprefix("prefill_attention: ")
    assert found == text


@pytest.mark.parametrize("head_dim", [8, 528])
def test_head_dim_message(head_dim):
    assert fault(good(head_dim=head_dim)) == (
        f"prefill_attention: q: expected head_dim 16..512, got {head_dim}; split or pad the heads"
    )


def test_checked_mode_names_this_function():
    call = good()
    table = call["block_table"].clone()
    table[1, 2] = 11
    assert fault(call | {"block_table": table}, check=True) == (
        "prefill_attention: block_table: expected page ids in [0, num_pages=11), got 11 at [1, 2]; allocate the page or fix the table"
    )
    assert same_bits(prefill_attention(**call, check=True), prefill_attention(**call))


def test_checked_mode_says_by_how_much_the_scratch_is_short():
    call = good(qk="int8")
    prefill_attention(**call, check=True, workspace=scratch())
    with pytest.raises(WorkspaceError) as caught:
        prefill_attention(**call, check=True, workspace=scratch(max_num_keys=100))
    assert str(caught.value) == (
        "workspace: expected room for 115 keys, got 100, 15 too few; state a larger max_num_keys in PrefillWorkspace.empty"
    )


def test_scratch_bytes():
    assert scratch().nbytes == prefill_scratch_bytes(**SIZES)
    # 51,200 keys of 4 heads at D 256: the original's 1 KiB of codes a token, scales, and the sums of one request.
    sizes = {"max_num_reqs": 1, "max_num_keys": 51_200, "num_kv_heads": 4, "head_dim": 256}
    assert prefill_scratch_bytes(**sizes) == 51_200 * (1_024 + 16) + 65 * 4 * 256 * 4
    with pytest.raises(ArgumentError) as caught:
        scratch(max_num_reqs=0, max_num_keys=2**31)
    assert str(caught.value) == (
        "prefill_scratch_bytes: 2 faults\n"
        "  max_num_reqs: expected an int 1..65535, got 0; see help(bigpool.prefill_attention)\n"
        "  max_num_keys: expected an int 1..2147483647, got 2147483648; see help(bigpool.prefill_attention)"
    )


def test_scratch_bytes_of_fp8_and_codes():
    for pv, qk, page_size in (("fp8", "int8", None), ("fp8", "exact", 880), ("fp8", "exact", 48)):
        sizes = {**SIZES, "qk": qk, "pv": pv, "page_size": page_size}
        assert scratch(qk=qk, pv=pv, page_size=page_size).nbytes == prefill_scratch_bytes(**sizes)
    with pytest.raises(ArgumentError) as caught:
        prefill_scratch_bytes(**SIZES, qk="exact")
    assert str(caught.value) == (
        "prefill_scratch_bytes: qk: expected 'int8' or pv='fp8', got 'exact' for both; they need no scratch"
    )
    with pytest.raises(ArgumentError) as caught:
        key_codes_bytes(num_pages=0, page_size=16, num_kv_heads=2, head_dim=64, max_num_reqs=2)
    assert str(caught.value) == (
        "key_codes_bytes: num_pages: expected an int 1..2147483647, got 0; see help(bigpool.prefill_attention)"
    )


class Recorder:
    """Kernels that note what they are launched with."""

    def __init__(self):
        self.launches = []

    def __getattr__(self, name):
        kernel = getattr(kernels_of_prefill, name)

        class Launch:
            def __getitem__(_, grid):
                return lambda *args, **options: self.launches.append((kernel, args, options))

        return Launch()


ATTENTION, SUM_KEYS, QUANTISE, KEEP, MAX_VALUES, QUANTISE_VALUES = (
    f"prefill_{name}_kernel" for name in ("attention", "sum_keys", "quantise", "keep", "max_values", "quantise_values")
)
# (qk, pv, format of the cache) and what is launched for them.
LAUNCHES = [
    ("exact", "exact", None, [ATTENTION]),
    ("exact", "exact", "int8", [ATTENTION]),
    ("exact", "exact", "int4", [ATTENTION]),
    ("exact", "exact", "fp8_e4m3", [ATTENTION]),
    ("int8", "exact", None, [SUM_KEYS, QUANTISE, ATTENTION]),
    ("kept", "exact", None, [KEEP, ATTENTION]),
    ("exact", "fp8", None, [MAX_VALUES, QUANTISE_VALUES, ATTENTION]),
    ("int8", "fp8", None, [SUM_KEYS, QUANTISE, MAX_VALUES, QUANTISE_VALUES, ATTENTION]),
    ("kept", "fp8", None, [KEEP, MAX_VALUES, QUANTISE_VALUES, ATTENTION]),
]


def operator_arguments(call, qk="exact", pv="exact"):
    """A call as the torch operator takes it."""
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    parts = [None] * 6
    if qk == "kept":
        made = key_codes(num_pages=len(call["k_cache"]), max_num_reqs=len(call["seq_lens"]))
        parts[1:4] = made.codes, made.scales, made.means
    out, lse = torch.empty_like(call["q"]), torch.empty(call["q"].shape[:2])
    scales = call.get("k_scale"), call.get("v_scale")
    return (*(call[name] for name in names), out, lse, *parts, 0, call["max_seqlen_q"], 0.125, qk, pv, *scales)


def compiled_for(call, qk, pv):
    """What Triton compiles for: of each launch all but the values that it must not specialise on."""
    recorder = Recorder()
    _launch(*operator_arguments(call, qk, pv), kernels=recorder)
    found = []
    for kernel, args, options in recorder.launches:
        free = getattr(kernel, "do_not_specialize", None) or kernel.kwargs.get("do_not_specialize", [])
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        fixed = {name: value for name, value in named.items() if not torch.is_tensor(value) and name not in free}
        found.append((kernel.__name__, fixed))
    return found


@pytest.mark.parametrize(("qk", "pv", "kv_format", "launches"), LAUNCHES)
def test_lengths_compile_nothing_anew(qk, pv, kv_format, launches, monkeypatch):
    """Lengths of 1, multiples of 16 and others, tables of other widths, pools of other sizes: Triton tells such integers apart."""
    monkeypatch.setattr(_prefill_launch, "device_props", lambda device: H200)
    first = compiled_for(make([75, 40], [6, 1], kv_format=kv_format), qk, pv)
    assert [name for name, _ in first] == launches
    for lengths in (([16], [16]), ([1], [1]), ([700, 64, 33], [300, 64, 17]), ([4_096], [2_048]), ([250], [100])):
        assert compiled_for(make(*lengths, kv_format=kv_format), qk, pv) == first, lengths


@pytest.mark.parametrize("kernel", sorted({name for *_, launches in LAUNCHES for name in launches}))
def test_kernels_have_few_parameters(kernel):
    """The ceiling of the house."""
    assert len(getattr(kernels_of_prefill, kernel).arg_names) <= 32


def test_the_call_has_the_arguments_of_the_operator_in_its_order():
    schema = torch.ops.bigpool.prefill_attention.default._schema
    fields = {field.name: field.default for field in dataclasses.fields(Call)}
    assert [argument.name for argument in schema.arguments] == list(fields)
    for argument in schema.arguments:
        if argument.has_default_value():
            assert argument.default_value == fields[argument.name], argument.name
        else:
            assert fields[argument.name] is dataclasses.MISSING, argument.name


TORCH_MODES = [
    {"qk": "exact"},
    {"qk": "int8"},
    {"qk": "int8", "pv": "fp8"},
    {"qk": "int8", "key_codes": True},
    {"kv_format": "int4"},
]


@pytest.mark.parametrize("modes", TORCH_MODES, ids=str)
def test_torch_compile_fullgraph(modes):
    call = good(**modes)
    if "key_codes" in modes:
        call["key_codes"] = key_codes()
    tensors = {name: value for name, value in call.items() if torch.is_tensor(value)}
    numbers = {name: value for name, value in call.items() if name not in tensors}

    def step(**tensors):
        return prefill_attention(**tensors, **numbers, return_lse=True)

    for ours, theirs in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(**tensors), step(**tensors), strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("kept", [False, True])
def test_operator_passes_opcheck(kept):
    call = good()
    arguments = list(operator_arguments(call, "kept" if kept else "int8", "fp8"))
    parts = scratch(pv="fp8").tensors
    arguments[8:15] = (None, *arguments[9:12], *parts[4:], 115) if kept else (*parts, 115)
    arguments[-2:] = None, None, torch.zeros(4), True, 0 if kept else 40, 3, 3.0
    report = torch.library.opcheck(torch.ops.bigpool.prefill_attention, tuple(arguments))
    assert set(report.values()) == {"SUCCESS"}, report


@pytest.mark.parametrize("op", [prefill_attention, bigpool.attention, bigpool.verify_attention], ids=lambda op: op.__name__)
def test_torch_compile_with_other_lengths(op):
    """max_seqlen_q is an integer of the call: from the second one on a graph takes all."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda call, longest: op(**call | {"max_seqlen_q": longest}), fullgraph=True, backend="aot_eager")
    for length in range(6, 18):
        call = make([60], [length])
        longest = call.pop("max_seqlen_q")
        assert torch.equal(compiled(call, longest), op(**call, max_seqlen_q=longest))


def test_outputs_carry_no_gradient():
    call = good()
    call["q"].requires_grad_()
    for backend in ("auto", "torch"):
        assert not prefill_attention(**call, backend=backend).requires_grad
