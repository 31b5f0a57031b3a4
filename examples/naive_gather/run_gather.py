"""A launch of the gather, as a test or a benchmark would make it: small, and right. `bigpool sweep` takes it from here."""

import torch
from naive_gather import gather


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    cache = torch.randn(8, 16, 64).half().to(device)
    block_table = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=device)
    out = torch.empty(4, 16 * 64, dtype=torch.float16, device=device)
    gather(cache, block_table, out)
    print("right:", torch.equal(out, cache[block_table.long()].flatten(1)))


if __name__ == "__main__":
    main()
