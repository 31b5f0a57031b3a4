"""Which calls share a configuration, and which configurations are tried for them: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bigpool.bench.formats import FormatShape, format_of, with_formats
from bigpool.bench.shapes import K, Shape
from bigpool.ops._verify_launch import kv_bytes_of
from bigpool.tuning import (
    INT4_BYTES,
    PAGE_TILES,
    DeviceProps,
    TunedKey,
    VerifyConfig,
    config_supports,
    next_power_of_2,
    pick_verify_config,
    tuned_key,
)

WARPS, STAGES = (2, 4, 8), (4, 3, 2, 1)
MOST_BLOCK_M = 128
# fp32 registers of a thread that the sums over values may take: half of all.
MOST_SUMS = 128
# Formats that share entries, since plans know the bytes of an element only.
ONE_BYTE = ("int8", "fp8_e4m3")
# 32 q / 8 kv heads, D 128, pages of 16 slots; then 24 / 4, D 256, pages of 880.
TABLE = tuple(
    Shape(num_reqs, q_len, length * K, page_size, *heads)
    for page_size, heads in ((16, (32, 8, 128)), (880, (24, 4, 256)))
    for num_reqs, q_len, length in ((1, 1, 32), (16, 1, 4), (1, 8, 32), (16, 8, 4))
)
TINY = (Shape(1, 2, 40, 16, 2, 1, 16),)


def with_siblings(names: Iterable[str]) -> tuple[str, ...]:
    """`names`, and every format that shares an entry with one of them."""
    asked = tuple(dict.fromkeys(names))
    shares = any(name in ONE_BYTE for name in asked)
    return tuple(dict.fromkeys((*asked, *(ONE_BYTE if shares else ()))))


def key_of(shape: FormatShape, itemsize: int) -> TunedKey:
    """The entry of a shape without masks. `itemsize` of q, in bytes."""
    kv_bytes = kv_bytes_of(format_of(shape.kv_format))
    head_dim_pad = max(next_power_of_2(shape.head_dim), 32 if kv_bytes == INT4_BYTES else 16)
    rows = shape.q_len * (shape.num_q_heads // shape.num_kv_heads)
    return tuned_key(rows, head_dim_pad, itemsize, shape.page_size, kv_bytes, False)


def cells(shapes: Sequence[Shape], names: Sequence[str], itemsize: int) -> dict[TunedKey, list[FormatShape]]:
    """Entry -> the shapes that are timed for it."""
    found: dict[TunedKey, list[FormatShape]] = {}
    for shape in dict.fromkeys(with_formats(shapes, with_siblings(names))):
        assert isinstance(shape, FormatShape)
        found.setdefault(key_of(shape, itemsize), []).append(shape)
    return found


def rule_of(props: DeviceProps, key: TunedKey, shape: Shape) -> VerifyConfig:
    """What is launched without any table."""
    return pick_verify_config(
        props, rows=shape.q_len * (shape.num_q_heads // shape.num_kv_heads), head_dim_pad=key.head_dim_pad, itemsize=key.itemsize,
        page_size=shape.page_size, kv_bytes=key.kv_bytes, heavy=key.heavy, tuned={},
    )  # fmt: skip


def candidates(props: DeviceProps, key: TunedKey, rule: VerifyConfig) -> list[VerifyConfig]:
    """What fits the card besides `rule`: row tiles of half, the same and twice as many rows, every tile, warps and stages.

    Warps and stages mean nothing to the interpreter.
    """
    most_rows = min(max(key.rows, 16), MOST_BLOCK_M)
    blocks = [rows for rows in (rule.block_m // 2, rule.block_m, 2 * rule.block_m) if 16 <= rows <= most_rows]
    warps, stages = ((1,), (1,)) if props.interpreted else (WARPS, STAGES)
    made = (VerifyConfig(rows, tile, w, s) for rows in blocks for tile in PAGE_TILES for w in warps for s in stages)
    return [config for config in made if config != rule and _fits(props, key, config)]


def _fits(props: DeviceProps, key: TunedKey, config: VerifyConfig) -> bool:
    sums = config.block_m * key.head_dim_pad // (32 * config.num_warps)
    slim = props.interpreted or sums <= MOST_SUMS
    return slim and config_supports(config, props, key.head_dim_pad, key.itemsize, key.kv_bytes)
