"""Three properties that random weights need for tests on them to see anything (design, SOURCE).

Weights of N(0, 0.02) hide a swapped rotary axis, because every logit is near zero; a larger common scale saturates the
softmax. Both are measured here at work: on two tiny towers, and on two layers of every released width.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from model import attention
from model.config import tensor_shapes
from model.random_weights import parse_random_source
from model.tower import KimiVision, build_tower
from tests.model.samples import pixels_of, relative_error, run, tower_of, weights_of

GRIDS = [(1, 10, 12), (1, 6, 4)]
NAMES = ("tiny", "tiny-k3", "kimi-vl", "kimi-k2.5", "kimi-k3")


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Noise in the first item, and in the second a smooth ramp, which differs little from patch to patch."""
    pixels = pixels_of(GRIDS)
    ramp = torch.linspace(-1, 1, 24).reshape(24, 1, 1, 1)
    pixels[120:] = (ramp + 0.1 * pixels[120:]).clamp(-1, 1)
    return pixels.to(torch.bfloat16).float()


@pytest.mark.parametrize("name", NAMES)
def test_logits_tokens_and_bf16_error(name: str, images: Tensor):
    """One test for the three, because they share the tower."""
    tower = tower_of(name)
    stds, rows = logits_and_rows(tower, images)
    assert len(stds) == 2  # one a block
    assert all(1 <= std <= 3 for std in stds), stds
    for item in rows:
        assert 0.4 < token_difference(item) < 1.5
    # the weights are bf16 numbers, so this is the tower that build_tower(dtype=bfloat16) gives
    bf16 = run(copy.deepcopy(tower).to(torch.bfloat16), GRIDS, images)
    assert 0.004 < relative_error(bf16, rows) < 0.015


def logits_and_rows(tower: KimiVision, images: Tensor) -> tuple[list[float], list[Tensor]]:
    """Standard deviation of the first item's attention logits in every block, and the tower's output."""
    stds: list[float] = []
    good = attention.attend_items

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        logits = torch.einsum("qhd,khd->hqk", q[: lengths[0]].double(), k[: lengths[0]].double())
        stds.append(float(logits.std()) / q.shape[-1] ** 0.5)
        return good(q, k, v, lengths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "attend_items", attend)
        return stds, run(tower, GRIDS, images)


def token_difference(rows: Tensor) -> float:
    """Mean distance of two rows over sqrt(2) times their mean length: 0 where all are equal, 1 for independent ones."""
    distances = torch.pdist(rows.double())
    return float(distances.mean() / (2**0.5 * rows.double().norm(dim=1).mean()))


class CommonScale:
    """What the usual initialisation gives: N(0, 0.02) for every tensor, 1 for the norms' weights."""

    config = weights_of("tiny").config

    def names(self) -> tuple[str, ...]:
        return tuple(tensor_shapes(self.config))

    def tensor(self, name: str) -> Tensor:
        shape = tensor_shapes(self.config)[name]
        if "norm" in name and name.endswith("weight"):
            return torch.ones(shape)
        return 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


def test_a_common_scale_would_not_do(images: Tensor):
    """The control: such a tower lies outside the limits above, so they say something."""
    stds, _ = logits_and_rows(build_tower(CommonScale()), images)
    assert len(stds) == 2
    assert max(stds) < 0.1


def test_outliers_stay_within_fp16():
    """Channels 50 times as large are what fp16 has to carry in real towers: finite, and no worse than 1 %."""
    weights = parse_random_source("random:tiny?seed=1&outliers=1")
    images = pixels_of(GRIDS).half()
    exact = run(build_tower(weights), GRIDS, images.float())
    half = run(build_tower(weights, dtype=torch.float16), GRIDS, images)
    assert all(torch.isfinite(item).all() for item in half)
    assert relative_error(half, exact) < 0.01
