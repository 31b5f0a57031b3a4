"""What the Hopper kernel of verify attention runs, and how: frozen values and pure pickers, as in bigpool.tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .tuning import MAX_GRID_YZ, MAX_NUM_SPLITS, DeviceProps, VerifySpec, cdiv, next_power_of_2, pick_tiles_per_page

# The versions of Triton whose Gluon the kernel was compiled and run with.
TRITON_VERSIONS = ((3, 6),)
# Tiles that a program should have before more programs than one a multiprocessor pay for their part of the merge.
MIN_TILES = 6


@dataclass(frozen=True)
class Sm90Shape:
    """What the kernel is compiled for. `rows` of queries (token x head) a program has, `tile` keys; `k_layout`, `v_layout`: how
    threads hold tiles of a quantised cache."""

    kv_format: str
    scales: str
    head_dim: int
    group: int
    page_size: int
    tiles_per_page: int
    tile: int
    rows: int
    stages: int
    k_layout: Any = None
    v_layout: Any = None


@dataclass(frozen=True)
class Sm90Plan:
    """The shape of a launch: `rows` of queries, `tile` keys, `stages` of tiles on their way, warps, splits."""

    rows: int
    tile: int
    stages: int
    num_warps: int
    num_splits: int


def sm90_supports(props: DeviceProps, spec: VerifySpec, *, itemsize: int, head_dim: int, rows: int, page_size: int) -> bool:
    """Whether the Hopper kernel has this case: causal attention and nothing else, few rows, tiles that end at page ends.

    `itemsize` of q, in bytes; `rows` = max_seqlen_q * group.
    """
    bare = VerifySpec(kv_format=spec.kv_format, scales=spec.scales, convert=spec.convert)
    plain = spec.kv_format == "plain"
    tile = _tile(spec.kv_format, head_dim, rows)
    return (
        props.sm == 90
        and itemsize == 2
        and spec == bare
        and head_dim in ((64, 128, 256) if plain else (128, 256))
        and not (spec.kv_format == "int4" and head_dim == 128)
        and rows <= (32 if plain else 64)
        and pick_tiles_per_page(page_size, tile) > 0
    )


def _tile(kv_format: str, head_dim: int, rows: int) -> int:
    """Keys of a tile: 16 a warp. Accumulators of more than 32 rows and 256 dims take the registers of eight warps."""
    return 128 if kv_format != "plain" and head_dim == 256 and rows > 32 else 64


def plan_sm90(
    props: DeviceProps,
    *,
    kv_format: str,
    head_dim: int,
    rows: int,
    num_reqs: int,
    num_kv_heads: int,
    page_size: int,
    max_seq_len: int,
    num_splits: int | None = None,
) -> Sm90Plan:
    """The launch for a shape that `sm90_supports`. Depends on sizes alone. Chosen by times on an H200."""
    tile = _tile(kv_format, head_dim, rows)
    num_warps = tile // 16
    max_tiles = max(cdiv(max_seq_len, tile), 1)
    if num_splits is None:
        programs = max(num_reqs * num_kv_heads, 1)
        num_splits = max(props.num_sms // programs, 1)
        # Shared memory and registers hold two programs of four warps.
        twice = 2 * props.num_sms // programs
        if kv_format != "plain" and num_warps == 4 and max_tiles >= MIN_TILES * twice:
            num_splits = max(twice, 1)
    num_splits = max(min(num_splits, max_tiles, MAX_NUM_SPLITS, MAX_GRID_YZ), 1)
    return Sm90Plan(max(next_power_of_2(rows), 16), tile, 2, num_warps, num_splits)
