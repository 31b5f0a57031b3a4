"""Calls of prefill attention for its tests, and their judgement: by the project's error rule, and against the unrounded truth."""

import torch

from bigpool import reference_prefill
from bigpool.ops.prefill import PrefillWorkspace, prefill_attention
from bigpool.proof.judge import judge_errors
from verify_inputs import make as make_call
from verify_inputs import same_bits

__all__ = ["check", "errors_of", "judge", "make", "outlier_call", "run", "same_bits"]
# What the kernel takes and the twin does not.
OF_THE_KERNEL = ("max_seqlen_q", "workspace", "key_codes", "check", "backend", "return_lse")


def make(seq_lens, q_lens, **options):
    """Keyword arguments of one call, with the traps of verify_inputs.make. `qk` and the like go into the call."""
    return make_call(seq_lens, q_lens, **options)


def run(call, backend="triton", **options):
    """(out, lse) of the kernels in plain Triton, or of another backend."""
    return prefill_attention(**call, return_lse=True, backend=backend, **options)


def judge(call, out, lse, workspace=None):
    """Holds out and lse to the error rule; with int8 that is about everything after the rounding to codes, of keys less the means
    that `workspace` has from the kernel; these are held to the true ones."""
    inputs = {name: value for name, value in call.items() if name not in OF_THE_KERNEL}
    if workspace is not None and workspace.means is not None and call.get("qk") == "int8":
        inputs["means"] = workspace.means
        assert_means(inputs)
    exact = reference_prefill.prefill_attention(**inputs, compute_dtype=torch.float64)
    baseline = reference_prefill.prefill_attention_baseline(**inputs)
    results = ((out, lse), exact, baseline)
    for entry in judge_errors(*(dict(zip(("out", "lse"), (t.cpu() for t in pair), strict=True)) for pair in results)):
        assert entry["ok"], entry["text"]


def assert_means(inputs):
    """Sums in fp32, of at most 100 steps each, over the count, one request after another."""
    names = ("kv_layout", "causal", "window_size", "num_sink_tokens", "k_scale", "v_scale")
    options = {name: inputs[name] for name in names if name in inputs}
    arguments = (inputs[name] for name in ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q"))
    starts, checked = inputs["cu_seqlens_q"].tolist(), set()
    for block in reference_prefill._blocks(*arguments, **options):
        req = max(i for i, start in enumerate(starts[:-1]) if start <= block.rows.start < starts[i + 1])
        if req in checked:
            continue
        checked.add(req)
        keys = block.keys.stored.codes.double()
        keys = keys.masked_fill(~keys.isfinite(), 0.0)
        count = max(len(keys), 1)
        error = (inputs["means"][req].double() - keys.sum(0) / count).abs()
        assert (error <= 100 * 2**-24 * keys.abs().sum(0) / count).all(), (req, float(error.max()))


def workspace_for(call, pv="exact"):
    """Scratch of a call with qk="int8" or pv="fp8" that just fits it."""
    _, page_size, num_kv_heads, head_dim = call["k_cache"].shape
    if call["kv_layout"] == "HND":
        num_kv_heads, page_size = page_size, num_kv_heads
    table = call["block_table"]
    held = call["seq_lens"].clamp(0, table.shape[1] * page_size)[call["cu_seqlens_q"].diff() > 0]
    return PrefillWorkspace.empty(
        max_num_reqs=len(table), max_num_keys=max(int(held.sum()), 1), num_kv_heads=num_kv_heads, head_dim=head_dim,
        qk=call.get("qk", "exact"), pv=pv, page_size=page_size, device=table.device,
    )  # fmt: skip


def check(call, **options):
    """Runs the kernel and holds out and lse to the error rule; returns both."""
    if call.get("qk") == "int8" and options.get("key_codes") is None:
        options = {"workspace": workspace_for(call, call.get("pv", "exact"))} | options
    out, lse = run(call, **options)
    judge(call, out, lse, options.get("workspace"))
    return out, lse


def errors_of(call, out):
    """(relative error, 1 - cosine) against float64 on unrounded q and K, over all elements."""
    inputs = {name: value for name, value in call.items() if name not in OF_THE_KERNEL} | {"qk": "exact", "pv": "exact"}
    want = reference_prefill.prefill_attention(**inputs, compute_dtype=torch.float64)[0].flatten()
    got = out.double().flatten()
    return float((got - want).norm() / want.norm()), 1 - float(got @ want / (got.norm() * want.norm()))


def outlier_call(kind, qk, device, *, seq_len=500, q_len=60, **options):
    """Keys as real models have them: "offset", 16 sigma in every channel; "channels", every 47th is 5 times larger; "turning",
    offsets of 2 sigma that turn with the position, as rotary embeddings do; "first", a first key like no other."""
    call = make([seq_len], [q_len], heads=(4, 2), head_dim=128, device=device, qk=qk, **options)
    k, rng = call["k_cache"], torch.Generator().manual_seed(1)
    pages = call["block_table"][0].long()
    if kind == "offset":
        k[pages] += 16 * torch.randn(2, 128, generator=rng).to(k)
    elif kind == "channels":
        k[..., 3::47] *= 5
    elif kind == "turning":
        offset = 2 * torch.randn(2, 64, dtype=torch.complex128, generator=rng)
        angles = torch.arange(len(pages) * 16).unsqueeze(-1) * 1e6 ** (-torch.arange(64, dtype=torch.float64) / 64)
        turned = offset * torch.polar(torch.ones(angles.shape, dtype=torch.float64), angles).unsqueeze(1)
        k[pages] += torch.cat((turned.real, turned.imag), -1).unflatten(0, (-1, 16)).to(k)
    elif kind == "first":
        k[pages[0], 0, :, ::16] += 30
    return call
