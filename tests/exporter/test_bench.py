"""``kvit-export bench`` as a user meets it: what is measured, what is compared, what is said when something cannot."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest

from exporter import cli
from exporter.bench import stage
from exporter.bench.compare import allowed_difference, difference_of
from exporter.bench.report import SCHEMA_VERSION, BenchReport
from exporter.bench.worker import TakenCase, time_case
from exporter.errors import BadInput
from exporter.manifest import read_manifest, write_manifest
from exporter.records import read_record
from exporter.validation.backends import CaseSkippedError
from exporter.validation.evidence import BackendInfo
from exporter.validation.gpu import cuda_capability
from exporter.validation.latency import Latency, Percentiles
from tests.exporter import fake_gpu, samples  # nothing that imports torch: processes import this module

THIS = "tests.exporter.test_bench"
QUICK = ("--repeats", "3", "--warmup", "1", "--threads", "1")
# two fp32 programs of one tiny tower: sums in another order, 5e-7 in all of this project's exports
FP32_AGREES = 5e-6


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["bench", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def said(err: str) -> list[str]:
    """What stderr says beside the progress."""
    assert "Traceback" not in err
    return [line for line in err.splitlines() if not line.startswith("[")]


def make(folder: Path, seed: int) -> Path:
    """A packed fp32 artifact of the tiny tower, from the trace that all tests share."""
    from exporter import onnx_export
    from exporter.onnx_artifact import OnnxRequest, make_onnx
    from model.graph import GraphForm
    from tests.exporter import towers

    form = GraphForm("plugin", "plain", "packed")
    request = OnnxRequest(f"random:tiny?seed={seed}", folder, "fp32", form, opset=20, golden=False)
    with mock.patch.object(onnx_export, "trace_one_block", lambda _config, options: towers.trace_of("tiny", options)):
        make_onnx(request, lambda *_: None)
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Path:
    from tests.exporter import artifacts

    return artifacts.shared_artifact(tmp_path_factory, tmp_path_factory.mktemp("bench") / "right")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("bench") / "wrong", seed=1)


@pytest.fixture(scope="module")
def side_by_side(right: Path, tmp_path_factory) -> tuple[BenchReport, str, str]:
    """One run of the live tower beside its export, which several tests look at: report, stdout, stderr."""
    output = tmp_path_factory.mktemp("bench") / "bench.json"
    arguments = ["random:tiny", right, "--case", "4x6", "--case", "2x6x4", "--case", "4x4+2x6"]
    done = subprocess.run(
        [sys.executable, "-c", "from exporter.cli import main; main()", "bench", *map(str, arguments), *QUICK,
         "--json", "-o", str(output)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(output.read_text())
    return read_record(BenchReport, output, SCHEMA_VERSION), done.stdout, done.stderr


# ----------------------------------------------------------------------------------------------------- what is measured


def test_the_live_tower_and_its_export_stand_side_by_side(side_by_side) -> None:
    report, _, err = side_by_side
    assert said(err) == []
    assert [(case.name, case.frames, case.tokens, case.rows) for case in report.cases] == [
        ("4x6", 1, 24, 6),
        ("2x6x4", 2, 48, 6),
        ("4x4+2x6", 1, 28, 7),
    ]
    tower, graph = report.targets
    assert (tower.kind, tower.backend, tower.dtype) == ("tower", "torch-cpu", "float32")  # the default on a CPU
    assert (graph.kind, graph.backend, graph.dtype) == ("onnx", "onnxruntime-cpu", "float32")
    assert tower.info.kind == "torch" and graph.info.providers == ("CPUExecutionProvider",)
    assert (tower.threads, tower.tf32, graph.tf32) == (1, False, False)
    for target in report.targets:
        assert target.status == "measured" and target.reason == "" and target.load_seconds > 0
        for found in target.cases:
            assert found.status == "measured" and (found.warmup, found.repeats) == (1, 3)
            assert found.first_ms > 0
            assert 0 < found.call_ms.p50 <= found.call_ms.p90 <= found.call_ms.p99
            assert found.parts is None  # neither times a GPU here


def test_rates_and_ratios_follow_from_the_medians(side_by_side) -> None:
    report, _, _ = side_by_side
    for index, case in enumerate(report.cases):
        found = [target.cases[index] for target in report.targets]
        medians = [entry.call_ms.p50 for entry in found]
        for entry in found:
            assert entry.case == case.name
            assert entry.tokens_per_second == pytest.approx(1000 * case.tokens / entry.call_ms.p50)
            assert entry.times_first == pytest.approx(entry.call_ms.p50 / medians[0])
            assert entry.times_fastest == pytest.approx(entry.call_ms.p50 / min(medians))
        assert min(entry.times_fastest for entry in found) == 1


def test_all_targets_get_the_pixels_of_the_golden_sets_noise(side_by_side, right: Path) -> None:
    """The difference of a pair is what the two give on those pixels, computed here without the code under test."""
    from exporter.validation.backends import OrtBackend
    from exporter.validation.golden_cases import GoldenOptions, PlannedCase, case_pixels
    from model.preprocess_rule import RULES
    from tests.exporter import towers

    report, _, _ = side_by_side
    case = PlannedCase("4x6-noise", "noise", 1, ((4, 6),))
    pixels = case_pixels(case, GoldenOptions("float32"), RULES["kimi_k25"])
    with OrtBackend(right / "vision_tower.onnx", threads=1) as backend:
        graph = backend.run(pixels, np.array(case.grids))
    expected = towers.relative(graph, towers.live("tiny", "fp32", pixels, list(case.grids)))
    assert [(entry.case, entry.first, entry.second) for entry in report.differences] == [
        (entry.name, 1, 2) for entry in report.cases
    ]
    found = report.differences[0]
    # the same two programs on the same pixels; a few ulp for other splits of sums in another process
    assert found.relative_l2 == pytest.approx(expected, rel=0.5)
    assert all(entry.relative_l2 < FP32_AGREES and entry.explained for entry in report.differences)


@pytest.mark.parametrize("size", [(1, ((4, 6),)), (1, ((16, 16),))])
def test_the_pixels_are_those_of_golden_sets(size) -> None:
    from exporter.bench.cases import cases_of, grids_of, pixels_of
    from exporter.validation.golden_cases import GoldenOptions, PlannedCase, case_pixels, size_text
    from model.preprocess_rule import RULES

    (case,) = cases_of([size], None)
    golden = PlannedCase(f"{size_text(size)}-noise", "noise", *size)
    np.testing.assert_array_equal(pixels_of(case), case_pixels(golden, GoldenOptions("float32"), RULES["kimi_k25"]))
    np.testing.assert_array_equal(grids_of(case), size[1])


def test_machine_settings_and_the_exact_command_are_recorded(side_by_side, right: Path) -> None:
    report, _, _ = side_by_side
    assert report.command.startswith(f"kvit-export bench random:tiny {right} --case 4x6 --case 2x6x4 --case 4x4+2x6 ")
    assert (report.settings.repeats, report.settings.warmup, report.settings.threads) == (3, 1, 1)
    machine = report.machine
    assert machine.cpu and machine.cpus == len(os.sched_getaffinity(0))
    import onnxruntime
    import torch

    assert machine.versions["onnxruntime"] == onnxruntime.__version__
    assert machine.versions["torch"] == torch.__version__
    assert report.targets[1].sha256 == read_manifest(right).artifact_sha256


def test_the_table_shows_every_target_and_case(right: Path, capsys) -> None:
    code, out, err = run(capsys, right, right, "--case", "4x6", *QUICK)
    assert code == 0 and said(err) == []
    assert "onnxruntime-cpu" in out and "4x6" in out and "float32" in out and "tokens/s" in out
    assert max(map(len, out.splitlines())) <= 80  # as wide as a log
    assert not any(line.rstrip().endswith("!") for line in out.splitlines())  # the same file twice


# ---------------------------------------------------------------------------------------- what computes something else


def poisoned(folder: Path) -> dict[str, str]:
    """An environment in which importing torch leaves a trace and fails."""
    (folder / "torch").mkdir(parents=True)
    trace = folder / "imported"
    (folder / "torch" / "__init__.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nraise ModuleNotFoundError('no torch', name='torch')\n"
    )
    paths = [str(folder), str(Path(__file__).parents[2])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_another_models_export_is_marked_and_named_and_torch_is_never_imported(
    right: Path, wrong: Path, tmp_path: Path
) -> None:
    environment = poisoned(tmp_path / "poison")
    command = [sys.executable, "-c", "from exporter.cli import main; main()", "bench", str(right), str(wrong)]
    done = subprocess.run(
        [*command, "--case", "4x6", *QUICK, "-o", str(tmp_path / "b.json")],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "poison" / "imported").exists()
    (line,) = said(done.stderr)
    assert line.startswith("kvit-export: ")
    assert "4x6" in line and "#1" in line and "#2" in line and "do not compare" in line
    assert any(line.rstrip().endswith("!") for line in done.stdout.splitlines())
    (found,) = read_record(BenchReport, tmp_path / "b.json", SCHEMA_VERSION).differences
    assert not found.explained
    # independent towers with normal outputs are orthogonal: |a - b| / |b| is about sqrt(2)
    assert 1 < found.relative_l2 < 2


def test_without_torch_a_source_is_a_row_with_its_reason(right: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from exporter.cli import main; main()", "bench", "random:tiny", str(right),
         "--case", "4x6", *QUICK, "--json"],
        capture_output=True, text=True, check=False, env=poisoned(tmp_path / "poison"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tower, graph = json.loads(done.stdout)["targets"]
    assert tower["status"] == "cannot run" and "torch" in tower["reason"] and "kvit-export[" in tower["reason"]
    assert graph["status"] == "measured" and graph["cases"][0]["times_first"] == 1


def test_what_two_dtypes_explain_is_what_the_gate_admits_of_each() -> None:
    """3e-2 and 5e-3 are the gate's highest floors, 1e-5 its limit in fp32 (docs/validation.md); independent errors."""
    assert allowed_difference("bfloat16", "bfloat16") == pytest.approx(math.sqrt(2) * 3e-2)
    assert allowed_difference("float16", "bfloat16") == pytest.approx(math.sqrt(25e-6 + 9e-4))
    assert allowed_difference("float32", "float32") == pytest.approx(math.sqrt(2) * 1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_honest_half_precision_is_not_marked(dtype: str) -> None:
    """Live towers against fp32 on unrounded pixels, as bench gives them: their rounding is part of the difference."""
    from tests.exporter import towers

    name = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    pixels = towers.noise(1, [(16, 16)], "fp32")
    half, full = (towers.live("tiny", kind, pixels, [(16, 16)]) for kind in (dtype, "fp32"))
    assert difference_of("c", (1, name, half), (2, "float32", full)).explained
    other = towers.run_live(towers.tower_of("tiny", dtype, seed=1), pixels, [(16, 16)])
    assert not difference_of("c", (1, name, other), (2, "float32", full)).explained


@pytest.mark.parametrize("spoilt", ["nan", "shape"])
def test_what_cannot_be_compared_is_not_explained(spoilt: str) -> None:
    first = np.ones((4, 8), np.float32)
    second = np.full((4, 8), np.nan, np.float32) if spoilt == "nan" else np.ones((4, 9), np.float32)
    for pair in ((first, second), (second, first)):
        found = difference_of("c", (1, "float32", pair[0]), (2, "float32", pair[1]))
        assert found.relative_l2 is None and not found.explained


def test_the_finer_dtype_is_the_reference() -> None:
    coarse, fine = np.full((1, 4), 2, np.float32), np.ones((1, 4), np.float32)
    for first, second in (
        ((1, "bfloat16", coarse), (2, "float32", fine)),
        ((1, "float32", fine), (2, "bfloat16", coarse)),
    ):
        assert difference_of("c", first, second).relative_l2 == 1


# ------------------------------------------------------------------------------- what cannot run, in part or all


def changed(right: Path, folder: Path, **changes: object) -> Path:
    """A copy whose manifest says something else about the graph."""
    shutil.copytree(right, folder)
    write_manifest(folder, dataclasses.replace(read_manifest(folder), **changes))
    return folder


def test_cases_that_a_graph_does_not_take_are_a_dash_with_a_reason(right: Path, tmp_path: Path, capsys) -> None:
    manifest = read_manifest(right)
    source = dataclasses.replace(manifest.source, config={**manifest.source.config, "pos_emb_time": 1})
    single = changed(right, tmp_path / "single", packing="single", source=source)
    bare = tmp_path / "bare"
    bare.mkdir()
    model = onnx.load(single / "vision_tower.onnx", load_external_data=False)
    for entry in model.metadata_props:
        if entry.key == "kvit.packing":
            entry.value = "single"
    onnx.save(model, bare / "vision_tower.onnx")
    shutil.copy(single / "vision_tower.onnx.data", bare)
    cases = ["--case", "2x2x4", "--case", "4x4+2x6", "--case", "4x6"]
    code, out, _ = run(capsys, single, bare / "vision_tower.onnx", *cases, *QUICK, "-o", tmp_path / "b.json")
    assert code == 0
    folder, file = read_record(BenchReport, tmp_path / "b.json", SCHEMA_VERSION).targets
    assert [case.status for case in folder.cases] == ["skipped", "skipped", "measured"]
    assert "2 frames" in folder.cases[0].reason and "takes 1" in folder.cases[0].reason
    assert "2 items" in folder.cases[1].reason and "packed" in folder.cases[1].reason
    assert [case.status for case in file.cases] == ["measured", "skipped", "measured"]
    assert folder.cases[1].call_ms is None and folder.cases[1].first_ms is None
    assert f"#1 2x2x4 skipped: {folder.cases[0].reason}" in " ".join(out.split())
    (line,) = [line for line in out.splitlines() if line.split()[:2] == ["2x2x4", "1"]]
    assert set(line.split()[2:]) == {"-"}
    # the first target did not run it: the second is what the others are measured by
    assert file.cases[0].times_first == 1


needs_no_gpu = pytest.mark.skipif(cuda_capability() is not None, reason="there is a GPU here")


@needs_no_gpu
def test_a_target_that_cannot_run_here_stops_no_other(right: Path, tmp_path: Path, capsys) -> None:
    engine = tmp_path / "x.engine"
    engine.write_bytes(b"ftrt no engine at all")
    code, out, err = run(
        capsys, engine, "random:tiny", right, "--device", "cuda", "--case", "4x6", *QUICK, "-o", tmp_path / "b.json"
    )
    assert code == 0 and said(err) == []
    found = read_record(BenchReport, tmp_path / "b.json", SCHEMA_VERSION).targets
    assert [target.status for target in found] == ["cannot run", "cannot run", "measured"]
    assert "cuda-bindings" in found[0].reason or "CUDA" in found[0].reason or "TensorRT" in found[0].reason
    assert "no CUDA GPU" in found[1].reason
    assert all(case.status == "skipped" and case.reason for target in found[:2] for case in target.cases)
    assert f"#2 cannot run: {found[1].reason}" in " ".join(out.split())


@needs_no_gpu
def test_nothing_that_runs_is_a_missing_requirement(capsys) -> None:
    code, out, err = run(capsys, "random:tiny", "--device", "cuda", "--case", "4x6", "--json")
    assert code == 8
    (line,) = said(err)
    assert "no CUDA GPU" in line and "#1" in line
    assert json.loads(out)["targets"][0]["status"] == "cannot run"


def test_an_onnx_file_that_cannot_be_loaded_is_bad_input_and_the_others_are_still_shown(
    right: Path, tmp_path: Path, capsys
) -> None:
    shutil.copy(right / "vision_tower.onnx", tmp_path)  # without its weights
    bare = tmp_path / "vision_tower.onnx"
    code, out, err = run(capsys, bare, right, "--case", "4x6", *QUICK, "-o", tmp_path / "b.json")
    assert code == 3
    (line,) = said(err)
    assert "vision_tower.onnx" in line and "bad input: " in out
    found = read_record(BenchReport, tmp_path / "b.json", SCHEMA_VERSION).targets
    assert [target.status for target in found] == ["bad input", "measured"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "SOURCE|ARTIFACT"),
        (["random:tiny", "--case", "3x4"], 2, "side of 3"),
        (["random:tiny", "--case", "5x4x4"], 2, "5 frames"),
        (["random:tiny", "--case", "big"], 2, "HxW"),
        (["random:tiny", "--case", "4x4", "--case", "4x4"], 2, "twice"),
        (["random:tiny", "--repeats", "0"], 2, "--repeats"),
        (["random:tiny", "--max-seconds", "0"], 2, "--max-seconds"),
        (["random:tiny", "--max-seconds", "nan"], 2, "--max-seconds"),
        (["random:tiny", "--device", "auto", "--device", "cpu"], 2, "auto"),
        (["random:tiny", "--backend", "onnxruntime-cpu"], 2, "--backend"),
        (["ARTIFACT", "--dtype", "fp16"], 2, "--dtype"),
        (["ARTIFACT", "--device", "cpu"], 2, "--device"),
        (["random:tiny", "--flavor", "tensorrt"], 2, "--flavor"),
        (["random:tiny", "-o", "DIR/no/b.json"], 2, "b.json"),
        (["random:tiny", "-o", "DIR/b.txt"], 2, ".json"),
        (["random:tiny", "-o", "ARTIFACT/manifest.json"], 2, "manifest.json"),
        (["random:nothing"], 3, "preset 'nothing'"),
        (["/no/such/folder"], 3, "/no/such/folder"),
        (["/no/such/file.onnx"], 3, "/no/such/file.onnx"),
        (["/no/such/file.engine"], 3, "/no/such/file.engine"),
        (["DIR/notes.txt"], 3, "notes.txt"),
        (["ARTIFACT", "DIR/changed"], 3, "vision_tower.onnx.data"),
        (["DIR/empty.engine"], 3, "empty.engine"),
    ],
)
def test_usage_and_bad_input(
    arguments: list[str], code: int, words: str, right: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """All of this is known before anything is loaded."""
    monkeypatch.setattr(stage, "WORKER", "nothing.may:start")
    (tmp_path / "notes.txt").write_text("no artifact")
    (tmp_path / "empty.engine").touch()
    shutil.copytree(right, tmp_path / "changed")
    with open(tmp_path / "changed" / "vision_tower.onnx.data", "ab") as file:
        file.write(b"more")
    given = [text.replace("ARTIFACT", str(right)).replace("DIR", str(tmp_path)) for text in arguments]
    found, out, err = run(capsys, *given)
    (line,) = said(err)
    assert (found, out) == (code, "") and words in line, line


def test_an_earlier_report_is_replaced_and_nothing_else_is(right: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "b.json"
    for _ in range(2):
        assert run(capsys, right, "--case", "2x2", *QUICK, "-o", output)[0] == 0
    assert read_record(BenchReport, output, SCHEMA_VERSION).cases[0].name == "2x2"
    before = output.read_bytes()
    with mock.patch.object(stage, "run_bench", side_effect=KeyboardInterrupt):
        assert run(capsys, right, "--case", "2x2", *QUICK, "-o", output)[0] == 130
    assert output.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == ["b.json"]


def test_what_cannot_be_written_is_still_shown(right: Path, tmp_path: Path, capsys) -> None:
    with mock.patch("exporter.files.write_text", side_effect=OSError(28, "No space left on device")):
        code, out, err = run(capsys, right, "--case", "2x2", *QUICK, "-o", tmp_path / "b.json")
    assert code == 2 and "No space left on device" in said(err)[0]
    assert "onnxruntime-cpu" in out and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gpu", [None, "9.0"])
def test_default_cases_fit_the_machine(gpu: str | None) -> None:
    expected = ["16x16", "32x32"] if gpu is None else ["16x16", "32x32", "64x64"]
    assert [case.name for case in stage.cases_of((), gpu)] == expected


def test_cuda_is_a_default_backend_only_where_onnxruntime_has_it(right: Path, monkeypatch) -> None:
    import onnxruntime

    from exporter.bench.targets import resolve

    def backends() -> list[str]:
        return [target.backend for target in resolve((str(right),), devices=("auto",), backends=())]

    assert backends() == ["onnxruntime-cpu"]
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: both)
    assert backends() == ["onnxruntime-cpu", "onnxruntime-cuda"]


# ------------------------------------------------------------------------------------------------------------- engines


class SlowFirst(fake_gpu.FakeContext):
    """Computes what it should; its first call of each shape takes a quarter of a second longer, as real ones do."""

    seen: set[object] = set()

    def execute_async_v3(self, stream):
        shape = tuple(self.shapes.items())
        if shape not in self.seen:
            self.seen.add(shape)
            time.sleep(0.25)
        return super().execute_async_v3(stream)


def serve_fake_engine(connection):
    """The real worker over a stand-in for GPU and TensorRT; the file's first word is the engine's dtype."""
    from exporter.bench import loading, worker
    from exporter.trt import runtime
    from exporter.trt.cuda import Cuda

    order = connection.recv()
    dtype = Path(order.target.path).read_text().split()[0]
    flavor = fake_gpu.fake_flavor(fake_gpu.FakeEngine(dtype))
    with (
        mock.patch.object(fake_gpu, "FakeContext", SlowFirst),
        mock.patch.object(runtime, "Cuda", return_value=Cuda(api=fake_gpu.FakeCudaApi())),
        mock.patch.object(loading, "choose", return_value=flavor),
        mock.patch.object(loading, "check_place", return_value=flavor),
    ):
        worker.serve_order(order, connection)


def engine_folder(folder: Path, dtype: str, **changes: object) -> Path:
    from model.config import preset

    folder.mkdir()
    (folder / "vision_tower.engine").write_text(f"{dtype} engine")
    manifest = samples.manifest_of(folder, "engine", dtype=dtype)
    source = dataclasses.replace(manifest.source, config=preset("tiny").to_dict())
    write_manifest(folder, dataclasses.replace(manifest, source=source, profiles=fake_gpu.PROFILES, **changes))
    return folder


def test_engines_report_first_call_and_gpu_part_and_skip_what_no_profile_takes(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(stage, "WORKER", f"{THIS}:serve_fake_engine")
    folder = engine_folder(tmp_path / "engine", "bfloat16")
    bare = tmp_path / "bare.engine"
    bare.write_text("float32 engine")
    cases = ["--case", "4x6", "--case", "64x64", "--case", "4x16x16"]
    code, out, err = run(capsys, folder, bare, *cases, "--repeats", "5", "--warmup", "2", "-o", tmp_path / "b.json")
    assert code == 0, err
    report = read_record(BenchReport, tmp_path / "b.json", SCHEMA_VERSION)
    for target, dtype in zip(report.targets, ("bfloat16", "float32"), strict=True):
        small, large, clip = target.cases
        assert (target.backend, target.dtype, target.info.device) == ("engine", dtype, "Fake GPU")
        assert large.status == "skipped" and "4096 patches" in large.reason
        for found in (small, clip):
            assert found.status == "measured" and (found.parts.warmup, found.parts.repeats) == (2, 5)
            assert found.first_ms > 250 > found.call_ms.p99  # once, apart, and in no percentile
            assert 0 < found.parts.gpu.p50 < found.call_ms.p50
    assert report.targets[0].sha256 == read_manifest(folder).artifact_sha256
    # a formula in float64 rounded to bf16: the two agree as well as bf16 does
    assert all(entry.explained and 0 < entry.relative_l2 < 1e-2 for entry in report.differences)
    assert len(report.differences) == 2 and "GPU" in out


def test_a_call_of_an_engine_is_one_call(tmp_path: Path) -> None:
    from exporter.bench.loading import EngineHere

    pixels = np.random.default_rng(0).random((1, 16, 588), dtype=np.float32)
    grids = np.array([[4, 4]])
    with EngineHere(fake_gpu.open_fake(tmp_path, fake_gpu.FakeEngine())) as backend:
        assert backend.latency() is None
        # the stand-in computes in float64 and rounds once to fp32
        np.testing.assert_allclose(backend.run_native(pixels, grids), fake_gpu.formula(pixels, grids), rtol=1e-6)
        assert (backend.latency().warmup, backend.latency().repeats) == (0, 1)
        with pytest.raises(CaseSkippedError, match="4096 patches"):
            backend.run_native(np.zeros((1, 4096, 588), np.float32), np.array([[64, 64]]))


def test_an_engine_that_is_replaced_is_not_measured(tmp_path: Path) -> None:
    from exporter.bench import loading
    from exporter.bench.targets import Target

    engine = fake_gpu.open_fake(tmp_path, fake_gpu.FakeEngine())
    target = Target(1, "x.engine", "engine", "engine", str(tmp_path / "x.engine"), sha256=samples.SHA)
    with (
        mock.patch.object(loading, "choose", return_value=engine.flavor),
        mock.patch.object(loading, "Engine", return_value=engine),
        pytest.raises(BadInput, match="was replaced"),
    ):
        loading.open_target(target, None)


def test_another_gpu_or_tensorrt_is_a_reason(tmp_path: Path, capsys) -> None:
    folder = engine_folder(tmp_path / "engine", "float32", targets=("1.0",))
    code, _, err = run(capsys, folder, "--case", "4x6", "--json")
    assert code == 8
    assert "compute capability 1.0" in said(err)[0]


# ---------------------------------------------------------------------------------------------------- crashes and times


class StandIn:
    """A backend without a model that dies on 4x6."""

    name, dtype = "engine", "float32"

    def describe(self):
        return BackendInfo("tensorrt", "10.0", "a GPU")

    def run_native(self, pixel_values, grid_hws):
        if grid_hws.tolist() == [[4, 6]]:
            os.abort()
        if grid_hws.tolist() == [[6, 6]]:
            raise RuntimeError("CUDA error: an illegal memory access")
        return pixel_values[0].reshape(-1, 4 * 588)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def serve_stand_in(connection):
    from exporter.bench import worker

    order = connection.recv()
    opened = worker.OpenBackend(StandIn(), "float32", 1, None)
    with mock.patch.object(worker, "open_target", return_value=opened):
        worker.serve_order(order, connection)


def test_a_crash_costs_one_case(right: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(stage, "WORKER", f"{THIS}:serve_stand_in")
    cases = ["--case", "4x6", "--case", "2x2", "--case", "6x6", "--case", "4x4"]
    code, _, err = run(capsys, right, *cases, *QUICK, "-o", tmp_path / "b.json")
    assert code == 0, err
    (target,) = read_record(BenchReport, tmp_path / "b.json", SCHEMA_VERSION).targets
    assert [case.status for case in target.cases] == ["lost", "measured", "lost", "measured"]
    assert "SIGABRT" in target.cases[0].reason and "illegal memory access" in target.cases[2].reason


class Clocked:
    """A backend whose first call takes 60 s and every other one 1 s, by a clock of its own."""

    dtype = "float32"

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def run_native(self, _pixels, _grids):
        self.now += 1.0 if self.calls else 60.0
        self.calls += 1
        return np.full((1, 1), self.calls, np.float32)

    def latency(self):
        part = Percentiles(self.calls, self.calls, self.calls)
        return Latency(0, 1, Percentiles(0.25, 0.25, 0.25), part, Percentiles(0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("seconds", "warmup", "repeats", "expected"),
    [
        (1e9, 2, 10, (2, 10)),
        (1e9, 0, 1, (0, 1)),
        (7.0, 2, 10, (2, 5)),  # two to warm up and five within seven seconds
        (1.5, 4, 10, (2, 3)),  # never fewer than three
        (1.5, 4, 2, (2, 2)),  # unless fewer are asked for
    ],
)
def test_calls_are_timed_one_by_one_within_a_budget(seconds, warmup, repeats, expected) -> None:
    backend = Clocked()
    found = time_case(
        backend, np.zeros(1), np.zeros(1), warmup=warmup, repeats=repeats, seconds=seconds,
        tick=lambda *_: None, clock=lambda: backend.now,
    )  # fmt: skip
    assert isinstance(found, TakenCase)
    assert found.first_ms == 60_000
    assert (found.warmup, len(found.calls_ms)) == expected
    assert set(found.calls_ms) == {1000.0}
    first = 2 + found.warmup  # number of the first call that counts
    assert [part.gpu.p50 for part in found.parts] == list(range(first, first + expected[1]))
    assert backend.calls == 1 + sum(expected)


def through(kind):
    """`run_live` with a tower whose patches are of a subclass of tensors."""
    from exporter.validation.record import run_live

    return lambda tower, pixels, grids: run_live(lambda x, thws: tower(x.as_subclass(kind), thws), pixels, grids)


def test_the_live_tower_on_a_gpu_times_its_parts(monkeypatch) -> None:
    """CUDA's events with a stand-in: the order in which they are recorded, and what lies between them."""
    import torch

    from exporter.validation import torch_backend

    told: list[str] = []

    class Event:
        count = 0

        def __init__(self, enable_timing: bool = False):
            assert enable_timing
            self.number = Event.count
            Event.count += 1

        def record(self):
            told.append(f"event{self.number}")

        def synchronize(self):
            told.append(f"wait{self.number}")

        def elapsed_time(self, end):
            return 10.0 * self.number + end.number

    class Tower:
        def __call__(self, patches, thws):
            assert patches.device.type == "meta"
            told.append("tower")
            return [torch.ones(1, 8)]

    class Patches(torch.Tensor):
        """Pixels that tell when they are copied."""

        def to(self, *arguments, **options):
            told.append("copy")
            return super().to(*arguments, **options)

    monkeypatch.setattr(torch_backend, "run_live", through(Patches))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch_backend, "describe_torch", lambda device: BackendInfo("torch", "2", device))
    monkeypatch.setattr(torch_backend, "live_tower", lambda *_, **__: Tower())
    with torch_backend.TorchBackend("random:tiny", "bfloat16", "cuda") as backend:
        monkeypatch.setattr(backend, "_device", "meta")
        assert backend.latency() is None
        rows = backend.run(np.zeros((1, 4, 588), np.float32), np.array([[2, 2]]))
    np.testing.assert_array_equal(rows, np.ones((1, 8)))
    assert told == ["event0", "copy", "event1", "tower", "event2", "event3", "wait3"]
    found = backend.latency()
    assert (found.warmup, found.repeats) == (0, 1)
    assert (found.host_to_device.p50, found.gpu.p99, found.device_to_host.p90) == (1.0, 12.0, 23.0)


def test_the_live_tower_is_run_as_callers_run_it(monkeypatch) -> None:
    """In inference mode, whether the gate or a clock waits: without it a fast form looks at every weight first."""
    import torch

    from exporter.validation import torch_backend

    seen: list[tuple[bool, bool]] = []

    def tower(patches, _thws):
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return [patches[:1, :8]]

    monkeypatch.setattr(torch_backend, "live_tower", lambda *_, **__: tower)
    with torch_backend.TorchBackend("random:tiny", "float32", "cpu") as backend:
        for call in (backend.run, backend.run_native):
            call(np.zeros((1, 4, 588), np.float32), np.array([[2, 2]]))
    assert seen == [(True, False)] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_live_towers_result_is_of_its_dtype(dtype: str) -> None:
    """What is timed; the same numbers as the gate sees."""
    from exporter.trt.arrays import numpy_dtype
    from exporter.validation.torch_backend import TorchBackend

    pixels = np.random.default_rng(1).random((1, 24, 588), dtype=np.float32)
    with TorchBackend("random:tiny", dtype, "cpu") as backend:
        native, widened = (run(pixels, np.array([[4, 6]])) for run in (backend.run_native, backend.run))
    assert (native.dtype, widened.dtype) == (numpy_dtype(dtype), np.float32)
    np.testing.assert_array_equal(native.astype(np.float32), widened)


def test_the_live_tower_on_a_cpu_has_no_gpu_part() -> None:
    from exporter.validation.torch_backend import TorchBackend

    with TorchBackend("random:tiny", "float32", "cpu") as backend:
        backend.run(np.zeros((1, 4, 588), np.float32), np.array([[2, 2]]))
        assert backend.latency() is None


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom exporter.cli import run\ncode = run(['bench', '--help'])\n"
        "bad = {'torch', 'onnx', 'onnxruntime', 'numpy', 'triton', 'tensorrt', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for option in ("--case", "--dtype", "--device", "--backend", "--repeats", "--warmup", "--json"):
        assert option in done.stdout
    assert "bench" in cli.COMMANDS


def test_bad_input_while_an_order_is_opened_is_ours_to_tell(tmp_path: Path) -> None:
    """A checkpoint that is damaged behind its header shows only when its tensors are read, in the other process."""
    from exporter.bench.loading import open_target
    from exporter.bench.targets import Target
    from model.errors import CheckpointError

    target = Target(1, "random:tiny", "tower", "torch-cpu", dtype="float32", device="cpu")
    with (
        mock.patch("exporter.validation.torch_backend.TorchBackend", side_effect=CheckpointError("shard 2 is cut")),
        pytest.raises(BadInput, match="shard 2 is cut"),
    ):
        open_target(target, 1)
