"""Random weights whose scale lets a test see every part of the tower.

With N(0, 0.02) everywhere a swapped rotary axis changes nothing that can be measured, and with a larger common scale
attention saturates. So the scale follows the layer: normal with variance gain^2 / fan_in.

A value is ``mean + std * Z[u]``, rounded to bf16. ``u`` is a 16-bit word of the raw Philox stream whose key is the
seed and the tensor's name; ``Z[u]`` is the normal quantile of ``(u + 1/2) / 2**16``. Only integers are drawn, and
NumPy promises that the raw stream stays, so the numbers are the same on every machine, in whatever order and on however
many threads they are drawn. ``standard_normal`` keeps neither promise: its tails call the C library's log1p.
The outermost quantiles are 4.3 standard deviations from the mean, and the variance of all of them is 0.99998.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from model.config import PRESETS, VisionConfig, preset, projector_linears, tensor_shapes
from model.errors import ConfigError
from model.weights import as_tensor, read_all, weights_sha256

if TYPE_CHECKING:
    import torch

PATCH_GAIN, QK_GAIN, LAST_GAIN = 2.0, 1.4, 1.5  # all other gains are 1
BIAS_STD, NORM_STD = 0.1, 0.2
POSITION_STD, POSITION_SIGMA = 0.5, 3.0  # cells
OUTLIER_FACTOR, OUTLIER_CHANNELS = 50.0, 4
MAX_SEED = 2**64 - 1

_CHUNK = 1 << 18  # values looked up at a time; bounds the temporary index array to 2 MiB
_SYNTAX = "random:PRESET?seed=N&layers=N&outliers=1"


@dataclass(frozen=True)
class RandomWeights:
    """Vision tensors that are drawn when they are asked for.

    Attributes:
        config: the tower.
        source: what the user gave.
        seed: 0 to MAX_SEED.
        outliers: whether four channels of the patch embedding are 50 times as large. They stay that large all along
            the residual stream, as the few massive channels of trained ViTs do, and stretch the range that fp16 and
            bf16 have to carry.
    """

    config: VisionConfig
    source: str
    seed: int
    outliers: bool = False
    _hashes: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def names(self) -> tuple[str, ...]:
        """Checkpoint names, in the order of :func:`model.config.tensor_shapes`."""
        return tuple(_shapes(self.config))

    def dtype(self, name: str) -> str:
        """Always ``bfloat16``."""
        if name not in _shapes(self.config):
            raise KeyError(name)
        return "bfloat16"

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Draw the tensor's bytes.

        Raises:
            KeyError: the tower has no such tensor.
        """
        codes = _draw(self, name, _shapes(self.config)[name]).view(np.uint8)
        if name not in self._hashes:  # hashed while it is at hand, so that sha256() need not draw it again
            self._hashes[name] = hashlib.sha256(codes.data).hexdigest()
        return codes

    def tensor(self, name: str) -> torch.Tensor:
        """Draw the tensor."""
        return as_tensor(self.raw(name), "bfloat16", _shapes(self.config)[name])

    def draw_all(self, threads: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors with their names, in order, at most ``threads`` of them ahead of the consumer."""
        return read_all(self, threads)

    def sha256(self) -> str:
        """Hash over names, dtypes, shapes and bytes; that of a checkpoint which holds the same tensors."""
        if "" not in self._hashes:
            self._hashes[""] = weights_sha256(self, self._digest)
        return self._hashes[""]

    def _digest(self, name: str) -> str:
        if name not in self._hashes:
            self.raw(name)
        return self._hashes[name]


def random_weights(config: VisionConfig, seed: int, preset_name: str, outliers: bool = False) -> RandomWeights:
    """Random weights for a config.

    Args:
        config: the tower.
        seed: 0 to MAX_SEED.
        preset_name: where the config comes from, for ``source``.
        outliers: see :class:`RandomWeights`.

    Raises:
        ConfigError: the seed is out of range.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed is {seed}; expected 0 to {MAX_SEED}")
    source = f"random:{preset_name}?seed={seed}"
    if preset_name in PRESETS and config.num_hidden_layers != PRESETS[preset_name].num_hidden_layers:
        source += f"&layers={config.num_hidden_layers}"
    return RandomWeights(config, source + ("&outliers=1" if outliers else ""), seed, outliers)


def parse_random_source(text: str, *, norm_eps: float | None = None) -> RandomWeights:
    """Read ``random:PRESET?seed=N&layers=N&outliers=1``; every part after the preset may be left out.

    Args:
        text: what the user gave.
        norm_eps: another eps for the tower's norms.

    Raises:
        ConfigError: unknown preset or key, or a value that is no number or out of range.
    """
    name, _, query = text.removeprefix("random:").partition("?")
    values: dict[str, int] = {}
    for part in query.split("&") if query else []:
        key, _, value = part.partition("=")
        if key not in ("seed", "layers", "outliers"):
            raise ConfigError(f"{text}: {key!r} is not a setting of a random source; expected {_SYNTAX}")
        if key in values:
            raise ConfigError(f"{text}: {key} is given twice; expected {_SYNTAX}")
        if not (value.isascii() and value.isdigit() and len(value) <= 20):
            raise ConfigError(f"{text}: {key} is {value!r}; expected a whole number, as in {_SYNTAX}")
        values[key] = int(value)
    if values.get("outliers", 0) > 1:
        raise ConfigError(f"{text}: outliers is {values['outliers']}; expected 0 or 1")
    try:
        config = preset(name, layers=values.get("layers"))
        config = config if norm_eps is None else dataclasses.replace(config, norm_eps=norm_eps)
        weights = random_weights(config, values.get("seed", 0), name, bool(values.get("outliers")))
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}") from error
    return dataclasses.replace(weights, source=text)


def outlier_channels(config: VisionConfig) -> tuple[int, ...]:
    """Channels of the residual stream that ``outliers`` enlarges: the middles of four equal parts."""
    return tuple((2 * i + 1) * config.hidden_size // (2 * OUTLIER_CHANNELS) for i in range(OUTLIER_CHANNELS))


@lru_cache(maxsize=8)
def _shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    return tensor_shapes(config)


def _draw(weights: RandomWeights, name: str, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Draw bf16 bit patterns, flat."""
    if name.endswith("pos_emb.weight"):
        return _position_table(weights.seed, name, shape)
    words = _words(weights.seed, name, math.prod(shape))
    for rows, mean, std in _scales(weights, name, shape):
        _look_up(words.reshape(shape[0], -1)[rows].reshape(-1), _codes(mean, std))
    return words


def _words(seed: int, name: str, count: int) -> NDArray[np.uint16]:
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    # mypy: NumPy's annotation of ``key`` allows no Python int of 128 bits, its documentation does
    raw = np.random.Philox(key=key).random_raw(-(-count // 4))
    return np.asarray(raw, dtype="<u8").view(np.uint16)[:count]


def _scales(weights: RandomWeights, name: str, shape: tuple[int, ...]) -> list[tuple[slice, float, float]]:
    """Mean and standard deviation of each run of rows."""
    everything = slice(None)
    layer, _, kind = name.rpartition(".")
    if layer.endswith(("norm0", "norm1", "final_layernorm", "pre_norm", "post_norm")):
        return [(everything, 1.0 if kind == "weight" else 0.0, NORM_STD)]
    unit = BIAS_STD if kind == "bias" else math.prod(shape[1:]) ** -0.5
    if layer.endswith("patch_embed.proj"):
        std = unit if kind == "bias" else PATCH_GAIN * unit
        return _outlier_runs(weights, std) if weights.outliers else [(everything, 0.0, std)]
    if kind == "bias":
        return [(everything, 0.0, unit)]
    if layer.endswith("wqkv"):
        q_and_k = 2 * weights.config.qkv_hidden_size
        return [(slice(q_and_k), 0.0, QK_GAIN * unit), (slice(q_and_k, None), 0.0, unit)]
    last = layer.endswith("mlp.fc1") or layer == projector_linears(weights.config)[1]
    return [(everything, 0.0, LAST_GAIN * unit if last else unit)]


def _outlier_runs(weights: RandomWeights, std: float) -> list[tuple[slice, float, float]]:
    runs, start = [], 0
    for channel in outlier_channels(weights.config):
        runs += [(slice(start, channel), 0.0, std), (slice(channel, channel + 1), 0.0, OUTLIER_FACTOR * std)]
        start = channel + 1
    return [*runs, (slice(start, None), 0.0, std)]


def _look_up(words: NDArray[np.uint16], codes: NDArray[np.uint16]) -> None:
    """Replace random words by the bit patterns that they stand for, in place."""
    for start in range(0, words.size, _CHUNK):
        part = words[start : start + _CHUNK]
        part[:] = np.take(codes, part)


@lru_cache(maxsize=1)
def _quantiles() -> NDArray[np.float64]:
    upper = [NormalDist().inv_cdf((u + 0.5) / 65536) for u in range(32768, 65536)]
    return np.array([-z for z in reversed(upper)] + upper)


@lru_cache(maxsize=32)
def _codes(mean: float, std: float) -> NDArray[np.uint16]:
    return _to_bf16(mean + std * _quantiles())


def _to_bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Round to bf16, nearest even; bit patterns."""
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def _position_table(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """A smooth field over the cells for every channel, as trained tables are.

    White noise is drawn on a margin around the table too, so that the field is as smooth at the border as inside. A
    small table takes a quarter of its side for the Gaussian's width, or it would be all but constant.
    """
    height, width, channels = shape
    rows, columns = _gaussian(height), _gaussian(width)
    padded = (rows.shape[1], columns.shape[1], channels)
    noise = _quantiles()[_words(seed, name, math.prod(padded))].reshape(padded)
    table = np.einsum("hH,HWc->hWc", rows, noise, optimize=True)
    table = np.einsum("wW,hWc->hwc", columns, table, optimize=True)
    return _to_bf16(table * (POSITION_STD / table.std())).reshape(-1)


def _gaussian(side: int) -> NDArray[np.float64]:
    """Weights [side, side + margins] of a Gaussian that is cut off at three sigma."""
    sigma = min(POSITION_SIGMA, side / 4)
    margin = math.ceil(3 * sigma)
    distance = np.arange(side + 2 * margin)[None, :] - np.arange(side)[:, None] - margin
    return np.where(np.abs(distance) <= margin, np.exp(-0.5 * (distance / sigma) ** 2), 0.0)
