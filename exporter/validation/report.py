"""What the gate tells people and programs: report.json, junit.xml, a table, and one line.

A report of an artifact that FAILED holds no word that could be taken for success, in any of its forms: case outcomes
are "within" and "failed".
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import platform
import sys
import xml.etree.ElementTree as ET  # only writes XML here
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from exporter.errors import KvitError, NotValidated, ValidationFailed, one_line
from exporter.files import write_bytes, write_text
from exporter.records import read_record, to_text
from exporter.validation.evidence import Evidence
from exporter.validation.gate import CaseResult, Judgement, Verdict
from exporter.validation.golden_format import GoldenSettings
from exporter.validation.metrics import HISTOGRAM_EDGES
from exporter.validation.runner import CaseDetails, Comparison

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA_VERSION = 2  # 2: latency of a case
JSON_NAME = "report.json"
JUNIT_NAME = "junit.xml"
_SHOWN_FINDINGS = 12  # lines under the table; all of them stand in report.json


@dataclass(frozen=True)
class ArtifactInfo:
    """What was judged.

    Attributes:
        name: file name.
        kind: what it is; ``tower`` is the live PyTorch model.
        sha256: its identity; None for the live model.
        origin: ``manifest``: its manifest vouches for the files; ``unknown``: a bare file, judged by its numbers only.
    """

    name: str
    kind: Literal["onnx", "engine", "tower"]
    sha256: str | None
    origin: Literal["manifest", "unknown"]


@dataclass(frozen=True)
class GoldenInfo:
    """What it was judged by.

    Attributes:
        sha256: identity of the golden set.
        family: of the tower.
        weights_sha256: of the weights that PyTorch ran.
        inputs_sha256: of the inputs.
        settings: under which PyTorch ran.
    """

    sha256: str
    family: str
    weights_sha256: str
    inputs_sha256: str
    settings: GoldenSettings


@dataclass(frozen=True)
class Report:
    """The content of ``report.json``.

    Attributes:
        schema_version: of this file.
        created: UTC, ISO 8601.
        summary: the verdict in one line.
        artifact: what was judged.
        golden: what it was judged by.
        evidence: what was measured, by which backend, against which reference.
        judgement: measured beside allowed, with the verdict and its reasons.
        details: per compared case.
        histogram_edges: bins of the histograms in ``details``.
        environment: versions of what ran.
    """

    schema_version: int
    created: str
    summary: str
    artifact: ArtifactInfo
    golden: GoldenInfo
    evidence: Evidence
    judgement: Judgement
    details: tuple[CaseDetails, ...]
    histogram_edges: tuple[float, ...]
    environment: Mapping[str, str]


def utc_now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")


def describe_environment() -> dict[str, str]:
    """List the versions that may matter for a number; nothing that names a person, a machine or a path."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    names = ("kvit-export", "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch")
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def summarise(judgement: Judgement) -> str:
    """Say the verdict in one line, with the first reason.

    Args:
        judgement: the gate's.

    Returns:
        A line that starts with the verdict.
    """
    counts = judgement.counts
    if judgement.verdict is Verdict.PASS:
        return f"PASS: all {counts.total} cases are within their limits"
    reasons = judgement.faults or judgement.doubts
    more = f" (and {len(reasons) - 1} more findings)" if len(reasons) > 1 else ""
    cases = f"{counts.failed} of {counts.total} cases failed, {counts.skipped} skipped"
    return one_line(f"{judgement.verdict.value}: {cases}; {reasons[0]}{more}")


def error_for(judgement: Judgement) -> KvitError | None:
    """Return what a command has to end with.

    Args:
        judgement: the gate's.

    Returns:
        None for PASS, else an error with the exit code of the verdict and its summary.
    """
    if judgement.verdict is Verdict.PASS:
        return None
    kind = ValidationFailed if judgement.verdict is Verdict.FAILED else NotValidated
    return kind(summarise(judgement))


def make_report(comparison: Comparison, judgement: Judgement, artifact: ArtifactInfo, golden: GoldenInfo) -> Report:
    """Gather a report.

    Args:
        comparison: what was measured.
        judgement: what the gate made of it.
        artifact: what was judged.
        golden: what it was judged by.

    Returns:
        The report.
    """
    return Report(
        SCHEMA_VERSION,
        utc_now(),
        summarise(judgement),
        artifact,
        golden,
        comparison.evidence,
        judgement,
        comparison.details,
        HISTOGRAM_EDGES,
        describe_environment(),
    )


def write_report(folder: Path, report: Report) -> None:
    """Write ``report.json`` and ``junit.xml``, each whole or not at all.

    Args:
        folder: an existing folder.
        report: the content.
    """
    write_text(folder / JSON_NAME, to_text(report))
    write_bytes(folder / JUNIT_NAME, junit(report))


def read_report(path: Path) -> Report:
    """Read a report again.

    Args:
        path: of ``report.json``.

    Returns:
        The report.

    Raises:
        BadInput: it is damaged or of another version.
    """
    return read_record(Report, path, SCHEMA_VERSION)


def junit(report: Report) -> bytes:
    """Write the report as JUnit XML: one test per case, direction, pair and profile corner, and one for the verdict.

    The last one fails unless the verdict is PASS: a file of tests that all hold, or of none, must not look green when
    the artifact is NOT VALIDATED.

    Args:
        report: the report.

    Returns:
        The XML document.
    """
    judgement = report.judgement
    suite = ET.Element("testsuite", name=f"kvit-export.{report.artifact.kind}", timestamp=report.created)
    seconds = {detail.name: detail.seconds for detail in report.details}
    for result in judgement.cases:
        _add_case(suite, result, seconds.get(result.name, 0.0))
    for pair in judgement.pairs:
        outside = pair.check.outcome == "outside"
        _add(suite, "sensitivity", f"{pair.first}/{pair.second}", pair.check.describe() if outside else None)
    for entry in judgement.coverage:
        missing = None if entry.case is not None else f"no compared case has {entry.shape}"
        _add(suite, "coverage", f"{entry.profile}.{entry.corner}", missing)
    _add(suite, "verdict", "verdict", None if judgement.verdict is Verdict.PASS else report.summary)
    suite.set("tests", str(len(suite)))
    for outcome in ("failure", "skipped"):
        name = "failures" if outcome == "failure" else outcome
        suite.set(name, str(sum(test.find(outcome) is not None for test in suite)))
    suite.set("errors", "0")
    suite.set("time", f"{sum(seconds.values()):.3f}")
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _add(suite: ET.Element, group: str, name: str, fault: str | None, seconds: float = 0.0) -> None:
    test = ET.SubElement(suite, "testcase", classname=group, name=one_line(name), time=f"{seconds:.3f}")
    if fault is not None:
        element = ET.SubElement(test, "failure", type=group, message=one_line(fault))
        element.text = one_line(fault)


def _add_case(suite: ET.Element, result: CaseResult, seconds: float) -> None:
    if result.outcome == "skipped":
        test = ET.SubElement(suite, "testcase", classname="case", name=result.name, time="0.000")
        ET.SubElement(test, "skipped", message=one_line(result.note))
        return
    outside = [check for check in result.checks if check.outcome == "outside" and check.metric != "direction"]
    fault = "; ".join(check.describe() for check in outside) or result.note or None
    _add(suite, "case", result.name, fault, seconds)
    for check in result.checks:
        if check.metric == "direction" and check.outcome != "informs":
            accused = f"the error points to {check.subject}: {check.describe()}" if check.outcome == "outside" else None
            _add(suite, "direction", f"{result.name}/{check.subject}", accused)


def print_report(report: Report, console: Console) -> None:
    """Print the table of cases, the findings and the verdict.

    Args:
        report: the report.
        console: where to; its stream is the caller's choice.
    """
    console.print(_table(report))
    judgement = report.judgement
    origin = "" if report.artifact.origin == "manifest" else "; the origin of this file is unknown"
    console.print(f"backend: {report.evidence.backend}", highlight=False, markup=False)
    console.print(f"reference: {report.evidence.reference}{origin}", highlight=False, markup=False)
    findings = [*judgement.faults, *judgement.doubts]
    for line in findings[:_SHOWN_FINDINGS]:
        console.print(f"- {one_line(line)}", highlight=False, markup=False)
    if len(findings) > _SHOWN_FINDINGS:
        console.print(f"- and {len(findings) - _SHOWN_FINDINGS} more in {JSON_NAME}", highlight=False)
    style = {Verdict.PASS: "bold green", Verdict.FAILED: "bold red", Verdict.NOT_VALIDATED: "bold yellow"}
    console.print(report.summary, style=style[judgement.verdict], highlight=False, markup=False)


_SHORT = {
    "relative_l2": "rel. L2",
    "worst_token": "token",
    "worst_angle": "angle",
    "largest_over_rms": "largest",
    "norm": "norm",
    "worst_token_norm": "token norm",
}


def _table(report: Report) -> Table:
    """One line a case: its relative L2, the metric that is nearest to its limit, and the nearest wrong model."""
    from rich import box
    from rich.table import Table

    title = f"{report.artifact.name} ({report.evidence.dtype})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    table.add_column("rows", justify="right")
    table.add_column("rel. L2", justify="right", no_wrap=True)
    table.add_column("allowed", justify="right", no_wrap=True)
    table.add_column("nearest limit", no_wrap=True)
    table.add_column("nearest wrong model")
    table.add_column("outcome", no_wrap=True)
    rows = {case.name: case.rows for case in report.evidence.cases}
    for result in report.judgement.cases:
        style = {"within": None, "failed": "red", "skipped": "yellow"}[result.outcome]
        cells = _case_cells(result)
        table.add_row(result.name, str(rows[result.name]), *cells, _direction_cell(result), result.outcome, style=style)
    return table


def _case_cells(result: CaseResult) -> tuple[str, str, str]:
    """Relative L2 measured and allowed, and how much of its limit the tightest metric takes."""
    plain = [check for check in result.checks if check.metric != "direction"]
    if not plain:
        return "", "", ""
    whole = next(check for check in plain if check.metric == "relative_l2")
    tightest = max(plain, key=lambda check: sys.float_info.max if check.measured is None else check.excess or 0.0)
    share = "not finite" if tightest.measured is None else f"{100 * (tightest.excess or 0.0):.3g} %"
    measured = "not finite" if whole.measured is None else f"{whole.measured:.2e}"
    return measured, f"{whole.allowed_high:.2e}", f"{_SHORT[tightest.metric]} {share}"


def _direction_cell(result: CaseResult) -> str:
    """Show the largest score among the directions that may accuse."""
    active = [check for check in result.checks if check.metric == "direction" and check.outcome != "informs"]
    if not active:
        return ""
    worst = max(active, key=lambda check: sys.float_info.max if check.measured is None else abs(check.measured))
    score = "not finite" if worst.measured is None else f"{worst.measured:.2f}"
    return f"{worst.subject} {score}"
