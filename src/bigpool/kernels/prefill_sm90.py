"""Prefill attention for Hopper, in Gluon: a warp that copies tiles by TMA, and two warpgroups of 64 rows each that multiply.

Rows of a program are query tokens x query heads of one kv head, as in prefill.py. While the matrix units multiply the weights
of one tile with V, a warpgroup works out the weights of the next. TMA forms the 64-bit address of a page; slots past the end of
a page read as zero, and so does V outside the pool, where K reads as NaN. CFG is a bigpool.ops._prefill_sm90.PrefillSm90Shape.

int8: codes, scales and means as prefill_keys.py leaves them in scratch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ._logits import LN2, LOG2_E, SMALL
from ._prefill_feed_sm90 import produce
from .cache import MIN_SCALE, ROUND

LOWEST = gl.constexpr(-1e30)


@gluon.jit
def _make_bars(N: gl.constexpr, COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def _visible(tile, q_pos, seq_len, CFG: gl.constexpr, KEY: gl.constexpr):
    """[64, tile]: which keys of a tile the rows at positions q_pos see."""
    offs = gl.arange(0, CFG.tile, layout=KEY)
    if CFG.tiles_per_page == 0:
        pos = tile * CFG.tile + offs
        is_key = pos < seq_len
    else:
        slot = tile % CFG.tiles_per_page * CFG.tile + offs
        pos = tile // CFG.tiles_per_page * CFG.page_size + slot
        is_key = (slot < CFG.page_size) & (pos < seq_len)
    seen = is_key[None, :] & (q_pos == q_pos)[:, None]
    if CFG.causal:
        seen = seen & (pos[None, :] <= q_pos[:, None])
    if CFG.window:
        seen = seen & (pos[None, :] >= gl.maximum(gl.maximum(q_pos, 0) - (CFG.window - 1), 0)[:, None])
    return seen


@gluon.jit
def _clean(v_tile, seen, poison, bad_smem, bar, phase, CFG: gl.constexpr, KEY: gl.constexpr):
    """0 * NaN is NaN: values that a row does not see must be finite, and what is not makes all of a row that sees it NaN."""
    D: gl.constexpr = CFG.head_dim
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for part in gl.static_range(CFG.tile // 16):
        raw = v_tile.slice(16 * part, 16, 0).load(L)
        finite = gl.abs(raw.to(gl.float32)) < float("inf")
        bad_smem.slice(16 * part, 16, 0).store(gl.max(gl.where(finite, 0, 1), 1))
    gl.thread_barrier()
    bad = bad_smem.load(KEY)
    sees_bad = gl.max(gl.where(seen & (bad > 0)[None, :], 1, 0), 1)
    mbarrier.arrive(bar)
    mbarrier.wait(bar, phase)
    for part in gl.static_range(CFG.tile // 16):
        rows = v_tile.slice(16 * part, 16, 0)
        raw = rows.load(L)
        rows.store(gl.where(gl.abs(raw.to(gl.float32)) < float("inf"), raw, 0.0))
    fence_async_shared()
    gl.thread_barrier()
    return gl.where(sees_bad > 0, float("nan"), poison)


@gluon.jit
def _tanh_of(y, twice):
    """`tanh_of` of _logits.py."""
    z = y * y
    series = y + y * z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315)))
    return gl.where(gl.abs(y) < SMALL, series, 1.0 - 2.0 / (1.0 + twice))


@gluon.jit
def _weights(s, m, l, scale, row_shift, k_scale_smem, tile, edge, q_pos, seq_len, CFG: gl.constexpr, S_L: gl.constexpr):
    """(p, alpha, m, l) after one more tile of raw scores; l stays spread over the four threads of a row."""
    KEY: gl.constexpr = gl.SliceLayout(0, S_L)
    if CFG.int8:
        s = s.to(gl.float32) * k_scale_smem.load(KEY)[None, :]
    if CFG.softcap != 0.0:
        s = s * (scale * (2.0 / CFG.softcap))[:, None]
        if CFG.int8:
            s += (row_shift * (2.0 / CFG.softcap))[:, None]
        s = (CFG.softcap * LOG2_E) * _tanh_of(s * (0.5 / LOG2_E), gl.exp2(s))
        scale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, S_L))
    ENDS: gl.constexpr = CFG.tiles_per_page != 0 and CFG.page_size % CFG.tile != 0
    if ENDS:
        is_last = tile % CFG.tiles_per_page == CFG.tiles_per_page - 1
        if is_last:
            s = gl.where((gl.arange(0, CFG.tile, layout=KEY) < CFG.page_size % CFG.tile)[None, :], s, float("-inf"))
    if edge:
        s = gl.where(_visible(tile, q_pos, seq_len, CFG, KEY), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - m_new) * scale)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None]
    p = gl.exp2(s * scale[:, None] - (m_new * scale)[:, None])
    l = l + gl.sum(gl.sum(p.reshape([64, CFG.tile // 8, 4, 2]), 3), 1)
    return p, alpha, m_new, l


@gluon.jit
def _load_queries(
    q_ptr, q_smem, factor_smem, shift_smem, first, token0, head0, q_len, scale_log2, mean_ptr,
    stride_q_token, stride_q_head, CFG: gl.constexpr,
):  # fmt: skip
    """64 rows of queries to shared memory; int8: their codes, and the factor and the shift of each row's scores."""
    D: gl.constexpr = CFG.head_dim
    Q_L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, Q_L))
    if CFG.int8:
        mean = gl.load(mean_ptr + cols)
    for part in gl.static_range(4):
        r = first + part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, Q_L))
        ptrs = q_ptr + (token0 + r // CFG.group) * stride_q_token + (head0 + r % CFG.group) * stride_q_head
        q = gl.load(ptrs[:, None] + cols[None, :], mask=(r // CFG.group < q_len)[:, None], other=0.0)
        if CFG.int8:
            x = q.to(gl.float32)
            shift_smem.slice(16 * part, 16, 0).store(gl.sum(x * mean[None, :], 1) * scale_log2)
            bad = gl.max(gl.where(gl.abs(x) < float("inf"), 0, 1), 1) > 0
            x = gl.where(bad[:, None], 0.0, x)
            top = gl.max(gl.abs(x), 1)
            unit = gl.maximum(_div(top, gl.full([16], 127.0, gl.float32, gl.SliceLayout(1, Q_L))), MIN_SCALE)
            unit = gl.where(top == 0.0, 1.0, unit)
            x, wide = gl.broadcast(x, unit[:, None])
            codes = (_div(x, wide) + ROUND) - ROUND
            q_smem.slice(16 * part, 16, 0).store(codes.to(gl.int8))
            factor_smem.slice(16 * part, 16, 0).store(gl.where(bad, float("nan"), unit) * scale_log2)
        else:
            q_smem.slice(16 * part, 16, 0).store(q)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _div(a, b):
    return gl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _attend(
    WG: gl.constexpr, q_ptr, out_ptr, lse_ptr, mean_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    clean_bar, bad_smem, row_smem, k_scale_smem, scale_log2,
    row0, token0, q_len, seq_len, fits, kv_head, num_kv_heads, begin, full_begin, full_end, end,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, CFG: gl.constexpr,
):  # fmt: skip
    """Rows 64 WG to 64 WG + 63 of a program."""
    D: gl.constexpr = CFG.head_dim
    GROUP: gl.constexpr = CFG.group
    DT: gl.constexpr = v_tiles.dtype
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CFG.tile, 32 if CFG.int8 else 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_L)
    KEY: gl.constexpr = gl.SliceLayout(0, S_L)
    P_L: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    head0 = kv_head.to(gl.int64) * GROUP
    q_smem = q_tiles.index(WG)
    _load_queries(
        q_ptr, q_smem, row_smem.index(2 * WG), row_smem.index(2 * WG + 1), row0 + WG * 64, token0, head0, q_len, scale_log2,
        mean_ptr, stride_q_token, stride_q_head, CFG,
    )  # fmt: skip
    row_shift = gl.full([64], 0.0, gl.float32, ROW)
    scale = gl.full([64], 0.0, gl.float32, ROW) + scale_log2
    if CFG.int8:
        scale = row_smem.index(2 * WG).load(ROW)
        row_shift = row_smem.index(2 * WG + 1).load(ROW)
    q_pos = seq_len - q_len + (row0 + WG * 64 + gl.arange(0, 64, layout=ROW)) // GROUP
    m = gl.full([64], LOWEST, gl.float32, ROW)
    poison = gl.full([64], 0.0, gl.float32, ROW) + gl.where(fits, 0.0, float("nan"))
    zero = gl.full([64, CFG.tile], 0.0, gl.float32, S_L)
    zero_s = gl.full([64, CFG.tile], 0, gl.int32, S_L) if CFG.int8 else zero
    acc = gl.full([64, D], 0.0, gl.float32, O_L)
    l = gl.sum(gl.sum(zero.reshape([64, CFG.tile // 8, 4, 2]), 3), 1)
    edges = 0
    p = zero.to(DT)
    if begin < end:
        mbarrier.wait(k_full.index(0), 0)
        s = warpgroup_mma(q_smem, k_tiles.index(0).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        edge = (begin < full_begin) | (begin >= full_end)
        p32, alpha, m, l = _weights(s, m, l, scale, row_shift, k_scale_smem.index(0), begin, edge, q_pos, seq_len, CFG, S_L)
        p = p32.to(DT)
        gl.thread_barrier()
        mbarrier.arrive(k_empty.index(0))
        mbarrier.wait(k_full.index(1 % CFG.k_stages), (1 // CFG.k_stages) & 1, pred=begin + 1 < end)
    for tile in range(begin + 1, end):
        i = tile - begin
        ks = i % CFG.k_stages
        vs = (i - 1) % CFG.v_stages
        edge = (tile < full_begin) | (tile >= full_end)
        was_edge = (tile - 1 < full_begin) | (tile - 1 >= full_end)
        pb = gl.convert_layout(p, P_L)
        if was_edge:
            mbarrier.wait(v_full.index(vs), ((i - 1) // CFG.v_stages) & 1)
            seen = _visible(tile - 1, q_pos, seq_len, CFG, KEY)
            poison = _clean(v_tiles.index(vs), seen, poison, bad_smem.index(WG), clean_bar, edges & 1, CFG, KEY)
            edges += 1
        s = warpgroup_mma(q_smem, k_tiles.index(ks).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(vs), ((i - 1) // CFG.v_stages) & 1)
        acc = warpgroup_mma(pb, v_tiles.index(vs), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if not CFG.int8:
            gl.thread_barrier()
            mbarrier.arrive(k_empty.index(ks))
        p32, alpha, m, l = _weights(s, m, l, scale, row_shift, k_scale_smem.index(ks), tile, edge, q_pos, seq_len, CFG, S_L)
        # A wait for memory is a block of its own, which keeps the exponentials above the wait for the product.
        mbarrier.wait(k_full.index((i + 1) % CFG.k_stages), ((i + 1) // CFG.k_stages) & 1, pred=tile + 1 < end)
        acc, pb, p = warpgroup_mma_wait(0, deps=[acc, pb, p32.to(DT)])
        gl.thread_barrier()
        mbarrier.arrive(v_empty.index(vs))
        if CFG.int8:
            mbarrier.arrive(k_empty.index(ks))
        acc = acc * gl.convert_layout(alpha, ROW_O)[:, None]
    if begin < end:
        last = end - 1 - begin
        vs = last % CFG.v_stages
        mbarrier.wait(v_full.index(vs), (last // CFG.v_stages) & 1)
        if (end - 1 < full_begin) | (end - 1 >= full_end):
            seen = _visible(end - 1, q_pos, seq_len, CFG, KEY)
            poison = _clean(v_tiles.index(vs), seen, poison, bad_smem.index(WG), clean_bar, edges & 1, CFG, KEY)
        pb = gl.convert_layout(p, P_L)
        acc = warpgroup_mma(pb, v_tiles.index(vs), acc, is_async=True)
        acc, pb = warpgroup_mma_wait(0, deps=[acc, pb])

    l = gl.convert_layout(gl.sum(l, 1), ROW)
    m = gl.where(l == 0.0, float("-inf"), m)
    l = gl.where(l == 0.0, 1.0, l)
    r = row0 + WG * 64 + gl.arange(0, 64, layout=ROW)
    ok = r // GROUP < q_len
    token = token0 + r // GROUP
    head = head0 + r % GROUP
    top = m if CFG.softcap != 0.0 else m * scale + row_shift
    gl.store(lse_ptr + token * (num_kv_heads * GROUP) + head, (top + gl.log2(l)) * LN2 + poison, mask=ok)
    norm = gl.convert_layout(1.0 / l + poison, ROW_O)
    ro = row0 + WG * 64 + gl.arange(0, 64, layout=ROW_O)
    ptrs = out_ptr + (token0 + ro // GROUP) * stride_out_token + (head0 + ro % GROUP) * stride_out_head
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, O_L))
    gl.store(ptrs[:, None] + cols[None, :], (acc * norm[:, None]).to(DT), mask=(ro // GROUP < q_len)[:, None])


@gluon.jit
def _tiles_before(pos, CFG: gl.constexpr):
    if CFG.tiles_per_page == 0:
        tiles = gl.cdiv(pos, CFG.tile)
    else:
        tiles = pos // CFG.page_size * CFG.tiles_per_page + gl.cdiv(pos % CFG.page_size, CFG.tile)
    return tiles


@gluon.jit
def _tile_of(pos, CFG: gl.constexpr):
    if CFG.tiles_per_page == 0:
        tile = pos // CFG.tile
    else:
        tile = pos // CFG.page_size * CFG.tiles_per_page + pos % CFG.page_size // CFG.tile
    return tile


@gluon.jit
def _tiles_of_rows(req, row0, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len, CFG: gl.constexpr):
    """(first query token, q_len, seq_len) of a request, and of 128 rows from row0 on the first tile, the tiles from full_begin to
    full_end that all of them see whole, and the tile after the last."""
    q_start = gl.load(cu_seqlens_q_ptr + req)
    seq_len = gl.load(seq_lens_ptr + req)
    q_len = gl.where(seq_len < 0, 0, gl.load(cu_seqlens_q_ptr + req + 1) - q_start)
    seq_len = gl.maximum(gl.minimum(seq_len, max_seq_len), 0)
    first_pos = seq_len - q_len + row0 // CFG.group
    last_pos = seq_len - q_len + gl.minimum((row0 + 127) // CFG.group, q_len - 1)
    kv_end = seq_len
    clear_end = seq_len
    if CFG.causal:
        kv_end = gl.maximum(last_pos + 1, 0)
        clear_end = gl.maximum(first_pos + 1, 0)
    end = _tiles_before(kv_end, CFG)
    begin = 0
    full_begin = 0
    if CFG.window:
        begin = gl.minimum(_tile_of(gl.maximum(gl.maximum(first_pos, 0) - (CFG.window - 1), 0), CFG), end)
        full_begin = _tiles_before(gl.maximum(gl.maximum(last_pos, 0) - (CFG.window - 1), 0), CFG)
    full_end = _tile_of(clear_end, CFG)
    if row0 // CFG.group >= q_len:
        end = begin
    return q_start, q_len, seq_len, begin, full_begin, full_end, end


@gluon.jit
def _first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len):
    """The scratch row, int64 as `req` is, of a request's first key: the keys of the requests before that have query tokens."""
    offs = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    row = req * 0
    for before in range(0, req, 128):
        other = before + offs
        mask = other < req
        q_len = gl.load(cu_seqlens_q_ptr + other + 1, mask=mask, other=0) - gl.load(cu_seqlens_q_ptr + other, mask=mask, other=0)
        keys = gl.load(seq_lens_ptr + other, mask=mask, other=0).to(gl.int64)
        row += gl.sum(gl.where(q_len > 0, gl.maximum(gl.minimum(keys, max_seq_len), 0), 0), 0)
    return row


@gluon.jit(do_not_specialize=["max_seq_len", "max_keys", "stride_table_req"])
def prefill_sm90_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr, k_scale_ptr, k_mean_ptr,
    scale_log2, max_seq_len, max_keys,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head, stride_table_req,
    CFG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (row tiles of 128, num_kv_heads, num_reqs), the longest row tiles first. lse is contiguous."""
    D: gl.constexpr = CFG.head_dim
    TILE: gl.constexpr = CFG.tile
    PARTS: gl.constexpr = D // 64
    BOXES: gl.constexpr = TILE // CFG.box
    req = gl.program_id(2).to(gl.int64)
    kv_head = gl.program_id(1)
    row0 = (gl.num_programs(0) - 1 - gl.program_id(0)) * 128
    q_start, q_len, seq_len, begin, full_begin, full_end, end = _tiles_of_rows(
        req, row0, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len, CFG
    )
    table_row_ptr = block_table_ptr + req * stride_table_req

    num_kv_heads = gl.num_programs(1)
    first_row = req * 0
    fits = seq_len >= 0
    if CFG.int8:
        first_row = _first_scratch_row(req, seq_lens_ptr, cu_seqlens_q_ptr, max_seq_len)
        fits = first_row + seq_len <= max_keys
        end = gl.where(fits, end, begin)

    dt: gl.constexpr = v_desc.dtype
    K_BITS: gl.constexpr = 8 if CFG.int8 else 16
    K_WIDTH: gl.constexpr = 1024 // K_BITS
    box: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    k_box: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=K_BITS, rank=5)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=K_BITS, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if CFG.tiles_per_page == 0 and not CFG.int8:
        k_boxes = gl.allocate_shared_memory(k_desc.dtype, [CFG.k_stages * PARTS * BOXES, 1, 1, 1, CFG.box, 64], k_box)
    else:
        k_boxes = gl.allocate_shared_memory(k_desc.dtype, [CFG.k_stages, 1, 1, D // K_WIDTH, TILE, K_WIDTH], k_box)
    if CFG.tiles_per_page == 0:
        v_boxes = gl.allocate_shared_memory(dt, [CFG.v_stages * PARTS * BOXES, 1, 1, 1, CFG.box, 64], box)
    else:
        v_boxes = gl.allocate_shared_memory(dt, [CFG.v_stages, 1, 1, PARTS, TILE, 64], box)
    k_tiles = k_boxes._reinterpret(k_desc.dtype, [CFG.k_stages, TILE, D], k_flat)
    v_tiles = v_boxes._reinterpret(dt, [CFG.v_stages, TILE, D], flat)
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, 64, D], k_flat)
    bad_smem = gl.allocate_shared_memory(gl.int32, [2, TILE], line)
    row_smem = gl.allocate_shared_memory(gl.float32, [4, 64], line)
    k_scale_smem = gl.allocate_shared_memory(gl.float32, [CFG.k_stages, TILE], line)
    k_full = _make_bars(CFG.k_stages, 2 if CFG.int8 else 1)
    v_full = _make_bars(CFG.v_stages, 1)
    k_empty = _make_bars(CFG.k_stages, 2)
    v_empty = _make_bars(CFG.v_stages, 2)
    clean_bar = _make_bars(1, 2).index(0)
    fence_async_shared()
    gl.thread_barrier()
    token0 = q_start.to(gl.int64)
    mean_ptr = k_mean_ptr + (req * num_kv_heads + kv_head) * D
    scales_ptr = k_scale_ptr + first_row * num_kv_heads + kv_head
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (0, q_ptr, out_ptr, lse_ptr, mean_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                       clean_bar, bad_smem, row_smem, k_scale_smem, scale_log2, row0, token0, q_len, seq_len, fits, kv_head,
                       num_kv_heads, begin, full_begin, full_end, end,
                       stride_q_token, stride_q_head, stride_out_token, stride_out_head, CFG)),
            (_attend, (1, q_ptr, out_ptr, lse_ptr, mean_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
                       clean_bar, bad_smem, row_smem, k_scale_smem, scale_log2, row0, token0, q_len, seq_len, fits, kv_head,
                       num_kv_heads, begin, full_begin, full_end, end,
                       stride_q_token, stride_q_head, stride_out_token, stride_out_head, CFG)),
            (produce, (k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, table_row_ptr, begin, end, kv_head,
                        seq_len, scales_ptr, k_scale_smem, first_row.to(gl.int32), num_kv_heads, CFG)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
