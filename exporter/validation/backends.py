"""What can run an artifact: the small interface that the gate asks for, and ONNX Runtime behind it."""

from __future__ import annotations

import contextlib
import ctypes
import io
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from exporter.errors import BadInput, MissingRequirement, one_line
from exporter.validation.evidence import BackendInfo, DType
from exporter.validation.external_data import check_external_data, read_model
from exporter.validation.gpu import cuda_capability

if TYPE_CHECKING:
    import onnx
    import onnxruntime

INPUTS = ("pixel_values", "grid_hws")
OUTPUT = "image_embeds"

_BFLOAT16 = 16  # onnx.TensorProto.BFLOAT16
_DTYPES: dict[int, DType] = {1: "float32", 10: "float16", _BFLOAT16: "bfloat16"}  # by onnx.TensorProto.DataType
_TENSOR_TYPES: dict[str, DType] = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
}


class CaseSkippedError(Exception):
    """The artifact does not take this case, such as a grid outside every profile; the verdict is at best open."""


class RunCrashedError(Exception):
    """The artifact ran on this case and gave no output, such as a crash of the process that ran it; that fails."""


Entered = TypeVar("Entered")


class AnyBackend(Protocol):
    """Holds one artifact, ready to run. It is a context manager; what it holds is released on exit.

    Attributes:
        name: short, for progress and messages.
        dtype: of the artifact.
    """

    name: str
    dtype: DType

    def describe(self) -> BackendInfo:
        """Say what really runs, as the session itself reports it."""

    def __enter__(self: Entered) -> Entered: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Backend(AnyBackend, Protocol):
    """Runs one artifact."""

    def run(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute one case.

        Args:
            pixel_values: [frames, patches, 588], fp32 holding values of the artifact's dtype.
            grid_hws: (h, w) in patches of each item, [items, 2].

        Returns:
            The output as fp32, [rows, width].

        Raises:
            CaseSkippedError: the artifact does not take these sizes.
            RunCrashedError: it was lost on this case.
        """


class NativeBackend(AnyBackend, Protocol):
    """Runs one artifact and gives its output as it is, since NumPy takes 20 ms to widen 7 million numbers of fp16."""

    def run_native(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[Any]:
        """Compute one case; arguments and errors as of `Backend.run`.

        Returns:
            [rows, width] in the model's dtype, in host memory.
        """


def _onnxruntime_errors() -> tuple[type[Exception], ...]:
    """List what ONNX Runtime raises; its exceptions have no common base below Exception."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = [entry for entry in vars(state).values() if isinstance(entry, type) and issubclass(entry, Exception)]
    return (*own, RuntimeError, ValueError, TypeError, MemoryError)


def model_dtype(path: Path) -> DType:
    """Read the dtype of an ONNX vision tower from its input, without its weights.

    Args:
        path: the ``.onnx`` file.

    Returns:
        The dtype of ``pixel_values``.

    Raises:
        BadInput: the file is no such model.
        MissingRequirement: onnx is not installed.
    """
    return _dtype_of(read_model(path), path)


def _dtype_of(model: onnx.ModelProto, path: Path) -> DType:
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    if set(types) != set(INPUTS) or [value.name for value in model.graph.output] != [OUTPUT]:
        raise BadInput(f"{path} is not a vision tower: it does not take {' and '.join(INPUTS)} to {OUTPUT}")
    if types[INPUTS[0]] not in _DTYPES:
        raise BadInput(f"{path}: {INPUTS[0]} has ONNX type {types[INPUTS[0]]}, which is none of fp32, fp16 and bf16")
    return _DTYPES[types[INPUTS[0]]]


class OrtBackend:
    """An ONNX artifact in ONNX Runtime.

    On a CPU a bf16 or fp16 model is emulated: each computing node runs in fp32 between casts, so that rounding happens
    where the graph says (ONNX Runtime has nearly no bf16 kernels there, and moves fp16 casts as it likes).
    """

    def __init__(self, path: Path, provider: Literal["cpu", "cuda"] = "cpu", threads: int = 0) -> None:
        """Load the model.

        Args:
            path: the ``.onnx`` file, its external data beside it.
            provider: ``cuda`` is refused where the session would silently run on the CPU.
            threads: of one operator; 0 lets ONNX Runtime choose.

        Raises:
            BadInput: the model cannot be loaded, or its weights lie outside its folder.
            MissingRequirement: onnxruntime or its CUDA provider is missing.
        """
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise MissingRequirement("this needs onnxruntime; install kvit-export[cpu] or [gpu]") from error
        self.name = f"onnxruntime-{provider}"
        graph = read_model(path)
        self.dtype = _dtype_of(graph, path)
        check_external_data(path, graph)
        self._path = path
        self._emulated = provider == "cpu" and self.dtype != "float32"
        self._errors = _onnxruntime_errors()
        self._weights: list[onnxruntime.OrtValue] = []
        providers = _providers(provider, ort.get_available_providers())
        if provider == "cuda":
            _load_cuda_libraries(ort)
        options = ort.SessionOptions()
        options.log_severity_level = 4  # its own lines on stderr would break the one-line rule
        options.intra_op_num_threads = threads
        model: str | bytes = str(path)
        if self._emulated:
            model = self._emulate(options, ort)
        try:
            self._session: onnxruntime.InferenceSession | None = ort.InferenceSession(model, options, providers)
        except self._errors as error:
            raise BadInput(f"ONNX Runtime cannot load {path}: {_short(error)}") from error
        self._info = self._read_info(ort.__version__, provider)

    def _emulate(self, options: onnxruntime.SessionOptions, ort: Any) -> bytes:  # noqa: ANN401  # a module
        from exporter.ort_emulation import emulated_model

        folder = str(self._path.resolve().parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        # an optimiser may drop a pair of casts, and with it a rounding that the artifact has
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        # packed weights would be a second fp32 copy beside the one below; a memory pattern is kept for every grid
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.enable_mem_pattern = False
        model = emulated_model(self._path)
        # the session points to these and owns none of them
        self._weights = [ort.OrtValue.ortvalue_from_numpy(weight.read()) for weight in model.weights]
        options.add_external_initializers([weight.name for weight in model.weights], self._weights)
        return model.content

    def _read_info(self, version: str, provider: str) -> BackendInfo:
        actual = tuple(self._live_session().get_providers())
        if provider == "cuda" and actual[:1] != ("CUDAExecutionProvider",):
            raise MissingRequirement(
                f"ONNX Runtime fell back to {', '.join(actual)}: no usable CUDA device or libraries; "
                "check nvidia-smi and that onnxruntime-gpu matches CUDA, or use --backend onnxruntime-cpu"
            )
        capability = cuda_capability() if provider == "cuda" else None
        return BackendInfo("onnxruntime", version, provider, actual, capability, self._emulated)

    def _live_session(self) -> onnxruntime.InferenceSession:
        if self._session is None:
            raise ValueError("the backend is closed")
        return self._session

    def describe(self) -> BackendInfo:
        """Say what really runs, as the session reports it."""
        return self._info

    def run(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[np.float32]:
        """Compute one case; see `Backend.run`.

        Raises:
            BadInput: ONNX Runtime refuses the model on this input.
        """
        return np.asarray(self.run_native(pixel_values, grid_hws), dtype=np.float32)

    def run_native(self, pixel_values: NDArray[Any], grid_hws: NDArray[np.int64]) -> NDArray[Any]:
        """Compute one case; see `NativeBackend.run_native`.

        Raises:
            BadInput: ONNX Runtime refuses the model on this input.
        """
        import onnxruntime as ort

        run_options = ort.RunOptions()
        run_options.log_severity_level = 4
        feeds = {
            INPUTS[0]: _to_ort(pixel_values, self.dtype),
            INPUTS[1]: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(grid_hws, dtype=np.int64)),
        }
        try:
            outputs = self._live_session().run_with_ort_values([OUTPUT], feeds, run_options)
            return _from_ort(outputs[0])
        except self._errors as error:
            grids = [tuple(int(side) for side in grid) for grid in grid_hws]
            raise BadInput(f"ONNX Runtime cannot run {self._path} on grids {grids}: {_short(error)}") from error

    def __enter__(self) -> OrtBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        self._weights = []


def _providers(provider: str, available: list[str]) -> list[str | tuple[str, dict[str, str]]]:
    if provider == "cpu":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in available:
        raise MissingRequirement("this onnxruntime has no CUDA provider; install onnxruntime-gpu in its place")
    # TF32 would be an error of the backend's own, and it is on by default
    return [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]


def _load_cuda_libraries(ort: Any) -> None:  # noqa: ANN401  # a module
    """Load CUDA's libraries from pip's packages: without it only a system's own are found, or PyTorch's once loaded.

    What is missing it prints; the session then falls back to the CPU, and that is told.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls()


def _short(error: BaseException) -> str:
    return one_line(str(error))[:300]


def _to_ort(values: NDArray[Any], dtype: DType) -> onnxruntime.OrtValue:
    """Round fp32 to the model's dtype; bf16 travels as uint16, since ONNX Runtime knows no NumPy bf16."""
    import ml_dtypes
    import onnxruntime as ort

    if dtype != "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values, dtype=dtype))
    bits = np.ascontiguousarray(values, dtype=ml_dtypes.bfloat16).view(np.uint16)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _BFLOAT16)


def _from_ort(value: onnxruntime.OrtValue) -> NDArray[Any]:
    """Copy an output; bf16 is read from its memory, since `numpy()` refuses it."""
    import ml_dtypes

    dtype = _TENSOR_TYPES.get(value.data_type())
    if dtype is None:
        raise ValueError(f"the output is a {value.data_type()}, which is none of fp32, fp16 and bf16")
    if dtype != "bfloat16":
        return np.asarray(value.numpy())
    if value.device_name().lower() != "cpu":
        raise ValueError(f"a bf16 output lies on {value.device_name()}")
    shape = tuple(value.shape())
    bits = np.empty(shape, dtype=np.uint16)
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(ml_dtypes.bfloat16)
