"""Scores between their product and the softmax, in units of log2."""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
# Below it the quotient of exponentials loses digits, and the next term of the series is smaller than they are.
SMALL = tl.constexpr(0.125)


@triton.jit
def tanh_of(y, twice):
    """tanh(y), `twice` being exp2 of 2 y in units of log2: by that, or where y is small by its series."""
    z = y * y
    series = y + y * z * (-1.0 / 3 + z * (2.0 / 15 + z * (-17.0 / 315)))
    return tl.where(tl.abs(y) < SMALL, series, 1.0 - 2.0 / (1.0 + twice))


@triton.jit
def soft_capped(s, CAP: tl.constexpr):
    """CAP tanh(s / CAP) of scores in units of log2."""
    y = s * (1.0 / (CAP * LOG2_E))
    return (CAP * LOG2_E) * tanh_of(y, tl.exp2(s * (2.0 / CAP)))
