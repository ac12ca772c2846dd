"""Which GPU is here, asked of the CUDA driver itself; imports nothing."""

from __future__ import annotations

import ctypes


def cuda_driver_version() -> int | None:
    """Ask the CUDA driver which CUDA it implements.

    Returns:
        1000 times the major version plus 10 times the minor, such as 12080; None where there is no driver.
    """
    driver = _driver()
    if driver is None:
        return None
    number = ctypes.c_int()
    return number.value if driver.cuDriverGetVersion(ctypes.byref(number)) == 0 else None


def cuda_capability(device: int = 0) -> str | None:
    """Ask the CUDA driver for a GPU's compute capability, without any package.

    Args:
        device: ordinal among the visible GPUs.

    Returns:
        Such as ``9.0``; None where there is no driver or no such GPU.
    """
    found = _device(device)
    if found is None:
        return None
    driver, handle = found
    number, parts = ctypes.c_int(), []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle) != 0:
            return None
        parts.append(number.value)
    return f"{parts[0]}.{parts[1]}"


def cuda_name(device: int = 0) -> str | None:
    """Ask the CUDA driver what a GPU is called; None where there is no driver or no such GPU.

    Args:
        device: ordinal among the visible GPUs.
    """
    found = _device(device)
    if found is None:
        return None
    driver, handle = found
    name = ctypes.create_string_buffer(256)
    return name.value.decode(errors="replace") if driver.cuDeviceGetName(name, len(name), handle) == 0 else None


def _device(ordinal: int) -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """Driver and handle of a GPU."""
    driver, handle = _driver(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(handle), ordinal) != 0:
        return None
    return driver, handle


def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
