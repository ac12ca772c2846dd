"""Places of tokens, the resampled position table in both its forms, and the time embedding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from model import position
from model.position import (
    add_time,
    axis_taps,
    get_rope_shape,
    kernel_polynomials,
    sample_table,
    source_position,
    time_embedding,
    token_layout,
)
from tests.model.reference import keys_kernel, resample, time_row
from tests.model.samples import arrays_of

MODES = ("bicubic", "bilinear")
# growing, shrinking, one axis each way, unchanged, the smallest, the longest
SHAPES = [(2, 2), (6, 512), (512, 6), (36, 46), (46, 36), (64, 64), (16, 16), (2, 512), (128, 2), (64, 62), (100, 100)]
# sums of at most 16 products with weights of at most 1.3 in all, of values up to 3: a few fp32 roundings of 1.2e-7
RESAMPLED = 3e-6


def table_of(rows: int, columns: int, width: int = 5) -> Tensor:
    return torch.randn(rows, columns, width, generator=torch.Generator().manual_seed(rows + columns))


def one_item(height: int, width: int) -> position.TokenLayout:
    return token_layout(torch.tensor([[height, width]]), height * width)


# ------------------------------------------------------------------------------------------------------------- places

sides = st.integers(1, 12).map(lambda half: 2 * half)


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=5))
def test_layout_is_item_after_item_in_raster_order(grids: list[tuple[int, int]]):
    expected, start = [], 0
    for item, (height, width) in enumerate(grids):
        expected += [(item, start, height, width, y, x) for y in range(height) for x in range(width)]
        start += height * width
    layout = token_layout(torch.tensor(grids), start)
    assert all(part.dtype == torch.int64 for part in layout)
    assert list(zip(*(part.tolist() for part in layout), strict=True)) == expected


# ------------------------------------------------------------------------------------------------------ source position


@pytest.mark.parametrize("table_size", [64, 8])
def test_source_position_is_exact_for_every_place_up_to_512(table_size: int):
    """Each (position, size): the floor equals the rational number's, the fraction is its correctly rounded rest."""
    pairs = [(place, size) for size in range(1, 513) for place in range(size)]
    floors, fractions = source_position(*torch.tensor(pairs).unbind(1), table_size)
    assert floors.dtype == torch.int64
    assert fractions.dtype == torch.float32
    for (place, size), floor, fraction in zip(pairs, floors.tolist(), fractions.tolist(), strict=True):
        # the coordinate is a fraction of whole numbers: floor and rest in Python's exact arithmetic
        expected, rest = divmod((2 * place + 1) * table_size - size, 2 * size)
        assert floor == expected
        numerator, denominator = fraction.as_integer_ratio()
        # the quotient of two whole numbers below 2**24 is off by half a unit in the last place of fp32 at most
        assert abs(numerator * 2 * size - rest * denominator) << 24 <= rest * denominator


@pytest.mark.parametrize(("place", "size"), [(0, 512), (511, 512), (17, 46), (35, 36), (1, 2), (5, 6)])
def test_source_position_equals_a_fraction(place: int, size: int):
    """The definition once more, as the design states it."""
    exact = (place + Fraction(1, 2)) * 64 / size - Fraction(1, 2)
    floor, fraction = source_position(torch.tensor([place]), torch.tensor([size]), 64)
    assert floor.item() == math.floor(exact)
    assert fraction.item() == pytest.approx(float(exact - math.floor(exact)), rel=2**-24)


@pytest.mark.parametrize("size", [2, 6, 8, 64, 512])
def test_source_position_is_the_identity_at_the_size_of_the_table(size: int):
    places = torch.arange(size)
    floors, fractions = source_position(places, torch.full_like(places, size), size)
    assert torch.equal(floors, places)
    assert torch.equal(fractions, torch.zeros(size))


# --------------------------------------------------------------------------------------------------------- resampling


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("table_shape", [(64, 64), (8, 8), (10, 6)])
def test_both_forms_equal_float64(table_shape: tuple[int, int], shape: tuple[int, int], mode: str):
    """Against PyTorch's interpolate in float64 and against Keys' formula written out: two oracles, which agree too."""
    table = table_of(*table_shape)
    planes = table.double().permute(2, 0, 1).unsqueeze(0)
    interpolated = F.interpolate(planes, size=shape, mode=mode, align_corners=False)
    interpolated = interpolated.squeeze(0).permute(1, 2, 0).flatten(0, 1)
    written_out = torch.from_numpy(resample(table.double().numpy(), mode, *shape)).flatten(0, 1)
    assert (interpolated - written_out).abs().max() < 1e-12
    whole = get_rope_shape(table, mode, shape)
    by_token = sample_table(table, mode, one_item(*shape))
    for ours in (whole, by_token):
        assert ours.dtype == torch.float32
        assert ours.shape == written_out.shape
        # interpolate in fp32 computes the coordinate itself in fp32, near 64: 4e-6 off, times the slope of white noise
        assert (ours.double() - written_out).abs().max() <= (3e-5 if ours is whole else RESAMPLED)


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_both_forms_agree_on_the_table_of_a_tower(name: str):
    table = torch.from_numpy(arrays_of(name)["vision_tower.patch_embed.pos_emb.weight"]).float()
    mode = "bicubic" if name == "tiny" else "bilinear"
    for shape in SHAPES:
        difference = get_rope_shape(table, mode, shape) - sample_table(table, mode, one_item(*shape))
        assert difference.abs().max() <= RESAMPLED


@pytest.mark.parametrize("mode", MODES)
def test_resampling_to_the_same_size_is_the_identity(mode: str):
    table = table_of(64, 64)
    assert torch.equal(get_rope_shape(table, mode, (64, 64)), table.flatten(0, 1))
    assert torch.equal(sample_table(table, mode, one_item(64, 64)), table.flatten(0, 1))


def test_the_two_modes_differ():
    table = table_of(64, 64)
    for shape in ((36, 46), (100, 100)):
        difference = get_rope_shape(table, "bicubic", shape) - get_rope_shape(table, "bilinear", shape)
        assert difference.abs().max() > 0.1


def test_pillows_kernel_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    """The control: a = -0.5, and antialiasing when shrinking, are far outside the tolerances above."""
    table = table_of(64, 64)
    exact = torch.from_numpy(resample(table.double().numpy(), "bicubic", 36, 46)).flatten(0, 1)
    planes = table.permute(2, 0, 1).unsqueeze(0)
    smoothed = F.interpolate(planes, size=(36, 46), mode="bicubic", antialias=True).squeeze(0).permute(1, 2, 0)
    assert (smoothed.flatten(0, 1) - exact).abs().max() > 0.1
    monkeypatch.setattr(position, "kernel_polynomials", lambda mode: kernel_polynomials(mode, -0.5))
    assert (sample_table(table, "bicubic", one_item(36, 46)) - exact).abs().max() > 0.1


def test_axes_are_not_exchanged():
    table = torch.arange(64.0).reshape(64, 1, 1).expand(64, 64, 1)
    for rows in (get_rope_shape(table, "bilinear", (2, 4)), sample_table(table, "bilinear", one_item(2, 4))):
        assert rows.squeeze(1).tolist() == [15.5] * 4 + [47.5] * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_tables_are_resampled_in_fp32(mode: str, dtype: torch.dtype):
    table = table_of(64, 64).to(dtype)
    exact = torch.from_numpy(resample(table.double().numpy(), mode, 36, 46)).flatten(0, 1)
    for ours in (get_rope_shape(table, mode, (36, 46)), sample_table(table, mode, one_item(36, 46))):
        assert ours.dtype == torch.float32
        assert (ours.double() - exact).abs().max() <= 3e-5


@pytest.mark.parametrize("mode", MODES)
def test_packed_items_are_sampled_each_by_its_own_grid(mode: str):
    grids = [(4, 6), (2, 2), (12, 20), (64, 2)]
    table = table_of(64, 64)
    packed = sample_table(table, mode, token_layout(torch.tensor(grids), sum(h * w for h, w in grids)))
    alone = torch.cat([sample_table(table, mode, one_item(*grid)) for grid in grids])
    assert torch.equal(packed, alone)


@pytest.mark.parametrize("mode", MODES)
def test_kernel_polynomials_equal_the_kernel(mode: str):
    first, coefficients = kernel_polynomials(mode)
    for fraction in np.linspace(0, 1, 33):
        weights = [sum(row[tap] * fraction**power for power, row in enumerate(coefficients))
                   for tap in range(len(coefficients[0]))]  # fmt: skip
        distances = [first + tap - fraction for tap in range(len(weights))]
        if mode == "bicubic":
            expected = [keys_kernel(distance) for distance in distances]
        else:
            expected = [max(0.0, 1 - abs(distance)) for distance in distances]
        assert weights == pytest.approx(expected, abs=1e-14)
        assert sum(weights) == pytest.approx(1, abs=1e-14)


def test_taps_beyond_the_edge_are_the_edge():
    index, weight = axis_taps(torch.tensor([0, 511]), torch.tensor([512, 512]), 64, "bicubic")
    assert index.tolist() == [[0, 0, 0, 1], [62, 63, 63, 63]]
    assert index.dtype == torch.int64
    assert weight.sum(1).tolist() == pytest.approx([1, 1], abs=1e-6)


# --------------------------------------------------------------------------------------------------------------- time


@pytest.mark.parametrize("width", [1152, 1024, 96])
def test_time_embedding_has_all_sines_first(width: int):
    rows = np.array(time_embedding(4, width))
    assert rows.shape == (4, width)
    for frame in range(4):
        np.testing.assert_allclose(rows[frame], time_row(frame, width), rtol=0, atol=1e-12)
    # the first frame's embedding is not zero
    np.testing.assert_array_equal(rows[0], [0.0] * (width // 2) + [1.0] * (width // 2))
    assert rows[1, 0] == math.sin(1)
    assert rows[1, width // 2] == math.cos(1)


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_frames_of_a_clip_are_embedded_and_an_image_is_not(frames: int):
    pos = table_of(4, 6, 96).flatten(0, 1)
    embedded = add_time(pos, frames, 4)
    assert embedded.shape == (frames, 24, 96)
    assert embedded.dtype == torch.float32
    if frames == 1:
        assert torch.equal(embedded[0], pos)
        return
    for frame in range(frames):
        exact = pos.double() + torch.from_numpy(time_row(frame, 96))
        # two fp32 roundings, of the embedding and of the sum, of numbers below 8
        assert (embedded[frame].double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("frames", [1, 2])
def test_family_without_time_axis_adds_nothing(frames: int):
    pos = table_of(4, 6, 96).flatten(0, 1)
    embedded = add_time(pos, frames, 1)
    assert torch.equal(embedded, torch.stack([pos] * frames))
