"""The judge on made-up results: bits, the error rule, and every verdict with its full text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'bigpool[cpu]'")

from bigpool.errors import ProofError  # noqa: E402
from bigpool.proof.isolate import Exit  # noqa: E402
from bigpool.proof.judge import compare_job, difference, judge_errors, ulp  # noqa: E402
from bigpool.proof.verdict import Evidence, Run, Verdict, judge, run_of, summary  # noqa: E402

NAN, INF = float("nan"), float("inf")


def t(*values: float, dtype: Any = torch.float16) -> Any:
    return torch.tensor(values, dtype=dtype)


# Bits.


def test_the_same_bits_are_no_difference_also_with_nan() -> None:
    assert difference({"out": t(1, NAN), "lse": t(2)}, {"out": t(1, NAN), "lse": t(2)}) == ""


@pytest.mark.parametrize(
    ("reference", "outputs", "text"),
    [
        ({"out": t(1, 2)}, {"out": t(1, 3)}, "out: 1 of 2 elements differ, first at [1]: 3 in place of 2"),
        ({"out": t(0.0)}, {"out": t(-0.0)}, "out: 1 of 1 elements differ, first at [0]: -0 in place of 0"),
        (
            {"out": torch.zeros(2, 3)},
            {"out": torch.tensor([[0, 0, 0], [0, NAN, NAN]])},
            "out: 2 of 6 elements differ, first at [1, 1]: nan in place of 0",
        ),
        ({"out": t(1)}, {"out": t(1, 1)}, "out: float16 [2] in place of float16 [1]"),
        ({"out": t(1)}, {"out": t(1, dtype=torch.float32)}, "out: float32 [1] in place of float16 [1]"),
        ({"out": t(1), "lse": t(1)}, {"out": t(1)}, "outputs out in place of out, lse"),
        ({"n": torch.tensor([7])}, {"n": torch.tensor([8])}, "n: 1 of 1 elements differ, first at [0]: 8 in place of 7"),
    ],
)
def test_a_difference_names_the_first_place(reference: Any, outputs: Any, text: str) -> None:
    assert difference(reference, outputs) == text


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.int8, torch.bool])
def test_every_output_dtype_can_be_compared(dtype: Any) -> None:
    one, other = torch.tensor([1.0, 0.0]).to(dtype), torch.tensor([1.0, 1.0]).to(dtype)
    assert difference({"k": one}, {"k": one.clone()}) == ""
    assert difference({"k": one}, {"k": other}).startswith("k: 1 of 2 elements differ, first at [1]: ")
    (entry,) = judge_errors({"k": one}, {"k": one.double()}, {})
    assert entry["ok"]
    (entry,) = judge_errors({"k": one}, {"k": one.double() + 4}, {})
    assert not entry["ok"]


def test_a_run_is_compared_with_the_bottom_of_its_own_arm(tmp_path: Path) -> None:
    paths = {}
    for key, value in (("a/bottom", 1.0), ("a/top", 1.5), ("b/bottom", 1.5), ("b/top", 1.5)):
        paths[key] = str(tmp_path / key.replace("/", "-"))
        torch.save({"out": t(value)}, paths[key])
    job = {"runs": paths, "references": {key: f"{key[0]}/bottom" for key in paths}, "oracle": ""}
    compared = compare_job(job)["runs"]
    assert {key: run["difference"] for key, run in compared.items()} == {
        "a/bottom": "",
        "a/top": "out: 1 of 1 elements differ, first at [0]: 1.5 in place of 1",
        "b/bottom": "",
        "b/top": "",
    }
    torch.save({"expected": {"out": t(1.5).double()}, "baseline": {}}, tmp_path / "oracle")
    errors = {
        key: run["errors"][0]["ok"] for key, run in compare_job({**job, "oracle": str(tmp_path / "oracle")})["runs"].items()
    }
    assert errors == {"a/bottom": False, "a/top": True, "b/bottom": True, "b/top": True}


# The error rule.


def judged(got: Any, want: Any, baseline: Any = None) -> dict[str, Any]:
    (entry,) = judge_errors({"out": got}, {"out": want.double()}, {} if baseline is None else {"out": baseline})
    return entry


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("magnitude", [1.0, 1.5, 0.0371, 300.0, 6.1e-5])
def test_an_ulp_is_the_distance_to_the_next_number(dtype: Any, magnitude: float) -> None:
    number = torch.tensor(magnitude, dtype=dtype)
    integer = {2: torch.int16, 4: torch.int32}[number.element_size()]
    following = (number.view(integer) + 1).view(dtype)
    assert ulp(dtype, float(number)) == float(following.double() - number.double())


def test_an_ulp_of_zero_is_the_smallest_number_and_of_an_integer_zero() -> None:
    assert ulp(torch.float16, 0.0) == 2.0**-24
    assert ulp(torch.int8, 100.0) == 0.0


def test_the_bound_is_twice_the_baseline_error_and_two_ulp() -> None:
    want = torch.tensor([1.0], dtype=torch.float64)
    baseline = t(1.0 + 3 * 2**-10)
    bound = 2 * 3 * 2**-10 + 2 * 2**-10
    inside, outside = judged(t(1.0 + 8 * 2**-10), want, baseline), judged(t(1.0 + 9 * 2**-10), want, baseline)
    assert (inside["ok"], inside["bound"]) == (True, bound)
    assert inside["text"] == "out: max error 0.00781 <= bound 0.00781 (2 * baseline error 0.00293 + 2 ulp of 0.000977)"
    assert not outside["ok"]
    assert outside["text"] == "out: max error 0.00879 > bound 0.00781 (2 * baseline error 0.00293 + 2 ulp of 0.000977)"


def test_without_a_baseline_the_bound_is_two_ulp() -> None:
    want = torch.tensor([1.0], dtype=torch.float64)
    assert judged(t(1.0 + 2 * 2**-10), want)["ok"]
    assert not judged(t(1.0 + 3 * 2**-10), want)["ok"]


def test_an_all_zero_output_fails_where_outputs_are_small() -> None:
    want = torch.full((64,), 0.01, dtype=torch.float64)
    assert not judged(torch.zeros(64, dtype=torch.float16), want, want.half())["ok"]


def test_an_integer_has_to_be_exact() -> None:
    want = torch.tensor([5.0], dtype=torch.float64)
    assert judged(torch.tensor([5], dtype=torch.int8), want)["ok"]
    assert not judged(torch.tensor([6], dtype=torch.int8), want)["ok"]


@pytest.mark.parametrize(
    ("got", "want", "text"),
    [
        (
            (1, NAN),
            (1, 1),
            "out: 1 of 2 elements are nan on one side only, first at [1]: nan, the oracle has 1",
        ),
        ((1, 1), (1, NAN), "out: 1 of 2 elements are nan on one side only, first at [1]: 1, the oracle has nan"),
        ((1, INF), (1, 1), "out: 1 of 2 elements are inf on one side only, first at [1]: inf, the oracle has 1"),
        ((1, INF), (1, -INF), "out: 1 of 2 elements are inf on one side only, first at [1]: inf, the oracle has -inf"),
        ((1, 1), (1, -INF), "out: 1 of 2 elements are -inf on one side only, first at [1]: 1, the oracle has -inf"),
    ],
)
def test_nan_and_infinity_must_match_in_place_and_sign(got: Any, want: Any, text: str) -> None:
    entry = judged(t(*got), t(*want, dtype=torch.float64))
    assert entry == {"output": "out", "error": None, "bound": None, "ok": False, "text": text}


def test_expected_nan_and_infinity_are_fine_and_leave_the_rest_judged() -> None:
    want = t(1, -INF, NAN, dtype=torch.float64)
    assert judged(t(1, -INF, NAN), want, t(1, -INF, NAN))["error"] == 0.0
    assert not judged(t(2, -INF, NAN), want)["ok"]
    assert judged(t(-INF), t(-INF, dtype=torch.float64))["ok"], "nothing finite is left to judge"


def test_shapes_and_missing_outputs_are_failures() -> None:
    assert judged(t(1, 1), t(1, dtype=torch.float64))["text"] == "out: shape [2], the oracle has [1]"
    (entry,) = judge_errors({}, {"out": t(1, dtype=torch.float64)}, {})
    assert entry["text"] == "out: the oracle expects it, but run() did not return it"


@pytest.mark.parametrize(
    ("baseline", "text"),
    [
        (t(1, 1), "oracle: expected baseline['out'] of shape [1], got [2]"),
        (t(NAN), "oracle: expected baseline['out'] to be finite where the expected values are, got nan"),
    ],
)
def test_a_bad_baseline_is_the_case_s_fault(baseline: Any, text: str) -> None:
    with pytest.raises(ProofError) as caught:
        judged(t(1), t(1, dtype=torch.float64), baseline)
    assert str(caught.value) == text


# Verdicts.

RUNS = {
    "shipped/bottom/unmapped": {},
    "shipped/top/unmapped": {},
    "shipped/across/unmapped": {},
    "shipped/top/poison": {},
    "narrowed/bottom/unmapped": {},
    "narrowed/top/unmapped": {"outcome": "killed", "detail": "SIGSEGV", "where": "verify.py:88"},
    "narrowed/top/poison": {"nan": {"out": 4}, "difference": "out: 4 of 9 elements differ"},
}
GOOD = {"output": "out", "error": 0.1, "bound": 0.2, "ok": True, "text": "out: max error 0.1 <= bound 0.2"}
WRONG = {**GOOD, "ok": False, "text": "out: max error 0.3 > bound 0.2"}


def verdict(changes: dict[str, dict[str, Any] | None] | None = None, **more: Any) -> Verdict:
    """The verdict on a case that holds, but for `changes` (key -> other properties of the run, None: it was not run)."""
    runs, compared = {}, {}
    for key, properties in ({**RUNS, **(changes or {})}).items():
        if properties is None:
            continue
        arm, placement, guard = key.split("/")
        made = {"outcome": "ok", **properties}
        difference, errors = made.pop("difference", ""), made.pop("errors", [GOOD])
        runs[key] = Run("case", "float16", arm, placement, guard, **made)
        if made["outcome"] in ("ok", "canary"):
            compared[key] = {"difference": difference, "errors": errors}
    broken = "narrowed" if any(run.arm == "narrowed" for run in runs.values()) else None
    return judge(Evidence("case", "float16", "shipped", more.pop("broken", broken), runs, compared, **more))


def test_proven() -> None:
    made = verdict()
    assert (made.status, made.findings) == ("proven", ())
    assert made.broken == {"unmapped": "killed: SIGSEGV at verify.py:88", "poison": "NaN in out"}
    assert made.errors == (GOOD,)


RIGHT_BELOW = "shipped is right at the bottom with the same bytes: look for an index that is multiplied in 32 bits"
KILLED = {"outcome": "killed", "detail": "SIGSEGV", "where": "verify.py:88"}


@pytest.mark.parametrize(
    ("key", "properties", "text"),
    [
        ("top/unmapped", KILLED, "shipped at the top (unmapped): killed: SIGSEGV at verify.py:88"),
        ("across/unmapped", KILLED, "shipped across the wall (unmapped): killed: SIGSEGV at verify.py:88"),
        (
            "top/unmapped",
            {"outcome": "killed", "detail": "CUDA illegal access in gather_kernel", "where": "k.py:12"},
            "shipped at the top (unmapped): killed: CUDA illegal access in gather_kernel at k.py:12",
        ),
        (
            "top/unmapped",
            {"outcome": "canary", "detail": "out: guard: ..."},
            "shipped at the top (unmapped): canary: out: guard: ...",
        ),
        (
            "top/unmapped",
            {"outcome": "error", "detail": "ValueError: no", "where": "case.py:3"},
            "shipped at the top (unmapped): error: ValueError: no at case.py:3",
        ),
        (
            "across/unmapped",
            {"outcome": "timeout", "detail": "no answer within 9 s"},
            "shipped across the wall (unmapped): timeout: no answer within 9 s",
        ),
        (
            "top/unmapped",
            {"difference": "out: 1 of 2 elements differ, first at [0]"},
            "shipped at the top (unmapped): not the bits of the bottom: out: 1 of 2 elements differ, first at [0]",
        ),
        (
            "top/poison",
            {"difference": "out: 1 of 2 elements differ"},
            "shipped at the top (poison): not the bits of the bottom: out: 1 of 2 elements differ; "
            "poison shows in the output, so memory outside the request was read",
        ),
        ("top/unmapped", {"errors": [WRONG]}, "shipped at the top (unmapped): out: max error 0.3 > bound 0.2"),
    ],
)
def test_refuted_above_the_bottom(key: str, properties: dict[str, Any], text: str) -> None:
    made = verdict({f"shipped/{key}": properties})
    assert (made.status, made.findings) == ("refuted", (text, RIGHT_BELOW))


def test_refuted_everywhere_says_nothing_of_32_bits() -> None:
    wrong = {
        f"shipped/{key}": {"errors": [WRONG]} for key in ("bottom/unmapped", "top/unmapped", "across/unmapped", "top/poison")
    }
    made = verdict(wrong)
    assert made.status == "refuted"
    assert len(made.findings) == 4
    assert made.findings[0] == "shipped at the bottom (unmapped): out: max error 0.3 > bound 0.2"
    assert RIGHT_BELOW not in made.findings


def test_a_bottom_that_dies_is_refuted_without_more_runs() -> None:
    made = verdict({key: None for key in RUNS if key != "shipped/bottom/unmapped"} | {"shipped/bottom/unmapped": KILLED})
    assert made.status == "refuted"
    assert made.findings == ("shipped at the bottom (unmapped): killed: SIGSEGV at verify.py:88",)


ONLY_BOTTOM = {key: None for key in RUNS if key != "shipped/bottom/unmapped"}
HOLDS = {"outcome": "ok"}


def test_no_power_where_the_broken_arm_holds() -> None:
    made = verdict({"narrowed/top/unmapped": HOLDS, "narrowed/top/poison": HOLDS})
    assert made.status == "no power"
    assert made.findings == (
        "narrowed at the top did not fail as a wrapped index does (unmapped: same bits; poison: same bits), "
        "so this case would not see the bug",
    )


@pytest.mark.parametrize("outcome", ["error", "timeout"])
def test_no_power_where_the_broken_arm_fails_in_another_way(outcome: str) -> None:
    other = {"outcome": outcome, "detail": "CompilationError: no"}
    made = verdict({"narrowed/top/unmapped": other, "narrowed/top/poison": other})
    assert made.status == "no power"
    assert made.findings == (
        f"narrowed at the top did not fail as a wrapped index does (unmapped: {outcome}: CompilationError: no; "
        f"poison: {outcome}: CompilationError: no), so this case would not see the bug",
    )


@pytest.mark.parametrize(
    ("key", "properties", "text"),
    [
        ("unmapped", KILLED, "killed: SIGSEGV at verify.py:88"),
        ("poison", {"outcome": "canary", "detail": "..."}, "wrote outside its tensors"),
        ("poison", {"nan": {"out": 3, "lse": 0}, "difference": "out: 3"}, "NaN in out"),
        (
            "poison",
            {"nan": dict.fromkeys("abcde", 1), "difference": "a: 1"},
            "NaN in a, b, c and 2 more",
        ),
        ("poison", {"difference": "out: 3 of 9 elements differ"}, "unequal (out: 3 of 9 elements differ)"),
    ],
)
def test_one_failure_of_the_broken_arm_gives_power(key: str, properties: dict[str, Any], text: str) -> None:
    changes: dict[str, Any] = {"narrowed/top/unmapped": HOLDS, "narrowed/top/poison": HOLDS, f"narrowed/top/{key}": properties}
    made = verdict(changes)
    assert made.status == "proven"
    assert made.broken[key] == text


def test_nan_that_the_right_output_has_too_is_no_sign_of_failure() -> None:
    nan = {"nan": {"out": 2}}
    made = verdict({"narrowed/bottom/unmapped": nan, "narrowed/top/poison": {**nan, "difference": "out: 1 of 9"}})
    assert made.broken["poison"] == "unequal (out: 1 of 9)"


def test_no_power_where_the_broken_arm_is_wrong_at_the_bottom_already() -> None:
    made = verdict({"narrowed/bottom/unmapped": {"outcome": "error", "detail": "CompilationError: no"}})
    assert made.status == "no power"
    assert made.findings == (
        "narrowed at the bottom (unmapped): error: CompilationError: no; "
        "it has to be right there, so that only the placement makes it fail",
    )


def test_no_power_without_a_broken_arm() -> None:
    made = verdict({key: None for key in RUNS if key.startswith("narrowed")}, no_broken_arm="k.py widens nothing")
    assert (made.status, made.findings) == ("no power", ("holds, but the case has no power: k.py widens nothing",))


def test_refuted_wins_over_no_power_and_over_could_not_run() -> None:
    changes: dict[str, Any] = {
        "shipped/top/unmapped": KILLED,
        "narrowed/top/poison": {"outcome": "unable", "detail": "no memory"},
    }
    assert verdict(changes).status == "refuted"


def test_could_not_run_where_a_run_says_nothing() -> None:
    made = verdict({"narrowed/top/poison": {"outcome": "unable", "detail": "SparsePool: shape: ..."}})
    assert (made.status, made.findings) == ("could not run", ("narrowed at the top (poison): SparsePool: shape: ...",))


def test_could_not_run_where_the_oracle_failed() -> None:
    made = verdict(faults=("oracle: ValueError: no",))
    assert (made.status, made.findings) == ("could not run", ("oracle: ValueError: no",))


def test_a_skip_is_a_skip_only_at_the_bottom() -> None:
    skip = {"outcome": "skip", "detail": "fp8 conversion needs sm89+, this is sm86"}
    made = verdict(ONLY_BOTTOM | {"shipped/bottom/unmapped": skip}, broken="narrowed")
    assert (made.status, made.findings) == ("skipped", ("fp8 conversion needs sm89+, this is sm86",))
    made = verdict({"shipped/top/unmapped": skip})
    assert made.status == "could not run"
    assert made.findings == (
        "shipped at the top (unmapped): skipped (fp8 conversion needs sm89+, this is sm86), but not at the bottom; "
        "a skip must not depend on the placement",
    )


# From a process to a run.

JOB = {"case": "case", "dtype": "float16", "arm": "shipped", "placement": "top", "guard": "unmapped"}


@pytest.mark.parametrize(
    ("outcome", "detail", "result", "becomes"),
    [
        ("done", "", {"outcome": "ok", "detail": ""}, "ok"),
        (
            "done",
            "",
            {"outcome": "killed", "detail": "CUDA launch failure", "where": "k.py:3"},
            "killed: CUDA launch failure at k.py:3",
        ),
        ("killed", "SIGSEGV", {}, "killed: SIGSEGV at k.py:1"),
        ("killed", "SIGSEGV", {"outcome": "ok", "detail": ""}, "killed: SIGSEGV at k.py:1"),
        ("timeout", "no answer within 3 s", {}, "timeout: no answer within 3 s at k.py:1"),
        ("died", "SIGABRT, which is no memory fault", {}, "error: SIGABRT, which is no memory fault at k.py:1"),
        ("died", "SIGKILL, which is no memory fault", {}, "unable: SIGKILL, which is no memory fault at k.py:1"),
    ],
)
def test_what_the_end_of_a_process_becomes(outcome: str, detail: str, result: dict[str, Any], becomes: str) -> None:
    where = "" if outcome == "done" else "k.py:1"
    run = run_of(JOB, Exit("1", Path(), outcome, detail, where, 0.5, 100, "log", result))
    assert run.text == becomes
    assert (run.key, run.label) == ("shipped/top/unmapped", "shipped at the top (unmapped)")


# The last line.


def of(*statuses: str) -> list[Verdict]:
    return [Verdict(f"case{index}", "float16", status) for index, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("statuses", "line", "code"),
    [
        (
            ["proven", "proven"],
            "proven: 2 of 2 cases give the same right bits wherever they lie in the pool, and each sees the 32-bit arm fail",
            0,
        ),
        (
            ["proven", "skipped"],
            "proven: 1 of 1 cases give the same right bits wherever they lie in the pool, and each sees the 32-bit arm fail; "
            "1 skipped by design",
            0,
        ),
        (["proven", "refuted", "no power", "could not run"], "refuted: 1 of 4 cases: case1", 1),
        (["no power", "proven", "no power"], "not proven: 2 of 3 cases have no power: case0, case2", 1),
        (["no power", "could not run"], "not proven: 1 of 2 cases have no power: case0", 1),
        (["proven", "could not run"], "could not run: 1 of 2 cases: case1", 2),
        (["skipped", "skipped"], "could not run: every case was skipped by design", 2),
    ],
)
def test_the_last_line_and_the_exit_status(statuses: list[str], line: str, code: int) -> None:
    assert summary(of(*statuses)) == (line, code)
