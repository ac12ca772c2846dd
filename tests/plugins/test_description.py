"""One description of the operator: the torch and the ONNX form say the same as it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from onnx import defs

from plugins.fused_qk_rope import torch_op
from plugins.fused_qk_rope.description import FUSED_QK_ROPE, Argument
from plugins.fused_qk_rope.onnx_op import register_schema


def test_names_and_version_of_the_contract():
    """A file that was exported names these, and an engine looks its plugin up by them."""
    assert FUSED_QK_ROPE.domain == "kvit"
    assert FUSED_QK_ROPE.onnx_name == "FusedQKRope"
    assert FUSED_QK_ROPE.torch_qualified_name == "kvit::fused_qk_rope"
    assert FUSED_QK_ROPE.version == 1
    assert FUSED_QK_ROPE.node_attributes == {"plugin_namespace": "kvit", "plugin_version": "1"}
    assert FUSED_QK_ROPE.dtypes == ("float32", "float16", "bfloat16")


def test_arguments_of_the_contract():
    inputs = [(argument.name, argument.shape, argument.type_parameter) for argument in FUSED_QK_ROPE.inputs]
    assert inputs == [
        ("q", ("tokens", "heads", "head_dim"), "T"),
        ("k", ("tokens", "heads", "head_dim"), "T"),
        ("cos", ("tokens", "head_dim/2"), "tensor(float)"),
        ("sin", ("tokens", "head_dim/2"), "tensor(float)"),
    ]
    outputs = [(argument.name, argument.shape, argument.type_parameter) for argument in FUSED_QK_ROPE.outputs]
    assert outputs == [(name, ("tokens", "heads", "head_dim"), "T") for name in ("q_rotated", "k_rotated")]


def test_cannot_be_changed():
    for thing, field in ((FUSED_QK_ROPE, "version"), (Argument("q", ("a", "b")), "name")):
        with pytest.raises(AttributeError):
            setattr(thing, field, 2)


def test_torch_schema_follows_it():
    schema = torch.ops.kvit.fused_qk_rope.default._schema
    assert schema.name == FUSED_QK_ROPE.torch_qualified_name
    assert [argument.name for argument in schema.arguments] == [argument.name for argument in FUSED_QK_ROPE.inputs]
    assert len(schema.returns) == len(FUSED_QK_ROPE.outputs)
    assert not any(argument.alias_info for argument in schema.arguments)


def test_onnx_schema_follows_it():
    register_schema()
    schema = defs.get_schema("FusedQKRope", 1, "kvit")
    assert schema.since_version == FUSED_QK_ROPE.version
    assert [(x.name, x.type_str) for x in schema.inputs] == [(a.name, a.type_parameter) for a in FUSED_QK_ROPE.inputs]
    assert [(x.name, x.type_str) for x in schema.outputs] == [(a.name, a.type_parameter) for a in FUSED_QK_ROPE.outputs]
    (constraint,) = schema.type_constraints
    assert sorted(constraint.allowed_type_strs) == ["tensor(bfloat16)", "tensor(float)", "tensor(float16)"]
    defaults = {name: attribute.default_value.s.decode() for name, attribute in schema.attributes.items()}
    assert defaults == FUSED_QK_ROPE.node_attributes
    assert schema.doc == FUSED_QK_ROPE.summary


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("plugins.fused_qk_rope.description", ["torch", "onnx", "numpy", "triton"]),
        ("plugins.fused_qk_rope.reference", ["torch", "onnx", "triton"]),
        ("plugins.fused_qk_rope.onnx_op", ["torch", "onnx", "triton"]),
        ("model.grids", ["torch", "onnx", "numpy"]),
    ],
)
def test_imports_nothing_heavy(module: str, heavy: list[str]):
    """The engine runtime and the command line read these where torch is not installed."""
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    root = Path(torch_op.__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
