"""The tower's norms: eps always given, statistics in fp32, result in the dtype of the input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from model.config import K3_RMS_EPS, PRESETS
from model.norm import RMSNorm, rms_norm, tower_norm
from tests.model import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_bf16_norm_of_a_small_constant_is_one():
    """Where eps is left out, PyTorch has taken 2**-7 for bf16 in some releases, which gives 0.11 here."""
    x = torch.full((2, 1024), 0.01, dtype=torch.bfloat16)
    norm = tower_norm(PRESETS["kimi-k3"]).to(torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    assert norm(x).unique().tolist() == [1.0]
    wrong = rms_norm(x, torch.ones(1024), 2.0**-7)
    assert wrong[0, 0].item() == pytest.approx(0.112, abs=0.001)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_rms_norm_equals_float64(scale: float, dtype: torch.dtype):
    """300 squared is beyond fp16, and 1e-3 squared close to eps: the statistics are fp32's."""
    generator = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(7, 96, generator=generator)).to(dtype)
    weight = (1 + 0.2 * torch.randn(96, generator=generator)).to(dtype)
    exact = reference.rms_norm(x.double().numpy(), weight.double().numpy(), K3_RMS_EPS)
    ours = rms_norm(x, weight, K3_RMS_EPS)
    assert ours.dtype == dtype
    # one rounding to the dtype, and four in fp32
    allowed = (torch.finfo(dtype).eps / 2 + 4 * 2.0**-23) * np.abs(exact) + 1e-7
    assert (np.abs(ours.double().numpy() - exact) <= allowed).all()


def test_eps_counts():
    x = torch.full((1, 8), 1e-3)
    for eps in (K3_RMS_EPS, 1e-5, 2.0**-7):
        expected = 1e-3 / np.sqrt(1e-6 + eps)
        assert rms_norm(x, torch.ones(8), eps)[0, 0].item() == pytest.approx(expected, rel=1e-6)
    assert K3_RMS_EPS == 2.0**-23


@pytest.mark.parametrize(
    ("name", "kind", "eps", "parameters"),
    [
        ("kimi-vl", nn.LayerNorm, 1e-5, {"weight", "bias"}),
        ("kimi-k2.5", nn.LayerNorm, 1e-5, {"weight", "bias"}),
        ("kimi-k3", RMSNorm, 2.0**-23, {"weight"}),
    ],
)
def test_norm_of_each_family(name: str, kind: type[nn.Module], eps: float, parameters: set[str]):
    norm = tower_norm(PRESETS[name])
    assert type(norm) is kind
    assert norm.eps == eps
    assert {parameter for parameter, _ in norm.named_parameters()} == parameters
    assert norm.weight.shape == (PRESETS[name].hidden_size,)


def test_layer_norm_equals_float64():
    generator = torch.Generator().manual_seed(0)
    norm = tower_norm(PRESETS["tiny"])
    with torch.no_grad():
        norm.weight.normal_(generator=generator)
        norm.bias.normal_(generator=generator)
        x = 3 + torch.randn(7, 96, generator=generator)
        weight, bias = (p.double().numpy() for p in (norm.weight, norm.bias))
        # variance over all 96 values (not 95), eps inside the root; a few fp32 roundings of values up to 10
        np.testing.assert_allclose(norm(x).numpy(), reference.layer_norm(x.double().numpy(), weight, bias), atol=5e-6)
