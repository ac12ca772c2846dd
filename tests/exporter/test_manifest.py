"""The manifest is written and read exactly, and refuses whatever it would not have written."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import tracemalloc

import pytest

from exporter.errors import BadInput
from exporter.files import combined_sha256, record_file
from exporter.manifest import check_file_name, check_files, read_manifest, record_files, write_manifest
from exporter.validation.evidence import Profile, Shape
from exporter.validation.golden import open_golden
from tests.exporter.samples import manifest_of, write_artifact


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "build"
    write_artifact(path, "onnx")
    return path


@pytest.fixture
def folder(template, tmp_path):
    return shutil.copytree(template, tmp_path / "a folder \u00e9")


def edit(folder, change):
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("kind", ["onnx", "engine"])
def test_round_trip(tmp_path, kind):
    profiles = (Profile("p", Shape(1, 4, 1), Shape(1, 56, 2), Shape(2, 324, 2)),) if kind == "engine" else ()
    manifest = write_artifact(tmp_path / "out", kind, profiles=profiles)
    assert read_manifest(tmp_path / "out") == manifest
    check_files(tmp_path / "out", manifest)
    moved = tmp_path / "elsewhere"
    (tmp_path / "out").rename(moved)
    check_files(moved, read_manifest(moved))


def test_without_validation_it_is_null(tmp_path):
    (tmp_path / "vision_tower.onnx").write_bytes(b"x")
    write_manifest(tmp_path, manifest_of(tmp_path, "onnx"))
    assert json.loads((tmp_path / "manifest.json").read_text())["validation"] is None
    assert read_manifest(tmp_path).validation is None


def test_identities_are_those_of_the_files(folder):
    manifest = read_manifest(folder)
    assert set(manifest.files) == {"vision_tower.onnx", "golden/golden.json", "golden/golden.safetensors"}
    assert manifest.golden_sha256 == open_golden(folder / "golden").sha256
    assert manifest.artifact_sha256 == combined_sha256({"vision_tower.onnx": record_file(folder / "vision_tower.onnx")})
    (folder / "vision_tower.onnx.data").write_bytes(b"weights")
    again = dataclasses.replace(manifest, files=record_files(folder))
    assert again.artifact_sha256 != manifest.artifact_sha256
    assert again.golden_sha256 == manifest.golden_sha256


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "a//b",
        "./a",
        "a/",
        "a\\b",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "//x",
    ],
)
def test_a_name_that_leads_out_of_the_folder_is_refused(folder, name):
    with pytest.raises(ValueError, match="plain relative"):
        check_file_name(name)
    edit(folder, lambda value: value["files"].update({name: value["files"]["vision_tower.onnx"]}))
    with pytest.raises(BadInput, match="plain relative"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "name", ["a", "a.data", "golden/golden.json", "with space", "\u6a21\u578b.onnx", "..a", "a..b"]
)
def test_a_plain_name_is_taken(name):
    check_file_name(name)


FIRST = ("validation", "evidence", "cases", 0)
BAD = {
    "another schema": (("schema_version",), 1),
    "no schema": (("schema_version",), None),
    "unknown kind": (("kind",), "plan"),
    "artifact not among the files": (("artifact",), "other.onnx"),
    "artifact elsewhere": (("artifact",), "/etc/passwd"),
    "size as text": (("files", "vision_tower.onnx", "size"), "8000"),
    "negative size": (("files", "vision_tower.onnx", "size"), -1),
    "float size": (("files", "vision_tower.onnx", "size"), 8000.0),
    "short hash": (("files", "vision_tower.onnx", "sha256"), "ab"),
    "bad weights hash": (("source", "weights_sha256"), "x" * 64),
    "unknown dtype": (("dtype",), "int8"),
    "unknown rope": (("rope",), "complex"),
    "seconds as text": (("seconds", "export"), "1"),
    "negative seconds": (("seconds", "export"), -1.0),
    "memory as float": (("peak_memory_bytes",), 1.5),
    "engine without runtime": (("kind",), "engine"),
    "verdict by another word": (("validation", "judgement", "verdict"), "PASSED"),
    "measured as text": ((*FIRST, "measured", "norm"), "0"),
    "negative floor": ((*FIRST, "floor", "worst_token"), -0.1),
    "no numbers though compared": ((*FIRST, "measured"), None),
    "zero scale": (("validation", "evidence", "limit_scale"), 0),
}


@pytest.mark.parametrize(("path", "value"), BAD.values(), ids=BAD)
def test_a_wrong_value_is_refused_in_one_line(folder, path, value):
    def change(root):
        for key in path[:-1]:
            root = root[key]
        assert path[-1] in root if isinstance(root, dict) else True
        root[path[-1]] = value

    edit(folder, change)
    with pytest.raises(BadInput) as caught:
        read_manifest(folder)
    assert len(caught.value.format_message()) < 400


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_no_number_that_is_not_finite_gets_in(folder, number):
    text = (folder / "manifest.json").read_text()
    assert '"relative_l2": 0.0' in text
    (folder / "manifest.json").write_text(text.replace('"relative_l2": 0.0', f'"relative_l2": {number}'))
    with pytest.raises(BadInput, match="damaged"):
        read_manifest(folder)


def test_a_folder_without_a_manifest_is_named(tmp_path):
    with pytest.raises(BadInput, match="no artifact of kvit-export"):
        read_manifest(tmp_path)
    with pytest.raises(BadInput, match="no artifact of kvit-export"):
        read_manifest(tmp_path / "missing")


def test_200_damaged_manifests(folder):
    """Bit flips and truncations: refused in one line, or read as a manifest that differs from the original."""
    path, draw = folder / "manifest.json", random.Random(1)
    data, original, refused = path.read_bytes(), read_manifest(folder), 0
    tracemalloc.start()
    for index in range(200):
        changed = bytearray(data)
        if index % 4 == 0:
            changed = changed[: draw.randrange(len(changed))]
        else:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            assert read_manifest(folder) != original or bytes(changed).split() != data.split()
        except BadInput as error:
            refused += 1
            assert "\n" not in error.format_message()  # noqa: PT017 - one of many
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 100  # a flip inside a free text or a digit is another manifest, and its hashes no longer fit
    assert peak < 64 << 20  # a manifest has some 20 kB; Python frees the faults in batches


DAMAGES = {
    "missing": (lambda path: path.unlink(), "No such file"),
    "empty": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes"),
    "one bit": (lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]), "changed"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
}


@pytest.mark.parametrize("name", ["vision_tower.onnx", "golden/golden.json", "golden/golden.safetensors"])
@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_changed_file_is_named(folder, name, damage, words):
    manifest = read_manifest(folder)
    damage(folder / name)
    with pytest.raises(BadInput) as caught:
        check_files(folder, manifest)
    assert name in caught.value.format_message()
    assert words in caught.value.format_message()


def test_sizes_are_compared_before_anything_is_hashed(folder, monkeypatch):
    manifest = read_manifest(folder)
    path = folder / "golden" / "golden.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    monkeypatch.setattr("exporter.manifest.sha256_file", lambda path: pytest.fail(f"hashed {path}"))
    with pytest.raises(BadInput, match="bytes"):
        check_files(folder, manifest)
