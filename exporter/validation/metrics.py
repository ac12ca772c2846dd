"""Error metrics of one case, always in float64, in one pass over chunks of rows so that memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.errors import BadInput
from exporter.validation.evidence import NOTHING_FINITE, Errors, Measured

Array = NDArray[Any]  # fp32, fp16, ml_dtypes.bfloat16 or float64
Floats = NDArray[np.float64]

_CHUNK_ELEMENTS = 1 << 19  # 4 MiB in float64; a handful of such temporaries exist at a time

# Bins of the per-token error histograms: quarter decades from 1e-9 to 10, the same everywhere so that cases compare.
HISTOGRAM_EDGES: tuple[float, ...] = tuple(10 ** (quarter / 4) for quarter in range(-36, 5))


@dataclass(frozen=True)
class TokenDetails:
    """Where the worst token is and how the tokens' errors are distributed.

    Attributes:
        worst_token: row of the largest relative error; None where an error is not finite.
        worst_angle: row of the largest angle; likewise.
        histogram: tokens per bin of ``HISTOGRAM_EDGES``; the first and last bin take what lies outside.
        not_finite: tokens whose error is not a finite number.
    """

    worst_token: int | None
    worst_angle: int | None
    histogram: tuple[int, ...]
    not_finite: int


@dataclass(frozen=True)
class Measurement:
    """The numbers that are judged, and the details that a report shows."""

    measured: Measured
    tokens: TokenDetails


@dataclass(frozen=True)
class _Rows:
    """Sums over each row: squared error, output and reference, squared distance of unit vectors, largest error."""

    error: Floats
    output: Floats
    reference: Floats
    angle: Floats
    largest: Floats

    @property
    def token_errors(self) -> Floats:
        return np.sqrt(self.error) / np.sqrt(self.reference)

    @property
    def token_norms(self) -> Floats:
        return np.sqrt(self.output) / np.sqrt(self.reference) - 1


def _check_shapes(*arrays: Array) -> None:
    shape = arrays[0].shape
    if len(shape) != 2 or 0 in shape:
        raise ValueError(f"an array of shape {shape} where rows of a tower's output belong")
    for array in arrays[1:]:
        if array.shape != shape:
            raise ValueError(f"arrays of shapes {shape} and {array.shape} cannot be compared")


def _chunks(*arrays: Array) -> Iterator[tuple[slice, list[Floats]]]:
    """Give slices of rows with these rows of every array in float64."""
    rows, width = arrays[0].shape
    step = max(1, _CHUNK_ELEMENTS // width)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        yield part, [array[part].astype(np.float64) for array in arrays]


def _dot(a: Floats, b: Floats) -> Floats:
    result: Floats = np.einsum("ij,ij->i", a, b)
    return result


def _reduce_rows(output: Array, reference: Array) -> _Rows:
    """Reduce two arrays to sums over rows; NaN and infinity propagate."""
    _check_shapes(output, reference)
    rows = _Rows(*(np.empty(output.shape[0]) for _ in range(5)))
    with np.errstate(all="ignore"):  # NaN, infinity and 0/0 are results here; the caller turns them into None
        for part, (y, r) in _chunks(output, reference):
            error = y - r
            rows.error[part] = _dot(error, error)
            rows.output[part] = _dot(y, y)
            rows.reference[part] = _dot(r, r)
            rows.largest[part] = np.abs(error).max(axis=1)
            # sqrt(2 (1 - cos)) is the distance of the unit vectors. Taken as a distance it keeps all its digits;
            # 1 - cos loses them below an angle of 1e-8 and can come out negative.
            units = y / np.sqrt(rows.output[part])[:, None] - r / np.sqrt(rows.reference[part])[:, None]
            rows.angle[part] = _dot(units, units)
    return rows


def _number(value: float | np.floating[Any]) -> float | None:
    """Return a Python float, or None for NaN and infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def _position_of_largest(values: Floats) -> int | None:
    return int(np.argmax(values)) if bool(np.isfinite(values).all()) else None


def histogram(token_errors: Array) -> tuple[int, ...]:
    """Count tokens per bin of ``HISTOGRAM_EDGES``.

    Args:
        token_errors: relative error of each token, [rows].

    Returns:
        One count per bin; finite values outside the edges count in the first or last bin, others nowhere.
    """
    values = token_errors[np.isfinite(token_errors)].astype(np.float64)
    clipped = np.clip(values, HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1])
    return tuple(int(count) for count in np.histogram(clipped, bins=np.array(HISTOGRAM_EDGES))[0])


def _details(rows: _Rows) -> TokenDetails:
    errors = rows.token_errors
    return TokenDetails(
        worst_token=_position_of_largest(errors),
        worst_angle=_position_of_largest(np.sqrt(rows.angle)),
        histogram=histogram(errors),
        not_finite=int(np.count_nonzero(~np.isfinite(errors))),
    )


def _measured(rows: _Rows, elements: int) -> Measured:
    reference = math.sqrt(float(rows.reference.sum()))
    norms = rows.token_norms
    farthest = norms[np.argmax(np.abs(norms))]  # argmax stops at NaN, which then is the result
    return Measured(
        relative_l2=_number(np.sqrt(rows.error.sum()) / np.float64(reference)),
        worst_token=_number(rows.token_errors.max()),
        worst_angle=_number(np.sqrt(rows.angle.max())),
        largest_over_rms=_number(rows.largest.max() / np.float64(reference / math.sqrt(elements))),
        norm=_number(np.sqrt(rows.output.sum()) / np.float64(reference) - 1),
        worst_token_norm=_number(farthest),
    )


def measure(output: Array, reference: Array) -> Measurement:
    """Measure one output against its reference.

    Args:
        output: y, [rows, width], any float type.
        reference: r, the same shape.

    Returns:
        The numbers. A NaN or an infinity anywhere in ``output`` makes all of them None, since a mean over the rest
        would hide it; a zero row makes its angle None (the cosine of a zero vector is not defined).

    Raises:
        BadInput: the reference is not finite, which says nothing about the artifact.
        ValueError: the shapes differ, or are not those of rows.
    """
    rows = _reduce_rows(output, reference)
    if not np.isfinite(rows.reference).all():
        raise BadInput("the reference output is not finite; record the golden set again")
    with np.errstate(all="ignore"):
        details = _details(rows)
        finite = bool(np.isfinite(rows.output).all())
        return Measurement(_measured(rows, reference.size) if finite else NOTHING_FINITE, details)


def floor_of(native: Array, reference: Array) -> Errors:
    """Measure PyTorch's own error in the artifact's dtype.

    Args:
        native: PyTorch's output in that dtype, [rows, width].
        reference: its fp32 output.

    Returns:
        The four error metrics.

    Raises:
        BadInput: a value is not finite, or a row of either is zero, so that nothing can be compared with it.
    """
    found = measure(native, reference).measured
    numbers = (found.relative_l2, found.worst_token, found.worst_angle, found.largest_over_rms)
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        raise BadInput("PyTorch's own output is not finite in this dtype, or has a row of zeros: no floor exists")
    return Errors(*known)


def token_errors(output: Array, reference: Array) -> Floats:
    """Return the relative L2 error of each row.

    Args:
        output: y, [rows, width].
        reference: r, the same shape.

    Returns:
        |y_i - r_i| / |r_i|, [rows]; NaN or infinity where it is not defined.
    """
    with np.errstate(all="ignore"):
        return _reduce_rows(output, reference).token_errors


def direction_score(output: Array, reference: Array, direction: Array) -> float | None:
    """Project the error on the difference that a named wrong model makes.

    Args:
        output: y, [rows, width].
        reference: r, the same shape.
        direction: d = (output of the wrong model) - r, the same shape.

    Returns:
        <y - r, d> / <d, d>: 0 for an error unrelated to the fault, 1 for exactly this fault; None if not finite.
    """
    _check_shapes(output, reference, direction)
    along = length = 0.0
    with np.errstate(all="ignore"):
        for _, (y, r, d) in _chunks(output, reference, direction):
            along += float(_dot(y - r, d).sum())
            length += float(_dot(d, d).sum())
        return _number(np.float64(along) / np.float64(length))


def score_scatter(output: Array, reference: Array, direction: Array) -> float | None:
    """Estimate the standard deviation of a direction's score from the rows of one honest output.

    The score is a sum over rows of <e_i, d_i> / <d, d>; honest errors of two rows are nearly independent and have mean
    0, so the root of the summed squares is its standard deviation. Within a row errors need not be independent: a
    rounding in an early layer moves the whole row. Measured, honest scores are 1.0 to 1.5 times this.

    Args:
        output: y of an honest run, [rows, width].
        reference: r, the same shape.
        direction: d, the same shape.

    Returns:
        sqrt(sum_i <e_i, d_i>^2) / <d, d> with e = y - r; None if not finite.
    """
    _check_shapes(output, reference, direction)
    squares = length = 0.0
    with np.errstate(all="ignore"):
        for _, (y, r, d) in _chunks(output, reference, direction):
            squares += float((_dot(y - r, d) ** 2).sum())
            length += float(_dot(d, d).sum())
        return _number(np.sqrt(squares) / np.float64(length))


def relative_distance(first: Array, second: Array) -> float | None:
    """Return |a - b| / |b|.

    Args:
        first: a, [rows, width].
        second: b, the same shape.

    Returns:
        The ratio; None if not finite.
    """
    rows = _reduce_rows(first, second)
    with np.errstate(all="ignore"):
        return _number(np.sqrt(rows.error.sum()) / np.sqrt(rows.reference.sum()))


def sensitivity(outputs: tuple[Array, Array], references: tuple[Array, Array]) -> float | None:
    """Compare how far two inputs of one grid lie apart in the output and in the reference.

    Args:
        outputs: y1 and y2, [rows, width] each.
        references: r1 and r2, the same shape.

    Returns:
        |y1 - y2| / |r1 - r2|; None if not finite.
    """
    with np.errstate(all="ignore"):
        found = np.sqrt(_reduce_rows(*outputs).error.sum())
        return _number(found / np.sqrt(_reduce_rows(*references).error.sum()))
