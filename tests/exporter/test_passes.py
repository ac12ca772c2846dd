"""Graph passes on graphs small enough to read."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from exporter.errors import ExportFailed
from exporter.onnx_trace import _check_symbolic, _told
from exporter.passes import cleanup
from exporter.passes.stamp import stamp_blocks

# one block between enter and leave: it uses a value that all layers share, a weight of its own, and a node (w2) that
# depends on the weight only, as a transposed weight does
ONE_BLOCK = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[n] x, float[1] w) => (float[n] y, float[n] enter, float[n] leave) {
    two = Constant <value_float = 2.0> ()
    shared = Mul (x, two)
    enter = Add (x, two)
    w2 = Add (w, w)
    a = Mul (enter, w2)
    leave = Add (a, shared)
    y = Sub (leave, two)
}
"""


def one_block() -> ir.Model:
    model = ir.serde.deserialize_model(onnx.parser.parse_model(ONE_BLOCK))
    model.graph.inputs[1].name = "m.blocks.0.w"  # ONNX text knows neither dots in names nor names of nodes
    for index, node in enumerate(model.graph):
        node.name = f"node_{index}"
    return model


def stamped(layers: int) -> onnx.ModelProto:
    model = one_block()
    result = stamp_blocks(model, layers, block_in="enter", block_out="leave")
    assert result.nodes_per_block == 3
    assert result.layers == layers
    return ir.serde.serialize_model(model)


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_each_layer_has_its_own_weight_and_shares_the_rest(layers: int) -> None:
    proto = stamped(layers)
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.output] == ["y"]
    assert len({node.name for node in proto.graph.node}) == len(proto.graph.node)
    x = np.array([1.0, -3.0], dtype=np.float32)
    weights = np.linspace(0.25, 1.0, layers).astype(np.float32)
    feeds = {f"m.blocks.{i}.w": weights[i : i + 1] for i in range(layers)}
    (y,) = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x, **feeds})
    stream = x + 2
    for weight in weights:
        stream = stream * (weight + weight) + x * 2
    np.testing.assert_allclose(y, stream - 2, rtol=1e-6)  # a handful of fp32 operations


def test_a_graph_without_marks_is_refused() -> None:
    model = one_block()
    with pytest.raises(ValueError, match="no outputs in and leave"):
        stamp_blocks(model, 2, block_in="in", block_out="leave")


def test_flat_reshapes_go_and_real_ones_stay() -> None:
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    net (int64[n] i, float[a, 3] t) => (float[m, 3] y, float[k] z)
    <int64[1] flat = {-1}> {
        j = Reshape (i, flat)
        y = Gather (t, j)
        z = Reshape (t, flat)
    }
    """
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    assert cleanup.bypass_flat_reshapes(model) == 1
    assert [node.op_type for node in model.graph] == ["Gather", "Reshape"]
    onnx.checker.check_model(ir.serde.serialize_model(model))


def test_a_frozen_axis_is_refused() -> None:
    """pitfall 20: every axis called dynamic is symbolic, or the export fails."""
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[frames, 32, 588] pixel_values, int64[items, 2] grid_hws) => (float[m, 56] image_embeds) {
        image_embeds = Identity (pixel_values)
    }
    """
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    with pytest.raises(ExportFailed, match=r"pixel_values: axes \['frames', '32'\] should be symbolic"):
        _check_symbolic(model)


def test_a_tracer_warning_ends_the_export() -> None:
    """pitfall 21."""

    class TracerWarning(UserWarning):
        pass

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("something else", UserWarning, stacklevel=1)
        warnings.warn("old", FutureWarning, stacklevel=1)
        assert _told(caught) == ("UserWarning: something else",)
        warnings.warn("Converting a tensor to a Python integer", TracerWarning, stacklevel=1)
        with pytest.raises(ExportFailed, match="depends on a value"):
            _told(caught)
