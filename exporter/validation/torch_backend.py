"""The live tower as a backend of the gate: what people run while they wait for an engine."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from exporter.validation.evidence import BackendInfo, DType
from exporter.validation.record import describe_torch, run_live
from model.checkpoint import open_source
from model.tower import KimiVision, build_tower


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
        self._tower: KimiVision | None = build_tower(weights, dtype=getattr(torch, dtype), device=device)

    def describe(self) -> BackendInfo:
        """Say what PyTorch runs on."""
        return self._info

    def run(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute one case; see `Backend.run`."""
        if self._tower is None:
            raise ValueError("the backend is closed")
        grids = [(int(h), int(w)) for h, w in grid_hws]
        return run_live(self._tower, np.ascontiguousarray(pixel_values, dtype=np.float32), grids)

    def __enter__(self) -> TorchBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tower = None
