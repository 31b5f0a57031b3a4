"""Prefill attention behind its argument checks: the launches, the twin, and the torch operator that chooses one."""

from __future__ import annotations

from typing import Any

import torch

from .. import reference_prefill
from .._device import device_props
from ..tuning import MAX_SEQ_LEN, VerifySpec, cdiv, pick_tiles_per_page
from ._prefill_plan import PrefillWorkspace, pick_key_passes, pick_prefill_config, prefill_head_dim_pad


@torch.no_grad()
def launch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    sums: torch.Tensor | None,
    means: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    int8: bool = False,
    causal: bool = True,
    window_size: int = 0,
    softcap: float = 0.0,
    *,
    kernels: Any = None,
) -> None:
    """Launches on caches seen as NHD. Without scratch, int8 allocates what the table could hold. 0 is None.

    `kernels`: a version of bigpool.kernels.prefill.
    """
    if kernels is None:
        from ..kernels import prefill

        kernels = prefill

    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    num_reqs, max_pages = block_table.shape
    if num_reqs == 0 or num_tokens == 0 or max_seqlen_q == 0:
        return
    max_seq_len = min(max_pages * page_size, MAX_SEQ_LEN)
    group = num_q_heads // num_kv_heads
    head_dim_pad = prefill_head_dim_pad(head_dim, int8)
    config = pick_prefill_config(device_props(q.device), head_dim_pad=head_dim_pad, itemsize=q.element_size(), int8=int8)
    spec = VerifySpec(causal=causal, window=window_size, softcap=softcap)
    sizes = {"HEAD_DIM": head_dim, "HEAD_DIM_PAD": head_dim_pad, "PAGE_SIZE": page_size, "SPEC": spec}
    keys, key_strides, max_keys, extras = k_pages, k_pages.stride()[:3], 0, {}
    if int8:
        if codes is None or scales is None or sums is None or means is None:
            made = PrefillWorkspace.empty(
                max_num_reqs=num_reqs, max_num_keys=max(min(num_reqs * max_seq_len, 2**31 - 1), 1), num_kv_heads=num_kv_heads,
                head_dim=head_dim, device=q.device,
            )  # fmt: skip
            codes, scales, sums, means = made.codes, made.scales, made.sums, made.means
        lengths = block_table, seq_lens, cu_seqlens_q
        max_keys = len(codes)
        _quantise(kernels, k_pages, lengths, (sums, means, codes, scales), max_seq_len, sizes)
        keys, key_strides, extras = codes, (0, num_kv_heads * head_dim, head_dim), {"k_scale_ptr": scales, "k_mean_ptr": means}
    grid = cdiv(max_seqlen_q * group, config.block_m), num_kv_heads, num_reqs
    kernels.prefill_attention_kernel[grid](
        q, keys, v_pages, out, lse, block_table, seq_lens, cu_seqlens_q,
        softmax_scale * reference_prefill.LOG2_E, num_pages, max_seq_len, max_keys,
        *q.stride()[:2], *key_strides, *v_pages.stride()[:3], *out.stride()[:2], block_table.stride(0),
        GROUP=group, TILE=config.tile, TILES_PER_PAGE=pick_tiles_per_page(page_size, config.tile), BLOCK_M=config.block_m,
        **sizes, **extras, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _quantise(
    kernels: Any,
    k_pages: torch.Tensor,
    lengths: tuple[torch.Tensor, ...],
    scratch: tuple[torch.Tensor, ...],
    max_seq_len: int,
    sizes: dict[str, Any],
) -> None:
    """Codes and scales of all keys that a query token sees, in two launches. `lengths`: block_table, seq_lens, cu_seqlens_q;
    `scratch`: sums, means, codes, scales."""
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    num_reqs, table_stride = len(lengths[0]), lengths[0].stride(0)
    passes = pick_key_passes(device_props(k_pages.device))
    sizes = sizes | {"TILE": passes.tile, "TILES_PER_PAGE": pick_tiles_per_page(page_size, passes.tile)}
    sizes["num_warps"] = passes.num_warps
    strides = *k_pages.stride()[:3], table_stride
    kernels.prefill_sum_keys_kernel[(num_reqs, passes.shares, num_kv_heads)](
        k_pages, scratch[0], *lengths, num_pages, max_seq_len, *strides, **sizes
    )
    kernels.prefill_quantise_kernel[(num_reqs, passes.programs, num_kv_heads)](
        k_pages, *scratch, *lengths, num_pages, max_seq_len, len(scratch[-1]), *strides, SHARES=passes.shares, **sizes
    )


@torch.no_grad()
def run_twin(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    codes: torch.Tensor | None,
    scales: torch.Tensor | None,
    sums: torch.Tensor | None,
    means: torch.Tensor | None,
    max_seqlen_q: int,
    softmax_scale: float,
    int8: bool = False,
    causal: bool = True,
    window_size: int = 0,
    softcap: float = 0.0,
) -> None:
    """`launch` on the plain-torch twin, which needs no scratch."""
    lse.copy_(
        reference_prefill.prefill_attention(
            q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, softmax_scale=softmax_scale, out=out,
            qk="int8" if int8 else "exact", causal=causal, window_size=window_size or None, softcap=softcap or None,
        )[1]
    )  # fmt: skip


def _fake(*_arguments: Any) -> None:
    """Writes in place and returns nothing: there is no shape to infer."""


def _register() -> Any:
    """The torch operator behind `prefill_attention`: what torch.compile sees, and where CPU tensors meet the twin."""
    library: Any = torch.library.Library("bigpool", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(
        "prefill_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
        "Tensor(a!) out, Tensor(b!) lse, Tensor(c!)? codes, Tensor(d!)? scales, Tensor(e!)? sums, Tensor(f!)? means, "
        "int max_seqlen_q, float softmax_scale, bool int8=False, bool causal=True, int window_size=0, float softcap=0.) -> ()",
        tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag),
    )
    library.impl("prefill_attention", launch, "CUDA")
    library.impl("prefill_attention", run_twin, "CPU")
    torch.library.register_fake("bigpool::prefill_attention", _fake, lib=library)
    return library


_library = _register()
