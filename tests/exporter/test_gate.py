"""Every limit is wired to the verdict, and nothing but a complete comparison gives PASS (pitfalls 1 to 6, 8, 12)."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.validation import gate
from exporter.validation.evidence import (
    METRICS,
    NOTHING_FINITE,
    BackendInfo,
    CaseEvidence,
    DirectionScore,
    Errors,
    Evidence,
    Measured,
    Profile,
    Sensitivity,
    Shape,
)
from exporter.validation.gate import Verdict, judge
from tests.exporter.samples import FLOOR, GOOD, ORT, TORCH, case_evidence, evidence_of, measured, with_case

# The limits that the contract asks for, written down once more and not taken from the code under test.
FLOAT32 = {"relative_l2": 1e-5, "worst_token": 3e-5, "worst_angle": 3e-5, "largest_over_rms": 1e-4}
NUMBERS = (*METRICS, "norm", "worst_token_norm")
LIMITED_BY = {metric: metric for metric in METRICS} | {"norm": "relative_l2", "worst_token_norm": "relative_l2"}


def fine(dtype: str, rows: int = 100) -> Evidence:
    """Evidence far inside every limit, with cases of 400 patches or of few rows."""
    side = 20 if rows >= 16 else 4
    tiny = Measured(1e-9, 1e-9, 1e-9, 1e-9, 1e-9, -1e-9)
    cases = [case_evidence(name, side, measured=tiny) for name in "ab"]
    cases += [case_evidence(name, 24, measured=tiny) for name in "cd"]
    if dtype == "float16":
        small = Errors(*(getattr(FLOOR, metric) / 10 for metric in METRICS))
        cases = [dataclasses.replace(case, floor=small) for case in cases]
    return evidence_of(*cases, dtype=dtype)


def limit(evidence: Evidence, metric: str) -> float:
    """The limit of the first case by the contract's formula."""
    metric = LIMITED_BY[metric]
    if evidence.dtype == "float32":
        return FLOAT32[metric]
    floors = [getattr(case.floor, metric) for case in evidence.cases]
    factor = 1.5 if metric == "relative_l2" and evidence.cases[0].rows >= 16 else 2
    return factor * max(floors[0], statistics.median(floors))


def test_good_evidence_passes():
    for dtype in ("float32", "float16", "bfloat16"):
        judgement = judge(fine(dtype))
        assert judgement.verdict is Verdict.PASS, judgement.doubts
        assert judgement.faults == judgement.doubts == ()


@pytest.mark.parametrize("rows", [4, 100])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("metric", "sign"), [(metric, 1) for metric in NUMBERS] + [("norm", -1), ("worst_token_norm", -1)]
)
def test_just_outside_each_limit_fails_and_just_inside_passes(metric, dtype, rows, sign):
    evidence = fine(dtype, rows)
    edge = limit(evidence, metric)
    for value, verdict in ((edge * (1 + 1e-9), Verdict.FAILED), (edge * (1 - 1e-9), Verdict.PASS)):
        numbers = dataclasses.replace(evidence.cases[0].measured, **{metric: sign * value})
        judgement = judge(with_case(evidence, measured=numbers))
        assert judgement.verdict is verdict
        (check,) = [check for check in judgement.cases[0].checks if check.metric == metric]
        assert (check.measured, check.allowed_high) == (sign * value, pytest.approx(edge, rel=1e-12))
        assert check.excess == pytest.approx(value / edge, rel=1e-12)
        if verdict is Verdict.FAILED:
            (fault,) = judgement.faults
            assert "case a" in fault
            assert metric.replace("_", " ") in fault
            assert "1 times the limit" in fault
            assert [result.outcome for result in judgement.cases] == ["failed", "within", "within", "within"]


@given(
    st.lists(st.floats(1e-4, 2.9e-2), min_size=1, max_size=9),
    st.sampled_from([2, 4, 6, 8, 20]),
    st.integers(0, 8),
    st.sampled_from(METRICS),
)
def test_limits_follow_the_formula(floors, side, index, metric):
    cases = [
        case_evidence(f"c{i}", side, floor=Errors(*(value * (1 + k) for k in range(4))))
        for i, value in enumerate(floors)
    ]
    evidence = evidence_of(*cases)
    case = cases[index % len(cases)]
    every = [getattr(each.floor, metric) for each in cases]
    factor = 1.5 if metric == "relative_l2" and side * side / 4 >= 16 else 2
    expected = factor * max(getattr(case.floor, metric), statistics.median(every))
    assert getattr(gate.limits_for(case, evidence), metric) == pytest.approx(expected, rel=1e-12)


def test_fifteen_rows_are_few_and_sixteen_are_not():
    assert [gate.factor_for("relative_l2", rows) for rows in (1, 15, 16, 1024)] == [2, 2, 1.5, 1.5]


@pytest.mark.parametrize("metric", METRICS[1:])
def test_maxima_scatter_whatever_the_number_of_rows(metric):
    """Measured: with 16 rows and more the largest error of an honest artifact reached 1.71 times the floor."""
    assert {gate.factor_for(metric, rows) for rows in (1, 15, 16, 1024)} == {2}


def test_a_direction_that_scatters_on_any_case_accuses_on_none():
    """Near the edge one case's spread is below 0.1 by luck."""
    usable = DirectionScore("axes-swapped", 0.0, 0.001)
    evidence = with_case(fine("bfloat16"), directions=(usable, DirectionScore("half-split", 0.6, 0.09)))
    assert judge(evidence).verdict is Verdict.FAILED
    evidence = with_case(evidence, 1, directions=(DirectionScore("half-split", 0.0, 0.11),))
    assert judge(evidence).verdict is Verdict.PASS


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_that_is_not_finite_never_passes(number, value, dtype):
    evidence = fine(dtype)
    numbers = dataclasses.replace(evidence.cases[0].measured, **{number: value})
    judgement = judge(with_case(evidence, measured=numbers))
    assert judgement.verdict is Verdict.FAILED
    assert "not a finite number" in judgement.faults[0]


@pytest.mark.parametrize("metric", METRICS)
def test_a_negative_error_is_not_smuggled_through(metric):
    assert judge(with_case(fine("bfloat16"), measured=measured(**{metric: -1e-3}))).verdict is Verdict.FAILED


def test_one_bad_case_of_twenty_fails():
    cases = [case_evidence(f"c{i}") for i in range(20)]
    cases[13] = dataclasses.replace(cases[13], measured=measured(relative_l2=0.9))
    judgement = judge(evidence_of(*cases))
    assert judgement.verdict is Verdict.FAILED
    assert dataclasses.astuple(judgement.counts) == (19, 1, 0, 20)
    assert "c13" in judgement.faults[0]


@given(st.lists(st.sampled_from(["good", "bad", "nan", "skipped", "crashed"]), max_size=12), st.floats(0.5, 3))
def test_only_all_good_cases_under_default_limits_pass(states, scale):
    def make(index: int, state: str) -> CaseEvidence:
        if state in ("skipped", "crashed"):
            return case_evidence(f"c{index}", status=state, note="why", measured=None, directions=())
        return case_evidence(
            f"c{index}", measured={"good": GOOD, "bad": measured(norm=9.0), "nan": NOTHING_FINITE}[state]
        )

    cases = [make(index, state) for index, state in enumerate(states)]
    evidence = Evidence(
        "bfloat16", scale, TORCH, ORT, (), tuple(cases), evidence_of(*cases).sensitivity if cases else ()
    )
    judgement = judge(evidence)
    counts = judgement.counts
    assert counts.within + counts.failed + counts.skipped == counts.total == len(states)
    assert counts.failed >= sum(state in ("bad", "nan", "crashed") for state in states)
    assert counts.skipped == states.count("skipped")
    if set(states) & {"bad", "nan", "crashed"}:
        assert judgement.verdict is Verdict.FAILED
    if len(states) < 2 or set(states) != {"good"} or scale != 1:
        assert judgement.verdict is not Verdict.PASS
    assert (judgement.verdict is Verdict.PASS) == (not judgement.faults and not judgement.doubts)


def no_cases():
    return Evidence("bfloat16", 1.0, TORCH, ORT, (), (), ())


def all_skipped():
    return evidence_of(*(case_evidence(n, status="skipped", note="x", measured=None, directions=()) for n in "ab"))


def one_skipped():
    cases = [case_evidence(name) for name in "abcd"]
    cases[3] = case_evidence("d", status="skipped", note="not selected", measured=None, directions=())
    return evidence_of(*cases)


def high_floor():
    return with_case(fine("bfloat16"), 2, floor=dataclasses.replace(FLOOR, relative_l2=3.001e-2))


def high_floor_fp16():
    return with_case(fine("float16"), 2, floor=dataclasses.replace(FLOOR, relative_l2=5.001e-3))


def single_input():
    return evidence_of(case_evidence("a"), case_evidence("b"), case_evidence("c", 30))


def sensitivity_left_out():
    return dataclasses.replace(fine("bfloat16"), sensitivity=fine("bfloat16").sensitivity[:1])


def no_directions():
    return evidence_of(case_evidence("a", directions=()), case_evidence("b", directions=()))


def only_informing_directions():
    wide = (DirectionScore("merge-order", 0.0, 0.2),)
    return evidence_of(case_evidence("a", directions=wide), case_evidence("b", directions=wide))


def itself():
    return dataclasses.replace(fine("bfloat16"), backend=dataclasses.replace(TORCH, providers=("x",)))


VACUOUS = {
    "no cases": (no_cases, "no golden case"),
    "all skipped": (all_skipped, "no case was compared"),
    "one skipped": (one_skipped, "case d was skipped: not selected"),
    "raised factor": (lambda: dataclasses.replace(fine("bfloat16"), limit_scale=1.0001), "multiplied"),
    "lowered factor": (lambda: dataclasses.replace(fine("bfloat16"), limit_scale=0.9999), "multiplied"),
    "raised factor fp32": (lambda: dataclasses.replace(fine("float32"), limit_scale=2.0), "multiplied"),
    "bf16 floor too high": (high_floor, "PyTorch itself"),
    "fp16 floor too high": (high_floor_fp16, "PyTorch itself"),
    "single input": (single_input, "only compared input"),
    "sensitivity left out": (sensitivity_left_out, "was not measured"),
    "no directions": (no_directions, "directions"),
    "only informing directions": (only_informing_directions, "directions"),
    "backend with itself": (itself, "compared with itself"),
}


@pytest.mark.parametrize(("make", "reason"), VACUOUS.values(), ids=VACUOUS)
def test_what_is_not_a_complete_comparison_is_not_validated(make, reason):
    judgement = judge(make())
    assert judgement.verdict is Verdict.NOT_VALIDATED
    assert any(reason in doubt for doubt in judgement.doubts)
    assert judgement.faults == ()


@pytest.mark.parametrize("name", sorted(set(VACUOUS) - {"no cases", "all skipped"}))
def test_a_fault_outweighs_a_doubt(name):
    evidence = VACUOUS[name][0]()
    assert judge(with_case(evidence, measured=NOTHING_FINITE)).verdict is Verdict.FAILED


def test_fp32_needs_no_directions_since_its_norms_see_every_wrong_model():
    evidence = fine("float32")
    for index in range(4):
        evidence = with_case(evidence, index, directions=())
    assert judge(evidence).verdict is Verdict.PASS


def test_floors_just_below_the_highest_can_be_judged():
    for dtype, highest in (("bfloat16", 3e-2), ("float16", 5e-3)):
        evidence = fine(dtype)
        evidence = with_case(evidence, 2, floor=dataclasses.replace(evidence.cases[2].floor, relative_l2=highest))
        assert judge(evidence).verdict is Verdict.PASS


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("score", "spread", "verdict"),
    [
        (0.5000001, 0.0, Verdict.FAILED),
        (-0.5000001, 0.1, Verdict.FAILED),
        (1.0, 0.1, Verdict.FAILED),
        (None, 0.0, Verdict.FAILED),
        (0.4999999, 0.1, Verdict.PASS),
        (-0.4999999, 0.0, Verdict.PASS),
        (1.0, 0.1000001, Verdict.PASS),
    ],
)
def test_directions_accuse_by_name_unless_honest_artifacts_scatter(score, spread, verdict, dtype):
    usable = DirectionScore("other", 0.0, 0.0)
    evidence = with_case(fine(dtype), directions=(usable, DirectionScore("half-split", score, spread)))
    judgement = judge(evidence)
    assert judgement.verdict is verdict
    if verdict is Verdict.FAILED:
        assert any("points to half-split" in fault for fault in judgement.faults)
    else:
        outcome = "informs" if spread > 0.1 else "within"
        assert judgement.cases[0].checks[-1].outcome == outcome


def test_the_likeliest_fault_is_named_first():
    scores = (DirectionScore("alike", 0.6, 0.0), DirectionScore("this", 0.98, 0.0), DirectionScore("far", 2.4, 0.0))
    faults = judge(with_case(fine("bfloat16"), directions=scores)).faults
    assert [fault.split("points to ")[1].split(";")[0] for fault in faults] == ["this", "alike", "far"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [
        (0.8999, Verdict.FAILED),
        (0.9001, Verdict.PASS),
        (1.0999, Verdict.PASS),
        (1.1001, Verdict.FAILED),
        (0.0, Verdict.FAILED),
        (None, Verdict.FAILED),
        (math.nan, Verdict.FAILED),
    ],
)
def test_sensitivity(ratio, verdict, dtype):
    evidence = fine(dtype)
    pairs = (Sensitivity("a", "b", ratio), evidence.sensitivity[1])
    judgement = judge(dataclasses.replace(evidence, sensitivity=pairs))
    assert judgement.verdict is verdict
    if verdict is Verdict.FAILED:
        assert "cases a and b: sensitivity" in judgement.faults[0]


def test_a_crash_is_a_fault_and_not_a_skip():
    evidence = with_case(fine("bfloat16"), status="crashed", note="signal 11", measured=None, directions=())
    judgement = judge(evidence)
    assert judgement.verdict is Verdict.FAILED
    assert judgement.faults == ("case a: signal 11",)


SMALL, MIDDLE, LARGE = Shape(1, 4, 1), Shape(1, 400, 1), Shape(2, 576, 1)


def covered_evidence():
    tiny = fine("float32").cases[0].measured
    sizes = (("a", 2, 1), ("b", 20, 1), ("c", 24, 2))
    cases = [
        case_evidence(name + part, side, frames=frames, measured=tiny) for name, side, frames in sizes for part in "12"
    ]
    return evidence_of(*cases, dtype="float32", profiles=(Profile("p", SMALL, MIDDLE, LARGE),))


def test_covered_profiles_pass():
    judgement = judge(covered_evidence())
    assert judgement.verdict is Verdict.PASS
    assert [(entry.corner, entry.case) for entry in judgement.coverage] == [("min", "a1"), ("opt", "b1"), ("max", "c1")]


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("change", ["another size", "skipped"])
def test_a_corner_that_no_compared_case_covers_is_not_validated(index, change):
    evidence = covered_evidence()
    for part in (2 * index, 2 * index + 1):
        if change == "skipped":
            evidence = with_case(evidence, part, status="skipped", note="x", measured=None, directions=())
        else:
            evidence = with_case(evidence, part, grid_hws=((14, 14),))
    if change == "another size":
        assert judge(evidence).faults == ()
    judgement = judge(evidence)
    assert judgement.verdict is Verdict.NOT_VALIDATED
    corner = ("min", "opt", "max")[index]
    assert any(f"covers the {corner} of profile p" in doubt for doubt in judgement.doubts)


def test_items_and_frames_count_for_coverage():
    profile = Profile("p", Shape(1, 4, 1), Shape(1, 400, 1), Shape(1, 400, 2))
    cases = [case_evidence("a", grid_hws=((10, 20), (10, 20)))]
    found = {entry.corner: entry.case for entry in gate.cover((profile,), cases)}
    assert found == {"min": None, "opt": None, "max": "a"}


def test_exit_codes():
    assert {verdict: verdict.exit_code for verdict in Verdict} == {
        Verdict.PASS: 0,
        Verdict.FAILED: 6,
        Verdict.NOT_VALIDATED: 7,
    }


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (TORCH, True),
        (dataclasses.replace(TORCH, version="2.12.0"), False),
        (BackendInfo("torch", "2.13.0", "cuda", (), "9.0"), False),
        (BackendInfo("onnxruntime", "2.13.0", "cpu"), False),
        (BackendInfo("torch", "2.13.0", "cpu:0"), True),
    ],
)
def test_what_counts_as_the_same_backend(other, same):
    assert TORCH.is_same_as(other) is same
    assert other.is_same_as(TORCH) is same


BAD_RECORDS = {
    "measured but skipped": lambda: case_evidence(status="skipped"),
    "compared without numbers": lambda: case_evidence(measured=None),
    "negative floor": lambda: Errors(-1e-9, 0, 0, 0),
    "nan floor": lambda: Errors(0, math.nan, 0, 0),
    "infinite floor": lambda: Errors(0, 0, 0, math.inf),
    "negative spread": lambda: DirectionScore("x", 0.0, -0.1),
    "nan spread": lambda: DirectionScore("x", 0.0, math.nan),
    "odd side": lambda: case_evidence(side=3),
    "large side": lambda: case_evidence(side=514),
    "no item": lambda: case_evidence(grid_hws=()),
    "five frames": lambda: case_evidence(frames=5),
    "twice one name": lambda: evidence_of(case_evidence("a"), case_evidence("a")),
    "name with a line": lambda: case_evidence("a\nb"),
    "zero scale": lambda: evidence_of(limit_scale=0.0),
    "nan scale": lambda: evidence_of(limit_scale=math.nan),
    "infinite scale": lambda: evidence_of(limit_scale=math.inf),
    "unknown dtype": lambda: evidence_of(dtype="int8"),
    "empty shape": lambda: Shape(0, 4, 1),
    "unordered profile": lambda: Profile("p", MIDDLE, SMALL, LARGE),
}


@pytest.mark.parametrize("make", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_evidence_that_contradicts_itself_cannot_be_made(make):
    with pytest.raises(ValueError, match=r"\w+ .*\w+"):  # a sentence
        make()


def test_a_corner_is_covered_only_by_a_case_that_ran_in_its_profile():
    """A call that fits two profiles runs in the tighter one, so the other's corner was never computed."""
    wide = Profile("wide", Shape(1, 4, 1), Shape(1, 64, 1), Shape(4, 4096, 1))
    tight = Profile("tight", Shape(1, 4, 1), Shape(1, 64, 1), Shape(1, 64, 1))
    grids = {"a": (1, ((2, 2),)), "b": (1, ((8, 8),)), "c": (4, ((64, 64),))}
    found = [
        CaseEvidence(name, "noise", frames, call, FLOOR, "compared", "", GOOD, ())
        for name, (frames, call) in grids.items()
    ]
    by_corner = {(entry.profile, entry.corner): entry.case for entry in gate.cover((wide, tight), found)}
    assert by_corner == {
        ("wide", "min"): None,
        ("wide", "opt"): None,
        ("wide", "max"): "c",
        ("tight", "min"): "a",
        ("tight", "opt"): "b",
        ("tight", "max"): "b",
    }
    assert {entry.case for entry in gate.cover((wide,), found)} == {"a", "b", "c"}
