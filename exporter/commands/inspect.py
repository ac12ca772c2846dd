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

    ARTIFACT is a folder that this program wrote, or a bare .onnx file: inputs and outputs, operators, sizes, rope form
    and manifest. Nothing is hashed or run; `verify` does that.
    """
    with options.needs("inspect", "cpu"):
        import onnx  # noqa: F401 - so that the message names it
    from exporter.inspection import describe, inspect_artifact

    found = inspect_artifact(artifact)
    click.echo(json.dumps(found) if as_json else describe(found))
