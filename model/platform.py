"""How the position table is resampled on which device: the one place that decides, and the one that compiles.

The decision follows the device of the table itself, at every call. Nothing is decided at import, and a device type that
is not listed here runs uncompiled and says so once.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from model.errors import InputError

ENVIRONMENT_VARIABLE = "KVIT_COMPILE_ROPE_SHAPE"
_SETTINGS = {"auto": None, "1": True, "0": False}

# Compiled by default: "cuda" is also what PyTorch calls an AMD GPU under ROCm.
COMPILED_DEVICES = ("cuda",)
# Known to be better off without: XLA and TPU refuse dynamic shapes; a CPU would spend a minute on its C++ compiler.
EAGER_DEVICES = ("cpu", "meta", "xla", "tpu")
# Where a program is compiled for every new shape, and (XLA) bicubic ``interpolate`` runs on the host. The TPU is listed
# because the form by tokens needs nothing but elementary operations; it was never run on one.
TOKENWISE_DEVICES = ("xla", "tpu")

# A whole-number argument of 0 or 1 is a constant to torch.compile, so such a grid would be compiled for itself alone.
_SMALLEST_DYNAMIC_SIDE = 2
_WARM_SHAPE = (64, 64)

_LOG = logging.getLogger(__name__)

Resample = Callable[[Tensor, str, int, int], Tensor]


class RopeShapePlan(NamedTuple):
    """What :func:`plan_rope_shape` decided.

    Attributes:
        tokenwise: taps gathered token by token, so that no operation's shape but the number of tokens depends on the
            grid; otherwise ``interpolate`` over the grid.
        compiled: through torch.compile with dynamic shapes.
        forced: ``compiled`` was asked for, so a failure to compile is an error and no reason to go on without.
    """

    tokenwise: bool
    compiled: bool
    forced: bool = False


def plan_rope_shape(table: Tensor, shape: tuple[int, int], compile: bool | None = None) -> RopeShapePlan:  # noqa: A002
    """Decide how to resample a table.

    Args:
        table: the position table; its device counts.
        shape: (h, w) in patches.
        compile: True or False overrides the environment variable KVIT_COMPILE_ROPE_SHAPE (``auto``, ``1``, ``0``),
            which overrides the choice by device. None and ``auto`` leave it to the device. Where an outer compiler,
            exporter or tracer is looking on, or torch.compile is switched off, nothing is compiled whatever was asked.

    Raises:
        InputError: the environment variable is none of the three.
    """
    device = table.device.type
    tokenwise = device in TOKENWISE_DEVICES
    # first, and before anything that a tracer could not follow
    if being_traced(table):
        return RopeShapePlan(tokenwise, compiled=False)
    wanted = requested() if compile is None else compile
    if wanted is None:
        wanted = device in COMPILED_DEVICES and has_triton()
        if device not in COMPILED_DEVICES + EAGER_DEVICES:
            say_once(f"get_rope_shape does not know device {device!r} and runs there uncompiled; {_HOW_TO_FORCE}")
        forced = False
    else:
        forced = wanted
    if not wanted or min(shape) < _SMALLEST_DYNAMIC_SIDE:
        return RopeShapePlan(tokenwise, compiled=False)
    if compilation_is_off():
        _note_once("get_rope_shape runs uncompiled: torch.compile is switched off in this process")
        return RopeShapePlan(tokenwise, compiled=False)
    # one dynamic program serves all grids, which is what the form by tokens is for
    return RopeShapePlan(tokenwise=False, compiled=True, forced=forced)


_HOW_TO_FORCE = f"{ENVIRONMENT_VARIABLE}=1 compiles it, {ENVIRONMENT_VARIABLE}=0 keeps it so without this message"


def requested() -> bool | None:
    """What the environment variable asks for; None leaves it to the device.

    Raises:
        InputError: its value is none of those allowed.
    """
    value = os.environ.get(ENVIRONMENT_VARIABLE, "auto")
    if value not in _SETTINGS:
        raise InputError(f"{ENVIRONMENT_VARIABLE} is {value!r}; set it to {', '.join(_SETTINGS)}, or unset it")
    return _SETTINGS[value]


def being_traced(table: Tensor) -> bool:
    """Whether an outer compiler, exporter, tracer or function transform is looking on, or the tensor is no plain one.

    What is compiled under a fake or proxy tensor would be wrong afterwards, and an outer compiler compiles this anyway.
    """
    return (
        torch.compiler.is_compiling()
        or torch.compiler.is_exporting()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or type(table) not in (Tensor, torch.nn.Parameter)
        or is_in_torch_dispatch_mode()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def compilation_is_off() -> bool:
    """Whether torch.compile does nothing in this process, by environment, by config or by stance."""
    import torch._dynamo.config as dynamo  # takes seconds, so not where nothing is compiled
    from torch._dynamo import eval_frame

    stance = getattr(getattr(eval_frame, "_stance", None), "stance", "default")
    return bool(dynamo.disable) or os.environ.get("TORCHDYNAMO_DISABLE") == "1" or stance == "force_eager"


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether torch.compile can make GPU kernels here; says once if not."""
    if find_spec("triton") is not None:
        return True
    say_once("get_rope_shape runs uncompiled on this GPU for want of Triton; pip install triton")
    return False


@lru_cache(maxsize=64)
def say_once(message: str) -> None:
    """Warn, the first time only."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)


@lru_cache(maxsize=8)
def _note_once(message: str) -> None:
    _LOG.info(message)


# ------------------------------------------------------------------------------------------------ compiling and warming

_READY: dict[tuple[Any, ...], Resample] = {}


def compiled_rope_shape(resample: Resample, table: Tensor, mode: str, *, forced: bool) -> Resample:
    """Return ``resample`` compiled with dynamic shapes and run once at (64, 64), so that no later grid compiles.

    torch.compile specialises on more than shapes, hence one compiled function for each combination of what it looks at:
    requires_grad, gradient and inference mode, autocast, interpolation mode, device, dtype and layout of the table.

    Args:
        resample: a plain function of (table, mode, h, w).
        table: the table that it will be called with.
        mode: interpolation mode.
        forced: raise if it does not compile; otherwise warn once and return ``resample`` itself, then and later.

    Raises:
        RuntimeError: PyTorch's own, where ``forced``.
    """
    key = (resample, mode, *_what_compilers_see(table))
    ready = _READY.get(key)
    if ready is not None and not (forced and ready is resample):
        return ready
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return resample  # compiling loads kernels, which a CUDA graph cannot record
    from torch._dynamo.exc import TorchDynamoException

    candidate = _own_code(resample)
    try:
        candidate(table, mode, *_WARM_SHAPE)
    except TorchDynamoException as error:
        if forced:
            raise
        reason = " ".join(str(error).split("\n")[:2])  # the compiler's name, and what it said
        say_once(f"get_rope_shape runs uncompiled, for torch.compile failed on {table.device.type}: {reason}")
        candidate = resample
    _READY[key] = candidate
    return candidate


def _what_compilers_see(table: Tensor) -> tuple[Any, ...]:
    return (
        type(table),
        table.requires_grad,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        table.is_inference(),
        torch.is_autocast_enabled(table.device.type),
        table.device,
        table.dtype,
        table.shape,
        table.stride(),
    )


def _own_code(function: Resample) -> Resample:
    """Compile a copy with a code object of its own: torch.compile counts recompilations, up to a limit, by that."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} is no plain Python function")
    copy = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    compiled: Resample = torch.compile(copy, dynamic=True)
    return compiled
