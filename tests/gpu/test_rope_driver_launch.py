"""The kernel that goes into an engine, launched on a real GPU through the CUDA driver as TensorRT launches it.

Hidden parameters are gone from the PTX, the driver compiles it, and it gets the declared arguments alone. TensorRT
itself is not needed: the IPluginV3's enqueue is called with stand-ins for TensorRT's descriptions.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the kernel was NOT launched")

HAS_GPU = torch.cuda.is_available() and torch.version.hip is None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here: the engine's kernel was NOT launched through the driver"),
]
if HAS_GPU:
    pytest.importorskip("triton", reason="Triton is not installed: the engine's kernel was NOT launched")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: nothing can be compiled in this process", allow_module_level=True)

from plugins.fused_qk_rope import cuda_driver, tensorrt_launch  # noqa: E402  these are for a GPU
from plugins.fused_qk_rope.description import FUSED_QK_ROPE  # noqa: E402
from plugins.fused_qk_rope.ptx import strip_hidden_parameters  # noqa: E402
from plugins.fused_qk_rope.reference import fused_qk_rope_reference  # noqa: E402
from plugins.fused_qk_rope.tensorrt_kernels import KernelTable  # noqa: E402
from plugins.fused_qk_rope.tensorrt_launch import launch_through_driver  # noqa: E402
from plugins.fused_qk_rope.tensorrt_v3 import RopeLayer, deserialized  # noqa: E402
from plugins.fused_qk_rope.triton_compile import compile_ptx  # noqa: E402
from tests.plugins.trt_nodes import FakeTensorRT, descriptions, dynamic_descriptions  # noqa: E402

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEADS = ((16, 72), (12, 128), (3, 128), (16, 80))
TOKENS = (1, 7, 128, 4096)
GUARD = 4096
POISON = 0xA5
# a rotation may grow a value by the square root of 2; fp16 ends at 65504, and bf16 must not be read as fp16
LARGE = {torch.float16: 3e4, torch.bfloat16: 1e30, torch.float32: 1e30}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def compile_here(dtype, heads, head_dim):
    major, minor = torch.cuda.get_device_capability()
    kernel = strip_hidden_parameters(compile_ptx(name_of(dtype), head_dim, f"sm_{major}{minor}", heads=heads))
    assert kernel.hidden_parameters == 0
    return kernel


@pytest.fixture(params=["cuda-bindings", "ctypes"])
def driver(request, monkeypatch):
    """Both ways to the driver; handles of one mean nothing to the other."""
    if request.param == "ctypes":
        library = cuda_driver.CtypesDriver()
        monkeypatch.setattr(cuda_driver, "driver", lambda: library)
    elif importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed: the launch through it was NOT tried")
    else:
        assert not isinstance(cuda_driver.driver(), cuda_driver.CtypesDriver)
    monkeypatch.setattr(tensorrt_launch, "_functions", {})
    torch.zeros(1, device="cuda")  # makes PyTorch's context current
    return request.param


def inputs(tokens, heads, head_dim, dtype, scale=1.0):
    generator = torch.Generator(device="cuda").manual_seed(tokens + heads + head_dim)
    q, k = (
        (scale * torch.rand(tokens, heads, head_dim, device="cuda", generator=generator) * 2 - scale).to(dtype)
        for _ in range(2)
    )
    angles = 600 * torch.rand(tokens, head_dim // 2, device="cuda", generator=generator) - 300
    return q, k, angles.cos(), angles.sin()


class Guarded:
    """An output with poisoned bytes before and after it."""

    def __init__(self, like) -> None:
        self.bytes = torch.full((like.nbytes + 2 * GUARD,), POISON, dtype=torch.uint8, device="cuda")
        self.tensor = self.bytes[GUARD : GUARD + like.nbytes].view(like.dtype).view(like.shape)
        self.tensor.fill_(float("nan"))

    def assert_guards(self):
        assert (self.bytes[:GUARD] == POISON).all()
        assert (self.bytes[-GUARD:] == POISON).all()


def assert_rotated(result, x, cos, sin):
    """Within 1 ulp of the exact answer in the output's type, where fp32 arithmetic itself can be so exact.

    Two products and a sum in fp32 are off by at most 2 eps of the pair's length, which shows where they cancel.
    """
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    exact = torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())[:, None]).flatten(-2)
    length = pairs.abs().repeat_interleave(2, dim=-1)
    info = torch.finfo(x.dtype)
    ulp = info.eps * 2.0 ** (torch.frexp(exact.abs().clamp_min(info.tiny))[1].double() - 1)
    assert result.dtype == x.dtype
    assert result.isfinite().all()
    error = (result.double() - exact).abs()
    assert (error <= ulp + 2 * 2.0**-23 * length).all(), f"{(error / ulp).max().item():.3g} ulp"


def launch(kernel, arguments, outputs, stream=None):
    stream = torch.cuda.current_stream() if stream is None else stream
    pointers = tuple(x.data_ptr() for x in (*arguments, *(output.tensor for output in outputs)))
    launch_through_driver(kernel, pointers, arguments[0].shape[0], stream.cuda_stream)
    stream.synchronize()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_exactly_the_declared_arguments(driver, heads, head_dim, dtype):
    kernel = compile_here(dtype, heads, head_dim)
    for tokens in TOKENS:
        for scale in (1.0, LARGE[dtype]):
            arguments = inputs(tokens, heads, head_dim, dtype, scale)
            before = [x.clone() for x in arguments]
            outputs = Guarded(arguments[0]), Guarded(arguments[1])
            launch(kernel, arguments, outputs)
            for x, output in zip(arguments[:2], outputs, strict=True):
                output.assert_guards()
                assert_rotated(output.tensor, x, *arguments[2:])
            if scale > 1:
                assert max(output.tensor.abs().max().item() for output in outputs) > scale / 2
            assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))
    assert len(tensorrt_launch._functions) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_drivers_compiler_rounds_as_the_reference(driver, dtype):
    """No product and sum is fused on the way from PTX to the GPU, so the engine's kernel equals PyTorch bit for bit."""
    arguments = inputs(1000, 16, 72, dtype)
    outputs = Guarded(arguments[0]), Guarded(arguments[1])
    launch(compile_here(dtype, 16, 72), arguments, outputs)
    for output, wanted in zip(outputs, fused_qk_rope_reference(*(x.cpu() for x in arguments)), strict=True):
        assert torch.equal(output.tensor.cpu(), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_enqueue_of_the_plugin_and_of_the_plugin_that_an_engine_brought_along(driver, dtype):
    """From configuring while building to running in another process, without TensorRT's library."""
    trt, table = FakeTensorRT(), KernelTable()
    table.add(compile_here(dtype, 16, 72))
    built = RopeLayer(trt, FUSED_QK_ROPE, table)
    kind = getattr(trt, name_of(dtype))
    built.get_output_data_types([kind, kind, trt.float32, trt.float32])
    tensors = dynamic_descriptions(trt, name_of(dtype), 1, 4096)
    built.configure_plugin(tensors[:4], tensors[4:])
    loaded = RopeLayer(trt, FUSED_QK_ROPE, KernelTable(), deserialized(built.get_fields_to_serialize(), FUSED_QK_ROPE))
    for plugin in (built, loaded):
        running = plugin.attach_to_context(None)
        for tokens in TOKENS:
            arguments = inputs(tokens, 16, 72, dtype)
            outputs = Guarded(arguments[0]), Guarded(arguments[1])
            enqueue(running, trt, arguments, outputs, torch.cuda.current_stream())
            torch.cuda.current_stream().synchronize()
            for x, output in zip(arguments[:2], outputs, strict=True):
                output.assert_guards()
                assert_rotated(output.tensor, x, *arguments[2:])


def enqueue(plugin, trt, arguments, outputs, stream):
    tensors = descriptions(trt, name_of(arguments[0].dtype), arguments[0].shape[0])
    plugin.on_shape_change(tensors[:4], tensors[4:])
    sources = [x.data_ptr() for x in arguments]
    targets = [output.tensor.data_ptr() for output in outputs]
    plugin.enqueue(tensors[:4], tensors[4:], sources, targets, 0, stream.cuda_stream)


def test_launches_on_the_stream_that_it_is_given(driver):
    """Behind slow work on that stream, of which it needs the result."""
    kernel = compile_here(torch.bfloat16, 16, 72)
    arguments = inputs(512, 16, 72, torch.bfloat16)
    stale = torch.zeros_like(arguments[0])
    outputs = Guarded(stale), Guarded(stale)
    slow = torch.randn(4096, 4096, device="cuda")
    tensorrt_launch.load(kernel)  # which waits for the device, and so would hide a wrong stream
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow * 1e-3
        stale.copy_(arguments[0])
    launch(kernel, (stale, *arguments[1:]), outputs, stream)
    assert_rotated(outputs[0].tensor, arguments[0], *arguments[2:])


def test_enqueue_is_captured_into_a_cuda_graph_and_replays_on_new_data(driver):
    trt = FakeTensorRT()
    plugin = RopeLayer(trt, FUSED_QK_ROPE, KernelTable(), compile_here(torch.bfloat16, 16, 72)).attach_to_context(None)
    arguments = inputs(333, 16, 72, torch.bfloat16)
    outputs = Guarded(arguments[0]), Guarded(arguments[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue(plugin, trt, arguments, outputs, torch.cuda.current_stream())
    for shift in (1, 2):
        arguments[0].copy_(inputs(333, 16, 72, torch.bfloat16)[0].roll(shift, 0))
        graph.replay()
        torch.cuda.synchronize()
        assert_rotated(outputs[0].tensor, arguments[0], *arguments[2:])
        assert_rotated(outputs[1].tensor, *arguments[1:])
        outputs[0].assert_guards()


def test_misaligned_addresses_and_no_tokens(driver):
    kernel = compile_here(torch.float16, 3, 128)
    arguments = inputs(4, 3, 128, torch.float16)
    outputs = Guarded(arguments[0]), Guarded(arguments[1])
    pointers = tuple(x.data_ptr() for x in (*arguments, *(output.tensor for output in outputs)))
    with pytest.raises(ValueError, match="needs q at a multiple of 16 bytes"):
        launch_through_driver(kernel, (pointers[0] + 2, *pointers[1:]), 3, 0)
    launch_through_driver(kernel, pointers, 0, 0)
    torch.cuda.synchronize()
    assert outputs[0].tensor.isnan().all()


def test_a_text_that_the_driver_refuses_is_named(driver):
    from dataclasses import replace

    kernel = compile_here(torch.float16, 3, 128)
    with pytest.raises(RuntimeError, match="cuModuleLoadData failed with CUDA_ERROR_INVALID_PTX"):
        tensorrt_launch.load(replace(kernel, text=kernel.text.replace("\tret;", "\treturn;")))
    with pytest.raises(RuntimeError, match="cuModuleGetFunction failed with CUDA_ERROR_NOT_FOUND"):
        tensorrt_launch.load(replace(kernel, kernel_name="other"))
