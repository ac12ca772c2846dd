"""The GPU script's verdict about its artifacts, with a stand-in for the Python that has TensorRT."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from exporter.trt.profiles import default_profiles, parse_profiles, uncovered
from exporter.validation.evidence import Shape, contains
from exporter.validation.golden_cases import plan_cases
from model.preprocess_rule import RULES
from model.random_weights import parse_random_source
from scripts import gpu_engines
from scripts.engine_runs import artifacts

# Does what the artifact's file says: sleeps, writes an engine's report and manifest, exits. A validation prints the
# next of the reports that the engine's file lists.
STAND_IN = """#!{python}
import json, pathlib, subprocess, sys, time
if sys.argv[3:4] not in (["trt"], ["validate"]):
    print(json.dumps({{"tensorrt": "8.6.0"}}))
    sys.exit(0)
folder = pathlib.Path(sys.argv[4])
told = json.loads((folder / "told.json").read_text())
(folder / "called").open("a").write(" ".join(sys.argv[5:]) + "\\n")
if sys.argv[3] == "validate":
    told = told[len((folder / "called").read_text().splitlines()) - 1]
    time.sleep(told["sleep"])
    print(json.dumps(told["report"]) if told["report"] else "nothing that is JSON")
    sys.exit(told["exit"])
engine = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
print("[    0.1 s] parse", file=sys.stderr, flush=True)
(folder / "log").write_text(engine.with_name(engine.name + ".log").read_text())
if told["sleep"]:
    child = subprocess.Popen(["sleep", str(told["sleep"])])
    (folder / "child").write_text(str(child.pid))
    child.wait()
engine.mkdir(exist_ok=True)
for name in ("report", "manifest"):
    (engine / f"{{name}}.json").write_text(json.dumps(told[name]))
print("no engine for you", file=sys.stderr)
sys.exit(told["exit"])
"""

# The real command line, with ONNX Runtime in place of the engine that TensorRT-RTX built and no GPU here can run.
PRETENDING = """#!{python}
import pathlib, sys
if sys.argv[3:4] not in (["trt"], ["validate"]):
    print("null")
    sys.exit(0)
from exporter import cli
from exporter.trt import backend, build
from tests.exporter.test_trt_build import Pretender
build.cuda_capability = lambda: "8.9"
for module in (backend, build):
    module.open_backend = lambda folder, manifest: Pretender(pathlib.Path({onnx!r}), manifest.profiles, 1.0)
sys.argv = sys.argv[2:]
cli.main()
"""

SWAPPED = "rope-axes-swapped"


def told(verdict: str, code: int, faults: tuple[str, ...] = (), sleep: float = 0) -> dict[str, Any]:
    checks = [
        {"metric": "relative_l2", "subject": "", "measured": 0.25, "allowed_high": 0.001},
        {"metric": "direction", "subject": SWAPPED, "measured": 0.98, "allowed_high": 0.5},
        {"metric": "direction", "subject": "align-corners", "measured": 3.0, "allowed_high": 0.5},
    ]
    cases = [{"name": "a", "checks": [{"allowed_low": 0, **check} for check in checks]}]
    pair = {"metric": "sensitivity", "subject": "b", "measured": 1.01, "allowed_low": 0.9, "allowed_high": 1.1}
    pairs = [{"first": "a", "second": "b", "check": pair}]
    judgement = {"verdict": verdict, "faults": list(faults), "doubts": [], "counts": {}, "cases": cases, "pairs": pairs}
    manifest = {
        "targets": ["9.0"],
        "options": {"opt_level": 0},
        "seconds": {"build": 12.5, "tensorrt build": 11.0},
        "artifact": "vision_tower.engine",
        "files": {"vision_tower.engine": {"size": 1234}},
    }
    return {"exit": code, "sleep": sleep, "report": {"judgement": judgement}, "manifest": manifest}


RIGHT = told("PASS", 0)
CAUGHT = told("FAILED", 6, (f"case a: the error points to {SWAPPED}; direction 0.98",))


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python86"
        self.python.write_text(STAND_IN.format(python=sys.executable))
        self.python.chmod(0o755)

    def artifact(self, name: str, told: dict[str, Any], wrong: str = "") -> Path:
        folder = self.folder / "onnx" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"options": {"wrong_model": wrong}}))
        (folder / "told.json").write_text(json.dumps(told))
        return folder

    def engine(self, name: str, told: list[dict[str, Any]]) -> Path:
        """An engine that the stand-in validates: each time it finds the next of these."""
        folder = self.folder / "engines" / name
        folder.mkdir(parents=True)
        (folder / "told.json").write_text(json.dumps(told))
        return folder

    def repeat(self, engine: Path, *options: str) -> int:
        return gpu_engines.main(
            ["repeat", str(engine), str(self.folder / "results"), "--python", str(self.python), *options]
        )

    def run(self, *options: str) -> int:
        places = [str(self.folder / "onnx"), str(self.folder / "results")]
        return gpu_engines.main(["run", *places, "--python", str(self.python), *options])

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "results" / "results.json").read_text())
        return found


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_right_passes_and_wrong_is_caught_by_name(rig: Rig) -> None:
    rig.artifact("right", RIGHT)
    rig.artifact("swapped", CAUGHT, SWAPPED)
    assert rig.run("--opt-level", "1") == 0
    found = rig.results()
    assert found["machine"]["versions"] == {"tensorrt": "8.6.0"}
    assert {name: engine["exit_code"] for name, engine in found["engines"].items()} == {"right": 0, "swapped": 6}
    swapped = found["engines"]["swapped"]
    assert swapped["relative_l2"] == {"case": "a", "measured": 0.25, "allowed": 0.001}
    assert swapped["direction"]["measured"] == 0.98
    assert swapped["command"] == "kvit-export trt swapped -o swapped --force --json --flavor tensorrt --opt-level 1"
    with tarfile.open(rig.folder / "results" / "records.tar.gz") as archive:
        names = {f"{name}{end}" for name in ("right", "swapped") for end in ("/report.json", "/manifest.json", ".log")}
        assert set(archive.getnames()) == names
    assert len(list((rig.folder / "results").iterdir())) == 2  # few files come back from such a machine
    assert str(rig.folder) not in json.dumps(found)


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        ("", told("PASS", 7)),
        ("", told("NOT VALIDATED", 0)),
        ("", CAUGHT),
        (SWAPPED, RIGHT),
        (SWAPPED, told("FAILED", 0, (f"it points to {SWAPPED}",))),
        (SWAPPED, told("FAILED", 6, ("case a: relative l2 0.25",))),
        (SWAPPED, told("FAILED", 6, ("case a: the error points to align-corners",))),
        (SWAPPED, told("NOT VALIDATED", 6, (f"it points to {SWAPPED}",))),
    ],
)
def test_any_other_end_is_not_as_expected(rig: Rig, wrong: str, answer: dict[str, Any]) -> None:
    rig.artifact("right", RIGHT)
    rig.artifact("other", answer, wrong)
    assert rig.run() == 1
    assert {name: engine["as_expected"] for name, engine in rig.results()["engines"].items()} == {
        "right": True,
        "other": False,
    }


def test_nothing_to_run_is_no_success(rig: Rig) -> None:
    (rig.folder / "onnx").mkdir()
    assert rig.run() == 1


def test_a_second_call_does_only_what_is_missing(rig: Rig) -> None:
    first = rig.artifact("right", RIGHT)
    assert rig.run() == 0
    second = rig.artifact("swapped", CAUGHT, SWAPPED)
    assert rig.run() == 0
    assert [len((folder / "called").read_text().splitlines()) for folder in (first, second)] == [1, 1]
    assert rig.run("--again", "--only", "right") == 0
    assert [len((folder / "called").read_text().splitlines()) for folder in (first, second)] == [2, 1]


def test_a_build_that_takes_too_long_is_ended_with_its_children(rig: Rig) -> None:
    slow = rig.artifact("slow", told("PASS", 0, sleep=30))
    assert rig.run("--timeout", "1") == 2
    found = rig.results()["engines"]["slow"]
    assert not found["finished"] and not found["as_expected"] and found["seconds"] < 10
    assert found["stderr"] == "[    0.1 s] parse\n"  # how far it had come
    child = Path("/proc", (slow / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"  # dead, though nobody may have asked for it yet
    rig.artifact("slow", RIGHT)
    assert rig.run() == 0


def test_nothing_begins_after_the_deadline(rig: Rig) -> None:
    folder = rig.artifact("right", RIGHT)
    assert rig.run("--deadline", "10", "--least", "20") == 2
    assert not (folder / "called").exists()


def test_what_was_asked_and_what_the_build_took_is_kept(rig: Rig) -> None:
    folder = rig.artifact("deep", RIGHT)
    rig.artifact("other", RIGHT)
    assert rig.run("--only", "deep", "--opt-level", "0", "--profile", "4:256:320", "--engines", str(rig.folder)) == 0
    options = "--force --json --flavor tensorrt --opt-level 0 --profile 4:256:320"
    assert (folder / "called").read_text() == f"-o {rig.folder / 'deep'} {options}\n"
    found = rig.results()["engines"]
    assert list(found) == ["deep"]
    assert found["deep"]["asked"] == {"opt_level": 0, "profile": ["4:256:320"], "frames": None, "at_a_time": 1}
    built = found["deep"]["built"]
    assert (built["engine_bytes"], built["opt_level"], built["seconds"]["tensorrt build"]) == (1234, 0, 11.0)
    # a log tells how far a build in the background is
    assert (folder / "log").read_text() == "[    0.1 s] parse\n"


def test_what_an_earlier_build_left_is_not_taken_for_this_one(rig: Rig) -> None:
    rig.artifact("right", RIGHT)
    assert rig.run() == 0
    rig.artifact("right", told("PASS", 0, sleep=30))
    assert rig.run("--again", "--timeout", "1") == 2
    found = rig.results()["engines"]["right"]
    assert (found["verdict"], found["built"]["engine_bytes"], found["built"]["seconds"]) == (None, None, None)


# -------------------------------------------------------------------------------------------- one engine, several times


def test_equal_validations_are_one_verdict(rig: Rig) -> None:
    rig.artifact("right", RIGHT)
    assert rig.run() == 0
    engine = rig.engine("right", [RIGHT] * 5)
    assert rig.repeat(engine) == 0
    assert (engine / "called").read_text().splitlines() == ["--json"] * 5
    found = rig.results()["repeated"]["right"]
    assert [(run["exit_code"], run["verdict"]) for run in found["runs"]] == [(0, "PASS")] * 5
    assert (found["numbers"], found["differing"], found["spread"]) == (4, 0, {})
    assert found["runs"][4]["relative_l2"] == {"case": "a", "measured": 0.25, "allowed": 0.001}
    assert list(rig.results()["engines"]) == ["right"]  # what was there stays
    assert str(rig.folder) not in json.dumps(found)


def test_numbers_that_differ_are_kept_with_their_spread(rig: Rig) -> None:
    other = json.loads(json.dumps(RIGHT))
    judgement = other["report"]["judgement"]
    judgement["cases"][0]["checks"][0]["measured"] = 0.25 - 0.0005  # of 0.001
    judgement["pairs"][0]["check"]["measured"] = 1.03  # 1 is ideal, 1.1 the limit
    assert rig.repeat(rig.engine("right", [RIGHT, other, RIGHT]), "--times", "3") == 0
    found = rig.results()["repeated"]["right"]
    assert (found["numbers"], found["differing"]) == (4, 2)
    assert set(found["spread"]) == {"relative_l2", "sensitivity"}
    assert found["spread"]["relative_l2"]["values"] == [0.25, 0.2495, 0.25]
    assert found["spread"]["relative_l2"]["share_of_allowed"] == pytest.approx(0.5)
    assert found["spread"]["sensitivity"]["share_of_allowed"] == pytest.approx(0.2)


def test_a_number_that_is_missing_once_is_a_difference(rig: Rig) -> None:
    other = json.loads(json.dumps(RIGHT))
    other["report"]["judgement"]["cases"][0]["checks"][1]["measured"] = None
    assert rig.repeat(rig.engine("right", [RIGHT, other]), "--times", "2") == 0
    (entry,) = rig.results()["repeated"]["right"]["spread"].values()
    assert entry["values"] == [0.98, None] and entry["share_of_allowed"] is None


NOTHING = {"exit": 8, "sleep": 0, "report": None}


@pytest.mark.parametrize(
    "ends",
    [
        [RIGHT, RIGHT, CAUGHT],
        [RIGHT, told("PASS", 6), RIGHT],
        [RIGHT, told("NOT VALIDATED", 0), RIGHT],
        [RIGHT, RIGHT, NOTHING],
        [NOTHING, NOTHING, NOTHING],
        [RIGHT, RIGHT, told("PASS", 0, sleep=20)],
    ],
)
def test_any_other_end_is_not_one_verdict(rig: Rig, ends: list[dict[str, Any]]) -> None:
    assert rig.repeat(rig.engine("x", ends), "--times", "3", "--timeout", "3") == 1
    found = rig.results()["repeated"]["x"]
    assert not found["one_verdict"] and len(found["runs"]) == 3


def test_one_validation_is_refused(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        rig.repeat(rig.engine("x", [RIGHT]), "--times", "1")
    assert error.value.code == 2
    assert "one validation shows nothing" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- the plan


def test_the_plan_holds_right_and_wrong_models_and_one_of_full_depth() -> None:
    planned = artifacts.plan(gpu_engines.parse(["prepare", "out"]))
    names = [item.name for item in planned]
    assert len(set(names)) == len(names) == 2 * 2 + 2 * 3 + 1
    right = {item.right for item in planned if not item.wrong}
    assert all(item.right in right for item in planned)
    assert {item.wrong for item in planned} == {"", *artifacts.WRONG}
    assert [item.source for item in planned if "layers" not in item.source] == ["random:kimi-k2.5"]


def planned_shapes(item: artifacts.Planned) -> list[Shape]:
    """Sizes of the calls in the golden set of an artifact."""
    config = parse_random_source(item.source).config
    cases = plan_cases(config, artifacts.golden_options(item, "cpu"), RULES[config.family])
    assert {case.keeps_directions for case in cases} == {True, False}  # without directions nothing gets PASS
    return [Shape(case.frames, case.patches, len(case.grids)) for case in cases]


@pytest.mark.parametrize("preset", ["kimi-k2.5", "kimi-k3", "kimi-vl"])
def test_one_small_profile_covers_the_golden_set_of_full_depth(preset: str) -> None:
    options = ["prepare", "out", "--deep", preset, "--only", f"{preset}-all-layers-fp16"]
    (item,) = artifacts.plan(gpu_engines.parse(options))
    shapes = planned_shapes(item)
    (profile,) = parse_profiles(["4:256:320"], None, None, max_frames=4, packed=False)
    assert all(contains(profile, shape) for shape in shapes)  # a case outside is skipped, hence NOT VALIDATED
    assert uncovered([profile], shapes) == []
    (default,) = default_profiles(shapes)
    assert (default.min, default.opt, default.max) == (profile.min, profile.opt, profile.max)


def test_sizes_are_given_to_the_other_golden_sets_too() -> None:
    options = ["--max-patches", "4", "--sizes", "16x16", "16x20", "20x16", "36x46"]
    planned = artifacts.plan(gpu_engines.parse(["prepare", "out", *options]))
    (profile,) = default_profiles(planned_shapes(planned[0]))
    assert (profile.min, profile.max) == (Shape(1, 4, 1), Shape(1, 1656, 1))
    assert len({item.right for item in planned if item.source == planned[0].source}) == 2  # fp16 and fp32


def test_an_artifact_that_is_not_planned_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"--only takes .*kimi-k2.5-all-layers-fp16, not kimi-k3-all-layers-fp16"):
        artifacts.plan(gpu_engines.parse(["prepare", "out", "--only", "kimi-k3-all-layers-fp16"]))


@pytest.mark.slow
def test_the_artifact_of_full_depth_can_pass(tmp_path: Path) -> None:
    """All phases in earnest for a tiny tower, but for the run of the engine, which needs a GPU."""
    name = "tiny-all-layers-fp16"
    onnx, results = tmp_path / "onnx", tmp_path / "results"
    assert gpu_engines.main(["prepare", str(onnx), "--deep", "tiny", "--only", name, "--device", "cpu"]) == 0
    python = tmp_path / "python"
    python.write_text(PRETENDING.format(python=sys.executable, onnx=str(onnx / name)))
    python.chmod(0o755)
    here = ["--python", str(python)]
    asked = ["--flavor", "tensorrt_rtx", "--opt-level", "0", "--profile", "4:256:320"]
    assert gpu_engines.main(["run", str(onnx), str(results), *here, *asked]) == 0
    assert gpu_engines.main(["repeat", str(tmp_path / "onnx-engines" / name), str(results), *here, "--times", "2"]) == 0
    found = json.loads((results / "results.json").read_text())
    engine = found["engines"][name]
    assert (engine["verdict"], engine["doubts"]) == ("PASS", [])
    assert engine["cases"] == {"within": 8, "failed": 0, "skipped": 0, "total": 8}
    assert engine["built"]["opt_level"] == 0
    assert engine["built"]["engine_bytes"] > 1000
    assert {"build", "tensorrt parse", "tensorrt build", "validate"} <= set(engine["built"]["seconds"])
    repeated = found["repeated"][name]
    assert [run["verdict"] for run in repeated["runs"]] == ["PASS", "PASS"]
    assert repeated["differing"] == 0 and repeated["numbers"] > 50
    # with another upper bound its corner has no case
    beyond = ["--flavor", "tensorrt_rtx", "--opt-level", "0", "--profile", "4:256:640", "--again"]
    assert gpu_engines.main(["run", str(onnx), str(results), *here, *beyond]) == 1
    engine = json.loads((results / "results.json").read_text())["engines"][name]
    assert (engine["exit_code"], engine["verdict"]) == (7, "NOT VALIDATED")
