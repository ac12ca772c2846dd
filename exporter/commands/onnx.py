"""``kvit-export onnx``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exporter.commands import options

if TYPE_CHECKING:
    from exporter.onnx_artifact import OnnxArtifact


@click.command("onnx")
@click.argument("source", metavar="SOURCE")
@options.OUTPUT
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), default="bf16", show_default=True)
@click.option(
    "--rope",
    type=click.Choice(["plugin", "standard", "plain"]),
    default="plugin",
    show_default=True,
    help="FusedQKRope with a function body, ONNX RotaryEmbedding (opset 23), or elementary operators.",
)
@click.option(
    "--packing",
    type=click.Choice(["single", "packed"]),
    default="single",
    show_default=True,
    help="One item a call without a mask, or several items masked by segment.",
)
@click.option(
    "--attention",
    type=click.Choice(["plain", "op"]),
    default="plain",
    show_default=True,
    help="Matrix products and softmax, or one Attention node a block (opset 23).",
)
@click.option("--opset", type=int, help="ONNX opset, 18 to 25.  [default: 20, or 23 where the form needs it]")
@options.GOLDEN
@click.option("--no-golden", is_flag=True, help="Record no golden set and compare nothing.")
@click.option("--norm-eps", type=float, help="Eps of the tower's norms, where the config has no field for it (K3).")
@options.FORCE
@options.JSON
def command(
    source: str,
    output: Path,
    dtype: str,
    rope: str,
    packing: str,
    attention: str,
    opset: int | None,
    images: tuple[Path, ...],
    golden_sizes: tuple[options.Size, ...],
    max_patches: int,
    device: str,
    no_golden: bool,
    norm_eps: float | None,
    force: bool,
    as_json: bool,
) -> None:
    """Export a vision tower to ONNX and check what was written.

    SOURCE is a checkpoint folder in hub layout, or random:PRESET?seed=N&layers=N with PRESET one of kimi-vl, kimi-k2.5,
    kimi-k3, tiny, tiny-k3. The folder given by -o receives vision_tower.onnx with its weights beside it, golden/,
    report.json, junit.xml and manifest.json; it appears whole or not at all.
    """
    with options.needs("onnx", "cpu"):
        from exporter.onnx_artifact import OnnxRequest, make_onnx
        from model.graph import GraphForm
    from exporter.progress import progress

    request = OnnxRequest(
        source=source,
        output=output,
        dtype=dtype,
        form=GraphForm(rope=rope, attention=attention, packing=packing),
        opset=opset,
        images=images,
        golden=not no_golden,
        golden_sizes=golden_sizes,
        max_patches=max_patches,
        device=device,
        norm_eps=norm_eps,
        force=force,
    )
    with progress() as tell:
        artifact = make_onnx(request, tell)
    if as_json:
        click.echo(json.dumps(_summary(artifact)))
        return
    _print(artifact)


def _worst(artifact: OnnxArtifact) -> tuple[float, float] | None:
    if artifact.report is None:
        return None
    found = [case.measured for case in artifact.report.evidence.cases if case.measured is not None]
    wholes = [measured.relative_l2 for measured in found if measured.relative_l2 is not None]
    tokens = [measured.worst_token for measured in found if measured.worst_token is not None]
    return (max(wholes), max(tokens)) if wholes and tokens else None


def _summary(artifact: OnnxArtifact) -> dict[str, object]:
    worst = _worst(artifact)
    return {
        "folder": str(artifact.folder),
        "artifact": artifact.manifest.artifact,
        "verdict": artifact.report.judgement.verdict.value if artifact.report else None,
        "relative_l2": worst[0] if worst else None,
        "worst_token": worst[1] if worst else None,
        "seconds": dict(artifact.manifest.seconds),
        "peak_memory_bytes": artifact.manifest.peak_memory_bytes,
    }


def _print(artifact: OnnxArtifact) -> None:
    from rich.console import Console

    from exporter.validation.report import print_report

    console = Console(highlight=False, soft_wrap=True)
    if artifact.report is not None:
        print_report(artifact.report, console)
    path = artifact.folder / artifact.manifest.artifact
    size = sum(record.size for name, record in artifact.manifest.files.items() if not name.startswith("golden/"))
    console.print(f"Wrote {path} ({size / 1e6:.1f} MB with its weights).", markup=False)
    worst = _worst(artifact)
    if worst is None:
        console.print("Nothing was compared (--no-golden): this model is NOT VALIDATED.")
        return
    console.print(
        f"ONNX Runtime against PyTorch fp32, worst case: relative L2 {worst[0]:.2e}, worst token {worst[1]:.2e}."
    )
