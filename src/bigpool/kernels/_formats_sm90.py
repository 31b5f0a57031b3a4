"""Codes of quantised caches to fp16 in registers on Hopper, four at a time, exactly.

A column tile of K is the left operand of the scores; its contraction index may run in any order that the queries share, so each
byte pair becomes the pair of values that lies next to it. V is transposed on the way: its pairs are of two keys and one dim, so
two words of neighbouring keys are interleaved first. int8 and int4 codes are put into the mantissa of 1024 and the excess is
subtracted: exact, one instruction for two values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# bigpool.formats.MIN_SCALE
MIN_SCALE = gl.constexpr(2.0**-100)
INT8_K = gl.constexpr("""{
.reg .b32 x, excess;
mov.b32 excess, 0xE480E480;
xor.b32 x, $2, 0x80808080;
prmt.b32 $0, x, 0x64646464, 0x4140;
prmt.b32 $1, x, 0x64646464, 0x4342;
add.rn.f16x2 $0, $0, excess;
add.rn.f16x2 $1, $1, excess;
}""")
INT8_V = gl.constexpr("""{
.reg .b32 x, y, low, high, excess;
mov.b32 excess, 0xE480E480;
xor.b32 x, $4, 0x80808080;
xor.b32 y, $5, 0x80808080;
prmt.b32 low, x, y, 0x5140;
prmt.b32 high, x, y, 0x7362;
prmt.b32 $0, low, 0x64646464, 0x4140;
prmt.b32 $1, low, 0x64646464, 0x4342;
prmt.b32 $2, high, 0x64646464, 0x4140;
prmt.b32 $3, high, 0x64646464, 0x4342;
add.rn.f16x2 $0, $0, excess;
add.rn.f16x2 $1, $1, excess;
add.rn.f16x2 $2, $2, excess;
add.rn.f16x2 $3, $3, excess;
}""")
E4M3_K = gl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")
E4M3_V = gl.constexpr("""{
.reg .b32 low, high;
.reg .b16 a, b, c, d;
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $4, $5, 0x7362;
mov.b32 {a, b}, low;
mov.b32 {c, d}, high;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
cvt.rn.f16x2.e4m3x2 $2, c;
cvt.rn.f16x2.e4m3x2 $3, d;
}""")
E5M2_K = gl.constexpr("""{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}""")
E5M2_V = gl.constexpr("""{
.reg .b32 low, high;
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $4, $5, 0x7362;
prmt.b32 $0, low, 0, 0x1404;
prmt.b32 $1, low, 0, 0x3424;
prmt.b32 $2, high, 0, 0x1404;
prmt.b32 $3, high, 0, 0x3424;
}""")
# The low nibbles as bytes, then the high ones.
INT4_BYTES = gl.constexpr("""{
.reg .b32 x;
shr.u32 x, $2, 4;
and.b32 $0, $2, 0x0F0F0F0F;
and.b32 $1, x, 0x0F0F0F0F;
}""")
# One nibble of each byte of two keys, less 8: $6 is the shift, 0 or 4, in every byte.
INT4_V = gl.constexpr("""{
.reg .b32 low, high, x, y, excess, s, s8;
mov.b32 excess, 0xE408E408;
and.b32 s, $6, 0xFF;
add.u32 s8, s, 8;
prmt.b32 low, $4, $5, 0x5410;
prmt.b32 high, $4, $5, 0x7632;
shr.u32 x, low, s;
shr.u32 y, low, s8;
lop3.b32 $0, x, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, y, 0x000F000F, 0x64006400, 0xEA;
shr.u32 x, high, s;
shr.u32 y, high, s8;
lop3.b32 $2, x, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $3, y, 0x000F000F, 0x64006400, 0xEA;
add.rn.f16x2 $0, $0, excess;
add.rn.f16x2 $1, $1, excess;
add.rn.f16x2 $2, $2, excess;
add.rn.f16x2 $3, $3, excess;
}""")
# Low nibbles of 8 bytes, then the high ones; $10 holds minus (1024 + zero point) twice.
INT4_VALUES = gl.constexpr("""{
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
LOG2 = gl.constexpr("lg2.approx.f32 $0, $1;")
INVERSE = gl.constexpr("rcp.approx.f32 $0, $1;")


@gluon.jit
def decode_k(raw, CFG: gl.constexpr):
    if CFG.kv_format == "int8":
        values = gl.inline_asm_elementwise(INT8_K, "=&r,=&r,r", [raw], dtype=gl.float16, is_pure=True, pack=4)
    elif CFG.kv_format == "e4m3":
        values = gl.inline_asm_elementwise(E4M3_K, "=&r,=&r,r", [raw], dtype=gl.float16, is_pure=True, pack=4)
    else:
        values = gl.inline_asm_elementwise(E5M2_K, "=&r,=&r,r", [raw], dtype=gl.float16, is_pure=True, pack=4)
    return values


@gluon.jit
def split_int4(raw):
    """Two tiles of codes 0..15 as int8: the low nibbles, the high ones."""
    types: gl.constexpr = (gl.int8, gl.int8)
    return gl.inline_asm_elementwise(INT4_BYTES, "=&r,=&r,r", [raw], dtype=types, is_pure=True, pack=4)


@gluon.jit
def decode_v(raw, CFG: gl.constexpr):
    if CFG.kv_format == "int8":
        values = gl.inline_asm_elementwise(INT8_V, "=&r,=&r,=&r,=&r,r,r", [raw], dtype=gl.float16, is_pure=True, pack=8)
    elif CFG.kv_format == "e4m3":
        values = gl.inline_asm_elementwise(E4M3_V, "=&r,=&r,=&r,=&r,r,r", [raw], dtype=gl.float16, is_pure=True, pack=8)
    else:
        values = gl.inline_asm_elementwise(E5M2_V, "=&r,=&r,=&r,=&r,r,r", [raw], dtype=gl.float16, is_pure=True, pack=8)
    return values


@gluon.jit
def decode_v_int4(raw, shift):
    return gl.inline_asm_elementwise(INT4_V, "=&r,=&r,=&r,=&r,r,r,r,r", [raw, shift], dtype=gl.float16, is_pure=True, pack=8)


@gluon.jit
def split_int4_values(raw, bias):
    """Two tiles of values: the low nibbles, the high ones, less the zero points; `bias` is minus (1024 + zero point), fp16."""
    types: gl.constexpr = (gl.float16, gl.float16)
    constraints: gl.constexpr = "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r"
    return gl.inline_asm_elementwise(INT4_VALUES, constraints, [raw, bias], dtype=types, is_pure=True, pack=8)


@gluon.jit
def log2_approx(x):
    """log2, to 2^-22."""
    return gl.inline_asm_elementwise(LOG2, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def inverse_approx(x):
    """1 / x, to one unit in the last place."""
    return gl.inline_asm_elementwise(INVERSE, "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)
