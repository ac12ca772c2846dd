"""Small repairs of what the PyTorch exporter leaves behind."""

from __future__ import annotations

import onnx_ir as ir


def strip_trace_metadata(model: ir.Model) -> None:
    """Drop stack traces and module scopes: they carry paths of the exporting machine and grow with depth."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.doc_string = None
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in (*node.inputs, *node.outputs):
            if value is not None:
                value.metadata_props.clear()
                value.doc_string = None


def bypass_flat_reshapes(model: ir.Model) -> int:
    """Remove Reshape to [-1] of what has one dimension already; index_select leaves one before every Gather.

    Returns:
        Number of nodes removed.
    """
    removed = 0
    for node in list(model.graph):
        if node.op_type != "Reshape" or node.domain:
            continue
        data, shape = node.inputs[0], node.inputs[1]
        constant = None if shape is None else ir.convenience.get_const_tensor(shape)
        flat = constant is not None and constant.numpy().tolist() == [-1]
        if flat and data is not None and data.shape is not None and len(data.shape) == 1:
            node.outputs[0].replace_all_uses_with(data)
            model.graph.remove(node, safe=True)
            removed += 1
    return removed


def rename_dimension(model: ir.Model, old: str, new: str) -> None:
    """Give a symbolic dimension another name wherever a shape mentions it."""
    values = [*model.graph.inputs, *model.graph.outputs, *(v for node in model.graph for v in node.outputs)]
    for value in values:
        if value.shape is not None and any(_symbol(dim) == old for dim in value.shape):
            value.shape = ir.Shape([new if _symbol(dim) == old else dim for dim in value.shape])


def _symbol(dim: int | ir.SymbolicDim) -> str | None:
    return dim.value if isinstance(dim, ir.SymbolicDim) else None
