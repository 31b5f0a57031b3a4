"""Runs the Gluon kernels for Hopper on the CPU, for tests: what they compute, and whether their warps wait as they must.

Values are numpy arrays with Triton's types: int32 wraps, bf16 and fp8 are rounded. Pointers are real addresses, so a wild one
kills the process. Warps of `warp_specialize` take turns in an order that a seed decides; copies by TMA land early, late or in
between; a product is computed when it is waited for. `Hazard` is raised for what a GPU would do in silence: an operand that
changes under a product or is read before its copy landed, a write that the matrix units may not see, a barrier that is
signalled while other warps may still read, and a deadlock.

Not modelled: races between the warps of one partition (but for the signal above), registers, bank conflicts, and layouts, but
where inline assembly takes several registers at once: then a thread's registers are those of the layout.
"""

from .launch import Emulated
from .threads import Hazard

__all__ = ["Emulated", "Hazard"]
