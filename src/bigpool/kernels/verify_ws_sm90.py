"""The split-KV partial of verify attention for Hopper with warps that specialise, in Gluon: for many rows, and for small pages.

A producer warp copies tiles by TMA, four warps decode what the products cannot read as it is, and one or two warpgroups compute
S = Q K^T and P V. int8 codes of K are operands as they lie in shared memory, int4 codes after their nibbles were spread to bytes:
queries are then integers in digits of 7 bits (verify_sm90.py). What needs no decoding has no decoding warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ._feed_sm90 import decode, place, produce
from .verify_sm90 import LN2, load_queries


@gluon.jit
def _add_products(
    k_tiles, first, q_smem, first_q: gl.constexpr, s, begin: gl.constexpr, KEYS: gl.constexpr, SUM: gl.constexpr,
    GROUPS: gl.constexpr,
):  # fmt: skip
    """`s` (where SUM) + the products of queries and KEYS keys from `begin` on; not waited for."""
    for group in gl.static_range(GROUPS):
        k = k_tiles.index(first + group).slice(begin, KEYS, 0).permute((1, 0))
        s = warpgroup_mma(q_smem.index(first_q + group), k, s, use_acc=SUM or group > 0, is_async=True)
    return s


@gluon.jit
def _integer_scores(
    k_tiles, first, q_smem, begin: gl.constexpr, KEYS: gl.constexpr, GROUPS: gl.constexpr, CFG: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Scores of KEYS keys from `begin` on: the digits of queries one after the other, since accumulators take many registers."""
    DIGITS: gl.constexpr = CFG.digits
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 32])
    zero = gl.full([CFG.rows, KEYS], 0, gl.int32, LAYOUT)
    s = warpgroup_mma_wait(0, deps=[_add_products(k_tiles, first, q_smem, 0, zero, begin, KEYS, False, GROUPS)]) * 128
    s = _add_products(k_tiles, first, q_smem, GROUPS, s, begin, KEYS, True, GROUPS)
    if DIGITS == 3:
        s = warpgroup_mma_wait(0, deps=[s]).to(gl.float32) * 128.0
        low = _add_products(k_tiles, first, q_smem, 2 * GROUPS, zero, begin, KEYS, False, GROUPS)
        s = s + warpgroup_mma_wait(0, deps=[low]).to(gl.float32)
    else:
        s = warpgroup_mma_wait(0, deps=[s]).to(gl.float32)
    return s


@gluon.jit
def _scores(k_tiles, first, q_smem, GROUPS: gl.constexpr, CFG: gl.constexpr, S_LAYOUT: gl.constexpr, WARPS: gl.constexpr):
    DIGITS: gl.constexpr = CFG.digits
    HALF: gl.constexpr = CFG.tile // 2
    if DIGITS == 3 and WARPS == 8:
        a = _integer_scores(k_tiles, first, q_smem, 0, HALF, GROUPS, CFG, WARPS)
        b = _integer_scores(k_tiles, first, q_smem, HALF, HALF, GROUPS, CFG, WARPS)
        s = gl.join(a, b).permute((0, 2, 1)).reshape([CFG.rows, CFG.tile])
        s = gl.convert_layout(s, S_LAYOUT, assert_trivial=True)
    elif DIGITS > 0:
        s = _integer_scores(k_tiles, first, q_smem, 0, CFG.tile, GROUPS, CFG, WARPS)
        s = gl.convert_layout(s, S_LAYOUT, assert_trivial=True)
    else:
        zero = gl.full([CFG.rows, CFG.tile], 0.0, gl.float32, S_LAYOUT)
        s = warpgroup_mma_wait(0, deps=[_add_products(k_tiles, first, q_smem, 0, zero, 0, CFG.tile, False, GROUPS)])
    return s


@gluon.jit
def _clean_values(tiles, first, GROUPS: gl.constexpr, GROUP_COLS: gl.constexpr, CFG: gl.constexpr):
    """Sets what is not finite in a tile of V to 0; 1 for keys that had such a value, else 0."""
    WARPS: gl.constexpr = CFG.rows // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // GROUP_COLS, GROUP_COLS // 8], [WARPS, 1], [1, 0])
    bad = gl.full([CFG.tile], 0, gl.int32, gl.SliceLayout(1, layout))
    for group in gl.static_range(GROUPS):
        v = tiles.index(first + group).load(layout)
        finite = gl.abs(v.to(gl.float32)) < float("inf")
        bad = gl.maximum(bad, gl.max(gl.where(finite, 0, 1), 1))
        tiles.index(first + group).store(gl.where(finite, v, 0.0))
    fence_async_shared()
    gl.thread_barrier()
    return bad


@gluon.jit
def _attend(
    q_smem, k_tiles, v_tiles, k_full, k_empty, kt_full, kt_empty, vt_full, vt_empty, sides, factor_smem, sum_smem,
    dest_ptr, lse_ptr, stride_dest_token, stride_dest_head, stride_dest_split, stride_lse_token, token0, head0, split, q_len,
    v_factor, table_row_ptr, max_page_col, num_pages, tile_begin, tile_end, num_full, first_pos,
    GROUPS: gl.constexpr, GROUP_COLS: gl.constexpr, CFG: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    PLAIN: gl.constexpr = CFG.kv_format == "plain"
    SCALED: gl.constexpr = CFG.scales == "token_head"
    CAN_HOLD_NAN: gl.constexpr = CFG.kv_format != "int8" and CFG.kv_format != "int4"
    BUFFERS: gl.constexpr = CFG.stages if PLAIN else CFG.buffers
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    KEY: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    OUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    offs = gl.arange(0, CFG.tile, layout=KEY)
    q_pos = first_pos + gl.arange(0, CFG.rows, layout=ROW) // CFG.group
    factor = factor_smem.load(ROW)
    m = gl.full([CFG.rows], float("-inf"), gl.float32, ROW)
    l = gl.full([CFG.rows], 0.0, gl.float32, ROW)
    poison = gl.full([CFG.rows], 0.0, gl.float32, ROW)
    acc = gl.full([CFG.rows, GROUP_COLS], 0.0, gl.float32, O_LAYOUT)
    acc2 = acc
    for tile in range(tile_begin, tile_end):
        stage = (tile - tile_begin) % CFG.stages
        phase = ((tile - tile_begin) // CFG.stages) & 1
        buffer = (tile - tile_begin) % BUFFERS
        turn = ((tile - tile_begin) // BUFFERS) & 1
        page, slot, pos = place(table_row_ptr, tile, offs, max_page_col, CFG)
        if PLAIN or CFG.kv_format == "int8":
            mbarrier.wait(k_full.index(stage), phase)
            s = _scores(k_tiles, stage * GROUPS, q_smem, GROUPS, CFG, S_LAYOUT, CFG.rows // 16)
            gl.thread_barrier()
            mbarrier.arrive(k_empty.index(stage))
        if not PLAIN:
            mbarrier.wait(kt_full.index(buffer), turn)
        if not PLAIN and CFG.kv_format != "int8":
            s = _scores(k_tiles, buffer * GROUPS, q_smem, GROUPS, CFG, S_LAYOUT, CFG.rows // 16)
        if SCALED:
            k_scale = sides.index(3 * buffer).load(KEY)
            if CFG.kv_format == "int4":
                zero = (k_scale.to(gl.int32, bitcast=True) & 15).to(gl.float32)
                s = s - sum_smem.load(ROW)[:, None] * zero[None, :]
            x = s * factor[:, None] * k_scale[None, :] + sides.index(3 * buffer + 1).load(KEY)[None, :]
        else:
            bias = gl.full([CFG.tile], 0.0, gl.float32, KEY) + gl.where((page >= 0) & (page < num_pages), 0.0, float("nan"))
            x = s * factor[:, None] + gl.where(slot < CFG.page_size, bias, float("-inf"))[None, :]
            x = gl.where((slot < CFG.page_size)[None, :], x, float("-inf"))
        is_edge = tile >= num_full
        if is_edge:
            x = gl.where(pos[None, :] <= q_pos[:, None], x, float("-inf"))
        m_new = gl.maximum(m, gl.max(x, 1))
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(x - shift[:, None])
        alpha = gl.exp2(m - shift)
        m = m_new
        if SCALED:
            l = l * alpha + gl.sum(p * sides.index(3 * buffer + 2).load(KEY)[None, :], 1)
        else:
            l = l * alpha + gl.sum(p, 1)
        if not PLAIN:
            gl.thread_barrier()
            mbarrier.arrive(kt_empty.index(buffer))
        alpha = gl.convert_layout(alpha, OUT)[:, None]
        acc = acc * alpha
        if GROUPS == 2:
            acc2 = acc2 * alpha
        p = gl.convert_layout(p.to(v_tiles.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
        mbarrier.wait(vt_full.index(buffer), turn)
        if CAN_HOLD_NAN:  # noqa: SIM102 (one is of the compiler)
            # 0 * NaN is NaN: values that a row does not see must be finite, and what is not makes a row that sees it NaN.
            if is_edge:
                bad = gl.convert_layout(_clean_values(v_tiles, buffer * GROUPS, GROUPS, GROUP_COLS, CFG), KEY)
                sees = (pos[None, :] <= q_pos[:, None]) & (slot < CFG.page_size)[None, :] & (bad > 0)[None, :]
                poison = poison + gl.where(gl.max(gl.where(sees, 1, 0), 1) > 0, float("nan"), 0.0)
        acc = warpgroup_mma(p, v_tiles.index(buffer * GROUPS), acc, is_async=True)
        if GROUPS == 2:
            acc2 = warpgroup_mma(p, v_tiles.index(buffer * GROUPS + 1), acc2, is_async=True)
            acc, acc2, p = warpgroup_mma_wait(0, deps=[acc, acc2, p])
        else:
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        gl.thread_barrier()
        mbarrier.arrive(vt_empty.index(buffer))
    _store_part(
        acc, acc2, l, m, poison, dest_ptr, lse_ptr, stride_dest_token, stride_dest_head, stride_dest_split, stride_lse_token,
        token0, head0, split, q_len, v_factor, GROUPS, CFG, O_LAYOUT,
    )  # fmt: skip


@gluon.jit
def _store_part(
    acc, acc2, l, m, poison, dest_ptr, lse_ptr, stride_dest_token, stride_dest_head, stride_dest_split, stride_lse_token,
    token0, head0, split, q_len, v_factor, GROUPS: gl.constexpr, CFG: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """The sum, maximum and weight of a split; or the result, where `dest` is not fp32."""
    OUT: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    ONE_SPLIT: gl.constexpr = dest_ptr.dtype.element_ty != gl.float32
    l = gl.convert_layout(l, OUT)
    m = gl.convert_layout(m, OUT)
    poison = gl.convert_layout(poison, OUT)[:, None]
    norm = gl.full([CFG.rows], 1.0, gl.float32, OUT) * v_factor
    if ONE_SPLIT:
        norm = norm / gl.where(l == 0.0, 1.0, l)
    row = gl.arange(0, CFG.rows, layout=OUT)
    mask = row // CFG.group < q_len
    token = token0 + row // CFG.group
    head = head0 + row % CFG.group
    dest_token = token
    if CFG.longest > 0 and not ONE_SPLIT:
        dest_token = gl.program_id(0).to(gl.int64) * CFG.longest + row // CFG.group
    # bigpool: assume split * stride_dest_split < 2**31, Workspace refuses splits of a token and head that span more
    ptrs = dest_ptr + dest_token * stride_dest_token + head * stride_dest_head + split * stride_dest_split
    for group in gl.static_range(GROUPS):
        values = acc2 if group == 1 else acc
        cols = group * acc.shape[1] + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, O_LAYOUT))
        values = ((values + poison) * norm[:, None]).to(dest_ptr.dtype.element_ty)
        gl.store(ptrs[:, None] + cols[None, :], values, mask=mask[:, None])
    if ONE_SPLIT:
        gl.store(lse_ptr + token * stride_lse_token + head, (m + gl.log2(gl.where(l == 0.0, 1.0, l))) * LN2, mask=mask)
    else:
        gl.store(ptrs + CFG.head_dim, m, mask=mask)
        gl.store(ptrs + CFG.head_dim + 1, l, mask=mask)


@gluon.jit
def _bars(COUNT: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i_bar in gl.static_range(COUNT):
        mbarrier.init(bars.index(i_bar), count=1)
    return bars


@gluon.jit(do_not_specialize=["max_page_col", "max_seq_len", "num_pages", "opaque_zero"])
def verify_partial_ws_sm90_kernel(
    q_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, dest_ptr, lse_ptr, block_table_ptr, seq_lens_ptr, cu_seqlens_q_ptr,
    scale_log2, max_page_col, max_seq_len, num_pages, opaque_zero,
    stride_q_token, stride_q_head,
    stride_k_scale_page, stride_k_scale_slot, stride_k_scale_head,
    stride_v_scale_page, stride_v_scale_slot, stride_v_scale_head,
    stride_dest_token, stride_dest_head, stride_dest_split,
    stride_lse_token, stride_table_req,
    CFG: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid and arguments of `verify_partial_sm90_kernel`. CFG: a Sm90Shape."""
    PLAIN: gl.constexpr = CFG.kv_format == "plain"
    TILE: gl.constexpr = CFG.tile
    ROWS: gl.constexpr = CFG.rows
    STAGES: gl.constexpr = CFG.stages
    GROUP: gl.constexpr = CFG.group
    DIGITS: gl.constexpr = CFG.digits
    INT4: gl.constexpr = CFG.kv_format == "int4"
    COLS: gl.constexpr = CFG.head_dim // 2 if INT4 else CFG.head_dim
    ITEM: gl.constexpr = 2 if PLAIN else 1
    ROW_BYTES: gl.constexpr = COLS * ITEM if COLS * ITEM < 128 else 128
    WIDTH: gl.constexpr = ROW_BYTES // ITEM
    PARTS: gl.constexpr = COLS // WIDTH
    GROUPS: gl.constexpr = 2 if INT4 or CFG.head_dim == 256 else 1
    GROUP_COLS: gl.constexpr = CFG.head_dim // GROUPS
    NBYTES: gl.constexpr = TILE * COLS * ITEM
    KV_TYPE: gl.constexpr = k_desc.dtype
    DTYPE: gl.constexpr = KV_TYPE if PLAIN else gl.float16
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
    SPAN: gl.constexpr = TILE if CFG.pages_per_tile > 1 else CFG.page_size
    num_tiles = kv_end // SPAN * CFG.tiles_per_page + gl.cdiv(kv_end % SPAN, TILE)
    num_full = full_end // SPAN * CFG.tiles_per_page + full_end % SPAN // TILE
    tiles_per_split = gl.cdiv(num_tiles, num_splits)
    tile_begin = gl.minimum(split * tiles_per_split, num_tiles)
    tile_end = gl.minimum(tile_begin + tiles_per_split, num_tiles)
    if q_len <= 0:
        tile_end = tile_begin
    table_row_ptr = block_table_ptr + req * stride_table_req

    box: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=ROW_BYTES, element_bitwidth=8 * ITEM, rank=5)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=ROW_BYTES, element_bitwidth=8 * ITEM, rank=2)
    HALF_BYTES: gl.constexpr = 2 * GROUP_COLS if GROUP_COLS < 64 else 128
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=HALF_BYTES, element_bitwidth=16, rank=2)
    BYTE_BYTES: gl.constexpr = GROUP_COLS if GROUP_COLS < 128 else 128
    byte: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=BYTE_BYTES, element_bitwidth=8, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if CFG.pages_per_tile > 1:
        BOXES: gl.constexpr = [STAGES * PARTS * CFG.pages_per_tile, 1, 1, 1, CFG.page_size, WIDTH]
    else:
        BOXES: gl.constexpr = [STAGES, 1, 1, PARTS, TILE, WIDTH]
    k_boxes = gl.allocate_shared_memory(KV_TYPE, BOXES, box)
    v_boxes = gl.allocate_shared_memory(KV_TYPE, BOXES, box)
    k_full = _bars(STAGES)
    k_empty = _bars(STAGES)
    v_full = _bars(STAGES)
    v_empty = _bars(STAGES)
    RAW_GROUPS: gl.constexpr = 1 if INT4 else GROUPS
    k_raw = k_boxes._reinterpret(KV_TYPE, [STAGES * RAW_GROUPS, TILE, COLS // RAW_GROUPS], flat)
    v_raw = v_boxes._reinterpret(KV_TYPE, [STAGES * RAW_GROUPS, TILE, COLS // RAW_GROUPS], flat)
    k_tiles = k_raw
    v_tiles = v_raw
    kt_full = k_full
    kt_empty = k_empty
    vt_full = v_full
    vt_empty = v_empty
    if not PLAIN:
        if INT4:
            k_tiles = gl.allocate_shared_memory(gl.int8, [CFG.buffers * GROUPS, TILE, GROUP_COLS], byte)
        elif DIGITS == 0:
            k_tiles = gl.allocate_shared_memory(DTYPE, [CFG.buffers * GROUPS, TILE, GROUP_COLS], half)
        v_tiles = gl.allocate_shared_memory(DTYPE, [CFG.buffers * GROUPS, TILE, GROUP_COLS], half)
        kt_full = _bars(CFG.buffers)
        kt_empty = _bars(CFG.buffers)
        vt_full = _bars(CFG.buffers)
        vt_empty = _bars(CFG.buffers)
    sides = gl.allocate_shared_memory(gl.float32, [3 * CFG.buffers, TILE], line)
    factor_smem = gl.allocate_shared_memory(gl.float32, [ROWS], line)
    sum_smem = gl.allocate_shared_memory(gl.float32, [ROWS], line)
    if DIGITS > 0:
        q_smem = gl.allocate_shared_memory(gl.int8, [DIGITS * GROUPS, ROWS, GROUP_COLS], byte)
    else:
        q_smem = gl.allocate_shared_memory(DTYPE, [GROUPS, ROWS, GROUP_COLS], half)
    q_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // GROUP_COLS, GROUP_COLS // 8], [num_warps, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, q_layout))
    q_offs = (token0 + row // GROUP) * stride_q_token + (kv_head64 * GROUP + row % GROUP) * stride_q_head
    v_factor = 1.0
    if CFG.scales == "head":
        scale_log2 = scale_log2 * gl.load(k_scale_ptr + kv_head64 * stride_k_scale_head)
        v_factor = gl.load(v_scale_ptr + kv_head64 * stride_v_scale_head)
    given = row // GROUP < q_len
    load_queries(q_ptr, q_offs, given, scale_log2, q_smem, factor_smem, sum_smem, CFG, GROUP_COLS, False, num_warps)
    fence_async_shared()
    gl.thread_barrier()

    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, TILE, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, GROUP_COLS, 16])
    if PLAIN:
        gl.warp_specialize(
            [
                (_attend, (
                    q_smem, k_tiles, v_tiles, k_full, k_empty, kt_full, kt_empty, vt_full, vt_empty, sides, factor_smem, sum_smem,
                    dest_ptr, lse_ptr, stride_dest_token, stride_dest_head, stride_dest_split, stride_lse_token,
                    token0, kv_head64 * GROUP, split, q_len, v_factor,
                    table_row_ptr, max_page_col, num_pages, tile_begin, tile_end, num_full, seq_len - q_len,
                    GROUPS, GROUP_COLS, CFG, S_LAYOUT, O_LAYOUT,
                )),
                (produce, (
                    k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
                    table_row_ptr, max_page_col, kv_head, tile_begin, tile_end, CFG, NBYTES,
                )),
            ],
            [1], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    q_smem, k_tiles, v_tiles, k_full, k_empty, kt_full, kt_empty, vt_full, vt_empty, sides, factor_smem, sum_smem,
                    dest_ptr, lse_ptr, stride_dest_token, stride_dest_head, stride_dest_split, stride_lse_token,
                    token0, kv_head64 * GROUP, split, q_len, v_factor,
                    table_row_ptr, max_page_col, num_pages, tile_begin, tile_end, num_full, seq_len - q_len,
                    GROUPS, GROUP_COLS, CFG, S_LAYOUT, O_LAYOUT,
                )),
                (decode, (
                    k_raw, v_raw, k_full, k_empty, v_full, v_empty, k_tiles, v_tiles, kt_full, kt_empty, vt_full, vt_empty,
                    sides, k_scale_ptr + kv_head64 * stride_k_scale_head, v_scale_ptr + kv_head64 * stride_v_scale_head,
                    (stride_k_scale_page, stride_k_scale_slot, stride_v_scale_page, stride_v_scale_slot),
                    table_row_ptr, max_page_col, num_pages, tile_begin, tile_end, GROUPS, GROUP_COLS, CFG,
                )),
                (produce, (
                    k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
                    table_row_ptr, max_page_col, kv_head, tile_begin, tile_end, CFG, NBYTES,
                )),
            ],
            [CFG.decode_warps, 1], [CFG.decode_regs, 24],
        )  # fmt: skip
