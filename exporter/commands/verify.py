"""``kvit-export verify``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from exporter.commands import options


@click.command("verify")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--anywhere", is_flag=True, help="Leave GPU and TensorRT out of the check.")
@options.JSON
def command(folder: Path, anywhere: bool, as_json: bool) -> None:
    """Exit with 0 only if this very artifact passed, for this GPU and this TensorRT.

    Hashes every file and computes the verdict again from the measured numbers; nothing is run. 3: changed or damaged,
    6: FAILED, 7: not or not completely validated, or for another GPU or TensorRT.
    """
    from exporter.validation.verify import verify

    gpu, runtime = (None, None) if anywhere else _here(folder)
    found = verify(folder, gpu=gpu, runtime=runtime, anywhere=anywhere)
    if as_json:
        click.echo(json.dumps({"verdict": "PASS", **asdict(found)}))
        return
    place = f", bound to {found.bound_to}" if found.bound_to else ""
    click.echo(f"PASS: {folder / found.artifact} ({found.dtype}), {found.cases} cases by {found.backend}{place}.")


def _here(folder: Path) -> tuple[str | None, tuple[str, str] | None]:
    """The GPU and the TensorRT here; asked only where the verdict is on an engine, which depends on them."""
    from exporter.manifest import read_manifest
    from exporter.validation.gpu import cuda_capability

    wanted = read_manifest(folder).runtime
    if wanted is None:
        return None, None
    from exporter.trt.flavor import installed

    found = installed(wanted.flavour)
    return cuda_capability(), None if found is None else (found.name, found.version)
