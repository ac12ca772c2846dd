"""Builds TensorRT-RTX engines of every form of the graph, on the CPU, and says which were built and which were not.

Two presets, three dtypes, two packings, three forms of RoPE and two of attention are 72 graphs; with one and with two
profiles each they are 144 engines. A graph is exported once, in a process that keeps PyTorch loaded, and both of its
engines are built from it by ``kvit-export trt``, each in a process of its own. Nothing is run: that takes an RTX GPU.

    OMP_NUM_THREADS=1 python scripts/rtx_matrix.py [--output benchmarks/results/engines-rtx-cpu.json]
    python scripts/rtx_matrix.py --only 'tiny-bf16-*-plugin-*' --first 4 --output FILE
    python scripts/rtx_matrix.py --table benchmarks/results/engines-rtx-cpu.json

OUTPUT is written after each engine, and a further call does only what is neither built nor refused there. An engine is
``refused`` where the program says why and `REFUSALS` names the page that documents it, ``failed`` where anything else
keeps it from being what was asked for. The exit code is 1 if one of those chosen failed, else 0. TensorRT-RTX must be
installed, and Triton with it for the plugin's kernel.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exporter.files import write_text
from exporter.tools import tool_versions
from model.config import PATCH_VALUES
from scripts.engine_runs.results import COMMAND, Record, call, now, read_json

DEFAULT_OUTPUT = Path("benchmarks/results/engines-rtx-cpu.json")
PACKAGES = ("kvit-export", "tensorrt-rtx", "triton", "torch", "onnx", "onnxscript", "onnx-ir", "numpy")

PRESETS = ("tiny", "tiny-k3")
DTYPES = {"bf16": "BF16", "fp16": "HALF", "fp32": "FLOAT"}  # with TensorRT's names
PACKINGS = ("single", "packed")
ROPES = ("plugin", "standard", "plain")
ATTENTIONS = ("plain", "op")
PROFILES = {"one": ((4, 16, 64),), "two": ((4, 16, 64), (64, 256, 1024))}  # patches of one frame: min, opt, max
FRAMES, ITEMS = 4, 3  # most of both; a single graph takes one item


class Refusal(NamedTuple):
    """A refusal that is no fault.

    Attributes:
        name: in the results.
        code: exit code of ``kvit-export trt``.
        pattern: of its message.
        documented: where.
    """

    name: str
    code: int
    pattern: str
    documented: str


# Both concern the plugin alone; everything else that does not become an engine is a failure.
REFUSALS = (
    Refusal("no Triton", 8, r"plugin's kernel is compiled with triton\b", "docs/engines.md, The RoPE plugin"),
    Refusal("no plugin on this system", 5, r"aborts at a plugin on this system", "docs/engines.md, The RoPE plugin"),
)


@dataclass(frozen=True)
class Graph:
    """An ONNX artifact."""

    preset: str
    dtype: str
    packing: str
    rope: str
    attention: str

    @property
    def name(self) -> str:
        """Of the artifact, in the results and as a folder."""
        return f"{self.preset}-{self.dtype}-{self.packing}-{self.rope}-{self.attention}"


@dataclass(frozen=True)
class Engine:
    """An engine that is to be built of a graph, with ``one`` or ``two`` profiles."""

    graph: Graph
    profiles: str

    @property
    def name(self) -> str:
        """Of the engine, in the results and as a folder."""
        return f"{self.graph.name}-{self.profiles}"

    def options(self) -> list[str]:
        """Options of ``kvit-export trt``."""
        given = [part for sizes in PROFILES[self.profiles] for part in ("--profile", ":".join(map(str, sizes)))]
        items = ["--items", str(ITEMS)] if self.graph.packing == "packed" else []
        return ["--flavor", "tensorrt_rtx", *given, "--frames", str(FRAMES), *items]

    def shapes(self) -> list[str]:
        """The profiles that were asked for: frames x patches x items at min, opt and max."""
        items = ITEMS if self.graph.packing == "packed" else 1
        return [f"1x{low}x1 1x{middle}x1 {FRAMES}x{high}x{items}" for low, middle, high in PROFILES[self.profiles]]

    def corners(self) -> list[str]:
        """Frames x patches of all corners, as `in_file` finds them."""
        return sorted({shape.rpartition("x")[0] for profile in self.shapes() for shape in profile.split()})


def plan() -> list[Engine]:
    """All 144, the two of a graph side by side."""
    forms = itertools.product(PRESETS, DTYPES, PACKINGS, ROPES, ATTENTIONS)
    return [Engine(Graph(*form), profiles) for form in forms for profiles in PROFILES]


def select(patterns: list[str], first: int | None) -> list[Engine]:
    """The engines whose names match a pattern (all without one), at most the first so many."""
    chosen = [e for e in plan() if not patterns or any(fnmatch.fnmatchcase(e.name, pattern) for pattern in patterns)]
    if not chosen:
        sys.exit(f"--only matches no engine; names look like {plan()[0].name}")
    return chosen[:first]


# --------------------------------------------------------------------------------------------- in the exporting process


def export(graph: Graph, folder: Path) -> Record:
    """Export a graph without a golden set; returns what it took, or with which exit code it ended and why."""
    from exporter.errors import BadInput, KvitError
    from exporter.onnx_artifact import OnnxRequest, make_onnx
    from model.errors import InputError
    from model.graph import GraphForm

    marks: dict[tuple[str, int], float] = {}
    start = time.perf_counter()

    def tell(step: str, done: int, _total: int) -> None:
        marks.setdefault((step, done), time.perf_counter() - start)

    form = GraphForm(graph.rope, graph.attention, graph.packing)
    request = OnnxRequest(f"random:{graph.preset}", folder, graph.dtype, form, golden=False)
    try:
        manifest = make_onnx(request, tell).manifest
    except InputError as error:
        return {"exit_code": BadInput.exit_code, "message": str(error)}
    except KvitError as error:
        return {"exit_code": error.exit_code, "message": error.format_message()}
    trace = marks["trace", 1] - marks["trace", 0]
    return {
        "exit_code": 0,
        "message": "",
        "opset": manifest.opset,
        "blocks": manifest.source.config["num_hidden_layers"],
        "bytes": sum(record.size for record in manifest.files.values()),
        "warnings": list(manifest.warnings),
        "seconds": {"trace": round(trace, 2), "export": round(manifest.seconds["export"], 2)},
    }


# ------------------------------------------------------------------------------------------------------- what was built


def build(engine: Engine, onnx: Path, folder: Path, timeout: float) -> Record:
    """Call ``kvit-export trt`` and read what it wrote."""
    from exporter.errors import KvitError

    command = [sys.executable, "-c", COMMAND, "trt", str(onnx), "-o", str(folder), *engine.options(), "--json"]
    start = time.perf_counter()
    code, _, errors = call(command, timeout)
    seconds = round(time.perf_counter() - start, 2)
    found: Record = {}
    message = f"no answer within {timeout:g} s" if code is None else ""
    if code:
        message = (errors.strip().splitlines() or ["nothing on stderr"])[-1]
    elif code == 0:
        try:
            found = describe(folder)
        except KvitError as error:
            message = error.format_message()
    found["seconds"] = {**found.get("seconds", {}), "process": seconds}
    message = message.replace(str(onnx), onnx.name).replace(str(folder), folder.name)
    return {"date": now(), "exit_code": code, "message": message, **found}


def describe(folder: Path) -> Record:
    """Facts about an engine: those of its manifest, whose hashes are checked, and those of the file itself."""
    from exporter.manifest import check_files, read_manifest

    manifest = read_manifest(folder)
    check_files(folder, manifest)
    layers = manifest.layers
    shapes = [
        " ".join(f"{corner.frames}x{corner.patches}x{corner.items}" for corner in (part.min, part.opt, part.max))
        for part in manifest.profiles
    ]
    return {
        "runtime": str(manifest.runtime),
        "targets": " ".join(manifest.targets),
        "form": [manifest.dtype, manifest.packing, manifest.rope, manifest.attention],
        "engine_bytes": manifest.files[manifest.artifact].size,
        "profiles": shapes,
        "plugin": None if manifest.plugin is None else manifest.plugin.kind,
        "plugin_layers": sum(count for kind, count in layers.items() if kind.startswith("PLUGIN")),
        "rotary_layers": layers.get("ROTARY_EMBEDDING", 0),
        "attention_layers": layers.get("ATTENTION_INPUT", 0),
        "products": {k.rpartition(" ")[2]: n for k, n in layers.items() if k.startswith("MATRIX_MULTIPLY ")},
        **in_file((folder / manifest.artifact).read_bytes()),
        "warnings": list(manifest.warnings),
        "seconds": {step.replace("tensorrt ", ""): value for step, value in manifest.seconds.items() if " " in step},
        "peak_memory_bytes": manifest.peak_memory_bytes,
    }


def in_file(content: bytes) -> Record:
    """What an engine file tells without a GPU, which deserialising it needs.

    TensorRT-RTX 1.7 writes the bounds of a profile as 64-bit integers, and a plugin's PTX as text.

    Args:
        content: of the file.

    Returns:
        ``corners_in_file``: frames x patches of those corners of `PROFILES` that are there as shapes of the pixels;
        ``packs_in_file``: how often the largest number of items is there as a shape of the grids;
        ``kernels_in_file``: how often a RoPE kernel of each dtype is there.
    """
    corners = {corner for kind in PROFILES for corner in Engine(Graph("", "", "", "", ""), kind).corners()}
    found = [
        corner
        for corner in sorted(corners)
        if struct.pack("<3q", *map(int, corner.split("x")), PATCH_VALUES) in content
    ]
    kernels = Counter(match.decode() for match in re.findall(rb"\.entry fused_qk_rope_([a-z0-9]+)_h", content))
    return {
        "corners_in_file": found,
        "packs_in_file": content.count(struct.pack("<2q", ITEMS, 2)),
        "kernels_in_file": dict(kernels),
    }


def complaints(engine: Engine, found: Record, blocks: int) -> list[str]:
    """In what an engine that was built differs from what was asked for.

    Args:
        engine: that was asked for.
        found: see `describe`.
        blocks: of the tower.
    """
    graph, count = engine.graph, len(PROFILES[engine.profiles])
    plugin = graph.rope == "plugin"
    long = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[graph.dtype]
    wanted: Record = {
        "form": [long, graph.packing, graph.rope, graph.attention],
        "profiles": engine.shapes(),
        "corners_in_file": engine.corners(),
        "plugin": "v3" if plugin else None,
        "plugin_layers": blocks if plugin else 0,
        "rotary_layers": 2 * blocks if graph.rope == "standard" else 0,  # one for q, one for k
        "attention_layers": blocks if graph.attention == "op" else 0,
    }
    faults = [f"{key}: {found[key]}, not {value}" for key, value in wanted.items() if found[key] != value]
    if graph.packing == "packed" and found["packs_in_file"] < count:
        faults.append(f"packs_in_file: {found['packs_in_file']}, less than one for each of {count} profiles")
    kernels = found["kernels_in_file"]
    if set(kernels) != ({graph.dtype} if plugin else set()) or any(n < blocks * count for n in kernels.values()):
        faults.append(f"kernels_in_file: {kernels}, not one of {graph.dtype} for each of {blocks} blocks and profile")
    if set(found["products"]) != {DTYPES[graph.dtype]}:
        faults.append(f"products: {found['products']}, not all in {DTYPES[graph.dtype]}")
    return faults


def judge(engine: Engine, found: Record, blocks: int) -> Record:
    """Put the outcome in front of what was found: ``built``, ``refused`` or ``failed``, and the reason."""
    if found["exit_code"] == 0 and not found["message"]:
        faults = complaints(engine, found, blocks)
        return {"outcome": "failed" if faults else "built", "reason": "; ".join(faults), **found}
    for refusal in REFUSALS if engine.graph.rope == "plugin" else ():
        if found["exit_code"] == refusal.code and re.search(refusal.pattern, found["message"]):
            return {"outcome": "refused", "reason": f"{refusal.name} ({refusal.documented})", **found}
    return {"outcome": "failed", "reason": f"exit code {found['exit_code']}: {found['message']}", **found}


# ------------------------------------------------------------------------------------------------------- the whole run


class Run:
    """Exports graphs, builds their engines and keeps what came of it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.lock = threading.Lock()
        old = {} if arguments.again else read_json(arguments.output)
        self.state: Record = {"runs": old.get("runs", []), "graphs": old.get("graphs", {})}
        self.engines: Record = old.get("engines", {})
        this = surroundings()
        if any(run["versions"] != this["versions"] for run in self.state["runs"]):
            sys.exit(f"{arguments.output} was made with other versions; take --again or another --output")
        self.state["runs"].append(this)
        self.exporters = ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn"), start_exporter)

    def finish(self, chosen: list[Engine]) -> int:
        """Do what is not done of the engines chosen; returns the exit code of this script."""
        todo = [e for e in chosen if self.engines.get(e.name, {}).get("outcome") not in ("built", "refused")]
        groups = [list(group) for _, group in itertools.groupby(todo, key=lambda engine: engine.graph)]
        self.left = len(todo)
        pool = ThreadPoolExecutor(self.arguments.jobs)
        try:
            for _ in pool.map(self.make, groups):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
            self.exporters.shutdown()
        self.save()
        counts = Counter(self.engines[engine.name]["outcome"] for engine in chosen)
        told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("built", "refused", "failed"))
        print(f"{told}; {len(self.engines)} of {len(plan())} are in {self.arguments.output}")
        return 1 if counts["failed"] else 0

    def make(self, engines: list[Engine]) -> None:
        """Export the graph of some engines and build them."""
        graph = engines[0].graph
        onnx = self.folder / graph.name
        made = self.exporters.submit(export, graph, onnx).result()
        self.state["graphs"][graph.name] = made
        for engine in engines:
            folder = self.folder / engine.name
            if made["exit_code"] == 0:
                found = build(engine, onnx, folder, self.arguments.timeout)
            else:
                found = {"date": now(), "exit_code": made["exit_code"], "message": f"export: {made['message']}"}
            found["command"] = f"kvit-export trt {onnx.name} -o {folder.name} {' '.join(engine.options())}"
            self.put(engine, judge(engine, found, made.get("blocks", 0)))
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(onnx, ignore_errors=True)

    def put(self, engine: Engine, found: Record) -> None:
        """Keep what came of an engine, at once."""
        with self.lock:
            self.engines[engine.name] = found
            self.left -= 1
            self.save()
        seconds = found["seconds"]["process"] if "seconds" in found else 0
        print(f"{engine.name}: {found['outcome']}, {seconds} s; {self.left} left. {found['reason']}", flush=True)

    def save(self) -> None:
        """Write the results, engines in the order of the plan."""
        engines = {engine.name: self.engines[engine.name] for engine in plan() if engine.name in self.engines}
        counts = Counter(found["outcome"] for found in engines.values())
        document = {**self.state["runs"][-1], "counts": dict(counts), **self.state, "engines": engines}
        self.arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.arguments.output, one_line_each(document) + "\n")


def start_exporter() -> None:
    """One thread each: the jobs are the parallelism."""
    import torch

    torch.set_num_threads(1)


def one_line_each(document: Record) -> str:
    """JSON with one line for each graph and each engine, so that a difference between two runs can be read."""
    lines = []
    for key, value in document.items():
        if key in ("graphs", "engines"):
            rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def surroundings() -> Record:
    """What the numbers depend on."""
    installed = tool_versions(PACKAGES)
    if "tensorrt-rtx" not in installed:
        sys.exit("tensorrt-rtx is not installed, so there is nothing to try; pip install 'kvit-export[cpu]'")
    return {
        "date": now(),
        "command": "python scripts/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": {"cores": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "load_before": os.getloadavg()[0],
        "versions": {name: installed.get(name, "") for name in PACKAGES},
    }


def table(document: Record) -> str:
    """What came of all engines as a Markdown table, one row for each form of RoPE and attention."""
    head = "| RoPE | attention | built | refused | failed | plugin layers | one profile, MB | two profiles, MB | s |"
    lines = [head, "|---|---|---:|---:|---:|---:|---:|---:|---:|"]
    for rope, attention in itertools.product(ROPES, ATTENTIONS):
        named = [(e, document["engines"].get(e.name)) for e in plan() if e.graph.rope == rope]
        rows = [(e, found) for e, found in named if found is not None and e.graph.attention == attention]
        counts = Counter(found["outcome"] for _, found in rows)
        built = [(e, found) for e, found in rows if found["outcome"] == "built"]
        cells = [rope, attention, *(counts[outcome] for outcome in ("built", "refused", "failed"))]
        cells.append(span([found["plugin_layers"] for _, found in built]))
        sizes = [(e.profiles, round(found["engine_bytes"] / 1e6, 1)) for e, found in built]
        cells += [span([size for profiles, size in sizes if profiles == kind]) for kind in PROFILES]
        cells.append(span([round(found["seconds"]["process"], 1) for _, found in built]))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def span(values: list[float]) -> str:
    """Smallest and largest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names of engines; * stands for any")
    parser.add_argument("--first", type=int, help="at most so many of them")
    parser.add_argument("--jobs", type=int, default=1, help="graphs at a time; seconds then mean little")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one engine")
    parser.add_argument("--again", action="store_true", help="forget what OUTPUT holds")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--table", type=Path, help="print the table of this file and build nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Build, or print the table of an earlier run; returns the exit code."""
    parsed = parse(arguments)
    if parsed.table:
        print(table(json.loads(parsed.table.read_text(encoding="utf-8"))))
        return 0
    chosen = select(parsed.only, parsed.first)
    with tempfile.TemporaryDirectory() as folder:
        return Run(parsed, Path(folder)).finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
