"""Trace the tower with one block and no weights: all that an export needs PyTorch's tracer for."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from exporter.errors import ExportFailed
from exporter.passes import cleanup
from model.config import VisionConfig
from model.graph import GraphForm, GraphTower
from model.tower import KimiVision
from plugins.fused_qk_rope import onnx_op

BLOCK_IN, BLOCK_OUT = "block_in", "block_out"
INPUTS, OUTPUT = ("pixel_values", "grid_hws"), "image_embeds"
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MIN_OPSET, DEFAULT_OPSET, MAX_OPSET = 18, 20, 25
OPSET_OF_NEW_OPERATORS = 23  # RotaryEmbedding and Attention


@dataclass(frozen=True)
class OnnxOptions:
    """What graph to make.

    Attributes:
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        form: rope, attention and packing.
        opset: version of ONNX's operators.
    """

    dtype: str = "bf16"
    form: GraphForm = dataclasses.field(default_factory=GraphForm)
    opset: int = DEFAULT_OPSET


class _OneBlock(GraphTower):
    """A tower of one block that also returns the residual stream on both sides of it."""

    def forward(self, pixel_values: Tensor, grid_hws: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        before, prepared = self.before_blocks(pixel_values, grid_hws)
        after = self.tower.vision_tower.encoder.blocks[0](before, prepared.rotate, prepared.attend)
        return self.after_blocks(after, pixel_values, prepared), before, after


@dataclass(frozen=True)
class Trace:
    """A traced tower.

    Attributes:
        options: what it was made with.
        proto: serialised graph. Its inputs are the two real ones, then the weights by their module names; its outputs
            are ``image_embeds``, ``block_in`` and ``block_out``.
        warnings: what PyTorch warned about.
    """

    options: OnnxOptions
    proto: bytes
    warnings: tuple[str, ...]

    def model(self) -> ir.Model:
        """A fresh copy of the graph, to be changed at will."""
        import onnx

        return ir.serde.deserialize_model(onnx.load_from_string(self.proto))


def trace_one_block(config: VisionConfig, options: OnnxOptions) -> Trace:
    """Trace and optimise the graph of a tower with a single block.

    The weights are graph inputs while the graph is optimised, so that none of them is folded, transposed or copied.

    Raises:
        ExportFailed: PyTorch cannot export the graph, or an axis that should be symbolic became a number.
    """
    dtype = TORCH_DTYPES[options.dtype]
    one_layer = dataclasses.replace(config, num_hidden_layers=1)
    with torch.device("meta"):
        tower = KimiVision(one_layer)
    # Uninitialised memory is never touched: the tracer looks at shapes only.
    tower = tower.to_empty(device="cpu").to(dtype).requires_grad_(requires_grad=False)
    # on the CPU whatever the process's default device is
    pixels = torch.zeros(2, 32, config.patch_pixels, dtype=dtype, device="cpu")
    example = (pixels, torch.full((2, 2), 4, device="cpu"))
    with _quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = _export(_OneBlock(tower, options.form).eval(), example, options.opset)
    _lift_weights(model)
    _optimise(model)
    _check_symbolic(model)
    return Trace(options, ir.serde.serialize_model(model).SerializeToString(), _told(caught))


def _export(module: torch.nn.Module, example: tuple[Tensor, Tensor], opset: int) -> ir.Model:
    onnx_op.register_schema()
    frames, patches, items = (torch.export.Dim(name) for name in ("frames", "patches", "items"))
    shapes = ({0: frames, 1: patches}, {0: items})
    try:
        program = torch.onnx.export(
            _capture(module, example, shapes),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=opset,
            input_names=INPUTS,
            output_names=(OUTPUT, BLOCK_IN, BLOCK_OUT),
            dynamic_shapes=shapes,
            custom_translation_table={**onnx_op.translation(), **_whole_number_division()},
        )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError) as error:
        raise ExportFailed(f"PyTorch could not export the tower at opset {opset}: {error}") from error
    if program is None:
        raise ExportFailed("PyTorch's exporter returned nothing")
    return program.model


def _capture(module: torch.nn.Module, example: tuple[Tensor, Tensor], shapes: Any) -> torch.export.ExportedProgram:  # noqa: ANN401
    """Trace as ``torch.onnx.export`` of PyTorch 2.11 and later does by itself.

    Earlier ones turn conditions on sizes (patches come in fours, frames * patches is not 1) into guards and then refuse
    the range; here they are left to assertions. Sizes of 0 and 1 are not told apart from others.
    """
    import torch.fx.experimental._config as sizes

    with sizes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        return torch.export.export(
            module,
            example,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def _whole_number_division() -> dict[Any, Any]:
    """Emit one integer Div for ``torch.div(rounding_mode="trunc")``; PyTorch's own translation goes through floats."""
    from onnxscript import opset18

    def div(dividend: Any, divisor: Any, rounding_mode: str | None = None) -> Any:  # noqa: ANN401 - symbolic values
        if rounding_mode != "trunc":
            raise ExportFailed(f"division with rounding_mode {rounding_mode!r} has no translation")
        return opset18.Div(dividend, divisor)

    return {torch.ops.aten.div.Tensor_mode: div}


def _lift_weights(model: ir.Model) -> None:
    graph, prefix = model.graph, "tower."
    for name in [name for name in graph.initializers if name.startswith(prefix)]:
        value = graph.initializers.pop(name)
        value.const_value = None
        value.name = name.removeprefix(prefix)
        graph.inputs.append(value)


def _optimise(model: ir.Model) -> None:
    from onnxscript import optimizer

    optimizer.optimize(model)
    cleanup.strip_trace_metadata(model)
    cleanup.bypass_flat_reshapes(model)
    cleanup.rename_dimension(model, "(patches//4)", "patches/4")


def _check_symbolic(model: ir.Model) -> None:
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    wanted = {"pixel_values": ["frames", "patches"], "grid_hws": ["items"], OUTPUT: ["patches/4"]}
    for name, dims in wanted.items():
        shape = values[name].shape
        found = [] if shape is None else [str(dim) for dim in list(shape)[: len(dims)]]
        if found != dims:
            raise ExportFailed(f"{name}: axes {found} should be symbolic {dims}; report this with your PyTorch version")


def _told(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    texts = dict.fromkeys(f"{w.category.__name__}: {' '.join(str(w.message).split())}" for w in caught)
    if tracer := [text for text in texts if text.startswith("TracerWarning")]:
        raise ExportFailed(f"the trace depends on a value: {tracer[0]}")
    # deprecations inside PyTorch tell its developers something, our users nothing
    return tuple(text for text in texts if not text.startswith(("FutureWarning", "DeprecationWarning")))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log lines about torchvision, which this project does not use."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
