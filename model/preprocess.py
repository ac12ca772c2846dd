"""Images and clips into the patches that the tower takes, by the rule of each family.

The rule is the hub processors': shrink (never enlarge) with Pillow's bicubic on 8-bit pixels, pad right and bottom with
black to multiples of 28, normalise to -1..1, cut into patches of 14. Two things go beyond those processors: EXIF
orientation is applied, and 16-bit grey is scaled to 8 bits where Pillow's own conversion would clip it to white.
Needs Pillow and NumPy, not torch.
"""

from __future__ import annotations

import contextlib
import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from model.config import FAMILY_DEFAULTS, MAX_FRAMES, PATCH_SIZE, VisionConfig
from model.errors import ImageError
from model.grids import check_grids as check_items
from model.preprocess_rule import PreprocessRule

MERGED_PIXELS = 2 * PATCH_SIZE  # one row of the tower's output stands for 28 by 28 pixels
MAX_PIXELS = 178_956_970  # twice Pillow's MAX_IMAGE_PIXELS, where Pillow refuses too; about 0.7 GB once decoded

ImageSource = Image.Image | Path | str
Pixels = npt.NDArray[np.float32]
Grids = npt.NDArray[np.int64]

# (v/255 - 0.5)/0.5 in float32 for each of the 256 values that a channel can have
_NORMALISED: Pixels = ((np.arange(256, dtype=np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)).astype(
    np.float32
)


# ------------------------------------------------------------------------------------------------------------- sizes


class TargetSize(NamedTuple):
    """What becomes of an image's size: pixels as (width, height), the grid as (rows, columns) of patches."""

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid: tuple[int, int]


def target_size(width: int, height: int, rule: PreprocessRule) -> TargetSize:
    """Size of an image after resizing and after padding, by the NaViT rule of the family.

    Args:
        width: pixels.
        height: pixels.
        rule: the budget and the side limit; for a frame of a clip, the rule of :meth:`PreprocessRule.for_frames`.

    Raises:
        ImageError: a side below 1, or one that Kimi-VL, which has no limit per side, does not take.
    """
    if width < 1 or height < 1:
        raise ImageError(f"an image of {width}x{height} pixels has no pixels to show; use another one")
    scale = _kimi_vl_scale(width, height, rule) if rule.family == "kimi_vl" else _navit_scale(width, height, rule)
    # truncated; the product exceeds a whole side limit by rounding only, so it needs no second bound
    new_w, new_h = max(1, int(width * scale)), max(1, int(height * scale))
    padded = (_round_up(new_w), _round_up(new_h))
    grid = (padded[1] // PATCH_SIZE, padded[0] // PATCH_SIZE)
    if rule.family == "kimi_vl" and max(grid) >= rule.side_limit:
        raise ImageError(
            f"an image of {width}x{height} pixels becomes {grid[0]}x{grid[1]} patches, and kimi_vl takes fewer than "
            f"{rule.side_limit} on a side; crop it or scale it down"
        )
    return TargetSize((new_w, new_h), padded, grid)


def _navit_scale(width: int, height: int, rule: PreprocessRule) -> float:
    patches = max(1, width // PATCH_SIZE) * max(1, height // PATCH_SIZE)
    most = rule.side_limit * PATCH_SIZE
    return min(1.0, math.sqrt(rule.patch_budget / patches), most / width, most / height)


def _kimi_vl_scale(width: int, height: int, rule: PreprocessRule) -> float:
    patches = (width // PATCH_SIZE) * (height // PATCH_SIZE)
    return math.sqrt(rule.patch_budget / patches) if patches > rule.patch_budget else 1.0


def _round_up(side: int) -> int:
    return -(-side // MERGED_PIXELS) * MERGED_PIXELS


# ------------------------------------------------------------------------------------------------------------- files


def load_image(path: Path | str) -> Image.Image:
    """Read an image file as upright 8-bit RGB; of an animation, the first frame.

    Grey, palette and CMYK files are converted by Pillow, 16-bit grey is scaled to 8 bits, an alpha channel is dropped,
    EXIF orientation is applied.

    Raises:
        ImageError: no such file, no image, a damaged one, one above MAX_PIXELS, or a pixel format with no known white.
    """
    return _rgb(_read(path))


def _read(source: ImageSource) -> Image.Image:
    """An upright 8-bit image in the file's own mode."""
    name = _name(source)
    with _pillow_errors(name):
        if isinstance(source, Image.Image):
            return _upright(source, name)
        _check_file(Path(source))
        with Image.open(source) as image:
            return _upright(image, name)


def _name(source: ImageSource) -> str:
    return "image" if isinstance(source, Image.Image) else str(source)


def _check_file(path: Path) -> None:
    if not path.exists():
        raise ImageError(f"{path}: no such file; check the name")
    if not path.is_file():
        raise ImageError(f"{path}: a folder or device, not a file; name an image file")
    if path.stat().st_size == 0:
        raise ImageError(f"{path}: empty file (0 bytes); copy or download it again")


@contextlib.contextmanager
def _pillow_errors(name: str) -> Iterator[None]:
    """Turn what Pillow raises on bad files into one ImageError that names the file."""
    try:
        with warnings.catch_warnings():
            # Pillow warns from half of MAX_PIXELS on; what is accepted here is accepted quietly
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    except ImageError:
        raise
    except UnidentifiedImageError as error:
        raise ImageError(f"{name}: not an image in a format that Pillow reads; convert it to PNG or JPEG") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: too many pixels ({error}); scale it down") from error
    # Pillow's decoders meet damaged data with all of these, not only with OSError; some reasons have several lines
    except (
        OSError,
        SyntaxError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
        struct.error,
    ) as error:
        reason = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
        raise ImageError(f"{name}: cannot be decoded ({reason}); copy or download it again, or convert it") from error


def _upright(image: Image.Image, name: str) -> Image.Image:
    width, height = image.size
    if width * height > MAX_PIXELS:  # the header says so; nothing has been decoded yet
        raise ImageError(f"{name}: {width}x{height} pixels; at most {MAX_PIXELS:,} are read, so scale it down")
    image.load()
    # Pillow 10 gives 16-bit grey PNG files mode I, which elsewhere means 32 bits
    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if image.mode in ("I", "F") and not sixteen:
        raise ImageError(f"{name}: 32-bit pixels (mode {image.mode}) have no fixed white; convert it to 8 bits")
    image = ImageOps.exif_transpose(image)
    if not sixteen:
        return image
    values = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values * 255 + 32767) // 65535).astype(np.uint8))


def _rgb(image: Image.Image) -> Image.Image:
    # Pillow wants palettes with transparent entries to go through RGBA; the colours are the same
    return (image.convert("RGBA") if "transparency" in image.info else image).convert("RGB")


def _resize(image: Image.Image, size: tuple[int, int], chessboard: bool) -> npt.NDArray[np.uint8]:
    """Resized pixels, uint8 [height, width, 3]."""
    if not chessboard:
        return np.asarray(_rgb(image).resize(size, Image.Resampling.BICUBIC))
    # K3's processor resizes in the file's own mode, so Pillow takes the nearest pixel of palette and 1-bit images.
    image = image.convert("RGBA") if image.mode == "PA" else image
    image = image.resize(size, Image.Resampling.BICUBIC)
    if "A" not in image.getbands() and (image.mode == "RGB" or "transparency" not in image.info):
        return np.asarray(image.convert("RGB"))
    return _over_chessboard(np.asarray(image.convert("RGBA"), dtype=np.float32))


def _over_chessboard(rgba: Pixels) -> npt.NDArray[np.uint8]:
    rows, columns = (np.arange(side) // 8 for side in rgba.shape[:2])
    gray = (rows[:, None] + columns) % 2  # the top left square is white
    board = np.where(gray, np.float32(180), np.float32(255))[..., None]
    alpha = rgba[..., 3:] / np.float32(255)
    # float32, and truncated where rounding would be the obvious choice: so does K3's processor
    return (alpha * rgba[..., :3] + (np.float32(1) - alpha) * board).astype(np.uint8)


# ----------------------------------------------------------------------------------------------------------- patches


def preprocess(image: ImageSource, rule: PreprocessRule) -> tuple[Pixels, Grids]:
    """Patches of one image.

    Args:
        image: a file, or an image in memory (its alpha and EXIF orientation are treated as those of a file).
        rule: the family's constants.

    Returns:
        pixel_values, float32 [h*w, 3, 14, 14], rows of the grid first; grid_thw, int64 [3], with t = 1.

    Raises:
        ImageError: see :func:`load_image` and :func:`target_size`.
    """
    return _patches([(_name(image), _read(image))], rule)


def preprocess_clip(frames: Sequence[ImageSource], rule: PreprocessRule) -> tuple[Pixels, Grids]:
    """Patches of one clip, each frame within the budget per frame.

    Args:
        frames: 1 to 4 frames of one size; longer videos are cut by :func:`chunk_frames`.
        rule: the family's constants.

    Returns:
        pixel_values, float32 [t*h*w, 3, 14, 14], frame after frame; grid_thw, int64 [3].

    Raises:
        ImageError: no frame, too many, frames of different sizes, a family without video, or a frame that
            :func:`load_image` refuses.
    """
    rule_each = rule.for_frames(max(1, len(frames)))
    if not 1 <= len(frames) <= rule.max_frames:
        raise ImageError(
            f"a clip of {len(frames)} frames; one item takes 1 to {rule.max_frames}, so cut it into several"
        )
    return _patches([(_name(frame), _read(frame)) for frame in frames], rule_each)


def preprocess_many(images: Sequence[ImageSource], rule: PreprocessRule) -> tuple[Pixels, Grids]:
    """Patches of several images, one after the other.

    Returns:
        pixel_values, float32 [patches, 3, 14, 14]; grid_thws, int64 [images, 3]. Both may be empty.

    Raises:
        ImageError: one of the images cannot be used; the message names it.
    """
    items = [preprocess(image, rule) for image in images]
    pixels = [np.empty((0, 3, PATCH_SIZE, PATCH_SIZE), np.float32), *(values for values, _ in items)]
    return np.concatenate(pixels), np.array([grid for _, grid in items], dtype=np.int64).reshape(-1, 3)


def _patches(frames: Sequence[tuple[str, Image.Image]], rule: PreprocessRule) -> tuple[Pixels, Grids]:
    first, image = frames[0]
    try:
        size = target_size(*image.size, rule)
    except ImageError as error:
        raise ImageError(f"{first}: {error}") from error
    canvas = np.zeros((len(frames), size.padded[1], size.padded[0], 3), dtype=np.uint8)
    for i, (name, frame) in enumerate(frames):
        if frame.size != image.size:
            raise ImageError(
                f"{name}: frame {i} is {_times(frame.size)} pixels, frame 0 {_times(image.size)}; crop them alike"
            )
        with _pillow_errors(name):
            canvas[i, : size.resized[1], : size.resized[0]] = _resize(frame, size.resized, rule.chessboard)
    grid = (len(frames), *size.grid)
    cut = canvas.reshape(grid[0], grid[1], PATCH_SIZE, grid[2], PATCH_SIZE, 3).transpose(0, 1, 3, 5, 2, 4)
    # padding is black before normalising, so it becomes -1 like any black pixel
    return _NORMALISED[cut.reshape(-1, 3, PATCH_SIZE, PATCH_SIZE)], np.array(grid, dtype=np.int64)


def _times(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


# ------------------------------------------------------------------------------------------------------------- video


def sample_frames(frames: int, fps: float, rule: PreprocessRule) -> list[int]:
    """Indices of the frames that a video is reduced to, evenly spaced from the first to the last.

    Args:
        frames: frames of the video.
        fps: its frames per second.
        rule: the family's constants.

    Raises:
        ImageError: no frames, a rate that is no positive number, or a family without video.
    """
    target = min(rule.for_frames(1).sample_fps, fps)
    if frames < 1 or not 0 < fps < math.inf:
        raise ImageError(f"a video of {frames} frames at {fps} frames per second cannot be sampled")
    taken = max(round(frames * target / fps), 1)
    if rule.max_video_frames is not None:
        taken = min(taken, rule.max_video_frames)
    return [int(i) for i in np.linspace(0, frames - 1, taken).round()]


def chunk_frames(indices: Sequence[int]) -> list[list[int]]:
    """Cut sampled frames into items of four; the last may be shorter."""
    return [list(indices[i : i + MAX_FRAMES]) for i in range(0, len(indices), MAX_FRAMES)]


# ------------------------------------------------------------------------------------------------------------- grids


def check_grids(
    grids: npt.ArrayLike,
    patches: int,
    limit: PreprocessRule | VisionConfig,
    *,
    frames: int = 1,
    allow_empty: bool = False,
) -> Grids:
    """Refuse grids that the tower or the graph would compute nonsense from; the rule is model.grids'.

    Args:
        grids: whole numbers, [items, 3] as (t, h, w), or [items, 2] as the graph's (h, w).
        patches: what the grids have to add up to: t*h*w over the items, or h*w, which is axis 1 of the graph's
            ``pixel_values``.
        limit: says how many frames an item may have.
        frames: axis 0 of the graph's ``pixel_values``; only read for (h, w) grids.
        allow_empty: accept zero items.

    Returns:
        The grids as int64.

    Raises:
        ImageError: names the item, its value and what is allowed.
    """
    array = _whole_rows(grids)
    if not len(array) and not allow_empty:
        raise ImageError("grids: no items; pass at least one image")
    # Python's integers: a uint64 that int64 cannot hold is refused and not wrapped
    items: list[list[int]] = array.tolist()
    if array.shape[1] == 2:
        items, patches = [[frames, *item] for item in items], patches * frames
    check_items(items, patches, limit if isinstance(limit, VisionConfig) else FAMILY_DEFAULTS[limit.family])
    return array.astype(np.int64)


def _whole_rows(grids: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
    try:
        array = np.asarray(grids)
    except ValueError as error:
        raise ImageError(
            f"grids: the items differ in length ({error}); expected (t, h, w) or (h, w) for each"
        ) from error
    if array.size == 0 and array.ndim < 2:
        array = np.empty((0, 3), np.int64)  # an empty list has no columns to judge
    if array.ndim != 2 or array.shape[1] not in (2, 3):
        raise ImageError(f"grids: shape {array.shape}; expected [items, 3] as (t, h, w) or [items, 2] as (h, w)")
    if not np.issubdtype(array.dtype, np.integer):
        raise ImageError(f"grids: dtype {array.dtype}; expected whole numbers (int64)")
    return array
