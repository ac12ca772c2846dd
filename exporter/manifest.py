"""``manifest.json``: what an artifact was made from and how, the hash of its files, and its validation."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from exporter.errors import BadInput
from exporter.files import FileRecord, check_sha256, combined_sha256, record_file, sha256_file, write_text
from exporter.records import read_record, to_text
from exporter.validation.evidence import DType, Evidence, Profile
from exporter.validation.gate import Judgement

SCHEMA_VERSION = 2  # 2: layers of an engine
MANIFEST_NAME = "manifest.json"
GOLDEN_FOLDER = "golden"
_GOLDEN_PREFIX = GOLDEN_FOLDER + "/"


@dataclass(frozen=True)
class Source:
    """What an artifact was made from.

    Attributes:
        given: SOURCE as the user wrote it.
        revision: commit of a hub repository; None for a folder and for random weights.
        family: of the tower.
        weights_sha256: over the vision tensors.
        config: the vision config as it was read.
        config_sha256: of it.
        onnx_sha256: identity of the ONNX artifact that an engine was built from; None for ONNX itself.
    """

    given: str
    revision: str | None
    family: str
    weights_sha256: str
    config: Mapping[str, Any]
    config_sha256: str
    onnx_sha256: str | None

    def __post_init__(self) -> None:
        for digest in (self.weights_sha256, self.config_sha256, self.onnx_sha256):
            if digest is not None:
                check_sha256(digest)


@dataclass(frozen=True)
class PluginRecord:
    """The RoPE operator inside an artifact.

    Attributes:
        name: of the operator.
        version: of the operator.
        kind: what carries it: the model-local ``function``, an ``aot`` plugin, or an IPluginV3 (``v3``).
        source_sha256: over the source that kernels were compiled from; None for a function.
    """

    name: str
    version: str
    kind: Literal["function", "aot", "v3"]
    source_sha256: str | None


@dataclass(frozen=True)
class Runtime:
    """A TensorRT: its flavour (``tensorrt`` or ``tensorrt_rtx``) and version."""

    flavour: str
    version: str

    def __str__(self) -> str:
        return f"{self.flavour} {self.version}"


@dataclass(frozen=True)
class Validation:
    """The numbers and the verdict of one run of the gate.

    Attributes:
        created: when, UTC, ISO 8601.
        artifact_sha256: identity of the artifact that was judged.
        golden_sha256: identity of the golden set that judged it.
        evidence: what was measured; its ``backend`` holds flavour, version and compute capability.
        judgement: measured beside allowed, and the verdict.
    """

    created: str
    artifact_sha256: str
    golden_sha256: str
    evidence: Evidence
    judgement: Judgement

    def __post_init__(self) -> None:
        check_sha256(self.artifact_sha256)
        check_sha256(self.golden_sha256)


@dataclass(frozen=True)
class Manifest:
    """One schema for ONNX artifacts and engines.

    Attributes:
        schema_version: of this file.
        kind: what the artifact is.
        artifact: name of its main file.
        source: what it was made from.
        options: every option of the command that made it.
        tool_versions: version by package, with Python and kvit-export.
        dtype: of its numbers.
        opset: of the ONNX model.
        rope: form of the RoPE.
        attention: form of the attention.
        packing: whether a call may hold several items.
        plugin: the RoPE operator; None where ``rope`` is not ``plugin``.
        runtime: what built the engine and alone can run it; None for ONNX.
        profiles: of the engine.
        targets: compute capabilities that the engine was built for, such as ``9.0``.
        warnings: what exporter and builder warned of.
        seconds: duration by step.
        peak_memory_bytes: largest resident set of the process; None where the system does not tell.
        layers: of an engine by type, with their precision where TensorRT tells it; empty for ONNX.
        files: record by name, relative to the folder, with ``/``; the golden set's files stand under ``golden/``.
        validation: None until the gate has run.
    """

    schema_version: int
    kind: Literal["onnx", "engine"]
    artifact: str
    source: Source
    options: Mapping[str, Any]
    tool_versions: Mapping[str, str]
    dtype: DType
    opset: int
    rope: Literal["plugin", "standard", "plain"]
    attention: Literal["plain", "op"]
    packing: Literal["single", "packed"]
    plugin: PluginRecord | None
    runtime: Runtime | None
    profiles: tuple[Profile, ...]
    targets: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: Mapping[str, float]
    peak_memory_bytes: int | None
    layers: Mapping[str, int]
    files: Mapping[str, FileRecord]
    validation: Validation | None

    def __post_init__(self) -> None:
        for name in self.files:
            check_file_name(name)
        if self.artifact not in self.files:
            raise ValueError(f"the artifact {self.artifact[:80]!r} is not among the files")
        if self.kind == "engine" and self.runtime is None:
            raise ValueError("an engine without the TensorRT that built it")
        if not all(math.isfinite(value) and value >= 0 for value in self.seconds.values()):
            raise ValueError("a duration is not a number of seconds")

    @property
    def artifact_sha256(self) -> str:
        """Identity of the artifact: over all files but the golden set's."""
        return combined_sha256({k: v for k, v in self.files.items() if not k.startswith(_GOLDEN_PREFIX)})

    @property
    def golden_sha256(self) -> str:
        """Identity of the golden set, equal to `GoldenSet.sha256`."""
        skip = len(_GOLDEN_PREFIX)
        return combined_sha256({k[skip:]: v for k, v in self.files.items() if k.startswith(_GOLDEN_PREFIX)})


def check_file_name(name: str) -> None:
    """Refuse a name that could lead out of the artifact's folder or differ between systems.

    Args:
        name: relative name with ``/``.

    Raises:
        ValueError: it is empty, absolute, not in its simplest form, or has ``..``, a backslash or a control character.
    """
    path = PurePosixPath(name)
    plain = name == str(path) and name not in ("", ".") and "\\" not in name and name.isprintable()
    if not plain or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name[:80]!r} is not a plain relative file name")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an artifact.

    Args:
        folder: the artifact's folder.

    Returns:
        The manifest; the files themselves have not been looked at.

    Raises:
        BadInput: it is missing, damaged or of another schema version.
    """
    path = folder / MANIFEST_NAME
    if not path.exists():
        raise BadInput(f"{folder} has no {MANIFEST_NAME}, so it is no artifact of kvit-export")
    return read_record(Manifest, path, SCHEMA_VERSION)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, whole or not at all.

    Args:
        folder: the artifact's folder.
        manifest: its content.
    """
    write_text(folder / MANIFEST_NAME, to_text(manifest))


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Hash every file below a folder, without its manifest.

    Args:
        folder: the artifact's folder.

    Returns:
        Record by relative name.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: record_file(path) for name, path in names.items() if name != MANIFEST_NAME}


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest: existence and size of all first, then the hashes.

    Args:
        folder: the artifact's folder.
        manifest: its manifest.

    Raises:
        BadInput: names the first file that is missing, of another size or changed.
    """
    for name, record in manifest.files.items():
        _check_size(folder / name, record)
    for name, record in manifest.files.items():
        path = folder / name
        try:
            found = sha256_file(path)
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
        if found != record.sha256:
            raise BadInput(
                f"{path} has changed since {MANIFEST_NAME} was written; fetch an intact copy or make it again"
            )


def _check_size(path: Path, record: FileRecord) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadInput(f"cannot read {path}, which {MANIFEST_NAME} lists: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{path} is not a regular file")
    if status.st_size != record.size:
        raise BadInput(
            f"{path} has {status.st_size} bytes, {MANIFEST_NAME} says {record.size}; "
            "fetch an intact copy or make it again"
        )
