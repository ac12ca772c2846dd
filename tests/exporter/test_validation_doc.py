"""docs/validation.md says what the measured results say: its numbers are read back and compared with the JSON."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/validation.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks/results/gate-margins-all.json"
FOUND: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
DTYPES = ("fp32", "bf16", "fp16")

# The last five columns of the table of wrong models: dtype, and whether towers at real width, the tiny ones, or both.
COLUMNS = (
    ("fp32", (True, False)),
    ("bf16", (True,)),
    ("fp16", (True,)),
    ("bf16", (False,)),
    ("fp16", (False,)),
)


def table(head: str) -> list[list[str]]:
    """Cells of the one table whose header begins so, without header and rule."""
    _, start, rest = TEXT.partition(f"\n{head}")
    assert start and head not in rest
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def says(text: str, value: float) -> bool:
    """Whether a number as the page prints it is a value, rounded to the digits that are shown.

    The page has whole numbers from 10 on and two digits below, without trailing zeros; half a unit of the last of these
    digits is allowed, and 1e-3 of it more, for the JSON is rounded itself (to four digits).
    """
    shown = Decimal(text.replace(",", ""))
    unit = Decimal(1) if shown >= 10 else Decimal(10) ** (shown.adjusted() - 1)
    return abs(shown - Decimal(repr(value))) <= unit * Decimal("0.501")


@pytest.mark.parametrize(
    ("text", "value", "right"),
    [("26,870", 26870.0, True), ("26,870", 26871.0, False), ("0.2", 0.1959, True), ("0.2", 0.1949, False),
     ("4.4e-06", 4.397e-06, True), ("2", 1.979, True), ("2", 1.94, False), ("7.4", 7.449, True)],
)  # fmt: skip
def test_numbers_are_read_as_printed(text: str, value: float, right: bool) -> None:
    assert says(text, value) is right


def test_honest_counts() -> None:
    rows = {row[0]: row[1:] for row in table("| tower | fp32 |")}
    measured: dict[str, dict[str, str]] = {}
    for row in FOUND["honest"]:
        measured.setdefault(row["preset"], {})[row["dtype"]] = f"{row['pass']} of {row['seeds']}"
    assert rows == {preset: [cells[dtype] for dtype in DTYPES] for preset, cells in measured.items()}


def test_the_sum_of_honest_artifacts_and_no_false_refusal() -> None:
    passed, seeds = (sum(row[key] for row in FOUND["honest"]) for key in ("pass", "seeds"))
    assert f"\n{passed} of {seeds} passed; there was no false refusal." in TEXT
    assert passed == seeds
    assert FOUND["false_refusals"] == []


def test_margins() -> None:
    rows = {(row[0].replace(" ", "_"), row[1]): row[3:] for row in table("| metric | dtype | limit |")}
    measured = {(row["metric"], row["dtype"]): row for row in FOUND["margins"]}
    assert rows.keys() == measured.keys()
    for key, (honest, at, nearest) in rows.items():
        row = measured[key]
        assert says(honest, row["honest"]), key
        assert at == row["honest_at"], key
        if row["mutant"] is None:
            assert nearest == "–", key  # noqa: RUF001 - the page's dash
            continue
        number, _, name = nearest.partition(" ")
        assert says(number, row["mutant"]), key
        assert name == f"({row['mutant_at']})", key


def check_cell(cell: str, rows: list[dict[str, Any]]) -> None:
    """Compare a cell of the table of wrong models with the results that it is about."""
    refused, seeds = sum(row["refused"] for row in rows), sum(row["seeds"] for row in rows)
    if refused == seeds:
        assert says(cell, min(row["least_excess"] for row in rows)), cell
        return
    match = re.fullmatch(r"(not seen|(\d+) of (\d+)) \(spread (\S+?)(?: to (\S+))?\)", cell)
    assert match, cell
    assert (int(match[2] or 0), int(match[3] or seeds)) == (refused, seeds), cell
    spreads = [row["own_spread"] for row in rows if row["refused"] < row["seeds"]]
    assert says(match[4], min(spreads)), cell
    assert says(match[5] or match[4], max(spreads)), cell
    # the reason that the page gives: an honest error reaches so far along this direction that it only informs
    assert min(spreads) > 0.1, cell


def test_wrong_models() -> None:
    rows = {row[0].strip("`"): row[2:] for row in table("| name | what is wrong |")}
    assert rows.keys() == {row["wrong"] for row in FOUND["wrong_models"]}
    for name, cells in rows.items():
        for cell, (dtype, real) in zip(cells, COLUMNS, strict=True):
            part = [row for row in FOUND["wrong_models"] if (row["wrong"], row["dtype"]) == (name, dtype)]
            check_cell(cell, [row for row in part if ("?layers=" in row["preset"]) in real])


def test_files_of_wrong_models() -> None:
    files = [row for row in FOUND["wrong_models"] if row["form"] == "onnx"]
    assert files == FOUND["wrong_models"]
    made, refused = (sum(row[key] for row in files) for key in ("seeds", "refused"))
    assert f"{made} files, of which {refused} are refused" in " ".join(TEXT.split())


def test_the_results_are_fit_for_a_repository() -> None:
    assert RESULTS.stat().st_size < 1_000_000
    for run in FOUND["runs"]:
        assert not re.search(r"(^|\s)[/~]|[A-Za-z]:\\", run["command"]), run["command"]  # a path of a machine
