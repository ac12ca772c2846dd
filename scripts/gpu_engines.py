"""Proves on a GPU with TensorRT 8.6 that engines of right models pass the gate and those of wrong models are refused.

Three phases, since the Python that has TensorRT 8.6 has no PyTorch. ``prepare`` needs PyTorch: it exports artifacts of
right and wrong models, all with the golden set of the right one, recorded on the GPU. ``run`` needs only the standard
library: it calls ``kvit-export trt`` in the other Python for each artifact, and compares how it ends with how it must.
``repeat`` validates one engine several times: a verdict that changes from run to run is none.

    python scripts/gpu_engines.py prepare work/onnx --jobs 8
    python scripts/gpu_engines.py run work/onnx results --python DEST/python86 --opt-level 1 --deadline 500
    python scripts/gpu_engines.py repeat work/onnx-engines/NAME results --python DEST/python86 --times 5

The artifact of full depth takes long to build. It has a golden set of its own, which one small profile
(4:256:320, also what is taken where none is given) covers:

    python scripts/gpu_engines.py prepare work/deep --only kimi-k2.5-all-layers-fp16
    python scripts/gpu_engines.py run work/deep results --python DEST/python86 --opt-level 0 --timeout 1800

``prepare`` and ``run`` can be called again and go on where they were cut. ``run`` exits with 0 if every artifact ended
as it must, 1 if one did not, 2 if some were not reached; ``repeat`` with 0 if all verdicts are one, else 1.
``results/results.json`` holds what was measured and is written after each engine and each validation,
``results/records.tar.gz`` the manifest, report and log of every engine. A log grows while its engine is being built.
Phases that run at the same time need a results folder each.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.engine_runs import artifacts
from scripts.engine_runs.repeat import repeat
from scripts.engine_runs.results import COMMAND, Record, Results, call, now, read_json, worst

PASSED, REFUSED = 0, 6  # exit codes of kvit-export trt


# ----------------------------------------------------------------------------------------------------------------- run


class Run:
    """Builds and judges the artifacts' engines."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.start = time.monotonic()
        self.engines: Path = arguments.engines or arguments.onnx.with_name(arguments.onnx.name + "-engines")
        self.engines.mkdir(parents=True, exist_ok=True)
        self.results = Results(arguments.results, self.engines, arguments.python)

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
        known = self.results.get("engines")
        done = {name for name, found in known.items() if found["finished"]}
        todo = [folder for folder in folders if self.arguments.again or folder.name not in done]
        with ThreadPoolExecutor(self.arguments.jobs) as pool:
            for _ in pool.map(self.build, todo):
                pass
        self.results.save()
        records = [known.get(folder.name) for folder in folders]
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
        engine, options = self.engines / folder.name, self.options()
        command = [arguments.python, "-c", COMMAND, "trt", str(folder), "-o", str(engine), *options]
        shutil.rmtree(engine, ignore_errors=True)  # what an earlier build left would be taken for this one's
        start = time.monotonic()
        code, output, errors = call(command, min(left, arguments.timeout), self.engines / f"{folder.name}.log")
        found = judge(folder, engine, code, output, errors)
        found["seconds"] = round(time.monotonic() - start, 1)
        found["asked"] = {
            "opt_level": arguments.opt_level,
            "profile": arguments.profile,
            "frames": arguments.frames,
            "at_a_time": arguments.jobs,
        }
        found["command"] = f"kvit-export trt {folder.name} -o {engine.name} {' '.join(options)}"
        found["date"] = now()
        self.results.put("engines", folder.name, found)
        print(describe(folder.name, found), flush=True)

    def options(self) -> list[str]:
        """Options of ``kvit-export trt``."""
        arguments = self.arguments
        options = ["--force", "--json", "--flavor", arguments.flavor]
        if arguments.opt_level is not None:
            options += ["--opt-level", str(arguments.opt_level)]
        for profile in arguments.profile:
            options += ["--profile", profile]
        if arguments.frames:
            options += ["--frames", arguments.frames]
        return options


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
        "built": describe_build(manifest),
        "stdout": output[-2000:].replace(str(engine), engine.name),
        "stderr": errors[-2000:].replace(str(engine), engine.name).replace(str(folder), folder.name),
    }


def describe_build(manifest: Record) -> Record:
    """What the manifest of an engine says of its build: seconds by phase, sizes, profiles, layers."""
    keys = ("runtime", "targets", "profiles", "seconds", "peak_memory_bytes", "warnings", "layers")
    found: Record = {key: manifest.get(key) for key in keys}
    found["opt_level"] = manifest.get("options", {}).get("opt_level")
    found["engine_bytes"] = manifest.get("files", {}).get(manifest.get("artifact"), {}).get("size")
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
    first.add_argument("--wrong", nargs="*", default=list(artifacts.WRONG), help="wrong models of the first preset")
    first.add_argument("--max-patches", type=int, default=1656, help="largest grid of the golden sets")
    first.add_argument("--sizes", nargs="*", default=[], help="further calls of the golden sets, such as 36x46")
    first.add_argument("--deep", default="kimi-k2.5", help="preset to make with all its layers in fp16; empty for none")
    first.add_argument("--deep-max-patches", type=int, default=artifacts.DEEP_MAX_PATCHES)
    first.add_argument("--deep-sizes", nargs="*", default=list(artifacts.DEEP_SIZES), help="calls of its golden set")
    first.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="what records the golden sets")
    first.add_argument("--jobs", type=int, default=1, help="exports at a time, each a process")
    second = phases.add_parser("run", help="build and judge engines; needs no package")
    second.add_argument("onnx", type=Path, help="what prepare wrote")
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
    third = phases.add_parser("repeat", help="validate one engine several times; needs no package")
    third.add_argument("engine", type=Path, help="folder of one engine that run made")
    third.add_argument("--times", type=_several, default=5)
    third.add_argument("--timeout", type=float, default=300.0, help="seconds for one validation")
    for phase in (second, third):
        phase.add_argument("results", type=Path)
        phase.add_argument("--python", default=sys.executable, help="a Python that has TensorRT")
    return parser.parse_args(arguments)


def _several(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError("one validation shows nothing; give 2 or more")
    return number


def main(arguments: list[str] | None = None) -> int:
    """Run a phase; return the exit code."""
    parsed = parse(arguments)
    if parsed.phase == "prepare":
        return artifacts.prepare(parsed)
    parsed.results = parsed.results.resolve()
    if parsed.phase == "repeat":
        parsed.engine = parsed.engine.resolve()
        return repeat(parsed)
    parsed.onnx = parsed.onnx.resolve()
    return Run(parsed).finish()


if __name__ == "__main__":
    sys.exit(main())
