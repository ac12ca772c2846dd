"""The tower's norms; statistics in fp32 in both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import VisionConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, in the dtype of ``x``.

    Zhang and Sennrich, arXiv:1910.07467, eq. 4. ``eps`` is always given: PyTorch's default changed between releases.
    """
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(torch.float32)).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm with a weight and no bias."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def tower_norm(config: VisionConfig) -> nn.Module:
    """Norm of the family: LayerNorm (Kimi-VL, K2.5) or RMSNorm (K3)."""
    if config.norm_type == "rmsnorm":
        return RMSNorm(config.hidden_size, config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
