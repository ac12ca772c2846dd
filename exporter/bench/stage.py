"""Runs every target on every case, each in a process of its own, and compares what they computed. Imports no torch."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from exporter.bench.cases import INPUTS, cases_of
from exporter.bench.compare import difference_of
from exporter.bench.machine import describe_machine
from exporter.bench.report import (
    KIND,
    SCHEMA_VERSION,
    BenchCase,
    BenchReport,
    CaseResult,
    Difference,
    Settings,
    TargetResult,
)
from exporter.bench.targets import Target
from exporter.bench.worker import CaseOrder, Loaded, NotTaken, Order, TakenCase, Ticked
from exporter.errors import BadInput, KvitError
from exporter.progress import Tell
from exporter.trt.child import Child, ChildDiedError
from exporter.validation.latency import Latency, Percentiles, percentiles

__all__ = ["cases_of", "run_bench"]

WORKER = "exporter.bench.worker:serve"
_LOAD_SECONDS = 1800.0  # a checkpoint may come over a network, TensorRT-RTX compiles when it loads
_CALL_SECONDS = 1800.0  # one call: a real tower at 64x64, emulated on two cores, takes minutes; a hang takes for ever

Outputs = dict[str, NDArray[np.float32]]  # by case


@dataclass
class _Row:
    """One target while it is being measured: it is loaded again after a crash, for the cases that are left."""

    target: Target
    settings: Settings
    tell: Tell
    child: Child | None = None
    loaded: Loaded | None = None

    def load(self) -> Child:
        """Start a process and load the target in it.

        Raises:
            KvitError: it cannot be loaded.
            ChildDiedError: the process was lost.
        """
        self.tell(f"{self.target.label} load", 0, 1)
        child = Child(WORKER, f"the process that runs {self.target.label}")
        self.child = child
        child.send(Order(self.target, self.settings.threads))
        answer = child.receive(_LOAD_SECONDS)
        if not isinstance(answer, Loaded):
            raise TypeError(f"the benchmark's process answered {type(answer).__name__}")
        self.loaded = self.loaded or answer
        return child

    def take(self, case: BenchCase) -> TakenCase | NotTaken:
        """Measure a case; what is lost with the process is this one."""
        settings, what = self.settings, f"{self.target.label} {case.name}"
        try:
            child = self.child or self.load()
            child.send(CaseOrder(case, settings.warmup, settings.repeats, settings.max_seconds))
            answer: object = child.receive(_CALL_SECONDS)
            while isinstance(answer, Ticked):
                self.tell(what, answer.done - 1, answer.total)
                answer = child.receive(_CALL_SECONDS)
        except (ChildDiedError, KvitError) as error:
            answer = NotTaken(getattr(error, "message", str(error)), lost=True)
        if not isinstance(answer, TakenCase | NotTaken):
            raise TypeError(f"the benchmark's process answered {type(answer).__name__}")
        if isinstance(answer, NotTaken) and answer.lost:
            self.close()  # after a CUDA error a process can use its GPU no more
        return answer

    def close(self) -> None:
        """End the process."""
        if self.child is not None:
            self.child.close()
            self.child = None


def run_bench(
    targets: Sequence[Target], cases: Sequence[BenchCase], settings: Settings, *, command: str, tell: Tell
) -> BenchReport:
    """Measure and compare.

    Args:
        targets: the rows, as `exporter.bench.targets.resolve` gives them.
        cases: what each is given.
        settings: how often.
        command: for the report.
        tell: told how far it is.

    Returns:
        The report; `exporter.bench.report.error_for` says how the command ends.
    """
    results: list[TargetResult] = []
    outputs: list[Outputs] = []
    for target in targets:
        result, found = _measure(target, cases, settings, tell)
        results.append(result)
        outputs.append(found)
    return BenchReport(
        schema_version=SCHEMA_VERSION,
        kind=KIND,
        created=dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds"),
        command=command,
        machine=describe_machine(),
        settings=settings,
        cases=tuple(cases),
        targets=_with_ratios(results, cases),
        differences=_differences(results, outputs, cases),
    )


def settings_of(*, warmup: int, repeats: int, max_seconds: float, threads: int | None) -> Settings:
    """Settings with the pixels that this program makes."""
    return Settings(warmup, repeats, max_seconds, threads, INPUTS)


def _measure(
    target: Target, cases: Sequence[BenchCase], settings: Settings, tell: Tell
) -> tuple[TargetResult, Outputs]:
    row = _Row(target, settings, tell)
    outputs: Outputs = {}
    try:
        try:
            row.load()
        except (KvitError, ChildDiedError) as error:
            return _not_loaded(target, cases, error), outputs
        results = []
        for case in cases:
            taken = row.take(case)
            results.append(_case_result(case, taken))
            if isinstance(taken, TakenCase):
                outputs[case.name] = taken.output
    finally:
        row.close()
    loaded = row.loaded
    if loaded is None:
        raise TypeError("nothing is known of a target that was loaded")
    measured = any(result.status == "measured" for result in results)
    return (
        TargetResult(
            target.number,
            target.given,
            target.kind,
            loaded.backend,
            "measured" if measured else "cannot run",
            "" if measured else f"none of the cases could be measured; {results[0].case}: {results[0].reason}",
            loaded.dtype,
            loaded.info,
            loaded.threads,
            loaded.tf32,
            target.sha256 or loaded.sha256,
            target.verdict,
            round(loaded.seconds, 3),
            tuple(results),
        ),
        outputs,
    )


def _not_loaded(target: Target, cases: Sequence[BenchCase], error: KvitError | ChildDiedError) -> TargetResult:
    """The row of a target that cannot be loaded. An engine that ends its process when it is loaded is damaged."""
    reason = getattr(error, "message", str(error))
    damaged = isinstance(error, BadInput) or (isinstance(error, ChildDiedError) and target.kind == "engine")
    status: Literal["bad input", "cannot run"] = "bad input" if damaged else "cannot run"
    nothing = tuple(CaseResult(case.name, "skipped", reason) for case in cases)
    return TargetResult(
        target.number,
        target.given,
        target.kind,
        target.backend,
        status,
        reason,
        target.dtype,
        None,
        None,
        None,
        target.sha256,
        target.verdict,
        None,
        nothing,
    )


def _case_result(case: BenchCase, taken: TakenCase | NotTaken) -> CaseResult:
    if isinstance(taken, NotTaken):
        return CaseResult(case.name, "lost" if taken.lost else "skipped", taken.reason)
    found = percentiles(taken.calls_ms)
    return CaseResult(
        case=case.name,
        status="measured",
        first_ms=taken.first_ms,
        call_ms=found,
        parts=_parts(taken),
        warmup=taken.warmup,
        repeats=len(taken.calls_ms),
        tokens_per_second=1000 * case.tokens / found.p50,
    )


def _parts(taken: TakenCase) -> Latency | None:
    """Percentiles over the calls of what the backend measured in each."""
    if not taken.parts:
        return None

    def over(name: str) -> Percentiles:
        return percentiles([getattr(part, name).p50 for part in taken.parts])

    return Latency(taken.warmup, len(taken.parts), over("host_to_device"), over("gpu"), over("device_to_host"))


def _with_ratios(results: Sequence[TargetResult], cases: Sequence[BenchCase]) -> tuple[TargetResult, ...]:
    rows = [list(result.cases) for result in results]
    for index in range(len(cases)):
        medians = [found.p50 for row in rows if (found := row[index].call_ms) is not None]
        for row in rows:
            times = row[index].call_ms
            if times is not None:
                row[index] = dataclasses.replace(
                    row[index], times_first=times.p50 / medians[0], times_fastest=times.p50 / min(medians)
                )
    return tuple(dataclasses.replace(result, cases=tuple(row)) for result, row in zip(results, rows, strict=True))


def _differences(
    results: Sequence[TargetResult], outputs: Sequence[Outputs], cases: Sequence[BenchCase]
) -> tuple[Difference, ...]:
    found = []
    for case in cases:
        ran = [
            (result.number, result.dtype, rows[case.name])
            for result, rows in zip(results, outputs, strict=True)
            if result.dtype is not None and case.name in rows
        ]
        found += [difference_of(case.name, first, second) for first, second in itertools.combinations(ran, 2)]
    return tuple(found)
