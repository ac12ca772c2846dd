"""What made an artifact and what it cost: versions, seconds by step, peak memory. Imports nothing heavy."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata

from exporter.cli import version

EXPORT_TOOLS = ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy", "safetensors")
BUILD_TOOLS = ("onnx", "numpy", "safetensors", "triton", "cuda-bindings")


class Clock:
    """Seconds by step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the block under a name."""
        start = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - start, 3)


def tool_versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of this program, of Python and of those packages that are installed.

    Args:
        names: of distributions.
    """
    found = {"kvit-export": version(), "python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_memory() -> int:
    """Largest resident set of this process so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
