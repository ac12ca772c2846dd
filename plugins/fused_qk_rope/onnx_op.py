"""FusedQKRope in ONNX: schema, function body for runtimes without the plugin, and the translation from PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plugins.fused_qk_rope.description import FUSED_QK_ROPE, OperatorDescription

if TYPE_CHECKING:
    import onnx

_ONNX_TYPE = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}


def register_schema(operator: OperatorDescription = FUSED_QK_ROPE) -> None:
    """Tell the onnx package of this process about the operator; does nothing the second time."""
    import onnx
    from onnx import defs

    if defs.has(operator.onnx_name, operator.domain):
        return
    parameter = defs.OpSchema.FormalParameter
    attribute = defs.OpSchema.Attribute
    types = [f"tensor({_ONNX_TYPE[dtype]})" for dtype in operator.dtypes]
    defs.register_schema(
        defs.OpSchema(
            operator.onnx_name,
            operator.domain,
            operator.version,
            doc=operator.summary,
            inputs=[parameter(argument.name, argument.type_parameter) for argument in operator.inputs],
            outputs=[parameter(argument.name, argument.type_parameter) for argument in operator.outputs],
            type_constraints=[("T", types, "Type of queries and keys.")],
            attributes=[
                attribute(name, onnx.helper.make_attribute(name, value), "How TensorRT finds the plugin.")
                for name, value in operator.node_attributes.items()
            ],
        )
    )


def function_body(dtype: str, opset: int, operator: OperatorDescription = FUSED_QK_ROPE) -> onnx.FunctionProto:
    """Return the operator as a model-local function of ordinary operators.

    A runtime that has the plugin never looks at it; any other inlines it, so that one file serves both.

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``: the type of q and k in the model at hand.
        opset: version of ONNX's own operators in that model.
        operator: the description; its first two inputs are rotated into its two outputs.

    Raises:
        ValueError: ``dtype`` is none of the operator's.
    """
    import onnx

    if dtype not in operator.dtypes:
        raise ValueError(f"{operator.onnx_name}: {dtype} is none of {', '.join(operator.dtypes)}")
    enum = onnx.TensorProto.DataType.Value(_ONNX_TYPE[dtype].upper())
    inputs = [argument.name for argument in operator.inputs]
    outputs = [argument.name for argument in operator.outputs]
    rotations = "".join(_rotation(x, y, enum) for x, y in zip(inputs[:2], outputs, strict=True))
    attributes = ", ".join(operator.node_attributes)
    return onnx.parser.parse_function(f"""
        <opset_import: ["" : {opset}], domain: "{operator.domain}">
        {operator.onnx_name} <{attributes}> ({", ".join(inputs)}) => ({", ".join(outputs)}) {{
            pair_axis = Constant <value_ints = [-1]> ()
            head_axis = Constant <value_ints = [1]> ()
            pair_shape = Constant <value_ints = [0, 0, -1, 2]> ()
            angle_cos = Unsqueeze ({inputs[2]}, head_axis)
            angle_sin = Unsqueeze ({inputs[3]}, head_axis)
            {rotations}
        }}
    """)


def _rotation(x: str, y: str, dtype_enum: int) -> str:
    """ONNX text that rotates the pairs of ``x`` [tokens, heads, d] into ``y``, in fp32."""
    return f"""
            {x}_wide = Cast <to = 1> ({x})
            {x}_pairs = Reshape ({x}_wide, pair_shape)
            {x}_real, {x}_imaginary = Split <axis = 3, num_outputs = 2> ({x}_pairs)
            {x}_re = Squeeze ({x}_real, pair_axis)
            {x}_im = Squeeze ({x}_imaginary, pair_axis)
            {x}_re_cos = Mul ({x}_re, angle_cos)
            {x}_im_sin = Mul ({x}_im, angle_sin)
            {x}_im_cos = Mul ({x}_im, angle_cos)
            {x}_re_sin = Mul ({x}_re, angle_sin)
            {x}_new_re = Sub ({x}_re_cos, {x}_im_sin)
            {x}_new_im = Add ({x}_im_cos, {x}_re_sin)
            {x}_first = Unsqueeze ({x}_new_re, pair_axis)
            {x}_second = Unsqueeze ({x}_new_im, pair_axis)
            {x}_joined = Concat <axis = -1> ({x}_first, {x}_second)
            {x}_shape = Shape ({x})
            {x}_rotated_wide = Reshape ({x}_joined, {x}_shape)
            {y} = Cast <to = {dtype_enum}> ({x}_rotated_wide)
    """


def translation(operator: OperatorDescription = FUSED_QK_ROPE) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the entry for ``torch.onnx.export(custom_translation_table=...)`` that emits the node and nothing else."""
    import torch
    from onnxscript import values

    import plugins.fused_qk_rope.torch_op  # noqa: F401 - registers the torch operator

    opset = values.Opset(operator.domain, operator.version)

    def fused_qk_rope(q: Any, k: Any, cos: Any, sin: Any) -> Any:  # noqa: ANN401 - symbolic values of the exporter
        return opset.FusedQKRope(q, k, cos, sin, **operator.node_attributes)

    return {torch.ops.kvit.fused_qk_rope.default: fused_qk_rope}
