"""The Kimi vision towers (MoonViT and MoonViT3d) in PyTorch; ``model.load`` gives a live one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.live import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import PyTorch only when a tower is asked for: configs and image processing work without."""
    if name == "load":
        from model.live import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
