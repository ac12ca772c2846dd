"""A mend for TensorRT-RTX's wheels, whose ONNX parser ends the process when it meets a plugin node."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import tempfile

SONAME = "libtensorrt_rtx.so"
"""The name that the parser of TensorRT-RTX 1.7 opens; the wheel ships ``libtensorrt_rtx.so.1`` alone."""

_HEADER, _SEGMENT, _DYNAMIC, _SYMBOL = (
    struct.Struct(f"<{fields}") for fields in ("16sHHIQQQIHHHHHH", "IIQQQQQQ", "qQ", "24x")
)
_EM_X86_64 = 62
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_READ_WRITE = 6
_PAGE = 4096
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 0, 1, 5, 6, 10, 11, 14

_loaded: list[ctypes.CDLL] = []


def make_rtx_library_resolvable() -> bool:
    """Let ``dlopen("libtensorrt_rtx.so")`` find the TensorRT-RTX library of this process.

    Without it the parser aborts the process at the first plugin node (SIGABRT, which Python cannot catch). The loader
    recognises a library that is already there by its SONAME, so a library of that name that holds nothing but a need
    for ``libtensorrt_rtx.so.1`` is loaded. Its file is gone again when this function returns, and the installed
    packages are left as they are. Further calls do nothing.

    Returns:
        Whether plugin nodes can be parsed. False on anything but Linux on x86-64, where this was not tried.

    Raises:
        ModuleNotFoundError: ``tensorrt_rtx`` is not installed.
        OSError: the library was not loaded.
    """
    import tensorrt_rtx  # noqa: F401  brings libtensorrt_rtx.so.1 in, which the new library needs

    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    if not _loaded:
        _loaded.append(_load(shared_object(SONAME, f"{SONAME}.1")))
    return True


def _load(content: bytes) -> ctypes.CDLL:
    descriptor, path = tempfile.mkstemp(suffix=".so")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return ctypes.CDLL(path)
    finally:
        os.unlink(path)


def shared_object(soname: str, needed: str) -> bytes:
    """Return an ELF64 shared object for x86-64 without code or symbols.

    One segment, writable because the dynamic linker relocates the dynamic section in place; and a stack segment, since
    a library without one asks for an executable stack (System V ABI, chapter 5; elf(5)).

    Args:
        soname: the name that the dynamic linker knows it by.
        needed: the library that it depends on.
    """
    strings = f"\0{soname}\0{needed}\0".encode()
    segments_at = _HEADER.size
    dynamic_at = segments_at + 3 * _SEGMENT.size
    dynamic_size = 7 * _DYNAMIC.size
    symbols_at = dynamic_at + dynamic_size
    strings_at = symbols_at + _SYMBOL.size
    size = strings_at + len(strings)
    dynamic = [
        (_DT_NEEDED, 2 + len(soname)),
        (_DT_SONAME, 1),
        (_DT_STRTAB, strings_at),
        (_DT_SYMTAB, symbols_at),
        (_DT_STRSZ, len(strings)),
        (_DT_SYMENT, _SYMBOL.size),
        (_DT_NULL, 0),
    ]
    identity = b"\x7fELF" + bytes((2, 1, 1))  # 64 bits, little endian, version 1; the structure pads it with zeros
    shared, version, no_entry, no_sections, no_flags = 3, 1, 0, 0, 0
    header = (identity, shared, _EM_X86_64, version, no_entry, segments_at, no_sections, no_flags)
    sizes = (_HEADER.size, _SEGMENT.size, 3, 64, 0, 0)
    segments = [
        (_PT_LOAD, _READ_WRITE, 0, 0, 0, size, size, _PAGE),
        (_PT_DYNAMIC, _READ_WRITE, dynamic_at, dynamic_at, dynamic_at, dynamic_size, dynamic_size, 8),
        (_PT_GNU_STACK, _READ_WRITE, 0, 0, 0, 0, 0, 16),
    ]
    return b"".join(
        (
            _HEADER.pack(*header, *sizes),
            *(_SEGMENT.pack(*segment) for segment in segments),
            *(_DYNAMIC.pack(*entry) for entry in dynamic),
            _SYMBOL.pack(),
            strings,
        )
    )
