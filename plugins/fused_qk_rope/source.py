"""Identity of everything that decides what a plugin in an engine does."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

SOURCES = (
    "cuda_driver.py",
    "description.py",
    "launch_plan.py",
    "ptx.py",
    "tensorrt_aot.py",
    "tensorrt_kernels.py",
    "tensorrt_launch.py",
    "tensorrt_v3.py",
    "triton_compile.py",
    "triton_kernel.py",
)
"""Files beside this one that the kernel, its launch and its registration come from."""


def source_sha256() -> str:
    """Return the hash of the plugin's sources and of the version of Triton, for cache keys and manifests.

    Returns:
        64 hexadecimal digits; other ones where Triton is missing or of another version.
    """
    try:
        triton_version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton_version = ""
    digest = hashlib.sha256(f"triton {triton_version}\n".encode())
    for name in SOURCES:
        content = Path(__file__).with_name(name).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
