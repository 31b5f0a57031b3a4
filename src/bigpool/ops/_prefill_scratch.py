"""Memory that prefill attention takes from its caller: scratch of the calls, and codes of keys that are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._check import Contract, usable_device
from ..tuning import MAX_HEAD_DIM, MAX_HEADS, MIN_HEAD_DIM
from ._prefill_plan import MAX_REQS, SUM_SHARES, VALUE_TILE, value_tiles

HELP = "see help(bigpool.prefill_attention)"


def prefill_scratch_bytes(
    *,
    max_num_reqs: int,
    max_num_keys: int,
    num_kv_heads: int,
    head_dim: int,
    qk: str = "int8",
    pv: str = "exact",
    page_size: int | None = None,
) -> int:
    """Bytes of scratch of prefill attention for batches within these maxima, in calls with these modes.

    qk="int8" needs codes, scales and means of keys; pv="fp8" codes and scales of values, which are laid out by tiles: fewer if
    the page size is given. `max_num_keys`: the seq_lens of a batch together, those of requests without query tokens left out.

    Raises:
        ArgumentError: listing every fault.
    """
    contract = Contract("prefill_scratch_bytes")
    for name, value, low, high in (
        ("max_num_reqs", max_num_reqs, 1, MAX_REQS),
        ("max_num_keys", max_num_keys, 1, 2**31 - 1),
        ("num_kv_heads", num_kv_heads, 1, MAX_HEADS),
        ("head_dim", head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM),
        ("page_size", page_size, 1, 2**31 - 1),
    ):
        ok = (value is None and name == "page_size") or (type(value) is int and low <= value <= high)
        contract.require(ok, name, f"an int {low}..{high}", f"{value!r}", HELP)
    for name, mode, modes in (("qk", qk, ("exact", "int8")), ("pv", pv, ("exact", "fp8"))):
        contract.require(mode in modes, name, " or ".join(map(repr, modes)), repr(mode), HELP)
    contract.require((qk, pv) != ("exact", "exact"), "qk", "'int8' or pv='fp8'", "'exact' for both", "they need no scratch")
    contract.finish()
    rows = max_num_reqs * SUM_SHARES
    total = 4 * rows * head_dim
    if qk == "int8":
        total += max_num_keys * (head_dim + 4) + max_num_reqs * head_dim * 4
    if pv == "fp8":
        total += value_tiles(max_num_keys, max_num_reqs, page_size) * VALUE_TILE * head_dim + max_num_reqs * head_dim * 4
    return num_kv_heads * total


@dataclass(frozen=True)
class PrefillWorkspace:
    """Scratch of prefill attention, which calls share, one after another on one stream. Two streams need two.

    `sums` fp32 [max_reqs, SUM_SHARES, num_kv_heads, head_dim]. Of int8 scores `codes` int8 [max_keys, num_kv_heads, head_dim],
    `scales` fp32 [max_keys, num_kv_heads], `means` fp32 [max_reqs, num_kv_heads, head_dim]. Of fp8 weights `value_codes` uint8
    [max_tiles, num_kv_heads, head_dim, 64], `value_scales` fp32 [max_reqs, num_kv_heads, head_dim]. Each contiguous.
    """

    sums: torch.Tensor
    max_num_keys: int
    codes: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    means: torch.Tensor | None = None
    value_codes: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @classmethod
    def empty(
        cls,
        *,
        max_num_reqs: int,
        max_num_keys: int,
        num_kv_heads: int,
        head_dim: int,
        qk: str = "int8",
        pv: str = "exact",
        page_size: int | None = None,
        device: torch.device | str = "cuda",
    ) -> PrefillWorkspace:
        """Allocates what `prefill_scratch_bytes` says, once. Not initialised; does not sync the host."""
        prefill_scratch_bytes(
            max_num_reqs=max_num_reqs, max_num_keys=max_num_keys, num_kv_heads=num_kv_heads, head_dim=head_dim, qk=qk, pv=pv,
            page_size=page_size,
        )  # fmt: skip

        device = usable_device("PrefillWorkspace.empty", device)

        def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        parts = {}
        if qk == "int8":
            parts["codes"] = make(torch.int8, max_num_keys, num_kv_heads, head_dim)
            parts["scales"] = make(torch.float32, max_num_keys, num_kv_heads)
            parts["means"] = make(torch.float32, max_num_reqs, num_kv_heads, head_dim)
        if pv == "fp8":
            tiles = value_tiles(max_num_keys, max_num_reqs, page_size)
            parts["value_codes"] = make(torch.uint8, tiles, num_kv_heads, head_dim, VALUE_TILE)
            parts["value_scales"] = make(torch.float32, max_num_reqs, num_kv_heads, head_dim)
        return cls(make(torch.float32, max_num_reqs, SUM_SHARES, num_kv_heads, head_dim), max_num_keys, **parts)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the operator's arguments."""
        return self.sums, self.codes, self.scales, self.means, self.value_codes, self.value_scales

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)


def key_codes_bytes(*, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, max_num_reqs: int) -> int:
    """Bytes of a KeyCodes: head_dim + 4 for each key and kv head, and a mean for each request of a call.

    Raises:
        ArgumentError: listing every fault.
    """
    contract = Contract("key_codes_bytes")
    for name, value, low, high in (
        ("num_pages", num_pages, 1, 2**31 - 1),
        ("page_size", page_size, 1, 2**31 - 1),
        ("num_kv_heads", num_kv_heads, 1, MAX_HEADS),
        ("head_dim", head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM),
        ("max_num_reqs", max_num_reqs, 1, MAX_REQS),
    ):
        contract.require(isinstance(value, int) and low <= value <= high, name, f"an int {low}..{high}", f"{value!r}", HELP)
    contract.finish()
    return num_kv_heads * (num_pages * page_size * (head_dim + 4) + max_num_reqs * head_dim * 4)


@dataclass(frozen=True)
class KeyCodes:
    """Codes of the keys of one cache that stay beside it, so that prefill with int8 scores rounds each key once.

    `codes` int8 [num_pages, page_size, num_kv_heads, head_dim] and `scales` fp32 [num_pages, page_size, num_kv_heads] are of the
    cache's pages and slots, whatever its kv_layout; `means` fp32 [max_reqs, num_kv_heads, head_dim] is scratch. Each contiguous.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    means: torch.Tensor

    @classmethod
    def empty(
        cls,
        *,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        max_num_reqs: int,
        device: torch.device | str = "cuda",
    ) -> KeyCodes:
        """Allocates what `key_codes_bytes` says. Scales are NaN, so that a key without codes shows; does not sync the host."""
        key_codes_bytes(
            num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim, max_num_reqs=max_num_reqs
        )  # fmt: skip
        device = usable_device("KeyCodes.empty", device)
        return cls(
            torch.empty(num_pages, page_size, num_kv_heads, head_dim, dtype=torch.int8, device=device),
            torch.full((num_pages, page_size, num_kv_heads), float("nan"), dtype=torch.float32, device=device),
            torch.empty(max_num_reqs, num_kv_heads, head_dim, dtype=torch.float32, device=device),
        )

    def forget(self, page_idx: torch.Tensor) -> None:
        """Takes the codes of pages away, of pages that go to another request: where a key on them is not rounded again, the rows
        that see it become NaN instead of wrong.

        `page_idx`: int32 or int64 of any shape, such as rows of a block table; ids outside the pool are passed over. Does not
        sync the host.

        Raises:
            ArgumentError: listing every fault.
        """
        contract, remedy = Contract("KeyCodes.forget"), "pass page ids, as block_table has them"
        given = page_idx.reshape(-1) if isinstance(page_idx, torch.Tensor) else page_idx
        contract.tensor("page_idx", given, "n", (torch.int32, torch.int64), remedy, device=self.scales.device)
        contract.finish()
        num_pages = len(self.scales)
        # One entry more, for what is passed over.
        places = torch.where((given >= 0) & (given < num_pages), given.long(), num_pages)
        gone = torch.zeros(num_pages + 1, dtype=torch.bool, device=given.device).index_fill_(0, places, True)
        self.scales.masked_fill_(gone[:-1, None, None], float("nan"))

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return self.codes.nbytes + self.scales.nbytes + self.means.nbytes
