"""Rewrites an ONNX artifact into what the parser of TensorRT 8.6 takes: opset 17, no functions, no newer operators.

Needs onnx and NumPy only, since TensorRT 8.6 runs in a Python of its own. Weights are never read: the data file gets a
second name beside the new model. What is computed, and where it is rounded, stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.errors import BadInput, BuildFailed, Usage, one_line
from exporter.files import link_or_copy, write_bytes
from exporter.passes.trt86_rewrites import FLOAT, element_types, rewrite
from exporter.validation.backends import INPUTS
from exporter.validation.external_data import check_external_data, read_model

if TYPE_CHECKING:
    import onnx

OPSET, IR_VERSION = 17, 8  # the newest that TensorRT 8.6 reads, and the IR version that belongs to it

# These move or retype data; TensorRT does not let a precision be set on their layers.
_MOVES_DATA = frozenset({
    "Cast", "Concat", "Constant", "Expand", "Gather", "Identity", "Reshape", "Shape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
})  # fmt: skip
_FLOAT16, _BFLOAT16 = 10, 16  # onnx.TensorProto.DataType


@dataclass(frozen=True)
class LoweredModel:
    """A model for TensorRT 8.6.

    Attributes:
        path: the ``.onnx`` file, its data file beside it.
        float32_nodes: names of the computing nodes that are fp32 by the graph's own types although the model is fp16;
            empty for an fp32 model. No name of a node is another's name followed by ``_`` and digits, which is how the
            parser names further layers of one node.
    """

    path: Path
    float32_nodes: frozenset[str]


def lower_for_trt86(source: Path, folder: Path) -> LoweredModel:
    """Write a model that TensorRT 8.6 parses and that computes the same.

    Args:
        source: the ``.onnx`` file of an artifact, its data file beside it.
        folder: an existing folder; gets the new model and another name for the data file.

    Raises:
        Usage: the artifact has a form that TensorRT 8.6 cannot take; names the option of the export to use instead.
        BadInput: the file is no readable model, or its weights lie elsewhere.
        BuildFailed: the result breaks ONNX's rules at opset 17.
    """
    import onnx
    import onnx.inliner

    model = read_model(source)
    check_external_data(source, model)
    _refuse_other_forms(source, model)
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        raise BadInput(f"{source}: {one_line(str(error))[:300]}; export it again") from error
    half = element_types(model.graph).get(INPUTS[0]) == _FLOAT16
    rewrite(model.graph)
    _drop_unused(model.graph)
    _set_versions(model)
    typed = _check(source, model)
    path = folder / f"{source.stem}.trt86.onnx"
    for location in _external_files(model.graph):
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source.parent / location, folder / location)
    write_bytes(path, model.SerializeToString())
    return LoweredModel(path, _float32_nodes(typed.graph) if half else frozenset())


# ---------------------------------------------------------------------------------------------------- before and after


def _refuse_other_forms(source: Path, model: onnx.ModelProto) -> None:
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    operators = {node.op_type for node in nodes}
    typed = [value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)]
    if _BFLOAT16 in (*typed, *(tensor.data_type for tensor in model.graph.initializer)):
        raise Usage(f"{source} is bf16, which TensorRT 8.6 does not know; export it with --dtype fp16 or --dtype fp32")
    if "RotaryEmbedding" in operators:
        raise Usage(f"{source} has the standard RoPE, which TensorRT 8.6 does not know; export it with --rope plugin")
    if "Attention" in operators:
        raise Usage(f"{source} has Attention nodes, which TensorRT 8.6 does not know; export it with --attention plain")


def _external_files(graph: onnx.GraphProto) -> set[str]:
    """Names of the data files; once Constant nodes are initializers, no other tensor lies in one."""
    places = (entry for tensor in graph.initializer if tensor.data_location == 1 for entry in tensor.external_data)
    return {entry.value for entry in places if entry.key == "location"}


def _set_versions(model: onnx.ModelProto) -> None:
    import onnx

    del model.opset_import[:], model.functions[:], model.graph.value_info[:]
    model.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    model.ir_version = IR_VERSION


def _check(source: Path, model: onnx.ModelProto) -> onnx.ModelProto:
    """Check the model as strictly as onnx can; return it with all its types."""
    import onnx

    # onnx refuses data files with several names, so weights become inputs where only the graph is looked at
    graph_only = onnx.ModelProto()
    graph_only.CopyFrom(model)
    graph = graph_only.graph
    inside = []
    for tensor in graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        else:
            inside.append(tensor)
    del graph.initializer[:]
    graph.initializer.extend(inside)
    try:
        onnx.checker.check_model(graph_only, full_check=True)
        return onnx.shape_inference.infer_shapes(graph_only, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        what = one_line(str(error))[:300]
        raise BuildFailed(f"{source} has no form for TensorRT 8.6: {what}; export it with --opset 20") from error


def _float32_nodes(graph: onnx.GraphProto) -> frozenset[str]:
    types = element_types(graph)
    computing = (node for node in graph.node if node.op_type not in _MOVES_DATA)
    return frozenset(node.name for node in computing if any(types.get(name) == FLOAT for name in node.output))


def _drop_unused(graph: onnx.GraphProto) -> None:
    """Remove nodes and initializers that nothing reads any more."""
    used = {value.name for value in graph.output}
    kept: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if used.intersection(node.output):
            kept.append(node)
            used.update(node.input)
    tensors = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(kept))
    graph.initializer.extend(tensors)
