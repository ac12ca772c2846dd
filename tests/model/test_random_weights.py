"""Random weights: the scale that design.md fixes, and the same numbers whatever is drawn, where and in which order."""

from __future__ import annotations

import hashlib
import random
import re
import tracemalloc
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
import torch

from model import random_weights as module
from model.config import PRESETS, preset, tensor_shapes
from model.errors import ConfigError
from model.random_weights import MAX_SEED, outlier_channels, parse_random_source, random_weights

BLOCK = "vision_tower.encoder.blocks.1."
POSITION = "vision_tower.patch_embed.pos_emb.weight"
PATCH = "vision_tower.patch_embed.proj."


@pytest.fixture(scope="module")
def wide():
    """Two blocks of the real K2.5: enough values for tight statistics."""
    return parse_random_source("random:kimi-k2.5?layers=2")


def values(weights, name: str) -> np.ndarray:
    return weights.tensor(name).double().numpy()


# -------------------------------------------------------------------------------------------------------- known numbers


def expected_value(seed: int, name: str, index: int, mean: float, std: float) -> float:
    """The documented formula, one value at a time, with nothing from the code under test."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    word = int(np.random.Philox(key=key).random_raw(index // 4 + 1)[-1])
    u = (word >> (16 * (index % 4))) & 0xFFFF
    exact = mean + std * NormalDist().inv_cdf((u + 0.5) / 65536)
    return float(torch.tensor(exact, dtype=torch.float32).to(torch.bfloat16))


@pytest.mark.parametrize("seed", [0, 7, MAX_SEED])
@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        (f"{PATCH}weight", 0, 2 / 588**0.5),
        (f"{PATCH}bias", 0, 0.1),
        (f"{BLOCK}norm0.weight", 1, 0.2),
        (f"{BLOCK}norm0.bias", 0, 0.2),
        (f"{BLOCK}wqkv.weight", 0, 1.4 / 96**0.5),
        (f"{BLOCK}mlp.fc1.weight", 0, 1.5 / 132**0.5),
        ("mm_projector.proj.0.weight", 0, 384**-0.5),
        ("mm_projector.proj.2.weight", 0, 1.5 / 384**0.5),
    ],
)
def test_values_follow_the_formula(seed: int, name: str, mean: float, std: float):
    drawn = parse_random_source(f"random:tiny?seed={seed}").tensor(name).flatten()
    for index in (0, 1, 2, 3, 4, 41):
        assert float(drawn[index]) == expected_value(seed, name, index, mean, std)


def test_hash_of_every_preset_stays():
    """A change of these numbers changes every test that uses them, and every artifact's recorded weights hash."""
    hashes = {name: parse_random_source(f"random:{name}?seed=1&layers=2").sha256()[:16] for name in ("tiny", "tiny-k3")}
    assert hashes == {"tiny": "90d679a8dc41149b", "tiny-k3": "e5cccc04fc867a18"}


# ------------------------------------------------------------------------------------------------------------ the scale


@pytest.mark.parametrize(
    ("name", "rows", "mean", "std"),
    [
        (f"{PATCH}weight", slice(None), 0, 2 / 588**0.5),
        (f"{BLOCK}wqkv.weight", slice(0, 1152), 0, 1.4 / 1152**0.5),
        (f"{BLOCK}wqkv.weight", slice(1152, 2304), 0, 1.4 / 1152**0.5),
        (f"{BLOCK}wqkv.weight", slice(2304, 3456), 0, 1152**-0.5),
        (f"{BLOCK}wo.weight", slice(None), 0, 1152**-0.5),
        (f"{BLOCK}mlp.fc0.weight", slice(None), 0, 1152**-0.5),
        (f"{BLOCK}mlp.fc1.weight", slice(None), 0, 1.5 / 4304**0.5),
        ("mm_projector.proj.0.weight", slice(None), 0, 4608**-0.5),
        ("mm_projector.proj.2.weight", slice(None), 0, 1.5 / 4608**0.5),
        (f"{BLOCK}wqkv.bias", slice(None), 0, 0.1),
        (f"{BLOCK}mlp.fc0.bias", slice(None), 0, 0.1),
        ("mm_projector.proj.2.bias", slice(None), 0, 0.1),
        (f"{BLOCK}norm0.weight", slice(None), 1, 0.2),
        (f"{BLOCK}norm1.bias", slice(None), 0, 0.2),
        ("vision_tower.encoder.final_layernorm.weight", slice(None), 1, 0.2),
        ("mm_projector.pre_norm.weight", slice(None), 1, 0.2),
    ],
)
def test_mean_and_std_of_each_kind(wide, name: str, rows: slice, mean: float, std: float):
    drawn = values(wide, name)[rows]
    # five standard errors of the sample mean and of the sample standard deviation, std/sqrt(n) and std/sqrt(2n),
    # and 1e-4 for rounding to bf16 and for the quantiles' cut tails (variance 0.9999)
    assert abs(drawn.mean() - mean) < 5 * std / drawn.size**0.5 + 1e-4 * std
    assert abs(drawn.std() / std - 1) < 5 / (2 * drawn.size) ** 0.5 + 1e-4


def test_values_are_normal_and_independent(wide):
    drawn = values(wide, "mm_projector.proj.2.weight").reshape(-1)
    z = drawn / (1.5 / 4608**0.5)
    n = z.size  # 33 million: the standard error of a share near 1e-3 is 5e-6
    for limit in (0.5, 1.0, 2.0, 3.0):
        share = 2 * (1 - NormalDist().cdf(limit))
        # rounding to bf16 moves the border by up to 2^-8 of itself
        slack = 2 * NormalDist().pdf(limit) * limit * 2**-8
        assert abs(np.mean(np.abs(z) > limit) - share) < 5 * (share / n) ** 0.5 + slack
    for lag in (1, 2, 4, 4608):
        correlation = np.mean(z[lag:] * z[:-lag])
        assert abs(correlation) < 5 / n**0.5  # five standard errors


def test_k3_scales_by_its_own_widths():
    weights = parse_random_source("random:kimi-k3?layers=2")
    assert weights.names() == tuple(tensor_shapes(preset("kimi-k3", layers=2)))
    wqkv = values(weights, f"{BLOCK}wqkv.weight")
    for section, std in enumerate((1.4 / 32, 1.4 / 32, 1 / 32)):  # width 1024; 1536 rows of q, k and v each
        assert abs(wqkv[section * 1536 : (section + 1) * 1536].std() / std - 1) < 4e-3  # five standard errors: 2.8e-3
    assert abs(values(weights, f"{BLOCK}wo.weight").std() * 1536**0.5 - 1) < 4e-3
    assert abs(values(weights, "mm_projector.post_norm.weight").mean() - 1) < 5 * 0.2 / 7168**0.5


def test_last_projector_layer_of_kimi_vl():
    weights = parse_random_source("random:kimi-vl?layers=1")
    for name, gain in (("linear_1", 1.0), ("linear_2", 1.5)):
        drawn = values(weights, f"multi_modal_projector.{name}.weight")
        assert abs(drawn.std() * 4608**0.5 / gain - 1) < 2e-3  # five standard errors: 1.2e-3 for 9 million values


# ----------------------------------------------------------------------------------------------------- position table


def test_position_table_is_smooth(wide):
    """White noise smoothed by a Gaussian of sigma s has the autocorrelation exp(-lag^2 / (4 s^2))."""
    table = values(wide, POSITION)
    assert abs(table.std() - 0.5) < 1e-3  # normalised before rounding to bf16
    assert abs(table.mean()) < 5 * 0.5 / (1152 * 36) ** 0.5  # some 64*64 / (4 pi 9) = 36 independent cells a channel
    for axis in (0, 1):
        for lag in (1, 3, 6):
            near, far = np.moveaxis(table, axis, 0)[lag:], np.moveaxis(table, axis, 0)[:-lag]
            # within 0.02: about 4e4 independent cells give a standard error of 5e-3, and the cut at 3 sigma costs 3e-3
            assert abs(np.mean(near * far) / 0.25 - np.exp(-(lag**2) / 36)) < 0.02
    # the border is like the middle: no wrapping, no fading
    assert abs(table[0].std() - 0.5) < 0.03
    assert abs(table[:, -1].std() - 0.5) < 0.03
    wrapped = np.mean(table[0] * table[-1]) / 0.25
    assert abs(wrapped) < 0.1  # about 1152 * 64/11 = 6700 independent cells: standard error 0.012
    channels = np.mean(table[:, :, 1:] * table[:, :, :-1]) / 0.25
    assert abs(channels) < 0.03  # channels are independent


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_small_position_table(name: str):
    """Eight cells a side: smooth from cell to cell, yet not constant."""
    table = values(parse_random_source(f"random:{name}"), POSITION)
    assert table.shape == (8, 8, 96)
    assert abs(table.std() - 0.5) < 2e-3
    step = np.diff(table, axis=0).std() / 0.5
    assert 0.2 < step < 0.5  # sigma 2: sqrt(2 (1 - exp(-1/16))) = 0.35; white noise would give 1.4
    opposite = (table[0, 0] - table[7, 7]).std() / 0.5
    assert opposite > 1  # independent corners give 1.4


# ------------------------------------------------------------------------------------------------------------ outliers


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_outliers_multiply_four_channels_of_the_patch_embedding(name: str):
    plain, outliers = (parse_random_source(f"random:{name}?outliers={i}") for i in (0, 1))
    channels = list(outlier_channels(plain.config))
    assert channels == [12, 36, 60, 84]
    for key in plain.names():
        before, after = values(plain, key), values(outliers, key)
        if key.startswith(PATCH):
            # each is rounded to bf16, by up to 2^-8 of itself
            np.testing.assert_allclose(after[channels], 50 * before[channels], rtol=2**-7)
            before[channels] = after[channels]
        np.testing.assert_array_equal(before, after)
    assert plain.sha256() != outliers.sha256()


# -------------------------------------------------------------------------------------------------------- determinism


def test_order_subset_threads_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    def fresh():
        return parse_random_source("random:tiny?seed=3&outliers=1")

    reference = {name: fresh().tensor(name) for name in fresh().names()}
    shuffled = list(reference)
    random.Random(0).shuffle(shuffled)
    one = fresh()
    for name in shuffled:
        assert torch.equal(one.tensor(name), reference[name])
        assert torch.equal(one.tensor(name), reference[name])
    for threads in (1, 2, 5):
        drawn = dict(fresh().draw_all(threads))
        assert list(drawn) == list(reference)
        assert all(torch.equal(drawn[name], reference[name]) for name in reference)
    monkeypatch.setattr(module, "_CHUNK", 1000)
    assert all(torch.equal(fresh().tensor(name), reference[name]) for name in reference)


def test_layers_share_their_numbers_with_a_deeper_tower():
    short, deep = parse_random_source("random:tiny?layers=1"), parse_random_source("random:tiny?layers=4")
    assert set(short.names()) < set(deep.names())
    for name in short.names():
        assert torch.equal(short.tensor(name), deep.tensor(name))


def test_every_tensor_and_seed_has_numbers_of_its_own():
    first, second = parse_random_source("random:tiny?seed=0"), parse_random_source("random:tiny?seed=1")
    for name in first.names():
        assert not torch.equal(first.tensor(name), second.tensor(name))
    blocks = [first.tensor(f"vision_tower.encoder.blocks.{i}.wo.weight") for i in (0, 1)]
    assert not torch.equal(*blocks)
    assert first.sha256() != second.sha256()


def test_a_tensor_may_be_changed_by_who_drew_it():
    weights = parse_random_source("random:tiny")
    before = weights.tensor(f"{PATCH}bias").clone()
    weights.tensor(f"{PATCH}bias").zero_()
    assert torch.equal(weights.tensor(f"{PATCH}bias"), before)


def test_hash_is_of_the_bytes():
    weights = parse_random_source("random:tiny")
    text = ""
    for name, shape in tensor_shapes(PRESETS["tiny"]).items():
        raw = weights.tensor(name).view(torch.int16).numpy().tobytes()
        text += f"{name} bfloat16 {list(shape)} {hashlib.sha256(raw).hexdigest()}\n"
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert weights.sha256() == expected  # from hashes kept while drawing
    assert parse_random_source("random:tiny").sha256() == expected  # without a tensor drawn before


def test_values_are_bf16_rounded_to_nearest_even():
    exact = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3e-5])
    codes = module._to_bf16(exact)
    assert codes.view(ml_dtypes.bfloat16).tolist() == [1, 1 + 2**-6, 1 + 2**-7, -1, float(ml_dtypes.bfloat16(3e-5))]


def test_memory_is_bounded_by_the_largest_tensors():
    """Drawing all of K2.5 holds two tensors being drawn and two waiting, not the tower."""
    weights = parse_random_source("random:kimi-k2.5?layers=1")
    tracemalloc.start()
    try:
        for name in weights.names():
            weights.raw(name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # the position table: 82*82*1152 white values as words, look-up indices and float64, and half-smoothed in float64
    assert peak < 250e6


# ----------------------------------------------------------------------------------------------------------- the source


@pytest.mark.parametrize(
    ("text", "seed", "layers", "outliers"),
    [
        ("random:tiny", 0, 2, False),
        ("random:tiny?", 0, 2, False),
        ("random:tiny?seed=5", 5, 2, False),
        ("random:tiny?layers=3&seed=007", 7, 3, False),
        ("random:tiny?outliers=1", 0, 2, True),
        ("random:tiny?outliers=0", 0, 2, False),
        (f"random:tiny?seed={MAX_SEED}", MAX_SEED, 2, False),
    ],
)
def test_parse(text: str, seed: int, layers: int, outliers: bool):
    weights = parse_random_source(text)
    assert (weights.seed, weights.config.num_hidden_layers, weights.outliers) == (seed, layers, outliers)
    assert weights.source == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("random:", "preset '' does not exist"),
        ("random:huge", "preset 'huge' does not exist; choose 'kimi-vl'"),
        ("random:Tiny", "preset 'Tiny' does not exist"),
        ("random:tiny?sed=1", "'sed' is not a setting of a random source; expected random:PRESET"),
        ("random:tiny?seed=1&", "'' is not a setting"),
        ("random:tiny?seed=1&seed=2", "seed is given twice"),
        ("random:tiny?seed", "seed is ''; expected a whole number"),
        ("random:tiny?seed=-1", "seed is '-1'; expected a whole number"),
        ("random:tiny?seed=1.5", "seed is '1.5'; expected a whole number"),
        ("random:tiny?seed=٣", "expected a whole number"),
        (f"random:tiny?seed={MAX_SEED + 1}", f"expected 0 to {MAX_SEED}"),
        (f"random:tiny?seed={'1' * 5000}", "expected a whole number"),
        ("random:tiny?layers=0", "num_hidden_layers is 0; expected 1 to 1024"),
        ("random:tiny?layers=1025", "num_hidden_layers is 1025"),
        ("random:tiny?outliers=2", "outliers is 2; expected 0 or 1"),
        ("random:tiny?outliers=yes", "outliers is 'yes'"),
    ],
)
def test_refused_by_name(text: str, words: str):
    with pytest.raises(ConfigError, match=re.escape(words)):
        parse_random_source(text)


@pytest.mark.parametrize("text", ["random:tiny?seed=0", "random:tiny?seed=4&layers=5&outliers=1"])
def test_source_text_can_be_read_back(text: str):
    weights = parse_random_source(text)
    again = random_weights(weights.config, weights.seed, "tiny", weights.outliers)
    assert again.source == text
    assert again == weights


def test_unknown_tensor_is_a_key_error():
    weights = parse_random_source("random:tiny")
    for method in (weights.raw, weights.tensor, weights.dtype):
        with pytest.raises(KeyError, match="no_such_tensor"):
            method("no_such_tensor")
