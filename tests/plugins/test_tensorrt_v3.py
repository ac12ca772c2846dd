"""The IPluginV3: TensorRT-RTX parses and builds with it on a CPU, and wrong types, shapes and versions are refused.

What the kernel computes inside an engine is not checked here; tests/gpu launches it as the plugin does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("triton", reason="Triton is not installed: no kernel for the plugin")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("TRITON_INTERPRET is set: nothing can be compiled in this process", allow_module_level=True)

from plugins.fused_qk_rope import tensorrt_kernels, tensorrt_launch, tensorrt_v3
from plugins.fused_qk_rope.description import FUSED_QK_ROPE
from plugins.fused_qk_rope.ptx import strip_hidden_parameters
from plugins.fused_qk_rope.tensorrt_kernels import KernelTable, check_shapes, forget_errors, keeps_error, last_error
from plugins.fused_qk_rope.tensorrt_v3 import RopeLayer, deserialized, serialized
from plugins.fused_qk_rope.triton_compile import compile_ptx
from tests.plugins.trt_nodes import Dimension, FakeTensorRT, descriptions, dynamic_descriptions

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def kernels():
    return {dtype: strip_hidden_parameters(compile_ptx(dtype, 72, "sm_89", heads=16)) for dtype in DTYPES}


# --- with TensorRT-RTX, each case in a process of its own: registrations are for good, and a fault may abort -------


PRELUDE = """
import json, sys
from dataclasses import replace
import tensorrt_rtx as trt
from exporter.trt.rtx_library import make_rtx_library_resolvable
from plugins.fused_qk_rope.description import FUSED_QK_ROPE
from plugins.fused_qk_rope.ptx import strip_hidden_parameters
from plugins.fused_qk_rope.tensorrt_v3 import forget_errors, last_error, register_v3, register_v3_runtime
from plugins.fused_qk_rope.triton_compile import compile_ptx
from tests.plugins.trt_nodes import one_node

def kernel(dtype, heads=16, head_dim=72):
    return strip_hidden_parameters(compile_ptx(dtype, head_dim, "sm_89", heads=heads))

def build(model):
    forget_errors()
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    result = {"parsed": parser.parse(model), "error": str(last_error() or ""), "engine": b""}
    result["plugins"] = sum(network.get_layer(i).type == trt.LayerType.PLUGIN_V3 for i in range(network.num_layers))
    if result["parsed"]:
        config, profile = builder.create_builder_config(), builder.create_optimization_profile()
        for i in range(network.num_inputs):
            tensor = network.get_input(i)
            profile.set_shape(tensor.name, *((n, *list(tensor.shape)[1:]) for n in (4, 128, 4096)))
        config.add_optimization_profile(profile)
        engine = builder.build_serialized_network(network, config)
        result |= {"engine": b"" if engine is None else bytes(engine), "error": str(last_error() or "")}
    return result

def show(result):
    print(json.dumps({**result, "engine": result["engine"].decode("latin-1")}))
"""


def rtx(body, *, resolvable=True, check=True):
    """Run with TensorRT-RTX; returns what each ``show`` printed."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: nothing was parsed or built")
    mend = "assert make_rtx_library_resolvable()\n" if resolvable else ""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + mend + body],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
        timeout=300,
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done


def test_rtx_aborts_at_a_plugin_node_without_the_mend():
    """Should this pass one day, a new TensorRT-RTX has mended it, and make_rtx_library_resolvable can go."""
    done = rtx("register_v3(trt, kernel('bfloat16')); show(build(one_node('bfloat16')))", resolvable=False, check=False)
    assert done.returncode == -6, done.stderr[-2000:]
    assert "terminate called without an active exception" in done.stderr


def test_rtx_builds_every_dtype_with_its_own_kernel(kernels):
    """All in one process, as one registration serves them; function and attributes are both in the file."""
    results = rtx("""
for dtype in ("float32", "float16", "bfloat16"):
    register_v3(trt, kernel(dtype))
for dtype in ("float32", "float16", "bfloat16"):
    show(build(one_node(dtype)))
""")
    assert len(results) == 3
    for dtype, result in zip(DTYPES, results, strict=True):
        assert result["error"] == ""
        assert (result["parsed"], result["plugins"]) == (True, 1)
        engine = result["engine"].encode("latin-1")
        assert engine[:4] == b"vtrt"
        for other, kernel in kernels.items():
            assert (kernel.kernel_name.encode() in engine) == (other == dtype)
            assert (kernel.text.encode() in engine) == (other == dtype)


def test_rtx_takes_the_kernel_for_heads_and_head_size(kernels):
    results = rtx("""
register_v3(trt, kernel("bfloat16"))
register_v3(trt, kernel("bfloat16", 12, 128))
show(build(one_node("bfloat16", heads=12, head_dim=128)))
show(build(one_node("bfloat16")))
""")
    assert "bf16_h12_d128" in results[0]["engine"] and kernels["bfloat16"].kernel_name not in results[0]["engine"]
    assert "bf16_h12_d128" not in results[1]["engine"] and kernels["bfloat16"].kernel_name in results[1]["engine"]


def test_rtx_refuses_what_no_kernel_was_compiled_for():
    wrong_size, wrong_heads, wrong_dtype, dynamic, half_angles = rtx("""
register_v3(trt, kernel("bfloat16"))
for model in (one_node("bfloat16", head_dim=80), one_node("bfloat16", heads=12), one_node("float16"),
              one_node("bfloat16", heads="heads"), one_node("bfloat16", angles="bfloat16")):
    show(build(model))
""")
    for result in (wrong_size, wrong_heads, wrong_dtype, dynamic, half_angles):
        assert result["engine"] == ""
    assert "no kernel for bfloat16 with 16 heads of 80" in wrong_size["error"]
    assert "no kernel for bfloat16 with 12 heads of 72" in wrong_heads["error"]
    assert "no kernel for float16 with 16 heads of 72" in wrong_dtype["error"]
    assert "no kernel for bfloat16 with -1 heads of 72" in dynamic["error"]
    assert "cos must be float32" in half_angles["error"]


def test_rtx_without_a_kernel_says_so_and_falls_back_only_where_no_plugin_is_registered():
    plain, empty = rtx("""
show(build(one_node("bfloat16")))
register_v3_runtime(trt)
show(build(one_node("bfloat16")))
""")
    assert (plain["parsed"], plain["plugins"]) == (True, 0)
    assert plain["engine"]
    assert empty["engine"] == ""
    assert "was registered in this process (dtype, heads x head_dim: none)" in empty["error"]


def test_rtx_a_version_1_node_is_refused_by_a_version_2_package_with_text():
    (result,) = rtx("""
newer = replace(FUSED_QK_ROPE, version=2)
register_v3(trt, kernel("bfloat16"), operator=newer)
show(build(one_node("bfloat16", version="1")))
""")
    assert not result["parsed"] and result["engine"] == ""
    for part in ("operator version 1", "this package has version 2", "build it again"):
        assert part in result["error"]


def test_rtx_refuses_a_second_plugin_of_the_same_name():
    (result,) = rtx("""
from plugins.fused_qk_rope import tensorrt_kernels
register_v3_runtime(trt)
register_v3_runtime(trt)
tensorrt_kernels._forms.clear()  # as if another library had registered it
try:
    register_v3_runtime(trt)
except RuntimeError as error:
    show({"error": str(error), "engine": b""})
""")
    assert "has a plugin kvit::FusedQKRope version 1 already" in result["error"]


def test_rtx_has_no_aot_plugins():
    (result,) = rtx("""
from plugins.fused_qk_rope.tensorrt_aot import register_aot
try:
    register_aot(trt, kernel("bfloat16"))
except RuntimeError as error:
    show({"error": str(error), "engine": b""})
""")
    assert "tensorrt_rtx" in result["error"] and "use register_v3" in result["error"]


def test_loading_needs_neither_triton_nor_torch():
    """A runtime process registers the creator, and reads a kernel out of an engine's fields, with both blocked."""
    code = """
import sys
sys.modules["triton"] = sys.modules["torch"] = sys.modules["onnx"] = None
import tensorrt_rtx as trt
from plugins.fused_qk_rope.tensorrt_v3 import register_v3_runtime
register_v3_runtime(trt)
creator = [c for c in trt.get_plugin_registry().all_creators if c.name == "FusedQKRope"][0]
print(creator.plugin_namespace, creator.plugin_version)
"""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.split() == ["kvit", "1"], done.stderr


# --- the plain-Python part, with stand-ins for TensorRT's objects --------------------------------------------------


@pytest.fixture
def trt():
    return FakeTensorRT()


@pytest.fixture
def layer(trt, kernels):
    table = KernelTable()
    for kernel in kernels.values():
        table.add(kernel)
    forget_errors()
    return RopeLayer(trt, FUSED_QK_ROPE, table)


def configured(layer, dtype="bfloat16", largest=4096):
    kind = getattr(layer.trt, dtype)
    layer.get_output_data_types([kind, kind, layer.trt.float32, layer.trt.float32])
    tensors = dynamic_descriptions(layer.trt, dtype, 4, largest)
    layer.configure_plugin(tensors[:4], tensors[4:])
    return layer


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_of_the_nodes_dtype_is_taken(layer, kernels, dtype):
    assert configured(layer, dtype).kernel is kernels[dtype]
    assert layer.clone().kernel is kernels[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_linear_tensors_of_the_kernels_types_are_supported(layer, trt, dtype):
    layer = configured(layer, dtype)
    supported = set()
    for position in range(6):
        for kind in (trt.float32, trt.float16, trt.bfloat16, trt.int32):
            for layout in (trt.TensorFormat.LINEAR, trt.TensorFormat.HWC8):
                tensors = dynamic_descriptions(trt, dtype, 4, 4096)
                tensors[position].desc.type, tensors[position].desc.format = kind, layout
                if layer.supports_format_combination(position, tensors, 4):
                    supported.add((position, kind, layout))
    kind = getattr(trt, dtype)
    wanted = [kind, kind, "FLOAT", "FLOAT", kind, kind]
    assert supported == {(position, kind, "LINEAR") for position, kind in enumerate(wanted)}


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (("BF16", "HALF", "FLOAT", "FLOAT"), "k must be as q is"),
        (("INT32", "INT32", "FLOAT", "FLOAT"), "q must be as q is and one of float32, float16, bfloat16"),
        (("BF16", "BF16", "BF16", "FLOAT"), "cos must be float32"),
        (("BF16", "BF16", "FLOAT", "HALF"), "sin must be float32"),
        (("BF16", "BF16", "FLOAT"), "has 4 inputs, not 3"),
    ],
)
def test_types_that_the_operator_does_not_take(layer, types, message):
    with pytest.raises(ValueError, match=message):
        layer.get_output_data_types(types)
    assert message in str(last_error())


SHAPES = [[None, 16, 72], [None, 16, 72], [None, 36], [None, 36]]


@pytest.mark.parametrize(
    ("position", "shape", "message"),
    [
        (0, [None, 16, 80], "no kernel"),
        (0, [None, 12, 72], "no kernel"),
        (0, [None, None, 72], "no kernel"),
        (0, [None, 1152], "q must be"),
        (1, [None, 12, 72], "k is"),
        (1, [None, 16, 72, 1], "k is"),
        (2, [None, 72], "cos is"),
        (3, [None, 16, 36], "sin is"),
    ],
)
def test_shapes_that_the_kernel_was_not_compiled_for(layer, trt, position, shape, message):
    shapes = [list(each) for each in SHAPES]
    dims = [[Dimension(size) for size in each] for each in shapes]
    layer.get_output_data_types([trt.bfloat16] * 2 + [trt.float32] * 2)
    assert layer.get_output_shapes(dims, [], None) == [dims[0], dims[0]]
    dims[position] = [Dimension(size) for size in shape]
    with pytest.raises(ValueError, match=message):
        layer.get_output_shapes(dims, [], None)


def test_tokens_must_agree_and_be_countable(layer, kernels):
    kernel = kernels["bfloat16"]
    rows = [5, 16, 72]
    check_shapes(kernel, [rows, rows, [5, 36], [5, 36], rows, rows])
    with pytest.raises(ValueError, match="same tokens"):
        check_shapes(kernel, [rows, rows, [4, 36], [5, 36]])
    with pytest.raises(ValueError, match="q_rotated is"):
        check_shapes(kernel, [[-1, 16, 72]] * 2 + [[-1, 36]] * 2 + [[-1, 16, 80]])
    most = (2**31 - 128) // 144
    configured(layer, largest=most)
    with pytest.raises(ValueError, match=f"{most + 1} tokens"):
        configured(layer, largest=most + 1)


def test_other_layouts_and_dtypes_than_the_engines_are_refused_at_run_time(layer, trt):
    layer = configured(layer)
    tensors = descriptions(trt, "bfloat16", 7)
    layer.on_shape_change(tensors[:4], tensors[4:])
    tensors[1].format = trt.TensorFormat.HWC8
    with pytest.raises(ValueError, match="linear"):
        layer.on_shape_change(tensors[:4], tensors[4:])
    tensors = descriptions(trt, "float16", 7)
    with pytest.raises(ValueError, match="this node is bfloat16, and TensorRT brings float16"):
        layer.on_shape_change(tensors[:4], tensors[4:])
    with pytest.raises(ValueError, match="number 3"):
        layer.set_tactic(3)


def test_enqueue_launches_on_tensorrts_stream_with_the_declared_arguments(layer, trt, kernels, monkeypatch):
    launches = []
    monkeypatch.setattr(tensorrt_v3, "launch_through_driver", lambda *arguments: launches.append(arguments))
    monkeypatch.setattr(tensorrt_v3, "load", launches.append)
    running = configured(layer).attach_to_context(None)
    assert launches == [kernels["bfloat16"]]  # loaded before anything is captured
    tensors = descriptions(trt, "bfloat16", 7)
    running.enqueue(tensors[:4], tensors[4:], [16, 32, 48, 64], [80, 96], 0, 1234)
    assert launches[1] == (kernels["bfloat16"], (16, 32, 48, 64, 80, 96), 7, 1234)
    wrong = descriptions(trt, "bfloat16", 7, head_dim=80)
    with pytest.raises(ValueError, match="q is"):
        running.enqueue(wrong[:4], wrong[4:], [16, 32, 48, 64], [80, 96], 0, 1234)
    assert len(launches) == 2


def test_a_plugin_that_was_not_configured_does_not_run(layer, trt):
    with pytest.raises(RuntimeError, match="before it configured"):
        layer.get_fields_to_serialize()
    with pytest.raises(RuntimeError, match="shapes before types"):
        layer.get_output_shapes([[Dimension(size) for size in shape] for shape in SHAPES], [], None)


class Driver:
    """A CUDA driver that records what it is asked for."""

    def __init__(self, version=99000, context=1):
        self.version, self.context, self.loaded, self.launched = version, context, [], []

    def cuDriverGetVersion(self):
        return 0, self.version

    def cuCtxGetCurrent(self):
        return 0, "context"

    def cuCtxGetId(self, context):
        return 0, self.context

    def cuModuleLoadData(self, image):
        self.loaded.append(image)
        return 0, len(self.loaded)

    def cuModuleGetFunction(self, module, name):
        return 0, (module, name)

    def cuLaunchKernel(self, function, *arguments):
        import ctypes

        *sizes, stream, parameters, extra = arguments
        addresses = (ctypes.c_void_p * 7).from_address(parameters)
        kinds = [ctypes.c_uint64] * 4 + [ctypes.c_int32] + [ctypes.c_uint64] * 2
        values = [kind.from_address(address).value for kind, address in zip(kinds, addresses, strict=True)]
        self.launched.append((function, tuple(sizes), stream, values, extra))
        return (self.status,)

    status = 0

    def cuGetErrorName(self, status):
        return 0, b"CUDA_ERROR_LAUNCH_FAILED"


@pytest.fixture
def driver(monkeypatch):
    fake = Driver()
    monkeypatch.setattr(tensorrt_launch.cuda_driver, "driver", lambda: fake)
    monkeypatch.setattr(tensorrt_launch, "_functions", {})
    return fake


def test_a_launch_packs_seven_values_and_nothing_more(driver, kernels):
    kernel = kernels["bfloat16"]
    tensorrt_launch.launch_through_driver(kernel, (16, 32, 48, 64, 80, 96), 7, 1234)
    function, sizes, stream, values, extra = driver.launched[0]
    assert function == (1, kernel.kernel_name.encode())
    assert sizes == (8, 1, 1, 128, 1, 1, 0)  # 7 * 144 vectors in programs of 128, no shared memory
    assert (stream, values, extra) == (1234, [16, 32, 48, 64, 7, 80, 96], 0)
    tensorrt_launch.launch_through_driver(kernel, (16, 32, 48, 64, 80, 96), 0, 1234)
    assert len(driver.launched) == 1  # nothing to do, and a grid of 0 is an error


def test_a_context_loads_a_kernel_once(driver, kernels):
    for _ in range(3):
        for dtype in DTYPES:
            tensorrt_launch.load(kernels[dtype])
    assert len(driver.loaded) == 3
    assert driver.loaded[2] == kernels["bfloat16"].text.encode() + b"\0"
    driver.context = 2
    assert tensorrt_launch.load(kernels["bfloat16"])[0] == 4


def test_driver_faults_are_named(driver, kernels):
    driver.status = 719
    with pytest.raises(RuntimeError, match="cuLaunchKernel failed with CUDA_ERROR_LAUNCH_FAILED"):
        tensorrt_launch.launch_through_driver(kernels["bfloat16"], (16, 32, 48, 64, 80, 96), 7, 0)
    driver.version, driver.context = 11080, 3
    with pytest.raises(RuntimeError, match=r"this driver is of CUDA 11\.8"):
        tensorrt_launch.load(kernels["bfloat16"])
    assert len(driver.loaded) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_comes_out_of_an_engine_as_it_went_in(layer, trt, kernels, dtype):
    fields = configured(layer, dtype).get_fields_to_serialize()
    assert [field.type for field in fields] == ["INT32", "CHAR", "CHAR"]
    for field in fields[1:]:  # TensorRT hands characters back as int8, some versions with a zero behind them
        field.data = np.frombuffer(field.data + b"\0", dtype=np.int8)
    assert deserialized(fields, FUSED_QK_ROPE) == replace(kernels[dtype], binary=b"")


def test_an_engine_of_another_operator_version_is_refused_with_text(kernels):
    fields = as_fields(kernels["bfloat16"])
    for operator, found in ((replace(FUSED_QK_ROPE, version=2), "version 1"), (FUSED_QK_ROPE, "no version")):
        if found == "no version":
            fields = fields[1:]
        with pytest.raises(ValueError, match=f"{found}, and this package has version {operator.version}") as caught:
            deserialized(fields, operator)
        assert "package that built it" in str(caught.value)


def as_fields(kernel):
    return [SimpleNamespace(name=name, data=value) for name, _, value in serialized(kernel, FUSED_QK_ROPE)]


def test_a_damaged_engine_is_refused(kernels):
    for change in ("cut", "other entry", "not json"):
        version, facts, ptx = as_fields(kernels["bfloat16"])
        if change == "cut":
            fields = [version, facts]
        elif change == "other entry":
            fields = [version, facts, SimpleNamespace(name="ptx", data=ptx.data.replace(b"_h16_", b"_h17_"))]
        else:
            fields = [version, SimpleNamespace(name="kernel", data=b"{"), ptx]
        with pytest.raises(ValueError, match="holds no kernel that can be read"):
            deserialized(fields, FUSED_QK_ROPE)


def test_the_first_error_is_kept():
    @keeps_error
    def fail(message):
        raise KeyError(message)

    forget_errors()
    assert last_error() is None
    for message in ("first", "second"):
        with pytest.raises(KeyError):
            fail(message)
    assert str(last_error()) == "'first'"
    forget_errors()
    assert last_error() is None


def test_one_process_registers_one_form(monkeypatch):
    monkeypatch.setattr(tensorrt_kernels, "_forms", {})
    registry = SimpleNamespace(all_creators=[])
    trt = SimpleNamespace(__name__="fake_tensorrt", get_plugin_registry=lambda: registry)
    calls = []

    def fail():
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):  # and that is not remembered as done
        tensorrt_kernels.register_once(trt, FUSED_QK_ROPE, "v3", fail)
    for _ in range(2):
        tensorrt_kernels.register_once(trt, FUSED_QK_ROPE, "aot", lambda: calls.append("aot"))
    assert calls == ["aot"]
    with pytest.raises(RuntimeError, match="registered in this process as aot plugin already: use another process"):
        tensorrt_kernels.register_once(trt, FUSED_QK_ROPE, "v3", lambda: calls.append("v3"))
    assert calls == ["aot"]
