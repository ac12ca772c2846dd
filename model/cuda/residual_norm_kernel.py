"""Residual and norm as one Triton kernel: a program for each token, which stays in registers between the two."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.cuda.residual_norm import NormWeights
from plugins.fused_qk_rope.triton_kernel import launches_dependently

# Measured on an H200 at 256 to 16384 tokens of 1024 and 1152 elements against 1 to 8 warps and 1 to 4 tokens a
# program: within 4 % of the best, but for 16384 tokens all are alike.
WARPS = 2
# Said, for Triton 3.9 warns of its default and 3.10 changes it: no formula here asks for two roundings.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}


@triton.jit  # type: ignore[untyped-decorator]
def residual_norm_kernel(
    x: tl.tensor,  # [tokens, WIDTH], contiguous like the next two; changed where DELTA
    delta: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,  # [WIDTH]
    bias: tl.tensor,  # [WIDTH]; not read but where CENTRED
    eps: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803  Triton's convention for what is known when compiling
    BLOCK: tl.constexpr,  # noqa: N803
    DELTA: tl.constexpr,  # noqa: N803
    CENTRED: tl.constexpr,  # noqa: N803
    DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Norm of one token: LayerNorm where CENTRED, else RMSNorm.

    With DEPENDENT (programmatic dependent launch) it reads the weights while the kernel before it finishes, and lets
    the one after it start early too.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    w = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    if CENTRED:
        b = tl.load(bias + column, mask, other=0.0).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + place, mask, other=0.0)
    wide = value.to(tl.float32)
    if DELTA:
        value = (wide + tl.load(delta + place, mask, other=0.0).to(tl.float32)).to(value.dtype)
        tl.store(x + place, value, mask)
        wide = value.to(tl.float32)
    if CENTRED:
        wide = tl.where(mask, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = wide * scale * w
    if CENTRED:
        normed += b
    tl.store(out + place, normed.to(value.dtype), mask)


def residual_norm_triton(x: Tensor, delta: Tensor | None, norm: NormWeights, out: Tensor) -> None:
    """Launch the kernel; see :func:`model.cuda.residual_norm.residual_norm_`.

    Raises:
        ValueError: tensors that are not contiguous or do not fit together.
    """
    tokens, width = x.shape
    tensors = [x, out] if delta is None else [x, out, delta]
    if any(t.shape != x.shape or t.dtype != x.dtype or not t.is_contiguous() for t in tensors):
        raise ValueError("x, delta and out must be contiguous and of one shape and dtype")
    if not tokens:
        return
    dependent = launches_dependently(x.get_device())
    options = {**COMPILE_OPTIONS, "launch_pdl": True} if dependent else COMPILE_OPTIONS
    residual_norm_kernel[(tokens,)](
        x,
        x if delta is None else delta,
        out,
        norm.weight,
        norm.weight if norm.bias is None else norm.bias,
        norm.eps,
        width,
        triton.next_power_of_2(width),
        delta is not None,
        norm.bias is not None,
        dependent,
        num_warps=WARPS,
        **options,
    )


def compiles_for(device: torch.device) -> bool:
    """Whether Triton compiles for a GPU (compute capability 8.0 and later, or ROCm)."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
