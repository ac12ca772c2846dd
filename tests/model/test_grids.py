"""Which grids are accepted, by a predicate of our own, and with which words the others are refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.config import PRESETS
from model.errors import ImageError, InputError
from model.grids import check_grids

KIMI_VL, K25 = PRESETS["kimi-vl"], PRESETS["kimi-k2.5"]

numbers = st.one_of(st.integers(-2, 8), st.sampled_from([510, 511, 512, 513, 514, 1024]))
grids = st.lists(st.tuples(st.integers(-1, 6), numbers, numbers), max_size=4)


@given(grids, st.sampled_from([KIMI_VL, K25, PRESETS["tiny-k3"]]), st.sampled_from([0, 0, 0, -4, -1, 1, 4]))
def test_accepts_exactly_what_the_formulas_cover(items, config, missing):
    """Even sides from 2 to 512, 1 to 4 frames (1 in Kimi-VL), and as many patches as the grids say."""
    patches = sum(t * h * w for t, h, w in items)
    most = 1 if config.family == "kimi_vl" else 4
    good = all(1 <= t <= most and all(side in range(2, 513, 2) for side in (h, w)) for t, h, w in items)
    if good and not missing:
        check_grids(items, patches, config)
        return
    with pytest.raises(ImageError) as error:
        check_grids(items, patches + missing, config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("items", "patches", "message"),
    [
        ([(1, 3, 4)], 12, "item 0: 3 rows; expected an even number from 2 to 512"),
        ([(1, 4, 6), (1, 4, 513)], 2076, "item 1: 513 columns; expected an even number from 2 to 512"),
        ([(5, 2, 2)], 20, "item 0: 5 frames; kimi_k25 takes 1 to 4"),
        ([(1, 4, 6)], 20, "grids ask for 24 patches, pixel_values has 20; check the image processor"),
        ([(4, 6)], 24, "item 0: grid (4, 6) is not (frames, rows, columns)"),
        ([(1, 1, 4, 6)], 24, "item 0: grid (1, 1, 4, 6) is not (frames, rows, columns)"),
    ],
)
def test_message(items, patches, message):
    with pytest.raises(ImageError) as error:
        check_grids(items, patches, K25)
    assert str(error.value) == message
    assert isinstance(error.value, InputError)


@pytest.mark.parametrize("side", [0, 1, 3, 511, 513, 514])
def test_sides_just_outside(side):
    for items in ([(1, 2, side)], [(1, side, 2)]):
        with pytest.raises(ImageError, match=f"{side} (rows|columns)"):
            check_grids(items, 2 * side, K25)


@pytest.mark.parametrize("side", [2, 4, 510, 512])
def test_sides_just_inside(side):
    check_grids([(1, 2, side), (4, side, 2)], 10 * side, K25)


def test_kimi_vl_has_no_frames():
    with pytest.raises(ImageError, match="2 frames; kimi_vl takes 1 to 1"):
        check_grids([(2, 2, 2)], 8, KIMI_VL)
    check_grids([(1, 2, 2)], 4, KIMI_VL)


def test_frames_follow_the_config():
    config = dataclasses.replace(K25, pos_emb_time=2)
    check_grids([(2, 2, 2)], 8, config)
    with pytest.raises(ImageError, match="3 frames"):
        check_grids([(3, 2, 2)], 12, config)
