"""What launches in the kernel's file say: grids, checks before the launch, buffers that the launcher allocates."""

from __future__ import annotations

from pathlib import Path

import pytest

from audit_texts import HEADER
from bigpool.audit import Finding, Severity, audit

KERNEL = """
@triton.jit
def kernel(x_ptr, y_ptr, stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < n_cols)
    tl.store(y_ptr + row * stride + cols, x, mask=cols < n_cols)


"""
LAUNCH = "    kernel[(rows,)](x, y, x.stride(0), x.size(1), BLOCK=1024)\n"
START = "import torch\n\nMOST = 8\n\n\ndef launch(x, y, big=False):\n    rows, cols = x.shape\n"

# (name, the launcher, what becomes of `row * stride`: severity, confidence, a note)
CASES = [
    ("no_check", START + LAUNCH, "error", "high", ""),
    ("an_assertion", START + "    assert rows <= MOST and cols % 8 == 0\n" + LAUNCH, "error", "medium", "program_id(0) below 8"),
    ("a_chain", START + "    assert 2 <= rows < 9\n" + LAUNCH, "error", "medium", "program_id(0) below 8"),
    (
        "an_error",
        START + "    if x.shape[0] > 8 or cols > 99:\n        raise ValueError\n" + LAUNCH,
        "error",
        "medium",
        "below 8",
    ),
    ("a_return", START + "    if not rows <= 8:\n        return None\n" + LAUNCH, "error", "medium", "below 8"),
    ("a_branch", START + "    if x.size(0) <= 8:\n    " + LAUNCH, "error", "medium", "below 8"),
    ("the_other_branch", START + "    if rows > 8:\n        pass\n    else:\n    " + LAUNCH, "error", "medium", "below 8"),
    ("a_large_check", START + "    assert rows <= 10**6\n" + LAUNCH, "error", "high", ""),
    ("a_check_of_something_else", START + "    assert cols <= 8\n" + LAUNCH, "error", "high", ""),
    ("a_check_that_may_not_run", START + "    if big:\n        assert rows <= 8\n" + LAUNCH, "error", "high", ""),
    ("a_check_that_does_not_stop", START + "    if rows > 8:\n        print(rows)\n" + LAUNCH, "error", "high", ""),
    ("one_of_two_conditions", START + "    assert rows <= 8 or big\n" + LAUNCH, "error", "high", ""),
    ("a_check_of_the_old_value", START + "    assert rows <= 8\n    rows = rows * cols\n" + LAUNCH, "error", "high", ""),
    ("a_check_of_the_old_tensor", START + "    assert x.shape[1] <= 8\n    x = x.t()\n" + LAUNCH, "error", "high", ""),
    ("a_check_after_the_launch", START + LAUNCH + "    assert rows <= 8\n", "error", "high", ""),
    ("a_second_launch", START + "    if rows <= 8:\n    " + LAUNCH + LAUNCH, "error", "high", ""),
    ("a_trial", START.replace("def launch", "def test_launch") + "    assert rows <= 8\n" + LAUNCH, "error", "high", ""),
    ("passed_on", START + "    assert rows <= 8\n" + LAUNCH + "    return tune(kernel)\n", "error", "high", ""),
    (
        "pieces",
        START + "    z = torch.empty((rows, triton.cdiv(cols, 1024)))\n" + LAUNCH.replace("x.stride", "z.stride"),
        "error",
        "medium",
        "a row has one entry for each block of a larger tensor",
    ),
    (
        "a_whole_shape_in_a_name",
        START + "    z = torch.empty(shape)\n" + LAUNCH.replace("x.stride", "z.stride"),
        "error",
        "high",
        "",
    ),
]


def product(folder: Path, launcher: str) -> list[Finding]:
    """What is said about the load of a kernel with a launcher."""
    path = folder / "kernels.py"
    path.write_text(HEADER + KERNEL + launcher, "utf-8")
    line = 1 + (HEADER + KERNEL).split("\n").index("    x = tl.load(x_ptr + row * stride + cols, mask=cols < n_cols)")
    return [finding for finding in audit([path]).findings if finding.primary.span.line == line]


@pytest.mark.parametrize(("launcher", "severity", "confidence", "note"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_a_check_before_every_launch_counts(tmp_path: Path, launcher: str, severity: str, confidence: str, note: str) -> None:
    (found,) = product(tmp_path, launcher)
    assert (str(found.severity), str(found.confidence)) == (severity, confidence), found.notes
    assert any(note in text for text in found.notes) if note else found.notes == []


@pytest.mark.parametrize(
    "check",
    [
        "    assert x.shape[0] * x.stride(0) <= 2**31\n",
        "    if x.numel() > 2**31 - 1:\n        raise ValueError\n",
        "    assert x.numel() < torch.iinfo(torch.int32).max\n",
        "    x = x.contiguous()\n    assert x.stride(0) * x.size(0) < 1 << 31\n",
    ],
)
def test_a_tensor_that_is_checked_to_fit_is_a_note(tmp_path: Path, check: str) -> None:
    (found,) = product(tmp_path, START + check + LAUNCH)
    assert found.severity is Severity.NOTE
    assert found.message == "32-bit program id multiplied by a stride; checked on the host"
    assert found.notes[0].startswith("trusted: the host checks before the launch that x.")


@pytest.mark.parametrize(
    "check", ["    assert x.numel() <= 2**32\n", "    assert y.numel() < 2**31\n", "    assert cols < 2**31\n"]
)
def test_a_check_that_is_too_weak_or_of_another_tensor_does_not_count(tmp_path: Path, check: str) -> None:
    (found,) = product(tmp_path, START + check + LAUNCH)
    assert (str(found.severity), str(found.confidence)) == ("error", "high")


def test_the_stride_of_a_vector_that_the_launcher_allocates_is_one(tmp_path: Path) -> None:
    assert product(tmp_path, START + "    z = torch.empty((rows,))\n" + LAUNCH.replace("x.stride", "z.stride")) == []


def test_a_constant_grid_bounds_the_program_id(tmp_path: Path) -> None:
    (found,) = product(tmp_path, START + LAUNCH.replace("(rows,)", "lambda meta: (min(rows, 4096),)"))
    assert (str(found.confidence), found.notes) == ("medium", ["every launch keeps program_id(0) below 4,096"])


def test_a_kernel_that_another_file_imports_may_be_launched_there(tmp_path: Path) -> None:
    launcher = START + "    assert rows <= 8\n" + LAUNCH
    other = tmp_path / "other.py"
    other.write_text("import triton\nfrom kernels import kernel\n\n\n@triton.jit\ndef own(x_ptr):\n    pass\n", "utf-8")
    product(tmp_path, launcher)
    found = [finding for finding in audit([tmp_path]).findings if finding.rule == "BP103"]
    assert {str(finding.confidence) for finding in found} == {"high"}


@pytest.mark.parametrize(
    "size",
    [
        "    a = b\n    b = a\n",
        "    b = x.shape[0]\n"
        + "".join(f"    b{n} = b{n - 1 if n else ''} * b{n - 1 if n else ''}\n" for n in range(1500))
        + "    a = b1499\n",
        "    a = " + " + ".join(["rows"] * 900) + "\n",
        "    a = rows\n    for a in range(a):\n        a += 1\n",
    ],
)
def test_a_size_that_cannot_be_told_bounds_nothing(tmp_path: Path, size: str) -> None:
    (found,) = product(tmp_path, START + size + LAUNCH.replace("(rows,)", "(a,)"))
    assert (str(found.severity), str(found.confidence)) == ("error", "high")


def test_a_buffer_that_another_one_goes_along(tmp_path: Path) -> None:
    buffers = "    z = torch.empty((rows, cols))\n    w = torch.empty((rows, cols, 64))\n"
    (found,) = product(tmp_path, START + buffers + LAUNCH.replace("x, y, x.stride", "z, w, z.stride"))
    assert (str(found.confidence), found.notes) == (
        "medium",
        ["y_ptr has the same sizes and one more: it may be beyond memory first"],
    )


def test_a_buffer_made_like_one_that_another_one_goes_along(tmp_path: Path) -> None:
    buffers = "    z = torch.empty((rows, cols))\n    w = torch.empty((rows, cols, 64))\n    v = torch.zeros_like(z)\n"
    (found,) = product(tmp_path, START + buffers + LAUNCH.replace("x, y, x.stride", "v, w, v.stride"))
    assert str(found.confidence) == "medium"


@pytest.mark.parametrize(
    ("before", "stride", "silent"),
    [
        ("    x = x.contiguous()\n", "x.stride(1)", True),
        ("    x = x.contiguous()\n", "x.stride(-1)", True),
        ("    x = x.contiguous()\n", "x.stride(0)", False),
        ("    if big:\n        x = x.contiguous()\n", "x.stride(1)", False),
        ("    x = x.contiguous()\n    x = x.t()\n", "x.stride(1)", False),
    ],
)
def test_the_last_axis_of_a_tensor_that_was_made_contiguous(tmp_path: Path, before: str, stride: str, silent: bool) -> None:
    assert (product(tmp_path, START + before + LAUNCH.replace("x.stride(0)", stride)) == []) == silent


def test_short_rows(tmp_path: Path) -> None:
    (found,) = product(tmp_path, START + "    assert cols <= 32\n" + LAUNCH.replace("x.stride(0)", "cols"))
    assert (str(found.confidence), found.notes) == ("medium", ["every launch has rows of at most 32"])
