"""Non-fault 4: integers that reach no address, no mask and no bound wrap on purpose."""

import triton
import triton.language as tl


@triton.jit
def dropout(out_ptr, in_ptr, seed, p, BLOCK: tl.constexpr):  # expect: clean
    # philox multiplies in 32 bits on purpose; its result masks values, not lanes.
    pid = tl.program_id(1)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    random = tl.rand(seed, offs)
    x = tl.load(in_ptr + offs)
    tl.store(out_ptr + offs, tl.where(random > p, x / (1 - p), 0.0))


@triton.jit
def hashed_value(out_ptr, keys_ptr, BLOCK: tl.constexpr):  # expect: clean
    # A multiplicative hash that is stored, not followed.
    pid = tl.program_id(1)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + offs)
    hashed = (key * 1000003) ^ (key << 13)
    tl.store(out_ptr + offs, hashed)


@triton.jit
def hashed_bucket(out_ptr, keys_ptr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    # An unsigned hash that wraps on purpose and is then cut to a bucket.
    pid = tl.program_id(1)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + offs).to(tl.uint32)
    hashed = key * 2654435761
    bucket = (hashed >> 16) % BUCKETS
    tl.atomic_add(out_ptr + bucket.to(tl.int32), 1)


@triton.jit
def packed_keys(out_ptr, scores_ptr, BLOCK: tl.constexpr):  # expect: clean
    # Value and index packed into one key for a reduction, and taken apart again by a mask.
    offs = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + offs)
    key = (score << 16) | offs
    best = tl.max(key, 0)
    tl.store(out_ptr + (best & 0xFFFF), 1)


@triton.jit
def float_scale(out_ptr, in_ptr, a, b, BLOCK: tl.constexpr):  # expect: clean
    # An integer product that becomes a float factor.
    offs = tl.arange(0, BLOCK)
    factor = (a * b).to(tl.float32)
    tl.store(out_ptr + offs, tl.load(in_ptr + offs) * factor)


@triton.jit
def int8_dot(out_ptr, a_ptr, b_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # expect: clean
    # int32 accumulators of an int8 product are data.
    offs_m = tl.arange(0, M)
    offs_n = tl.arange(0, N)
    offs_k = tl.arange(0, K)
    a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :])
    b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :])
    acc = tl.dot(a, b, out_dtype=tl.int32)
    tl.store(out_ptr + offs_m[:, None] * N + offs_n[None, :], acc * acc)


META = {
    "dropout": {
        "klass": "4",
        "report": "philox",
        "args": {"out_ptr": "*fp32", "in_ptr": "*fp32", "seed": "i32", "p": "fp32", "BLOCK": 1024},
        "grid": [1, 65535],
        "safe": ["65534 * 1024 + 1023"],
    },
    "hashed_value": {
        "klass": "4",
        "report": "a hash",
        "args": {"out_ptr": "*i32", "keys_ptr": "*i32", "BLOCK": 1024},
        "grid": [1, 65535],
        "safe": ["65534 * 1024 + 1023"],
    },
    "hashed_bucket": {
        "klass": "4",
        "report": "an unsigned hash cut to a bucket",
        "args": {"out_ptr": "*i32", "keys_ptr": "*i32", "BUCKETS": 4096, "BLOCK": 1024},
        "grid": [1, 65535],
        "safe": ["65534 * 1024 + 1023"],
    },
    "packed_keys": {
        "klass": "4",
        "report": "packed keys",
        "args": {"out_ptr": "*i32", "scores_ptr": "*i32", "BLOCK": 1024},
        "grid": [1],
        "safe": ["1023", "65535"],
    },
    "float_scale": {
        "klass": "4",
        "report": "an integer product that is data",
        "args": {"out_ptr": "*fp32", "in_ptr": "*fp32", "a": "i32", "b": "i32", "BLOCK": 1024},
        "grid": [1],
        "safe": ["1023"],
    },
    "int8_dot": {
        "klass": "4",
        "report": "integer accumulators",
        "args": {"out_ptr": "*i32", "a_ptr": "*i8", "b_ptr": "*i8", "M": 64, "N": 64, "K": 64},
        "grid": [1],
        "safe": ["63 * 64 + 63"],
    },
}
