"""Inline assembly on arrays of registers: the few instructions that the kernels use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .values import Tensor, from_bits, to_bits

UINT = np.uint32


def run(text: str, inputs: Sequence[np.ndarray], num_outputs: int) -> list[np.ndarray]:
    """The output registers. Registers are uint32 arrays; $0, $1 ... are outputs, then inputs."""
    registers = {f"${num_outputs + place}": value for place, value in enumerate(inputs)}
    for line in re.split(r"[;\n]", text.strip().strip("{}")):
        parts = line.strip().split(None, 1)
        if not parts or parts[0].startswith(".reg"):
            continue
        _execute(parts[0], [word.strip() for word in re.findall(r"\{[^}]*\}|[^,\s]+", parts[1])], registers)
    return [registers[f"${place}"] for place in range(num_outputs)]


def _execute(name: str, words: list[str], registers: dict[str, np.ndarray]) -> None:
    target, sources = words[0], [_value(word, registers) for word in words[1:]]
    if name == "mov.b32" and target.startswith("{"):
        low, high = (word.strip() for word in target.strip("{}").split(","))
        registers[low], registers[high] = sources[0] & UINT(0xFFFF), sources[0] >> UINT(16)
        return
    with np.errstate(all="ignore"):
        registers[target] = _result(name, sources)


def _value(word: str, registers: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(int(word, 0), UINT) if word[0].isdigit() else registers[word]


def _result(name: str, x: list[np.ndarray]) -> np.ndarray:
    if name == "mov.b32":
        return x[0]
    if name == "xor.b32":
        return x[0] ^ x[1]
    if name == "and.b32":
        return x[0] & x[1]
    if name == "add.u32":
        return x[0] + x[1]
    if name == "shr.u32":
        return np.where(x[1] < 32, x[0] >> np.minimum(x[1], UINT(31)), UINT(0))
    if name == "prmt.b32":
        return _permuted(x[0], x[1], int(x[2]))
    if name == "lop3.b32":
        return _looked_up(x[0], x[1], x[2], int(x[3]))
    if name == "add.rn.f16x2":
        a, b = np.broadcast_arrays(x[0], x[1])
        return (_halves(a) + _halves(b)).view(UINT)[..., 0]
    if name == "cvt.rn.f16x2.e4m3x2":
        codes = torch.from_numpy(np.stack([x[0] & UINT(0xFF), x[0] >> UINT(8)], -1).astype(np.uint8))
        return codes.view(torch.float8_e4m3fn).half().numpy().view(UINT)[..., 0]
    floats = [one.view(np.float32) for one in x]
    made = {
        "lg2.approx.f32": lambda: np.log2(floats[0]),
        "rcp.approx.f32": lambda: 1 / floats[0],
        "div.rn.f32": lambda: floats[0] / floats[1],
    }[name]()
    return made.astype(np.float32).view(UINT)


def _halves(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x)[..., None].view(np.float16)


def _permuted(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """Bytes 0 to 3 are of a, 4 to 7 of b; bit 3 of a selector spreads the sign, which no kernel asks for."""
    out = np.zeros(np.broadcast(a, b).shape, UINT)
    for place in range(4):
        chosen = selector >> (4 * place) & 15
        assert chosen < 8, "a selector with the sign bit"
        source = a if chosen < 4 else b
        out |= (source >> UINT(8 * (chosen % 4)) & UINT(0xFF)) << UINT(8 * place)
    return out


def _looked_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    out = np.zeros(np.broadcast(a, b, c).shape, UINT)
    for case in range(8):
        if table >> case & 1:
            out |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return out


def elementwise(text: str, constraints: str, arguments: list[Tensor], dtypes: list[Any], pack: int) -> list[Tensor]:
    """`gl.inline_asm_elementwise`: the outputs, which lie as the inputs do."""
    shape = arguments[0].shape
    assert all(one.shape == shape for one in arguments), "arguments of one shape"
    order = _order(next((one.layout for one in arguments if one.layout is not None), None), shape, pack)
    registers: list[np.ndarray] = []
    for one in arguments:
        groups = to_bits(one.a.reshape(-1)[order], one.dtype)
        words = np.ascontiguousarray(groups.reshape(len(order), -1)).view(UINT)
        registers += [words[:, place] for place in range(words.shape[1])]
    widths = [pack * dtype.primitive_bitwidth // 32 for dtype in dtypes]
    names = constraints.split(",")
    assert len(names) == sum(widths) + len(registers), f"{constraints} of {sum(widths)} outputs and {len(registers)} inputs"
    results = run(text, registers, sum(widths))
    made = []
    for dtype, width in zip(dtypes, widths, strict=True):
        words = np.stack([np.broadcast_to(one, len(order)) for one in results[:width]], -1)
        results = results[width:]
        data = np.ascontiguousarray(words).view(np.uint8).reshape(len(order), pack, -1)
        values = from_bits(data, dtype)
        out = np.empty(int(np.prod(shape)), values.dtype)
        out[order] = values
        made.append(Tensor(out.reshape(shape), dtype, arguments[0].layout))
    return made


def _order(layout: Any, shape: list[int], pack: int) -> np.ndarray:
    """[groups, pack]: which elements (of the flat value) a thread's registers hold that go into the assembly together."""
    if pack == 1:
        return np.arange(int(np.prod(shape)))[:, None]
    if hasattr(layout, "reg_bases"):
        assert list(layout.shape) == shape, f"a value of {shape} in a layout of {layout.shape}"
        threads = _span([*layout.lane_bases, *layout.warp_bases], shape)
        flat = threads[:, None] ^ _span(layout.reg_bases, shape)[None, :]
        return flat.reshape(-1, pack)
    assert layout is not None
    assert layout.size_per_thread[-1] % pack == 0
    assert layout.order[0] == len(shape) - 1, "registers in a row"
    return np.arange(int(np.prod(shape))).reshape(-1, pack)


def _span(bases: list[list[int]], shape: list[int]) -> np.ndarray:
    """The flat places that the bases reach; sizes are powers of two, so that flat places combine as coordinates do."""
    assert all(size & (size - 1) == 0 for size in shape)
    made = np.zeros(1, np.int64)
    for basis in bases:
        flat = int(np.ravel_multi_index(basis, shape))
        made = np.concatenate([made, made ^ flat])
    return made
