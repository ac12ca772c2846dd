"""The operator as PyTorch sees it, on a CPU: numbers, tracing, gradients, in-place form and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plugins.fused_qk_rope.torch_op import fused_qk_rope, fused_qk_rope_
from tests.plugins.rotations import DTYPES, SHAPES, arguments, assert_rotated

FORMS = [fused_qk_rope, fused_qk_rope_]
RAW = torch.ops.kvit.fused_qk_rope.default
RAW_IN_PLACE = torch.ops.kvit.fused_qk_rope_.default


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_float64(dtype: torch.dtype, shape: tuple[int, int, int]):
    q, k, cos, sin = arguments(shape, dtype)
    before = q.clone(), k.clone()
    for form in (fused_qk_rope, RAW):
        for result, x in zip(form(q, k, cos, sin), before, strict=True):
            assert_rotated(result, x, cos, sin)
            assert result.is_contiguous()
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_equals_float64(dtype: torch.dtype, shape: tuple[int, int, int]):
    q, k, cos, sin = arguments(shape, dtype)
    before = q.clone(), k.clone()
    assert fused_qk_rope_(q, k, cos, sin) is None
    for result, x in zip((q, k), before, strict=True):
        assert_rotated(result, x, cos, sin)


def test_slices_of_one_result():
    """q and k as the tower has them: views of wqkv, each strided; in place, v between them stays."""
    qkv = torch.randn(20, 3, 4, 24, generator=torch.Generator().manual_seed(0))
    before = qkv.clone()
    q, k, _ = qkv.unbind(1)
    _, _, cos, sin = arguments((20, 4, 24))
    for result, x in zip(fused_qk_rope(q, k, cos, sin), (q, k), strict=True):
        assert_rotated(result, x, cos, sin)
    fused_qk_rope_(q, k, cos, sin)
    assert_rotated(qkv[:, 0], before[:, 0], cos, sin)
    assert_rotated(qkv[:, 1], before[:, 1], cos, sin)
    assert torch.equal(qkv[:, 2], before[:, 2])


def test_q_and_k_may_be_one_tensor_unless_in_place():
    q, _, cos, sin = arguments((20, 3, 24))
    first, second = fused_qk_rope(q, q, cos, sin)
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()
    with pytest.raises(ValueError, match="same memory"):
        fused_qk_rope_(q, q, cos, sin)


def test_expanded_tensors_have_no_in_place_form():
    q, k, cos, sin = arguments((20, 3, 24))
    for pair in ((q[:, :1].expand(20, 3, 24), k), (q, k[:1].expand(20, 3, 24))):
        with pytest.raises(ValueError, match="expanded"):
            fused_qk_rope_(*pair, cos, sin)
    assert_rotated(fused_qk_rope(q[:1].expand(20, 3, 24), k, cos, sin)[0], q[:1].expand(20, 3, 24), cos, sin)


# ------------------------------------------------------------------------------------------------------------ tracing


@pytest.mark.parametrize("shape", [(6, 2, 24), (4, 3, 72)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype, shape: tuple[int, int, int]):
    """PyTorch's own examination: schema, autograd registration, fake form, tracing with symbolic sizes."""
    for raw in (RAW, RAW_IN_PLACE):
        results = torch.library.opcheck(raw, arguments(shape, dtype))
        assert len(results) >= 4
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fake_form_gives_shape_dtype_and_strides(dtype: torch.dtype):
    real = arguments((6, 2, 24), dtype)
    strided = real[0].transpose(0, 1).contiguous().transpose(0, 1)
    expected = RAW(strided, *real[1:])
    with FakeTensorMode() as mode:
        fake = RAW(mode.from_tensor(strided), *map(mode.from_tensor, real[1:]))
        assert RAW_IN_PLACE(mode.from_tensor(strided), *map(mode.from_tensor, real[1:])) is None
    meta = RAW(*(x.to("meta") for x in (strided, *real[1:])))
    for traced in (fake, meta):
        for ours, theirs in zip(traced, expected, strict=True):
            assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


def test_export_keeps_one_node():
    class Rotate(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            return fused_qk_rope(q, k, cos, sin)

    tokens = torch.export.Dim("tokens", min=2)
    program = torch.export.export(Rotate(), arguments((6, 2, 24)), dynamic_shapes=({0: tokens},) * 4)
    called = [node.target for node in program.graph.nodes if node.op == "call_function" and node.target is RAW]
    assert called == [RAW]
    q, k, cos, sin = arguments((36, 2, 24))
    assert_rotated(program.module()(q, k, cos, sin)[0], q, cos, sin)


# ----------------------------------------------------------------------------------------------------------- gradients


def test_gradient_equals_finite_differences():
    """The function takes fp32 at most, so the step is 2**-6 and exact, and the map is linear: no truncation error."""
    q, k, cos, sin = arguments((3, 2, 8))
    q.requires_grad_()
    k.requires_grad_()
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(q.shape, generator=generator) for _ in range(2)]

    def loss(q: Tensor, k: Tensor) -> Tensor:
        return sum((w * x).double().sum() for w, x in zip(weights, fused_qk_rope(q, k, cos, sin), strict=True))

    loss(q, k).backward()
    step = 2.0**-6
    for which, x in enumerate((q, k)):
        for index in range(0, x.numel(), 5):
            moved = []
            for sign in (1, -1):
                with torch.no_grad():
                    other = x.detach().clone()
                    other.view(-1)[index] += sign * step
                    moved.append(loss(*((other, k) if which == 0 else (q, other))))
            # the loss is a sum of 96 fp32 numbers below 10, exact to 1e-6 each; the step divides that by 2**-5
            assert x.grad.view(-1)[index].item() == pytest.approx(float(moved[0] - moved[1]) / (2 * step), abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_is_the_rotation_back(dtype: torch.dtype):
    q, k, cos, sin = arguments((20, 3, 24), dtype)
    gradients, _, _, _ = arguments((20, 3, 24), dtype, scale=2)
    q.requires_grad_()
    fused_qk_rope(q, k, cos, sin)[0].backward(gradients)
    assert_rotated(q.grad, gradients, cos, -sin)


def test_second_gradient():
    q, k, cos, sin = arguments((4, 2, 8))
    q.requires_grad_()
    (first,) = torch.autograd.grad((fused_qk_rope(q, k, cos, sin)[0] ** 2).sum() / 2, q, create_graph=True)
    # |rotated|^2 / 2 has the gradient q, so the gradient of its sum is all ones
    (second,) = torch.autograd.grad(first.sum(), q)
    assert (first - q).abs().max() < 1e-5
    assert (second - 1).abs().max() < 1e-5


def test_no_gradient_is_lost_silently():
    q, k, cos, sin = arguments((4, 2, 8))
    needs = q.clone().requires_grad_()
    for call in (RAW, RAW_IN_PLACE, fused_qk_rope_):
        with pytest.raises(RuntimeError, match="gradient"):
            call(needs, k, cos, sin)
        with pytest.raises(RuntimeError, match="gradient"):
            call(q, needs, cos, sin)
    with pytest.raises(RuntimeError, match="cos and sin"):
        fused_qk_rope(needs, k, cos.clone().requires_grad_(), sin)
    with pytest.raises(RuntimeError, match="cos and sin"):
        fused_qk_rope(q, k, cos, sin.clone().requires_grad_())
    with torch.no_grad():
        assert_rotated(RAW(needs, k, cos, sin)[0], q, cos, sin)
    assert not fused_qk_rope(q, k, cos, sin)[0].requires_grad


def test_autograd_notices_the_in_place_form():
    """A tensor that a graph has saved must not be changed behind its back."""
    q, k, cos, sin = arguments((4, 2, 8))
    weight = torch.ones(8, requires_grad=True)
    product = (q * weight).sum()  # saves q
    fused_qk_rope_(q, k, cos, sin)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# ------------------------------------------------------------------------------------------------------------ refusals

Change = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Any, ...]]
REFUSED: list[tuple[str, Change, type[Exception], list[str]]] = [
    ("q and k differ", lambda q, k, c, s: (q, k[:, :1], c, s), ValueError, ["(6, 2, 8)", "(6, 1, 8)"]),
    ("two dimensions", lambda q, k, c, s: (q[:, 0], k[:, 0], c, s), ValueError, ["[tokens, heads, even d]", "(6, 8)"]),
    ("four dimensions", lambda q, k, c, s: (q[None], k[None], c, s), ValueError, ["(1, 6, 2, 8)"]),
    ("odd head", lambda q, k, c, s: (q[..., :7], k[..., :7], c, s), ValueError, ["even d", "(6, 2, 7)"]),
    ("whole angles", lambda q, k, c, s: (q, k, c.repeat(1, 2), s.repeat(1, 2)), ValueError, ["(6, 4)", "(6, 8)"]),
    ("short cos", lambda q, k, c, s: (q, k, c[:5], s), ValueError, ["(6, 4)", "(5, 4)"]),
    ("short sin", lambda q, k, c, s: (q, k, c, s[:, :3]), ValueError, ["(6, 4)", "(6, 3)"]),
    ("float64", lambda q, k, c, s: (q.double(), k.double(), c, s), TypeError, ["float32", "bfloat16", "float64"]),
    ("whole numbers", lambda q, k, c, s: (q.int(), k.int(), c, s), TypeError, ["int32"]),
    ("mixed", lambda q, k, c, s: (q.half(), k.bfloat16(), c, s), TypeError, ["float16", "bfloat16"]),
    ("narrow cos", lambda q, k, c, s: (q, k, c.half(), s), TypeError, ["cos and sin must be float32", "float16"]),
    ("wide sin", lambda q, k, c, s: (q, k, c, s.double()), TypeError, ["cos and sin must be float32", "float64"]),
]


@pytest.mark.parametrize(("change", "kind", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
@pytest.mark.parametrize("traced", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("form", FORMS, ids=["new", "in place"])
def test_refused(form: Any, traced: bool, change: Change, kind: type[Exception], words: list[str]):
    """With the same words when tracing, so that a wrong graph is not exported first and refused later."""
    changed = change(*arguments((6, 2, 8)))
    before = [x.clone() for x in changed]
    if traced:
        with FakeTensorMode() as mode, pytest.raises(kind) as error:
            form(*map(mode.from_tensor, changed))
    else:
        with pytest.raises(kind) as error:
            form(*changed)
    message = str(error.value)
    assert [word for word in words if not re.search(re.escape(word), message)] == []
    assert "\n" not in message
    assert all(torch.equal(x, y) for x, y in zip(changed, before, strict=True))


def test_devices_may_not_be_mixed():
    q, k, cos, sin = arguments((6, 2, 8))
    with pytest.raises(ValueError, match="one device, got meta, meta, meta and cpu"):
        fused_qk_rope(q.to("meta"), k.to("meta"), cos.to("meta"), sin)
