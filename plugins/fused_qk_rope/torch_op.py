"""``torch.ops.kvit.fused_qk_rope``: the operator as PyTorch sees it, live and at export.

Registered through ``torch.library.Library`` and not ``torch.library.custom_op``, whose bookkeeping costs more than the
launch. What the bookkeeping is for is here: fake forms for tracing, gradients, version counters of what is mutated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from plugins.fused_qk_rope.arguments import check_arguments, check_distinct
from plugins.fused_qk_rope.description import FUSED_QK_ROPE
from plugins.fused_qk_rope.reference import fused_qk_rope_reference

__all__ = ["check_arguments", "fused_qk_rope", "fused_qk_rope_"]

_NAME = FUSED_QK_ROPE.torch_name
_IN_PLACE_NAME = f"{_NAME}_"
_ANGLES = "Tensor cos, Tensor sin"
_TAGS = (torch.Tag.pt2_compliant_tag,)
_LIBRARY: Any = torch.library.Library(FUSED_QK_ROPE.domain, "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"{_NAME}(Tensor q, Tensor k, {_ANGLES}) -> (Tensor, Tensor)", tags=_TAGS)
_LIBRARY.define(f"{_IN_PLACE_NAME}(Tensor(a!) q, Tensor(b!) k, {_ANGLES}) -> ()", tags=_TAGS)
_ROTATE: Any = getattr(getattr(torch.ops, FUSED_QK_ROPE.domain), _NAME).default
_ROTATE_IN_PLACE: Any = getattr(getattr(torch.ops, FUSED_QK_ROPE.domain), _IN_PLACE_NAME).default


def fused_qk_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q and k by the angles of their token: one Triton launch on a GPU, the reference elsewhere.

    Args:
        q: [tokens, heads, d] in fp32, fp16 or bf16; any strides.
        k: like ``q``.
        cos: [tokens, d/2], fp32; no gradient flows to it.
        sin: [tokens, d/2], fp32; no gradient flows to it.

    Returns:
        ``(q_rotated, k_rotated)``, contiguous, in the dtype of ``q``.

    Raises:
        ValueError: shapes or devices that do not fit together.
        TypeError: dtypes outside the description.
    """
    # an exported graph keeps the operator, and has no gradients
    if _needs_gradient(q, k, cos, sin) and not torch.compiler.is_exporting():
        return _Rotation.apply(q, k, cos, sin)  # type: ignore[no-any-return, no-untyped-call]
    rotated: tuple[Tensor, Tensor] = _ROTATE(q, k, cos, sin)
    return rotated


def fused_qk_rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q and k where they are; see :func:`fused_qk_rope`. Not differentiable.

    Raises:
        ValueError: shapes or devices that do not fit together; q and k that share memory.
        TypeError: dtypes outside the description.
        RuntimeError: q or k needs a gradient.
    """
    _ROTATE_IN_PLACE(q, k, cos, sin)


def _needs_gradient(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or cos.requires_grad or sin.requires_grad)


def _refuse_gradient(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    # the dispatcher passes autograd by, so a graph would end here without a word
    if _needs_gradient(q, k, cos, sin):
        raise RuntimeError(
            f"torch.ops.{FUSED_QK_ROPE.domain}.{_NAME} carries no gradient: call "
            f"{fused_qk_rope.__module__}.{fused_qk_rope.__name__}, or use torch.no_grad()"
        )


@lru_cache(maxsize=1)
def _triton_form() -> Callable[..., tuple[Tensor, Tensor]] | None:
    try:
        from plugins.fused_qk_rope.triton_kernel import fused_qk_rope_triton
    except ImportError as error:
        warnings.warn(
            f"fused_qk_rope runs as separate PyTorch operations on this GPU, for want of triton ({error}); "
            "pip install triton",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return fused_qk_rope_triton


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    _refuse_gradient(q, k, cos, sin)
    check_arguments(q, k, cos, sin)
    return fused_qk_rope_reference(q, k, cos, sin)


def _rotate_on_gpu(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    triton_form = _triton_form()
    if triton_form is None:
        return _rotate(q, k, cos, sin)
    _refuse_gradient(q, k, cos, sin)
    return triton_form(q, k, cos, sin)


def _rotate_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    _refuse_gradient(q, k, cos, sin)
    check_arguments(q, k, cos, sin)
    check_distinct(q, k)
    rotated = fused_qk_rope_reference(q, k, cos, sin)
    q.copy_(rotated[0])
    k.copy_(rotated[1])


def _rotate_in_place_on_gpu(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    triton_form = _triton_form()
    if triton_form is None:
        _rotate_in_place(q, k, cos, sin)
        return
    _refuse_gradient(q, k, cos, sin)
    triton_form(q, k, cos, sin, inplace=True)
    if not torch.is_inference_mode_enabled():
        torch.autograd.graph.increment_version((q, k))  # so that autograd notices if it had saved them


def _rotate_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    check_arguments(q, k, cos, sin)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)


def _rotate_in_place_fake(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_arguments(q, k, cos, sin)


class _Rotation(torch.autograd.Function):
    """A rotation is orthogonal, so the gradient is the output's gradient rotated back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            raise RuntimeError("fused_qk_rope has no gradient with respect to cos and sin: detach them")
        ctx.save_for_backward(cos, sin)
        rotated: tuple[Tensor, Tensor] = _ROTATE(q, k, cos, sin)
        return rotated

    @staticmethod
    def backward(ctx: Any, q_gradient: Tensor, k_gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # noqa: ANN401
        cos, sin = ctx.saved_tensors
        return (*fused_qk_rope(q_gradient, k_gradient, cos, -sin), None, None)


_DISPATCH: dict[str, dict[str, Callable[..., Any]]] = {
    _NAME: {"CompositeExplicitAutograd": _rotate, "CUDA": _rotate_on_gpu},  # ROCm tensors are CUDA to the dispatcher
    _IN_PLACE_NAME: {"CompositeExplicitAutograd": _rotate_in_place, "CUDA": _rotate_in_place_on_gpu},
}
for _name, _kernels in _DISPATCH.items():
    for _key, _kernel in _kernels.items():
        _LIBRARY.impl(_name, _kernel, _key)
    # a Python kernel here would cost as much as the launch
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake(f"{FUSED_QK_ROPE.domain}::{_NAME}", _rotate_fake, lib=_LIBRARY)
torch.library.register_fake(f"{FUSED_QK_ROPE.domain}::{_IN_PLACE_NAME}", _rotate_in_place_fake, lib=_LIBRARY)
