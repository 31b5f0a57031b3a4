"""Sketch, not product: a warp-specialised split-KV partial of verify attention on Hopper, in Gluon (Triton 3.6).

A producer warp copies tiles by TMA, four or eight warps decode int8, int4 or fp8 into fp16 tiles in shared memory (none for bf16), and
one warpgroup (two for up to 128 rows) multiplies: S = Q K^T, then P V, not transposed. What was measured is in sketches/README.md.
Missing: everything around it; K and V descriptors are [page, chunk of 128 bytes, slot, column]. Its results were right on every shape
that was timed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

I8 = gl.constexpr("""{
.reg .b32 x, y, c;
mov.b32 c, 0xE480E480;
xor.b32 x, $4, 0x80808080;
xor.b32 y, $5, 0x80808080;
prmt.b32 $0, x, 0x64646464, 0x4140;
prmt.b32 $1, x, 0x64646464, 0x4342;
prmt.b32 $2, y, 0x64646464, 0x4140;
prmt.b32 $3, y, 0x64646464, 0x4342;
add.rn.f16x2 $0, $0, c;
add.rn.f16x2 $1, $1, c;
add.rn.f16x2 $2, $2, c;
add.rn.f16x2 $3, $3, c;
}""")
E4 = gl.constexpr("""{
.reg .b16 a, b, c, d;
mov.b32 {a, b}, $4;
mov.b32 {c, d}, $5;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}""")
E5 = gl.constexpr("""{
prmt.b32 $0, $4, 0, 0x1404;
prmt.b32 $1, $4, 0, 0x3424;
prmt.b32 $2, $5, 0, 0x1404;
prmt.b32 $3, $5, 0, 0x3424;
}""")
# $0..$3 low nibbles, $4..$7 high; $10 holds minus (1024 + zero point) twice
I4 = gl.constexpr("""{
.reg .b32 x, y, u, v;
and.b32 x, $8, 0x0F0F0F0F;
and.b32 y, $9, 0x0F0F0F0F;
shr.u32 u, $8, 4;
shr.u32 v, $9, 4;
and.b32 u, u, 0x0F0F0F0F;
and.b32 v, v, 0x0F0F0F0F;
prmt.b32 $0, x, 0x64646464, 0x4140;
prmt.b32 $1, x, 0x64646464, 0x4342;
prmt.b32 $2, y, 0x64646464, 0x4140;
prmt.b32 $3, y, 0x64646464, 0x4342;
prmt.b32 $4, u, 0x64646464, 0x4140;
prmt.b32 $5, u, 0x64646464, 0x4342;
prmt.b32 $6, v, 0x64646464, 0x4140;
prmt.b32 $7, v, 0x64646464, 0x4342;
add.rn.f16x2 $0, $0, $10;
add.rn.f16x2 $1, $1, $10;
add.rn.f16x2 $2, $2, $10;
add.rn.f16x2 $3, $3, $10;
add.rn.f16x2 $4, $4, $10;
add.rn.f16x2 $5, $5, $10;
add.rn.f16x2 $6, $6, $10;
add.rn.f16x2 $7, $7, $10;
}""")


@gluon.jit
def copy_tile(desc, raw, full, empty, page, slot, stage, phase, row, col, NBYTES: gl.constexpr):
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(bar, NBYTES)
    tma.async_copy_global_to_shared(desc, [page, col, row + slot, 0], bar, raw.index(stage))


@gluon.jit
def producer(k_desc, v_desc, k_raw, v_raw, k_full, k_empty, v_full, v_empty, table_row_ptr, max_col, tile_begin, tile_end, k_row, k_col, v_row, v_col,
             TPP: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, NBYTES: gl.constexpr):
    page = gl.load(table_row_ptr + gl.minimum(tile_begin // TPP, max_col))
    for tile in range(tile_begin, tile_end):
        i = tile - tile_begin
        stage = i % STAGES
        phase = (i // STAGES) & 1
        slot = (tile % TPP) * TILE
        page_after = gl.load(table_row_ptr + gl.minimum((tile + 1) // TPP, max_col))
        copy_tile(k_desc, k_raw, k_full, k_empty, page, slot, stage, phase, k_row, k_col, NBYTES)
        copy_tile(v_desc, v_raw, v_full, v_empty, page, slot, stage, phase, v_row, v_col, NBYTES)
        page = page_after


@gluon.jit
def decode(x, FMT: gl.constexpr):
    if FMT == "int8":
        return gl.inline_asm_elementwise(I8, "=&r,=&r,=&r,=&r,r,r", [x], dtype=gl.float16, is_pure=True, pack=8)
    elif FMT == "e4m3":
        return gl.inline_asm_elementwise(E4, "=&r,=&r,=&r,=&r,r,r", [x], dtype=gl.float16, is_pure=True, pack=8)
    else:
        return gl.inline_asm_elementwise(E5, "=&r,=&r,=&r,=&r,r,r", [x], dtype=gl.float16, is_pure=True, pack=8)


@gluon.jit
def convert_tile(raw, tiles, words, stage, buf, FMT: gl.constexpr, GROUPS: gl.constexpr, RAW_L: gl.constexpr, TILE: gl.constexpr):
    """raw bytes of a tile -> fp16 tiles."""
    if FMT == "int4":
        x = raw.index(stage).load(RAW_L)
        z = -(1024 + (words.to(gl.int32, bitcast=True) & 15)).to(gl.float16)
        z = gl.convert_layout(z, gl.SliceLayout(1, RAW_L)).expand_dims(1)
        x, z = gl.broadcast(x, z)
        lo, hi = gl.inline_asm_elementwise(I4, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [x, z], dtype=(gl.float16, gl.float16), is_pure=True, pack=8)
        tiles.index(buf * GROUPS).store(lo)
        tiles.index(buf * GROUPS + 1).store(hi)
    else:
        for g in gl.static_range(GROUPS):
            tiles.index(buf * GROUPS + g).store(decode(raw.index(stage * GROUPS + g).load(RAW_L), FMT))


@gluon.jit
def converter(k_raw, v_raw, k_full, k_empty, v_full, v_empty, k_tiles, v_tiles, kt_full, kt_empty, vt_full, vt_empty, side_k, side_b, side_i,
              ks_head, vs_head, sks_p, sks_s, svs_p, svs_s, table_row_ptr, max_col, num_pages, tile_begin, tile_end,
              FMT: gl.constexpr, SCALED: gl.constexpr, GROUPS: gl.constexpr, PAGE_SIZE: gl.constexpr, TPP: gl.constexpr, TILE: gl.constexpr,
              STAGES: gl.constexpr, BUFS: gl.constexpr, CW: gl.constexpr, GCOLS: gl.constexpr):
    RAW_L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // GCOLS, GCOLS // 8], [CW, 1], [1, 0])
    KEY_L: gl.constexpr = gl.BlockedLayout([1], [32], [CW], [0])
    offs_n = gl.arange(0, TILE, layout=KEY_L)
    page = gl.load(table_row_ptr + gl.minimum(tile_begin // TPP, max_col))
    ks = gl.full([TILE], 1.0, gl.float32, KEY_L)
    vs = gl.full([TILE], 1.0, gl.float32, KEY_L)
    if SCALED:
        slot = (tile_begin % TPP) * TILE + offs_n
        ok = (tile_begin < tile_end) & (slot < PAGE_SIZE) & (page >= 0) & (page < num_pages)
        ks = gl.load(ks_head + page.to(gl.int64) * sks_p + slot * sks_s, mask=ok, other=1.0)
        vs = gl.load(vs_head + page.to(gl.int64) * svs_p + slot * svs_s, mask=ok, other=1.0)
    for tile in range(tile_begin, tile_end):
        i = tile - tile_begin
        stage = i % STAGES
        phase = (i // STAGES) & 1
        buf = i % BUFS
        turn = (i // BUFS) & 1
        page_after = gl.load(table_row_ptr + gl.minimum((tile + 1) // TPP, max_col))
        mbarrier.wait(kt_empty.index(buf), turn ^ 1)
        mbarrier.wait(k_full.index(stage), phase)
        convert_tile(k_raw, k_tiles, ks, stage, buf, FMT, GROUPS, RAW_L, TILE)
        if SCALED:
            slot = (tile % TPP) * TILE + offs_n
            vc = gl.where(vs < 7.888609052210118e-31, 7.888609052210118e-31, vs)
            bias = gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=r,r", [vc], dtype=gl.float32, is_pure=True, pack=1)
            bias = gl.where((page >= 0) & (page < num_pages), bias, float("nan"))
            bias = gl.where(slot < PAGE_SIZE, bias, float("-inf"))
            side_k.index(buf).store(ks)
            side_b.index(buf).store(bias)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(kt_full.index(buf))
        mbarrier.arrive(k_empty.index(stage))
        vw = vs
        if SCALED:
            slot = ((tile + 1) % TPP) * TILE + offs_n
            ok = (tile + 1 < tile_end) & (slot < PAGE_SIZE) & (page_after >= 0) & (page_after < num_pages)
            ks = gl.load(ks_head + page_after.to(gl.int64) * sks_p + slot * sks_s, mask=ok, other=1.0)
            vs = gl.load(vs_head + page_after.to(gl.int64) * svs_p + slot * svs_s, mask=ok, other=1.0)
        mbarrier.wait(vt_empty.index(buf), turn ^ 1)
        mbarrier.wait(v_full.index(stage), phase)
        convert_tile(v_raw, v_tiles, vw, stage, buf, FMT, GROUPS, RAW_L, TILE)
        if SCALED:
            vc = gl.where(vw < 7.888609052210118e-31, 7.888609052210118e-31, vw)
            inv = gl.inline_asm_elementwise("rcp.approx.f32 $0, $1;", "=r,r", [vc], dtype=gl.float32, is_pure=True, pack=1)
            side_i.index(buf).store(gl.where(vc == vc, inv, 0.0))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(vt_full.index(buf))
        mbarrier.arrive(v_empty.index(stage))
        page = page_after


@gluon.jit
def attend(q_smem, k_tiles, v_tiles, kt_full, kt_empty, vt_full, vt_empty, side_k, side_b, side_i, factor, dest_ptr, offs_o, ok,
           table_row_ptr, max_col, num_pages, tile_begin, tile_end, num_full, kv_end, q_pos,
           FMT: gl.constexpr, SCALED: gl.constexpr, GROUPS: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, TPP: gl.constexpr, TILE: gl.constexpr,
           BLOCK_M: gl.constexpr, BUFS: gl.constexpr, DT: gl.constexpr, GCOLS: gl.constexpr, S_L: gl.constexpr, O_L: gl.constexpr):
    ROW_L: gl.constexpr = gl.SliceLayout(1, S_L)
    KEY_L: gl.constexpr = gl.SliceLayout(0, S_L)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, O_L, 2)
    W: gl.constexpr = BLOCK_M // 16
    offs_n = gl.arange(0, TILE, layout=KEY_L)
    m = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW_L)
    l = gl.full([BLOCK_M], 0.0, gl.float32, ROW_L)
    poison = gl.full([BLOCK_M], 0.0, gl.float32, ROW_L)
    zero = gl.full([BLOCK_M, TILE], 0.0, gl.float32, S_L)
    acc = gl.full([BLOCK_M, GCOLS], 0.0, gl.float32, O_L)
    acc1 = acc
    page = gl.load(table_row_ptr + gl.minimum(tile_begin // TPP, max_col))
    for tile in range(tile_begin, tile_end):
        i = tile - tile_begin
        buf = i % BUFS
        turn = (i // BUFS) & 1
        page_after = gl.load(table_row_ptr + gl.minimum((tile + 1) // TPP, max_col))
        mbarrier.wait(kt_full.index(buf), turn)
        s = warpgroup_mma(q_smem.index(0), k_tiles.index(buf * GROUPS).permute((1, 0)), zero, use_acc=False, is_async=True)
        if GROUPS == 2:
            s = warpgroup_mma(q_smem.index(1), k_tiles.index(buf * GROUPS + 1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if SCALED:
            ks = side_k.index(buf).load(KEY_L)
            bias = side_b.index(buf).load(KEY_L)
        gl.thread_barrier()
        mbarrier.arrive(kt_empty.index(buf))
        slot = (tile % TPP) * TILE + offs_n
        x = s * factor[:, None]
        if SCALED:
            x = x * ks[None, :] + bias[None, :]
        else:
            x = x + gl.where((page >= 0) & (page < num_pages), 0.0, float("nan"))
            if PAGE_SIZE % TILE != 0:
                x = gl.where((slot < PAGE_SIZE)[None, :], x, float("-inf"))
        edge = tile >= num_full
        if edge:
            pos = tile // TPP * PAGE_SIZE + slot
            x = gl.where(pos[None, :] <= q_pos[:, None], x, float("-inf"))
        m_new = gl.maximum(m, gl.max(x, 1))
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(x - shift[:, None])
        alpha = gl.exp2(m - shift)
        m = m_new
        alpha_o = gl.convert_layout(alpha, gl.SliceLayout(1, O_L))[:, None]
        acc = acc * alpha_o
        if GROUPS == 2:
            acc1 = acc1 * alpha_o
        pb = gl.convert_layout(p.to(DT), p_layout)
        mbarrier.wait(vt_full.index(buf), turn)
        if SCALED:
            inv = side_i.index(buf).load(KEY_L)
            l = l * alpha + gl.sum(p * inv[None, :], 1)
        else:
            l = l * alpha + gl.sum(p, 1)
        if FMT != "int8" and FMT != "int4":
            if edge:
                # 0 * NaN is NaN: what a row does not see must be finite, and what it sees makes it NaN.
                clean_l: gl.constexpr = gl.BlockedLayout([1, 8], [256 // GCOLS, GCOLS // 8], [W, 1], [1, 0])
                bad = gl.full([TILE], 0, gl.int32, gl.SliceLayout(1, clean_l))
                for g in gl.static_range(GROUPS):
                    y = v_tiles.index(buf * GROUPS + g).load(clean_l)
                    finite = gl.abs(y.to(gl.float32)) < float("inf")
                    bad = gl.maximum(bad, gl.max(gl.where(finite, 0, 1), 1))
                    v_tiles.index(buf * GROUPS + g).store(gl.where(finite, y, 0.0))
                pos = tile // TPP * PAGE_SIZE + slot
                bad_key = gl.convert_layout(bad, KEY_L)
                sees = (pos[None, :] <= q_pos[:, None]) & (slot < PAGE_SIZE)[None, :] & (bad_key[None, :] > 0)
                poison = poison + gl.where(gl.max(gl.where(sees, 1, 0), 1) > 0, float("nan"), 0.0)
                fence_async_shared()
                gl.thread_barrier()
        acc = warpgroup_mma(pb, v_tiles.index(buf * GROUPS), acc, is_async=True)
        if GROUPS == 2:
            acc1 = warpgroup_mma(pb, v_tiles.index(buf * GROUPS + 1), acc1, is_async=True)
            acc, acc1, pb = warpgroup_mma_wait(0, deps=[acc, acc1, pb])
        else:
            acc, pb = warpgroup_mma_wait(0, deps=[acc, pb])
        gl.thread_barrier()
        mbarrier.arrive(vt_empty.index(buf))
        page = page_after
    OUT_L: gl.constexpr = gl.SliceLayout(1, O_L)
    cols = gl.arange(0, GCOLS, layout=gl.SliceLayout(0, O_L))
    lo = gl.convert_layout(l, OUT_L)
    mo = gl.convert_layout(m, OUT_L)
    bad_row = gl.convert_layout(poison, OUT_L)[:, None]
    ptrs = dest_ptr + offs_o
    gl.store(ptrs[:, None] + cols[None, :], acc + bad_row, mask=ok[:, None])
    if GROUPS == 2:
        gl.store(ptrs[:, None] + (GCOLS + cols)[None, :], acc1 + bad_row, mask=ok[:, None])
    gl.store(ptrs + D, mo, mask=ok)
    gl.store(ptrs + D + 1, lo, mask=ok)


@gluon.jit
def make_bars(N: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit(do_not_specialize=["max_col", "max_seq_len", "num_pages"])
def partial_kernel(
    q_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, dest_ptr, table_ptr, seq_lens_ptr, cu_ptr,
    scale_log2, max_col, max_seq_len, num_pages,
    sq_t, sq_h, k_head_rows, k_head_cols, v_head_rows, v_head_cols,
    sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, sd_t, sd_h, sd_s, st_req,
    FMT: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE_SIZE: gl.constexpr, TPP: gl.constexpr, TILE: gl.constexpr,
    BLOCK_M: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr, BUFS: gl.constexpr, SCALED: gl.constexpr, PDL: gl.constexpr,
    CW: gl.constexpr, CREGS: gl.constexpr, num_warps: gl.constexpr,
):
    PLAIN: gl.constexpr = FMT == "plain"
    COLS: gl.constexpr = D // 2 if FMT == "int4" else D
    WIDTH: gl.constexpr = 64 if PLAIN else 128
    ITEM: gl.constexpr = 2 if PLAIN else 1
    CHUNKS: gl.constexpr = COLS // WIDTH
    GCOLS: gl.constexpr = 128
    GROUPS: gl.constexpr = D // GCOLS
    NBYTES: gl.constexpr = TILE * COLS * ITEM
    kv_dt: gl.constexpr = k_desc.dtype
    DT: gl.constexpr = kv_dt if PLAIN else gl.float16
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

    smem4: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * ITEM, rank=4)
    smem: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * ITEM, rank=2)
    half: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_boxes = gl.allocate_shared_memory(kv_dt, [STAGES, 1, CHUNKS, TILE, WIDTH], smem4)
    v_boxes = gl.allocate_shared_memory(kv_dt, [STAGES, 1, CHUNKS, TILE, WIDTH], smem4)
    k_full = make_bars(STAGES)
    k_empty = make_bars(STAGES)
    v_full = make_bars(STAGES)
    v_empty = make_bars(STAGES)
    if PLAIN:
        k_tiles = k_boxes._reinterpret(kv_dt, [STAGES * GROUPS, TILE, GCOLS], smem)
        v_tiles = v_boxes._reinterpret(kv_dt, [STAGES * GROUPS, TILE, GCOLS], smem)
        kt_full = k_full
        kt_empty = k_empty
        vt_full = v_full
        vt_empty = v_empty
        side_k = k_full
        side_b = k_full
        side_i = k_full
        k_raw = k_boxes
        v_raw = v_boxes
    else:
        k_raw = k_boxes._reinterpret(kv_dt, [STAGES * CHUNKS, TILE, WIDTH], smem)
        v_raw = v_boxes._reinterpret(kv_dt, [STAGES * CHUNKS, TILE, WIDTH], smem)
        k_tiles = gl.allocate_shared_memory(DT, [BUFS * GROUPS, TILE, GCOLS], half)
        v_tiles = gl.allocate_shared_memory(DT, [BUFS * GROUPS, TILE, GCOLS], half)
        kt_full = make_bars(BUFS)
        kt_empty = make_bars(BUFS)
        vt_full = make_bars(BUFS)
        vt_empty = make_bars(BUFS)
        side_k = gl.allocate_shared_memory(gl.float32, [BUFS, TILE], flat)
        side_b = gl.allocate_shared_memory(gl.float32, [BUFS, TILE], flat)
        side_i = gl.allocate_shared_memory(gl.float32, [BUFS, TILE], flat)
    fence_async_shared()
    gl.thread_barrier()

    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, TILE, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, GCOLS, 16])
    ROW_L: gl.constexpr = gl.SliceLayout(1, S_L)
    ql: gl.constexpr = gl.BlockedLayout([1, 8], [256 // GCOLS, GCOLS // 8], [num_warps, 1], [1, 0])
    r = row0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, ql))
    q_offs = (token0 + r // GROUP) * sq_t + (kv_head * GROUP + r % GROUP) * sq_h
    q_ok = (r // GROUP < q_len)[:, None]
    cols = gl.arange(0, GCOLS, layout=gl.SliceLayout(0, ql))
    factor = gl.full([BLOCK_M], scale_log2, gl.float32, ROW_L)
    q_smem = gl.allocate_shared_memory(DT, [GROUPS, BLOCK_M, GCOLS], half)
    if PDL:
        gdc_wait()
    q_ptrs = q_ptr + q_offs[:, None] + cols[None, :]
    if PLAIN:
        for g in gl.static_range(GROUPS):
            q_smem.index(g).store(gl.load(q_ptrs + g * GCOLS, mask=q_ok, other=0.0))
    else:
        # Quantised caches meet fp16 queries: each row is scaled by a power of two, which is exact.
        q0 = gl.load(q_ptrs, mask=q_ok, other=0.0).to(gl.float32)
        top = gl.max(gl.abs(q0), 1)
        if GROUPS == 2:
            q1 = gl.load(q_ptrs + GCOLS, mask=q_ok, other=0.0).to(gl.float32)
            top = gl.maximum(top, gl.max(gl.abs(q1), 1))
        unit = (gl.maximum(top, 7.888609052210118e-31).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        inv = (4096.0 / unit)[:, None]
        factor = factor * gl.convert_layout(unit * 0.000244140625, ROW_L)
        q_smem.index(0).store((q0 * inv).to(DT))
        if GROUPS == 2:
            q_smem.index(1).store((q1 * inv).to(DT))
    fence_async_shared()
    gl.thread_barrier()

    row = row0 + gl.arange(0, BLOCK_M, layout=ROW_L)
    q_pos = seq_len - q_len + row // GROUP
    ro = row0 + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, O_L))
    ok = ro // GROUP < q_len
    offs_o = (token0 + ro // GROUP) * sd_t + (kv_head * GROUP + ro % GROUP) * sd_h + split * sd_s
    BUFS_T: gl.constexpr = STAGES if PLAIN else BUFS
    if PLAIN:
        gl.warp_specialize([(attend, (q_smem, k_tiles, v_tiles, kt_full, kt_empty, vt_full, vt_empty, side_k, side_b, side_i, factor, dest_ptr, offs_o, ok,
                   table_row_ptr, max_col, num_pages, tile_begin, tile_end, num_full, kv_end, q_pos,
                   FMT, SCALED, GROUPS, D, PAGE_SIZE, TPP, TILE, BLOCK_M, BUFS_T, DT, GCOLS, S_L, O_L)), (producer, (k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, table_row_ptr, max_col, tile_begin, tile_end,
                     kvh * k_head_rows, kvh * k_head_cols, kvh * v_head_rows, kvh * v_head_cols, TPP, TILE, STAGES, NBYTES))], [1], [24])
    else:
        ks_head = k_scale_ptr + kv_head * sks_h
        vs_head = v_scale_ptr + kv_head * svs_h
        gl.warp_specialize([(attend, (q_smem, k_tiles, v_tiles, kt_full, kt_empty, vt_full, vt_empty, side_k, side_b, side_i, factor, dest_ptr, offs_o, ok,
                   table_row_ptr, max_col, num_pages, tile_begin, tile_end, num_full, kv_end, q_pos,
                   FMT, SCALED, GROUPS, D, PAGE_SIZE, TPP, TILE, BLOCK_M, BUFS_T, DT, GCOLS, S_L, O_L)), (converter, (k_raw, v_raw, k_full, k_empty, v_full, v_empty, k_tiles, v_tiles, kt_full, kt_empty, vt_full, vt_empty, side_k, side_b, side_i,
                          ks_head, vs_head, sks_p, sks_s, svs_p, svs_s, table_row_ptr, max_col, num_pages, tile_begin, tile_end,
                          FMT, SCALED, GROUPS, PAGE_SIZE, TPP, TILE, STAGES, BUFS, CW, GCOLS)), (producer, (k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, table_row_ptr, max_col, tile_begin, tile_end,
                     kvh * k_head_rows, kvh * k_head_cols, kvh * v_head_rows, kvh * v_head_cols, TPP, TILE, STAGES, NBYTES))], [CW, 1], [CREGS, 24])
    if PDL:
        gdc_launch_dependents()
