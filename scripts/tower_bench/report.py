"""Tables and picture of what scripts/bench_tower.py measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Row = dict[str, Any]
NAMES = {"fast": "fast form", "plain": "plain form", "transformers": "transformers", "floor": "floor"}


def call_name(grids: list[list[int]]) -> str:
    """Short text of a call: ``36x46``, ``4x16x24``, ``8 of 32x32``, ``8 items``."""
    items = [f"{h}x{w}" if t == 1 else f"{t}x{h}x{w}" for t, h, w in grids]
    if len(items) == 1:
        return items[0]
    return f"{len(items)} of {items[0]}" if len(set(items)) == 1 else f"{len(items)} items of 12x12 to 46x36"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _time(row: Row, name: str, kind: str) -> str:
    return f"{row[name][kind]:.3g}" if row[name][kind] < 100 else f"{row[name][kind]:.0f}"


def times_table(tower: Row, kind: str, required: dict[str, float]) -> str:
    """Milliseconds of a call by contender, and what part of the floor's speed the fast form has."""
    has_other = "transformers" in tower
    head = ["grid", "tokens", "required, ms", "**fast**, ms", "floor, ms", "of the floor", "plain, ms"]
    if not has_other:
        head.remove("required, ms")
    rows = []
    for row in tower["rows"] + tower["several"]:
        line = [call_name(row["grids"]), str(row["tokens"])]
        if has_other:
            line.append(f"{required.get(str(row['tokens']), '')}" if len(row["grids"]) == 1 else "")
        line += [f"**{_time(row, 'fast', kind)}**", _time(row, "floor", kind), f"{row[f'of_floor_{kind}']:.2f}"]
        line.append(_time(row, "plain", kind))
        if has_other:
            line += [_time(row, "transformers", kind), f"{row['transformers'][kind] / row['fast'][kind]:.1f} x"]
        rows.append(line)
    return _table(head + (["transformers, ms", "to transformers"] if has_other else []), rows)


def memory_table(tower: Row) -> str:
    """Bytes above the weights that a call takes, in MB."""
    names = [name for name in ("fast", "plain", "transformers") if name in tower["rows"][0]]
    rows = [
        [call_name(row["grids"]), *(f"{row[name]['peak_bytes'] / 1e6:.1f}" for name in names)]
        for row in tower["rows"] + tower["several"]
    ]
    return _table(["grid", *(f"{NAMES[name]}, MB" for name in names)], rows)


def first_table(tower: Row) -> str:
    """Milliseconds of first calls."""
    rows = [
        [
            call_name(row["grids"]),
            str(row["grids"][0][1] * row["grids"][0][2]),
            f"{row['first_ms']:.0f}",
            f"{row['second_ms']:.1f}",
        ]
        for row in tower["first_calls"]
    ]
    return _table(["grid, in this order", "tokens", "first call, ms", "second, ms"], rows)


def errors_table(towers: list[Row]) -> str:
    """Relative L2 errors of whole outputs."""
    rows = []
    for tower in towers:
        for row in tower["errors"]:
            line = [tower["source"].removeprefix("random:"), call_name(row["grids"])]
            rows.append([*line, f"{row['fast']:.3e}", f"{row['plain']:.3e}", f"{row['fast_over_plain']:.3f}"])
    return _table(["tower", "call", "fast", "plain", "fast over plain"], rows)


def attention_table(rows: list[Row]) -> str:
    """Microseconds of one attention by kernel; one of this project is for padded heads alone."""
    names = ("split_us", "cudnn_us", "flash_us", "efficient_us")
    lines = [
        [
            f"{row['heads']} x {row['head_dim']}",
            str(row["tokens"]),
            *(f"{row[name]:.1f}" if name in row else "" for name in names),
        ]
        for row in rows
    ]
    return _table(["heads x d", "tokens", "two parts, us", "cuDNN, us", "flash, us", "efficient, us"], lines)


def tables(result: Row) -> str:
    """All tables as Markdown."""
    parts = []
    for tower in result["towers"]:
        name = tower["source"].removeprefix("random:")
        titles = {"rested_ms": "after a rest", "alone_ms": "one at a time", "in_a_row_ms": "in a row"}
        for kind, title in titles.items():
            parts.append(f"### {name}, {title}\n\n{times_table(tower, kind, result['required_ms'])}")
        parts.append(f"### {name}, memory of a call\n\n{memory_table(tower)}")
        parts.append(f"### {name}, first calls\n\n{first_table(tower)}")
    parts.append(f"### Errors\n\n{errors_table(result['towers'])}")
    parts.append(f"### Attention\n\n{attention_table(result['attention'])}")
    return "\n\n".join(parts)


def draw(result: Row, picture: Path) -> None:
    """Draw milliseconds by tokens of single images, both axes logarithmic, and the fraction of the floor's speed.

    Args:
        result: of a run.
        picture: PNG to write.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    towers = result["towers"]
    figure, axes = plt.subplots(1, len(towers), figsize=(5.5 * len(towers), 4.2), squeeze=False)
    styles = {"transformers": "C1s--", "plain": "C0^--", "fast": "C2o-", "floor": "k:"}
    for axis, tower in zip(axes[0], towers, strict=True):
        rows = sorted(tower["rows"], key=lambda row: int(row["tokens"]))
        for name, style in styles.items():
            if name in rows[0]:
                values = [row[name]["alone_ms"] for row in rows]
                axis.loglog([row["tokens"] for row in rows], values, style, label=NAMES[name], base=2)
        axis.set_title(tower["source"].removeprefix("random:") + ", bf16, one item a call")
        axis.set_xlabel("tokens")
        axis.set_ylabel("ms from pixels to merged rows")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter(lambda value, _: f"{value:g}")
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.legend()
    figure.suptitle(f"{result['gpu']}, PyTorch {result['versions']['torch']}, {result['date'][:10]}", fontsize=9)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    plt.close(figure)
