"""What a build is told and what it answers; plain records that cross from process to process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from exporter.validation.evidence import DType, Profile

PluginKind = Literal["aot", "v3"]


@dataclass(frozen=True)
class BuildJob:
    """One build.

    Attributes:
        flavor: name of the TensorRT to build with.
        onnx: the model, its weights beside it.
        engine: where to write the engine; the caller makes it appear whole.
        dtype: of the model.
        profiles: of the engine.
        targets: compute capabilities to build for; empty for the flavour's default.
        opt_level: builder optimisation level, 0 to 5; None leaves it to TensorRT.
        workspace: most bytes of scratch memory; None leaves it to TensorRT.
        timing_cache: file of measured kernel times, read and written; None for none.
        plugin: kind of plugin that shall take the RoPE nodes; None leaves them to the function in the model.
        plugin_target: ``sm_NN`` that the plugin's kernel is compiled for.
        plugin_layers: RoPE nodes in the model, all of which a plugin must take.
        heads: attention heads.
        head_dim: elements of a head.
    """

    flavor: str
    onnx: str
    engine: str
    dtype: DType
    profiles: tuple[Profile, ...]
    targets: tuple[str, ...]
    opt_level: int | None
    workspace: int | None
    timing_cache: str | None
    plugin: PluginKind | None
    plugin_target: str
    plugin_layers: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class Phase:
    """Where a build is.

    Attributes:
        name: of the step, in TensorRT's words.
    """

    name: str


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        warnings: what TensorRT warned of, each once.
        layer_types: layers of the parsed network by type.
        plugin_layers: layers that a plugin took.
        float32_layers: layers that were pinned to fp32 (TensorRT 8 only).
        seconds: duration by step.
        peak_memory_bytes: largest resident set of the building process.
    """

    warnings: tuple[str, ...]
    layer_types: Mapping[str, int]
    plugin_layers: int
    float32_layers: int
    seconds: Mapping[str, float]
    peak_memory_bytes: int
