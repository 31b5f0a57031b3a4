"""Hostile input: a clear line each, no crash, no hang."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit_texts import HEADER, audited
from bigpool.audit import audit
from bigpool.audit.expr import Sink, const, unary
from bigpool.audit.finding import Span
from bigpool.audit.slices import MAX_PARTS, followed
from bigpool.audit.source.modules import MAX_FILE_BYTES, Unreadable, parse

GOOD = HEADER + "@triton.jit\ndef f(x_ptr, stride):\n    tl.store(x_ptr + tl.program_id(0) * stride, 1.0)\n"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"import triton.jit\ndef f(:\n", "does not parse as Python in line 2: invalid syntax"),
        (b"import triton.jit\n\x00\n", "holds NUL bytes: UTF-16, or no text"),
        (GOOD.encode("utf-16"), "holds NUL bytes: UTF-16, or no text"),
        (b"# coding: no-such-encoding\nimport triton.jit\n", "does not parse as Python: unknown encoding"),
        (b"import triton.jit\ns = '\xff\xfe'\n", "does not parse as Python"),
        (b"import triton.jit\nx = " + b"(" * 5000 + b")" * 5000, ""),
        (b"import triton.jit\nx = " + b"-" * 200_000 + b"1", ""),
        (b"import triton.jit\n#" + b" " * MAX_FILE_BYTES, "larger than 4 MiB"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "bad.py").write_bytes(data)
    (tmp_path / "good.py").write_text(GOOD)
    report = audit([tmp_path])
    ((what, why),) = report.skipped_files
    assert what.endswith("bad.py")
    assert why.startswith(reason)
    assert len(report.faults) == 1


def test_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\n# \xe9\n" + GOOD.encode())
    report = audit([tmp_path])
    assert (len(report.faults), report.skipped_files) == (1, [])


def test_a_loop_of_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "good.py").write_text(GOOD)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "twice.py").symlink_to(tmp_path / "a" / "good.py")
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "missing.py")
    report = audit([tmp_path])
    assert (report.files, len(report.faults)) == (1, 1)
    assert report.skipped_files == [(str(tmp_path / "nowhere.py"), "is no file, or a link to none")]


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    report = audit([tmp_path / "missing"])
    assert report.status == 2
    assert report.skipped_files[0][1] == "no such file or directory"


BIG = {
    "a long chain": "    y = x\n" + "    y = y * 3 + x\n" * 3000 + "    tl.store(x_ptr + y, 1.0)\n",
    "a wide sum": "    y = " + " + ".join(f"x * {n}" for n in range(2, 800)) + "\n    tl.store(x_ptr + y, 1.0)\n",
    "a product of sums": "    y = x\n" + "    y = y * (y + x + 1)\n" * 60 + "    tl.store(x_ptr + y, 1.0)\n",
    "branches": "    y = x\n"
    + "    if n > 3:\n        y = y + n\n    else:\n        y = y * n\n" * 300
    + "    tl.store(x_ptr + y, 1.0)\n",
    "branches on what is computed": "    y = x\n"
    + "    y = y * n + 1\n    if y > n:\n        y = y - n\n" * 1500
    + "    tl.store(x_ptr + y, 1.0)\n",
    "deep nesting": "".join("    " * (n + 1) + f"if n > {n}:\n" for n in range(60)) + "    " * 61 + "tl.store(x_ptr + x, 1.0)\n",
    "nested loops": "".join("    " * (n + 1) + f"for i{n} in range(n):\n" for n in range(16)) + "    " * 17 + "x_ptr += x\n",
    "an expression nested deeply": "    tl.store(x_ptr + " + "(" * 85 + "x" + " * n)" * 85 + ", 1.0)\n",
}


@pytest.mark.parametrize("name", BIG)
def test_large_kernels_end(tmp_path: Path, name: str) -> None:
    begin = time.process_time()
    report = audited(tmp_path, f"@triton.jit\ndef f(x_ptr, n):\n    x = tl.program_id(0)\n{BIG[name]}")
    assert time.process_time() - begin < 10
    assert report.kernels == 1
    assert report.skipped_files == []


def test_of_a_huge_kernel_the_first_sinks_are_followed() -> None:
    chain = const(1, 32)
    for _ in range(MAX_PARTS // 2):
        chain = unary("abs", chain)
    sinks = [Sink("address", (chain,), Span("kernels.py", line, 1, line, 2)) for line in range(1, 6)]
    assert (followed(sinks[:1]), followed(sinks)) == (1, 1)


def test_helpers_that_call_each_other_end(tmp_path: Path) -> None:
    body = (
        "@triton.jit\ndef a(x, n):\n    return b(x, n) + b(x, n)\n\n@triton.jit\ndef b(x, n):\n    return a(x, n) + a(x, n)\n\n"
    )
    body += "@triton.jit\ndef f(x_ptr, n):\n    tl.store(x_ptr + a(tl.program_id(0), n), 1.0)\n"
    report = audited(tmp_path, body)
    assert len(report.skipped_kernels) + len(report.notes) >= 1


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    # Anything else than this error would fail the test.
    with suppress(Unreadable):
        parse(b"import triton\n" + data, Path("x.py"), "x.py")


STATEMENTS = (
    "y = tl.load(x_ptr + {a})",
    "x_ptr += {a}",
    "for i in range({a}, {b}):\n        n = n + i",
    "a, b = {a}, {b}",
    "n = {a} * {b}",
    "while n < {a}:\n        n += {b}",
    "n = tl.where({a} > {b}, {a}, {b})",
    "if {a} > {b}:\n        n = {a}",
    "n = tl.cdiv({a}, {b})",
    "n = ({a}).to(tl.int64)",
    "n = -{a} // {b}",
    "n, _ = {a}",
    "n = n[{a}]",
    "tl.store({a}, {b}, mask={a} < {b})",
    "n = {a}.foo({b})",
    "n = tl.sum({a}, {b})",
    "n: tl.constexpr = {a}",
    "return {a}",
    "n = [{a} for i in {b}]",
    "n = lambda: {a}",
    "del n",
    "n = x_ptr - {a}",
)
VALUES = ("n", "1", "None", "x_ptr", "tl", "(1, 2)")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(STATEMENTS), st.sampled_from("npxqz"), st.sampled_from(VALUES)),
        max_size=8,
    )
)
def test_any_kernel(tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, str, str]]) -> None:
    body = "".join("    " + statement.format(a=a, b=b) + "\n" for statement, a, b in parts)
    report = audited(
        tmp_path_factory.mktemp("fuzz"), f"@triton.jit\ndef f(x_ptr, n, p, q: tl.constexpr):\n    x = tl.program_id(0)\n{body}"
    )
    assert report.kernels + len(report.skipped_kernels) == 1


def test_a_changed_file_takes_less_than_a_second(tmp_path: Path) -> None:
    kernels = [GOOD.removeprefix(HEADER).replace("def f(", f"def f{place}(") for place in range(20)]
    path = tmp_path / "twenty.py"
    path.write_text(HEADER + "\n".join(kernels))
    begin = time.process_time()
    assert len(audit([path]).faults) == 20
    assert time.process_time() - begin < 1
