"""Launch configurations of prefill attention: pure functions of (device properties, shape), and the scratch of its int8 mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._check import Contract
from ..tuning import MAX_HEADS, MIN_HEAD_DIM, WIDE_MMA, DeviceProps, next_power_of_2

MAX_HEAD_DIM = 256
# Grid axes of requests and kv heads, and rows (query token x query head) of a request, which are counted in int32.
MAX_REQS, MAX_ROWS = 65_535, 2**31 - 2**16
# Programs that sum the keys of one request and head: not chosen by the batch, so that the mean does not depend on it.
SUM_SHARES = 64


@dataclass(frozen=True)
class PrefillConfig:
    """Tile shape of prefill attention: `block_m` rows (query token x query head), `tile` keys."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class KeyPasses:
    """The two passes over keys of the int8 mode: tile, and programs of each pass per request and kv head; `shares` at most
    SUM_SHARES."""

    tile: int
    shares: int
    programs: int
    num_warps: int


def pick_key_passes(props: DeviceProps) -> KeyPasses:
    """The same for every length. Few and large where each program costs the interpreter a millisecond."""
    return KeyPasses(512, 1, 1, 1) if props.interpreted else KeyPasses(64, SUM_SHARES, 128, 8)


def prefill_head_dim_pad(head_dim: int, int8: bool) -> int:
    """The head dim that tiles have; products of int8 take 32 or more at a time."""
    return max(next_power_of_2(head_dim), 32 if int8 else 16)


def prefill_smem_bytes(config: PrefillConfig, head_dim_pad: int, itemsize: int, int8: bool) -> int:
    """Shared memory that a launch needs at most, in bytes: q, and the K and V tiles of each stage."""
    keys = config.tile * head_dim_pad * ((1 if int8 else itemsize) + itemsize)
    return config.block_m * head_dim_pad * itemsize + config.num_stages * keys


def pick_prefill_config(props: DeviceProps, *, head_dim_pad: int, itemsize: int, int8: bool) -> PrefillConfig:
    """The largest tile that fits the device. It depends on no length, so that no length compiles anew.

    Chosen by what the compiler says of registers and shared memory, not by times.
    """
    if props.interpreted:
        return PrefillConfig(64, 512, 1, 1)
    if itemsize == 4:
        # fp32 dots run on the plain cores, with whole operands in registers.
        return PrefillConfig(16, 16, 4, 1)
    wide = props.sm in WIDE_MMA
    keys = 64 if wide or head_dim_pad <= 128 else 32
    shapes = [(128, keys, 8, stages) for stages in (3, 2)] if wide else []
    shapes += [(64, keys, 4 if head_dim_pad <= 128 else 8, stages) for stages in (2, 1)] + [(32, 32, 4, 1)]
    configs = [PrefillConfig(*shape) for shape in shapes]
    return next((c for c in configs if prefill_smem_bytes(c, head_dim_pad, itemsize, int8) <= props.smem_bytes), configs[-1])


def prefill_scratch_bytes(*, max_num_reqs: int, max_num_keys: int, num_kv_heads: int, head_dim: int) -> int:
    """Bytes of scratch of int8 prefill attention for batches within these maxima: codes, scales, sums, means.

    `max_num_keys`: the seq_lens of a batch together, those of requests without query tokens left out.

    Raises:
        ArgumentError: listing every fault.
    """
    contract = Contract("prefill_scratch_bytes")
    for name, value, low, high in (
        ("max_num_reqs", max_num_reqs, 1, MAX_REQS),
        ("max_num_keys", max_num_keys, 1, 2**31 - 1),
        ("num_kv_heads", num_kv_heads, 1, MAX_HEADS),
        ("head_dim", head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM),
    ):
        ok = isinstance(value, int) and low <= value <= high
        contract.require(ok, name, f"an int {low}..{high}", f"{value!r}", "see help(bigpool.prefill_attention)")
    contract.finish()
    return num_kv_heads * (max_num_keys * (head_dim + 4) + max_num_reqs * (SUM_SHARES + 1) * head_dim * 4)


@dataclass(frozen=True)
class PrefillWorkspace:
    """Scratch of int8 prefill attention, which calls share, one after another on one stream. Two streams need two.

    `codes` int8 [max_keys, num_kv_heads, head_dim], `scales` fp32 [max_keys, num_kv_heads], `sums` fp32 [max_reqs, SUM_SHARES,
    num_kv_heads, head_dim], `means` fp32 [max_reqs, num_kv_heads, head_dim], each contiguous.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor
    means: torch.Tensor

    @classmethod
    def empty(
        cls,
        *,
        max_num_reqs: int,
        max_num_keys: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str = "cuda",
    ) -> PrefillWorkspace:
        """Allocates what `prefill_scratch_bytes` says, once. Not initialised; does not sync the host."""
        prefill_scratch_bytes(
            max_num_reqs=max_num_reqs, max_num_keys=max_num_keys, num_kv_heads=num_kv_heads, head_dim=head_dim
        )  # fmt: skip
        return cls(
            torch.empty(max_num_keys, num_kv_heads, head_dim, dtype=torch.int8, device=device),
            torch.empty(max_num_keys, num_kv_heads, dtype=torch.float32, device=device),
            torch.empty(max_num_reqs, SUM_SHARES, num_kv_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(max_num_reqs, num_kv_heads, head_dim, dtype=torch.float32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all four."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.sums, self.means))
