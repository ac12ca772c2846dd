"""Proves on a GPU with TensorRT 8.6 that engines of right models pass the gate and those of wrong models are refused.

Two phases, since the Python that has TensorRT 8.6 has no PyTorch. ``prepare`` needs PyTorch: it exports artifacts of
right and wrong models, all with the golden set of the right one, recorded on the GPU. ``run`` needs only the standard
library: it calls ``kvit-export trt`` in the other Python for each artifact, and compares how it ends with how it must.

    python scripts/gpu_engines.py prepare work/onnx --jobs 8
    python scripts/gpu_engines.py run work/onnx results --python DEST/python86 --opt-level 1 --deadline 500

Both can be called again and go on where they were cut. ``run`` exits with 0 if every artifact ended as it must, 1 if
one did not, 2 if some were not reached. ``results/results.json`` holds what was measured, ``results/records.tar.gz``
the manifest, report and log of every engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

Record = dict[str, Any]

# one mistake each in RoPE, position table and attention; each replaces a function, so that weights and config stay
WRONG = ("rope-axes-swapped", "bicubic-pillow", "attention-scale-padded")
PASSED, REFUSED = 0, 6  # exit codes of kvit-export trt
COMMAND = "from exporter.cli import main; main()"
VERSIONS = (
    "import json, sys, numpy, onnx, tensorrt; print(json.dumps({'python': sys.version.split()[0], "
    "'numpy': numpy.__version__, 'onnx': onnx.__version__, 'tensorrt': tensorrt.__version__}))"
)


# ------------------------------------------------------------------------------------------------------------- prepare


@dataclass(frozen=True)
class Planned:
    """An artifact to be made.

    Attributes:
        name: of its folder.
        source: SOURCE of the right model.
        dtype: fp32 or fp16.
        wrong: name of the wrong model; empty for the right one.
        max_patches: bounds the grids of the golden set.
    """

    name: str
    source: str
    dtype: str
    wrong: str
    max_patches: int

    @property
    def right(self) -> tuple[str, str, int]:
        """What a golden set depends on; wrong models have that of the right one."""
        return self.source, self.dtype, self.max_patches


def plan(arguments: argparse.Namespace) -> list[Planned]:
    """List the artifacts: right models of few layers, wrong ones of the first preset, one of full depth."""
    planned = []
    for preset in arguments.presets:
        source = f"random:{preset}?layers={arguments.layers}"
        for dtype in arguments.dtypes:
            wrongs = arguments.wrong if preset == arguments.presets[0] else []
            for wrong in ("", *wrongs):
                name = "-".join(filter(None, [preset, f"layers{arguments.layers}", dtype, wrong]))
                planned.append(Planned(name, source, dtype, wrong, arguments.max_patches))
    if arguments.deep:
        deep = f"{arguments.deep}-all-layers-fp16"
        planned.append(Planned(deep, f"random:{arguments.deep}", "fp16", "", arguments.deep_max_patches))
    if arguments.only:
        planned = [item for item in planned if item.name in arguments.only]
    return planned


def export(item: Planned, folder: Path) -> None:
    """Export one artifact without a golden set, in a process of its own."""
    import torch

    from exporter.onnx_artifact import OnnxRequest, make_onnx
    from exporter.validation.wrong_models import WrongModel, wrong_model

    torch.set_num_threads(2)  # the processes are the parallelism
    wrong = wrong_model(item.wrong) if item.wrong else WrongModel("", "none")
    with wrong.substituted():
        make_onnx(OnnxRequest(item.source, folder, item.dtype, golden=False), lambda _step, _done, _total: None)


def record(item: Planned, device: str, folder: Path) -> None:
    """Record the golden set of a right model, if it is not there."""
    if folder.exists():
        return
    from exporter.onnx_artifact import DTYPES
    from exporter.validation.record import GoldenOptions, record_golden
    from model.random_weights import parse_random_source
    from scripts.gate_margins import DrawnOnce

    asked = GoldenOptions(DTYPES[item.dtype], max_patches=item.max_patches, device=device)  # type: ignore[arg-type]
    record_golden(DrawnOnce(parse_random_source(item.source)), asked, folder)


def finish(item: Planned, made: Path, golden: Path, device: str, target: Path) -> None:
    """Add the golden set to an exported artifact and let it appear under its name."""
    from exporter.files import link_or_copy
    from exporter.manifest import GOLDEN_FOLDER, read_manifest, record_files, write_manifest

    (made / GOLDEN_FOLDER).mkdir()
    for path in golden.iterdir():
        link_or_copy(path, made / GOLDEN_FOLDER / path.name)
    manifest = read_manifest(made)
    options = {**manifest.options, "golden": True, "device": device, "max_patches": item.max_patches}
    options["wrong_model"] = item.wrong
    write_manifest(made, dataclasses.replace(manifest, options=options, files=record_files(made)))
    os.rename(made, target)


def prepare(arguments: argparse.Namespace) -> int:
    """Make the artifacts: exports in worker processes, golden sets here meanwhile, since they use the GPU."""
    import multiprocessing
    import shutil

    from exporter.validation.wrong_models import WRONG_MODELS

    usable = {wrong.name for wrong in WRONG_MODELS if wrong.function}  # the others change the weights or the config
    if unusable := set(arguments.wrong) - usable:
        sys.exit(f"--wrong takes {', '.join(sorted(usable))}, not {', '.join(sorted(unusable))}")
    out: Path = arguments.out
    work = out / ".work"
    work.mkdir(parents=True, exist_ok=True)
    todo = [item for item in plan(arguments) if not (out / item.name).exists()]
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        exports: dict[str, Future[None]] = {}
        for item in sorted(todo, key=lambda item: "layers=" in item.source):  # the deep one takes longest
            shutil.rmtree(work / item.name, ignore_errors=True)
            exports[item.name] = pool.submit(export, item, work / item.name)
        for item in todo:
            start = time.perf_counter()
            golden = work / "-".join(["golden", item.source.replace("?", "_"), item.dtype, str(item.max_patches)])
            record(item, arguments.device, golden)
            exports[item.name].result()
            finish(item, work / item.name, golden, arguments.device, out / item.name)
            print(f"{item.name}: made, {time.perf_counter() - start:.0f} s", flush=True)
    shutil.rmtree(work)
    return 0


# ----------------------------------------------------------------------------------------------------------------- run


class Run:
    """Builds the artifacts' engines and keeps the results, written after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.start = time.monotonic()
        self.engines: Path = arguments.engines or arguments.onnx.with_name(arguments.onnx.name + "-engines")
        self.engines.mkdir(parents=True, exist_ok=True)
        arguments.results.mkdir(parents=True, exist_ok=True)
        self.path: Path = arguments.results / "results.json"
        self.lock = threading.Lock()
        self.state: Record = {"machine": {}, "engines": {}}
        if self.path.exists():
            self.state = json.loads(self.path.read_text(encoding="utf-8"))
        self.state["machine"] = describe_machine(arguments.python)

    def artifacts(self) -> list[Path]:
        """Folders of ONNX artifacts, in order of their names."""
        folders = sorted(path.parent for path in self.arguments.onnx.glob("[!.]*/manifest.json"))
        return [folder for folder in folders if not self.arguments.only or folder.name in self.arguments.only]

    def finish(self) -> int:
        """Build all that is not done; say how it went.

        Returns:
            Exit code of this script.
        """
        folders = self.artifacts()
        done = {name for name, found in self.state["engines"].items() if found["finished"]}
        todo = [folder for folder in folders if self.arguments.again or folder.name not in done]
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            for _ in pool.map(self.build, todo):
                pass
        self.save()
        records = [self.state["engines"].get(folder.name) for folder in folders]
        missing = sum(found is None or not found["finished"] for found in records)
        wrong = [found for found in records if found and found["finished"] and not found["as_expected"]]
        print(f"{len(folders) - missing - len(wrong)} as expected, {len(wrong)} not, {missing} not finished")
        if wrong or not folders:
            return 1
        return 2 if missing else 0

    def build(self, folder: Path) -> None:
        """Build and judge one engine, unless too little time is left."""
        arguments = self.arguments
        left = arguments.deadline - (time.monotonic() - self.start)
        if left < arguments.least:
            return
        engine = self.engines / folder.name
        options = ["-o", str(engine), "--force", "--json", "--flavor", arguments.flavor]
        if arguments.opt_level is not None:
            options += ["--opt-level", str(arguments.opt_level)]
        for profile in arguments.profile:
            options += ["--profile", profile]
        if arguments.frames:
            options += ["--frames", arguments.frames]
        command = [arguments.python, "-c", COMMAND, "trt", str(folder), *options]
        start = time.monotonic()
        code, output, errors = call(command, min(left, arguments.timeout))
        found = judge(folder, engine, code, output, errors)
        found["seconds"] = round(time.monotonic() - start, 1)
        found["command"] = f"kvit-export trt {folder.name} {' '.join(options)}".replace(str(self.engines) + "/", "")
        found["date"] = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        (self.engines / f"{folder.name}.log").write_text(f"{output}\n{errors}", encoding="utf-8")
        with self.lock:
            self.state["engines"][folder.name] = found
            self.save()
        print(describe(folder.name, found), flush=True)

    def save(self) -> None:
        """Write the results so far."""
        text = json.dumps(self.state, indent=1, sort_keys=True)
        temporary = self.path.with_suffix(".part")
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, self.path)
        with tarfile.open(self.path.with_name("records.tar.gz"), "w:gz") as archive:
            for path in sorted(self.engines.glob("[!.]*/*.json")) + sorted(self.engines.glob("*.log")):
                archive.add(path, path.relative_to(self.engines).as_posix())


def describe_machine(python: str) -> Record:
    """GPU, driver and versions; what cannot be found out is None."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    found: Record = {"gpu": None, "versions": None}
    with contextlib.suppress(OSError):
        code, output, _ = call(query, 30)
        found["gpu"] = output.strip() if code == 0 else None
    with contextlib.suppress(OSError):
        code, output, _ = call([python, "-c", VERSIONS], 60)
        found["versions"] = json.loads(output) if code == 0 else None
    return found


def call(command: list[str], seconds: float) -> tuple[int | None, str, str]:
    """Run a command with this repository importable; end it and all its children when its time is over.

    Returns:
        Exit code, None if time was over; what it wrote on stdout and on stderr.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # a wrapper that sets PYTHONPATH itself can append PYTHONPATH86
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONPATH86": str(ROOT)}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        return None, output, errors
    return process.returncode, output, errors


def judge(folder: Path, engine: Path, code: int | None, output: str, errors: str) -> Record:
    """Compare how a build ended with how it must."""
    wrong = read_json(folder / "manifest.json").get("options", {}).get("wrong_model", "")
    report, manifest = read_json(engine / "report.json"), read_json(engine / "manifest.json")
    judgement = report.get("judgement", {})
    faults, verdict = judgement.get("faults", []), judgement.get("verdict")
    if wrong:
        named = any(wrong in line for line in faults)
        good = code == REFUSED and verdict == "FAILED" and named
    else:
        good = code == PASSED and verdict == "PASS"
    return {
        "wrong_model": wrong,
        "finished": code is not None,
        "as_expected": good,
        "exit_code": code,
        "verdict": verdict,
        "relative_l2": worst(judgement, "relative_l2"),
        "direction": worst(judgement, "direction", wrong) if wrong else None,
        "faults": faults,
        "doubts": judgement.get("doubts", []),
        "cases": judgement.get("counts"),
        "built": {
            key: manifest.get(key) for key in ("runtime", "targets", "profiles", "seconds", "warnings", "layers")
        },
        "stdout": output[-2000:].replace(str(engine), engine.name),
        "stderr": errors[-2000:].replace(str(engine), engine.name).replace(str(folder), folder.name),
    }


def worst(judgement: Record, metric: str, subject: str = "") -> Record | None:
    """The check of a metric that lies farthest from its ideal, over all cases: measured beside allowed."""
    checks = [
        {"case": case["name"], "measured": check["measured"], "allowed": check["allowed_high"]}
        for case in judgement.get("cases", [])
        for check in case["checks"]
        if check["metric"] == metric and (not subject or check["subject"] == subject)
    ]
    return max(
        checks, key=lambda check: float("inf") if check["measured"] is None else abs(check["measured"]), default=None
    )


def read_json(path: Path) -> Record:
    """Content of a JSON file; empty where there is none."""
    found: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def describe(name: str, found: Record) -> str:
    """One line for a person."""
    error = found["relative_l2"] or {"measured": None, "allowed": None}
    state = "as expected" if found["as_expected"] else "NOT AS EXPECTED" if found["finished"] else "not finished"
    numbers = f"relative L2 {error['measured']} (allowed {error['allowed']})"
    reason = "" if found["as_expected"] else f": {found['stderr'].strip()[-300:]}"
    return f"{name}: {state}, exit {found['exit_code']}, {found['verdict']}, {numbers}, {found['seconds']} s{reason}"


# -------------------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    phases = parser.add_subparsers(dest="phase", required=True)
    first = phases.add_parser("prepare", help="make ONNX artifacts; needs PyTorch")
    first.add_argument("out", type=Path)
    first.add_argument("--presets", nargs="+", default=["kimi-k2.5", "kimi-k3"])
    first.add_argument("--layers", type=int, default=2)
    first.add_argument("--dtypes", nargs="+", choices=["fp16", "fp32"], default=["fp16", "fp32"])
    first.add_argument("--wrong", nargs="*", default=list(WRONG), help="wrong models of the first preset")
    first.add_argument("--max-patches", type=int, default=1656, help="largest grid of the golden sets")
    first.add_argument("--deep", default="kimi-k2.5", help="preset to make with all its layers in fp16; empty for none")
    first.add_argument("--deep-max-patches", type=int, default=480)
    first.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="what records the golden sets")
    first.add_argument("--jobs", type=int, default=1, help="exports at a time, each a process")
    second = phases.add_parser("run", help="build and judge engines; needs no package")
    second.add_argument("onnx", type=Path, help="what prepare wrote")
    second.add_argument("results", type=Path)
    second.add_argument("--python", default=sys.executable, help="a Python that has TensorRT")
    second.add_argument("--engines", type=Path, help="where engines go; beside the artifacts if left out")
    second.add_argument("--flavor", choices=["tensorrt", "tensorrt_rtx"], default="tensorrt")
    second.add_argument("--opt-level", type=int)
    second.add_argument("--profile", action="append", default=[], help="passed on; the golden set's sizes if left out")
    second.add_argument("--frames", help="passed on")
    second.add_argument("--deadline", type=float, default=3600.0, help="seconds from now after which nothing begins")
    second.add_argument("--timeout", type=float, default=540.0, help="seconds for one engine")
    second.add_argument("--least", type=float, default=30.0, help="begin no engine with fewer seconds left")
    second.add_argument("--jobs", type=int, default=1, help="engines at a time; their build times then mean little")
    second.add_argument("--again", action="store_true", help="also those that are done")
    for phase in (first, second):
        phase.add_argument("--only", nargs="+", default=[], help="names of artifacts")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run a phase; return the exit code."""
    parsed = parse(arguments)
    if parsed.phase == "prepare":
        return prepare(parsed)
    parsed.onnx, parsed.results = parsed.onnx.resolve(), parsed.results.resolve()
    return Run(parsed).finish()


if __name__ == "__main__":
    sys.exit(main())
