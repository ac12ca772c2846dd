#!/usr/bin/env python3
"""Measure ``get_rope_shape``: ``python scripts/bench_rope_shape.py --device cuda --output FILE.json``.

On ``cpu`` and ``cuda`` eager and compiled are compared, and what compiling costs; on ``xla`` (PJRT_DEVICE says on what)
three ways of resampling are, and how many programs each compiles. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_output import write_json

if TYPE_CHECKING:
    from torch import Tensor

EXIT_NO_DEVICE = 8
SCHEMA = 1
# mode and width of the two released tables, both 64 x 64
TABLES = {"kimi-k2.5": ("bicubic", 1152), "kimi-k3": ("bilinear", 1024)}
GRIDS = [(2, 2), (16, 16), (36, 46), (46, 36), (64, 64), (6, 512), (100, 100)]
FIRST_CALL_GRID = (36, 46)
CALLS_IN_A_ROW = 20
SECONDS_OF_EACH = 0.3  # at most, for each of the two ways of timing a call, once there are three values


def make_table(name: str, device: Any) -> Tensor:  # noqa: ANN401  a torch.device or its name
    """A random table like a released one: bf16, without gradient."""
    import torch

    generator = torch.Generator().manual_seed(0)
    table = torch.randn(64, 64, TABLES[name][1], generator=generator)
    return table.to(device=device, dtype=torch.bfloat16)


def timed(work: Callable[[], object], wait: Callable[[], object], repeats: int) -> dict[str, float]:
    """Microseconds of one call: alone, with waiting for its result, and as one of twenty in a row."""
    for _ in range(3):
        work()
    wait()
    alone = several(work, wait, repeats, calls=1)
    in_a_row = several(work, wait, max(3, repeats // CALLS_IN_A_ROW), calls=CALLS_IN_A_ROW)
    return {
        "calls_alone": len(alone),
        "alone_us": statistics.median(alone),
        "alone_min_us": min(alone),
        "alone_max_us": max(alone),
        "in_a_row_us": statistics.median(in_a_row),
    }


def several(work: Callable[[], object], wait: Callable[[], object], repeats: int, calls: int) -> list[float]:
    """Microseconds of a call in up to ``repeats`` groups of ``calls``; three groups at least, however slow they are."""
    values: list[float] = []
    end = time.perf_counter() + SECONDS_OF_EACH
    while len(values) < repeats and (len(values) < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        values.append((time.perf_counter() - start) * 1e6 / calls)
    return values


def gpu_microseconds(work: Callable[[], object], about_us: float) -> float:
    """What the GPU itself is busy for: one call within a CUDA graph of twenty; fewer replays of slow ones."""
    import torch

    from scripts.rope_bench.timing import capture, time_graphs

    torch.cuda.synchronize()
    graphs = {"call": capture(CALLS_IN_A_ROW, lambda _: work())}
    replays = int(SECONDS_OF_EACH * 1e6 / (CALLS_IN_A_ROW * about_us))
    return time_graphs(graphs, min(20, max(3, replays)))["call"]["median_us"]


def measure_grid(name: str, table: Tensor, grid: tuple[int, int], repeats: int) -> dict[str, Any]:
    """Eager and compiled at one grid, and how far apart they are."""
    import torch

    from model.position import get_rope_shape

    mode = TABLES[name][0]
    on_gpu = table.is_cuda
    wait = torch.cuda.synchronize if on_gpu else time.perf_counter
    row: dict[str, Any] = {"table": name, "mode": mode, "grid": list(grid)}
    results = []
    for form, wanted in (("eager", False), ("compiled", True)):
        call = partial(get_rope_shape, table, mode, grid, compile=wanted)
        results.append(call())
        row[form] = timed(call, wait, repeats)
        if on_gpu:
            row[form]["gpu_us"] = gpu_microseconds(call, row[form]["in_a_row_us"])
    row["largest_difference"] = float((results[0] - results[1]).abs().max())
    row["speedup_alone"] = row["eager"]["alone_us"] / row["compiled"]["alone_us"]
    return row


def first_call(name: str, device: str) -> dict[str, float]:
    """Seconds of the first compiled call of this process and of one at another grid; run in a process of its own."""
    import torch

    from model.platform import compilation_is_off
    from model.position import get_rope_shape

    table, mode = make_table(name, device), TABLES[name][0]
    get_rope_shape(table, mode, FIRST_CALL_GRID, compile=False)
    wait = torch.cuda.synchronize if device == "cuda" else time.perf_counter
    started = time.perf_counter()
    compilation_is_off()  # imports the compiler
    seconds = {"import_s": time.perf_counter() - started}
    for what, grid in (("first_s", FIRST_CALL_GRID), ("second_grid_s", (6, 512))):
        started = time.perf_counter()
        get_rope_shape(table, mode, grid, compile=True)
        wait()
        seconds[what] = time.perf_counter() - started
    return seconds


def caches_of(name: str, folder: str) -> dict[str, str]:
    """Environment variables that give one table's compiled kernels a place of their own."""
    return {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{name}/inductor", "TRITON_CACHE_DIR": f"{folder}/{name}/triton"}


def first_calls(device: str, folder: str) -> Iterator[dict[str, Any]]:
    """First calls with an empty and with a filled cache of compiled kernels."""
    for name in TABLES:
        for cache in ("empty", "filled"):
            command = [sys.executable, __file__, "--device", device, "--first-call", name]
            environ = {**os.environ, **caches_of(name, folder)}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            yield {"table": name, "cache": cache, **json.loads(done.stdout)}


def all_grids(device: str, repeats: int, folder: str) -> Iterator[dict[str, Any]]:
    """Every table at every grid, with the kernels that :func:`first_calls` left."""
    for name in TABLES:
        os.environ.update(caches_of(name, folder))
        table = make_table(name, device)
        for grid in GRIDS:
            yield measure_grid(name, table, grid, repeats)


def deciding_microseconds(device: str) -> dict[str, float]:
    """What the decision itself costs a call, and the look-up of the compiled form."""
    from model import platform, position

    table = make_table("kimi-k3", device)
    plan = partial(platform.plan_rope_shape, table, (4, 6))
    find = partial(platform.compiled_rope_shape, position._resample_grid, table, "bilinear", forced=True)
    return {
        "plan_us": timed(plan, time.perf_counter, 200)["in_a_row_us"],
        "find_compiled_us": timed(find, time.perf_counter, 200)["in_a_row_us"],
    }


# ------------------------------------------------------------------------------------------------------------------ XLA


def by_products(table: Tensor, mode: str, shape: tuple[int, int]) -> Tensor:
    """Resample by two matrix products, [h, rows] and [w, columns]: the way that was not taken."""
    import torch

    from model.position import axis_taps

    rows, columns, width = table.shape
    matrices = []
    for length, size in zip(shape, (rows, columns), strict=True):
        position = torch.arange(length, device=table.device)
        index, weight = axis_taps(position, torch.full_like(position, length), size, mode)
        there = index.unsqueeze(-1) == torch.arange(size, device=table.device)
        matrices.append((there.to(torch.float32) * weight.unsqueeze(-1)).sum(1))
    by_row = (matrices[0] @ table.to(torch.float32).flatten(1)).reshape(-1, columns, width)
    return (matrices[1] @ by_row).flatten(0, 1)


def measure_xla(repeats: int) -> Iterator[dict[str, Any]]:
    """Three ways of resampling, by tokens as shipped, at grids of which two have the same number of tokens."""
    import torch_xla
    import torch_xla.debug.metrics as met

    from model.position import _resample_grid, _resample_tokens

    ways: dict[str, Callable[[Tensor, str, tuple[int, int]], Tensor]] = {
        "by tokens": lambda table, mode, grid: _resample_tokens(table, mode, *grid),
        "matrix products": by_products,
        "interpolate": lambda table, mode, grid: _resample_grid(table, mode, *grid),
    }
    for name, (mode, _) in TABLES.items():
        table = make_table(name, torch_xla.device())
        for way, resample in ways.items():
            for grid in ((36, 46), (46, 36), (64, 64)):

                def work(
                    grid: tuple[int, int] = grid,
                    resample: Callable[..., Tensor] = resample,
                    table: Tensor = table,
                    mode: str = mode,
                ) -> None:
                    result = resample(table, mode, grid)
                    torch_xla.sync(wait=True)
                    del result

                met.clear_all()
                started = time.perf_counter()
                work()
                first = time.perf_counter() - started
                compiled = met.metric_data("CompileTime")
                on_host = [counter for counter in met.counter_names() if counter.startswith("aten::")]
                row = {"table": name, "mode": mode, "way": way, "grid": list(grid), "first_s": first}
                row |= {"programs": compiled[0] if compiled else 0, "on_host": on_host}
                times = timed(work, time.perf_counter, repeats)
                yield row | {key: times[key] for key in ("calls_alone", "alone_us", "alone_min_us")}


# --------------------------------------------------------------------------------------------------------------- output


def environment(device: str) -> dict[str, Any]:
    """Where and how this was measured."""
    import platform

    import torch

    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "scripts/bench_rope_shape.py", *sys.argv[1:]]),
        "device": device,
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device == "xla":
        import torch_xla

        facts |= {"torch_xla": torch_xla.__version__, "pjrt_device": os.environ.get("PJRT_DEVICE", "")}
    facts["load_before"] = list(os.getloadavg())  # of a machine that others use too
    if device == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return facts


def measure(device: str, repeats: int, save: Callable[[dict[str, Any]], None]) -> None:
    """All that belongs to a device; saved after every row, so that a run that is cut short leaves what it had."""
    result = environment(device)
    with tempfile.TemporaryDirectory() as folder:
        for part, rows in parts_of(device, repeats, folder).items():
            result[part] = []
            for row in rows:
                result[part].append(row)
                log(f"{part}: {row}")
                save(result)
    result["complete"] = True
    save(result)


def parts_of(device: str, repeats: int, folder: str) -> dict[str, Iterator[dict[str, Any]]]:
    """What is measured on a device, in this order: first calls first, for they are cut off most easily."""
    if device == "xla":
        return {"rows": measure_xla(repeats)}
    return {
        "first_calls": first_calls(device, folder),
        "rows": all_grids(device, repeats, folder),
        "deciding": (deciding_microseconds(device) for _ in range(1)),
    }


def log(line: str) -> None:
    """Progress, beside the result."""
    print(line, file=sys.stderr, flush=True)


def unavailable(device: str) -> str | None:
    """Why nothing can be measured here, in one line."""
    module = "torch_xla" if device == "xla" else "torch"
    try:
        __import__(module)
    except ImportError as error:
        return f"bench_rope_shape --device {device} needs {module}: {error}"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return "bench_rope_shape --device cuda needs a CUDA GPU, and PyTorch sees none here"
    return None


def main() -> int:
    """Run one command; the return value is the exit code."""
    parser = argparse.ArgumentParser(description="Measure get_rope_shape eager and compiled.")
    parser.add_argument("--device", choices=("cpu", "cuda", "xla"), default="cpu")
    parser.add_argument("--output", type=Path, default=Path("rope-shape.json"), help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=100, help="calls of each kind (default: 100)")
    parser.add_argument("--first-call", choices=tuple(TABLES), help="time one first call and stop")
    arguments = parser.parse_args()
    reason = unavailable(arguments.device)
    if reason:
        print(reason, file=sys.stderr)
        return EXIT_NO_DEVICE
    import torch

    with torch.no_grad():
        if arguments.first_call:
            print(json.dumps(first_call(arguments.first_call, arguments.device)))
            return 0
        measure(arguments.device, arguments.repeats, partial(write_json, arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
