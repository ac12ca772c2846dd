"""`verify` believes hashes and numbers, never a verdict (pitfalls 12 and 26, and the exit codes)."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import subprocess
import sys

import pytest

from exporter.errors import BadInput, KvitError, NotValidated, ValidationFailed
from exporter.manifest import Validation, read_manifest, record_files, write_manifest
from exporter.validation.evidence import NOTHING_FINITE, Profile, Shape
from exporter.validation.gate import Verdict, judge
from exporter.validation.verify import verify
from tests.exporter.samples import ORT, TENSORRT, TORCH, golden_evidence, with_case, write_artifact

HERE = {"gpu": "9.0", "runtime": ("tensorrt", "10.13.2.6")}

# its corners are the sizes of golden cases
PROFILES = (Profile("p", Shape(1, 4, 1), Shape(1, 4, 1), Shape(2, 324, 1)),)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    write_artifact(folder / "onnx", "onnx")
    (folder / "engine").mkdir()
    shutil.copytree(folder / "onnx" / "golden", folder / "engine" / "golden")
    write_artifact(folder / "engine", "engine", profiles=PROFILES)
    return folder


@pytest.fixture
def onnx_folder(template, tmp_path):
    return shutil.copytree(template / "onnx", tmp_path / "build")


@pytest.fixture
def engine_folder(template, tmp_path):
    return shutil.copytree(template / "engine", tmp_path / "engine")


def store(folder, evidence=None, judgement=None, **changes):
    """Write another validation block by hand, with hashes that fit the files."""
    manifest = read_manifest(folder)
    evidence = evidence or manifest.validation.evidence
    validation = Validation(
        "2025-01-01T00:00:00+00:00",
        manifest.artifact_sha256,
        manifest.golden_sha256,
        evidence,
        judgement or judge(evidence),
    )
    write_manifest(folder, dataclasses.replace(manifest, validation=dataclasses.replace(validation, **changes)))


def code(folder, **options):
    with pytest.raises(KvitError) as caught:
        verify(folder, **options)
    return caught.value.exit_code


def test_a_validated_onnx_artifact_is_verified_anywhere(onnx_folder):
    found = verify(onnx_folder)
    assert (found.artifact, found.kind, found.cases, found.bound_to) == ("vision_tower.onnx", "onnx", 6, "")
    assert verify(onnx_folder, gpu="8.9", runtime=("tensorrt", "11.1")) == found


def test_a_validated_engine_is_verified_where_it_was_validated(engine_folder):
    assert verify(engine_folder, **HERE).bound_to == "compute capability 9.0, tensorrt 10.13.2.6"
    assert verify(engine_folder, anywhere=True).bound_to == ""


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "8.9"},
        {"gpu": None},
        {"gpu": "9"},
        {"runtime": None},
        {"runtime": ("tensorrt", "10.13.2.7")},
        {"runtime": ("tensorrt_rtx", "10.13.2.6")},
        {"gpu": None, "runtime": None},
    ],
    ids=str,
)
def test_another_gpu_or_tensorrt_is_not_validated(engine_folder, change):
    with pytest.raises(NotValidated) as caught:
        verify(engine_folder, **(HERE | change))
    assert "--anywhere" in caught.value.format_message()
    verify(engine_folder, anywhere=True, **(HERE | change))


def test_both_sides_are_named(engine_folder):
    with pytest.raises(NotValidated, match=r"compute capability 9\.0, here is 8\.9"):
        verify(engine_folder, **(HERE | {"gpu": "8.9"}))
    with pytest.raises(NotValidated, match=r"tensorrt 10\.13\.2\.6, here is tensorrt 11\.1"):
        verify(engine_folder, **(HERE | {"runtime": ("tensorrt", "11.1")}))


def test_an_engine_validated_with_another_tensorrt_than_built_it(engine_folder):
    evidence = read_manifest(engine_folder).validation.evidence
    store(engine_folder, dataclasses.replace(evidence, backend=dataclasses.replace(TENSORRT, version="11.1")))
    with pytest.raises(NotValidated, match="was built by"):
        verify(engine_folder, gpu="9.0", runtime=("tensorrt", "11.1"))


@pytest.mark.parametrize("name", ["vision_tower.onnx", "golden/golden.json", "golden/golden.safetensors"])
def test_a_changed_file_is_bad_input(onnx_folder, name):
    path = onnx_folder / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert code(onnx_folder) == 3
    path.write_bytes(b"")
    assert code(onnx_folder) == 3
    path.unlink()
    assert code(onnx_folder) == 3


def test_a_changed_file_whose_hash_was_updated_is_not_the_one_that_was_judged(onnx_folder):
    (onnx_folder / "vision_tower.onnx").write_bytes(b"another")
    manifest = dataclasses.replace(read_manifest(onnx_folder), files=record_files(onnx_folder))
    write_manifest(onnx_folder, manifest)
    with pytest.raises(BadInput, match="another artifact"):
        verify(onnx_folder)


def test_a_golden_set_swapped_with_its_hash_is_not_the_one_that_judged(onnx_folder):
    path = onnx_folder / "golden" / "golden.json"
    path.write_text(path.read_text() + "\n")
    write_manifest(onnx_folder, dataclasses.replace(read_manifest(onnx_folder), files=record_files(onnx_folder)))
    with pytest.raises(BadInput, match="another golden set"):
        verify(onnx_folder)


def test_without_validation(onnx_folder):
    write_manifest(onnx_folder, dataclasses.replace(read_manifest(onnx_folder), validation=None))
    assert code(onnx_folder) == 7


def test_a_recorded_failure(onnx_folder):
    evidence = with_case(read_manifest(onnx_folder).validation.evidence, measured=NOTHING_FINITE)
    store(onnx_folder, evidence)
    with pytest.raises(ValidationFailed, match="grid0-0"):
        verify(onnx_folder)


def test_a_partial_comparison(onnx_folder):
    evidence = read_manifest(onnx_folder).validation.evidence
    store(onnx_folder, with_case(evidence, status="skipped", note="x", measured=None, directions=()))
    assert code(onnx_folder) == 7
    store(onnx_folder, dataclasses.replace(evidence, limit_scale=2.0))
    assert code(onnx_folder) == 7


def forged_verdict(folder):
    """FAILED numbers under a judgement that says PASS."""
    manifest = read_manifest(folder)
    good = manifest.validation.judgement
    store(folder, with_case(manifest.validation.evidence, measured=NOTHING_FINITE), good)
    return 6


def forged_verdict_of_a_partial_run(folder):
    manifest = read_manifest(folder)
    skipped = with_case(manifest.validation.evidence, status="skipped", note="", measured=None, directions=())
    store(folder, skipped, manifest.validation.judgement)
    return 7


def failed_verdict_over_good_numbers(folder):
    store(folder, judgement=dataclasses.replace(read_manifest(folder).validation.judgement, verdict=Verdict.FAILED))
    return 6


def open_verdict_over_good_numbers(folder):
    judgement = read_manifest(folder).validation.judgement
    store(folder, judgement=dataclasses.replace(judgement, verdict=Verdict.NOT_VALIDATED))
    return 7


def wider_allowed_numbers(folder):
    """Limits raised in the stored judgement only."""
    judgement = read_manifest(folder).validation.judgement
    checks = (dataclasses.replace(judgement.cases[0].checks[0], allowed_high=9.0), *judgement.cases[0].checks[1:])
    cases = (dataclasses.replace(judgement.cases[0], checks=checks), *judgement.cases[1:])
    store(folder, judgement=dataclasses.replace(judgement, cases=cases))
    return 3


def raised_floors(folder):
    """Floors raised so far that wrong numbers fit, consistently throughout the manifest."""
    evidence = read_manifest(folder).validation.evidence
    floor = dataclasses.replace(evidence.cases[0].floor, worst_token=9.0)
    store(folder, with_case(evidence, floor=floor))
    return 3


def a_case_removed(folder):
    evidence = read_manifest(folder).validation.evidence
    store(folder, dataclasses.replace(evidence, cases=evidence.cases[2:], sensitivity=evidence.sensitivity[1:]))
    return 3


def a_direction_removed(folder):
    evidence = read_manifest(folder).validation.evidence
    store(folder, with_case(evidence, 2, directions=evidence.cases[2].directions[1:]))
    return 3


def a_spread_raised(folder):
    evidence = read_manifest(folder).validation.evidence
    first, *rest = evidence.cases[2].directions
    store(folder, with_case(evidence, 2, directions=(dataclasses.replace(first, spread=0.9), *rest)))
    return 3


def another_reference(folder):
    evidence = read_manifest(folder).validation.evidence
    store(folder, dataclasses.replace(evidence, reference=dataclasses.replace(TORCH, version="1.0")))
    return 3


def run_by_torch(folder):
    evidence = read_manifest(folder).validation.evidence
    store(folder, dataclasses.replace(evidence, backend=dataclasses.replace(TORCH, device="cuda")))
    return 7


def older_rules(folder):
    store(folder, judgement=dataclasses.replace(read_manifest(folder).validation.judgement, rules_version=0))
    return 7


def another_artifact(folder):
    store(folder, artifact_sha256="ab" * 32)
    return 3


def another_golden_set(folder):
    store(folder, golden_sha256="ab" * 32)
    return 3


FORGERIES = [
    forged_verdict, forged_verdict_of_a_partial_run, failed_verdict_over_good_numbers, open_verdict_over_good_numbers,
    wider_allowed_numbers, raised_floors, a_case_removed, a_direction_removed, a_spread_raised, another_reference,
    run_by_torch, older_rules, another_artifact, another_golden_set,
]  # fmt: skip


@pytest.mark.parametrize("forge", FORGERIES)
def test_nothing_edited_by_hand_is_believed(onnx_folder, forge):
    verify(onnx_folder)
    expected = forge(onnx_folder)
    assert code(onnx_folder) == expected


def test_the_verdict_word_alone_is_not_believed(onnx_folder):
    evidence = with_case(read_manifest(onnx_folder).validation.evidence, measured=NOTHING_FINITE)
    store(onnx_folder, evidence)
    path = onnx_folder / "manifest.json"
    path.write_text(path.read_text().replace('"FAILED"', '"PASS"').replace(': "failed"', ': "within"'))
    assert code(onnx_folder) == 6


def test_profiles_of_the_evidence_are_those_of_the_engine(engine_folder):
    manifest = read_manifest(engine_folder)
    wider = (Profile("p", Shape(1, 4, 1), Shape(1, 4, 1), Shape(4, 9999, 1)),)
    write_manifest(engine_folder, dataclasses.replace(manifest, profiles=wider))
    assert code(engine_folder, **HERE) == 3
    evidence = dataclasses.replace(manifest.validation.evidence, profiles=())
    write_manifest(engine_folder, dataclasses.replace(manifest, profiles=()))
    store(engine_folder, evidence)
    assert code(engine_folder, **HERE) == 7


def test_an_engine_judged_by_onnx_runtime_is_not_validated(engine_folder):
    evidence = read_manifest(engine_folder).validation.evidence
    store(engine_folder, dataclasses.replace(evidence, backend=ORT))
    assert code(engine_folder, anywhere=True) == 7


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"schema_version": 2}'])
def test_a_damaged_manifest(onnx_folder, text):
    (onnx_folder / "manifest.json").write_text(text)
    assert code(onnx_folder) == 3
    (onnx_folder / "manifest.json").unlink()
    assert code(onnx_folder) == 3


def test_it_is_fast_and_imports_nothing_heavy(onnx_folder):
    """Under 0.5 s plus hashing, start of Python included; in CPU time, for this machine may be busy."""
    program = (
        "import sys; from pathlib import Path; from exporter.validation.verify import verify\n"
        "verify(Path(sys.argv[1]))\n"
        "heavy = {'numpy', 'torch', 'onnx', 'onnxruntime', 'tensorrt', 'rich', 'ml_dtypes', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    seconds = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", program, str(onnx_folder)], capture_output=True, text=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.stdout == "[]\n"
    assert min(seconds) < 0.5


def test_the_evidence_of_the_samples_is_what_the_gate_would_pass(onnx_folder):
    evidence = golden_evidence(onnx_folder / "golden", ORT)
    assert json.loads((onnx_folder / "manifest.json").read_text())["validation"]["judgement"]["verdict"] == "PASS"
    assert judge(evidence).verdict is Verdict.PASS
