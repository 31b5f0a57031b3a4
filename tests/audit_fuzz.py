"""Hostile kernels, files and folders from a seed: what an audit must survive."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

HEAD = "import triton\nimport triton.language as tl\n\n"
NAMES = ("n", "m", "stride", "x", "y", "z", "pid", "i", "K")
BINARY = ("+", "-", "*", "//", "%", "<<", ">>", "&", "|", "^", "@", "**", "/")
CALLS = ("tl.minimum({a}, {b})", "tl.where({a} > {b}, {a}, {b})", "tl.cdiv({a}, {b})", "tl.sum({a}, 0)", "tl.load(x_ptr + {a})")
CASTS = (".to(tl.int64)", ".to(tl.int32)", "[:, None]", ".to(x_ptr.dtype.element_ty)", "")
TEXTS = (
    b"\xef\xbb\xbf",
    b"# coding: latin-1\n# \xe9\xff\n",
    b"# coding: utf-16\n",
    b"\x00",
    b"\r\n",
    b"\x0c",
    "Ⅷ = 1\n".encode(),
)
Maker = Callable[[random.Random, int], bytes]


def expression(draw: random.Random, depth: int) -> str:
    if depth <= 0 or draw.random() < 0.2:
        return draw.choice((*NAMES, str(draw.randrange(-(2**34), 2**34)), "None", "1.5", "tl"))
    first, second = expression(draw, depth - 1), expression(draw, depth - 1)
    if draw.random() < 0.25:
        return draw.choice(CALLS).format(a=first, b=second)
    return f"({first} {draw.choice(BINARY)} {second}){draw.choice(CASTS)}"


def block(draw: random.Random, lines: int, indent: str = "    ") -> list[str]:
    """Statements, nested at random, about `lines` of them."""
    out: list[str] = []
    while len(out) < lines:
        name, value = draw.choice(NAMES), expression(draw, draw.randrange(4))
        kind = draw.randrange(9)
        if kind < 4:
            out.append(f"{indent}{name} {draw.choice(('=', '+=', '*=', '-='))} {value}")
        elif kind < 6:
            out.append(f"{indent}tl.store(x_ptr + {value}, {name}, mask={name} < {draw.choice(NAMES)})")
        elif len(indent) < 80:
            heads = (f"for {name} in range({value}):", f"while {name} < {value}:", f"if {value} > {name}:")
            out.append(indent + heads[kind - 6])
            out += block(draw, max(1, min(lines - len(out), draw.randrange(1, 6))), indent + "    ")
    return out


def kernel(draw: random.Random, size: int) -> bytes:
    """Operations of every kind, as many as `size`."""
    head = "@triton.jit\ndef f(x_ptr, n, m, stride, K: tl.constexpr):\n    pid = tl.program_id(0)\n    x = y = z = i = pid\n"
    return (HEAD + head + "\n".join(block(draw, size)) + "\n").encode()


def products(draw: random.Random, size: int) -> bytes:
    """Products of sums of products: as polynomials they explode."""
    lines = [f"    y = y * (y {draw.choice('+-')} x + {draw.randrange(9)})" for _ in range(size)]
    stores = [f"    tl.store(x_ptr + y * {step}, 1.0)" for step in range(1, 4)]
    return (HEAD + "@triton.jit\ndef f(x_ptr, n):\n    x = y = tl.program_id(0)\n" + "\n".join(lines + stores) + "\n").encode()


def nested(draw: random.Random, size: int) -> bytes:
    """Brackets, operators or blocks inside one another."""
    shape = draw.randrange(4)
    if shape == 0:
        text = "(" * size + "x" + " * n)" * size
    elif shape == 1:
        text = "-" * size + "x"
    elif shape == 2:
        text = "x" + " + x * n" * size
    else:
        text = "tl.minimum(x, " * size + "n" + ")" * size
    return (HEAD + f"@triton.jit\ndef f(x_ptr, n):\n    x = tl.program_id(0)\n    tl.store(x_ptr + {text}, 1.0)\n").encode()


def garbled(draw: random.Random, size: int) -> bytes:
    """A kernel with bytes cut out, doubled or replaced; other encodings, with and without their marks."""
    data = bytearray(kernel(draw, size))
    for _ in range(draw.randrange(6)):
        place = draw.randrange(len(data))
        data[place : place + draw.randrange(3)] = bytes(draw.randrange(256) for _ in range(draw.randrange(3)))
    return draw.choice(TEXTS) * draw.randrange(2) + bytes(data)


MAKERS: tuple[Maker, ...] = (kernel, products, nested, garbled)


def tree(draw: random.Random, root: Path, size: int) -> None:
    """A folder of such files, with symbolic links that lead in circles and names that are no text."""
    root.mkdir(parents=True)
    for place, maker in enumerate(MAKERS):
        (root / f"{maker.__name__}_{place}.py").write_bytes(maker(draw, size))
    (root / "circle").symlink_to(root, target_is_directory=True)
    (root / "gone.py").symlink_to(root / "nothing.py")
    (root / "a folder.py").mkdir()
    (root / "é \t.py").write_bytes(kernel(draw, 2))
