"""Clocks of the benchmark: CUDA graphs for the GPU, calls in a row for the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

_WAIT_CYCLES = 8_000_000  # about 4 ms
_GRAPH_US = 3000.0


def capture(sets: int, step: Callable[[int], Any], launch_us: float) -> tuple[Any, int]:
    """A CUDA graph of launches over all sets of tensors, and their number.

    Args:
        sets: how many sets of tensors there are.
        step: launches for one set.
        launch_us: what one launch takes at least. The graph is made so long that the 10 us in which it starts do not
            count.
    """
    import torch

    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    launches = max(sets, int(_GRAPH_US / launch_us))
    with torch.cuda.graph(graph):
        for i in range(launches):
            step(i % sets)
    return graph, launches


def _event() -> Any:  # noqa: ANN401  its constructor is not annotated
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _replay(graph: Any, launches: int, *, queued: bool) -> float:  # noqa: ANN401
    import torch

    start, end = _event(), _event()
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end) * 1e3 / launches)


def time_graphs(graphs: dict[str, tuple[Any, int]], repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds of one launch: median, least and most over ``repeats`` replays, the graphs taking turns.

    The replays begin on an idle GPU. ``queued_us`` is the median of replays that were submitted while the GPU was busy
    with something else: there the step from one kernel to the next takes about 0.3 us longer.
    """
    idle: dict[str, list[float]] = {name: [] for name in graphs}
    queued: dict[str, list[float]] = {name: [] for name in graphs}
    for graph, launches in graphs.values():
        _replay(graph, launches, queued=False)
    for turn in range(repeats):
        for name, (graph, launches) in graphs.items():
            idle[name].append(_replay(graph, launches, queued=False))
            if turn % 3 == 0:
                queued[name].append(_replay(graph, launches, queued=True))
    return {
        name: {
            "median_us": statistics.median(idle[name]),
            "min_us": min(idle[name]),
            "max_us": max(idle[name]),
            "queued_us": statistics.median(queued[name]),
            "replays": repeats,
            "launches": graphs[name][1],
        }
        for name in graphs
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
