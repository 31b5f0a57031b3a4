"""Launch configurations of prefill attention: pure functions of (device properties, shape)."""

from __future__ import annotations

from dataclasses import dataclass

from ..tuning import MAX_HEAD_DIM, WIDE_MMA, DeviceProps, VerifySpec, next_power_of_2, pick_tiles_per_page

__all__ = ["MAX_HEAD_DIM"]
# Grid axes of requests and kv heads, and rows (query token x query head) of a request, which are counted in int32.
MAX_REQS, MAX_ROWS = 65_535, 2**31 - 2**16
# Programs that sum the keys of one request and head: not chosen by the batch, so that the mean does not depend on it.
SUM_SHARES = 64
# Keys at the head of a request that stay exact where codes are kept; the second half of them gives the mean.
EXACT_KEYS = 128
# Keys of a tile of fp8 values, which scratch is laid out by. The oldest card that multiplies fp8.
VALUE_TILE, OLDEST_FP8 = 64, 89
NO_RULES = VerifySpec()


@dataclass(frozen=True)
class PrefillConfig:
    """Tile shape of prefill attention: `block_m` rows (query token x query head), `tile` keys."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class KeyPasses:
    """The passes over keys or values: tile, and programs of each pass per request and kv head; `shares` at most SUM_SHARES."""

    tile: int
    shares: int
    programs: int
    num_warps: int


@dataclass(frozen=True)
class PrefillShape:
    """What prefill kernels are compiled for: no length is among it.

    `qk` "exact" | "int8" | "kept"; `pv` "exact" | "fp8" | "fp8 plain", as fp32 in Triton's interpreter; strides of scales
    between pages, slots and heads; `spec` has masks and the format of the cache.
    """

    group: int
    head_dim: int
    head_dim_pad: int
    page_size: int
    tile: int
    tiles_per_page: int
    block_m: int
    spec: VerifySpec = NO_RULES
    qk: str = "exact"
    pv: str = "exact"
    k_scale_strides: tuple[int, int, int] = (0, 0, 0)
    v_scale_strides: tuple[int, int, int] = (0, 0, 0)
    exact_keys: int = EXACT_KEYS


def pick_key_passes(props: DeviceProps, pv: str = "exact") -> KeyPasses:
    """The same for every length. Few and large where each program costs the interpreter a millisecond."""
    if pv != "exact":
        return KeyPasses(VALUE_TILE, 1, 1, 1) if props.interpreted else KeyPasses(VALUE_TILE, SUM_SHARES, 128, 8)
    return KeyPasses(512, 1, 1, 1) if props.interpreted else KeyPasses(64, SUM_SHARES, 128, 8)


def prefill_head_dim_pad(head_dim: int, int8: bool, packed: bool = False) -> int:
    """The head dim that tiles have; products of int8 take 32 or more at a time, and two codes may share a byte."""
    return max(next_power_of_2(head_dim), 32 if int8 or packed else 16)


def prefill_smem_bytes(config: PrefillConfig, head_dim_pad: int, itemsize: int, int8: bool, kv_bytes: float | None = None) -> int:
    """Shared memory that a launch needs at most, in bytes: q, and the K and V tiles of each stage.

    `kv_bytes` of an element of a quantised cache, whose decoded tiles need room beside the stored ones.
    """
    row = config.tile * head_dim_pad
    stored = row * ((1 if int8 else itemsize) + itemsize)
    if kv_bytes is not None:
        return config.block_m * head_dim_pad * itemsize + int(2 * config.num_stages * row * kv_bytes) + 2 * row * itemsize
    return config.block_m * head_dim_pad * itemsize + config.num_stages * stored


def pick_prefill_config(
    props: DeviceProps,
    *,
    head_dim_pad: int,
    itemsize: int,
    int8: bool,
    kv_bytes: float | None = None,
    fp8: bool = False,
) -> PrefillConfig:
    """The largest tile that fits the device. It depends on no length, so that no length compiles anew.

    Chosen by what the compiler says of registers and shared memory, not by times.
    """
    if props.interpreted:
        return PrefillConfig(64, VALUE_TILE if fp8 else 512, 1, 1)
    if itemsize == 4:
        # fp32 dots run on the plain cores, with whole operands in registers.
        return PrefillConfig(16, VALUE_TILE if fp8 else 16, 4, 1)
    wide = props.sm in WIDE_MMA
    keys = 64 if wide or head_dim_pad <= 128 else 32
    shapes = [(128, keys, 8, stages) for stages in (3, 2)] if wide and head_dim_pad <= 256 else []
    shapes += [(64, keys, 4 if head_dim_pad <= 128 else 8, stages) for stages in (2, 1)] + [(32, 32, 4, 1)]
    if head_dim_pad > 256:
        shapes = [(64, 32, 8, 2), (64, 32, 8, 1)] if wide else [(32, 32, 8, 1), (16, 16, 4, 1)]
    if fp8:
        shapes = [(rows, VALUE_TILE, warps, stages) for rows, _, warps, stages in shapes]
    configs = [PrefillConfig(*shape) for shape in shapes]
    fits = (c for c in configs if prefill_smem_bytes(c, head_dim_pad, itemsize, int8, kv_bytes) <= props.smem_bytes)
    return next(fits, configs[-1])


def value_tiles(max_num_keys: int, max_num_reqs: int, page_size: int | None) -> int:
    """Tiles of VALUE_TILE values that requests within these maxima take of scratch; `page_size` None: whatever it is."""
    if page_size is None:
        return 4 * max_num_keys // (3 * VALUE_TILE) + max_num_reqs
    tiles = pick_tiles_per_page(page_size, VALUE_TILE)
    return (max_num_keys * tiles // page_size if tiles else max_num_keys // VALUE_TILE) + max_num_reqs
