"""From weights to an ONNX file: trace one block, stamp it once a layer, attach the weights, save, check."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from exporter.errors import ExportFailed
from exporter.onnx_trace import (
    BLOCK_IN,
    BLOCK_OUT,
    OPSET_OF_NEW_OPERATORS,
    TORCH_DTYPES,
    OnnxOptions,
    Trace,
    trace_one_block,
)
from exporter.passes.stamp import stamp_blocks
from model.config import VisionConfig, tensor_shapes
from model.tower import module_name
from model.weights import VisionWeights
from plugins.fused_qk_rope import onnx_op
from plugins.fused_qk_rope.description import FUSED_QK_ROPE

MODEL_FILE = "vision_tower.onnx"
DATA_FILE = f"{MODEL_FILE}.data"
FP16_MAX = 65504.0
ONNX_DTYPES = {"bf16": ir.DataType.BFLOAT16, "fp16": ir.DataType.FLOAT16, "fp32": ir.DataType.FLOAT}

# Smaller tensors stay in the model file, where onnx's shape inference can read them.
_EXTERNAL_FROM = 1024  # bytes

Progress = Callable[[str, int, int], None]
"""Called with the step, how much of it is done and how much there is."""


@dataclass(frozen=True)
class OnnxExport:
    """What an export wrote.

    Attributes:
        model: the .onnx file.
        data: its weights, beside it.
        warnings: what PyTorch said while tracing.
        nodes: operators in the graph.
        nodes_per_block: operators of one block.
    """

    model: Path
    data: Path
    warnings: tuple[str, ...]
    nodes: int
    nodes_per_block: int


def export_onnx(
    weights: VisionWeights,
    options: OnnxOptions,
    folder: Path,
    *,
    version: str,
    progress: Progress | None = None,
    trace: Trace | None = None,
) -> OnnxExport:
    """Write ``vision_tower.onnx`` and ``vision_tower.onnx.data``.

    Args:
        weights: an opened source; each tensor is read once, while it is written.
        options: dtype, form and opset.
        folder: an existing folder; the caller makes it appear whole.
        version: of this program, for the model's metadata.
        progress: told how far each step is.
        trace: made earlier of a tower that differs at most in depth, with the same options; made now if None.

    Raises:
        ExportFailed: the graph cannot be made, a weight does not fit fp16, or the written file breaks ONNX's rules.
        CheckpointError: a tensor cannot be read.
    """
    tell = progress or (lambda _step, _done, _total: None)
    if options.opset < OPSET_OF_NEW_OPERATORS and (options.form.rope == "standard" or options.form.attention == "op"):
        raise ExportFailed(f"RotaryEmbedding and Attention need opset {OPSET_OF_NEW_OPERATORS}, not {options.opset}")
    config = weights.config
    tell("trace", 0, 1)
    trace = trace or trace_one_block(config, options)
    if trace.options != options:
        raise ValueError(f"the trace was made with {trace.options}, not {options}")
    model = trace.model()
    stamped = stamp_blocks(model, config.num_hidden_layers, block_in=BLOCK_IN, block_out=BLOCK_OUT)
    tell("trace", 1, 1)
    _attach_weights(model, weights, options.dtype)
    _finish(model, config, options, version)
    _save(model, folder, tell)
    _add_weights_hash(folder / MODEL_FILE, weights.sha256())
    check_model(folder / MODEL_FILE)
    return OnnxExport(
        folder / MODEL_FILE, folder / DATA_FILE, trace.warnings, len(model.graph), stamped.nodes_per_block
    )


def _attach_weights(model: ir.Model, weights: VisionWeights, dtype: str) -> None:
    """Turn the graph's weight inputs into initializers that are read when they are written."""
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    shapes = tensor_shapes(weights.config)
    for name, shape in shapes.items():
        value = inputs.pop(module_name(name), None)
        if value is None:
            raise ExportFailed(f"the traced graph does not use {name}; report this")
        graph.inputs.remove(value)
        value.name = name
        value.const_value = ir.LazyTensor(
            _reader(weights, name, dtype), dtype=ONNX_DTYPES[dtype], shape=ir.Shape(shape), name=name
        )
        graph.register_initializer(value)
    if len(graph.inputs) != 2:
        raise ExportFailed(
            f"inputs {[value.name for value in graph.inputs[2:]]} of the graph have no weights; report this"
        )


def _reader(weights: VisionWeights, name: str, dtype: str) -> Callable[[], ir.TensorProtocol]:
    def read() -> ir.TensorProtocol:
        return ir.tensor_adapters.TorchTensor(cast_weight(weights.tensor(name), name, dtype), name=name)

    return read


def cast_weight(tensor: torch.Tensor, name: str, dtype: str) -> torch.Tensor:
    """Cast a weight to the artifact's dtype.

    Raises:
        ExportFailed: a value is not finite, or is beyond fp16's range.
    """
    largest = float(tensor.abs().max())
    if not largest < float("inf"):  # NaN compares false too
        raise ExportFailed(f"{name} holds NaN or infinity; the checkpoint is damaged")
    if dtype == "fp16" and largest > FP16_MAX:
        raise ExportFailed(f"{name} holds {largest:g}, beyond fp16's {FP16_MAX:g}; use --dtype bf16")
    return tensor.to(TORCH_DTYPES[dtype])


def _finish(model: ir.Model, config: VisionConfig, options: OnnxOptions, version: str) -> None:
    model.graph.name = "vision_tower"
    model.producer_name, model.producer_version = "kvit-export", version
    if options.form.rope == "plugin":
        body = onnx_op.function_body(str(TORCH_DTYPES[options.dtype]).removeprefix("torch."), options.opset)
        function = ir.serde.deserialize_function(body)
        model.functions[function.identifier()] = function
        model.opset_imports.setdefault(FUSED_QK_ROPE.domain, FUSED_QK_ROPE.version)
    model.metadata_props.update(
        {
            "kvit.version": version,
            "kvit.family": config.family,
            "kvit.config": json.dumps(config.to_dict(), sort_keys=True),
            "kvit.config_sha256": config.sha256,
            "kvit.dtype": options.dtype,
            "kvit.rope": options.form.rope,
            "kvit.attention": options.form.attention,
            "kvit.packing": options.form.packing,
        }
    )


def _save(model: ir.Model, folder: Path, tell: Progress) -> None:
    def on_tensor(_tensor: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        tell("write weights", info.index + 1, info.total)

    # two threads: one reads or draws and casts while the other writes
    ir.save(
        model,
        folder / MODEL_FILE,
        external_data=DATA_FILE,
        size_threshold_bytes=_EXTERNAL_FROM,
        callback=on_tensor,
        max_workers=2,
        max_in_flight_bytes=1 << 28,
    )


def _add_weights_hash(path: Path, sha256: str) -> None:
    """Write the hash of the weights into the model; it is known once all of them have been read."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    model.metadata_props.add(key="kvit.weights_sha256", value=sha256)
    onnx.save(model, str(path))


def check_model(path: Path) -> None:
    """Check a written model as strictly as onnx can.

    Raises:
        ExportFailed: the full check or strict shape inference refuses it.
    """
    import onnx

    onnx_op.register_schema()
    try:
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(str(path), load_external_data=False)
        onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportFailed(f"{path.name} breaks ONNX's rules: {error}") from error
