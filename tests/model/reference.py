"""The towers once more, in float64 NumPy, written from the formulas of the published description and sharing no code.

Slow and literal on purpose: rotary positions are complex numbers, attention is a loop over items and heads,
resampling is a dense matrix per axis filled tap by tap, and merging is slicing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.config import VisionConfig

Array = NDArray[np.float64]
Grid = tuple[int, int, int]

# eps of RMSNorm in K3's tower: float32's epsilon, which is what PyTorch takes where none is given
K3_EPS = 2.0**-23


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def keys_kernel(distance: float, a: float = -0.75) -> float:
    """Keys' cubic convolution kernel at a distance from a tap."""
    z = abs(distance)
    if z <= 1:
        return (a + 2) * z**3 - (a + 3) * z**2 + 1
    return a * z**3 - 5 * a * z**2 + 8 * a * z - 4 * a if z < 2 else 0.0


def resampling_matrix(out: int, table: int, mode: str, a: float = -0.75) -> Array:
    """[out, table]: what each cell of one axis of the table contributes to each position of a grid."""
    matrix = np.zeros((out, table))
    for i in range(out):
        source = (i + 0.5) * table / out - 0.5
        if mode == "bilinear":
            source = max(source, 0.0)
            low = math.floor(source)
            matrix[i, low] += 1 - (source - low)
            matrix[i, min(low + 1, table - 1)] += source - low
        else:
            low = math.floor(source)
            for tap in range(low - 1, low + 3):
                matrix[i, min(max(tap, 0), table - 1)] += keys_kernel(source - tap, a)
    return matrix


def resample(table: Array, mode: str, height: int, width: int, a: float = -0.75) -> Array:
    """[rows, columns, channels] -> [height, width, channels]."""
    rows = resampling_matrix(height, table.shape[0], mode, a)
    columns = resampling_matrix(width, table.shape[1], mode, a)
    return np.einsum("hr,wc,rcd->hwd", rows, columns, table, optimize=True)


def time_row(frame: int, width: int) -> Array:
    omega = np.array([10000.0 ** (-2 * j / width) for j in range(width // 2)])
    return np.concatenate([np.sin(frame * omega), np.cos(frame * omega)])


def turns(height: int, width: int, head_dim: int) -> NDArray[np.complex128]:
    """[height * width, head_dim / 2] complex numbers of length one."""
    result = np.empty((height, width, head_dim // 2), dtype=np.complex128)
    for i in range(head_dim // 4):
        frequency = 10000.0 ** (-4 * i / head_dim)
        result[:, :, 2 * i] = np.exp(1j * np.arange(width) * frequency)[None, :]
        result[:, :, 2 * i + 1] = np.exp(1j * np.arange(height) * frequency)[:, None]
    return result.reshape(height * width, -1)


def rotate(x: Array, turn: NDArray[np.complex128]) -> Array:
    """[tokens, heads, d] by [tokens, d / 2]."""
    rotated = np.ascontiguousarray(x).view(np.complex128) * turn[:, None, :]
    return rotated.view(np.float64)


def attend(q: Array, k: Array, v: Array) -> Array:
    """One item: [tokens, heads, d] -> [tokens, heads * d]."""
    outputs = []
    for head in range(q.shape[1]):
        logits = q[:, head] @ k[:, head].T / math.sqrt(q.shape[2])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, head])
    return np.concatenate(outputs, axis=1)


class Reference:
    """A tower with its projector, from tensors by checkpoint name in float64."""

    def __init__(self, tensors: dict[str, Array], config: VisionConfig) -> None:
        self.tensors = tensors
        self.k3 = config.family == "kimi_k3"
        self.mode = "bilinear" if self.k3 else "bicubic"
        self.heads = config.num_attention_heads
        self.layers = config.num_hidden_layers
        first, last = ("linear_1", "linear_2") if config.family == "kimi_vl" else ("proj.0", "proj.2")
        root = "multi_modal_projector" if config.family == "kimi_vl" else "mm_projector"
        self.projector_names = (root, f"{root}.{first}", f"{root}.{last}")

    def __call__(self, pixels: Array, grids: Sequence[Grid]) -> list[Array]:
        """[tokens, 588] -> [rows, text width] of every item."""
        lengths = [t * h * w for t, h, w in grids]
        items = np.split(pixels, np.cumsum(lengths)[:-1])
        return [self.project(self.merge(self.tower(x, grid), grid)) for x, grid in zip(items, grids, strict=True)]

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.tensors[f"{name}.weight"].reshape(-1, x.shape[-1]).T
        return y if self.k3 else y + self.tensors[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        weight = self.tensors[f"vision_tower.encoder.{name}.weight"]
        if self.k3:
            return rms_norm(x, weight, K3_EPS)
        return layer_norm(x, weight, self.tensors[f"vision_tower.encoder.{name}.bias"])

    def positions(self, grid: Grid) -> Array:
        frames, height, width = grid
        table = self.tensors["vision_tower.patch_embed.pos_emb.weight"]
        still = resample(table, self.mode, height, width).reshape(height * width, -1)
        if frames == 1:
            return still
        return np.concatenate([still + time_row(frame, still.shape[1]) for frame in range(frames)])

    def tower(self, pixels: Array, grid: Grid) -> Array:
        """One item, [tokens, 588] -> [tokens, width], final norm applied."""
        frames, height, width = grid
        x = self.linear("vision_tower.patch_embed.proj", pixels) + self.positions(grid)
        turn = None
        for i in range(self.layers):
            block = f"vision_tower.encoder.blocks.{i}"
            qkv = self.linear(f"{block}.wqkv", self.norm(f"blocks.{i}.norm0", x))
            q, k, v = (part.reshape(len(x), self.heads, -1) for part in np.split(qkv, 3, axis=1))
            if turn is None:
                turn = np.tile(turns(height, width, q.shape[-1]), (frames, 1))
            x = x + self.linear(f"{block}.wo", attend(rotate(q, turn), rotate(k, turn), v))
            hidden = gelu_tanh(self.linear(f"{block}.mlp.fc0", self.norm(f"blocks.{i}.norm1", x)))
            x = x + self.linear(f"{block}.mlp.fc1", hidden)
        return self.norm("final_layernorm", x)

    @staticmethod
    def merge(x: Array, grid: Grid) -> Array:
        """[tokens, width] -> [rows, 4, width]."""
        still = x.reshape(*grid, -1).mean(0)
        squares = [still[0::2, 0::2], still[0::2, 1::2], still[1::2, 0::2], still[1::2, 1::2]]
        return np.stack([square.reshape(-1, x.shape[1]) for square in squares], axis=1)

    def project(self, members: Array) -> Array:
        """[rows, 4, width] -> [rows, text width]."""
        root, first, last = self.projector_names
        if not self.k3:
            norm = self.tensors[f"{root}.pre_norm.weight"], self.tensors[f"{root}.pre_norm.bias"]
            members = layer_norm(members, *norm)
        rows = self.linear(last, gelu_erf(self.linear(first, members.reshape(len(members), -1))))
        return rms_norm(rows, self.tensors[f"{root}.post_norm.weight"], 1e-5) if self.k3 else rows
