"""The blocks over packed weights: one kernel each for rotation, residual with norm, and product with bias and GELU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from model.cuda.placement import Fields
from model.cuda.residual_norm import residual_norm_
from model.cuda.weights import PackedTower
from model.tower import mlp_activation
from plugins.fused_qk_rope.torch_op import fused_qk_rope_

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def encode(packed: PackedTower, patches: Tensor, fields: Fields, attend: Attend, out: Tensor | None = None) -> Tensor:
    """Embed patches and run all blocks and the norm after them.

    Args:
        packed: weights.
        patches: [padded, 592], 0 at padding and behind the 588 values of a patch.
        fields: positions, angles and mask of the same tokens.
        attend: takes q, k and v, each [padded, heads, padded head], to [padded, heads * padded head].
        out: [padded, hidden_size] to write to.

    Returns:
        [padded, hidden_size]; rows of padding mean nothing.
    """
    x = torch.addmm(fields.pos, patches, packed.patch.t())
    normed = torch.empty_like(x) if out is None else out
    norms = [block.norm0 for block in packed.blocks[1:]] + [packed.final]
    residual_norm_(x, None, packed.blocks[0].norm0, normed)
    for block, following in zip(packed.blocks, norms, strict=True):
        q, k, v = F.linear(normed, block.wqkv, block.qkv_bias).view(-1, 3, packed.heads, packed.padded).unbind(1)
        fused_qk_rope_(q, k, fields.cos, fields.sin)
        residual_norm_(x, F.linear(attend(q, k, v), block.wo, block.wo_bias), block.norm1, normed)
        hidden = linear_gelu(normed, block.fc0, block.fc0_bias)
        residual_norm_(x, F.linear(hidden, block.fc1, block.fc1_bias), following, normed)
    return normed


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``gelu(x W^T + b)`` in the tanh form, rounded once on a GPU.

    cuBLASLt's epilogue is the tanh form (its documentation of CUBLASLT_EPILOGUE_GELU); tests/gpu hold it against
    float64 in fp32, where the exact GELU would show.

    Args:
        x: [tokens, width].
        weight: [inner, width].
        bias: [inner].

    Returns:
        [tokens, inner].
    """
    if x.is_cuda and torch.version.hip is None:
        fused: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)
        return fused
    return mlp_activation(F.linear(x, weight, bias))
