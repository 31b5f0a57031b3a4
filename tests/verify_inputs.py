"""Batches for the tests of verify attention, and the judgement by the project's error rule."""

import torch

from bigpool import formats, reference
from bigpool.ops.verify import verify_attention
from bigpool.proof.judge import judge_errors

# What the kernel takes and the twin does not: how the work is cut up.
OF_THE_KERNEL = ("max_seqlen_q", "deterministic")
# (format, scales) of every quantised cache.
QUANTISED = [
    ("int8", "token_head"),
    ("int4", "token_head"),
    *((name, scales) for name in ("fp8_e4m3", "fp8_e5m2") for scales in ("tensor", "head", "token_head")),
]


def make(
    seq_lens,
    q_lens,
    *,
    page_size=16,
    heads=(4, 2),
    head_dim=64,
    dtype=torch.float16,
    kv_layout="NHD",
    seed=0,
    device="cpu",
    kv_format=None,
    scales=None,
    inline=False,
    outliers=False,
    **options,
):
    """Keyword arguments of one call. Everything that must not be read is NaN, or garbage in the table.

    `kv_format`, `scales`: see bigpool.formats; None is a cache in q's dtype. `inline`: scales lie behind their rows, K and V in
    one tensor. `outliers`: two channels of K are 30 times the others. `options` go into the call.
    """
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(counts) + 3
    shape = (num_pages, page_size, heads[1], head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    order = torch.randperm(num_pages, generator=rng).int()
    table = torch.randint(-(2**31), 2**31, (len(seq_lens), max([*counts, 1])), generator=rng).int()
    taken = 0
    for req, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[req, :count] = order[taken : taken + count]
        for col in range(count):
            rows = min(page_size, length - col * page_size)
            for cache in (k, v):
                cache[order[taken + col], :rows] = torch.randn(rows, heads[1], head_dim, generator=rng).to(dtype)
        taken += count
    if outliers:
        k[..., 3::47] *= 30
    tensors = {
        "q": torch.randn(sum(q_lens), heads[0], head_dim, generator=rng).to(dtype),
        **(_caches(k, v) if kv_format is None else _quantised(k, v, formats.named(kv_format, scales), inline=inline)),
        "block_table": table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32),
    }
    if kv_layout == "HND":
        for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
            if name in tensors and tensors[name].dim() > 2:
                tensors[name] = _as_hnd(tensors[name], contiguous=not inline)
    tensors = _moved(tensors, device) | options
    return tensors | {"max_seqlen_q": max(q_lens), "kv_layout": kv_layout}


def _moved(tensors, device):
    """On `device`, with the same strides, offsets and shared storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    there = {key: torch.empty(0, dtype=torch.uint8).set_(storage).to(device) for key, storage in storages.items()}
    return {
        name: torch.empty(0, dtype=tensor.dtype, device=device).set_(
            there[tensor.untyped_storage().data_ptr()].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        for name, tensor in tensors.items()
    }


def _as_hnd(tensor, contiguous):
    tensor = tensor.transpose(1, 2)
    return tensor.contiguous() if contiguous else tensor


def _caches(k, v):
    return {"k_cache": k, "v_cache": v}


def _quantised(k, v, kv_format, *, inline):
    """Caches in a format; rows of NaN get scale NaN, or the NaN code where a scale stands for more than a row."""
    made = {}
    for name, rows in (("k", k), ("v", v)):
        rows = formats.rotate(rows) if name == "k" and kv_format.rotates_k else rows.float()
        scale = None
        if kv_format.scales == "tensor":
            scale = torch.tensor([0.02 if name == "k" else 0.01])
        elif kv_format.scales == "head":
            scale = torch.linspace(0.01, 0.03, rows.shape[2])
        made[f"{name}_cache"], scale = kv_format.quantize(rows, scale)
        made[f"{name}_scale"] = scale
    return _put_inline(made) if inline else made


def _put_inline(made):
    """Per slot and head: K data, its scale, V data, its scale, as bytes of one tensor."""
    parts = []
    for name in ("k", "v"):
        parts += [made[f"{name}_cache"].view(torch.uint8), made[f"{name}_scale"].unsqueeze(-1).view(torch.uint8)]
    widths = [part.shape[-1] for part in parts]
    whole = torch.cat(parts, -1)
    views = []
    for index, width in enumerate(widths):
        begin = sum(widths[:index])
        views.append(whole[..., begin : begin + width])
    scales = [
        torch.as_strided(
            whole.view(torch.float32),
            whole.shape[:3],
            [stride // 4 for stride in whole.stride()[:3]],
            (sum(widths[:index])) // 4,
        )
        for index in (1, 3)
    ]
    dtype = made["k_cache"].dtype
    return {
        "k_cache": views[0].view(dtype), "v_cache": views[2].view(dtype), "k_scale": scales[0], "v_scale": scales[1],
    }  # fmt: skip


def run(call, **options):
    """(out, lse) of the Triton kernel."""
    return verify_attention(**call, return_lse=True, backend="triton", **options)


def judge(call, out, lse):
    """Holds out and lse of `call` to the error rule."""
    inputs = {name: value for name, value in call.items() if name not in OF_THE_KERNEL}
    expected = dict(zip(("out", "lse"), reference.verify_attention(**inputs, compute_dtype=torch.float64), strict=True))
    if call.get("out_scale") is not None:
        inputs["out_dtype"] = out.dtype
    baseline = dict(zip(("out", "lse"), reference.verify_attention_baseline(**inputs), strict=True))
    for entry in judge_errors(*({k: v.cpu() for k, v in d.items()} for d in ({"out": out, "lse": lse}, expected, baseline))):
        assert entry["ok"], entry["text"]


def check(call, **options):
    """Runs the kernel and holds out and lse to the error rule; returns both."""
    out, lse = run(call, **options)
    judge(call, out, lse)
    return out, lse


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
