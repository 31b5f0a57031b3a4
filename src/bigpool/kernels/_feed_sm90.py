"""What feeds the kernel with specialised warps on Hopper: the warp that copies tiles by TMA, and the warps that decode them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ._formats_sm90 import MIN_SCALE, decode_k, inverse_approx, log2_approx, split_int4, split_int4_values


@gluon.jit
def place(table_row_ptr, tile, offs, max_page_col, CFG: gl.constexpr):
    """(page id, slot, position) of the keys `offs` of a tile; the page id is a number where a tile lies in one page."""
    if CFG.pages_per_tile > 1:
        column = tile * CFG.pages_per_tile + offs // CFG.page_size
        slot = offs % CFG.page_size
        position = tile * CFG.tile + offs
    else:
        column = tile // CFG.tiles_per_page
        slot = tile % CFG.tiles_per_page * CFG.tile + offs
        position = column * CFG.page_size + slot
    page = gl.load(table_row_ptr + gl.minimum(column, max_page_col))
    return page, slot, position


@gluon.jit
def _copy_tile(desc, boxes, bar, pages, kv_head, slot, stage, CFG: gl.constexpr, NBYTES: gl.constexpr):
    """One box, or a box for each page and each 128 bytes of its rows."""
    mbarrier.expect(bar, NBYTES)
    if CFG.pages_per_tile > 1:
        PAGES: gl.constexpr = CFG.pages_per_tile
        PARTS: gl.constexpr = NBYTES // (CFG.tile * boxes.shape[5] * (boxes.dtype.primitive_bitwidth // 8))
        for i_page in gl.static_range(PAGES):
            for part in gl.static_range(PARTS):
                box = boxes.index((stage * PARTS + part) * PAGES + i_page)
                tma.async_copy_global_to_shared(desc, [pages[i_page], kv_head, part, 0, 0], bar, box)
    else:
        tma.async_copy_global_to_shared(desc, [pages[0], kv_head, 0, slot, 0], bar, boxes.index(stage))


@gluon.jit
def _pages_of(table_row_ptr, tile, max_page_col, CFG: gl.constexpr):
    PAGES: gl.constexpr = CFG.pages_per_tile
    first = tile * PAGES if PAGES > 1 else tile // CFG.tiles_per_page
    pages = ()
    for i_page in gl.static_range(PAGES):
        page = gl.load(table_row_ptr + gl.minimum(first + i_page, max_page_col))
        pages = pages + (page,)  # noqa: RUF005 (Triton cannot unpack)
    return pages


@gluon.jit
def produce(
    k_desc, v_desc, k_boxes, v_boxes, k_full, k_empty, v_full, v_empty,
    table_row_ptr, max_page_col, kv_head, tile_begin, tile_end, CFG: gl.constexpr, NBYTES: gl.constexpr,
):  # fmt: skip
    for tile in range(tile_begin, tile_end):
        stage = (tile - tile_begin) % CFG.stages
        phase = ((tile - tile_begin) // CFG.stages) & 1
        pages = _pages_of(table_row_ptr, tile, max_page_col, CFG)
        slot = tile % CFG.tiles_per_page * CFG.tile
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        _copy_tile(k_desc, k_boxes, k_full.index(stage), pages, kv_head, slot, stage, CFG, NBYTES)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        _copy_tile(v_desc, v_boxes, v_full.index(stage), pages, kv_head, slot, stage, CFG, NBYTES)


@gluon.jit
def _decode_k_tile(raw, tiles, stage, buffer, GROUPS: gl.constexpr, CFG: gl.constexpr, LAYOUT: gl.constexpr):
    if CFG.kv_format == "int4":
        low, high = split_int4(raw.index(stage).load(LAYOUT))
        tiles.index(buffer * GROUPS).store(low)
        tiles.index(buffer * GROUPS + 1).store(high)
    else:
        for group in gl.static_range(GROUPS):
            tiles.index(buffer * GROUPS + group).store(decode_k(raw.index(stage * GROUPS + group).load(LAYOUT), CFG))


@gluon.jit
def _decode_v_tile(raw, tiles, words, stage, buffer, GROUPS: gl.constexpr, CFG: gl.constexpr, LAYOUT: gl.constexpr):
    if CFG.kv_format == "int4":
        zero = (words.to(gl.int32, bitcast=True) & 15).to(gl.float16)
        zero = gl.convert_layout(-1024.0 - zero, gl.SliceLayout(1, LAYOUT)).to(gl.float16)
        x, zero = gl.broadcast(raw.index(stage).load(LAYOUT), zero.expand_dims(1))
        low, high = split_int4_values(x, zero)
        tiles.index(buffer * GROUPS).store(low)
        tiles.index(buffer * GROUPS + 1).store(high)
    else:
        for group in gl.static_range(GROUPS):
            tiles.index(buffer * GROUPS + group).store(decode_k(raw.index(stage * GROUPS + group).load(LAYOUT), CFG))


@gluon.jit
def _load_scales(k_ptr, v_ptr, table_row_ptr, tile, tile_end, offs, max_page_col, num_pages, strides, CFG: gl.constexpr):
    """(scales of K, of V, 0 for keys of a page in the pool, NaN of others, -inf past the end of a page)."""
    page, slot, _ = place(table_row_ptr, tile, offs, max_page_col, CFG)
    in_pool = (page >= 0) & (page < num_pages)
    mask = (tile < tile_end) & (slot < CFG.page_size) & in_pool
    page64 = page.to(gl.int64)
    k_scale = gl.load(k_ptr + page64 * strides[0] + slot * strides[1], mask=mask, other=1.0)
    v_scale = gl.load(v_ptr + page64 * strides[2] + slot * strides[3], mask=mask, other=1.0)
    bias = gl.full([CFG.tile], 0.0, gl.float32, offs.type.layout) + gl.where(in_pool, 0.0, float("nan"))
    return k_scale, v_scale, gl.where(slot < CFG.page_size, bias, float("-inf"))


@gluon.jit
def decode(
    k_raw, v_raw, k_full, k_empty, v_full, v_empty, k_tiles, v_tiles, kt_full, kt_empty, vt_full, vt_empty,
    sides, k_scale_ptr, v_scale_ptr, strides, table_row_ptr, max_page_col, num_pages, tile_begin, tile_end,
    GROUPS: gl.constexpr, GROUP_COLS: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Decodes tiles, and turns the scales of a tile into what the softmax adds and multiplies."""
    SCALED: gl.constexpr = CFG.scales == "token_head"
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // GROUP_COLS, GROUP_COLS // 8], [CFG.decode_warps, 1], [1, 0])
    KEY: gl.constexpr = gl.BlockedLayout([1], [32], [CFG.decode_warps], [0])
    offs = gl.arange(0, CFG.tile, layout=KEY)
    k_scale = gl.full([CFG.tile], 1.0, gl.float32, KEY)
    v_scale = gl.full([CFG.tile], 1.0, gl.float32, KEY)
    bias = gl.full([CFG.tile], 0.0, gl.float32, KEY)
    if SCALED:
        k_scale, v_scale, bias = _load_scales(
            k_scale_ptr, v_scale_ptr, table_row_ptr, tile_begin, tile_end, offs, max_page_col, num_pages, strides, CFG
        )
    for tile in range(tile_begin, tile_end):
        stage = (tile - tile_begin) % CFG.stages
        phase = ((tile - tile_begin) // CFG.stages) & 1
        buffer = (tile - tile_begin) % CFG.buffers
        turn = ((tile - tile_begin) // CFG.buffers) & 1
        mbarrier.wait(kt_empty.index(buffer), turn ^ 1)
        if CFG.kv_format != "int8":
            mbarrier.wait(k_full.index(stage), phase)
            _decode_k_tile(k_raw, k_tiles, stage, buffer, GROUPS, CFG, LAYOUT)
        words = v_scale
        if SCALED:
            positive = gl.where(v_scale < MIN_SCALE, MIN_SCALE, v_scale)
            sides.index(3 * buffer).store(k_scale)
            sides.index(3 * buffer + 1).store(bias + log2_approx(positive))
            sides.index(3 * buffer + 2).store(gl.where(v_scale == v_scale, inverse_approx(positive), 0.0))
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(kt_full.index(buffer))
        if CFG.kv_format != "int8":
            mbarrier.arrive(k_empty.index(stage))
        if SCALED:
            k_scale, v_scale, bias = _load_scales(
                k_scale_ptr, v_scale_ptr, table_row_ptr, tile + 1, tile_end, offs, max_page_col, num_pages, strides, CFG
            )
        mbarrier.wait(vt_empty.index(buffer), turn ^ 1)
        mbarrier.wait(v_full.index(stage), phase)
        _decode_v_tile(v_raw, v_tiles, words, stage, buffer, GROUPS, CFG, LAYOUT)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(vt_full.index(buffer))
        mbarrier.arrive(v_empty.index(stage))
