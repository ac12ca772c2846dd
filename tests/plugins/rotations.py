"""Arguments of the operator, its answer in float64 by complex numbers, and how close a dtype can come to it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# (tokens, heads, head_dim): both real heads, tiny ones, one token, sizes of no particular divisibility
SHAPES = [(36, 16, 72), (20, 12, 128), (4, 4, 24), (1, 1, 2), (7, 3, 10), (0, 4, 24)]


def arguments(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, cos and sin; the angles reach those of the largest grid."""
    tokens, heads, head_dim = shape
    generator = torch.Generator().manual_seed(tokens + heads + head_dim)
    q, k = ((scale * torch.randn(tokens, heads, head_dim, generator=generator)).to(dtype) for _ in range(2))
    angles = 511 * torch.rand(tokens, head_dim // 2, generator=generator)
    return q, k, angles.cos(), angles.sin()


def rotated_exactly(x: Tensor, cos: Tensor, sin: Tensor) -> NDArray[np.float64]:
    """Elements 2m and 2m + 1 as one complex number, times cos[m] + i sin[m]."""
    numbers = x.double().numpy()[..., 0::2] + 1j * x.double().numpy()[..., 1::2]
    turned = numbers * (cos.double().numpy() + 1j * sin.double().numpy())[:, None, :]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def assert_rotated(result: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """The result is the exact one, but for fp32 arithmetic and one rounding to the dtype of ``x``.

    Two products and a sum in fp32 are off by at most 2 eps of the pair's length, which is what a + b cancelling may
    leave; rounding to the dtype by half of its eps.
    """
    exact = rotated_exactly(x, cos, sin)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    pairs = x.double().numpy().reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
    length = np.repeat(np.hypot(pairs[..., 0], pairs[..., 1]), 2, axis=-1)
    in_fp32 = 2 * 2.0**-23 * length
    info = torch.finfo(x.dtype)
    rounding = (
        0.0 if x.dtype == torch.float32 else info.eps / 2 * (np.abs(exact) + in_fp32) + info.smallest_normal * info.eps
    )
    assert (np.abs(result.double().numpy() - exact) <= in_fp32 + rounding).all()
