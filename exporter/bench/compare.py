"""Whether two targets compute the same, so that nobody compares the speed of two things that do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.bench.report import Difference
from exporter.validation.evidence import DTYPES, DType
from exporter.validation.gate import FLOAT32_LIMITS, HIGHEST_FLOOR
from exporter.validation.metrics import measure

Output = tuple[int, DType, NDArray[Any]]  # number of the target, its dtype, [rows, width]

# The relative L2 error that an honest tower may have in each dtype: by the gate's rules, so that what it lets pass is
# not marked here. For half precision that is the highest floor which it judges at all. Real towers have a quarter of it
# (0.5 to 0.9 % in bf16 at four layers, input rounding included), other weights or swapped axes give 20 % and more.
_EXPLAINED: dict[DType, float] = {"float32": FLOAT32_LIMITS.relative_l2, **HIGHEST_FLOOR}


def allowed_difference(first: DType, second: DType) -> float:
    """The relative L2 difference that two dtypes explain.

    Both outputs approximate the same exact one, and two implementations round independently of each other: their errors
    add as the sides of a right angle.

    Args:
        first: dtype of one target.
        second: dtype of the other.
    """
    return math.hypot(_EXPLAINED[first], _EXPLAINED[second])


def difference_of(case: str, first: Output, second: Output) -> Difference:
    """Compare two outputs of one case.

    Args:
        case: its name.
        first: of one target.
        second: of another.

    Returns:
        The difference relative to the output of the finer dtype; to that of the first where they are the same.
    """
    reference, other = sorted((first, second), key=lambda output: DTYPES.index(output[1]))
    allowed = allowed_difference(first[1], second[1])
    found = None
    if reference[2].shape == other[2].shape and np.isfinite(reference[2]).all():
        found = measure(other[2], reference[2]).measured.relative_l2
    return Difference(case, first[0], second[0], found, allowed, found is not None and found <= allowed)
