"""The ``trt`` stage: an ONNX artifact in, a folder with engine, golden set, report and manifest out. Needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.cli import version
from exporter.errors import BadInput, BuildFailed, MissingRequirement, Usage
from exporter.files import atomic_directory, link_or_copy
from exporter.manifest import (
    GOLDEN_FOLDER,
    SCHEMA_VERSION,
    Manifest,
    PluginRecord,
    check_files,
    record_files,
    write_manifest,
)
from exporter.tools import BUILD_TOOLS, Clock, peak_memory, tool_versions
from exporter.trt import profiles as sizes
from exporter.trt.backend import open_backend
from exporter.trt.cache import EngineCache, dependencies
from exporter.trt.child import Child, ChildDiedError
from exporter.trt.cuda import Cuda
from exporter.trt.flavor import Flavor
from exporter.trt.job import BuildJob, Built, Phase
from exporter.trt.plan import Plan, TrtRequest, plan_build
from exporter.validation.gate import Verdict
from exporter.validation.golden_format import JSON_NAME, TENSORS_NAME
from exporter.validation.gpu import cuda_capability
from exporter.validation.judging import judge_folder
from exporter.validation.report import Report
from plugins.fused_qk_rope.description import FUSED_QK_ROPE

ENGINE_FILE = "vision_tower.engine"
Progress = Callable[[str, int, int], None]

# TensorRT says this of weights that its arithmetic cannot hold; the engine then computes something else
_DANGEROUS = re.compile(r"overflow|subnormal|infinit|\bnan\b|out of range|clamp", re.IGNORECASE)


@dataclass(frozen=True)
class EngineArtifact:
    """What the stage made.

    Attributes:
        folder: where it lies.
        manifest: as written.
        report: of the validation; None where the engine could not run here or there was nothing to compare with.
        advice: what to run where, if it was not validated.
        cached: whether the engine came out of the cache.
    """

    folder: Path
    manifest: Manifest
    report: Report | None
    advice: str
    cached: bool


def make_engine(request: TrtRequest, progress: Progress, say: Callable[[str], None] | None = None) -> EngineArtifact:
    """Build an engine and, where it can run, judge it.

    Args:
        request: what the user asked for.
        progress: told what is being done.
        say: told before the build what will be built, line by line.

    Returns:
        The artifact, with any verdict: a folder whose engine FAILED is written too, since its report says why.

    Raises:
        BadInput, Usage, ValidationFailed, MissingRequirement: see `plan_build`; nothing was written.
        BuildFailed: TensorRT failed or crashed; nothing was written.
    """
    gpu = cuda_capability()
    plan = plan_build(request, gpu)
    for line in plan.describe():
        (say or (lambda _line: None))(line)
    name = _check_memory(plan, gpu, ignore=request.ignore_memory)
    clock = Clock()
    try:
        with atomic_directory(request.output, request.force) as folder:
            plugin = _plugin_record(plan)
            job = _job(request, plan, folder)
            keys = dependencies(plan.source, job, plan.flavor, plugin, name, _program())
            cache = None if request.cache is None else EngineCache(request.cache)
            with clock.step("build"):
                built = cache.fetch(keys, folder / ENGINE_FILE) if cache is not None else None
                cached = built is not None
                if built is None:
                    built = _build(job, plan.flavor, progress)
                    check_files(request.folder, plan.source)  # the model may have been replaced while it was being read
                    if cache is not None:
                        _store(cache, keys, folder / ENGINE_FILE, built, say)
            _check_warnings(built, strict=request.strict)
            if plan.golden is not None:
                _take_golden(plan.golden, folder / GOLDEN_FOLDER)
            manifest = _manifest(request, plan, plugin, built, folder, clock)
            write_manifest(folder, manifest)
            manifest, report, advice = _judge(request, plan, manifest, folder, clock, progress, gpu)
    except OSError as error:
        raise BuildFailed(f"cannot write {request.output}: {error.strerror}; free space or choose another") from error
    return EngineArtifact(request.output, manifest, report, advice, cached)


def _program() -> str:
    """What of this program decides an engine beside its plugins: the version, and the source of build and lowering."""
    package = Path(__file__).parent.parent
    sources = [package / "trt" / "builder.py", *sorted((package / "passes").glob("trt86*.py"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return f"{version()} {digest}"


def _check_memory(plan: Plan, gpu: str | None, *, ignore: bool) -> str | None:
    """Compare what attention may need with what the GPU has free; returns the GPU's name where it matters."""
    if gpu is None or not plan.flavor.needs_gpu:
        return None
    with Cuda() as cuda:
        free = cuda.free_memory()
        name = f"{cuda.name}, {cuda.capability}"
    weights = sum(record.size for file, record in plan.source.files.items() if not file.startswith(GOLDEN_FOLDER))
    if plan.attention_bytes + weights > free and not ignore:
        raise Usage(
            f"the largest profile may need {sizes.gibibytes(plan.attention_bytes + weights)} and the GPU has "
            f"{sizes.gibibytes(free)} free; choose a smaller --profile, or --ignore-memory if attention will be fused"
        )
    return name


def _plugin_record(plan: Plan) -> PluginRecord | None:
    if plan.source.rope != "plugin":
        return None
    if plan.plugin is None:
        return PluginRecord(FUSED_QK_ROPE.onnx_name, str(FUSED_QK_ROPE.version), "function", None)
    try:
        from plugins.fused_qk_rope.source import source_sha256

        digest = source_sha256()
    except ModuleNotFoundError as error:
        raise MissingRequirement(f"the plugin needs {error.name}; install it, or pass --no-plugin") from error
    return PluginRecord(FUSED_QK_ROPE.onnx_name, str(FUSED_QK_ROPE.version), plan.plugin, digest)


def _job(request: TrtRequest, plan: Plan, folder: Path) -> BuildJob:
    config = plan.config
    lowest = min(plan.targets, key=lambda target: tuple(map(int, target.split("."))))
    return BuildJob(
        flavor=plan.flavor.name,
        onnx=str((request.folder / plan.source.artifact).resolve()),
        engine=str((folder / ENGINE_FILE).resolve()),
        dtype=plan.source.dtype,
        profiles=plan.profiles,
        targets=plan.targets if request.target_sm else (),
        opt_level=request.opt_level,
        workspace=None if request.workspace_mib is None else request.workspace_mib << 20,
        timing_cache=None if request.timing_cache is None else str(request.timing_cache.resolve()),
        plugin=plan.plugin,
        # a newer GPU's driver compiles the PTX of an older one
        plugin_target=f"sm_{lowest.replace('.', '')}",
        plugin_layers=config.num_hidden_layers if plan.source.rope == "plugin" else 0,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
    )


def _build(job: BuildJob, flavor: Flavor, progress: Progress) -> Built:
    """Run the build in a process of its own and pass on what it is doing."""
    with Child("exporter.trt.builder:serve", f"the process in which {flavor} builds") as child:
        try:
            child.send(job)
            phase = "build"
            while True:
                while not child.poll(1.0):
                    progress(phase, 0, 1)  # the time goes on, though TensorRT says nothing for minutes
                message = child.receive()
                if isinstance(message, Built):
                    return message
                if isinstance(message, Phase):
                    phase = message.name
                    progress(phase, 0, 1)
        except ChildDiedError as error:
            raise BuildFailed(f"{error}; try --no-plugin or another --opt-level") from error
        finally:
            shutil.rmtree(Path(job.engine).parent / ".lowered", ignore_errors=True)


def _store(
    cache: EngineCache, keys: dict[str, Any], engine: Path, built: Built, say: Callable[[str], None] | None
) -> None:
    """Keep the engine; a cache that cannot be written is no reason to lose it."""
    try:
        cache.store(keys, engine, built)
    except OSError as error:
        (say or (lambda _line: None))(f"the engine was not kept in the cache: {error.strerror}")


def _check_warnings(built: Built, *, strict: bool) -> None:
    if not strict:
        return
    for warning in built.warnings:
        if _DANGEROUS.search(warning):
            raise BuildFailed(f"--strict: TensorRT warns: {warning[:300]}; use another --dtype, or leave --strict out")


def _take_golden(source: Path, target: Path) -> None:
    target.mkdir()
    for name in (JSON_NAME, TENSORS_NAME):
        link_or_copy(source / name, target / name)


def _manifest(
    request: TrtRequest, plan: Plan, plugin: PluginRecord | None, built: Built, folder: Path, clock: Clock
) -> Manifest:
    seconds = {**clock.seconds, **{f"tensorrt {step}": value for step, value in built.seconds.items()}}
    return dataclasses.replace(
        plan.source,
        schema_version=SCHEMA_VERSION,
        kind="engine",
        artifact=ENGINE_FILE,
        source=dataclasses.replace(plan.source.source, onnx_sha256=plan.source.artifact_sha256),
        options={**_plain_options(request), "tf32": plan.uses_tf32},
        tool_versions=tool_versions(BUILD_TOOLS),
        plugin=plugin,
        runtime=plan.flavor.runtime,
        profiles=plan.profiles,
        targets=plan.targets,
        warnings=built.warnings,
        seconds=seconds,
        peak_memory_bytes=max(built.peak_memory_bytes, peak_memory()),
        layers=built.layer_types,
        files=record_files(folder),
        validation=None,
    )


def _plain_options(request: TrtRequest) -> dict[str, Any]:
    """Options as JSON can hold them; no path of this machine travels."""
    return {
        "flavor": request.flavor,
        "profiles": list(request.profiles),
        "frames": request.frames,
        "items": request.items,
        "target_sm": list(request.target_sm),
        "opt_level": request.opt_level,
        "workspace_mib": request.workspace_mib,
        "timing_cache": request.timing_cache is not None,
        "cache": request.cache is not None,
        "plugin": request.plugin,
        "strict": request.strict,
        "golden": request.golden is not None,
        "ignore_memory": request.ignore_memory,
        "validate": request.validate,
    }


def _judge(
    request: TrtRequest,
    plan: Plan,
    manifest: Manifest,
    folder: Path,
    clock: Clock,
    progress: Progress,
    gpu: str | None,
) -> tuple[Manifest, Report | None, str]:
    """Judge the engine where it can run; otherwise say what to run where."""
    place = f"on a GPU of compute capability {', '.join(plan.targets)} with {plan.flavor}"
    if plan.golden is None:
        return (
            manifest,
            None,
            f"there is no golden set; record one, then run kvit-export validate {request.output} {place}",
        )
    if not request.validate or gpu not in plan.targets:
        return manifest, None, f"run kvit-export validate {request.output} {place}"
    with clock.step("validate"):
        try:
            backend = open_backend(folder, manifest)
        except MissingRequirement as error:
            return manifest, None, f"{error.message}; then run kvit-export validate {request.output}"
        except BadInput as error:
            raise BuildFailed(f"{plan.flavor} built an engine that does not load: {error.message}") from error
        with backend:
            manifest, report = judge_folder(
                folder,
                backend,
                manifest,
                progress=lambda name, number, total: progress(f"validate {name}", number - 1, total),
            )
    manifest = dataclasses.replace(manifest, seconds={**manifest.seconds, **clock.seconds})
    write_manifest(folder, manifest)
    advice = ""
    if report.judgement.verdict is not Verdict.PASS:
        advice = "do not deploy it; report.json has the numbers"
    return manifest, report, advice
