"""Times verify attention over every cache format on this machine's GPU: `python docs/measured/time_formats.py RECORD.json`.

Medians of CUDA-graph replays; the L2 cache is emptied before each by reading. "auto" is what a user gets, "triton" the plain
Triton kernel; both are replayed in turn, in both orders. The 8k shape is first held to the float64 twin, the others to the plain
kernel.
"""

import json
import statistics
import sys
from pathlib import Path

import torch
import triton

from bigpool import formats, reference
from bigpool.ops.verify import verify_attention

SHAPES = [(1, 4, 8_192), (1, 4, 32_768), (1, 8, 131_072), (1, 16, 131_072), (16, 8, 32_768), (64, 4, 1_024)]
FORMATS = ["bf16", "int8", "fp8_e4m3", "int4"]
HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, REPEATS = 24, 4, 256, 880, 15


def make(num_reqs, q_len, seq_len, name):
    pages = -(-seq_len // PAGE_SIZE)
    kv_format = formats.named(name)
    call = {"block_table": torch.randperm(num_reqs * pages, device="cuda").view(num_reqs, pages).int()}
    for side in "kv":
        parts = []
        for _ in range(num_reqs * pages):
            rows = torch.randn(PAGE_SIZE, KV_HEADS, HEAD_DIM, device="cuda").bfloat16()
            if name == "bf16":
                parts.append((rows, None))
            else:
                rows = formats.rotate(rows) if side == "k" and kv_format.rotates_k else rows.float()
                scale = torch.ones(1, device="cuda") if name == "fp8_e4m3" else None
                parts.append(kv_format.quantize(rows, scale))
        codes = torch.stack([codes.view(torch.uint8) for codes, _ in parts])
        call[f"{side}_cache"] = codes.view(parts[0][0].dtype)
        if name == "fp8_e4m3":
            call[f"{side}_scale"] = torch.ones(1, device="cuda")
        elif name != "bf16":
            call[f"{side}_scale"] = torch.stack([scale for _, scale in parts])
    call["q"] = torch.randn(num_reqs * q_len, HEADS, HEAD_DIM, device="cuda").bfloat16()
    call["seq_lens"] = torch.full((num_reqs,), seq_len, device="cuda", dtype=torch.int32)
    call["cu_seqlens_q"] = torch.arange(0, num_reqs * q_len + 1, q_len, device="cuda", dtype=torch.int32)
    return call


def graph_of(call, q_len, backend):
    def run():
        return verify_attention(**call, max_seqlen_q=q_len, backend=backend)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    return graph, out


def main():
    other = torch.zeros(2**26, device="cuda")
    rows = []
    for shape in SHAPES:
        for name in FORMATS:
            call = make(*shape, name)
            arms = {backend: graph_of(call, shape[1], backend) for backend in ("auto", "triton")}
            if shape[2] == SHAPES[0][2]:
                expected = reference.verify_attention(**call, compute_dtype=torch.float64)[0]
            else:
                expected = arms["triton"][1].double()
            error = float((arms["auto"][1].double() - expected).abs().max() / expected.abs().max())
            samples = {backend: [] for backend in arms}
            for repeat in range(REPEATS):
                for backend in (list(arms), list(arms)[::-1])[repeat % 2]:
                    other.sum()
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    arms[backend][0].replay()
                    end.record()
                    torch.cuda.synchronize()
                    samples[backend].append(begin.elapsed_time(end) * 1e3)
            times = {backend: statistics.median(values) for backend, values in samples.items()}
            label = "B{} q{} kv{}".format(*shape)
            print(
                f"{label:18} {name:9} auto {times['auto']:7.1f} us  triton {times['triton']:7.1f} us  error {error:.1e}",
                flush=True,
            )
            rows.append({"shape": label, "format": name, "median_us": times, "samples_us": samples, "max_error_of_max": error})
            del call, arms
    record = {
        "schema": "bigpool-time-formats/1", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "heads": [HEADS, KV_HEADS], "head_dim": HEAD_DIM, "page_size": PAGE_SIZE,
        "repeats": REPEATS, "rows": rows,
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
