"""Which grids a tower accepts. Imports nothing heavy: the engine runtime asks it too."""

from __future__ import annotations

from collections.abc import Sequence

from model.config import MAX_SIDE, VisionConfig
from model.errors import ImageError


def check_grids(grids: Sequence[Sequence[int]], patches: int, config: VisionConfig) -> None:
    """Refuse grids that the family's formulas do not cover or that do not fit the patches.

    Args:
        grids: (frames, rows, columns) of each item, in patches.
        patches: patches of all items and frames together.
        config: the tower's config.

    Raises:
        ImageError: names the item, the value and what is allowed.
    """
    for index, grid in enumerate(grids):
        if len(grid) != 3:
            raise ImageError(f"item {index}: grid {tuple(grid)} is not (frames, rows, columns)")
        frames, *sides = grid
        if not 1 <= frames <= config.max_frames:
            raise ImageError(f"item {index}: {frames} frames; {config.family} takes 1 to {config.max_frames}")
        for axis, side in zip(("rows", "columns"), sides, strict=True):
            if not 2 <= side <= MAX_SIDE or side % 2:
                raise ImageError(f"item {index}: {side} {axis}; expected an even number from 2 to {MAX_SIDE}")
    expected = sum(t * h * w for t, h, w in grids)
    if expected != patches:
        raise ImageError(f"grids ask for {expected} patches, pixel_values has {patches}; check the image processor")
