"""``kvit-export inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from exporter.commands import options


@click.command("inspect")
@click.argument("artifact", type=click.Path(path_type=Path))
@options.JSON
def command(artifact: Path, as_json: bool) -> None:
    """Show what an artifact holds and where it came from.

    ARTIFACT is a folder that this program wrote, or a bare .onnx file: inputs and outputs, operators or layers, sizes,
    rope form, profiles and manifest. Nothing is hashed or run; `verify` does that.
    """
    from exporter.inspection import describe, inspect_artifact

    with options.needs("inspect", "cpu"):  # an ONNX file is read with onnx, an engine's manifest without
        found = inspect_artifact(artifact)
    click.echo(json.dumps(found) if as_json else describe(found))
