"""Optimisation profiles: their corners, what covers them, the memory they ask for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import Usage
from exporter.trt.profiles import (
    attention_bytes,
    default_profiles,
    describe,
    gibibytes,
    parse_profiles,
    tightest,
    tokens,
    uncovered,
)
from exporter.validation.evidence import Profile, Shape, contains

# the shapes of a default golden set: seven single grids, two for directions, two clips, two calls of several items
SINGLE = [Shape(1, patches, 1) for patches in (4, 256, 320, 1656, 3072, 4096)]
CLIPS = [Shape(2, 4, 1), Shape(4, 120, 1), Shape(4, 1020, 1)]
SEVERAL = [Shape(1, 316, 3), Shape(1, 76, 2), Shape(1, 8, 2)]
shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 1024).map(lambda n: 4 * n), st.integers(1, 3))


def test_default_profiles_are_those_of_the_golden_set():
    images, clips, packed = default_profiles([*SINGLE, *CLIPS, *SEVERAL])
    assert images == Profile("images", Shape(1, 4, 1), Shape(1, 1656, 1), Shape(1, 4096, 1))
    assert clips == Profile("clips", Shape(2, 4, 1), Shape(4, 1020, 1), Shape(4, 1020, 1))
    assert packed == Profile("packed", Shape(1, 8, 2), Shape(1, 316, 3), Shape(1, 316, 3))
    assert uncovered((images, clips, packed), [*SINGLE, *CLIPS, *SEVERAL]) == []
    (line,) = uncovered((images,), SINGLE[:-1])
    assert line == "the max of profile images (1 frames, 4096 patches, 1 items) has no golden case"
    tight = Profile("tight", Shape(1, 4, 1), Shape(1, 256, 1), Shape(1, 256, 1))
    (line,) = uncovered((images, tight), SINGLE)
    assert "min of profile images" in line
    assert "runs in tight, which is tighter" in line


def test_larger_cases_are_left_to_the_option():
    (profile,) = default_profiles([*SINGLE, Shape(1, 16384, 1)])
    assert profile.max.patches == 4096


def test_without_a_golden_set_there_is_a_usual_profile():
    (profile,) = default_profiles([])
    assert (profile.min, profile.max) == (Shape(1, 4, 1), Shape(1, 4096, 1))


@given(st.lists(shapes, min_size=1, max_size=8))
def test_default_profiles_take_every_case_of_the_set(cases):
    profiles = default_profiles(cases)
    for case in cases:
        # a clip of several items lies with the packed calls
        assert any(contains(profile, case) for profile in profiles)


@pytest.mark.parametrize(
    ("texts", "frames", "items", "expected"),
    [
        (["4:1024:4096"], None, None, [Profile("profile", Shape(1, 4, 1), Shape(1, 1024, 1), Shape(1, 4096, 1))]),
        (["4:256:1024"], "4", None, [Profile("profile", Shape(1, 4, 1), Shape(1, 256, 1), Shape(4, 1024, 1))]),
        (["4:256:1024"], "2:3:4", "3", [Profile("profile", Shape(2, 4, 1), Shape(3, 256, 1), Shape(4, 1024, 3))]),
        (["4:4:4"], "1:1:1", "2:2:2", None),
        (
            ["4:64:256", "256:1024:16384"],
            None,
            None,
            [
                Profile("profile0", Shape(1, 4, 1), Shape(1, 64, 1), Shape(1, 256, 1)),
                Profile("profile1", Shape(1, 256, 1), Shape(1, 1024, 1), Shape(1, 16384, 1)),
            ],
        ),
    ],
)
def test_profiles_are_parsed(texts, frames, items, expected):
    if expected is None:  # four patches cannot hold two items
        with pytest.raises(Usage, match="do not hold 2 items"):
            parse_profiles(texts, frames, items, max_frames=4, packed=True)
        return
    assert list(parse_profiles(texts, frames, items, max_frames=4, packed=True)) == expected


@pytest.mark.parametrize(
    ("texts", "frames", "items", "named"),
    [
        (["4:1024"], None, None, {}),
        (["4:1024:x"], None, None, {}),
        (["4:1024:512"], None, None, {}),
        (["0:4:8"], None, None, {}),
        (["2:4:8"], None, None, {}),
        (["6:1024:4096"], None, None, {}),
        (["4:1024:16388"], None, None, {}),
        (["4:8:16", "4:12:16"], None, None, {}),
        (["4:8:16"], "5", None, {}),
        (["4:8:16"], "0", None, {}),
        (["4:8:16"], "2", None, {"max_frames": 1}),
        (["4:8:16"], None, "2", {"packed": False}),
        (["4:8:16"], None, "1:2", {}),
    ],
)
def test_wrong_profiles_are_usage_errors(texts, frames, items, named):
    with pytest.raises(Usage, match=r"--profile|--frames|--items"):
        parse_profiles(texts, frames, items, **{"max_frames": 4, "packed": True, **named})


def test_the_tightest_profile_wins_whatever_its_place():
    wide = Profile("wide", Shape(1, 4, 1), Shape(1, 1024, 1), Shape(4, 4096, 1))
    tight = Profile("tight", Shape(1, 4, 1), Shape(1, 64, 1), Shape(1, 256, 1))
    for order in ((wide, tight), (tight, wide)):
        assert order[tightest(order, Shape(1, 256, 1))] is tight
        assert order[tightest(order, Shape(1, 260, 1))] is wide
        with pytest.raises(ValueError, match=r"4100 patches, where this engine takes .*4 to 4096.*"):
            tightest(order, Shape(1, 4100, 1))


@given(st.lists(st.tuples(shapes, shapes), min_size=1, max_size=4), shapes)
def test_a_call_goes_to_a_profile_that_holds_it_or_is_refused(corners, shape):
    profiles = []
    for a, b in corners:
        low = Shape(min(a.frames, b.frames), min(a.patches, b.patches), min(a.items, b.items))
        high = Shape(max(a.frames, b.frames), max(a.patches, b.patches), max(a.items, b.items))
        profiles.append(Profile("p", low, low, high))
    if any(contains(profile, shape) for profile in profiles):
        chosen = profiles[tightest(profiles, shape)]
        assert contains(chosen, shape)
        assert all(
            tokens(chosen.max) * chosen.max.items <= tokens(p.max) * p.max.items for p in profiles if contains(p, shape)
        )
    else:
        with pytest.raises(ValueError, match=r"this engine takes|fit no profile"):
            tightest(profiles, shape)


def test_memory_of_attention_is_that_of_its_formula():
    profile = Profile("p", Shape(1, 4, 1), Shape(1, 1024, 1), Shape(4, 4096, 1))
    # 16 heads, 16384 x 16384 logits and as many probabilities, 2 bytes each: 16 GiB; a mask adds one 32nd
    assert attention_bytes([profile], 16, 2, packed=False) == 16 << 30
    assert attention_bytes([profile], 16, 4, packed=True) == (32 << 30) + (1 << 30)
    assert gibibytes(16 << 30) == "16 GiB"
    assert gibibytes(1536) == "1.5 KiB"


def test_a_profile_is_described_in_words():
    text = describe(Profile("clips", Shape(1, 4, 1), Shape(4, 120, 1), Shape(4, 1020, 1)))
    assert text == "clips: 4 to 1020 patches (tuned for 120), 1 to 4 frames (tuned for 4)"
    assert describe(Profile("p", Shape(1, 4, 1), Shape(1, 4, 1), Shape(1, 4, 1))) == "p: 4 patches"
