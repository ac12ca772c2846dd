"""How far the kernel is from float64 under Triton's interpreter, for a process of its own."""

from __future__ import annotations

import numpy as np
import torch

from plugins.fused_qk_rope import launch_plan, triton_kernel

FRACTION_BITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
SHAPES = [(1, 1, 64), (2, 3, 72), (7, 2, 80), (3, 1, 96), (5, 3, 128), (4, 2, 68), (9, 1, 6)]


def problem(shape, dtype, seed=0):
    tokens, heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(tokens, 3, heads, head_dim, generator=generator).to(dtype)
    angle = torch.rand(tokens, head_dim // 2, generator=generator) * 600 - 300
    return packed[:, 0], packed[:, 1], angle.cos(), angle.sin()


def worst_ulp(result, x, cos, sin):
    """Error in units in the last place of ``x``'s dtype, taken at the length of the rotated pair.

    Not of each element: where a cos and b sin cancel, fp32 loses bits that no kernel can keep.
    """
    pairs = x.double().numpy().reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (cos.double().numpy() + 1j * sin.double().numpy())[:, None]
    wanted = np.stack((turned.real, turned.imag), -1).reshape(x.shape)
    length = np.repeat(np.abs(turned), 2, axis=-1).reshape(x.shape)
    unit = 2.0 ** (np.floor(np.log2(length)) - FRACTION_BITS[x.dtype])
    return float(np.max(np.abs(result.double().numpy() - wanted) / unit))


def report(name, result, q, k, cos, sin):
    return {
        "name": name,
        "dtype": str(q.dtype).removeprefix("torch."),
        "ulp": max(worst_ulp(result[0], q, cos, sin), worst_ulp(result[1], k, cos, sin)),
        "contiguous": all(x.is_contiguous() for x in result),
        "output_dtype": str(result[0].dtype).removeprefix("torch."),
    }


def layouts(dtype):
    """Layouts of q that the kernel reads where they are, and some that it cannot."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(6, 3, 4, 146, generator=generator).to(dtype)
    flat = torch.randn(5 * 3 * 72 + 1, generator=generator).to(dtype)
    return {
        "packed": base[:5, 1, :3, :72],
        "heads first": base[:3, 0, :, :72].permute(1, 0, 2).contiguous().permute(1, 0, 2)[:, :3],
        "odd stride": torch.randn(5, 3, 73, generator=generator).to(dtype)[..., :72],
        "misaligned": flat[1:].view(5, 3, 72),
        "every other element": base[:5, 2, :3, :144:2],
        "expanded": base[:1, 2, :3, :72].expand(5, 3, 72),
    }


def results():
    for dtype in FRACTION_BITS:
        for shape in SHAPES:
            q, k, cos, sin = problem(shape, dtype)
            yield report(f"shape {shape}", triton_kernel.fused_qk_rope_triton(q, k, cos, sin), q, k, cos, sin)
    for name, q in layouts(torch.float16).items():
        _, k, cos, sin = problem(q.shape, torch.float16)
        yield report(name, triton_kernel.fused_qk_rope_triton(q, k, cos, sin), q, k, cos, sin)
    q, k, cos, sin = problem((5, 3, 72), torch.float32)
    table = torch.stack((cos, sin), -1)
    rotated = triton_kernel.fused_qk_rope_triton(q, k, table[..., 0], table[..., 1])
    yield report("interleaved cos and sin", rotated, q, k, cos, sin)
    yield beyond_int32()
    yield from written(*problem((5, 3, 72), torch.float32))
    yield in_slices(*problem((40, 3, 72), torch.float32))


def beyond_int32():
    """q and k lie 2^31 elements apart from token to token; of that memory only what is touched becomes real."""
    stride = 2**30 + 8
    space = torch.empty(2 * stride + 1000, dtype=torch.float16)
    q, k = (space.as_strided((3, 2, 72), (stride, 72, 1), offset) for offset in (0, 144))
    source_q, source_k, cos, sin = problem((3, 2, 72), torch.float16)
    q.copy_(source_q)
    k.copy_(source_k)
    return report("beyond 2^31", triton_kernel.fused_qk_rope_triton(q, k, cos, sin), source_q, source_k, cos, sin)


def written(q, k, cos, sin):
    """Outputs that the caller gives, poisoned and between guards; and the inputs as outputs."""
    guard = 256
    buffers = [torch.full((q.numel() + 2 * guard,), float("nan")) for _ in "qk"]
    out = tuple(b[guard:-guard].view(q.shape) for b in buffers)
    result = triton_kernel.fused_qk_rope_triton(q, k, cos, sin, out=out)
    guards = all(bool(b[:guard].isnan().all()) and bool(b[-guard:].isnan().all()) for b in buffers)
    yield report("given outputs", result, q, k, cos, sin) | {"guards": guards}
    packed = torch.stack((q, k, q), 1)
    changed = triton_kernel.fused_qk_rope_triton(packed[:, 0], packed[:, 1], cos, sin, inplace=True)
    yield report("in place", tuple(x.contiguous() for x in changed), q, k, cos, sin) | {
        "guards": bool(torch.equal(packed[:, 2], q)) and changed[0].data_ptr() == packed.data_ptr()
    }


def in_slices(q, k, cos, sin):
    """As where one launch could not count its vectors in int32, with a lower limit."""
    launch_plan.INT32_END = 1200
    triton_kernel._prepare.cache_clear()
    plan = triton_kernel._prepare_for(q, k, cos, sin, in_place=False).plan
    result = triton_kernel.fused_qk_rope_triton(q, k, cos, sin)
    return report("in slices", result, q, k, cos, sin) | {"guards": 0 < plan.tokens_per_launch < 40}


def cases():
    return list(results())
