"""The kernel for heads of two parts on a real GPU, against float64, and the tower that takes it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: the kernel was NOT run")

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_GPU, reason="no CUDA GPU here: the kernel for heads of two parts was NOT run on hardware"
    ),
    pytest.mark.skipif(
        HAS_GPU and torch.cuda.get_device_capability() != (9, 0),
        reason="not compute capability 9.0, for which alone the kernel for heads of two parts was measured",
    ),
]

from model.cuda import attention  # noqa: E402
from model.cuda.split_head_kernel import split_head_attention  # noqa: E402
from tests.model.attention_float64 import attend_float64, draw_qkv, errors_of, limits_for  # noqa: E402

HEADS, DIM, PADDED = 16, 72, 80


def packed_qkv(tokens, hidden, dtype, std):
    """What the tower's projection and rotation leave: keys from ``hidden`` on are masked, a spare element of v is 1."""
    guard = torch.full((tokens + 128, 3, HEADS, PADDED), float("nan"), dtype=dtype, device="cuda")
    packed = guard[64:-64]
    packed.zero_()
    for index, x in enumerate(draw_qkv(tokens, HEADS, DIM, dtype, std, "cuda")):
        packed[:, index, :, :DIM] = x
    packed[:, 0, :, DIM] = packed[:, 2, :, -1] = 1
    packed[:hidden, 1, :, DIM + 1] = 1
    packed[hidden:, 1, :, DIM] = -29952
    return packed.unbind(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [1.0, 3.0])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(("tokens", "hidden"), [(64, 4), (192, 180), (2048, 2048), (3072, 2952), (4096, 4092)])
def test_it_is_as_near_to_float64_as_its_roundings_allow(tokens, hidden, rows, dtype, std):
    q, k, v = packed_qkv(tokens, hidden, dtype, std)
    out = split_head_attention(q, k, v, DIM, rows).unflatten(1, (HEADS, PADDED))
    assert bool(out.isfinite().all())
    assert bool((out[..., -1] == 1).all())
    exact = attend_float64(*(x[:hidden, :, :DIM] for x in (q, k, v)))
    found = errors_of(out[:hidden, :, :DIM].flatten(1), exact, HEADS)
    limits = limits_for(dtype, hidden, DIM, std)
    assert found.within(limits), f"{found}, allowed {limits}"


def test_the_same_call_gives_the_same_bits():
    q, k, v = packed_qkv(4096, 4000, torch.bfloat16, 1.0)
    assert torch.equal(split_head_attention(q, k, v, DIM), split_head_attention(q, k, v, DIM))


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 36, 46), (1, 64, 64), (1, 6, 512), (1, 70, 92), (2, 46, 36)])
def test_the_tower_takes_it_for_one_item(grid, monkeypatch):
    """And rows are those of the tower without it, but for roundings."""
    from model.checkpoint import open_source
    from model.tower import build_tower

    weights = open_source("random:kimi-k2.5?layers=2")
    exact = build_tower(weights, dtype=torch.float32, device="cuda")
    plain = build_tower(weights, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(sum(grid))
    pixels = torch.rand(grid[0] * grid[1] * grid[2], 588, generator=generator, device="cuda") * 2 - 1
    want = exact(pixels, torch.tensor([grid]))[0].double()

    def error(tower):
        return float((tower(pixels, torch.tensor([grid]))[0].double() - want).norm() / want.norm())

    taken = []
    monkeypatch.setattr(
        attention, "attend_split_heads", lambda *a, **k: taken.append(1) or split_head_attention(*a, **k)
    )
    floor = error(plain)
    # what the fast form promises; it has fewer roundings between the products (docs/benchmarks.md, Errors)
    assert error(plain.accelerate()) <= 1.2 * floor
    assert taken
