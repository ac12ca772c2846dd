"""Loads one target and times it, in a process of its own; started by `exporter.trt.child`.

A process for each row, so that a crash costs one case, memory is free for the next target, no library's threads or
caches disturb another's, and the first call of each has everything before it that a deployment's first call has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.bench.cases import grids_of, pixels_of
from exporter.bench.loading import OpenBackend, open_target
from exporter.bench.report import BenchCase
from exporter.bench.targets import Target
from exporter.errors import KvitError, one_line
from exporter.trt.arrays import numpy_dtype
from exporter.validation.backends import CaseSkippedError, NativeBackend
from exporter.validation.evidence import BackendInfo, DType
from exporter.validation.latency import Latency, MeasuresLatency
from model.errors import InputError

LEAST_REPEATS = 3  # a median of fewer says nothing
Tick = Callable[[int, int], None]  # calls made, calls planned
Clock = Callable[[], float]


@dataclass(frozen=True)
class Order:
    """Load a target; CPU threads, None leaves them to the library."""

    target: Target
    threads: int | None


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        backend: its name, such as ``torch-cuda``.
        info: what really runs.
        dtype: of its numbers.
        sha256: of the weights of a live tower; None for files, which are hashed before.
        threads: CPU threads; None where the library chooses or the CPU does not compute.
        tf32: whether products may be computed in TF32; None where only the artifact can tell.
        seconds: from the file to a backend that is ready.
    """

    backend: str
    info: BackendInfo
    dtype: DType
    sha256: str | None
    threads: int | None
    tf32: bool | None
    seconds: float


@dataclass(frozen=True)
class CaseOrder:
    """Measure a case; numbers as in `exporter.bench.report.Settings`."""

    case: BenchCase
    warmup: int
    repeats: int
    seconds: float


@dataclass(frozen=True)
class Ticked:
    """A call is done: how many of how many."""

    done: int
    total: int


@dataclass(frozen=True)
class TakenCase:
    """What was measured, and the output of the last call.

    Attributes:
        first_ms: the first call.
        warmup: calls that were made to warm up.
        calls_ms: every call that counts.
        parts: of the same calls, where the backend times them.
        output: [rows, width] fp32.
    """

    first_ms: float
    warmup: int
    calls_ms: tuple[float, ...]
    parts: tuple[Latency, ...]
    output: NDArray[np.float32]


@dataclass(frozen=True)
class NotTaken:
    """There is nothing to measure: the target does not take the case, or lost it while running."""

    reason: str
    lost: bool


# ------------------------------------------------------------------------------------------------------------- serving


def serve(connection: Connection) -> None:
    """Answer `Order` with `Loaded`, then every `CaseOrder` with `Ticked` messages and one outcome, until nobody asks.

    Raises:
        BadInput, MissingRequirement: sent to the parent by `exporter.trt.child`.
    """
    serve_order(connection.recv(), connection)


def serve_order(order: Order, connection: Connection) -> None:
    """Serve an order that was received before."""
    opened = open_target(order.target, order.threads)
    with opened.backend as backend, _exact(order.target):
        connection.send(
            Loaded(
                backend.name,
                backend.describe(),
                backend.dtype,
                opened.sha256,
                opened.threads,
                opened.tf32,
                opened.seconds,
            )
        )
        while True:
            try:
                asked: CaseOrder = connection.recv()
            except EOFError:
                return
            connection.send(_take(opened, asked, lambda done, total: connection.send(Ticked(done, total))))


def _exact(target: Target) -> AbstractContextManager[object]:
    """PyTorch without TF32, as ONNX Runtime and engines are without it."""
    if target.kind != "tower":
        return contextlib.nullcontext()
    from exporter.validation.record import exact_arithmetic

    return exact_arithmetic()


def _take(opened: OpenBackend, asked: CaseOrder, tick: Tick) -> TakenCase | NotTaken:
    case = asked.case
    refusal = _refusal(opened, case)
    if refusal:
        return NotTaken(refusal, lost=False)
    pixels = pixels_of(case).astype(numpy_dtype(opened.takes))
    try:
        return time_case(
            opened.backend,
            pixels,
            grids_of(case),
            warmup=asked.warmup,
            repeats=asked.repeats,
            seconds=asked.seconds,
            tick=tick,
        )
    except CaseSkippedError as error:
        return NotTaken(one_line(str(error)), lost=False)
    except (InputError, KvitError) as error:  # ONNX Runtime's own fault with these grids, among others
        return NotTaken(one_line(getattr(error, "message", str(error))), lost=False)
    except (RuntimeError, MemoryError) as error:  # out of memory, a CUDA error
        return NotTaken(f"{type(error).__name__}: {one_line(str(error))[:300]}", lost=True)


def _refusal(opened: OpenBackend, case: BenchCase) -> str:
    """Why a graph must not be given a case: it cannot check its input itself."""
    items = len(case.grid_hws)
    if items > 1 and opened.several is False:
        return f"{items} items, where this graph takes one a call; export it with --packing packed"
    if opened.max_frames is not None and case.frames > opened.max_frames:
        return f"{case.frames} frames, where this tower takes {opened.max_frames}"
    return ""


def time_case(
    backend: NativeBackend,
    pixels: NDArray[Any],
    grids: NDArray[Any],
    *,
    warmup: int,
    repeats: int,
    seconds: float,
    tick: Tick,
    clock: Clock = time.perf_counter,
) -> TakenCase:
    """Time a case call by call.

    Args:
        backend: runs it.
        pixels: [frames, patches, 588] in the dtype that it takes.
        grids: [items, 2].
        warmup: calls between the first and those that count.
        repeats: calls that count.
        seconds: after the first call; then no more than `LEAST_REPEATS` calls are completed.
        tick: told after every call.
        clock: in seconds.

    Raises:
        CaseSkippedError, RuntimeError, KvitError: whatever the backend raises.
    """
    total = 1 + warmup + repeats
    calls: list[float] = []
    parts: list[Latency] = []

    def call() -> NDArray[Any]:
        start = clock()
        rows = backend.run_native(pixels, grids)
        calls.append((clock() - start) * 1e3)
        return rows

    output = call()
    first = calls[0]
    tick(1, total)
    warmed, deadline = 0, clock() + seconds
    while warmed < warmup and clock() < deadline:
        output = call()
        warmed += 1
        tick(1 + warmed, total)
    calls.clear()
    least = min(repeats, LEAST_REPEATS)
    while len(calls) < least or (len(calls) < repeats and clock() < deadline):
        output = call()
        part = backend.latency() if isinstance(backend, MeasuresLatency) else None
        parts += [] if part is None else [part]
        tick(1 + warmed + len(calls), total)
    return TakenCase(first, warmed, tuple(calls), tuple(parts), output.astype(np.float32))
