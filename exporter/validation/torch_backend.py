"""The live tower as a backend of the gate: what people run while they wait for an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exporter.validation.evidence import BackendInfo, DType
from exporter.validation.latency import Latency, percentiles
from exporter.validation.record import LiveTower, describe_torch, live_rows, run_live
from model.checkpoint import open_source
from model.live import live_tower
from model.tower import KimiVision

Run = Callable[[LiveTower, NDArray[np.float32], Sequence[tuple[int, int]]], NDArray[Any]]


def _run_native(tower: LiveTower, pixels: NDArray[np.float32], grids: Sequence[tuple[int, int]]) -> NDArray[Any]:
    rows = live_rows(tower, pixels, grids).cpu()
    if rows.dtype != torch.bfloat16:
        return rows.numpy()
    import ml_dtypes

    bits: NDArray[Any] = rows.view(torch.int16).numpy()
    return bits.view(ml_dtypes.bfloat16)


class TorchBackend:
    """A live tower in some dtype on some device."""

    def __init__(self, source: str, dtype: DType, device: str) -> None:
        """Build the tower.

        Args:
            source: SOURCE of the command line.
            dtype: of the tower.
            device: ``cpu`` or ``cuda``.

        Raises:
            InputError: the source cannot be used.
            MissingRequirement: no such device.
        """
        self.name, self.dtype = f"torch-{device}", dtype
        self._info = describe_torch(device)
        weights = open_source(source)
        self.weights_sha256 = weights.sha256()
        # in the form that people run, fast on a GPU; what judges it was recorded with the plain one
        self._tower: KimiVision | None = live_tower(weights, dtype=getattr(torch, dtype), device=device)
        self._device = device
        events = 4 if device == "cuda" else 0
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(events)]  # type: ignore[no-untyped-call]
        self._latency: Latency | None = None

    def describe(self) -> BackendInfo:
        """Say what PyTorch runs on."""
        return self._info

    def run(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute one case; see `Backend.run`."""
        return self._timed(run_live, pixel_values, grid_hws)

    def run_native(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[Any]:
        """Compute one case; see `NativeBackend.run_native`."""
        return self._timed(_run_native, pixel_values, grid_hws)

    def _timed(self, run: Run, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[Any]:
        if self._tower is None:
            raise ValueError("the backend is closed")
        grids = [(int(h), int(w)) for h, w in grid_hws]
        pixels = np.ascontiguousarray(pixel_values, dtype=np.float32)
        if not self._events:
            return run(self._tower, pixels, grids)
        self._latency = None
        rows = run(self._run_between_events, pixels, grids)
        self._events[3].record()
        self._events[3].synchronize()
        parts = [percentiles([first.elapsed_time(last)]) for first, last in pairwise(self._events)]
        self._latency = Latency(0, 1, *parts)
        return rows

    def _run_between_events(self, patches: Tensor, grid_thws: Tensor) -> list[Tensor]:
        """Run the tower: the copy of the pixels lies between the first two events, the computation before the third."""
        if self._tower is None:
            raise ValueError("the backend is closed")
        self._events[0].record()
        patches = patches.to(self._device)
        self._events[1].record()
        rows: list[Tensor] = self._tower(patches, grid_thws)
        self._events[2].record()
        return rows

    def latency(self) -> Latency | None:
        """Times of the call that ran last, which nothing warmed up; None on a CPU."""
        return self._latency

    def __enter__(self) -> TorchBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tower = None
