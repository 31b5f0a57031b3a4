"""Reads the text of TTIR: functions, blocks, operations, and where each stands in the source.

Text rather than the compiler's binding: the text is the same for every version, names the place of every operation (the binding
has none for a store, and aborts the process on some questions), and can be read where Triton is not installed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_LOC_END = re.compile(r"\s+loc\((#loc\d*|unknown|callsite\(.*\)|\"(?:[^\"\\]|\\.)*\"(?::\d+:\d+|\(.*\))?)\)$")
_RESULTS = re.compile(r"^(%[\w$.-]+)(?::(\d+))? = ")
_NAME = re.compile(r'^"?([\w.]+)"?')
_BLOCK = re.compile(r"^\^(\w+)(?:\((.*)\))?:\s*(?://\s*(.*))?$")
_FUNC = re.compile(r"^tt\.func (?:public |private )?@(\"[^\"]*\"|[\w$.]+)\((.*)\)(.*)\{$")
_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):(\d+)$')
_NAMED = re.compile(r'^"((?:[^"\\]|\\.)*)"(?:\((.*)\))?$')
_QUOTED = re.compile(r'"[^"]*"')
MAX_ALIASES = 40


class TtirError(ValueError):
    """The text is not what this reader knows."""


@dataclass(slots=True)
class Op:
    """One operation. `text` is what follows its name, without the place; `types` what follows the last colon."""

    name: str
    results: list[str]
    text: str
    operands: list[str]
    loc: str = ""
    types: str = ""
    regions: list[list[Block]] = field(default_factory=list)


@dataclass(slots=True)
class Block:
    label: str = ""
    args: list[tuple[str, str, str]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    reachable: bool = True


@dataclass(slots=True)
class Function:
    name: str
    public: bool
    args: list[tuple[str, str, str]]
    blocks: list[Block]
    loc: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """File, line and column of an operation, and the name that its value is assigned to.

    Newer versions of Triton give the column, from 1, at which the expression starts; older ones (`last_part`) give the column,
    from 0, at which its last operand starts.
    """

    file: str
    line: int
    col: int
    name: str = ""
    last_part: bool = False


class Module:
    def __init__(self, text: str) -> None:
        self.functions: dict[str, Function] = {}
        self._aliases: dict[str, str] = {}
        self._places: dict[str, Place | None] = {}
        self._from_zero = False
        _Reader(self, text).read()

    @property
    def entry(self) -> Function:
        for function in self.functions.values():
            if function.public:
                return function
        raise TtirError("no public function")

    def place(self, loc: str) -> Place | None:
        """What a location says, through its aliases; None where it is unknown."""
        if loc not in self._places:
            self._places[loc] = self._resolve(loc)
        return self._places[loc]

    def _resolve(self, loc: str) -> Place | None:
        name = ""
        for _ in range(MAX_ALIASES):
            loc = self._aliases.get(loc, loc)
            if found := _FILE.match(loc):
                return Place(_unquoted(found[1]), int(found[2]), int(found[3]), name, self._from_zero)
            if loc.startswith("callsite("):
                loc = loc.removeprefix("callsite(").partition(" at ")[0]
            elif named := _NAMED.match(loc):
                name = name or _unquoted(named[1])
                loc = named[2] or ""
            elif loc not in self._aliases:
                return None
        return None


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


class _Reader:
    def __init__(self, module: Module, text: str) -> None:
        self.module = module
        self.lines = text.splitlines()
        self.at = 0

    def read(self) -> None:
        for line in self.lines:
            if alias := _ALIAS.match(line.strip()):
                self.module._aliases[alias[1]] = alias[2]
                self.module._from_zero = self.module._from_zero or alias[2].endswith(":0")
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            self.at += 1
            if header := _FUNC.match(line):
                self._function(line, header)

    def _function(self, line: str, header: re.Match[str]) -> None:
        name = header[1].strip('"')
        inside, _, _ = _balanced(line[header.end(1) :])
        function = Function(name, " public " in line[: line.index("@")], [_argument(part) for part in split(inside)], [])
        function.blocks, tail = self._region()
        function.loc = _place_at_end(tail)[1]
        self.module.functions[name] = function

    def _region(self) -> tuple[list[Block], str]:
        """Blocks up to the closing brace, and the line of that brace."""
        blocks = [Block()]
        while self.at < len(self.lines):
            line = self.lines[self.at].strip()
            self.at += 1
            if line.startswith("}"):
                return blocks, line
            if not line or line.startswith(("//", "#")):
                continue
            if block := _BLOCK.match(line):
                args = [_argument(part) for part in split(block[2])] if block[2] else []
                fresh = Block(block[1], args, [], "no predecessors" not in (block[3] or ""))
                if len(blocks) == 1 and not blocks[0].ops and not blocks[0].label:
                    blocks[0] = fresh
                else:
                    blocks.append(fresh)
                continue
            blocks[-1].ops.append(self._operation(line))
        raise TtirError("the text ends inside a region")

    def _operation(self, line: str) -> Op:
        results: list[str] = []
        if found := _RESULTS.match(line):
            results = [found[1]] if found[2] is None else [f"{found[1]}#{place}" for place in range(int(found[2]))]
            line = line[found.end() :]
        opens = line.endswith("{")
        text, loc = (line[:-1].rstrip(), "") if opens else _place_at_end(line)
        named = _NAME.match(text)
        if named is None:
            raise TtirError(f"no operation in {line[:80]!r}")
        op = Op(named[1], results, text[named.end() :].strip(), [], loc)
        if opens:
            self._regions(op)
        head, colon, op.types = _last_colon(op.text)
        op.operands = VALUE.findall(_QUOTED.sub("", head if colon else op.text))
        return op

    def _regions(self, op: Op) -> None:
        while True:
            blocks, tail = self._region()
            op.regions.append(blocks)
            if tail.endswith("{"):
                continue
            tail, op.loc = _place_at_end(tail)
            # `}) : (types) -> types` of the generic form; `} {attributes}` says nothing about values.
            if tail.startswith("})"):
                op.text = op.text.removesuffix("({").removesuffix("(").rstrip() + " " + tail[2:].strip()
            return


def _place_at_end(line: str) -> tuple[str, str]:
    if found := _LOC_END.search(line):
        return line[: found.start()], found[1]
    return line, ""


def _argument(text: str) -> tuple[str, str, str]:
    """(name, type, location) of `%name: type {attributes} loc(...)`."""
    text, loc = _place_at_end(text.strip())
    name, _, rest = text.partition(":")
    return name.strip(), re.sub(r"\s*\{.*\}$", "", rest).strip(), loc


def _balanced(text: str) -> tuple[str, str, int]:
    """The inside of the bracket that `text` starts with, what follows, and where that starts."""
    depth, quoted = 0, False
    for place, char in enumerate(text):
        if char == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if not depth:
                return text[1:place], text[place + 1 :], place + 1
    raise TtirError("a bracket is not closed")


def split(text: str) -> list[str]:
    """Splits at commas outside brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for place, char in enumerate(text):
        if char == '"' and text[place - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char in "([{<":
            depth += 1
        elif char in ")]}" or (char == ">" and text[place - 1] != "-"):
            depth -= 1
        elif char == "," and not depth:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def _last_colon(text: str) -> tuple[str, str, str]:
    """Splits at the last colon outside brackets: types follow it."""
    depth = 0
    for place in range(len(text) - 1, -1, -1):
        char = text[place]
        if char in ")]}" or (char == ">" and text[place - 1] != "-"):
            depth += 1
        elif char in "([{<":
            depth -= 1
        elif char == ":" and not depth:
            return text[:place].rstrip(), ":", text[place + 1 :].strip()
    return text, "", ""


def groups(text: str) -> list[list[str]]:
    """The values in each pair of square brackets."""
    return [VALUE.findall(part) for part in re.findall(r"\[([^\]]*)\]", text)]


def element(type_text: str) -> str:
    """`i32` of `tensor<64x1xi32>`, `ptr<bf16>` of `tensor<64x!tt.ptr<bf16>>`, `block<bf16>` of a pointer to a tensor."""
    text = type_text.strip().removeprefix("!").removeprefix("tt.")
    if text.startswith("tensor<"):
        inner = re.sub(r"^(?:\d+x)*", "", text[len("tensor<") : -1])
        return element(inner.partition(", #")[0])
    if text.startswith("ptr<"):
        inner = text[4:-1]
        return f"block<{element(inner)}>" if inner.startswith("tensor<") else f"ptr<{element(inner.partition(',')[0])}>"
    return text


def width(type_text: str) -> int:
    """Bits of an integer type, 0 for anything else."""
    found = re.fullmatch(r"i(\d+)", element(type_text))
    return int(found[1]) if found else 64 if element(type_text) == "index" else 0


def item_bytes(type_text: str) -> int:
    """Bytes of what a pointer points to, 0 if unknown."""
    inner = element(type_text).removeprefix("ptr<").removeprefix("block<").removesuffix(">")
    if inner.startswith("ptr<"):
        return 8
    found = re.match(r"(?:i|f|bf|tf)(\d+)", inner)
    return max(1, int(found[1]) // 8) if found else 0


def walk(blocks: list[Block]) -> Iterator[Op]:
    for block in blocks:
        for op in block.ops:
            yield op
            for region in op.regions:
                yield from walk(region)
