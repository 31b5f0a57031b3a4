"""The contract of prefill attention: every message in full, scratch, torch.compile, and that lengths compile nothing anew."""

import pytest
import torch

from bigpool import PrefillWorkspace
from bigpool.errors import ArgumentError, WorkspaceError
from bigpool.kernels import prefill as kernels_of_prefill
from bigpool.ops import _prefill_launch
from bigpool.ops.prefill import _launch, prefill_attention, prefill_scratch_bytes
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


CASES = {
    "q dtype": ({"q": lambda c: c["q"].double()}, "q: expected bfloat16|float16|float32 [num_tokens, num_q_heads, head_dim], got float64 [7, 4, 64]; flatten the tokens of all requests"),
    "k dtype": ({"k_cache": lambda c: c["k_cache"].float()}, "k_cache: expected float16 [num_pages, page_size, num_kv_heads, head_dim=64], got float32 [11, 16, 2, 64]; caches share q's dtype, head_dim and shape"),
    "a quantised cache": ({name: lambda c: c["k_cache"].to(torch.int8) for name in ("k_cache", "v_cache")}, "k_cache: expected q's dtype, got int8; quantised caches are for verify_attention; gather_kv gives their values"),
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
    "workspace of exact": ({"workspace": lambda c: scratch(), "qk": lambda c: "exact"}, "workspace: expected None for qk='exact', got a PrefillWorkspace; exact prefill needs no scratch"),
    "workspace heads": ({"workspace": lambda c: scratch(head_dim=32)}, "3 faults\n  workspace.codes: expected int8 [max_keys=115, num_kv_heads=2, head_dim=64], got int8 [115, 2, 32]; make one with PrefillWorkspace.empty\n  workspace.sums: expected float32 [max_reqs=2, shares=64, num_kv_heads=2, head_dim=64], got float32 [2, 64, 2, 32]; make one with PrefillWorkspace.empty\n  workspace.means: expected float32 [max_reqs=2, num_kv_heads=2, head_dim=64], got float32 [2, 2, 32]; make one with PrefillWorkspace.empty"),
    "workspace requests": ({"workspace": lambda c: scratch(max_num_reqs=1)}, "workspace.sums: expected room for 2 requests, got 1; state a larger max_num_reqs"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_argument_messages(name):
    changes, text = CASES[name]
    call = good(qk="int8")
    found = fault(call | {key: change(call) for key, change in changes.items()}).removeprefix("prefill_attention: ")
    assert found == text


@pytest.mark.parametrize("head_dim", [8, 272])
def test_head_dim_message(head_dim):
    assert fault(good(head_dim=head_dim)) == (
        f"prefill_attention: q: expected head_dim 16..256, got {head_dim}; split or pad the heads"
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


def compiled_for(call):
    """What Triton compiles for: of each launch all but the values that it must not specialise on."""
    recorder = Recorder()
    out, lse = torch.empty_like(call["q"]), torch.empty(call["q"].shape[:2])
    names = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
    _launch(
        *(call[name] for name in names), out, lse, None, None, None, None, call["max_seqlen_q"], 0.125, call["qk"] == "int8",
        kernels=recorder,
    )  # fmt: skip
    found = []
    for kernel, args, options in recorder.launches:
        free = getattr(kernel, "do_not_specialize", None) or kernel.kwargs.get("do_not_specialize", [])
        named = dict(zip(kernel.arg_names, args, strict=False)) | options
        fixed = {name: value for name, value in named.items() if not torch.is_tensor(value) and name not in free}
        found.append((kernel.__name__, fixed))
    return found


@pytest.mark.parametrize("qk", ["exact", "int8"])
def test_lengths_compile_nothing_anew(qk, monkeypatch):
    """Lengths of 1, multiples of 16 and others, tables of other widths, pools of other sizes: Triton tells such integers apart."""
    monkeypatch.setattr(_prefill_launch, "device_props", lambda device: H200)
    first = compiled_for(make([75, 40], [6, 1], qk=qk))
    assert [name for name, _ in first] == (
        ["prefill_attention_kernel"] if qk == "exact" else [
            "prefill_sum_keys_kernel", "prefill_quantise_kernel", "prefill_attention_kernel",
        ]
    )  # fmt: skip
    for lengths in (([16], [16]), ([1], [1]), ([700, 64, 33], [300, 64, 17]), ([4_096], [2_048]), ([250], [100])):
        assert compiled_for(make(*lengths, qk=qk)) == first, lengths


@pytest.mark.parametrize("qk", ["exact", "int8"])
def test_torch_compile_fullgraph(qk):
    call = good(qk=qk)
    tensors = {name: value for name, value in call.items() if torch.is_tensor(value)}
    numbers = {name: value for name, value in call.items() if name not in tensors}

    def step(**tensors):
        return prefill_attention(**tensors, **numbers, return_lse=True)

    for ours, theirs in zip(torch.compile(step, fullgraph=True, backend="aot_eager")(**tensors), step(**tensors), strict=True):
        assert same_bits(ours, theirs)


def test_operator_passes_opcheck():
    call = good()
    out, lse = torch.empty_like(call["q"]), torch.empty(call["q"].shape[:2])
    tensors = [value for value in call.values() if torch.is_tensor(value)]
    parts = scratch()
    arguments = (*tensors, out, lse, parts.codes, parts.scales, parts.sums, parts.means, 6, 0.125, True, True, 40, 3.0)
    report = torch.library.opcheck(torch.ops.bigpool.prefill_attention, arguments)
    assert set(report.values()) == {"SUCCESS"}, report


def test_outputs_carry_no_gradient():
    call = good()
    call["q"].requires_grad_()
    for backend in ("auto", "torch"):
        assert not prefill_attention(**call, backend=backend).requires_grad
