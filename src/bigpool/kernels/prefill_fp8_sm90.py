"""Prefill attention in 8 bits throughout for Hopper, in Gluon: int8 scores, fp8 weights and values.

A warp copies tiles by TMA, two warpgroups of 64 rows each multiply, as in prefill_sm90.py. The sums of a tile are taken by
themselves, 64 columns at a time, two of them under way, and added to the others in fp32 with the factor of a new maximum: the
two-level accumulation costs nothing beside the rescaling. Weights stay where the scores were: within 16 keys the codes of V are
in the order of OPERAND_ORDER of prefill_values.py, so that a thread's four neighbouring scores are four neighbouring bytes of
the first operand.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ._logits import LN2
from ._prefill_feed_sm90 import _load_scales
from .prefill_sm90 import (
    LOWEST,
    _first_scratch_row,
    _load_queries,
    _make_bars,
    _tiles_of_rows,
    _visible,
    _weights,
)


@gluon.jit
def _clean_codes(v_tile, seen, poison, bad_smem, bar, phase, CFG: gl.constexpr, KEY: gl.constexpr):
    """`_clean` of prefill_sm90.py for a tile [head_dim, 64] of codes."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    worst = gl.full([32, 64], 0, gl.uint8, L)
    for part in gl.static_range(CFG.head_dim // 32):
        worst = gl.maximum(worst, v_tile.slice(32 * part, 32, 0).load(L).to(gl.uint8, bitcast=True) & 0x7F)
    bad = gl.max(gl.where(worst == 0x7F, 1, 0), 0)
    bad_smem.store(bad.reshape([4, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([64]))
    gl.thread_barrier()
    sees_bad = gl.max(gl.where(seen & (bad_smem.load(KEY) > 0)[None, :], 1, 0), 1)
    mbarrier.arrive(bar)
    mbarrier.wait(bar, phase)
    for part in gl.static_range(CFG.head_dim // 32):
        rows = v_tile.slice(32 * part, 32, 0)
        raw = rows.load(L).to(gl.uint8, bitcast=True)
        rows.store(gl.where((raw & 0x7F) == 0x7F, 0, raw).to(gl.uint8).to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    gl.thread_barrier()
    return gl.where(sees_bad > 0, float("nan"), poison)


@gluon.jit
def _as_operand(p, P_L: gl.constexpr):
    """Weights [64, 64], times 256, as the first operand of a product of fp8: nothing moves between threads."""
    p = (p * 256.0).to(gl.float8e4nv)
    p = p.reshape([64, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, 64])
    return gl.convert_layout(p, P_L, assert_trivial=True)


@gluon.jit
def _begin_part(p, v_tile, PART: gl.constexpr, zero):
    v = v_tile.slice(64 * PART, 64, 0).permute((1, 0))
    return warpgroup_mma(p, v, zero, use_acc=False, max_num_imprecise_acc=64, is_async=True)


@gluon.jit
def _add_parts(accs, p, v_tile, factor, zero, PARTS: gl.constexpr):
    """Sums times `factor` plus the products of a tile, but for the last part, whose product comes with them."""
    done = ()
    running = _begin_part(p, v_tile, 0, zero)
    for part in gl.static_range(1, PARTS):
        following = _begin_part(p, v_tile, part, zero)
        running = warpgroup_mma_wait(1, deps=[running])
        done = done + (accs[part - 1] * factor + running,)  # noqa: RUF005 (Triton cannot unpack)
        running = following
    return done, warpgroup_mma_wait(0, deps=[running])


@gluon.jit
def _attend(
    WG: gl.constexpr, q_ptr, out_ptr, lse_ptr, mean_ptr, v_scale_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    clean_bar, bad_smem, row_smem, k_scale_smem, scale_log2,
    row0, token0, q_len, seq_len, fits, kv_head, num_kv_heads, begin, full_begin, full_end, end,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, CFG: gl.constexpr,
):  # fmt: skip
    """Rows 64 WG to 64 WG + 63 of a program."""
    GROUP: gl.constexpr = CFG.group
    PARTS: gl.constexpr = CFG.head_dim // 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    KEY: gl.constexpr = gl.SliceLayout(0, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(0, S_L, 4)
    head0 = kv_head.to(gl.int64) * GROUP
    q_smem = q_tiles.index(WG)
    _load_queries(
        q_ptr, q_smem, row_smem.index(2 * WG), row_smem.index(2 * WG + 1), row0 + WG * 64, token0, head0, q_len, scale_log2,
        mean_ptr, stride_q_token, stride_q_head, CFG,
    )  # fmt: skip
    scale = row_smem.index(2 * WG).load(ROW)
    row_shift = row_smem.index(2 * WG + 1).load(ROW)
    q_pos = seq_len - q_len + (row0 + WG * 64 + gl.arange(0, 64, layout=ROW)) // GROUP
    m = gl.full([64], LOWEST, gl.float32, ROW)
    poison = gl.full([64], 0.0, gl.float32, ROW) + gl.where(fits, 0.0, float("nan"))
    zero = gl.full([64, 64], 0.0, gl.float32, S_L)
    zero_s = gl.full([64, 64], 0, gl.int32, S_L)
    accs = (zero, zero)
    if PARTS == 4:
        accs = (zero, zero, zero, zero)
    l = gl.sum(gl.sum(zero.reshape([64, 8, 4, 2]), 3), 1)
    edges = 0
    for tile in range(begin, end):
        i = tile - begin
        ks = i % CFG.k_stages
        vs = i % CFG.v_stages
        edge = (tile < full_begin) | (tile >= full_end)
        v_tile = v_tiles.index(vs)
        if edge:
            mbarrier.wait(v_full.index(vs), (i // CFG.v_stages) & 1)
            seen = _visible(tile, q_pos, seq_len, CFG, KEY)
            poison = _clean_codes(v_tile, seen, poison, bad_smem.index(WG), clean_bar, edges & 1, CFG, KEY)
            edges += 1
        mbarrier.wait(k_full.index(ks), (i // CFG.k_stages) & 1)
        s = warpgroup_mma(q_smem, k_tiles.index(ks).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        p32, alpha, m, l = _weights(s, m, l, scale, row_shift, k_scale_smem.index(ks), tile, edge, q_pos, seq_len, CFG, S_L)
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(ks))
        mbarrier.wait(v_full.index(vs), (i // CFG.v_stages) & 1)
        factor = alpha[:, None]
        done, last = _add_parts(accs, _as_operand(p32, P_L), v_tile, factor, zero, PARTS)
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(vs))
        accs = done + (accs[PARTS - 1] * factor + last,)  # noqa: RUF005

    l = gl.convert_layout(gl.sum(l, 1), ROW)
    m = gl.where(l == 0.0, float("-inf"), m)
    l = gl.where(l == 0.0, 1.0, l)
    r = row0 + WG * 64 + gl.arange(0, 64, layout=ROW)
    ok = r // GROUP < q_len
    token = token0 + r // GROUP
    head = head0 + r % GROUP
    top = m if CFG.softcap != 0.0 else m * scale + row_shift
    gl.store(lse_ptr + token * (num_kv_heads * GROUP) + head, (top + gl.log2(l)) * LN2 + poison, mask=ok)
    norm = (1.0 / l + poison) * (1.0 / 256.0)
    row_ptrs = out_ptr + token * stride_out_token + head * stride_out_head
    for part in gl.static_range(PARTS):
        cols = 64 * part + gl.arange(0, 64, layout=KEY)
        out = accs[part] * norm[:, None] * gl.load(v_scale_ptr + cols)[None, :]
        gl.store(row_ptrs[:, None] + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=ok[:, None])


@gluon.jit
def _produce(
    k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, begin, end, kv_head, seq_len,
    k_scale_ptr, k_scale_smem, first_row, first_tile, stride_scale, CFG: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of a program, which lie in scratch one after another."""
    KEYS: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    NBYTES: gl.constexpr = 64 * CFG.head_dim
    scales = _load_scales(k_scale_ptr, begin, seq_len, KEYS, stride_scale, CFG)
    for tile in range(begin, end):
        i = tile - begin
        ks = i % CFG.k_stages
        vs = i % CFG.v_stages
        if CFG.tiles_per_page == 0:
            pos = tile * 64
        else:
            pos = tile // CFG.tiles_per_page * CFG.page_size + tile % CFG.tiles_per_page * 64
        mbarrier.wait(k_empty.index(ks), ((i // CFG.k_stages) & 1) ^ 1)
        bar = k_full.index(ks)
        mbarrier.expect(bar, NBYTES)
        tma.async_copy_global_to_shared(k_desc, [0, kv_head, 0, first_row + pos, 0], bar, k_boxes.index(ks))
        k_scale_smem.index(ks).store(scales)
        gl.thread_barrier()
        mbarrier.arrive(bar)
        scales = _load_scales(k_scale_ptr, tile + 1, seq_len, KEYS, stride_scale, CFG)
        mbarrier.wait(v_empty.index(vs), ((i // CFG.v_stages) & 1) ^ 1)
        bar = v_full.index(vs)
        mbarrier.expect(bar, NBYTES)
        tma.async_copy_global_to_shared(v_desc, [first_tile + tile, kv_head, 0, 0], bar, v_boxes.index(vs))


@gluon.jit(do_not_specialize=["max_seq_len", "max_keys"])
def prefill_fp8_sm90_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, seq_lens_ptr, cu_seqlens_q_ptr, k_scale_ptr, k_mean_ptr, v_scale_ptr,
    scale_log2, max_seq_len, max_keys, stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    CFG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (row tiles of 128, num_kv_heads, num_reqs), the longest row tiles first. lse is contiguous. K and V: scratch of
    prefill_keys.py and prefill_values.py. CFG: a bigpool.ops._prefill_sm90.PrefillSm90Shape."""
    D: gl.constexpr = CFG.head_dim
    req = gl.program_id(2).to(gl.int64)
    kv_head = gl.program_id(1)
    num_kv_heads = gl.num_programs(1)
    row0 = (gl.num_programs(0) - 1 - gl.program_id(0)) * 128
    q_start, q_len, seq_len, begin, full_begin, full_end, end = _tiles_of_rows(
        req, row0, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len, CFG
    )
    first_row = _first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
    first_tile = first_row // 64 + req
    if CFG.tiles_per_page != 0:
        first_tile = first_row * CFG.tiles_per_page // CFG.page_size + req
    fits = first_row + seq_len <= max_keys
    end = gl.where(fits, end, begin)

    k_box: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=5)
    k_flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    v_box: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=4)
    v_flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_boxes = gl.allocate_shared_memory(gl.int8, [CFG.k_stages, 1, 1, D // 128, 64, 128], k_box)
    v_boxes = gl.allocate_shared_memory(gl.float8e4nv, [CFG.v_stages, 1, 1, D, 64], v_box)
    k_tiles = k_boxes._reinterpret(gl.int8, [CFG.k_stages, 64, D], k_flat)
    v_tiles = v_boxes._reinterpret(gl.float8e4nv, [CFG.v_stages, D, 64], v_flat)
    q_tiles = gl.allocate_shared_memory(gl.int8, [2, 64, D], k_flat)
    bad_smem = gl.allocate_shared_memory(gl.int32, [2, 64], line)
    row_smem = gl.allocate_shared_memory(gl.float32, [4, 64], line)
    k_scale_smem = gl.allocate_shared_memory(gl.float32, [CFG.k_stages, 64], line)
    k_full = _make_bars(CFG.k_stages, 2)
    v_full = _make_bars(CFG.v_stages, 1)
    k_empty = _make_bars(CFG.k_stages, 2)
    v_empty = _make_bars(CFG.v_stages, 2)
    clean_bar = _make_bars(1, 2).index(0)
    fence_async_shared()
    gl.thread_barrier()
    token0 = q_start.to(gl.int64)
    mean_ptr = k_mean_ptr + (req * num_kv_heads + kv_head) * D
    v_scales_ptr = v_scale_ptr + (req * num_kv_heads + kv_head) * D
    scales_ptr = k_scale_ptr + first_row * num_kv_heads + kv_head
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (0, q_ptr, out_ptr, lse_ptr, mean_ptr, v_scales_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty,
                       v_full, v_empty, clean_bar, bad_smem, row_smem, k_scale_smem, scale_log2, row0, token0, q_len,
                       seq_len, fits, kv_head, num_kv_heads, begin, full_begin, full_end, end,
                       stride_q_token, stride_q_head, stride_out_token, stride_out_head, CFG)),
            (_attend, (1, q_ptr, out_ptr, lse_ptr, mean_ptr, v_scales_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty,
                       v_full, v_empty, clean_bar, bad_smem, row_smem, k_scale_smem, scale_log2, row0, token0, q_len,
                       seq_len, fits, kv_head, num_kv_heads, begin, full_begin, full_end, end,
                       stride_q_token, stride_q_head, stride_out_token, stride_out_head, CFG)),
            (_produce, (k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, begin, end, kv_head, seq_len,
                        scales_ptr, k_scale_smem, first_row.to(gl.int32), first_tile.to(gl.int32), num_kv_heads, CFG)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
