"""Attention within one item, for heads whose width is no power of two, as one Triton kernel.

The usual kernels pad a head of 72 or 80 elements to 128: on an H200 cuDNN takes as long for 16 heads of 80 as for 16 of
128. Here a head is two parts, 64 and 16 wide, each with products of its own. And the sum of the softmax costs nothing:
the last spare element of every v is 1, so the product with v has it in that column, of the very weights that were
rounded for it. The rest is FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1): online softmax over blocks of
keys, divided once at the end.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from model.attention import attention_scale

KEYS = 64
# By rows a program, measured on an H200 at 1024 to 16384 tokens against 32 to 128 keys, 4 and 8 warps, 2 to 4 stages.
COMPILE_OPTIONS: dict[int, dict[str, Any]] = {
    128: {"num_warps": 4, "num_stages": 3, "maxnreg": 240, "enable_fp_fusion": True},
    64: {"num_warps": 4, "num_stages": 3, "maxnreg": 168, "enable_fp_fusion": True},
}
# Programs that share a multiprocessor: registers allow two of 128 rows, shared memory three of 64.
PROGRAMS = {128: 2, 64: 3}
# How much longer a wave of programs of 128 rows takes than one of 64. By it the better of the two is chosen at 68 of 76
# sizes from 512 to 32768 tokens (16 heads), and what is lost at the others is at most 9 % (docs/benchmarks.md).
WAVE_RATIO = 1.27


@triton.jit  # type: ignore[untyped-decorator]
def split_head_kernel(
    q_wide: tl.tensor_descriptor,  # descriptors of [tokens, 3 * HEADS * (WIDE + REST)] in blocks of [ROWS, WIDE]
    q_rest: tl.tensor_descriptor,  # [ROWS, REST]
    kv_wide: tl.tensor_descriptor,  # [KEYS, WIDE]
    kv_rest: tl.tensor_descriptor,  # [KEYS, REST]
    out: tl.tensor,  # [tokens, HEADS * (WIDE + REST)], contiguous
    tokens: tl.tensor,  # a multiple of KEYS
    scale: tl.tensor,  # of the logits, times log2(e)
    HEADS: tl.constexpr,  # noqa: N803  Triton's convention for what is known when compiling
    WIDE: tl.constexpr,  # noqa: N803
    REST: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
) -> None:
    """ROWS queries of one head over all keys. The last element of each head of v must be 1."""
    first = tl.program_id(0) * ROWS
    head = tl.program_id(1)
    column: tl.constexpr = WIDE + REST
    queries_wide = q_wide.load([first, head * column])
    queries_rest = q_rest.load([first, head * column + WIDE])
    key = (HEADS + head) * column
    value = (2 * HEADS + head) * column
    top = tl.full([ROWS], -float("inf"), tl.float32)
    sum_wide = tl.zeros([ROWS, WIDE], tl.float32)
    sum_rest = tl.zeros([ROWS, REST], tl.float32)
    for start in range(0, tokens, KEYS):
        # both parts are loaded before the first product, so that none waits between the two
        k_wide = kv_wide.load([start, key])
        k_rest = kv_rest.load([start, key + WIDE])
        logits = tl.dot(queries_wide, k_wide.T)
        logits = tl.dot(queries_rest, k_rest.T, logits)
        larger = tl.maximum(top, tl.max(logits, 1) * scale)
        weight = tl.exp2(logits * scale - larger[:, None]).to(out.dtype.element_ty)
        shrink = tl.exp2(top - larger)[:, None]
        v_wide = kv_wide.load([start, value])
        v_rest = kv_rest.load([start, value + WIDE])
        sum_wide = tl.dot(weight, v_wide, sum_wide * shrink)
        sum_rest = tl.dot(weight, v_rest, sum_rest * shrink)
        top = larger
    wide = tl.arange(0, WIDE)[None, :]
    rest = tl.arange(0, REST)[None, :]
    total = tl.sum(tl.where(rest == REST - 1, sum_rest, 0.0), 1)[:, None]
    row = (first + tl.arange(0, ROWS))[:, None]
    place = (row.to(tl.int64) * HEADS + head) * column
    tl.store(out + place + wide, (sum_wide / total).to(out.dtype.element_ty), row < tokens)
    tl.store(out + place + WIDE + rest, (sum_rest / total).to(out.dtype.element_ty), row < tokens)


def parts(padded_head: int) -> tuple[int, int] | None:
    """Split a head's width into two powers of two, the smaller at least 16; None where it is none such."""
    wide = 1 << (padded_head.bit_length() - 1)
    rest = padded_head - wide
    return (wide, rest) if rest >= 16 and rest & (rest - 1) == 0 else None


def rows_for(tokens: int, heads: int, multiprocessors: int) -> int:
    """Queries of a program, so that few multiprocessors idle in the last wave of programs.

    Args:
        tokens: of the item.
        heads: of attention.
        multiprocessors: of the GPU.
    """
    waves = {
        rows: -(-heads * -(-tokens // rows) // (programs * multiprocessors)) for rows, programs in PROGRAMS.items()
    }
    return 64 if waves[64] <= WAVE_RATIO * waves[128] else 128


def split_head_attention(q: Tensor, k: Tensor, v: Tensor, head_dim: int, rows: int | None = None) -> Tensor:
    """Attend within one item.

    Args:
        q: [tokens, heads, padded head] in bf16 or fp16, like ``k`` and ``v`` a view of one contiguous
            [tokens, 3, heads, padded head]; tokens a multiple of 64.
        k: like ``q``.
        v: like ``q``, the last element of each head 1.
        head_dim: the model's, from which the scale follows.
        rows: queries of a program, 64 or 128; None for what is faster.

    Returns:
        [tokens, heads * padded head].

    Raises:
        ValueError: tensors of other shapes, strides or dtypes.
    """
    tokens, heads, padded = q.shape
    width, split = heads * padded, parts(padded)
    alike = all(
        x.shape == q.shape
        and x.stride() == (3 * width, padded, 1)
        and x.dtype == q.dtype
        and x.data_ptr() == q.data_ptr() + i * width * q.itemsize
        for i, x in enumerate((q, k, v))
    )
    if split is None or not alike or tokens % KEYS or q.itemsize != 2:
        raise ValueError(
            f"expected views of one projection in bf16 or fp16, tokens a multiple of {KEYS} and heads of two powers of "
            f"two, got {tuple(q.shape)} of {q.dtype} with strides {q.stride()}, {k.stride()} and {v.stride()}"
        )
    if rows is None:
        rows = rows_for(tokens, heads, _multiprocessors(q.get_device()))
    flat = q.as_strided((tokens, 3 * width), (3 * width, 1))
    out = torch.empty(tokens, width, dtype=q.dtype, device=q.device)
    split_head_kernel[(triton.cdiv(tokens, rows), heads)](
        *(TensorDescriptor.from_tensor(flat, [height, part]) for height in (rows, KEYS) for part in split),
        out,
        tokens,
        attention_scale(head_dim) * math.log2(math.e),
        heads,
        *split,
        rows,
        KEYS,
        **COMPILE_OPTIONS[rows],
    )
    return out


@lru_cache(maxsize=64)
def _multiprocessors(device: int) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
