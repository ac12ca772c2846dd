"""bf16 and fp16 by casts: rounding happens after every computing node and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from exporter import ort_emulation
from exporter.errors import BadInput
from exporter.ort_emulation import emulated_model
from exporter.validation.backends import OrtBackend

# Shapes and names of the towers, so that the backend accepts it; three computing nodes and two that move data.
TEXT = """
<ir_version: 10, opset_import: ["" : 20]>
net (DTYPE[frames, patches, 588] pixel_values, int64[items, 2] grid_hws) => (DTYPE[rows, 588] image_embeds)
<int64[2] flat = {-1, 588}> {
    x = Reshape (pixel_values, flat)
    square = Mul (x, x)
    sum = Add (square, x)
    t = Transpose <perm = [1, 0]> (sum)
    back = Transpose <perm = [1, 0]> (t)
    image_embeds = Gelu <approximate = "tanh"> (back)
}
"""


def model_file(folder: Path, dtype: str) -> Path:
    path = folder / "model.onnx"
    onnx.save(onnx.parser.parse_model(TEXT.replace("DTYPE", dtype)), str(path))
    return path


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_elementwise_operators_are_bit_equal_to_pytorch(name: str, dtype: torch.dtype, tmp_path) -> None:
    """PyTorch rounds after each of the three operators too; one more or one less rounding would show."""
    pixels = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 8, 588)).astype(np.float32)).to(dtype)
    with OrtBackend(model_file(tmp_path, name)) as backend:
        found = backend.run(pixels.float().numpy(), np.array([[2, 4]]))
    x = pixels[0]
    expected = torch.nn.functional.gelu(x * x + x, approximate="tanh").float().numpy()
    # tanh itself differs by an ulp between libraries now and then; without rounding in between 30 % differ
    assert (found != expected).mean() < 0.005
    unrounded = (
        torch.nn.functional.gelu(x.float() * x.float() + x.float(), approximate="tanh").to(dtype).float().numpy()
    )
    assert (unrounded != expected).mean() > 0.1


def test_data_movers_get_no_cast_and_weights_stay_outside(tmp_path) -> None:
    model = onnx.load_from_string(emulated_model(model_file(tmp_path, "bfloat16")).content)
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Transpose") == 2
    assert kinds.count("Reshape") == 1
    # one cast down after each of three nodes; one cast up per distinct low-precision input: x, square, back
    assert kinds.count("Cast") == 6


def test_a_function_is_inlined_and_its_domain_dropped(tmp_path) -> None:
    import towers

    path = towers.export_to(tmp_path, "tiny", towers.options_of("bf16"))
    model = onnx.load_from_string(emulated_model(path).content)
    assert {entry.domain for entry in model.opset_import} == {""}
    assert not model.functions
    assert "FusedQKRope" not in {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_are_cast_once_and_nothing_computed_changes(dtype: str, tmp_path, monkeypatch) -> None:
    """Bit for bit what casts of the weights within the graph give: fp32 holds every bf16 and fp16 number."""
    import towers

    path, grids = towers.export_to(tmp_path, "tiny", towers.options_of(dtype)), [(4, 6), (6, 2)]
    calls = [towers.noise(frames, grids, dtype) for frames in (1, 2)]

    def run_twice() -> list[np.ndarray]:
        with OrtBackend(path, threads=1) as backend:
            return [backend.run(pixels, np.array(grids)) for pixels in (*calls, *calls)]

    once = run_twice()
    model = onnx.load_from_string(emulated_model(path).content)
    stored = onnx.load(path, load_external_data=False).graph.initializer
    weights = {tensor.name for tensor in stored if tensor.data_location == onnx.TensorProto.EXTERNAL}
    assert not [node.name for node in model.graph.node if node.op_type == "Cast" and node.input[0] in weights]
    monkeypatch.setattr(ort_emulation, "_wide_weight", lambda *_: None)
    model = onnx.load_from_string(emulated_model(path).content)
    assert [node.name for node in model.graph.node if node.op_type == "Cast" and node.input[0] in weights]
    for found, expected in zip(once, run_twice(), strict=True):
        assert np.array_equal(found, expected)


def test_the_fp32_weights_are_those_of_the_file_and_live_as_long_as_the_session(tmp_path) -> None:
    import towers

    path = towers.export_to(tmp_path, "tiny", towers.options_of("bf16"))
    given = {weight.name.removesuffix("/fp32"): weight.read() for weight in emulated_model(path).weights}
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    assert "vision_tower.encoder.blocks.1.mlp.fc0.weight" in given
    for name, values in given.items():
        assert values.dtype == np.float32 and np.array_equal(values, stored[name].astype(np.float32)), name
    backend = OrtBackend(path, threads=1)
    assert len(backend._weights) == len(given)
    with backend:
        pass
    assert not backend._weights


@pytest.mark.parametrize("content", [b"", b"no model at all", b"\x08\x0a"])
def test_no_model(content: bytes, tmp_path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(BadInput), OrtBackend(path) as backend:
        backend.describe()
