"""Drives a plugin through the released Python layer of TensorRT, as the builder does; TensorRT's libraries are stubs.

Real are the module ``tensorrt`` with its enums, PluginTensorDesc, DynamicPluginTensorDesc and PluginField, and all of
``tensorrt.plugin``: its creator, its plugin class and its checks. What stands for objects of the library is a recorder:
the registry, dimension expressions and their builder, launch parameters.
"""

from __future__ import annotations

import json
import pickle
import sys
from types import SimpleNamespace

import numpy as np
import tensorrt as trt


class Expression:
    """An IDimensionExpr: a number, or a function of the number of tokens."""

    def __init__(self, value) -> None:
        self.value = value

    def is_constant(self):
        return isinstance(self.value, int)

    def get_constant_value(self):
        return self.value

    def at(self, tokens):
        return self.value if isinstance(self.value, int) else self.value(tokens)


class Shape(list):
    """A DimsExprs: of a given length, or a copy."""

    def __init__(self, source) -> None:
        super().__init__([None] * source if isinstance(source, int) else source)


class Argument:
    """An ISymExpr."""


class Arguments(dict):
    """An ISymExprs, whose length is set apart."""

    nbSymExprs = None  # noqa: N815  TensorRT's name


class Registry:
    def __init__(self) -> None:
        self.all_creators = []

    def register_creator(self, creator, namespace):
        if (creator.name, creator.plugin_version, namespace) in {
            (other.name, other.plugin_version, other.plugin_namespace) for other in self.all_creators
        }:
            return False
        self.all_creators.append(creator)
        return True

    def get_creator(self, name, version, namespace):
        for creator in self.all_creators:
            if (creator.name, creator.plugin_version, creator.plugin_namespace) == (name, version, namespace):
                return creator
        return None


REGISTRY = Registry()
# before tensorrt.plugin is imported, whose classes are made from these
trt.IDimensionExpr, trt.DimsExprs, trt.ISymExpr = Expression, Shape, Argument
trt.get_plugin_registry = lambda: REGISTRY

OPERATIONS = {
    trt.DimensionOperation.SUM: lambda a, b: a + b,
    trt.DimensionOperation.SUB: lambda a, b: a - b,
    trt.DimensionOperation.PROD: lambda a, b: a * b,
    trt.DimensionOperation.FLOOR_DIV: lambda a, b: a // b,
    trt.DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
}


class Builder(trt.IExprBuilder):
    def __init__(self) -> None:
        trt.IExprBuilder.__init__(self)

    def constant(self, value):
        assert type(value) is int
        return Expression(value)

    def operation(self, operation, first, second):
        assert isinstance(first, Expression) and isinstance(second, Expression), "a null expression"
        return Expression(lambda tokens: OPERATIONS[operation](first.at(tokens), second.at(tokens)))


def shapes(kernel, tokens):
    rows, table = (tokens, kernel.heads, kernel.head_dim), (tokens, kernel.head_dim // 2)
    return [rows, rows, table, table, rows, rows]


def types(dtype):
    kind = getattr(trt, dtype)
    return [kind, kind, trt.float32, trt.float32, kind, kind]


def plain(kernel, tokens):
    descriptions = []
    for dims, kind in zip(shapes(kernel, tokens), types(kernel.dtype), strict=True):
        description = trt.PluginTensorDesc()
        description.dims, description.type, description.format = trt.Dims(dims), kind, trt.TensorFormat.LINEAR
        descriptions.append(description)
    return descriptions


def dynamic(kernel):
    descriptions = []
    for index, description in enumerate(plain(kernel, -1)):
        tensor = trt.DynamicPluginTensorDesc()
        tensor.desc = description
        for bound, tokens in (("min", 1), ("opt", 128), ("max", 4096)):
            setattr(tensor, bound, trt.Dims(shapes(kernel, tokens)[index]))
        descriptions.append(tensor)
    return descriptions


def expressions(kernel):
    return [
        Shape([Expression(lambda tokens: tokens), *(Expression(size) for size in dims[1:])])
        for dims in shapes(kernel, -1)[:4]
    ]


def drive_aot(kernel):
    """From the registered creator to grid, arguments and PTX."""
    creator = REGISTRY.get_creator("FusedQKRope", "1", "kvit")
    request = trt.QuickPluginCreationRequest.PREFER_AOT
    none = trt.PluginFieldCollection([])
    plugin = creator.create_plugin("FusedQKRope", "kvit", none, trt.TensorRTPhase.BUILD, request)
    tensors, builder = dynamic(kernel), Builder()
    assert plugin.num_outputs == 2
    assert plugin.get_output_data_types(types(kernel.dtype)[:4], [3, 3, 2, 2]) == [getattr(trt, kernel.dtype)] * 2
    outputs = plugin.get_output_shapes(expressions(kernel), [], builder)
    assert [[size.at(55) for size in shape] for shape in outputs] == [[55, kernel.heads, kernel.head_dim]] * 2
    combinations = plugin.get_supported_format_combinations(tensors, 4)
    assert [(each.type, each.format) for each in combinations] == [
        (kind, trt.TensorFormat.LINEAR) for kind in types(kernel.dtype)
    ]
    plugin.configure_plugin(tensors[:4], tensors[4:])
    assert plugin.get_valid_tactics() == []
    plugin.set_tactic(0)
    launch, arguments = SimpleNamespace(), Arguments()
    plugin.get_launch_params(expressions(kernel), tensors, 4, launch, arguments, builder)
    name, ptx = plugin.get_kernel(plain(kernel, -1)[:4], plain(kernel, -1)[4:])
    assert (name, ptx) == (kernel.kernel_name, kernel.text.encode())
    assert arguments.nbSymExprs == len(arguments) == 1
    assert (arguments[0].type, arguments[0].dtype) == (trt.PluginArgType.INT, trt.PluginArgDataType.INT32)
    sizes = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")
    return {
        str(tokens): [
            *(getattr(launch, each).expr.at(tokens) for each in sizes),
            arguments[0].expr.at(tokens),
        ]
        for tokens in (1, 7, 128, 4096)
    }


def drive_v3(kernel, readable):
    """From the registered creator through the build to the plugin that the engine makes."""
    from plugins.fused_qk_rope.tensorrt_v3 import last_error

    creator = REGISTRY.get_creator("FusedQKRope", "1", "kvit")
    plugin = creator.create_plugin("FusedQKRope", trt.PluginFieldCollection([]), trt.TensorRTPhase.BUILD)
    assert (plugin.plugin_name, plugin.plugin_namespace, plugin.plugin_version) == ("FusedQKRope", "kvit", "1")
    assert plugin.num_outputs == 2
    for capability in ("CORE", "BUILD", "RUNTIME"):
        assert plugin.get_capability_interface(getattr(trt.PluginCapabilityType, capability)) is plugin
    assert plugin.get_output_data_types(types(kernel.dtype)[:4]) == [getattr(trt, kernel.dtype)] * 2
    plugin = plugin.clone()
    outputs = plugin.get_output_shapes(expressions(kernel), [], Builder())
    assert [[size.at(55) for size in shape] for shape in outputs] == [[55, kernel.heads, kernel.head_dim]] * 2
    tensors = dynamic(kernel)
    assert all(plugin.supports_format_combination(position, tensors, 4) for position in range(6))
    plugin.configure_plugin(tensors[:4], tensors[4:])
    assert plugin.get_workspace_size(tensors[:4], tensors[4:]) == 0
    assert list(plugin.get_valid_tactics()) == []
    fields = plugin.get_fields_to_serialize()
    if not readable:
        return {}
    loaded = creator.create_plugin("FusedQKRope", fields, trt.TensorRTPhase.RUNTIME)
    loaded.set_tactic(0)
    loaded.on_shape_change(plain(kernel, 7)[:4], plain(kernel, 7)[4:])
    assert last_error() is None
    assert loaded.kernel.text == kernel.text
    return {name: value for name, value in vars(loaded.kernel).items() if name in ("kernel_name", "dtype", "arguments")}


def main() -> None:
    form, path = sys.argv[1:]
    with open(path, "rb") as file:
        kernels = pickle.load(file)
    if form == "aot":
        from plugins.fused_qk_rope.tensorrt_aot import register_aot

        registered = [register_aot(trt, kernel) for kernel in kernels]
        assert [each.kernel_name for each in registered] == [kernel.kernel_name for kernel in kernels]
        results = [drive_aot(kernel) for kernel in kernels]
    else:
        from plugins.fused_qk_rope import tensorrt_v3

        try:
            tensorrt_v3.register_v3_runtime(trt)
            readable = True
        except RuntimeError as error:  # old bindings and NumPy 2; what does not read fields is still driven
            assert "cannot read a plugin's data with NumPy" in str(error)  # noqa: PT017
            assert trt.__version__.startswith(("10.8.", "10.9.")) and int(np.__version__.split(".")[0]) > 1
            readable = False
            tensorrt_v3._check_fields_can_be_read = lambda _: None
        for kernel in kernels:
            tensorrt_v3.register_v3(trt, kernel)
        results = [drive_v3(kernel, readable) for kernel in kernels]
    assert len(REGISTRY.all_creators) == 1
    print(json.dumps(results))


if __name__ == "__main__":
    main()
