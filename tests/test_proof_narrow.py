"""Finding and removing widenings: every spelling, lookalikes that must stay, and line numbers that must not move."""

from __future__ import annotations

import ast

import pytest

import bigpool
from bigpool.proof.arms import kernel_modules
from bigpool.proof.narrow import list_widenings, narrow, uncut

HEAD = "import triton.language as tl\n"

# source line(s) -> what is left without the widening
SPELLINGS = [
    ("page = tl.load(p).to(tl.int64) * s", "page = tl.load(p) * s"),
    ("page = tl.load(p).to(dtype=tl.int64)", "page = tl.load(p)"),
    ("page = (a + b).to(tl.int64) * s", "page = (a + b) * s"),
    ("page = a.to(triton.language.uint64)", "page = a"),
    ("page = a[i].cast(tl.int64)", "page = a[i]"),
    ("page = tl.cast(a + b, tl.int64) * s", "page = (a + b) * s"),
    ("page = tl.cast((a + b), dtype=tl.int64) * s", "page = (a + b) * s"),
    ("page = tl.cast(input=a, dtype=tl.int64)", "page = (a)"),
    ("acc = tl.full([4], 0, tl.int64)", "acc = tl.full([4], 0, tl.int32)"),
    ("acc = tl.zeros((4,), dtype=tl.int64)", "acc = tl.zeros((4,), dtype=tl.int32)"),
    ("def f(a, stride: tl.int64, n: tl.constexpr): pass", "def f(a, stride, n: tl.constexpr): pass"),
    ("def f(a, stride: 'i64' = 1): pass", "def f(a, stride = 1): pass"),
    ("x = 'é'; page = ä.to(tl.int64) + 1", "x = 'é'; page = ä + 1"),
    ("page = tl.load(\n    p,\n).to(\n    tl.int64,  # why\n) * s", "page = tl.load(\n    p,\n)\\\n\\\n * s"),
    ("page = (\n    a\n    .to(tl.int64)\n)", "page = (\n    a\n    \n)"),
    ("page = tl.cast(\n    a,  # .to(tl.int64)\n    tl.int64,\n) * s", "page = (\na\n\n) * s"),
    ("page = a.to(\n    tl.int64\n)  # tail", "page = a\\\n\\\n  # tail"),
]

LOOKALIKES = [
    "# page = a.to(tl.int64)",
    's = "a.to(tl.int64)"',
    "page = a.to(torch.int64)",
    "page = a.to(tl.int32)",
    "page = torch.full((4,), 0, dtype=torch.int64)",
    'def f(a):\n    """a.to(tl.int64) and tl.cast(a, tl.int64)"""',
    "def f(a: int, b: 'int32', c: tl.constexpr): pass",
]


@pytest.mark.parametrize(("source", "left"), SPELLINGS)
def test_every_spelling_is_cut_and_no_line_moves(source: str, left: str) -> None:
    assert len(list_widenings(HEAD + source)) == 1
    narrowed = narrow(HEAD + source)
    assert narrowed == HEAD + left
    assert narrowed.count("\n") == (HEAD + source).count("\n")
    assert list_widenings(narrowed) == []
    ast.parse(narrowed)


@pytest.mark.parametrize("source", LOOKALIKES)
def test_lookalikes_stay(source: str) -> None:
    assert list_widenings(HEAD + source) == []
    assert narrow(HEAD + source) == HEAD + source
    assert uncut(HEAD + source) == []


@pytest.mark.parametrize(
    ("imports", "name"),
    [
        ("import triton.language as L", "L.int64"),
        ("from triton import language as L", "L.int64"),
        ("import triton as t", "t.language.int64"),
        ("from triton.language import int64", "int64"),
        ("from triton.language import int64 as wide", "wide"),
    ],
)
def test_imported_names_are_followed(imports: str, name: str) -> None:
    assert narrow(f"{imports}\npage = a.to({name})") == f"{imports}\npage = a"


def test_a_place_counts_lines_and_columns_from_one() -> None:
    source = HEAD + "page = tl.load(p).to(tl.int64)\nx: int = 1\ny = tl.cast(page.to(tl.int64), tl.int64)"
    assert [tuple(widening) for widening in list_widenings(source)] == [
        (2, 18, ".to(tl.int64)"),
        (4, 5, "tl.cast(..., int64)"),
        (4, 17, ".to(tl.int64)"),
    ]


def test_one_of_several_can_be_removed() -> None:
    source = HEAD + "y = tl.cast(page.to(tl.int64), tl.int64) + z.to(tl.int64)"
    assert [narrow(source, only=index) for index in range(3)] == [
        HEAD + "y = (page.to(tl.int64)) + z.to(tl.int64)",
        HEAD + "y = tl.cast(page, tl.int64) + z.to(tl.int64)",
        HEAD + "y = tl.cast(page.to(tl.int64), tl.int64) + z",
    ]
    with pytest.raises(IndexError):
        narrow(source, only=3)


def test_wide_types_that_are_not_cut_are_listed() -> None:
    source = HEAD + "WIDE = tl.int64\npage = a.to(WIDE)\nok = a.to(tl.int64)\nif a.dtype == tl.int64:\n    pass"
    assert uncut(source) == [(2, "WIDE = tl.int64"), (5, "if a.dtype == tl.int64:")]


def test_the_kernels_of_this_package_can_be_narrowed_to_nothing() -> None:
    modules = kernel_modules()
    assert f"{bigpool.__name__}.kernels._paging" in modules
    sources = [path.read_text() for path in modules.values()]
    assert sum(len(list_widenings(source)) for source in sources) > 0
    for source in sources:
        # Of Gluon, barriers are of that type.
        assert [line for _, line in uncut(source) if "MBarrierLayout" not in line] == []
        assert "int64)" not in "".join(line for line in narrow(source).splitlines() if not line.lstrip().startswith(('"', "#")))
