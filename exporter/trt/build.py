"""The ``trt`` stage: an ONNX artifact in, a folder with engine, golden set, report and manifest out. Needs no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter.cli import version
from exporter.errors import BadInput, BuildFailed, MissingRequirement, Usage, ValidationFailed
from exporter.files import atomic_directory, link_or_copy
from exporter.manifest import (
    GOLDEN_FOLDER,
    SCHEMA_VERSION,
    Manifest,
    PluginRecord,
    check_files,
    read_manifest,
    record_files,
    write_manifest,
)
from exporter.tools import BUILD_TOOLS, Clock, peak_memory, tool_versions
from exporter.trt import profiles as sizes
from exporter.trt.backend import open_backend
from exporter.trt.cache import EngineCache, dependencies
from exporter.trt.child import Child, ChildDiedError
from exporter.trt.cuda import Cuda
from exporter.trt.flavor import Flavor, check_targets, choose
from exporter.trt.job import BuildJob, Built, Phase, PluginKind
from exporter.validation.evidence import Profile, Shape
from exporter.validation.gate import Verdict
from exporter.validation.golden import open_golden
from exporter.validation.golden_format import JSON_NAME, TENSORS_NAME, read_golden_header
from exporter.validation.gpu import cuda_capability
from exporter.validation.judging import judge_folder
from exporter.validation.report import Report
from model.config import VisionConfig
from plugins.fused_qk_rope.description import FUSED_QK_ROPE

ENGINE_FILE = "vision_tower.engine"
Progress = Callable[[str, int, int], None]

# TensorRT says this of weights that its arithmetic cannot hold; the engine then computes something else
_DANGEROUS = re.compile(r"overflow|subnormal|infinit|\bnan\b|out of range|clamp", re.IGNORECASE)


@dataclass(frozen=True)
class TrtRequest:
    """What the user asked of ``kvit-export trt``; fields as the options of that command."""

    folder: Path
    output: Path
    flavor: str | None = None
    profiles: tuple[str, ...] = ()
    frames: str | None = None
    items: str | None = None
    target_sm: tuple[str, ...] = ()
    opt_level: int | None = None
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    cache: Path | None = None
    plugin: bool = True
    strict: bool = False
    golden: Path | None = None
    ignore_memory: bool = False
    validate: bool = True
    force: bool = False


@dataclass(frozen=True)
class Plan:
    """A build that was thought through, before anything is done.

    Attributes:
        source: manifest of the ONNX artifact.
        flavor: that will build.
        profiles: of the engine.
        targets: compute capabilities of the engine.
        plugin: what will carry the RoPE nodes; None for the function in the model.
        attention_bytes: memory that attention needs at the largest profile if nothing fuses it.
        uncovered: corners of profiles for which the golden set has no case.
        golden: folder of the golden set; None if there is none.
    """

    source: Manifest
    flavor: Flavor
    profiles: tuple[Profile, ...]
    targets: tuple[str, ...]
    plugin: PluginKind | None
    attention_bytes: int
    uncovered: tuple[str, ...]
    golden: Path | None

    @property
    def uses_tf32(self) -> bool:
        """Whether products may be computed in TF32: only those of half-precision operands, which it holds exactly."""
        return not self.flavor.strongly_typed and self.source.dtype == "float16"

    def describe(self) -> list[str]:
        """Say what will be built, one line each."""
        lines = [f"{self.flavor}, {self.source.dtype}, for compute capability {', '.join(self.targets)}"]
        lines += [f"profile {sizes.describe(profile)}" for profile in self.profiles]
        memory = sizes.gibibytes(self.attention_bytes)
        lines.append(
            f"attention needs up to {memory} beside the weights at the largest profile, less where it is fused"
        )
        if self.golden is not None:
            lines += [f"{text}: at best NOT VALIDATED" for text in self.uncovered]
        return lines


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


def plan_build(request: TrtRequest, gpu: str | None) -> Plan:
    """Read the ONNX artifact, choose flavour and profiles, and refuse what cannot work.

    Args:
        request: what the user asked for.
        gpu: compute capability of the GPU here; None without one.

    Raises:
        BadInput: the artifact is damaged, or no ONNX artifact of ours.
        ValidationFailed: it FAILED its own validation.
        Usage: options that contradict it or each other.
        MissingRequirement: no TensorRT, or it needs a GPU.
    """
    source = _read_source(request.folder)
    flavor = choose(request.flavor, has_gpu=gpu is not None)
    if flavor.needs_gpu and gpu is None:
        raise MissingRequirement(f"{flavor} builds on the GPU that will run the engine, and there is none here")
    _check_readable(source, flavor)
    targets = check_targets(flavor, request.target_sm, source.dtype) or (str(gpu),)
    if request.timing_cache is not None and not flavor.timing_cache:
        raise Usage(f"--timing-cache: {flavor} measures no kernels, so there is nothing to keep")
    golden = request.golden or (request.folder / GOLDEN_FOLDER if _has_golden(source) else None)
    if request.golden is not None:
        open_golden(request.golden)  # the model's own set was hashed with the model
    _check_places(request, golden)
    shapes = _golden_shapes(golden, source)
    config = VisionConfig.from_dict(dict(source.source.config))
    packed = source.packing == "packed"
    chosen = _profiles(request, shapes, config, packed=packed)
    return Plan(
        source=source,
        flavor=flavor,
        profiles=chosen,
        targets=targets,
        plugin=_plugin_kind(request, source, flavor),
        attention_bytes=sizes.attention_bytes(
            chosen,
            config.num_attention_heads,
            # without strong types half-precision logits are fp32, see exporter.passes.trt86_rewrites
            sizes.ITEM_BYTES[source.dtype] if flavor.strongly_typed else 4,
            packed=packed,
        ),
        uncovered=tuple(sizes.uncovered(chosen, shapes)),
        golden=golden,
    )


def _read_source(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise BadInput(f"{folder} is no folder; give the one that kvit-export onnx wrote")
    manifest = read_manifest(folder)
    if manifest.kind != "onnx":
        raise BadInput(f"{folder} holds an engine; give the folder that kvit-export onnx wrote")
    check_files(folder, manifest)
    validation = manifest.validation
    plugin = manifest.plugin
    if plugin is not None and plugin.version != str(FUSED_QK_ROPE.version):
        raise BadInput(
            f"{folder} has version {plugin.version} of {plugin.name}, this program version {FUSED_QK_ROPE.version}; "
            "export it again"
        )
    if validation is not None and validation.judgement.verdict is Verdict.FAILED:
        raise ValidationFailed(f"{folder} FAILED its validation, so no engine is built from it; see its report.json")
    return manifest


def _check_places(request: TrtRequest, golden: Path | None) -> None:
    """Refuse an output that would replace what the build reads, and folders that cannot take what it keeps."""
    output = request.output.resolve()
    for used in filter(None, (request.folder, golden)):
        place = used.resolve()
        if output == place or output in place.parents or (used == golden and place in output.parents):
            raise Usage(f"-o {request.output}: {used} is read by this build; choose a folder apart from it")
    for option, path in (("--cache", request.cache), ("--timing-cache", request.timing_cache)):
        if path is None:
            continue
        if output == path.resolve() or output in path.resolve().parents:
            raise Usage(f"{option} {path} lies in the output; choose another place")
        folder = path if option == "--cache" else path.parent
        try:
            if option == "--cache":
                folder.mkdir(parents=True, exist_ok=True)
            readable = not path.exists() or os.access(path, os.R_OK)
        except OSError as error:
            raise Usage(f"{option} {path}: {error.strerror}; choose another place") from error
        if not (folder.is_dir() and os.access(folder, os.W_OK) and readable):
            raise Usage(f"{option} {path}: the folder is missing or cannot be written; choose another place")


def _check_readable(source: Manifest, flavor: Flavor) -> None:
    """Refuse what the parser or the arithmetic of a flavour lacks, and say how to export for it."""
    needs = []
    if not flavor.strongly_typed and source.dtype == "bfloat16":
        needs.append("--dtype fp16 or fp32")
    if not flavor.attention_op and source.attention == "op":
        needs.append("--attention plain")
    if not flavor.rotary_op and source.rope == "standard":
        needs.append("--rope plugin")
    if needs:
        raise Usage(f"{flavor} cannot read this graph; export again with {' and '.join(needs)}")


def _has_golden(manifest: Manifest) -> bool:
    return any(name.startswith(f"{GOLDEN_FOLDER}/") for name in manifest.files)


def _golden_shapes(golden: Path | None, source: Manifest) -> list[Shape]:
    if golden is None:
        return []
    header = read_golden_header(golden)
    found = (header.dtype, header.weights_sha256, header.config_sha256)
    if found != (source.dtype, source.source.weights_sha256, source.source.config_sha256):
        raise BadInput(
            f"the golden set in {golden} is of another dtype, other weights or another config than the model; record "
            "it again"
        )
    return [case.shape for case in header.cases]


def _profiles(request: TrtRequest, shapes: list[Shape], config: VisionConfig, *, packed: bool) -> tuple[Profile, ...]:
    if request.profiles:
        return sizes.parse_profiles(
            request.profiles, request.frames, request.items, max_frames=config.max_frames, packed=packed
        )
    if request.frames is not None or request.items is not None:
        raise Usage("--frames and --items bound the profiles given by --profile; give --profile MIN:OPT:MAX too")
    return sizes.default_profiles(shapes)


def _plugin_kind(request: TrtRequest, source: Manifest, flavor: Flavor) -> PluginKind | None:
    if source.rope != "plugin" or not request.plugin:
        return None
    if flavor.aot_plugins:
        return "aot"
    return "v3" if flavor.v3_plugins else None


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
    config = VisionConfig.from_dict(dict(plan.source.source.config))
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
