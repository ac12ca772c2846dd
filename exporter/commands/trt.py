"""``kvit-export trt``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exporter.commands import options

if TYPE_CHECKING:
    from exporter.trt.build import EngineArtifact


@click.command("trt")
@click.argument("folder", metavar="ONNX_FOLDER", type=click.Path(path_type=Path))
@options.OUTPUT
@click.option("--flavor", help="tensorrt or tensorrt_rtx.  [default: tensorrt where there is a GPU]")
@click.option(
    "--profile",
    "profiles",
    metavar="MIN:OPT:MAX",
    multiple=True,
    help="Patches of one frame, of all items; may be repeated.  [default: what the golden set covers, up to 4096]",
)
@click.option("--frames", metavar="N", help="Most frames of the profiles given, or MIN:OPT:MAX.  [default: 1]")
@click.option("--items", metavar="N", help="Most items of one call, or MIN:OPT:MAX.  [default: 1]")
@click.option(
    "--target-sm",
    multiple=True,
    metavar="SM",
    help="TensorRT-RTX: compute capability such as 89; may be repeated.  [default: all but Turing]",
)
@click.option("--opt-level", type=click.IntRange(0, 5), help="Builder optimisation level.  [default: TensorRT's]")
@click.option("--workspace", type=click.IntRange(min=1), metavar="MIB", help="Most scratch memory of a kernel.")
@click.option("--timing-cache", type=click.Path(path_type=Path, dir_okay=False), help="Kernel times, read and written.")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), help="Folder of engines built before.")
@click.option("--no-plugin", is_flag=True, help="Build the RoPE from elementary operators.")
@click.option("--strict", is_flag=True, help="Fail when TensorRT warns of overflow or subnormal weights.")
@click.option("--golden", type=click.Path(path_type=Path), help="Golden set to judge by.  [default: the model's]")
@click.option("--ignore-memory", is_flag=True, help="Build although attention may need more memory than is free.")
@click.option("--no-validate", is_flag=True, help="Do not run the engine; it stays NOT VALIDATED.")
@options.FORCE
@options.JSON
def command(
    folder: Path,
    output: Path,
    flavor: str | None,
    profiles: tuple[str, ...],
    frames: str | None,
    items: str | None,
    target_sm: tuple[str, ...],
    opt_level: int | None,
    workspace: int | None,
    timing_cache: Path | None,
    cache: Path | None,
    no_plugin: bool,
    strict: bool,
    golden: Path | None,
    ignore_memory: bool,
    no_validate: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Build a TensorRT engine from an exported tower and, where it can run, judge it.

    ONNX_FOLDER is what kvit-export onnx wrote. The folder given by -o receives vision_tower.engine, golden/,
    manifest.json and, where the engine ran, report.json and junit.xml. Exit code 0 says that the engine was built and
    that nothing is known against it; 6 and 7 are the verdict where it ran. Whether it may be deployed is what
    kvit-export verify says.
    """
    from exporter.progress import progress
    from exporter.trt.build import make_engine
    from exporter.trt.plan import TrtRequest

    request = TrtRequest(
        folder=folder,
        output=output,
        flavor=flavor,
        profiles=profiles,
        frames=frames,
        items=items,
        target_sm=target_sm,
        opt_level=opt_level,
        workspace_mib=workspace,
        timing_cache=timing_cache,
        cache=cache,
        plugin=not no_plugin,
        strict=strict,
        golden=golden,
        ignore_memory=ignore_memory,
        validate=not no_validate,
        force=force,
    )
    with progress() as tell:
        artifact = make_engine(request, tell, lambda line: click.echo(line, err=True))
    if as_json:
        click.echo(json.dumps(_summary(artifact)))
    else:
        _print(artifact)
    if artifact.report is not None:
        from exporter.validation.report import error_for

        error = error_for(artifact.report.judgement)
        if error is not None:
            raise error


def _summary(artifact: EngineArtifact) -> dict[str, object]:
    from exporter.trt.profiles import describe

    manifest = artifact.manifest
    return {
        "folder": str(artifact.folder),
        "artifact": manifest.artifact,
        "runtime": str(manifest.runtime),
        "targets": list(manifest.targets),
        "profiles": [describe(profile) for profile in manifest.profiles],
        "plugin": None if manifest.plugin is None else manifest.plugin.kind,
        "size_bytes": manifest.files[manifest.artifact].size,
        "cached": artifact.cached,
        "verdict": artifact.report.judgement.verdict.value if artifact.report else "NOT VALIDATED",
        "advice": artifact.advice,
        "seconds": dict(manifest.seconds),
        "peak_memory_bytes": manifest.peak_memory_bytes,
    }


def _print(artifact: EngineArtifact) -> None:
    from rich.console import Console

    from exporter.validation.report import print_report

    console = Console(highlight=False, soft_wrap=True)
    if artifact.report is not None:
        print_report(artifact.report, console)
    manifest = artifact.manifest
    path, size = artifact.folder / manifest.artifact, manifest.files[manifest.artifact].size
    plugin = "" if manifest.plugin is None else f", RoPE by {_PLUGINS[manifest.plugin.kind]}"
    origin = "from the cache" if artifact.cached else f"in {manifest.seconds.get('build', 0):.1f} s"
    console.print(f"Wrote {path} ({size / 1e6:.1f} MB, {manifest.runtime}{plugin}) {origin}.", markup=False)
    if artifact.report is None:
        console.print(f"NOT VALIDATED: {artifact.advice}.", markup=False)
    elif artifact.advice:
        console.print(artifact.advice, markup=False)


_PLUGINS = {"aot": "the compiled plugin", "v3": "the Python plugin", "function": "elementary operators"}
