"""The GPU script's verdict about its artifacts, with a stand-in for the Python that has TensorRT."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from scripts import gpu_engines

# Does what the artifact's file says: sleeps, writes an engine's report and manifest, exits.
STAND_IN = """#!{python}
import json, pathlib, subprocess, sys, time
if sys.argv[3:4] != ["trt"]:
    print(json.dumps({{"tensorrt": "8.6.0"}}))
    sys.exit(0)
folder, engine = pathlib.Path(sys.argv[4]), pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
told = json.loads((folder / "told.json").read_text())
(folder / "called").open("a").write(" ".join(sys.argv[5:]) + "\\n")
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

SWAPPED = "rope-axes-swapped"


def told(verdict: str, code: int, faults: tuple[str, ...] = (), sleep: float = 0) -> dict[str, Any]:
    checks = [
        {"metric": "relative_l2", "subject": "", "measured": 0.25, "allowed_high": 0.001},
        {"metric": "direction", "subject": SWAPPED, "measured": 0.98, "allowed_high": 0.5},
        {"metric": "direction", "subject": "align-corners", "measured": 3.0, "allowed_high": 0.5},
    ]
    cases = [{"name": "a", "checks": checks}]
    judgement = {"verdict": verdict, "faults": list(faults), "doubts": [], "counts": {}, "cases": cases}
    return {"exit": code, "sleep": sleep, "report": {"judgement": judgement}, "manifest": {"targets": ["9.0"]}}


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
    child = Path("/proc", (slow / "child").read_text(), "stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"  # dead, though nobody may have asked for it yet
    rig.artifact("slow", RIGHT)
    assert rig.run() == 0


def test_nothing_begins_after_the_deadline(rig: Rig) -> None:
    folder = rig.artifact("right", RIGHT)
    assert rig.run("--deadline", "10", "--least", "20") == 2
    assert not (folder / "called").exists()


def test_the_plan_holds_right_and_wrong_models_and_one_of_full_depth() -> None:
    planned = gpu_engines.plan(gpu_engines.parse(["prepare", "out"]))
    names = [item.name for item in planned]
    assert len(set(names)) == len(names) == 2 * 2 + 2 * 3 + 1
    right = {item.right for item in planned if not item.wrong}
    assert all(item.right in right for item in planned)
    assert {item.wrong for item in planned} == {"", *gpu_engines.WRONG}
    assert [item.source for item in planned if "layers" not in item.source] == ["random:kimi-k2.5"]
