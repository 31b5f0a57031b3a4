"""Writing rows of new tokens into a paged KV cache, and reading them back for reference and debugging."""

from __future__ import annotations

from typing import Any

import torch

from .. import formats, reference_cache
from .._check import Contract, dtype_name
from ..cache import KVCache
from ..tuning import next_power_of_2
from ._operator import Operator, require_backend

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements of a program's tile of K (and then of V): enough to keep four warps busy with loads of 16 bytes.
TILE_ELEMENTS = 1024


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    slot_mapping: torch.Tensor,
    *,
    check: bool = False,
    backend: str = "auto",
) -> None:
    """Stores the keys and values of new tokens in a paged cache, in the format of the cache.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], bf16, fp16 or fp32, both the same; any strides between tokens and heads, so
            that slices of a fused projection need no copy. Where the cache is not quantised, the dtype of the cache.
        cache: KVCache; its tensors are written in place. int4 keys are stored rotated, see docs/formats.md.
        slot_mapping: int64 [num_tokens], the slot `page * page_size + slot in the page` of each token. Tokens with a negative
            slot are skipped, and so are slots beyond the pool. If a slot comes twice, which token it keeps is undefined, and
            may differ between its heads, and between its data and its scale.
        check: look at the values of slot_mapping too: slots beyond the pool and slots that come twice. Syncs the host.
        backend: "auto": Triton for CUDA tensors, the plain-torch twin for CPU tensors. "triton" takes CPU tensors when Triton
            runs its interpreter (TRITON_INTERPRET=1; any dtype). "torch": the twin.

    Codes are rounded to nearest, ties to even; kernel and twin give the same bits. Rows with NaN or infinity: where a scale
    stands for a token and head, the row's scale becomes NaN, so that each query that sees the key gives NaN; where a scale
    stands for more, the element becomes NaN. Other finite values saturate; unquantised caches take the bits as they are.

    Deterministic but for slots that come twice. Does not sync the host unless `check`; CUDA-graph capturable. Works under
    torch.compile but for inline scales: torch cannot trace writes through views of two dtypes of one storage.

    Raises:
        ArgumentError: listing every fault.  BackendError: the backend cannot run here.
    """
    contract = Contract("write_kv")
    _check_cache(contract, cache)
    _check_rows(contract, k, v, cache)
    _check_slots(contract, slot_mapping, cache)
    require_backend(contract, backend)
    if torch.compiler.is_compiling() and cache.inline_scales:
        expected = "scales apart from the data under torch.compile"
        contract.fault("cache", expected, "inline scales", "write outside the compiled graph, or in an operator of your own")
    contract.finish()
    if check:
        _check_values(slot_mapping, cache)
    arguments = (k, v, slot_mapping, *cache.nhd())
    # Nothing is computed in bf16.
    OPERATOR.run(backend, arguments, device=k.device, dtype=torch.float32)


def gather_kv(cache: KVCache, block_table: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of requests out of a paged cache, dequantised: for reference and debugging, plain torch.

    Args:
        cache: KVCache.
        block_table: int32 [num_reqs, max_pages_per_req], page ids.
        seq_lens: int32 [num_reqs], rows to read of each request; at most what the table holds counts.

    Returns:
        (keys, values), float32 [sum of lengths, num_kv_heads, head_dim], requests one after another. int4 keys are rotated
        back. Rows of a page id outside the pool are NaN. Syncs the host.

    Raises:
        ArgumentError: listing every fault.
    """
    contract = Contract("gather_kv")
    _check_cache(contract, cache)
    device = cache.k.device
    for name, value, axes in (("block_table", block_table, "num_reqs max_pages_per_req"), ("seq_lens", seq_lens, "num_reqs")):
        wrong = isinstance(value, torch.Tensor) and value.dtype != torch.int32
        remedy = f"call {name}.int()" if wrong else "pass one entry per request"
        contract.tensor(name, value, axes, (torch.int32,), remedy, device=device)
    contract.finish()
    return reference_cache.gather_kv(cache, block_table, seq_lens)


def _check_cache(contract: Contract, cache: Any) -> None:
    if not isinstance(cache, KVCache):
        contract.fault("cache", "a bigpool.KVCache", type(cache).__name__, "wrap its tensors: bigpool.KVCache(k, v, ...)")
        contract.finish()


def _check_rows(contract: Contract, k: Any, v: Any, cache: KVCache) -> None:
    contract.axes |= {"num_kv_heads": cache.num_kv_heads, "head_dim": cache.head_dim}
    dtypes: tuple[torch.dtype, ...] = ROW_DTYPES
    device, remedy = cache.k.device, "the cache has these heads"
    if cache.format.scales == "none":
        dtypes = (cache.k.dtype,)
        remedy = f"the cache is {dtype_name(cache.k.dtype)} and not quantised"
    axes = "num_tokens num_kv_heads head_dim"
    if contract.tensor("k", k, axes, dtypes, remedy, device=device):
        dtypes, remedy = (k.dtype,), "k and v share dtype and shape"
    contract.tensor("v", v, axes, dtypes, remedy, device=device)


def _check_slots(contract: Contract, slot_mapping: Any, cache: KVCache) -> None:
    remedy = "pass one slot per token"
    if isinstance(slot_mapping, torch.Tensor) and slot_mapping.dtype != torch.int64:
        remedy = "call slot_mapping.long()"
    contract.tensor("slot_mapping", slot_mapping, "num_tokens", (torch.int64,), remedy, device=cache.k.device)


def _check_values(slot_mapping: torch.Tensor, cache: KVCache) -> None:
    """The checked mode: slots that are skipped without being negative, and slots that come twice."""
    contract = Contract("write_kv")
    slots = cache.num_pages * cache.page_size
    beyond = (slot_mapping >= slots).nonzero()
    if len(beyond):
        token = int(beyond[0])
        got = f"{int(slot_mapping[token])} at token {token}"
        contract.fault("slot_mapping", f"slots below num_pages * page_size = {slots}", got, "allocate the page, or pass -1")
    values, counts = torch.unique(slot_mapping[slot_mapping >= 0], return_counts=True)
    twice = values[counts > 1]
    if len(twice):
        contract.fault("slot_mapping", "each slot once", f"{int(twice[0])} twice or more", "give each token a slot of its own")
    contract.finish()


def _as_bits(tensor: torch.Tensor, plain: bool) -> torch.Tensor:
    """What the kernel sees: bits, where it only moves bits or Triton lacks the type (fp8 before sm 89, bf16 interpreted)."""
    if plain or tensor.dtype == torch.bfloat16:
        return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return tensor if tensor.dtype in (torch.int8, torch.float16, torch.float32) else tensor.view(torch.uint8)


def _scale_of(scale: torch.Tensor | None, scales: str, cache: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The scale tensor of a launch and its strides between pages, slots and heads; any tensor where there is none."""
    if scale is None:
        return cache, (0, 0, 0)
    return scale, scale.stride() if scales == "token_head" else (0, 0, 0 if scales == "tensor" else scale.stride(0))


@torch.no_grad()
def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    kernels: Any = None,
) -> None:
    """Launches on caches that are seen as NHD. `kernels`: a version of bigpool.kernels.cache."""
    if kernels is None:
        from ..kernels import cache

        kernels = cache

    num_tokens, num_kv_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    kv_format = formats.of(k_cache.dtype, k_scale)
    plain, scales = kv_format.scales == "none", kv_format.scales
    if (k_scale is None) != (v_scale is None):
        one = torch.ones(1, dtype=torch.float32, device=k.device)
        k_scale, v_scale = (one if scale is None else scale for scale in (k_scale, v_scale))
    data = tuple(_as_bits(tensor, plain) for tensor in (k, v, k_cache, v_cache))
    (k_scales, k_strides), (v_scales, v_strides) = (_scale_of(scale, scales, data[2]) for scale in (k_scale, v_scale))
    head_dim_pad = next_power_of_2(head_dim)
    head_tile = min(next_power_of_2(num_kv_heads), max(TILE_ELEMENTS // head_dim_pad, 1))
    kernels.write_kv_kernel[(num_tokens, -(-num_kv_heads // head_tile))](
        *data, k_scales, v_scales, slot_mapping, k_cache.shape[0],
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], *k_strides, *v_strides,
        PAGE_SIZE=k_cache.shape[1], NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HEAD_DIM_PAD=head_dim_pad, HEAD_TILE=head_tile,
        FORMAT="plain" if plain else kv_format.name, SCALES="none" if k_scale is None else scales,
        STAGES=formats.rotation_block(head_dim).bit_length() - 1,
    )  # fmt: skip


@torch.no_grad()
def _run_twin(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    reference_cache.write_rows(k, k_cache, k_scale, slot_mapping, is_key=True)
    reference_cache.write_rows(v, v_cache, v_scale, slot_mapping, is_key=False)


OPERATOR = Operator(
    "write_kv",
        "Tensor k, Tensor v, Tensor slot_mapping, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor(c!)? k_scale, Tensor(d!)? v_scale",
    launch=_launch, twin=_run_twin, plain=_launch,
)  # fmt: skip
