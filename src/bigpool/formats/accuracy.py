"""How far attention over a quantised cache is from attention over the rows themselves: `python -m bigpool.formats.accuracy`.

Everything is computed in float64 but the quantisation, so that what is seen is the format's error and no kernel's.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from . import KVFormat, named, rotate

HEADS, HEAD_DIM, KEYS, QUERIES, SEEDS = 4, 128, 8_192, 16, 5
DATA = {
    "random": "K, V and queries standard normal",
    "outliers": "4 of 128 channels of K 10 to 30 times larger, with a mean of their own, as keys of language models have",
}
Row = tuple[str, KVFormat, bool, bool]


def formats_in_table() -> list[Row]:
    """(label, format, rotate K, scale from the data). fp8 scales per tensor or head are 1 unless they come from the data."""
    return [
        ("bf16", named("bf16"), False, False),
        ("fp16", named("fp16"), False, False),
        ("fp8 e4m3, one scale of 1", named("fp8_e4m3"), False, False),
        ("fp8 e4m3, scale per head", named("fp8_e4m3", "head"), False, True),
        ("fp8 e4m3, scale per token and head", named("fp8_e4m3", "token_head"), False, False),
        ("fp8 e5m2, one scale of 1", named("fp8_e5m2"), False, False),
        ("fp8 e5m2, scale per token and head", named("fp8_e5m2", "token_head"), False, False),
        ("int8", named("int8"), False, False),
        ("int4", named("int4"), True, False),
        ("int4, were K not rotated", named("int4"), False, False),
    ]


def make_data(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [QUERIES, HEADS, HEAD_DIM], k, v [KEYS, HEADS, HEAD_DIM]), float32."""
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, HEADS, HEAD_DIM, generator=rng) for rows in (QUERIES, KEYS, KEYS))
    if name == "outliers":
        for head in range(HEADS):
            channels = torch.randperm(HEAD_DIM, generator=rng)[:4]
            factors = 10 + 20 * torch.rand(4, generator=rng)
            k[:, head, channels] = (k[:, head, channels] * 0.3 + 1.0) * factors
    return q, k, v


def stored(rows: torch.Tensor, kv_format: KVFormat, rotated: bool, from_data: bool) -> torch.Tensor:
    """`rows` as a reader of the cache sees them, float64."""
    scale = rows.abs().amax((0, 2)) / torch.finfo(kv_format.dtype).max if from_data else None
    given = rotate(rows) if rotated else rows
    if scale is None and kv_format.scales == "head":
        scale = torch.ones(HEADS)
    values = kv_format.dequantize(*kv_format.quantize(given, scale), torch.float64)
    return rotate(values) if rotated else values


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,nhd->hqn", q.double(), k) * HEAD_DIM**-0.5
    return torch.einsum("hqn,nhd->hqd", scores.softmax(-1), v)


def relative(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference over that of the exact values."""
    return float((values - exact).norm() / exact.norm())


def measure(name: str) -> Iterator[dict[str, float | str]]:
    """For each format the mean over the seeds of the relative errors of K, V and the output of attention."""
    for label, kv_format, rotated, from_data in formats_in_table():
        sums = torch.zeros(3, dtype=torch.float64)
        for seed in range(SEEDS):
            q, k, v = make_data(name, seed)
            new_k, new_v = stored(k, kv_format, rotated, from_data), stored(v, kv_format, False, from_data)
            out, exact = attention(q, new_k, new_v), attention(q, k.double(), v.double())
            sums += torch.tensor([relative(new_k, k.double()), relative(new_v, v.double()), relative(out, exact)])
        k_error, v_error, out_error = (sums / SEEDS).tolist()
        bits = 8 * kv_format.row_bytes(HEAD_DIM) / HEAD_DIM
        yield {"format": label, "bits": bits, "k": k_error, "v": v_error, "attention": out_error}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bigpool.formats.accuracy", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers and the versions here")
    options = parser.parse_args()
    results: dict[str, list[dict[str, float | str]]] = {}
    for name, describe in DATA.items():
        print(f"\n{name}: {describe}; {KEYS:,} keys, {HEADS} heads of {HEAD_DIM}, mean of {SEEDS} seeds\n")
        print("| format | bits a value | K | V | attention |\n|---|---|---|---|---|")
        results[name] = []
        for row in measure(name):
            results[name].append(row)
            errors = " | ".join(f"{float(row[key]):.2%}" for key in ("k", "v", "attention"))
            print(f"| {row['format']} | {row['bits']:.2f} | {errors} |", flush=True)
    if options.json is not None:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        sizes = {"heads": HEADS, "head_dim": HEAD_DIM, "keys": KEYS, "queries": QUERIES, "seeds": SEEDS}
        record = {"schema": "bigpool-accuracy/1", "versions": versions, "sizes": sizes, "data": DATA, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
