"""The rollout check: does this very file hold a PASS, for this GPU and this TensorRT? Needs no NumPy and no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exporter.errors import BadInput, NotValidated, ValidationFailed
from exporter.manifest import GOLDEN_FOLDER, Manifest, Runtime, Validation, check_files, read_manifest
from exporter.validation.evidence import Evidence
from exporter.validation.gate import RULES_VERSION, Verdict, judge
from exporter.validation.golden_format import TENSORS_NAME, read_golden_header

_AGAIN = "run kvit-export validate"

# What may have run an artifact for its verdict to be about the artifact; PyTorch, for one, does not run it.
_BACKENDS = {"onnx": ("onnxruntime",), "engine": ("tensorrt", "tensorrt_rtx")}


@dataclass(frozen=True)
class Verification:
    """What a successful check says.

    Attributes:
        artifact: main file of the folder.
        kind: onnx or engine.
        dtype: of its numbers.
        backend: what ran it when it was validated.
        validated: when.
        bound_to: the GPU and TensorRT that were demanded; empty for ONNX and with ``anywhere``.
        cases: golden cases behind the verdict.
    """

    artifact: str
    kind: str
    dtype: str
    backend: str
    validated: str
    bound_to: str
    cases: int


def verify(
    folder: Path, *, gpu: str | None = None, runtime: tuple[str, str] | None = None, anywhere: bool = False
) -> Verification:
    """Check an artifact before it is rolled out. Only its manifest is trusted, and of that not the verdict.

    All files are hashed, and the verdict is computed again from the measured numbers and the floors. A verdict on an
    engine holds for one compute capability and one TensorRT, and both are demanded. A verdict on an ONNX artifact is
    about the file: ONNX Runtime has computed what the graph says, and whatever runs the graph elsewhere is judged by
    itself (an engine built from it has a verdict of its own). So for ONNX neither ``gpu`` nor ``runtime`` is demanded.

    Args:
        folder: the artifact's folder.
        gpu: compute capability of the GPU here, such as ``9.0``; None where there is none.
        runtime: flavour and version of the TensorRT here, such as ``("tensorrt", "10.13.2.6")``; None likewise.
        anywhere: do not demand the GPU and the TensorRT of the verdict.

    Returns:
        What was verified.

    Raises:
        BadInput: a file or the manifest is damaged or changed, or the stored verdict is not that of its numbers.
        ValidationFailed: the artifact FAILED.
        NotValidated: it was not validated, not completely, or not for this GPU or this TensorRT.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    validation = manifest.validation
    if validation is None:
        raise NotValidated(f"{folder} has not been validated; {_AGAIN}")
    _check_binding(folder, manifest, validation)
    _check_verdict(folder, validation)
    backend = validation.evidence.backend
    if backend.kind not in _BACKENDS[manifest.kind]:
        raise NotValidated(f"{folder}: {backend.kind} ran in the validation, which does not run this file; {_AGAIN}")
    bound_to = ""
    if manifest.kind == "engine" and not anywhere:
        bound_to = _check_place(folder, manifest, validation, gpu, runtime)
    return Verification(
        artifact=manifest.artifact,
        kind=manifest.kind,
        dtype=manifest.dtype,
        backend=str(backend),
        validated=validation.created,
        bound_to=bound_to,
        cases=validation.judgement.counts.total,
    )


def _check_binding(folder: Path, manifest: Manifest, validation: Validation) -> None:
    """Demand that the numbers are about these files, this golden set and these profiles."""
    evidence = validation.evidence
    found = {
        "artifact": validation.artifact_sha256 == manifest.artifact_sha256,
        "golden set": validation.golden_sha256 == manifest.golden_sha256,
        "dtype": evidence.dtype == manifest.dtype,
        "profiles": evidence.profiles == manifest.profiles,
    }
    for what, same in found.items():
        if not same:
            raise BadInput(f"the validation in {folder} is about another {what}; {_AGAIN}")
    _check_floors(folder, manifest, evidence)
    if manifest.kind == "engine" and not manifest.profiles:
        raise NotValidated(f"{folder}: the engine lists no profile, so its coverage is unknown; {_AGAIN}")


def _check_floors(folder: Path, manifest: Manifest, evidence: Evidence) -> None:
    """Demand all cases of the golden set, with its floors and spreads, for limits are made of them."""
    header = read_golden_header(folder / GOLDEN_FOLDER)
    recorded = [(case.name, case.call, case.floor) for case in header.cases]
    spreads = {case.name: [(entry.fault, entry.spread) for entry in case.directions] for case in header.cases}
    same = recorded == [(case.name, case.call, case.floor) for case in evidence.cases] and all(
        spreads[case.name] == [(entry.fault, entry.spread) for entry in case.directions]
        for case in evidence.cases
        if case.status == "compared"
    )
    arrays = manifest.files.get(f"{GOLDEN_FOLDER}/{TENSORS_NAME}")
    if not same or header.recorded_by != evidence.reference or header.tensors != arrays:
        raise BadInput(f"the cases and floors stored in {folder} are not its golden set's; {_AGAIN}")


def _check_verdict(folder: Path, validation: Validation) -> None:
    """Judge the numbers again; the worse of the stored and the new verdict counts."""
    stored, again = validation.judgement, judge(validation.evidence)
    verdicts = (stored.verdict, again.verdict)
    if Verdict.FAILED in verdicts:
        reason = next(iter((*again.faults, *stored.faults)), "see report.json")
        raise ValidationFailed(f"{folder} FAILED its validation: {reason}")
    if stored.rules_version != RULES_VERSION:
        raise NotValidated(f"{folder} was judged by rules {stored.rules_version}, not {RULES_VERSION}; {_AGAIN} again")
    if Verdict.NOT_VALIDATED in verdicts:
        reason = next(iter((*again.doubts, *stored.doubts)), "see report.json")
        raise NotValidated(f"{folder} is NOT VALIDATED: {reason}")
    if stored != again:
        raise BadInput(f"the limits stored in {folder} are not those of its numbers: the manifest was edited; {_AGAIN}")


def _check_place(
    folder: Path, manifest: Manifest, validation: Validation, gpu: str | None, runtime: tuple[str, str] | None
) -> str:
    """Demand the GPU and the TensorRT of the verdict, and the TensorRT that built the engine."""
    backend = validation.evidence.backend
    validated = Runtime(backend.kind, backend.version)
    here = Runtime(*runtime) if runtime is not None else None
    otherwise = f"{_AGAIN} here, or pass --anywhere"
    if manifest.runtime != validated:
        raise NotValidated(f"{folder} was built by {manifest.runtime} and validated with {validated}; {_AGAIN} again")
    if here != validated:
        raise NotValidated(f"{folder} was validated with {validated}, here is {here or 'no TensorRT'}; {otherwise}")
    if backend.capability is None or gpu != backend.capability:
        there = backend.capability or "no GPU"
        raise NotValidated(
            f"{folder} was validated on compute capability {there}, here is {gpu or 'no GPU'}; {otherwise}"
        )
    return f"compute capability {gpu}, {validated}"
