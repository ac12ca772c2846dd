"""Rotary positions in two axes: the angles of every token, from its row and column in the patch grid.

Formulas: 2-D rotary embedding of MoonViT (Kimi-VL report, arXiv:2504.07491, section 2.1); the hub code's
arithmetic puts the *column* in the even angles, whatever its docstring says.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_frequencies(head_dim: int, theta: float) -> list[float]:
    """Return the head_dim/4 frequencies ``theta ** (-4 i / head_dim)``, in radians per patch."""
    return [theta ** (-4.0 * i / head_dim) for i in range(head_dim // 4)]


def rope_angles(y: Tensor, x: Tensor, head_dim: int, theta: float) -> Tensor:
    """Angle by which each adjacent pair of a head is rotated.

    Pair ``2i`` turns by ``x * f_i``, pair ``2i + 1`` by ``y * f_i``. Computed in fp32 whatever the dtype of the
    model, and anew for every call: a table kept from a traced or fake run would stay garbage.

    Args:
        y: [tokens] int64, row of the token's patch.
        x: [tokens] int64, its column.
        head_dim: elements of a head.
        theta: base of the frequencies.

    Returns:
        [tokens, head_dim/2] fp32, radians.
    """
    frequencies = torch.tensor(rope_frequencies(head_dim, theta), dtype=torch.float32, device=y.device)
    by_column = x.to(torch.float32).unsqueeze(-1) * frequencies
    by_row = y.to(torch.float32).unsqueeze(-1) * frequencies
    return torch.stack([by_column, by_row], dim=-1).reshape(-1, head_dim // 2)
