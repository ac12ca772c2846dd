"""The exported file against the live tower, by ONNX Runtime, on grids that the tracer never saw."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import onnx
import pytest
import torch
import towers

from exporter.errors import ExportFailed
from exporter.onnx_export import DATA_FILE, cast_weight, check_model, export_onnx
from exporter.onnx_trace import OnnxOptions
from exporter.validation.backends import OrtBackend
from model.graph import ATTENTION_FORMS, PACKINGS, ROPE_FORMS, GraphForm

# none of them is the tracer's (2 frames, two items of 4x4); 2x2, sizes that are 4 modulo 8, extreme ratios
ONE_ITEM = [
    (1, [(2, 2)]),
    (1, [(2, 6)]),
    (1, [(6, 128)]),
    (1, [(46, 36)]),
    (1, [(8, 8)]),
    (4, [(6, 10)]),
    (3, [(2, 2)]),
]
THREE_ITEMS = [(1, [(2, 2), (16, 18), (4, 6)]), (4, [(6, 4), (2, 2), (8, 10)])]

FORMS = list(itertools.product(ROPE_FORMS, ATTENTION_FORMS, PACKINGS))

# A tiny Kimi-VL differs from a tiny K2.5 in the time embedding alone, which no form touches: every pair of values of
# the three options will do (a trace takes ten seconds of CPU).
PAIRS = [
    ("plugin", "plain", "packed"), ("plugin", "op", "single"), ("standard", "op", "packed"),
    ("standard", "plain", "single"), ("plain", "plain", "single"), ("plain", "op", "packed"),
]  # fmt: skip


def calls_for(name: str, packing: str) -> list[tuple[int, list[tuple[int, int]]]]:
    calls = ONE_ITEM + (THREE_ITEMS if packing == "packed" else [])
    return [(frames if name != "tiny-vl" else 1, grids) for frames, grids in calls]


@pytest.mark.parametrize(
    ("name", "rope", "attention", "packing"),
    [(name, *form) for name in ("tiny", "tiny-k3", "tiny-vl") for form in (PAIRS if name == "tiny-vl" else FORMS)],
)
def test_fp32_agrees_with_the_live_tower(name: str, rope: str, attention: str, packing: str, tmp_path) -> None:
    """1e-5 is the contract; two fp32 summation orders differ by 7e-7 here."""
    path = towers.export_to(tmp_path, name, towers.options_of("fp32", rope, attention, packing))
    with OrtBackend(path, threads=1) as backend:
        for frames, grids in calls_for(name, packing):
            pixels = towers.noise(frames, grids, "fp32")
            rows = backend.run(pixels, np.array(grids))
            assert towers.relative(rows, towers.live(name, "fp32", pixels, grids)) < 1e-5, (frames, grids)


HALF_FORMS = [("plugin", "plain", "packed"), ("standard", "op", "single"), ("plain", "op", "packed")]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
@pytest.mark.parametrize(("rope", "attention", "packing"), HALF_FORMS)
def test_half_precision_errs_like_pytorch(
    dtype: str, name: str, rope: str, attention: str, packing: str, tmp_path
) -> None:
    """Between 0.5 and 1.5 times PyTorch's own error: more is a fault, less is an emulation that forgets to round."""
    path = towers.export_to(tmp_path, name, towers.options_of(dtype, rope, attention, packing))
    with OrtBackend(path, threads=1) as backend:

        def ratio(frames: int, grids: list[tuple[int, int]], seed: int) -> float:
            pixels = towers.noise(frames, grids, dtype, seed)
            reference = towers.live(name, "fp32", pixels, grids)
            own = towers.relative(towers.live(name, dtype, pixels, grids), reference)
            return towers.relative(backend.run(pixels, np.array(grids)), reference) / own

        for frames, grids in calls_for(name, packing):
            if sum(h * w for h, w in grids) >= 24:
                assert 0.5 <= ratio(frames, grids, 0) <= 1.5, (frames, grids)
        # at 2x2 a single draw is a matter of luck: one row of output
        assert 0.5 <= np.median([ratio(1, [(2, 2)], seed) for seed in range(8)]) <= 1.5


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_interface_and_operators(name: str, dtype: str, tmp_path) -> None:
    path = towers.export_to(tmp_path, name, towers.options_of(dtype))
    check_model(path)  # full check and strict shape inference
    model = onnx.load(str(path), load_external_data=False)
    kind = {"fp32": "FLOAT", "bf16": "BFLOAT16", "fp16": "FLOAT16"}[dtype]
    width = towers.config_of(name).text_hidden_size

    def described(value: onnx.ValueInfoProto) -> tuple[str, str, list[object]]:
        tensor = value.type.tensor_type
        dims = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
        return value.name, onnx.TensorProto.DataType.Name(tensor.elem_type), dims

    assert [described(v) for v in model.graph.input] == [
        ("pixel_values", kind, ["frames", "patches", 588]),
        ("grid_hws", "INT64", ["items", 2]),
    ]
    assert [described(v) for v in model.graph.output] == [("image_embeds", kind, ["patches/4", width])]
    operators = Counter(node.op_type for node in model.graph.node)
    assert operators["FusedQKRope"] == towers.config_of(name).num_hidden_layers
    assert not {"Resize", "GatherND", "NonZero"} & set(operators)
    types = {v.name: v.type.tensor_type.elem_type for v in model.graph.value_info}
    low = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    for node in model.graph.node:
        for output in node.output:
            assert types.get(output) not in {onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128}
            assert node.op_type != "Range" or types[output] not in low
    props = {entry.key: entry.value for entry in model.metadata_props}
    assert props["kvit.dtype"] == dtype and props["kvit.weights_sha256"] == towers.weights_of(name).sha256()
    assert str(tmp_path) not in path.read_bytes().decode("latin-1")  # no path of the exporting machine


@pytest.mark.parametrize(
    ("rope", "attention", "expected"),
    [
        ("standard", "plain", {"RotaryEmbedding": 4}),
        ("plain", "op", {"Attention": 2}),
        ("plugin", "op", {"FusedQKRope": 2, "Attention": 2}),
    ],
)
def test_one_node_a_block(rope: str, attention: str, expected: dict[str, int], tmp_path) -> None:
    path = towers.export_to(tmp_path, "tiny", towers.options_of("fp32", rope, attention))
    operators = Counter(node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node)
    named = {"RotaryEmbedding", "Attention", "FusedQKRope"}
    assert {name: count for name, count in operators.items() if name in named} == expected


@pytest.mark.parametrize("opset", [18, 24])
def test_other_opsets(opset: int, tmp_path) -> None:
    options = OnnxOptions("fp32", GraphForm("plugin", "plain", "single"), opset)
    path = towers.export_to(tmp_path, "tiny", options)
    assert onnx.load(str(path), load_external_data=False).opset_import[0].version == opset
    pixels = towers.noise(1, [(4, 6)], "fp32")
    with OrtBackend(path, threads=1) as backend:
        rows = backend.run(pixels, np.array([(4, 6)]))
    assert towers.relative(rows, towers.live("tiny", "fp32", pixels, [(4, 6)])) < 1e-5


def test_depth_is_stamped_with_each_layers_own_weights(tmp_path) -> None:
    """Five layers from a trace of one: a layer with another's weights would be far off."""
    options = towers.options_of("fp32", "plugin", "plain", "single")
    path = towers.export_to(tmp_path, "tiny", options, layers=5)
    pixels = towers.noise(1, [(8, 10)], "fp32")
    with OrtBackend(path, threads=1) as backend:
        rows = backend.run(pixels, np.array([(8, 10)]))
    assert towers.relative(rows, towers.live("tiny", "fp32", pixels, [(8, 10)], layers=5)) < 1e-5
    names = {tensor.name for tensor in onnx.load(str(path), load_external_data=False).graph.initializer}
    assert {f"vision_tower.encoder.blocks.{i}.wqkv.weight" for i in range(5)} <= names


def test_runtime_without_the_schema_inlines_the_function(tmp_path) -> None:
    """A process that knows nothing of this project runs the file (onnxruntime only; no import of ours)."""
    import subprocess
    import sys

    path = towers.export_to(tmp_path, "tiny", towers.options_of("fp32"))
    code = (
        "import sys, numpy as np, onnxruntime as ort\n"
        "s = ort.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "x = np.linspace(-1, 1, 24 * 588, dtype=np.float32).reshape(1, 24, 588)\n"
        "y = s.run(None, {'pixel_values': x, 'grid_hws': np.array([[4, 6]])})[0]\n"
        "assert 'model' not in sys.modules and 'plugins' not in sys.modules\n"
        "np.save(sys.argv[2], y)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "y.npy")], check=True, cwd=tmp_path)
    pixels = np.linspace(-1, 1, 24 * 588, dtype=np.float32).reshape(1, 24, 588)
    rows = np.load(tmp_path / "y.npy")
    assert towers.relative(rows, towers.live("tiny", "fp32", pixels, [(4, 6)])) < 1e-5


def test_a_moved_folder_with_spaces_and_letters_still_runs(tmp_path, monkeypatch) -> None:
    """pitfall 24: external data is found beside the model, wherever that is and wherever the process stands."""
    first = tmp_path / "made here"
    first.mkdir()
    path = towers.export_to(first, "tiny", towers.options_of("bf16"))
    moved = tmp_path / "déplacé 移動 folder"
    path.parent.rename(moved)
    monkeypatch.chdir("/")
    pixels = towers.noise(1, [(4, 6)], "bf16")
    with OrtBackend(moved / path.name, threads=1) as backend:
        assert np.isfinite(backend.run(pixels, np.array([(4, 6)]))).all()
    locations = {
        entry.value
        for tensor in onnx.load(str(moved / path.name), load_external_data=False).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    assert locations == {DATA_FILE}


def test_fp16_refuses_a_weight_beyond_its_range_by_name() -> None:
    """pitfall 16: 65504 is the largest fp16; bf16 takes it."""
    weight = torch.tensor([1.0, 70000.0])
    with pytest.raises(ExportFailed, match=r"some\.weight holds 70000.*bf16"):
        cast_weight(weight, "some.weight", "fp16")
    assert cast_weight(weight, "some.weight", "bf16").isfinite().all()
    assert cast_weight(torch.tensor([65504.0]), "some.weight", "fp16").isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_weight_that_is_not_finite_is_refused_by_name(value: float, dtype: str) -> None:
    with pytest.raises(ExportFailed, match=r"some\.weight holds NaN or infinity"):
        cast_weight(torch.tensor([1.0, value]), "some.weight", dtype)


def test_forms_need_their_opset(tmp_path) -> None:
    options = OnnxOptions("fp32", GraphForm("standard", "plain", "single"), 20)
    with pytest.raises(ExportFailed, match="opset 23"):
        export_onnx(towers.weights_of("tiny"), options, tmp_path, version="test")
