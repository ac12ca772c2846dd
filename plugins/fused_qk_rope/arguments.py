"""What the operator accepts: one check for every PyTorch form of it."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.fused_qk_rope.description import FUSED_QK_ROPE

_DTYPES = frozenset(getattr(torch, name) for name in FUSED_QK_ROPE.dtypes)


def check_arguments(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse what the operator does not define. On the path of every call, so it compares and does nothing else.

    Raises:
        ValueError: shapes are not q, k [tokens, heads, d] with even d and cos, sin [tokens, d/2], or the four tensors
            are not on one device.
        TypeError: q and k differ in dtype or have one outside the description, or cos or sin is not fp32.
    """
    shape = q.shape
    if len(shape) != 3 or k.shape != shape or shape[2] % 2:
        raise ValueError(f"q and k must both be [tokens, heads, even d], got {tuple(shape)} and {tuple(k.shape)}")
    angles = (shape[0], shape[2] // 2)
    if cos.shape != angles or sin.shape != angles:
        raise ValueError(f"cos and sin must be {angles}, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    dtype, device = q.dtype, q.device
    if k.dtype != dtype or dtype not in _DTYPES:
        raise TypeError(f"q and k must share one of {', '.join(FUSED_QK_ROPE.dtypes)}, got {dtype} and {k.dtype}")
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise TypeError(f"cos and sin must be float32, got {cos.dtype} and {sin.dtype}")
    if k.device != device or cos.device != device or sin.device != device:
        raise ValueError(
            f"q, k, cos and sin must be on one device, got {device}, {k.device}, {cos.device} and {sin.device}"
        )


def check_distinct(q: Tensor, k: Tensor) -> None:
    """Refuse tensors that cannot be rotated in place because an element would be rotated twice.

    Raises:
        ValueError: q or k is expanded (stride 0), or both start at the same address.
    """
    for name, x in (("q", q), ("k", k)):
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
            raise ValueError(
                f"{name} is expanded: several of its elements share memory, so it has no in-place rotation"
            )
    if q.numel() and q.data_ptr() == k.data_ptr():
        raise ValueError("q and k are the same memory, so they cannot both be rotated in place")
