"""Codes of a quantised cache become exact values of q's dtype, and outputs become fp8: bit arithmetic, right on every card.

"plain" is plain Triton: it leaves e4m3 2^8 too small (its exponent field in that of fp16), which `decode_unit` says, so that
scales make up for it. "asm" does four codes at a time on NVIDIA cards: a byte under the upper byte of 1024 (fp16) or 128 (bf16)
is that number plus the code, and one subtraction of two halves takes it away again.
"""

import triton
import triton.language as tl

# Four bytes in $2 (zero points in $3, not of one key in every layout) to two pairs of halves. `prmt` 0x4140 puts bytes 0 and 1
# under byte 0 of the second operand, 0x4342 bytes 2 and 3. 0x64 over 8 bits is 1024 + them as fp16, 0x43 over 7 bits is
# 128 + them as bf16.
INT8_TO_FP16 = tl.constexpr("""{ .reg .b32 t, u, c; xor.b32 t, $2, 0x80808080; mov.b32 u, 0x64646464; mov.b32 c, 0x64806480;
prmt.b32 $0, t, u, 0x4140; prmt.b32 $1, t, u, 0x4342; sub.f16x2 $0, $0, c; sub.f16x2 $1, $1, c; }""")
# Two's complement: the lower 7 bits less the uppermost one, each as 128 + it.
INT8_TO_BF16 = tl.constexpr("""{ .reg .b32 u, a, b, n, p, q; mov.b32 u, 0x43434343; mov.b32 n, 0xBF80BF80;
prmt.b32 a, $2, u, 0x4140; prmt.b32 b, $2, u, 0x4342; and.b32 p, a, 0xFF80FF80; and.b32 q, b, 0xFF80FF80;
and.b32 a, a, 0xFF7FFF7F; and.b32 b, b, 0xFF7FFF7F; fma.rn.bf16x2 $0, p, n, a; fma.rn.bf16x2 $1, q, n, b; }""")
INT4_LOW_TO_FP16 = tl.constexpr("""{ .reg .b32 t, u, a, b, y, z; and.b32 t, $2, 0x0F0F0F0F; mov.b32 u, 0x64646464;
prmt.b32 a, t, u, 0x4140; prmt.b32 b, t, u, 0x4342; prmt.b32 y, $3, u, 0x4140; prmt.b32 z, $3, u, 0x4342;
sub.f16x2 $0, a, y; sub.f16x2 $1, b, z; }""")
INT4_HIGH_TO_FP16 = tl.constexpr("""{ .reg .b32 t, u, a, b, y, z; shr.u32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;
mov.b32 u, 0x64646464; prmt.b32 a, t, u, 0x4140; prmt.b32 b, t, u, 0x4342; prmt.b32 y, $3, u, 0x4140; prmt.b32 z, $3, u, 0x4342;
sub.f16x2 $0, a, y; sub.f16x2 $1, b, z; }""")
INT4_LOW_TO_BF16 = tl.constexpr("""{ .reg .b32 t, u, a, b, y, z, n; and.b32 t, $2, 0x0F0F0F0F; mov.b32 u, 0x43434343;
mov.b32 n, 0xBF80BF80; prmt.b32 a, t, u, 0x4140; prmt.b32 b, t, u, 0x4342; prmt.b32 y, $3, u, 0x4140; prmt.b32 z, $3, u, 0x4342;
fma.rn.bf16x2 $0, y, n, a; fma.rn.bf16x2 $1, z, n, b; }""")
INT4_HIGH_TO_BF16 = tl.constexpr("""{ .reg .b32 t, u, a, b, y, z, n; shr.u32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;
mov.b32 u, 0x43434343; mov.b32 n, 0xBF80BF80; prmt.b32 a, t, u, 0x4140; prmt.b32 b, t, u, 0x4342;
prmt.b32 y, $3, u, 0x4140; prmt.b32 z, $3, u, 0x4342;
fma.rn.bf16x2 $0, y, n, a; fma.rn.bf16x2 $1, z, n, b; }""")
# From sm_89 on.
E4M3_TO_FP16 = tl.constexpr("""{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""")
E4M3_TO_BF16 = tl.constexpr("""{ .reg .b16 a, b, c, d; .reg .b32 h, k; .reg .f32 w, x, y, z; mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 h, a; cvt.rn.f16x2.e4m3x2 k, b; mov.b32 {a, b}, h; mov.b32 {c, d}, k; cvt.f32.f16 w, a; cvt.f32.f16 x, b;
cvt.f32.f16 y, c; cvt.f32.f16 z, d; cvt.rn.bf16x2.f32 $0, x, w; cvt.rn.bf16x2.f32 $1, z, y; }""")
# e5m2 is the upper byte of an fp16.
E5M2_TO_FP16 = tl.constexpr("""{ .reg .b32 u; mov.b32 u, 0; prmt.b32 $0, $2, u, 0x1404; prmt.b32 $1, $2, u, 0x3424; }""")
E5M2_TO_BF16 = tl.constexpr("""{ .reg .b16 a, b, c, d; .reg .b32 u, h, k; .reg .f32 w, x, y, z; mov.b32 u, 0;
prmt.b32 h, $2, u, 0x1404; prmt.b32 k, $2, u, 0x3424; mov.b32 {a, b}, h; mov.b32 {c, d}, k; cvt.f32.f16 w, a; cvt.f32.f16 x, b;
cvt.f32.f16 y, c; cvt.f32.f16 z, d; cvt.rn.bf16x2.f32 $0, x, w; cvt.rn.bf16x2.f32 $1, z, y; }""")


@triton.jit
def decode_unit(KV_FORMAT: tl.constexpr, CONVERT: tl.constexpr):
    """What a decoded 1 stands for."""
    return 256.0 if KV_FORMAT == "e4m3" and CONVERT == "plain" else 1.0


@triton.jit
def decode(raw, zero, KV_FORMAT: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr, CONVERT: tl.constexpr):
    """Values [N, D] of codes `raw`. int4: of their low or high nibbles less the zero points `zero` [N]."""
    if KV_FORMAT == "plain":
        values = raw
    elif CONVERT == "asm":
        values = _decode_asm(raw, zero, KV_FORMAT, HIGH, DTYPE)
    elif KV_FORMAT == "int8":
        values = raw.to(DTYPE)
    elif KV_FORMAT == "int4":
        nibble = (raw >> 4) if HIGH else (raw & 15)
        values = (nibble.to(tl.int32) - zero[:, None]).to(DTYPE)
    elif KV_FORMAT == "e4m3":
        bits = raw.to(tl.uint16)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        halves = tl.where((bits & 0x7F) == 0x7F, 0x7E00, halves).to(tl.uint16)
        values = halves.to(tl.float16, bitcast=True).to(DTYPE)
    else:
        values = (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DTYPE)
    return values


@triton.jit
def decode_parts(raw, words, KV_FORMAT: tl.constexpr, DTYPE: tl.constexpr, CONVERT: tl.constexpr):
    """A tuple of tiles, a part of the head dim each, of a tile as it is stored; `words` [N] are its scales, for int4."""
    if KV_FORMAT == "int4":
        zero = words.to(tl.int32, bitcast=True) & 15
        parts = (decode(raw, zero, KV_FORMAT, False, DTYPE, CONVERT), decode(raw, zero, KV_FORMAT, True, DTYPE, CONVERT))
    else:
        parts = (decode(raw, words, KV_FORMAT, False, DTYPE, CONVERT),)
    return parts


@triton.jit
def _decode_asm(raw, zero, KV_FORMAT: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    if KV_FORMAT == "int4":
        points = tl.broadcast_to(zero.to(tl.uint8)[:, None], raw.shape)
        if DTYPE == tl.float16:  # noqa: SIM300
            ASM: tl.constexpr = INT4_HIGH_TO_FP16 if HIGH else INT4_LOW_TO_FP16
            values = tl.inline_asm_elementwise(ASM, "=&r,=&r,r,r", [raw, points], dtype=tl.float16, is_pure=True, pack=4)
        else:
            ASM: tl.constexpr = INT4_HIGH_TO_BF16 if HIGH else INT4_LOW_TO_BF16
            values = tl.inline_asm_elementwise(ASM, "=&r,=&r,r,r", [raw, points], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif DTYPE == tl.float16:  # noqa: SIM300
        FP8_ASM: tl.constexpr = E4M3_TO_FP16 if KV_FORMAT == "e4m3" else E5M2_TO_FP16
        ASM: tl.constexpr = INT8_TO_FP16 if KV_FORMAT == "int8" else FP8_ASM
        values = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [raw], dtype=tl.float16, is_pure=True, pack=4)
    else:
        FP8_ASM: tl.constexpr = E4M3_TO_BF16 if KV_FORMAT == "e4m3" else E5M2_TO_BF16
        ASM: tl.constexpr = INT8_TO_BF16 if KV_FORMAT == "int8" else FP8_ASM
        values = tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [raw], dtype=tl.bfloat16, is_pure=True, pack=4)
    return values


@triton.jit
def encode_fp8(x, FP8: tl.constexpr):
    """fp8 codes, uint8, of fp32 values: to nearest, ties to even, saturating; NaN becomes 0x7f."""
    # A normal value keeps the upper bits of its fp32, the exponent moved by OFFSET; ROUNDER is so large that the last bit of a
    # sum with it is worth the smallest subnormal.
    if FP8 == "e4m3":
        LARGEST: tl.constexpr = 448.0
        SMALLEST: tl.constexpr = 2.0**-6
        ROUNDER: tl.constexpr = 2.0**14
        DROPPED: tl.constexpr = 20
        OFFSET: tl.constexpr = 120 << 3
    else:
        LARGEST: tl.constexpr = 57344.0
        SMALLEST: tl.constexpr = 2.0**-14
        ROUNDER: tl.constexpr = 2.0**7
        DROPPED: tl.constexpr = 21
        OFFSET: tl.constexpr = 112 << 2
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.where(tl.abs(x) < LARGEST, tl.abs(x), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    rounded = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - OFFSET
    subnormal = (size + ROUNDER).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(size < SMALLEST, subnormal, normal.to(tl.int32)) | sign.to(tl.int32)
    return tl.where(x == x, code, 0x7F).to(tl.uint8)
