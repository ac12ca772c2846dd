"""Validates one engine several times: whether one file gets one verdict, and how far its numbers lie apart."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.engine_runs.results import COMMAND, Record, Results, call, now, worst


@dataclass(frozen=True, order=True)
class Number:
    """What a run measures.

    Attributes:
        metric: of the gate.
        case: of the golden set; the first of a pair.
        subject: wrong model of a direction, second case of a pair, else empty.
        allowed: how far from its ideal value it may be.
    """

    metric: str
    case: str
    subject: str
    allowed: float


Numbers = dict[Number, float | None]


def repeat(arguments: argparse.Namespace) -> int:
    """Validate one engine several times and keep what was found, after each time.

    Returns:
        Exit code: 0 if all came to one verdict, else 1.
    """
    engine: Path = arguments.engine
    results = Results(arguments.results, engine.parent, arguments.python)
    runs: list[Record] = []
    numbers: list[Numbers] = []
    found: Record = {}
    for index in range(arguments.times):
        run, judgement = validate(engine, arguments.python, arguments.timeout, index + 1)
        runs.append(run)
        numbers.append(dict(measured(judgement)))
        found = {"runs": runs, "times": arguments.times, **compare(runs, numbers)}
        results.put("repeated", engine.name, found)
        print(f"{engine.name}: validation {index + 1}, exit {run['exit_code']}, {run['verdict']}", flush=True)
    verdict = f"one verdict ({runs[0]['verdict']})" if found["one_verdict"] else "NOT ONE VERDICT"
    print(f"{engine.name}: {verdict} of {len(runs)}; {found['differing']} of {found['numbers']} numbers differ")
    return 0 if found["one_verdict"] else 1


def validate(engine: Path, python: str, seconds: float, number: int) -> tuple[Record, Record]:
    """Call ``kvit-export validate`` once.

    Args:
        engine: folder.
        python: that has its TensorRT.
        seconds: that it may take.
        number: for the name of the log.

    Returns:
        How it ended, and the judgement of its report, which is empty where it printed none.
    """
    start = time.monotonic()
    command = [python, "-c", COMMAND, "validate", str(engine), "--json"]
    code, output, errors = call(command, seconds, engine.with_name(f"{engine.name}.validate{number}.log"))
    judgement = parse_report(output).get("judgement", {})
    run = {
        "exit_code": code,
        "verdict": judgement.get("verdict"),
        "cases": judgement.get("counts"),
        "relative_l2": worst(judgement, "relative_l2"),
        "seconds": round(time.monotonic() - start, 1),
        "date": now(),
        "stderr": errors[-500:].replace(str(engine), engine.name),
    }
    return run, judgement


def parse_report(text: str) -> Record:
    """The report that ``validate --json`` printed; empty where it printed none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def measured(judgement: Record) -> Iterator[tuple[Number, float | None]]:
    """Every number of a judgement; None where it was not finite."""
    checks = [(case["name"], check) for case in judgement.get("cases", []) for check in case["checks"]]
    checks += [(pair["first"], pair["check"]) for pair in judgement.get("pairs", [])]
    for case, check in checks:
        low, high = check["allowed_low"], check["allowed_high"]
        allowed = high if low == 0 else (high - low) / 2
        yield Number(check["metric"], case, check["subject"], allowed), check["measured"]


def compare(runs: list[Record], numbers: list[Numbers]) -> Record:
    """Compare validations of one engine.

    Args:
        runs: exit code and verdict of each.
        numbers: what each measured.

    Returns:
        ``one_verdict``: all came to the same verdict with the same exit code. ``numbers``: how many were measured at
        all. ``differing``: how many of them are not equal in all runs. ``spread``: of each metric that differs, the
        number whose values lie farthest apart, as a share of what is allowed; the share is None where a run did not
        measure it.
    """
    ends = {(run["exit_code"], run["verdict"]) for run in runs}
    names = sorted({name for found in numbers for name in found})
    values = {name: [found.get(name) for found in numbers] for name in names}
    differing = {name: found for name, found in values.items() if len(set(found)) > 1}
    spread: dict[str, Record] = {}
    for name, found in differing.items():
        entry = {"case": name.case, "subject": name.subject, "values": found, "share_of_allowed": apart(name, found)}
        if name.metric not in spread or _size(entry) > _size(spread[name.metric]):
            spread[name.metric] = entry
    return {
        "one_verdict": len(ends) == 1 and runs[0]["verdict"] is not None,
        "numbers": len(names),
        "differing": len(differing),
        "spread": spread,
    }


def apart(name: Number, values: list[float | None]) -> float | None:
    """Distance of the largest from the smallest value over what is allowed; None where a value is missing."""
    known = [value for value in values if value is not None]
    return (max(known) - min(known)) / name.allowed if len(known) == len(values) else None


def _size(entry: Record) -> float:
    share: float | None = entry["share_of_allowed"]
    return float("inf") if share is None else share
