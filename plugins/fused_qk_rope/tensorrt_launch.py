"""How a compiled kernel is launched by anything but Triton: the rules, and a launch through the CUDA driver."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

from plugins.fused_qk_rope import cuda_driver
from plugins.fused_qk_rope.description import FUSED_QK_ROPE, OperatorDescription
from plugins.fused_qk_rope.launch_plan import INT32_END, VECTOR_BYTES
from plugins.fused_qk_rope.ptx import check_driver, entry_parameters
from plugins.fused_qk_rope.triton_compile import ELEMENT_TYPES, CompiledRope

EXTRA_ARGUMENTS = ("tokens",)
"""What the kernel takes between its inputs and its outputs: int32 numbers."""


def check_launchable(kernel: CompiledRope, operator: OperatorDescription = FUSED_QK_ROPE) -> None:
    """Refuse a kernel whose parameters are not the inputs, the number of tokens and the outputs, in this order.

    Args:
        kernel: the kernel, without hidden parameters.
        operator: what it computes.

    Raises:
        ValueError: another dtype, a kernel for another maker's GPU, or parameters in another number, order or type.
    """
    name = kernel.kernel_name
    if kernel.dtype not in operator.dtypes or kernel.dtype not in ELEMENT_TYPES:
        raise ValueError(f"kernel {name} is for {kernel.dtype}; {operator.onnx_name} has {', '.join(operator.dtypes)}")
    if kernel.ptx_version is None:
        raise ValueError(f"kernel {name} is for {kernel.target}; TensorRT runs PTX")
    if kernel.hidden_parameters:
        raise ValueError(f"kernel {name} has parameters that TensorRT does not pass: use strip_hidden_parameters first")
    inputs, outputs = len(operator.inputs), len(operator.outputs)
    names = kernel.arguments
    if (
        names[:inputs] != tuple(argument.name for argument in operator.inputs)
        or names[inputs:-outputs] != EXTRA_ARGUMENTS
        or len(names) != inputs + len(EXTRA_ARGUMENTS) + outputs
    ):
        raise ValueError(
            f"kernel {name} takes {', '.join(names)}, not inputs, {', '.join(EXTRA_ARGUMENTS)} and outputs"
        )
    expected = ["64"] * inputs + ["32"] * len(EXTRA_ARGUMENTS) + ["64"] * outputs
    found = [kind for kind, _ in entry_parameters(kernel.text, name)]
    if [kind[1:] for kind in found] != expected or any(kind[0] not in "ub" for kind in found):
        raise ValueError(
            f"kernel {name} takes parameters of types {', '.join(found)}, where {', '.join(expected)} bits go"
        )


def most_tokens(kernel: CompiledRope) -> int:
    """Return how many tokens one launch can have: the kernel counts vectors in int32."""
    return (INT32_END - kernel.block) // kernel.vectors_per_token


def grid_size(kernel: CompiledRope, tokens: int) -> int:
    """Return the number of programs, ``ceil(tokens * vectors_per_token / block)``.

    Args:
        kernel: the kernel.
        tokens: 0 or more.

    Raises:
        ValueError: fewer than no tokens, or more than the kernel can count.
    """
    if not 0 <= tokens <= most_tokens(kernel):
        raise ValueError(f"kernel {kernel.kernel_name} takes 0 to {most_tokens(kernel)} tokens, not {tokens}")
    return -(-tokens * kernel.vectors_per_token // kernel.block)


def launch_arguments(kernel: CompiledRope, pointers: tuple[int, ...], tokens: int) -> tuple[Any, ...]:
    """Return the kernel's arguments as C values, in the order in which it declares them.

    Args:
        kernel: the kernel.
        pointers: addresses of the inputs, then of the outputs.
        tokens: rows of q.

    Raises:
        ValueError: another number of addresses, or one that is not a multiple of 16 bytes.
    """
    names = [name for name in kernel.arguments if name not in EXTRA_ARGUMENTS]
    if len(pointers) != len(names):
        raise ValueError(f"kernel {kernel.kernel_name} takes {len(names)} addresses, not {len(pointers)}")
    for name, pointer in zip(names, pointers, strict=True):
        if pointer % VECTOR_BYTES:
            raise ValueError(
                f"kernel {kernel.kernel_name} needs {name} at a multiple of {VECTOR_BYTES} bytes: {pointer:#x}"
            )
    addresses = dict(zip(names, pointers, strict=True))
    return tuple(
        ctypes.c_uint64(addresses[name]) if name in addresses else ctypes.c_int32(tokens) for name in kernel.arguments
    )


def launch_through_driver(kernel: CompiledRope, pointers: tuple[int, ...], tokens: int, stream: int) -> None:
    """Launch on the current CUDA context with exactly the arguments that the kernel declares.

    Args:
        kernel: a kernel that :func:`check_launchable` accepts.
        pointers: addresses of q, k, cos, sin and of the two outputs, contiguous [tokens, heads, head_dim] or
            [tokens, head_dim/2].
        tokens: rows of q; nothing is launched for 0.
        stream: handle of the CUDA stream.

    Raises:
        ValueError: addresses or tokens that the kernel does not take.
        RuntimeError: the driver is older than the PTX, or refused the kernel or the launch.
    """
    grid = grid_size(kernel, tokens)
    values = launch_arguments(kernel, pointers, tokens)
    if not grid:
        return
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    sizes = (grid, 1, 1, kernel.threads, 1, 1, kernel.shared)
    cuda_driver.call("cuLaunchKernel", load(kernel), *sizes, stream, ctypes.addressof(addresses), 0)


_functions: dict[tuple[int, bytes], Any] = {}


def load(kernel: CompiledRope) -> Any:  # noqa: ANN401  a handle of the driver
    """Return the kernel as a function of the current CUDA context; a context loads the same PTX once.

    Raises:
        RuntimeError: no context is current, or the driver is older than the PTX or refused it.
    """
    context = cuda_driver.call("cuCtxGetCurrent")
    key = int(cuda_driver.call("cuCtxGetId", context)), hashlib.sha256(kernel.text.encode("ascii")).digest()
    if key not in _functions:
        check_driver(kernel, cuda_driver.driver_version())
        module = cuda_driver.call("cuModuleLoadData", kernel.text.encode("ascii") + b"\0")
        _functions[key] = cuda_driver.call("cuModuleGetFunction", module, kernel.kernel_name.encode("ascii"))
    return _functions[key]
