"""Measures the gate's margins: does it pass every honest artifact, and does it refuse every wrong model?

For each preset, dtype and seed of the weights a golden set is recorded, the honest ONNX file is exported and judged by
it. For the first seeds each wrong model is judged too: as an ONNX file of its own, each from a trace of its own (ten
CPU-seconds), or with ``--mutant-form graph`` in the graph's form in PyTorch, in the artifact's dtype. Every result is
appended to OUTPUT.jsonl as soon as it is there; ``--summarise`` makes OUTPUT from such a file, also of a run cut short.

    OMP_NUM_THREADS=1 python scripts/gate_margins.py --seeds 50 --presets tiny tiny-k3 tiny-vl --jobs 16 --output FILE
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import datetime as dt
import functools
import heapq
import json
import multiprocessing
import os
import pickle
import platform
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from exporter.onnx_trace import OnnxOptions, Trace
    from exporter.validation.backends import Backend
    from exporter.validation.evidence import BackendInfo, DType, Evidence
    from exporter.validation.gate import Check, Judgement
    from exporter.validation.golden import GoldenSet
    from exporter.validation.wrong_models import WrongModel
    from model.config import VisionConfig
    from model.random_weights import RandomWeights
    from model.weights import VisionWeights

Record = dict[str, Any]

DTYPES: dict[str, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_PATCHES = 480  # 2x2, 16x16, 16x20, 20x16, a clip of 4x10x12 and calls of several items
TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Job:
    """What a worker does.

    Attributes:
        preset: a preset, ``tiny-vl``, or ``PRESET?layers=N``.
        dtype: fp32, bf16 or fp16.
        seeds: of the weights.
        wrong: name of the wrong model; empty for the honest artifact.
        form: ``trace`` only traces; ``onnx`` judges a file, ``graph`` the graph's form in PyTorch.
        device: that records golden sets and runs ``graph``.
        work: folder of traces and golden sets.
        results: file of results, appended to.
        deadline: as ``time.time()``; a job that has not begun by then is dropped.
        keep: leave the golden set for later jobs.
    """

    preset: str
    dtype: str
    seeds: tuple[int, ...]
    wrong: str
    form: str
    device: str
    work: Path
    results: Path
    deadline: float
    keep: bool = False

    def place(self, kind: str, *more: object) -> Path:
        """A path in the work folder that belongs to this preset, this dtype and more."""
        return self.work / "-".join([kind, self.preset.replace("?", "_"), self.dtype, *map(str, more)])


def config_of(name: str) -> VisionConfig:
    """The tower of a name on the command line."""
    from model.config import preset
    from model.random_weights import parse_random_source

    if name == "tiny-vl":  # the tiny tower as Kimi-VL has it: no time axis
        return dataclasses.replace(preset("tiny"), family="kimi_vl", pos_emb_time=1)
    return parse_random_source(f"random:{name}").config


class DrawnOnce:
    """Random weights that keep what they have drawn: golden set and export both read all of it."""

    def __init__(self, right: RandomWeights) -> None:
        self._right = right
        self._drawn: dict[str, NDArray[np.uint8]] = {}
        self.config, self.source = right.config, right.source

    def names(self) -> tuple[str, ...]:
        """See `VisionWeights`."""
        return self._right.names()

    def dtype(self, name: str) -> str:
        """See `VisionWeights`."""
        return self._right.dtype(name)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """See `VisionWeights`."""
        if name not in self._drawn:
            self._drawn[name] = self._right.raw(name)
        return self._drawn[name]

    def tensor(self, name: str) -> Tensor:
        """See `VisionWeights`."""
        from model.config import tensor_shapes
        from model.weights import as_tensor

        return as_tensor(self.raw(name), "bfloat16", tensor_shapes(self.config)[name])

    def sha256(self) -> str:
        """See `VisionWeights`."""
        for name in self.names():
            self.raw(name)
        return self._right.sha256()


class GraphBackend:
    """The graph's form in PyTorch, in the artifact's dtype: what the exporter would trace."""

    def __init__(self, weights: VisionWeights, wrong: WrongModel, dtype: DType, device: str) -> None:
        import torch

        from exporter.validation.evidence import BackendInfo
        from model.tower import build_tower

        self.name, self.dtype, self._wrong = "graph form", dtype, wrong
        self._tower = build_tower(weights, dtype=getattr(torch, dtype), device=device)
        self._info = BackendInfo("torch-graph", str(torch.__version__), device)

    def describe(self) -> BackendInfo:
        """See `Backend`."""
        return self._info

    def run(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[np.float32]:
        """See `Backend`."""
        from exporter.validation.record import exact_arithmetic, run_wrong

        grids = [(int(h), int(w)) for h, w in grid_hws]
        with exact_arithmetic():
            return run_wrong(self._tower, self._wrong, pixel_values, grids)

    def __enter__(self) -> GraphBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._tower


# ------------------------------------------------------------------------------------------------- in a worker


def start_worker() -> None:
    """One thread a worker: the seeds are the parallelism, and sums are split the same way everywhere."""
    import torch

    torch.set_num_threads(1)


def options_of(dtype: str) -> OnnxOptions:
    """The form that ``kvit-export onnx`` writes, with calls of several items."""
    from exporter.onnx_trace import OnnxOptions
    from model.graph import GraphForm

    return OnnxOptions(dtype, GraphForm("plugin", "plain", "packed"))


def trace_for(job: Job, wrong: WrongModel) -> Trace:
    """The trace of a model, from the work folder if it is there; weights do not show in it."""
    from exporter.onnx_trace import trace_one_block

    right = config_of(job.preset)
    same = not wrong.function and wrong.config(right) == right
    path = job.place("trace", "honest" if same else wrong.name)
    if path.exists():
        found: Trace = pickle.loads(path.read_bytes())  # noqa: S301 - written by this very run
        return found
    with wrong.substituted():
        trace = trace_one_block(wrong.config(right), options_of(job.dtype))
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(pickle.dumps(trace))
    temporary.replace(path)
    return trace


def golden_for(job: Job, weights: VisionWeights, seed: int) -> GoldenSet:
    """The golden set of a seed, recorded if it is not in the work folder."""
    from exporter.validation.golden import open_golden
    from exporter.validation.record import GoldenOptions, record_golden

    folder = job.place("golden", seed)
    if not folder.exists():
        options = GoldenOptions(DTYPES[job.dtype], "packed", max_patches=MAX_PATCHES, device=job.device)
        record_golden(weights, options, folder)
    return open_golden(folder, check_hash=False)


def work(job: Job) -> int:
    """Do a job.

    Returns:
        Number of seeds that were finished.
    """
    from exporter.validation.wrong_models import WrongModel, wrong_model
    from model.random_weights import random_weights

    if time.time() > job.deadline:
        return 0
    wrong = wrong_model(job.wrong) if job.wrong else WrongModel("", "none")
    trace = None if job.form == "graph" else trace_for(job, wrong)
    for seed in job.seeds:
        right = DrawnOnce(random_weights(config_of(job.preset), seed, job.preset.partition("?")[0]))
        start = time.perf_counter()
        golden = golden_for(job, right, seed)
        recorded = time.perf_counter() - start
        for model in [wrong] if job.form == "onnx" else applicable(job.preset):
            if time.time() > job.deadline:
                return 0
            start = time.perf_counter()
            with tempfile.TemporaryDirectory(dir=job.work) as folder:
                evidence = measure_model(make_backend(job, model, right, trace, Path(folder)), golden)
            seconds = {"record": recorded, "judge": time.perf_counter() - start}
            write_result(job, seed, model.name, evidence, seconds)
        if not job.keep:
            shutil.rmtree(golden.folder)
    return len(job.seeds)


def applicable(preset: str) -> list[WrongModel]:
    """The wrong models that can be made of a tower."""
    from exporter.validation.wrong_models import WRONG_MODELS

    config = config_of(preset)
    return [wrong for wrong in WRONG_MODELS if wrong.applies(config)]


def make_backend(job: Job, wrong: WrongModel, right: DrawnOnce, trace: Trace | None, folder: Path) -> Backend:
    """What is judged: a file that is exported into a folder, or the graph's form in PyTorch."""
    from exporter.onnx_export import MODEL_FILE, export_onnx
    from exporter.validation.backends import OrtBackend

    if trace is None:
        return GraphBackend(right, wrong, DTYPES[job.dtype], job.device)
    weights = wrong.weights(right) if wrong.name else right
    export_onnx(weights, options_of(job.dtype), folder, version="margins", trace=trace)
    return OrtBackend(folder / MODEL_FILE, threads=1)


def measure_model(backend: Backend, golden: GoldenSet) -> Evidence:
    """Compare as ``validate`` does for a bare file."""
    from exporter.validation.runner import compare

    with backend:
        return compare(backend, golden).evidence


def write_result(job: Job, seed: int, wrong: str, evidence: Evidence, seconds: dict[str, float]) -> None:
    """Append one line to the results; lines of several workers do not mix, being single writes.

    The evidence is kept whole, so that the summary can judge it by the rules of today.
    """
    from exporter.records import encode

    packed = base64.b64encode(zlib.compress(json.dumps(encode(evidence)).encode(), 9)).decode()
    record: Record = {
        "preset": job.preset, "dtype": job.dtype, "seed": seed, "wrong": wrong, "form": job.form, "seconds": seconds,
        "evidence": packed,
    }  # fmt: skip
    with open(job.results, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


# ------------------------------------------------------------------------------------------------- the whole run


class Run:
    """Hands out jobs: honest artifacts in the order of their seeds, wrong models once their golden sets are there."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.results = arguments.output.with_suffix(".jsonl")
        self.deadline = time.time() + arguments.budget
        self.pool = ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn"), start_worker)
        self.pending: list[tuple[int, int, Job, Callable[[], None]]] = []
        self.running: dict[Future[int], Callable[[], None]] = {}
        self.count = 0

    def submit(self, rank: int, job: Job, then: Callable[[], None] = lambda: None) -> None:
        """Queue a job; lower ranks first. ``then`` is called when it is done."""
        self.count += 1
        heapq.heappush(self.pending, (rank, self.count, job, then))

    def finish(self) -> None:
        """Do everything; the first fault of a worker ends the run."""
        with self.pool:
            while self.pending or self.running:
                while self.pending and len(self.running) < self.arguments.jobs:
                    _, _, job, then = heapq.heappop(self.pending)
                    self.running[self.pool.submit(work, job)] = then
                done, _ = wait(self.running, return_when=FIRST_COMPLETED)
                for future in done:
                    then = self.running.pop(future)
                    future.result()
                    then()

    def start(self) -> None:
        """Queue the honest traces; all else follows from them."""
        for preset in self.arguments.presets:
            device = self.arguments.device if not is_tiny(preset) else "cpu"
            for dtype in self.arguments.dtypes:
                job = Job(preset, dtype, (), "", "onnx", device, self.folder, self.results, self.deadline)
                self.submit(-1, job, functools.partial(self.honest, job))

    def honest(self, job: Job) -> None:
        """Queue the honest artifacts of a preset and dtype, those first whose golden sets wrong models need."""
        mutants = self.arguments.mutant_seeds
        if mutants:
            first = dataclasses.replace(job, seeds=tuple(range(mutants)), keep=True)
            self.submit(0, first, functools.partial(self.mutants, first))
        for seed in range(max(mutants, self.arguments.first_seed), self.arguments.seeds):
            self.submit(seed, dataclasses.replace(job, seeds=(seed,)))

    def mutants(self, job: Job) -> None:
        """Queue the wrong models of a preset and dtype."""
        if self.arguments.mutant_form == "graph":
            self.submit(1, dataclasses.replace(job, form="graph"))
            return
        for wrong in applicable(job.preset):
            self.submit(1, dataclasses.replace(job, wrong=wrong.name))


def is_tiny(preset: str) -> bool:
    """Whether a preset is one for tests."""
    return preset.startswith("tiny")


def read_results(path: Path) -> tuple[list[Record], list[Record]]:
    """Read the lines that are whole (the last one of a run that was cut may not be) and judge each.

    Returns:
        The runs that wrote the file, and the results; the same artifact from two runs counts once.
    """
    runs: list[Record] = []
    records: dict[tuple[Any, ...], Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "run" in record:
            runs.append(record["run"])
            continue
        form = record["form"] if record["wrong"] else ""
        records[record["preset"], record["dtype"], record["seed"], record["wrong"], form] = record
    return runs, [judged(record) for record in records.values()]


def all_checks(judgement: Judgement) -> Iterator[tuple[str, Check]]:
    """Every check with the name of its case."""
    for case in judgement.cases:
        for check in case.checks:
            yield case.name, check
    for pair in judgement.pairs:
        yield pair.second, pair.check


def judged(record: Record) -> Record:
    """Put the gate's verdict, and the share of each limit that is taken, in the place of the evidence."""
    from exporter.records import decode
    from exporter.validation.evidence import Evidence
    from exporter.validation.gate import judge

    packed = record.pop("evidence")
    evidence = decode(Evidence, json.loads(zlib.decompress(base64.b64decode(packed))), "evidence")
    judgement = judge(evidence)
    spreads = [entry.spread for case in evidence.cases for entry in case.directions if entry.fault == record["wrong"]]
    shares: dict[str, float | None] = {}
    directions: dict[str, list[tuple[str, float | None, str]]] = {}
    for case, check in all_checks(judgement):
        if check.metric == "direction":
            directions.setdefault(check.subject, []).append((case, check.measured, check.outcome))
        if check.outcome == "informs":
            continue
        old = shares.get(check.metric, 0.0)
        shares[check.metric] = None if old is None or check.excess is None else max(old, check.excess)
    usable = [fault for fault, found in directions.items() if any(entry[2] != "informs" for entry in found)]
    return record | {
        "verdict": judgement.verdict.value, "shares": shares, "usable": usable,
        "faults": list(judgement.faults[:6]), "doubts": list(judgement.doubts[:6]),
        "own": directions.get(record["wrong"], []), "own_spread": max(spreads, default=None),
    }  # fmt: skip


def summarise(records: list[Record]) -> Record:
    """Honest verdicts, the worst share of each limit, and what each wrong model is refused by."""
    honest = [record for record in records if not record["wrong"]]
    wrong = [record for record in records if record["wrong"]]
    return {
        "honest": honest_counts(honest),
        "false_refusals": [record for record in honest if record["verdict"] != "PASS"],
        "margins": [margin for dtype in DTYPES for margin in margins_of(dtype, honest, wrong)],
        "wrong_models": mutant_rows(wrong),
    }


def honest_counts(honest: list[Record]) -> list[Record]:
    """Verdicts by preset and dtype."""
    rows = []
    for key in sorted({(record["preset"], record["dtype"]) for record in honest}):
        found = [record for record in honest if (record["preset"], record["dtype"]) == key]
        passed = sum(record["verdict"] == "PASS" for record in found)
        usable = min(len(record["usable"]) for record in found)
        rows.append(
            {"preset": key[0], "dtype": key[1], "seeds": len(found), "pass": passed, "usable_directions": usable}
        )
    return rows


def strongest(record: Record) -> tuple[str, float]:
    """The metric that is farthest outside, and its excess; a number that is not finite is infinitely far."""
    shares = {metric: float("inf") if share is None else share for metric, share in record["shares"].items()}
    return max(shares.items(), key=lambda item: item[1])


def margins_of(dtype: str, honest: list[Record], wrong: list[Record]) -> list[Record]:
    """For every metric the worst honest share of its limit, and the wrong model that it refuses by the least."""
    honest, wrong = ([record for record in part if record["dtype"] == dtype] for part in (honest, wrong))
    metrics = dict.fromkeys(metric for record in honest for metric in record["shares"])
    rows: list[Record] = []
    for metric in metrics:
        worst = max(honest, key=lambda record: record["shares"].get(metric) or 0.0)
        decided = [record for record in wrong if strongest(record)[0] == metric and strongest(record)[1] > 1]
        nearest = min(decided, key=lambda record: strongest(record)[1], default=None)
        rows.append({
            "dtype": dtype, "metric": metric, "honest": worst["shares"].get(metric),
            "honest_at": f"{worst['preset']} seed {worst['seed']}", "mutant": nearest and strongest(nearest)[1],
            "mutant_at": nearest and f"{nearest['wrong']} {nearest['preset']}",
        })  # fmt: skip
    return rows


def mutant_rows(wrong: list[Record]) -> list[Record]:
    """One row for each wrong model, dtype, preset and form, over its seeds."""
    keys = ("wrong", "dtype", "preset", "form")
    rows = []
    for key in sorted({tuple(record[part] for part in keys) for record in wrong}):
        found = [record for record in wrong if tuple(record[part] for part in keys) == key]
        weakest = min(found, key=lambda record: strongest(record)[1])
        metric, excess = strongest(weakest)
        own = [entry[1] for record in found for entry in record["own"] if entry[2] != "informs"]
        rows.append(dict(zip(keys, key, strict=True)) | {
            "seeds": len(found), "refused": sum(record["verdict"] == "FAILED" for record in found),
            "strongest_metric": metric, "least_excess": excess, "shares": weakest["shares"],
            "own_scores": [min(own), max(own)] if own and None not in own else None,
            "own_spread": max(record["own_spread"] for record in found), "usable_own_directions": len(own),
            "own_directions": sum(len(record["own"]) for record in found),
        })  # fmt: skip
    return rows


def surroundings(command: list[str]) -> Record:
    """What the numbers depend on."""
    cores = os.cpu_count()
    return {
        "date": dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "machine": f"{platform.machine()}, {cores} cores",
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in TOOLS},
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--presets", nargs="+", default=["tiny", "tiny-k3", "tiny-vl"])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--seeds", type=int, default=50, help="weights of honest artifacts")
    parser.add_argument("--first-seed", type=int, default=0, help="of honest artifacts, to share seeds between runs")
    parser.add_argument("--mutant-seeds", type=int, default=2, help="of these, how many make wrong models")
    parser.add_argument("--mutant-form", choices=["onnx", "graph"], default="onnx", help="graph: in PyTorch, no file")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="records golden sets at real width")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no job begins")
    parser.add_argument("--output", type=Path, required=True, help="JSON; results go to the same name with .jsonl")
    parser.add_argument("--summarise", action="store_true", help="only make OUTPUT from the results that are there")
    return parser.parse_args(arguments)


def main(command: list[str]) -> int:
    """Run; 0 if every honest artifact passed."""
    arguments = parse(command)
    results = arguments.output.with_suffix(".jsonl")
    if not arguments.summarise:
        with open(results, "a", encoding="utf-8") as file:
            file.write(json.dumps({"run": surroundings(["scripts/gate_margins.py", *command])}) + "\n")
        with tempfile.TemporaryDirectory() as folder:
            run = Run(arguments, Path(folder))
            run.start()
            run.finish()
    runs, records = read_results(results)
    found = summarise(records)
    document = {"runs": runs, "max_patches": MAX_PATCHES} | found
    document = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.4g}"))
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in found["honest"]:
        print(f"{row['preset']:<22} {row['dtype']}: {row['pass']} of {row['seeds']} honest artifacts PASS")
    for row in found["wrong_models"]:
        if row["refused"] < row["seeds"]:
            print(f"not refused: {row['wrong']} {row['dtype']} {row['preset']}: {row['least_excess']:.2g} of a limit")
    return 1 if found["false_refusals"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
