"""What bench_rope.py measures the fused kernel against: kernels of the same build that do less, or do it in two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from plugins.fused_qk_rope.launch_plan import LaunchPlan

_STRIDES = ("q_token", "q_head", "k_token", "k_head", "cos_token", "sin_token")


@triton.jit(do_not_specialize=["tokens", *_STRIDES])  # type: ignore[untyped-decorator]
def copy_kernel(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    tokens: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    cos_token: tl.tensor,
    sin_token: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Move the bytes that the rotation moves: q and k out of the projection, and every cosine and sine read once."""
    parts: tl.constexpr = HEAD_DIM // VECTOR
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = vector // (HEADS * parts)
    within = vector - token * (HEADS * parts)
    head = within // parts
    part = within - head * parts
    mask = (token < tokens)[:, None]
    first_head = mask & (head == 0)[:, None]
    token, head = token.to(tl.int64), head.to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, VECTOR)[None, :]
    angle = tl.arange(0, VECTOR // 2)[None, :]
    out = (vector.to(tl.int64) * VECTOR)[:, None]
    c = tl.load(cos + ((token * cos_token + part) * (VECTOR // 2))[:, None] + angle, first_head, other=0.0)
    s = tl.load(sin + ((token * sin_token + part) * (VECTOR // 2))[:, None] + angle, first_head, other=0.0)
    x = tl.load(q + ((token * q_token + head * q_head + part) * VECTOR)[:, None] + lane, mask)
    y = tl.load(k + ((token * k_token + head * k_head + part) * VECTOR)[:, None] + lane, mask)
    tl.store(q_out + out + lane, x, mask)
    tl.store(k_out + out + lane, y, mask)
    # no cosine or sine is above 2, so this stores nothing; without it the compiler would drop their loads
    extreme = tl.maximum(c, s)
    tl.store(q_out + out + angle, extreme.to(x.dtype), first_head & (extreme > 2.0))


@triton.jit(do_not_specialize=["tokens", "x_token", "x_head", "cos_token", "sin_token"])  # type: ignore[untyped-decorator]
def one_tensor_kernel(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    tokens: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    cos_token: tl.tensor,
    sin_token: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate one tensor, in the same way as the fused kernel rotates two."""
    parts: tl.constexpr = HEAD_DIM // VECTOR
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = vector // (HEADS * parts)
    within = vector - token * (HEADS * parts)
    head = within // parts
    part = within - head * parts
    mask = (token < tokens)[:, None]
    token, head = token.to(tl.int64), head.to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, VECTOR)[None, :]
    angle = tl.arange(0, VECTOR // 2)[None, :]
    c = tl.load(cos + ((token * cos_token + part) * (VECTOR // 2))[:, None] + angle, mask)
    s = tl.load(sin + ((token * sin_token + part) * (VECTOR // 2))[:, None] + angle, mask)
    value = tl.load(x + ((token * x_token + head * x_head + part) * VECTOR)[:, None] + lane, mask)
    real, imaginary = tl.split(tl.reshape(value.to(tl.float32), [BLOCK, VECTOR // 2, 2]))
    rotated = tl.reshape(tl.join(real * c - imaginary * s, imaginary * c + real * s), [BLOCK, VECTOR])
    tl.store(out + (vector.to(tl.int64) * VECTOR)[:, None] + lane, rotated.to(value.dtype), mask)


@dataclass
class Baseline:
    """One baseline at one launch size, launched like the fused kernel: compiled once, then by addresses."""

    kernel: Any
    threads: int
    dependent: bool
    run: Any = None

    @property
    def label(self) -> str:
        """Launch sizes in words."""
        return f"{self.threads} threads, {'' if self.dependent else 'no '}dependent launch"

    def _start(
        self, pointers: tuple[Tensor, ...], scalars: tuple[int, ...], outputs: tuple[Tensor, ...], plan: LaunchPlan
    ) -> None:
        heads, head_dim, vector, _ = plan.constants
        arguments = (*pointers, *scalars, *outputs, heads, head_dim, vector, self.threads, self.dependent)
        if self.run is None:
            grid = (triton.cdiv(plan.scalars[0] * heads * head_dim // vector, self.threads), 1, 1)
            options = {"num_warps": self.threads // 32, "enable_fp_fusion": False}
            if self.dependent:
                options["launch_pdl"] = True
            self.run = self.kernel[grid](*arguments, **options)[grid]
        else:
            self.run(*arguments)

    def copy(self, tensors: tuple[Tensor, ...], plan: LaunchPlan) -> None:
        """Launch :func:`copy_kernel` for ``(q, k, cos, sin, q_out, k_out)``."""
        self._start(tensors[:4], plan.scalars, tensors[4:], plan)

    def rotate_twice(self, tensors: tuple[Tensor, ...], plan: LaunchPlan) -> None:
        """Launch :func:`one_tensor_kernel` for q and again for k."""
        q, k, cos, sin, q_out, k_out = tensors
        tokens, q_token, q_head, k_token, k_head, *angles = plan.scalars
        self._start((q, cos, sin), (tokens, q_token, q_head, *angles), (q_out,), plan)
        self._start((k, cos, sin), (tokens, k_token, k_head, *angles), (k_out,), plan)
