#!/usr/bin/env python3
"""Measure the live tower on a GPU: ``python scripts/bench_tower.py --output FILE.json``.

From pixel_values on the GPU to merged rows, without the projector, in bf16: the fast form, the plain form, the tower of
transformers with the same weights, and a floor of the matrix products and attention alone, in one run and in turns.
Also what first calls cost, errors against fp32, memory, several items in one call, and attention by back end. See
docs/benchmarks.md; ``--tables`` and ``--plot`` show what was measured.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_output import run, surroundings

if TYPE_CHECKING:
    from model.tower import KimiVision
    from model.weights import VisionWeights
    from scripts.tower_bench.contenders import Floor, Grid, Transformers

SCHEMA = 1
SOURCES = ("random:kimi-k2.5", "random:kimi-k3")
SINGLE: list[list[tuple[int, int, int]]] = [
    [(1, 16, 16)],
    [(1, 32, 32)],
    [(1, 64, 64)],
    [(1, 128, 128)],
    [(1, 20, 26)],
    [(1, 36, 46)],
    [(1, 6, 512)],
    [(1, 70, 92)],
    [(4, 16, 24)],
]
SEVERAL: list[list[tuple[int, int, int]]] = [
    [(1, 32, 32)] * 8,
    [(1, 32, 32)] * 3,
    [(1, 36, 46), (1, 20, 26), (1, 46, 36), (1, 16, 16), (1, 28, 40), (1, 30, 30), (1, 22, 44), (1, 12, 12)],
    [(1, 16, 16)] * 16,
]
TIMES = ("rested_ms", "alone_ms", "in_a_row_ms")
ERROR_GRIDS: list[list[tuple[int, int, int]]] = [
    *([(1, h, w)] for h, w in ((2, 2), (16, 16), (36, 46), (46, 36), (6, 512), (64, 64))),
    [(4, 16, 24)],
]
ATTENTION_TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# milliseconds from pixel_values to merged rows of K2.5 that the project set itself, by tokens
REQUIRED_MS = {256: 1.5, 1024: 2.8, 4096: 12.3, 16384: 117.0}


def tokens_of(grids: list[Grid]) -> int:
    """Tokens of all items."""
    return sum(t * h * w for t, h, w in grids)


def measure_source(source: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All of one tower."""
    import torch

    from model import load
    from model.checkpoint import open_source
    from scripts.tower_bench.contenders import Floor, KeptWeights, Transformers

    start = time.perf_counter()
    fast = load(source, device="cuda")
    torch.cuda.synchronize()
    result: dict[str, Any] = {"source": source, "load_s": round(time.perf_counter() - start, 2)}
    start = time.perf_counter()
    form = fast.fast_tower()
    if form is None:
        raise SystemExit("the tower has no fast form here; it needs Triton and compute capability 8.0 or later")
    result["pack_s"] = round(time.perf_counter() - start, 3)
    result["copied_bytes"] = form.copied_bytes
    result["weights_bytes"] = sum(p.nbytes for p in fast.parameters())
    # first, while nothing is warm: what a user's first calls cost
    result["first_calls"] = first_calls(fast)
    weights = KeptWeights(open_source(source))
    floor = Floor(weights)
    other = Transformers(weights) if weights.config.family == "kimi_k25" else None
    if other is not None:
        result["transformers"] = {"version": other.version, "attention": other.attention}
    result["rows"] = [logged(measure_row(grids, fast, floor, other, arguments)) for grids in SINGLE]
    result["several"] = [logged(measure_row(grids, fast, floor, other, arguments)) for grids in SEVERAL]
    result["graphs"] = {f"{k.padded} {k.form} {k.segments}": s for k, s in form.first_call_seconds.items()}
    result["cache"] = {"bytes": form.cache.nbytes, "bound": form.cache.max_bytes}
    del other
    result["errors"] = measure_errors(weights, fast)
    return result


def first_calls(fast: KimiVision) -> list[dict[str, Any]]:
    """Milliseconds of first calls, in this order: of the process, of other sizes, of another grid of the same size."""
    from scripts.tower_bench.contenders import merged_rows, pixels_of
    from scripts.tower_bench.timing import first_call

    rows = []
    for grids in ([(1, 32, 32)], [(1, 16, 64)], [(1, 36, 46)], [(1, 38, 44)], [(1, 70, 92)], [(1, 92, 70)]):
        call = merged_rows(fast, pixels_of(grids), grids)
        rows.append({"grids": grids, "first_ms": first_call(call), "second_ms": first_call(call)})
    return rows


def measure_row(
    grids: list[Grid], fast: KimiVision, floor: Floor, other: Transformers | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The contenders on one call."""
    from scripts.tower_bench.contenders import merged_rows, pixels_of
    from scripts.tower_bench.timing import peak_bytes, time_calls

    pixels = pixels_of(grids)
    plain = copy.copy(fast)  # the same weights; a copy is not accelerated
    calls = {"fast": merged_rows(fast, pixels, grids), "plain": merged_rows(plain, pixels, grids)}
    calls["floor"] = floor.record([t * h * w for t, h, w in grids])
    if other is not None:
        calls["transformers"] = other.call(pixels, grids)
    row: dict[str, Any] = {"grids": grids, "tokens": tokens_of(grids)}
    times = time_calls(calls, arguments.repeats, arguments.seconds)
    for name, values in times.items():
        row[name] = {key: round(value, 4) for key, value in values.items()}
        if name != "floor":
            row[name]["peak_bytes"] = peak_bytes(calls[name])
    for kind in TIMES:
        row[f"of_floor_{kind}"] = round(times["floor"][kind] / times["fast"][kind], 4)
    if len(grids) > 1:
        row["against_alone"] = against_alone(fast, grids)
    return row


def against_alone(tower: KimiVision, grids: list[Grid]) -> float:
    """Largest relative L2 difference between an item's rows in the call and by itself."""
    import torch

    from scripts.tower_bench.contenders import pixels_of

    pixels, worst = pixels_of(grids), 0.0
    together = tower(pixels, torch.tensor(grids))
    parts = torch.split(pixels, [t * h * w for t, h, w in grids])
    for rows, part, grid in zip(together, parts, grids, strict=True):
        alone = tower(part, torch.tensor([grid]))[0].double()
        worst = max(worst, float((rows.double() - alone).norm() / alone.norm()))
    return worst


def measure_errors(weights: VisionWeights, fast: KimiVision) -> list[dict[str, Any]]:
    """Relative L2 error of whole outputs, projector included, against the plain form in fp32 without TF32."""
    import torch

    from model.tower import build_tower
    from scripts.tower_bench.contenders import pixels_of

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    rows = []
    exact = build_tower(weights, dtype=torch.float32, device="cuda")
    plain = build_tower(weights, dtype=torch.bfloat16, device="cuda")
    for grids in [*ERROR_GRIDS, *SEVERAL[1:3]]:
        pixels, grid_thws = pixels_of(grids), torch.tensor(grids)
        want = torch.cat(exact(pixels.float(), grid_thws)).double()
        row: dict[str, Any] = {"grids": grids}
        for name, tower in (("fast", fast), ("plain", plain)):
            row[name] = float((torch.cat(tower(pixels, grid_thws)).double() - want).norm() / want.norm())
        row["fast_over_plain"] = row["fast"] / row["plain"]
        rows.append(row)
    return rows


def measure_attention() -> list[dict[str, Any]]:
    """Microseconds of attention by kernel, head size and length, one item, within a CUDA graph."""
    import torch
    from torch.nn import functional as F  # noqa: N812
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from model.cuda.attention import attend_split_heads, splits_heads
    from scripts.tower_bench.timing import graph_microseconds

    back_ends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    back_ends["efficient"] = SDPBackend.EFFICIENT_ATTENTION
    rows = []
    for heads, dim in ((16, 72), (16, 80), (12, 128)):
        for tokens in ATTENTION_TOKENS:
            packed = torch.randn(tokens, 3, heads, dim, device="cuda", dtype=torch.bfloat16)
            packed[:, 2, :, -1] = 1  # as the kernel for heads of two parts wants it
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in packed.unbind(1))
            row: dict[str, Any] = {"heads": heads, "head_dim": dim, "tokens": tokens}
            for name, back_end in back_ends.items():
                with sdpa_kernel(back_end):
                    row[f"{name}_us"] = round(graph_microseconds(partial(F.scaled_dot_product_attention, q, k, v)), 2)
            if splits_heads(packed.device, dim):
                ours = partial(attend_split_heads, packed[:, 0], packed[:, 1], packed[:, 2], head_dim=dim)
                row["split_us"] = round(graph_microseconds(ours), 2)
            rows.append(row)
    return rows


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything."""
    result: dict[str, Any] = {"schema": SCHEMA, **surroundings("bench_tower")}
    result["required_ms"] = {str(tokens): value for tokens, value in REQUIRED_MS.items()}
    result["towers"] = [measure_source(source, arguments) for source in arguments.source]
    result["attention"] = measure_attention()
    return result


def logged(row: dict[str, Any]) -> dict[str, Any]:
    """Show a row while the next is measured."""
    parts = [f"{row['tokens']:>6} tokens, {len(row['grids'])} items"]
    names = [name for name in ("fast", "floor", "plain", "transformers") if name in row]
    parts += [f"{name} {'/'.join(format(row[name][kind], '.3f') for kind in TIMES)}" for name in names]
    parts.append(f"of floor {'/'.join(format(row[f'of_floor_{kind}'], '.3f') for kind in TIMES)}")
    print("  ".join(parts), file=sys.stderr, flush=True)
    return row


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure the live tower on a GPU, or show what was measured.")
    parser.add_argument("--source", action="append", help=f"towers (default: {' '.join(SOURCES)})")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: standard output)")
    parser.add_argument("--repeats", type=int, default=15, help="single calls of each contender (default: 15)")
    parser.add_argument(
        "--seconds", type=float, default=0.4, help="of calls without a rest, in each of two ways (default: 0.4)"
    )
    parser.add_argument("--tables", type=Path, metavar="JSON", help="print this file's tables as Markdown and stop")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw this file and stop")
    parser.add_argument("--picture", type=Path, default=Path("docs/tower-h200.png"), help="picture to write")
    parsed = parser.parse_args(arguments)
    parsed.source = parsed.source or list(SOURCES)
    return parsed


def main() -> int:
    """Run one command; the return value is the exit code."""
    return run("bench_tower", parse_arguments(), measure, lambda: importlib.import_module("scripts.tower_bench.report"))


if __name__ == "__main__":
    raise SystemExit(main())
