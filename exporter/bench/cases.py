"""The calls that all targets get: their sizes and their pixels. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.bench.report import BenchCase
from exporter.errors import Usage
from exporter.validation.evidence import PATCHES_PER_ROW, check_grids
from exporter.validation.golden_cases import GoldenSize, noise_pixels, size_text

# 64x64 is the position table's own size; on a CPU one such call of a real tower takes a minute
_EVERYWHERE: tuple[GoldenSize, ...] = ((1, ((16, 16),)), (1, ((32, 32),)))
_ON_A_GPU: tuple[GoldenSize, ...] = (*_EVERYWHERE, (1, ((64, 64),)))

_SEED = 0
INPUTS = f"uniform noise in [-1, 1), as in golden sets of seed {_SEED}"


def cases_of(sizes: Sequence[GoldenSize], gpu: str | None) -> tuple[BenchCase, ...]:
    """List the cases.

    Args:
        sizes: that were asked for; empty for the default.
        gpu: compute capability of the GPU here; None without one.

    Raises:
        Usage: no tower takes such a size, or one is asked for twice.
    """
    cases: list[BenchCase] = []
    for frames, grids in sizes or (_EVERYWHERE if gpu is None else _ON_A_GPU):
        name = size_text((frames, grids))
        try:
            check_grids(frames, grids)
        except ValueError as error:
            raise Usage(f"--case {name}: {error}") from error
        if any(case.name == name for case in cases):
            raise Usage(f"--case {name} is asked for twice")
        patches = sum(h * w for h, w in grids)
        cases.append(BenchCase(name, frames, grids, frames * patches, patches // PATCHES_PER_ROW))
    return tuple(cases)


def pixels_of(case: BenchCase) -> NDArray[np.float32]:
    """Make the pixels of a case as golden sets make noise; every backend rounds them to its own dtype.

    Returns:
        [frames, patches, 588] fp32.
    """
    return noise_pixels(_SEED, f"{case.name}-noise", case.frames, case.tokens // case.frames)


def grids_of(case: BenchCase) -> NDArray[Any]:
    """(h, w) of each item as the graph takes them: [items, 2] int64."""
    return np.array(case.grid_hws, dtype=np.int64)
