"""Merge order, mean over frames and the two projectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.position import token_layout
from model.projector import flatten_members, mean_over_frames, member_offsets, merge_index, projector_activation
from model.tower import merge, mlp_activation
from tests.model.reference import Reference
from tests.model.samples import TINY, UNIT_SCALE, arrays_of, tower_of, weights_of

sides = st.integers(1, 8).map(lambda half: 2 * half)


def squares(grids: list[tuple[int, int]]) -> list[int]:
    """The tokens in merge order, by four loops."""
    order, start = [], 0
    for height, width in grids:
        for y in range(0, height, 2):
            for x in range(0, width, 2):
                order += [start + (y + dy) * width + x + dx for dy in (0, 1) for dx in (0, 1)]
        start += height * width
    return order


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=4))
def test_merge_order(grids: list[tuple[int, int]]):
    patches = sum(h * w for h, w in grids)
    index = merge_index(token_layout(torch.tensor(grids), patches))
    assert index.dtype == torch.int64
    assert index.tolist() == squares(grids)


def test_merge_order_of_the_longest_sides():
    for grid in ((6, 512), (512, 6)):
        assert merge_index(token_layout(torch.tensor([grid]), 3072)).tolist() == squares([grid])


def test_members_of_a_square():
    down, across = member_offsets(torch.arange(4))
    assert list(zip(down.tolist(), across.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("grids", [[(1, 4, 6)], [(4, 6, 4)], [(1, 4, 6), (4, 6, 4), (2, 2, 2), (1, 2, 8)]], ids=str)
def test_merge_equals_slices(grids: list[tuple[int, int, int]]):
    lengths = [t * h * w for t, h, w in grids]
    x = torch.randn(sum(lengths), 7, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    expected = [
        Reference.merge(part.double().numpy(), grid) for part, grid in zip(x.split(lengths), grids, strict=True)
    ]
    merged = merge(x, grids)
    # a mean of at most four values of unit size in fp32
    np.testing.assert_allclose(merged.numpy(), np.concatenate(expected), rtol=0, atol=1e-6)


def test_mean_over_frames_is_summed_in_fp32():
    # 256 + 1 is 256 in bf16: a running sum would lose every later frame
    bf16 = torch.tensor([256.0, 1, 1, 1], dtype=torch.bfloat16).reshape(4, 1, 1)
    assert mean_over_frames(bf16).item() == torch.tensor(64.75).to(torch.bfloat16).item()
    # the sum of four is beyond fp16's range, the mean is not
    fp16 = torch.full((4, 1, 1), 60000.0, dtype=torch.float16)
    assert mean_over_frames(fp16).item() == fp16[0].item()
    assert mean_over_frames(bf16).dtype == torch.bfloat16
    assert mean_over_frames(fp16).dtype == torch.float16


def test_activations_are_not_exchanged():
    """The projector's GELU is exact, the blocks' is the tanh form; they differ by up to 4.7e-4."""
    x = torch.linspace(-6, 6, 121, dtype=torch.float64)
    exact = torch.tensor([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()], dtype=torch.float64)
    tanh = torch.tensor(
        [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.tolist()],
        dtype=torch.float64,
    )
    assert (projector_activation(x) - exact).abs().max() < 1e-12
    assert (mlp_activation(x) - tanh).abs().max() < 1e-12
    assert (exact - tanh).abs().max() > 4e-4


@pytest.mark.parametrize("name", TINY)
def test_projector_equals_the_formulas(name: str):
    config = weights_of(name).config
    members = torch.randn(9, 4, config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = Reference(arrays_of(name), config).project(members.double().numpy())
    rows = tower_of(name).mm_projector(members)
    assert rows.shape == (9, config.text_hidden_size)
    assert np.abs(rows.numpy() - expected).max() <= UNIT_SCALE


def test_members_are_normed_each_by_itself():
    norm = tower_of("tiny").mm_projector.pre_norm
    members = torch.randn(3, 4, 96, generator=torch.Generator().manual_seed(0))
    flat = flatten_members(members, norm)
    members[:, 2] *= 10  # a norm over all four members would change the other three
    changed = flatten_members(members, norm)
    assert torch.equal(flat[:, : 2 * 96], changed[:, : 2 * 96])
    assert torch.equal(flat[:, 3 * 96 :], changed[:, 3 * 96 :])


def test_members_lie_side_by_side_in_order():
    members = torch.arange(24.0).reshape(1, 4, 6)
    assert flatten_members(members, None).tolist() == [list(range(24))]


def test_k3_projector_ends_with_its_norm():
    projector = tower_of("tiny-k3").mm_projector
    assert projector.pre_norm is None
    assert projector.post_norm.eps == 1e-5
    rows = projector(torch.randn(5, 4, 96, generator=torch.Generator().manual_seed(0)))
    mean_square = (rows.double() / projector.post_norm.weight.double()).square().mean(-1)
    # rows of about unit size before the norm: eps takes 1e-5 of it
    assert (mean_square - 1).abs().max() < 1e-4


def test_no_rows():
    for name in TINY:
        config = weights_of(name).config
        assert tower_of(name).mm_projector(torch.empty(0, 4, config.hidden_size)).shape == (0, config.text_hidden_size)
