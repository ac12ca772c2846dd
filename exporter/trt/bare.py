"""What a bare engine file tells without TensorRT."""

from __future__ import annotations

import mmap
from pathlib import Path

from exporter.errors import BadInput
from plugins.fused_qk_rope.description import FUSED_QK_ROPE


def names_plugin(path: Path) -> bool:
    """Whether an engine of unknown origin names the RoPE plugin, whose class must then be registered before it loads.

    Args:
        path: the engine file.

    Raises:
        BadInput: it cannot be read, or is empty.
    """
    try:
        size = path.stat().st_size
        file = path.open("rb")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    if not size:
        raise BadInput(f"{path} is empty; fetch an intact copy or build it again")
    with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(FUSED_QK_ROPE.onnx_name.encode()) >= 0
