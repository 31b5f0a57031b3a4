"""The reader of TTIR: what it reads, and that no text can crash or hang it."""

from __future__ import annotations

import random
import time

import pytest

from audit_cases._format import kernels
from audit_compiled import compiled
from bigpool.audit.launch.audit import audit_ttir
from bigpool.audit.launch.ttir import Module, Place, TtirError, element, groups, item_bytes, split, walk, width
from bigpool.audit.launch.values import Given

TEXT = """
#loc = loc("k.py":3:1)
#loc1 = loc("k.py":4:12)
#loc2 = loc("page"(#loc1))
#loc9 = loc("a \\"b\\".py":7:2)
module {
  tt.func public @k(%a: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("a"(#loc)), %n: i32 loc("n"(#loc))) attributes {x = 0} {
    %p = tt.get_program_id x : i32 loc(#loc2)
    %r:2 = scf.for %i = %p to %n step %n iter_args(%x = %n, %y = %a) -> (i32, !tt.ptr<bf16>)  : i32 {
      %s = tt.call @"h__(1,)c"(%x) : (i32) -> i32 loc(#loc9)
      scf.yield %s, %y : i32, !tt.ptr<bf16> loc(#loc1)
    } {tt.num_stages = 3 : i32} loc(#loc1)
    tt.return loc(#loc)
  } loc(#loc)
  tt.func private @"h__(1,)c"(%v: i32 loc("v"(#loc))) -> i32 attributes {noinline = false} {
    tt.return %v : i32 loc(#loc)
  ^bb1:  // no predecessors
    %0 = ub.poison : i32 loc(#loc)
    tt.return %0 : i32 loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def test_functions_blocks_operands_and_places_are_read() -> None:
    module = Module(TEXT)
    entry = module.entry
    assert [(name, type_) for name, type_, _ in entry.args] == [("%a", "!tt.ptr<bf16>"), ("%n", "i32")]
    program, loop, end = entry.blocks[0].ops
    assert module.place(program.loc) == Place("k.py", 4, 12, "page")
    assert loop.results == ["%r#0", "%r#1"]
    assert loop.operands[:4] == ["%i", "%p", "%n", "%n"]
    assert loop.loc == "#loc1"
    assert end.name == "tt.return"
    call = loop.regions[0][0].ops[0]
    assert call.operands == ["%x"], "a quoted name with brackets holds no operands"
    place = module.place(call.loc)
    assert place is not None
    assert place.file == 'a "b".py'
    helper = module.functions["h__(1,)c"]
    assert [block.reachable for block in helper.blocks] == [True, False]
    assert len(list(walk(entry.blocks))) == 5


def test_types_are_taken_apart() -> None:
    assert element("tensor<64x1x!tt.ptr<bf16>>") == "ptr<bf16>"
    assert element("!tt.ptr<tensor<64x64xbf16>>") == "block<bf16>"
    assert element("tensor<128xi32, #blocked>") == "i32"
    assert [width(text) for text in ("i1", "tensor<4xi64>", "f32", "index")] == [1, 64, 0, 64]
    assert [item_bytes(f"!tt.ptr<{text}>") for text in ("bf16", "f32", "i1", "i64", "f8E4M3FN", "!tt.ptr<f32>")] == [
        2,
        4,
        1,
        8,
        1,
        8,
    ]
    assert split('a: (b, c), d<e, f> {g = "h, i"}, j -> k') == ["a: (b, c)", 'd<e, f> {g = "h, i"}', "j -> k"]
    assert groups("%d[%a, %b#1], [%c]") == [["%a", "%b#1"], ["%c"]]


def test_text_that_ends_early_is_an_error_with_a_reason() -> None:
    with pytest.raises(TtirError, match="ends inside a region"):
        Module(TEXT[: TEXT.index("scf.yield")])
    with pytest.raises(TtirError, match="no public function"):
        _ = Module("").entry


def test_mangled_text_is_read_or_skipped_but_never_crashes() -> None:
    texts = [made["text"] for made in compiled()["made"].values()]
    rng = random.Random(0)
    start = time.perf_counter()
    for _ in range(150):
        lines = rng.choice(texts).splitlines()
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(lines))
            change = rng.randrange(4)
            if change == 0:
                del lines[at]
            elif change == 1:
                lines.insert(at, rng.choice(lines))
            elif change == 2:
                lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
            else:
                lines[at] = lines[at].replace(
                    rng.choice(["%", "(", ")", ":", "i32", "<", "loc"]), rng.choice(["", "%", "i64", "{", "}"]), 1
                )
        report = audit_ttir("\n".join(lines), Given(), name="mangled")
        assert report.kernels + len(report.skipped_kernels) == 1
        assert all(reason for _, reason in report.skipped_kernels)
    assert time.perf_counter() - start < 60


def test_deep_nesting_and_many_operations_are_skipped_with_a_reason_or_read() -> None:
    header = "tt.func public @k(%a: !tt.ptr<f32> loc(#loc), %n: i32 loc(#loc), %c: i1 loc(#loc)) {"
    head = f'#loc = loc("k.py":1:1)\nmodule {{\n {header}\n'
    deep = head + "scf.if %c {\n" * 5000 + "} loc(#loc)\n" * 5000 + "tt.return loc(#loc)\n} loc(#loc)\n} loc(#loc)\n"
    report = audit_ttir(deep, Given(), name="deep")
    assert report.skipped_kernels == [("deep", "nested deeper than the auditor follows")]
    chain = "".join(f"%x{at + 1} = arith.addi %x{at}, %n : i32 loc(#loc)\n" for at in range(5000))
    use = "%p = tt.addptr %a, %x5000 : !tt.ptr<f32>, i32 loc(#loc)\n%v = tt.load %p : !tt.ptr<f32> loc(#loc)\n"
    long = head + "%x0 = arith.addi %n, %n : i32 loc(#loc)\n" + chain + use + "tt.return loc(#loc)\n} loc(#loc)\n} loc(#loc)\n"
    start = time.perf_counter()
    report = audit_ttir(long, Given(), name="long")
    assert time.perf_counter() - start < 20
    assert report.kernels + len(report.skipped_kernels) == 1


def test_what_is_not_understood_reaches_the_report() -> None:
    text = next(made["text"] for name, made in compiled()["made"].items() if name == "a_page_ids.page_gather_fixed")
    report = audit_ttir(text.replace("arith.muli", "arith.mystery"), Given(), name="page_gather_fixed")
    assert [finding.rule for finding in report.notes] == ["BP191"] * len(report.notes)
    assert report.notes, "silence means proven"
    assert "arith.mystery is not understood" in report.notes[0].message


def test_the_set_is_not_empty() -> None:
    assert len(kernels()) > 150
