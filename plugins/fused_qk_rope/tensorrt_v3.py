"""FusedQKRope as a TensorRT plugin in Python (IPluginV3), for TensorRT-RTX and for TensorRT before 10.9.

The engine carries the kernel, so that a process that runs it needs this package, the CUDA driver and TensorRT, and
neither Triton nor PyTorch. What needs TensorRT's own classes is at the end of the file; the rest is plain Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np

from plugins.fused_qk_rope.description import FUSED_QK_ROPE, OperatorDescription
from plugins.fused_qk_rope.tensorrt_kernels import (
    KernelTable,
    check_shapes,
    check_types,
    dtype_names,
    forget_errors,
    keeps_error,
    last_error,
    register_once,
)
from plugins.fused_qk_rope.tensorrt_launch import check_launchable, launch_through_driver, load
from plugins.fused_qk_rope.triton_compile import CompiledRope

__all__ = ["RopeLayer", "forget_errors", "last_error", "register_v3", "register_v3_runtime"]

_VERSION, _KERNEL, _PTX = "operator_version", "kernel", "ptx"
_NOT_SERIALIZED = ("text", "binary", "hidden_parameters")


class RopeLayer:
    """One node of a network or of an engine: what TensorRT asks of it, apart from TensorRT's base classes.

    Args:
        trt: ``tensorrt`` or ``tensorrt_rtx``.
        operator: the description.
        table: kernels to choose from when building.
        kernel: the kernel that an engine brought along.
    """

    def __init__(
        self,
        trt: Any,  # noqa: ANN401
        operator: OperatorDescription,
        table: KernelTable,
        kernel: CompiledRope | None = None,
    ) -> None:
        self.trt = trt
        self.operator = operator
        self.table = table
        self.kernel = kernel
        self.names = dtype_names(trt, operator)
        self.dtype: str | None = None if kernel is None else kernel.dtype

    @keeps_error
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:  # noqa: D102  TensorRT documents these
        self.dtype = check_types(input_types, self.names, self.operator)
        return [input_types[0]] * len(self.operator.outputs)

    @keeps_error
    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:  # noqa: ANN401, D102
        shapes = [[_constant_or_unknown(dimension) for dimension in shape] for shape in inputs]
        if self.dtype is None:
            raise RuntimeError(f"{self.operator.onnx_name}: TensorRT asked for shapes before types")
        check_shapes(self._find(self.dtype, shapes[0]), shapes, self.operator)
        return [self.trt.DimsExprs(inputs[0]) for _ in self.operator.outputs]

    @keeps_error
    def supports_format_combination(self, position: int, in_out: Sequence[Any], num_inputs: int) -> bool:  # noqa: D102
        described = in_out[position].desc
        argument = (*self.operator.inputs, *self.operator.outputs)[position]
        wanted = "float32" if argument.always_float32 else self.dtype
        return bool(described.format == self.trt.TensorFormat.LINEAR and self.names.get(described.type) == wanted)

    @keeps_error
    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:  # noqa: D102
        tensors = (*inputs, *outputs)
        dtype = self._check_descriptions([tensor.desc for tensor in tensors])
        self.kernel = self._find(dtype, list(inputs[0].desc.dims))
        for bound in ("min", "max"):
            check_shapes(self.kernel, [list(getattr(tensor, bound)) for tensor in tensors], self.operator)
        check_shapes(self.kernel, [list(tensor.desc.dims) for tensor in tensors], self.operator)

    @keeps_error
    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:  # noqa: D102
        tensors = (*inputs, *outputs)
        self._check_descriptions(tensors)
        check_shapes(self._ready(), [list(tensor.dims) for tensor in tensors], self.operator)

    @keeps_error
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:  # noqa: D102
        return 0

    @keeps_error
    def get_valid_tactics(self) -> list[int]:  # noqa: D102
        return []

    @keeps_error
    def set_tactic(self, tactic: int) -> None:  # noqa: D102
        if tactic:
            raise ValueError(f"{self.operator.onnx_name} has one implementation, and TensorRT asks for number {tactic}")

    @keeps_error
    def get_fields_to_serialize(self) -> Any:  # noqa: ANN401, D102
        fields = [
            self.trt.PluginField(name, value, getattr(self.trt.PluginFieldType, kind))
            for name, kind, value in serialized(self._ready(), self.operator)
        ]
        return self.trt.PluginFieldCollection(fields)

    @keeps_error
    def attach_to_context(self, context: Any) -> RopeLayer:  # noqa: ANN401, D102
        # here and not in enqueue, which may be under capture into a CUDA graph
        load(self._ready())
        return self.clone()

    @keeps_error
    def enqueue(  # noqa: D102
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        tensors = (*input_desc, *output_desc)
        kernel = self._ready()
        self._check_descriptions(tensors)
        check_shapes(kernel, [list(tensor.dims) for tensor in tensors], self.operator)
        launch_through_driver(kernel, (*inputs, *outputs), input_desc[0].dims[0], stream)

    @keeps_error
    def clone(self) -> RopeLayer:  # noqa: D102
        copy = type(self)(self.trt, self.operator, self.table)
        copy.__dict__.update(self.__dict__)
        return copy

    def _find(self, dtype: str, q_shape: list[int]) -> CompiledRope:
        return self.table.find(dtype, q_shape)

    def _ready(self) -> CompiledRope:
        if self.kernel is None:
            raise RuntimeError(f"{self.operator.onnx_name}: TensorRT asks for a kernel before it configured the plugin")
        return self.kernel

    def _check_descriptions(self, tensors: Sequence[Any]) -> str:
        """Formats and types of inputs and outputs; returns the dtype of q."""
        if any(tensor.format != self.trt.TensorFormat.LINEAR for tensor in tensors):
            raise ValueError(f"{self.operator.onnx_name} takes linear tensors only")
        dtype = check_types([tensor.type for tensor in tensors], self.names, self.operator)
        if dtype != self.dtype:
            raise ValueError(f"{self.operator.onnx_name}: this node is {self.dtype}, and TensorRT brings {dtype}")
        return dtype


def _constant_or_unknown(dimension: Any) -> int:  # noqa: ANN401  IDimensionExpr
    return int(dimension.get_constant_value()) if dimension.is_constant() else -1


@cache
def serialized(kernel: CompiledRope, operator: OperatorDescription) -> tuple[tuple[str, str, Any], ...]:
    """Return ``(name, type, value)`` of the fields by which an engine carries the kernel.

    A PluginField holds the address of its value and does not keep the value, in every version of TensorRT that was
    tried (10.8 to 11.4, RTX 1.7), so the values are kept here for as long as the process lives.
    """
    facts = {name: value for name, value in asdict(kernel).items() if name not in _NOT_SERIALIZED}
    return (
        (_VERSION, "INT32", np.array([operator.version], dtype=np.int32)),
        (_KERNEL, "CHAR", json.dumps(facts, sort_keys=True).encode("ascii")),
        (_PTX, "CHAR", kernel.text.encode("ascii")),
    )


def deserialized(fields: Iterable[Any], operator: OperatorDescription) -> CompiledRope:
    """Return the kernel that an engine carries.

    Args:
        fields: with ``name`` and ``data``, as :func:`serialized` made them.
        operator: the version that this package implements.

    Raises:
        ValueError: the engine was made with another version of the operator, or holds something else.
    """
    data = {field.name: np.asarray(field.data).tobytes() for field in fields}
    versions = [int(version) for version in np.frombuffer(data.get(_VERSION, b""), dtype=np.int32)]
    if versions != [operator.version]:
        raise ValueError(_wrong_version(operator, str(versions[0]) if versions else "no version"))
    try:
        facts = json.loads(data[_KERNEL].rstrip(b"\0"))
        facts |= {"ptx_version": tuple(facts["ptx_version"]), "arguments": tuple(facts["arguments"])}
        kernel = CompiledRope(**facts, text=data[_PTX].rstrip(b"\0").decode("ascii"), binary=b"", hidden_parameters=0)
        check_launchable(kernel, operator)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the engine's {operator.onnx_name} holds no kernel that can be read: {error}") from error
    return kernel


def _wrong_version(operator: OperatorDescription, found: str) -> str:
    return (
        f"this {operator.onnx_name} is of operator version {found}, and this package has version {operator.version}: "
        "build it again with this package, or use the package that built it"
    )


def register_v3(trt: Any, kernel: CompiledRope, *, operator: OperatorDescription = FUSED_QK_ROPE) -> None:  # noqa: ANN401
    """Let this process build engines with the plugin; may be called again, for another dtype or architecture.

    Args:
        trt: ``tensorrt`` or ``tensorrt_rtx``.
        kernel: without hidden parameters; nodes of its dtype, heads and head size take it from now on.
        operator: the description.

    Raises:
        ValueError: TensorRT cannot launch such a kernel.
        RuntimeError: the AOT form is registered in this process, another plugin of this name is, or this TensorRT does
            not work with this NumPy.
    """
    table = _tables.get((trt.__name__, operator.version)) or KernelTable(operator)
    table.add(kernel)
    _tables[trt.__name__, operator.version] = table
    register_v3_runtime(trt, operator=operator)


def register_v3_runtime(trt: Any, *, operator: OperatorDescription = FUSED_QK_ROPE) -> None:  # noqa: ANN401
    """Let this process load engines with the plugin; may be called again.

    Args:
        trt: ``tensorrt`` or ``tensorrt_rtx``.
        operator: the description.

    Raises:
        RuntimeError: the AOT form is registered in this process, another plugin of this name is, or this TensorRT does
            not work with this NumPy.
    """
    table = _tables.setdefault((trt.__name__, operator.version), KernelTable(operator))
    register_once(trt, operator, "v3", lambda: _register(trt, operator, table))


def _register(trt: Any, operator: OperatorDescription, table: KernelTable) -> None:  # noqa: ANN401
    _check_fields_can_be_read(trt)
    creator, layer = _classes(trt)
    registry = trt.get_plugin_registry()
    # an engine of an older version looks for a creator of that version: it finds one that says what to do
    for version in range(1, operator.version + 1):
        instance = creator(operator, version, table, layer)
        if not registry.register_creator(instance, operator.domain) and version == operator.version:
            raise RuntimeError(f"{trt.__name__} refused the plugin {operator.domain}::{operator.onnx_name} {version}")
        _creators.append(instance)


def _check_fields_can_be_read(trt: Any) -> None:  # noqa: ANN401
    """With NumPy 2 TensorRT 10.8 and 10.9 return the first byte of a field over and over, and no error."""
    sent = b"kernel"
    if trt.PluginField("probe", sent, trt.PluginFieldType.CHAR).data.tobytes() != sent:
        raise RuntimeError(
            f"{trt.__name__} {trt.__version__} cannot read a plugin's data with NumPy {np.__version__}: install NumPy "
            "1.26 or a newer TensorRT"
        )


_tables: dict[tuple[str, int], KernelTable] = {}
_creators: list[Any] = []  # TensorRT does not keep them alive


def _classes(trt: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """The creator and the plugin as TensorRT wants them: subclasses that call every base, with their properties set."""
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)

    class FusedQKRope(RopeLayer, *bases):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:  # noqa: ANN401
            for base in bases:
                base.__init__(self)
            RopeLayer.__init__(self, *arguments)
            self.plugin_name = self.operator.onnx_name
            self.plugin_namespace = self.operator.domain
            self.plugin_version = str(self.operator.version)
            self.num_outputs = len(self.operator.outputs)

        def get_capability_interface(self, type: Any) -> FusedQKRope:  # noqa: A002, ANN401
            return self

    class FusedQKRopeCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self, operator: OperatorDescription, version: int, table: KernelTable, layer: Any) -> None:  # noqa: ANN401
            trt.IPluginCreatorV3One.__init__(self)
            self.operator, self.version, self.table, self.layer = operator, version, table, layer
            self.name = operator.onnx_name
            self.plugin_namespace = operator.domain
            self.plugin_version = str(version)
            self.field_names = trt.PluginFieldCollection([])

        @keeps_error
        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:  # noqa: ANN401
            if self.version != self.operator.version:
                raise ValueError(_wrong_version(self.operator, str(self.version)))
            kernel = deserialized(fields, self.operator) if phase == trt.TensorRTPhase.RUNTIME else None
            return self.layer(trt, self.operator, self.table, kernel)

    return FusedQKRopeCreator, FusedQKRope
