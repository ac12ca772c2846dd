"""ONNX models of one FusedQKRope node, and stand-ins for what TensorRT hands a plugin."""

from __future__ import annotations

from types import SimpleNamespace


def one_node(dtype, *, heads=16, head_dim=72, tokens="tokens", version="1", function=True, angles="float32"):
    """The node with its attributes and, unless told otherwise, its function, as bytes."""
    import onnx
    from onnx import helper

    from plugins.fused_qk_rope.onnx_op import function_body

    enums = {
        "float32": onnx.TensorProto.FLOAT,
        "float16": onnx.TensorProto.FLOAT16,
        "bfloat16": onnx.TensorProto.BFLOAT16,
    }
    rows, table = [tokens, heads, head_dim], [tokens, head_dim // 2]
    value = helper.make_tensor_value_info
    node = helper.make_node(
        "FusedQKRope",
        ["q", "k", "cos", "sin"],
        ["q_rotated", "k_rotated"],
        name="rope0",
        domain="kvit",
        plugin_namespace="kvit",
        plugin_version=version,
    )
    graph = helper.make_graph(
        [node],
        "one_node",
        [value(name, enums[dtype], rows) for name in "qk"]
        + [value(name, enums[angles], table) for name in ("cos", "sin")],
        [value(f"{name}_rotated", enums[dtype], rows) for name in "qk"],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvit", 1)]
    functions = [function_body(dtype, 23)] if function else []
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10).SerializeToString()


class FakeTensorRT(SimpleNamespace):
    """As much of the ``tensorrt`` module as the plain-Python part of the plugin looks at."""

    def __init__(self) -> None:
        super().__init__(
            __name__="fake_tensorrt",
            float32="FLOAT",
            float16="HALF",
            bfloat16="BF16",
            int32="INT32",
            TensorFormat=SimpleNamespace(LINEAR="LINEAR", HWC8="HWC8"),
            PluginFieldType=SimpleNamespace(INT32="INT32", CHAR="CHAR"),
            PluginField=lambda name, data, kind: SimpleNamespace(name=name, data=data, type=kind),
            PluginFieldCollection=list,
            DimsExprs=list,
        )


class Dimension:
    """An IDimensionExpr: a number, or unknown."""

    def __init__(self, value) -> None:
        self.value = value

    def is_constant(self):
        return self.value is not None

    def get_constant_value(self):
        return self.value


def descriptions(trt, dtype, tokens, heads=16, head_dim=72):
    """PluginTensorDesc of the four inputs and the two outputs."""
    kind = getattr(trt, dtype)
    rows, table = (tokens, heads, head_dim), (tokens, head_dim // 2)
    shapes = [rows, rows, table, table, rows, rows]
    kinds = [kind, kind, trt.float32, trt.float32, kind, kind]
    return [
        SimpleNamespace(dims=dims, type=each, format=trt.TensorFormat.LINEAR, scale=1.0)
        for dims, each in zip(shapes, kinds, strict=True)
    ]


def dynamic_descriptions(trt, dtype, smallest, largest, heads=16, head_dim=72):
    """DynamicPluginTensorDesc of the same, tokens being unknown."""
    at = {
        name: descriptions(trt, dtype, tokens, heads, head_dim)
        for name, tokens in (("min", smallest), ("max", largest))
    }
    return [
        SimpleNamespace(desc=desc, min=at["min"][index].dims, opt=at["max"][index].dims, max=at["max"][index].dims)
        for index, desc in enumerate(descriptions(trt, dtype, -1, heads, head_dim))
    ]
