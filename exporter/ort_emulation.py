"""bf16 and fp16 arithmetic for ONNX Runtime on a CPU, which computes almost nothing in bf16.

Every computing node is wrapped: its low-precision inputs are cast to fp32, it runs in fp32, and its results are rounded
back. That is what a GPU does with fp32 accumulators, node by node, so rounding happens where the graph says and nowhere
else. Nodes that only move data stay as they are. Weights are cast up once, when they are read, and not in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

# These copy elements, or change their type, which ONNX Runtime does in every dtype; Expand too, but not of bf16.
_MOVES_DATA = frozenset({
    "Cast", "Concat", "Constant", "Flatten", "Gather", "Identity", "Reshape", "Shape", "Slice", "Split",
    "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip


@dataclass(frozen=True)
class WideWeight:
    """A low-precision weight that the emulated model wants in fp32.

    Attributes:
        name: of the fp32 initializer.
        path: file that holds the low-precision values.
        offset: of its first byte.
        dtype: ``bfloat16`` or ``float16``.
        shape: of the tensor.
    """

    name: str
    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    def read(self) -> NDArray[np.float32]:
        """Read the values; fp32 holds every one exactly.

        Raises:
            BadInput: the file ends inside the tensor.
        """
        import ml_dtypes
        import numpy as np

        low: Any = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.float16
        values = np.fromfile(self.path, dtype=low, count=math.prod(self.shape), offset=self.offset)
        if values.size != math.prod(self.shape):
            raise BadInput(f"{self.path} ends inside a weight; it was cut short while it was being read")
        return values.astype(np.float32).reshape(self.shape)


@dataclass(frozen=True)
class EmulatedModel:
    """A model that ONNX Runtime can run on a CPU.

    Attributes:
        content: the serialised model.
        weights: initializers whose values are not in the model and must be given to the session.
    """

    content: bytes
    weights: tuple[WideWeight, ...]


def emulated_model(path: Path) -> EmulatedModel:
    """Read a model and return one that ONNX Runtime can run on a CPU, with the same inputs, outputs and roundings.

    Args:
        path: the model. Its external data must have been checked (`external_data.check_external_data`); what no
            computing node takes is neither read nor copied, so the session must be told its folder
            (``session.model_external_initializers_file_folder_path``). It must run with optimisations disabled, lest a
            pair of casts that rounds is removed.

    Raises:
        BadInput: the file is no ONNX model or its types cannot be inferred.
    """
    import onnx
    import onnx.inliner
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load(str(path), load_external_data=False)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        model = onnx.shape_inference.infer_shapes(model, strict_mode=False)
    except (DecodeError, onnx.shape_inference.InferenceError, ValueError, RuntimeError, OSError) as error:
        raise BadInput(f"{path}: not a readable ONNX model ({error}); export it again") from error
    outside = {tensor.name: wide for tensor in model.graph.initializer if (wide := _wide_weight(tensor, path.parent))}
    weights = _wrap_nodes(model.graph, _element_types(model.graph), outside)
    _drop_unused(model.graph)
    # what the inliner leaves behind names a domain that no runtime knows
    used = {node.domain for node in model.graph.node} | {""}
    kept = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return EmulatedModel(bytes(model.SerializeToString()), weights)


def _element_types(graph: onnx.GraphProto) -> dict[str, int]:
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return types


def _wide_weight(tensor: onnx.TensorProto, folder: Path) -> WideWeight | None:
    """Where a low-precision weight lies; None for what the model itself holds, which is small and cast as it runs."""
    import onnx

    dtypes: dict[int, str] = {onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.FLOAT16: "float16"}
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if tensor.data_location != onnx.TensorProto.EXTERNAL or tensor.data_type not in dtypes:
        return None
    shape = tuple(tensor.dims)
    if entries.get("length") != str(2 * math.prod(shape)):  # ONNX Runtime says what is wrong with it
        return None
    place, offset = folder / entries["location"], int(entries.get("offset") or "0")
    return WideWeight(f"{tensor.name}/fp32", place, offset, dtypes[tensor.data_type], shape)


def _wrap_nodes(
    graph: onnx.GraphProto, types: dict[str, int], outside: dict[str, WideWeight]
) -> tuple[WideWeight, ...]:
    import onnx

    low = {onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT16}
    nodes: list[onnx.NodeProto] = []
    widened: dict[str, str] = {}

    def cast(source: str, target: str, to: int) -> onnx.NodeProto:
        return onnx.helper.make_node("Cast", [source], [target], name=f"emulate/{target}", to=to)

    def widen(name: str) -> str:
        if types.get(name) not in low:
            return name
        if name not in widened:
            widened[name] = f"{name}/fp32"
            if name in outside:
                graph.initializer.append(_given_later(outside[name]))
            else:
                nodes.append(cast(name, widened[name], onnx.TensorProto.FLOAT))
        return widened[name]

    for node in graph.node:
        if node.op_type in _MOVES_DATA and not node.domain:
            nodes.append(node)
            continue
        _rewrite(node, types, low, widen, nodes, cast)
    del graph.node[:]
    graph.node.extend(nodes)
    return tuple(weight for name, weight in outside.items() if name in widened)


def _given_later(weight: WideWeight) -> onnx.TensorProto:
    """An fp32 initializer that the session is given; its place in a file is a form that is never followed."""
    import onnx

    tensor = onnx.TensorProto(
        name=weight.name, data_type=onnx.TensorProto.FLOAT, dims=weight.shape, data_location=onnx.TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value="given-to-the-session")
    return tensor


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Drop initializers that only their fp32 form replaced, lest the session maps them for nothing."""
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _rewrite(
    node: onnx.NodeProto,
    types: dict[str, int],
    low: Collection[int],
    widen: Callable[[str], str],
    nodes: list[onnx.NodeProto],
    cast: Callable[[str, str, int], onnx.NodeProto],
) -> None:
    inputs = [widen(name) for name in node.input]
    outputs = list(node.output)
    rounding = []
    for index, name in enumerate(outputs):
        if types.get(name) in low:
            outputs[index] = f"{name}/unrounded"
            rounding.append(cast(outputs[index], name, types[name]))
    del node.input[:], node.output[:]
    node.input.extend(inputs)
    node.output.extend(outputs)
    nodes.append(node)
    nodes.extend(rounding)
