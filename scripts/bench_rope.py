#!/usr/bin/env python3
"""Measure the fused RoPE kernel on a CUDA GPU: ``python scripts/bench_rope.py --output FILE.json``.

Every number is the time of one launch within a CUDA graph that goes through so many sets of tensors that none is in the
L2 cache when its turn comes; the graphs of all contenders of a row take turns. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plugins.fused_qk_rope.launch_plan import LAUNCH, LaunchConfig
from scripts.bench_output import run
from scripts.rope_bench.cases import Problem, check_outputs, contenders, make_problem, prepare_fused
from scripts.rope_bench.timing import capture, copy_bandwidth, host_microseconds, time_graphs

SCHEMA = 1
VLLM_GRID = [(tokens, heads, 128, "bfloat16") for tokens in (256, 1024, 4096, 8192) for heads in (3, 6, 12)]
TOWER_GRID = [(tokens, 16, 72, "bfloat16") for tokens in (256, 1024, 4096, 16384)]
OTHER_SIZES = [(tokens, 16, head_dim, "bfloat16") for head_dim in (64, 80, 96) for tokens in (1024, 4096, 16384)]
OTHER_DTYPES = [(4096, 16, 72, "float16"), (4096, 16, 72, "float32"), (4096, 12, 128, "float32")]
SWEEP_GRID = [
    (tokens, heads, head_dim, "bfloat16")
    for heads, head_dim in ((16, 64), (16, 72), (16, 80), (16, 96), (12, 128), (3, 128))
    for tokens in (64, 256, 1024, 4096, 16384)
] + [(tokens, 16, 72, dtype) for tokens in (256, 4096) for dtype in ("float16", "float32")]
# microseconds of the first sketch of this kernel, on an H200
SKETCH_US = {
    (256, 3, 128): 1.68,
    (1024, 12, 128): 5.11,
    (4096, 12, 128): 14.8,
    (8192, 12, 128): 29.1,
    (1024, 16, 72): 4.51,
    (4096, 16, 72): 12.2,
    (16384, 16, 72): 48.4,
}
LAYER_SHAPES = [(256, 16, 72), (1024, 16, 72), (4096, 16, 72), (4096, 12, 128)]


def measure_row(shape: tuple[int, int, int, str], rotated_bytes: int, repeats: int) -> dict[str, Any]:
    """One row of the result: all contenders at one shape, and the fused kernel with its outputs not rotated."""
    problem = make_problem(shape, rotated_bytes, same_outputs=False)
    graphs = {}
    for name, step in contenders(problem).items():
        check_outputs(problem, name, step)
        graphs[name] = capture(len(problem.sets), step)
    times = time_graphs(graphs, repeats)
    graphs.clear()
    inputs_only = make_problem(shape, rotated_bytes, same_outputs=True)
    step = prepare_fused(inputs_only, dependent=True)
    plain = prepare_fused(inputs_only, dependent=False)
    same_outputs = time_graphs(
        {
            "fused": capture(len(inputs_only.sets), step),
            "fused, no dependent launch": capture(len(inputs_only.sets), plain),
        },
        repeats,
    )
    return summarise(problem, times, same_outputs)


def summarise(
    problem: Problem, times: dict[str, dict[str, float]], same_outputs: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Take the best copy and the best pair of launches, and divide."""

    def best(prefix: str) -> str:
        return min((name for name in times if name.startswith(prefix)), key=lambda name: times[name]["median_us"])

    def median(name: str) -> float:
        return times[name]["median_us"]

    shape = problem.tokens, problem.heads, problem.head_dim
    chosen = {"fused": "fused", "fused_plain": "fused, no dependent launch", "native": "native"}
    chosen |= {"copy": best("copy"), "copy_plain": best_plain(times), "two_launches": best("two launches")}
    rows = {
        key: {"what": name, **times[name], "gb_per_s": problem.bytes_moved / median(name) / 1e3}
        for key, name in chosen.items()
    }
    fused = median("fused")
    return {
        "tokens": problem.tokens,
        "heads": problem.heads,
        "head_dim": problem.head_dim,
        "dtype": problem.dtype,
        "bytes": problem.bytes_moved,
        "sets": len(problem.sets),
        **rows,
        "fused_same_outputs": same_outputs["fused"],
        "fused_plain_same_outputs": same_outputs["fused, no dependent launch"],
        "ratio_to_copy": median(chosen["copy"]) / fused,
        "ratio_to_copy_plain": median(chosen["copy_plain"]) / median(chosen["fused_plain"]),
        "speedup_to_native": median("native") / fused,
        "speedup_to_two_launches": median(chosen["two_launches"]) / fused,
        "sketch_us": SKETCH_US.get(shape) if problem.dtype == "bfloat16" else None,
        "all": {name: value["median_us"] for name, value in times.items()},
    }


def best_plain(times: dict[str, dict[str, float]]) -> str:
    """The fastest copy without dependent launch."""
    plain = [name for name in times if name.startswith("copy") and "no dependent" in name]
    return min(plain, key=lambda name: times[name]["median_us"])


def measure_layer(shape: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    """Projection, rotation and attention in a row, as a tower runs them: without rotation, and with both launches."""
    import torch
    from torch.nn import functional

    tokens, heads, head_dim = shape
    width = heads * head_dim
    problem = make_problem((*shape, "bfloat16"), 0, same_outputs=True)
    _, _, cos, sin, q_out, k_out = problem.sets[0]
    weight = torch.randn(3 * width, width, device="cuda").bfloat16() / width**0.5
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    launches = {"fused": prepare_fused(problem, dependent=True), "plain": prepare_fused(problem, dependent=False)}

    def layer(_: int, name: str) -> None:
        q, k, v = functional.linear(x, weight).view(tokens, 3, heads, head_dim).unbind(1)
        if name in launches:
            problem.sets[0] = (q, k, cos, sin, q_out, k_out)
            launches[name](0)
            q, k = q_out, k_out
        q, k, v = (y.transpose(0, 1)[None] for y in (q, k, v))
        functional.scaled_dot_product_attention(q, k, v)

    graphs = {name: capture(1, partial(layer, name=name)) for name in ("no rotation", *launches)}
    return {"tokens": tokens, "heads": heads, "head_dim": head_dim, **time_graphs(graphs, repeats)}


def measure_host() -> dict[str, float]:
    """Microseconds that one eager call keeps the CPU busy, at a size where the GPU is faster than that."""
    import torch

    from plugins.fused_qk_rope.reference import fused_qk_rope_reference
    from plugins.fused_qk_rope.torch_op import fused_qk_rope, fused_qk_rope_
    from plugins.fused_qk_rope.triton_kernel import fused_qk_rope_triton

    q, k, cos, sin, *out = make_problem((64, 3, 128, "bfloat16"), 0, same_outputs=True).sets[0]

    def wrapped(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return fused_qk_rope_triton(q, k, cos, sin)

    wrapped.__annotations__ = dict.fromkeys(("q", "k", "cos", "sin"), torch.Tensor) | {
        "return": tuple[torch.Tensor, torch.Tensor]
    }
    custom = torch.library.custom_op("kvit_bench::wrapped", wrapped, mutates_args=())
    calls: dict[str, Callable[[], Any]] = {
        "operator": lambda: fused_qk_rope(q, k, cos, sin),
        "operator, in place": lambda: fused_qk_rope_(q, k, cos, sin),
        "same launch behind torch.library.custom_op": lambda: custom(q, k, cos, sin),
        "no operator, outputs given": lambda: fused_qk_rope_triton(q, k, cos, sin, out=(out[0], out[1])),
        "reference, elementary operations": lambda: fused_qk_rope_reference(q, k, cos, sin),
    }
    result: dict[str, float] = {}
    for mode, context in (("inference_mode", torch.inference_mode), ("no_grad", torch.no_grad)):
        with context():
            result |= {f"{mode}: {name}": value for name, value in host_microseconds(calls).items()}
    return result


def sweep_row(shape: tuple[int, int, int, str], rotated_bytes: int, repeats: int) -> dict[str, Any]:
    """All launch sizes at one shape, and how much slower than the best of them the shipped one is."""
    problem = make_problem(shape, rotated_bytes, same_outputs=False)
    configs = [LaunchConfig(threads, vectors) for threads in (32, 64, 128, 256, 512) for vectors in (1, 2)]
    graphs = {
        f"{config.threads}x{config.vectors_per_thread}": capture(
            len(problem.sets), prepare_fused(problem, dependent=True, config=config)
        )
        for config in configs
    }
    times = {name: value["median_us"] for name, value in time_graphs(graphs, repeats).items()}
    shipped = f"{LAUNCH.threads}x{LAUNCH.vectors_per_thread}"
    tokens, heads, head_dim, dtype = shape
    return {
        "tokens": tokens,
        "heads": heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "threads_x_vectors_us": times,
        "shipped": shipped,
        "shipped_over_best": times[shipped] / min(times.values()),
    }


def environment(command: list[str]) -> dict[str, Any]:
    """Where and how this was measured."""
    import torch
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "schema": SCHEMA,
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "gpu": properties.name,
        "compute_capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "copy_gb_per_s": copy_bandwidth(),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that was asked for, in the order of the JSON file."""
    import torch

    torch.manual_seed(0)
    result = environment(["python", "scripts/bench_rope.py", *sys.argv[1:]])
    rotated = 4 * result["l2_bytes"]
    result["method"] = {
        "rotated_bytes": rotated,
        "replays": arguments.repeats,
        "time": "one launch in a CUDA graph over all sets of tensors, replayed behind a wait, contenders in turn",
    }
    shapes = [*VLLM_GRID, *TOWER_GRID, *OTHER_SIZES, *OTHER_DTYPES]
    result["rows"] = [_logged(shape, measure_row(shape, rotated, arguments.repeats)) for shape in shapes]
    result["layers"] = [measure_layer(shape, arguments.repeats) for shape in LAYER_SHAPES]
    result["host_us"] = measure_host()
    if arguments.sweep:
        result["sweep"] = [sweep_row(shape, rotated, arguments.repeats) for shape in SWEEP_GRID]
    return result


def _logged(shape: tuple[int, int, int, str], row: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{'x'.join(map(str, shape[:3])):>12} {shape[3]:9} fused {row['fused']['median_us']:7.2f} us"
        f"  plain {row['fused_plain']['median_us']:7.2f}"
        f"  same outputs {row['fused_same_outputs']['median_us']:7.2f}"
        f"  copy {row['copy']['median_us']:7.2f} ({row['ratio_to_copy']:.3f}; plain {row['ratio_to_copy_plain']:.3f})"
        f"  native x{row['speedup_to_native']:.2f}  two launches x{row['speedup_to_two_launches']:.2f}",
        file=sys.stderr,
    )
    return row


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure the fused RoPE kernel, or draw what was measured.")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: standard output)")
    parser.add_argument("--repeats", type=int, default=20, help="replays of each graph (default: 20)")
    parser.add_argument("--sweep", action="store_true", help="also measure other launch sizes")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw a roofline picture of this file and stop")
    parser.add_argument("--picture", type=Path, default=Path("docs/rope-roofline.png"), help="picture to write")
    parser.add_argument("--tables", type=Path, metavar="JSON", help="print this file's tables as Markdown and stop")
    return parser.parse_args(arguments)


def main() -> int:
    """Run one command; the return value is the exit code."""
    return run("bench_rope", parse_arguments(), measure, lambda: importlib.import_module("scripts.rope_bench.report"))


if __name__ == "__main__":
    raise SystemExit(main())
