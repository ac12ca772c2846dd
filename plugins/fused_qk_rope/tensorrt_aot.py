"""FusedQKRope as a TensorRT plugin compiled ahead of time, for TensorRT 10.9 and later.

TensorRT embeds the PTX in the engine, which then runs without Python and without a plugin library.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

from plugins.fused_qk_rope.description import FUSED_QK_ROPE, OperatorDescription
from plugins.fused_qk_rope.tensorrt_kernels import (
    KernelTable,
    check_shapes,
    check_types,
    dtype_names,
    keeps_error,
    register_once,
)
from plugins.fused_qk_rope.tensorrt_launch import EXTRA_ARGUMENTS
from plugins.fused_qk_rope.triton_compile import CompiledRope


@dataclass(frozen=True)
class AotRegistration:
    """What TensorRT was told.

    Attributes:
        plugin_id: namespace and name.
        kernel_name: entry point of the PTX.
        dtype: of q and k, as PyTorch names it.
        target: architecture of the PTX.
        extra_arguments: int32 arguments between inputs and outputs.
    """

    plugin_id: str
    kernel_name: str
    dtype: str
    target: str
    extra_arguments: tuple[str, ...]


def register_aot(
    trt: Any,  # noqa: ANN401  a module
    kernel: CompiledRope,
    *,
    operator: OperatorDescription = FUSED_QK_ROPE,
    lazy_register: bool = False,
) -> AotRegistration:
    """Let this process build engines with the plugin; may be called again, for another dtype or architecture.

    Args:
        trt: ``tensorrt``.
        kernel: without hidden parameters; nodes of its dtype, heads and head size take it from now on.
        operator: the description.
        lazy_register: leave out TensorRT's registry, where the ONNX parser looks.

    Raises:
        ValueError: TensorRT cannot launch such a kernel.
        RuntimeError: this TensorRT has no plugins of this kind, the IPluginV3 form is registered in this process, or
            another plugin of this name.
    """
    if not hasattr(trt, "QuickPluginCreationRequest"):
        raise RuntimeError(
            f"{trt.__name__} {trt.__version__} has no AOT plugins, TensorRT has them from 10.9 on: use register_v3"
        )
    if operator.version != 1:
        raise RuntimeError(
            f"TensorRT registers AOT plugins as version 1, and {operator.onnx_name} is of {operator.version}"
        )
    table = _tables.get(operator.version) or KernelTable(operator)
    table.add(kernel)
    _tables[operator.version] = table
    register_once(trt, operator, "aot", lambda: _register(trt, operator, table, lazy_register))
    return AotRegistration(_plugin_id(operator), kernel.kernel_name, kernel.dtype, kernel.target, EXTRA_ARGUMENTS)


_tables: dict[int, KernelTable] = {}


def _plugin_id(operator: OperatorDescription) -> str:
    return f"{operator.domain}::{operator.onnx_name}"


def _register(trt: Any, operator: OperatorDescription, table: KernelTable, lazy_register: bool) -> None:  # noqa: ANN401
    plugin = importlib.import_module(f"{trt.__name__}.plugin")
    names = dtype_names(trt, operator)

    @keeps_error
    def describe(q: Any, k: Any, cos: Any, sin: Any) -> Any:  # noqa: ANN401
        check_types([tensor.dtype for tensor in (q, k, cos, sin)], names, operator)
        return q.like(), k.like()

    @keeps_error
    def implement(q: Any, k: Any, cos: Any, sin: Any, outputs: Any, tactic: int) -> Any:  # noqa: ANN401
        kernel = _choose(trt, table, (q, k, cos, sin, *outputs), names, operator)
        tokens = q.shape_expr[0]
        grid = plugin.cdiv(tokens * kernel.vectors_per_token, kernel.block)
        parameters = launch_parameters(plugin, grid_x=grid, block_x=kernel.threads, shared_mem=kernel.shared)
        return kernel.kernel_name, kernel.text, parameters, extra_arguments(plugin, (plugin.SymInt32(tokens),))

    _annotate(plugin, operator, describe, implement)
    plugin.register(_plugin_id(operator), lazy_register=lazy_register)(describe)
    plugin.aot_impl(_plugin_id(operator))(implement)


def _annotate(
    plugin: Any,  # noqa: ANN401
    operator: OperatorDescription,
    describe: Callable[..., Any],
    implement: Callable[..., Any],
) -> None:
    """Write the types that TensorRT reads as objects: it takes the numbers of inputs and outputs from them."""
    inputs = {argument.name: plugin.TensorDesc for argument in operator.inputs}
    outputs = GenericAlias(tuple, (plugin.TensorDesc,) * len(operator.outputs))
    result = GenericAlias(tuple, (str | bytes, str | bytes, plugin.KernelLaunchParams, plugin.SymIntExprs))
    # signatures are read off the function under the decorator
    describe.__wrapped__.__annotations__ = {**inputs, "return": outputs}  # type: ignore[attr-defined]
    implement.__wrapped__.__annotations__ = {**inputs, "outputs": outputs, "tactic": int, "return": result}  # type: ignore[attr-defined]


def _choose(
    trt: Any,  # noqa: ANN401
    table: KernelTable,
    tensors: Sequence[Any],
    names: dict[Any, str],
    operator: OperatorDescription,
) -> CompiledRope:
    """The kernel for the types and shapes of one node."""
    if any(tensor.format != trt.TensorFormat.LINEAR for tensor in tensors):
        raise ValueError(f"{operator.onnx_name} takes linear tensors only")
    shapes = [list(tensor.shape) for tensor in tensors]
    kernel = table.find(check_types([tensor.dtype for tensor in tensors], names, operator), shapes[0])
    check_shapes(kernel, shapes, operator)
    if all(tensor.shape.is_dynamic for tensor in tensors):
        check_shapes(kernel, [list(tensor.shape.max) for tensor in tensors], operator)
    return kernel


def launch_parameters(plugin: Any, **values: Any) -> Any:  # noqa: ANN401
    """Return TensorRT's launch parameters.

    Args:
        plugin: ``tensorrt.plugin``.
        values: by the names of KernelLaunchParams.

    Raises:
        TypeError: a value is neither an int nor a symbolic one. TensorRT would take a float or a NumPy integer without
            a word and then launch with nothing.
    """
    for name, value in values.items():
        if type(value) is not int and not isinstance(value, plugin.SymInt32):
            raise TypeError(f"{name} must be an int or a SymInt32, got {type(value).__name__} {value!r}")
    parameters = plugin.KernelLaunchParams()
    for name, value in values.items():
        setattr(parameters, name, value)
    return parameters


def extra_arguments(plugin: Any, values: Sequence[Any]) -> Any:  # noqa: ANN401
    """Return the kernel's arguments between inputs and outputs.

    Args:
        plugin: ``tensorrt.plugin``.
        values: symbolic int32, in order.

    Raises:
        TypeError: another number of them, or another type.
    """
    if len(values) != len(EXTRA_ARGUMENTS) or not all(isinstance(value, plugin.SymInt32) for value in values):
        found = ", ".join(type(value).__name__ for value in values)
        raise TypeError(f"the kernel takes {', '.join(EXTRA_ARGUMENTS)} as SymInt32, got {found or 'nothing'}")
    arguments = plugin.SymIntExprs(len(values))
    for index, value in enumerate(values):
        arguments[index] = value
    return arguments
