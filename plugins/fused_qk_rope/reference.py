"""The rotation in elementary PyTorch operations: what every other form is measured against."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate adjacent pairs of the last dimension of one tensor.

    The pairing is the interleaved one (RoFormer, arXiv:2104.09864, eq. 34): elements 2m and 2m+1 are the real and
    imaginary part of the number that is multiplied by ``exp(i * angle[m])``.

    Args:
        x: [tokens, heads, d], any floating dtype.
        cos: [tokens, d/2], fp32 (fp64 is honoured, for references).
        sin: [tokens, d/2], same dtype as ``cos``.

    Returns:
        [tokens, heads, d] in the dtype of ``x``; arithmetic in the dtype of ``cos``.
    """
    pairs = x.to(cos.dtype).reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    real, imaginary = pairs.unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    rotated = (real * cos - imaginary * sin).unsqueeze(-1), (imaginary * cos + real * sin).unsqueeze(-1)
    return _cat(rotated).reshape(x.shape).to(x.dtype)


def fused_qk_rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys; see :func:`rotate_pairs` for shapes and dtypes.

    Returns:
        ``(q_rotated, k_rotated)``, new tensors.
    """
    return rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)


def _cat(parts: tuple[Tensor, Tensor]) -> Tensor:
    import torch

    return torch.cat(parts, dim=-1)
