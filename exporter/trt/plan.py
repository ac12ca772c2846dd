"""What a build will do, thought through and refused before anything is done where it cannot work. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from exporter.errors import BadInput, MissingRequirement, Usage, ValidationFailed
from exporter.manifest import GOLDEN_FOLDER, Manifest, check_files, read_manifest
from exporter.trt import profiles as sizes
from exporter.trt.flavor import Flavor, check_targets, choose
from exporter.trt.job import PluginKind
from exporter.validation.evidence import Profile, Shape
from exporter.validation.gate import Verdict
from exporter.validation.golden import open_golden
from exporter.validation.golden_format import read_golden_header
from model.config import VisionConfig
from model.weights import ITEM_SIZES
from plugins.fused_qk_rope.description import FUSED_QK_ROPE


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
        config: of the tower.
        flavor: that will build.
        profiles: of the engine.
        targets: compute capabilities of the engine.
        plugin: what will carry the RoPE nodes; None for the function in the model.
        attention_bytes: memory that attention needs at the largest profile if nothing fuses it.
        uncovered: corners of profiles for which the golden set has no case.
        golden: folder of the golden set; None if there is none.
    """

    source: Manifest
    config: VisionConfig
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
        config=config,
        flavor=flavor,
        profiles=chosen,
        targets=targets,
        plugin=_plugin_kind(request, source, flavor),
        attention_bytes=sizes.attention_bytes(
            chosen,
            config.num_attention_heads,
            # without strong types half-precision logits are fp32, see exporter.passes.trt86_rewrites
            ITEM_SIZES[source.dtype] if flavor.strongly_typed else 4,
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
