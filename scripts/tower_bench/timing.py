"""Clocks: calls after a rest, calls one at a time, and calls in a row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
REST_SECONDS = 0.02  # between single calls; a GPU that is never idle lowers its clock


def _milliseconds(call: Call, calls: int = 1) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def first_call(call: Call) -> float:
    """Milliseconds of a call that was not made before."""
    return _milliseconds(call)


def time_calls(calls: dict[str, Call], repeats: int, seconds: float) -> dict[str, dict[str, float]]:
    """Time calls from host to finished result, in three ways.

    Args:
        calls: by name; warmed up here.
        repeats: calls of each after a rest.
        seconds: for which each is called without a rest, in either way.

    Returns:
        By name, medians in milliseconds: ``rested_ms``, a call after a rest, the contenders taking turns (and
        ``rested_min_ms``, ``rested_p90_ms``); ``alone_ms``, calls that each wait for the result; ``in_a_row_ms``, calls
        of which only the last is waited for, on average; and ``host_ms``, for which a call keeps the CPU at least.
    """
    for call in calls.values():
        for _ in range(3):
            call()
    rested: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            time.sleep(REST_SECONDS)
            rested[name].append(_milliseconds(call))
    rows = {}
    for name, call in calls.items():
        times = sorted(rested[name])
        median = statistics.median(times)
        count = max(3, int(seconds * 1e3 / median))
        rows[name] = {
            "rested_ms": median,
            "rested_min_ms": times[0],
            "rested_p90_ms": times[-(-90 * len(times) // 100) - 1],
            "alone_ms": statistics.median(_milliseconds(call) for _ in range(count)),
            "in_a_row_ms": _milliseconds(call, count),
            "calls": count,
            "host_ms": _host(call),
        }
    return rows


def _host(call: Call) -> float:
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        best = min(best, (time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return best


def peak_bytes(call: Call) -> int:
    """Bytes that a call takes at most above what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def graph_microseconds(work: Call, launches: int = 5, replays: int = 5) -> float:
    """Microseconds of one piece of work on the GPU, within a CUDA graph of several."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return float(statistics.median(times))
