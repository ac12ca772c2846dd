"""Which attention kernel runs: by what was measured, for one item, equal items and unequal items.

On an H200 (bf16, 16 heads of 72 and 12 of 128, 64 to 16384 tokens) cuDNN is the fastest of PyTorch's from 256 tokens
on, 1.5 to 2.4 times as fast as flash at 1024 and more, and never loses more than 2 us. It plans each new shape for 40
to 60 ms, so the number of shapes is bounded by padding. Several items of one length are a batch for it; for items of
several lengths it would be a call an item, at which flash's one call for all wins below some 2048 tokens an item. Heads
of 80 it pads to 128, so one item with such heads has a kernel of this project. docs/benchmarks.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention import attend_items, attention_scale

# Items from this length on are run by themselves: they fill the GPU, and cuDNN does not need to know of the others.
ALONE_TOKENS = 2048
_PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def preferred_kernels(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Let attention choose by measurement where it was measured (compute capability 9.0), else as PyTorch does."""
    if not _measured(device):
        return contextlib.nullcontext()
    _let_pytorch_choose_first(device)
    return sdpa_kernel(_PREFERRED, set_priority=True)


@lru_cache(maxsize=64)
def _let_pytorch_choose_first(device: torch.device) -> None:
    """Attend once without a preference of ours.

    PyTorch settles its own order at the first attention of a process (``priority_order`` in its sdp_utils.cpp). Were
    that among ours, the order from before would be put back afterwards, and every attention of the process would be
    flash's: the plain tower then takes 177 ms for 16384 tokens on an H200 and not 131.
    """
    x = torch.zeros(1, 1, 1, 8, device=device)
    with sdpa_kernel(_PREFERRED):  # whatever the caller allows, one of them takes fp32
        F.scaled_dot_product_attention(x, x, x)


def _measured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and _capability(device.index or 0) == (9, 0)


@lru_cache(maxsize=64)
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def attend_equal(q: Tensor, k: Tensor, v: Tensor, items: int, head_dim: int, mask: Tensor | None = None) -> Tensor:
    """Attend within each of several items of one length, or within one.

    Args:
        q: [items * length, heads, padded head], spare elements 0 or the mask's.
        k: like ``q``.
        v: like ``q``.
        items: their number.
        head_dim: the model's, from which the scale follows.
        mask: [length] additive, or None.

    Returns:
        [items * length, heads * padded head].
    """
    query, key, value = (x.view(items, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    bias = None if mask is None else mask.expand(1, 1, 1, -1)
    scale = attention_scale(head_dim)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    return output.transpose(1, 2).reshape(q.shape[0], -1)


def splits_heads(device: torch.device, padded_head: int) -> bool:
    """Whether one item is for :func:`attend_split_heads`, by what was measured: heads of 80, on the GPU of one kind."""
    if not _measured(device):
        return False
    try:
        from model.cuda.split_head_kernel import parts
    except ImportError:  # Triton before 3.4 has no descriptors of tensors
        return False
    return parts(padded_head) == (64, 16)


def attend_split_heads(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> Tensor:
    """Attend within one item; see :func:`model.cuda.split_head_kernel.split_head_attention`."""
    from model.cuda.split_head_kernel import split_head_attention

    return split_head_attention(q, k, v, head_dim)


def attend_unequal(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], ends: Tensor, longest: int, head_dim: int
) -> Tensor:
    """Attend within each of several items of any lengths, by one call where flash is there.

    Args:
        q: [tokens, heads, padded head].
        k: like ``q``.
        v: like ``q``.
        lengths: tokens of each item, padding being one of them; not looked at where flash is there.
        ends: [segments + 1] int32, 0 and the end of each segment, on the device.
        longest: bound on a segment.
        head_dim: the model's.

    Returns:
        [tokens, heads * padded head].
    """
    if not has_varlen(q.device.type):
        return attend_items(q, k, v, lengths, attention_scale(head_dim))
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(q, k, v, ends, ends, longest, longest, scale=attention_scale(head_dim))
    if not isinstance(output, Tensor):
        raise TypeError("varlen_attn returned more than was asked for")
    return output.flatten(1)


@lru_cache(maxsize=8)
def has_varlen(device_type: str) -> bool:
    """Whether PyTorch has flash attention over unequal segments here."""
    if device_type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    import inspect

    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "scale" in inspect.signature(varlen_attn).parameters
