"""A benchmark's report for people: the targets, their times on each case, and how far their outputs lie apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exporter.bench.report import BenchReport, CaseResult, Difference, TargetResult
from exporter.errors import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NONE = "-"


def print_bench(report: BenchReport, console: Console) -> None:
    """Print the report.

    Args:
        report: the report.
        console: where to.
    """
    console.print(_targets(report))
    console.print("milliseconds of a call, from host memory to host memory")
    console.print(_times(report))
    if report.differences:
        console.print("relative L2 difference of the outputs (!: more than the dtypes explain)")
        console.print(_differences(report))
    for line in [*_reasons(report), *_notes(report)]:
        console.print(line, highlight=False, markup=False)


def unexplained(report: BenchReport) -> list[str]:
    """List the differences that no dtype explains, as text: one line a pair of targets.

    Args:
        report: the report.
    """
    targets = {target.number: target for target in report.targets}
    pairs: dict[tuple[int, int], list[Difference]] = {}
    for entry in report.differences:
        if not entry.explained:
            pairs.setdefault((entry.first, entry.second), []).append(entry)
    lines = []
    for (first, second), entries in pairs.items():
        names = " and ".join(f"#{number} {targets[number].given}" for number in (first, second))
        dtypes = " and ".join(str(targets[number].dtype) for number in (first, second))
        worst = max(entries, key=lambda entry: float("inf") if entry.relative_l2 is None else entry.relative_l2)
        found = "by more than can be measured" if worst.relative_l2 is None else f"by {worst.relative_l2:.2g}"
        where = ", ".join(entry.case for entry in entries)
        lines.append(
            f"{names} differ on {where} {found} (relative L2), {dtypes} explain {worst.allowed:.2g}; they do not "
            "compute the same, so do not compare their speed"
        )
    return lines


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE, padding=(0, 1, 0, 0))


def _targets(report: BenchReport) -> Table:
    table = _table()
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("target", overflow="fold")
    table.add_column("backend", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("load s", justify="right", no_wrap=True)
    table.add_column("recorded", no_wrap=True)
    table.add_column("", no_wrap=True)
    for target in report.targets:
        style = {"measured": None, "cannot run": "yellow", "bad input": "red"}[target.status]
        load = _NONE if target.load_seconds is None else f"{target.load_seconds:.2f}"
        dtype, verdict = target.dtype or _NONE, target.verdict or _NONE
        cells = (target.given, target.backend, dtype, load, verdict, _remark(target))
        table.add_row(str(target.number), *map(_plain, cells), style=style)
    return table


def _plain(text: str) -> str:
    """A text out of a file name or a library, which may hold what rich takes for markup."""
    from rich.markup import escape

    return escape(one_line(text))


def _remark(target: TargetResult) -> str:
    if target.status != "measured":
        return target.status
    return "emulated" if target.info is not None and target.info.emulated else ""


def _reasons(report: BenchReport) -> list[str]:
    """Why a target did not run, or not on some case."""
    lines = []
    for target in report.targets:
        if target.status != "measured":
            lines.append(f"#{target.number} {target.status}: {target.reason}")
            continue
        missing = [found for found in target.cases if found.status != "measured"]
        lines += [f"#{target.number} {found.case} {found.status}: {found.reason}" for found in missing]
    return [one_line(line) for line in lines]


def _times(report: BenchReport) -> Table:
    table = _table()
    table.add_column("case", overflow="fold")
    table.add_column("#", justify="right", no_wrap=True)
    for name in ("first", "p50", "p90", "p99", "GPU p50", "tokens/s", "x 1st", "x best"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, case in enumerate(report.cases):
        for target in report.targets:
            found = target.cases[index]
            style = {"measured": None, "skipped": "dim", "lost": "red"}[found.status]
            last = target is report.targets[-1]
            table.add_row(case.name, str(target.number), *_cells(found), style=style, end_section=last)
    return table


def _cells(found: CaseResult) -> list[str]:
    if found.call_ms is None:
        return [_NONE] * 8
    times = found.call_ms
    rate = _NONE if found.tokens_per_second is None else f"{found.tokens_per_second:,.0f}"
    gpu = None if found.parts is None else found.parts.gpu.p50
    return [
        *(_number(value) for value in (found.first_ms, times.p50, times.p90, times.p99, gpu)),
        rate,
        *(_number(value, 3) for value in (found.times_first, found.times_fastest)),
    ]


def _number(value: float | None, digits: int = 4) -> str:
    """So many digits, without an exponent where that is possible."""
    if value is None:
        return _NONE
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:#.{digits}g}"


def _differences(report: BenchReport) -> Table:
    """The lower half of each case's matrix."""
    table = _table()
    table.add_column("case", overflow="fold")
    table.add_column("#", justify="right", no_wrap=True)
    numbers = [target.number for target in report.targets]
    for number in numbers[:-1]:
        table.add_column(f"#{number}", justify="right", no_wrap=True)
    found = {(entry.case, entry.first, entry.second): entry for entry in report.differences}
    for case in report.cases:
        for second in numbers[1:]:
            cells = [found.get((case.name, first, second)) for first in numbers[:-1]]
            if any(cells):
                style = None if all(cell is None or cell.explained for cell in cells) else "bold red"
                table.add_row(case.name, str(second), *map(_difference, cells), style=style)
    return table


def _difference(entry: Difference | None) -> str:
    if entry is None:
        return ""
    text = "none" if entry.relative_l2 is None else f"{entry.relative_l2:.1e}"
    return text if entry.explained else f"{text} !"


def _notes(report: BenchReport) -> list[str]:
    machine, settings = report.machine, report.settings
    gpu = "no GPU" if machine.gpu is None else f"{machine.gpu} ({machine.capability})"
    threads = "each library's choice" if settings.threads is None else str(settings.threads)
    lines = [f"{machine.cpu}, {machine.cpus} CPUs, threads: {threads}; {gpu}"]
    if any(target.info is not None and target.info.emulated for target in report.targets):
        lines.append("emulated: half precision as fp32 between casts; its numbers count, its speed does not")
    repeats = [found.repeats for target in report.targets for found in target.cases if found.repeats]
    if repeats and min(repeats) < settings.repeats:
        lines.append(f"some cases were repeated {min(repeats)} times only (--max-seconds {settings.max_seconds:g})")
    if repeats and min(repeats) < 100:
        lines.append("p99 of fewer than 100 calls is the slowest of them")
    return lines
