"""The command line as a user meets it: one line, the right exit code, no traceback, no half-made output."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exporter import cli
from tests.broken import BROKEN, good_checkpoint

PROGRAM = Path(sys.executable).with_name("kvit-export")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def one_fault(err: str) -> str:
    """The last line of stderr is the fault; progress may stand before it, a traceback never."""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith("[")]
    assert len(lines) == 1 and lines[0].startswith("kvit-export: "), err
    return lines[0]


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_is_quick(argument: str) -> None:
    """0.3 s is the contract on a quiet machine; CI shares its two cores with a second test process, hence CPU time."""
    code = f"import resource, sys; from exporter.cli import run; c = run(['{argument}']); u = resource.getrusage(0); " \
        "print(u.ru_utime + u.ru_stime, file=sys.stderr); sys.exit(c)"  # fmt: skip
    found = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        found.append(float(done.stderr.split()[-1]))
    assert min(found) < 0.3


HEAVY = ("torch", "onnx", "onnxruntime", "triton", "tensorrt", "tensorrt_rtx", "matplotlib", "transformers", "numpy")


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], HEAVY),
        (["onnx", "--help"], HEAVY),
        (["golden", "--help"], HEAVY),
        (["validate", "--help"], HEAVY),
        (["verify", "FOLDER"], HEAVY),
        (["validate", "FOLDER"], ("torch", "triton", "transformers", "matplotlib")),
        (["inspect", "FOLDER"], ("torch", "triton", "transformers", "matplotlib")),
    ],
)
def test_imports(arguments: list[str], forbidden: tuple[str, ...], artifact: Path) -> None:
    arguments = [str(artifact) if argument == "FOLDER" else argument for argument in arguments]
    code = (
        "import sys\nfrom exporter.cli import run\ncode = run(sys.argv[2:])\n"
        "bad = [name for name in sys.argv[1].split(',') if name in sys.modules]\n"
        "sys.exit(f'imported {bad}' if bad else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(forbidden), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact made the way a user makes it, once for all workers; each has its own copy, since validate writes."""
    folder = tmp_path_factory.mktemp("cli")
    shared = Path(os.environ["KVIT_TEST_TRACES"]) / "artifact"
    if not shared.exists():
        made = folder / "made"
        assert cli.run(["onnx", "random:tiny?seed=3", "-o", str(made), "--max-patches", "400"]) == 0
        with contextlib.suppress(OSError):  # the other worker was quicker
            made.rename(shared)
    shutil.copytree(shared, folder / "build")
    return folder / "build"


def test_onnx_writes_the_whole_contract(artifact: Path, capsys) -> None:
    names = {path.relative_to(artifact).as_posix() for path in artifact.rglob("*") if path.is_file()}
    assert names == {
        "vision_tower.onnx", "vision_tower.onnx.data", "manifest.json", "report.json", "junit.xml",
        "golden/golden.json", "golden/golden.safetensors",
    }  # fmt: skip
    manifest = json.loads((artifact / "manifest.json").read_text())
    cases = manifest["validation"]["evidence"]["cases"]
    assert manifest["validation"]["judgement"]["verdict"] == "PASS"
    assert {"photo", "noise"} == {case["kind"] for case in cases}
    assert all(case["measured"]["relative_l2"] > 0 and case["measured"]["worst_token"] > 0 for case in cases)
    assert str(artifact.parent) not in (artifact / "manifest.json").read_text()
    code, out, err = run(capsys, "verify", str(artifact))
    assert code == 0 and out.startswith("PASS: ") and not err
    code, out, _ = run(capsys, "validate", str(artifact))
    assert code == 0 and "PASS" in out


def test_a_part_of_a_run_takes_no_verdict_away(artifact: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "build"
    shutil.copytree(artifact, folder)
    before = (folder / "manifest.json").read_bytes()
    for part in (["--case", "2x2-photo"], ["--factor", "3"]):
        code, out, err = run(capsys, "validate", str(folder), *part)
        assert code == 7 and "keeps the verdict of" in out and out.rstrip().endswith("PASS")
        assert (folder / "manifest.json").read_bytes() == before
    code, _, err = run(capsys, "validate", str(folder), "--case", "2x2-photo", "--json")
    assert code == 7 and "were not selected; run it without --case" in one_fault(err)
    assert run(capsys, "verify", str(folder))[0] == 0
    # but a fault that a part shows is recorded, and a part that passes does not take it away either
    assert run(capsys, "validate", str(folder), "--case", "2x2-photo", "--factor", "1e-9")[0] == 6
    assert run(capsys, "validate", str(folder), "--case", "2x2-noise")[0] == 7
    assert run(capsys, "verify", str(folder))[0] == 6
    assert run(capsys, "validate", str(folder))[0] == 0
    assert run(capsys, "verify", str(folder))[0] == 0


def test_inspect(artifact: Path, capsys) -> None:
    code, out, err = run(capsys, "inspect", str(artifact), "--json")
    found = json.loads(out)
    assert code == 0 and not err
    assert [value["name"] for value in found["inputs"]] == ["pixel_values", "grid_hws"]
    assert found["operators"]["kvit::FusedQKRope"] == 2 and found["rope"] == "plugin"
    assert found["manifest"]["source"]["given"] == "random:tiny?seed=3"
    assert found["files"]["vision_tower.onnx.data"] == (artifact / "vision_tower.onnx.data").stat().st_size
    code, out, _ = run(capsys, "inspect", str(artifact))
    assert code == 0 and "image_embeds" in out and "PASS on" in out
    code, out, _ = run(capsys, "inspect", str(artifact / "vision_tower.onnx"))
    assert code == 0 and "origin of this file is unknown" in out


def test_a_changed_file_is_refused_by_verify_and_validate(artifact: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    data = bytearray((copy / "vision_tower.onnx.data").read_bytes())
    data[1000] ^= 1
    (copy / "vision_tower.onnx.data").write_bytes(data)
    for command in ("verify", "validate"):
        code, _, err = run(capsys, command, str(copy))
        assert code == 3 and "vision_tower.onnx.data has changed" in one_fault(err)
    # a verdict edited by hand is not believed
    shutil.rmtree(copy)
    shutil.copytree(artifact, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["validation"]["evidence"]["cases"][0]["measured"]["relative_l2"] = 0.5
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert run(capsys, "verify", str(copy))[0] == 6


def test_truncated_or_missing_data_is_named_before_anything_runs(artifact: Path, tmp_path: Path, capsys) -> None:
    """pitfall 25."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(artifact / "vision_tower.onnx", bare)
    golden = ["--golden", str(artifact / "golden")]
    code, _, err = run(capsys, "validate", str(bare / "vision_tower.onnx"), *golden)
    assert code == 3 and "vision_tower.onnx" in one_fault(err)
    whole = (artifact / "vision_tower.onnx.data").read_bytes()
    (bare / "vision_tower.onnx.data").write_bytes(whole[: len(whole) // 2])
    code, _, err = run(capsys, "validate", str(bare / "vision_tower.onnx"), *golden)
    assert code == 3 and "vision_tower.onnx" in one_fault(err)


def test_a_bare_file_and_a_selection(artifact: Path, tmp_path: Path, capsys) -> None:
    golden = ["--golden", str(artifact / "golden")]
    code, out, _ = run(capsys, "validate", str(artifact / "vision_tower.onnx"), *golden, "-o", str(tmp_path))
    assert code == 0 and "origin of this file is unknown" in out
    assert (tmp_path / "report.json").exists() and (tmp_path / "junit.xml").exists()
    code, out, err = run(capsys, "validate", str(artifact / "vision_tower.onnx"), *golden, "--case", "2x2-photo")
    assert code == 7 and "NOT VALIDATED" in one_fault(err)
    code, _, err = run(capsys, "validate", str(artifact / "vision_tower.onnx"), *golden, "--factor", "3")
    assert code == 7 and "NOT VALIDATED" in one_fault(err)
    code, _, err = run(capsys, "validate", str(artifact / "vision_tower.onnx"))
    assert code == 2 and "--golden" in one_fault(err)


def test_the_live_tower_is_not_compared_with_itself(artifact: Path, capsys) -> None:
    code, _, err = run(capsys, "validate", str(artifact), "--backend", "torch")
    assert code == 2 and "itself" in one_fault(err)


def test_no_golden_is_not_validated(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "build"
    code, out, _ = run(capsys, "onnx", "random:tiny", "-o", str(folder), "--no-golden", "--json")
    assert code == 0 and json.loads(out)["verdict"] is None
    code, _, err = run(capsys, "verify", str(folder))
    assert code == 7 and "has not been validated" in one_fault(err)
    code, _, err = run(capsys, "validate", str(folder))
    assert code == 3 and "no golden set" in one_fault(err)


def test_an_existing_folder_is_kept(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for extra in ([], ["--force"]):
        code, _, err = run(capsys, "onnx", "random:tiny", "-o", str(folder), *extra)
        assert code == 2 and str(folder) in one_fault(err)
    assert (folder / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_checkpoints(name: str, tmp_path: Path, capsys) -> None:
    """pitfall 27: one line that names the key and the file, exit code 3, nothing written."""
    source, output = tmp_path / "checkpoint", tmp_path / "build"
    good_checkpoint(source)
    BROKEN[name].apply(source)
    code, out, err = run(capsys, "onnx", str(source), "-o", str(output), "--no-golden")
    message = one_fault(err)
    assert code == 3 and out == ""
    words = BROKEN[name].words
    for word in (words,) if isinstance(words, str) else words:
        assert word in message
    assert not output.exists() and not list(tmp_path.glob(".build*"))


PHOTOS = {
    "empty": b"",
    "text": b"this is no image",
    "truncated jpeg": b"\xff\xd8\xff\xe0" + bytes(40),
    "png header only": b"\x89PNG\r\n\x1a\n" + bytes(16),
}


@pytest.mark.parametrize("name", sorted(PHOTOS))
def test_broken_photos(name: str, tmp_path: Path, capsys) -> None:
    photo, output = tmp_path / "photo.jpg", tmp_path / "build"
    photo.write_bytes(PHOTOS[name])
    code, _, err = run(capsys, "golden", "random:tiny", "-o", str(output), "--image", str(photo))
    assert code == 3 and "photo.jpg" in one_fault(err)
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["onnx", "random:nothing", "-o", "OUT"], 3, "preset 'nothing'"),
        (["onnx", "random:tiny?sead=1", "-o", "OUT"], 3, "'sead'"),
        (["onnx", "random:tiny?layers=0", "-o", "OUT"], 3, "num_hidden_layers"),
        (["onnx", "no/where", "-o", "OUT"], 3, "hub id"),
        (["onnx", "/no/such/folder", "-o", "OUT"], 3, "no such folder"),
        (["onnx", "random:tiny", "-o", "OUT", "--opset", "17"], 2, "--opset 17"),
        (["onnx", "random:tiny", "-o", "OUT", "--rope", "standard", "--opset", "20"], 2, "23"),
        (["onnx", "random:tiny", "-o", "OUT", "--dtype", "int8"], 2, "int8"),
        (["onnx", "random:tiny", "-o", "OUT", "--golden-sizes", "3x4"], 2, "3x4"),
        (["onnx", "random:tiny", "-o", "OUT", "--golden-sizes", "big"], 2, "HxW"),
        (["onnx", "random:tiny", "-o", "OUT", "--device", "cuda"], 8, "no CUDA GPU"),
        (["onnx", "random:tiny"], 2, "--output"),
        (["frobnicate"], 2, "frobnicate"),
        (["verify", "/no/such/folder"], 3, "manifest.json"),
        (["validate", "/no/such/folder"], 3, "no such file"),
        (["inspect", "/no/such/file.onnx"], 3, "not a readable"),
    ],
)
def test_usage_and_input(arguments: list[str], code: int, words: str, tmp_path: Path, capsys) -> None:
    if "cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    output = tmp_path / "out"
    found, _, err = run(capsys, *[str(output) if argument == "OUT" else argument for argument in arguments])
    assert found == code and words in one_fault(err)
    assert not output.exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys, monkeypatch) -> None:
    """pitfall 26, by the error that the system gives."""
    import errno

    from exporter import onnx_artifact

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(onnx_artifact, "export_onnx", full)
    code, _, err = run(capsys, "onnx", "random:tiny", "-o", str(tmp_path / "build"))
    assert code == 4 and "No space left on device" in one_fault(err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ZeroDivisionError("x"), 1)])
def test_interrupts_and_faults_of_ours(error: BaseException, code: int, tmp_path: Path, capsys, monkeypatch) -> None:
    from exporter import onnx_artifact

    def stop(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(onnx_artifact, "export_onnx", stop)
    found, _, err = run(capsys, "onnx", "random:tiny", "-o", str(tmp_path / "build"))
    one_fault(err)
    assert found == code and not list(tmp_path.iterdir())


def test_the_program_runs_beside_a_model_and_plugins_of_someone_else(tmp_path: Path) -> None:
    for name in ("model", "plugins", "exporter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('someone else')\n")
    done = subprocess.run(
        [str(PROGRAM), "inspect", "nothing.onnx"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and "someone else" not in done.stderr


def test_a_closed_pipe_is_no_fault(artifact: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"'{PROGRAM}' inspect '{artifact}' --json | head -c 10"], capture_output=True, text=True,
        check=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("warmup", "limit", "expected"), [(3, 2.0, 6), (3, 4.0, 0), (0, 2.0, 7), (0, 4.0, 7)])
def test_a_first_call_is_not_held_against_max_latency(warmup, limit, expected):
    """The live tower is timed on its first call, which compiles: that says nothing of production, either way."""
    from types import SimpleNamespace

    from exporter.commands.validate import _check_latency
    from exporter.errors import KvitError
    from exporter.validation.latency import Latency, Percentiles

    part = Percentiles(1.0, 1.0, 1.0)
    report = SimpleNamespace(details=[SimpleNamespace(name="2x2", latency=Latency(warmup, 5, part, part, part))])
    code = 0
    try:
        _check_latency(report, limit)
    except KvitError as error:
        code = error.exit_code
    assert code == expected


def test_without_a_command_the_help_is_shown_as_it_is(capfd):
    assert cli.run([]) == 2
    out, err = capfd.readouterr()
    text = out + err
    assert len(text.splitlines()) > 10
    assert "  bench" in text and "  validate" in text


@pytest.mark.parametrize("arguments", [["--backend", "onnxruntime-cpu"], ["--backend", "torch"], []])
def test_a_limit_on_times_that_nobody_takes_is_refused_before_the_run(arguments, tmp_path, capfd):
    model = tmp_path / "tower.onnx"
    model.write_bytes(b"never read")
    assert cli.run(["validate", str(model), "--golden", str(tmp_path), "--max-latency", "5", *arguments]) == 2
    assert "only engines are timed" in capfd.readouterr().err


def test_debug_stands_before_the_command(capfd):
    assert cli.run(["inspect", "--debug", "x"]) == 2
    assert "Traceback" not in capfd.readouterr().err
    assert cli.run(["--debug", "inspect", "missing"]) == 3
    assert "Traceback" in capfd.readouterr().err
