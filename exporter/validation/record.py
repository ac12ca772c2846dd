"""Records golden sets: inputs, the live tower's fp32 output, its own error in a dtype, and wrong models."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from exporter.errors import MissingRequirement, Usage
from exporter.validation.backends import cuda_capability
from exporter.validation.evidence import BackendInfo, DType, Grids
from exporter.validation.golden_format import PATCH_VALUES, GoldenSettings
from exporter.validation.golden_writer import GoldenOrigin, GoldenWriter, write_golden
from exporter.validation.wrong_models import WrongModel, wrong_models_for
from model.config import MAX_SIDE, PATCH_SIZE, VisionConfig
from model.graph import GraphForm, GraphTower
from model.preprocess import load_image, preprocess
from model.preprocess_rule import RULES, PreprocessRule, load_rule
from model.tower import KimiVision, build_tower
from model.weights import VisionWeights

Pixels = NDArray[np.float32]
Progress = Callable[[str, int, int], None]

# Extreme ratios, growing and shrinking, the table's own size (64x64), a photo's 36x46, and the smallest.
DEFAULT_GRIDS = ((2, 2), (6, 512), (512, 6), (36, 46), (46, 36), (64, 64), (16, 16))
# Directions need 300 patches, where an honest error is nearly orthogonal to every one; more would only cost time.
DIRECTION_GRIDS = ((16, 20), (20, 16))
CLIP_FRAMES, CLIP_GRID = 4, (10, 12)
SEVERAL: tuple[Grids, ...] = (((4, 6), (16, 18), (2, 2)), ((16, 4), (2, 6)))


@dataclass(frozen=True)
class GoldenOptions:
    """What to record.

    Attributes:
        dtype: of the artifacts that the set shall judge.
        packing: ``packed`` adds calls of several items.
        images: photos to record at their own grids, beside the default grids.
        sizes: further grids (h, w) in patches.
        max_patches: leave out default grids with more patches than this.
        device: ``cpu`` or ``cuda``.
        seed: of the noise.
    """

    dtype: DType
    packing: Literal["single", "packed"] = "single"
    images: tuple[Path, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
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
        return (self.kind == "noise" and self.grids in [(grid,) for grid in DIRECTION_GRIDS]) or (
            self.kind == "noise" and (self.frames > 1 or self.grids == SEVERAL[0])
        )


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


def plan_cases(config: VisionConfig, options: GoldenOptions, rule: PreprocessRule) -> list[PlannedCase]:
    """List the cases of a golden set: every grid with a photo and with noise.

    Raises:
        Usage: a size that is asked for is odd or out of range, or nothing would be left.
        ImageError: a photo cannot be read.
    """
    photo = options.images[0] if options.images else default_photo()
    calls: list[tuple[str, int, Grids]] = []
    usual = [(h, w) for h, w in (*DEFAULT_GRIDS, *DIRECTION_GRIDS) if h * w <= options.max_patches]
    calls += [(f"{h}x{w}", 1, ((h, w),)) for h, w in usual]
    for h, w in options.sizes:
        if not all(2 <= side <= MAX_SIDE and side % 2 == 0 for side in (h, w)):
            raise Usage(f"--golden-sizes {h}x{w}: sides must be even, 2 to {MAX_SIDE} patches")
        calls.append((f"{h}x{w}", 1, ((h, w),)))
    if config.max_frames >= CLIP_FRAMES and math.prod(CLIP_GRID) <= options.max_patches:
        calls.append((f"clip{CLIP_FRAMES}-{CLIP_GRID[0]}x{CLIP_GRID[1]}", CLIP_FRAMES, (CLIP_GRID,)))
    if options.packing == "packed":
        for grids in SEVERAL:
            if sum(h * w for h, w in grids) <= options.max_patches:
                calls.append((f"items{len(grids)}-{grids[0][0]}x{grids[0][1]}", 1, grids))
    cases = _photo_cases(options, rule)
    for name, frames, grids in dict.fromkeys(calls):
        cases.append(PlannedCase(f"{name}-photo", "photo", frames, grids, photo))
        cases.append(PlannedCase(f"{name}-noise", "noise", frames, grids))
    return cases


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
        digest = hashlib.sha256(f"{options.seed} {case.name}".encode()).digest()
        noise = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "little")))
        values = noise.random((case.frames, case.patches, PATCH_VALUES), dtype=np.float32) * 2 - 1
    rounded: Pixels = torch.from_numpy(values).to(getattr(torch, options.dtype)).to(torch.float32).numpy()
    return rounded


def _fitted_photo(case: PlannedCase, photo: Image.Image) -> Pixels:
    """Fit a photo to the grid of each item; later frames and items see it moved, so that no two are alike."""
    frames = []
    for frame in range(case.frames):
        items = []
        for index, (h, w) in enumerate(case.grids):
            left, top = (frame + 2 * index) * photo.width // 24, (frame + index) * photo.height // 24
            box = (left, top, left + photo.width * 3 // 4, top + photo.height * 3 // 4)
            size = (w * PATCH_SIZE, h * PATCH_SIZE)
            fitted = photo.resize(size, Image.Resampling.BICUBIC, box if case.frames + len(case.grids) > 2 else None)
            pixels = np.asarray(fitted, dtype=np.float32) / np.float32(127.5) - np.float32(1)
            cut = pixels.reshape(h, PATCH_SIZE, w, PATCH_SIZE, 3).transpose(0, 2, 4, 1, 3)
            items.append(cut.reshape(h * w, -1))
        frames.append(np.concatenate(items))
    return np.stack(frames)


# ------------------------------------------------------------------------------------------------- running the tower


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Forbid TF32, which would put its own error into the reference."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = False, False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def describe_torch(device: str) -> BackendInfo:
    """Say what PyTorch runs on.

    Raises:
        MissingRequirement: the device is not there.
    """
    if device == "cpu":
        return BackendInfo("torch", str(torch.__version__), "cpu")
    if not torch.cuda.is_available():
        raise MissingRequirement(f"--device {device}: PyTorch {torch.__version__} sees no CUDA GPU; use --device cpu")
    return BackendInfo(
        "torch", str(torch.__version__), f"cuda: {torch.cuda.get_device_name()}", capability=cuda_capability()
    )


@torch.inference_mode()
def run_live(tower: KimiVision, pixels: Pixels, grids: Sequence[tuple[int, int]]) -> Pixels:
    """Run the live tower on one call of the graph's interface.

    Args:
        tower: in any dtype, on any device.
        pixels: [frames, patches, 588] fp32.
        grids: (h, w) of each item.

    Returns:
        [patches/4, text_hidden_size] fp32.
    """
    frames = pixels.shape[0]
    areas = [h * w for h, w in grids]
    # the graph's patches are frame-major over all items, the live tower's item by item
    items = torch.split(torch.from_numpy(pixels), areas, dim=1)
    flat = torch.cat([item.flatten(0, 1) for item in items])
    thws = torch.tensor([(frames, h, w) for h, w in grids])
    rows: Pixels = torch.cat(tower(flat, thws)).to(torch.float32).cpu().numpy()
    return rows


@torch.inference_mode()
def run_wrong(tower: KimiVision, wrong: WrongModel, pixels: Pixels, grids: Sequence[tuple[int, int]]) -> Pixels:
    """Run a wrong model in the exported form, where the mistakes are made; shapes as in :func:`run_live`."""
    form = GraphForm("plain", "plain", "packed" if len(grids) > 1 else "single")
    values = torch.from_numpy(pixels).to(device=tower.device, dtype=tower.dtype)
    with wrong.substituted():
        graph = GraphTower(wrong.tower(tower), form)
        rows: Pixels = graph(values, torch.tensor(grids, device=tower.device)).to(torch.float32).cpu().numpy()
    return rows


def check_options(weights: VisionWeights, options: GoldenOptions) -> None:
    """Raise what :func:`record_golden` would raise about its options, before anything long begins."""
    plan_cases(weights.config, options, preprocess_rule(weights))
    describe_torch(options.device)


def record_golden(
    weights: VisionWeights,
    options: GoldenOptions,
    folder: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Record a golden set.

    Args:
        weights: an opened source.
        options: what to record.
        folder: appears whole.
        force: replace an existing golden set.
        progress: called before each case.

    Returns:
        Number of cases.

    Raises:
        Usage, ImageError, MissingRequirement: see :func:`plan_cases` and :func:`describe_torch`.
        BadInput: an output is not finite.
    """
    config, device = weights.config, options.device
    rule = preprocess_rule(weights)
    cases = plan_cases(config, options, rule)
    origin = GoldenOrigin(
        family=config.family,
        dtype=options.dtype,
        width=config.text_hidden_size,
        weights_sha256=weights.sha256(),
        config_sha256=config.sha256,
        recorded_by=describe_torch(device),
        settings=GoldenSettings(False, torch.get_num_threads(), options.seed, {"packing": options.packing}),
    )
    with exact_arithmetic(), write_golden(folder, origin, force) as writer:
        reference = build_tower(weights, dtype=torch.float32, device=device)
        native = None
        if options.dtype != "float32":
            native = build_tower(weights, dtype=getattr(torch, options.dtype), device=device)
        for number, case in enumerate(cases, 1):
            if progress is not None:
                progress(case.name, number, len(cases))
            _record_case(writer, case, case_pixels(case, options, rule), reference, native)
    return len(cases)


def _record_case(
    writer: GoldenWriter, case: PlannedCase, pixels: Pixels, reference: KimiVision, native: KimiVision | None
) -> None:
    def wrong_outputs() -> Iterator[tuple[str, NDArray[Any]]]:
        for wrong in wrong_models_for(reference.config, frames=case.frames, items=len(case.grids)):
            # what an image shows is recorded on images; other calls add only what needs them
            if wrong.needs == "any" and (case.frames > 1 or len(case.grids) > 1):
                continue
            yield wrong.name, run_wrong(reference, wrong, pixels, case.grids)

    writer.add(
        case.name,
        case.kind,
        grid_hws=case.grids,
        pixel_values=pixels,
        reference=run_live(reference, pixels, case.grids),
        native=None if native is None else run_live(native, pixels, case.grids),
        wrong_outputs=wrong_outputs() if case.keeps_directions else (),
    )
