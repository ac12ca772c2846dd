"""Clocks of the benchmark: CUDA graphs for the GPU, calls in a row for the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_WAIT_CYCLES = 1_500_000  # about 0.8 ms


def capture(sets: int, step: Callable[[int], Any]) -> tuple[Any, int]:
    """A CUDA graph of launches over all sets of tensors, at least eight, and their number."""
    import torch

    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    launches = max(sets, 8)
    with torch.cuda.graph(graph):
        for i in range(launches):
            step(i % sets)
    return graph, launches


def _event() -> Any:  # noqa: ANN401  its constructor is not annotated
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _replay(graph: Any, launches: int) -> float:  # noqa: ANN401
    """Microseconds of one launch in one replay, which the GPU begins when all of it has been submitted."""
    import torch

    start, end = _event(), _event()
    torch.cuda.synchronize()
    torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1e3 / launches)


def time_graphs(graphs: dict[str, tuple[Any, int]], repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of one launch: median, least and most over ``repeats`` replays, the graphs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph, launches in graphs.values():
        _replay(graph, launches)  # the first takes longer
    for _ in range(repeats):
        for name, (graph, launches) in graphs.items():
            times[name].append(_replay(graph, launches))
    return {
        name: {"median_us": statistics.median(t), "min_us": min(t), "max_us": max(t), "replays": repeats}
        for name, t in times.items()
    }


def host_microseconds(calls: dict[str, Callable[[], Any]], repeats: int = 300, rounds: int = 15) -> dict[str, float]:
    """Microseconds for which one call keeps the CPU, in the fastest of some rounds in which the calls take turns."""
    import torch

    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / repeats * 1e6)
    return best


def copy_bandwidth() -> float:
    """GB/s of a device-to-device copy of 2 GiB, bytes read plus bytes written: the roof."""
    import torch

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_(0, 255)
    target = torch.empty_like(source)
    milliseconds: list[float] = []
    for _ in range(12):
        start, end = _event(), _event()
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return float(2 * source.numel() / statistics.median(milliseconds[2:]) / 1e6)
