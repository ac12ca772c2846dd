"""The ``onnx`` stage: a source in, a folder with model, golden set, report and manifest out, whole or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter.cli import version
from exporter.errors import ExportFailed, Usage
from exporter.files import atomic_directory
from exporter.manifest import (
    GOLDEN_FOLDER,
    SCHEMA_VERSION,
    Manifest,
    PluginRecord,
    Source,
    record_files,
    write_manifest,
)
from exporter.onnx_export import MODEL_FILE, OnnxExport, export_onnx
from exporter.onnx_trace import DEFAULT_OPSET, MAX_OPSET, MIN_OPSET, OPSET_OF_NEW_OPERATORS, OnnxOptions
from exporter.tools import EXPORT_TOOLS, Clock, peak_memory, tool_versions
from exporter.validation.backends import OrtBackend
from exporter.validation.golden_cases import GoldenOptions, GoldenSize, size_text
from exporter.validation.judging import judge_folder
from exporter.validation.record import check_options, record_golden
from exporter.validation.report import Report
from model.checkpoint import open_source
from model.graph import GraphForm
from model.weights import VisionWeights
from plugins.fused_qk_rope.description import FUSED_QK_ROPE

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

Progress = Callable[[str, int, int], None]
"""Called with a step, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class OnnxRequest:
    """What the user asked of ``kvit-export onnx``; fields as the options of that command."""

    source: str
    output: Path
    dtype: str = "bf16"
    form: GraphForm = field(default_factory=GraphForm)
    opset: int | None = None
    images: tuple[Path, ...] = ()
    golden: bool = True
    golden_sizes: tuple[GoldenSize, ...] = ()
    max_patches: int = 4096
    device: str = "cpu"
    norm_eps: float | None = None
    force: bool = False


@dataclass(frozen=True)
class OnnxArtifact:
    """What the stage made.

    Attributes:
        folder: where it lies.
        manifest: as written.
        report: of the validation; None with ``golden=False``.
    """

    folder: Path
    manifest: Manifest
    report: Report | None


def choose_opset(form: GraphForm, asked: int | None) -> int:
    """Choose the opset: what was asked, else 20, or 23 where the form needs its operators.

    Raises:
        Usage: an opset that is out of range or too old for the form.
    """
    least = OPSET_OF_NEW_OPERATORS if form.rope == "standard" or form.attention == "op" else MIN_OPSET
    opset = max(DEFAULT_OPSET, least) if asked is None else asked
    if not least <= opset <= MAX_OPSET:
        raise Usage(f"--opset {opset}: this form of the graph needs {least} to {MAX_OPSET}")
    return opset


def make_onnx(request: OnnxRequest, progress: Progress) -> OnnxArtifact:
    """Export, record a golden set, judge the exported file by it, write the manifest.

    Args:
        request: what the user asked for.
        progress: told how far each step is.

    Returns:
        The artifact. Its verdict may be anything but FAILED.

    Raises:
        InputError: the source or a photo cannot be used.
        Usage: options that contradict each other, or a folder that must not be replaced.
        ExportFailed: the graph cannot be made, the disk is full, or the file does not compute what PyTorch computes.
    """
    options = OnnxOptions(request.dtype, request.form, choose_opset(request.form, request.opset))
    weights = open_source(request.source, norm_eps=request.norm_eps)
    if request.golden:
        check_options(weights, _golden_options(request))
    clock = Clock()
    try:
        with atomic_directory(request.output, request.force) as folder:
            with clock.step("export"):
                export = export_onnx(weights, options, folder, version=version(), progress=progress)
            if request.golden:
                with clock.step("record golden set"):
                    parts = _record(weights, request, folder, progress)
                clock.seconds |= {f"record golden set: {part}": seconds for part, seconds in parts.items()}
            manifest = _manifest(request, options, weights, export, folder, clock)
            write_manifest(folder, manifest)
            report = None
            if request.golden:
                with clock.step("validate"), OrtBackend(folder / MODEL_FILE) as backend:
                    manifest, report = judge_folder(folder, backend, manifest, progress=_counted("validate", progress))
                _refuse_failed(report)
                manifest = dataclasses.replace(manifest, seconds=clock.seconds, peak_memory_bytes=peak_memory())
                write_manifest(folder, manifest)
    except OSError as error:
        raise ExportFailed(f"cannot write {request.output}: {error.strerror}; free space or choose another") from error
    return OnnxArtifact(request.output, manifest, report)


def _refuse_failed(report: Report) -> None:
    if report.judgement.faults:
        raise ExportFailed(
            f"the exported model does not compute what PyTorch computes: {report.summary}; nothing was written"
        )


def _counted(step: str, progress: Progress) -> Progress:
    return lambda name, number, total: progress(f"{step} {name}", number - 1, total)


def _record(weights: VisionWeights, request: OnnxRequest, folder: Path, progress: Progress) -> dict[str, float]:
    """Record the golden set; returns the seconds of each part."""
    seconds: dict[str, float] = {}
    record_golden(
        weights,
        _golden_options(request),
        folder / GOLDEN_FOLDER,
        progress=_counted("golden", progress),
        seconds=seconds,
    )
    return seconds


def _golden_options(request: OnnxRequest) -> GoldenOptions:
    return GoldenOptions(
        dtype=DTYPES[request.dtype],  # type: ignore[arg-type]  # the table's values are the literals
        packing=request.form.packing,  # type: ignore[arg-type]  # checked by GraphForm
        images=request.images,
        sizes=request.golden_sizes,
        max_patches=request.max_patches,
        device=request.device,
    )


def _manifest(
    request: OnnxRequest,
    options: OnnxOptions,
    weights: VisionWeights,
    export: OnnxExport,
    folder: Path,
    clock: Clock,
) -> Manifest:
    config, form = weights.config, options.form
    plugin = None
    if form.rope == "plugin":
        plugin = PluginRecord(FUSED_QK_ROPE.onnx_name, str(FUSED_QK_ROPE.version), "function", None)
    return Manifest(
        schema_version=SCHEMA_VERSION,
        kind="onnx",
        artifact=MODEL_FILE,
        source=Source(
            given=weights.source,
            revision=None,
            family=config.family,
            weights_sha256=weights.sha256(),
            config=config.to_dict(),
            config_sha256=config.sha256,
            onnx_sha256=None,
        ),
        options=_plain_options(request),
        tool_versions=tool_versions(EXPORT_TOOLS),
        dtype=DTYPES[options.dtype],  # type: ignore[arg-type]
        opset=options.opset,
        rope=form.rope,  # type: ignore[arg-type]
        attention=form.attention,  # type: ignore[arg-type]
        packing=form.packing,  # type: ignore[arg-type]
        plugin=plugin,
        runtime=None,
        profiles=(),
        targets=(),
        warnings=export.warnings,
        seconds=dict(clock.seconds),
        peak_memory_bytes=peak_memory(),
        layers={},
        files=record_files(folder),
        validation=None,
    )


def _plain_options(request: OnnxRequest) -> dict[str, Any]:
    """Options as JSON can hold them; photos by name only, so that no path of this machine travels."""
    return {
        "dtype": request.dtype,
        "rope": request.form.rope,
        "attention": request.form.attention,
        "packing": request.form.packing,
        "opset": request.opset,
        "images": [image.name for image in request.images],
        "golden": request.golden,
        "golden_sizes": [size_text(size) for size in request.golden_sizes],
        "max_patches": request.max_patches,
        "device": request.device,
        "norm_eps": request.norm_eps,
    }
