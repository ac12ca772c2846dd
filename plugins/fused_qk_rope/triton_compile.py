"""Ahead-of-time compilation of the Triton kernel, on machines with or without a GPU."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from plugins.fused_qk_rope.launch_plan import LAUNCH, VECTOR_BYTES, LaunchConfig, vector_width

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
"""Targets that continuous integration compiles for."""

ELEMENT_TYPES = {"float32": ("fp32", 4), "float16": ("fp16", 2), "bfloat16": ("bf16", 2)}
"""Triton's name and the bytes of each dtype of the operator; bf16 is never read as fp16."""


@dataclass(frozen=True)
class CompiledRope:
    """One specialisation: q, k, cos, sin and the outputs contiguous and 16-byte aligned, ``tokens`` alone at run time.

    Launch it over ``ceil(tokens * vectors_per_token / block)`` programs of ``threads`` threads, with the arguments in
    ``arguments`` and then ``hidden_parameters`` null pointers, which the kernel never reads.

    Attributes:
        text: the PTX or, for gfx targets, the AMDGCN assembly.
        binary: the cubin or hsaco.
        kernel_name: entry point.
        dtype: of q and k, as PyTorch names it.
        heads: attention heads.
        head_dim: elements of a head.
        target: as Triton compiled it, e.g. ``sm_90a``.
        ptx_version: ``(major, minor)`` of the PTX language; a driver must know it. ``None`` for gfx targets.
        triton_version: of the compiler.
        num_warps: warps per program.
        threads: threads per program.
        shared: bytes of shared memory per program.
        block: vectors of q that one program rotates.
        vectors_per_token: vectors of one token of q.
        arguments: declared parameters in order.
        hidden_parameters: pointers that Triton appended to the parameter list.
    """

    text: str
    binary: bytes
    kernel_name: str
    dtype: str
    heads: int
    head_dim: int
    target: str
    ptx_version: tuple[int, int] | None
    triton_version: str
    num_warps: int
    threads: int
    shared: int
    block: int
    vectors_per_token: int
    arguments: tuple[str, ...]
    hidden_parameters: int


def compile_ptx(
    dtype: str,
    head_dim: int,
    target: str,
    *,
    heads: int,
    config: LaunchConfig = LAUNCH,
    ptx_version: tuple[int, int] | None = None,
) -> CompiledRope:
    """Compile the kernel for one dtype, head size and architecture.

    Args:
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        head_dim: elements of a head, even.
        target: ``sm_NN`` or ``gfxNNN``.
        heads: attention heads.
        config: launch sizes.
        ptx_version: PTX language to write, which a driver must know; None for Triton's own choice, its newest.

    Raises:
        ValueError: another dtype, head size or target.
        RuntimeError: the compiler made a kernel that needs scratch memory, which no launcher but Triton's provides.
    """
    if dtype not in ELEMENT_TYPES:
        raise ValueError(f"the kernel is compiled for {', '.join(ELEMENT_TYPES)}, not {dtype!r}")
    if head_dim < 2 or head_dim % 2 or heads < 1:
        raise ValueError(f"head_dim must be even and heads positive, got head_dim={head_dim}, heads={heads}")
    gpu = _gpu_target(target)
    name, itemsize = ELEMENT_TYPES[dtype]
    constants = _constants(head_dim, heads, itemsize, config)
    options = {"num_warps": max(1, config.threads // gpu.warp_size)}
    if ptx_version is not None:
        options["ptx_version"] = 10 * ptx_version[0] + ptx_version[1]
    kernel = _compile(name, constants, gpu, options)
    return _describe(kernel, dtype, constants)


def _gpu_target(target: str) -> Any:  # noqa: ANN401  triton is not annotated
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_(\d{2,3})a?", target):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", target):
        return GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    raise ValueError(f"target must be sm_NN or gfxNNN, got {target!r}")


def _constants(head_dim: int, heads: int, itemsize: int, config: LaunchConfig) -> dict[str, Any]:
    vector = vector_width(itemsize, head_dim)
    parts = head_dim // vector
    return {
        **dict.fromkeys(("q_token", "k_token"), heads * parts),
        **dict.fromkeys(("q_head", "k_head", "cos_token", "sin_token"), parts),
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "VECTOR": vector,
        "BLOCK": config.block,
        "IN_PLACE": False,
        "DEPENDENT": False,
    }


def _signature(element: str, constants: dict[str, Any]) -> dict[str, str]:
    from plugins.fused_qk_rope.triton_kernel import fused_qk_rope_kernel

    types = dict.fromkeys(("q", "k", "q_out", "k_out"), f"*{element}")
    types |= {"cos": "*fp32", "sin": "*fp32", "tokens": "i32"} | dict.fromkeys(constants, "constexpr")
    return {name: types[name] for name in fused_qk_rope_kernel.arg_names}


def _compile(element: str, constants: dict[str, Any], gpu: Any, options: dict[str, int]) -> Any:  # noqa: ANN401
    import triton
    from triton.compiler import ASTSource

    from plugins.fused_qk_rope.triton_kernel import COMPILE_OPTIONS, fused_qk_rope_kernel

    if not isinstance(fused_qk_rope_kernel, triton.JITFunction):
        raise RuntimeError("TRITON_INTERPRET is set, so nothing can be compiled in this process: unset it")  # noqa: TRY004
    signature = _signature(element, constants)
    names = list(signature)
    pointers = [index for index, name in enumerate(names) if signature[name].startswith("*")]
    source = ASTSource(
        fused_qk_rope_kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", VECTOR_BYTES]] for index in pointers},
    )
    with _without_line_info():
        return triton.compile(source, target=gpu, options={**options, **COMPILE_OPTIONS})


@contextlib.contextmanager
def _without_line_info() -> Iterator[None]:
    """Line information holds the path of this file, and an engine is no place for it."""
    before = os.environ.get("TRITON_DISABLE_LINE_INFO")
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRITON_DISABLE_LINE_INFO"]
        else:
            os.environ["TRITON_DISABLE_LINE_INFO"] = before


def _describe(kernel: Any, dtype: str, constants: dict[str, Any]) -> CompiledRope:  # noqa: ANN401
    import triton

    metadata = kernel.metadata
    scratch = {key: getattr(metadata, key, 0) for key in ("global_scratch_size", "profile_scratch_size")}
    if any(scratch.values()):
        raise RuntimeError(f"triton {triton.__version__} compiled a kernel that needs scratch memory: {scratch}")
    is_ptx = "ptx" in kernel.asm
    text = kernel.asm["ptx" if is_ptx else "amdgcn"]
    arguments = tuple(name for name in kernel.src.signature if name not in constants)
    return CompiledRope(
        text=text,
        binary=kernel.asm["cubin" if is_ptx else "hsaco"],
        kernel_name=metadata.name,
        dtype=dtype,
        heads=constants["HEADS"],
        head_dim=constants["HEAD_DIM"],
        target=_find(r"^\.target\s+(\w+)", text) if is_ptx else metadata.target.arch,
        ptx_version=_ptx_version(text) if is_ptx else None,
        triton_version=triton.__version__,
        num_warps=metadata.num_warps,
        threads=metadata.num_warps * metadata.target.warp_size,
        shared=metadata.shared,
        block=constants["BLOCK"],
        vectors_per_token=constants["q_token"],
        arguments=arguments,
        hidden_parameters=_count_parameters(text, metadata.name, is_ptx=is_ptx) - len(arguments),
    )


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"compiled code has nothing like {pattern!r}: this version of triton is not supported")
    return match[1]


def _ptx_version(text: str) -> tuple[int, int]:
    major, minor = _find(r"^\.version\s+(\d+\.\d+)", text).split(".")
    return int(major), int(minor)


def _count_parameters(text: str, kernel_name: str, *, is_ptx: bool) -> int:
    if is_ptx:
        return _find(rf"\.entry\s+{kernel_name}\(([^)]*)\)", text).count(".param")
    return len(re.findall(r"\.value_kind:\s+(?:global_buffer|by_value)", text))
