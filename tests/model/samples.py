"""Towers, pixels and grids that several tests share."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.config import PRESETS
from model.graph import GraphForm, GraphTower
from model.random_weights import RandomWeights, parse_random_source, random_weights
from model.tower import KimiVision, build_tower
from tests.model.reference import Reference

Grid = tuple[int, int, int]
Noted = TypeVar("Noted")

# Every family with few and small layers. Kimi-VL has no tiny preset: it is K2.5's without the time axis.
TINY = ("tiny-vl", "tiny", "tiny-k3")
# Two layers of every released tower.
WIDE = ("kimi-vl", "kimi-k2.5", "kimi-k3")
# An answer of about unit scale computed twice in fp32, in two orders of summation: the agreement that the
# specification asks for between implementations (its section 6 measured 6e-6).
UNIT_SCALE = 2e-5


@lru_cache(maxsize=8)
def weights_of(name: str) -> RandomWeights:
    """Random weights of one of TINY or WIDE."""
    if name == "tiny-vl":
        config = dataclasses.replace(PRESETS["tiny"], family="kimi_vl", pos_emb_time=1)
        return random_weights(config, 1, "tiny")
    return parse_random_source(f"random:{name}?seed=1&layers=2")


@lru_cache(maxsize=6)
def tower_of(name: str, dtype: torch.dtype = torch.float32) -> KimiVision:
    """The live tower of those weights; shared, so a test that changes it takes a copy."""
    return build_tower(weights_of(name), dtype=dtype)


def graph_of(name: str, dtype: torch.dtype = torch.float32, **form: str) -> GraphTower:
    """The graph form over the same modules."""
    return GraphTower(tower_of(name, dtype), GraphForm(**form))


def tensors_of(name: str) -> dict[str, Tensor]:
    """The same weights by checkpoint name, in fp32."""
    weights = weights_of(name)
    return {tensor: weights.tensor(tensor).float() for tensor in weights.names()}


def arrays_of(name: str) -> dict[str, NDArray[np.float64]]:
    """The same weights by checkpoint name, in float64."""
    return {tensor: value.double().numpy() for tensor, value in tensors_of(name).items()}


def token_count(grids: Sequence[Grid]) -> int:
    """Patches of all items and frames."""
    return sum(t * h * w for t, h, w in grids)


def pixels_of(grids: Sequence[Grid], seed: int = 0) -> Tensor:
    """Noise in [-1, 1], the range of normalised pixels: [tokens, 3, 14, 14] fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(token_count(grids), 3, 14, 14, generator=generator) * 2 - 1


def run(tower: KimiVision, grids: Sequence[Grid], pixels: Tensor | None = None) -> list[Tensor]:
    """The live form on noise, or on given pixels."""
    return tower(pixels_of(grids) if pixels is None else pixels, torch.tensor(grids))


def run_graph(graph: GraphTower, grids: Sequence[Grid], pixels: Tensor) -> list[Tensor]:
    """The graph form on the live form's pixels (items share their frames), split into items."""
    frames = grids[0][0]
    areas = [h * w for _, h, w in grids]
    items = pixels.flatten(1).split([frames * area for area in areas])
    packed = torch.cat([item.reshape(frames, area, -1) for item, area in zip(items, areas, strict=True)], dim=1)
    rows = graph(packed, torch.tensor([[h, w] for _, h, w in grids]))
    return list(rows.split([area // 4 for area in areas]))


def largest_error(ours: Sequence[Tensor], theirs: Sequence[Tensor | NDArray[np.float64]]) -> float:
    """Largest absolute difference over all items; the shapes must be equal."""
    assert len(ours) == len(theirs)
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        reference = torch.as_tensor(b).double()
        assert a.shape == reference.shape
        differences.append(float((a.double() - reference).abs().max()))
    return max(differences)


def relative_error(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Relative L2 over all items."""
    difference = torch.cat([a.double() - b.double() for a, b in zip(ours, theirs, strict=True)])
    return float(difference.norm() / torch.cat([b.double() for b in theirs]).norm())


def note_fast_calls(monkeypatch: pytest.MonkeyPatch, note: Callable[[list[Grid]], Noted]) -> list[Noted]:
    """Keep what ``note`` makes of the grids of every call that a fast form answers."""
    from model.cuda.tower import FastTower

    seen: list[Noted] = []
    right = FastTower.__call__

    def call(fast: FastTower, patches: Tensor, grids: list[Grid]) -> Tensor:
        seen.append(note(grids))
        return right(fast, patches, grids)

    monkeypatch.setattr(FastTower, "__call__", call)
    return seen


@lru_cache(maxsize=3)
def reference_of(name: str) -> Reference:
    """The float64 formulas on the same weights."""
    return Reference(arrays_of(name), weights_of(name).config)


def reference_rows(name: str, grids: list[tuple[int, int, int]]) -> list[NDArray[np.float64]]:
    """Their answer to the noise of :func:`pixels_of`."""
    return reference_of(name)(pixels_of(grids).flatten(1).double().numpy(), grids)


class Watch(TorchDispatchMode):
    """Sees every operation: the dtypes that occur, and the largest number of bytes of tensors alive at one time.

    Counted are storages that were made inside; views share one, and weights and pixels were there before. What a
    kernel allocates for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()
        self.live = self.peak = 0
        self._tensors_on: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.dtypes.update(x.dtype for x in given + made)
        from_outside = {x.untyped_storage()._cdata for x in given} - self._tensors_on.keys()
        for x in made:
            if x.untyped_storage()._cdata not in from_outside:
                self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        key, size = x.untyped_storage()._cdata, x.untyped_storage().nbytes()
        if key not in self._tensors_on:
            self._tensors_on[key] = 0
            self.live += size
            self.peak = max(self.peak, self.live)
        self._tensors_on[key] += 1
        weakref.finalize(x, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._tensors_on[key] -= 1
        if not self._tensors_on[key]:
            del self._tensors_on[key]
            self.live -= size
