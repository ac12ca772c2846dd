"""Reads ONNX models without their weights, and refuses weights outside the folder or beyond the end of their file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from exporter.errors import BadInput, MissingRequirement, one_line

if TYPE_CHECKING:
    import onnx

MAX_MODEL_BYTES = 1 << 31  # protobuf reads no larger message


def check_model_file(path: Path) -> None:
    """Refuse what cannot be a model file before it is opened: reading a pipe would wait, a huge file fill memory.

    Raises:
        BadInput: it is missing, not a regular file, or larger than a model can be.
    """
    size = _size_of(path, f"{path} is not a readable ONNX model")
    if size >= MAX_MODEL_BYTES:
        raise BadInput(f"{path} is not a readable ONNX model: it has {size} bytes, a model has less than 2 GiB")


def read_model(path: Path) -> onnx.ModelProto:
    """Read a model without its weights.

    Raises:
        BadInput: it is missing, no regular file, too large or no ONNX model.
        MissingRequirement: onnx is not installed.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingRequirement("reading an ONNX model needs onnx; install kvit-export[cpu] or [gpu]") from error
    check_model_file(path)
    try:
        return onnx.load_model(str(path), load_external_data=False)
    except (OSError, ValueError, DecodeError) as error:
        raise BadInput(f"{path} is not a readable ONNX model: {one_line(str(error))[:200]}") from error


def check_external_data(path: Path, model: onnx.ModelProto) -> None:
    """Demand that every tensor kept in another file lies inside a regular file in the model's folder.

    Args:
        path: the model's file.
        model: read without its external data.

    Raises:
        BadInput: names the tensor and what is wrong with its place.
    """
    sizes: dict[str, int] = {}
    for tensor in _external_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        what = f"{path}: tensor {tensor.name[:80]!r} lies in {location[:80]!r}"
        place = PurePosixPath(location)
        if not location.isprintable() or "\\" in location or place.is_absolute() or ".." in place.parts:
            raise BadInput(f"{what}, which is not a file in the model's folder; export it again")
        if location not in sizes:
            sizes[location] = _size_of(path.parent / place, what)
        start, length = (_number(entries.get(key) or "0", f"{what} at {key}") for key in ("offset", "length"))
        if start + length > sizes[location]:
            raise BadInput(
                f"{what} at {start} to {start + length}, which has {sizes[location]} bytes; it was cut short"
            )


def _size_of(path: Path, what: str) -> int:
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadInput(f"{what}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{what}, which is not a regular file")
    return status.st_size


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        raise BadInput(f"{what} {text[:40]!r}, which is no position in a file")
    return int(text)


def _external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor with external data: initializers and attributes, in functions and subgraphs too."""
    for function in model.functions:
        yield from _of_nodes(function.node)
    yield from _of_graph(model.graph)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    tensors = [*graph.initializer]
    for sparse in graph.sparse_initializer:
        tensors += [sparse.values, sparse.indices]
    # data_location 1 is EXTERNAL; a place that is listed is refused whether or not it would be used
    yield from (tensor for tensor in tensors if tensor.data_location == 1 or tensor.external_data)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterator[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            tensors = [attribute.t, *attribute.tensors]
            yield from (tensor for tensor in tensors if tensor.data_location == 1 or tensor.external_data)
            for graph in (attribute.g, *attribute.graphs):
                if graph.node or graph.initializer:
                    yield from _of_graph(graph)
