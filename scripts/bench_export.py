"""Time and memory of an export by depth: runs the installed command line and writes JSON.

python scripts/bench_export.py [--layers 3 9 27 54] [--output benchmarks/results/export-cpu.json]
python scripts/bench_export.py --golden [--layers 27] [--max-patches 4096] [--output benchmarks/results/golden-cpu.json]
python scripts/bench_export.py --tables benchmarks/results/export-cpu.json

With ``--golden`` the export also records a golden set and judges the file, and the seconds of each step are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kvit-export", "torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy")


def measure(source: str, arguments: list[str]) -> dict[str, Any]:
    """Run one export; returns wall and CPU seconds, peak memory and file sizes."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "build"
        command = [
            str(Path(sys.executable).with_name("kvit-export")),
            "onnx",
            source,
            "-o",
            str(output),
            "--json",
            *arguments,
        ]
        start = time.monotonic()
        with open(Path(scratch) / "stdout", "w+b") as stdout:
            process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
            # wait4 gives this child's own peak, RUSAGE_CHILDREN only the largest of all so far
            _, status, used = os.wait4(process.pid, 0)
            wall = time.monotonic() - start
            if status:
                raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
            stdout.seek(0)
            summary = json.load(stdout)
        sizes = {path.name: path.stat().st_size for path in output.iterdir() if path.is_file()}
    judged = {key: summary[key] for key in ("verdict", "relative_l2", "worst_token", "seconds")}
    return {
        "source": source,
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_memory_mb": round(used.ru_maxrss / 1000),
        "graph_bytes": sizes["vision_tower.onnx"],
        "data_bytes": sizes["vision_tower.onnx.data"],
        **{key: value for key, value in judged.items() if value is not None},
    }


def table(document: dict[str, Any]) -> str:
    """The rows as a Markdown table, and the steps of each row where a golden set was recorded."""
    lines = ["| layers | wall, s | CPU, s | peak memory, MB | graph, kB | weights, MB |", "|---:" * 6 + "|"]
    for row in document["rows"]:
        cells = (row["layers"], row["wall_s"], row["cpu_s"], row["peak_memory_mb"])
        graph, data = f"{row['graph_bytes'] / 1e3:.0f}", f"{row['data_bytes'] / 1e6:.0f}"
        lines.append("| " + " | ".join(map(str, (*cells, graph, data))) + " |")
    for row in (row for row in document["rows"] if "verdict" in row):
        lines += ["", f"{row['layers']} layers, {row['verdict']}:", "", "| step | s | s a layer |", "|---|---:|---:|"]
        lines += [f"| {step} | {s:.1f} | {s / row['layers']:.2f} |" for step, s in row["seconds"].items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, or print the tables of an earlier run."""
    parser = argparse.ArgumentParser(description="time and memory of kvit-export onnx by depth")
    parser.add_argument("--layers", type=int, nargs="+", help="default: 3 9 27 54, or 27 with --golden")
    parser.add_argument("--preset", default="kimi-k2.5")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--golden", action="store_true", help="record a golden set too and judge the file by it")
    parser.add_argument("--max-patches", type=int, default=4096, help="with --golden; as of kvit-export")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/{export,golden}-cpu.json")
    parser.add_argument("--tables", type=Path, help="print the tables of this file and measure nothing")
    arguments = parser.parse_args()
    if arguments.tables:
        print(table(json.loads(arguments.tables.read_text())))
        return
    output = arguments.output or Path(f"benchmarks/results/{'golden' if arguments.golden else 'export'}-cpu.json")
    golden = ["--max-patches", str(arguments.max_patches)] if arguments.golden else ["--no-golden"]
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python scripts/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "load_before": os.getloadavg()[0],
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    rows: list[dict[str, Any]] = []
    output.parent.mkdir(parents=True, exist_ok=True)
    for layers in arguments.layers or ([27] if arguments.golden else [3, 9, 27, 54]):
        row = measure(f"random:{arguments.preset}?layers={layers}", ["--dtype", arguments.dtype, *golden])
        rows.append({"layers": layers, **row})
        print(json.dumps(rows[-1]), flush=True)
        output.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n")
    print(table({"rows": rows}))


if __name__ == "__main__":
    main()
