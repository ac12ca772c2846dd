"""The residual with norm against float64, on whichever device the tensors are drawn."""

from __future__ import annotations

import torch
from torch.nn import functional as F  # noqa: N812

from model.cuda.residual_norm import NormWeights, residual_norm_


def check_residual_norm(tokens: int, width: int, dtype: torch.dtype, *, bias: bool, device: str) -> None:
    """Draw a call, and compare sum and norm; with a bias it is LayerNorm, without one RMSNorm."""
    generator = torch.Generator(device=device).manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    x, delta, weight = draw(tokens, width) * 3 + 5, draw(tokens, width), draw(width)
    norm = NormWeights(weight, draw(width) if bias else None, 1e-5)
    total, out = x + delta, torch.full_like(x, float("nan"))
    given_delta = delta.clone()
    residual_norm_(x, delta, norm, out)
    assert torch.equal(x, total)
    assert torch.equal(delta, given_delta)
    wide = total.double()
    if norm.bias is not None:
        want = F.layer_norm(wide, (width,), weight.double(), norm.bias.double(), 1e-5)
    else:
        want = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    # one rounding to the dtype: half a spacing of each value, and fp32's own error of the statistics (means of 5 and
    # deviations of 3: a few 1e-7 of the value before the weights)
    allowed = torch.finfo(dtype).eps * want.abs() * 0.502 + 4e-6 * (weight.double().abs() + 1)
    assert bool(((out.double() - want).abs() <= allowed).all())
    again = torch.full_like(out, float("nan"))
    residual_norm_(x, None, norm, again)
    assert torch.equal(out, again)
    assert torch.equal(x, total)
