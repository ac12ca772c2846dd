"""Real TensorRT-RTX engines, built on the CPU, and what the stage around the build keeps and refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from exporter import cli
from exporter.errors import BadInput, BuildFailed, MissingRequirement, Usage, ValidationFailed
from exporter.manifest import check_files, read_manifest, write_manifest
from exporter.trt import build
from exporter.trt import plan as plan_module
from exporter.trt.build import ENGINE_FILE, make_engine
from exporter.trt.child import Child
from exporter.trt.job import Built
from exporter.trt.plan import TrtRequest, plan_build
from exporter.validation.backends import OrtBackend
from exporter.validation.evidence import BackendInfo, Profile, Shape
from exporter.validation.gate import Verdict
from exporter.validation.latency import Latency, Percentiles
from exporter.validation.verify import verify
from model.graph import GraphForm
from tests.exporter.artifacts import artifact, shared_artifact

QUIET = lambda *_: None  # noqa: E731 - progress that nobody reads
ONE = ("4:16:64",)
TWO = ("4:16:64", "64:256:1024")

# Nearly every pair of (tower, dtype, rope, attention, packing, profiles) stands in some row; all 144 combinations took
# 18 minutes by scripts/rtx_matrix.py.
MATRIX = [
    ("tiny", "fp32", "plugin", "plain", "packed", ONE),
    ("tiny", "bf16", "plugin", "plain", "packed", TWO),
    ("tiny-k3", "fp16", "plugin", "plain", "packed", ONE),
    ("tiny-k3", "fp32", "standard", "op", "packed", TWO),
    ("tiny", "fp32", "standard", "plain", "single", ONE),
    ("tiny-k3", "fp32", "plain", "plain", "single", TWO),
    ("tiny", "fp32", "plain", "op", "packed", ONE),
    ("tiny-k3", "fp32", "plugin", "op", "single", ONE),
]
HALF = [
    ("tiny-k3", "bf16", "standard", "op", "single", ONE),
    ("tiny", "fp16", "plain", "op", "packed", TWO),
]


def request(folder, output, **changes):
    return TrtRequest(folder=folder, output=output, flavor="tensorrt_rtx", **changes)


@pytest.mark.parametrize(("name", "dtype", "rope", "attention", "packing", "profiles"), MATRIX + HALF)
def test_an_engine_of_every_form_is_built(tmp_path, name, dtype, rope, attention, packing, profiles):
    onnx = artifact(tmp_path / "onnx", name, dtype, GraphForm(rope, attention, packing))
    several = {"items": "3"} if packing == "packed" else {}
    made = make_engine(request(onnx, tmp_path / "engine", profiles=profiles, frames="4", **several), QUIET)
    manifest = read_manifest(tmp_path / "engine")
    check_files(tmp_path / "engine", manifest)
    assert manifest == made.manifest
    assert (tmp_path / "engine" / ENGINE_FILE).read_bytes()[:4] == b"vtrt"
    assert len(manifest.profiles) == len(profiles)
    assert manifest.profiles[0].max == Shape(4, 64, 3 if several else 1)
    layers = config_layers(onnx)
    plugins = sum(count for kind, count in manifest.layers.items() if kind.startswith("PLUGIN"))
    assert plugins == (layers if rope == "plugin" else 0)
    assert (manifest.plugin.kind if manifest.plugin else None) == ("v3" if rope == "plugin" else None)
    kinds = Counter(manifest.layers)
    assert kinds["ROTARY_EMBEDDING"] == (2 * layers if rope == "standard" else 0)
    # two products a block are attention's own unless one fused layer makes them
    assert bool(kinds["ATTENTION_INPUT"]) == (attention == "op")


def config_layers(folder):
    return read_manifest(folder).source.config["num_hidden_layers"]


def test_half_precision_products_stay_half(tmp_path, tmp_path_factory):
    """The parsed network of a bf16 model: no product in fp32 but those that sample the position table."""
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", dtype="bf16")
    manifest = make_engine(request(onnx, tmp_path / "e", profiles=ONE), QUIET).manifest
    products = {kind: count for kind, count in manifest.layers.items() if kind.startswith("MATRIX_MULTIPLY")}
    layers = config_layers(onnx)
    # a block has QKV, two of attention, the output and two of the MLP; the patches and the projector make three more
    assert products["MATRIX_MULTIPLY BF16"] == 6 * layers + 3
    assert sum(products.values()) == products["MATRIX_MULTIPLY BF16"]


@pytest.mark.slow
def test_the_real_size_builds_in_half_a_minute_and_four_gigabytes(tmp_path):
    onnx = tmp_path / "onnx"
    assert cli.run(["onnx", "random:kimi-k2.5", "-o", str(onnx), "--no-golden"]) == 0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = used.ru_utime + used.ru_stime
    manifest = make_engine(request(onnx, tmp_path / "e", profiles=("4:1024:4096",)), QUIET).manifest
    assert manifest.files[ENGINE_FILE].size > 900e6
    assert sum(count for kind, count in manifest.layers.items() if kind.startswith("PLUGIN")) == 27
    assert manifest.peak_memory_bytes < 4e9
    # CPU time of the building process, imports and the kernel's compilation with it: the machine may be busy. 5 to 15 s
    # were measured by hand on two cores with nothing else to do.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_utime + used.ru_stime - before < 30


# ------------------------------------------------------------------------------------------------------ what it refuses


def test_the_profiles_of_the_golden_set_are_the_default(tmp_path, tmp_path_factory):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", golden=True, max_patches=480)
    plan = plan_build(request(onnx, tmp_path / "e"), None)
    assert plan.uncovered == ()
    assert [profile.name for profile in plan.profiles] == ["images", "clips", "packed"]
    text = "\n".join(plan.describe())
    assert "attention needs up to" in text
    assert "at best NOT VALIDATED" not in text
    plan = plan_build(request(onnx, tmp_path / "e", profiles=("4:16:1024",)), None)
    assert len(plan.uncovered) == 2
    text = "\n".join(plan.describe())
    assert "max of profile profile (1 frames, 1024 patches, 1 items) has no golden case: at best NOT VALIDATED" in text


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"profiles": ("4:16",)}, Usage, "MIN:OPT:MAX"),
        ({"frames": "4"}, Usage, "give --profile"),
        ({"profiles": ONE, "target_sm": ("90",)}, Usage, "builds for"),
        ({"profiles": ONE, "timing_cache": Path("t")}, Usage, "measures no kernels"),
        ({"flavor": "tensorrt"}, MissingRequirement, "tensorrt is not installed"),
        ({"golden": Path("nowhere")}, BadInput, "nowhere"),
    ],
)
def test_what_cannot_work_is_refused_before_the_build(tmp_path, tmp_path_factory, changes, kind, text):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    with pytest.raises(kind, match=text):
        make_engine(dataclasses.replace(request(onnx, tmp_path / "e"), **changes), QUIET)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("damage", ["data missing", "data cut", "model cut", "no manifest", "no folder", "an engine"])
def test_a_damaged_model_is_named_before_the_build_starts(tmp_path, tmp_path_factory, damage):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    data, model = onnx / "vision_tower.onnx.data", onnx / "vision_tower.onnx"
    name = "vision_tower.onnx"
    if damage == "data missing":
        data.unlink()
        name = data.name
    elif damage == "data cut":
        data.write_bytes(data.read_bytes()[:-1])
        name = data.name
    elif damage == "model cut":
        model.write_bytes(model.read_bytes()[:-1])
    elif damage == "no manifest":
        (onnx / "manifest.json").unlink()
        name = "manifest.json"
    elif damage == "no folder":
        onnx, name = tmp_path / "nothing", "nothing"
    else:
        manifest = read_manifest(onnx)
        runtime = plan_module.choose("tensorrt_rtx", has_gpu=False).runtime
        write_manifest(onnx, dataclasses.replace(manifest, kind="engine", runtime=runtime))
        name = "holds an engine"
    start = time.monotonic()
    with pytest.raises(BadInput, match=re.escape(name)):
        make_engine(request(onnx, tmp_path / "e"), QUIET)
    assert time.monotonic() - start < 20  # no TensorRT was started; importing it takes a second or two
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("output", [".", "golden", "golden/inside", ".."])
def test_an_output_that_would_replace_what_is_read_is_refused(tmp_path, tmp_path_factory, output):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", golden=True, max_patches=480)
    before = sorted(path.name for path in onnx.rglob("*"))
    with pytest.raises(Usage, match="is read by this build"):
        make_engine(request(onnx, onnx / output, force=True), QUIET)
    assert sorted(path.name for path in onnx.rglob("*")) == before


def test_caches_have_a_place_of_their_own(tmp_path, tmp_path_factory):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "e" / "cache", tmp_path / "file"):
        with pytest.raises(Usage, match="--cache"):
            make_engine(request(onnx, tmp_path / "e", cache=place), QUIET)
    plan = plan_build(request(onnx, tmp_path / "e"), None)
    for place in (tmp_path / "missing" / "t", tmp_path / "e" / "t"):
        with pytest.raises(Usage, match="--timing-cache"):
            plan_module._check_places(request(onnx, tmp_path / "e", timing_cache=place), plan.golden)
    plan_module._check_places(
        request(onnx, tmp_path / "e", timing_cache=tmp_path / "t", cache=tmp_path / "c"), plan.golden
    )


@pytest.mark.parametrize("change", ["arrays", "cases"])
def test_another_golden_set_is_hashed_before_it_is_taken(tmp_path, tmp_path_factory, change):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", golden=True, max_patches=480)
    golden = tmp_path / "golden"
    shutil.copytree(onnx / "golden", golden)
    (golden / "stray.txt").write_text("not of the set")
    plan_build(request(onnx, tmp_path / "e", golden=golden), None)
    path = golden / ("golden.safetensors" if change == "arrays" else "golden.json")
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadInput, match="golden"):
        plan_build(request(onnx, tmp_path / "e", golden=golden), None)


def test_a_model_that_is_replaced_during_the_build_gives_no_engine(tmp_path, tmp_path_factory, monkeypatch):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")

    def slow(job, flavor, progress):
        Path(job.engine).write_bytes(b"vtrt")
        data = bytearray((onnx / "vision_tower.onnx.data").read_bytes())
        data[0] ^= 1
        (onnx / "vision_tower.onnx.data").write_bytes(data)
        return Built((), {}, 0, 0, {}, 1)

    monkeypatch.setattr(build, "_build", slow)
    with pytest.raises(BadInput, match=r"vision_tower\.onnx\.data has changed"):
        make_engine(request(onnx, tmp_path / "e", profiles=ONE, cache=tmp_path / "cache"), QUIET)
    assert not (tmp_path / "e").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_no_engine(tmp_path, tmp_path_factory, monkeypatch):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")

    def full(*_given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("exporter.trt.cache.EngineCache.store", full)
    said = []
    made = make_engine(
        request(onnx, tmp_path / "e", profiles=ONE, plugin=False, cache=tmp_path / "cache"), QUIET, said.append
    )
    assert (made.folder / ENGINE_FILE).exists()
    assert "the engine was not kept in the cache: No space left on device" in said


def test_a_model_that_failed_is_not_built(tmp_path, tmp_path_factory):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", golden=True, max_patches=480)
    manifest = read_manifest(onnx)
    judgement = dataclasses.replace(manifest.validation.judgement, verdict=Verdict.FAILED)
    write_manifest(
        onnx, dataclasses.replace(manifest, validation=dataclasses.replace(manifest.validation, judgement=judgement))
    )
    with pytest.raises(ValidationFailed, match="FAILED its validation"):
        make_engine(request(onnx, tmp_path / "e"), QUIET)


@pytest.mark.parametrize("operator", ["NoSuchOperator", "FusedQKRope"])
def test_the_first_parser_error_ends_the_build_and_names_the_node(tmp_path, tmp_path_factory, operator):
    import onnx as onnx_package

    from exporter.manifest import record_files

    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", form=GraphForm("plain", "plain", "packed"))
    path = onnx / "vision_tower.onnx"
    model = onnx_package.load(path, load_external_data=False)
    node = next(node for node in model.graph.node if node.op_type == "Softmax")
    node.op_type, node.domain, node.name = operator, "nowhere", "broken_softmax"
    model.opset_import.append(onnx_package.helper.make_opsetid("nowhere", 1))
    onnx_package.save(model, path)
    manifest = read_manifest(onnx)
    write_manifest(onnx, dataclasses.replace(manifest, files=record_files(onnx)))
    with pytest.raises(BuildFailed, match=rf"\({operator}\)") as caught:
        make_engine(request(onnx, tmp_path / "e", profiles=ONE, plugin=False), QUIET)
    needs = "needs the plugin FusedQKRope, version 1, namespace kvit" in str(caught.value)
    assert needs == (operator == "FusedQKRope")
    assert list(tmp_path.iterdir()) == [onnx]


@pytest.mark.parametrize("kept", ["function", "no attributes"])
def test_silence_about_the_plugin_proves_nothing(tmp_path, tmp_path_factory, kept, monkeypatch):
    """A node without its attributes goes to the function, and TensorRT says nothing; the count of layers tells."""
    import onnx as onnx_package

    from exporter.manifest import record_files

    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    path = onnx / "vision_tower.onnx"
    model = onnx_package.load(path, load_external_data=False)
    changed = 0
    for node in model.graph.node:
        if node.op_type == "FusedQKRope" and (kept == "no attributes" or not changed):
            del node.attribute[:]
            changed += 1
    onnx_package.save(model, path)
    write_manifest(onnx, dataclasses.replace(read_manifest(onnx), files=record_files(onnx)))
    layers = config_layers(onnx)
    with pytest.raises(BuildFailed, match=rf"{layers - changed} of {layers} RoPE nodes became plugin layers"):
        make_engine(request(onnx, tmp_path / "e", profiles=ONE), QUIET)
    made = make_engine(request(onnx, tmp_path / "e", profiles=ONE, plugin=False), QUIET)
    assert made.manifest.plugin.kind == "function"


def test_a_crash_of_tensorrt_is_a_build_that_failed(tmp_path, tmp_path_factory, monkeypatch):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    monkeypatch.setattr(build, "Child", lambda _function, name: Child("tests.exporter.test_trt_child:abort", name))
    with pytest.raises(BuildFailed, match=r"builds ended with signal SIGABRT; its last words: terminate called"):
        make_engine(request(onnx, tmp_path / "e", profiles=ONE), QUIET)
    assert list(tmp_path.iterdir()) == [onnx]


def test_the_timing_cache_and_current_are_never_touched(tmp_path, tmp_path_factory):
    """Both want a GPU in TensorRT-RTX, and the second aborts the process."""
    sources = [path.read_text() for path in Path(build.__file__).parent.glob("*.py")]
    assert not any("ComputeCapability.CURRENT" in source for source in sources)
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    manifest = make_engine(request(onnx, tmp_path / "e", profiles=ONE, plugin=False), QUIET).manifest
    assert not any("iming cache" in warning for warning in manifest.warnings)


class SmallGpu:
    """A GPU with little memory left."""

    name, capability = "a GPU", "9.0"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def free_memory(self):
        return 1 << 20


def test_more_memory_than_is_free_is_refused_unless_forced(tmp_path, tmp_path_factory, monkeypatch):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    plan = plan_build(request(onnx, tmp_path / "e", profiles=("4:1024:4096",)), None)
    plan = dataclasses.replace(plan, flavor=dataclasses.replace(plan.flavor, targets=()))
    # four heads, 4096 x 4096 logits and as many probabilities of 4 bytes, and a mask: 576 MiB
    assert plan.attention_bytes == 4096 * 4096 * 9 * 4
    monkeypatch.setattr(build, "Cuda", SmallGpu)
    with pytest.raises(Usage, match=r"may need 5\d\d MiB and the GPU has 1 MiB free; choose a smaller --profile"):
        build._check_memory(plan, "9.0", ignore=False)
    assert build._check_memory(plan, "9.0", ignore=True) == "a GPU, 9.0"
    assert build._check_memory(plan, None, ignore=False) is None  # nothing to compare with


def test_a_kernel_that_the_driver_does_not_know_is_refused_before_the_build(tmp_path, tmp_path_factory, monkeypatch):
    from exporter.trt import builder
    from plugins.fused_qk_rope.triton_compile import compile_ptx

    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    made = compile_ptx("float32", 24, "sm_90", heads=4, ptx_version=builder._oldest_ptx("sm_90"))
    assert made.ptx_version == (8, 0)
    job = build._job(request(onnx, tmp_path / "e"), plan_build(request(onnx, tmp_path / "e"), None), tmp_path)
    gpu_flavor = dataclasses.replace(plan_module.choose("tensorrt_rtx", has_gpu=False), targets=())
    this = builder._Build(job, gpu_flavor, None)
    monkeypatch.setattr(builder, "cuda_driver_version", lambda: 12000)
    this._check_driver(made)
    monkeypatch.setattr(builder, "cuda_driver_version", lambda: 11080)
    with pytest.raises(MissingRequirement, match=r"8\.0.*--no-plugin"):
        this._check_driver(made)


def test_warnings_are_kept_and_dangerous_ones_fail_under_strict():
    built = Built(("Subnormal FP16 values detected in weights",), {}, 0, 0, {}, 1)
    build._check_warnings(built, strict=False)
    with pytest.raises(BuildFailed, match="--strict: TensorRT warns: Subnormal"):
        build._check_warnings(built, strict=True)
    build._check_warnings(dataclasses.replace(built, warnings=("Int64 binding",)), strict=True)


# ----------------------------------------------------------------------------------------------------- places and files


def test_another_working_directory_and_strange_names(tmp_path, tmp_path_factory, monkeypatch):
    strange = tmp_path / "ein Ordner mit Ümläuten 图像"
    strange.mkdir()
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    onnx.rename(strange / "das Modell")
    monkeypatch.chdir(strange)
    make_engine(request(Path("das Modell"), Path("die Maschine"), profiles=ONE, plugin=False), QUIET)
    check_files(strange / "die Maschine", read_manifest(strange / "die Maschine"))
    assert str(tmp_path) not in (strange / "die Maschine" / "manifest.json").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_build_leaves_no_partial_file(tmp_path, tmp_path_factory, number, code):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    arguments = ["trt", str(onnx), "-o", str(tmp_path / "e"), "--flavor", "tensorrt_rtx", "--no-plugin"]
    program = f"import sys; from exporter.cli import main; sys.argv[1:] = {arguments!r}; main()"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if "build" in line:
            break
    process.send_signal(number)
    rest = process.stderr.read()
    assert process.wait(60) == code
    if number == signal.SIGINT:
        assert rest.strip().splitlines()[-1] == "kvit-export: interrupted; nothing was written"
    assert list(tmp_path.iterdir()) == [onnx]


def test_a_full_disk_leaves_nothing(tmp_path, tmp_path_factory, monkeypatch):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")

    def full(*_given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "write_manifest", full)
    with pytest.raises(BuildFailed, match="No space left on device"):
        make_engine(request(onnx, tmp_path / "e", profiles=ONE, plugin=False), QUIET)
    assert list(tmp_path.iterdir()) == [onnx]


def test_json_stands_alone_on_stdout(tmp_path, tmp_path_factory, capfd):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    arguments = ["trt", str(onnx), "-o", str(tmp_path / "e"), "--flavor", "tensorrt_rtx", "--no-plugin", "--json"]
    assert cli.run([*arguments, "--profile", "4:16:64"]) == 0
    found = capfd.readouterr()
    summary = json.loads(found.out)
    assert summary["verdict"] == "NOT VALIDATED"
    assert summary["plugin"] == "function"
    assert "attention needs up to" in found.err
    assert cli.run(["validate", str(tmp_path / "e")]) == 3  # there is no golden set
    assert cli.run(["verify", str(tmp_path / "e")]) == 7
    capfd.readouterr()
    assert cli.run(["inspect", str(tmp_path / "e")]) == 0
    shown = capfd.readouterr().out
    for text in (
        "tensorrt_rtx 1",
        "profile profile: 4 to 64 patches (tuned for 16)",
        "plugin (function)",
        "NOT VALIDATED",
    ):
        assert text in shown
    assert cli.run(["inspect", str(tmp_path / "e"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["engine"]["profiles"] == ["profile: 4 to 64 patches (tuned for 16)"]


# ------------------------------------------------------------------------------------------------------------ the cache


def test_the_cache_serves_the_same_build_and_nothing_else(tmp_path, tmp_path_factory, monkeypatch):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx")
    builds = []

    def pretend(job, flavor, progress):
        builds.append(job)
        Path(job.engine).write_bytes(b"vtrt" + bytes([len(builds)]))
        return Built((), {}, 0, 0, {}, 1)

    monkeypatch.setattr(build, "_build", pretend)
    number = iter(range(100))

    def make(folder=onnx, **changes):
        target = tmp_path / f"e{next(number)}"
        made = make_engine(request(folder, target, cache=tmp_path / "cache", profiles=ONE, **changes), QUIET)
        return made.cached, (target / ENGINE_FILE).read_bytes()

    assert make() == (False, b"vtrt\1")
    assert make() == (True, b"vtrt\1")
    assert not make(opt_level=1)[0]
    assert not make(frames="4")[0]
    assert not make(target_sm=("89",))[0]
    assert not make(plugin=False)[0]
    assert not make(workspace_mib=64)[0]
    other = shared_artifact(tmp_path_factory, tmp_path / "half", dtype="bf16")
    assert not make(other)[0]
    weights = artifact(tmp_path / "weights", "tiny-k3")
    assert not make(weights)[0]
    assert make()[0]
    with monkeypatch.context() as patch:
        patch.setattr("plugins.fused_qk_rope.source.source_sha256", lambda: "ab" * 32)
        assert not make()[0]  # another kernel
    with monkeypatch.context() as patch:
        flavor = plan_module.choose("tensorrt_rtx", has_gpu=False)
        patch.setattr(plan_module, "choose", lambda asked, has_gpu: dataclasses.replace(flavor, version="1.8"))
        assert not make()[0]  # another TensorRT
    assert make()[0]
    for engine in (tmp_path / "cache").glob("*/engine"):
        engine.unlink()
        engine.write_bytes(b"vtrX")
    assert not make()[0]  # what lies there is not what was put there


# -------------------------------------------------------------------------------------------------------- the judgement


class Pretender:
    """Runs the ONNX model and says that it is the engine, so that the stage after the build can be seen on a CPU."""

    def __init__(self, onnx: Path, profiles: tuple[Profile, ...], spoil: float):
        self._ort = OrtBackend(onnx / "vision_tower.onnx")
        self.name, self.dtype, self.profiles = "engine", self._ort.dtype, profiles
        self._spoil = spoil

    def describe(self):
        flavor = plan_module.choose("tensorrt_rtx", has_gpu=False)
        return BackendInfo(flavor.name, flavor.version, "a GPU", capability="8.9")

    def latency(self):
        part = Percentiles(1.0, 2.0, 3.0)
        return Latency(2, 10, part, part, part)

    def run(self, pixels, grids):
        return self._ort.run(pixels, grids) * np.float32(self._spoil)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize(("spoil", "code", "verdict"), [(1.0, 0, "PASS"), (1.01, 6, "FAILED")])
def test_where_it_can_run_the_engine_is_judged(tmp_path, tmp_path_factory, monkeypatch, capsys, spoil, code, verdict):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", golden=True, max_patches=480)
    engine = tmp_path / "engine"

    def pretend(job, flavor, progress):
        Path(job.engine).write_bytes(b"vtrt")
        return Built((), {}, 2, 0, {}, 1)

    monkeypatch.setattr(build, "_build", pretend)
    monkeypatch.setattr(build, "cuda_capability", lambda: "8.9")
    monkeypatch.setattr(build, "open_backend", lambda folder, manifest: Pretender(onnx, manifest.profiles, spoil))
    assert cli.run(["trt", str(onnx), "-o", str(engine), "--flavor", "tensorrt_rtx", "--json"]) == code
    manifest = read_manifest(engine)
    assert manifest.validation.judgement.verdict.value == verdict
    report = json.loads((engine / "report.json").read_text())
    assert report["details"][0]["latency"]["gpu"] == {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    assert (engine / "junit.xml").exists()
    runtime = (manifest.runtime.flavour, manifest.runtime.version)
    if code == 0:
        assert verify(engine, gpu="8.9", runtime=runtime).bound_to
    else:
        with pytest.raises(ValidationFailed):
            verify(engine, gpu="8.9", runtime=runtime)
    # the same through validate, with and without a bound on the time
    monkeypatch.setattr(
        "exporter.trt.backend.open_backend", lambda folder, manifest: Pretender(onnx, manifest.profiles, 1)
    )
    capsys.readouterr()
    assert cli.run(["validate", str(engine), "--max-latency", "9.5"]) == 0
    assert cli.run(["validate", str(engine), "--max-latency", "8.5"]) == 6
    assert "9 ms (99th percentile), allowed are 8.5 ms" in capsys.readouterr().err
    assert cli.run(["validate", str(engine), "--backend", "onnxruntime-cpu"]) == 2
    assert cli.run(["validate", str(onnx), "--backend", "engine"]) == 2


def test_elsewhere_the_command_says_what_to_run_where(tmp_path, tmp_path_factory):
    onnx = shared_artifact(tmp_path_factory, tmp_path / "onnx", golden=True, max_patches=480)
    made = make_engine(request(onnx, tmp_path / "e", target_sm=("89",), plugin=False), QUIET)
    assert made.report is None
    assert re.search(
        r"run kvit-export validate .*e on a GPU of compute capability 8\.9 with tensorrt_rtx 1", made.advice
    )
    assert (tmp_path / "e" / "golden" / "golden.json").exists()
    assert made.manifest.golden_sha256 == read_manifest(onnx).golden_sha256
    assert made.manifest.source.onnx_sha256 == read_manifest(onnx).artifact_sha256
    assert cli.run(["validate", str(tmp_path / "e")]) == 8
    assert cli.run(["verify", str(tmp_path / "e")]) == 7
