"""What both TensorRT forms of the operator share: the kernels of a process, its registrations, its first error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from plugins.fused_qk_rope.description import FUSED_QK_ROPE, OperatorDescription
from plugins.fused_qk_rope.tensorrt_launch import check_launchable, most_tokens
from plugins.fused_qk_rope.triton_compile import CompiledRope

_Callback = TypeVar("_Callback", bound=Callable[..., Any])


class KernelTable:
    """Kernels by what a node of the graph says about itself: dtype, heads and head size."""

    def __init__(self, operator: OperatorDescription = FUSED_QK_ROPE) -> None:
        self._operator = operator
        self._kernels: dict[tuple[str, int, int], CompiledRope] = {}

    def add(self, kernel: CompiledRope) -> None:
        """Serve this kernel; it replaces one for the same dtype, heads and head size, say of another architecture.

        Raises:
            ValueError: TensorRT cannot launch it.
        """
        check_launchable(kernel, self._operator)
        self._kernels[kernel.dtype, kernel.heads, kernel.head_dim] = kernel

    def find(self, dtype: str, q_shape: Sequence[int]) -> CompiledRope:
        """Return the kernel for q [tokens, heads, head_dim].

        Args:
            dtype: of q, as PyTorch names it.
            q_shape: with -1 for what is not known when the engine is built.

        Raises:
            ValueError: no kernel was registered for it.
        """
        if len(q_shape) != 3:
            raise ValueError(f"{self._operator.onnx_name}: q must be [tokens, heads, head_dim], got {list(q_shape)}")
        key = dtype, q_shape[1], q_shape[2]
        if key not in self._kernels:
            known = ", ".join(f"{name} {heads} x {size}" for name, heads, size in self._kernels) or "none"
            raise ValueError(
                f"{self._operator.onnx_name}: no kernel for {dtype} with {key[1]} heads of {key[2]} was registered in "
                f"this process (dtype, heads x head_dim: {known})"
            )
        return self._kernels[key]


def dtype_names(trt: Any, operator: OperatorDescription = FUSED_QK_ROPE) -> dict[Any, str]:  # noqa: ANN401
    """Return the operator's dtypes, by TensorRT's values for them."""
    return {getattr(trt, name): name for name in operator.dtypes}


def check_types(types: Sequence[Any], names: dict[Any, str], operator: OperatorDescription = FUSED_QK_ROPE) -> str:
    """Return the operator's dtype, given the types of its inputs or of inputs and outputs.

    Args:
        types: TensorRT's data types of q, k, cos and sin, then of the outputs or nothing.
        names: from :func:`dtype_names`.
        operator: the description.

    Raises:
        ValueError: q, k and the outputs differ or have a type outside the description, or cos or sin is not fp32.
    """
    arguments = (*operator.inputs, *operator.outputs)
    if len(types) not in (len(operator.inputs), len(arguments)):
        raise ValueError(f"{operator.onnx_name} has {len(operator.inputs)} inputs, not {len(types)}")
    for argument, found in zip(arguments, types, strict=False):
        if argument.always_float32 and names.get(found) != "float32":
            raise ValueError(f"{operator.onnx_name}: {argument.name} must be float32, got {found}")
        if not argument.always_float32 and (found not in names or found != types[0]):
            raise ValueError(
                f"{operator.onnx_name}: {argument.name} must be as q is and one of {', '.join(operator.dtypes)}, "
                f"got {found}"
            )
    return names[types[0]]


def check_shapes(
    kernel: CompiledRope, shapes: Sequence[Sequence[int]], operator: OperatorDescription = FUSED_QK_ROPE
) -> None:
    """Refuse shapes of inputs, or of inputs and outputs, that the kernel was not compiled for.

    Args:
        kernel: the kernel.
        shapes: of q, k, cos and sin, then of the outputs or nothing; tokens may be -1, unknown.
        operator: the description.

    Raises:
        ValueError: a shape does not fit the kernel's heads and head size, tokens differ, or there are too many.
    """
    sizes = {"heads": kernel.heads, "head_dim": kernel.head_dim, "head_dim/2": kernel.head_dim // 2}
    tokens = {shape[0] for shape in shapes if len(shape)} - {-1}
    for argument, shape in zip((*operator.inputs, *operator.outputs), shapes, strict=False):
        wanted = tuple(sizes[name] for name in argument.shape[1:])
        if len(shape) != len(argument.shape) or tuple(shape)[1:] != wanted or len(tokens) > 1:
            raise ValueError(
                f"{operator.onnx_name}: {argument.name} is {list(shape)}, and the kernel is for [tokens, "
                f"{', '.join(map(str, wanted))}] with the same tokens in all"
            )
    if max(tokens, default=0) > most_tokens(kernel):
        raise ValueError(f"{operator.onnx_name}: {max(tokens)} tokens, and the kernel takes {most_tokens(kernel)}")


_errors: list[BaseException] = []


def last_error() -> BaseException | None:
    """Return the first exception that a callback raised since :func:`forget_errors`.

    TensorRT prints an exception of a Python plugin to stderr and then reports an assertion of its own, or nothing.
    Later exceptions mostly follow from the first.
    """
    return _errors[0] if _errors else None


def forget_errors() -> None:
    """Start anew; to be called before parsing, building or loading."""
    _errors.clear()


def keeps_error(callback: _Callback) -> _Callback:
    """Decorate a function that TensorRT calls, so that the caller of TensorRT can read what it raised."""

    @functools.wraps(callback)
    def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        try:
            return callback(*arguments, **options)
        except BaseException as error:
            _errors.append(error)
            raise

    return call  # type: ignore[return-value]


_forms: dict[tuple[str, int], str] = {}


def register_once(trt: Any, operator: OperatorDescription, form: str, register: Callable[[], None]) -> None:  # noqa: ANN401
    """Register one form of the plugin unless this was done; TensorRT keeps one creator for a name and a version.

    Args:
        trt: ``tensorrt`` or ``tensorrt_rtx``.
        operator: the description.
        form: ``aot`` or ``v3``.
        register: does it.

    Raises:
        RuntimeError: the other form is registered in this process, or a library registered a plugin of this name.
    """
    key = str(trt.__name__), operator.version
    if _forms.get(key) == form:
        return
    if key in _forms:
        raise RuntimeError(
            f"{operator.onnx_name} is registered in this process as {_forms[key]} plugin already: use another process "
            f"for the {form} form"
        )
    identity = operator.onnx_name, str(operator.version), operator.domain
    # not get_creator, which logs an error where it finds nothing
    creators = trt.get_plugin_registry().all_creators
    if identity in {(creator.name, creator.plugin_version, creator.plugin_namespace) for creator in creators}:
        raise RuntimeError(
            f"{trt.__name__} has a plugin {operator.domain}::{operator.onnx_name} version {operator.version} already, "
            "from another library of this process: load one of them only"
        )
    register()
    _forms[key] = form
