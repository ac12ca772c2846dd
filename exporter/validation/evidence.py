"""The numbers that a verdict is made from, as plain records without NumPy, so that `verify` can judge them again."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from model.config import MAX_FRAMES, MAX_SIDE

DType = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")

Grids = tuple[tuple[int, int], ...]  # (h, w) in patches of each item

PATCHES_PER_ROW = 4  # two by two patches become one row, whatever the number of frames

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=-]{0,63}")


def check_name(name: str) -> None:
    """Refuse a case or fault name that could not be a tensor key, an XML attribute and a table cell as it is.

    Args:
        name: 1 to 64 letters, digits and ``_ . + = -``.

    Raises:
        ValueError: it has another character or length.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name[:80]!r} is not 1 to 64 letters, digits and _ . + = -")


def _check_error(value: float, what: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what} is {value}, not a finite number from 0 up")


@dataclass(frozen=True, order=True)
class Shape:
    """Sizes of one call: what a TensorRT profile bounds.

    Attributes:
        frames: frames that the items share.
        patches: patches of one frame, summed over the items.
        items: images or clips.
    """

    frames: int
    patches: int
    items: int

    def __post_init__(self) -> None:
        if min(self.frames, self.patches, self.items) < 1:
            raise ValueError(f"the shape {self} has a size below 1")

    def __str__(self) -> str:
        return f"{self.frames} frames, {self.patches} patches, {self.items} items"


@dataclass(frozen=True)
class Profile:
    """One TensorRT optimisation profile.

    Attributes:
        name: for messages.
        min: smallest sizes.
        opt: sizes that the engine is tuned for.
        max: largest sizes.
    """

    name: str
    min: Shape
    opt: Shape
    max: Shape

    def __post_init__(self) -> None:
        check_name(self.name)
        low, middle, high = (dataclasses.astuple(shape) for shape in (self.min, self.opt, self.max))
        if not all(a <= b <= c for a, b, c in zip(low, middle, high, strict=True)):
            raise ValueError(f"profile {self.name} is not ordered min <= opt <= max")


def contains(profile: Profile, shape: Shape) -> bool:
    """Whether a call of these sizes fits the profile."""
    bounds = (dataclasses.astuple(sizes) for sizes in (profile.min, shape, profile.max))
    return all(low <= size <= high for low, size, high in zip(*bounds, strict=True))


def tightest_profile(profiles: Sequence[Profile], shape: Shape) -> int | None:
    """Choose the profile that a call runs in: of those that it fits, the one with the smallest upper bound.

    Args:
        profiles: of the engine.
        shape: of the call.

    Returns:
        Index of the profile, the first of equal ones; None where it fits none.
    """
    fitting = [index for index, profile in enumerate(profiles) if contains(profile, shape)]
    volume = {index: math.prod(dataclasses.astuple(profiles[index].max)) for index in fitting}
    return min(fitting, key=volume.__getitem__, default=None)


@dataclass(frozen=True)
class BackendInfo:
    """What really ran, as the session or the runtime itself says.

    Attributes:
        kind: ``torch``, ``onnxruntime``, ``tensorrt`` or ``tensorrt_rtx``; the runtime's flavour.
        version: of that library.
        device: ``cpu``, ``cuda`` or the name of a GPU.
        providers: ONNX Runtime's providers, from the session; empty elsewhere.
        capability: compute capability of the GPU, such as ``9.0``; None on a CPU.
        emulated: half precision was computed as fp32 between casts.
    """

    kind: str
    version: str
    device: str
    providers: tuple[str, ...] = ()
    capability: str | None = None
    emulated: bool = False

    def is_same_as(self, other: BackendInfo) -> bool:
        """Whether the two would compute the same numbers, so that comparing them shows nothing."""
        mine = (self.kind, self.version, self.device.partition(":")[0], self.capability)
        return mine == (other.kind, other.version, other.device.partition(":")[0], other.capability)

    def __str__(self) -> str:
        extra = f", compute capability {self.capability}" if self.capability else ""
        emulated = ", half precision emulated by casts" if self.emulated else ""
        providers = f" ({', '.join(self.providers)})" if self.providers else ""
        return f"{self.kind} {self.version} on {self.device}{providers}{extra}{emulated}"


@dataclass(frozen=True)
class Errors:
    """The four error metrics, as a floor or as limits. All are ratios.

    Attributes:
        relative_l2: |y - r| / |r| over the whole output.
        worst_token: largest |y_i - r_i| / |r_i| of a row.
        worst_angle: largest sqrt(2 (1 - cos(y_i, r_i))) of a row.
        largest_over_rms: largest |y - r| of an element over the RMS of r.
    """

    relative_l2: float
    worst_token: float
    worst_angle: float
    largest_over_rms: float

    def __post_init__(self) -> None:
        for metric in METRICS:
            _check_error(getattr(self, metric), metric)


METRICS = tuple(field.name for field in dataclasses.fields(Errors))


@dataclass(frozen=True)
class Measured:
    """What was measured on one case. None is "not a finite number", which no limit admits.

    Attributes:
        relative_l2: see `Errors`.
        worst_token: see `Errors`.
        worst_angle: see `Errors`; None where a row of y or r is zero.
        largest_over_rms: see `Errors`.
        norm: |y| / |r| - 1 over the whole output.
        worst_token_norm: |y_i| / |r_i| - 1 of the row where it is farthest from 0.
    """

    relative_l2: float | None
    worst_token: float | None
    worst_angle: float | None
    largest_over_rms: float | None
    norm: float | None
    worst_token_norm: float | None


NOTHING_FINITE = Measured(None, None, None, None, None, None)


@dataclass(frozen=True)
class DirectionScore:
    """How far the error points towards one named wrong model: 0 not at all, 1 all the way.

    Attributes:
        fault: name of the wrong model.
        score: <y - r, d> / <d, d>; None if not a finite number.
        spread: |score| of an honest artifact, measured when the golden set was recorded.
    """

    fault: str
    score: float | None
    spread: float

    def __post_init__(self) -> None:
        check_name(self.fault)
        _check_error(self.spread, f"the spread of {self.fault}")


def check_grids(frames: int, grid_hws: Grids) -> None:
    """Refuse sizes that the graph does not compute.

    Args:
        frames: frames that the items share.
        grid_hws: (h, w) in patches of each item.

    Raises:
        ValueError: no item, an odd side, a side outside 2..512 or frames outside 1..4.
    """
    if not 1 <= frames <= MAX_FRAMES:
        raise ValueError(f"{frames} frames, where 1 to {MAX_FRAMES} are possible")
    if not grid_hws:
        raise ValueError("no item")
    for side in (side for grid in grid_hws for side in grid):
        if side % 2 or not 2 <= side <= MAX_SIDE:
            raise ValueError(f"a side of {side} patches, where even sides of 2 to {MAX_SIDE} are possible")


@dataclass(frozen=True)
class Case:
    """What a golden case and the evidence on it have in common.

    Attributes:
        name: unique in the set.
        kind: photo or noise.
        frames: frames that the items share.
        grid_hws: (h, w) in patches of each item.
        floor: PyTorch's own error in the artifact's dtype on this case.
    """

    name: str
    kind: Literal["photo", "noise"]
    frames: int
    grid_hws: Grids
    floor: Errors

    def __post_init__(self) -> None:
        check_name(self.name)
        check_grids(self.frames, self.grid_hws)

    @property
    def shape(self) -> Shape:
        """Sizes of the call."""
        return Shape(self.frames, sum(h * w for h, w in self.grid_hws), len(self.grid_hws))

    @property
    def rows(self) -> int:
        """Rows of the output."""
        return self.shape.patches // PATCHES_PER_ROW

    @property
    def call(self) -> tuple[int, Grids]:
        """What two inputs of one grid have in common."""
        return self.frames, self.grid_hws


NOT_SELECTED = "not selected"  # note of a case that was left out because the user asked for others


@dataclass(frozen=True)
class CaseEvidence(Case):
    """One golden case and what became of it.

    Attributes:
        status: ``compared``; ``skipped``: not run; ``crashed``: ran and gave no output of the right shape.
        note: why it was skipped, or how it crashed; empty otherwise.
        measured: present exactly when compared.
        directions: score along each wrong model that the golden set keeps for this case.
    """

    status: Literal["compared", "skipped", "crashed"]
    note: str
    measured: Measured | None
    directions: tuple[DirectionScore, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.status == "compared") != (self.measured is not None):
            raise ValueError(f"case {self.name} is {self.status}, which its measured numbers contradict")


@dataclass(frozen=True)
class Sensitivity:
    """How far two inputs of one grid lie apart in the output, as a part of the reference's distance.

    Attributes:
        first: name of one case.
        second: name of the other.
        ratio: |y1 - y2| / |r1 - r2|; None if not a finite number.
    """

    first: str
    second: str
    ratio: float | None


@dataclass(frozen=True)
class Evidence:
    """All that a verdict depends on.

    Attributes:
        dtype: of the artifact and of its golden set.
        limit_scale: what every limit was multiplied by; anything but 1 forbids PASS.
        reference: what recorded the golden set.
        backend: what ran the artifact.
        profiles: profiles of the engine; empty for ONNX.
        cases: every case of the golden set, also those not run.
        sensitivity: one entry per pair of consecutive compared cases of one grid.
    """

    dtype: DType
    limit_scale: float
    reference: BackendInfo
    backend: BackendInfo
    profiles: tuple[Profile, ...]
    cases: tuple[CaseEvidence, ...]
    sensitivity: tuple[Sensitivity, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"the dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if not (math.isfinite(self.limit_scale) and self.limit_scale > 0):
            raise ValueError(f"a limit scale of {self.limit_scale}")
        if len({case.name for case in self.cases}) != len(self.cases):
            raise ValueError("two cases have one name")


def expected_pairs(cases: tuple[CaseEvidence, ...]) -> list[tuple[CaseEvidence, CaseEvidence]]:
    """List the pairs of consecutive compared cases of one grid, in the order of the cases.

    Args:
        cases: cases of a golden set.

    Returns:
        The pairs whose sensitivity is measured.
    """
    last: dict[tuple[int, Grids], CaseEvidence] = {}
    pairs = []
    for case in cases:
        if case.status != "compared":
            continue
        if case.call in last:
            pairs.append((last[case.call], case))
        last[case.call] = case
    return pairs
