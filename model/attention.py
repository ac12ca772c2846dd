"""Attention over packed tokens: every item attends to all of its own tokens, across frames, and to no other item."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom


def attention_scale(head_dim: int) -> float:
    """Scale of the logits: of the true head size, also where a kernel pads it."""
    return float(head_dim**-0.5)


def attend_items(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None) -> Tensor:
    """Attend within each item, one after another, so that memory follows the longest item and no mask exists.

    Args:
        q: [tokens, heads, d].
        k: like ``q``.
        v: like ``q``.
        lengths: tokens of each item; they sum to ``tokens``.
        scale: of the logits; None for that of ``d``, which is not the model's where heads are padded.

    Returns:
        [tokens, heads * d].
    """
    scale = attention_scale(q.shape[-1]) if scale is None else scale
    outputs = []
    for parts in zip(*(torch.split(x, list(lengths)) for x in (q, k, v)), strict=True):
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        output = F.scaled_dot_product_attention(query, key, value, scale=scale)
        outputs.append(output.squeeze(0).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


def segment_mask(item: Tensor) -> Tensor:
    """[tokens, tokens] bool: true where both tokens belong to one item. The diagonal is true, so no row is empty."""
    return item.unsqueeze(1) == item.unsqueeze(0)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where attention is allowed, elsewhere a finite number that the softmax turns into exactly 0.

    Finite because some runtimes make NaN of inf - inf; -30000 fits fp16, and exp(-30000 + any logit) is 0 in fp32.
    """
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.full((), -30000.0, dtype=dtype, device=allowed.device))


def attend_plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend by two matrix products and a softmax, the form that every runtime reads.

    Args:
        q: [tokens, heads, d].
        k: like ``q``.
        v: like ``q``.
        mask: [tokens, tokens] additive, in the dtype of ``q``, or None for one item.

    Returns:
        [tokens, heads * d].
    """
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    logits = torch.matmul(q, k.transpose(1, 2)) * attention_scale(q.shape[-1])
    if mask is not None:
        logits = logits + mask
    return torch.matmul(logits.softmax(-1), v).transpose(0, 1).flatten(1)


def attend_fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
    """Attend by one scaled-dot-product call, which opset 23 exports as one ``Attention`` node.

    Args:
        q: [tokens, heads, d].
        k: like ``q``.
        v: like ``q``.
        allowed: [tokens, tokens] bool, or None for one item.

    Returns:
        [tokens, heads * d].
    """
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=attention_scale(q.shape[-1]))
    return output.squeeze(0).transpose(0, 1).flatten(1)
