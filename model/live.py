"""One call from a source of weights to a live tower that runs as fast as we know how."""

from __future__ import annotations

import torch

from model.checkpoint import open_source
from model.errors import InputError
from model.tower import KimiVision, build_tower
from model.weights import VisionWeights

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def load(source: str, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> KimiVision:
    """Build the live tower of a source.

    On a GPU in bf16 or fp16 it runs in the fast form of :mod:`model.cuda`: fused kernels, the attention kernel that was
    measured to be the fastest, positions kept by grid, CUDA graphs for small inputs. The first call of each padded size
    costs more (plans, a recorded graph); ``tower.fast_tower().warm_up([...])`` pays for it beforehand.

    Args:
        source: checkpoint folder in hub layout, or ``random:PRESET?...``.
        device: where it runs.
        dtype: of the tower; None for bf16 on a GPU, as checkpoints are, and fp32 elsewhere.

    Returns:
        The tower in evaluation mode, without gradients.

    Raises:
        InputError: the source cannot be used, or PyTorch sees no GPU where one is asked for.
        TypeError: ``dtype`` is none that a tower computes in.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise TypeError(f"dtype is {dtype!r}; expected torch.bfloat16, torch.float16, torch.float32 or torch.float64")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {place}: PyTorch {torch.__version__} sees no GPU here; use device='cpu'")
    if dtype is None:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    return live_tower(open_source(source), device=place, dtype=dtype)


def live_tower(weights: VisionWeights, *, device: torch.device | str, dtype: torch.dtype) -> KimiVision:
    """Build the live tower of an opened source; see :func:`load`."""
    tower = build_tower(weights, dtype=dtype, device=device)
    return tower.accelerate() if tower.device.type == "cuda" else tower
