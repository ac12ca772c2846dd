"""Runs a backend over a golden set and collects the evidence; the judging is the gate's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from exporter.errors import BadInput, Usage
from exporter.validation import metrics
from exporter.validation.backends import Backend, CaseSkippedError, RunCrashedError
from exporter.validation.evidence import (
    NOT_SELECTED,
    CaseEvidence,
    DirectionScore,
    Evidence,
    Measured,
    Profile,
    Sensitivity,
)
from exporter.validation.golden import GoldenSet
from exporter.validation.golden_format import GoldenCase
from exporter.validation.latency import Latency, MeasuresLatency
from exporter.validation.metrics import TokenDetails

Progress = Callable[[str, int, int], None]  # name of the case, its number from 1, number of cases


@dataclass(frozen=True)
class CaseDetails:
    """What a report shows of a compared case and no verdict depends on.

    Attributes:
        name: of the case.
        seconds: that the backend took, with copies.
        tokens: distribution of the tokens' errors.
        floor_histogram: the same distribution for PyTorch in the artifact's dtype.
        latency: times of the call by part; None where the backend takes none.
    """

    name: str
    seconds: float
    tokens: TokenDetails
    floor_histogram: tuple[int, ...]
    latency: Latency | None = None


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    evidence: Evidence
    details: tuple[CaseDetails, ...]


@dataclass(frozen=True)
class _Outputs:
    """What the next input of the same grid is compared with."""

    name: str
    output: NDArray[Any]
    reference: NDArray[Any]


class _Run:
    """State of one pass over a golden set; at most two cases' outputs are held."""

    def __init__(self, backend: Backend, golden: GoldenSet) -> None:
        self.backend = backend
        self.golden = golden
        self.cases: dict[str, CaseEvidence] = {}
        self.details: dict[str, CaseDetails] = {}
        self.sensitivity: list[Sensitivity] = []

    def skip(self, case: GoldenCase, note: str) -> None:
        self._record(case, "skipped", note)

    def compare(self, case: GoldenCase, previous: _Outputs | None) -> _Outputs | None:
        """Run one case; return its outputs for the next input of the same grid."""
        start = time.perf_counter()
        try:
            output = self.backend.run(self.golden.pixel_values(case), self.golden.grid_hws(case))
        except CaseSkippedError as error:
            self.skip(case, str(error))
            return previous
        except RunCrashedError as error:
            self._record(case, "crashed", str(error))
            return previous
        seconds = time.perf_counter() - start
        reference = self.golden.reference(case)
        if output.shape != reference.shape:
            self._record(case, "crashed", f"the output has shape {output.shape}, expected {reference.shape}")
            return previous
        self._measure(case, output, reference, seconds)
        if previous is not None:
            ratio = metrics.sensitivity((previous.output, output), (previous.reference, reference))
            self.sensitivity.append(Sensitivity(previous.name, case.name, ratio))
        return _Outputs(case.name, output, reference)

    def _measure(self, case: GoldenCase, output: NDArray[Any], reference: NDArray[Any], seconds: float) -> None:
        found = metrics.measure(output, reference)
        scores = tuple(
            DirectionScore(
                direction.fault,
                metrics.direction_score(output, reference, self.golden.direction(case, direction.fault)),
                direction.spread,
            )
            for direction in case.directions
        )
        floor_histogram = metrics.histogram(self.golden.floor_tokens(case))
        self._record(case, "compared", "", found.measured, scores)
        latency = self.backend.latency() if isinstance(self.backend, MeasuresLatency) else None
        self.details[case.name] = CaseDetails(case.name, seconds, found.tokens, floor_histogram, latency)

    def _record(
        self,
        case: GoldenCase,
        status: Literal["compared", "skipped", "crashed"],
        note: str,
        measured: Measured | None = None,
        directions: tuple[DirectionScore, ...] = (),
    ) -> None:
        self.cases[case.name] = CaseEvidence(
            case.name, case.kind, case.frames, case.grid_hws, case.floor, status, note, measured, directions
        )


def _check_comparable(backend: Backend, golden: GoldenSet, weights_sha256: str | None) -> None:
    header, info = golden.header, backend.describe()
    if info.is_same_as(header.recorded_by):
        raise Usage(f"the golden set was recorded by {info} too; comparing a backend with itself shows nothing")
    if backend.dtype != header.dtype:
        raise BadInput(
            f"the golden set in {golden.folder} judges {header.dtype} and the artifact is {backend.dtype}; "
            "record a golden set for this dtype"
        )
    if weights_sha256 is not None and weights_sha256 != header.weights_sha256:
        raise BadInput(
            f"the golden set in {golden.folder} was recorded with other weights than the artifact's; record it again"
        )


def _by_grid(cases: Sequence[GoldenCase]) -> list[list[GoldenCase]]:
    """Bring the inputs of one grid together, so that few outputs are held at a time."""
    groups: dict[Any, list[GoldenCase]] = {}
    for case in cases:
        groups.setdefault(case.call, []).append(case)
    return list(groups.values())


def compare(
    backend: Backend,
    golden: GoldenSet,
    *,
    profiles: Sequence[Profile] = (),
    limit_scale: float = 1.0,
    only: Sequence[str] | None = None,
    weights_sha256: str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Run an artifact on every golden case and measure it.

    Args:
        backend: what runs the artifact.
        golden: what PyTorch computed.
        profiles: profiles of the engine; empty for ONNX.
        limit_scale: multiplies every limit; anything but 1 forbids PASS.
        only: names of the cases to run; the others count as skipped, which forbids PASS.
        weights_sha256: of the artifact, where it is known.
        progress: called before each case that is run.

    Returns:
        The evidence for `judge`, cases in the golden set's order, and details for the report.

    Raises:
        Usage: a name in ``only`` is unknown, or the backend is the one that recorded the set.
        BadInput: the set is damaged or was recorded for another dtype or other weights, or the artifact does not run.
    """
    header = golden.header
    _check_comparable(backend, golden, weights_sha256)
    unknown = sorted(set(only or ()) - {case.name for case in header.cases})
    if unknown:
        raise Usage(f"no golden case is called {unknown[0]}; there are {', '.join(c.name for c in header.cases)}")
    run, number, total = _Run(backend, golden), 0, len(header.cases)
    for group in _by_grid(header.cases):
        previous: _Outputs | None = None
        for case in group:
            number += 1
            if only is not None and case.name not in only:
                run.skip(case, NOT_SELECTED)
                continue
            if progress is not None:
                progress(case.name, number, total)
            previous = run.compare(case, previous)
    names = [case.name for case in header.cases]
    evidence = Evidence(
        dtype=header.dtype,
        limit_scale=limit_scale,
        reference=header.recorded_by,
        backend=backend.describe(),
        profiles=tuple(profiles),
        cases=tuple(run.cases[name] for name in names),
        sensitivity=tuple(run.sensitivity),
    )
    return Comparison(evidence, tuple(run.details[name] for name in names if name in run.details))
