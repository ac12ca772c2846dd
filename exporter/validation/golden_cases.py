"""What a golden set is recorded on: which calls, and their pixels."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from exporter.errors import MissingRequirement, Usage
from exporter.validation.evidence import DType, Grids
from model.config import MAX_SIDE, PATCH_SIZE, PATCH_VALUES, VisionConfig
from model.preprocess import load_image, preprocess
from model.preprocess_rule import RULES, PreprocessRule, load_rule
from model.weights import VisionWeights

Pixels = NDArray[np.float32]
GoldenSize = tuple[int, Grids]  # frames, and (h, w) in patches of each item

# Extreme ratios, growing and shrinking, the table's own size (64x64), a photo's 36x46, and the smallest.
DEFAULT_GRIDS = ((2, 2), (6, 512), (512, 6), (36, 46), (46, 36), (64, 64), (16, 16))
# Directions need 300 patches, where an honest error is nearly orthogonal to every one; more would only cost time.
DIRECTION_GRIDS = ((16, 20), (20, 16))
# The smallest clip, a small one, and one that fills 4096 tokens, as an engine's profile may.
CLIPS: tuple[GoldenSize, ...] = ((2, ((2, 2),)), (4, ((10, 12),)), (4, ((30, 34),)))
SEVERAL: tuple[Grids, ...] = (((4, 6), (16, 18), (2, 2)), ((16, 4), (2, 6)), ((2, 2), (2, 2)))
# The calls that wrong models run too, on noise: what an image shows, what a clip shows, what several items show.
DIRECTION_CALLS: tuple[GoldenSize, ...] = (
    *((1, (grid,)) for grid in DIRECTION_GRIDS),
    CLIPS[1],
    (1, SEVERAL[0]),
)


@dataclass(frozen=True)
class GoldenOptions:
    """What to record.

    Attributes:
        dtype: of the artifacts that the set shall judge.
        packing: ``packed`` adds calls of several items.
        images: photos to record at their own grids, beside the default grids.
        sizes: further calls, as frames and grids.
        max_patches: leave out default calls with more patches than this, all frames and items counted.
        device: ``cpu`` or ``cuda``.
        seed: of the noise.
    """

    dtype: DType
    packing: Literal["single", "packed"] = "single"
    images: tuple[Path, ...] = ()
    sizes: tuple[GoldenSize, ...] = ()
    max_patches: int = 4096
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class PlannedCase:
    """One case before its pixels are made.

    Attributes:
        name: in the golden set.
        kind: photo or noise.
        frames: frames that the items share.
        grids: (h, w) of each item.
        image: photo; for a photo case.
        own_grid: the photo goes through the family's preprocessing instead of being fitted to the grid.
    """

    name: str
    kind: Literal["photo", "noise"]
    frames: int
    grids: Grids
    image: Path | None = None
    own_grid: bool = False

    @property
    def patches(self) -> int:
        """Patches of one frame."""
        return sum(h * w for h, w in self.grids)

    @property
    def keeps_directions(self) -> bool:
        """Whether wrong models are recorded for this case."""
        return self.kind == "noise" and (self.frames, self.grids) in DIRECTION_CALLS


def default_photo() -> Path:
    """Return a real photo that a dependency ships (matplotlib's portrait of Grace Hopper, 512x600, public domain).

    Raises:
        MissingRequirement: matplotlib is not installed.
    """
    try:
        from matplotlib import cbook
    except ImportError as error:
        raise MissingRequirement("no photo at hand: install kvit-export[cpu] or [gpu], or give --image FILE") from error
    return Path(str(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)))


def preprocess_rule(weights: VisionWeights) -> PreprocessRule:
    """Return the checkpoint's own preprocessing rule, or its family's where it has none."""
    folder, family = Path(weights.source), weights.config.family
    return load_rule(folder, family) if folder.is_dir() else RULES[family]


def size_text(size: GoldenSize) -> str:
    """Write a size as the command line takes it: ``36x46``, ``4x30x34`` (frames first), ``36x46+16x16``."""
    frames, grids = size
    return "+".join("x".join(map(str, grid if frames == 1 else (frames, *grid))) for grid in grids)


def plan_cases(config: VisionConfig, options: GoldenOptions, rule: PreprocessRule) -> list[PlannedCase]:
    """List the cases of a golden set: every call with a photo and with noise.

    Raises:
        Usage: a size that is asked for cannot be an input of the artifact.
        ImageError: a photo cannot be read.
    """
    photo = options.images[0] if options.images else default_photo()
    default: list[GoldenSize] = [(1, (grid,)) for grid in (*DEFAULT_GRIDS, *DIRECTION_GRIDS)]
    default += [clip for clip in CLIPS if clip[0] <= config.max_frames]
    if options.packing == "packed":
        default += [(1, grids) for grids in SEVERAL]
    calls = [call for call in default if _tokens(call) <= options.max_patches]
    for size in options.sizes:
        _check_size(config, options, size)
        calls.append(size)
    cases, names = _photo_cases(options, rule), set[str]()
    for call in dict.fromkeys(calls):
        name = _call_name(call, names)
        names.add(name)
        cases.append(PlannedCase(f"{name}-photo", "photo", *call, photo))
        cases.append(PlannedCase(f"{name}-noise", "noise", *call))
    return cases


def _tokens(call: GoldenSize) -> int:
    return call[0] * sum(h * w for h, w in call[1])


def _check_size(config: VisionConfig, options: GoldenOptions, size: GoldenSize) -> None:
    (frames, grids), what = size, f"--golden-sizes {size_text(size)}"
    if not grids or not all(2 <= side <= MAX_SIDE and side % 2 == 0 for grid in grids for side in grid):
        raise Usage(f"{what}: sides must be even, 2 to {MAX_SIDE} patches")
    if not 1 <= frames <= config.max_frames:
        raise Usage(f"{what}: {frames} frames; {config.family} takes 1 to {config.max_frames}")
    if len(grids) > 1 and options.packing != "packed":
        raise Usage(f"{what}: several items in one call need --packing packed")


def _call_name(call: GoldenSize, taken: Collection[str]) -> str:
    """Name a call by its frames, its number of items and its first grid; a number at the end tells equal ones apart."""
    frames, grids = call
    name = f"{grids[0][0]}x{grids[0][1]}"
    name = name if len(grids) == 1 else f"items{len(grids)}-{name}"
    name = name if frames == 1 else f"clip{frames}-{name}"
    if name not in taken:
        return name
    return next(f"{name}-{number}" for number in itertools.count(2) if f"{name}-{number}" not in taken)


def _photo_cases(options: GoldenOptions, rule: PreprocessRule) -> list[PlannedCase]:
    """Each photo of the user at the grid that the family's own rule gives it, with noise of the same grid beside it."""
    cases = []
    for index, path in enumerate(options.images):
        _, (_, h, w) = preprocess(path, rule)
        name = f"image{index}-{h}x{w}"
        grids = ((int(h), int(w)),)
        cases.append(PlannedCase(f"{name}-photo", "photo", 1, grids, path, own_grid=True))
        cases.append(PlannedCase(f"{name}-noise", "noise", 1, grids))
    return cases


def case_pixels(case: PlannedCase, options: GoldenOptions, rule: PreprocessRule) -> Pixels:
    """Make the pixels of a case, rounded to the artifact's dtype.

    Returns:
        [frames, patches, 588] fp32.
    """
    if case.own_grid and case.image is not None:
        values = preprocess(case.image, rule)[0].reshape(1, case.patches, -1)
    elif case.image is not None:
        values = _fitted_photo(case, load_image(case.image))
    else:
        values = noise_pixels(options.seed, case.name, case.frames, case.patches)
    import torch

    rounded: Pixels = torch.from_numpy(values).to(getattr(torch, options.dtype)).to(torch.float32).numpy()
    return rounded


def noise_pixels(seed: int, name: str, frames: int, patches: int) -> Pixels:
    """Uniform noise in [-1, 1), the range of normalised pixels: [frames, patches, 588] fp32.

    Args:
        seed: of all cases.
        name: of the case; another name is other noise.
        frames: of the call.
        patches: of one frame.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    noise = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "little")))
    return noise.random((frames, patches, PATCH_VALUES), dtype=np.float32) * 2 - 1


def _fitted_photo(case: PlannedCase, photo: Image.Image) -> Pixels:
    """Fit a photo to the grid of each item; later frames and items see it moved, so that neighbours differ."""
    frames = []
    for frame in range(case.frames):
        items = []
        for index, (h, w) in enumerate(case.grids):
            # three quarters of the photo are cut out, so that 6/24 are left to move in
            left, top = (frame + 2 * index) % 7 * photo.width // 24, (frame + index) % 7 * photo.height // 24
            box = (left, top, left + photo.width * 3 // 4, top + photo.height * 3 // 4)
            size = (w * PATCH_SIZE, h * PATCH_SIZE)
            fitted = photo.resize(size, Image.Resampling.BICUBIC, box if case.frames + len(case.grids) > 2 else None)
            pixels = np.asarray(fitted, dtype=np.float32) / np.float32(127.5) - np.float32(1)
            cut = pixels.reshape(h, PATCH_SIZE, w, PATCH_SIZE, 3).transpose(0, 2, 4, 1, 3)
            items.append(cut.reshape(h * w, -1))
        frames.append(np.concatenate(items))
    return np.stack(frames)
