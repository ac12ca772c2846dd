"""Reads golden sets; `golden_format` says what they are, `golden_writer` writes them."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.errors import BadInput
from exporter.files import combined_sha256, record_file, sha256_file
from exporter.records import parse_json
from exporter.validation.evidence import DType
from exporter.validation.golden_format import (
    HEADER_BYTES,
    JSON_NAME,
    TENSORS_NAME,
    GoldenCase,
    GoldenHeader,
    layout,
    read_golden_header,
)

Float32 = NDArray[np.float32]


def rounds_exactly(values: Float32, dtype: DType) -> bool:
    """Whether every value is one of the artifact's dtype, so that a backend converts it without loss.

    Args:
        values: fp32 array.
        dtype: the artifact's.

    Returns:
        True if rounding to ``dtype`` changes nothing.
    """
    if dtype == "float32":
        return True
    import ml_dtypes

    target = np.dtype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    with np.errstate(over="ignore"):
        rounded = values.astype(target).astype(np.float32)
    return bool(np.array_equal(rounded, values))


class GoldenSet:
    """A golden set on the disk; arrays are read one at a time, when asked for.

    Attributes:
        folder: where the two files lie.
        header: the content of ``golden.json``.
    """

    def __init__(self, folder: Path, header: GoldenHeader) -> None:
        self.folder = folder
        self.header = header
        self._layout, _ = layout(header.cases, header.width)

    @functools.cached_property
    def sha256(self) -> str:
        """Identity of the set: over both files, as the manifest combines them."""
        return combined_sha256({name: record_file(self.folder / name) for name in (JSON_NAME, TENSORS_NAME)})

    def pixel_values(self, case: GoldenCase) -> Float32:
        """Read the input, [frames, patches, 588]; its values are exact in the set's dtype."""
        values = self._read(f"{case.name}/pixel_values")
        if not rounds_exactly(values, self.header.dtype):
            raise BadInput(f"{self.folder}: the pixels of case {case.name} are not {self.header.dtype} numbers")
        return values

    def grid_hws(self, case: GoldenCase) -> NDArray[np.int64]:
        """Return (h, w) in patches of each item, [items, 2]."""
        return np.array(case.grid_hws, dtype=np.int64)

    def reference(self, case: GoldenCase) -> Float32:
        """Read PyTorch's fp32 output, [rows, width]."""
        return self._read(f"{case.name}/reference")

    def floor_tokens(self, case: GoldenCase) -> Float32:
        """Read the relative error of each row of PyTorch in the set's dtype, [rows]."""
        return self._read(f"{case.name}/floor")

    def direction(self, case: GoldenCase, fault: str) -> Float32:
        """Read the difference that a named wrong model makes, [rows, width]."""
        return self._read(f"{case.name}/direction/{fault}")

    def _read(self, key: str) -> Float32:
        """Read one array; its place is known and the file's size was checked, so no length from the file is used."""
        entry = self._layout[key]
        start, end = entry["data_offsets"]
        path = self.folder / TENSORS_NAME
        try:
            values = np.fromfile(path, dtype="<f4", count=(end - start) // 4, offset=8 + HEADER_BYTES + start)
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
        if values.size * 4 != end - start:
            raise BadInput(f"{path} ends inside {key}; it was cut short while it was being read")
        if not np.isfinite(values).all():
            raise BadInput(f"{path}: {key} is not finite; record the golden set again")
        return values.reshape(entry["shape"]).astype(np.float32, copy=False)


def open_golden(folder: Path, check_hash: bool = True) -> GoldenSet:
    """Open a golden set and refuse one that is not exactly what was recorded.

    Args:
        folder: the folder of ``golden.json`` and ``golden.safetensors``.
        check_hash: hash the arrays; leave it out only where they have just been hashed against a manifest.

    Returns:
        The set; no array has been read.

    Raises:
        BadInput: a file is missing, damaged, of another version, or the two do not belong together.
    """
    header = read_golden_header(folder)
    path = folder / TENSORS_NAME
    expected, data_bytes = layout(header.cases, header.width)
    size = _size_of(path)
    if not size == header.tensors.size == 8 + HEADER_BYTES + data_bytes:
        raise BadInput(
            f"{path} has {size} bytes where {JSON_NAME} records {header.tensors.size} and its cases need "
            f"{8 + HEADER_BYTES + data_bytes}; record the golden set again or fetch an intact copy"
        )
    if _read_header(path) != expected:
        raise BadInput(f"the arrays in {path} are not those that {JSON_NAME} lists; fetch an intact copy")
    if check_hash and sha256_file(path) != header.tensors.sha256:
        raise BadInput(f"{path} has changed since it was recorded (its sha256 differs); fetch an intact copy")
    return GoldenSet(folder, header)


def _size_of(path: Path) -> int:
    if not os.path.isfile(path):
        raise BadInput(f"{path} is missing; record the golden set again or fetch a complete copy")
    return path.stat().st_size


def _read_header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        length, text = file.read(8), file.read(HEADER_BYTES)
    if int.from_bytes(length, "little") != HEADER_BYTES:
        raise BadInput(f"{path} does not start with the header of a golden set; fetch an intact copy")
    return parse_json(text, str(path))
