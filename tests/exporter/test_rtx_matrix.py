"""The plan of the TensorRT-RTX matrix, how its script judges engines, and the results that are kept."""

from __future__ import annotations

import copy
import json
import re
import struct
import sys
from collections import Counter
from concurrent.futures import Future
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from exporter.errors import MissingRequirement
from exporter.trt import builder
from exporter.trt.profiles import parse_profiles
from model.config import preset
from scripts import rtx_matrix
from scripts.rtx_matrix import Engine, Graph

KEPT = Path(__file__).parents[2] / "benchmarks/results/engines-rtx-cpu.json"
DOCUMENT = json.loads(KEPT.read_text(encoding="utf-8"))
# written out apart from the script: what the issue asks for
AXES = (
    ("tiny", "tiny-k3"),
    ("bf16", "fp16", "fp32"),
    ("single", "packed"),
    ("plugin", "standard", "plain"),
    ("plain", "op"),
    ("one", "two"),
)
NAMES = ["-".join(values) for values in product(*AXES)]
LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
BOUNDS = {"one": ["4:16:64"], "two": ["4:16:64", "64:256:1024"]}
BY_NAME = dict(zip(NAMES, product(*AXES), strict=True))
PLANNED = {engine.name: engine for engine in rtx_matrix.plan()}


def values_of(name):
    """The values that a name was made of."""
    return dict(zip(("preset", "dtype", "packing", "rope", "attention", "profiles"), BY_NAME[name], strict=True))


def test_the_plan_has_every_combination_once():
    names = [engine.name for engine in rtx_matrix.plan()]
    assert len(names) == len(set(names)) == 144
    assert sorted(names) == sorted(NAMES)
    assert len({engine.graph for engine in rtx_matrix.plan()}) == 72
    graphs = [engine.graph for engine in rtx_matrix.plan()]
    assert graphs[::2] == graphs[1::2]  # so each graph is exported once


def test_the_options_ask_for_the_profiles_that_are_looked_for():
    """What the command itself makes of the options is what the script looks for in manifests."""
    for name, engine in PLANNED.items():
        given = engine.options()
        texts = [given[i + 1] for i, word in enumerate(given) if word == "--profile"]
        asked = values_of(name)
        assert texts == BOUNDS[asked["profiles"]]
        items = given[given.index("--items") + 1] if "--items" in given else None
        assert (items is not None) == (asked["packing"] == "packed")
        frames = given[given.index("--frames") + 1]
        packed = asked["packing"] == "packed"
        found = parse_profiles(texts, frames, items, max_frames=preset(asked["preset"]).max_frames, packed=packed)
        corners = [(p.min, p.opt, p.max) for p in found]
        shapes = [" ".join(f"{c.frames}x{c.patches}x{c.items}" for c in three) for three in corners]
        assert engine.shapes() == shapes
        assert engine.corners() == sorted({f"{c.frames}x{c.patches}" for three in corners for c in three})


def test_a_choice_of_engines():
    assert [engine.name for engine in rtx_matrix.select(["*-plugin-op-two"], 3)] == [
        "tiny-bf16-single-plugin-op-two", "tiny-bf16-packed-plugin-op-two", "tiny-fp16-single-plugin-op-two",
    ]  # fmt: skip
    assert len(rtx_matrix.select([], None)) == 144
    with pytest.raises(SystemExit, match="matches no engine"):
        rtx_matrix.select(["tiny-k2*"], None)


# -------------------------------------------------------------------------------------------- the results that are kept


def test_the_kept_results_hold_every_engine_built_or_with_a_named_reason():
    assert list(DOCUMENT["engines"]) == [engine.name for engine in rtx_matrix.plan()]
    outcomes = Counter(found["outcome"] for found in DOCUMENT["engines"].values())
    assert set(outcomes) <= {"built", "refused"}
    assert DOCUMENT["counts"] == dict(outcomes)
    for name, found in DOCUMENT["engines"].items():
        if found["outcome"] == "refused":
            assert any(found["reason"].startswith(f"{refusal.name} (") for refusal in rtx_matrix.REFUSALS), name
            assert found["message"], name
        assert found["command"].startswith(f"kvit-export trt {name.rpartition('-')[0]} -o {name} --flavor tensorrt_rtx")


def test_the_kept_results_say_where_they_come_from():
    for run in DOCUMENT["runs"]:
        for package in ("kvit-export", "tensorrt-rtx", "triton", "torch", "onnx", "onnxscript", "onnx-ir", "numpy"):
            assert re.match(r"\d+\.\d+", run["versions"][package]), package
        assert run["versions"] == DOCUMENT["versions"]
        assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]{8}\+00:00", run["date"])
        assert run["command"].startswith("python scripts/rtx_matrix.py")
        assert run["machine"]["cores"] >= 1
    runtimes = {found["runtime"] for found in DOCUMENT["engines"].values() if found["outcome"] == "built"}
    assert runtimes == {f"tensorrt_rtx {DOCUMENT['versions']['tensorrt-rtx']}"}
    assert not re.search(r'"/|[ =](/home|/root|/tmp|/work)/', KEPT.read_text())  # no place of that machine


def test_the_kept_engines_are_what_was_asked_for():
    """Not by the script's own check: the numbers follow from the presets and the names."""
    built = {name: found for name, found in DOCUMENT["engines"].items() if found["outcome"] == "built"}
    assert built
    for name, found in built.items():
        asked = values_of(name)
        blocks, plugin = preset(asked["preset"]).num_hidden_layers, asked["rope"] == "plugin"
        assert found["exit_code"] == 0, name
        assert found["form"] == [LONG[asked["dtype"]], asked["packing"], asked["rope"], asked["attention"]], name
        assert found["plugin_layers"] == (blocks if plugin else 0), name
        assert found["plugin"] == ("v3" if plugin else None), name
        assert set(found["kernels_in_file"]) == ({asked["dtype"]} if plugin else set()), name
        assert found["rotary_layers"] == (2 * blocks if asked["rope"] == "standard" else 0), name
        assert found["attention_layers"] == (blocks if asked["attention"] == "op" else 0), name
        # QKV, output and two of the MLP a block, three for patches and projector; two of attention unless it is fused
        assert sum(found["products"].values()) == (6 if asked["attention"] == "plain" else 4) * blocks + 3, name
        assert len(found["profiles"]) == len(BOUNDS[asked["profiles"]]), name
        assert ("4x1024" in found["corners_in_file"]) == (asked["profiles"] == "two"), name
        assert found["engine_bytes"] > 1e6, name  # compiled for five capabilities; the weights alone are 0.7 to 1.4 MB
        assert 0 < found["seconds"]["parse"] + found["seconds"]["build"] < found["seconds"]["process"], name
    for name, found in built.items():
        if name.endswith("-two") and name[:-3] + "one" in built:  # a second profile is more code
            assert found["engine_bytes"] > built[name[:-3] + "one"]["engine_bytes"], name


# ----------------------------------------------------------------------------------------------- how engines are judged

PLUGIN = "tiny-bf16-packed-plugin-plain-two"
STANDARD = "tiny-fp16-single-standard-op-one"


def kept(name):
    """What was found of an engine, without the judgement about it."""
    found = copy.deepcopy(DOCUMENT["engines"][name])
    return {key: value for key, value in found.items() if key not in ("outcome", "reason")}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        (PLUGIN, {"plugin_layers": 1}, "plugin_layers: 1, not 2"),
        (PLUGIN, {"plugin_layers": 0, "plugin": "function"}, "plugin: function"),
        (PLUGIN, {"kernels_in_file": {}}, "kernels_in_file"),
        (PLUGIN, {"kernels_in_file": {"fp32": 8}}, "kernels_in_file"),
        (PLUGIN, {"kernels_in_file": {"bf16": 3}}, "kernels_in_file"),
        (PLUGIN, {"profiles": ["1x4x1 1x16x1 4x64x3"]}, "profiles"),
        (PLUGIN, {"corners_in_file": ["1x16", "1x4", "4x64"]}, "corners_in_file"),
        (PLUGIN, {"packs_in_file": 1}, "packs_in_file"),
        (PLUGIN, {"products": {"BF16": 14, "FLOAT": 1}}, "products"),
        (PLUGIN, {"form": ["bfloat16", "single", "plugin", "plain"]}, "form"),
        (STANDARD, {"rotary_layers": 2}, "rotary_layers"),
        (STANDARD, {"attention_layers": 0}, "attention_layers"),
        (STANDARD, {"plugin_layers": 2}, "plugin_layers"),
        (STANDARD, {"kernels_in_file": {"fp16": 4}}, "kernels_in_file"),
        (STANDARD, {"corners_in_file": ["1x16", "1x256", "1x4", "1x64", "4x1024", "4x64"]}, "corners_in_file"),
        (STANDARD, {"message": "the engine has changed"}, "exit code 0: the engine has changed"),
    ],
)
def test_an_engine_that_is_not_what_was_asked_for_has_failed(name, changes, says):
    found = kept(name)
    right = rtx_matrix.judge(PLANNED[name], found, 2)
    assert (right["outcome"], right["reason"]) == ("built", "")
    wrong = rtx_matrix.judge(PLANNED[name], {**found, **changes}, 2)
    assert wrong["outcome"] == "failed"
    assert says in wrong["reason"]


def test_what_an_engine_file_tells():
    def numbers(*values):
        return struct.pack(f"<{len(values)}q", *values)

    kernel = b".visible .entry fused_qk_rope_bf16_h4_d24_v8_b128("
    content = b"vtrt" + numbers(1, 4, 588) + b"\1" + numbers(1, 16, 588, 4, 64, 588) + kernel + numbers(3, 2) + kernel
    assert rtx_matrix.in_file(content) == {
        "corners_in_file": ["1x16", "1x4", "4x64"],
        "packs_in_file": 1,
        "kernels_in_file": {"bf16": 2},
    }
    nothing = b"vtrt" + numbers(1, 4, 589, 1, 64, 2) + b"node_fused_qk_rope__1 (FusedQKRope)"
    assert rtx_matrix.in_file(nothing) == {"corners_in_file": [], "packs_in_file": 0, "kernels_in_file": {}}


def test_only_a_documented_refusal_of_the_plugin_is_no_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    job = SimpleNamespace(plugin="v3", dtype="bfloat16", head_dim=24, heads=4, plugin_target="sm_80")
    with pytest.raises(MissingRequirement) as caught:
        builder._Build._prepare_plugin(SimpleNamespace(job=job))
    found = {"exit_code": caught.value.exit_code, "message": f"kvit-export: {caught.value.format_message()}"}
    engine = PLANNED[PLUGIN]
    judged = rtx_matrix.judge(engine, found, 2)
    assert judged["outcome"] == "refused"
    assert judged["reason"] == "no Triton (docs/engines.md, The RoPE plugin)"
    assert judged["message"] == found["message"]
    assert rtx_matrix.judge(PLANNED[STANDARD], found, 2)["outcome"] == "failed"  # it has no plugin to be refused
    assert rtx_matrix.judge(engine, {**found, "exit_code": 1}, 2)["outcome"] == "failed"
    without = {**found, "message": found["message"].replace("triton", "numpy")}
    assert rtx_matrix.judge(engine, without, 2)["outcome"] == "failed"
    other = {"exit_code": 8, "message": "kvit-export: tensorrt_rtx is not installed"}
    assert rtx_matrix.judge(engine, other, 2)["outcome"] == "failed"
    assert rtx_matrix.judge(engine, {"exit_code": None, "message": "no answer within 1 s"}, 2)["outcome"] == "failed"
    page = (KEPT.parents[2] / "docs/engines.md").read_text(encoding="utf-8")
    for refusal in rtx_matrix.REFUSALS:
        assert f"\n## {refusal.documented.partition(', ')[2]}\n" in page


# -------------------------------------------------------------------------------------------------------------- the run


class Here:
    """A pool that does its work at once, in this process."""

    def __init__(self, *_given):
        pass

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self):
        pass


@pytest.fixture
def rig(monkeypatch):
    """The run with exports and builds that only note that they were asked for; some names fail."""
    made = SimpleNamespace(exported=[], built=[], failing=set())

    def pretend_export(graph, folder):
        made.exported.append(graph.name)
        return {"exit_code": 4, "message": "no"} if graph.name in made.failing else {"exit_code": 0, "blocks": 2}

    def pretend_build(engine, onnx, folder, timeout):
        made.built.append(engine.name)
        if engine.name in made.failing:
            return {"exit_code": 5, "message": "kvit-export: no engine", "seconds": {"process": 1.0}}
        return kept(engine.name)

    monkeypatch.setattr(rtx_matrix, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(rtx_matrix, "export", pretend_export)
    monkeypatch.setattr(rtx_matrix, "build", pretend_build)
    return made


def test_a_run_goes_on_where_it_was_cut_and_fails_with_any_engine(tmp_path, rig, capsys):
    output = tmp_path / "results.json"
    rig.failing = {"tiny-bf16-single-plugin-plain-two"}
    assert rtx_matrix.main(["--first", "3", "--output", str(output)]) == 1
    assert rig.exported == ["tiny-bf16-single-plugin-plain", "tiny-bf16-single-plugin-op"]
    assert "2 built, 0 refused, 1 failed; 3 of 144 are in" in capsys.readouterr().out
    found = json.loads(output.read_text())
    assert found["counts"] == {"built": 2, "failed": 1}
    assert found["engines"]["tiny-bf16-single-plugin-plain-two"]["reason"] == "exit code 5: kvit-export: no engine"

    rig.failing, rig.exported[:], rig.built[:] = set(), [], []
    assert rtx_matrix.main(["--first", "4", "--output", str(output)]) == 0
    assert rig.built == ["tiny-bf16-single-plugin-plain-two", "tiny-bf16-single-plugin-op-two"]
    found = json.loads(output.read_text())
    assert list(found["engines"]) == [engine.name for engine in rtx_matrix.plan()][:4]
    assert len(found["runs"]) == 2
    assert rtx_matrix.main(["--table", str(output)]) == 0
    assert "| plugin | plain | 2 | 0 | 0 | 2 |" in capsys.readouterr().out


def test_results_are_there_after_each_engine(tmp_path, rig, monkeypatch):
    output = tmp_path / "results.json"
    pretend = rtx_matrix.build

    def cut(engine, *rest):
        if engine.profiles == "two":
            raise KeyboardInterrupt
        return pretend(engine, *rest)

    monkeypatch.setattr(rtx_matrix, "build", cut)
    with pytest.raises(KeyboardInterrupt):
        rtx_matrix.main(["--first", "2", "--output", str(output)])
    assert list(json.loads(output.read_text())["engines"]) == ["tiny-bf16-single-plugin-plain-one"]


def test_a_graph_that_is_not_exported_fails_both_of_its_engines(tmp_path, rig):
    output = tmp_path / "results.json"
    rig.failing = {"tiny-bf16-single-plugin-plain"}
    assert rtx_matrix.main(["--first", "2", "--output", str(output)]) == 1
    assert rig.built == []
    engines = json.loads(output.read_text())["engines"]
    assert {found["reason"] for found in engines.values()} == {"exit code 4: export: no"}
    assert len(engines) == 2


def test_results_of_other_versions_are_not_mixed(tmp_path, rig):
    output = tmp_path / "results.json"
    assert rtx_matrix.main(["--first", "1", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    found["runs"][0]["versions"]["tensorrt-rtx"] = "1.6"
    output.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match="other versions"):
        rtx_matrix.main(["--first", "2", "--output", str(output)])
    assert rtx_matrix.main(["--first", "2", "--output", str(output), "--again"]) == 0
    assert len(json.loads(output.read_text())["runs"]) == 1


def test_an_artifact_name_tells_its_form():
    graph = Graph("tiny", "bf16", "packed", "plain", "op")
    assert (graph.name, Engine(graph, "two").name) == ("tiny-bf16-packed-plain-op", "tiny-bf16-packed-plain-op-two")
