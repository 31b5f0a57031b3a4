"""Candidates in words: a finding with its spans, its wall and its fix."""

from __future__ import annotations

from dataclasses import replace

from .candidate import Candidate
from .expr import Origin
from .finding import Confidence, Finding, Fix, Label, Severity, Span, Wall
from .rules import rule_for

MAX_CALLS = 3
ORIGINS = {
    Origin.LOAD: "int32 from here",
    Origin.PROGRAM_ID: "int32 from here",
    Origin.LOOP: "loop variable, int32 from here",
}


def finding(found: Candidate) -> Finding:
    rule = rule_for(found)
    noun = rule.noun(found)
    if found.confidence is Confidence.LOW:
        message = f"32-bit {noun} may not fit"
    elif found.checked:
        message = f"32-bit {noun}; checked on the host"
    elif found.assumed:
        message = f"32-bit {noun}; its tensor is assumed to be small enough"
    elif found.severity is Severity.NOTE:
        message = f"32-bit {noun}; out of reach"
    else:
        message = f"32-bit {noun}"
    result = Finding(
        rule.id,
        found.severity,
        found.confidence,
        found.program.name,
        message,
        Label(found.span, "evaluated in 32 bits" if found.observed.root.width == 32 else _evaluated(found)),
        wall=replace(found.wall, item_bytes=1 if found.observed.sink.offset_bytes else found.observed.sink.item_bytes),
        key=found.wall.formula,
    )
    _origin(found, result)
    if found.observed.via is not None and found.observed.via.span is not None and found.observed.via.detail == "explicit":
        what = "narrowed here" if found.observed.narrowing else "widened only here"
        result.secondary.append(Label(found.observed.via.span, what))
    calls = [call for body, call in found.program.calls if found.span.within(body)]
    result.secondary += [Label(call, "called here") for call in dict.fromkeys(calls[:MAX_CALLS])]
    _notes(found, result)
    result.fix = _fix(found)
    return result


def _evaluated(found: Candidate) -> str:
    if found.observed.narrowing:
        return "does not fit 32 bits"
    return f"evaluated in {found.observed.root.width} bits"


def _origin(found: Candidate, result: Finding) -> None:
    var = found.var
    if var is None or var.span is None or var.span == found.span:
        return
    text = ORIGINS.get(var.origin, "from here")
    if var.origin is Origin.LOAD and not var.typed:
        text = "int32 from here, if the tensor holds int32"
    elif var.width != 32:
        text = f"{var.width} bits from here"
    result.secondary.append(Label(var.span, text))
    index = found.product.index
    if index.span is not None and index.narrow and index.span.line not in (found.span.line, var.span.line):
        result.secondary.append(Label(index.span, f"the {index.width}-bit index is made here"))


def _notes(found: Candidate, result: Finding) -> None:
    var = found.var
    if var is not None and not var.typed:
        result.notes.append(f"assumed: {var.pointer or 'the tensor that the index is loaded from'} holds int32")
    if found.siblings and found.confidence is not Confidence.HIGH:
        result.notes.append("the address has other terms that grow: if this is an inner axis, its wall is that of one slab")
    result.notes += found.reasons
    for gate, value in found.program.gates.items():
        result.notes.append(f"with {gate} = {value}")
    if found.checked:
        result.notes.append(f"trusted: the host checks before the launch that {found.checked}")
    elif found.assumed:
        result.notes.append(f"assumed: {found.assumed}")
    elif found.severity is Severity.NOTE and not found.compared:
        result.notes.append("needs a tensor beyond --max-memory: the index is scaled again after it is widened")


def _fix(found: Candidate) -> Fix | None:
    var = found.var
    if var is None and found.variable is not None and found.variable.span is not None:
        return Fix("widen what the kernel counts: .to(tl.int64)", (after(found.variable.span),), True)
    if var is None or var.span is None:
        return None
    if found.observed.narrowing:
        return None
    if var.origin in (Origin.LOAD, Origin.PROGRAM_ID):
        what = "at the load: tl.load(...)" if var.origin is Origin.LOAD else "the program id: tl.program_id(...)"
        if found.product.index.span is not None and _narrowed_by_author(found):
            return None
        return Fix(f"widen {what}.to(tl.int64)", (after(var.span),), True)
    if var.origin is Origin.LOOP and found.product.index is found.variable and found.span.file:
        title = f"widen at the use: {found.wall.variable}.to(tl.int64)"
        return Fix(title, ((found.span.file, found.span.line, -found.span.col, found.wall.variable),), False)
    return None


def _narrowed_by_author(found: Candidate) -> bool:
    return found.variable is not None and found.variable.op != "var"


def after(span: Span) -> tuple[str, int, int, str]:
    return span.file, span.end_line, span.end_col, ".to(tl.int64)"


def gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size < 2**50 else f"{size / 2**40:,.0f} TiB"


def tensor_text(wall: Wall) -> str:
    """` (a bf16 tensor of 4.00 GiB)`, as far as the element type is known."""
    if wall.tensor_bytes is None:
        return ""
    size = gib(wall.tensor_bytes)
    if wall.dtype:
        return f" (a {wall.dtype} tensor of {size})"
    if wall.item_bytes:
        return f" (a tensor of {size}, {wall.item_bytes} byte{'s' if wall.item_bytes > 1 else ''} an element)"
    return f" (a tensor of {size}, if an element has 2 bytes)"


def wall_text(wall: Wall) -> str:
    """`page 2,384 at stride_k_page = 901,120 (a bf16 tensor of 4.00 GiB)`."""
    size = tensor_text(wall)
    if wall.value is not None:
        others = " and ".join(f"{name} = {value:,}" for name, value in wall.others)
        base = f" ({wall.base[0]} {wall.base[1]:,})" if wall.base is not None else ""
        return f"{wall.variable} {wall.value:,}{base}{f' at {others}' if others else ''}{size}"
    limit = "2^31-1" if wall.limit == 2**31 - 1 else f"{wall.limit:,}"
    text = f"{wall.formula} > {limit}"
    if wall.example is not None:
        text += f"; e.g. {wall.example[0]} {wall.example[1]:,} -> {wall.variable} {wall.example[2]:,}"
    return text + size
