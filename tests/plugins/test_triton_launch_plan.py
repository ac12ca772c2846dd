"""How launches are cut: by arithmetic on shapes and strides, checked by enumerating what a kernel would touch."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from plugins.fused_qk_rope.launch_plan import LaunchConfig, plan_launch, vector_width  # noqa: E402  torch is optional


def plan_for(q, k, cos, sin, **options):
    strides = tuple(x.stride() for x in (q, k, cos, sin))
    return plan_launch(tuple(q.shape), strides, q.element_size(), **options)


def tables(tokens, head_dim):
    return torch.zeros(tokens, head_dim // 2), torch.zeros(tokens, head_dim // 2)


@pytest.mark.parametrize(
    ("itemsize", "multiples", "width"),
    [
        (2, (72,), 8),
        (2, (128, 1152), 8),
        (2, (68,), 4),
        (2, (70,), 2),
        (4, (72,), 4),
        (4, (70,), 2),
        (2, (72, 0, 3456), 8),
        (2, (72, 3), 1),
        (2, (1 << 40,), 8),
    ],
)
def test_vectors_are_as_wide_as_all_strides_allow(itemsize, multiples, width):
    assert vector_width(itemsize, *multiples) == width


def touched(x, token_stride, head_stride, vector, parts):
    """Addresses, in elements, that the kernel's formula visits."""
    tokens, heads, _ = x.shape
    starts = itertools.product(range(tokens), range(heads), range(parts))
    return [
        (token * token_stride + head * head_stride + part) * vector + lane
        for token, head, part in starts
        for lane in range(vector)
    ]


@pytest.mark.parametrize("head_dim", [6, 64, 68, 72, 80, 96, 128])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_of_a_packed_projection_address_its_elements(head_dim, heads, dtype):
    tokens = 4
    packed = torch.arange(tokens * 3 * heads * head_dim, dtype=torch.int32).view(tokens, 3, heads, head_dim)
    q, k = packed[:, 0], packed[:, 1]
    strides = tuple(x.stride() for x in (q, k, *tables(tokens, head_dim)))
    plan = plan_launch(tuple(q.shape), strides, dtype.itemsize)
    heads_, head_dim_, vector, block = plan.constants
    assert plan.copied == (False,) * 4
    assert plan.scalars[0] == tokens
    assert (heads_, head_dim_) == (heads, head_dim)
    assert vector * dtype.itemsize <= 16
    flat = packed.flatten()
    for x, token_stride, head_stride in ((q, *plan.scalars[1:3]), (k, *plan.scalars[3:5])):
        offsets = touched(x, token_stride, head_stride, vector, head_dim // vector)
        assert flat[x.storage_offset() :][offsets].tolist() == x.flatten().tolist()
    assert plan.scalars[5] * vector // 2 == plan.scalars[6] * vector // 2 == head_dim // 2
    assert (plan.grid[0] - 1) * block < tokens * heads * head_dim // vector <= plan.grid[0] * block


def test_d_72_takes_whole_vectors_of_16_bytes_and_no_padding():
    packed = torch.empty(4096, 3, 16, 72, dtype=torch.bfloat16, device="meta")
    plan = plan_for(packed[:, 0], packed[:, 1], *tables(4096, 72))
    assert plan.constants[2] == 8
    assert plan.grid[0] * plan.constants[3] == 4096 * 16 * 9


def test_copies_exactly_what_it_cannot_address():
    odd = torch.empty(5, 3, 73)[..., :72]
    spread = torch.empty(5, 3, 144)[..., ::2]
    plain = torch.empty(5, 3, 72)
    cos, sin = tables(5, 72)
    columns = torch.empty(36, 5).t()
    assert plan_for(odd, plain, cos, sin).copied == (True, False, False, False)
    assert plan_for(plain, spread, cos, sin).copied == (False, True, False, False)
    assert plan_for(plain, plain, columns, sin).copied == (False, False, True, False)
    assert plan_for(plain, plain, cos, columns).copied == (False, False, False, True)
    # angles come one by one, so an odd stride of theirs is no obstacle
    assert plan_for(plain, plain, torch.empty(5, 37)[:, :36], sin).copied == (False,) * 4
    assert plan_for(plain.expand(5, 3, 72), torch.empty(1, 1, 72).expand(5, 3, 72), cos, sin).copied == (False,) * 4


def test_strides_over_one_element_do_not_count():
    lonely = torch.empty(1, 1, 73).as_strided((1, 1, 72), (73, 73, 1))
    assert plan_for(lonely, lonely, *tables(1, 72)).copied == (False,) * 4


def test_strides_beyond_int32_are_copied_and_large_totals_are_not():
    huge = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided((3, 2, 72), (1 << 31, 72, 1))
    large = torch.empty(1, dtype=torch.bfloat16, device="meta").as_strided((3, 2, 72), ((1 << 31) - 8, 72, 1))
    assert plan_for(huge, huge, *tables(3, 72)).copied == (True, True, False, False)
    plan = plan_for(large, large, *tables(3, 72))
    assert plan.copied == (False,) * 4
    assert max(plan.scalars) < 1 << 31


@pytest.mark.parametrize("tokens", [1 << 20, 1 << 24, (1 << 28) + 3])
def test_no_launch_counts_beyond_int32(tokens):
    q = torch.empty(tokens, 16, 72, dtype=torch.bfloat16, device="meta")
    cos = torch.empty(tokens, 36, device="meta")
    plan = plan_for(q, q, cos, cos)
    step = plan.tokens_per_launch or tokens
    assert bool(plan.tokens_per_launch) == (tokens * 144 + plan.constants[3] > 1 << 31)
    assert plan.grid[0] * plan.constants[3] <= 1 << 31
    assert plan.grid[0] * plan.constants[3] >= step * 144


def test_other_launch_sizes_change_the_cut_alone():
    q = torch.empty(100, 2, 64, dtype=torch.float16)
    plan = plan_for(q, q, *tables(100, 64), config=LaunchConfig(threads=32, vectors_per_thread=2))
    assert plan.threads == 32
    assert plan.constants == (2, 64, 8, 64)
    assert plan.grid == (25, 1, 1)
