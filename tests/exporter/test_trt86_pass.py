"""The model for TensorRT 8.6 holds only what its parser takes and computes what the artifact computes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import towers

from exporter.errors import BuildFailed, Usage
from exporter.onnx_export import DATA_FILE
from exporter.passes.trt86 import LoweredModel, lower_for_trt86
from exporter.validation.backends import OrtBackend


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators marked "Y" in docs/operators.md of onnx-tensorrt at its release for TensorRT 8.5 ("operators up to Opset
# 17"), as far as a graph of ours could hold them. 8.6 added LayerNormalization (its changelog); it is not used.
SUPPORTED = words("""
    Abs Add And Cast Ceil Clip Concat Constant ConstantOfShape Cos CumSum Div Einsum Equal Erf Exp Expand Flatten Floor
    Gather GatherElements GatherND Gemm Greater GreaterOrEqual Identity Less LessOrEqual Log MatMul Max Mean Min Mod Mul
    Neg Not Or Pad Pow Range Reciprocal ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu Reshape Round Shape
    Sigmoid Sign Sin Size Slice Softmax Split Sqrt Squeeze Sub Sum Tanh Tile Transpose Trilu Unsqueeze Where Xor
""")

# Those whose row in that table names INT32, which INT64 becomes, and ReduceSum, whose row does not: TensorRT's own
# documentation of IReduceLayer says Int32.
WHOLE_NUMBERS = words("""
    Abs Add Cast Concat Constant Div Equal Expand Flatten Gather GatherElements GatherND Greater GreaterOrEqual Identity
    Less LessOrEqual Max Mean Min Mod Mul Neg Pad Range ReduceSum Reshape Shape Sign Size Slice Split Squeeze Sub Sum
    Tile Transpose Trilu Unsqueeze Where
""")

MOVES_DATA = words("Cast Concat Constant Expand Gather Identity Reshape Shape Slice Split Squeeze Transpose Unsqueeze")

# the traces of these are shared with test_onnx_export.py
FORMS = [
    ("tiny", "fp32", "plugin", "packed"),
    ("tiny", "fp32", "plugin", "single"),
    ("tiny", "fp32", "plain", "packed"),
    ("tiny-k3", "fp32", "plugin", "packed"),
    ("tiny", "fp16", "plugin", "packed"),
]
ONE_ITEM = [(1, [(2, 2)]), (1, [(6, 20)]), (1, [(36, 46)]), (4, [(6, 10)])]
SEVERAL = [(1, [(2, 2), (16, 18), (4, 6)]), (4, [(6, 4), (2, 2), (8, 10)])]


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoweredModel, str]:
    """An artifact's model, the same for TensorRT 8.6, and ``name-dtype-rope-packing``."""
    name, dtype, rope, packing = request.param
    folder = tmp_path_factory.mktemp("artifact")
    (folder / "lowered").mkdir()
    source = towers.export_to(folder, name, towers.options_of(dtype, rope, packing=packing))
    return source, lower_for_trt86(source, folder / "lowered"), "-".join(request.param)


@cache
def model_of(path: Path) -> onnx.ModelProto:
    return onnx.load(str(path), load_external_data=False)


# ------------------------------------------------------------------------------------------------------ what it holds


def test_it_is_a_valid_model_of_opset_17(pair: tuple[Path, LoweredModel, str], tmp_path: Path) -> None:
    _, lowered, _ = pair
    model = model_of(lowered.path)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 17)]
    assert model.ir_version <= 8 and not model.functions
    # onnx refuses a data file that has two names, so the check looks at copies
    shutil.copyfile(lowered.path, tmp_path / lowered.path.name)
    shutil.copyfile(lowered.path.parent / DATA_FILE, tmp_path / DATA_FILE)
    onnx.checker.check_model(str(tmp_path / lowered.path.name), full_check=True)


def test_inputs_and_output_are_those_of_the_artifact(pair: tuple[Path, LoweredModel, str]) -> None:
    source, lowered, _ = pair
    before, after = model_of(source).graph, model_of(lowered.path).graph
    assert list(after.input) == list(before.input) and list(after.output) == list(before.output)


def test_it_holds_only_what_the_parser_knows(pair: tuple[Path, LoweredModel, str]) -> None:
    model = onnx.shape_inference.infer_shapes(model_of(pair[1].path), strict_mode=True)
    graph, constants = model.graph, {tensor.name for tensor in model.graph.initializer}
    types = {v.name: v.type.tensor_type.elem_type for v in (*graph.input, *graph.output, *graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        assert node.op_type in SUPPORTED and not node.domain, node
        if types[node.input[0]] == onnx.TensorProto.INT64:
            assert node.op_type in WHOLE_NUMBERS, node
        attributes = {attribute.name for attribute in node.attribute}
        if node.op_type == "Shape":
            assert not attributes
        if node.op_type.startswith("Reduce") and node.op_type != "ReduceSum":
            assert "axes" in attributes and len(node.input) == 1
        if node.op_type in ("Squeeze", "Unsqueeze", "ReduceSum"):
            assert node.input[1] in constants
        if node.op_type == "Slice":
            assert set(node.input[3:]) <= constants
    assert not set(types.values()) & {onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE}


def test_layers_can_be_traced_to_their_nodes(pair: tuple[Path, LoweredModel, str]) -> None:
    """The parser calls further layers of a node NAME_1, NAME_2: no node may have such a name of another's."""
    names = [node.name for node in model_of(pair[1].path).graph.node]
    assert all(names) and len(set(names)) == len(names)
    assert not [name for name in names if re.fullmatch(r".*_\d+", name)]


def test_weights_are_neither_read_nor_copied(pair: tuple[Path, LoweredModel, str]) -> None:
    source, lowered, _ = pair
    assert (lowered.path.parent / DATA_FILE).samefile(source.parent / DATA_FILE)
    outside = [tensor for tensor in model_of(source).graph.initializer if tensor.data_location]
    kept = {tensor.name: tensor for tensor in model_of(lowered.path).graph.initializer}
    assert len(outside) > 10 and all(kept[tensor.name] == tensor for tensor in outside)


def test_nothing_is_left_over(pair: tuple[Path, LoweredModel, str]) -> None:
    graph = model_of(pair[1].path).graph
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    assert {tensor.name for tensor in graph.initializer} <= used
    assert all(used.intersection(node.output) for node in graph.node)


# --------------------------------------------------------------------------------------------------- what it computes


def calls_of(form: str) -> list[tuple[int, list[tuple[int, int]]]]:
    return ONE_ITEM + (SEVERAL if form.endswith("packed") else [])


def test_it_computes_the_same(pair: tuple[Path, LoweredModel, str]) -> None:
    source, lowered, form = pair
    name, dtype = re.match(r"(.*)-(fp\d\d)-", form).groups()  # type: ignore[union-attr]
    with OrtBackend(source, threads=1) as before, OrtBackend(lowered.path, threads=1) as after:
        for seed, (frames, grids) in enumerate(calls_of(form)):
            pixels, sizes = towers.noise(frames, grids, dtype, seed), np.array(grids)
            first, second = before.run(pixels, sizes), after.run(pixels, sizes)
            if dtype == "fp32":
                assert towers.relative(second, first) < 1e-6  # sums of a few hundred terms in another order
                continue
            # one fp16 rounding that falls the other way spreads, so what must not grow is the error itself
            reference = towers.live(name, "fp32", pixels, grids)
            assert 0 < towers.relative(second, reference) < 1.05 * towers.relative(first, reference)
            assert towers.relative(second, first) < 1e-3  # fp16's unit roundoff is 4.9e-4; a wrong graph is off by 0.1


def test_it_is_made_without_torch_and_without_a_newer_onnx_ir(
    pair: tuple[Path, LoweredModel, str], tmp_path: Path
) -> None:
    """TensorRT 8.6 runs in a Python of its own, which has onnx and NumPy only."""
    source, lowered, _ = pair
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "sys.modules.update(dict.fromkeys(('torch', 'onnx_ir', 'onnxscript', 'onnxruntime')))\n"
        "from exporter.passes.trt86 import lower_for_trt86\n"
        "lower_for_trt86(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program, str(source), str(tmp_path)], check=True, cwd=root)
    assert (tmp_path / lowered.path.name).read_bytes() == lowered.path.read_bytes()


# ------------------------------------------------------------------------------------------------------ what is fp32


def test_fp32_nodes_are_those_that_onnx_runtime_types_fp32(pair: tuple[Path, LoweredModel, str]) -> None:
    _, lowered, form = pair
    model = onnx.ModelProto()
    model.CopyFrom(model_of(lowered.path))
    producers = {name: node for node in model.graph.node for name in node.output}
    real = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in producers if name not in real)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(lowered.path.parent))
    session = ort.InferenceSession(model.SerializeToString(), options)
    wide = {
        producers[value.name].name
        for value in session.get_outputs()
        if value.type == "tensor(float)" and producers[value.name].op_type not in MOVES_DATA
    }
    assert lowered.float32_nodes == (wide if "fp16" in form else set())


def test_fp32_islands_and_products_are_named(pair: tuple[Path, LoweredModel, str]) -> None:
    _, lowered, form = pair
    if "fp16" not in form:
        assert not lowered.float32_nodes
        return
    nodes = model_of(lowered.path).graph.node
    inside = [node for node in nodes if node.name in lowered.float32_nodes]
    outside = [node for node in nodes if node.name not in lowered.float32_nodes]
    assert not {node.op_type for node in inside} & MOVES_DATA
    islands = {"Sin", "Cos", "Sqrt", "ReduceMean", "Erf", "Tanh", "MatMul", "Gemm", "Softmax"}
    assert {node.op_type for node in inside} >= islands and not {node.op_type for node in outside} & islands
    norms = [node for node in inside if "layer_norm" in node.name and node.op_type == "Sqrt"]
    assert len(norms) == 2 * 2 + 2  # two blocks of two, the last and the projector's
    rotations = [node for node in inside if re.match(r"[qk]_(re|im)_(cos|sin)", node.name)]
    assert len(rotations) == 2 * 2 * 4  # two blocks, q and k, four products
    taps = [node for node in inside if node.op_type == "ReduceSum"]
    assert len(taps) == 4  # rows of the bicubic kernel


def test_products_take_half_precision_operands_and_round_once(pair: tuple[Path, LoweredModel, str]) -> None:
    """TensorRT 8.6 would sum them in half precision; their operands are cast, so that TF32 holds them exactly."""
    _, lowered, form = pair
    graph = model_of(lowered.path).graph
    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == 2 * 6 + 3  # QKV, two of attention, output, two of the MLP; patches, two of the projector
    if "fp16" not in form:
        return
    made = {name: node for node in graph.node for name in node.output}
    types = {value.name: value.type.tensor_type.elem_type for value in graph.input}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    readers = {name: [node for node in graph.node if name in node.input] for name in made}
    for product in products:
        for name in product.input:
            assert made[name].op_type == "Cast" and types.get(made[name].input[0], HALF) == HALF
        (cast,) = readers[product.output[0]]
        assert cast.op_type == "Cast" and cast.attribute[0].i == HALF


def test_every_size_of_what_has_a_row_per_token_is_said(pair: tuple[Path, LoweredModel, str]) -> None:
    """TensorRT 8.6 builds nothing for several frames where two axes of -1 meet, as the residual stream's would."""
    _, lowered, _ = pair
    graph = model_of(lowered.path).graph
    inside = [tensor for tensor in graph.initializer if not tensor.external_data]
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in inside}
    shapes = {node.output[0]: constants.get(node.input[1]) for node in graph.node if node.op_type == "Reshape"}
    unsaid = {name for name, shape in shapes.items() if shape is not None and -1 in shape}
    assert not {name for name in unsaid if re.match(r"block_|[qk]_|_unsafe_view|view_(9|10|14)$", name)}
    # patches alone, and their squares: one axis of the two from which tokens are made
    assert len(unsaid) <= 16


HALF = onnx.TensorProto.FLOAT16
PARSE = """
import json, sys
import tensorrt_rtx as trt

log = trt.Logger(trt.Logger.ERROR)
network = trt.Builder(log).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
parser = trt.OnnxParser(network, log)
assert parser.parse_from_file(sys.argv[1]), parser.get_error(0).desc()
inputs = [network.get_input(i) for i in range(network.num_inputs)]
print(json.dumps({
    "layers": [network.get_layer(i).name for i in range(network.num_layers)],
    "shape inputs": [tensor.name for tensor in inputs if tensor.is_shape_tensor],
}))
"""


def test_a_parser_of_tensorrt_finds_a_layer_for_every_fp32_node(pair: tuple[Path, LoweredModel, str]) -> None:
    """8.6 itself needs a GPU even to parse; TensorRT-RTX has the same parser, years later, and needs none."""
    pytest.importorskip("tensorrt_rtx")
    _, lowered, _ = pair
    done = subprocess.run([sys.executable, "-c", PARSE, str(lowered.path)], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert not found["shape inputs"]
    assert lowered.float32_nodes <= set(found["layers"])
    products = [node.name for node in model_of(lowered.path).graph.node if node.op_type == "MatMul"]
    assert products and set(products) <= set(found["layers"])


# --------------------------------------------------------------------------------------------------------- rewritings


def lowered_text(text: str, folder: Path) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    before = onnx.parser.parse_model(text)
    onnx.save(before, str(folder / "small.onnx"))
    (folder / "lowered").mkdir()
    return before, onnx.load(str(lower_for_trt86(folder / "small.onnx", folder / "lowered").path))


X = np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32) * 3
I = np.array([7, 0, 12, 5], dtype=np.int64)  # noqa: E741 - the name in the graphs below
HEAD = '<ir_version: 10, opset_import: ["" : {opset}]> net (float[a, b, 8] x, int64[n] i) => ({kind}[{shape}] y)'

REWRITINGS = {
    "gelu": ("float", "a, b, 8", "{ y = Gelu (x) }"),
    "gelu tanh": ("float", "a, b, 8", '{ y = Gelu <approximate = "tanh"> (x) }'),
    "layer norm": (
        "float",
        "a, b, 8",
        "<float[8] s = {1,2,3,4,5,6,7,8}, float[8] o = {8,7,6,5,4,3,2,1}> "
        "{ y = LayerNormalization <epsilon = 0.5> (x, s, o) }",
    ),
    "layer norm of an axis counted from the front, no bias": (
        "float",
        "a, b, 8",
        "<float[8] s = {1,2,3,4,5,6,7,8}> { y = LayerNormalization <axis = 2> (x, s) }",
    ),
    "layer norm over two axes": (
        "float",
        "a, b, 8",
        f"<float[4, 8] s = {{{', '.join(map(str, range(32)))}}}> {{ y = LayerNormalization <axis = 1> (x, s) }}",
    ),
    "clip of whole numbers": ("int64", "n", "<int64 l = {2}, int64 h = {7}> { y = Clip (i, l, h) }"),
    "clip from above": ("int64", "n", "<int64 h = {7}> { y = Clip (i, , h) }"),
    "clip from below": ("int64", "n", "<int64 l = {6}> { y = Clip (i, l) }"),
    "clip of floats": ("float", "a, b, 8", "<float l = {0.5}> { y = Clip (x, l) }"),
    "mod": ("int64", "n", "<int64 four = {4}> { y = Mod (i, four) }"),
    "cumulative sum": ("int64", "n", "<int64 axis = {0}> { y = CumSum (i, axis) }"),
    "square": ("float", "a, b, 8", "<float two = {2.0}> { y = Pow (x, two) }"),
    "cube": ("float", "a, b, 8", "<float three = {3.0}> { y = Pow (x, three) }"),
    "shape from the end": ("int64", "s", "{ y = Shape <start = -2> (x) }"),
    "shape of the middle": ("int64", "s", "{ y = Shape <start = 1, end = 2> (x) }"),
    "size": ("int64", "", "{ z = Shape <end = 1> (x)  y = Squeeze (z) }"),
    "mean over an axis": ("float", "a, 8", "<int64[1] axis = {1}> { y = ReduceMean <keepdims = 0> (x, axis) }"),
    "largest of all": ("float", "", "{ y = ReduceMax <keepdims = 0> (x) }"),
    "no axes, no reduction": (
        "float",
        "a, b, 8",
        "<int64[0] none = {}> { y = ReduceMean <noop_with_empty_axes = 1> (x, none) }",
    ),
    "split": ("float", "a, b, 4", "{ z, y = Split <axis = 2, num_outputs = 2> (x) }"),
    "constants": (
        "float",
        "a, b, 8",
        "{ c = Constant <value_ints = [0, 0, 8]> ()  d = Constant <value_float = 1.5> () "
        "z = Reshape (x, c)  y = Mul (z, d) }",
    ),
}


@pytest.mark.parametrize("case", REWRITINGS)
def test_a_rewriting_keeps_the_values(case: str, tmp_path: Path) -> None:
    kind, shape, body = REWRITINGS[case]
    before, after = lowered_text(HEAD.format(opset=20, kind=kind, shape=shape) + body, tmp_path)
    onnx.checker.check_model(after, full_check=True)
    assert {node.op_type for node in after.graph.node} <= SUPPORTED
    results = [
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": X, "i": I})
        for model in (before, after)
    ]
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=2e-6, atol=2e-6)  # a dozen fp32 operations
    assert results[1][0].dtype == results[0][0].dtype


def test_an_rms_norm_of_opset_23_is_rewritten_too(tmp_path: Path) -> None:
    body = "<float[8] s = {1,2,3,4,5,6,7,8}> { y = RMSNormalization <epsilon = 0.5> (x, s) }"
    _, after = lowered_text(HEAD.format(opset=23, kind="float", shape="a, b, 8") + body, tmp_path)
    (y,) = ort.InferenceSession(after.SerializeToString()).run(None, {"x": X, "i": I})
    x64 = X.astype(np.float64)
    wanted = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 0.5) * np.arange(1, 9)
    np.testing.assert_allclose(y, wanted, rtol=2e-6)  # fp32


# ----------------------------------------------------------------------------------------------------- what is refused

TOWER = (
    '<ir_version: 10, opset_import: ["" : 23]> '
    "net ({t}[f, p, 588] pixel_values, int64[n, 2] grid_hws) => ({t}[f, p, 588] image_embeds)"
)
REFUSED = {
    "--dtype fp16": TOWER.format(t="bfloat16") + "{ image_embeds = Identity (pixel_values) }",
    "--rope plugin": TOWER.format(t="float")
    + "<float[1,4,294] c> { image_embeds = RotaryEmbedding <num_heads = 1> (pixel_values, c, c) }",
    "--attention plain": TOWER.format(t="float")
    + "{ image_embeds = Attention <q_num_heads = 1, kv_num_heads = 1> (pixel_values, pixel_values, pixel_values) }",
}


@pytest.mark.parametrize("option", REFUSED)
def test_a_form_that_tensorrt_8_lacks_is_refused_with_the_option_to_use(option: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(REFUSED[option]), str(tmp_path / "tower.onnx"))
    (tmp_path / "lowered").mkdir()
    with pytest.raises(Usage, match=f"TensorRT 8.6.*{option}") as caught:
        lower_for_trt86(tmp_path / "tower.onnx", tmp_path / "lowered")
    assert "\n" not in caught.value.message
    assert not list((tmp_path / "lowered").iterdir())


@pytest.mark.parametrize(
    ("operator", "body"),
    [
        ("Mod", "<int64 four = {-4}> { y = Mod (i, four) }"),
        ("CumSum", "<int64 axis = {0}> { y = CumSum <exclusive = 1> (i, axis) }"),
        ("ReduceMax", "{ j = Unsqueeze (i, i)  y = ReduceMax (j, i) }"),
        ("BitwiseNot", "{ y = BitwiseNot (i) }"),
    ],
)
def test_what_has_no_form_is_refused_by_name(operator: str, body: str, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=operator):
        lowered_text(HEAD.format(opset=20, kind="int64", shape="m") + body, tmp_path)
