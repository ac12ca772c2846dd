"""What the GPU benchmarks share: whether they can run here, and how their results are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from exporter.files import write_text

EXIT_NO_GPU = 8


def unavailable(script: str) -> str | None:
    """Why a script that needs PyTorch, Triton and a GPU can measure nothing here, in one line.

    Args:
        script: its name, for the message.
    """
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"{script} needs PyTorch and Triton: {error}; install kvit-export[gpu]"
    return None if torch.cuda.is_available() else f"{script} needs a CUDA GPU, and PyTorch sees none here"


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that is whole or not there, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1) + "\n")
