"""Metrics against exact or higher-precision arithmetic (pitfalls 4 to 7)."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exporter.errors import BadInput
from exporter.validation import metrics
from exporter.validation.evidence import NOTHING_FINITE

FINITE = st.floats(min_value=-1e4, max_value=1e4, width=32)
ARRAYS = hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=FINITE)


def root(value: Fraction) -> float:
    """Square root of an exact fraction, correct to the last digits of a float."""
    scale = 1 << 400
    return float(Fraction(math.isqrt(int(value * scale * scale)), scale))


def exact_numbers(y, r):
    """The four errors and two norms in exact rational arithmetic up to the final square root."""
    y, r = ([[Fraction(float(value)) for value in row] for row in array] for array in (y, r))
    difference = [[a - b for a, b in zip(*rows, strict=True)] for rows in zip(y, r, strict=True)]
    errors, yy, rr = ([sum(v * v for v in row) for row in array] for array in (difference, y, r))
    dots = [sum(a * b for a, b in zip(*rows, strict=True)) for rows in zip(y, r, strict=True)]
    # 2 (1 - cos) with the cosine as the root of an exact fraction, to 400 bits
    angles, scale = [], 1 << 400
    for dot, a, b in zip(dots, yy, rr, strict=True):
        cosine = Fraction(math.isqrt(int(dot * dot / (a * b) * scale * scale)), scale)
        angles.append(root(2 * (1 - (cosine if dot >= 0 else -cosine))))
    tokens = [root(e / b) for e, b in zip(errors, rr, strict=True)]
    norms = [root(a / b) - 1 for a, b in zip(yy, rr, strict=True)]
    largest = max(abs(v) for row in difference for v in row)
    return {
        "relative_l2": root(sum(errors) / sum(rr)),
        "worst_token": max(tokens),
        "worst_angle": max(angles),
        "largest_over_rms": root(largest**2 * len(r) * len(r[0]) / sum(rr)),
        "norm": root(sum(yy) / sum(rr)) - 1,
        "worst_token_norm": max(norms, key=abs),
    }


def no_zero_row(array):
    return bool((np.abs(array.astype(np.float64)).max(axis=1) > 1e-20).all())


@given(ARRAYS, st.data())
def test_all_numbers_agree_with_exact_arithmetic(r, data):
    y = data.draw(hnp.arrays(np.float32, r.shape, elements=FINITE))
    assume(no_zero_row(r) and no_zero_row(y))
    found = dataclasses.asdict(metrics.measure(y, r).measured)
    for name, value in exact_numbers(y, r).items():
        # norms and angles near 0 come from numbers near 1, of which float64 keeps 1e-16; sums of 6 terms add a little
        tolerance = 1e-14 if "norm" in name or "angle" in name else 0
        assert math.isclose(found[name], value, rel_tol=1e-13, abs_tol=tolerance), name


@pytest.mark.parametrize("angle", [1e-3, 1e-6, 1e-9, 1e-12])
def test_small_angles_keep_their_digits(angle):
    """1 - cos is 0 in float64 below 1e-8, so the textbook formula would see nothing there."""
    r = np.zeros((3, 8))
    r[:, 0] = 1e3
    y = r.copy()
    y[1, :2] = 1e3 * math.cos(angle), 1e3 * math.sin(angle)
    measurement = metrics.measure(y, r)
    assert measurement.measured.worst_angle == pytest.approx(2 * math.sin(angle / 2), rel=1e-3)
    assert measurement.tokens.worst_angle == 1


def test_an_array_is_at_no_angle_to_itself_and_at_most_opposite():
    """A cosine above 1 would be a bug (pitfall 7); an angle here is a distance and cannot be one."""
    r = np.random.default_rng(0).standard_normal((64, 7168)).astype(np.float32)
    assert metrics.measure(r, r).measured == dataclasses.replace(NOTHING_FINITE, **dict.fromkeys(exact_names(), 0.0))
    assert metrics.measure(-r, r).measured.worst_angle == pytest.approx(2, abs=1e-12)
    # scaling changes no angle; the two unit vectors differ by their rounding only
    assert metrics.measure(r * 1.5, r).measured.worst_angle < 1e-7


def exact_names():
    return [field.name for field in dataclasses.fields(NOTHING_FINITE)]


@given(ARRAYS, st.data(), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_one_bad_element_makes_every_number_unknown(y, data, bad):
    assume(no_zero_row(y))
    reference = y.copy()
    y[data.draw(st.integers(0, y.shape[0] - 1)), data.draw(st.integers(0, y.shape[1] - 1))] = bad
    measurement = metrics.measure(y, reference)
    assert measurement.measured == NOTHING_FINITE
    assert measurement.tokens.not_finite == 1
    assert measurement.tokens.worst_token is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("both", [False, True])
def test_a_reference_that_is_not_finite_is_an_error_of_its_own(bad, both):
    r = np.ones((4, 3), np.float32)
    r[2, 1] = bad
    y = r.copy() if both else np.ones((4, 3), np.float32)
    with pytest.raises(BadInput, match="reference"):
        metrics.measure(y, r)


def test_zero_rows_have_no_angle():
    """cosine(0, 0) and cosine(0, x) are not 1 (pitfall 4)."""
    ones, hole = np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)
    hole[1] = 0
    assert metrics.measure(hole, ones).measured.worst_angle is None
    assert metrics.measure(hole, ones).measured.worst_token == 1
    for output in (hole, ones):
        found = metrics.measure(output, hole).measured
        assert found.worst_angle is found.worst_token is None
    zeros = np.zeros((3, 4), np.float32)
    assert metrics.measure(zeros, zeros).measured == NOTHING_FINITE
    with pytest.raises(BadInput):
        metrics.floor_of(hole, ones)
    with pytest.raises(BadInput):
        metrics.floor_of(ones, hole)


def test_the_worst_token_is_found_among_many():
    r = np.random.default_rng(0).standard_normal((500, 64)).astype(np.float32)
    y = r * np.float32(1.001)
    y[377] *= np.float32(1.01)
    measurement = metrics.measure(y, r)
    assert measurement.tokens.worst_token == 377
    assert measurement.measured.worst_token == pytest.approx(1.001 * 1.01 - 1, rel=1e-4)
    assert measurement.measured.worst_token_norm == pytest.approx(1.001 * 1.01 - 1, rel=1e-4)
    assert measurement.measured.norm == pytest.approx(1e-3, rel=0.05)  # one row of 500 adds 2 %
    assert sum(measurement.tokens.histogram) == 500
    assert np.flatnonzero(measurement.tokens.histogram).tolist() == [
        int(np.searchsorted(metrics.HISTOGRAM_EDGES, value)) - 1 for value in (1e-3 * (1 + 1e-9), 0.01101)
    ]


def test_histogram_keeps_what_lies_outside_its_edges():
    errors = np.array([0.0, 1e-30, 9.0, 1e30, np.nan, np.inf])
    counts = metrics.histogram(errors)
    assert (counts[0], counts[-1], sum(counts)) == (2, 2, 4)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
def test_full_size_arrays_are_reduced_in_float64_and_in_bounded_memory(dtype):
    """4096 x 7168 (pitfall 7). Summed in their own type, fp16 squares overflow and bf16 sums stop growing at 256."""
    random = np.random.default_rng(1)
    r = (random.standard_normal((4096, 7168), dtype=np.float32) * 20).astype(dtype)
    y = r.copy()
    y[4000] = (r[4000].astype(np.float32) * 1.25).astype(dtype)
    tracemalloc.start()
    found = metrics.measure(y, r)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20  # the arrays themselves would be 235 MB each in float64
    row_y, row_r = y[4000].astype(np.float64), r[4000].astype(np.float64)
    worst = np.linalg.norm(row_y - row_r) / np.linalg.norm(row_r)
    total = math.sqrt(sum(float(np.linalg.norm(row.astype(np.float64))) ** 2 for row in r))
    # two ways to sum 29 million squares in float64
    assert found.measured.worst_token == pytest.approx(worst, rel=1e-12)
    assert found.measured.relative_l2 == pytest.approx(np.linalg.norm(row_y - row_r) / total, rel=1e-11)
    assert found.tokens.worst_token == 4000


@given(ARRAYS, st.floats(-3, 3), st.data())
def test_score_is_the_share_of_the_direction_in_the_error(r, share, data):
    d = data.draw(hnp.arrays(np.float32, r.shape, elements=st.floats(-100, 100, width=32)))
    assume(np.abs(d).max() > 1e-3)
    y = r.astype(np.float64) + share * d.astype(np.float64)
    # r + share d is rounded at the size of r (1e4), which moves the score by up to 1e4 * 1e-16 * sqrt(30) / |d|
    tolerance = 1e-11 / float(np.abs(d).max())
    assert metrics.direction_score(y, r, d) == pytest.approx(share, abs=tolerance, rel=1e-12)


def test_score_ignores_what_is_orthogonal_and_knows_no_zero_direction():
    r = np.zeros((2, 2), np.float32)
    d = np.array([[1, 0], [0, 0]], np.float32)
    y = np.array([[0, 5], [5, 5]], np.float32)
    assert metrics.direction_score(y, r, d) == 0
    assert metrics.direction_score(y, r, np.zeros_like(d)) is None
    assert metrics.direction_score(y * np.float32(np.nan), r, d) is None


@given(st.floats(0.01, 100), ARRAYS, st.data())
@settings(max_examples=50)
def test_sensitivity_is_the_ratio_of_distances(factor, r1, data):
    r2 = data.draw(hnp.arrays(np.float32, r1.shape, elements=FINITE))
    assume(np.abs(r1.astype(np.float64) - r2).max() > 1e-3)
    y1, y2 = (factor * r.astype(np.float64) + 7 for r in (r1, r2))
    # adding and taking away 7 at sizes up to 1e6 costs 1e-10 of a distance of 1e-3 and more
    assert metrics.sensitivity((y1, y2), (r1, r2)) == pytest.approx(factor, rel=1e-5)
    assert metrics.sensitivity((y1, y1), (r1, r2)) == 0
    assert metrics.sensitivity((y1, y2), (r1, r1)) is None


@pytest.mark.parametrize("shapes", [((2, 3), (3, 2)), ((2, 3), (2, 1)), ((1, 2), (2,)), ((0, 3), (0, 3)), ((6,), (6,))])
def test_shapes_that_broadcast_are_not_compared(shapes):
    first, second = (np.ones(shape) for shape in shapes)
    with pytest.raises(ValueError, match="shape"):
        metrics.measure(first, second)
    with pytest.raises(ValueError, match="shape"):
        metrics.direction_score(first, second, second)


def test_token_errors_are_per_row():
    r = np.array([[3.0, 4.0], [0.0, 2.0]])
    y = np.array([[3.0, 4.5], [1.0, 2.0]])
    assert metrics.token_errors(y, r) == pytest.approx([0.1, 0.5], rel=1e-15)


def test_a_floor_is_what_is_measured():
    random = np.random.default_rng(3)
    r = random.standard_normal((20, 30))
    y = r + 0.01 * random.standard_normal((20, 30))
    found = dataclasses.asdict(metrics.measure(y, r).measured)
    assert dataclasses.asdict(metrics.floor_of(y, r)) == {name: found[name] for name in list(found)[:4]}
    assert metrics.relative_distance(y, r) == pytest.approx(np.linalg.norm(y - r) / np.linalg.norm(r), rel=1e-12)
