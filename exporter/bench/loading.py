"""Opens a target in the process that shall run it, ready to be timed."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exporter.bench.targets import Target
from exporter.errors import BadInput, MissingRequirement
from exporter.manifest import read_manifest
from exporter.trt.flavor import choose
from exporter.trt.runtime import Engine, check_place
from exporter.validation.backends import INPUTS, CaseSkippedError, NativeBackend, OrtBackend
from exporter.validation.evidence import BackendInfo, DType
from exporter.validation.external_data import read_model
from exporter.validation.gpu import cuda_capability
from exporter.validation.latency import Latency
from model.config import VisionConfig
from model.errors import InputError


@dataclass(frozen=True)
class OpenBackend:
    """A backend that is ready.

    Attributes:
        backend: it.
        takes: dtype in which it is handed its pixels, so that nothing is converted on the host while time runs.
        threads: see `Loaded`.
        tf32: see `Loaded`.
        sha256: see `Loaded`.
        several: whether it takes several items; None for what the backend itself says.
        max_frames: likewise.
        seconds: that loading took.
    """

    backend: NativeBackend
    takes: DType
    threads: int | None
    tf32: bool | None
    sha256: str | None = None
    several: bool | None = None
    max_frames: int | None = None
    seconds: float = 0.0


def open_target(target: Target, threads: int | None) -> OpenBackend:
    """Load a target.

    Args:
        target: what to load.
        threads: CPU threads; None leaves them to the library.

    Raises:
        BadInput: it cannot be loaded.
        MissingRequirement: no such device, or a package is not installed.
    """
    openers = {"tower": _open_tower, "onnx": _open_onnx, "engine": _open_engine}
    try:
        return openers[target.kind](target, threads)
    except InputError as error:
        raise BadInput(str(error)) from error
    except ModuleNotFoundError as error:
        raise MissingRequirement(f"{error.name} is not installed; pip install 'kvit-export[cpu]' or [gpu]") from error


def _open_tower(target: Target, threads: int | None) -> OpenBackend:
    import torch

    from exporter.validation.torch_backend import TorchBackend

    device = target.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # on a CPU without units for it bf16 is slower than fp32, and PyTorch's own kernels for it are less exact
    dtype: DType = target.dtype or ("bfloat16" if device == "cuda" else "float32")
    if threads is not None:
        torch.set_num_threads(threads)
    start = time.perf_counter()
    backend = TorchBackend(target.given, dtype, device)
    seconds = time.perf_counter() - start
    used = torch.get_num_threads() if device == "cpu" else None
    return OpenBackend(backend, "float32", used, tf32=False, sha256=backend.weights_sha256, seconds=seconds)


def _open_onnx(target: Target, threads: int | None) -> OpenBackend:
    import onnxruntime  # noqa: F401 - the import is not part of loading the model

    path = Path(target.path or "")
    several, max_frames = _limits(target, path)
    start = time.perf_counter()
    backend = OrtBackend(path, "cuda" if target.backend == "onnxruntime-cuda" else "cpu", threads or 0)
    seconds = time.perf_counter() - start
    used = threads if target.backend == "onnxruntime-cpu" else None
    return OpenBackend(backend, backend.dtype, used, False, None, several, max_frames, seconds)


def _limits(target: Target, path: Path) -> tuple[bool, int | None]:
    """Whether a graph takes several items, and how many frames: from its manifest, or from the file itself."""
    if target.folder is not None:
        manifest = read_manifest(Path(target.folder))
        return manifest.packing == "packed", VisionConfig.from_dict(manifest.source.config).max_frames
    known = {entry.key: entry.value for entry in read_model(path).metadata_props}
    try:
        max_frames = VisionConfig.from_dict(json.loads(known["kvit.config"])).max_frames
    except (KeyError, ValueError, TypeError):  # another program's file, or another version's
        max_frames = None
    return known.get("kvit.packing") == "packed", max_frames


def _open_engine(target: Target, _threads: int | None) -> OpenBackend:
    path, max_frames = Path(target.path or ""), None
    if target.folder is not None:
        manifest = read_manifest(Path(target.folder))
        flavor = check_place(Path(target.folder), manifest, cuda_capability())
        wanted = manifest.files[manifest.artifact].sha256
        max_frames = VisionConfig.from_dict(manifest.source.config).max_frames
    else:
        flavor = choose(target.flavor, has_gpu=True)
        wanted = target.sha256 or ""
    start = time.perf_counter()
    engine = Engine(path, flavor, v3_plugin=target.v3_plugin and flavor.v3_plugins)
    seconds = time.perf_counter() - start
    if engine.sha256 != wanted:
        engine.close()
        raise BadInput(f"{path} was replaced while it was being measured; start again")
    return OpenBackend(EngineHere(engine), engine.dtype, None, target.tf32, None, None, max_frames, seconds)


class EngineHere:
    """An engine in this process, call by call; `exporter.trt.backend` repeats every call in another one.

    Attributes:
        name: of the backend.
        dtype: of the engine.
    """

    name = "engine"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.dtype: DType = engine.dtype
        self._latency: Latency | None = None

    def describe(self) -> BackendInfo:
        """Say what really runs, as the runtime and the GPU report it."""
        flavor, cuda = self._engine.flavor, self._engine.cuda
        return BackendInfo(flavor.name, flavor.version, cuda.name, capability=cuda.capability)

    def latency(self) -> Latency | None:
        """Times of the call that ran last."""
        return self._latency

    def run_native(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[Any]:
        """Compute one case; see `exporter.validation.backends.NativeBackend`.

        Args:
            pixel_values: in the engine's dtype.
            grid_hws: [items, 2].

        Raises:
            CaseSkippedError: the sizes fit no profile; the GPU was not touched.
            RuntimeError: TensorRT or CUDA failed.
        """
        inputs = {INPUTS[0]: pixel_values, INPUTS[1]: grid_hws}
        try:
            rows, self._latency = self._engine.benchmark(inputs, warmup=0, repeats=1)
        except ValueError as error:
            raise CaseSkippedError(str(error)) from error
        except MissingRequirement as error:  # no memory on the GPU
            raise RuntimeError(error.message) from error
        return rows

    def __enter__(self) -> EngineHere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()
