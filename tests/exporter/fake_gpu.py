"""Stands in for a GPU and for TensorRT's runtime: device memory is host memory, the "engine" is a formula in NumPy.

What it checks is ours: names, types, profiles, addresses, order of copies. The numbers of a real engine are judged on a
GPU.
"""

from __future__ import annotations

import ctypes
import time
import types
from pathlib import Path

import numpy as np

from exporter.trt.cuda import Cuda
from exporter.trt.flavor import Flavor
from exporter.validation.evidence import Profile, Shape

WIDTH = 8
PROFILES = (
    Profile("profile0", Shape(1, 4, 1), Shape(1, 64, 1), Shape(4, 1024, 1)),
    Profile("profile1", Shape(1, 4, 1), Shape(1, 64, 1), Shape(1, 256, 3)),
)


class FakeCudaApi:
    """The functions of cuda.bindings.runtime that `exporter.trt.cuda` calls."""

    cudaMemcpyKind = types.SimpleNamespace(  # noqa: N815 - CUDA's own name
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )

    def __init__(self, fail=None):
        self.memory: dict[int, ctypes.Array] = {}
        self.freed: list[int] = []
        self.copies: list[int] = []
        self.fail = fail
        self.clock = 0.0

    def _answer(self, name, *values):
        return (700, *values) if name == self.fail else (0, *values)

    def cudaSetDevice(self, device):
        return self._answer("cudaSetDevice")

    def cudaGetDeviceProperties(self, device):
        properties = types.SimpleNamespace(name=b"Fake GPU\0\0", major=9, minor=0)
        return self._answer("cudaGetDeviceProperties", properties)

    def cudaStreamCreateWithFlags(self, flags):
        assert flags == 1
        return self._answer("cudaStreamCreateWithFlags", 77)

    def cudaStreamDestroy(self, stream):
        return self._answer("cudaStreamDestroy")

    def cudaStreamSynchronize(self, stream):
        return self._answer("cudaStreamSynchronize")

    def cudaMalloc(self, size):
        block = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(block)] = block
        return self._answer("cudaMalloc", ctypes.addressof(block))

    def cudaFree(self, address):
        self.freed.append(address)
        del self.memory[address]
        return self._answer("cudaFree")

    def cudaMemGetInfo(self):
        return self._answer("cudaMemGetInfo", 1 << 30, 1 << 31)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        assert stream == 77
        self.copies.append(kind)
        ctypes.memmove(target, source, size)
        return self._answer("cudaMemcpyAsync")

    def cudaEventCreate(self):
        return self._answer("cudaEventCreate", [0.0])

    def cudaEventRecord(self, event, stream):
        event[0] = time.perf_counter()
        return self._answer("cudaEventRecord")

    def cudaEventElapsedTime(self, first, last):
        return self._answer("cudaEventElapsedTime", (last[0] - first[0]) * 1e3)

    def cudaGetErrorString(self, code):
        return 0, b"an illegal memory access was encountered"


def formula(pixels: np.ndarray, grids: np.ndarray) -> np.ndarray:
    """[frames, patches, 588], [items, 2] -> [patches/4, WIDTH]: depends on every pixel, its order and the grids."""
    rows = pixels.astype(np.float64).mean(0).reshape(-1, 4, 588)
    weights = np.arange(1, 4 * 588 + 1).reshape(4, 588) / 4000
    return (rows * weights).sum((1, 2))[:, None] * np.arange(1, WIDTH + 1) + grids.sum()


class FakeContext:
    def __init__(self, engine):
        self.engine, self.shapes, self.addresses, self.profile = engine, {}, {}, None
        self.profiles_used: list[int] = []

    def set_optimization_profile_async(self, index, stream):
        assert stream == 77
        self.profile = index
        self.profiles_used.append(index)
        return True

    def set_input_shape(self, name, shape):
        self.shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name):
        assert name == "image_embeds"
        return (self.shapes["pixel_values"][1] // 4, WIDTH)

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream):
        assert stream == 77
        if self.engine.broken:
            return False
        arrays = {}
        for name in ("pixel_values", "grid_hws"):
            dtype = self.engine.numpy_types[name]
            size = int(np.prod(self.shapes[name])) * dtype.itemsize
            data = (ctypes.c_byte * size).from_address(self.addresses[name])
            arrays[name] = np.frombuffer(data, dtype).reshape(self.shapes[name])
        out = formula(arrays["pixel_values"], arrays["grid_hws"]).astype(self.engine.numpy_types["image_embeds"])
        ctypes.memmove(self.addresses["image_embeds"], out.ctypes.data, out.nbytes)
        return True


class FakeEngine:
    def __init__(self, dtype="float32", grid_dtype="int64", broken=False, names=None):
        import ml_dtypes

        numpy_dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
        self.names = names or ["grid_hws", "image_embeds", "pixel_values"]
        self.numpy_types = {
            "pixel_values": numpy_dtype,
            "image_embeds": numpy_dtype,
            "grid_hws": np.dtype(grid_dtype),
        }
        self.broken = broken
        self.contexts: list[FakeContext] = []
        self.num_optimization_profiles = len(PROFILES)
        self.num_io_tensors = len(self.names)

    def create_execution_context(self):
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]

    def get_tensor_name(self, index):
        return self.names[index]

    def get_tensor_dtype(self, name):
        kinds = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "int32": "INT32"}
        return f"DataType.{kinds[self.numpy_types.get(name, np.dtype('int32')).name]}"

    def get_tensor_profile_shape(self, name, index):
        corners = [getattr(PROFILES[index], corner) for corner in ("min", "opt", "max")]
        if name == "pixel_values":
            return [(corner.frames, corner.patches, 588) for corner in corners]
        return [(corner.items, 2) for corner in corners]


def fake_flavor(engine: FakeEngine | None, version: str = "10.13.2.6") -> Flavor:
    """A flavour whose runtime loads ``engine``, or nothing where that is None."""

    class ILogger:
        ERROR, INTERNAL_ERROR, WARNING = range(3)

    class Runtime:
        def __init__(self, log):
            self.log_ = log

        def deserialize_cuda_engine(self, data):
            if engine is None:
                self.log_.log(ILogger.ERROR, "the magic tag does not match")
            return engine

    module = types.SimpleNamespace(__name__="tensorrt", ILogger=ILogger, Runtime=Runtime)
    return Flavor("tensorrt", version, True, True, True, (), True, True, True, True, module)


def open_fake(folder: Path, engine: FakeEngine, api: FakeCudaApi | None = None):
    """A real `exporter.trt.runtime.Engine` over the fakes."""
    from exporter.trt.runtime import Engine

    path = folder / "vision_tower.engine"
    path.write_bytes(b"an engine")
    return Engine(path, fake_flavor(engine), cuda=Cuda(api=api or FakeCudaApi()))
