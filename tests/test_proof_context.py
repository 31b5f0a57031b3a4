"""What a case builds from: placements, rows that pass the wall, and refusals."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'bigpool[cpu]'")

from bigpool.errors import CanaryError, ProofError  # noqa: E402
from bigpool.proof.case import DesignedSkip  # noqa: E402
from bigpool.proof.context import Context  # noqa: E402

INT32_MAX = 2**31 - 1
PLACEMENTS = ("bottom", "top", "across")
# 880 x 4 x 256 elements a page: the first page that fails is 2,384.
BIG_PAGE = (880, 4, 256)


def context(placement: str = "top", guard: str = "unmapped", **more: Any) -> Context:
    return Context(
        case="case", placement=placement, guard=guard, arm="shipped", dtype=torch.float16, versions=" (triton 9)", **more
    )


@pytest.mark.parametrize(("placement", "first"), [("bottom", 0), ("top", 2577), ("across", 2373)])
def test_pages_lie_where_the_placement_says(placement: str, first: int) -> None:
    with context(placement) as ctx:
        pool = ctx.pool("k", BIG_PAGE, pages=23, num_pages=2600)
        assert pool.ids.tolist() == list(range(first, first + 23))
        assert (pool.wall, pool.page_stride, pool.num_pages) == (2384, 901_120, 2600)
        assert tuple(pool.tensor.shape) == (2600, *BIG_PAGE)
        assert (pool.max_offset > INT32_MAX) == (placement != "bottom")
        assert pool.max_offset == (first + 23) * 901_120 - 1
        assert pool.pool.mapped_bytes < 64 * 2**20


@pytest.mark.parametrize(
    ("page_shape", "pages", "ids"),
    [
        ((1024,), 1, [2**21]),
        ((1000,), 1, [2_147_483]),
        ((1024,), 2, [2**21 - 1, 2**21]),
        ((1024,), 3, [2**21 - 1, 2**21, 2**21 + 1]),
    ],
)
def test_across_takes_pages_on_both_sides_of_the_wall(page_shape: tuple[int, ...], pages: int, ids: list[int]) -> None:
    with context("across") as ctx:
        pool = ctx.pool("k", page_shape, pages=pages)
        assert pool.ids.tolist() == ids
        assert pool.max_offset > INT32_MAX


def test_k_and_v_in_one_page_halve_the_wall() -> None:
    with context() as ctx:
        pool = ctx.pool("kv", (2, *BIG_PAGE), pages=2, num_pages=1400)
        assert pool.wall == 1192
        assert pool.tensor[:, 1].stride(0) == 1_802_240


def test_like_takes_the_ids_of_another_pool() -> None:
    with context() as ctx:
        k = ctx.pool("k", (16, 64), pages=3)
        v = ctx.pool("v", (16, 32), like=k)
        assert torch.equal(k.ids, v.ids)
        assert (v.num_pages, v.page_stride) == (k.num_pages, 512)


@pytest.mark.parametrize("page_shape", [(1,), (2,), (5,), (64,), (1000,), BIG_PAGE])
def test_the_top_lies_beyond_2_33_where_int32_ids_reach(page_shape: tuple[int, ...]) -> None:
    with context() as ctx:
        pool = ctx.pool("k", page_shape, pages=3)
        first = int(pool.ids[0]) * pool.page_stride
        if pool.page_stride == 1:
            assert pool.num_pages > 2**31, "only wider ids get above the wall"
            return
        assert pool.num_pages <= 2**31
        assert first > min(2**33, pool.page_stride * (2**31 - 4))
        # Where 32 bits would look instead: not at page 0, and not where the pages in use are.
        for wrap in (2**31, 2**32, 2**33):
            assert pool.page_stride < 6 or 2**25 < first % wrap < wrap - 2**25


def test_a_narrower_pool_has_to_pass_its_own_wall() -> None:
    with context() as ctx:
        k = ctx.pool("k", (16, 64), pages=3)
        assert ctx.pool("v", (8, 64), like=k).max_offset > INT32_MAX
        with pytest.raises(ProofError) as caught:
            ctx.pool("scale", (16,), like=k)
        assert str(caught.value) == (
            f"scale: expected an offset above 2147483647 elements at top, got {k.num_pages * 16 - 1} at most "
            f"(num_pages={k.num_pages} of k, page stride 16); pass num_pages=134217731 to k"
        )
    with context() as ctx:
        k = ctx.pool("k", (16, 64), pages=3, num_pages=134_217_731)
        assert ctx.pool("scale", (16,), like=k).max_offset > INT32_MAX
        assert ctx.pool("flag", (), like=k).max_offset <= INT32_MAX, "no int32 id can wrap"


def test_what_is_only_read_must_keep_its_bits() -> None:
    with context("bottom") as ctx:
        pool, rows = ctx.pool("k", (8,), pages=2), ctx.rows("q", (3, 4), role="read")
        table, lens, scratch = pool.table([1, 0]), ctx.tensor([1, 2]), ctx.tensor([0.0], dtype=torch.float16, role="write")
        out = ctx.rows("out", (3, 4))
        ctx.seal()
        out.tensor[1] = 1
        scratch[0] = 1
        ctx.check_inputs([])
        for one in (pool.tensor, rows.tensor):
            one[1, 2] = 3
        table[0] = 7
        lens[1] = 7
        with pytest.raises(CanaryError) as caught:
            ctx.check_inputs([])
        remedy = "look for a store through a wrong pointer, or make it with role='write'"
        stay = "expected its bits to stay, since it is only read, got others"
        assert str(caught.value) == (
            f"k: {stay} in 1 of its 2 rows in use, first in logical row 1; {remedy}; "
            f"q: {stay} in 1 of its 3 rows in use, first in logical row 1; {remedy}; "
            f"table of k: {stay}; {remedy}; ctx.tensor() 2, int64 [2]: {stay}; {remedy}"
        )
        with pytest.raises(CanaryError, match=r"^k: .*; q: .*; table of k: [^;]*; [^;]*$"):
            ctx.check_inputs([lens[:1]])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_bytes_are_the_same_at_every_placement(placement: str) -> None:
    def contents(at: str) -> tuple[Any, ...]:
        with context(at) as ctx:
            pool, out = ctx.pool("k", (8, 4), pages=3), ctx.rows("out", (4, 5))
            pool.write(ctx.randn(3, 8, 4))
            out.write(ctx.randn(4, 5))
            return pool.read(), out.read(), ctx.randint(0, 99, (7,)), torch.rand(3, generator=ctx.generator("mine"))

    for here, bottom in zip(contents(placement), contents("bottom"), strict=True):
        assert torch.equal(here, bottom)


def test_a_table_holds_physical_ids() -> None:
    with context() as ctx:
        pool = ctx.pool("k", (16, 64), pages=3)
        table = pool.table([[2, 0], [1, 1]])
        assert table.dtype == torch.int32
        assert (table - pool.ids[0]).tolist() == [[2, 0], [1, 1]]


@pytest.mark.parametrize("rows", [3, 4, 5, 6, 7, 8, 9, 10, 24, 25, 100])
def test_rows_pass_the_wall_with_a_stride_that_fits(rows: int) -> None:
    with context() as ctx:
        out = ctx.rows("out", (rows, 6, 10))
        assert out.max_offset > (2**33 if rows >= 6 else 2**32 if rows >= 4 else INT32_MAX)
        starts = [row * out.page_stride for row in range(rows)]
        for wrapped in (start % 2**32 for start in starts if start >= 2**32):
            assert min(abs(wrapped - start) for start in starts) > 60, "a wrapped row must not find a row"
        assert out.page_stride <= INT32_MAX
        assert out.page_stride % 16 == 0
        assert out.tensor.stride()[1:] == (10, 1)
    with context("bottom") as ctx:
        assert ctx.rows("out", (rows, 6, 10)).tensor.is_contiguous()


def test_fresh_memory_is_poison() -> None:
    with context() as ctx:
        assert ctx.pool("k", (8, 4), pages=2).read().isnan().all()
        assert ctx.rows("out", (3, 4), dtype=torch.float32).read().isnan().all()
        assert (ctx.rows("ids", (3, 4), dtype=torch.int32).read() == -0x7F7F7F80).all()


@pytest.mark.parametrize(("role", "guard"), [("write", "canary"), ("read", "poison")])
def test_what_lies_around_depends_on_the_role(role: Any, guard: str) -> None:
    with context(guard="poison") as ctx:
        assert ctx.pool("k", (8, 4), pages=2, role=role).pool.guard == guard
        assert ctx.rows("out", (3, 4), role=role).pool.guard == guard


def test_a_write_beside_a_tensor_is_reported_with_its_name() -> None:
    with context("bottom") as ctx:
        ctx.rows("out", (3, 4))
        scratch = ctx.rows("scratch", (3, 4), dtype=torch.float32)
        ctx.check_canaries()
        ctypes.memset(scratch.tensor.data_ptr() + 12 * 4, 1, 4)
        with pytest.raises(CanaryError) as caught:
            ctx.check_canaries()
        assert str(caught.value).startswith("scratch: guard: expected untouched memory outside the mapped pages, got 1 written")
        assert caught.value.ranges


def test_a_write_beside_a_tensor_is_seen_without_a_check_too() -> None:
    with pytest.raises(CanaryError), context("bottom") as ctx:
        ctypes.memset(ctx.rows("out", (3, 4)).tensor.data_ptr() + 12 * 2, 1, 2)


REFUSALS: list[tuple[str, Callable[[Context], Any], str]] = [
    (
        "top",
        lambda ctx: ctx.pool("k", BIG_PAGE, pages=2, num_pages=2000),
        "k: expected an offset above 2147483647 elements at top, got 1802239999 at most (num_pages=2000, page stride 901120); "
        "pass num_pages >= 2386 or leave it out",
    ),
    (
        "across",
        lambda ctx: ctx.pool("k", BIG_PAGE, pages=2, num_pages=2384),
        "k: expected a pool that holds 2 pages across the wall at page 2384, got num_pages=2384; leave num_pages out",
    ),
    ("top", lambda ctx: ctx.pool("k", (8, 4)), "k: expected pages >= 1, got None; say how many pages the case uses"),
    (
        "top",
        lambda ctx: ctx.rows("out", (2, 8)),
        "out: expected at least 3 rows, got 2; two rows cannot pass 2^31 with a 32-bit stride",
    ),
    (
        "bottom",
        lambda ctx: ctx.pool("k", (8, 4), pages=2).write(torch.zeros(3, 8, 4)),
        "k: expected data of shape [2, 8, 4], got [3, 8, 4]",
    ),
]


@pytest.mark.parametrize(("placement", "make", "text"), REFUSALS)
def test_a_case_that_would_prove_nothing_is_refused(placement: str, make: Callable[[Context], Any], text: str) -> None:
    with context(placement) as ctx, pytest.raises(ProofError) as caught:
        make(ctx)
    assert str(caught.value) == text


@pytest.mark.parametrize(("dtype", "short"), [(torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8"), (torch.float8_e5m2, "fp8")])
def test_what_the_interpreter_computes_wrongly_is_a_designed_skip(dtype: Any, short: str) -> None:
    makers: dict[str, Callable[[Context], Any]] = {
        "k": lambda ctx: ctx.pool("k", (8, 4), pages=2, dtype=dtype),
        "out": lambda ctx: ctx.rows("out", (3, 4), dtype=dtype),
        "randn": lambda ctx: ctx.randn(3, dtype=dtype),
        "tensor": lambda ctx: ctx.tensor([1.0], dtype=dtype),
    }
    for name, make in makers.items():
        with context() as ctx, pytest.raises(DesignedSkip) as caught:
            make(ctx)
        assert str(caught.value) == (
            f"{name}: {short} arithmetic is silently wrong in Triton's interpreter (triton 9); "
            "run this case on a GPU, or with float16 or float32"
        )
    with context(interpreted=False) as ctx:
        ctx.randn(3, dtype=dtype)


def test_a_designed_skip_carries_its_reason() -> None:
    with context() as ctx, pytest.raises(DesignedSkip, match=r"^fp8 conversion needs sm89\+, this is sm86$"):
        ctx.skip("fp8 conversion needs sm89+, this is sm86")
