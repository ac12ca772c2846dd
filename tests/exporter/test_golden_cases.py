"""Which calls a golden set is recorded on, and what their pixels are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import numpy as np
import pytest
import towers

from exporter import cli
from exporter.commands.options import GridSize
from exporter.errors import Usage
from exporter.onnx_artifact import OnnxRequest, _plain_options
from exporter.validation.golden_cases import (
    CLIPS,
    DEFAULT_GRIDS,
    DIRECTION_CALLS,
    GoldenOptions,
    case_pixels,
    plan_cases,
    size_text,
)
from model.preprocess_rule import RULES

BF16 = GoldenOptions("bfloat16")
PACKED = GoldenOptions("bfloat16", "packed")


def plan(options: GoldenOptions, preset: str = "tiny"):
    config = towers.config_of(preset)
    return plan_cases(config, options, RULES[config.family])


def calls(options: GoldenOptions, preset: str = "tiny") -> set:
    return {(case.frames, case.grids) for case in plan(options, preset)}


@pytest.mark.parametrize("options", [BF16, PACKED, dataclasses.replace(PACKED, sizes=((2, ((6, 8), (2, 2))),))])
def test_every_call_has_one_photo_and_one_noise_input(options: GoldenOptions) -> None:
    cases = plan(options)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    for frames, grids in calls(options):
        own = [case for case in cases if (case.frames, case.grids) == (frames, grids)]
        assert sorted(case.kind for case in own) == ["noise", "photo"]


def test_the_default_calls_fill_a_profile_of_4096_tokens_with_images_and_with_clips() -> None:
    found = calls(BF16)
    assert {(1, (grid,)) for grid in DEFAULT_GRIDS} < found
    assert set(CLIPS) < found
    assert 4096 - 4 * 2 * 34 < 4 * 30 * 34 <= 4096  # no more rows of this width would fit
    assert (4, ((30, 34),)) in found and (1, ((64, 64),)) in found
    assert all(frames == 1 for frames, _ in calls(BF16, "tiny-vl"))  # Kimi-VL has no clips


@pytest.mark.parametrize(("limit", "clips"), [(4, 0), (479, 0), (480, 1), (4079, 1), (4080, 2)], ids=str)
def test_a_clip_counts_all_its_frames_against_the_limit(limit: int, clips: int) -> None:
    found = calls(dataclasses.replace(PACKED, max_patches=limit))
    assert sum(frames == 4 for frames, _ in found) == clips
    assert max(frames * sum(h * w for h, w in grids) for frames, grids in found) <= limit


def test_what_is_asked_for_comes_beyond_the_limit_and_only_once() -> None:
    sizes = ((1, ((16, 16),)), (1, ((80, 60),)), (4, ((10, 12),)), (3, ((4, 6),)), (3, ((4, 6),)))
    cases = plan(dataclasses.replace(BF16, max_patches=300, sizes=sizes))
    names = ("2x2", "16x16", "clip2-2x2", "80x60", "clip4-10x12", "clip3-4x6")
    assert [case.name for case in cases] == [f"{name}-{kind}" for name in names for kind in ("photo", "noise")]


def test_calls_with_equal_first_items_have_names_of_their_own() -> None:
    sizes = tuple((1, ((8, 8), (2, last))) for last in (2, 4, 6))
    cases = plan(dataclasses.replace(PACKED, max_patches=4, sizes=(*sizes, (2, ((8, 8), (2, 2))))))
    assert [case.name for case in cases if case.kind == "noise"] == [
        "2x2-noise", "items2-8x8-noise", "items2-8x8-2-noise", "items2-8x8-3-noise", "clip2-items2-8x8-noise",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("preset", "options", "size", "words"),
    [
        ("tiny", BF16, (1, ((3, 4),)), "3x4: sides must be even"),
        ("tiny", BF16, (1, ((0, 4),)), "0x4: sides must be even"),
        ("tiny", BF16, (1, ((4, 514),)), "4x514: sides must be even"),
        ("tiny", PACKED, (1, ((4, 4), (4, 5))), "4x4[+]4x5: sides must be even"),
        ("tiny", BF16, (5, ((4, 4),)), "5x4x4: 5 frames; kimi_k25 takes 1 to 4"),
        ("tiny", BF16, (0, ((4, 4),)), "0x4x4: 0 frames"),
        ("tiny-vl", BF16, (2, ((4, 4),)), "2x4x4: 2 frames; kimi_vl takes 1 to 1"),
        ("tiny", BF16, (1, ((4, 4), (2, 2))), "4x4[+]2x2: several items in one call need --packing packed"),
    ],
)
def test_what_no_artifact_could_take_is_refused(preset: str, options: GoldenOptions, size, words: str) -> None:
    with pytest.raises(Usage, match=words):
        plan(dataclasses.replace(options, sizes=(size,)), preset)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("36x46", (1, ((36, 46),))),
        ("4x30x34", (4, ((30, 34),))),
        ("36x46+16x16", (1, ((36, 46), (16, 16)))),
        ("2x6x8+2x2x4+2x512x2", (2, ((6, 8), (2, 4), (512, 2)))),
    ],
)
def test_sizes_are_read_and_written_alike(text: str, size) -> None:
    assert GridSize().convert(text, None, None) == size
    assert size_text(size) == text
    assert GridSize().convert(size, None, None) == size
    request = OnnxRequest("random:tiny", Path("out"), golden_sizes=(size, size))
    assert json.loads(json.dumps(_plain_options(request)))["golden_sizes"] == [text, text]


@pytest.mark.parametrize(
    "text", ["", "36", "36x", "x46", "36x46+", "+36x46", "1x2x3x4", "36 x46", "-2x4", "36x46+2x4x4", "99999x2", "a"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"HxW|equally many frames"):
        GridSize().convert(text, None, None)


@pytest.mark.parametrize(
    ("size", "words"), [("4x4+2x2", "--packing packed"), ("5x4x4", "5 frames"), ("2x4x4+4x4", "equally many frames")]
)
def test_the_command_line_refuses_before_anything_long_begins(size: str, words: str, tmp_path, capsys) -> None:
    code = cli.run(["golden", "random:tiny", "-o", str(tmp_path / "out"), "--golden-sizes", size])
    assert code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", ["tiny", "tiny-k3", "tiny-vl"])
def test_directions_are_kept_on_small_calls_of_each_kind(preset: str) -> None:
    kept = [case for case in plan(PACKED, preset) if case.keeps_directions]
    assert all(case.kind == "noise" and case.frames * case.patches <= 480 for case in kept)
    expected = {call for call in DIRECTION_CALLS if call[0] == 1 or preset != "tiny-vl"}
    assert {(case.frames, case.grids) for case in kept} == expected


def test_photos_of_frames_and_items_lie_within_the_photo_and_differ() -> None:
    """Seven items with four frames: the cut moves to every place that it has, and none beyond the edge."""
    size = (4, tuple((4, 4) for _ in range(7)))
    case = next(c for c in plan(dataclasses.replace(PACKED, sizes=(size,))) if c.frames == 4 and len(c.grids) == 7)
    assert case.kind == "photo"
    pixels = case_pixels(case, PACKED, RULES["kimi_k25"])
    assert pixels.shape == (4, 7 * 16, 588) and np.abs(pixels).max() <= 1
    parts = [pixels[frame, 16 * item : 16 * item + 16] for frame in range(4) for item in range(7)]
    for index, part in enumerate(parts):
        assert not any(np.array_equal(part, other) for other in parts[index + 1 :])
