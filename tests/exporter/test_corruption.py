"""Two hundred damaged artifacts: one line on stderr, the right exit code, no traceback, bounded memory, never a pass.

A folder's files are hashed, so any change to them is bad input (3). A bare ``.onnx`` file has no hash: it is judged by
its numbers, so a damaged one is unreadable (3), wrong (6), not judged (7), or it computes the right numbers (0).
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from exporter import cli
from exporter.errors import BadInput
from exporter.manifest import read_manifest, write_manifest
from exporter.validation.backends import OrtBackend
from exporter.validation.golden import open_golden
from exporter.validation.judging import judge_folder
from tests.exporter.samples import manifest_of, write_sample_golden, write_sample_onnx

ONNX, DATA = "vision_tower.onnx", "vision_tower.onnx.data"
JSON, TENSORS, MANIFEST = "golden/golden.json", "golden/golden.safetensors", "manifest.json"
HASHED = (ONNX, DATA, JSON, TENSORS)
Damage = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A validated artifact of the sample tower, and beside it another one of the same shapes."""
    base = tmp_path_factory.mktemp("good")
    for name, scale in (("a", 1.0), ("other", 1.02)):
        folder = base / name
        folder.mkdir()
        write_sample_onnx(folder / ONNX, "float32", external=True, scale=scale)
        write_sample_golden(folder / "golden", "float32" if name == "a" else "bfloat16")
        manifest = dataclasses.replace(manifest_of(folder, "onnx"), dtype="float32")
        weights = open_golden(folder / "golden").header.weights_sha256
        source = dataclasses.replace(manifest.source, weights_sha256=weights)
        write_manifest(folder, dataclasses.replace(manifest, source=source))
    with OrtBackend(base / "a" / ONNX, threads=1) as backend:
        judge_folder(base / "a", backend, read_manifest(base / "a"))
    assert cli.run(["verify", str(base / "a")]) == 0
    return base


def run(capsys, *arguments: object) -> tuple[int, str]:
    """Run the command line; stderr must be one line if anything is wrong, and never a traceback."""
    code = cli.run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("[")]
    assert "Traceback" not in captured.err + captured.out
    assert code in (0, 3, 6, 7), (code, captured.err)
    if code:
        assert len(lines) == 1 and lines[0].startswith("kvit-export: ") and len(lines[0]) < 2000, captured.err
    return code, captured.err


# ------------------------------------------------------------------------------------------------- kinds of damage


def flip(name: str) -> Damage:
    def damage(folder: Path, draw: random.Random) -> None:
        data = bytearray((folder / name).read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(data)

    return damage


def cut(name: str) -> Damage:
    def damage(folder: Path, draw: random.Random) -> None:
        os.truncate(folder / name, draw.randrange((folder / name).stat().st_size))

    return damage


def replaced(name: str, source: str) -> Damage:
    return lambda folder, _draw: shutil.copy(folder.parent.parent / "other" / source, folder / name)  # type: ignore


def emptied(name: str) -> Damage:
    return lambda folder, _draw: (folder / name).write_bytes(b"")  # type: ignore


def directory(name: str) -> Damage:
    def damage(folder: Path, _draw: random.Random) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return damage


def pipe(name: str) -> Damage:
    def damage(folder: Path, _draw: random.Random) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)  # opening it to read would wait for ever

    return damage


def missing(name: str) -> Damage:
    return lambda folder, _draw: (folder / name).unlink()


def edited(name: str, *keys: Any, value: Any) -> Damage:
    """Set a value inside a JSON file."""

    def damage(folder: Path, _draw: random.Random) -> None:
        document = json.loads((folder / name).read_text())
        place = document
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        (folder / name).write_text(json.dumps(document))

    return damage


VERSIONS = (0, 3, -1, 1.0, "1", None, True, 10**400)
SIZES = (-1, 0, 2**31, 2**62, 10**300, 1.5, "9", None)
NAMES = ("/etc/hostname", "../vision_tower.onnx", "a/../../b", "", "a\\b", "a\0b")


def folder_damages() -> list[tuple[str, Damage]]:
    """(name, damage) of everything that must end in 3."""
    found: list[tuple[str, Damage]] = []
    for name in HASHED:
        found += [(f"flip {i} {name}", flip(name)) for i in range(15)]
        found += [(f"cut {i} {name}", cut(name)) for i in range(8)]
    found += [(f"cut {i} {MANIFEST}", cut(MANIFEST)) for i in range(10)]
    for name in (*HASHED, MANIFEST):
        found += [(f"{kind.__name__} {name}", kind(name)) for kind in (emptied, directory, pipe, missing)]
    found += [(f"swapped {a} {b}", replaced(a, b)) for a in HASHED for b in HASHED if a != b or a != ONNX]
    found += [
        (f"version {v!r:.9} {n}", edited(n, "schema_version", value=v)) for v in VERSIONS for n in (MANIFEST, JSON)
    ]
    found += [(f"size {v!r:.9}", edited(MANIFEST, "files", DATA, "size", value=v)) for v in SIZES]
    found += [(f"name {v!r}", edited(MANIFEST, "artifact", value=v)) for v in NAMES]
    return found


FOLDER = folder_damages()


def test_there_are_two_hundred() -> None:
    assert len(FOLDER) + len(BARE_FLIPS) + len(MANIFEST_FLIPS) + len(LOCATIONS) + len(GOLDEN_EDITS) >= 200
    assert len({name for name, _ in FOLDER}) == len(FOLDER)


@pytest.mark.parametrize(("name", "damage"), FOLDER, ids=[name for name, _ in FOLDER])
def test_a_damaged_folder_is_bad_input(name: str, damage: Damage, good: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "x" / "a"
    shutil.copytree(good / "a", folder)
    if name.startswith("swapped"):
        shutil.copytree(good / "other", tmp_path / "other")
    damage(folder, random.Random(name))
    for command in ("verify", "validate"):
        code, err = run(capsys, command, folder)
        assert code == 3, (command, err)
    run(capsys, "inspect", folder)  # hashes nothing, so it may succeed; it never ends in a traceback


# ------------------------------------------------------------------------------------------------- manifest and golden

MANIFEST_FLIPS = range(40)


@pytest.mark.parametrize("seed", MANIFEST_FLIPS)
def test_a_flipped_manifest_passes_only_if_all_that_is_judged_is_as_it_was(seed, good, tmp_path, capsys) -> None:
    """The manifest has no hash over itself: a flip in a remark is a remark; files, numbers and verdict must agree."""
    folder = tmp_path / "a"
    shutil.copytree(good / "a", folder)
    flip(MANIFEST)(folder, random.Random(seed))
    code, _ = run(capsys, "verify", folder)
    assert code in (0, 3, 6, 7)
    if code == 0:
        before, after = read_manifest(good / "a"), read_manifest(folder)
        assert (after.files, after.artifact, after.dtype) == (before.files, before.artifact, before.dtype)
        assert after.validation is not None and before.validation is not None
        assert after.validation.judgement == before.validation.judgement


GOLDEN_EDITS: dict[str, Damage] = {
    "width": edited(JSON, "width", value=2**60),
    "width 0": edited(JSON, "width", value=0),
    "negative width": edited(JSON, "width", value=-1),
    "grids": edited(JSON, "cases", 0, "grid_hws", value=[[512, 512]] * 100000),
    "side": edited(JSON, "cases", 0, "grid_hws", value=[[2**40, 2**40]]),
    "frames": edited(JSON, "cases", 0, "frames", value=2**40),
    "tensor size": edited(JSON, "tensors", "size", value=2**62),
    "no case": edited(JSON, "cases", value=[]),
    "many cases": edited(JSON, "cases", value=[0] * 10**6),
    "floor": edited(JSON, "cases", 0, "floor", "relative_l2", value=-1),
    "dtype": edited(JSON, "dtype", value="int8"),
    "tf32": edited(JSON, "settings", "tf32", value=True),
    "name": edited(JSON, "cases", 0, "name", value="../../etc/passwd"),
    "header length": lambda folder, _: overwrite(folder / TENSORS, 0, (2**63).to_bytes(8, "little")),
    "header": lambda folder, _: overwrite(folder / TENSORS, 8, b'{"a":{"data_offsets":[0,9223372036854775807]}}'),
    "deep json": lambda folder, _: (folder / JSON).write_text("[" * 10**6),  # type: ignore
    "huge json": lambda folder, _: os.truncate(folder / JSON, 1 << 40),
    "huge tensors": lambda folder, _: os.truncate(folder / TENSORS, 1 << 40),
    "huge manifest": lambda folder, _: os.truncate(folder / MANIFEST, 1 << 40),
    "huge model": lambda folder, _: os.truncate(folder / ONNX, 1 << 40),
    "model of zeros": lambda folder, _: (folder / ONNX).write_bytes(bytes(1000)),  # type: ignore
}


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


IN_LITTLE_MEMORY = """
import json, resource, sys
import onnx, onnxruntime, numpy, rich.console, exporter.validation.judging, exporter.validation.report
from exporter.cli import run
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20),) * 2)
codes = []
for arguments in json.loads(sys.argv[1]):
    codes.append(run(arguments))
print(json.dumps([codes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10]))
"""


def test_giant_sizes_take_no_memory(good: Path, tmp_path: Path) -> None:
    """600 MiB beyond the libraries; the sample itself needs 10, and every claimed size is far beyond it."""
    commands = []
    for name, damage in GOLDEN_EDITS.items():
        folder = tmp_path / name.replace(" ", "-")
        shutil.copytree(good / "a", folder)
        damage(folder, random.Random(name))
        commands.append(["validate", str(folder)])
        if "manifest" not in name:
            commands.append(["validate", str(folder / ONNX), "--golden", str(folder / "golden")])
    done = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, json.dumps(commands)], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2], timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    codes, peak = json.loads(done.stdout.splitlines()[-1])
    assert "Traceback" not in done.stderr
    wrong = [(command, code) for command, code in zip(commands, codes, strict=True) if code != 3]
    assert not wrong, (wrong, done.stderr[-2000:])
    assert len([line for line in done.stderr.splitlines() if line.startswith("kvit-export: ")]) == len(commands)
    assert peak < 1200  # MiB, libraries included


# ------------------------------------------------------------------------------------------------- bare files

BARE_FLIPS = [(dtype, seed) for dtype in ("float32", "bfloat16") for seed in range(30)]


@pytest.mark.parametrize(("dtype", "seed"), BARE_FLIPS)
def test_a_flip_in_a_bare_file_passes_only_if_its_numbers_are_right(dtype, seed, tmp_path, capsys) -> None:
    """Half of the flips hit the graph, whose every byte means something; the others the weights beside it."""
    golden, path = tmp_path / "golden", tmp_path / ONNX
    write_sample_golden(golden, dtype)
    write_sample_onnx(path, dtype, external=True)
    flip(ONNX if seed % 2 else DATA)(tmp_path, random.Random(f"{dtype} {seed}"))
    code, _ = run(capsys, "validate", path, "--golden", golden, "-o", tmp_path / "report")
    if code:
        return
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["artifact"]["origin"] == "unknown"
    # by a run and a formula of its own: within 1e-5 in fp32, within 1.5 times 2^-8 in bf16
    opened = open_golden(golden)
    with OrtBackend(path, threads=1) as backend:
        for case in opened.header.cases:
            rows = backend.run(opened.pixel_values(case), opened.grid_hws(case)).astype(np.float64)
            reference = opened.reference(case).astype(np.float64)
            error = np.linalg.norm(rows - reference) / np.linalg.norm(reference)
            assert error < (1e-5 if dtype == "float32" else 1.5 * 2**-8)


def test_a_flip_in_a_remark_changes_no_number(tmp_path, capsys) -> None:
    golden, path = write_sample_golden(tmp_path / "golden", "float32"), write_sample_onnx(tmp_path / ONNX, "float32")
    measured = []
    for remark in ("a remark", "b remark"):
        model = onnx.load(str(path))
        model.doc_string = remark
        onnx.save(model, str(path))
        assert run(capsys, "validate", path, "--golden", golden, "-o", tmp_path / remark)[0] == 0
        report = json.loads((tmp_path / remark / "report.json").read_text())
        measured.append([case["measured"] for case in report["evidence"]["cases"]])
    assert measured[0] == measured[1]


LOCATIONS = {
    "absolute": "{outside}",
    "parent": "../secret.data",
    "through a folder": "sub/../../secret.data",
    "empty": "",
    "folder": "sub",
    "nothing": "no-such-file.data",
    "pipe": "pipe",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(LOCATIONS))
def test_weights_outside_the_folder_are_not_read(name: str, dtype: Any, tmp_path: Path, capsys) -> None:
    folder, outside = tmp_path / "artifact", tmp_path / "secret.data"
    (folder / "sub").mkdir(parents=True)
    os.mkfifo(folder / "pipe")  # reading it would wait for ever
    path = write_sample_onnx(folder / ONNX, dtype, external=True)
    golden = write_sample_golden(tmp_path / "golden", dtype)
    shutil.copy(folder / DATA, outside)  # what the weights would be, so that only the rule can refuse
    relocate(path, LOCATIONS[name].format(outside=outside))
    os.utime(outside, ns=(0, outside.stat().st_mtime_ns))
    control = folder / "control"
    control.write_bytes(b"x")
    os.utime(control, ns=(0, control.stat().st_mtime_ns))
    control.read_bytes()
    code, err = run(capsys, "validate", path, "--golden", golden)
    assert code == 3 and ONNX in err
    if name in ("absolute", "parent", "through a folder"):
        assert "not a file in the model's folder" in err  # our own rule: older ONNX Runtimes do not have it
    if control.stat().st_atime_ns:  # this file system records reading
        assert outside.stat().st_atime_ns == 0


def relocate(path: Path, location: str, **entries: str) -> None:
    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
            if entry.key in entries:
                entry.value = entries[entry.key]
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("value", ["-1", "1", str(2**40), str(2**63), str(10**30), "x", ""])
def test_places_beyond_the_data_are_refused(key: str, value: str, tmp_path: Path, capsys) -> None:
    path = write_sample_onnx(tmp_path / ONNX, "float32", external=True)
    golden = write_sample_golden(tmp_path / "golden", "float32")
    relocate(path, DATA, **{key: value})
    code, err = run(capsys, "validate", path, "--golden", golden)
    assert code == 3 or ((key, value) == ("offset", "1") and code == 6), err


def test_an_artifact_that_is_replaced_during_its_validation_gets_no_verdict(good, tmp_path):
    """Else the numbers of the old file would be stored as those of the new one."""
    folder = tmp_path / "a"
    shutil.copytree(good / "a", folder)
    manifest = read_manifest(folder)
    other = dataclasses.replace(manifest, warnings=("made again",), validation=None)
    with OrtBackend(folder / ONNX, threads=1) as backend:
        write_manifest(folder, other)
        with pytest.raises(BadInput, match="was changed while it was being validated"):
            judge_folder(folder, backend, manifest)
    assert read_manifest(folder) == other
