"""Which TensorRT is installed and what it can do, found by asking it; everything else reads this record."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from types import ModuleType

from exporter.errors import MissingRequirement, Usage, one_line
from exporter.manifest import Runtime

FLAVOURS = ("tensorrt", "tensorrt_rtx")

# A portable TensorRT-RTX engine leaves out Turing, which must be asked for by itself and has no bfloat16.
_NOT_PORTABLE = ("7.5",)


@dataclass(frozen=True)
class Flavor:
    """One installed TensorRT.

    Attributes:
        name: ``tensorrt`` or ``tensorrt_rtx``; also the name of its module.
        version: of the library.
        strongly_typed: the network takes every type from the graph. Without it (TensorRT 8) precision is a flag, there
            is no bfloat16, no model-local function, and the graph is lowered first.
        aot_plugins: an engine can carry a compiled kernel that needs neither Python nor a library (10.9 and later).
        v3_plugins: a Python class can be a plugin (IPluginV3).
        targets: compute capabilities that it builds for without having the GPU, such as ``8.9``; empty where an engine
            is built for the GPU at hand.
        timing_cache: measured kernel times can be kept between builds; TensorRT-RTX measures none.
        stream_build: the engine can be written to a file piece by piece.
        attention_op: its parser reads ONNX Attention (opset 23).
        rotary_op: its parser reads ONNX RotaryEmbedding (opset 23).
        module: the imported module.
    """

    name: str
    version: str
    strongly_typed: bool
    aot_plugins: bool
    v3_plugins: bool
    targets: tuple[str, ...]
    timing_cache: bool
    stream_build: bool
    attention_op: bool
    rotary_op: bool
    module: ModuleType = field(repr=False, compare=False)

    @property
    def runtime(self) -> Runtime:
        """Flavour and version, as manifests hold them."""
        return Runtime(self.name, self.version)

    @property
    def needs_gpu(self) -> bool:
        """Whether a build measures kernels and so needs the GPU that will run the engine."""
        return not self.targets

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def installed(name: str) -> Flavor | None:
    """Import one flavour and ask what it can do.

    Args:
        name: one of `FLAVOURS`.

    Returns:
        The record; None where it is not installed.

    Raises:
        MissingRequirement: it is installed and cannot be loaded.
    """
    if name not in FLAVOURS:  # it may come out of a manifest
        return None
    try:
        return ask(importlib.import_module(name), name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        broken: Exception = error
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
    ) as error:  # a library is missing, or it is another module
        broken = error
    raise MissingRequirement(
        f"{name} is installed and cannot be loaded: {one_line(str(broken))[:200]}; reinstall it, or choose --flavor"
    ) from broken


def ask(trt: ModuleType, name: str) -> Flavor:
    """Ask a TensorRT module what it can do.

    Args:
        trt: the module.
        name: its flavour.
    """
    targets = capability_targets(trt)
    return Flavor(
        name=name,
        version=str(trt.__version__),
        strongly_typed=hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED"),
        aot_plugins=_has_aot(trt),
        v3_plugins=hasattr(trt, "IPluginV3"),
        targets=tuple(targets),
        # TensorRT-RTX has the names of a timing cache and wants a GPU as soon as they are used
        timing_cache=not targets and hasattr(trt.IBuilderConfig, "create_timing_cache"),
        stream_build=hasattr(trt.Builder, "build_serialized_network_to_stream"),
        attention_op=hasattr(trt, "IAttention"),
        rotary_op=hasattr(trt, "IRotaryEmbeddingLayer"),
        module=trt,
    )


def capability_targets(trt: ModuleType) -> dict[str, object]:
    """List the compute capabilities that a module can build for without the GPU.

    Returns:
        Enum member by capability such as ``8.9``; empty for TensorRT.
    """
    if not hasattr(trt.IBuilderConfig, "num_compute_capabilities"):
        return {}
    found = {}
    for name, member in trt.ComputeCapability.__members__.items():
        # CURRENT is left out on purpose: without a GPU it aborts the process
        if match := re.fullmatch(r"SM(\d+)(\d)", name):
            found[f"{match[1]}.{match[2]}"] = member
    return found


def _has_aot(trt: ModuleType) -> bool:
    try:
        plugin = importlib.import_module(f"{trt.__name__}.plugin")
    except ImportError:
        return False
    return hasattr(plugin, "aot_impl")


def choose(asked: str | None, *, has_gpu: bool) -> Flavor:
    """Choose the flavour to build with.

    Args:
        asked: ``--flavor``; None prefers TensorRT where there is a GPU, elsewhere TensorRT-RTX, which builds without.
        has_gpu: whether there is a CUDA GPU.

    Raises:
        Usage: an unknown name.
        MissingRequirement: none is installed, or the one that is cannot be loaded.
    """
    if asked is not None and asked not in FLAVOURS:
        raise Usage(f"--flavor {asked}: choose {' or '.join(FLAVOURS)}")
    order = FLAVOURS if has_gpu else tuple(reversed(FLAVOURS))
    for name in order if asked is None else (asked,):
        found = installed(name)
        if found is not None:
            return found
    raise MissingRequirement(
        f"{asked or 'TensorRT'} is not installed; pip install 'kvit-export[cpu]' for TensorRT-RTX or "
        "'kvit-export[gpu]' for TensorRT"
    )


def portable_targets(flavor: Flavor) -> tuple[str, ...]:
    """Compute capabilities of an engine for which no target was chosen; empty where there is no such choice."""
    return tuple(target for target in flavor.targets if target not in _NOT_PORTABLE)


def check_targets(flavor: Flavor, asked: tuple[str, ...], dtype: str) -> tuple[str, ...]:
    """Turn ``--target-sm`` into compute capabilities.

    Args:
        flavor: that will build.
        asked: such as ``89`` or ``8.9``; empty for the portable default.
        dtype: of the artifact.

    Returns:
        Sorted capabilities such as ``8.9``; empty where the engine is for the GPU at hand.

    Raises:
        Usage: the flavour does not build for a target, or the target cannot compute in this dtype.
    """
    if not asked:
        return portable_targets(flavor)
    if not flavor.targets:
        raise Usage(f"--target-sm: {flavor} builds for the GPU at hand and for no other")
    chosen = []
    for text in asked:
        match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", text.strip().lower())
        target = f"{match[1]}.{match[2]}" if match else ""
        if target not in flavor.targets:
            raise Usage(f"--target-sm {text}: {flavor} builds for {', '.join(flavor.targets)}")
        if target in _NOT_PORTABLE and dtype == "bfloat16":
            raise Usage(f"--target-sm {text}: compute capability {target} has no bfloat16; export with --dtype fp16")
        chosen.append(target)
    return tuple(sorted(set(chosen), key=lambda target: tuple(map(int, target.split(".")))))
