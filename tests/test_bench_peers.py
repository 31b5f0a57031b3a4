"""Peers hand their library what its signature means: each is run against a stand-in that computes what the library documents.

The stand-ins take the parameters that we pass, by the names of the library, and no others. Whether the real libraries agree
is for a machine that has them; the gate holds them to the oracle there too.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from bigpool import reference
from bigpool.bench import peers
from bigpool.bench.peers._peer import PeerCannot, first_module
from bigpool.bench.shapes import Shape
from bigpool.bench.work import Work

DECODE, VERIFY = Shape(2, 1, 50, 16, 4, 2, 32), Shape(2, 3, 50, 16, 4, 2, 32)


def work_of(shape: Shape) -> Work:
    return Work(shape, torch.float32, torch.device("cpu"))


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: object) -> None:
    """A module of this name in sys.modules, with its parents."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        made = ModuleType(name)
        made.__path__ = []
        monkeypatch.setitem(sys.modules, name, made)
    for name, function in functions.items():
        setattr(sys.modules[module], name, function)


def paged(q: Any, k: Any, v: Any, table: Any, lengths: Any, cu_seqlens_q: Any, scale: float) -> torch.Tensor:
    out, _ = reference.verify_attention(q, k, v, table, lengths, cu_seqlens_q, softmax_scale=scale)
    return out


def with_kvcache(table: str) -> Any:
    """FlashAttention's function over a cache; `table` is what it calls the block table."""

    def flash_attn_with_kvcache(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, softmax_scale: float, **more: Any) -> Any:
        block_table = more.pop(table)
        assert more == {"causal": True}
        cu = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1], dtype=torch.int32)
        return paged(q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens, cu, softmax_scale).view(q.shape)

    return flash_attn_with_kvcache


def vllm_varlen(version: int) -> Any:
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int, seqused_k: Any, softmax_scale: float,
        causal: bool, block_table: Any, fa_version: int,
    ) -> Any:  # fmt: skip
        assert (fa_version, causal, max_seqlen_k) == (version, True, int(seqused_k.max()))
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        return paged(q, k, v, block_table, seqused_k, cu_seqlens_q, softmax_scale)

    return flash_attn_varlen_func


def vllm_unified(split: bool) -> Any:
    def unified_attention(
        q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any, max_seqlen_k: int,
        softmax_scale: float, causal: bool, window_size: Any, block_table: Any, softcap: float, q_descale: Any, k_descale: Any,
        v_descale: Any, seq_threshold_3D: Any = None, num_par_softmax_segments: Any = None, softmax_segm_output: Any = None,
        softmax_segm_max: Any = None, softmax_segm_expsum: Any = None,
    ) -> None:  # fmt: skip
        assert (causal, window_size, softcap, q_descale, k_descale, v_descale) == (True, (-1, -1), 0.0, None, None, None)
        assert (seq_threshold_3D is not None) == split
        if split:
            rows = (q.shape[0], q.shape[1], num_par_softmax_segments)
            assert softmax_segm_max.shape == softmax_segm_expsum.shape == rows
            assert softmax_segm_output.shape[:3] == rows
        out.copy_(paged(q, k, v, block_table, seqused_k, cu_seqlens_q, softmax_scale))

    return unified_attention


class PrefillWrapper:
    """FlashInfer's: planned, then run."""

    def __init__(self, float_workspace_buffer: Any, kv_layout: str, backend: str) -> None:
        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")
        assert backend in ("fa2", "fa3")

    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float, q_data_type: Any,
        kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert causal
        counts = paged_kv_indptr.diff()
        self.lengths = ((counts - 1) * page_size + paged_kv_last_page_len).int()
        self.table = paged_kv_indices.view(len(counts), -1)
        self.cu, self.scale = qo_indptr, sm_scale

    def run(self, q: Any, paged_kv_cache: Any) -> Any:
        return paged(q, *paged_kv_cache, self.table, self.lengths, self.cu, self.scale)


def tokens_of(pool: torch.Tensor, rows: torch.Tensor, request: int, indptr: torch.Tensor) -> torch.Tensor:
    return pool[rows[indptr[request] : indptr[request + 1]].long()]


def dense(q: Any, k: Any, v: Any, scale: float) -> torch.Tensor:
    """One request: q [tokens, heads, dim], k and v [length, kv heads, dim]; the mask is bottom-right aligned."""
    groups = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def sglang_extend(
    q_extend: Any, k_extend: Any, v_extend: Any, o_extend: Any, k_buffer: Any, v_buffer: Any, qo_indptr: Any, kv_indptr: Any,
    kv_indices: Any, custom_mask: Any, is_causal: bool, mask_indptr: Any, max_len_extend: int, k_scale: float, v_scale: float,
    sm_scale: Any = None,
) -> bool:  # fmt: skip
    assert (custom_mask, is_causal, mask_indptr, k_scale, v_scale) == (None, True, None, 1.0, 1.0)
    assert kv_indices.is_contiguous()
    for request in range(len(qo_indptr) - 1):
        new = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
        k, v = (
            torch.cat([tokens_of(pool, kv_indices, request, kv_indptr), fresh[new]])
            for pool, fresh in ((k_buffer, k_extend), (v_buffer, v_extend))
        )
        o_extend[new] = dense(q_extend[new], k, v, sm_scale)
    return True


def sglang_decode(
    q: Any, k_buffer: Any, v_buffer: Any, o: Any, kv_indptr: Any, kv_indices: Any, attn_logits: Any, attn_lse: Any,
    num_kv_splits: Any, max_kv_splits: int, sm_scale: float, k_scale: float, v_scale: float,
) -> None:  # fmt: skip
    assert attn_logits.shape == (*attn_lse.shape, q.shape[2])
    assert attn_lse.shape == (q.shape[0], q.shape[1], max_kv_splits)
    assert int(num_kv_splits.max()) <= max_kv_splits
    for request in range(len(kv_indptr) - 1):
        k, v = (tokens_of(pool, kv_indices, request, kv_indptr) for pool in (k_buffer, v_buffer))
        o[request] = dense(q[request : request + 1], k, v, sm_scale)[0]


def sage(q: Any, k: Any, v: Any, tensor_layout: str, is_causal: bool, sm_scale: float) -> Any:
    assert (tensor_layout, is_causal, q.shape[2]) == ("HND", False, 1)
    return torch.stack(
        [dense(*(part[at].transpose(0, 1) for part in (q, k, v)), sm_scale).transpose(0, 1) for at in range(len(q))]
    )


KERNELS, TRITON_OPS = "sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops"
UNIFIED = "attention.ops.triton_unified_attention"
CASES = (
    ("fa2", "flash_attn", {"flash_attn_with_kvcache": with_kvcache("block_table")}, (DECODE, VERIFY)),
    ("fa3", "flash_attn_interface", {"flash_attn_with_kvcache": with_kvcache("page_table")}, (DECODE, VERIFY)),
    ("fa3", "flash_attn_3.flash_attn_interface", {"flash_attn_with_kvcache": with_kvcache("page_table")}, (VERIFY,)),
    ("vllm-fa2", "vllm.vllm_flash_attn", {"flash_attn_varlen_func": vllm_varlen(2)}, (DECODE, VERIFY)),
    ("vllm-fa3", "vllm.vllm_flash_attn", {"flash_attn_varlen_func": vllm_varlen(3)}, (DECODE, VERIFY)),
    ("vllm-triton", f"vllm.v1.{UNIFIED}", {"unified_attention": vllm_unified(False)}, (VERIFY,)),
    ("vllm-triton", f"vllm.{UNIFIED}", {"unified_attention": vllm_unified(False)}, (VERIFY,)),
    ("vllm-triton-3d", f"vllm.v1.{UNIFIED}", {"unified_attention": vllm_unified(True)}, (DECODE, VERIFY)),
    ("flashinfer-fa2", "flashinfer", {"BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper}, (DECODE, VERIFY)),
    ("flashinfer-fa3", "flashinfer", {"BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper}, (VERIFY,)),
    ("sglang-extend", f"{KERNELS}.extend_attention", {"extend_attention_fwd": sglang_extend}, (DECODE, VERIFY)),
    ("sglang-extend", f"{TRITON_OPS}.extend_attention", {"extend_attention_fwd": sglang_extend}, (VERIFY,)),
    ("sglang-verify", f"{KERNELS}.verify_splitkv", {"verify_splitkv_fwd": sglang_extend}, (DECODE, VERIFY)),
    ("sglang-decode", f"{KERNELS}.decode_attention", {"decode_attention_fwd": sglang_decode}, (DECODE,)),
    ("sage", "sageattention", {"sageattn": sage}, (DECODE,)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "module", "functions", "shapes"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_a_peer_asks_for_the_right_thing(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, functions: dict[str, object], shapes: tuple[Shape, ...]
) -> None:
    for mine in [known for known in sys.modules if known.partition(".")[0] in ("vllm", "sglang", "flash_attn", "flashinfer")]:
        monkeypatch.delitem(sys.modules, mine)
    install(monkeypatch, module, **functions)
    for shape in shapes:
        work = work_of(shape)
        call = peers.named(name).prepare(work)
        for _ in range(2):
            ok, text = work.check(call())
            assert ok, text


def test_every_peer_of_others_is_here() -> None:
    assert {name for name, *_ in CASES} == {name for name in peers.every() if not name.startswith(("sdpa", "flex"))}


@pytest.mark.parametrize(
    ("name", "module", "functions", "said"),
    [
        ("sglang-decode", f"{KERNELS}.decode_attention", {}, "decode takes one query token, not 3"),
        ("sglang-verify", f"{KERNELS}.verify_splitkv", {"verify_splitkv_fwd": lambda **_: False}, "verify_splitkv_fwd declines "
         f"{VERIFY.name}"),
        ("sage", "sageattention", {"sageattn": sage}, "no bottom-right mask, so no 3 query tokens over 50 keys"),
    ],
)  # fmt: skip
def test_what_a_peer_cannot(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, functions: dict[str, object], said: str
) -> None:
    install(monkeypatch, module, **functions)
    with pytest.raises(PeerCannot) as caught:
        peers.named(name).prepare(work_of(VERIFY))()
    assert str(caught.value) == said


def test_an_error_within_a_module_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "there.inside", answer=3)
    assert first_module("not_there.inside", "there.not_inside", "there.inside").answer == 3
    with pytest.raises(ModuleNotFoundError, match=r"^no module of not_there, there\.not_inside$") as caught:
        first_module("not_there", "there.not_inside")
    assert caught.value.name == "not_there"


def test_a_missing_dependency_is_named(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfway.py").write_text("import its_dependency_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="its_dependency_is_missing"):
        first_module("halfway", "torch")
