"""The float64 attention that a GPU's is compared with, and whether its limits see what they must; on the CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from model.attention import attend_items
from tests.model.attention_float64 import Errors, attend_float64, draw_qkv, errors_of, limits_for
from tests.model.reference import attend

HEADS = ((16, 72), (12, 128))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STDS = (1.0, 3.0)


@pytest.mark.parametrize("rows", [1, 7, 36, 256])
@pytest.mark.parametrize("std", [*STDS, 400.0])  # exp of the last logits would overflow
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_it_is_the_formula_however_it_is_cut(heads: int, head_dim: int, std: float, rows: int):
    q, k, v = draw_qkv(36, heads, head_dim, torch.float32, std)
    expected = attend(*(x.double().numpy() for x in (q, k, v)))
    # float64's own rounding: a logit of up to 5 std is off by a few 2^-53 of itself, and its weight by that share
    np.testing.assert_allclose(attend_float64(q, k, v, rows).numpy(), expected, rtol=0, atol=1e-14 * max(std, 1))


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_logits_have_the_spread_that_is_asked_for(heads: int, head_dim: int, std: float):
    q, k, v = draw_qkv(256, heads, head_dim, torch.float32, std)
    logits = torch.einsum("shd,thd->hst", q, k) / math.sqrt(head_dim)
    assert float(logits.std()) == pytest.approx(std, rel=0.03)  # some 6000 independent rows of q and k
    assert float(v.std()) == pytest.approx(1, rel=0.03)
    assert not v.is_contiguous()


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("tokens", [4, 256])
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_live_attention_on_the_cpu_is_within_the_limits(
    dtype: torch.dtype, heads: int, head_dim: int, tokens: int, std: float
):
    q, k, v = draw_qkv(tokens, heads, head_dim, dtype, std)
    found = errors_of(attend_items(q, k, v, [tokens]), attend_float64(q, k, v), heads)
    assert found.within(limits_for(dtype, tokens, head_dim, std)), found


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Keep ten bits behind the leading one, rounded to nearest."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def in_tf32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_float64(rounded_to_tf32(q.float()), rounded_to_tf32(k.float()), rounded_to_tf32(v.float()))


def padded_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scale of the next multiple of 64, to which a kernel may pad a head."""
    padded = -(-(q.shape[-1] + 1) // 64) * 64
    return attend_float64(q.double() * math.sqrt(q.shape[-1] / padded), k, v)


def last_key_missing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As where the number of keys is no multiple of a kernel's tile."""
    wrong = attend_float64(q, k, v)
    wrong[-1] = attend_float64(q, k[:-1], v[:-1], 10**6)[-1]
    return wrong


def heads_exchanged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend_float64(q, k, v.flip(1))


def weights_in_bfloat16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    queries, keys, values = (x.double().transpose(0, 1) for x in (q, k, v))
    weights = (queries @ keys.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(-1)
    return (weights.bfloat16().double() @ values).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [
        (in_tf32, torch.float32),
        (weights_in_bfloat16, torch.float32),
        (weights_in_bfloat16, torch.float16),
        *((function, dtype) for function in (padded_scale, heads_exchanged) for dtype in DTYPES),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_limits_see_what_is_wrong(wrong, dtype: torch.dtype, heads: int, head_dim: int, std: float):
    q, k, v = draw_qkv(256, heads, head_dim, dtype, std)
    found = errors_of(wrong(q, k, v).to(dtype), attend_float64(q, k, v), heads)
    limits = limits_for(dtype, 256, head_dim, std)
    assert found.whole > 1.5 * limits.whole, (found, limits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_limits_see_one_wrong_row(dtype: torch.dtype):
    q, k, v = draw_qkv(1008, 16, 72, dtype, 3.0)
    k[-1] = q[-1]  # the key that the last query looks at
    found = errors_of(last_key_missing(q, k, v).to(dtype), attend_float64(q, k, v), 16)
    assert found.row > 2 * limits_for(dtype, 1008, 72, 3.0).row


def test_what_is_not_a_number_is_not_within():
    q, k, v = draw_qkv(4, 16, 72, torch.float32, 1.0)
    exact = attend_float64(q, k, v)
    output = exact.clone()
    output[1, 1] = math.nan
    assert not errors_of(output, exact, 16).within(limits_for(torch.float32, 4, 72, 1.0))
    assert errors_of(exact, exact, 16) == Errors(0.0, 0.0)
