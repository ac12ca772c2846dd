"""Tables and a picture from the benchmark's JSON file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLOPS_PER_PAIR = 6  # four products and two sums


def tables(result: dict[str, Any]) -> str:
    """The file's tables as Markdown: shapes, conditions, a layer, the CPU's share, launch sizes; those that it has."""
    makers: dict[str, tuple[Callable[[Any], str], ...]] = {
        "rows": (_rows, _conditions),
        "layers": (_layers,),
        "host_us": (_host,),
        "sweep": (_sweep,),
    }
    return "\n\n".join(make(result[key]) for key, group in makers.items() if key in result for make in group)


def _table(header: list[str], rows: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def _name(row: dict[str, Any]) -> str:
    dtype = {"bfloat16": "", "float16": " fp16", "float32": " fp32"}[row.get("dtype", "bfloat16")]
    return f"{row['tokens']} x {row['heads']} x {row['head_dim']}{dtype}"


def _rows(rows: list[dict[str, Any]]) -> str:
    header = ["tokens x heads x d", "fused, us", "min to max", "TB/s", "copy, us", "of the copy"]
    header += ["two launches", "native, us", "to native", "sketch, us"]
    lines = []
    for row in rows:
        fused = row["fused"]
        lines.append(
            [
                _name(row),
                f"**{fused['median_us']:.2f}**",
                f"{fused['min_us']:.2f} to {fused['max_us']:.2f}",
                f"{fused['gb_per_s'] / 1e3:.2f}",
                f"{row['copy']['median_us']:.2f}",
                f"{row['ratio_to_copy']:.3f}",
                f"{row['speedup_to_two_launches']:.2f} x",
                f"{row['native']['median_us']:.1f}",
                f"{row['speedup_to_native']:.2f} x",
                f"{row['sketch_us']:.2f}" if row["sketch_us"] else "",
            ]
        )
    return _table(header, lines)


def _conditions(rows: list[dict[str, Any]]) -> str:
    header = ["tokens x heads x d", "fused, us", "outputs not rotated, us"]
    header += ["no dependent launch, us", "of its copy"]
    lines = [
        [
            _name(row),
            f"{row['fused']['median_us']:.2f}",
            f"{row['fused_same_outputs']['median_us']:.2f}",
            f"{row['fused_plain']['median_us']:.2f}",
            f"{row['ratio_to_copy_plain']:.3f}",
        ]
        for row in rows
    ]
    return _table(header, lines)


def _layers(layers: list[dict[str, Any]]) -> str:
    header = ["projection, rotation, attention", "no rotation, us", "fused, us", "without dependent launch, us"]
    names = ("no rotation", "fused", "plain")
    return _table(header, [[_name(row), *(f"{row[name]['median_us']:.2f}" for name in names)] for row in layers])


def _host(host: dict[str, float]) -> str:
    modes = ("inference_mode", "no_grad")
    calls = [name.split(": ", 1)[1] for name in host if name.startswith(modes[0])]
    lines = [[call, *(f"{host[f'{mode}: {call}']:.1f}" for mode in modes)] for call in calls]
    return _table(["CPU time of one eager call, us", *modes], lines)


def _sweep(sweep: list[dict[str, Any]]) -> str:
    header = ["tokens x heads x d", "shipped: threads x vectors", "us", "best", "us", "shipped over best"]
    lines = []
    for row in sweep:
        times = row["threads_x_vectors_us"]
        best = min(times, key=times.__getitem__)
        over = f"{row['shipped_over_best']:.3f}"
        lines.append([_name(row), row["shipped"], f"{times[row['shipped']]:.2f}", best, f"{times[best]:.2f}", over])
    return _table(header, lines)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the roofline, and the bandwidth by size, of the fused kernel, the copy and the native form."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (roof, size) = plt.subplots(1, 2, figsize=(11, 4.6), constrained_layout=True)
    _draw_roofline(roof, result)
    _draw_bandwidth(size, result)
    figure.suptitle(f"Rotating q and k, bf16, {result['gpu']}, {result['date'][:10]}")
    temporary = path.with_suffix(f".{os.getpid()}{path.suffix}")
    figure.savefig(temporary, dpi=130, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)
    temporary.replace(path)


_SERIES = (
    ("fused", "fused kernel", "C0o"),
    ("copy", "copy of the same bytes", "C1x"),
    ("native", "complex multiplication", "C2s"),
)


def _bf16(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["dtype"] == "bfloat16"]


def _draw_roofline(axes: Any, result: dict[str, Any]) -> None:  # noqa: ANN401  matplotlib is not needed to import this
    roof = result["copy_gb_per_s"]
    intensities = [0.4, 1.2]
    axes.loglog(intensities, [roof * x for x in intensities], "k-", lw=1, label=f"memory: {roof / 1e3:.2f} TB/s")
    for key, label, marker in _SERIES:
        if key == "copy":
            continue
        points = [
            (flops / row["bytes"], flops / row[key]["median_us"] / 1e3)
            for row in _bf16(result)
            if (flops := FLOPS_PER_PAIR * row["tokens"] * row["heads"] * row["head_dim"])
        ]
        axes.loglog(*zip(*points, strict=True), marker, ls="", ms=5, alpha=0.8, label=label)
    ticks = [0.4, 0.6, 0.8, 1.0, 1.2]
    axes.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set(xlabel="flop per byte that must move", ylabel="GFLOP/s", title="Roofline")
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.3, which="both")


def _draw_bandwidth(axes: Any, result: dict[str, Any]) -> None:  # noqa: ANN401
    rows = sorted(_bf16(result), key=lambda row: row["bytes"])
    for key, label, marker in _SERIES:
        bandwidths = [row[key]["gb_per_s"] / 1e3 for row in rows]
        axes.semilogx([row["bytes"] / 1e6 for row in rows], bandwidths, marker, ls="-", lw=0.6, ms=5, label=label)
    axes.axhline(result["copy_gb_per_s"] / 1e3, color="k", lw=1, label="copy of 2 GiB")
    axes.set(xlabel="MB that must move", ylabel="TB/s", title="Bandwidth by size", ylim=(0, None))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
