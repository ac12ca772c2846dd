"""The reference that every other form is measured against, itself measured against complex numbers in float64."""

from __future__ import annotations

import pytest
import torch

from plugins.fused_qk_rope.reference import fused_qk_rope_reference, rotate_pairs
from tests.plugins.rotations import DTYPES, SHAPES, arguments, assert_rotated, rotated_exactly


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_complex_numbers(dtype: torch.dtype, shape: tuple[int, int, int]):
    q, k, cos, sin = arguments(shape, dtype)
    before = q.clone(), k.clone()
    for result, x in zip(fused_qk_rope_reference(q, k, cos, sin), (q, k), strict=True):
        assert_rotated(result, x, cos, sin)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_one_pair_by_hand():
    """A quarter turn takes (1, 0) to (0, 1): pairs are adjacent, and turn from the first to the second element."""
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert rotate_pairs(x, cos, sin).tolist() == [[[0.0, 1.0, 0.0, 2.0]]]


def test_half_split_pairs_would_be_seen():
    """The control: the other common layout, where element m goes with m + d/2, is another operator."""
    q, _, cos, sin = arguments((20, 3, 72))
    first, second = q.chunk(2, -1)
    cos_, sin_ = cos.unsqueeze(1), sin.unsqueeze(1)
    other = torch.cat([first * cos_ - second * sin_, second * cos_ + first * sin_], -1)
    with pytest.raises(AssertionError):
        assert_rotated(other, q, cos, sin)
    with pytest.raises(AssertionError):
        assert_rotated(rotate_pairs(q, cos, -sin), q, cos, sin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype):
    """Arithmetic in the narrow type would be off by several of its units; assert_rotated allows half a unit."""
    q, _, cos, sin = arguments((64, 4, 72), dtype)
    narrow = rotate_pairs(q, cos.to(dtype), sin.to(dtype))
    with pytest.raises(AssertionError):
        assert_rotated(narrow, q, cos, sin)
    assert_rotated(rotate_pairs(q, cos, sin), q, cos, sin)


def test_values_beyond_fp16_in_bf16():
    """Pitfall 31: bf16 read as fp16 would be infinite here."""
    q, k, cos, sin = arguments((20, 3, 72), torch.bfloat16, scale=1e6)
    assert q.abs().max() > 65504
    for result, x in zip(fused_qk_rope_reference(q, k, cos, sin), (q, k), strict=True):
        assert torch.isfinite(result).all()
        assert_rotated(result, x, cos, sin)


def test_float64_is_honoured():
    """A reference of references: with double angles nothing is rounded to fp32 on the way."""
    q, _, cos, sin = (x.double() for x in arguments((20, 3, 72)))
    error = rotate_pairs(q, cos, sin).numpy() - rotated_exactly(q, cos, sin)
    assert abs(error).max() < 1e-14


def test_lengths_are_kept():
    q, _, cos, sin = (x.double() for x in arguments((20, 3, 72)))
    turned = rotate_pairs(q, cos, sin)
    pairs = [x.unflatten(-1, (36, 2)).norm(dim=-1) for x in (q, turned)]
    # cos and sin are fp32 numbers, so that cos^2 + sin^2 is 1 to 1e-7
    assert (pairs[0] - pairs[1]).abs().max() < 1e-6


def test_back_and_forth():
    q, _, cos, sin = (x.double() for x in arguments((20, 3, 72)))
    assert (rotate_pairs(rotate_pairs(q, cos, sin), cos, -sin) - q).abs().max() < 1e-6


def test_strided_input():
    """The tower gives slices of one wqkv result."""
    qkv = torch.randn(20, 3, 4, 24, generator=torch.Generator().manual_seed(0))
    q, k, _ = qkv.unbind(1)
    _, _, cos, sin = arguments((20, 4, 24))
    assert not q.is_contiguous()
    for result, x in zip(fused_qk_rope_reference(q, k, cos, sin), (q, k), strict=True):
        assert_rotated(result, x, cos, sin)
