#!/usr/bin/env python3
"""Measure the attention kernel for heads of two parts: ``python scripts/bench_split_head.py --output FILE.json``.

Both forms of it (64 and 128 rows a program) beside cuDNN, at every padded size from 512 to 16384 tokens and three
above, 16 heads of 72 padded to 80: what ``rows_for`` in model/cuda/split_head_kernel.py was fitted to. ``--tables``
shows it.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_output import run, surroundings

HEADS, HEAD_DIM, PADDED = 16, 72, 80
LARGE = (20480, 24576, 32768)
HALF = (1024, 2048, 4096, 8192, 16384)  # also in fp16
SHOWN = (512, 1024, 1280, 1536, 2048, 3072, 4096, 6656, 8192, 16384, 32768)


def measure(_: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of one attention within a CUDA graph, inputs in the L2 cache."""
    import torch

    from model.cuda.placement import padded_tokens

    sizes = sorted({padded_tokens(n) for n in range(512, 16385, 64)} | set(LARGE))
    return {
        **surroundings("bench_split_head"),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "heads": HEADS,
        "head_dim": HEAD_DIM,
        "padded_head": PADDED,
        "bf16": [measure_size(tokens, torch.bfloat16) for tokens in sizes],
        "fp16": [measure_size(tokens, torch.float16) for tokens in HALF],
    }


def measure_size(tokens: int, dtype: Any) -> dict[str, Any]:  # noqa: ANN401  PyTorch is imported where it is used
    """One size: cuDNN, and programs of 64 and of 128 rows."""
    import torch
    from torch.nn import functional as F  # noqa: N812
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from model.attention import attention_scale
    from model.cuda.split_head_kernel import split_head_attention
    from scripts.tower_bench.timing import graph_microseconds

    packed = torch.randn(tokens, 3, HEADS, PADDED, device="cuda", dtype=dtype)
    packed[..., HEAD_DIM:] = 0
    packed[:, 2, :, -1] = 1
    q, k, v = packed[:, 0], packed[:, 1], packed[:, 2]
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    library = partial(F.scaled_dot_product_attention, query, key, value, scale=attention_scale(HEAD_DIM))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        row: dict[str, Any] = {"tokens": tokens, "cudnn_us": round(graph_microseconds(library), 2)}
    for rows in (64, 128):
        ours = partial(split_head_attention, q, k, v, HEAD_DIM, rows)
        row[f"rows{rows}_us"] = round(graph_microseconds(ours), 2)
    print(row, file=sys.stderr, flush=True)
    return row


def tables(result: dict[str, Any]) -> str:
    """Some sizes as a Markdown table; the choice of ``rows_for`` is bold."""
    from model.cuda.split_head_kernel import rows_for

    lines = ["| tokens | cuDNN, us | 64 rows, us | 128 rows, us | of cuDNN |", "| ---: | ---: | ---: | ---: | ---: |"]
    for row in result["bf16"]:
        if row["tokens"] in SHOWN:
            chosen = rows_for(row["tokens"], result["heads"], result["multiprocessors"])
            cells = [f"{row['cudnn_us']:.1f}"]
            for rows in (64, 128):
                mark = "**" if rows == chosen else ""
                cells.append(f"{mark}{row[f'rows{rows}_us']:.1f}{mark}")
            cells.append(f"{row[f'rows{chosen}_us'] / row['cudnn_us']:.2f}")
            lines.append(f"| {row['tokens']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure the attention kernel for heads of two parts on a GPU.")
    parser.add_argument("--output", type=Path, help="JSON file to write (default: standard output)")
    parser.add_argument("--tables", type=Path, metavar="JSON", help="print this file's table as Markdown and stop")
    parser.set_defaults(plot=None)
    return parser.parse_args(arguments)


def main() -> int:
    """Run one command; the return value is the exit code."""
    return run("bench_split_head", parse_arguments(), measure, lambda: sys.modules[__name__])


if __name__ == "__main__":
    raise SystemExit(main())
