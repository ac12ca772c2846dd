"""bf16 and fp16 arithmetic for ONNX Runtime on a CPU, which computes almost nothing in bf16.

Every computing node is wrapped: its low-precision inputs are cast to fp32, it runs in fp32, and its results are rounded
back. That is what a GPU does with fp32 accumulators, node by node, so rounding happens where the graph says and nowhere
else. Nodes that only move data stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.errors import BadInput

if TYPE_CHECKING:
    import onnx

# These copy elements, or change their type, which ONNX Runtime does in every dtype.
_MOVES_DATA = frozenset({
    "Cast", "Concat", "Constant", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Shape", "Slice", "Split",
    "Squeeze", "Transpose", "Unsqueeze",
})  # fmt: skip


def emulated_model_bytes(path: Path) -> bytes:
    """Read a model and return one that ONNX Runtime can run on a CPU, with the same inputs, outputs and roundings.

    Args:
        path: the model; its external data is neither read nor copied, so the session must be told its folder
            (``session.model_external_initializers_file_folder_path``) and must run with optimisations disabled, lest a
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
    _wrap_nodes(model.graph, _element_types(model.graph))
    # what the inliner leaves behind names a domain that no runtime knows
    used = {node.domain for node in model.graph.node} | {""}
    kept = [entry for entry in model.opset_import if entry.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return bytes(model.SerializeToString())


def _element_types(graph: onnx.GraphProto) -> dict[str, int]:
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    return types


def _wrap_nodes(graph: onnx.GraphProto, types: dict[str, int]) -> None:
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
            nodes.append(cast(name, widened[name], onnx.TensorProto.FLOAT))
        return widened[name]

    for node in graph.node:
        if node.op_type in _MOVES_DATA and not node.domain:
            nodes.append(node)
            continue
        _rewrite(node, types, low, widen, nodes, cast)
    del graph.node[:]
    graph.node.extend(nodes)


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
