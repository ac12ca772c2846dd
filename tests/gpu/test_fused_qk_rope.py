"""The fused kernel on a real GPU, against float64 and, bit for bit, against the reference."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the fused kernel was NOT run")

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here: the fused kernel was NOT run on hardware"),
]
if HAS_GPU:
    pytest.importorskip("triton", reason="Triton is not installed: the fused kernel was NOT run")
    from plugins.fused_qk_rope.triton_kernel import fused_qk_rope_triton

from plugins.fused_qk_rope.reference import fused_qk_rope_reference  # noqa: E402  these need PyTorch
from plugins.fused_qk_rope.torch_op import fused_qk_rope, fused_qk_rope_  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOKENS = (1, 2, 7, 1000, 4097)
CASES = [
    (heads, head_dim, dtype)
    for head_dim in (64, 72, 80, 96, 128, 68, 6)
    for heads in (1, 3, 12, 16)
    for dtype in DTYPES
    # every pair of heads and d in bf16; one odd and one even head count elsewhere
    if dtype == torch.bfloat16 or heads in (3, 16)
]


def packed_qkv(tokens, heads, head_dim, dtype, *, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    packed = torch.randn(tokens, 3, heads, head_dim, device="cuda", generator=generator)
    return packed.to(dtype)


def angles(tokens, head_dim, seed=1):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    angle = torch.rand(tokens, head_dim // 2, device="cuda", generator=generator) * 600 - 300
    return angle.cos(), angle.sin()


def problem(tokens, heads, head_dim, dtype):
    packed = packed_qkv(tokens, heads, head_dim, dtype)
    return (packed[:, 0], packed[:, 1], *angles(tokens, head_dim))


def exact(x, cos, sin):
    """Complex multiplication in float64: another formula and another precision than the code under test."""
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(1)
    return torch.view_as_real(pairs * turn).flatten(-2)


def ulp(x, dtype):
    """Distance between neighbouring numbers of ``dtype`` at the size of ``x``."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp_min(info.tiny))[1].double() - 1
    return info.eps * 2.0**exponent


def assert_rotated(result, x, cos, sin):
    """Within half an ulp of the output's type plus what fp32 arithmetic may lose.

    Two products and a sum in fp32, each rounded to nearest, are off by at most 2^-24 of |a cos| + |b sin| for the
    products and 2^-24 of the result for the sum (doubled below for second-order terms); where the two products cancel
    that is more than an ulp of the result, whatever the kernel does.
    """
    wanted = exact(x, cos, sin)
    pairs = x.double().abs().reshape(*x.shape[:-1], -1, 2)
    c, s = cos.double().abs().unsqueeze(1), sin.double().abs().unsqueeze(1)
    a, b = pairs.unbind(-1)
    products = torch.stack((a * c + b * s, b * c + a * s), -1).flatten(-2)
    rounding = 0.0 if x.dtype == torch.float32 else 0.5 * ulp(wanted, x.dtype)
    allowed = rounding + 2.0**-24 * 2 * products
    excess = (result.double() - wanted).abs() - allowed
    assert result.dtype == x.dtype
    assert result.isfinite().all()
    assert excess.max().item() <= 0, f"{excess.max().item():.3g} beyond the allowed error"


def assert_both_rotated(result, q, k, cos, sin):
    for y, x in zip(result, (q, k), strict=True):
        assert y.is_contiguous()
        assert_rotated(y, x, cos, sin)
    # without fused multiply-add the kernel rounds as the reference does, on whichever device
    on_cpu = fused_qk_rope_reference(*(x.cpu() for x in (q, k, cos, sin)))
    assert torch.equal(result[0].cpu(), on_cpu[0])
    assert torch.equal(result[1].cpu(), on_cpu[1])


@pytest.mark.parametrize(("heads", "head_dim", "dtype"), CASES, ids=str)
def test_shapes_against_float64_and_reference(heads, head_dim, dtype):
    for tokens in TOKENS:
        q, k, cos, sin = problem(tokens, heads, head_dim, dtype)
        before = q.clone(), k.clone()
        assert_both_rotated(fused_qk_rope_triton(q, k, cos, sin), q, k, cos, sin)
        assert torch.equal(q, before[0])
        assert torch.equal(k, before[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(7, 3, 72), (129, 16, 72), (1, 1, 64), (33, 12, 128)])
def test_writes_all_of_the_output_and_nothing_else(tokens, heads, head_dim, dtype):
    q, k, cos, sin = problem(tokens, heads, head_dim, dtype)
    size, guard = q.numel(), 4096
    poison = 0xA5
    buffers = [
        torch.full(((size + 2 * guard) * q.element_size(),), poison, dtype=torch.uint8, device="cuda") for _ in "qk"
    ]
    out = tuple(b.view(dtype)[guard : guard + size].view(q.shape) for b in buffers)
    for x in out:
        x.fill_(float("nan"))
    result = fused_qk_rope_triton(q, k, cos, sin, out=out)
    assert result[0].data_ptr() == out[0].data_ptr()
    assert_both_rotated(result, q, k, cos, sin)
    edge = guard * q.element_size()
    for b in buffers:
        assert (b[:edge] == poison).all()
        assert (b[-edge:] == poison).all()


def views(tokens, heads, head_dim, dtype):
    """Other layouts of q, by what each is there for."""
    base = packed_qkv(tokens + 2, heads + 1, 2 * head_dim + 2, dtype)
    flat = torch.randn(tokens * heads * head_dim + 1, device="cuda").to(dtype)
    return {
        "packed": base[:tokens, 1, :heads, :head_dim],
        "heads first": base[:, 0, :heads, :head_dim].permute(1, 0, 2).contiguous().permute(1, 0, 2)[:tokens],
        "odd head stride": torch.randn(tokens, heads, head_dim + 1, device="cuda").to(dtype)[..., :head_dim],
        "odd token stride": torch.randn(tokens, heads * head_dim + 1, device="cuda")
        .to(dtype)[:, 1:]
        .unflatten(1, (heads, head_dim)),
        "even head stride": torch.randn(tokens, heads, head_dim + 2, device="cuda").to(dtype)[..., :head_dim],
        "misaligned start": flat[1:].view(tokens, heads, head_dim),
        "every other element": base[:tokens, 2, :heads, : 2 * head_dim : 2],
        "expanded over heads": base[:tokens, 2, :1, :head_dim].expand(tokens, heads, head_dim),
        "expanded over tokens": base[:1, 2, :heads, :head_dim].expand(tokens, heads, head_dim),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(dtype):
    tokens, heads, head_dim = 37, 5, 72
    cos, sin = angles(tokens, head_dim)
    wide = torch.stack((cos, sin), -1)
    tables = {
        "contiguous": (cos, sin),
        "interleaved": (wide[..., 0], wide[..., 1]),
        "one row for all": (cos[:1].expand_as(cos), sin[:1].expand_as(sin)),
        "padded rows": tuple(torch.nn.functional.pad(x, (1, 2))[:, 1:-2] for x in (cos, sin)),
        "columns first": (cos.t().contiguous().t(), sin.t().contiguous().t()),
    }
    layouts = views(tokens, heads, head_dim, dtype)
    straight = packed_qkv(tokens, heads, head_dim, dtype, seed=5)[:, 1]
    for x in layouts.values():
        assert_both_rotated(fused_qk_rope_triton(x, straight, cos, sin), x, straight, cos, sin)
        assert_both_rotated(fused_qk_rope_triton(straight, x, cos, sin), straight, x, cos, sin)
    for c, s in tables.values():
        assert_both_rotated(fused_qk_rope_triton(straight, straight, c, s), straight, straight, c, s)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_gives_the_same_and_leaves_the_values_alone(dtype):
    for tokens, heads, head_dim in ((1, 1, 64), (7, 3, 72), (1000, 16, 72), (300, 12, 128), (5, 2, 68)):
        packed = packed_qkv(tokens, heads, head_dim, dtype)
        before = packed.clone()
        cos, sin = angles(tokens, head_dim)
        version = packed._version
        fused_qk_rope_(packed[:, 0], packed[:, 1], cos, sin)
        assert packed._version > version
        wanted = fused_qk_rope_reference(before[:, 0], before[:, 1], cos, sin)
        assert torch.equal(packed[:, 0], wanted[0])
        assert torch.equal(packed[:, 1], wanted[1])
        assert torch.equal(packed[:, 2], before[:, 2])


def test_in_place_where_the_kernel_cannot_address_the_tensor():
    base = packed_qkv(9, 3, 145, torch.bfloat16)
    q, k = base[:, 0, :, :144:2], base[:, 1, :, 1:73]
    cos, sin = angles(9, 72)
    wanted = fused_qk_rope_reference(q, k, cos, sin)
    untouched = base[:, 0, :, 1::2].clone()
    fused_qk_rope_(q, k, cos, sin)
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])
    assert torch.equal(base[:, 0, :, 1::2], untouched)


def test_fp16_up_to_3e4_and_bf16_beyond_the_range_of_fp16():
    for dtype, largest in ((torch.float16, 3e4), (torch.bfloat16, 3e38), (torch.float32, 1e38)):
        q, k, cos, sin = problem(257, 16, 72, dtype)
        for x in (q, k):
            # 3e4 sqrt(2) is 42426, below 65504; the others stay below their largest number likewise
            x.copy_(
                torch.empty_like(x, dtype=torch.float32).uniform_(-1, 1) * (largest / 2 if largest > 1e5 else largest)
            )
        result = fused_qk_rope_triton(q, k, cos, sin)
        assert result[0].abs().max() > (65504 if dtype != torch.float16 else 2.9e4)
        assert_both_rotated(result, q, k, cos, sin)


def test_an_overflow_in_fp16_is_an_infinity():
    q, k, cos, _ = problem(3, 2, 72, torch.float16)
    q.fill_(6e4)
    eighth = torch.full_like(cos, 0.5**0.5)  # cosine and sine of an eighth of a turn
    result = fused_qk_rope_triton(q, k, eighth, eighth)[0]
    assert result[..., 0::2].eq(0).all()
    assert result[..., 1::2].isposinf().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hundred_repeats_are_bit_equal(dtype):
    q, k, cos, sin = problem(1000, 16, 72, dtype)
    first = fused_qk_rope(q, k, cos, sin)
    for _ in range(100):
        again = fused_qk_rope(q, k, cos, sin)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_a_stride_that_passes_2_to_the_31():
    tokens, heads, head_dim = 3, 4, 72
    stride = 2**30 + 8
    buffer = torch.empty(2 * stride + 2 * heads * head_dim, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    q, k = (
        buffer.as_strided((tokens, heads, head_dim), (stride, head_dim, 1), offset) for offset in (0, heads * head_dim)
    )
    source = packed_qkv(tokens, heads, head_dim, torch.bfloat16)
    q.copy_(source[:, 0])
    k.copy_(source[:, 1])
    cos, sin = angles(tokens, head_dim)
    assert_both_rotated(fused_qk_rope_triton(q, k, cos, sin), source[:, 0], source[:, 1], cos, sin)
    fused_qk_rope_(q, k, cos, sin)
    wanted = fused_qk_rope_reference(source[:, 0], source[:, 1], cos, sin)
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])


def test_an_output_of_more_than_2_to_the_31_elements():
    heads, head_dim = 16, 128
    tokens = 2**31 // (heads * head_dim) + 5
    q = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda").normal_()  # 4.3 GB; three of them
    cos, sin = (x.expand(tokens, -1) for x in angles(1, head_dim))
    result = fused_qk_rope_triton(q, q, cos, sin)
    for part in (slice(0, 3), slice(tokens // 2, tokens // 2 + 3), slice(tokens - 9, tokens)):
        assert_rotated(result[0][part].contiguous(), q[part], cos[part], sin[part])
        assert_rotated(result[1][part].contiguous(), q[part], cos[part], sin[part])
    # a rotation keeps lengths, so an unwritten or twice-written stretch would show: bf16 rounding is unbiased
    lengths = (
        torch.linalg.vector_norm(q[:: tokens // 64].double()),
        torch.linalg.vector_norm(result[0][:: tokens // 64].double()),
    )
    assert abs(lengths[0] / lengths[1] - 1) < 1e-4


def test_more_vectors_than_one_launch_can_count(monkeypatch):
    """In slices; the limit is lowered, since 2^31 vectors of 16 bytes do not fit any GPU three times."""
    from plugins.fused_qk_rope import launch_plan, triton_kernel

    monkeypatch.setattr(launch_plan, "INT32_END", 1 << 15)
    triton_kernel._prepare.cache_clear()
    try:
        q, k, cos, sin = problem(1003, 16, 72, torch.bfloat16)
        plan = triton_kernel._prepare_for(q, k, cos, sin, in_place=False).plan
        assert 0 < plan.tokens_per_launch < 1003
        assert_both_rotated(fused_qk_rope_triton(q, k, cos, sin), q, k, cos, sin)
    finally:
        triton_kernel._prepare.cache_clear()


def test_back_to_back_launches_see_each_other():
    """Programmatic dependent launch starts a kernel early: it must still wait for what the one before wrote."""
    packed = packed_qkv(2048, 16, 72, torch.float32)
    cos, sin = angles(2048, 72)
    wanted = packed[:, 0].clone(), packed[:, 1].clone()
    for _ in range(60):
        wanted = fused_qk_rope_reference(*wanted, cos, sin)
        wanted = wanted[0].add(1.0), wanted[1]
    torch.cuda.synchronize()
    q, k = packed[:, 0], packed[:, 1]
    for _ in range(60):
        fused_qk_rope_(q, k, cos, sin)
        q.add_(1.0)
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])
    # and without another kernel between: each lets the next one start early
    for _ in range(60):
        wanted = fused_qk_rope_reference(*wanted, cos, sin)
    torch.cuda.synchronize()
    for _ in range(60):
        fused_qk_rope_(q, k, cos, sin)
    assert torch.equal(q, wanted[0])
    assert torch.equal(k, wanted[1])


def test_launches_on_the_current_stream():
    q, k, cos, sin = problem(512, 16, 72, torch.bfloat16)
    wanted = fused_qk_rope(q, k, cos, sin)
    stale = torch.zeros_like(q)
    slow = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = slow @ slow * 1e-3
        stale.copy_(q)
        result = fused_qk_rope(stale, k, cos, sin)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(result[0], wanted[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiles_without_a_graph_break(dtype):
    def rotate(packed, cos, sin):
        q, k = fused_qk_rope(packed[:, 0] * 2, packed[:, 1], cos, sin)
        return q + 1, k

    packed = packed_qkv(65, 3, 72, dtype)
    cos, sin = angles(65, 72)
    with torch.no_grad():
        wanted = rotate(packed, cos, sin)
        result = torch.compile(rotate, fullgraph=True)(packed, cos, sin)
    assert torch.equal(result[0], wanted[0])
    assert torch.equal(result[1], wanted[1])


def test_compiles_in_place_without_a_graph_break():
    def rotate(x, cos, sin):
        packed = (x + 1).unflatten(1, (3, 3, 72))
        fused_qk_rope_(packed[:, 0], packed[:, 1], cos, sin)
        return packed * 2

    x = torch.randn(65, 648, device="cuda", dtype=torch.bfloat16)
    cos, sin = angles(65, 72)
    with torch.no_grad():
        wanted = rotate(x, cos, sin)
        assert torch.equal(torch.compile(rotate, fullgraph=True)(x, cos, sin), wanted)


def test_compiled_with_cuda_graphs():
    """Inductor launches one by one, without an error, where an operator is unfit for capture; it counts these."""
    from torch._dynamo.utils import counters

    def rotate(packed, cos, sin):
        return fused_qk_rope(packed[:, 0], packed[:, 1], cos, sin)[0] * 2

    step = torch.compile(rotate, mode="reduce-overhead", fullgraph=True)
    cos, sin = angles(64, 72)
    counters["inductor"].clear()
    with torch.no_grad():
        for seed in range(5):
            packed = packed_qkv(64, 3, 72, torch.bfloat16, seed=seed)
            assert torch.equal(step(packed, cos, sin), rotate(packed, cos, sin))
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_is_captured_into_a_cuda_graph_and_replays_on_new_data():
    packed = packed_qkv(333, 16, 72, torch.bfloat16)
    cos, sin = angles(333, 72)
    fused_qk_rope(packed[:, 0], packed[:, 1], cos, sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused_qk_rope(packed[:, 0], packed[:, 1], cos, sin)
        fused_qk_rope_(packed[:, 1], packed[:, 2], cos, sin)
    for seed in (7, 8):
        packed.copy_(packed_qkv(333, 16, 72, torch.bfloat16, seed=seed))
        before = packed.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert_both_rotated(result, before[:, 0], before[:, 1], cos, sin)
        assert torch.equal(packed[:, 2], fused_qk_rope_reference(before[:, 1], before[:, 2], cos, sin)[1])


def test_the_operator_runs_the_kernel_and_not_the_reference(monkeypatch):
    from plugins.fused_qk_rope import torch_op

    def fail(*_):
        raise AssertionError("the reference ran on a GPU that has Triton")

    monkeypatch.setattr(torch_op, "fused_qk_rope_reference", fail)
    q, k, cos, sin = problem(7, 3, 72, torch.bfloat16)
    fused_qk_rope(q, k, cos, sin)
    fused_qk_rope_(q, k, cos, sin)


def test_launches_one_kernel():
    q, k, cos, sin = problem(333, 16, 72, torch.bfloat16)
    with torch.no_grad():
        fused_qk_rope(q, k, cos, sin)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            fused_qk_rope(q, k, cos, sin)
            torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name[:31] for name in kernels if "Memset" not in name] == ["fused_qk_rope_bf16_h16_d72_v8_b"]


def test_gradients_equal_those_of_the_reference():
    packed = packed_qkv(50, 3, 72, torch.float32)
    cos, sin = angles(50, 72)
    weights = torch.randn(2, 50, 3, 72, device="cuda")

    def gradients(rotate):
        q, k = (packed[:, i].clone().requires_grad_() for i in (0, 1))
        rotated = rotate(q, k, cos, sin)
        return torch.autograd.grad((rotated[0] * weights[0]).sum() + (rotated[1] * weights[1]).sum(), (q, k))

    for mine, wanted in zip(gradients(fused_qk_rope), gradients(fused_qk_rope_reference), strict=True):
        assert (mine - wanted).norm() <= 2**-22 * wanted.norm()  # two roundings to fp32 each


def test_a_gradient_is_never_lost_without_a_word():
    q, k, cos, sin = problem(5, 3, 72, torch.float32)
    q = q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="carries no gradient"):
        torch.ops.kvit.fused_qk_rope(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="carries no gradient"):
        fused_qk_rope_(q, k, cos, sin)


def test_empty_inputs():
    for shape in ((0, 3, 72), (3, 0, 72), (0, 0, 0)):
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        table = torch.empty(shape[0], shape[2] // 2, device="cuda")
        result = fused_qk_rope_triton(x, x, table, table)
        assert result[0].shape == result[1].shape == shape


def test_refuses_what_it_is_not_defined_for():
    q, k, cos, sin = problem(4, 2, 72, torch.float32)
    with pytest.raises(TypeError, match="float32, float16, bfloat16"):
        fused_qk_rope_triton(q.double(), k.double(), cos, sin)
    with pytest.raises(TypeError, match="cos and sin must be float32"):
        fused_qk_rope_triton(q, k, cos.half(), sin)
    with pytest.raises(ValueError, match="one device"):
        fused_qk_rope_triton(q, k, cos.cpu(), sin)
    with pytest.raises(ValueError, match="on a CUDA or ROCm device"):
        fused_qk_rope_triton(*(x.cpu() for x in (q, k, cos, sin)))
    with pytest.raises(ValueError, match="same memory"):
        fused_qk_rope_triton(q, q, cos, sin, inplace=True)
    with pytest.raises(ValueError, match="contiguous"):
        fused_qk_rope_triton(q, k, cos, sin, out=(q, k))


SANITIZED = """
import torch
from plugins.fused_qk_rope.triton_kernel import fused_qk_rope_triton
CASES = (1, 1, 72, "bfloat16"), (5, 3, 72, "float32"), (130, 16, 72, "bfloat16"), (7, 2, 68, "float16")
for tokens, heads, head_dim, dtype in CASES:
    packed = torch.randn(tokens, 3, heads, head_dim, device="cuda").to(getattr(torch, dtype))
    cos = torch.rand(tokens, head_dim // 2, device="cuda")
    fused_qk_rope_triton(packed[:, 0], packed[:, 1], cos, cos)
    fused_qk_rope_triton(packed[:, 1], packed[:, 2], cos, cos)
    fused_qk_rope_triton(packed[:, 0], packed[:, 2], cos, cos, inplace=True)
torch.cuda.synchronize()
print("sanitized cases done")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on PATH: NOT checked")
def test_compute_sanitizer_finds_no_bad_access(tmp_path):
    script = tmp_path / "sanitized.py"
    script.write_text(SANITIZED)
    # without its cache PyTorch gives every tensor its own allocation, so that reads beyond one are seen
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report[-3000:]
    assert "sanitized cases done" in report
    assert "ERROR SUMMARY: 0 errors" in report
