"""Attention on a real GPU against float64: as the live tower calls it, and each of PyTorch's back ends by itself.

16 heads of 72 are checked by themselves, since kernels pad such heads. What was measured is recorded beside what is
allowed (``--junitxml FILE -o junit_family=legacy``).
"""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: attention was NOT run")

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA GPU here: attention was NOT run on hardware"),
]

from torch.nn import functional as F  # noqa: E402, N812  these need PyTorch
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from model.attention import attend_fused, attend_items, attend_plain, attention_scale  # noqa: E402
from tests.model.attention_float64 import attend_float64, draw_qkv, errors_of, limits_for  # noqa: E402

HEADS = ((16, 72), (12, 128))
TOKENS = (4, 256, 1008, 4096)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
STDS = (1.0, 3.0)  # of the logits
HALF = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
BACKENDS = [
    (backend, dtype) for dtype in DTYPES for backend in (HALF[2:] if dtype == torch.float32 else HALF)
]  # cuDNN and flash take no fp32


def at_every_size(function):
    for mark in (
        pytest.mark.parametrize("std", STDS),
        pytest.mark.parametrize("tokens", TOKENS),
        pytest.mark.parametrize(("heads", "head_dim"), HEADS),
    ):
        function = mark(function)
    return function


@pytest.fixture(autouse=True)
def no_tf32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def check(record_property):
    """Compare with float64, and write down what was measured."""

    def compare(output, q, k, v, std):
        tokens, heads, head_dim = q.shape
        assert output.dtype == q.dtype
        assert output.shape == (tokens, heads * head_dim)
        found, limits = errors_of(output, attend_float64(q, k, v), heads), limits_for(q.dtype, tokens, head_dim, std)
        for name in ("whole", "row"):
            record_property(f"{name}, measured", getattr(found, name))
            record_property(f"{name}, allowed", getattr(limits, name))
        assert found.within(limits), f"{found}, allowed {limits}"

    return compare


def attend_by(backend, q, k, v):
    """One back end by itself, [tokens, heads, d] -> [tokens, heads * d]; skips where PyTorch says that it has none."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(backend), warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            output = F.scaled_dot_product_attention(query, key, value, scale=attention_scale(q.shape[-1]))
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            why = "; ".join(dict.fromkeys(str(reason.message).partition(" (Triggered")[0] for reason in reasons))
            pytest.skip(f"{backend.name} was NOT checked, PyTorch {torch.__version__} has no such kernel here: {why}")
    return output.squeeze(0).transpose(0, 1).flatten(1)


@at_every_size
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_live_attention(check, dtype, heads, head_dim, tokens, std):
    q, k, v = draw_qkv(tokens, heads, head_dim, dtype, std, "cuda")
    check(attend_items(q, k, v, [tokens]), q, k, v, std)


@at_every_size
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=lambda value: getattr(value, "name", None) or str(value))
def test_each_back_end(check, backend, dtype, heads, head_dim, tokens, std):
    q, k, v = draw_qkv(tokens, heads, head_dim, dtype, std, "cuda")
    check(attend_by(backend, q, k, v), q, k, v, std)


@at_every_size
def test_the_exported_forms_in_fp32(check, heads, head_dim, tokens, std):
    """In half precision the plain form rounds its logits too, so only fp32 has these limits."""
    q, k, v = draw_qkv(tokens, heads, head_dim, torch.float32, std, "cuda")
    check(attend_plain(q, k, v, None), q, k, v, std)
    check(attend_fused(q, k, v, None), q, k, v, std)


@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_items_of_one_call(check, dtype, heads, head_dim):
    q, k, v = draw_qkv(sum(TOKENS), heads, head_dim, dtype, 3.0, "cuda")
    output = attend_items(q, k, v, TOKENS)
    for item in zip(*(x.split(TOKENS) for x in (output, q, k, v)), strict=True):
        check(*item, 3.0)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS)
def test_tf32_would_be_seen(monkeypatch, heads, head_dim, std):
    """With TF32 on, the very calls above are outside their limits, so a pass says that it was off."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32: it was NOT shown that the limits see it")
    q, k, v = draw_qkv(4096, heads, head_dim, torch.float32, std, "cuda")
    exact, limits = attend_float64(q, k, v), limits_for(torch.float32, 4096, head_dim, std)
    assert errors_of(attend_by(SDPBackend.MATH, q, k, v), exact, heads).within(limits)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert errors_of(attend_by(SDPBackend.MATH, q, k, v), exact, heads).whole > 2 * limits.whole
