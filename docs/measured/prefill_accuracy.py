"""How far each mode of prefill attention is from float64: `python docs/measured/prefill_accuracy.py [--json FILE]`, minutes.

No kernel runs: outputs are those of the plain-torch reference with a kernel's roundings (the baseline of the error rule), on a
CPU, row by row the farther of its orders of summing. `--from-json FILE` prints the table of a record again.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

from bigpool import reference_prefill
from bigpool.reference_prefill_keys import keep_keys

SEED, PAGE_SIZE, DTYPE = 0, 16, torch.bfloat16
DATA = {
    "normal": "q, K and V standard normal",
    "offset": "the same, and an offset of 16 sigma in each channel of K",
    "channels": "the same, every 47th channel of K 5 times larger",
    "real-shaped": "K with an offset of 2 sigma in each channel and 4 channels 5 to 15 times larger, q with offsets of half a "
    "sigma, both then turned by rotary embeddings of base 1e6; 30 added to every 16th channel of the first key; V of Student's t "
    "with 4 degrees of freedom, channels of sizes exp(n / 2), n normal",
}
# Query tokens, query heads, kv heads.
SMALL, SERVING = (32, 4, 2), (64, 24, 4)
# data, head_dim, context, sizes
CASES = [("normal", head_dim, context, SMALL) for head_dim in (64, 128, 256) for context in (512, 4_096, 20_000)]
CASES += [("offset", head_dim, 20_000, SMALL) for head_dim in (64, 128, 256)]
CASES += [("channels", head_dim, 20_000, SMALL) for head_dim in (64, 128, 256)]
CASES += [("real-shaped", head_dim, context, SMALL) for head_dim in (64, 128, 256) for context in (4_096, 20_000)]
CASES += [("normal", 256, 20_000, SERVING)]
# name -> (qk, pv, are codes kept)
MODES = {
    "exact": ("exact", "exact", False),
    "int8": ("int8", "exact", False),
    "int8 kept": ("int8", "exact", True),
    "exact, fp8": ("exact", "fp8", False),
    "int8, fp8": ("int8", "fp8", False),
    "int8 kept, fp8": ("int8", "fp8", True),
}


def turned(rows, first):
    """Rows [tokens, heads, head_dim] at positions from `first` on, by rotary embeddings."""
    half = rows.shape[-1] // 2
    angles = torch.arange(first, first + len(rows)).double()[:, None] * 1e6 ** (-torch.arange(half).double() / half)
    pairs = torch.complex(rows[..., :half].double(), rows[..., half:].double())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1).float()


def make_data(kind, head_dim, context, sizes):
    """(q [tokens, heads, head_dim], k, v [context, kv_heads, head_dim]) float32."""
    tokens, heads, kv_heads = sizes
    rng = torch.Generator().manual_seed(SEED)
    shapes = (tokens, heads), (context, kv_heads), (context, kv_heads)
    q, k, v = (torch.randn(*shape, head_dim, generator=rng) for shape in shapes)
    if kind == "offset":
        k += 16 * torch.randn(kv_heads, head_dim, generator=rng)
    elif kind == "channels":
        k[..., 3::47] *= 5
    elif kind == "real-shaped":
        k += 2 * torch.randn(kv_heads, head_dim, generator=rng)
        for head in range(kv_heads):
            k[:, head, torch.randperm(head_dim, generator=rng)[:4]] *= 5 + 10 * torch.rand(4, generator=rng)
        q += 0.5 * torch.randn(heads, head_dim, generator=rng)
        k, q = turned(k, 0), turned(q, context - tokens)
        k[0, :, ::16] += 30
        squares = sum(torch.randn(v.shape, generator=rng) ** 2 for _ in range(4))
        v = v / (squares / 4).sqrt() * torch.exp(torch.randn(kv_heads, head_dim, generator=rng) / 2)
    return q, k, v


def measure(kind, head_dim, context, sizes):
    """{mode: {"relative", "cosine" (1 - it), "max"}}, and the largest output."""
    q, k, v = make_data(kind, head_dim, context, sizes)
    caches = (rows.to(DTYPE).view(-1, PAGE_SIZE, *rows.shape[1:]) for rows in (k, v))
    lengths = torch.arange(context // PAGE_SIZE, dtype=torch.int32)[None], *(torch.tensor([context]), torch.tensor([0, len(q)]))
    call = (q.to(DTYPE), *caches, *lengths)
    want = reference_prefill.prefill_attention(*call, compute_dtype=torch.float64)[0].flatten()
    found = {}
    for mode, (qk, pv, is_kept) in MODES.items():
        kept = None
        if is_kept:
            kept = torch.zeros(call[1].shape, dtype=torch.int8), torch.zeros(call[1].shape[:3])
            keep_keys(call[1], *kept, lengths[0][0], context, context)
        got = reference_prefill.prefill_attention_baseline(*call, qk=qk, pv=pv, kept=kept)[0].double().flatten()
        error = got - want
        cosine = 1 - float(got @ want / (got.norm() * want.norm()))
        found[mode] = {"relative": float(error.norm() / want.norm()), "cosine": cosine, "max": float(error.abs().max())}
    return found, float(want.abs().max())


def table(rows):
    """Relative error, 1 - cosine and largest error of each mode, as Markdown."""
    lines = ["| data | D | context | largest output | " + " | ".join(MODES) + " |", "|---" * (4 + len(MODES)) + "|"]
    for row in rows:
        name = "" if row["sizes"] == list(SMALL) else ", {} tokens, {} / {} heads".format(*row["sizes"])
        cells = [row["data"] + name]
        cells += [str(row["head_dim"]), f"{row['context']:,}", f"{row['largest']:.2g}"]
        for mode in MODES:
            errors = row["errors"][mode]
            cells.append(f"{errors['relative']:.2%}, {errors['cosine']:.0e}, {errors['max']:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).replace("e-0", "e-")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers and the versions here")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="print the table of this record; measure nothing")
    options = parser.parse_args()
    if options.from_json is not None:
        print(table(json.loads(options.from_json.read_text("utf-8"))["rows"]))
        return
    rows = []
    for kind, head_dim, context, sizes in CASES:
        errors, largest = measure(kind, head_dim, context, sizes)
        row = {"data": kind, "head_dim": head_dim, "context": context, "sizes": list(sizes), "largest": largest, "errors": errors}
        rows.append(row)
        print(table([row]).splitlines()[-1], flush=True)
    if options.json is not None:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        fixed = {"schema": "bigpool-prefill-accuracy/1", "versions": versions, "seed": SEED, "dtype": "bf16", "data": DATA}
        record = fixed | {"rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
