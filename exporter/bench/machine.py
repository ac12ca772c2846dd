"""Where a benchmark ran: processor, GPU, versions. Imports none of the libraries that it tells of."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from exporter.bench.report import Machine
from exporter.tools import tool_versions
from exporter.validation.gpu import cuda_capability, cuda_driver_version, cuda_name

_PACKAGES = (
    *("torch", "triton", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "cuda-bindings"),
    *("numpy", "ml-dtypes"),
)


def describe_machine() -> Machine:
    """Ask the system, the CUDA driver and the installed packages' metadata."""
    driver = cuda_driver_version()
    return Machine(
        system=platform.platform(),
        cpu=_cpu(),
        cpus=len(os.sched_getaffinity(0)),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        gpu=cuda_name(),
        capability=cuda_capability(),
        cuda_driver=None if driver is None else f"{driver // 1000}.{driver % 1000 // 10}",
        versions=tool_versions(_PACKAGES),
    )


def _cpu() -> str:
    """Model of the processor as Linux tells it; its architecture where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()
