"""Attention in its three forms against float64 loops; items do not see each other; the scale is the true head's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from model.attention import additive_mask, attend_fused, attend_items, attend_plain, attention_scale, segment_mask
from tests.model.reference import attend

HEAD_DIMS = (72, 128, 24)
LENGTHS = (4, 36, 20, 12)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Error over the largest value. In fp32 a logit of 8 is off by 1e-6, and its weight by that share. In half precision
# q, k and v are given, but logits, weights and result may each be rounded: 4 eps.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4 * 2**-10, torch.bfloat16: 4 * 2**-7}


def qkv(tokens: int, head_dim: int, dtype: torch.dtype = torch.float32, heads: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + head_dim)
    q, k, v = (torch.randn(tokens, heads, head_dim, generator=generator) for _ in range(3))
    return [x.to(dtype) for x in (1.4 * q, 1.4 * k, v)]


def exact(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> np.ndarray:
    parts = (x.double().numpy() for x in (q, k, v))
    cuts = np.cumsum(lengths)[:-1]
    return np.concatenate([attend(*item) for item in zip(*(np.split(part, cuts) for part in parts), strict=True)])


def items_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def forms(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Every form that can compute these items."""
    allowed = segment_mask(items_of(lengths))
    results = {
        "items": attend_items(q, k, v, lengths),
        "plain": attend_plain(q, k, v, additive_mask(allowed, q.dtype)),
        "fused": attend_fused(q, k, v, allowed),
    }
    if len(lengths) == 1:
        results |= {"plain, no mask": attend_plain(q, k, v, None), "fused, no mask": attend_fused(q, k, v, None)}
    return results


@pytest.mark.parametrize("lengths", [(4,), (36,), (100,), LENGTHS, (4, 4, 4)], ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_form_equals_loops_in_float64(dtype: torch.dtype, head_dim: int, lengths: tuple[int, ...]):
    q, k, v = qkv(sum(lengths), head_dim, dtype)
    expected = exact(q, k, v, lengths)
    for form, result in forms(q, k, v, lengths).items():
        assert result.dtype == dtype, form
        assert result.shape == expected.shape, form
        error = np.abs(result.double().numpy() - expected).max() / np.abs(expected).max()
        assert error <= TOLERANCE[dtype], form


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_item_changes_no_bit(dtype: torch.dtype):
    """The mask turns other items' weights into exactly 0, also where their logits are far above an item's own."""
    q, k, v = qkv(sum(LENGTHS), 72, dtype)
    before = forms(q, k, v, LENGTHS)
    own = items_of(LENGTHS) == 1
    for x in (q, k, v):
        x[~own] = 20 * x[~own] + 3
    after = forms(q, k, v, LENGTHS)
    for form, result in after.items():
        assert torch.equal(result[own], before[form][own]), form
        assert not torch.equal(result[~own], before[form][~own]), form


@pytest.mark.parametrize("lengths", [(4,), (4, 4), LENGTHS])
def test_mask_allows_an_item_its_own_tokens_and_no_row_is_empty(lengths: tuple[int, ...]):
    allowed = segment_mask(items_of(lengths))
    assert torch.equal(allowed, torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool())
    assert allowed.any(1).all()
    assert allowed.diagonal().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_additive_mask_is_finite_and_leaves_nothing(dtype: torch.dtype):
    mask = additive_mask(segment_mask(items_of((4, 8))), dtype)
    assert mask.dtype == dtype
    assert torch.isfinite(mask).all()
    assert (mask[:4, :4] == 0).all()
    assert (mask[4:, 4:] == 0).all()
    # the largest logit that fp16 could hold beside an ordinary one
    logits = torch.zeros(12, 12, dtype=dtype)
    logits[:4, 4:] = 1000
    weights = (logits + mask).softmax(-1)
    assert (weights[:4, 4:] == 0).all()
    assert torch.isfinite(weights).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scale_is_that_of_the_true_head(head_dim: int):
    assert attention_scale(head_dim) == pytest.approx(1 / np.sqrt(head_dim), rel=1e-15)


@pytest.mark.parametrize(("head_dim", "padded"), [(72, 80), (72, 96), (72, 128), (24, 32)])
def test_padded_heads_keep_the_scale(head_dim: int, padded: int):
    """A kernel may pad a head of 72 with zeros: with the scale of 72 nothing changes, with its own it would."""
    q, k, v = qkv(36, head_dim)
    wide = [F.pad(x, (0, padded - head_dim)).transpose(0, 1).unsqueeze(0) for x in (q, k, v)]

    def padded_attention(scale: float) -> np.ndarray:
        result = F.scaled_dot_product_attention(*wide, scale=scale).squeeze(0).transpose(0, 1)
        assert not result[..., head_dim:].any()
        return result[..., :head_dim].flatten(1).double().numpy()

    expected = exact(q, k, v, (36,))
    tolerance = TOLERANCE[torch.float32] * np.abs(expected).max()
    assert np.abs(padded_attention(attention_scale(head_dim)) - expected).max() <= tolerance
    assert np.abs(padded_attention(attention_scale(padded)) - expected).max() > 1000 * tolerance


def test_scale_is_always_given(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's default scale is that of the tensor it gets, which is wrong as soon as somebody pads heads."""
    scales = []
    good = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *args, **options: scales.append(options["scale"]) or good(*args, **options),
    )
    q, k, v = qkv(8, 72)
    attend_items(q, k, v, (4, 4))
    attend_fused(q, k, v, None)
    assert scales == [72**-0.5] * 3
