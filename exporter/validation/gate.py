"""From numbers to a verdict: every limit is stated, wired and stored beside what was measured."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from exporter.validation.evidence import (
    METRICS,
    NOT_SELECTED,
    CaseEvidence,
    DType,
    Errors,
    Evidence,
    Measured,
    Profile,
    Shape,
    expected_pairs,
    tightest_profile,
)

# Part of every stored judgement. A judgement by other rules is made again, not believed.
RULES_VERSION = 2

FACTOR = (
    1.5  # honest half-precision exports reach 1.16 times the floor, the nearest wrong model that a norm sees 1.7 times
)
FACTOR_FEW_ROWS = 2.0  # with few rows the floor itself is one draw of a wide distribution: 1.5 times it at 2x2
FEW_ROWS = 16
# A maximum over rows or elements is one draw of a wide distribution however many there are: in 6776 cases honest
# artifacts reached 1.71 times the floor (largest error) and 1.51 (worst token); each further 0.1 is 3.5 times as rare.
FACTOR_MAXIMUM = 2.0

# fp32 has no floor worth the name; ONNX Runtime agrees with PyTorch to 5e-7.
FLOAT32_LIMITS = Errors(relative_l2=1e-5, worst_token=3e-5, worst_angle=3e-5, largest_over_rms=1e-4)

# Above this relative L2 PyTorch itself is so far off in that dtype that a factor on it would admit wrong models.
HIGHEST_FLOOR: dict[DType, float] = {"bfloat16": 3e-2, "float16": 5e-3}

DIRECTION_LIMIT = 0.5  # half way to the wrong model
HIGHEST_SPREAD = 0.1  # a direction along which honest artifacts already scatter this far cannot accuse
SENSITIVITY_LOW, SENSITIVITY_HIGH = 0.9, 1.1


class Verdict(enum.Enum):
    """What may be said of an artifact."""

    PASS = "PASS"  # noqa: S105  # not a password
    FAILED = "FAILED"
    NOT_VALIDATED = "NOT VALIDATED"

    @property
    def exit_code(self) -> int:
        """The exit code of `validate`."""
        return {Verdict.PASS: 0, Verdict.FAILED: 6, Verdict.NOT_VALIDATED: 7}[self]


@dataclass(frozen=True)
class Check:
    """One measured number beside what is allowed.

    Attributes:
        metric: name of the number.
        subject: name of the wrong model for a direction, of the second case for a sensitivity, else empty.
        measured: the number; None if it is not finite.
        allowed_low: smallest value that is allowed.
        allowed_high: largest value that is allowed.
        excess: distance from the ideal value over the allowed distance; above 1 is outside. None if not finite.
        outcome: ``informs`` is a direction that cannot accuse.
    """

    metric: str
    subject: str
    measured: float | None
    allowed_low: float
    allowed_high: float
    excess: float | None
    outcome: Literal["within", "outside", "informs"]

    def describe(self) -> str:
        """Say in one clause what was measured and what was allowed."""
        what = self.metric.replace("_", " ")
        if self.measured is None:
            return f"{what} is not a finite number"
        low = "" if self.allowed_low == 0 else f"{self.allowed_low:.3g} to "
        times = "" if self.excess is None else f", {self.excess:.3g} times the limit"
        return f"{what} {self.measured:.3g} (allowed {low}{self.allowed_high:.3g}{times})"


@dataclass(frozen=True)
class CaseResult:
    """What the gate says of one case."""

    name: str
    outcome: Literal["within", "failed", "skipped"]
    note: str
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class PairResult:
    """What the gate says of two inputs of one grid."""

    first: str
    second: str
    check: Check


@dataclass(frozen=True)
class Coverage:
    """Whether a compared case has the sizes of one corner of a profile."""

    profile: str
    corner: Literal["min", "opt", "max"]
    shape: Shape
    case: str | None


@dataclass(frozen=True)
class Counts:
    """Cases by outcome; they add up to the total."""

    within: int
    failed: int
    skipped: int
    total: int


@dataclass(frozen=True)
class Judgement:
    """A verdict with everything that led to it.

    Attributes:
        rules_version: version of these rules.
        verdict: the worst of what was found.
        faults: one line per finding that fails.
        doubts: one line per finding that forbids PASS without showing a fault.
        counts: cases by outcome.
        cases: per case, in the order of the golden set.
        pairs: per pair of inputs of one grid.
        coverage: per corner of each profile.
    """

    rules_version: int
    verdict: Verdict
    faults: tuple[str, ...]
    doubts: tuple[str, ...]
    counts: Counts
    cases: tuple[CaseResult, ...]
    pairs: tuple[PairResult, ...]
    coverage: tuple[Coverage, ...]


def _median(values: Sequence[float]) -> float:
    """Median; the statistics module would cost 15 ms of `verify`."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def factor_for(metric: str, rows: int) -> float:
    """Return the factor on the floor.

    Args:
        metric: one of ``METRICS``.
        rows: rows of the case's output.

    Returns:
        For the relative L2 1.5 from 16 rows on and 2 below; 2 for the other metrics, which are maxima.
    """
    if metric != "relative_l2":
        return FACTOR_MAXIMUM
    return FACTOR if rows >= FEW_ROWS else FACTOR_FEW_ROWS


def limits_for(case: CaseEvidence, evidence: Evidence) -> Errors:
    """Compute the limits of one case: factor x max(its floor, median floor over all cases of the golden set).

    Args:
        case: the case.
        evidence: everything, since the median takes all cases, run or not: a selection must not move a limit.

    Returns:
        One limit per error metric.
    """
    if evidence.dtype == "float32":
        found = {metric: getattr(FLOAT32_LIMITS, metric) for metric in METRICS}
    else:
        found = {
            metric: factor_for(metric, case.rows)
            * max(getattr(case.floor, metric), _median([getattr(c.floor, metric) for c in evidence.cases]))
            for metric in METRICS
        }
    return Errors(**{metric: limit * evidence.limit_scale for metric, limit in found.items()})


def make_check(metric: str, measured: float | None, low: float, high: float, subject: str = "") -> Check:
    """Compare one number with a closed range.

    Args:
        metric: its name.
        measured: the number; None, NaN and infinity are outside of every range.
        low: smallest allowed value; 0 for an error, whose ideal is 0.
        high: largest allowed value.
        subject: wrong model or case that the number is about.

    Returns:
        The check.
    """
    if measured is None or not math.isfinite(measured):
        return Check(metric, subject, None, low, high, None, "outside")
    ideal = 0.0 if low == 0 else (low + high) / 2
    half = high - ideal
    excess = abs(measured - ideal) / half if half > 0 else None
    within = low <= measured <= high
    return Check(metric, subject, measured, low, high, excess, "within" if within else "outside")


def _norm_checks(measured: Measured, limits: Errors) -> list[Check]:
    """Check the norms, overall and per token, against the limit of the whole case's relative L2.

    For a single token the limit is deliberately that of the whole and not that of the worst token: a token's norm
    cannot differ by more than its error does, so the wider limit could never speak. Honest artifacts keep inside, for
    rounding errors are nearly orthogonal to a long row: PyTorch's own bf16 and fp16 reach 0.1 times the case's relative
    L2 at width 7168 (0.4 with outlier channels) and 1.0 times at width 56, where 1.5 times is allowed.
    """
    high = limits.relative_l2
    return [
        make_check("norm", measured.norm, -high, high),
        make_check("worst_token_norm", measured.worst_token_norm, -high, high),
    ]


def spread_of(fault: str, evidence: Evidence) -> float:
    """Return the largest honest spread of a direction over all cases: near the edge one case's may be small by luck."""
    return max(entry.spread for case in evidence.cases for entry in case.directions if entry.fault == fault)


def _direction_checks(case: CaseEvidence, evidence: Evidence) -> list[Check]:
    checks = []
    for direction in case.directions:
        check = make_check("direction", direction.score, -DIRECTION_LIMIT, DIRECTION_LIMIT, direction.fault)
        if spread_of(direction.fault, evidence) > HIGHEST_SPREAD:
            check = dataclasses.replace(check, outcome="informs")
        checks.append(check)
    return checks


def _judge_case(case: CaseEvidence, evidence: Evidence) -> CaseResult:
    if case.status == "skipped":
        return CaseResult(case.name, "skipped", case.note, ())
    if case.measured is None:  # crashed
        return CaseResult(case.name, "failed", case.note, ())
    limits = limits_for(case, evidence)
    checks = [make_check(metric, getattr(case.measured, metric), 0.0, getattr(limits, metric)) for metric in METRICS]
    checks += _norm_checks(case.measured, limits)
    checks += _direction_checks(case, evidence)
    failed = any(check.outcome == "outside" for check in checks)
    return CaseResult(case.name, "failed" if failed else "within", "", tuple(checks))


def _judge_pairs(evidence: Evidence) -> tuple[list[PairResult], list[str]]:
    """Check the sensitivities; whatever should have been measured and was not is a doubt."""
    ratios = {(entry.first, entry.second): entry.ratio for entry in evidence.sensitivity}
    pairs = expected_pairs(evidence.cases)
    results, doubts = [], []
    for first, second in pairs:
        if (first.name, second.name) not in ratios:
            doubts.append(f"the sensitivity between {first.name} and {second.name} was not measured")
            continue
        ratio = ratios[first.name, second.name]
        check = make_check("sensitivity", ratio, SENSITIVITY_LOW, SENSITIVITY_HIGH, second.name)
        results.append(PairResult(first.name, second.name, check))
    paired = {case.call for pair in pairs for case in pair}
    doubts += [
        f"case {case.name} is the only compared input of its grid, so the sensitivity to the input is unknown"
        for case in evidence.cases
        if case.status == "compared" and case.call not in paired
    ]
    return results, doubts


def cover(profiles: Sequence[Profile], cases: Sequence[CaseEvidence]) -> tuple[Coverage, ...]:
    """Find a compared case for the min, opt and max of every profile.

    A call that fits several profiles runs in the tightest, so it shows nothing of the others.

    Args:
        profiles: profiles of the engine.
        cases: cases with their status.

    Returns:
        One entry per corner; its ``case`` is None where no compared case of these very sizes ran in the profile.
    """
    compared: dict[tuple[int | None, Shape], str] = {}
    for case in cases:
        if case.status == "compared":
            compared.setdefault((tightest_profile(profiles, case.shape), case.shape), case.name)
    corners: tuple[Literal["min", "opt", "max"], ...] = ("min", "opt", "max")
    return tuple(
        Coverage(profile.name, corner, getattr(profile, corner), compared.get((index, getattr(profile, corner))))
        for index, profile in enumerate(profiles)
        for corner in corners
    )


def _set_doubts(evidence: Evidence) -> list[str]:
    """List what the golden set and the options lack for a PASS, whatever was measured."""
    doubts = []
    if not evidence.cases:
        doubts.append("there is no golden case")
    elif not any(case.status == "compared" for case in evidence.cases):
        doubts.append("no case was compared")
    left_out = sum(case.note == NOT_SELECTED for case in evidence.cases)
    if left_out:
        doubts.append(
            f"{left_out} of {len(evidence.cases)} cases were not selected; run it without --case for a verdict"
        )
    if evidence.limit_scale != 1:
        doubts.append(f"the limits were multiplied by {evidence.limit_scale:g}")
    if evidence.backend.is_same_as(evidence.reference):
        doubts.append(f"the golden set was recorded by {evidence.reference} too: a backend was compared with itself")
    highest = HIGHEST_FLOOR.get(evidence.dtype)
    if highest is None:
        return doubts
    doubts += [
        f"case {case.name}: PyTorch itself is {case.floor.relative_l2:.3g} off in {evidence.dtype} "
        f"(at most {highest:g} can be judged)"
        for case in evidence.cases
        if case.floor.relative_l2 > highest
    ]
    scores = [direction for case in evidence.cases if case.status == "compared" for direction in case.directions]
    if not any(spread_of(direction.fault, evidence) <= HIGHEST_SPREAD for direction in scores):
        doubts.append(
            f"no compared case has usable directions, and in {evidence.dtype} no norm sees a wrong resampling kernel; "
            "record a golden set with a case of 300 patches or more"
        )
    return doubts


def _accuse(result: CaseResult) -> list[str]:
    """Say which metrics of a failed case are outside, and which wrong model the error looks like."""
    if result.outcome != "failed":
        return []
    outside = [check for check in result.checks if check.outcome == "outside"]
    lines = [f"case {result.name}: {result.note}"] if not outside else []
    plain = [check.describe() for check in outside if check.metric != "direction"]
    if plain:
        lines.append(f"case {result.name}: {'; '.join(plain)}")
    # of several directions that resemble each other the nearest to 1 is named first
    accused = sorted(
        (check for check in outside if check.metric == "direction"),
        key=lambda check: abs((check.measured if check.measured is not None else math.inf) - 1),
    )
    lines += [
        f"case {result.name}: the error points to {check.subject}; {check.describe()}"
        for check in accused
        if check.measured is not None or not plain
    ]
    return lines


def judge(evidence: Evidence) -> Judgement:
    """Judge the numbers.

    Args:
        evidence: what was measured, with the floors that limits are made from.

    Returns:
        The verdict and every check behind it. FAILED outweighs NOT VALIDATED, which outweighs PASS.
    """
    cases = tuple(_judge_case(case, evidence) for case in evidence.cases)
    pairs, doubts = _judge_pairs(evidence)
    coverage = cover(evidence.profiles, evidence.cases)
    faults = [line for result in cases for line in _accuse(result)]
    faults += [
        f"cases {pair.first} and {pair.second}: {pair.check.describe()}"
        for pair in pairs
        if pair.check.outcome == "outside"
    ]
    doubts = _set_doubts(evidence) + doubts
    doubts += [f"case {result.name} was skipped: {result.note}" for result in cases if result.outcome == "skipped"]
    doubts += [
        f"no compared case covers the {entry.corner} of profile {entry.profile} ({entry.shape})"
        for entry in coverage
        if entry.case is None
    ]
    outcomes = [result.outcome for result in cases]
    counts = Counts(outcomes.count("within"), outcomes.count("failed"), outcomes.count("skipped"), len(cases))
    return Judgement(
        RULES_VERSION, _verdict(faults, doubts), tuple(faults), tuple(doubts), counts, cases, tuple(pairs), coverage
    )


def _verdict(faults: list[str], doubts: list[str]) -> Verdict:
    if faults:
        return Verdict.FAILED
    return Verdict.NOT_VALIDATED if doubts else Verdict.PASS
