"""Time and memory of an export by depth: runs the installed command line and writes JSON.

python scripts/bench_export.py [--layers 3 9 27 54] [--output benchmarks/results/export-cpu.json]
python scripts/bench_export.py --tables benchmarks/results/export-cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kvit-export", "torch", "onnx", "onnxscript", "onnx-ir", "numpy")


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
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # wait4 gives this child's own peak, RUSAGE_CHILDREN only the largest of all so far
        _, status, used = os.wait4(process.pid, 0)
        wall = time.monotonic() - start
        if status:
            raise SystemExit(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
        sizes = {path.name: path.stat().st_size for path in output.iterdir() if path.is_file()}
    return {
        "source": source,
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_memory_mb": round(used.ru_maxrss / 1000),
        "graph_bytes": sizes["vision_tower.onnx"],
        "data_bytes": sizes["vision_tower.onnx.data"],
    }


def table(document: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = ["| layers | wall, s | CPU, s | peak memory, MB | graph, kB | weights, MB |", "|---:" * 6 + "|"]
    for row in document["rows"]:
        cells = (row["layers"], row["wall_s"], row["cpu_s"], row["peak_memory_mb"])
        graph, data = f"{row['graph_bytes'] / 1e3:.0f}", f"{row['data_bytes'] / 1e6:.0f}"
        lines.append("| " + " | ".join(map(str, (*cells, graph, data))) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, or print the tables of an earlier run."""
    parser = argparse.ArgumentParser(description="time and memory of kvit-export onnx by depth")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 9, 27, 54])
    parser.add_argument("--preset", default="kimi-k2.5")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/export-cpu.json"))
    parser.add_argument("--tables", type=Path, help="print the tables of this file and measure nothing")
    arguments = parser.parse_args()
    if arguments.tables:
        print(table(json.loads(arguments.tables.read_text())))
        return
    rows = []
    for layers in arguments.layers:
        row = measure(f"random:{arguments.preset}?layers={layers}", ["--no-golden"])
        rows.append({"layers": layers, **row})
        print(json.dumps(rows[-1]), flush=True)
    document = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": "python scripts/bench_export.py --layers " + " ".join(map(str, arguments.layers)),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "load_before": os.getloadavg()[0],
        "versions": {name: metadata.version(name) for name in PACKAGES},
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))


if __name__ == "__main__":
    main()
