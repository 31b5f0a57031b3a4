"""Tiles of K and V in the two products of the Hopper kernel: how threads hold them, and the products themselves."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ._formats_sm90 import decode_k, decode_v, decode_v_int4, split_int4


@gluon.jit
def _k_operand(x, CFG: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Renames the columns of a decoded tile to the contraction index that each register already holds; moves nothing."""
    y = x.reshape([CFG.tile, 4, 16, 2]).permute(0, 2, 1, 3).reshape([CFG.tile, 128])
    return gl.convert_layout(y, gl.DotOperandLayout(0, S_LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _v_operand(x, CFG: gl.constexpr, O_LAYOUT: gl.constexpr, num_warps: gl.constexpr):
    """The same for V, transposed: rows are dims in the order of registers, which `_store_rows` undoes."""
    if num_warps == 4:
        y = x.reshape([32, 2, 4, 8, 2, 2]).permute(1, 2, 4, 3, 0, 5).reshape([128, 64])
    elif CFG.kv_format == "int4":
        y = x.reshape([32, 2, 4, 8, 2, 2, 2]).permute(1, 6, 2, 4, 3, 0, 5).reshape([256, 64])
    else:
        y = x.reshape([32, 2, 8, 8, 2, 2]).permute(1, 2, 4, 3, 0, 5).reshape([256, 64])
    return gl.convert_layout(y, gl.DotOperandLayout(0, O_LAYOUT, 2), assert_trivial=True)


@gluon.jit
def _stored_scores(k_tiles, stage, q_smem, opaque, CFG: gl.constexpr, S_LAYOUT: gl.constexpr):
    """S^T of queries and of keys as they lie in shared memory, of int8 from one product for each digit."""
    if CFG.kv_format == "plain":
        zero = gl.full([CFG.tile, CFG.rows], 0.0, gl.float32, S_LAYOUT)
        q = q_smem.index(opaque).permute((1, 0))
        s = warpgroup_mma(k_tiles.index(stage), q, zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
    else:
        BLOCKS: gl.constexpr = CFG.head_dim // 128
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], S_LAYOUT.warps_per_cta, [16, CFG.rows, 32])
        a = gl.full([CFG.tile, CFG.rows], 0, gl.int32, LAYOUT)
        b = a
        c = a
        for block in gl.static_range(BLOCKS):
            k = k_tiles.index(stage * BLOCKS + block)
            q = opaque + block
            a = warpgroup_mma(k, q_smem.index(q).permute((1, 0)), a, use_acc=block > 0, is_async=True)
            b = warpgroup_mma(k, q_smem.index(q + BLOCKS).permute((1, 0)), b, use_acc=block > 0, is_async=True)
            c = warpgroup_mma(k, q_smem.index(q + 2 * BLOCKS).permute((1, 0)), c, use_acc=block > 0, is_async=True)
        a, b, c = warpgroup_mma_wait(0, deps=[a, b, c])
        s = (a * 128 + b).to(gl.float32) * 128.0 + c.to(gl.float32)
        s = gl.convert_layout(s, S_LAYOUT, assert_trivial=True)
    return s


@gluon.jit
def scores(k_tiles, stage, q_smem, opaque, zero, CFG: gl.constexpr, S_LAYOUT: gl.constexpr):
    """S^T of a tile. `opaque` is 0: addresses that depend on it are not kept in registers from tile to tile."""
    if CFG.kv_format == "plain" or (CFG.kv_format == "int8" and CFG.rows <= 32):
        s = _stored_scores(k_tiles, stage, q_smem, opaque, CFG, S_LAYOUT)
    elif CFG.kv_format == "int8" or CFG.kv_format == "int4":
        s = _integer_scores(k_tiles, stage, q_smem, opaque, CFG, S_LAYOUT)
    else:
        s = zero
        for part in gl.static_range(CFG.head_dim // 128):
            raw = k_tiles.index(stage * (CFG.head_dim // 128) + part).load(CFG.k_layout)
            a = _k_operand(decode_k(raw, CFG), CFG, S_LAYOUT)
            s = warpgroup_mma(a, q_smem.index(opaque + part).permute((1, 0)), s, use_acc=part > 0, is_async=True)
            s, a = warpgroup_mma_wait(0, deps=[s, a])
    return s


@gluon.jit
def _integer_scores(k_tiles, stage, q_smem, opaque, CFG: gl.constexpr, S_LAYOUT: gl.constexpr):
    """S^T of codes and the 7-bit digits of integer queries, highest first: exact up to the last sum."""
    BLOCKS: gl.constexpr = CFG.head_dim // 128
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], S_LAYOUT.warps_per_cta, [16, CFG.rows, 32])
    zero = gl.full([CFG.tile, CFG.rows], 0, gl.int32, LAYOUT)
    if CFG.kv_format == "int4":
        low, high = split_int4(k_tiles.index(stage).load(CFG.k_layout))
        low = _k_bytes(low, CFG, LAYOUT)
        high = _k_bytes(high, CFG, LAYOUT)
        a = warpgroup_mma(low, q_smem.index(opaque).permute((1, 0)), zero, use_acc=False, is_async=True)
        a = warpgroup_mma(high, q_smem.index(opaque + 1).permute((1, 0)), a, is_async=True)
        b = zero
        if CFG.rows > 32:
            # Two accumulators would not fit the registers.
            b = warpgroup_mma_wait(0, deps=[a]) * 128
        b = warpgroup_mma(low, q_smem.index(opaque + 2).permute((1, 0)), b, use_acc=CFG.rows > 32, is_async=True)
        b = warpgroup_mma(high, q_smem.index(opaque + 3).permute((1, 0)), b, is_async=True)
        # A wait cannot name `low` and `high`, which are bytes; nothing comes in between that could take their registers.
        if CFG.rows > 32:
            b = warpgroup_mma_wait(0, deps=[b])
        else:
            a, b = warpgroup_mma_wait(0, deps=[a, b])
            b = a * 128 + b
        s = b.to(gl.float32)
    else:
        # Digit after digit: three accumulators would not fit the registers.
        b = zero
        c = zero
        for block in gl.static_range(BLOCKS):
            k = k_tiles.index(stage * BLOCKS + block)
            b = warpgroup_mma(k, q_smem.index(opaque + block).permute((1, 0)), b, use_acc=block > 0, is_async=True)
        b = warpgroup_mma_wait(0, deps=[b]) * 128
        for block in gl.static_range(BLOCKS):
            k = k_tiles.index(stage * BLOCKS + block)
            q = opaque + block
            b = warpgroup_mma(k, q_smem.index(q + BLOCKS).permute((1, 0)), b, is_async=True)
            c = warpgroup_mma(k, q_smem.index(q + 2 * BLOCKS).permute((1, 0)), c, use_acc=block > 0, is_async=True)
        b, c = warpgroup_mma_wait(0, deps=[b, c])
        s = b.to(gl.float32) * 128.0 + c.to(gl.float32)
    return gl.convert_layout(s, S_LAYOUT, assert_trivial=True)


@gluon.jit
def _k_bytes(x, CFG: gl.constexpr, LAYOUT: gl.constexpr):
    """`_k_operand` of bytes."""
    y = x.reshape([CFG.tile, 4, 4, 2, 4]).permute(0, 2, 3, 1, 4).reshape([CFG.tile, 128])
    return gl.convert_layout(y, gl.DotOperandLayout(0, LAYOUT, 4), assert_trivial=True)


@gluon.jit
def add_values(v_tiles, stage, p_smem, acc, CFG: gl.constexpr, O_LAYOUT: gl.constexpr, num_warps: gl.constexpr):
    """acc (a tuple of accumulators [dims, rows]) + V^T P^T of a tile."""
    if CFG.kv_format == "plain":
        gl.thread_barrier()
        first = warpgroup_mma(v_tiles.index(stage).permute((1, 0)), p_smem, acc[0], is_async=True)
        sums = (warpgroup_mma_wait(0, deps=[first]),)
    elif num_warps == 8:
        first = acc[0]
        for part in gl.static_range(2):
            a = _v_operand(_decode_keys(v_tiles.index(stage).slice(64 * part, 64, 0), CFG), CFG, O_LAYOUT, num_warps)
            if part == 0:
                gl.thread_barrier()
            first = warpgroup_mma(a, p_smem.slice(64 * part, 64, 0), first, is_async=True)
            first, a = warpgroup_mma_wait(0, deps=[first, a])
        sums = (first,)
    else:
        a = _v_operand(_decode_dims(v_tiles, stage, 0, CFG), CFG, O_LAYOUT, num_warps)
        gl.thread_barrier()
        first = warpgroup_mma(a, p_smem, acc[0], is_async=True)
        first, a = warpgroup_mma_wait(0, deps=[first, a])
        if CFG.head_dim == 128:
            sums = (first,)
        else:
            b = _v_operand(_decode_dims(v_tiles, stage, 1, CFG), CFG, O_LAYOUT, num_warps)
            second = warpgroup_mma(b, p_smem, acc[1], is_async=True)
            second, b = warpgroup_mma_wait(0, deps=[second, b])
            sums = (first, second)
    return sums


@gluon.jit
def _decode_keys(v_part, CFG: gl.constexpr):
    """Values of all dims of 64 keys, for 8 warps."""
    if CFG.kv_format == "int4":
        raw = v_part.load(gl.SliceLayout(2, CFG.v_layout)).expand_dims(2)
        nibble = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, CFG.v_layout)))
        raw, shift = gl.broadcast(raw, (4 * nibble).to(gl.uint8)[None, None, :])
        values = decode_v_int4(raw, shift)
    else:
        values = decode_v(v_part.load(CFG.v_layout), CFG)
    return values


@gluon.jit
def _decode_dims(v_tiles, stage, part: gl.constexpr, CFG: gl.constexpr):
    """Values of 128 dims of 64 keys, for 4 warps: a half of the columns, of int4 the low or the high nibbles."""
    if CFG.kv_format == "int4":
        raw = v_tiles.index(stage).load(CFG.v_layout)
        values = decode_v_int4(raw, gl.full([64, 128], 4 * part, gl.uint8, CFG.v_layout))
    else:
        values = decode_v(v_tiles.index(stage).slice(128 * part, 128, 1).load(CFG.v_layout), CFG)
    return values


@gluon.jit
def clean_values(v_tile, bad_smem, CFG: gl.constexpr, num_warps: gl.constexpr):
    """Sets what is not finite in a tile of V to 0, and `bad_smem` [tile] to 1 where a key had such a value, else to 0."""
    COLS: gl.constexpr = v_tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [num_warps, 1], [1, 0])
    for part in gl.static_range(CFG.tile // 32):
        rows = v_tile.slice(32 * part, 32, 0)
        raw = rows.load(layout)
        if CFG.kv_format == "plain":
            finite = gl.abs(raw.to(gl.float32)) < float("inf")
        elif CFG.kv_format == "e4m3":
            finite = (raw & 0x7F) != 0x7F
        else:
            finite = (raw & 0x7F) < 0x7C
        rows.store(gl.where(finite, raw, 0.0 if CFG.kv_format == "plain" else 0))
        bad_smem.slice(32 * part, 32, 0).store(gl.max(gl.where(finite, 0.0, 1.0), 1))
    fence_async_shared()
    gl.thread_barrier()
