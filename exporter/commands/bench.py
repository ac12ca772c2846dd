"""``kvit-export bench``."""

from __future__ import annotations

import math
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter.commands import options
from exporter.errors import PROGRAM, Usage

if TYPE_CHECKING:
    from exporter.bench.report import BenchReport

_ARGUMENTS = "exporter.bench.arguments"


class _Recorded(click.Command):
    """A command that remembers its arguments as they were written, for the report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


@click.command("bench", cls=_Recorded)
@click.argument("targets", metavar="SOURCE|ARTIFACT...", nargs=-1, required=True)
@click.option(
    "--case",
    "sizes",
    type=options.GridSize(),
    multiple=True,
    help="Call in patches: 36x46, a clip 4x30x34 (frames first), or several items 36x46+16x16; may be repeated.  "
    "[default: 16x16 and 32x32, and 64x64 where there is a GPU]",
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Of live towers.  [default: bf16 on a GPU, fp32 on a CPU]",
)
@click.option(
    "--device",
    "devices",
    type=click.Choice(["auto", "cpu", "cuda"]),
    multiple=True,
    help="Where live towers run; may be repeated.  [default: auto, which is cuda where PyTorch sees a GPU]",
)
@click.option(
    "--backend",
    "backends",
    type=click.Choice(["onnxruntime-cpu", "onnxruntime-cuda"]),
    multiple=True,
    help="What runs ONNX models; may be repeated.  [default: the CPU, and CUDA where ONNX Runtime has it]",
)
@click.option("--flavor", help="For bare .engine files: tensorrt or tensorrt_rtx.  [default: what is installed]")
@click.option("--repeats", type=click.IntRange(min=1), default=20, show_default=True, help="Calls that are timed.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, show_default=True, help="Calls after the first that are not."
)
@click.option(
    "--max-seconds",
    type=float,
    default=60.0,
    show_default=True,
    help="Repeat a case no more after so long, once it has three timed calls.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: what each library takes]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="JSON file that shall hold the report.")
@options.JSON
@click.pass_context
def command(
    context: click.Context,
    targets: tuple[str, ...],
    sizes: tuple[options.Size, ...],
    dtype: str | None,
    devices: tuple[str, ...],
    backends: tuple[str, ...],
    flavor: str | None,
    repeats: int,
    warmup: int,
    max_seconds: float,
    threads: int | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Time live towers, ONNX models and engines side by side, and compare what they compute.

    Each argument is a SOURCE, which runs as the live PyTorch tower, a folder that this program wrote, or a bare .onnx
    or .engine file. All get the same pixels, each in a process of its own. A call counts from arrays in host memory to
    the result in host memory; its first is told apart. What cannot run here is shown with its reason; exit code 0 says
    that at least one target ran, 8 that none did.
    """
    from exporter.bench import stage
    from exporter.bench.targets import kinds_of, resolve
    from exporter.progress import progress
    from exporter.validation.gpu import cuda_capability

    if not (math.isfinite(max_seconds) and max_seconds > 0):
        raise Usage(f"--max-seconds {max_seconds}: expected seconds above 0")
    if "auto" in devices and len(devices) > 1:
        raise Usage("--device auto chooses one device; leave it out, or name the devices")
    _check_used(kinds_of(targets), dtype=dtype, device=devices, backend=backends, flavor=flavor)
    _check_output(output)
    cases = stage.cases_of(sizes, cuda_capability())
    rows = resolve(
        targets,
        dtype=None if dtype is None else _DTYPES[dtype],  # type: ignore[arg-type]  # the table's values are the literals
        devices=devices or ("auto",),
        backends=backends,
        flavor=flavor,
    )
    settings = stage.settings_of(warmup=warmup, repeats=repeats, max_seconds=max_seconds, threads=threads)
    line = shlex.join([PROGRAM, "bench", *context.meta[_ARGUMENTS]])
    with progress() as tell:
        report = stage.run_bench(rows, cases, settings, command=line, tell=tell)
    _finish(report, output, as_json)


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _check_used(kinds: tuple[str, ...], **given: Any) -> None:  # noqa: ANN401
    """Refuse an option that no target heeds."""
    # an artifact folder holds either kind, which its manifest tells later
    concerned = {"dtype": ("tower",), "device": ("tower",), "backend": ("onnx", "artifact"), "flavor": ("engine",)}
    what = {"tower": "SOURCE", "onnx": "ONNX model", "engine": "bare .engine file"}
    for name, value in given.items():
        if value and not set(concerned[name]) & set(kinds):
            raise Usage(f"--{name}: no target is a{'n' * (name == 'backend')} {what[concerned[name][0]]}")


def _check_output(output: Path | None) -> None:
    """Find out before the run whether its outcome can be written, and that no other file is lost by it."""
    if output is None:
        return
    from exporter.bench.report import is_report

    if output.suffix != ".json":
        raise Usage(f"-o {output}: expected a file name that ends with .json")
    if output.exists() and not is_report(output):
        raise Usage(f"-o {output} exists and is no report of bench; choose another name")
    if not os.access(output.parent, os.W_OK):
        raise Usage(f"-o {output}: its folder does not exist or cannot be written; choose another")


def _finish(report: BenchReport, output: Path | None, as_json: bool) -> None:
    from exporter.bench.report import error_for
    from exporter.bench.table import print_bench, unexplained
    from exporter.records import to_text

    text = to_text(report)
    unwritten = None if output is None else _write(output, text)
    if as_json:
        click.echo(text, nl=False)
    else:
        from rich.console import Console

        print_bench(report, Console(highlight=False))
    for line in unexplained(report):
        click.echo(f"{PROGRAM}: {line}", err=True)
    error = unwritten or error_for(report)
    if error is not None:
        raise error


def _write(output: Path, text: str) -> Usage | None:
    """Write the file; where that fails the report is still shown, since making it may have taken an hour."""
    from exporter.files import write_text

    try:
        write_text(output, text)
    except OSError as error:
        return Usage(f"-o {output}: {error.strerror}; the report was only printed")
    return None
