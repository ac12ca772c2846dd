"""Attention in float64 on whatever device its inputs are, and how far attention in another dtype may be from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Rows of d values that each have the same distribution differ in norm: for d = 72, five standard deviations from the
# mean are 0.58 and 1.42 of it. A row's error can be among the largest where its result is among the smallest.
ROW = 1.42 / 0.58


@dataclass(frozen=True)
class Errors:
    """Relative L2 error of everything, and of the worst row of one token and one head; or the limits of both."""

    whole: float
    row: float

    def within(self, limits: Errors) -> bool:
        """False too where an error is not a number."""
        return self.whole <= limits.whole and self.row <= limits.row


def draw_qkv(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, std: float, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v of [tokens, heads, d] as the tower has them: v is a view of one product, q and k are rotated.

    Args:
        tokens: how many.
        heads: how many.
        head_dim: d.
        dtype: of the result, to which the values are rounded.
        std: of the logits; values of v have a standard deviation of 1.
        device: of the result.
    """
    generator = torch.Generator(device).manual_seed(tokens * heads + head_dim)
    packed = torch.randn(tokens, 3, heads, head_dim, generator=generator, device=device)
    packed[:, :2] *= math.sqrt(std)  # d products over sqrt(d), each with the variance of q times that of k
    q, k, v = packed.to(dtype).unbind(1)
    return q.contiguous(), k.contiguous(), v


def attend_float64(q: Tensor, k: Tensor, v: Tensor, rows: int = 256) -> Tensor:
    """softmax(q k^T / sqrt(d)) v of one item in float64, so many queries at a time.

    Args:
        q: [tokens, heads, d], any dtype.
        k: like ``q``.
        v: like ``q``.
        rows: queries whose logits are held at once: rows * tokens * heads * 8 bytes, three times.

    Returns:
        [tokens, heads * d] float64.
    """
    queries, keys, values = (x.double().transpose(0, 1) for x in (q, k, v))
    outputs = []
    for part in queries.split(rows, dim=1):
        logits = part @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        outputs.append(weights @ values / weights.sum(-1, keepdim=True))
    return torch.cat(outputs, dim=1).transpose(0, 1).flatten(1)


def errors_of(output: Tensor, exact: Tensor, heads: int) -> Errors:
    """Compare [tokens, heads * d] in any dtype with the same in float64."""
    wanted = exact.unflatten(1, (heads, -1))
    apart = output.double().unflatten(1, (heads, -1)) - wanted
    rows = apart.norm(dim=-1) / wanted.norm(dim=-1)
    return Errors(float(apart.norm() / wanted.norm()), float(rows.max()))


def limits_for(dtype: torch.dtype, tokens: int, head_dim: int, std: float) -> Errors:
    """How far attention that computes in fp32 and keeps weights and result in ``dtype`` may be from float64.

    The rows of v are independent of the logits and of each other. So an error that changes each weight p by a share of
    at most e changes the result by at most e of itself: both are sums of Gaussians, of variance sum (e p)^2 and
    sum p^2.

    Half precision, with u its unit roundoff: each weight is rounded once (u), and the result is (u). Everything else
    is fp32: 2u. Independent roundings add up to about 0.6u.

    fp32, with u of fp32: a logit is a sum of d products of mean size (2 / pi) std / sqrt(d); it is off by at most
    sqrt(d) u times the sum of their sizes (Higham and Mary 2019), which is (2 / pi) d std u, and weight and normaliser
    each by that share. The argument of exp lies up to 8 std below its largest, and is rounded. Both sums over the
    tokens are off by sqrt(tokens) u of themselves. Some kernels make one fp32 product of three TF32 ones, which leaves
    out 2^-21 = 8u of it.

    Args:
        dtype: of q, k and v.
        tokens: of the item.
        head_dim: d.
        std: of the logits.
    """
    unit = torch.finfo(dtype).eps / 2
    steps = 2.0
    if dtype == torch.float32:
        steps = 2 * (2 / math.pi) * head_dim * std + 8 * std + 2 * math.sqrt(tokens) + 8
    return Errors(steps * unit, ROW * steps * unit)
