"""What only a GPU can show of prefill attention: bf16, CUDA graphs, no host sync, how often it compiles, the serving shape."""

import pytest
import torch

from bigpool.kernels import prefill
from bigpool.ops import _prefill_sm90
from bigpool.ops.prefill import PrefillWorkspace, prefill_attention
from prefill_inputs import check, errors_of, make, run, same_bits

pytestmark = pytest.mark.gpu
MODES = ("exact", "int8")


# Plain Triton, and what the card has.
BACKENDS = ("triton", "auto")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qk", MODES)
@pytest.mark.parametrize("page_size", [1, 16, 880])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_bf16(page_size, head_dim, qk, backend):
    sizes = {"page_size": page_size, "head_dim": head_dim, "dtype": torch.bfloat16, "device": "cuda"}
    check(make([901, 430, 0, 17], [500, 130, 0, 1], qk=qk, **sizes), backend=backend)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("qk", MODES)
def test_other_dtypes(qk, dtype):
    check(make([901, 430], [200, 130], page_size=48, head_dim=128, dtype=dtype, device="cuda", qk=qk))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qk", MODES)
def test_rules(qk, backend):
    sizes = {"page_size": 16, "heads": (24, 4), "head_dim": 128, "dtype": torch.bfloat16, "device": "cuda", "qk": qk}
    for rules in ({"window_size": 200}, {"softcap": 20.0}, {"causal": False}, {"window_size": 70, "causal": False}):
        check(make([901, 300], [400, 130], **sizes, **rules), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qk", MODES)
def test_serving_shape(qk, backend):
    call = make([20_000], [2_048], page_size=880, heads=(24, 4), head_dim=256, dtype=torch.bfloat16, device="cuda", qk=qk)
    out, _ = check(call, backend=backend)
    relative, angle = errors_of(call, out)
    assert relative <= (0.02 if qk == "int8" else 0.006), relative
    assert angle <= (2e-4 if qk == "int8" else 2e-5), angle


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qk", MODES)
def test_graph_replay_gives_the_bits_of_eager_also_after_tables_and_lengths_changed(qk, backend):
    first = make([3_000, 75, 40], [300, 60, 33], page_size=48, dtype=torch.bfloat16, device="cuda", seed=1, qk=qk)
    options = {"backend": backend}
    if qk == "int8":
        sizes = {"max_num_reqs": 3, "max_num_keys": 4_000, "num_kv_heads": 2, "head_dim": 64}
        options["workspace"] = PrefillWorkspace.empty(**sizes, device="cuda")
    run(first, **options)
    out = torch.empty_like(first["q"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_lse = run(first, out=out, **options)
    for seed, lengths, q_lens in (
        (1, [3_000, 75, 40], [300, 60, 33]),
        (2, [8, 2_900, 1], [8, 250, 0]),
        (3, [0, 48, 9], [3, 8, 8]),
    ):
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
        graph.replay()
        eager, eager_lse = run(first, **options)
        torch.cuda.synchronize()
        assert same_bits(captured[:rows], eager[:rows]), (seed, rows)
        assert same_bits(captured_lse[:rows], eager_lse[:rows])
        assert torch.isfinite(eager[:rows]).all()


@pytest.mark.parametrize("qk", MODES)
def test_no_host_sync(qk):
    call = make([3_000, 75], [300, 20], dtype=torch.bfloat16, device="cuda", qk=qk)
    run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        prefill_attention(**call, return_lse=True)
        with pytest.raises(RuntimeError, match="synchroniz"):
            prefill_attention(**call, check=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def compilations():
    """Compiled variants of all kernels of prefill."""
    from triton.runtime import JITFunction

    kernels = [value for value in vars(prefill).values() if isinstance(value, JITFunction)]
    return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)


@pytest.mark.parametrize("qk", MODES)
def test_lengths_compile_nothing_anew(qk):
    sizes = {"dtype": torch.bfloat16, "device": "cuda", "head_dim": 32, "qk": qk}
    run(make([75, 40], [6, 1], **sizes))
    before = compilations()
    for lengths in (([16], [16]), ([1], [1]), ([700, 64, 33], [300, 64, 17]), ([4_096], [2_048]), ([250], [100])):
        run(make(*lengths, **sizes))
    assert compilations() == before
    # Another head dim does.
    run(make([75], [6], **sizes | {"head_dim": 48}))
    assert compilations() > before


@pytest.mark.parametrize("qk", MODES)
def test_torch_compile_with_inductor(qk):
    call = make([3_000, 75], [300, 20], dtype=torch.bfloat16, device="cuda")
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}

    def step(q, **tensors):
        return prefill_attention(q * 2, **tensors, max_seqlen_q=300, qk=qk) + 1

    compiled = torch.compile(step, fullgraph=True)
    assert torch.equal(compiled(**tensors), step(**tensors))


@pytest.mark.skipif(not _prefill_sm90.has_gluon(), reason="needs a Triton of tuning_sm90.TRITON_VERSIONS")
@pytest.mark.parametrize("modes", [{}, {"qk": "int8"}, {"qk": "int8", "pv": "fp8"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rules", [{}, {"window_size": 300}, {"softcap": 2.0}, {"causal": False}], ids=str)
def test_the_hopper_kernels_take_plain_caches(monkeypatch, modes, dtype, rules):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    taken = []
    launch = _prefill_sm90.launch
    monkeypatch.setattr(_prefill_sm90, "launch", lambda *arguments: (taken.append(1), launch(*arguments)))
    sizes = {"heads": (24, 4), "head_dim": 256, "dtype": dtype, "device": "cuda"}
    for page_size in (16, 64, 880):
        call = make([2_901, 430, 0, 17, 64], [500, 130, 0, 1, 64], page_size=page_size, **modes, **sizes, **rules)
        check(call, backend="auto")
    assert len(taken) == 3
