"""The format of golden sets: recorded inputs and fp32 outputs of PyTorch that an artifact is compared with.

``golden.json`` lists the cases and says how they were recorded; ``golden.safetensors`` holds the arrays, all fp32, in
the order of the list. Names, shapes and offsets of the arrays follow from the list (`layout`), so the reader demands
exactly that header and cannot be led anywhere else by a damaged one. Arrays of a case:

==========================  ============================  ===========================================================
``CASE/pixel_values``       [frames, patches, 588]        input, already rounded to the artifact's dtype
``CASE/reference``          [patches / 4, width]          fp32 output of PyTorch
``CASE/floor``              [patches / 4]                 each row's relative error of PyTorch in the artifact's dtype
``CASE/direction/FAULT``    [patches / 4, width]          fp32 output of a named wrong model, minus the reference
==========================  ============================  ===========================================================

Of PyTorch's output in the artifact's dtype only its errors are kept, not the output itself: nothing that is judged
needs it, and it would double the set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.errors import BadInput
from exporter.files import FileRecord, check_sha256
from exporter.records import read_record
from exporter.validation.evidence import BackendInfo, Case, DType, check_name
from model.config import PATCH_VALUES

SCHEMA_VERSION = 1
JSON_NAME = "golden.json"
TENSORS_NAME = "golden.safetensors"
HEADER_BYTES = 256 << 10  # reserved, so that arrays are written as they come; the format allows spaces after the JSON


@dataclass(frozen=True)
class GoldenSettings:
    """How the reference was computed; outputs are bit-equal only under the same settings on one machine.

    Attributes:
        tf32: whether TF32 was allowed; a set recorded with it is refused.
        threads: CPU threads.
        seed: of everything random in the inputs.
        other: anything else worth recording.
    """

    tf32: bool
    threads: int
    seed: int
    other: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.tf32:
            raise ValueError("the reference was computed with TF32; record it with TF32 off")


@dataclass(frozen=True)
class RecordedDirection:
    """One wrong model's direction.

    Attributes:
        fault: name of the wrong model.
        spread: |score| that an honest artifact may show: the largest seen, or the standard deviation expected.
        size: |d| / |r|, how far the wrong model is from the right one.
    """

    fault: str
    spread: float
    size: float

    def __post_init__(self) -> None:
        check_name(self.fault)
        if not (0 <= self.spread < float("inf") and 0 < self.size < float("inf")):
            raise ValueError(f"direction {self.fault} has spread {self.spread} and size {self.size}")


@dataclass(frozen=True)
class GoldenCase(Case):
    """One case.

    Attributes:
        directions: wrong models whose difference from the reference is kept for this case.
        blind_to: wrong models that compute exactly the reference on this input, so that it cannot show them.
    """

    directions: tuple[RecordedDirection, ...]
    blind_to: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        faults = [direction.fault for direction in self.directions]
        if len(set(faults)) != len(faults):
            raise ValueError(f"case {self.name} has two directions of one name")


@dataclass(frozen=True)
class GoldenHeader:
    """The content of ``golden.json``.

    Attributes:
        schema_version: of this file.
        family: of the tower.
        dtype: of the artifacts that this set judges.
        width: columns of the output.
        weights_sha256: over the vision tensors, as in the manifest.
        config_sha256: of the tower's config, as in the manifest.
        recorded_by: what computed the reference.
        settings: how.
        inputs_sha256: over weights, settings, names, sizes and pixels of all cases.
        tensors: hash and size of ``golden.safetensors``.
        cases: in the order of the arrays.
    """

    schema_version: int
    family: str
    dtype: DType
    width: int
    weights_sha256: str
    config_sha256: str
    recorded_by: BackendInfo
    settings: GoldenSettings
    inputs_sha256: str
    tensors: FileRecord
    cases: tuple[GoldenCase, ...]

    def __post_init__(self) -> None:
        for digest in (self.weights_sha256, self.config_sha256, self.inputs_sha256):
            check_sha256(digest)
        if self.width < 1:
            raise ValueError(f"a width of {self.width}")
        if len({case.name for case in self.cases}) != len(self.cases):
            raise ValueError("two cases have one name")


def shapes_of(case: GoldenCase, width: int) -> dict[str, tuple[int, ...]]:
    """List the arrays of a case in the order in which they are stored.

    Args:
        case: the case.
        width: columns of the output.

    Returns:
        Shape by key.
    """
    output = (case.rows, width)
    shapes: dict[str, tuple[int, ...]] = {
        f"{case.name}/pixel_values": (case.frames, case.shape.patches, PATCH_VALUES),
        f"{case.name}/reference": output,
        f"{case.name}/floor": (case.rows,),
    }
    return shapes | {f"{case.name}/direction/{direction.fault}": output for direction in case.directions}


def layout(cases: Sequence[GoldenCase], width: int) -> tuple[dict[str, Any], int]:
    """Compute the only safetensors header that belongs to a list of cases.

    Args:
        cases: the cases, in order.
        width: columns of the output.

    Returns:
        The header and the number of data bytes behind it.
    """
    header: dict[str, Any] = {"__metadata__": {"format": f"kvit-golden-{SCHEMA_VERSION}"}}
    position = 0
    for case in cases:
        for key, shape in shapes_of(case, width).items():
            size = 4
            for dimension in shape:
                size *= dimension
            header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
            position += size
    return header, position


def encode_header(cases: Sequence[GoldenCase], width: int) -> bytes:
    """Write the start of ``golden.safetensors``: the header's length and the header, padded with spaces.

    Args:
        cases: the cases, in order.
        width: columns of the output.

    Returns:
        ``8 + HEADER_BYTES`` bytes.

    Raises:
        BadInput: there are more cases than fit.
    """
    text = json.dumps(layout(cases, width)[0], separators=(",", ":")).encode("ascii")
    if len(text) > HEADER_BYTES:
        raise BadInput(f"{len(cases)} cases are too many for one golden set; leave some sizes out")
    return HEADER_BYTES.to_bytes(8, "little") + text.ljust(HEADER_BYTES)


def read_golden_header(folder: Path) -> GoldenHeader:
    """Read ``golden.json``.

    Args:
        folder: the golden set's folder.

    Returns:
        Its content; the arrays have not been looked at.

    Raises:
        BadInput: it is missing, damaged or of another schema version.
    """
    return read_record(GoldenHeader, folder / JSON_NAME, SCHEMA_VERSION)
