"""API conformance: our plugins against the released Python layers of TensorRT, without TensorRT's libraries.

This proves that names exist, that TensorRT's own validation accepts our signatures, and what it would launch. It proves
nothing about a result: tests/gpu launches the kernels.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("triton", reason="Triton is not installed: no kernel for the plugins")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: nothing can be compiled in this process", allow_module_level=True)

from plugins.fused_qk_rope import tensorrt_aot
from plugins.fused_qk_rope.description import FUSED_QK_ROPE
from plugins.fused_qk_rope.ptx import strip_hidden_parameters
from plugins.fused_qk_rope.triton_compile import compile_ptx
from tests.plugins import tensorrt_bindings

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = tuple(tensorrt_bindings.VERSIONS)
WITH_AOT = ("11.4", "10.16", "10.9")
CASES = (("bfloat16", 16, 72), ("float16", 16, 72), ("float32", 16, 72), ("bfloat16", 12, 128))
DRIVE = "import runpy; runpy.run_module('tests.plugins.tensorrt_drive', run_name='__main__')"
# names that our code reads only where another one is there
CONDITIONS = {
    "IStreamWriter": "Builder.build_serialized_network_to_stream",
    "QuickPluginCreationRequest": "QuickPluginCreationRequest",
    "ComputeCapability": "ComputeCapability",  # TensorRT-RTX
    "BuilderFlag.FP16": "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",  # networks that are not strongly typed
    "BuilderFlag.OBEY_PRECISION_CONSTRAINTS": "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
}


def run(version, code, *arguments):
    try:
        return tensorrt_bindings.run(version, code, *arguments)
    except tensorrt_bindings.UnavailableError as error:
        pytest.skip(f"API conformance with TensorRT {version} was NOT checked: {error}")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    compiled = [
        strip_hidden_parameters(compile_ptx(dtype, head_dim, "sm_90", heads=heads)) for dtype, heads, head_dim in CASES
    ]
    path = tmp_path_factory.mktemp("kernels") / "kernels.pickle"
    path.write_bytes(pickle.dumps(compiled))
    return compiled, path


def drive(version, form, path):
    done = run(version, DRIVE, form, str(path))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("version", WITH_AOT)
def test_api_conformance_of_the_aot_plugin(version, kernels):
    """TensorRT's creator and plugin class, fed as its builder feeds them: grid, block, arguments, PTX of each dtype."""
    results = drive(version, "aot", kernels[1])
    assert len(results) == len(CASES)
    for (dtype, heads, head_dim), launches in zip(CASES, results, strict=True):
        vectors = heads * head_dim * {"float32": 4}.get(dtype, 2) // 16
        for tokens in (1, 7, 128, 4096):
            grid = -(-tokens * vectors // 128)
            # grid x y z, block x y z, shared memory, and the one extra argument
            assert launches[str(tokens)] == [grid, 1, 1, 128, 1, 1, 0, tokens]


@pytest.mark.parametrize("version", VERSIONS)
def test_api_conformance_of_the_python_plugin(version, kernels):
    results = drive(version, "v3", kernels[1])
    expected = [
        {"kernel_name": kernel.kernel_name, "dtype": kernel.dtype, "arguments": list(kernel.arguments)}
        for kernel in kernels[0]
    ]
    # with NumPy 2 the two oldest do not read fields, which registering refuses; all else was driven
    assert results == expected or (results == [{}] * len(CASES) and version in ("10.8", "10.9"))


def test_tensorrt_10_8_has_no_aot_plugins_and_says_so(kernels):
    done = run("10.8", DRIVE, "aot", str(kernels[1]))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: tensorrt 10.8")
    assert "use register_v3" in done.stderr.splitlines()[-1]


REFUSALS = """
import pickle, sys
from dataclasses import replace
from tests.plugins import tensorrt_drive as drive
from plugins.fused_qk_rope import tensorrt_aot
from plugins.fused_qk_rope.tensorrt_kernels import last_error, forget_errors
with open(sys.argv[1], "rb") as file:
    kernels = pickle.load(file)
trt = drive.trt
tensorrt_aot.register_aot(trt, kernels[0])
for kernel in (kernels[1], kernels[3], replace(kernels[0], heads=8)):
    try:
        drive.drive_aot(kernel)
    except ValueError as error:
        assert str(last_error()) == str(error)
        print(error)
    forget_errors()
tensors = drive.dynamic
def too_many(kernel):
    made = tensors(kernel)
    for tensor, dims in zip(made, drive.shapes(kernel, 2**24), strict=True):
        tensor.max = trt.Dims(dims)
    return made
drive.dynamic = too_many
try:
    drive.drive_aot(kernels[0])
except ValueError as error:
    print(error)
import tensorrt.plugin as plugin
import numpy as np
for values in ({"grid_x": 2.0}, {"block_x": np.int64(128)}, {"shared_mem": True}):
    try:
        tensorrt_aot.launch_parameters(plugin, **values)
    except TypeError as error:
        print(error)
for extra in ((), (plugin.SymInt32(4),) * 2, (4,), (plugin.SymInt16(4),)):
    try:
        tensorrt_aot.extra_arguments(plugin, extra)
    except TypeError as error:
        print(error)
from plugins.fused_qk_rope.tensorrt_v3 import register_v3
try:
    register_v3(trt, kernels[0])
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("version", WITH_AOT)
def test_the_aot_plugin_refuses_what_it_cannot_launch(version, kernels):
    done = run(version, REFUSALS, str(kernels[1]))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if "[TRT]" not in line]
    expected = (
        "no kernel for float16 with 16 heads of 72",
        "no kernel for bfloat16 with 12 heads of 128",
        "no kernel for bfloat16 with 8 heads of 72",
        f"{2**24} tokens",
        "grid_x must be an int or a SymInt32, got float 2.0",
        "block_x must be an int or a SymInt32, got int64",
        "shared_mem must be an int or a SymInt32, got bool True",
        "tokens as SymInt32, got nothing",
        "tokens as SymInt32, got SymInt32, SymInt32",
        "tokens as SymInt32, got int",
        "tokens as SymInt32, got SymInt16",
        "registered in this process as aot plugin already",
    )
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_registering_an_unfit_kernel_raises_before_tensorrt_hears_of_it(kernels):
    kernel = kernels[0][0]
    trt = SimpleNamespace(__name__="tensorrt", __version__="11.4", QuickPluginCreationRequest=None)
    for unfit in (
        replace(kernel, arguments=("q", "k", "cos", "sin", "q_out", "k_out", "tokens")),
        replace(kernel, text=kernel.text.replace(".param .u32", ".param .f32")),
        replace(kernel, hidden_parameters=2),
    ):
        with pytest.raises(ValueError, match=kernel.kernel_name):
            tensorrt_aot.register_aot(trt, unfit)
    with pytest.raises(RuntimeError, match="as version 1"):
        tensorrt_aot.register_aot(trt, kernel, operator=replace(FUSED_QK_ROPE, version=2))


# --- names -----------------------------------------------------------------------------------------------------------


def names_of_tensorrt(path):
    """Dotted names that a file reads off the variable ``trt``, and those that it asks for with hasattr or getattr."""
    used, asked = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            used.add(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            owner, attribute = node.args[:2]
            if isinstance(attribute, ast.Constant) and (owner_name := dotted(owner)) is not None:
                asked.add(f"{owner_name}.{attribute.value}".lstrip("."))
    return used, asked


def dotted(node):
    """``A.B`` for ``trt.A.B`` or ``self.trt.A.B``; "" for ``trt`` itself, None for anything else."""
    if isinstance(node, ast.Name):
        return "" if node.id == "trt" else None
    if not isinstance(node, ast.Attribute):
        return None
    if node.attr == "trt":
        return ""
    owner = dotted(node.value)
    return None if owner is None else f"{owner}.{node.attr}".lstrip(".")


def sources():
    folders = [ROOT / "exporter" / "trt", ROOT / "plugins" / "fused_qk_rope"]
    return [path for folder in folders for path in sorted(folder.glob("*.py"))]


def test_names_are_found_in_source(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text(
        "x = trt.A.B(1)\ny = self.trt.C\nif hasattr(trt.D, 'E'):\n    z = trt.D.E\nw = other.F\nv = self.flavor.trt.G\n"
    )
    used, asked = names_of_tensorrt(path)
    assert used - {""} == {"A", "A.B", "C", "D", "D.E", "G"}
    assert asked == {"D.E"}


PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[2])
def has(name):
    value = module
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True
names = json.loads(sys.argv[1])
print(json.dumps([name for name, condition in names.items() if not has(name) and (not condition or has(condition))]))
"""


def names_with_conditions():
    """Names that our code reads off TensorRT; names that a file itself asks for with hasattr may be missing."""
    names = set()
    for path in sources():
        used, asked = names_of_tensorrt(path)
        names |= used - asked - {""}
    return {
        name: next((c for n, c in CONDITIONS.items() if name == n or name.startswith(f"{n}.")), "") for name in names
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_the_code_reads_off_tensorrt_exists(version):
    names = names_with_conditions()
    assert {"IPluginV3OneBuild", "TensorFormat.LINEAR", "TensorRTPhase.RUNTIME", "get_plugin_registry"} <= set(names)
    done = run(version, PROBE, json.dumps({**names, "NoSuchName": "", "NoSuchName2": "NoSuchName3"}), "tensorrt")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["NoSuchName"]


def test_every_name_that_the_code_reads_off_tensorrt_exists_in_tensorrt_rtx():
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: its names were NOT checked")
    command = [sys.executable, "-c", PROBE, json.dumps(names_with_conditions()), "tensorrt_rtx"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []
