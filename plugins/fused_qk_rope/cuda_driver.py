"""The few functions of the CUDA driver that a kernel launch needs, from cuda-bindings or, without it, from libcuda."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any


class CtypesDriver:
    """The functions of ``cuda.bindings.driver`` used here, over libcuda.so.1; each returns ``(status, value...)``."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"the NVIDIA driver's libcuda.so.1 cannot be loaded: {error}") from error

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: D102, N802  named as in CUDA
        value = ctypes.c_int()
        return self._library.cuDriverGetVersion(ctypes.byref(value)), value.value

    def cuCtxGetId(self, context: Any) -> tuple[int, int]:  # noqa: ANN401, D102, N802
        value = ctypes.c_ulonglong()
        return self._library.cuCtxGetId(context, ctypes.byref(value)), value.value

    def cuCtxGetCurrent(self) -> tuple[int, ctypes.c_void_p]:  # noqa: D102, N802
        value = ctypes.c_void_p()
        return self._library.cuCtxGetCurrent(ctypes.byref(value)), value

    def cuModuleLoadData(self, image: bytes) -> tuple[int, ctypes.c_void_p]:  # noqa: D102, N802
        value = ctypes.c_void_p()
        return self._library.cuModuleLoadData(ctypes.byref(value), image), value

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[int, ctypes.c_void_p]:  # noqa: ANN401, D102, N802
        value = ctypes.c_void_p()
        return self._library.cuModuleGetFunction(ctypes.byref(value), module, name), value

    def cuLaunchKernel(self, function: Any, *numbers: int) -> tuple[int]:  # noqa: ANN401, D102, N802
        *sizes, stream, parameters, extra = numbers
        addresses = (ctypes.c_void_p(address) for address in (stream, parameters, extra))
        return (self._library.cuLaunchKernel(function, *map(ctypes.c_uint, sizes), *addresses),)

    def cuGetErrorName(self, status: int) -> tuple[int, bytes]:  # noqa: D102, N802
        value = ctypes.c_char_p()
        return self._library.cuGetErrorName(status, ctypes.byref(value)), value.value or b""


@lru_cache(maxsize=1)
def driver() -> Any:  # noqa: ANN401  a module, or the class above
    """Return ``cuda.bindings.driver``, or what stands in for it where cuda-bindings is not installed.

    Raises:
        RuntimeError: there is no NVIDIA driver.
    """
    try:
        from cuda.bindings import driver as bindings
    except ImportError:
        return CtypesDriver()
    return bindings


def call(name: str, *arguments: Any) -> Any:  # noqa: ANN401  handles, numbers or bytes
    """Call a function of the driver.

    Args:
        name: as CUDA names it.
        arguments: without the places for results.

    Returns:
        Its result; ``None`` where it has none.

    Raises:
        RuntimeError: the driver answered with an error, which the message names, or there is no driver.
    """
    status, *values = getattr(driver(), name)(*arguments)
    if int(status):
        error_name = driver().cuGetErrorName(status)[1].decode()
        raise RuntimeError(f"{name} failed with {error_name or int(status)}")
    return values[0] if values else None


def driver_version() -> int:
    """Return the newest CUDA version that the driver knows, as 1000 * major + 10 * minor.

    Raises:
        RuntimeError: there is no NVIDIA driver.
    """
    return int(call("cuDriverGetVersion"))
