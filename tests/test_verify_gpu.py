"""What only a GPU can show: CUDA graphs, no host sync, compiled graphs, bf16 at every shape."""

import pytest
import torch

from bigpool.ops.verify import verify_attention
from bigpool.workspace import Workspace
from verify_inputs import QUANTISED, check, make, run, same_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_size", [1, 16, 880])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 512])
def test_bf16(page_size, head_dim):
    check(make([901, 430, 0, 17], [5, 8, 0, 1], page_size=page_size, head_dim=head_dim, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 8, 16, 22, 64])
def test_serving_shape(seqlen_q):
    check(make([9_000, 700], [seqlen_q] * 2, page_size=880, heads=(24, 4), head_dim=256, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.parametrize("seqlen_q", [1, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 880])
@pytest.mark.parametrize(("kv_format", "scales"), QUANTISED)
def test_quantised_serving_shapes(kv_format, scales, page_size, head_dim, seqlen_q):
    sizes = {"page_size": page_size, "heads": (24, 4), "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
    check(make([5_000, 700], [seqlen_q] * 2, kv_format=kv_format, scales=scales, **sizes))


@pytest.mark.parametrize("kv_format", [None, "int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [(4, 4), (24, 4), (32, 2)])
def test_batch_mode_on_a_card(heads, kv_format):
    """Alone, in parts, in a batch of 20, with a wider table: the same bits, with 20 splits that hold keys."""
    sizes = {"heads": heads, "head_dim": 128, "page_size": 880, "dtype": torch.bfloat16, "device": "cuda", "kv_format": kv_format}
    call = make([20_000, *(300 * i for i in range(19))], [8, *(1 + i % 8 for i in range(19))], **sizes)
    out, lse = run(call, deterministic="batch")
    for tokens in (slice(0, 8), slice(5, 8), slice(7, 8), slice(0, 1), slice(2, 5)):
        alone = {
            "q": call["q"][tokens],
            "block_table": torch.cat((call["block_table"][:1], call["block_table"][:1]), 1),
            "seq_lens": call["seq_lens"][:1] - (8 - tokens.stop),
            "cu_seqlens_q": torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32, device="cuda"),
            "max_seqlen_q": tokens.stop - tokens.start,
        }
        got, got_lse = run({**call, **alone}, deterministic="batch")
        assert same_bits(got, out[tokens])
        assert same_bits(got_lse, lse[tokens])
    assert not same_bits(run(call, num_splits=1)[0], run(call, num_splits=20)[0])


def test_graph_with_an_int8_cache_and_rules():
    options = {"kv_format": "int8", "window_size": 500, "num_sink_tokens": 4, "softcap": 20.0}
    call = make([3_000, 75], [8, 2], dtype=torch.bfloat16, device="cuda", **options)
    eager, _ = run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = run(call)
    graph.replay()
    assert same_bits(captured, eager)


@pytest.mark.parametrize("with_workspace", [False, True])
def test_graph_replay_gives_the_bits_of_eager_also_after_tables_and_lengths_changed(with_workspace):
    first = make([3_000, 75, 40, 880], [8, 8, 8, 8], page_size=48, dtype=torch.bfloat16, device="cuda", seed=1)
    sizes = {"max_num_reqs": 4, "max_seqlen_q": 8, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    options = {"workspace": Workspace.for_verify(**sizes)} if with_workspace else {}
    run(first, **options)
    out = torch.empty_like(first["q"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_lse = run(first, out=out, **options)
    batches = (1, [3_000, 75, 40, 880], [8] * 4), (2, [8, 2_900, 1, 333], [8, 5, 1, 0]), (3, [0, 0, 48, 9], [0, 3, 8, 8])
    for seed, lengths, q_lens in batches:
        other = make(lengths, q_lens, page_size=48, dtype=torch.bfloat16, device="cuda", seed=seed)
        rows = sum(q_lens)
        first["q"][:rows] = other["q"]
        for name in ("k_cache", "v_cache"):
            first[name].fill_(float("nan"))
            first[name][: len(other[name])] = other[name]
        first["block_table"].fill_(-1)
        first["block_table"][:, : other["block_table"].shape[1]] = other["block_table"]
        for name in ("seq_lens", "cu_seqlens_q"):
            first[name].copy_(other[name])
        if with_workspace:
            options["workspace"].part.fill_(float("nan"))
        graph.replay()
        eager, eager_lse = run(first, **options)
        torch.cuda.synchronize()
        assert same_bits(captured[:rows], eager[:rows]), (seed, rows)
        assert same_bits(captured_lse[:rows], eager_lse[:rows])
        assert torch.isfinite(eager[:rows]).all()


def test_no_host_sync():
    call = make([3_000, 75], [8, 2], dtype=torch.bfloat16, device="cuda")
    run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_attention(**call, return_lse=True)
        with pytest.raises(RuntimeError, match="synchroniz"):
            verify_attention(**call, check=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_torch_compile_with_inductor():
    call = make([3_000, 75], [8, 2], dtype=torch.bfloat16, device="cuda")
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}

    def step(q, **tensors):
        return verify_attention(q * 2, **tensors, max_seqlen_q=8) + 1

    compiled = torch.compile(step, fullgraph=True)
    assert torch.equal(compiled(**tensors), step(**tensors))


def test_two_streams_with_their_own_workspaces():
    sizes = {"max_num_reqs": 2, "max_seqlen_q": 8, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    calls = [make([20_000, 75], [8, 2], dtype=torch.bfloat16, device="cuda", seed=seed) for seed in (1, 2)]
    expected = [run(call)[0] for call in calls]
    scratch = [Workspace.for_verify(**sizes) for _ in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    outputs = [[], []]
    for _ in range(20):
        for lane, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[lane].append(run(calls[lane], workspace=scratch[lane])[0])
    torch.cuda.synchronize()
    for lane, want in enumerate(expected):
        assert all(same_bits(got, want) for got in outputs[lane])
