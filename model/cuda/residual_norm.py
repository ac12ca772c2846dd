"""Residual and norm in one pass over the residual stream: ``x += delta``, then the norm of ``x``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor
from torch import nn as torch_nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from model.norm import RMSNorm, rms_norm


class NormWeights(NamedTuple):
    """A norm of the tower.

    Attributes:
        weight: [width].
        bias: [width] for LayerNorm, None for RMSNorm.
        eps: added to the variance or the mean square.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float


def norm_weights(norm: torch_nn.Module) -> NormWeights:
    """Take a norm of the tower apart; the tensors share its memory.

    Raises:
        TypeError: it is neither LayerNorm nor RMSNorm.
    """
    if isinstance(norm, RMSNorm):
        return NormWeights(norm.weight.detach(), None, norm.eps)
    if isinstance(norm, torch_nn.LayerNorm):
        return NormWeights(norm.weight.detach(), norm.bias.detach(), norm.eps)
    raise TypeError(f"the tower has no norm {type(norm).__name__}")


def residual_norm_(x: Tensor, delta: Tensor | None, norm: NormWeights, out: Tensor) -> None:
    """Add ``delta`` to ``x`` where it is and write the norm of the sum to ``out``.

    The sum is rounded to the dtype of ``x`` before its statistics are taken, as the plain tower does; they and the norm
    are computed in fp32 and rounded once.

    Args:
        x: [tokens, width], contiguous; changed.
        delta: like ``x``, or None to leave ``x`` as it is.
        norm: with [width] weights of the dtype of ``x``.
        out: like ``x``, written.
    """
    if x.is_cuda:
        _triton_form()(x, delta, norm, out)
        return
    if delta is not None:
        x.add_(delta)
    if norm.bias is None:
        out.copy_(rms_norm(x, norm.weight, norm.eps))
    else:
        out.copy_(F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps))


@lru_cache(maxsize=1)
def _triton_form() -> Callable[[Tensor, Tensor | None, NormWeights, Tensor], None]:
    from model.cuda.residual_norm_kernel import residual_norm_triton

    return residual_norm_triton
