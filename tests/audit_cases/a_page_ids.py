"""Class A: an id loaded from a table, times the stride of what it names."""

import triton
import triton.language as tl

from .helpers_elsewhere import load_page_id, page_base, page_base_wide, split_slot


@triton.jit
def page_gather(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + page * stride_page + offs)  # expect: BP101 page 2,384
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def page_gather_fixed(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + page * stride_page + offs)
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def page_interleaved(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs = tl.arange(0, BLOCK)
    k_off = page * stride_page  # expect: BP101 page 1,192
    x = tl.load(pool_ptr + k_off + offs)
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def page_interleaved_fixed(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.cast(tl.load(table_ptr + pid), tl.int64)
    offs = tl.arange(0, BLOCK)
    k_off = page * stride_page
    x = tl.load(pool_ptr + k_off + offs)
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def page_summed(out_ptr, pool_ptr, table_ptr, stride_page, stride_slot, seq_len, PAGE: tl.constexpr, D: tl.constexpr):
    # The offsets are summed in 32 bits before they meet the pointer: the wall is one page nearer than that of the product.
    pid = tl.program_id(0)
    offs_d = tl.arange(0, D)
    for pos in range(seq_len):
        page = tl.load(table_ptr + pos // PAGE)
        slot = pos % PAGE
        offs = page * stride_page + slot * stride_slot + offs_d  # expect: BP101 page 2,383
        x = tl.load(pool_ptr + offs)
        tl.store(out_ptr + pid * D + offs_d, x)


@triton.jit
def page_summed_fixed(
    out_ptr, pool_ptr, table_ptr, stride_page, stride_slot, seq_len, PAGE: tl.constexpr, D: tl.constexpr
):  # expect: clean
    pid = tl.program_id(0)
    offs_d = tl.arange(0, D)
    for pos in range(seq_len):
        page = tl.load(table_ptr + pos // PAGE).to(tl.int64)
        slot = pos % PAGE
        offs = page * stride_page + slot * stride_slot + offs_d
        x = tl.load(pool_ptr + offs)
        tl.store(out_ptr + pid * D + offs_d, x)


@triton.jit
def latent_page(out_ptr, pool_ptr, table_ptr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # A latent cache: 480 slots of 576 values in a page.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + page * PAGE * WIDTH + offs)  # expect: BP101 page 7,768
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def latent_page_fixed(
    out_ptr, pool_ptr, table_ptr, PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + page * PAGE * WIDTH + offs)
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def slot_update(pool_ptr, new_ptr, slots_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    # Load and store wrap alike: each line needs its own cast, or the id does.
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid)
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    old = tl.load(pool_ptr + slot * WIDTH + offs, mask=mask)  # expect: BP101 slot 3,728,271
    new = tl.load(new_ptr + pid * WIDTH + offs, mask=mask)
    tl.store(pool_ptr + slot * WIDTH + offs, old + new, mask=mask)  # expect: BP101 slot 3,728,271


@triton.jit
def slot_update_partly_fixed(pool_ptr, new_ptr, slots_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid)
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    old = tl.load(pool_ptr + slot.to(tl.int64) * WIDTH + offs, mask=mask)
    new = tl.load(new_ptr + pid * WIDTH + offs, mask=mask)
    tl.store(pool_ptr + slot * WIDTH + offs, old + new, mask=mask)  # expect: BP101 slot 3,728,271


@triton.jit
def slot_update_fixed(pool_ptr, new_ptr, slots_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < WIDTH
    old = tl.load(pool_ptr + slot * WIDTH + offs, mask=mask)
    new = tl.load(new_ptr + pid * WIDTH + offs, mask=mask)
    tl.store(pool_ptr + slot * WIDTH + offs, old + new, mask=mask)


@triton.jit
def slot_split(out_ptr, pool_ptr, slots_ptr, page_size, stride_page, stride_slot, BLOCK: tl.constexpr):
    # slot // page_size is bounded by the slot, a tuple comes back from another file.
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid)
    page, rest = split_slot(slot, page_size)
    offs = tl.arange(0, BLOCK)
    src = pool_ptr + page * stride_page + rest * stride_slot + offs  # expect: BP101 slot 2,097,920
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(src))


@triton.jit
def slot_split_fixed(out_ptr, pool_ptr, slots_ptr, page_size, stride_page, stride_slot, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    slot = tl.load(slots_ptr + pid).to(tl.int64)
    page, rest = split_slot(slot, page_size)
    offs = tl.arange(0, BLOCK)
    src = pool_ptr + page * stride_page + rest * stride_slot + offs
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(src))


@triton.jit
def page_by_helper(out_ptr, pool_ptr, table_ptr, stride_row, stride_page, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    page = load_page_id(table_ptr, pid, stride_row, 0)
    base = page_base(page, stride_page)  # expect: BP101 page 2,384
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(pool_ptr + base + offs))


@triton.jit
def page_by_helper_fixed(out_ptr, pool_ptr, table_ptr, stride_row, stride_page, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = load_page_id(table_ptr, pid, stride_row, 0)
    base = page_base_wide(page, stride_page)
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + pid * BLOCK + offs, tl.load(pool_ptr + base + offs))


@triton.jit
def draft_state(logits_ptr, state_ptr, stride_state, vocab, BLOCK: tl.constexpr):
    # The third kernel of the two discussions: 7 draft rows of 248,320 logits per request, written.
    pid = tl.program_id(0)
    state = tl.load(state_ptr + pid)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    tl.store(logits_ptr + state * stride_state + offs, zero, mask=offs < vocab)  # expect: BP101 state 1,236


@triton.jit
def draft_state_fixed(logits_ptr, state_ptr, stride_state, vocab, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    state = tl.load(state_ptr + pid).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    tl.store(logits_ptr + state * stride_state + offs, zero, mask=offs < vocab)


@triton.jit
def page_clipped(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    # The guard against -1 changes nothing about the top of the range.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    safe_page = tl.where(page >= 0, page, 0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + safe_page * stride_page + offs)  # expect: BP101 page 2,384
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def page_clipped_fixed(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    safe_page = tl.where(page >= 0, page, 0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + safe_page * stride_page + offs)
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def pages_of_a_tile(out_ptr, pool_ptr, table_ptr, stride_page, stride_slot, seq_len, PAGE: tl.constexpr, TILE: tl.constexpr):
    # A tensor of ids, reloaded on every turn.
    offs_n = tl.arange(0, TILE)
    acc = tl.zeros([TILE], tl.float32)
    for start in range(0, seq_len, TILE):
        pos = start + offs_n
        mask = pos < seq_len
        page = tl.load(table_ptr + pos // PAGE, mask=mask, other=0)
        k_off = page * stride_page  # expect: BP101 page 16,384
        acc += tl.load(pool_ptr + k_off + (pos % PAGE) * stride_slot, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, acc)


@triton.jit
def pages_of_a_tile_fixed(
    out_ptr, pool_ptr, table_ptr, stride_page, stride_slot, seq_len, PAGE: tl.constexpr, TILE: tl.constexpr
):  # expect: clean
    offs_n = tl.arange(0, TILE)
    acc = tl.zeros([TILE], tl.float32)
    for start in range(0, seq_len, TILE):
        pos = start + offs_n
        mask = pos < seq_len
        page = tl.load(table_ptr + pos // PAGE, mask=mask, other=0).to(tl.int64)
        k_off = page * stride_page
        acc += tl.load(pool_ptr + k_off + (pos % PAGE) * stride_slot, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, acc)


@triton.jit
def reversed_pages(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):
    # A flipped view: the stride is negative, the value leaves the range at the bottom.
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + page * stride_page + offs)  # expect: BP101 page 2,384
    tl.store(out_ptr + pid * BLOCK + offs, x)


@triton.jit
def reversed_pages_fixed(out_ptr, pool_ptr, table_ptr, stride_page, BLOCK: tl.constexpr):  # expect: clean
    pid = tl.program_id(0)
    page = tl.load(table_ptr + pid).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    x = tl.load(pool_ptr + page * stride_page + offs)
    tl.store(out_ptr + pid * BLOCK + offs, x)


META = {
    "page_gather": {
        "klass": "A",
        "report": "the first discussion, contiguous pool",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "stride_page": 901120, "BLOCK": 128},
        "grid": [4096],
        "walls": [["page", "page * 901120", {}]],
        "safe": ["4095 * 128 + 127"],
    },
    "page_interleaved": {
        "klass": "A",
        "report": "the second discussion, K and V interleaved in a page",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "stride_page": 1802240, "BLOCK": 128},
        "grid": [4096],
        "walls": [["page", "page * 1802240", {}]],
        "safe": ["4095 * 128 + 127"],
    },
    "page_summed": {
        "klass": "A",
        "report": "the first discussion, offsets summed first",
        "args": {
            "out_ptr": "*bf16",
            "pool_ptr": "*bf16",
            "table_ptr": "*i32",
            "stride_page": 901120,
            "stride_slot": 1024,
            "seq_len": 131072,
            "PAGE": 880,
            "D": 256,
        },
        "grid": [1024],
        "walls": [["page", "page * 901120 + slot * 1024 + offs_d", {"slot": 879, "offs_d": 255}]],
        "safe": ["1023 * 256 + 255", "879 * 1024 + 255", "131072"],
    },
    "latent_page": {
        "klass": "A",
        "report": "vllm #47671",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "PAGE": 480, "WIDTH": 576, "BLOCK": 64},
        "grid": [4096],
        "walls": [["page", "page * 480 * 576", {}]],
        "safe": ["4095 * 64 + 63", "480 * 576"],
    },
    "slot_update": {
        "klass": "A",
        "report": "tokenspeed #501",
        "args": {"pool_ptr": "*bf16", "new_ptr": "*bf16", "slots_ptr": "*i32", "WIDTH": 576, "BLOCK": 1024},
        "grid": [4096],
        "walls": [["slot", "slot * 576", {}], ["slot", "slot * 576", {}]],
        "safe": ["4095 * 576 + 1023"],
    },
    "slot_update_partly_fixed": {
        "klass": "A",
        "report": "tokenspeed #501, the store left as it was",
        "args": {"pool_ptr": "*bf16", "new_ptr": "*bf16", "slots_ptr": "*i32", "WIDTH": 576, "BLOCK": 1024},
        "grid": [4096],
        "walls": [["slot", "slot * 576", {}]],
    },
    "slot_split": {
        "klass": "A",
        "report": "slot // page_size on the way to a page",
        "args": {
            "out_ptr": "*bf16",
            "pool_ptr": "*bf16",
            "slots_ptr": "*i32",
            "page_size": 880,
            "stride_page": 901120,
            "stride_slot": 1024,
            "BLOCK": 128,
        },
        "grid": [4096],
        "walls": [["slot", "slot // 880 * 901120", {}]],
        "safe": ["4095 * 128 + 127", "879 * 1024"],
    },
    "page_by_helper": {
        "klass": "A",
        "report": "the multiply is in a helper of another file",
        "args": {
            "out_ptr": "*bf16",
            "pool_ptr": "*bf16",
            "table_ptr": "*i32",
            "stride_row": 512,
            "stride_page": 901120,
            "BLOCK": 128,
        },
        "grid": [4096],
        "walls": [["page", "page * 901120", {}]],
        "safe": ["4095 * 512", "4095 * 128 + 127"],
    },
    "draft_state": {
        "klass": "A",
        "report": "the draft-logit cache of the first system, 7 draft tokens",
        "args": {"logits_ptr": "*fp32", "state_ptr": "*i32", "stride_state": 1738240, "vocab": 248320, "BLOCK": 1024},
        "grid": [256, 243],
        "walls": [["state", "state * 1738240", {}]],
        "safe": ["242 * 1024 + 1023"],
    },
    "page_clipped": {
        "klass": "A",
        "report": "a guard against -1",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "stride_page": 901120, "BLOCK": 128},
        "grid": [4096],
        "ranges": {"page": [-1, 2147483647]},
        "walls": [["page", "max(page, 0) * 901120", {}]],
        "safe": ["4095 * 128 + 127"],
    },
    "pages_of_a_tile": {
        "klass": "A",
        "report": "ids of a tile of keys",
        "args": {
            "out_ptr": "*fp32",
            "pool_ptr": "*bf16",
            "table_ptr": "*i32",
            "stride_page": 131072,
            "stride_slot": 1024,
            "seq_len": 131072,
            "PAGE": 128,
            "TILE": 64,
        },
        "grid": [1],
        "walls": [["page", "page * 131072", {}]],
        "safe": ["131072 + 64", "127 * 1024"],
    },
    "reversed_pages": {
        "klass": "A",
        "report": "a negative stride: one product fits further down",
        "args": {"out_ptr": "*bf16", "pool_ptr": "*bf16", "table_ptr": "*i32", "stride_page": -901120, "BLOCK": 128},
        "grid": [4096],
        "walls": [["page", "page * -901120", {}]],
        "safe": ["4095 * 128 + 127"],
    },
}
