"""Scratch for split-KV attention: sized once from stated maxima, its bytes known before it is allocated, never grown."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ._check import Contract, usable_device
from ._device import device_props
from .errors import WorkspaceError
from .tuning import (
    INT4_BYTES,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_NUM_SPLITS,
    MAX_SEQLEN_Q,
    MIN_HEAD_DIM,
    most_batch_splits,
    plan_verify,
    scratch_floats,
)
from .tuning_tables import in_force

if TYPE_CHECKING:
    import torch

    from .tuning import DeviceProps


def verify_scratch_bytes(
    props: DeviceProps,
    *,
    max_num_reqs: int,
    max_seqlen_q: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_num_tokens: int | None = None,
    max_num_splits: int | None = None,
    batch_max_seq_len: int | None = None,
) -> int:
    """Bytes that verify attention can need on a device for any batch within these maxima.

    Fewer requests or shorter queries leave room for more splits, so the largest need is not always at the maxima: every
    combination is asked. `max_num_tokens` states the rows of q where q is padded (None: as many as the requests have);
    `max_num_splits` the splits of calls that pass `num_splits` themselves; `batch_max_seq_len` the tokens that a row of the
    block table holds (its columns x page_size) in calls with deterministic="batch", whose splits count with it.

    Raises:
        ArgumentError: listing every fault.
    """
    _check_maxima(
        max_num_reqs, max_seqlen_q, num_q_heads, num_kv_heads, head_dim, max_num_tokens, max_num_splits, batch_max_seq_len
    )
    sizes: dict[str, Any] = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    most, tuned = 0, in_force(props)
    requests = range(1, max_seqlen_q + 1), range(1, max_num_reqs + 1)
    for seqlen_q, num_reqs, itemsize, kv_bytes, heavy in product(*requests, (2, 4), (None, 1.0, INT4_BYTES), (False, True)):
        plan = plan_verify(
            props, num_reqs=num_reqs, max_seqlen_q=seqlen_q, itemsize=itemsize, kv_bytes=kv_bytes, heavy=heavy, page_size=1,
            max_seq_len=2**31, tuned=tuned, **sizes,
        )  # fmt: skip
        tokens = max_num_tokens or num_reqs * seqlen_q
        most = max(most, scratch_floats(tokens, num_q_heads, head_dim, max(plan.num_splits, max_num_splits or 0)))
    if batch_max_seq_len is not None:
        tokens = max_num_tokens or max_num_reqs * max_seqlen_q
        most = max(most, scratch_floats(tokens, num_q_heads, head_dim, most_batch_splits(batch_max_seq_len)))
    return 4 * most


def _check_maxima(
    max_num_reqs: int,
    max_seqlen_q: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_num_tokens: int | None,
    max_num_splits: int | None,
    batch_max_seq_len: int | None,
) -> None:
    contract = Contract("Workspace.for_verify")
    for name, value, low, high in (
        ("max_num_reqs", max_num_reqs, 1, 2**31 - 1),
        ("max_seqlen_q", max_seqlen_q, 1, MAX_SEQLEN_Q),
        ("num_q_heads", num_q_heads, 1, MAX_HEADS),
        ("num_kv_heads", num_kv_heads, 1, MAX_HEADS),
        ("head_dim", head_dim, MIN_HEAD_DIM, MAX_HEAD_DIM),
        ("max_num_tokens", max_num_tokens, 1, 2**31 - 1),
        ("max_num_splits", max_num_splits, 1, MAX_NUM_SPLITS),
        ("batch_max_seq_len", batch_max_seq_len, 1, 2**63 - 1),
    ):
        given = value is not None or name not in ("max_num_tokens", "max_num_splits", "batch_max_seq_len")
        ok = not given or (isinstance(value, int) and low <= value <= high)
        contract.require(ok, name, f"an int {low}..{high}", f"{value}", "see help(bigpool.verify_attention)")
    if not contract.faults:
        divides = num_q_heads % num_kv_heads == 0
        got = f"{num_q_heads} and {num_kv_heads}"
        contract.require(divides, "num_q_heads", "a multiple of num_kv_heads", got, "repeat or drop heads")
    contract.finish()


class Workspace:
    """Scratch that calls share, one after another on one stream. Two streams need two workspaces.

    `part` is fp32: one-dimensional (each call lays its own shape over it), or [max_tokens, num_q_heads, num_splits,
    head_dim + 4] with any strides between tokens, heads and splits (each call takes a corner; one token and head spans
    fewer than 2^31 elements).
    """

    def __init__(self, part: torch.Tensor) -> None:
        import torch

        contract = Contract("Workspace")
        axes = "values" if getattr(part, "ndim", 1) == 1 else "max_tokens num_q_heads num_splits head_dim+4"
        ok = contract.tensor("part", part, axes, (torch.float32,), "pass fp32 scratch", written=True)
        if ok and part.dim() == 4:
            span = part.shape[2] * part.stride(2)
            expected = "the splits of one token and head within 2^31 elements"
            contract.require(span < 2**31, "part", expected, f"{span:,}", "move them closer")
        contract.finish()
        self.part = part

    @classmethod
    def for_verify(
        cls,
        *,
        max_num_reqs: int,
        max_seqlen_q: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_num_tokens: int | None = None,
        max_num_splits: int | None = None,
        batch_max_seq_len: int | None = None,
        device: torch.device | str = "cuda",
    ) -> Workspace:
        """Allocates what `verify_scratch_bytes` says for the device, once. Not initialised; does not sync the host."""
        import torch

        device = usable_device("Workspace.for_verify", device)
        nbytes = verify_scratch_bytes(
            device_props(device), max_num_reqs=max_num_reqs, max_seqlen_q=max_seqlen_q, num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, max_num_tokens=max_num_tokens, max_num_splits=max_num_splits,
            batch_max_seq_len=batch_max_seq_len,
        )  # fmt: skip
        return cls(torch.empty(nbytes // 4, dtype=torch.float32, device=device))

    @property
    def nbytes(self) -> int:
        """Bytes of scratch that calls may use."""
        return 4 * self.part.numel()


def carve(part: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """A view of `shape` of scratch, see Workspace."""
    asked = "{} query tokens x {} heads x {} splits".format(*shape)
    if part.dim() == 1:
        need = 4 * prod(shape)
        held = 4 * part.numel()
        if need > held:
            raise WorkspaceError(
                f"workspace: expected {need:,} bytes for {asked}, got {held:,}, {need - held:,} too few; "
                "state larger maxima in Workspace.for_verify, or pass a smaller num_splits"
            )
        return part[: need // 4].view(shape)
    if any(need > limit for need, limit in zip(shape, part.shape, strict=True)):
        raise WorkspaceError(
            f"workspace: expected room for {list(shape)}, got {list(part.shape)}; pass larger scratch, or a smaller num_splits"
        )
    tokens, heads, splits, width = shape
    return part[:tokens, :heads, :splits, :width]
