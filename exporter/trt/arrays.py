"""Arrays of other libraries, on the host or on the GPU, as an address and a shape; nothing is copied.

NumPy arrays, objects with ``__cuda_array_interface__`` (version 3) and objects with ``__dlpack__`` are understood.
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_DL_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
_DL_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
_DL_TYPES = {(2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16", (0, 64): "int64", (0, 32): "int32"}


@dataclass(frozen=True)
class ArrayView:
    """Where an array lies.

    Attributes:
        address: of its first element.
        shape: of it; elements lie densely in C order.
        dtype: NumPy's name of it, or ``bfloat16``.
        on_device: whether the address is a GPU's.
        device: ordinal of that GPU; 0 on the host.
        owner: keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    on_device: bool
    device: int
    owner: object = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Bytes."""
        count = 1
        for length in self.shape:
            count *= length
        return count * item_bytes(self.dtype)


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return numpy_dtype(dtype).itemsize


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of a name; bfloat16 is that of ml-dtypes."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def view(value: object, name: str, *, stream: int, writable: bool = False) -> ArrayView:
    """Find out where an array lies.

    Args:
        value: a NumPy array, or an object with ``__cuda_array_interface__`` or ``__dlpack__``.
        name: for messages.
        stream: on which the array will be read; a GPU array's producer is waited for by it or before returning.
        writable: refuse arrays that may not be written, and copies of them.

    Returns:
        The view. A host array that is not dense in C order is copied, unless ``writable``.

    Raises:
        TypeError: it is no such thing, or of a type that no engine takes.
        ValueError: it is not dense, or may not be written.
    """
    if isinstance(value, np.ndarray):
        return _from_numpy(value, name, writable)
    # DLPack first: it makes the producer's stream wait-for-able, while PyTorch's other interface names no stream
    if hasattr(value, "__dlpack__"):
        return _from_dlpack(value, name, stream)
    interface = _cuda_interface(value)
    if interface is not None:
        return _from_cuda_interface(value, interface, name, writable)
    raise TypeError(
        f"{name} is a {type(value).__name__}; pass a NumPy array, or a GPU array with __cuda_array_interface__ or "
        "__dlpack__"
    )


def _cuda_interface(value: object) -> dict[str, Any] | None:
    """Its interface, or None: PyTorch has the attribute and raises for host tensors and for bfloat16."""
    try:
        interface = getattr(value, "__cuda_array_interface__", None)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return interface if isinstance(interface, dict) else None


def _from_numpy(value: NDArray[Any], name: str, writable: bool) -> ArrayView:
    if writable and not (value.flags.c_contiguous and value.flags.writeable):
        raise ValueError(f"{name} must be writable and dense in C order to receive an output")
    if not value.dtype.isnative:
        if writable:
            raise TypeError(f"{name} has another byte order than this machine")
        value = value.astype(value.dtype.newbyteorder("="))
    dense = np.ascontiguousarray(value)
    return ArrayView(dense.ctypes.data, tuple(value.shape), value.dtype.name, False, 0, dense)


def _from_cuda_interface(value: object, interface: dict[str, Any], name: str, writable: bool) -> ArrayView:
    shape = tuple(int(length) for length in interface["shape"])
    kind = np.dtype(interface["typestr"])
    if not kind.isnative:
        raise TypeError(f"{name} has another byte order than this machine")
    dtype = kind.name
    address, read_only = interface["data"]
    _check_dense(shape, interface.get("strides"), item_bytes(dtype), name)
    if writable and read_only:
        raise ValueError(f"{name} may not be written")
    if address:
        _synchronise(interface)
    return ArrayView(int(address or 0), shape, dtype, True, _device_of(value), value)


def _device_of(value: object) -> int:
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[1])
    return 0


def _synchronise(interface: dict[str, Any]) -> None:
    """Wait for whoever makes the array: for its stream; for the whole GPU where an older interface names none."""
    from exporter.trt.cuda import runtime_api

    if "stream" in interface and interface["stream"] is None:
        return  # version 3 says so where nothing is pending
    api, stream = runtime_api(), interface.get("stream")
    code, *_ = api.cudaDeviceSynchronize() if stream is None else api.cudaStreamSynchronize(int(stream))
    if int(code) != 0:
        raise ValueError(f"what makes a GPU array cannot be waited for (CUDA error {int(code)})")


def _check_dense(shape: tuple[int, ...], strides: Any, item: int, name: str) -> None:  # noqa: ANN401
    """Refuse strides, in bytes, that are not those of C order."""
    if strides is None:
        return
    step = item
    for length, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
        if length > 1 and stride != step:
            raise ValueError(f"{name} is not dense in C order; make it contiguous first")
        step *= length


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _from_dlpack(value: Any, name: str, stream: int) -> ArrayView:  # noqa: ANN401
    kind, device = (int(part) for part in value.__dlpack_device__())
    if kind not in _DL_CUDA + _DL_HOST:
        raise TypeError(f"{name} lies on a device of DLPack type {kind}, which is no CUDA GPU")
    try:
        capsule = value.__dlpack__(stream=stream) if kind in _DL_CUDA else value.__dlpack__()
    except BufferError as error:
        raise ValueError(f"{name} cannot be shared: {error}") from error
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DlTensor.from_address(pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    dtype = _DL_TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(f"{name} has DLPack type code {tensor.code} of {tensor.bits} bits, which no engine takes")
    item = item_bytes(dtype)
    strides = tuple(tensor.strides[i] * item for i in range(tensor.ndim)) if tensor.strides else None
    _check_dense(shape, strides, item, name)
    # the capsule stays ours and unconsumed: when it is dropped, its destructor gives the tensor back
    address = (tensor.data or 0) + tensor.byte_offset
    return ArrayView(address, shape, dtype, kind in _DL_CUDA, device, (value, capsule))
