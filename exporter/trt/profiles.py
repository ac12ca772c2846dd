"""Optimisation profiles: from options or from a golden set, what they cover, and the memory that they ask for."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from exporter.errors import Usage
from exporter.validation.evidence import Profile, Shape, tightest_profile
from model.config import MAX_FRAMES

LARGEST_DEFAULT = 4096  # patches; more on request
LARGEST = 16384
_USUAL = Profile("images", Shape(1, 4, 1), Shape(1, 1024, 1), Shape(1, LARGEST_DEFAULT, 1))


def parse_range(text: str, option: str, least: int, most: int) -> tuple[int, int, int]:
    """Parse ``MIN:OPT:MAX``.

    Args:
        text: as the user wrote it.
        option: for messages.
        least: smallest value that is possible.
        most: largest.

    Raises:
        Usage: it is something else, not in order, or out of range.
    """
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9}):(\d{1,9})", text.strip())
    if match is None:
        raise Usage(f"{option} {text}: expected MIN:OPT:MAX, such as 4:1024:4096")
    low, middle, high = (int(part) for part in match.groups())
    if not least <= low <= middle <= high <= most:
        raise Usage(f"{option} {text}: expected {least} <= MIN <= OPT <= MAX <= {most}")
    return low, middle, high


def parse_profiles(
    texts: Sequence[str], frames: str | None, items: str | None, *, max_frames: int, packed: bool
) -> tuple[Profile, ...]:
    """Make the profiles that the user asked for.

    Args:
        texts: ``MIN:OPT:MAX`` in patches of one frame, summed over the items; one per profile.
        frames: largest number of frames, or MIN:OPT:MAX; None for one.
        items: likewise, of items of one call.
        max_frames: that the model takes.
        packed: whether the graph takes several items.

    Raises:
        Usage: a range is wrong, or the graph does not take what is asked.
    """
    low_t, middle_t, high_t = _bound(frames, "--frames", min(max_frames, MAX_FRAMES))
    low_i, middle_i, high_i = _bound(items, "--items", 256 if packed else 1)
    profiles = []
    for number, text in enumerate(texts):
        low, middle, high = parse_range(text, "--profile", 4, LARGEST)
        for size in (low, middle, high):
            if size % 4:
                raise Usage(f"--profile {text}: {size} is no number of patches, which are squares of 2x2")
        if high < 4 * high_i:
            raise Usage(f"--profile {text}: {high} patches do not hold {high_i} items of 2x2 patches")
        name = "profile" if len(texts) == 1 else f"profile{number}"
        low, middle = max(low, 4 * low_i), max(middle, 4 * middle_i)
        profiles.append(
            Profile(name, Shape(low_t, low, low_i), Shape(middle_t, middle, middle_i), Shape(high_t, high, high_i))
        )
    if len(set(profiles)) != len(profiles) or len({(p.min, p.max) for p in profiles}) != len(profiles):
        raise Usage("--profile: two profiles have the same bounds")
    return tuple(profiles)


def _bound(text: str | None, option: str, most: int) -> tuple[int, int, int]:
    if text is None:
        return 1, 1, 1
    if text.strip().isdigit():
        text = f"1:1:{text.strip()}"
    if most == 1 and text != "1:1:1":
        what = "frame; --frames" if option == "--frames" else "item a call (export with --packing packed); --items"
        raise Usage(f"this graph takes one {what} {text} cannot be built")
    return parse_range(text, option, 1, most)


def default_profiles(shapes: Iterable[Shape], largest: int = LARGEST_DEFAULT) -> tuple[Profile, ...]:
    """Make the profiles whose corners a golden set covers: images, clips, and several items where it has any.

    No call of one group fits the profile of another, so that each case runs in the profile whose corner it is.

    Args:
        shapes: of the golden cases; empty where there is no golden set.
        largest: patches of one frame; larger cases are left to ``--profile``.

    Returns:
        At least one profile.
    """
    fitting = sorted(shape for shape in set(shapes) if shape.patches <= largest)
    images = [shape for shape in fitting if shape.frames == 1 and shape.items == 1]
    clips = [shape for shape in fitting if shape.frames > 1 and shape.items == 1]
    several = [shape for shape in fitting if shape.items > 1]
    groups = (("images", images), ("clips", clips), ("packed", several))
    return tuple(_profile(name, group) for name, group in groups if group) or (_USUAL,)


def _profile(name: str, shapes: Sequence[Shape]) -> Profile:
    """Span ``shapes``; tune for that which is nearest, as a ratio, to half the largest."""
    low = Shape(*(min(getattr(s, key) for s in shapes) for key in ("frames", "patches", "items")))
    high = Shape(*(max(getattr(s, key) for s in shapes) for key in ("frames", "patches", "items")))
    middle = min(shapes, key=lambda shape: abs(math.log(2 * tokens(shape) / tokens(high))))
    return Profile(name, low, middle, high)


def tokens(shape: Shape) -> int:
    """Tokens of one call: patches of all frames."""
    return shape.frames * shape.patches


def describe(profile: Profile) -> str:
    """Write a profile for people."""
    parts = []
    for key in ("patches", "frames", "items"):
        low, middle, high = (getattr(shape, key) for shape in (profile.min, profile.opt, profile.max))
        if key == "patches" or high > 1:
            parts.append(f"{low} to {high} {key} (tuned for {middle})" if low < high else f"{high} {key}")
    return f"{profile.name}: {', '.join(parts)}"


def uncovered(profiles: Sequence[Profile], shapes: Iterable[Shape]) -> list[str]:
    """List the corners of profiles that no golden case will run in, as text.

    Args:
        profiles: of the engine; a call that fits several runs in the tightest.
        shapes: of the golden cases.
    """
    have = set(shapes)
    lines = []
    for profile in profiles:
        for corner in ("min", "opt", "max"):
            shape = getattr(profile, corner)
            taker = profiles[tightest(profiles, shape)]
            if shape not in have:
                lines.append(f"the {corner} of profile {profile.name} ({shape}) has no golden case")
            elif taker is not profile:
                lines.append(f"the {corner} of profile {profile.name} ({shape}) runs in {taker.name}, which is tighter")
    return lines


def tightest(profiles: Sequence[Profile], shape: Shape) -> int:
    """Choose the profile that a call runs in; see `exporter.validation.evidence.tightest_profile`.

    Args:
        profiles: of the engine.
        shape: of the call.

    Returns:
        Index of the profile.

    Raises:
        ValueError: names the axis, its value and the allowed ranges.
    """
    found = tightest_profile(profiles, shape)
    if found is None:
        raise ValueError(_misfit(profiles, shape))
    return found


def _misfit(profiles: Sequence[Profile], shape: Shape) -> str:
    for key in ("frames", "patches", "items"):
        value = getattr(shape, key)
        ranges = [(getattr(p.min, key), getattr(p.max, key)) for p in profiles]
        if not any(low <= value <= high for low, high in ranges):
            allowed = ", ".join(f"{low} to {high} ({p.name})" for (low, high), p in zip(ranges, profiles, strict=True))
            return f"{value} {key}, where this engine takes {allowed}"
    allowed = "; ".join(f"{p.name}: {p.min} up to {p.max}" for p in profiles)
    return f"{shape} together fit no profile: {allowed}"


def attention_bytes(profiles: Sequence[Profile], heads: int, item_bytes: int, *, packed: bool) -> int:
    """Memory that attention needs at the largest profile if no kernel fuses it.

    Two arrays [heads, tokens, tokens] live at once (logits and probabilities), beside the mask of a packed graph.

    Args:
        profiles: of the engine.
        heads: attention heads.
        item_bytes: of one logit.
        packed: whether the graph masks by item.

    Returns:
        Bytes.
    """
    most = max(tokens(profile.max) for profile in profiles)
    return most * most * (2 * heads + (1 if packed else 0)) * item_bytes


def gibibytes(count: float) -> str:
    """Write a number of bytes for people, with three digits."""
    power = min(max(int(math.log(max(count, 1), 1024)), 0), 4)
    return f"{count / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
