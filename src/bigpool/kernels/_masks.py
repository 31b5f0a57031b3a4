"""Which keys a query token sees, and which tiles hold such keys.

SPEC is a bigpool.tuning.VerifySpec: what is off in it is 0 and compiles to nothing.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(pos, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr):
    """The tile that holds a position; also how many tiles end at or before it."""
    if TILES_PER_PAGE == 0:
        tile = pos // TILE
    else:
        tile = pos // PAGE_SIZE * TILES_PER_PAGE + pos % PAGE_SIZE // TILE
    return tile


@triton.jit
def tiles_before(pos, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr):
    """How many tiles begin before a position."""
    if TILES_PER_PAGE == 0:
        tiles = tl.cdiv(pos, TILE)
    else:
        tiles = pos // PAGE_SIZE * TILES_PER_PAGE + tl.cdiv(pos % PAGE_SIZE, TILE)
    return tiles


@triton.jit
def first_key(q_pos, SPEC: tl.constexpr):
    """The first position that the window and the chunk of positions `q_pos` (scalar or [M]) leave visible; not below 0."""
    pos = tl.maximum(q_pos, 0)
    low = pos * 0
    if SPEC.window:
        low = tl.maximum(low, pos - (SPEC.window - 1))
    if SPEC.chunk:
        low = tl.maximum(low, pos // SPEC.chunk * SPEC.chunk)
    return low


@triton.jit
def visible_keys(pos, mask_key, q_pos, mask_q, tree_row_ptr, draft_start, SPEC: tl.constexpr):
    """[M, N]: whether the rows at positions `q_pos` [M] see the keys at `pos` [N]."""
    if SPEC.tree_words:
        draft_idx = pos - draft_start
        mask_draft = (draft_idx >= 0) & (draft_idx < 32 * SPEC.tree_words)
        mask_word = mask_q[:, None] & mask_draft[None, :]
        word = tl.load(tree_row_ptr[:, None] + (draft_idx // 32)[None, :], mask=mask_word, other=0)
        in_tree = ((word >> (draft_idx & 31)[None, :]) & 1) != 0
        visible = mask_key[None, :] & (in_tree | (draft_idx < 0)[None, :])
    elif SPEC.causal:
        visible = mask_key[None, :] & (pos[None, :] <= q_pos[:, None])
    else:
        visible = mask_key[None, :] & (q_pos == q_pos)[:, None]
    if SPEC.window or SPEC.chunk:
        near = pos[None, :] >= first_key(q_pos, SPEC)[:, None]
        if SPEC.sink_tokens:
            near = near | (pos < SPEC.sink_tokens)[None, :]
        visible = visible & near
    return visible


@triton.jit
def tile_bounds(
    kv_end, full_end, first_pos, last_pos, split, num_splits,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES_PER_PAGE: tl.constexpr, SPEC: tl.constexpr,
):  # fmt: skip
    """(begin, full_begin, full_end, end, sink_tiles, gap) of a split, counted in tiles that are visited.

    Visit i is tile i among the sink tiles and tile i + gap after them. In [full_begin, full_end) every row sees every key:
    rows at positions first_pos..last_pos see no key from `kv_end` on, and all before `full_end` in their window and chunk.
    """
    num_tiles = tiles_before(kv_end, PAGE_SIZE, TILE, TILES_PER_PAGE)
    num_full = tile_of(full_end, PAGE_SIZE, TILE, TILES_PER_PAGE)
    sink_tiles = 0
    gap = 0
    first_full = 0
    if SPEC.window or SPEC.chunk:
        first_tile = tl.minimum(tile_of(first_key(first_pos, SPEC), PAGE_SIZE, TILE, TILES_PER_PAGE), num_tiles)
        if SPEC.sink_tokens:
            SINK_TOKENS: tl.constexpr = SPEC.sink_tokens
            sink_tiles = tl.minimum(tiles_before(SINK_TOKENS, PAGE_SIZE, TILE, TILES_PER_PAGE), first_tile)
        gap = first_tile - sink_tiles
        num_tiles -= gap
        first_full = tl.maximum(tiles_before(first_key(last_pos, SPEC), PAGE_SIZE, TILE, TILES_PER_PAGE) - gap, sink_tiles)
        num_full -= gap
    if SPEC.tiles_per_split:
        # Bounds at fixed positions, whatever the batch, so they are tiles before they are visits.
        begin = split * SPEC.tiles_per_split
        end = begin + SPEC.tiles_per_split
        if SPEC.window or SPEC.chunk:
            begin = tl.where(begin < sink_tiles, begin, tl.maximum(begin - gap, sink_tiles))
            end = tl.where(end < sink_tiles, end, tl.maximum(end - gap, sink_tiles))
        begin = tl.minimum(begin, num_tiles)
        end = tl.minimum(end, num_tiles)
    else:
        tiles_per_split = tl.cdiv(num_tiles, num_splits)
        begin = tl.minimum(split * tiles_per_split, num_tiles)
        end = tl.minimum(begin + tiles_per_split, num_tiles)
    full_begin = begin
    if SPEC.window or SPEC.chunk:
        full_begin = tl.minimum(tl.maximum(first_full, begin), end)
    full_end_visit = tl.minimum(tl.maximum(num_full, full_begin), end)
    return begin, full_begin, full_end_visit, end, sink_tiles, gap
