"""Class F: chained products into scratch or state."""

import triton
import triton.language as tl


@triton.jit
def partial_out(part_ptr, lse_ptr, SPLITS: tl.constexpr, HEADS: tl.constexpr, QMAX: tl.constexpr, D: tl.constexpr):
    # Writer and combiner wrap alike: the output looks right while foreign memory is overwritten.
    req = tl.program_id(0)
    split = tl.program_id(1)
    head = tl.program_id(2)
    offs_d = tl.arange(0, D)
    for i in range(QMAX):
        row = ((req * HEADS + head) * QMAX + i) * SPLITS + split
        tl.store(part_ptr + row * D + offs_d, tl.zeros([D], tl.float32))  # expect: BP103|BP105 req 2,184
        tl.store(lse_ptr + row, 0.0)


@triton.jit
def partial_out_fixed(
    part_ptr, lse_ptr, SPLITS: tl.constexpr, HEADS: tl.constexpr, QMAX: tl.constexpr, D: tl.constexpr
):  # expect: clean
    req = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    head = tl.program_id(2)
    offs_d = tl.arange(0, D)
    for i in range(QMAX):
        row = ((req * HEADS + head) * QMAX + i) * SPLITS + split
        tl.store(part_ptr + row * D + offs_d, tl.zeros([D], tl.float32))
        tl.store(lse_ptr + row, 0.0)


@triton.jit
def chunk_state(h_ptr, chunks, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):
    # One state of K x V per chunk and head: 262,144 tokens in chunks of 64 are 4,096 chunks.
    bh = tl.program_id(0)
    b = bh // H
    head = bh % H
    offs = tl.arange(0, BK)
    for chunk in range(chunks):
        base = ((b * chunks + chunk) * H + head) * K * V  # expect: BP103|BP105 chunk 2,048
        tl.store(h_ptr + base + offs, tl.zeros([BK], tl.float32))


@triton.jit
def chunk_state_fixed(h_ptr, chunks, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr):  # expect: clean
    bh = tl.program_id(0)
    b = bh // H
    head = bh % H
    offs = tl.arange(0, BK)
    for chunk in range(chunks):
        base = ((b * chunks + chunk).to(tl.int64) * H + head) * K * V
        tl.store(h_ptr + base + offs, tl.zeros([BK], tl.float32))


@triton.jit
def token_state(x_ptr, T, H: tl.constexpr, K: tl.constexpr):
    # [1, T, H, K]: 262,144 tokens at H 64, K 128.
    token = tl.program_id(0)
    head = tl.program_id(1)
    offs = tl.arange(0, K)
    base = (token * H + head) * K  # expect: BP103|BP105 token 262,144
    tl.store(x_ptr + base + offs, tl.zeros([K], tl.float32))


@triton.jit
def token_state_fixed(x_ptr, T, H: tl.constexpr, K: tl.constexpr):  # expect: clean
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    offs = tl.arange(0, K)
    base = (token * H + head) * K
    tl.store(x_ptr + base + offs, tl.zeros([K], tl.float32))


@triton.jit
def growing_offset(out_ptr, in_ptr, turns, step, BLOCK: tl.constexpr):
    # Loop-carried: no product in sight, the sum of all turns is one.
    offs = tl.arange(0, BLOCK)
    base = 0
    for _ in range(turns):
        x = tl.load(in_ptr + base + offs)
        tl.store(out_ptr + offs, x)
        base += step  # expect: BP102|BP105|BP106 *


@triton.jit
def growing_offset_fixed(out_ptr, in_ptr, turns, step, BLOCK: tl.constexpr):  # expect: clean
    # A pointer that moves is 64 bits wide on every turn.
    offs = tl.arange(0, BLOCK)
    src_ptr = in_ptr
    for _ in range(turns):
        x = tl.load(src_ptr + offs)
        tl.store(out_ptr + offs, x)
        src_ptr += step


@triton.jit
def split_scratch(scratch_ptr, splits, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    # pid x splits x rows x D
    pid = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    for split in range(splits):
        base = pid * splits * rows * D  # expect: BP103|BP105 pid 256
        tl.store(scratch_ptr + base + split * rows * D + offs, tl.zeros([BLOCK], tl.float32))


@triton.jit
def split_scratch_fixed(scratch_ptr, splits, rows, D: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    for split in range(splits):
        base = pid * splits * rows * D
        tl.store(scratch_ptr + base + split * rows * D + offs, tl.zeros([BLOCK], tl.float32))


@triton.jit
def masked_volume(x_ptr, N, H, W, BW: tl.constexpr):
    # Each index is masked by the length of its axis, and the product of the lengths is what wraps.
    i = tl.program_id(0)
    j = tl.program_id(1)
    k = tl.program_id(2) * BW + tl.arange(0, BW)
    inside = (i < N) & (j < H) & (k < W)
    tl.store(x_ptr + ((i * H + j) * W + k), 0.0, mask=inside)  # expect: BP103|BP105 i 1,024


@triton.jit
def masked_volume_fixed(x_ptr, N, H, W, BW: tl.constexpr):  # expect: clean
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    k = tl.program_id(2) * BW + tl.arange(0, BW)
    inside = (i < N) & (j < H) & (k < W)
    tl.store(x_ptr + ((i * H + j) * W + k), 0.0, mask=inside)


@triton.jit
def small_volume(x_ptr, N, H, W, BW: tl.constexpr):  # expect: clean
    # The same text: the masks keep every index below N * H * W, which fits.
    i = tl.program_id(0)
    j = tl.program_id(1)
    k = tl.program_id(2) * BW + tl.arange(0, BW)
    inside = (i < N) & (j < H) & (k < W)
    tl.store(x_ptr + ((i * H + j) * W + k), 0.0, mask=inside)


META = {
    "partial_out": {
        "klass": "F",
        "report": "split-KV scratch of the first system: 24 heads, QMAX 10, 16 splits",
        "args": {"part_ptr": "*fp32", "lse_ptr": "*fp32", "SPLITS": 16, "HEADS": 24, "QMAX": 10, "D": 256},
        "grid": [65536, 16, 24],
        "walls": [["req", "(((req * 24 + head) * 10 + i) * 16 + split) * 256", {"head": 23, "i": 9, "split": 15}]],
        "safe": ["((65535 * 24 + 23) * 10 + 9) * 16 + 15"],
    },
    "chunk_state": {
        "klass": "F",
        "report": "fla #1082, one sequence of 262,144 tokens, heads 64, K 128, V 128",
        "args": {"h_ptr": "*fp32", "chunks": 4096, "H": 64, "K": 128, "V": 128, "BK": 128},
        "grid": [64],
        "walls": [["chunk", "(chunk * 64 + head) * 128 * 128", {"head": 0}]],
        "safe": ["4095 * 64 + 63"],
    },
    "token_state": {
        "klass": "F",
        "report": "fla #1080",
        "args": {"x_ptr": "*fp32", "T": 1048576, "H": 64, "K": 128},
        "grid": [1048576, 64],
        "walls": [["token", "(token * 64 + head) * 128", {"head": 0}]],
        "safe": ["1048575 * 64 + 63"],
    },
    "growing_offset": {
        "klass": "F",
        "report": "a running offset",
        "args": {"out_ptr": "*bf16", "in_ptr": "*bf16", "turns": 4096, "step": 1048576, "BLOCK": 128},
        "grid": [1],
        "walls": [["turn", "turn * 1048576", {}, 2048]],
        "safe": ["1048576"],
    },
    "masked_volume": {
        "klass": "F",
        "report": "a volume whose three indices are masked",
        "args": {"x_ptr": "*fp32", "N": 4096, "H": 2048, "W": 1024, "BW": 128},
        "grid": [4096, 2048, 8],
        "walls": [["i", "(i * 2048 + j) * 1024 + k", {"j": 0, "k": 0}]],
        "safe": ["7 * 128 + 127"],
    },
    "small_volume": {
        "klass": "5",
        "report": "a volume whose three indices are masked",
        "args": {"x_ptr": "*fp32", "N": 999, "H": 999, "W": 999, "BW": 128},
        "grid": [4096, 2048, 8],
        "safe": ["(998 * 999 + 998) * 999 + 998"],
    },
    "split_scratch": {
        "klass": "F",
        "report": "pid x splits x rows x D",
        "args": {"scratch_ptr": "*fp32", "splits": 64, "rows": 512, "D": 256, "BLOCK": 256},
        "grid": [1024],
        "walls": [["pid", "pid * 64 * 512 * 256", {}]],
        "safe": ["63 * 512 * 256"],
    },
}
