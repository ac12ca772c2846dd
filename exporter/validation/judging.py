"""One validation from end to end: run, judge, write report and manifest. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from exporter.errors import BadInput
from exporter.files import sha256_file
from exporter.manifest import GOLDEN_FOLDER, Manifest, Validation, read_manifest, write_manifest
from exporter.validation.backends import Backend
from exporter.validation.gate import Verdict, judge
from exporter.validation.golden import GoldenSet, open_golden
from exporter.validation.report import ArtifactInfo, GoldenInfo, Report, make_report, utc_now, write_report
from exporter.validation.runner import Progress, compare


def judge_folder(
    folder: Path,
    backend: Backend,
    manifest: Manifest,
    *,
    limit_scale: float = 1.0,
    only: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[Manifest, Report]:
    """Judge an artifact in its own folder by its own golden set, and record the outcome there.

    A run of some cases, or with other limits, that finds no fault leaves the record of a whole run alone: it says less.
    The files must have been compared with ``manifest`` before (`check_files`), or have just been written.

    Args:
        folder: holds manifest, artifact and golden set.
        backend: runs the artifact.
        manifest: of the artifact, as it was when the files were compared with it.
        limit_scale: multiplies every limit; anything but 1 forbids PASS.
        only: names of the cases to run; a selection forbids PASS.
        progress: called before each case.

    Returns:
        The manifest with its validation, and the report; both have been written, unless an earlier record stays.

    Raises:
        BadInput: the artifact was replaced while it was being judged; nothing was written.
    """
    golden = open_golden(folder / GOLDEN_FOLDER, check_hash=False)
    comparison = compare(
        backend,
        golden,
        profiles=manifest.profiles,
        limit_scale=limit_scale,
        only=only,
        weights_sha256=manifest.source.weights_sha256,
        progress=progress,
    )
    judgement = judge(comparison.evidence)
    artifact = ArtifactInfo(manifest.artifact, manifest.kind, manifest.artifact_sha256, "manifest")
    report = make_report(comparison, judgement, artifact, golden_info(golden))
    if read_manifest(folder) != manifest:
        raise BadInput(f"{folder} was changed while it was being validated; run kvit-export validate again")
    partial = only is not None or limit_scale != 1
    if partial and judgement.verdict is Verdict.NOT_VALIDATED and _has_verdict(manifest):
        return manifest, report
    validation = Validation(utc_now(), manifest.artifact_sha256, manifest.golden_sha256, comparison.evidence, judgement)
    manifest = dataclasses.replace(manifest, validation=validation)
    write_report(folder, report)
    write_manifest(folder, manifest)
    return manifest, report


def _has_verdict(manifest: Manifest) -> bool:
    """Whether a run of these very files ended with PASS or FAILED."""
    found = manifest.validation
    if found is None or found.judgement.verdict is Verdict.NOT_VALIDATED:
        return False
    return (found.artifact_sha256, found.golden_sha256) == (manifest.artifact_sha256, manifest.golden_sha256)


def golden_info(golden: GoldenSet) -> GoldenInfo:
    """What a report says of a golden set."""
    header = golden.header
    return GoldenInfo(golden.sha256, header.family, header.weights_sha256, header.inputs_sha256, header.settings)


def judge_file(
    path: Path,
    kind: str,
    backend: Backend,
    golden: GoldenSet,
    *,
    limit_scale: float = 1.0,
    only: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Judge a bare file by its numbers; the report says that its origin is unknown."""
    profiles = getattr(backend, "profiles", ())  # an engine tells its own; nothing else has any
    comparison = compare(backend, golden, profiles=profiles, limit_scale=limit_scale, only=only, progress=progress)
    sha256, name = (sha256_file(path), path.name) if path.is_file() and kind != "tower" else (None, path.name)
    if kind == "tower":
        name = "live tower"  # no file ran, and the report must not look as if one had
    artifact = ArtifactInfo(name, kind, sha256, "unknown")  # type: ignore[arg-type]
    return make_report(comparison, judge(comparison.evidence), artifact, golden_info(golden))
