"""What the Hopper kernel of verify attention runs, and how: frozen values and pure pickers, as in bigpool.tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .tuning import MAX_GRID_YZ, MAX_NUM_SPLITS, DeviceProps, VerifySpec, cdiv, next_power_of_2, pick_tiles_per_page

# The versions of Triton whose Gluon the kernel was compiled and run with.
TRITON_VERSIONS = ((3, 6),)
# Tiles that a program should have before more programs than one a multiprocessor pay for their part of the merge.
MIN_TILES = 6
# The kernel with specialised warps: keys of a tile, rows that two warpgroups hold, pages of which a tile has several.
SPECIALISED_TILE = 64
MAX_ROWS = 128
SMALL_PAGES = (16, 32)


@dataclass(frozen=True)
class Sm90Shape:
    """What the kernel is compiled for. `rows` of queries (token x head) a program has, `tile` keys; `k_layout`, `v_layout`: how
    threads hold tiles of a quantised cache; `longest` as of VerifySpec, the rest as of Sm90Plan."""

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
    pages_per_tile: int = 1
    buffers: int = 2
    decode_warps: int = 4
    decode_regs: int = 128
    longest: int = 0

    @property
    def digits(self) -> int:
        """Digits of 7 bits that integer queries have; 0: queries are fp16, or in the dtype of a plain cache."""
        return {"int8": 3, "int4": 2}.get(self.kv_format, 0)


@dataclass(frozen=True)
class Sm90Plan:
    """The shape of a launch: `rows` of queries, `tile` keys, `stages` of tiles on their way, warps, splits.

    `specialised`: the kernel of verify_ws_sm90.py, with `buffers` of decoded tiles and `decode_regs` registers for decoding.
    `tiles_per_page` is 1 where a tile holds `pages_per_tile` whole pages.
    """

    rows: int
    tile: int
    stages: int
    num_warps: int
    num_splits: int
    tiles_per_page: int
    specialised: bool = False
    pages_per_tile: int = 1
    buffers: int = 2
    decode_regs: int = 128


def sm90_supports(props: DeviceProps, spec: VerifySpec, *, itemsize: int, head_dim: int, rows: int, page_size: int) -> bool:
    """Whether a Hopper kernel has this case: causal attention and nothing else, not too many rows, pages that tiles fit.

    `itemsize` of q, in bytes; `rows` = max_seqlen_q * group.
    """
    bare = VerifySpec(kv_format=spec.kv_format, scales=spec.scales, convert=spec.convert, longest=spec.longest)
    kernel = pick_kernel(spec.kv_format, head_dim=head_dim, rows=rows, page_size=page_size)
    return props.sm == 90 and itemsize == 2 and spec == bare and kernel != ""


def pick_kernel(kv_format: str, *, head_dim: int, rows: int, page_size: int) -> str:
    """ "swapped" (verify_sm90.py), "specialised" (verify_ws_sm90.py), or "": neither has it. Chosen by times on an H200."""
    most = 32 if kv_format in ("plain", "int4") else 64
    dims = {"plain": (64, 128, 256), "int4": (256,)}.get(kv_format, (128, 256))
    if rows <= most and head_dim in dims and pick_tiles_per_page(page_size, _tile(kv_format, head_dim, rows)):
        return "swapped"
    fits = pick_tiles_per_page(page_size, SPECIALISED_TILE) > 0 or page_size in SMALL_PAGES
    return "specialised" if rows <= MAX_ROWS and head_dim in (64, 128, 256) and fits else ""


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
    programs = max(num_reqs * num_kv_heads, 1)
    specialised = pick_kernel(kv_format, head_dim=head_dim, rows=rows, page_size=page_size) == "specialised"
    tile = SPECIALISED_TILE if specialised else _tile(kv_format, head_dim, rows)
    num_warps = (8 if rows > 64 else 4) if specialised else tile // 16
    max_tiles = max(cdiv(max_seq_len, tile), 1)
    if num_splits is None:
        num_splits = max(props.num_sms // programs, 1)
        # Shared memory and registers hold two programs of four warps.
        twice = 2 * props.num_sms // programs
        if kv_format != "plain" and not specialised and num_warps == 4 and max_tiles >= MIN_TILES * twice:
            num_splits = max(twice, 1)
    num_splits = max(min(num_splits, max_tiles, MAX_NUM_SPLITS, MAX_GRID_YZ), 1)
    if not specialised:
        tiles = pick_tiles_per_page(page_size, tile)
        return Sm90Plan(max(next_power_of_2(rows), 16), tile, 2, num_warps, num_splits, tiles)
    # Shared memory holds decoded tiles of K beside all others for 64 rows only.
    is_float = kv_format in ("e4m3", "e5m2")
    stages = 1 if is_float and num_warps == 8 and head_dim == 256 else 2
    decode_regs = 128 if num_warps == 4 else 40 if kv_format == "int8" else 56
    return Sm90Plan(
        16 * num_warps, tile, stages, num_warps, num_splits, pick_tiles_per_page(page_size, tile) or 1, True,
        max(tile // page_size, 1) if page_size in SMALL_PAGES else 1, 2, decode_regs,
    )  # fmt: skip
