"""Ragged batches of prefill: how long each request is, which of its keys are seen, and where its rows of scratch begin."""

import triton
import triton.language as tl

from ._masks import first_key, tile_bounds

REQS_AT_ONCE = tl.constexpr(128)


@triton.jit
def _clamped_len(req, mask, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len):
    """Keys, int64, of requests that have query tokens; 0 for others."""
    q_len = tl.load(cu_seqlens_q_ptr + req + 1, mask=mask, other=0) - tl.load(cu_seqlens_q_ptr + req, mask=mask, other=0)
    seq_len = tl.load(seq_lens_ptr + req, mask=mask, other=0).to(tl.int64)
    return tl.where(q_len > 0, tl.maximum(tl.minimum(seq_len, max_seq_len), 0), 0)


@triton.jit
def first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len):
    """The scratch row, int64, of a request's first key."""
    offs = tl.arange(0, REQS_AT_ONCE)
    row = tl.sum(_clamped_len(offs, offs < req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len), 0)
    for before in tl.range(REQS_AT_ONCE, req, REQS_AT_ONCE):
        more = before + offs
        row += tl.sum(_clamped_len(more, more < req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len), 0)
    return row


@triton.jit
def first_value_tile(first_row, req, CFG: tl.constexpr):
    """The tile of scratch, int64, of a request's first values: the requests before have no more tiles than this."""
    if CFG.tiles_per_page == 0:
        tiles = first_row // CFG.tile
    else:
        tiles = first_row * CFG.tiles_per_page // CFG.page_size
    return tiles + req


@triton.jit
def request_lengths(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len):
    """(first query token, q_len, seq_len) of a request. One whose length is negative counts as without query tokens."""
    q_start = tl.load(cu_seqlens_q_ptr + req)
    seq_len = tl.load(seq_lens_ptr + req)
    q_len = tl.where(seq_len < 0, 0, tl.load(cu_seqlens_q_ptr + req + 1) - q_start)
    return q_start, q_len, tl.maximum(tl.minimum(seq_len, max_seq_len), 0)


@triton.jit
def seen_tiles(q_len, seq_len, CFG: tl.constexpr):
    """(first key that any query token's window holds, visits, sink tiles, gap): the tiles that some query token sees."""
    SPEC: tl.constexpr = CFG.spec
    chunk_start = seq_len - q_len
    _, _, _, visits, sink_tiles, gap = tile_bounds(
        seq_len, seq_len, chunk_start, seq_len, 0, 1, CFG.page_size, CFG.tile, CFG.tiles_per_page, SPEC
    )
    return first_key(chunk_start, SPEC), visits, sink_tiles, gap


@triton.jit
def tile_of_visit(visit, sink_tiles, gap, CFG: tl.constexpr):
    """The tile of a visit, see tile_bounds."""
    tile = visit
    if CFG.spec.sink_tokens:
        tile += tl.where(visit < sink_tiles, 0, gap)
    elif CFG.spec.window:
        tile += gap
    return tile


@triton.jit
def is_seen(pos, low, CFG: tl.constexpr):
    """Which positions [N] some query token sees, as far as windows decide."""
    seen = pos >= low
    if CFG.spec.sink_tokens:
        seen = seen | (pos < CFG.spec.sink_tokens)
    return seen
