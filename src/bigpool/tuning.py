"""Launch configurations as frozen values, picked by pure functions of (device properties, shape).

Nothing here touches a device. `bigpool._device.device_props` fills a DeviceProps once per device, `tuning_tables.in_force` reads
what `bigpool tune` found for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_NUM_SPLITS = 128
MAX_GRID_YZ = 65_535
# Row tiles and splits share a grid axis.
MAX_HEADS, MAX_SEQLEN_Q = 2_048, 256
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 512
# Bytes of one element of a row, of which two share a byte.
INT4_BYTES = 0.5
# The batch-invariant mode: keys of a split, and the query tokens of a request for which its tile is chosen.
BATCH_SPLIT_TOKENS, BATCH_SEQLEN_Q = 1_024, 8
# Tiles are counted in int32: a length this far below 2^31 leaves room for the last tile.
MAX_SEQ_LEN = 2**31 - 2**16


@dataclass(frozen=True)
class DeviceProps:
    """What a picker may know of a device: `sm` 90 is compute capability 9.0, `smem_bytes` the most one block can opt in to."""

    name: str
    sm: int
    num_sms: int
    smem_bytes: int
    interpreted: bool = False


INTERPRETER = DeviceProps(name="triton interpreter", sm=0, num_sms=4, smem_bytes=2**30, interpreted=True)
# Their matrix units take operands from shared memory, which leaves the registers to the accumulator.
WIDE_MMA = (90, 100, 103)


@dataclass(frozen=True)
class VerifyConfig:
    """Tile shape of the verify kernel: `block_m` rows (query token x head), `tile` keys."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class VerifySpec:
    """What verify kernels are compiled for besides sizes. 0 and "" mean off.

    `kv_format` "plain" | "int8" | "int4" | "e4m3" | "e5m2"; `scales` "" | "head" | "token_head"; `convert` how codes become
    numbers: "plain" Triton, or "asm", byte permutes of NVIDIA cards; `tree_words` int32 words of a tree mask per token;
    `tiles_per_split` fixes the bounds of splits. `longest`: requests with more query tokens are left alone, and scratch has that
    many rows for each request.
    """

    causal: bool = True
    window: int = 0
    sink_tokens: int = 0
    chunk: int = 0
    softcap: float = 0.0
    alibi: bool = False
    tree_words: int = 0
    kv_format: str = "plain"
    scales: str = ""
    convert: str = "plain"
    tiles_per_split: int = 0
    out_format: str = ""
    longest: int = 0


PLAIN_SPEC = VerifySpec()


@dataclass(frozen=True)
class VerifyPlan:
    """Everything that shapes one launch. `tiles_per_page` 0: a tile gathers keys from several pages. `tiles_per_split` 0: splits
    share the tiles evenly."""

    config: VerifyConfig
    head_dim_pad: int
    tiles_per_page: int
    row_tiles: int
    num_splits: int
    tiles_per_split: int = 0


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is >= n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def verify_smem_bytes(config: VerifyConfig, head_dim_pad: int, itemsize: int, kv_bytes: float | None = None) -> int:
    """Shared memory that a launch needs at most: K and V tiles of each stage, and the query tile, in bytes.

    `kv_bytes` of an element of a quantised cache, None for a cache in q's dtype; decoded tiles need room beside the stored ones.
    """
    query = config.block_m * head_dim_pad * itemsize
    stored = 2 * config.num_stages * config.tile * head_dim_pad
    if kv_bytes is None:
        return stored * itemsize + query
    return int(stored * kv_bytes) + query + 2 * config.tile * head_dim_pad * itemsize


def config_supports(
    config: VerifyConfig, props: DeviceProps, head_dim_pad: int, itemsize: int, kv_bytes: float | None = None
) -> bool:
    """Whether `config` fits the shared memory of the device."""
    return verify_smem_bytes(config, head_dim_pad, itemsize, kv_bytes) <= props.smem_bytes


PAGE_TILES = (128, 64, 32, 16)
MOST_ROWS = 256


class TunedKey(NamedTuple):
    """Calls that share an entry of a table: `rows` per kv head up to this (256: or more), `page_tile` the largest tile that ends
    at page ends (0: none), the rest as of pick_verify_config."""

    rows: int
    head_dim_pad: int
    itemsize: int
    kv_bytes: float | None
    page_tile: int
    heavy: bool


Tuned = Mapping[TunedKey, VerifyConfig]


def tuned_key(rows: int, head_dim_pad: int, itemsize: int, page_size: int, kv_bytes: float | None, heavy: bool) -> TunedKey:
    """The key of a call; arguments as of pick_verify_config."""
    page_tile = next((tile for tile in PAGE_TILES if pick_tiles_per_page(page_size, tile)), 0)
    return TunedKey(min(max(next_power_of_2(rows), 16), MOST_ROWS), head_dim_pad, itemsize, kv_bytes, page_tile, heavy)


NO_TABLE: Tuned = {}


def pick_verify_config(
    props: DeviceProps,
    *,
    rows: int,
    head_dim_pad: int,
    itemsize: int,
    page_size: int,
    kv_bytes: float | None = None,
    heavy: bool = False,
    tuned: Tuned = NO_TABLE,
) -> VerifyConfig:
    """The tile for `rows` = max_seqlen_q * group rows per kv head: the most keys and stages that fit the device.

    `heavy`: masks or logit options need registers too.

    Chosen by times on an H200; for other cards and for quantised caches by what the compiler says of registers and shared
    memory, not by times. `tuned`: configs that go before this rule.
    """
    if tuned and (key := tuned_key(rows, head_dim_pad, itemsize, page_size, kv_bytes, heavy)) in tuned:
        return tuned[key]
    if props.interpreted:
        return VerifyConfig(min(max(next_power_of_2(rows), 16), 128), 256, 1, 1)
    wide = props.sm in WIDE_MMA
    most_rows = min((32_768 if wide else 16_384) // head_dim_pad, 128 if wide or head_dim_pad <= 64 else 64)
    block_m = min(max(next_power_of_2(rows), 16), max(most_rows, 16))
    most_keys = (16_384 if block_m * head_dim_pad <= 16_384 else 8_192) // head_dim_pad
    if heavy:
        most_keys //= 2
    if itemsize == 4:
        # fp32 dots run on the plain cores, with whole operands in registers.
        block_m = most_keys = 16
    tiles = [tile for tile in (64, 32, 16) if tile <= max(most_keys, 16)]
    shapes = [(tile, stages) for tile in tiles for stages in (3, 2)] + [(16, 1)]
    candidates = []
    for tile, stages in shapes:
        # A gather holds a pointer for every row, a decoded tile is in registers.
        lean = wide and itemsize < 4 and pick_tiles_per_page(page_size, tile) > 0 and kv_bytes is None and not heavy
        few = block_m <= 64 and block_m * head_dim_pad <= (16_384 if lean else 4_096)
        candidates.append(VerifyConfig(block_m, tile, 4 if few else 8, stages))
    return next((c for c in candidates if config_supports(c, props, head_dim_pad, itemsize, kv_bytes)), candidates[-1])


def pick_convert(props: DeviceProps, *, itemsize: int, kv_format: str) -> str:
    """How codes become numbers, see VerifySpec: by byte permutes where the card has them for q's dtype and the format."""
    oldest = 89 if kv_format == "e4m3" else 80
    return "asm" if props.sm >= oldest and itemsize == 2 and kv_format != "plain" and not props.interpreted else "plain"


def pick_tiles_per_page(page_size: int, tile: int) -> int:
    """Tiles of one page when tiles end at page ends; 0 (gather) when that would waste over a quarter of the lanes."""
    tiles = cdiv(page_size, tile)
    return tiles if tiles * tile * 3 <= page_size * 4 else 0


def pick_num_splits(props: DeviceProps, *, programs: int, max_tiles: int, smem_bytes: int) -> int:
    """Splits that fill the device once with `programs` = requests x kv heads x row tiles, as its shared memory allows."""
    resident = props.num_sms * max(min(props.smem_bytes // smem_bytes, 2), 1)
    return max(1, min(resident // programs, max_tiles, MAX_NUM_SPLITS))


def _fill(
    props: DeviceProps, config: VerifyConfig, rows: int, pairs: int, sizes: tuple[int, int, float | None], max_tiles: int
) -> int:
    """pick_num_splits of `config` for `pairs` = requests x kv heads; `sizes` as of verify_smem_bytes."""
    programs = max(pairs * max(cdiv(rows, config.block_m), 1), 1)
    return pick_num_splits(props, programs=programs, max_tiles=max_tiles, smem_bytes=verify_smem_bytes(config, *sizes))


def batch_splits(max_seq_len: int, page_size: int, tile: int) -> tuple[int, int]:
    """(tiles of a split, splits) of the batch-invariant mode: bounds at fixed positions, at least two splits.

    One split would skip the merge, whose sums may differ in a bit.
    """
    tiles_per_split = BATCH_SPLIT_TOKENS // tile
    tiles_per_page = pick_tiles_per_page(page_size, tile)
    max_tiles = cdiv(max_seq_len, page_size) * tiles_per_page if tiles_per_page else cdiv(max_seq_len, tile)
    return tiles_per_split, max(cdiv(max_tiles, tiles_per_split), 2)


def most_batch_splits(max_seq_len: int) -> int:
    """Splits of the batch-invariant mode at most, whatever the page size: tiles that end at page ends waste up to a quarter."""
    return cdiv(4 * min(max_seq_len, MAX_SEQ_LEN), 3 * BATCH_SPLIT_TOKENS) + 1


def plan_verify(
    props: DeviceProps,
    *,
    num_reqs: int,
    max_seqlen_q: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    page_size: int,
    max_seq_len: int,
    num_splits: int | None = None,
    kv_bytes: float | None = None,
    batch: bool = False,
    max_visible: int | None = None,
    heavy: bool = False,
    tuned: Tuned = NO_TABLE,
) -> VerifyPlan:
    """The launch for a shape. Depends on sizes alone, never on values, so a captured graph stays valid.

    `batch`: tiles and bounds of splits depend on neither the batch, nor the table's width, nor how many tokens a call brings.
    `max_visible`: keys that a request visits at most (None: all of them). `heavy`: with masks or logit options. `tuned`: as of
    pick_verify_config.
    """
    head_dim_pad = max(next_power_of_2(head_dim), 32 if kv_bytes == INT4_BYTES else 16)
    group = num_q_heads // num_kv_heads
    rows = max_seqlen_q * group
    config = pick_verify_config(
        props, rows=BATCH_SEQLEN_Q * group if batch else rows, head_dim_pad=head_dim_pad, itemsize=itemsize, page_size=page_size,
        kv_bytes=kv_bytes, heavy=heavy, tuned=tuned,
    )  # fmt: skip
    row_tiles = max(cdiv(rows, config.block_m), 1)
    tiles_per_page, tiles_per_split = pick_tiles_per_page(page_size, config.tile), 0
    if batch:
        tiles_per_split, num_splits = batch_splits(max_seq_len, page_size, config.tile)
    elif num_splits is None:
        keys = max_seq_len if max_visible is None else min(max_visible, max_seq_len)
        pairs, sizes = num_reqs * num_kv_heads, (head_dim_pad, itemsize, kv_bytes)
        num_splits = _fill(props, config, rows, pairs, sizes, cdiv(keys, config.tile))
        if tuned:
            # Workspaces are sized for pages of one slot and for calls without masks.
            sized = pick_verify_config(
                props, rows=rows, head_dim_pad=head_dim_pad, itemsize=itemsize, page_size=1, kv_bytes=kv_bytes, tuned=tuned
            )
            num_splits = min(num_splits, _fill(props, sized, rows, pairs, sizes, MAX_NUM_SPLITS))
    num_splits = max(min(num_splits, MAX_GRID_YZ // row_tiles), 1)
    return VerifyPlan(config, head_dim_pad, tiles_per_page, row_tiles, num_splits, tiles_per_split)


PART_EXTRA = 4


def scratch_floats(num_tokens: int, num_q_heads: int, head_dim: int, num_splits: int) -> int:
    """fp32 values of scratch of one launch: per token, head and split a sum, its maximum, its weight, and two unused
    values that keep rows of 16-byte multiples aligned."""
    return num_tokens * num_q_heads * num_splits * (head_dim + PART_EXTRA) if num_splits > 1 else 0
