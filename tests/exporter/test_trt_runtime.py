"""The engine runtime's own part: what it binds, copies and refuses. A stand-in takes the place of TensorRT and CUDA."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from exporter.errors import BadInput, MissingRequirement
from exporter.manifest import PluginRecord, Runtime, write_manifest
from exporter.trt import runtime
from exporter.trt.arrays import view
from exporter.trt.cuda import Cuda, CudaError
from exporter.trt.runtime import check_place, open_engine
from exporter.validation.latency import percentiles
from tests.exporter import fake_gpu, samples
from tests.exporter.fake_gpu import FakeCudaApi, FakeEngine, fake_flavor, formula, open_fake

GRIDS = [(2, 2), (6, 42), (36, 26), (16, 16)]


def pixels_of(frames, patches, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal((frames, patches, 588)).astype(dtype)


def call(frames=1, grids=((4, 6),), dtype=np.float32):
    patches = sum(h * w for h, w in grids)
    return {"pixel_values": pixels_of(frames, patches, dtype), "grid_hws": np.array(grids, dtype=np.int64)}


def test_inputs_are_bound_by_name_in_any_order(tmp_path):
    inputs = call()
    expected = formula(inputs["pixel_values"], inputs["grid_hws"])
    with open_fake(tmp_path, FakeEngine()) as engine:
        for order in (list(inputs), list(reversed(inputs))):
            rows = engine.run({name: inputs[name] for name in order})["image_embeds"]
            # the stand-in computes in float64 and rounds once to fp32
            np.testing.assert_allclose(rows, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("grid_dtype", ["int64", "int32"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_dtype_reaches_the_engine_bit_for_bit(tmp_path, dtype, grid_dtype, grid):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    inputs = call(grids=(grid,), dtype=kind)
    with open_fake(tmp_path, FakeEngine(dtype, grid_dtype)) as engine:
        rows = engine.run(inputs)["image_embeds"]
    assert rows.dtype == np.dtype(kind)
    assert np.array_equal(rows, formula(inputs["pixel_values"], inputs["grid_hws"]).astype(kind))


def test_a_non_contiguous_input_gives_the_contiguous_result(tmp_path):
    inputs = call(frames=1, grids=((4, 6), (2, 2)))
    strided = np.asfortranarray(inputs["pixel_values"])
    grids = np.asfortranarray(inputs["grid_hws"])
    assert not strided.flags.c_contiguous
    assert not grids.flags.c_contiguous
    with open_fake(tmp_path, FakeEngine()) as engine:
        dense = engine.run(inputs)["image_embeds"]
        other = engine.run({**inputs, "pixel_values": strided, "grid_hws": grids})["image_embeds"]
    assert np.array_equal(dense, other)


def test_the_tightest_profile_is_used_and_changed_only_when_needed(tmp_path):
    with open_fake(tmp_path, fake := FakeEngine()) as engine:
        engine.run(call(grids=((4, 6),)))  # fits both; profile 1 ends at 256 patches x 3 items, profile 0 at 4 x 1024
        engine.run(call(grids=((2, 2),)))
        engine.run(call(frames=4, grids=((4, 6),)))
        engine.run(call(grids=((2, 2), (4, 6))))
        assert fake.contexts[0].profiles_used == [1, 0, 1]


def test_an_output_is_written_where_the_caller_wants_it(tmp_path):
    inputs = call()
    out = np.full((6, fake_gpu.WIDTH), np.nan, dtype=np.float32)
    with open_fake(tmp_path, FakeEngine()) as engine:
        assert engine.run(inputs, {"image_embeds": out})["image_embeds"] is out
    np.testing.assert_allclose(out, formula(inputs["pixel_values"], inputs["grid_hws"]), rtol=1e-6)


def test_buffers_grow_and_are_freed(tmp_path):
    api = FakeCudaApi()
    with open_fake(tmp_path, FakeEngine(), api) as engine:
        for grid in ((2, 2), (16, 16), (2, 2), (16, 16)):
            engine.run(call(grids=(grid,)))
        assert len(api.memory) == 3  # two inputs, one output
        assert len(api.freed) == 2  # grids stay one row of 16 bytes; pixels and output grew once
    assert api.memory == {}


class DeviceArray:
    """What CuPy and Numba arrays offer; the memory is the stand-in's."""

    def __init__(self, values, strides=None, stream=None):
        self.values = values
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (values.ctypes.data, False),
            "strides": strides,
            "version": 3,
            "stream": stream,
        }


def aligned(shape, offset=0):
    """An fp32 array at an address that is a multiple of 256, plus an offset in bytes."""
    size = int(np.prod(shape)) * 4
    data = np.zeros(size + 512, dtype=np.uint8)
    start = -data.ctypes.data % 256 + offset
    return data[start : start + size].view(np.float32).reshape(shape)


@pytest.mark.parametrize("offset", [4, 128])
def test_gpu_arrays_that_tensorrt_cannot_bind_are_copied_on_the_gpu(tmp_path, offset):
    inputs, api = call(), FakeCudaApi()
    pixels, out = aligned((1, 24, 588), offset), aligned((6, fake_gpu.WIDTH), offset)
    pixels[...] = inputs["pixel_values"]
    with open_fake(tmp_path, fake := FakeEngine(), api) as engine:
        engine.run({**inputs, "pixel_values": DeviceArray(pixels)}, {"image_embeds": DeviceArray(out)})
        np.testing.assert_allclose(out, formula(pixels, inputs["grid_hws"]), rtol=1e-6)
        bound = fake.contexts[0].addresses
        assert bound["pixel_values"] != pixels.ctypes.data
        assert bound["image_embeds"] != out.ctypes.data
        assert sorted(api.copies) == [1, 3, 3]  # the grids from the host, pixels and output within the GPU


def test_another_byte_order_is_converted_or_refused(tmp_path):
    inputs = call()
    swapped = inputs["pixel_values"].astype(">f4")
    with open_fake(tmp_path, FakeEngine()) as engine:
        rows = engine.run({**inputs, "pixel_values": swapped})["image_embeds"]
        assert np.array_equal(rows, engine.run(inputs)["image_embeds"])
        with pytest.raises(TypeError, match="byte order"):
            engine.run({**inputs, "pixel_values": DeviceArray(swapped)})
        with pytest.raises(TypeError, match="byte order"):
            engine.run(inputs, {"image_embeds": np.zeros((6, fake_gpu.WIDTH), dtype=">f4")})


def test_gpu_arrays_are_read_and_written_where_they_lie(tmp_path):
    inputs, out = call(), aligned((6, fake_gpu.WIDTH))
    pixels = aligned((1, 24, 588))
    pixels[...] = inputs["pixel_values"]
    inputs["pixel_values"] = pixels
    api = FakeCudaApi()
    with open_fake(tmp_path, FakeEngine(), api) as engine:
        given = {"pixel_values": DeviceArray(inputs["pixel_values"]), "grid_hws": inputs["grid_hws"]}
        engine.run(given, {"image_embeds": DeviceArray(out)})
        np.testing.assert_allclose(out, formula(inputs["pixel_values"], inputs["grid_hws"]), rtol=1e-6)
        assert api.copies == [1]  # the grids alone went from the host to the device
        strides = tuple(8 * stride for stride in inputs["pixel_values"].strides)
        with pytest.raises(ValueError, match="not dense"):
            engine.run({**given, "pixel_values": DeviceArray(inputs["pixel_values"], strides)})


def test_the_producer_of_a_gpu_array_is_waited_for(tmp_path, monkeypatch):
    """Version 3 names a stream, or says that nothing is pending; version 2 says nothing, so all is waited for."""
    waited = []
    api = FakeCudaApi()
    api.cudaStreamSynchronize = lambda stream: (waited.append(stream), (0,))[1]
    api.cudaDeviceSynchronize = lambda: (waited.append("all"), (0,))[1]
    monkeypatch.setattr("exporter.trt.cuda.runtime_api", lambda: api)
    values = np.zeros((2, 3), dtype=np.float32)
    for stream in (None, 1, 2):
        view(DeviceArray(values, stream=stream), "x", stream=77)
    old = DeviceArray(values)
    del old.__cuda_array_interface__["stream"]
    view(old, "x", stream=77)
    assert waited == [1, 2, "all"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dlpack_arrays_are_understood(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    inputs = call()
    pixels = torch.from_numpy(inputs["pixel_values"]).to(getattr(torch, dtype))
    with open_fake(tmp_path, FakeEngine(dtype)) as engine:
        rows = engine.run({**inputs, "pixel_values": pixels})["image_embeds"]
        with pytest.raises(ValueError, match="not dense"):
            engine.run({**inputs, "pixel_values": pixels.transpose(1, 2).contiguous().transpose(1, 2)})
    exact = formula(pixels.double().numpy(), inputs["grid_hws"])
    # one rounding of the result: half an ulp of 2^-8 in bf16, of 2^-24 in fp32
    np.testing.assert_allclose(rows.astype(np.float64), exact, rtol=2**-8 if dtype == "bfloat16" else 1e-6)


REFUSED = [
    (lambda c: {**c, "mask": c["grid_hws"]}, KeyError, "unknown input 'mask'"),
    (lambda c: {"pixel_values": c["pixel_values"]}, KeyError, "missing input 'grid_hws'"),
    (lambda c: {**c, "pixel_values": c["pixel_values"].astype(np.float16)}, TypeError, "float16.*takes float32"),
    (lambda c: {**c, "grid_hws": c["grid_hws"].astype(np.float32)}, TypeError, "expected int64"),
    (lambda c: {**c, "pixel_values": c["pixel_values"].tolist()}, TypeError, "is a list"),
    (lambda c: {**c, "pixel_values": c["pixel_values"][0]}, ValueError, r"has shape \[24, 588\]"),
    (lambda c: {**c, "pixel_values": c["pixel_values"][..., :587]}, ValueError, "588"),
    (lambda c: {**c, "grid_hws": np.array([[4, 6, 1]])}, ValueError, r"expected \[items, 2\]"),
    (lambda c: {**c, "grid_hws": np.array([[4, 4]])}, ValueError, "asks for 16 patches, pixel_values has 24"),
    (lambda c: {**c, "grid_hws": np.array([[3, 8]])}, ValueError, "side of 3"),
    (lambda c: {**c, "grid_hws": np.array([[-4, -6]])}, ValueError, "side of -4"),
    (lambda c: {**c, "grid_hws": np.zeros((0, 2), np.int64)}, ValueError, "below 1"),
    (lambda c: {**c, "pixel_values": c["pixel_values"][:, :0]}, ValueError, "below 1"),
    (lambda c: call(frames=5), ValueError, "5 frames"),
    (lambda c: call(grids=((2, 514),)), ValueError, "side of 514"),
    (lambda c: call(grids=((36, 30),)), ValueError, r"1080 patches, where this engine takes 4 to 1024 .*4 to 256"),
    (lambda c: call(grids=((2, 2),) * 4), ValueError, "4 items, where this engine takes 1 to 1"),
    (lambda c: call(frames=2, grids=((2, 2),) * 2), ValueError, "fit no profile"),
]


@pytest.mark.parametrize(("change", "kind", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_a_wrong_call_is_refused_before_the_gpu_is_touched(tmp_path, change, kind, text):
    api = FakeCudaApi()
    with open_fake(tmp_path, fake := FakeEngine(), api) as engine:
        with pytest.raises(kind, match=text):
            engine.run(change(call()))
        assert api.copies == []
        assert fake.contexts[0].addresses == {}


def test_wrong_outputs_are_refused(tmp_path):
    good = np.zeros((6, fake_gpu.WIDTH), dtype=np.float32)
    with open_fake(tmp_path, FakeEngine()) as engine:
        for outputs, kind in (
            ({"rows": good}, KeyError),
            ({"image_embeds": good.astype(np.float64)}, TypeError),
            ({"image_embeds": good[:5]}, ValueError),
            ({"image_embeds": good[:, ::2]}, ValueError),
        ):
            with pytest.raises(kind):
                engine.run(call(), outputs)
        good.flags.writeable = False
        with pytest.raises(ValueError, match="writable"):
            engine.run(call(), {"image_embeds": good})


def test_a_failed_run_and_a_failed_cuda_call_are_errors(tmp_path):
    with open_fake(tmp_path, FakeEngine(broken=True)) as engine, pytest.raises(RuntimeError, match="did not run"):
        engine.run(call())
    api = FakeCudaApi()
    with open_fake(tmp_path, FakeEngine(), api) as engine:
        api.fail = "cudaMemcpyAsync"
        with pytest.raises(CudaError, match=r"cudaMemcpyAsync: an illegal memory access.*700"):
            engine.run(call())
        api.fail = None


def test_no_gpu_and_no_tower_are_said(tmp_path):
    with pytest.raises(MissingRequirement, match="no usable CUDA GPU number 0"):
        Cuda(api=FakeCudaApi(fail="cudaSetDevice"))
    with pytest.raises(BadInput, match="no vision tower: its tensors are grid_hws, x"):
        open_fake(tmp_path, FakeEngine(names=["grid_hws", "x"]))
    with pytest.raises(BadInput, match="the magic tag does not match"):
        open_fake(tmp_path, None)
    (tmp_path / "empty.engine").write_bytes(b"")
    with pytest.raises(BadInput, match="it is empty"):
        runtime.Engine(tmp_path / "empty.engine", fake_flavor(FakeEngine()), cuda=Cuda(api=FakeCudaApi()))


def test_latency_counts_warm_up_apart_and_reports_percentiles(tmp_path):
    api = FakeCudaApi()
    with open_fake(tmp_path, FakeEngine(), api) as engine:
        rows, latency = engine.benchmark(call(), warmup=3, repeats=7)
        assert api.copies == [1, 1, 2] * 10
    assert (latency.warmup, latency.repeats) == (3, 7)
    for part in (latency.host_to_device, latency.gpu, latency.device_to_host):
        assert 0 < part.p50 <= part.p90 <= part.p99
    assert rows.shape == (6, fake_gpu.WIDTH)


def test_percentiles_are_measured_times():
    found = percentiles([float(i) for i in range(100, 0, -1)])
    assert (found.p50, found.p90, found.p99) == (50.0, 90.0, 99.0)
    assert percentiles([3.0]) == dataclasses.replace(found, p50=3.0, p90=3.0, p99=3.0)
    assert percentiles([1.0, 2.0, 3.0, 4.0]).p50 == 2.0
    with pytest.raises(ValueError, match="no time"):
        percentiles([])


# ------------------------------------------------------------------------------------------- before anything is loaded


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vision_tower.engine").write_bytes(b"an engine")
    write_manifest(tmp_path, samples.manifest_of(tmp_path, "engine"))
    return tmp_path


def rewrite(folder, **changes):
    write_manifest(folder, samples.manifest_of(folder, "engine", **changes))


def test_an_engine_for_another_gpu_or_tensorrt_is_refused_by_its_manifest(folder, monkeypatch):
    loaded = []
    monkeypatch.setattr(runtime, "Engine", lambda *given, **named: loaded.append(given))
    monkeypatch.setattr(runtime, "cuda_capability", lambda device=0: "9.0")
    monkeypatch.setattr(runtime, "installed", lambda name: fake_flavor(None))
    open_engine(folder)
    assert len(loaded) == 1
    for gpu, here, text in (
        ("8.9", "10.13.2.6", "built for compute capability 9.0, here is 8.9"),
        (None, "10.13.2.6", "no CUDA GPU here.*9.0.*tensorrt 10.13.2.6"),
        ("9.0", "10.13.3", "built by tensorrt 10.13.2.6 and no other runs it, here is tensorrt 10.13.3"),
    ):
        monkeypatch.setattr(runtime, "cuda_capability", lambda device=0, gpu=gpu: gpu)
        monkeypatch.setattr(runtime, "installed", lambda name, here=here: fake_flavor(None, here))
        with pytest.raises(MissingRequirement, match=text):
            open_engine(folder)
    monkeypatch.setattr(runtime, "installed", lambda name: None)
    with pytest.raises(MissingRequirement, match="here is no tensorrt"):
        open_engine(folder)
    assert len(loaded) == 1


def test_an_engine_of_another_operator_version_is_refused_with_text(folder):
    rewrite(folder, plugin=PluginRecord("FusedQKRope", "2", "aot", "ab" * 32))
    with pytest.raises(BadInput, match=r"version 2 of FusedQKRope, this program has version 1"):
        open_engine(folder)


@pytest.mark.parametrize("data", [b"", b"an engin", b"an enginE"])
def test_empty_cut_and_changed_engines_are_refused_by_hash(folder, data):
    (folder / "vision_tower.engine").write_bytes(data)
    with pytest.raises(BadInput, match=r"vision_tower\.engine"):
        open_engine(folder)


def test_an_onnx_folder_is_no_engine(tmp_path):
    (tmp_path / "vision_tower.onnx").write_bytes(b"a model")
    write_manifest(tmp_path, samples.manifest_of(tmp_path, "onnx"))
    with pytest.raises(BadInput, match="build an engine from it"):
        open_engine(tmp_path)


def test_targets_of_a_portable_engine_are_all_accepted(folder, monkeypatch):
    rewrite(folder, targets=("8.9", "12.0"), runtime=Runtime("tensorrt", "10.13.2.6"))
    manifest = samples.manifest_of(folder, "engine", targets=("8.9", "12.0"))
    monkeypatch.setattr(runtime, "installed", lambda name: fake_flavor(None))
    for gpu in ("8.9", "12.0"):
        assert check_place(folder, manifest, gpu).version == "10.13.2.6"
    with pytest.raises(MissingRequirement, match=re.escape("8.9, 12.0, here is 8.6")):
        check_place(folder, manifest, "8.6")


def test_the_runtime_imports_no_torch():
    code = (
        "import sys, exporter.trt.runtime, exporter.trt.backend, exporter.trt.engine_worker, exporter.trt.build\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'triton', 'tensorrt', 'tensorrt_rtx', 'cuda'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
