"""From tokens to rows of the language model: 2x2 merge with the mean over frames, then two linear layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from model.config import VisionConfig
from model.norm import RMSNorm, rms_norm
from model.position import TokenLayout


def merge_index(layout: TokenLayout) -> Tensor:
    """Order in which tokens enter the projector: row after row, its four members (0,0), (0,1), (1,0), (1,1).

    Every item's area is a multiple of 4, so a row's four places belong to the item of its first place.

    Returns:
        [patches] int64: the token at each place.
    """
    place = torch.arange(layout.item.shape[0], device=layout.item.device) - layout.start
    row, member = torch.div(place, 4, rounding_mode="trunc"), place % 4
    half = torch.div(layout.width, 2, rounding_mode="trunc")
    row_y = torch.div(row, half, rounding_mode="trunc")
    row_x = row - row_y * half
    down, across = member_offsets(member)
    return layout.start + (2 * row_y + down) * layout.width + 2 * row_x + across


def member_offsets(member: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets (down, across) of member 0..3 within its 2x2 square."""
    down = torch.div(member, 2, rounding_mode="trunc")
    return down, member - 2 * down


def mean_over_frames(x: Tensor) -> Tensor:
    """[frames, patches, width] -> [patches, width], summed in fp32."""
    return x.to(torch.float32).mean(0).to(x.dtype)


def projector_activation(x: Tensor) -> Tensor:
    """Exact GELU (by erf); the blocks use the tanh form."""
    return F.gelu(x)


class Projector(nn.Module):
    """Two linear layers with GELU; ``patchmerger`` norms each member first, ``patchmergerv2`` the rows at the end."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged, bias = config.merged_size, config.linear_bias
        first = config.mm_projector_type == "patchmerger"
        self.pre_norm = nn.LayerNorm(config.hidden_size, eps=config.projector_ln_eps) if first else None
        # indices 0 and 2 are the checkpoint's; the activation between them has no tensors
        self.proj = nn.Sequential(
            nn.Linear(merged, merged, bias=bias), nn.Identity(), nn.Linear(merged, config.text_hidden_size, bias=bias)
        )
        self.post_norm = None if first else RMSNorm(config.text_hidden_size, config.projector_ln_eps)

    def forward(self, members: Tensor) -> Tensor:
        """[rows, 4, width] -> [rows, text_hidden_size]."""
        x = flatten_members(members, self.pre_norm)
        rows: Tensor = self.proj[2](projector_activation(self.proj[0](x)))
        return rows if self.post_norm is None else rms_norm(rows, self.post_norm.weight, self.post_norm.eps)


def flatten_members(members: Tensor, norm: nn.LayerNorm | None) -> Tensor:
    """Norm each of the four members by itself, then lay them side by side: [rows, 4, width] -> [rows, 4 * width]."""
    return (members if norm is None else norm(members)).flatten(1)
