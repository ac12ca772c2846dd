"""The operator in ONNX: schema, function body run by ONNX Runtime, translation, and ONNX's RotaryEmbedding beside it.

All of it is compared with a rotation by complex numbers in float64.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, defs
from torch import Tensor

from model.graph import standard_rotation
from plugins.fused_qk_rope import onnx_op
from plugins.fused_qk_rope.description import FUSED_QK_ROPE, OperatorDescription
from plugins.fused_qk_rope.onnx_op import function_body, register_schema, translation
from plugins.fused_qk_rope.torch_op import fused_qk_rope
from tests.plugins.rotations import DTYPES, SHAPES, arguments, assert_rotated

ONNX_TYPE = {torch.float32: "float", torch.float16: "float16", torch.bfloat16: "bfloat16"}
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
ATTRIBUTES = ' <plugin_namespace = "kvit", plugin_version = "1">'


def model_of(dtype: torch.dtype, opset: int = 20, attributes: str = ATTRIBUTES) -> onnx.ModelProto:
    """One node with its function. Inputs and outputs are fp32 and cast inside, because NumPy has no bf16."""
    kind, enum = ONNX_TYPE[dtype], TensorProto.DataType.Value(ONNX_TYPE[dtype].upper())
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": {opset}, "kvit": 1]>
        rotation (float[n, h, d] q32, float[n, h, d] k32, float[n, p] cos, float[n, p] sin)
            => (float[n, h, d] q_out, float[n, h, d] k_out)
            <{kind}[n, h, d] q_new, {kind}[n, h, d] k_new> {{
            q = Cast <to = {enum}> (q32)
            k = Cast <to = {enum}> (k32)
            q_new, k_new = kvit.FusedQKRope{attributes} (q, k, cos, sin)
            q_out = Cast <to = 1> (q_new)
            k_out = Cast <to = 1> (k_new)
        }}""")
    model.functions.append(function_body(NAMES[dtype], opset))
    return model


def run_model(model: onnx.ModelProto, *values: Tensor) -> list[Tensor]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = {name: value.contiguous().numpy() for name, value in zip(names, values, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, feed)]


# ------------------------------------------------------------------------------------------------------------- schema


def test_schema_is_registered_once_and_again():
    register_schema()
    first = defs.get_schema("FusedQKRope", 1, "kvit")
    register_schema()
    assert defs.get_schema("FusedQKRope", 1, "kvit").since_version == first.since_version
    assert len([schema for schema in defs.get_all_schemas_with_history() if schema.domain == "kvit"]) == 1


def test_schema_is_unknown_before():
    """In a process of its own: importing the module registers nothing, the first call does, the second is no error."""
    code = (
        "from onnx import defs\n"
        "from plugins.fused_qk_rope.onnx_op import register_schema\n"
        "print(defs.has('FusedQKRope', 'kvit'))\n"
        "register_schema(); register_schema()\n"
        "print(defs.has('FusedQKRope', 'kvit'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(onnx_op.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"]


def test_checker_uses_the_schema():
    """A node with three inputs, or with a type that the operator has not, is refused where the schema is known."""
    register_schema()
    for signature, call in (
        ("float[n, h, d] q, float[n, h, d] k, float[n, p] cos", "q, k, cos"),
        ("double[n, h, d] q, double[n, h, d] k, float[n, p] cos, float[n, p] sin", "q, k, cos, sin"),
    ):
        kind = signature.partition("[")[0]
        model = onnx.parser.parse_model(f"""
            <ir_version: 10, opset_import: ["": 20, "kvit": 1]>
            wrong ({signature}) => ({kind}[n, h, d] a, {kind}[n, h, d] b) {{ a, b = kvit.FusedQKRope ({call}) }}""")
        with pytest.raises((onnx.checker.ValidationError, onnx.shape_inference.InferenceError)):
            onnx.checker.check_model(model, full_check=True)


# ------------------------------------------------------------------------------------------------------ function body


@pytest.mark.parametrize("attributes", ["", ATTRIBUTES], ids=["bare", "attributes"])
@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_function_body_passes_the_checker_and_equals_float64(dtype: torch.dtype, opset: int, attributes: str):
    """A runtime without the plugin runs the function, whether or not the node says where to find the plugin."""
    register_schema()
    model = model_of(dtype, opset, attributes)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    for shape in SHAPES:
        if shape[0]:  # a Reshape with an empty dimension cannot infer another
            q, k, cos, sin = arguments(shape, dtype)
            for result, x in zip(run_model(model, q.float(), k.float(), cos, sin), (q, k), strict=True):
                narrow = result.to(dtype)
                assert torch.equal(narrow.float(), result), "the output is not a number of the dtype"
                assert_rotated(narrow, x, cos, sin)


def test_function_body_beyond_fp16():
    q, k, cos, sin = arguments((20, 3, 72), torch.bfloat16, scale=1e6)
    for result, x in zip(run_model(model_of(torch.bfloat16), q.float(), k.float(), cos, sin), (q, k), strict=True):
        assert torch.isfinite(result).all()
        assert_rotated(result.to(torch.bfloat16), x, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_function_takes_the_node_by_name_and_by_its_attributes(dtype: torch.dtype):
    body = function_body(NAMES[dtype], 20)
    assert (body.domain, body.name) == ("kvit", "FusedQKRope")
    assert list(body.input) == ["q", "k", "cos", "sin"]
    assert list(body.output) == ["q_rotated", "k_rotated"]
    assert sorted(body.attribute) == ["plugin_namespace", "plugin_version"]
    assert [(opset.domain, opset.version) for opset in body.opset_import] == [("", 20)]
    # ordinary operators only; none that makes a complex number, a sequence or a loop
    allowed = {"Constant", "Cast", "Reshape", "Split", "Squeeze", "Unsqueeze", "Mul", "Sub", "Add", "Concat", "Shape"}
    assert {node.op_type for node in body.node} <= allowed
    assert {node.domain for node in body.node} == {""}


def test_wrong_body_would_be_seen():
    """The control: a body that turns the other way gives other numbers."""
    model = model_of(torch.float32)
    for node in model.functions[0].node:
        if node.op_type in ("Sub", "Add"):
            node.op_type = "Add" if node.op_type == "Sub" else "Sub"
    q, k, cos, sin = arguments((20, 3, 72))
    result = run_model(model, q, k, cos, sin)[0]
    assert_rotated(result, q, cos, -sin)
    with pytest.raises(AssertionError):
        assert_rotated(result, q, cos, sin)


@pytest.mark.parametrize("dtype", ["float64", "float", "int8", ""])
def test_other_dtypes_have_no_body(dtype: str):
    with pytest.raises(ValueError, match="float32, float16, bfloat16"):
        function_body(dtype, 20)


# -------------------------------------------------------------------------------------------------------- translation


class Rotate(torch.nn.Module):
    """One call of the operator."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return fused_qk_rope(q, k, cos, sin)


class StandardRotate(torch.nn.Module):
    """The same by ONNX's own operator."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return standard_rotation(q, cos, sin), standard_rotation(k, cos, sin)


@lru_cache
def exported(
    module: type[torch.nn.Module], dtype: torch.dtype, opset: int, operator: OperatorDescription = FUSED_QK_ROPE
) -> onnx.ModelProto:
    tokens = torch.export.Dim("tokens", min=2)
    program = torch.onnx.export(
        module().eval(),
        arguments((6, 3, 24), dtype),
        dynamic_shapes=({0: tokens},) * 4,
        dynamo=True,
        opset_version=opset,
        custom_translation_table=translation(operator),
        verbose=False,
    )
    return program.model_proto


def test_translation_emits_one_node():
    model = exported(Rotate, torch.float16, 20)
    (node,) = model.graph.node
    assert (node.domain, node.op_type) == ("kvit", "FusedQKRope")
    values = {attribute.name: attribute.s.decode() for attribute in node.attribute}
    assert values == {"plugin_namespace": "kvit", "plugin_version": "1"}
    assert {entry.domain: entry.version for entry in model.opset_import}["kvit"] == 1
    assert list(node.input) == [value.name for value in model.graph.input]
    assert list(node.output) == [value.name for value in model.graph.output]


def test_translation_follows_the_description():
    """The node says itself where its plugin is, and does not lean on defaults of a schema that others may not have."""
    model = exported(Rotate, torch.float32, 20, dataclasses.replace(FUSED_QK_ROPE, version=7))
    values = {attribute.name: attribute.s.decode() for attribute in model.graph.node[0].attribute}
    assert values == {"plugin_namespace": "kvit", "plugin_version": "7"}


def test_exported_node_runs_with_its_function():
    """The exporter's model and our function make one file that any runtime can run, at another number of tokens."""
    model = onnx.ModelProto()
    model.CopyFrom(exported(Rotate, torch.float16, 20))
    del model.functions[:]
    model.functions.append(function_body("float16", 20))
    onnx.checker.check_model(model, full_check=True)
    check_at_other_sizes(model, torch.float16)


def check_at_other_sizes(model: onnx.ModelProto, dtype: torch.dtype) -> None:
    for tokens in (1, 36, 100):
        q, k, cos, sin = arguments((tokens, 3, 24), dtype)
        for result, x in zip(run_model(model, q, k, cos, sin), (q, k), strict=True):
            assert_rotated(result, x, cos, sin)


# ---------------------------------------------------------------------------------------- ONNX's own RotaryEmbedding


@pytest.mark.parametrize("shape", [(36, 16, 72), (20, 12, 128), (7, 3, 10)])
def test_standard_operator_with_three_and_with_four_dimensions(shape: tuple[int, int, int]):
    """Pitfall 22: both layouts of RotaryEmbedding's input, run by ONNX Runtime, give the rotation of adjacent pairs."""
    tokens, heads, head_dim = shape
    q, _, cos, sin = arguments(shape)
    inputs = {
        # [batch, tokens, heads * d] with num_heads, and [batch, heads, tokens, d]
        "num_heads = {heads}, ": q.flatten(1).unsqueeze(0),
        "": q.transpose(0, 1).unsqueeze(0).contiguous(),
    }
    results = []
    for attribute, value in inputs.items():
        dims = ", ".join(map(str, value.shape))
        model = onnx.parser.parse_model(f"""
            <ir_version: 11, opset_import: ["": 23]>
            rotation (float[{dims}] x, float[1, {tokens}, {head_dim // 2}] cos, float[1, {tokens}, {head_dim // 2}] sin)
                => (float[{dims}] y) {{
                y = RotaryEmbedding <{attribute.format(heads=heads)}interleaved = 1> (x, cos, sin)
            }}""")
        onnx.checker.check_model(model, full_check=True)
        results.append(run_model(model, value, cos.unsqueeze(0), sin.unsqueeze(0))[0])
    assert_rotated(results[0].reshape(shape), q, cos, sin)
    assert_rotated(results[1].squeeze(0).transpose(0, 1), q, cos, sin)


@pytest.mark.parametrize("layout", ["three dimensions", "four dimensions"])
def test_torchs_form_of_the_standard_operator(layout: str):
    """What the exporter is given; both layouts, see pytorch#162865."""
    q, _, cos, sin = arguments((20, 3, 72))
    if layout == "three dimensions":
        result = torch.onnx.ops.rotary_embedding(
            q.flatten(1)[None], cos[None], sin[None], interleaved=True, num_heads=3
        )
        result = result.reshape(20, 3, 72)
    else:
        result = torch.onnx.ops.rotary_embedding(q.transpose(0, 1)[None], cos[None], sin[None], interleaved=True)
        result = result.squeeze(0).transpose(0, 1)
    assert_rotated(result, q, cos, sin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_exported_standard_form_equals_the_plain_form(dtype: torch.dtype):
    """As the graph has it, run by ONNX Runtime; the operator itself works in fp32, whatever the model's dtype."""
    model = exported(StandardRotate, dtype, 23)
    assert [node.op_type for node in model.graph.node].count("RotaryEmbedding") == 2
    assert "kvit" not in {node.domain for node in model.graph.node}
    onnx.checker.check_model(model, full_check=True)
    elements = {value.type.tensor_type.elem_type for value in (*model.graph.input[:2], *model.graph.output)}
    assert elements == {TensorProto.DataType.Value(ONNX_TYPE[dtype].upper())}
    check_at_other_sizes(model, dtype)
