"""The header of a safetensors file, checked before any tensor is looked at.

Format: eight bytes with the header's length (little-endian), that many bytes of JSON, then the data, which the tensors
fill in some order without holes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from model.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_AGAIN = "download the file again"


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        file: the safetensors file.
        dtype: the format's spelling, such as ``BF16``.
        shape: dimensions as the header gives them; only their type has been checked.
        offset: bytes from the start of the file.
        size: bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_header(path: Path, reason: str = "the checkpoint is incomplete") -> dict[str, TensorEntry]:
    """Read and check the header of one file; memory is bounded by the size of the file.

    Args:
        path: the file.
        reason: why the file should exist, for the message when it does not.

    Returns:
        The file's tensors, by name.

    Raises:
        CheckpointError: the file is missing, no regular file, truncated, or not in the format.
    """
    try:
        text, data_start, file_size = _read_text(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; {reason}, so download it") from None
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: cannot be read ({error}); check its name and permissions") from error
    try:
        document = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({short(str(error))}); {_AGAIN}") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: the header is no JSON object; {_AGAIN}")
    document.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, data_start) for name, value in document.items()}
    _check_layout(path, list(entries.values()), data_start, file_size)
    return entries


def short(value: object, limit: int = 80) -> str:
    """A value from a file as it can stand in one line of an error message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _read_text(path: Path) -> tuple[bytes, int, int]:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
        raise CheckpointError(f"{path}: not a regular file; put the safetensors file there")
    with path.open("rb") as file:
        file_size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8:
            raise CheckpointError(f"{path}: truncated, it has {file_size} bytes and no header; {_AGAIN}")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: not a safetensors file: its first 8 bytes give a header of {length} bytes, "
                f"more than the format's {MAX_HEADER_BYTES}; {_AGAIN}"
            )
        if length > file_size - 8:
            raise CheckpointError(
                f"{path}: truncated, the header should have {length} bytes and the file has {file_size}; {_AGAIN}"
            )
        return file.read(length), 8 + length, file_size


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands in it twice")
    return result


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    if isinstance(value, dict):
        dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
        if isinstance(dtype, str) and _whole(shape) and _whole(offsets) and len(offsets) == 2:
            begin, end = offsets
            if begin <= end:
                return TensorEntry(path, dtype, tuple(shape), data_start + begin, end - begin)
    raise CheckpointError(f"{path}: the header's entry for {short(name)} is {short(value)}; {_AGAIN}")


def _whole(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(path: Path, entries: list[TensorEntry], position: int, file_size: int) -> None:
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.size)):
        if entry.offset != position:
            raise CheckpointError(
                f"{path}: the header's tensors overlap or leave holes at byte {entry.offset}; {_AGAIN}"
            )
        position += entry.size
    if position > file_size:
        raise CheckpointError(f"{path}: truncated, it should have {position} bytes and has {file_size}; {_AGAIN}")
    if position < file_size:
        raise CheckpointError(f"{path}: {file_size - position} bytes too long for its header; {_AGAIN}")
