"""``kvit-export golden``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from exporter.commands import options


@click.command("golden")
@click.argument("source", metavar="SOURCE")
@options.OUTPUT
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option("--packing", type=click.Choice(["single", "packed"]), default="single", show_default=True)
@options.GOLDEN
@click.option("--norm-eps", type=float, help="Eps of the tower's norms, where the config has no field for it (K3).")
@options.FORCE
@options.JSON
def command(
    source: str,
    output: Path,
    dtype: str,
    packing: str,
    images: tuple[Path, ...],
    golden_sizes: tuple[options.Size, ...],
    max_patches: int,
    device: str,
    norm_eps: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Record what PyTorch computes, to judge artifacts by.

    Runs the live tower of SOURCE in fp32 on photos and noise, notes its own error in --dtype, and the differences that
    named wrong models make. `kvit-export onnx` does the same by default.
    """
    with options.needs("golden", "cpu"):
        from exporter.onnx_artifact import DTYPES
        from exporter.validation.golden_cases import GoldenOptions
        from exporter.validation.record import record_golden
        from model.checkpoint import open_source
    from exporter.progress import progress

    asked = GoldenOptions(
        dtype=DTYPES[dtype],  # type: ignore[arg-type]  # the table's values are the literals
        packing=packing,  # type: ignore[arg-type]  # click has checked it
        images=images,
        sizes=golden_sizes,
        max_patches=max_patches,
        device=device,
    )
    with progress() as tell:
        cases = record_golden(
            open_source(source, norm_eps=norm_eps),
            asked,
            output,
            force=force,
            progress=lambda name, number, total: tell(f"golden {name}", number - 1, total),
        )
    click.echo(json.dumps({"folder": str(output), "cases": cases}) if as_json else f"Wrote {output}: {cases} cases.")
