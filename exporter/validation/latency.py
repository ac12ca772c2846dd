"""How long an artifact takes, recorded beside its numbers; it is no part of the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds that half, nine in ten and ninety-nine in a hundred calls do not exceed."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one call by part.

    Attributes:
        warmup: calls before, which are not counted.
        repeats: calls that are.
        host_to_device: copies of the inputs.
        gpu: the computation.
        device_to_host: copy of the output.
    """

    warmup: int
    repeats: int
    host_to_device: Percentiles
    gpu: Percentiles
    device_to_host: Percentiles


@runtime_checkable
class MeasuresLatency(Protocol):
    """A backend that times what it runs."""

    def latency(self) -> Latency | None:
        """Times of the case that ran last; None before the first."""


def percentiles(milliseconds: Sequence[float]) -> Percentiles:
    """Take percentiles by nearest rank, so that each is a time that was measured.

    Args:
        milliseconds: at least one.
    """
    ordered = sorted(milliseconds)
    if not ordered:
        raise ValueError("no time was measured")
    # nearest rank: the smallest value that at least p % of all do not exceed; integers, so that 90 % of 10 is 9
    ranks = [-(-percent * len(ordered) // 100) for percent in (50, 90, 99)]
    return Percentiles(*(ordered[rank - 1] for rank in ranks))


def slow_cases(latencies: Sequence[tuple[str, Latency]], limit_ms: float) -> list[str]:
    """List the cases that took longer than allowed, as text.

    Args:
        latencies: by case.
        limit_ms: on the 99th percentile of a whole call, in milliseconds.
    """
    lines = []
    for name, latency in latencies:
        total = latency.host_to_device.p99 + latency.gpu.p99 + latency.device_to_host.p99
        if total > limit_ms:
            lines.append(f"case {name} took {total:.3g} ms (99th percentile), allowed are {limit_ms:g} ms")
    return lines
