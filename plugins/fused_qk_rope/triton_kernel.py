"""The fused rotation as one Triton kernel launch, for CUDA and ROCm.

The kernel sees q as a list of 16-byte vectors, in the order (token, head, part of the head), and gives each thread one
of them together with its fellow in k and the angles that both need. So a head dimension that is no power of two costs
nothing: 72 elements are nine vectors, no lane idles, and the writes of neighbouring threads are neighbours in memory.
Strides count vectors rather than elements, which is how the compiler learns that every address is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plugins.fused_qk_rope.arguments import check_arguments, check_distinct
from plugins.fused_qk_rope.launch_plan import VECTOR_BYTES, LaunchPlan, plan_launch

_SIZES = ("HEADS", "HEAD_DIM", "VECTOR", "BLOCK")
_STRIDES = ("q_token", "q_head", "k_token", "k_head", "cos_token", "sin_token")
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Without fused multiply-add the kernel rounds as the reference does: the two are equal bit for bit."""


def kernel_name(specialization: Any) -> str:  # noqa: ANN401  triton is not annotated
    """Name of one compiled specialisation, so that no two PTX modules in a process share an entry point."""
    constants = specialization.constants
    dtype = specialization.signature["q"].removeprefix("*")
    place = "_in_place" if constants["IN_PLACE"] else ""
    sizes = "_".join(f"{letter}{constants[name]}" for letter, name in zip("hdvb", _SIZES, strict=True))
    return f"fused_qk_rope_{dtype}_{sizes}{place}"


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(x: tl.tensor, cos: tl.tensor, sin: tl.tensor, BLOCK: tl.constexpr, VECTOR: tl.constexpr) -> tl.tensor:  # noqa: N803
    real, imaginary = tl.split(tl.reshape(x.to(tl.float32), [BLOCK, VECTOR // 2, 2]))
    rotated = tl.join(real * cos - imaginary * sin, imaginary * cos + real * sin)
    return tl.reshape(rotated, [BLOCK, VECTOR]).to(x.dtype)


@triton.jit(repr=kernel_name, do_not_specialize=["tokens", *_STRIDES])  # type: ignore[untyped-decorator]
def fused_qk_rope_kernel(
    q: tl.tensor,  # [tokens, heads, head_dim], read at the strides below
    k: tl.tensor,
    cos: tl.tensor,  # [tokens, head_dim/2] fp32
    sin: tl.tensor,
    tokens: tl.tensor,
    q_token: tl.tensor,  # strides, in vectors of VECTOR elements, or of VECTOR/2 angles for cos and sin
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    cos_token: tl.tensor,
    sin_token: tl.tensor,
    q_out: tl.tensor,  # contiguous; or q itself, with IN_PLACE
    k_out: tl.tensor,
    HEADS: tl.constexpr,  # noqa: N803  Triton's convention for what is known when compiling
    HEAD_DIM: tl.constexpr,  # noqa: N803
    VECTOR: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IN_PLACE: tl.constexpr,  # noqa: N803
    DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Rotate BLOCK vectors of q and of k. The arguments stand in the order of a TensorRT AOT plugin.

    With DEPENDENT (programmatic dependent launch) the kernel may start while the one before it in the stream finishes,
    and waits for that one's end before it touches memory; and it lets the one after it do the same.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    parts: tl.constexpr = HEAD_DIM // VECTOR
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = vector // (HEADS * parts)
    within = vector - token * (HEADS * parts)
    head = within // parts
    part = within - head * parts
    mask = (token < tokens)[:, None]
    token, head = token.to(tl.int64), head.to(tl.int64)  # from here on products with strides may pass 2^31

    if DEPENDENT:
        tl.extra.cuda.gdc_wait()

    lane = tl.arange(0, VECTOR)[None, :]
    angle = tl.arange(0, VECTOR // 2)[None, :]
    q_offset = ((token * q_token + head * q_head + part) * VECTOR)[:, None] + lane
    k_offset = ((token * k_token + head * k_head + part) * VECTOR)[:, None] + lane
    c = tl.load(cos + ((token * cos_token + part) * (VECTOR // 2))[:, None] + angle, mask)
    s = tl.load(sin + ((token * sin_token + part) * (VECTOR // 2))[:, None] + angle, mask)
    x = tl.load(q + q_offset, mask)
    y = tl.load(k + k_offset, mask)
    if not IN_PLACE:
        q_offset = (vector.to(tl.int64) * VECTOR)[:, None] + lane
        k_offset = q_offset
    tl.store(q_out + q_offset, _rotate(x, c, s, BLOCK, VECTOR), mask)
    tl.store(k_out + k_offset, _rotate(y, c, s, BLOCK, VECTOR), mask)


def fused_qk_rope_triton(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, out: tuple[Tensor, Tensor] | None = None, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k in one launch.

    Args:
        q: [tokens, heads, d] in fp32, fp16 or bf16, at any strides. Even strides with the elements of a head next to
            each other are read where they are (such are the views of a packed [tokens, 3, heads, d] projection, at 16
            bytes a load where addresses allow it); anything else is copied first.
        k: like ``q``.
        cos: [tokens, d/2], fp32.
        sin: [tokens, d/2], fp32.
        out: contiguous tensors to write to, of the shape and dtype of ``q``; they must not overlap the inputs.
        inplace: write the results over q and k.

    Returns:
        ``(q_rotated, k_rotated)``: new contiguous tensors, or ``out``, or ``(q, k)``.

    Raises:
        ValueError: shapes or devices that do not fit together, tensors that are not on a GPU, ``out`` that is not
            contiguous, or q and k that share memory and are to be rotated in place.
        TypeError: dtypes outside the description.
    """
    check_arguments(q, k, cos, sin)
    _check_device(q)
    if inplace:
        if out is not None:
            raise ValueError("out and inplace exclude each other")
        return _rotate_in_place(q, k, cos, sin)
    if out is None:
        out = _new_like(q), _new_like(k)
    else:
        _check_out(q, out)
    if q.numel():
        launch((q, k, cos, sin, *out), _prepare_for(q, k, cos, sin, in_place=False))
    return out


def _new_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _check_device(q: Tensor) -> None:
    if not q.is_cuda and isinstance(fused_qk_rope_kernel, triton.JITFunction):
        raise ValueError(f"the Triton kernel needs tensors on a CUDA or ROCm device, got {q.device}")


def _check_out(q: Tensor, out: tuple[Tensor, Tensor]) -> None:
    for x in out:
        if x.shape != q.shape or x.dtype != q.dtype or x.device != q.device or not x.is_contiguous():
            raise ValueError(
                f"out must hold contiguous tensors {tuple(q.shape)} of {q.dtype} on {q.device}, "
                f"got {tuple(x.shape)} of {x.dtype} on {x.device} with strides {x.stride()}"
            )


def _rotate_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    check_distinct(q, k)
    if not q.numel():
        return q, k
    prepared = _prepare_for(q, k, cos, sin, in_place=True)
    if prepared.plan.copied[0] or prepared.plan.copied[1]:
        rotated = fused_qk_rope_triton(q, k, cos, sin)
        q.copy_(rotated[0])
        k.copy_(rotated[1])
    else:
        launch((q, k, cos, sin, q, k), prepared)
    return q, k


@dataclass
class PreparedLaunch:
    """A launch that is ready but for the addresses.

    Attributes:
        plan: what follows from shapes and strides.
        constants: the kernel's compile-time arguments.
        device: index of the GPU, -1 under Triton's interpreter.
        run: launches with given addresses; there after the first launch.
    """

    plan: LaunchPlan
    constants: tuple[Any, ...]
    device: int
    run: Callable[..., None] | None = None


@lru_cache(maxsize=4096)
def _prepare(
    shape: tuple[int, int, int], strides: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: int, in_place: bool
) -> PreparedLaunch:
    plan = plan_launch(shape, strides, dtype.itemsize)
    return PreparedLaunch(plan, (*plan.constants, in_place, launches_dependently(device)), device)


def _prepare_for(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, in_place: bool) -> PreparedLaunch:
    """What follows from everything but the addresses; a tower asks for the same once a layer, so it is kept."""
    strides = q.stride(), k.stride(), cos.stride(), sin.stride()
    return _prepare(q.shape, strides, q.dtype, q.get_device(), in_place)


def launches_dependently(device: int) -> bool:
    """Whether the GPU has programmatic dependent launch; it saves the launch latency after most kernels."""
    return device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _threads_per_warp(device: int) -> int:
    return 32 if torch.version.hip is None else int(torch.cuda.get_device_properties(device).warp_size)


def launch(tensors: tuple[Tensor, ...], prepared: PreparedLaunch) -> None:
    """Launch for ``(q, k, cos, sin, q_out, k_out)``, whose shapes, strides and dtype ``prepared`` was made from."""
    plan = prepared.plan
    if True in plan.copied:
        inputs = zip(tensors, plan.copied, strict=False)
        tensors = (*(x.contiguous() if copied else x for x, copied in inputs), *tensors[4:])
    if plan.tokens_per_launch:
        _launch_slices(tensors, prepared)
    elif prepared.device < 0 or prepared.device == torch.cuda.current_device():
        _launch_once(tensors, prepared)
    else:
        with torch.cuda.device(prepared.device):
            _launch_once(tensors, prepared)


def _launch_slices(tensors: tuple[Tensor, ...], prepared: PreparedLaunch) -> None:
    step = prepared.plan.tokens_per_launch
    for start in range(0, prepared.plan.scalars[0], step):
        part = tuple(x[start : start + step] for x in tensors)
        plan = prepared.plan._replace(
            scalars=(part[0].shape[0], *prepared.plan.scalars[1:]), tokens_per_launch=0, copied=(False,) * 4
        )
        launch(part, PreparedLaunch(plan, prepared.constants, prepared.device))


def _launch_once(tensors: tuple[Tensor, ...], prepared: PreparedLaunch) -> None:
    """Launch on the current device. Triton's own look-up costs more than the launch, so its result is kept.

    What is kept was compiled for 16-byte aligned addresses, and the kernel's integers are not specialised.
    """
    q, k, cos, sin, q_out, k_out = (x.data_ptr() for x in tensors)
    aligned = not (q | k | cos | sin | q_out | k_out) % VECTOR_BYTES
    scalars, constants = prepared.plan.scalars, prepared.constants
    if aligned and prepared.run is not None:
        prepared.run(q, k, cos, sin, *scalars, q_out, k_out, *constants)
        return
    options = dict(COMPILE_OPTIONS, num_warps=max(1, prepared.plan.threads // _threads_per_warp(prepared.device)))
    if constants[-1]:
        options["launch_pdl"] = True
    grid = prepared.plan.grid
    compiled = fused_qk_rope_kernel[grid](*tensors[:4], *scalars, *tensors[4:], *constants, **options)
    if aligned and compiled is not None:  # the interpreter compiles nothing
        prepared.run = compiled[grid]
