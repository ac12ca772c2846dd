"""What ``kvit-export bench`` found, as plain records: the file that ``-o`` writes and ``--json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exporter.errors import BadInput, KvitError, MissingRequirement
from exporter.files import read_bounded
from exporter.records import JSON_LIMIT, parse_json
from exporter.validation.evidence import BackendInfo, DType, Grids
from exporter.validation.latency import Latency, Percentiles

SCHEMA_VERSION = 1
KIND: Literal["kvit-export bench"] = "kvit-export bench"


@dataclass(frozen=True)
class BenchCase:
    """One call that every target gets.

    Attributes:
        name: as the command line takes it: ``36x46``, ``4x30x34``, ``36x46+16x16``.
        frames: frames that the items share.
        grid_hws: (h, w) in patches of each item.
        tokens: patches of all frames and items.
        rows: of the output.
    """

    name: str
    frames: int
    grid_hws: Grids
    tokens: int
    rows: int


@dataclass(frozen=True)
class Settings:
    """How it was measured.

    Attributes:
        warmup: calls between the first one and those that count.
        repeats: calls that count.
        max_seconds: after which a case is repeated no more, unless it has fewer than three calls that count.
        threads: CPU threads of PyTorch and ONNX Runtime; None leaves them to each library.
        inputs: what the pixels are.
    """

    warmup: int
    repeats: int
    max_seconds: float
    threads: int | None
    inputs: str


@dataclass(frozen=True)
class Machine:
    """Where it was measured.

    Attributes:
        system: operating system.
        cpu: model of the processor.
        cpus: logical processors that this process may use.
        omp_num_threads: the environment variable, which PyTorch heeds and ONNX Runtime does not.
        gpu: name of the first visible GPU, from the CUDA driver; None without one.
        capability: its compute capability.
        cuda_driver: CUDA version of the driver, such as ``13.0``.
        versions: of the packages that are installed.
    """

    system: str
    cpu: str
    cpus: int
    omp_num_threads: str | None
    gpu: str | None
    capability: str | None
    cuda_driver: str | None
    versions: Mapping[str, str]


@dataclass(frozen=True)
class CaseResult:
    """What a target made of one case.

    Attributes:
        case: its name.
        status: ``skipped``: the target does not take it, or did not run at all; ``lost``: it was run and gave nothing.
        reason: why it was not measured; empty where it was.
        first_ms: the first call of this case in this process, with all compilation and planning that it causes.
        call_ms: a whole call after warming up, from arrays in host memory to the result in host memory.
        parts: copies and computation on the GPU, where the backend times them.
        warmup: calls that were made to warm up.
        repeats: calls that ``call_ms`` is taken from.
        tokens_per_second: tokens of the case over the median call.
        times_first: the median call over that of the first target that ran the case.
        times_fastest: the median call over that of the fastest target.
    """

    case: str
    status: Literal["measured", "skipped", "lost"]
    reason: str = ""
    first_ms: float | None = None
    call_ms: Percentiles | None = None
    parts: Latency | None = None
    warmup: int = 0
    repeats: int = 0
    tokens_per_second: float | None = None
    times_first: float | None = None
    times_fastest: float | None = None


@dataclass(frozen=True)
class TargetResult:
    """One row: a target in one backend.

    Attributes:
        number: from 1, in the order of the command line.
        given: as the user wrote it.
        kind: what it is; ``tower`` is the live PyTorch model.
        backend: what runs it: ``torch-cpu``, ``torch-cuda``, ``onnxruntime-cpu``, ``onnxruntime-cuda`` or ``engine``;
            ``torch`` where that was left open and it did not get so far.
        status: ``measured`` if it ran at least one case.
        reason: why it did not; empty where it did.
        dtype: of its weights, input and output.
        info: what really ran, as the backend says.
        threads: CPU threads; None where the library chooses or the CPU does not compute.
        tf32: whether products may be computed in TF32; None for an engine that does not tell.
        sha256: identity of the weights (tower), of the artifact (folder) or of the file.
        verdict: that the manifest records; None for others. ``kvit-export verify`` is what checks it.
        load_seconds: from the file to a backend that is ready, without importing the library.
        cases: in the order of the report's.
    """

    number: int
    given: str
    kind: Literal["tower", "onnx", "engine"]
    backend: str
    status: Literal["measured", "cannot run", "bad input"]
    reason: str
    dtype: DType | None
    info: BackendInfo | None
    threads: int | None
    tf32: bool | None
    sha256: str | None
    verdict: str | None
    load_seconds: float | None
    cases: tuple[CaseResult, ...]


@dataclass(frozen=True)
class Difference:
    """How far the outputs of two targets lie apart on one case.

    Attributes:
        case: its name.
        first: number of one target.
        second: number of the other.
        relative_l2: |a - b| / |r|, r being that of the finer dtype; None if that is no finite
            number, or the shapes differ.
        allowed: what the two dtypes explain.
        explained: whether it is within that.
    """

    case: str
    first: int
    second: int
    relative_l2: float | None
    allowed: float
    explained: bool


@dataclass(frozen=True)
class BenchReport:
    """All that was found.

    Attributes:
        schema_version: of this file.
        kind: tells this file from other JSON files.
        created: when, UTC, ISO 8601.
        command: the exact command.
        machine: where.
        settings: how.
        cases: what every target was given.
        targets: what each made of it.
        differences: one for each pair of targets that ran a case.
    """

    schema_version: int
    kind: Literal["kvit-export bench"]
    created: str
    command: str
    machine: Machine
    settings: Settings
    cases: tuple[BenchCase, ...]
    targets: tuple[TargetResult, ...]
    differences: tuple[Difference, ...]


def error_for(report: BenchReport) -> KvitError | None:
    """Return the error that the command ends with; None if something was measured and nothing is damaged.

    Args:
        report: complete, so that it can be shown before.
    """
    for target in report.targets:
        if target.status == "bad input":
            return BadInput(f"#{target.number} {target.given}: {target.reason}")
    if any(target.status == "measured" for target in report.targets):
        return None
    first = report.targets[0]
    more = f" (and {len(report.targets) - 1} more)" if len(report.targets) > 1 else ""
    return MissingRequirement(f"nothing could be measured: #{first.number} {first.given}: {first.reason}{more}")


def is_report(path: Path) -> bool:
    """Whether a file is a report of this command, which another may replace."""
    try:
        return parse_json(read_bounded(path, JSON_LIMIT), str(path)).get("kind") == KIND
    except BadInput:
        return False
