"""Writes golden sets from NumPy arrays, one case at a time, so that a set may be larger than memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from exporter.errors import BadInput
from exporter.files import atomic_directory, record_file, write_text
from exporter.records import encode, to_text
from exporter.validation import golden_format, metrics
from exporter.validation.evidence import BackendInfo, DType, Errors
from exporter.validation.golden import Float32, rounds_exactly
from model.config import PATCH_VALUES

Array = NDArray[Any]


# Relative error of the fp32 reference itself. It stands in y - r and in d alike, and so gives the most honest artifact
# a score of (this / |d|)^2: a wrong model whose difference is rounding noise must not accuse anybody.
REFERENCE_NOISE = 5e-7


@dataclass(frozen=True)
class GoldenOrigin:
    """What a golden set is recorded from and how; see `GoldenHeader` for each field."""

    family: str
    dtype: DType
    width: int
    weights_sha256: str
    config_sha256: str
    recorded_by: BackendInfo
    settings: golden_format.GoldenSettings


def _fp32(values: Array, shape: tuple[int, ...], what: str) -> Float32:
    """Bring an array to fp32 without changing a value, or refuse it."""
    if values.shape != shape:
        raise BadInput(f"{what} has shape {values.shape}, expected {shape}")
    result = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(result).all():
        raise BadInput(f"{what} is not finite, so nothing can be compared with it")
    return result


class GoldenWriter:
    """Takes the cases of one golden set; made by `write_golden`."""

    def __init__(self, origin: GoldenOrigin, file: BinaryIO) -> None:
        self.origin = origin
        self.cases: list[golden_format.GoldenCase] = []
        self._file = file
        self._inputs = hashlib.sha256(origin.weights_sha256.encode())
        self._inputs.update(json.dumps(encode(origin.settings), sort_keys=True).encode())
        file.write(bytes(8 + golden_format.HEADER_BYTES))  # the header is known when the last case is

    @property
    def inputs_sha256(self) -> str:
        """Hash over weights, settings and the inputs added so far."""
        return self._inputs.hexdigest()

    def add(
        self,
        name: str,
        kind: Literal["photo", "noise"],
        *,
        grid_hws: Iterable[tuple[int, int]],
        pixel_values: Array,
        reference: Array,
        native: Array | None = None,
        wrong_outputs: Iterable[tuple[str, Array]] = (),
        spreads: Mapping[str, float] | None = None,
    ) -> golden_format.GoldenCase:
        """Add one case.

        Args:
            name: unique in the set.
            kind: photo or noise.
            grid_hws: (h, w) in patches of each item.
            pixel_values: input, already rounded to the artifact's dtype, [frames, patches, 588].
            reference: PyTorch's fp32 output of exactly these pixels, [patches / 4, width].
            native: PyTorch's output in the artifact's dtype, same shape; for fp32 another honest fp32 run, or None.
            wrong_outputs: (name, fp32 output) of each wrong model to keep for this case; a generator is asked for one
                at a time.
            spreads: |score| of further honest runs by wrong model; the larger of it and that of ``native`` is kept.

        Returns:
            The case as it will stand in ``golden.json``.

        Raises:
            BadInput: a shape is wrong, a value not finite, the pixels are not rounded, or no floor exists.
            ValueError: a name is taken or not allowed.
        """
        if name in {case.name for case in self.cases}:
            raise ValueError(f"two cases are called {name}")
        grids = tuple((int(h), int(w)) for h, w in grid_hws)
        frames = int(pixel_values.shape[0])
        no_error = Errors(0.0, 0.0, 0.0, 0.0)
        draft = golden_format.GoldenCase(name, kind, frames, grids, no_error, (), ())
        pixels = _fp32(pixel_values, (frames, draft.shape.patches, PATCH_VALUES), f"pixel_values of {name}")
        if not rounds_exactly(pixels, self.origin.dtype):
            raise BadInput(
                f"pixel_values of {name} are not rounded to {self.origin.dtype}; round before running PyTorch"
            )
        right = _fp32(reference, (draft.rows, self.origin.width), f"the reference of {name}")
        own = self._native(native, right, name)
        floor = metrics.floor_of(own, right)
        self._write(pixels, right, metrics.token_errors(own, right))
        directions, blind_to = self._add_directions(name, right, own, floor.relative_l2, wrong_outputs, spreads or {})
        case = golden_format.GoldenCase(name, kind, frames, grids, floor, tuple(directions), tuple(blind_to))
        self._inputs.update(json.dumps([name, frames, grids]).encode())
        self._inputs.update(pixels.tobytes())
        self.cases.append(case)
        return case

    def _native(self, native: Array | None, right: Float32, name: str) -> Float32:
        if native is not None:
            return _fp32(native, right.shape, f"PyTorch's {self.origin.dtype} output of {name}")
        if self.origin.dtype != "float32":
            raise BadInput(f"case {name} lacks PyTorch's output in {self.origin.dtype}, so it has no floor")
        return right

    def _add_directions(
        self,
        name: str,
        right: Float32,
        own: Float32,
        floor_l2: float,
        wrong_outputs: Iterable[tuple[str, Array]],
        spreads: Mapping[str, float],
    ) -> tuple[list[golden_format.RecordedDirection], list[str]]:
        directions: list[golden_format.RecordedDirection] = []
        blind_to: list[str] = []
        for fault, wrong in wrong_outputs:
            output = _fp32(wrong, right.shape, f"the output of wrong model {fault} for {name}")
            size = metrics.relative_distance(output, right)
            direction = output - right
            score = metrics.direction_score(own, right, direction)
            scatter = metrics.score_scatter(own, right, direction)
            if not size or score is None or scatter is None:
                blind_to.append(fault)
                continue
            # One honest run may lie near 0 by luck, so what it is expected to scatter counts too: estimated from its
            # rows, and at least that of an error without a preferred direction.
            white = floor_l2 / size / math.sqrt(right.size)
            spread = max(abs(score), scatter, white, float(spreads.get(fault, 0.0)), (REFERENCE_NOISE / size) ** 2)
            directions.append(golden_format.RecordedDirection(fault, spread, size))
            self._write(direction)
        return directions, blind_to

    def _write(self, *arrays: Array) -> None:
        for array in arrays:
            self._file.write(np.ascontiguousarray(array, dtype="<f4").data)

    def finish(self) -> None:
        """Put the header in front of the arrays."""
        self._file.seek(0)
        self._file.write(golden_format.encode_header(self.cases, self.origin.width))


@contextlib.contextmanager
def write_golden(folder: Path, origin: GoldenOrigin, force: bool = False) -> Iterator[GoldenWriter]:
    """Write a golden set; the folder appears whole when the block ends well, and not at all otherwise.

    Args:
        folder: the folder that shall appear.
        origin: what the set is recorded from.
        force: replace an existing golden set.

    Yields:
        The writer, whose `add` takes the cases.
    """
    with atomic_directory(folder, force) as temporary:
        with open(temporary / golden_format.TENSORS_NAME, "xb") as file:
            writer = GoldenWriter(origin, file)
            yield writer
            writer.finish()
        header = golden_format.GoldenHeader(
            schema_version=golden_format.SCHEMA_VERSION,
            inputs_sha256=writer.inputs_sha256,
            tensors=record_file(temporary / golden_format.TENSORS_NAME),
            cases=tuple(writer.cases),
            **{key: getattr(origin, key) for key in GoldenOrigin.__dataclass_fields__},
        )
        write_text(temporary / golden_format.JSON_NAME, to_text(header))
