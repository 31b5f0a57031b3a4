"""The warp of the Hopper kernel of prefill attention that copies tiles of K and V into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def _page_at(table_row_ptr, column, last_column):
    return gl.load(table_row_ptr + gl.minimum(column, last_column))


@gluon.jit
def _copy_boxes(desc, boxes, bar, stage, table_row_ptr, pos, last_column, kv_head, CFG: gl.constexpr, PARTS: gl.constexpr):
    """A tile of several pages: a box for each page and 128 bytes of a row."""
    BOXES: gl.constexpr = CFG.tile // CFG.box
    for b in gl.static_range(BOXES):
        page = _page_at(table_row_ptr, (pos + b * CFG.box) // CFG.page_size, last_column)
        for part in gl.static_range(PARTS):
            box = boxes.index((stage * PARTS + part) * BOXES + b)
            tma.async_copy_global_to_shared(desc, [page, kv_head, part, (pos + b * CFG.box) % CFG.page_size, 0], bar, box)


@gluon.jit
def _load_scales(ptr, tile, seq_len, KEYS: gl.constexpr, stride, CFG: gl.constexpr):
    offs = gl.arange(0, CFG.tile, layout=KEYS)
    if CFG.tiles_per_page == 0:
        pos = tile * CFG.tile + offs
        ok = pos < seq_len
    else:
        slot = tile % CFG.tiles_per_page * CFG.tile + offs
        pos = tile // CFG.tiles_per_page * CFG.page_size + slot
        ok = (slot < CFG.page_size) & (pos < seq_len)
    return gl.load(ptr + pos.to(gl.int64) * stride, mask=ok, other=0.0)


@gluon.jit
def produce(
    k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty, table_row_ptr, begin, end, kv_head, seq_len,
    k_scale_ptr, k_scale_smem, first_row, stride_scale, CFG: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of a program in the order in which they are used."""
    K_BYTES: gl.constexpr = CFG.tile * CFG.head_dim * (1 if CFG.int8 else 2)
    V_BYTES: gl.constexpr = CFG.tile * CFG.head_dim * 2
    V_PARTS: gl.constexpr = CFG.head_dim // 64
    KEYS: gl.constexpr = gl.BlockedLayout([CFG.tile // 32], [32], [1], [0])
    last_column = gl.maximum(seq_len - 1, 0) // CFG.page_size
    page = 0
    if CFG.tiles_per_page != 0:
        page = _page_at(table_row_ptr, begin // CFG.tiles_per_page, last_column)
    if CFG.int8:
        scales = _load_scales(k_scale_ptr, begin, seq_len, KEYS, stride_scale, CFG)
    for tile in range(begin, end):
        i = tile - begin
        ks = i % CFG.k_stages
        vs = i % CFG.v_stages
        if CFG.tiles_per_page == 0:
            pos = tile * CFG.tile
            slot = 0
            next_page = page
        else:
            slot = tile % CFG.tiles_per_page * CFG.tile
            pos = tile // CFG.tiles_per_page * CFG.page_size + slot
            next_page = _page_at(table_row_ptr, (tile + 1) // CFG.tiles_per_page, last_column)
        mbarrier.wait(k_empty.index(ks), ((i // CFG.k_stages) & 1) ^ 1)
        bar = k_full.index(ks)
        mbarrier.expect(bar, K_BYTES)
        if CFG.int8:
            tma.async_copy_global_to_shared(k_desc, [0, kv_head, 0, first_row + pos, 0], bar, k_boxes.index(ks))
            k_scale_smem.index(ks).store(scales)
            gl.thread_barrier()
            mbarrier.arrive(bar)
            scales = _load_scales(k_scale_ptr, tile + 1, seq_len, KEYS, stride_scale, CFG)
        elif CFG.tiles_per_page == 0:
            _copy_boxes(k_desc, k_boxes, bar, ks, table_row_ptr, pos, last_column, kv_head, CFG, V_PARTS)
        else:
            tma.async_copy_global_to_shared(k_desc, [page, kv_head, 0, slot, 0], bar, k_boxes.index(ks))
        mbarrier.wait(v_empty.index(vs), ((i // CFG.v_stages) & 1) ^ 1)
        bar = v_full.index(vs)
        mbarrier.expect(bar, V_BYTES)
        if CFG.tiles_per_page == 0:
            _copy_boxes(v_desc, v_boxes, bar, vs, table_row_ptr, pos, last_column, kv_head, CFG, V_PARTS)
        else:
            tma.async_copy_global_to_shared(v_desc, [page, kv_head, 0, slot, 0], bar, v_boxes.index(vs))
        page = next_page
