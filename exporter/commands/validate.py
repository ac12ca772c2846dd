"""``kvit-export validate``."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exporter.commands import options
from exporter.errors import BadInput, NotValidated, Usage, ValidationFailed

if TYPE_CHECKING:
    from exporter.manifest import Manifest
    from exporter.validation.backends import Backend
    from exporter.validation.report import Report
    from exporter.validation.runner import Progress as Told

BACKENDS = ("onnxruntime-cpu", "onnxruntime-cuda", "engine", "torch")


@click.command("validate")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    help="What runs it.  [default: onnxruntime-cpu for ONNX, engine for engines]",
)
@click.option("--golden", type=click.Path(path_type=Path), help="Golden set for a bare file, or another one.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="For --backend torch.")
@click.option("--source", help="For --backend torch: the checkpoint, if it is not where the manifest says.")
@click.option(
    "--case",
    "only",
    multiple=True,
    help="Run only this case; may be repeated. At best NOT VALIDATED, and an earlier verdict stays.",
)
@click.option("--factor", type=float, default=1.0, help="Multiply every limit. At best NOT VALIDATED, likewise.")
@click.option("--flavor", help="For a bare .engine file: tensorrt or tensorrt_rtx.  [default: what is installed]")
@click.option(
    "--max-latency", type=float, metavar="MS", help="Engines: fail (6) if a case's 99th percentile is slower."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for report.json and junit.xml.")
@options.JSON
def command(
    artifact: Path,
    backend: str | None,
    golden: Path | None,
    device: str,
    source: str | None,
    only: tuple[str, ...],
    factor: float,
    flavor: str | None,
    max_latency: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Run an artifact on its golden set and judge it.

    ARTIFACT is a folder that this program wrote, or a bare .onnx or .engine file with --golden. An engine runs in a
    process of its own. Exit code 0 is PASS, 6 FAILED, 7
    NOT VALIDATED; nothing else is ever 0.
    """
    from exporter.progress import progress

    if factor <= 0 or factor != factor:  # noqa: PLR0124 - NaN
        raise Usage(f"--factor {factor}: expected a number above 0")
    if max_latency is not None and not max_latency > 0:
        raise Usage(f"--max-latency {max_latency}: expected milliseconds above 0")
    if max_latency is not None:
        _check_timed(artifact, backend)
    _check_writable(artifact, output)
    with progress() as tell:

        def told(name: str, number: int, total: int) -> None:
            tell(f"validate {name}", number - 1, total)

        stays = ""
        if artifact.is_dir() and golden is None and backend != "torch":
            report, stays = _folder(artifact, backend, only, factor, told)
        else:
            report = _other(artifact, backend, golden, device, source, flavor, only, factor, told)
    _finish(report, stays, output, as_json, max_latency)


def _check_timed(artifact: Path, backend: str | None) -> None:
    """Refuse a limit on times before anything runs, where none will be taken."""
    timed = backend in (None, "engine") and artifact.suffix != ".onnx"
    if timed and artifact.is_dir():
        from exporter.manifest import read_manifest

        timed = read_manifest(artifact).kind == "engine"
    if not timed:
        raise Usage("--max-latency: only engines are timed; kvit-export bench times ONNX models and live towers")


def _check_writable(artifact: Path, output: Path | None) -> None:
    """Find out before the run whether its outcome can be written down."""
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Usage(f"-o {output}: {error.strerror}; choose another folder") from error
    folder = output or (artifact if artifact.is_dir() else None)
    if folder is not None and not os.access(folder, os.W_OK):
        raise Usage(f"{folder} cannot be written, so the report has no place; make it writable, or copy the artifact")


def _folder(
    artifact: Path, backend: str | None, only: tuple[str, ...], factor: float, told: Told
) -> tuple[Report, str]:
    """Judge an artifact: the report, and what is to be said where an earlier record stays."""
    from exporter.manifest import check_files, read_manifest
    from exporter.validation.judging import judge_folder

    manifest = read_manifest(artifact)
    check_files(artifact, manifest)
    if not any(name.startswith("golden/") for name in manifest.files):
        raise BadInput(f"{artifact} has no golden set; record one with kvit-export golden and pass --golden")
    with _folder_backend(artifact, manifest, backend) as runner:
        manifest, report = judge_folder(
            artifact, runner, manifest, limit_scale=factor, only=only or None, progress=told
        )
    kept = manifest.validation
    if kept is None or kept.judgement is report.judgement:
        return report, ""
    return report, f"{artifact} keeps the verdict of {kept.created}: {kept.judgement.verdict.value}"


def _folder_backend(artifact: Path, manifest: Manifest, backend: str | None) -> AbstractContextManager[Backend]:
    if manifest.kind == "onnx":
        return _onnx_backend(artifact / manifest.artifact, backend)
    if backend not in (None, "engine"):
        raise Usage(f"--backend {backend}: {artifact} holds an engine, which TensorRT alone runs")
    from exporter.trt.backend import open_backend

    return open_backend(artifact, manifest)


def _other(
    artifact: Path,
    backend: str | None,
    golden: Path | None,
    device: str,
    source: str | None,
    flavor: str | None,
    only: tuple[str, ...],
    factor: float,
    told: Told,
) -> Report:
    """A bare file, another golden set, or the live tower: judged by its numbers, recorded in no manifest."""
    from exporter.manifest import GOLDEN_FOLDER, check_files, read_manifest
    from exporter.validation.golden import open_golden
    from exporter.validation.judging import judge_file

    manifest, path = None, artifact
    kind = "engine" if artifact.suffix == ".engine" or backend == "engine" else "onnx"
    if artifact.is_dir():
        manifest = read_manifest(artifact)
        kind = manifest.kind
        check_files(artifact, manifest)
        path, source = artifact / manifest.artifact, source or manifest.source.given
        golden = golden or artifact / GOLDEN_FOLDER
    elif not artifact.exists():
        raise BadInput(f"{artifact}: no such file or folder")
    if golden is None:
        raise Usage(f"{artifact} is a bare file; pass the golden set that shall judge it with --golden")
    opened = open_golden(golden)
    runner: AbstractContextManager[Backend]
    if backend == "torch":
        with options.needs("validate --backend torch", "cpu"):
            from exporter.validation.torch_backend import TorchBackend
        if source is None:
            raise Usage("--backend torch runs the live tower; pass its checkpoint with --source")
        kind, runner = "tower", TorchBackend(source, opened.header.dtype, device)
    elif manifest is not None:
        runner = _folder_backend(artifact, manifest, backend)
    else:
        if kind == "engine" and backend not in (None, "engine"):
            raise Usage(f"--backend {backend}: {path} is an engine, which TensorRT alone runs")
        runner = _bare_engine(path, flavor) if kind == "engine" else _onnx_backend(path, backend)
    with runner as ready:
        return judge_file(path, kind, ready, opened, limit_scale=factor, only=only or None, progress=told)


def _bare_engine(path: Path, flavor: str | None) -> AbstractContextManager[Backend]:
    """An engine of unknown origin; it names the plugins that it holds."""
    from exporter.trt.backend import EngineBackend
    from exporter.trt.bare import names_plugin

    return EngineBackend(path, flavor, v3_plugin=names_plugin(path))


def _onnx_backend(path: Path, backend: str | None) -> AbstractContextManager[Backend]:
    if backend == "engine":
        raise Usage(f"--backend engine: {path} is an ONNX model; build an engine from it with kvit-export trt")
    from exporter.validation.backends import OrtBackend

    return OrtBackend(path, "cuda" if backend == "onnxruntime-cuda" else "cpu")


def _finish(report: Report, stays: str, output: Path | None, as_json: bool, max_latency: float | None) -> None:
    from rich.console import Console

    from exporter.records import to_text
    from exporter.validation.report import error_for, print_report, write_report

    if output is not None:
        write_report(output, report)
    if as_json:
        click.echo(to_text(report), nl=False)
    else:
        print_report(report, Console(highlight=False))
        if stays:
            click.echo(stays)
    error = error_for(report.judgement)
    if error is not None:
        raise error
    if max_latency is not None:
        _check_latency(report, max_latency)


def _check_latency(report: Report, limit: float) -> None:
    """Hold the times against what the user allows; they are no part of the verdict on the numbers."""
    from exporter.validation.latency import slow_cases

    # a first call compiles and plans, which is nothing that the artifact takes in production
    timed = [(detail.name, detail.latency) for detail in report.details if detail.latency and detail.latency.warmup]
    if not timed:
        raise NotValidated(f"--max-latency {limit:g}: this backend takes no times of warm calls; validate an engine")
    slow = slow_cases(timed, limit)
    if slow:
        more = f" (and {len(slow) - 1} more)" if len(slow) > 1 else ""
        raise ValidationFailed(f"--max-latency: {slow[0]}{more}; the numbers themselves passed")
