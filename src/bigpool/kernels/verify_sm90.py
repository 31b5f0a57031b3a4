"""The split-KV partial of verify attention for Hopper, in Gluon: K and V through TMA, both products transposed.

S^T = K Q^T and O^T = V^T P^T: the few rows of queries are the narrow side of the products, and codes of a quantised cache become
the left operand in registers, so that a decoded tile is never written back. TMA forms the 64-bit address of a page; slots past
the end of a page, and pages outside the pool, read as zero. Scratch is written as in verify.py.

The running maximum is left alone until a score passes it by more than 8 (in units of log2): weights stay below 256, which
fp16 holds.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ._formats_sm90 import MIN_SCALE, inverse_approx, log2_approx
from ._tiles_sm90 import add_values, clean_values, scores

LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)


@gluon.jit
def _copy_tile(desc, boxes, bars, page, kv_head, slot, stage, pred, NBYTES: gl.constexpr):
    bar = bars.index(stage)
    mbarrier.expect(bar, NBYTES, pred=pred)
    tma.async_copy_global_to_shared(desc, [page, kv_head, 0, slot, 0], bar, boxes.index(stage), pred=pred)


@gluon.jit
def load_queries(
    q_ptr, offs, mask, scale_log2, q_smem, factor_smem, sum_smem,
    CFG: gl.constexpr, WIDTH: gl.constexpr, ORDERED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Queries to shared memory, `WIDTH` columns at a time; the factor of each row's scores, and the sum of each row.

    Quantised caches meet fp16 queries, or integer ones in digits of 7 bits: a row is multiplied by a power of two that makes its
    largest value 2^12 to 2^13, or fill the digits. `ORDERED`: columns in the order in which registers hold those of K.
    """
    DIGITS: gl.constexpr = CFG.digits
    PARTS: gl.constexpr = CFG.head_dim // WIDTH
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [num_warps, 1], [1, 0])
    cols = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    ptrs = q_ptr + offs[:, None]
    if CFG.kv_format == "plain":
        for part in gl.static_range(PARTS):
            q_smem.index(part).store(gl.load(ptrs + (WIDTH * part + cols)[None, :], mask=mask[:, None], other=0.0))
        factor_smem.store(gl.full([CFG.rows], scale_log2, gl.float32, gl.SliceLayout(1, layout)))
    else:
        LARGEST: gl.constexpr = 2.0 ** (7 * DIGITS) if DIGITS > 0 else 8192.0
        top = gl.full([CFG.rows], 0.0, gl.float32, gl.SliceLayout(1, layout))
        bad = gl.full([CFG.rows], 0, gl.int32, gl.SliceLayout(1, layout))
        for part in gl.static_range(PARTS):
            q = gl.load(ptrs + (WIDTH * part + cols)[None, :], mask=mask[:, None], other=0.0).to(gl.float32)
            top = gl.maximum(top, gl.max(gl.abs(q), 1))
            bad = gl.maximum(bad, gl.max(gl.where(gl.abs(q) < float("inf"), 0, 1), 1))
        unit = (gl.maximum(top, MIN_SCALE).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        factor_smem.store(gl.where(bad > 0, float("nan"), unit * (scale_log2 / (LARGEST / 2))))
        if ORDERED and CFG.kv_format == "int4":
            # Bits 0, 1, ... of the contraction index are bits 0, 1, 5, 6, 2, 3, 4 of the column.
            cols = (cols & 3) | ((cols & 12) << 3) | ((cols & 112) >> 2)
        elif ORDERED and DIGITS == 0:
            # Bits 0, 5, 6, 1, 2, 3, 4.
            cols = (cols & 1) | ((cols & 6) << 4) | ((cols & 120) >> 2)
        total = gl.full([CFG.rows], 0.0, gl.float32, gl.SliceLayout(1, layout))
        for part in gl.static_range(PARTS):
            q = gl.load(ptrs + (WIDTH * part + cols)[None, :], mask=mask[:, None], other=0.0).to(gl.float32)
            q = q * ((LARGEST / 2) / unit)[:, None]
            if DIGITS > 0:
                q = gl.minimum(gl.floor(q + 0.5), LARGEST - 1)
                total += gl.sum(q, 1)
                for digit in gl.static_range(DIGITS):
                    value = q.to(gl.int32) >> (7 * (DIGITS - 1 - digit))
                    q_smem.index(digit * PARTS + part).store((value & 127 if digit > 0 else value).to(gl.int8))
            else:
                q_smem.index(part).store(q.to(gl.float16))
        sum_smem.store(total)


@gluon.jit
def _store_rows(acc, ptrs, first, mask, CFG: gl.constexpr, LAYOUT: gl.constexpr, num_warps: gl.constexpr):
    """acc [dims, rows] to rows at `ptrs`, from dim `first` on."""
    DIMS: gl.constexpr = acc.shape[0]
    if CFG.kv_format != "plain":
        if num_warps == 4:
            acc = acc.reshape([2, 4, 2, 8, CFG.rows]).permute(1, 3, 0, 2, 4).reshape([DIMS, CFG.rows])
        elif CFG.kv_format == "int4":
            acc = acc.reshape([2, 2, 4, 2, 8, CFG.rows]).permute(1, 2, 4, 0, 3, 5).reshape([DIMS, CFG.rows])
        else:
            acc = acc.reshape([2, 8, 2, 8, CFG.rows]).permute(1, 3, 0, 2, 4).reshape([DIMS, CFG.rows])
    out = gl.convert_layout(acc.permute((1, 0)), LAYOUT)
    offs_d = first + gl.arange(0, DIMS, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(ptrs[:, None] + offs_d[None, :], out.to(ptrs.dtype.element_ty), mask=mask[:, None])


@gluon.jit
def _load_scale(head_ptr, page, slot, mask, stride_page, stride_slot):
    return gl.load(head_ptr + page.to(gl.int64) * stride_page + slot * stride_slot, mask=mask, other=1.0)


@gluon.jit
def _poison_rows(
    v_tile, x, is_edge, bad_smem, poison_smem,
    CFG: gl.constexpr, KEY: gl.constexpr, ROW: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """0 * NaN is NaN: values that a row does not see must be finite, and what is not makes all of a row that sees it NaN."""
    if is_edge:
        clean_values(v_tile, bad_smem, CFG, num_warps)
        sees_bad = gl.max(gl.where((bad_smem.load(KEY) > 0.0)[:, None] & (x != float("-inf")), 1, 0), 0)
        poison_smem.store(gl.where(sees_bad > 0, float("nan"), poison_smem.load(ROW)))


@gluon.jit(do_not_specialize=["max_page_col", "max_seq_len", "num_pages", "opaque_zero"])
def verify_partial_sm90_kernel(
    q_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, dest_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    scale_log2, max_page_col, max_seq_len, num_pages, opaque_zero,
    stride_q_token, stride_q_head,
    stride_k_scale_page, stride_k_scale_slot, stride_k_scale_head,
    stride_v_scale_page, stride_v_scale_slot, stride_v_scale_head,
    stride_dest_token, stride_dest_head, stride_dest_split,
    stride_lse_token, stride_table_req,
    CFG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (num_reqs, num_splits, num_kv_heads); `dest` and `lse` as in `verify_partial_kernel`. CFG: a Sm90Shape."""
    PLAIN: gl.constexpr = CFG.kv_format == "plain"
    TILE: gl.constexpr = CFG.tile
    ROWS: gl.constexpr = CFG.rows
    STAGES: gl.constexpr = CFG.stages
    GROUP: gl.constexpr = CFG.group
    PAGE_SIZE: gl.constexpr = CFG.page_size
    TILES_PER_PAGE: gl.constexpr = CFG.tiles_per_page
    COLS: gl.constexpr = CFG.head_dim // 2 if CFG.kv_format == "int4" else CFG.head_dim
    WIDTH: gl.constexpr = 64 if PLAIN else 128
    ITEM: gl.constexpr = 2 if PLAIN else 1
    NBYTES: gl.constexpr = TILE * COLS * ITEM
    DTYPE: gl.constexpr = k_desc.dtype if PLAIN else gl.float16
    req = gl.program_id(0).to(gl.int64)
    kv_head = gl.program_id(2)
    kv_head64 = kv_head.to(gl.int64)
    split = gl.program_id(1)
    num_splits = gl.num_programs(1)
    seq_len = gl.maximum(gl.minimum(gl.load(seq_lens_ptr + req), max_seq_len), 0)
    q_start = gl.load(cu_seqlens_q_ptr + req)
    q_len = gl.load(cu_seqlens_q_ptr + req + 1) - q_start
    if CFG.longest > 0:
        q_len = gl.where(q_len > CFG.longest, 0, q_len)
    token0 = q_start.to(gl.int64)
    last_idx = gl.minimum((ROWS - 1) // GROUP, q_len - 1)
    kv_end = gl.maximum(seq_len - q_len + last_idx + 1, 0)
    full_end = gl.maximum(seq_len - q_len + 1, 0)
    num_tiles = kv_end // PAGE_SIZE * TILES_PER_PAGE + gl.cdiv(kv_end % PAGE_SIZE, TILE)
    num_full = full_end // PAGE_SIZE * TILES_PER_PAGE + full_end % PAGE_SIZE // TILE
    tiles_per_split = gl.cdiv(num_tiles, num_splits)
    tile_begin = gl.minimum(split * tiles_per_split, num_tiles)
    tile_end = gl.minimum(tile_begin + tiles_per_split, num_tiles)
    if q_len <= 0:
        tile_end = tile_begin
    table_row_ptr = block_table_ptr + req * stride_table_req

    box: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * ITEM, rank=5)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * ITEM, rank=2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    Q_TYPE: gl.constexpr = gl.int8 if CFG.digits > 0 else gl.float16
    q_flat: gl.constexpr = flat if CFG.digits > 0 else half
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_boxes = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, COLS // WIDTH, TILE, WIDTH], box)
    v_boxes = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, COLS // WIDTH, TILE, WIDTH], box)
    v_tiles = v_boxes._reinterpret(k_desc.dtype, [STAGES, TILE, COLS], flat)
    if PLAIN:
        k_tiles = k_boxes._reinterpret(k_desc.dtype, [STAGES, TILE, COLS], flat)
        q_smem = gl.allocate_shared_memory(DTYPE, [1, ROWS, CFG.head_dim], half)
    else:
        k_tiles = k_boxes._reinterpret(k_desc.dtype, [STAGES * (COLS // 128), TILE, 128], flat)
        q_smem = gl.allocate_shared_memory(Q_TYPE, [max(CFG.digits, 1) * CFG.head_dim // 128, ROWS, 128], q_flat)
    k_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i_stage in gl.static_range(STAGES):
        mbarrier.init(k_bars.index(i_stage), count=1)
        mbarrier.init(v_bars.index(i_stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    for i_stage in gl.static_range(STAGES):
        tile = tile_begin + i_stage
        page = gl.load(table_row_ptr + gl.minimum(tile // TILES_PER_PAGE, max_page_col))
        slot0 = (tile % TILES_PER_PAGE) * TILE
        _copy_tile(k_desc, k_boxes, k_bars, page, kv_head, slot0, i_stage, tile < tile_end, NBYTES)
        _copy_tile(v_desc, v_boxes, v_bars, page, kv_head, slot0, i_stage, tile < tile_end, NBYTES)

    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // q_smem.shape[2], q_smem.shape[2] // 8], [num_warps, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, q_layout))
    q_offs = (token0 + row // GROUP) * stride_q_token + (kv_head64 * GROUP + row % GROUP) * stride_q_head
    factor_smem = gl.allocate_shared_memory(gl.float32, [ROWS], line)
    sum_smem = gl.allocate_shared_memory(gl.float32, [ROWS], line)
    poison_smem = gl.allocate_shared_memory(gl.float32, [ROWS], line)
    bad_smem = gl.allocate_shared_memory(gl.float32, [TILE], line)
    poison_smem.store(gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, q_layout)))
    if CFG.scales == "head":
        scale_log2 = scale_log2 * gl.load(k_scale_ptr + kv_head64 * stride_k_scale_head)
    Q_WIDTH: gl.constexpr = q_smem.shape[2]
    load_queries(q_ptr, q_offs, row // GROUP < q_len, scale_log2, q_smem, factor_smem, sum_smem, CFG, Q_WIDTH, True, num_warps)
    p_smem_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=2 * ROWS if ROWS < 64 else 128, element_bitwidth=16, rank=2
    )
    p_tiles = gl.allocate_shared_memory(DTYPE, [1, TILE, ROWS], p_smem_layout)
    fence_async_shared()
    gl.thread_barrier()
    _attend_tiles(
        k_desc, v_desc, k_boxes, v_boxes, k_tiles, v_tiles, k_bars, v_bars, q_smem, p_tiles,
        factor_smem, sum_smem, poison_smem, bad_smem,
        k_scale_ptr + kv_head64 * stride_k_scale_head, v_scale_ptr + kv_head64 * stride_v_scale_head,
        stride_k_scale_page, stride_k_scale_slot, stride_v_scale_page, stride_v_scale_slot,
        dest_ptr, lse_ptr, table_row_ptr, max_page_col, num_pages, opaque_zero,
        seq_len, q_len, kv_head, kv_head64 * GROUP, token0,
        split, num_splits, tile_begin, tile_end, num_full,
        stride_dest_token, stride_dest_head, stride_dest_split, stride_lse_token, CFG, DTYPE, NBYTES, num_warps,
    )  # fmt: skip


@gluon.jit
def _attend_tiles(
    k_desc, v_desc, k_boxes, v_boxes, k_tiles, v_tiles, k_bars, v_bars, q_smem, p_tiles,
    factor_smem, sum_smem, poison_smem, bad_smem,
    k_scale_head_ptr, v_scale_head_ptr, stride_k_scale_page, stride_k_scale_slot, stride_v_scale_page, stride_v_scale_slot,
    dest_ptr, lse_ptr, table_row_ptr, max_page_col, num_pages, opaque_zero,
    seq_len, q_len, kv_head, head0, token0,
    split, num_splits, tile_begin, tile_end, num_full,
    stride_dest_token, stride_dest_head, stride_dest_split, stride_lse_token,
    CFG: gl.constexpr, DTYPE: gl.constexpr, NBYTES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The loop over the tiles of a split, and the store of what it came to."""
    TILE: gl.constexpr = CFG.tile
    ROWS: gl.constexpr = CFG.rows
    STAGES: gl.constexpr = CFG.stages
    GROUP: gl.constexpr = CFG.group
    TILES_PER_PAGE: gl.constexpr = CFG.tiles_per_page
    SCALED: gl.constexpr = CFG.scales == "token_head"
    CAN_HOLD_NAN: gl.constexpr = CFG.kv_format != "int8" and CFG.kv_format != "int4"
    DIMS: gl.constexpr = CFG.head_dim if CFG.kv_format == "plain" else 32 * num_warps
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    KEY: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    offs_n = gl.arange(0, TILE, layout=KEY)
    factor = factor_smem.load(ROW)
    m = gl.full([ROWS], LOWEST, gl.float32, ROW)
    zero = gl.full([TILE, ROWS], 0.0, gl.float32, S_LAYOUT)
    # The softmax sum stays spread over threads: only the two keys of a thread are added up in the loop.
    l = gl.sum(zero.reshape([TILE // 16, 2, 8, ROWS]), 1)
    spread: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
    acc = (gl.full([DIMS, ROWS], 0.0, gl.float32, O_LAYOUT),)
    if CFG.head_dim > DIMS:
        acc = (acc[0], gl.full([DIMS, ROWS], 0.0, gl.float32, O_LAYOUT))
    v_shift = gl.full([ROWS], 0.0, gl.float32, ROW)
    page = gl.load(table_row_ptr + gl.minimum(tile_begin // TILES_PER_PAGE, max_page_col))
    k_scale = gl.full([TILE], 1.0, gl.float32, KEY)
    v_scale = gl.full([TILE], 1.0, gl.float32, KEY)
    if SCALED:
        slot = (tile_begin % TILES_PER_PAGE) * TILE + offs_n
        mask = (tile_begin < tile_end) & (slot < CFG.page_size) & (page >= 0) & (page < num_pages)
        k_scale = _load_scale(k_scale_head_ptr, page, slot, mask, stride_k_scale_page, stride_k_scale_slot)
        v_scale = _load_scale(v_scale_head_ptr, page, slot, mask, stride_v_scale_page, stride_v_scale_slot)
    for tile in range(tile_begin, tile_end):
        stage = (tile - tile_begin) % STAGES
        phase = ((tile - tile_begin) // STAGES) & 1
        ahead = tile + STAGES
        page_ahead = gl.load(table_row_ptr + gl.minimum(ahead // TILES_PER_PAGE, max_page_col))
        opaque = page & opaque_zero
        log_bias = gl.full([TILE], 0.0, gl.float32, KEY) + gl.where((page >= 0) & (page < num_pages), 0.0, float("nan"))
        slot = (tile % TILES_PER_PAGE) * TILE + offs_n
        page = gl.load(table_row_ptr + gl.minimum((tile + 1) // TILES_PER_PAGE, max_page_col))
        ks = k_scale
        vs = v_scale
        if SCALED:
            next_slot = ((tile + 1) % TILES_PER_PAGE) * TILE + offs_n
            mask = (tile + 1 < tile_end) & (next_slot < CFG.page_size) & (page >= 0) & (page < num_pages)
            k_scale = _load_scale(k_scale_head_ptr, page, next_slot, mask, stride_k_scale_page, stride_k_scale_slot)
            v_scale = _load_scale(v_scale_head_ptr, page, next_slot, mask, stride_v_scale_page, stride_v_scale_slot)
        mbarrier.wait(k_bars.index(stage), phase)
        s = scores(k_tiles, stage, q_smem, opaque, zero, CFG, S_LAYOUT)
        if CFG.kv_format == "int4":
            # K is read with its zero point, V less 8: what is missing is one product a key, and one sum a row.
            excess = (ks.to(gl.int32, bitcast=True) & 15).to(gl.float32)
            v_excess = (vs.to(gl.int32, bitcast=True) & 15).to(gl.float32) - 8.0
            s = s - excess[:, None] * sum_smem.load(ROW)[None, :]
        x = s * factor[None, :]
        bad_scale = vs != vs
        if SCALED:
            vs = gl.where(vs < MIN_SCALE, MIN_SCALE, vs)
            vs = gl.where(bad_scale, 1.0, vs)
            x = x * ks[:, None]
            log_bias += log2_approx(vs)
        x = gl.where((slot < CFG.page_size)[:, None], x + log_bias[:, None], float("-inf"))
        if tile >= num_full:
            q_pos = seq_len - q_len + gl.arange(0, ROWS, layout=ROW) // GROUP
            pos = tile // TILES_PER_PAGE * CFG.page_size + slot
            x = gl.where(pos[:, None] <= q_pos[None, :], x, float("-inf"))
        top = gl.max(x - m[None, :], 1)
        if SCALED:
            top = gl.where(bad_scale, float("inf"), top)
        if gl.max(top, 0) > 8.0:
            m_new = gl.maximum(m, gl.max(x, 0))
            alpha = gl.exp2(m - m_new)
            m = m_new
            l = l * gl.convert_layout(alpha, spread)[None, None, :]
            v_shift = v_shift * alpha
            alpha = gl.convert_layout(alpha, gl.SliceLayout(0, O_LAYOUT))[None, :]
            if CFG.head_dim > DIMS:
                acc = (acc[0] * alpha, acc[1] * alpha)
            else:
                acc = (acc[0] * alpha,)
            if SCALED:
                sees_bad = gl.max(gl.where(bad_scale[:, None] & (x != float("-inf")), 1, 0), 0)
                poison_smem.store(gl.where(sees_bad > 0, float("nan"), poison_smem.load(ROW)))
        p = gl.exp2(x - m[None, :])
        weights = p
        if SCALED:
            weights = p * inverse_approx(vs)[:, None]
        l = l + gl.sum(weights.reshape([TILE // 16, 2, 8, ROWS]), 1)
        p = p.to(DTYPE)
        if CFG.kv_format == "int4":
            v_shift += gl.sum(p.to(gl.float32) * v_excess[:, None], 0)
        p_smem = p_tiles.index(opaque)
        p_smem.store(p)
        fence_async_shared()
        mbarrier.wait(v_bars.index(stage), phase)
        if CAN_HOLD_NAN:
            _poison_rows(v_tiles.index(stage), x, tile >= num_full, bad_smem, poison_smem, CFG, KEY, ROW, num_warps)
        acc = add_values(v_tiles, stage, p_smem, acc, CFG, O_LAYOUT, num_warps)
        gl.thread_barrier()
        ahead_slot = (ahead % TILES_PER_PAGE) * TILE
        _copy_tile(k_desc, k_boxes, k_bars, page_ahead, kv_head, ahead_slot, stage, ahead < tile_end, NBYTES)
        _copy_tile(v_desc, v_boxes, v_bars, page_ahead, kv_head, ahead_slot, stage, ahead < tile_end, NBYTES)

    l = gl.convert_layout(gl.sum(gl.sum(l, 0), 0), gl.SliceLayout(0, O_LAYOUT))
    m = gl.convert_layout(m, gl.SliceLayout(0, O_LAYOUT))
    shift = poison_smem.load(gl.SliceLayout(0, O_LAYOUT)) - gl.convert_layout(v_shift, gl.SliceLayout(0, O_LAYOUT))
    norm = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(0, O_LAYOUT))
    if CFG.scales == "head":
        norm = norm * gl.load(v_scale_head_ptr)
    ONE_SPLIT: gl.constexpr = dest_ptr.dtype.element_ty != gl.float32
    if ONE_SPLIT:
        norm = norm / gl.where(l == 0.0, 1.0, l)
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [num_warps, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    mask = row // GROUP < q_len
    token = token0 + row // GROUP
    head = head0 + row % GROUP
    dest_token = token
    if CFG.longest > 0 and not ONE_SPLIT:
        dest_token = gl.program_id(0).to(gl.int64) * CFG.longest + row // GROUP
    # bigpool: assume split * stride_dest_split < 2**31, Workspace refuses splits of a token and head that span more
    ptrs = dest_ptr + dest_token * stride_dest_token + head * stride_dest_head + split * stride_dest_split
    _store_rows((acc[0] + shift[None, :]) * norm[None, :], ptrs, 0, mask, CFG, OUT, num_warps)
    if CFG.head_dim > DIMS:
        _store_rows((acc[1] + shift[None, :]) * norm[None, :], ptrs, DIMS, mask, CFG, OUT, num_warps)
    m = gl.convert_layout(gl.where(l == 0.0, float("-inf"), m), gl.SliceLayout(1, OUT))
    l = gl.convert_layout(l, gl.SliceLayout(1, OUT))
    if ONE_SPLIT:
        gl.store(lse_ptr + token * stride_lse_token + head, (m + gl.log2(gl.where(l == 0.0, 1.0, l))) * LN2, mask=mask)
    else:
        gl.store(ptrs + CFG.head_dim, m, mask=mask)
        gl.store(ptrs + CFG.head_dim + 1, l, mask=mask)
