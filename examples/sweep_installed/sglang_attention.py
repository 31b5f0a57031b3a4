"""Launches attention kernels of an installed sglang at a small size, for `bigpool sweep`.

    bigpool sweep examples/sweep_installed/sglang_attention.py prefill
    bigpool sweep examples/sweep_installed/sglang_attention.py extend

sglang may be installed without its dependencies (`pip install --no-deps sglang==0.5.23`). Nothing of it is copied here.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "stand_ins"))

HEADS, HEAD_DIM = 64, 128
LENGTHS = (40, 24)


def make(*shape: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(*shape).half().to(device)


def prefill() -> None:
    """Two sequences, packed."""
    from sglang.kernels.ops.attention.prefill_attention import context_attention_fwd

    q, k, v = (make(sum(LENGTHS), HEADS, HEAD_DIM) for _ in range(3))
    starts = torch.tensor([0, LENGTHS[0]], dtype=torch.int32, device=q.device)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=q.device)
    context_attention_fwd(q, k, v, torch.empty_like(q), starts, lengths, max(LENGTHS))


def extend() -> None:
    """The same sequences behind prefixes of 32 and 16 cached tokens (sglang #20389)."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    q, k, v = (make(sum(LENGTHS), HEADS, HEAD_DIM) for _ in range(3))
    k_buffer, v_buffer = make(128, HEADS, HEAD_DIM), make(128, HEADS, HEAD_DIM)
    place = {"device": q.device}
    queries = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, **place)
    prefixes = torch.tensor([0, 32, 48], dtype=torch.int32, **place)
    indices = torch.randperm(128)[:48].to(q.device)
    extend_attention_fwd(
        q, k, v, torch.empty_like(q), k_buffer, v_buffer, queries, prefixes, indices, None, True, None, max(LENGTHS), 1.0, 1.0
    )


def main() -> None:
    torch.manual_seed(0)
    chosen = sys.argv[1:] or ["prefill"]
    for name in chosen:
        {"prefill": prefill, "extend": extend}[name]()


if __name__ == "__main__":
    main()
