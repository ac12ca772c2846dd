"""Runs an engine in a process of its own for `exporter.trt.backend`; started by `exporter.trt.child`."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.errors import MissingRequirement
from exporter.trt.arrays import numpy_dtype
from exporter.trt.flavor import choose
from exporter.trt.runtime import Engine
from exporter.validation.backends import INPUTS
from exporter.validation.evidence import BackendInfo, DType, Profile
from exporter.validation.latency import Latency

WARMUP, REPEATS = 2, 10


@dataclass(frozen=True)
class Open:
    """Load an engine.

    Attributes:
        path: the engine file.
        flavor: name of the TensorRT; None for whichever is installed.
        v3_plugin: it holds Python plugins.
        device: ordinal of the GPU.
    """

    path: str
    flavor: str | None
    v3_plugin: bool
    device: int = 0


@dataclass(frozen=True)
class Opened:
    """What was loaded.

    Attributes:
        info: what really runs.
        dtype: of the engine.
        profiles: as the engine itself has them.
        sha256: of the bytes that were loaded.
    """

    info: BackendInfo
    dtype: DType
    profiles: tuple[Profile, ...]
    sha256: str


@dataclass(frozen=True)
class Run:
    """Compute a case: pixels [frames, patches, 588] fp32, grids [items, 2] int64."""

    pixels: NDArray[Any]
    grids: NDArray[Any]


@dataclass(frozen=True)
class Ran:
    """The output as fp32, and what it took."""

    output: NDArray[np.float32]
    latency: Latency


@dataclass(frozen=True)
class Refused:
    """The engine does not take this case; the reason."""

    reason: str


@dataclass(frozen=True)
class Lost:
    """The case was run and gave nothing; the reason."""

    reason: str


def serve(connection: Connection) -> None:
    """Answer `Open` once, then `Run` until the connection ends.

    Raises:
        BadInput, MissingRequirement: sent to the parent by `exporter.trt.child`.
    """
    order = connection.recv()
    with _open(order) as engine:
        connection.send(_describe(engine))
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            connection.send(_run(engine, job))


def _open(order: Open) -> Engine:
    flavor = choose(order.flavor, has_gpu=True)
    return Engine(Path(order.path), flavor, v3_plugin=order.v3_plugin and flavor.v3_plugins, device=order.device)


def _describe(engine: Engine) -> Opened:
    flavor, cuda = engine.flavor, engine.cuda
    info = BackendInfo(flavor.name, flavor.version, cuda.name, capability=cuda.capability)
    return Opened(info, engine.dtype, engine.profiles, engine.sha256)


def _run(engine: Engine, job: Run) -> Ran | Refused | Lost:
    inputs = {INPUTS[0]: job.pixels.astype(numpy_dtype(engine.dtype)), INPUTS[1]: job.grids}
    try:
        output, latency = engine.benchmark(inputs, warmup=WARMUP, repeats=REPEATS)
    except ValueError as error:
        return Refused(str(error))
    except (RuntimeError, MissingRequirement) as error:
        return Lost(str(error))
    return Ran(output.astype(np.float32), latency)
