"""Sketch, not product: the split-KV partial of verify attention on Hopper, in Gluon, to start the next version from.

Tiles of 64 keys that end at page ends come through 3-D TMA boxes [page, slot, column]: the hardware forms the 64-bit address, and
slots past a page, and page ids outside the pool, read as zero. One warpgroup computes; copies run STAGES tiles ahead. With OVERLAP
the scores of the next tile are computed under this tile's softmax. Needs sm90 and Triton 3.6; head_dim a multiple of 64, NHD caches.

    PYTHONPATH=src python sketches/verify_sm90.py

checks it against `verify_attention` and times both, replayed as CUDA graphs, with the L2 cache flushed by reading. What was measured
is in sketches/README.md. Missing: other layouts and formats, NaN in later draft tokens, more than 64 rows of queries per kv head.
"""

import statistics

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bigpool.kernels.verify import verify_merge_kernel
from bigpool.ops.verify import verify_attention
from bigpool.reference_logits import LOG2_E


@gluon.jit
def copy_tile(desc, boxes, bar, page, slot, stage, head_row, head_col, pred, TILE: gl.constexpr, CHUNKS: gl.constexpr):
    mbarrier.expect(bar, TILE * CHUNKS * 64 * 2, pred=pred)
    for c in gl.static_range(CHUNKS):
        tma.async_copy_global_to_shared(
            desc, [page, head_row + slot, head_col + c * 64], bar, boxes.index(stage * CHUNKS + c), pred=pred
        )


@gluon.jit
def partial_kernel(
    q_ptr,
    k_desc,
    v_desc,
    dest_ptr,
    table_ptr,
    seq_lens_ptr,
    cu_ptr,
    scale_log2,
    max_col,
    max_seq_len,
    sq_t,
    sq_h,
    k_head_rows,
    k_head_cols,
    v_head_rows,
    v_head_cols,
    sd_t,
    sd_h,
    sd_s,
    st_req,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    TPP: gl.constexpr,
    TILE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ROW_TILES: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):
    CHUNKS: gl.constexpr = D // 64
    dtype: gl.constexpr = k_desc.dtype
    req = gl.program_id(0).to(gl.int64)
    kvh = gl.program_id(2)
    kv_head = kvh.to(gl.int64)
    split = gl.program_id(1) // ROW_TILES
    num_splits = gl.num_programs(1) // ROW_TILES
    row0 = (gl.program_id(1) % ROW_TILES) * BLOCK_M
    seq_len = gl.maximum(gl.minimum(gl.load(seq_lens_ptr + req), max_seq_len), 0)
    q_start = gl.load(cu_ptr + req)
    q_len = gl.load(cu_ptr + req + 1) - q_start
    token0 = q_start.to(gl.int64)
    last_idx = gl.minimum((row0 + BLOCK_M - 1) // GROUP, q_len - 1)
    kv_end = gl.maximum(seq_len - q_len + last_idx + 1, 0)
    full_end = gl.maximum(seq_len - q_len + row0 // GROUP + 1, 0)
    num_tiles = kv_end // PAGE_SIZE * TPP + gl.cdiv(kv_end % PAGE_SIZE, TILE)
    num_full = full_end // PAGE_SIZE * TPP + full_end % PAGE_SIZE // TILE
    per = gl.cdiv(num_tiles, num_splits)
    tile_begin = gl.minimum(split * per, num_tiles)
    tile_end = gl.minimum(tile_begin + per, num_tiles)
    if row0 >= q_len * GROUP:
        tile_end = tile_begin
    table_row_ptr = table_ptr + req * st_req

    smem3: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, 1, TILE, 64], smem3)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * CHUNKS, 1, TILE, 64], smem3)
    k_tiles = k_boxes._reinterpret(dtype, [STAGES, TILE, D], smem)
    v_tiles = v_boxes._reinterpret(dtype, [STAGES, TILE, D], smem)
    v_chunks = v_boxes._reinterpret(dtype, [STAGES * CHUNKS, TILE, 64], smem)
    bars = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i_bar in gl.static_range(2 * STAGES):
        mbarrier.init(bars.index(i_bar), count=1)
    fence_async_shared()
    gl.thread_barrier()
    hrk = kvh * k_head_rows
    hck = kvh * k_head_cols
    hrv = kvh * v_head_rows
    hcv = kvh * v_head_cols
    for i_st in gl.static_range(STAGES):
        t = tile_begin + i_st
        page0 = gl.load(table_row_ptr + gl.minimum(t // TPP, max_col))
        copy_tile(k_desc, k_boxes, bars.index(2 * i_st), page0, (t % TPP) * TILE, i_st, hrk, hck, t < tile_end, TILE, CHUNKS)
        copy_tile(v_desc, v_boxes, bars.index(2 * i_st + 1), page0, (t % TPP) * TILE, i_st, hrv, hcv, t < tile_end, TILE, CHUNKS)

    ql: gl.constexpr = gl.BlockedLayout(
        [1, 8], [1, 32] if D == 256 else ([2, 16] if D == 128 else [4, 8]), [num_warps, 1], [1, 0]
    )
    r = row0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ql))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, ql))
    qi = r // GROUP
    offs = (token0 + qi) * sq_t + (kv_head * GROUP + r % GROUP) * sq_h
    q = gl.load(q_ptr + offs[:, None] + d[None, :], mask=(qi < q_len)[:, None], other=0.0)
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, D], smem, q)
    fence_async_shared()
    gl.thread_barrier()

    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row = row0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, s_layout))
    q_pos = seq_len - q_len + row // GROUP
    offs_n = gl.arange(0, TILE, layout=gl.SliceLayout(0, s_layout))
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    l = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.full([BLOCK_M, D], 0.0, gl.float32, o_layout)
    zero = gl.full([BLOCK_M, TILE], 0.0, gl.float32, s_layout)
    page = gl.load(table_row_ptr + gl.minimum((tile_begin + STAGES) // TPP, max_col))
    if OVERLAP:
        mbarrier.wait(bars.index(0), 0, pred=tile_begin < tile_end)
        s = warpgroup_mma(q_smem, k_tiles.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        gl.thread_barrier()
        copy_tile(
            k_desc,
            k_boxes,
            bars.index(0),
            page,
            ((tile_begin + STAGES) % TPP) * TILE,
            0,
            hrk,
            hck,
            tile_begin + STAGES < tile_end,
            TILE,
            CHUNKS,
        )
    else:
        s = zero
    for tile in range(tile_begin, tile_end):
        i = tile - tile_begin
        stage = i % STAGES
        phase = (i // STAGES) & 1
        nxt = tile + STAGES
        more = nxt < tile_end
        nslot = (nxt % TPP) * TILE
        page_after = gl.load(table_row_ptr + gl.minimum((nxt + 1) // TPP, max_col))
        if OVERLAP:
            st1 = (i + 1) % STAGES
            ph1 = ((i + 1) // STAGES) & 1
            mbarrier.wait(bars.index(2 * st1), ph1, pred=tile + 1 < tile_end)
            s_next = warpgroup_mma(q_smem, k_tiles.index(st1).permute((1, 0)), zero, use_acc=False, is_async=True)
        else:
            mbarrier.wait(bars.index(2 * stage), phase)
            s = warpgroup_mma(q_smem, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            gl.thread_barrier()
            copy_tile(k_desc, k_boxes, bars.index(2 * stage), page, nslot, stage, hrk, hck, more, TILE, CHUNKS)
        x = s * scale_log2
        slot = (tile % TPP) * TILE + offs_n
        if PAGE_SIZE % TILE != 0:
            x = gl.where((slot < PAGE_SIZE)[None, :], x, float("-inf"))
        if tile >= num_full:
            pos = tile // TPP * PAGE_SIZE + slot
            x = gl.where(pos[None, :] <= q_pos[:, None], x, float("-inf"))
        m_new = gl.maximum(m, gl.max(x, 1))
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(x - shift[:, None])
        alpha = gl.exp2(m - shift)
        l = l * alpha + gl.sum(p, 1)
        m = m_new
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        pb = gl.convert_layout(p.to(dtype), p_layout)
        mbarrier.wait(bars.index(2 * stage + 1), phase)
        if tile // TPP * PAGE_SIZE + (tile % TPP) * TILE + TILE > kv_end:
            vl: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
            rv = tile // TPP * PAGE_SIZE + (tile % TPP) * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, vl))
            for c in gl.static_range(CHUNKS):
                vc = v_chunks.index(stage * CHUNKS + c)
                y = vc.load(vl)
                y = gl.where((rv < kv_end)[:, None], y, 0.0)
                vc.store(y)
            fence_async_shared()
            gl.thread_barrier()
        acc = warpgroup_mma(pb, v_tiles.index(stage), acc, is_async=True)
        if OVERLAP:
            s = warpgroup_mma_wait(1, deps=[s_next])
            gl.thread_barrier()
            copy_tile(
                k_desc,
                k_boxes,
                bars.index(2 * st1),
                page_after,
                ((nxt + 1) % TPP) * TILE,
                st1,
                hrk,
                hck,
                nxt + 1 < tile_end,
                TILE,
                CHUNKS,
            )
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.thread_barrier()
        copy_tile(v_desc, v_boxes, bars.index(2 * stage + 1), page, nslot, stage, hrv, hcv, more, TILE, CHUNKS)
        page = page_after

    ro = row0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, o_layout))
    do = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    lo = gl.convert_layout(l, gl.SliceLayout(1, o_layout))
    mo = gl.convert_layout(m, gl.SliceLayout(1, o_layout))
    ok = ro // GROUP < q_len
    offs_o = (token0 + ro // GROUP) * sd_t + (kv_head * GROUP + ro % GROUP) * sd_h + split * sd_s
    gl.store(dest_ptr + offs_o[:, None] + do[None, :], acc, mask=(ok & (lo != 0.0))[:, None])
    gl.store(dest_ptr + offs_o + D, mo, mask=ok)
    gl.store(dest_ptr + offs_o + D + 1, lo, mask=ok)


def descriptor(cache, tile):
    """A TMA descriptor over a whole NHD cache, seen as [num_pages, page_size, num_kv_heads * head_dim]."""
    num_pages, page_size, num_kv_heads, head_dim = cache.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    shape, strides = [num_pages, page_size, num_kv_heads * head_dim], [cache.stride(0), cache.stride(1), 1]
    return TensorDescriptor(cache, shape, strides, [1, tile, 64], layout)


def launcher(q, k, v, table, seq_lens, starts, q_len, out, lse, num_splits, tile=64, stages=2, overlap=False):
    """A callable that runs partial and merge."""
    num_tokens, num_q_heads, head_dim = q.shape
    page_size, num_kv_heads = k.shape[1:3]
    part = torch.full((num_tokens, num_q_heads, num_splits, head_dim + 4), float("nan"), device=q.device)
    k_desc, v_desc = descriptor(k, tile), descriptor(v, tile)
    splits_pad = triton.next_power_of_2(num_splits)

    def run():
        partial_kernel[(len(table), num_splits, num_kv_heads)](
            q, k_desc, v_desc, part, table, seq_lens, starts, head_dim**-0.5 * LOG2_E, table.shape[1] - 1, table.shape[1] * page_size,
            *q.stride()[:2], 0, head_dim, 0, head_dim, *part.stride()[:3], table.stride(0),
            GROUP=num_q_heads // num_kv_heads, D=head_dim, PAGE_SIZE=page_size, TPP=triton.cdiv(page_size, tile), TILE=tile,
            BLOCK_M=64, ROW_TILES=1, STAGES=stages, OVERLAP=overlap, num_warps=4,
        )  # fmt: skip
        verify_merge_kernel[(len(table), q_len, num_q_heads)](
            part, out, lse, starts, num_splits, *part.stride()[:3], *out.stride()[:2], lse.stride(0),
            HEAD_DIM=head_dim, HEAD_DIM_PAD=head_dim, SPLITS_PAD=splits_pad, SPLIT_TILE=min(16, splits_pad),
        )  # fmt: skip

    return run


def time_us(run, repeats=40):
    """Median microseconds of a graph replay after the L2 cache was filled with clean lines of something else."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    other = torch.zeros(2**26, device="cuda")
    times = []
    for _ in range(repeats):
        other.sum()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def compare(num_reqs, q_len, seq_len, num_splits, page_size=880, heads=(24, 4), head_dim=256):
    pages = triton.cdiv(seq_len, page_size)
    shape = (num_reqs * pages + 3, page_size, heads[1], head_dim)
    k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    table = torch.randperm(len(k), device="cuda")[: num_reqs * pages].view(num_reqs, pages).int()
    seq_lens = torch.full((num_reqs,), seq_len, device="cuda", dtype=torch.int32)
    starts = torch.arange(0, num_reqs * q_len + 1, q_len, device="cuda", dtype=torch.int32)
    q = torch.randn(num_reqs * q_len, heads[0], head_dim, device="cuda").bfloat16()
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    plain = lambda: verify_attention(q, k, v, table, seq_lens, starts, max_seqlen_q=q_len)  # noqa: E731
    sketch = launcher(q, k, v, table, seq_lens, starts, q_len, out, lse, num_splits)
    sketch()
    difference = (out.float() - plain().float()).abs().max().item()
    print(
        f"B{num_reqs} q{q_len} kv{seq_len}: plain {time_us(plain):.1f} us, sketch {time_us(sketch):.1f} us, differ by {difference:.1e}"
    )


if __name__ == "__main__":
    compare(1, 4, 8_192, 33)
    compare(1, 4, 32_768, 33)
    compare(1, 8, 131_072, 33)
    compare(16, 8, 32_768, 2)
    compare(1, 8, 2**20, 33)
