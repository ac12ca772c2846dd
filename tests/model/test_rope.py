"""Rotary angles: column first, fp32 whatever the weights' dtype, and as many as the request has tokens."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from model import tower as tower_module
from model.position import token_layout
from model.rope import rope_angles, rope_frequencies
from plugins.fused_qk_rope.reference import fused_qk_rope_reference
from tests.model.reference import rotate, turns
from tests.model.samples import graph_of, pixels_of, run, run_graph, tower_of

HEAD_DIMS = (72, 128, 24, 32, 4)  # K2.5, K3, tiny, tiny-k3, the smallest


def exact_angles(y: np.ndarray, x: np.ndarray, head_dim: int) -> np.ndarray:
    """Straight from the formula in float64: angle[2i] = x f_i, angle[2i + 1] = y f_i."""
    angles = np.empty((len(y), head_dim // 2))
    for i in range(head_dim // 4):
        frequency = 10000.0 ** (-4.0 * i / head_dim)
        angles[:, 2 * i] = x * frequency
        angles[:, 2 * i + 1] = y * frequency
    return angles


def grid_positions(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    y, x = np.indices((height, width))
    return y.ravel(), x.ravel()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_angles_equal_float64_up_to_the_largest_grid(head_dim: int):
    """Relative error below 1e-6 for every row and column from 0 to 511.

    Relative, because an fp32 number near 511 is spaced 3e-5: no fp32 angle can be absolutely better than half of that.
    Two roundings, of the frequency and of the product, make 1.2e-7.
    """
    y, x = np.arange(512), np.arange(511, -1, -1)
    angles = rope_angles(torch.from_numpy(y), torch.from_numpy(x), head_dim, 10000.0)
    exact = exact_angles(y, x, head_dim)
    assert angles.dtype == torch.float32
    assert angles.shape == exact.shape
    assert (np.abs(angles.numpy() - exact) <= 1e-6 * np.abs(exact)).all()
    assert exact.max() == 511


def test_column_has_the_even_angles():
    angles = rope_angles(torch.tensor([0, 3]), torch.tensor([5, 0]), 8, 10000.0)
    assert angles.tolist() == [[5.0, 0.0, pytest.approx(0.05), 0.0], [0.0, 3.0, 0.0, pytest.approx(0.03)]]


def test_theta_is_used():
    assert rope_frequencies(8, 10000.0) == [1.0, pytest.approx(0.01)]
    assert rope_frequencies(8, 100.0) == [1.0, pytest.approx(0.1)]


@pytest.mark.parametrize("head_dim", [72, 128])
def test_rotation_equals_complex_numbers(head_dim: int):
    height, width = 6, 10
    y, x = (torch.from_numpy(part) for part in grid_positions(height, width))
    angles = rope_angles(y, x, head_dim, 10000.0)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(60, 3, head_dim, generator=generator) for _ in range(2))
    rotated = fused_qk_rope_reference(q, k, angles.cos(), angles.sin())
    turn = turns(height, width, head_dim)
    for ours, x_in in zip(rotated, (q, k), strict=True):
        # values up to 4, angles up to 9 with 1.2e-7 relative error
        assert np.abs(ours.numpy() - rotate(x_in.double().numpy(), turn)).max() < 1e-5


@pytest.mark.parametrize("head_dim", [72, 128])
def test_logits_depend_on_differences_alone(head_dim: int):
    """What makes rotary positions relative: moving both tokens by one vector leaves their product."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, head_dim, generator=generator) for _ in range(2))

    def logit(query: tuple[int, int], key: tuple[int, int]) -> float:
        rotated = []
        for value, (y, x) in ((q, query), (k, key)):
            angles = rope_angles(torch.tensor([y]), torch.tensor([x]), head_dim, 10000.0)
            rotated.append(fused_qk_rope_reference(value, value, angles.cos(), angles.sin())[0])
        return float((rotated[0] * rotated[1]).sum())

    # fp32 angles near 500 are off by 3e-5, in a sum of head_dim products of unit size
    assert logit((3, 7), (10, 2)) == pytest.approx(logit((403, 207), (410, 202)), abs=2e-3)
    assert abs(logit((3, 7), (10, 2)) - logit((3, 7), (2, 10))) > 0.1


# ------------------------------------------------------------------------------------------------ as the tower does it


class Captured(list[tuple[Tensor, Tensor]]):
    """cos and sin of every call of the rotation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        good = tower_module.fused_qk_rope

        def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            self.append((cos, sin))
            return good(q, k, cos, sin)

        monkeypatch.setattr(tower_module, "fused_qk_rope", rotation)
        monkeypatch.setattr("model.graph.fused_qk_rope", rotation)


def check_against_float64(captured: Captured, grids: list[tuple[int, int, int]], head_dim: int) -> None:
    places = [grid_positions(h, w) for t, h, w in grids for _ in range(t)]
    y, x = (np.concatenate(part) for part in zip(*places, strict=True))
    exact = exact_angles(y, x, head_dim)
    for cos, sin in captured:
        assert cos.dtype == sin.dtype == torch.float32
        # one pair of numbers for each token of the request: no table of 512 x 512 places
        assert cos.shape == sin.shape == exact.shape
        assert cos.untyped_storage().nbytes() == exact.size * 4
        # the derivative is at most 1, so the angle's relative error of 1.2e-7 is the error here, times the angle
        allowed = 2e-7 + 1.3e-7 * np.abs(exact)
        assert (np.abs(cos.numpy() - np.cos(exact)) <= allowed).all()
        assert (np.abs(sin.numpy() - np.sin(exact)) <= allowed).all()


@pytest.mark.parametrize("cast", ["float32", "bfloat16", "half", "rebuilt"])
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_angles_stay_fp32_when_the_tower_is_cast(name: str, cast: str, monkeypatch: pytest.MonkeyPatch):
    """Pitfall 17: ``.to(bfloat16)`` and ``.half()`` cast every buffer, and would turn 511 into 512."""
    tower = {
        "float32": lambda: tower_of(name),
        "bfloat16": lambda: copy.deepcopy(tower_of(name)).to(torch.bfloat16),
        "half": lambda: copy.deepcopy(tower_of(name)).half(),
        "rebuilt": lambda: tower_of(name, torch.bfloat16),
    }[cast]()
    captured = Captured(monkeypatch)
    for grids in ([(1, 2, 512)], [(1, 512, 2)], [(2, 4, 6), (1, 6, 4)]):
        captured.clear()
        run(tower, grids)
        assert len(captured) == 2  # once a block
        check_against_float64(captured, grids, tower.config.head_dim)


def test_angles_of_the_graph_form(monkeypatch: pytest.MonkeyPatch):
    captured = Captured(monkeypatch)
    graph = graph_of("tiny", torch.bfloat16, packing="packed")
    run_graph(graph, [(1, 2, 512), (1, 4, 6)], pixels_of([(1, 2, 512), (1, 4, 6)]).to(torch.bfloat16))
    check_against_float64(captured, [(1, 2, 512), (1, 4, 6)], 24)
    captured.clear()
    run_graph(graph, [(3, 4, 6)], pixels_of([(3, 4, 6)]).to(torch.bfloat16))
    check_against_float64(captured, [(3, 4, 6)], 24)


def test_no_state_is_kept_between_calls(monkeypatch: pytest.MonkeyPatch):
    """A smaller grid after a larger one, and the other way round, gets its own numbers."""
    tower = copy.deepcopy(tower_of("tiny"))
    buffers = dict(tower.named_buffers())
    attributes = {name: set(vars(module)) for name, module in tower.named_modules()}
    captured = Captured(monkeypatch)
    for grids in ([(1, 8, 12)], [(1, 2, 2)], [(1, 12, 8)], [(1, 8, 12)]):
        captured.clear()
        run(tower, grids)
        check_against_float64(captured, grids, 24)
    assert buffers == dict(tower.named_buffers()) == {}
    assert attributes == {name: set(vars(module)) for name, module in tower.named_modules()}


def test_every_frame_has_the_same_angles():
    layout = token_layout(torch.tensor([[4, 6]] * 3), 72)
    angles = rope_angles(layout.y, layout.x, 24, 10000.0).unflatten(0, (3, 24))
    assert torch.equal(angles[0], angles[1])
    assert torch.equal(angles[0], angles[2])
