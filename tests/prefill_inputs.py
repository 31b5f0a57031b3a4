"""Calls of prefill attention for its tests, and their judgement: by the project's error rule, and against the unrounded truth."""

import torch

from bigpool import reference_prefill
from bigpool.ops.prefill import prefill_attention
from bigpool.proof.judge import judge_errors
from verify_inputs import make as make_call
from verify_inputs import same_bits

__all__ = ["check", "errors_of", "judge", "make", "outlier_call", "run", "same_bits"]
# What the kernel takes and the twin does not.
OF_THE_KERNEL = ("max_seqlen_q", "workspace", "key_codes", "check", "backend", "return_lse")


def make(seq_lens, q_lens, **options):
    """Keyword arguments of one call, with the traps of verify_inputs.make. `qk` and the like go into the call."""
    return make_call(seq_lens, q_lens, **options)


def run(call, **options):
    """(out, lse) of the Triton kernel."""
    return prefill_attention(**call, return_lse=True, backend="triton", **options)


def judge(call, out, lse):
    """Holds out and lse to the error rule; with int8 that is about everything after the rounding to codes."""
    inputs = {name: value for name, value in call.items() if name not in OF_THE_KERNEL}
    exact = reference_prefill.prefill_attention(**inputs, compute_dtype=torch.float64)
    baseline = reference_prefill.prefill_attention_baseline(**inputs)
    results = ((out, lse), exact, baseline)
    for entry in judge_errors(*(dict(zip(("out", "lse"), (t.cpu() for t in pair), strict=True)) for pair in results)):
        assert entry["ok"], entry["text"]


def check(call, **options):
    """Runs the kernel and holds out and lse to the error rule; returns both."""
    out, lse = run(call, **options)
    judge(call, out, lse)
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
