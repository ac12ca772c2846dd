"""The preprocessing rule against worked examples, formulas, and resamplers that are not ours."""

import ast
import dataclasses
import functools
import importlib.util
import json
import math
import os
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from model.checkpoint_writer import hub_preprocessor_config
from model.config import FAMILY_DEFAULTS
from model.errors import ConfigError, ImageError
from model.preprocess import (
    MAX_PIXELS,
    check_grids,
    chunk_frames,
    load_image,
    preprocess,
    preprocess_clip,
    preprocess_many,
    sample_frames,
    target_size,
)
from model.preprocess_rule import RULES, load_rule, parse_rule

VL, K25, K3 = (RULES[family] for family in ("kimi_vl", "kimi_k25", "kimi_k3"))
FOLDER = Path(__file__).parents[2]


def noise(width, height, channels=3, seed=0):
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, array, **options):
    Image.fromarray(array).save(path, **options)
    return path


def whole(pixel_values, grid):
    """The padded picture as uint8 [t, H, W, 3], put together again pixel by pixel from the definition of a patch."""
    t, h, w = grid.tolist()
    picture = np.empty((t, h * 14, w * 14, 3))
    for n, patch in enumerate(pixel_values):
        frame, row, column = n // (h * w), n // w % h, n % w
        picture[frame, row * 14 : row * 14 + 14, column * 14 : column * 14 + 14] = np.moveaxis(patch, 0, 2)
    return np.rint((picture * 0.5 + 0.5) * 255).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------- sizes

# width, height, resized, padded, (h, w), rows of output: run on transformers' Kimi_K25ImageProcessor
WORKED = [
    (1024, 768, (1024, 768), (1036, 784), (56, 74), 1036),
    (640, 480, (640, 480), (644, 504), (36, 46), 414),
    (3000, 200, (3000, 200), (3024, 224), (16, 216), 864),
    (1, 1, (1, 1), (28, 28), (2, 2), 1),
    (5000, 5000, (1792, 1792), (1792, 1792), (128, 128), 4096),
    (224, 224, (224, 224), (224, 224), (16, 16), 64),
    (225, 223, (225, 223), (252, 224), (16, 18), 72),
    (1920, 1080, (1920, 1080), (1932, 1092), (78, 138), 2691),
    (4000, 3000, (2073, 1554), (2100, 1568), (112, 150), 4200),
    (100, 10000, (71, 7168), (84, 7168), (512, 6), 768),
    (10000, 100, (7168, 71), (7168, 84), (6, 512), 768),
    (7168, 7168, (1792, 1792), (1792, 1792), (128, 128), 4096),
]
# where K3's larger budget changes the outcome
WORKED_K3 = {
    (5000, 5000): ((3585, 3585), (3612, 3612), (258, 258), 16641),
    (4000, 3000): ((4000, 3000), (4004, 3024), (216, 286), 15444),
    (7168, 7168): ((3584, 3584), (3584, 3584), (256, 256), 16384),
}
WORKED_VL = [*WORKED[:4], (5000, 5000, (896, 896), (896, 896), (64, 64), 1024)]
ROWS = [
    *((K25, row) for row in WORKED),
    *((K3, (*row[:2], *WORKED_K3.get(row[:2], row[2:]))) for row in WORKED),
    *((VL, row) for row in WORKED_VL),
]


@pytest.mark.parametrize(("rule", "row"), ROWS, ids=lambda value: getattr(value, "family", value))
def test_worked_examples(rule, row):
    width, height, resized, padded, grid, rows = row
    assert target_size(width, height, rule) == (resized, padded, grid)
    assert grid[0] * grid[1] // 4 == rows


@pytest.mark.parametrize("row", [row for row in WORKED if row[0] * row[1] < 3e6], ids=str)
def test_worked_examples_resized_for_real(row):
    """transformers 5.14.0 swapped height and width; a grid that is not square shows it."""
    pixels, grid = preprocess(Image.new("RGB", row[:2], (9, 99, 199)), K25)
    assert grid.tolist() == [1, *row[4]]
    assert pixels.shape == (row[4][0] * row[4][1], 3, 14, 14)
    picture = whole(pixels, grid)[0]
    assert (picture[: row[2][1], : row[2][0]] == (9, 99, 199)).all()
    assert not picture[row[2][1] :].any()
    assert not picture[:, row[2][0] :].any()


def test_padding_may_exceed_the_budget():
    h, w = target_size(4000, 3000, K25).grid
    assert h * w == 16800 > K25.patch_budget
    assert target_size(1821, 7069, K3).grid == (506, 132)  # the most rows that K3 can give: 16,698
    assert target_size(10000, 10000, K3).grid == (258, 258)


@pytest.mark.parametrize(("width", "height"), [(8000, 100), (100, 8000), (7141, 20), (20, 7141)])
def test_kimi_vl_refuses_512_patches_on_a_side(width, height):
    with pytest.raises(ImageError, match=f"{width}x{height}.*kimi_vl takes fewer than 512 on a side"):
        target_size(width, height, VL)


def test_kimi_vl_takes_510_patches_and_keeps_an_aspect_ratio_that_loses_a_side():
    assert target_size(7140, 20, VL).grid == (2, 510)
    # 14 x 200 patches in a budget of one: the short side must not vanish
    assert target_size(14, 2800, dataclasses.replace(VL, patch_budget=1)).resized == (1, 197)


def test_first_size_beyond_the_budget():
    """By hand: 64 x 65 patches give sqrt(4096 / 4160) = 0.99228, and 13 pixels count as one patch: sqrt(300 / 512)."""
    assert target_size(896, 896, VL).resized == (896, 896)
    assert target_size(896, 910, VL).resized == (889, 902)
    assert target_size(13, 7168, dataclasses.replace(K25, patch_budget=300)).resized == (9, 5486)


def test_thinking_budget_keeps_1792_pixels():
    assert target_size(1792, 1792, parse_rule({"in_token_limit": 16384}, "kimi_vl")).resized == (1792, 1792)
    assert target_size(1792, 1792, VL).resized == (896, 896)


@functools.cache
def transformers_rule():
    """navit_resize, cut out of transformers' processor: the module itself needs torchvision, the function only math."""
    pytest.importorskip("transformers")
    path = Path(importlib.util.find_spec("transformers").origin).parent / "models/kimi_k25/image_processing_kimi_k25.py"
    if not path.exists():
        pytest.skip("transformers below 5.14")
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "navit_resize"]
    names = {"math": math}
    exec(compile(tree, str(path), "exec"), names)
    return names["navit_resize"]


SIDES = st.integers(1, 30_000) | st.sampled_from([13, 14, 27, 28, 29, 7140, 7167, 7168, 7169, 14336])


@settings(max_examples=300, deadline=None)
@given(SIDES, SIDES, st.sampled_from([K25, K3]), st.integers(1, 70_000) | st.none())
def test_sizes_equal_transformers(width, height, rule, budget):
    rule = dataclasses.replace(rule, patch_budget=budget or rule.patch_budget)
    size = target_size(width, height, rule)
    expected = transformers_rule()(height, width, 14, 2, rule.patch_budget, rule.side_limit)
    assert (size.resized[::-1], size.padded[::-1]) == expected


@settings(max_examples=300, deadline=None)
@given(SIDES, SIDES, st.sampled_from([VL, K25, K3]))
def test_sizes_are_even_padded_and_never_enlarged(width, height, rule):
    try:
        (new_w, new_h), padded, grid = target_size(width, height, rule)
    except ImageError:
        assert rule is VL
        assert max(width, height) > 7140
        return
    assert 1 <= new_w <= width
    assert 1 <= new_h <= height
    for new, pad, patches in zip((new_w, new_h), padded, grid[::-1], strict=True):
        assert pad % 28 == 0
        assert new <= pad < new + 28
        assert patches * 14 == pad
        assert 2 <= patches <= 512
    check_grids([[1, *grid]], grid[0] * grid[1], rule)


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 5)])
def test_no_pixels(width, height):
    with pytest.raises(ImageError, match="has no pixels"):
        target_size(width, height, K25)


# --------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("rule", [VL, K25, K3], ids=lambda rule: rule.family)
def test_patch_order_probe(rule):
    """Six constant patches of a 42x28 image, the fourth column being padding."""
    values = np.array([[0, 10, 20], [30, 40, 50]], dtype=np.uint8)
    pixels, grid = preprocess(Image.fromarray(np.kron(values, np.ones((14, 14), np.uint8))), rule)
    assert grid.tolist() == [1, 2, 4]
    assert pixels.dtype == np.float32
    assert grid.dtype == np.int64
    assert np.ptp(pixels, axis=(1, 2, 3)).max() == 0
    assert np.rint((pixels[:, 0, 0, 0] * 0.5 + 0.5) * 255).tolist() == [0, 10, 20, 0, 30, 40, 50, 0]
    assert (pixels[[3, 7]] == -1).all()


def test_order_inside_a_patch_and_normalisation():
    """Channel, row, column; 30 x 20 pixels so that height and width differ, every value different enough to place."""
    image = noise(30, 20)
    pixels, grid = preprocess(Image.fromarray(image), K25)
    assert grid.tolist() == [1, 2, 4]
    for n, channel, py, px in [(0, 0, 0, 0), (0, 2, 13, 1), (1, 1, 3, 7), (2, 0, 4, 1), (4, 1, 5, 9), (6, 2, 0, 1)]:
        y, x = n // 4 * 14 + py, n % 4 * 14 + px
        # half an ulp of the division and half one of the result, both at most 2**-24 for values up to 1
        assert abs(pixels[n, channel, py, px] - (image[y, x, channel] / 255 - 0.5) / 0.5) <= 2**-23
    assert pixels[2, 0, 0, 2] == -1  # column 30 is the first padded one
    assert pixels[4, 0, 6, 0] == -1  # row 20 is the first padded one


def test_every_level_is_normalised_in_float32():
    pixels, _ = preprocess(Image.fromarray(np.arange(256, dtype=np.uint8)[None]), K25)
    levels = np.concatenate([patch[0, 0] for patch in pixels[: pixels.shape[0] // 2]])[:256]
    exact = (np.arange(256) / 255 - 0.5) / 0.5
    assert np.abs(levels - exact).max() <= 2**-23
    assert levels[[0, 255]].tolist() == [-1, 1]
    np.testing.assert_array_equal(levels, (np.arange(256) / 255).astype(np.float32) * np.float32(2) - np.float32(1))


def keys_matrix(old, new):
    """Antialiased bicubic, a = -0.5, float64 [new, old]: Keys' kernel stretched by the reduction, rows summing to 1."""
    scale = old / new
    z = np.abs(np.arange(old)[None] + 0.5 - (np.arange(new)[:, None] + 0.5) * scale) / max(scale, 1.0)
    near, far = 1.5 * z**3 - 2.5 * z**2 + 1, -0.5 * z**3 + 2.5 * z**2 - 4 * z + 2
    weights = np.where(z < 1, near, np.where(z < 2, far, 0.0))
    return weights / weights.sum(1, keepdims=True)


def resample(image, width, height):
    """Columns, then rows. 8-bit pixels in between, as 8-bit resamplers keep them: noise overshoots and is clipped."""
    step = np.einsum("xc,ycd->yxd", keys_matrix(image.shape[1], width), image.astype(np.float64))
    return np.einsum("yr,rxd->yxd", keys_matrix(image.shape[0], height), np.rint(step).clip(0, 255)).clip(0, 255)


@pytest.mark.parametrize(
    ("rule", "budget"), [(K25, 300), (K25, 900), (K3, 300), (VL, 300)], ids=["k25", "k25-less", "k3", "vl"]
)
@pytest.mark.parametrize("kind", ["noise", "photo"])
def test_downscale_is_an_antialiased_bicubic(rule, budget, kind):
    """Without antialias the mean error is above 3 levels; the two passes here differ from Pillow's by rounding only."""
    image = photo() if kind == "photo" else noise(601, 433)
    pixels, grid = preprocess(Image.fromarray(image), dataclasses.replace(rule, patch_budget=budget))
    width, height = target_size(image.shape[1], image.shape[0], dataclasses.replace(rule, patch_budget=budget)).resized
    assert width < image.shape[1]
    error = np.abs(whole(pixels, grid)[0, :height, :width] - resample(image, width, height))
    assert error.max() <= 2
    assert error.mean() < 0.5  # rounding to whole levels alone gives 0.25


def photo():
    folder = pytest.importorskip("matplotlib").get_data_path()
    return np.asarray(Image.open(Path(folder) / "sample_data" / "grace_hopper.jpg").convert("RGB"))


def test_a_photo_that_fits_keeps_every_pixel():
    image = photo()
    pixels, grid = preprocess(Image.fromarray(image), K25)
    height, width = image.shape[:2]
    np.testing.assert_array_equal(whole(pixels, grid)[0, :height, :width], image)


# ---------------------------------------------------------------------------------------------------- modes

# EXIF orientation: how the stored rows and columns become upright
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp"])
def test_exif_orientation(tmp_path, orientation, suffix):
    stored = noise(40, 25)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / f"turned{suffix}", stored, exif=exif, **({"lossless": True} if suffix == ".webp" else {}))
    np.testing.assert_array_equal(np.asarray(load_image(path)), UPRIGHT[orientation](stored))
    if orientation == 6:
        assert preprocess(path, K25)[1].tolist() == [1, 4, 2]
        assert preprocess(path, K3)[1].tolist() == [1, 4, 2]
        with Image.open(path) as image:
            assert preprocess(image, K25)[1].tolist() == [1, 4, 2]


def test_grey_is_the_same_in_three_channels(tmp_path):
    grey = noise(33, 21, 1)
    image = load_image(save(tmp_path / "grey.png", grey))
    assert image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(image), np.repeat(grey[..., None], 3, 2))


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path, suffix):
    values = np.array([[0, 128, 129, 257, 32768, 65278, 65535]], dtype=np.uint16)
    image = np.asarray(load_image(save(tmp_path / f"deep{suffix}", values)))
    assert image[0, :, 0].tolist() == [round(value / 257) for value in values[0].tolist()]
    assert image[0, :, 0].tolist() == [0, 0, 1, 1, 128, 254, 255]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bit_grey_is_refused(tmp_path, mode):
    path = tmp_path / "deep.tif"
    Image.new(mode, (5, 5)).save(path)
    with pytest.raises(ImageError, match=rf"deep\.tif: 32-bit pixels \(mode {mode}\).*convert it to 8 bits"):
        load_image(path)


def test_cmyk_and_one_bit(tmp_path):
    cmyk = tmp_path / "print.tif"
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(cmyk)  # magenta and yellow ink: red
    assert load_image(cmyk).getpixel((1, 1)) == (255, 0, 0)
    bits = tmp_path / "fax.png"
    Image.fromarray(np.array([[True, False]])).save(bits)
    assert [load_image(bits).getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (0, 0, 0)]


@pytest.mark.parametrize("rule", [VL, K25], ids=lambda rule: rule.family)
def test_alpha_is_dropped(tmp_path, rule):
    """Not composited: a transparent black pixel stays black (transformers' own processor makes it white)."""
    rgba = noise(30, 20, 4)
    rgba[:5] = 0
    pixels, grid = preprocess(save(tmp_path / "clear.png", rgba), rule)
    np.testing.assert_array_equal(whole(pixels, grid)[0, :20, :30], rgba[..., :3])
    assert pixels[0, 0, 0, 0] == -1
    np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "clear.png")), rgba[..., :3])


def test_grey_with_alpha_drops_it(tmp_path):
    pair = noise(30, 20, 2)
    path = tmp_path / "la.png"
    Image.fromarray(pair, "LA").save(path)
    np.testing.assert_array_equal(np.asarray(load_image(path)), np.repeat(pair[..., :1], 3, 2))


def palette_image(transparency):
    image = Image.fromarray(noise(30, 20, 1) % 3)
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette([200, 10, 30, 5, 6, 7, 90, 80, 70])
    return image, {} if transparency is None else {"transparency": transparency}


@pytest.mark.parametrize("transparency", [None, 1, b"\x00\x80\xff"])
def test_palette_gives_its_colours_without_a_warning(tmp_path, transparency):
    image, options = palette_image(transparency)
    image.save(tmp_path / "p.png", **options)
    colours = np.array([[200, 10, 30], [5, 6, 7], [90, 80, 70]], dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = np.asarray(load_image(tmp_path / "p.png"))
    np.testing.assert_array_equal(found, colours[np.asarray(image)])


def test_first_frame_of_an_animation(tmp_path):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "two.png", save_all=True, append_images=frames[1:])
    assert load_image(tmp_path / "two.png").getpixel((3, 3)) == (255, 0, 0)


# ------------------------------------------------------------------------------------------ K3 transparency


def board(width, height):
    return np.array([[255 if (y // 8 + x // 8) % 2 == 0 else 180 for x in range(width)] for y in range(height)])


def test_k3_lays_transparent_pixels_over_a_chessboard(tmp_path):
    """smg-project/smg#1984: K3 treated as K2.5 shows black where the reference shows squares of 1.0 and 0.4118."""
    pixels, grid = preprocess(save(tmp_path / "clear.png", np.zeros((44, 52, 4), np.uint8)), K3)
    np.testing.assert_array_equal(whole(pixels, grid)[0, :44, :52], np.repeat(board(52, 44)[..., None], 3, 2))
    assert pixels[0, 0, 0, 0] == 1
    assert pixels[0, 0, 0, 8] == pytest.approx(0.4118, abs=5e-5)  # four digits are given
    assert pixels[0, 0, 7, 8] == pixels[0, 0, 8, 7] != pixels[0, 0, 8, 8]
    assert pixels[-1, 0, -1, -1] == -1  # padding stays black


def test_k3_blends_and_truncates():
    rgba = noise(44, 52, 4, seed=3)
    pixels, grid = preprocess(Image.fromarray(rgba), K3)
    alpha = rgba[..., 3:] / 255
    exact = alpha * rgba[..., :3] + (1 - alpha) * board(44, 52)[..., None]
    found = whole(pixels, grid)[0, :52, :44]
    # float32 may fall just below a whole number that float64 reaches, nothing else
    clear = np.abs(exact - np.rint(exact)) > 1e-4
    np.testing.assert_array_equal(found[clear], np.floor(exact[clear]))
    assert np.abs(found - exact).max() <= 1 + 1e-4
    assert (exact - found > 0.6).any()  # so rounding would have been seen


def test_k3_fills_after_resizing():
    """Squares are 8 pixels of the resized image, and alpha goes through the bicubic."""
    rule = dataclasses.replace(K3, patch_budget=16)
    pixels, grid = preprocess(Image.new("RGBA", (112, 112)), rule)
    assert grid.tolist() == [1, 4, 4]
    np.testing.assert_array_equal(whole(pixels, grid)[0, ..., 0], board(56, 56))
    edge = Image.new("RGBA", (112, 112), (0, 0, 0, 255))
    edge.paste((0, 0, 0, 0), (57, 0, 112, 112))
    found = whole(*preprocess(edge, rule))[0, 0, :, 0]
    assert found[20] == 0
    assert 0 < found[28] < board(56, 56)[0, 28]  # half covered
    assert found[40] == board(56, 56)[0, 40]


@pytest.mark.parametrize("mode", ["LA", "PA", "P", "tRNS"])
def test_k3_other_transparent_modes(tmp_path, mode):
    if mode == "P":
        image, options = palette_image(b"\x00\x00\x00")
        image.save(tmp_path / "p.png", **options)
        source = tmp_path / "p.png"
    elif mode == "tRNS":
        source = tmp_path / "grey.png"
        Image.new("L", (30, 20), 77).save(source, transparency=77)
    else:
        source = Image.new(mode, (30, 20))
    pixels, grid = preprocess(source, K3)
    np.testing.assert_array_equal(whole(pixels, grid)[0, :20, :30, 1], board(30, 20))


def test_k3_takes_the_nearest_pixel_of_a_palette():
    image, _ = palette_image(None)
    image = image.resize((300, 200))
    pixels, grid = preprocess(image, dataclasses.replace(K3, patch_budget=20))
    width, height = target_size(300, 200, dataclasses.replace(K3, patch_budget=20)).resized
    colours = {tuple(colour) for colour in whole(pixels, grid)[0, :height, :width].reshape(-1, 3).tolist()}
    assert colours == {(200, 10, 30), (5, 6, 7), (90, 80, 70)}


def test_k3_never_blends_palette_indices():
    """Between entries 0 and 2 lies a green one that no blend of black and white may show."""
    image = Image.new("PA", (300, 200), (0, 255))
    image.paste((2, 255), (133, 0, 300, 200))
    image.putpalette([0, 0, 0, 0, 255, 0, 255, 255, 255])
    picture = whole(*preprocess(image, dataclasses.replace(K3, patch_budget=20)))
    assert len(np.unique(picture)) > 2
    np.testing.assert_array_equal(picture[..., 0], picture[..., 1])


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "I;16"])
def test_k3_opaque_images_equal_k25(mode):
    image = (
        Image.fromarray(noise(50, 40)).convert(mode)
        if mode != "I;16"
        else Image.fromarray(noise(50, 40, 1).astype(np.uint16) * 257)
    )
    for found, expected in zip(preprocess(image, K3), preprocess(image, K25), strict=True):
        np.testing.assert_array_equal(found, expected)


# ------------------------------------------------------------------------------------------------ bad files


def png_header(width, height):
    """A PNG that claims a size and holds no pixels."""
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def refused(path, pattern, rule=K25):
    for call in (lambda: load_image(path), lambda: preprocess(path, rule), lambda: preprocess_many([path], rule)):
        with pytest.raises(ImageError, match=pattern) as caught:
            call()
        message = str(caught.value)
        assert message.startswith(f"{path}: ")
        assert "\n" not in message
        assert len(message) < 250 + len(str(path))


def test_bad_files(tmp_path):
    refused(tmp_path / "none.png", "no such file; check the name")
    refused(str(tmp_path / "none.png"), "no such file; check the name")
    refused(tmp_path, "a folder or device, not a file; name an image file")
    empty = tmp_path / "empty.jpg"
    empty.touch()
    refused(empty, r"empty file \(0 bytes\); copy or download it again")
    text = tmp_path / "notes.png"
    text.write_text("not a picture " * 50)
    refused(text, "not an image in a format that Pillow reads; convert it to PNG or JPEG")
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for ever
    refused(tmp_path / "pipe.png", "a folder or device, not a file")


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".bmp", ".webp"])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_truncated_file(tmp_path, suffix, keep):
    path = save(tmp_path / f"cut{suffix}", noise(90, 80))
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    refused(path, "cannot be decoded .*; copy or download it again|not an image in a format")


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".tif", ".gif", ".webp", ".bmp", ".avif"])
def test_damaged_bytes_give_an_image_or_an_image_error(tmp_path, suffix):
    """Whatever Pillow raises on damaged data arrives as ImageError: nothing else leaves load_image."""
    if suffix == ".avif" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF decoder")  # the one that raises RuntimeError
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"exif": exif} if suffix in (".jpg", ".png", ".webp") else {}
    path = save(tmp_path / f"hurt{suffix}", noise(40, 30), **options)
    data = path.read_bytes()
    rng, outcomes = np.random.default_rng(1), set()
    for _ in range(150):
        hurt = np.frombuffer(data, np.uint8).copy()
        where = rng.integers(0, min(len(hurt), 400), 3) if rng.random() < 0.8 else rng.integers(0, len(hurt), 20)
        hurt[where] = rng.integers(0, 256, len(where))
        path.write_bytes(hurt.tobytes())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about metadata that it skips
                outcomes.add(load_image(path).mode)
        except ImageError as error:
            outcomes.add("error" if str(error).startswith(f"{path}: ") else str(error))
    # every PNG chunk has a checksum; the other formats let some damage through
    assert outcomes - {"RGB"} == {"error"}


@pytest.mark.parametrize("own_limit", [False, True])
def test_oversized_image_is_refused_from_its_header(tmp_path, monkeypatch, own_limit):
    """The file holds no pixels: decoding would fail in another way. Without Pillow's guard ours holds."""
    if own_limit:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(20000, 20000))
    refused(path, "178,956,970|178956970")
    refused(path, "scale it down")


def test_largest_image_passes_the_header_check_in_silence(tmp_path):
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
    path = tmp_path / "large.png"
    path.write_bytes(png_header(MAX_PIXELS // 10, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(path, "cannot be decoded")


def test_too_long_a_strip_for_kimi_vl_names_the_file(tmp_path):
    path = save(tmp_path / "strip.png", np.zeros((100, 8000), np.uint8))
    with pytest.raises(ImageError, match=r"strip\.png: an image of 8000x100 pixels.*crop it or scale it down"):
        preprocess(path, VL)


def test_no_torch():
    code = "import sys, model.preprocess; sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=FOLDER, check=False).returncode == 0


# ------------------------------------------------------------------------------------------- several, clips


def test_many_are_one_after_the_other(tmp_path):
    paths = [save(tmp_path / f"{i}.png", noise(20 + 30 * i, 40, seed=i)) for i in range(3)]
    pixels, grids = preprocess_many(paths, K25)
    assert grids.tolist() == [[1, 4, 2], [1, 4, 4], [1, 4, 6]]
    assert grids.dtype == np.int64
    np.testing.assert_array_equal(pixels, np.concatenate([preprocess(path, K25)[0] for path in paths]))
    check_grids(grids, len(pixels), K25)


def test_no_images_give_empty_arrays():
    pixels, grids = preprocess_many([], K25)
    assert (pixels.shape, pixels.dtype, grids.shape, grids.dtype) == ((0, 3, 14, 14), np.float32, (0, 3), np.int64)


@pytest.mark.parametrize(
    ("frames", "fps", "size", "expected"),
    [
        (5, 2.0, (640, 480), [[4, 36, 46], [1, 36, 46]]),
        (9, 2.0, (1920, 1080), [[4, 48, 86], [4, 48, 86], [1, 48, 86]]),
    ],
)
def test_worked_videos(frames, fps, size, expected):
    video = [Image.new("RGB", size, (i, 2 * i, 3 * i)) for i in range(frames)]
    chunks = chunk_frames(sample_frames(frames, fps, K25))
    items = [preprocess_clip([video[i] for i in chunk], K25) for chunk in chunks]
    assert [grid.tolist() for _, grid in items] == expected
    for (pixels, (t, h, w)), chunk in zip(items, chunks, strict=True):
        assert len(pixels) == t * h * w
        # frame-major: the first pixel of each frame tells which one it is
        assert np.rint((pixels[:: h * w, :, 0, 0] * 0.5 + 0.5) * 255).tolist() == [[i, 2 * i, 3 * i] for i in chunk]


def test_budget_of_a_frame():
    """Half the side of an image's budget; K3's total only binds where many frames share it."""
    assert target_size(5000, 5000, K25.for_frames(4)).resized == (896, 896)
    assert target_size(5000, 5000, K3.for_frames(4)).resized == (1792, 1792)
    assert [K3.for_frames(n).patch_budget for n in (1, 40, 41, 1000)] == [16384, 16384, 15984, 655]
    assert preprocess_clip([Image.new("RGB", (1920, 1080))], K25)[1].tolist() == [1, 48, 86]


@pytest.mark.parametrize(
    ("frames", "fps", "expected"),
    [
        (60, 30, [0, 20, 39, 59]),  # vllm-project/vllm#45545: sampled before it is cut into items
        (10, 1, list(range(10))),  # slower than 2 frames a second: all of them
        (1, 30, [0]),
        (3, 30, [0]),  # round(0.2) is 0, one frame is the least
        (6, 4, [0, 2, 5]),  # round(2.5) is 2 and linspace ends at the last frame
    ],
)
def test_sampled_frames(frames, fps, expected):
    assert sample_frames(frames, fps, K25) == expected


def test_sampling_of_k3_and_a_frame_limit():
    assert len(sample_frames(300, 30, K3)) == 80  # 8 a second
    assert sample_frames(300, 30, dataclasses.replace(K25, max_video_frames=3)) == [0, 150, 299]
    assert chunk_frames([0, 7, 9, 11, 13]) == [[0, 7, 9, 11], [13]]
    assert chunk_frames([]) == []


@pytest.mark.parametrize(("frames", "fps"), [(0, 30), (5, 0), (5, -1), (5, math.nan), (5, math.inf)])
def test_video_that_cannot_be_sampled(frames, fps):
    with pytest.raises(ImageError, match=f"{frames} frames at {fps} frames per second"):
        sample_frames(frames, fps, K25)


def test_bad_clips(tmp_path):
    frame = Image.new("RGB", (30, 30))
    for number in (0, 5):
        with pytest.raises(ImageError, match=f"a clip of {number} frames; one item takes 1 to 4"):
            preprocess_clip([frame] * number, K25)
    path = save(tmp_path / "other.png", noise(30, 31))
    with pytest.raises(ImageError, match=r"other\.png: frame 1 is 30x31 pixels, frame 0 30x30"):
        preprocess_clip([frame, path], K25)
    for call in (lambda: preprocess_clip([frame], VL), lambda: sample_frames(5, 5, VL)):
        with pytest.raises(ImageError, match="kimi_vl takes images only"):
            call()


# ---------------------------------------------------------------------------------- preprocessor_config.json

BOARD = {
    "pattern": "chessboard",
    "chessboard_square_size": 8,
    "chessboard_square_on_top_left": True,
    "chessboard_white_value": 255,
    "chessboard_gray_value": 180,
}
HUB_K25 = {
    "in_patch_limit": 16384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
HUB_K3 = HUB_K25 | {
    "in_patch_limit": 65536,
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": 655360,
    "sample_fps": 8.0,
    "transparent_bg_config": BOARD,
    "transparent_bg_fill_stage": "after_resize",
}
HUB_VL = {
    "in_token_limit": 4096,
    "patch_size": 14,
    "pad_input": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": [2, 2],
    "num_pooled_tokens": 1024,
}
NESTED = [("kimi_k25", HUB_K25), ("kimi_k3", HUB_K3)]


@pytest.mark.parametrize("family", RULES)
def test_released_files_are_the_table(tmp_path, family):
    document = HUB_VL if family == "kimi_vl" else {"media_proc_cfg": dict(NESTED)[family], "auto_map": {}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(document))
    assert load_rule(tmp_path, family) == RULES[family]
    (tmp_path / "preprocessor_config.json").unlink()
    assert load_rule(tmp_path, family) == RULES[family]
    assert parse_rule(hub_preprocessor_config(family), family) == RULES[family]  # what random: checkpoints get
    assert RULES[family].max_frames == FAMILY_DEFAULTS[family].max_frames


def test_every_field_is_read():
    fields = HUB_K3 | {
        "in_patch_limit": 1000,
        "patch_limit_on_one_side": 64,
        "in_patch_limit_each_frame": None,
        "in_patch_limit_video": 2000,
        "sample_fps": 3,
        "max_num_frames_each_video": 7,
        "transparent_bg_config": None,
    }
    rule = parse_rule({"media_proc_cfg": fields}, "kimi_k3")
    assert dataclasses.astuple(rule) == ("kimi_k3", 1000, 64, 1000, 2000, 3.0, 7, False)
    assert parse_rule(fields, "kimi_k3") == rule  # a flat file says the same
    assert target_size(2000, 10, rule).grid == (2, 64)
    assert rule.for_frames(4).patch_budget == 500
    short = {"pattern": "chessboard", "square_size": 8, "square_on_top_left": True, "white": 255, "gray": 180}
    assert parse_rule({"media_proc_cfg": HUB_K3 | {"transparent_bg_config": short}}, "kimi_k3") == K3
    assert parse_rule({"media_proc_cfg": {"in_patch_limit_video": None}}, "kimi_k3").video_budget is None


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("kimi_vl", "pad_input", False),
        ("kimi_vl", "image_mean", [0.48, 0.46, 0.41]),
        ("kimi_vl", "patch_size", 16),
        ("kimi_vl", "in_token_limit", 0),
        ("kimi_vl", "in_token_limit", "4096"),
        ("kimi_vl", "in_token_limit", True),
        ("kimi_vl", "in_token_limit", 4096.5),
        ("kimi_vl", "merge_kernel_size", [1, 1]),
        ("kimi_vl", "in_patch_limit", 16384),
        ("kimi_k25", "in_token_limit", 4096),
        ("kimi_k25", "max_patches", 16384),
        ("kimi_k25", "image_std", [1.0, 1.0, 1.0]),
        ("kimi_k25", "fixed_output_tokens", 256),
        ("kimi_k25", "temporal_merge_kernel_size", 2),
        ("kimi_k25", "do_resize", False),
        ("kimi_k25", "resample", 2),
        ("kimi_k25", "patch_limit_on_one_side", 513),
        ("kimi_k25", "patch_limit_on_one_side", 514),
        ("kimi_k25", "patch_limit_on_one_side", 63),
        ("kimi_k25", "sample_fps", 0),
        ("kimi_k25", "sample_fps", "2"),
        ("kimi_k25", "max_num_frames_each_video", -1),
        ("kimi_k25", "in_patch_limit_video", 0),
        ("kimi_k3", "transparent_bg_config", BOARD | {"pattern": "white"}),
        ("kimi_k3", "transparent_bg_config", BOARD | {"chessboard_square_size": 16}),
        ("kimi_k3", "transparent_bg_config", BOARD | {"chessboard_square_on_top_left": False}),
        ("kimi_k3", "transparent_bg_config", {"pattern": "chessboard"}),
        ("kimi_k3", "transparent_bg_config", "chessboard"),
        ("kimi_k3", "transparent_bg_fill_stage", "before_resize"),
        ("kimi_k3", "transparent_bg_fill_stage", None),
    ],
)
def test_unsupported_values_are_refused_by_name(tmp_path, family, field, value):
    fields = (HUB_VL if family == "kimi_vl" else dict(NESTED)[family]) | {field: value}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(fields if family == "kimi_vl" else {"media_proc_cfg": fields})
    )
    with pytest.raises(ConfigError) as caught:
        load_rule(tmp_path, family)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'preprocessor_config.json'}: {field} ")
    assert "expected" in message or "use the file of the checkpoint's own" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"media_proc_cfg": 3}', "media_proc_cfg 3 is not supported; expected an object"),
    ],
)
def test_files_that_are_no_preprocessor_config(tmp_path, text, reason):
    path = tmp_path / "preprocessor_config.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=reason) as caught:
        load_rule(tmp_path, "kimi_k25")
    assert str(caught.value).startswith(f"{path}: ")


def test_preprocessor_config_that_cannot_be_read(tmp_path):
    (tmp_path / "preprocessor_config.json").mkdir()
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json: cannot be read \(Is a directory\)"):
        load_rule(tmp_path, "kimi_k25")


def test_unknown_family():
    with pytest.raises(ConfigError, match="family 'qwen' is not supported; expected 'kimi_vl' or"):
        parse_rule({}, "qwen")


# ---------------------------------------------------------------------------------------------------- grids


@pytest.mark.parametrize("limit", [K25, FAMILY_DEFAULTS["kimi_k25"], K3], ids=["rule", "config", "k3"])
def test_good_grids(limit):
    grids = check_grids([[1, 2, 2], [4, 6, 512], [3, 512, 2]], 4 + 4 * 3072 + 3 * 1024, limit)
    assert grids.dtype == np.int64
    assert grids.tolist() == [[1, 2, 2], [4, 6, 512], [3, 512, 2]]
    assert check_grids(np.array([[2, 4], [6, 8]], np.int32), 56, limit, frames=4).tolist() == [[2, 4], [6, 8]]


@pytest.mark.parametrize("limit", [VL, FAMILY_DEFAULTS["kimi_vl"]], ids=["rule", "config"])
def test_kimi_vl_takes_one_frame(limit):
    check_grids([[1, 4, 6]], 24, limit)
    with pytest.raises(ImageError, match="item 0: 2 frames; kimi_vl takes 1 to 1"):
        check_grids([[2, 4, 6]], 48, limit)
    with pytest.raises(ImageError, match="item 0: 2 frames; kimi_vl takes 1 to 1"):
        check_grids([[4, 6]], 24, limit, frames=2)


@pytest.mark.parametrize(
    ("grids", "patches", "message"),
    [
        ([[1, 2, 2], [1, 3, 2]], 10, "item 1: 3 rows; expected an even number from 2 to 512"),
        ([[1, 2, 5]], 10, "item 0: 5 columns"),
        ([[1, 514, 2]], 1028, "514 rows"),
        ([[1, 2, 513]], 1026, "513 columns"),
        ([[1, 0, 2]], 0, "item 0: 0 rows"),
        ([[1, 2, -2]], -4, "item 0: -2 columns"),
        ([[2, -2]], -4, "item 0: -2 columns"),
        ([[0, 2, 2]], 0, "item 0: 0 frames; kimi_k25 takes 1 to 4"),
        ([[1, 2, 2], [5, 2, 2]], 24, "item 1: 5 frames; kimi_k25 takes 1 to 4"),
        ([[1, 2, 2], [1, 4, 6]], 27, "grids ask for 28 patches, pixel_values has 27"),
        ([[4, 2, 2]], 4, "grids ask for 16 patches, pixel_values has 4"),
        (np.array([[1, 2, 2**63]], np.uint64), 4, "9223372036854775808 columns"),
        ([[2, 4], [6, 8]], 55, "grids ask for 56 patches, pixel_values has 55"),
        ([], 0, "no items; pass at least one image"),
        (np.empty((0, 2), np.int64), 0, "no items"),
        ([1, 2, 2], 4, r"shape \(3,\); expected \[items, 3\]"),
        ([[1, 2, 2, 2]], 8, r"shape \(1, 4\)"),
        ([[[1, 2, 2]]], 4, r"shape \(1, 1, 3\)"),
        ([[1, 2, 2], [2, 2]], 8, "the items differ in length"),
        ([[1.0, 2.0, 2.0]], 4, "dtype float64; expected whole numbers"),
        ([["1", "2", "2"]], 4, "dtype <U1"),
        ([[True, True, True]], 1, "dtype bool"),
    ],
)
def test_bad_grids(grids, patches, message):
    with pytest.raises(ImageError, match=message):
        check_grids(grids, patches, K25)


@pytest.mark.parametrize("frames", [0, 5, -1])
def test_frames_of_the_graph(frames):
    with pytest.raises(ImageError, match=f"item 0: {frames} frames; kimi_k25 takes 1 to 4"):
        check_grids([[2, 2]], 4, K25, frames=frames)


def test_no_items_on_request():
    assert check_grids([], 0, K25, allow_empty=True).shape == (0, 3)
    assert check_grids(np.empty((0, 2), np.int64), 0, K25, allow_empty=True).shape == (0, 2)
    with pytest.raises(ImageError, match="grids ask for 0 patches, pixel_values has 4"):
        check_grids([], 4, K25, allow_empty=True)
