"""bf16 and fp16 matrix products of the tower on CPUs that have no units for them: fp32 sums, rounded once.

PyTorch sums such products in fp32 too, in a slow kernel where the CPU has no bf16 instructions. Casting the operands up
is exact and an fp32 product followed by one rounding is the same arithmetic, so the error that a golden set takes for
PyTorch's own stays what it is (one result in ten thousand rounds the other way, since sums are ordered otherwise) and
is measured up to five times faster. Only `linear` is replaced: attention has fast kernels in bf16, which keep roundings
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom
from torch.overrides import TorchFunctionMode


class WideLinear(TorchFunctionMode):
    """Within the block, `linear` of bf16 or fp16 tensors on a CPU is an fp32 product that is rounded once."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        """Called by PyTorch for each of its functions."""
        kwargs = kwargs or {}
        if func is F.linear and _is_low(args[0] if args else kwargs["input"]):
            return _wide(*args, **kwargs)
        return func(*args, **kwargs)


def _is_low(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu"


def _wide(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002 - PyTorch's own word
    wide_bias = None if bias is None else bias.to(torch.float32)
    return F.linear(input.to(torch.float32), weight.to(torch.float32), wide_bias).to(input.dtype)
