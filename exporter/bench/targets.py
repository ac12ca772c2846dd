"""What the command line names: live towers, artifacts and bare files, each in the backends that shall run it.

Everything that can be refused without loading anything is refused here. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exporter.errors import BadInput
from exporter.files import sha256_file
from exporter.manifest import MANIFEST_NAME, Manifest, check_files, read_manifest
from exporter.trt.bare import names_plugin
from exporter.validation.evidence import DType
from exporter.validation.external_data import check_model_file
from model.checkpoint import open_source

ONNX_BACKENDS = ("onnxruntime-cpu", "onnxruntime-cuda")


@dataclass(frozen=True)
class Target:
    """One row that is to be measured.

    Attributes:
        number: from 1.
        given: as the user wrote it.
        kind: what it is.
        backend: what shall run it; ``torch`` where PyTorch chooses the device.
        path: of the file; None for a live tower.
        folder: of the artifact, which has a manifest; None for the others.
        dtype: of a live tower; None for the default of its device.
        device: of a live tower.
        flavor: TensorRT for a bare engine; None for whichever is installed.
        v3_plugin: the engine may hold Python plugins.
        sha256: identity of the artifact or file; None for a live tower, which tells its own.
        verdict: that the manifest records.
        tf32: what the manifest of an engine says of it.
    """

    number: int
    given: str
    kind: Literal["tower", "onnx", "engine"]
    backend: str
    path: str | None = None
    folder: str | None = None
    dtype: DType | None = None
    device: str = "auto"
    flavor: str | None = None
    v3_plugin: bool = False
    sha256: str | None = None
    verdict: str | None = None
    tf32: bool | None = None

    @property
    def label(self) -> str:
        """For progress and messages."""
        return f"#{self.number} {self.given}"


@dataclass(frozen=True)
class _Found:
    """A target before its backends are chosen; fields as in `Target`."""

    given: str
    kind: Literal["tower", "onnx", "engine"]
    path: Path | None = None
    folder: Path | None = None
    manifest: Manifest | None = None


def kinds_of(given: Sequence[str]) -> tuple[str, ...]:
    """Tell what each argument is, by its name and by what lies there, without reading it."""
    return tuple(_kind(text) for text in given)


def _kind(text: str) -> str:
    if os.path.exists(os.path.join(text, MANIFEST_NAME)):
        return "artifact"
    return {".onnx": "onnx", ".engine": "engine"}.get(os.path.splitext(text)[1], "tower")


def resolve(
    given: Sequence[str],
    *,
    dtype: DType | None = None,
    devices: Sequence[str] = ("auto",),
    backends: Sequence[str] = (),
    flavor: str | None = None,
) -> tuple[Target, ...]:
    """Find out what the arguments are, and check all that can be checked without loading.

    Args:
        given: SOURCEs, artifact folders, bare ``.onnx`` and ``.engine`` files.
        dtype: of live towers; None for the default of the device.
        devices: of live towers; each gives a row.
        backends: of ONNX models; each gives a row. Empty for the CPU, and for CUDA where ONNX Runtime has it.
        flavor: TensorRT for bare engines.

    Returns:
        The rows in the order of the arguments.

    Raises:
        InputError: a checkpoint cannot be used.
        BadInput: a file is missing, or is not what its manifest says.
    """
    found = [_find(text) for text in given]
    rows: list[Target] = []
    for entry in found:
        if entry.kind == "tower":
            for device in devices:
                backend = "torch" if device == "auto" else f"torch-{device}"
                rows.append(Target(len(rows) + 1, entry.given, "tower", backend, dtype=dtype, device=device))
        elif entry.kind == "onnx":
            rows += [_row(len(rows) + 1 + i, entry, name) for i, name in enumerate(backends or onnx_backends())]
        else:
            rows.append(_row(len(rows) + 1, entry, "engine", flavor))
    return tuple(rows)


def _find(text: str) -> _Found:
    path, kind = Path(text), _kind(text)
    if kind == "artifact":
        manifest = read_manifest(path)
        check_files(path, manifest)
        return _Found(text, manifest.kind, path / manifest.artifact, path, manifest)
    if kind == "onnx":
        check_model_file(path)
        return _Found(text, "onnx", path)
    if kind == "engine":
        return _Found(text, "engine", path)
    if path.is_file():
        raise BadInput(f"{text} is none of a checkpoint folder, an artifact folder, an .onnx file and an .engine file")
    open_source(text)
    return _Found(text, "tower")


def _row(number: int, found: _Found, backend: str, flavor: str | None = None) -> Target:
    manifest, path = found.manifest, str(found.path)
    if manifest is None:
        plugin = found.kind == "engine" and names_plugin(Path(path))
        try:
            sha256 = sha256_file(Path(path))
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
        return Target(number, found.given, found.kind, backend, path, flavor=flavor, v3_plugin=plugin, sha256=sha256)
    tf32 = manifest.options.get("tf32")
    return Target(
        number,
        found.given,
        found.kind,
        backend,
        path,
        str(found.folder),
        v3_plugin=manifest.plugin is not None and manifest.plugin.kind == "v3",
        sha256=manifest.artifact_sha256,
        verdict=manifest.validation.judgement.verdict.value if manifest.validation else "NOT VALIDATED",
        tf32=tf32 if isinstance(tf32, bool) else None,
    )


def onnx_backends() -> tuple[str, ...]:
    """ONNX Runtime on the CPU, and on CUDA where the installed one has that provider."""
    try:
        import onnxruntime
    except ImportError:  # the row says so
        return ONNX_BACKENDS[:1]
    return ONNX_BACKENDS if "CUDAExecutionProvider" in onnxruntime.get_available_providers() else ONNX_BACKENDS[:1]
