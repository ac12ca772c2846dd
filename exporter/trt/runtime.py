"""Runs an engine: checks its manifest first, picks the tightest profile, binds by name. Imports no torch.

with open_engine(Path("engine/")) as engine:
    rows = engine.run({"pixel_values": pixels, "grid_hws": grids})["image_embeds"]
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.errors import BadInput, MissingRequirement
from exporter.manifest import Manifest, check_files, read_manifest
from exporter.trt.arrays import ArrayView, numpy_dtype, view
from exporter.trt.builder import make_logger
from exporter.trt.cuda import Cuda, DeviceBuffer
from exporter.trt.flavor import Flavor, installed
from exporter.trt.profiles import tightest
from exporter.validation.backends import INPUTS, OUTPUT
from exporter.validation.evidence import DTYPES, PATCHES_PER_ROW, DType, Profile, Shape, check_grids
from exporter.validation.gpu import cuda_capability
from exporter.validation.latency import Latency, percentiles
from model.config import PATCH_VALUES
from plugins.fused_qk_rope.description import FUSED_QK_ROPE
from plugins.fused_qk_rope.tensorrt_kernels import forget_errors, last_error

_ALIGNMENT = 256  # bytes, of every address given to TensorRT (NvInferRuntime.h, setTensorAddress)
_TYPES = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64"}


def open_engine(folder: Path, *, device: int = 0) -> Engine:
    """Open an engine that this program built, after checking that it is intact and made for this place.

    Args:
        folder: the artifact's folder.
        device: ordinal of the GPU among the visible ones.

    Returns:
        The engine, ready to run; a context manager.

    Raises:
        BadInput: it is no engine of ours, or a file differs from the manifest.
        MissingRequirement: another TensorRT, another GPU, or a package that is not installed.
    """
    manifest = read_manifest(folder)
    if manifest.kind != "engine":
        raise BadInput(f"{folder} holds an ONNX model; build an engine from it with kvit-export trt")
    check_files(folder, manifest)
    flavor = check_place(folder, manifest, cuda_capability(device))
    plugin = manifest.plugin.kind if manifest.plugin is not None else "function"
    return Engine(folder / manifest.artifact, flavor, v3_plugin=plugin == "v3", device=device)


def check_place(folder: Path, manifest: Manifest, gpu: str | None) -> Flavor:
    """Compare the TensorRT and the GPU here with those that an engine was built for, before it is loaded.

    Args:
        folder: for messages.
        manifest: of the engine.
        gpu: compute capability here; None without a GPU.

    Returns:
        The TensorRT that will run it.

    Raises:
        BadInput: it was built with another version of the RoPE operator.
        MissingRequirement: names what the engine needs and what is here.
    """
    wanted = manifest.runtime
    if wanted is None:
        raise BadInput(f"{folder}: the manifest does not say what built the engine")
    plugin = manifest.plugin
    if plugin is not None and plugin.version != str(FUSED_QK_ROPE.version):
        raise BadInput(
            f"{folder} was built with version {plugin.version} of {plugin.name}, this program has version "
            f"{FUSED_QK_ROPE.version}; build it again with kvit-export trt"
        )
    targets = ", ".join(manifest.targets)
    if gpu is None:
        raise MissingRequirement(
            f"no CUDA GPU here; run this where there is one of compute capability {targets} with {wanted}"
        )
    if gpu not in manifest.targets:
        raise MissingRequirement(
            f"{folder} was built for compute capability {targets}, here is {gpu}; build it for this GPU"
        )
    flavor = installed(wanted.flavour)
    if flavor is None or flavor.runtime != wanted:
        raise MissingRequirement(
            f"{folder} was built by {wanted} and no other runs it, here is {flavor or f'no {wanted.flavour}'}; install "
            "that version, or build it again here"
        )
    return flavor


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call, from CUDA events on the engine's stream."""

    host_to_device: float
    gpu: float
    device_to_host: float


class Engine:
    """A loaded engine with one execution context; a context manager. Not to be used from two threads at once.

    Attributes:
        dtype: of ``pixel_values`` and ``image_embeds``.
        profiles: as the engine itself has them.
        cuda: the GPU that it runs on.
        flavor: the TensorRT that runs it.
        sha256: of the file as it was loaded.
    """

    def __init__(
        self,
        path: Path,
        flavor: Flavor,
        *,
        v3_plugin: bool = False,
        device: int = 0,
        cuda: Cuda | None = None,
    ) -> None:
        """Load an engine file.

        Args:
            path: the file. What it was built by and for is not checked; `open_engine` does.
            flavor: the TensorRT that built it.
            v3_plugin: it holds Python plugins, whose class must be registered first.
            device: ordinal of the GPU.
            cuda: a GPU already taken.

        Raises:
            BadInput: the file cannot be loaded, or is no vision tower.
            MissingRequirement: no GPU, or no cuda-bindings.
        """
        self.flavor, self._path = flavor, path
        self.cuda = cuda or Cuda(device)
        trt = flavor.module
        self._log = make_logger(trt)
        self._no_plugin: RuntimeError | None = None
        if v3_plugin:
            from plugins.fused_qk_rope.tensorrt_v3 import register_v3_runtime

            try:
                register_v3_runtime(trt)
            except RuntimeError as error:
                self._no_plugin = error  # it matters only if the engine needs it
        try:
            self._runtime = trt.Runtime(self._log)
        except TypeError as error:  # what the bindings make of a null pointer
            raise MissingRequirement(f"{flavor} cannot start: {self._log.first_error()}; check nvidia-smi") from error
        self._engine: Any = self._load(path)
        self._context: Any = self._engine.create_execution_context()
        if self._context is None:
            raise BadInput(f"{flavor} cannot prepare {path}: {self._log.first_error()}; free GPU memory")
        self._types = {name: self._type(name) for name in self._names()}
        if set(self._types) != {*INPUTS, OUTPUT} or self._types[INPUTS[0]] not in DTYPES:
            raise BadInput(f"{path} is no vision tower: its tensors are {', '.join(sorted(self._types)) or 'none'}")
        self.dtype: DType = self._types[INPUTS[0]]
        self.profiles = tuple(self._profile(index) for index in range(self._engine.num_optimization_profiles))
        self._buffers = {name: DeviceBuffer(self.cuda) for name in self._types}
        self._events = [self.cuda.event() for _ in range(4)]
        self._active = -1

    # ------------------------------------------------------------------------------------------------------- inspection

    def _load(self, path: Path) -> Any:  # noqa: ANN401
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
        self.sha256 = hashlib.sha256(data).hexdigest()
        forget_errors()
        engine = self._runtime.deserialize_cuda_engine(data) if data else None
        if engine is None:
            if data and self._no_plugin is not None:
                raise MissingRequirement(f"{path} cannot be loaded: {self._no_plugin}")
            reason = str(last_error() or self._log.first_error()) if data else "it is empty"
            raise BadInput(f"{self.flavor} cannot load {path}: {reason}")
        return engine

    def _names(self) -> list[str]:
        return [str(self._engine.get_tensor_name(i)) for i in range(self._engine.num_io_tensors)]

    def _type(self, name: str) -> Any:  # noqa: ANN401 - compared with what is allowed
        kind = str(self._engine.get_tensor_dtype(name)).rpartition(".")[2]
        return _TYPES.get(kind, kind)

    def _profile(self, index: int) -> Profile:
        pixels = self._engine.get_tensor_profile_shape(INPUTS[0], index)
        grids = self._engine.get_tensor_profile_shape(INPUTS[1], index)
        corners = [Shape(int(pixel[0]), int(pixel[1]), int(grid[0])) for pixel, grid in zip(pixels, grids, strict=True)]
        return Profile(f"profile{index}", *corners)

    # ---------------------------------------------------------------------------------------------------------- running

    def run(
        self, inputs: Mapping[str, object], outputs: Mapping[str, object] | None = None
    ) -> dict[str, NDArray[Any] | object]:
        """Compute one call.

        Args:
            inputs: ``pixel_values`` [frames, patches, 588] of the engine's dtype and ``grid_hws`` [items, 2] int64, by
                name in any order. GPU arrays are read where they lie.
            outputs: ``image_embeds`` [patches/4, width] of the engine's dtype, to be written where it lies; None gives
                a new NumPy array.

        Returns:
            ``image_embeds`` by name. The call is complete when it returns.

        Raises:
            KeyError: an unknown or missing name.
            TypeError: a wrong dtype.
            ValueError: a wrong shape, grids that contradict the pixels, or sizes outside every profile; nothing has
                touched the GPU then.
            RuntimeError: TensorRT or CUDA failed.
        """
        call = self._prepare(inputs, outputs)
        self._submit(call)
        return {OUTPUT: call.result}

    def benchmark(
        self, inputs: Mapping[str, object], *, warmup: int = 2, repeats: int = 10
    ) -> tuple[NDArray[Any], Latency]:
        """Run a call repeatedly and time its three parts.

        Args:
            inputs: as `run` takes them; NumPy arrays, or there is nothing to copy.
            warmup: calls that are not counted.
            repeats: calls that are; at least one.

        Returns:
            The output of the last call, and percentiles in milliseconds.
        """
        call = self._prepare(inputs, None)
        for _ in range(warmup):
            self._submit(call)
        timings = [self._submit(call) for _ in range(repeats)]
        latency = Latency(
            warmup,
            repeats,
            percentiles([timing.host_to_device for timing in timings]),
            percentiles([timing.gpu for timing in timings]),
            percentiles([timing.device_to_host for timing in timings]),
        )
        return call.result, latency

    def _prepare(self, inputs: Mapping[str, object], outputs: Mapping[str, object] | None) -> _Call:
        self.cuda.activate()
        _check_names(inputs, INPUTS, "input")
        if outputs is not None:
            _check_names(outputs, (OUTPUT,), "output")
        pixels = view(inputs[INPUTS[0]], INPUTS[0], stream=self.cuda.stream)
        self._check_array(pixels, INPUTS[0], (None, None, PATCH_VALUES))
        grids = self._grids(view(inputs[INPUTS[1]], INPUTS[1], stream=self.cuda.stream))
        shape = Shape(pixels.shape[0], pixels.shape[1], grids.shape[0])
        check_grids(shape.frames, tuple((int(h), int(w)) for h, w in grids))
        covered = int(grids.astype(np.int64).prod(axis=1).sum())
        if covered != shape.patches:
            raise ValueError(f"{INPUTS[1]} asks for {covered} patches, {INPUTS[0]} has {shape.patches} a frame")
        profile = tightest(self.profiles, shape)
        self._activate(profile, {INPUTS[0]: pixels.shape, INPUTS[1]: grids.shape})
        rows = tuple(int(length) for length in self._context.get_tensor_shape(OUTPUT))
        if rows[0] != shape.patches // PATCHES_PER_ROW:
            raise RuntimeError(f"{self._path.name} would give {rows[0]} rows for {shape.patches} patches")
        given = None if outputs is None else outputs[OUTPUT]
        result = np.empty(rows, dtype=numpy_dtype(self.dtype)) if given is None else given
        target = view(result, OUTPUT, stream=self.cuda.stream, writable=True)
        self._check_array(target, OUTPUT, rows)
        return _Call(pixels, view(grids, INPUTS[1], stream=self.cuda.stream), target, result)

    def _check_array(self, array: ArrayView, name: str, shape: tuple[int | None, ...]) -> None:
        wanted = self._types[name]
        if array.dtype != wanted:
            raise TypeError(f"{name} is {array.dtype}, this engine takes {wanted}")
        fits = len(array.shape) == len(shape) and all(b in (None, a) for a, b in zip(array.shape, shape, strict=True))
        if not fits:
            text = ", ".join("any" if length is None else str(length) for length in shape)
            raise ValueError(f"{name} has shape {list(array.shape)}, expected [{text}]")
        if array.on_device and array.device != self.cuda.device:
            raise ValueError(f"{name} lies on GPU {array.device}, the engine on GPU {self.cuda.device}")

    def _grids(self, array: ArrayView) -> NDArray[Any]:
        """Bring the grids to the host, where they are checked, in the engine's own type (TensorRT 8 takes int32)."""
        if array.dtype not in ("int64", "int32"):
            raise TypeError(f"{INPUTS[1]} is {array.dtype}, expected int64")
        if len(array.shape) != 2 or array.shape[1] != 2:
            raise ValueError(f"{INPUTS[1]} has shape {list(array.shape)}, expected [items, 2]")
        host = np.empty(array.shape, dtype=array.dtype)
        if array.on_device:
            self.cuda.to_host(host.ctypes.data, array.address, array.size)
            self.cuda.wait()
        elif array.size:
            ctypes.memmove(host.ctypes.data, array.address, array.size)
        return host.astype(self._types[INPUTS[1]])

    def _activate(self, profile: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if profile != self._active:
            done = self._context.set_optimization_profile_async(profile, self.cuda.stream)
            self.cuda.wait()
            if not done:
                raise RuntimeError(f"{self._path.name}: profile {profile} cannot be used: {self._log.first_error()}")
            self._active = profile
        for name, shape in shapes.items():
            if not self._context.set_input_shape(name, shape):
                raise RuntimeError(
                    f"{self._path.name} refuses {name} of shape {list(shape)}: {self._log.first_error()}"
                )

    def _submit(self, call: _Call) -> Timing:
        """Copy in, compute, copy out, wait."""
        started, copied, computed, ended = self._events
        self.cuda.record(started)
        for name, array in ((INPUTS[0], call.pixels), (INPUTS[1], call.grids)):
            address = array.address
            if not _is_bindable(array):
                address = self._buffers[name].reserve(array.size)
                copy = self.cuda.within_device if array.on_device else self.cuda.to_device
                copy(address, array.address, array.size)
            self._bind(name, address)
        direct = _is_bindable(call.target)
        target = call.target.address if direct else self._buffers[OUTPUT].reserve(call.target.size)
        self._bind(OUTPUT, target)
        self.cuda.record(copied)
        if not self._context.execute_async_v3(self.cuda.stream):
            raise RuntimeError(f"{self._path.name} did not run: {self._log.first_error()}")
        self.cuda.record(computed)
        if not direct:
            copy = self.cuda.within_device if call.target.on_device else self.cuda.to_host
            copy(call.target.address, target, call.target.size)
        self.cuda.record(ended)
        self.cuda.wait()
        marks = (started, copied, computed, ended)
        return Timing(*(self.cuda.milliseconds(a, b) for a, b in pairwise(marks)))

    def _bind(self, name: str, address: int) -> None:
        if not self._context.set_tensor_address(name, address):
            raise RuntimeError(f"{self._path.name}: {name} cannot be bound: {self._log.first_error()}")

    def close(self) -> None:
        """Free what the engine holds."""
        self.cuda.activate()
        for buffer in self._buffers.values():
            buffer.release()
        self._context = self._engine = None
        self.cuda.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Call:
    """Inputs that were checked, and where the output goes."""

    pixels: ArrayView
    grids: ArrayView
    target: ArrayView
    result: Any


def _is_bindable(array: ArrayView) -> bool:
    """Whether TensorRT can use the memory as it is: on the GPU, and aligned as its documentation demands."""
    return array.on_device and array.address % _ALIGNMENT == 0


def _check_names(given: Mapping[str, object], wanted: tuple[str, ...], what: str) -> None:
    for name in given:
        if name not in wanted:
            raise KeyError(f"unknown {what} {name!r}; this engine has {', '.join(wanted)}")
    for name in wanted:
        if name not in given:
            raise KeyError(f"missing {what} {name!r}")
