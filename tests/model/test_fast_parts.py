"""Parts of the fast form on a CPU against float64: packed weights, residual with norm, MLP, attention, groups."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from model.cuda import attention
from model.cuda.encoder import linear_gelu
from model.cuda.residual_norm import NormWeights, norm_weights, residual_norm_
from model.cuda.tower import GROUP_TOKENS, FastTower
from model.cuda.weights import MASKED, BlockWeights, fits, pack, padded_head, parameter_bytes, unpadded
from model.tower import Block, build_tower, group_items
from tests.model.attention_float64 import attend_float64, draw_qkv, errors_of, limits_for
from tests.model.residual_norms import check_residual_norm
from tests.model.samples import tower_of, weights_of

# ------------------------------------------------------------------------------------------------------ packed weights


def test_padded_head_sizes():
    assert [padded_head(dim) for dim in (4, 16, 24, 32, 72, 80, 128)] == [16, 16, 32, 32, 80, 80, 128]


def block_pairs(name: str, *, wide: bool = True) -> list[tuple[Block, BlockWeights]]:
    tower = tower_of(name, torch.bfloat16).vision_tower
    packed = pack(tower) if wide else unpadded(pack(tower), tower)
    return list(zip(tower.encoder.blocks, packed.blocks, strict=True))


def test_padded_heads_are_the_model_and_exact_zeros():
    for block, packed in block_pairs("tiny"):
        wqkv, wo = packed.wqkv.view(3, 4, 32, 96), packed.wo.view(96, 4, 32)
        assert torch.equal(wqkv[:, :, :24], block.wqkv.weight.view(3, 4, 24, 96))
        assert torch.equal(wo[:, :, :24], block.wo.weight.view(96, 4, 24))
        assert not wqkv[:, :, 24:].any()
        assert not wo[:, :, 24:].any()
        assert packed.qkv_bias is not None
        bias = packed.qkv_bias.view(3, 4, 32)
        assert torch.equal(bias[:, :, :24], block.wqkv.bias.view(3, 4, 24))
        # q gets (1, 0) and k (0, 1), from which the rotation makes the mask, and v a 1 for the sum of the softmax
        spare = torch.zeros(3, 8, dtype=torch.bfloat16)
        spare[0, 0] = spare[1, 1] = spare[2, 7] = 1
        assert torch.equal(bias[:, :, 24:], spare.unsqueeze(1).expand(-1, 4, -1))


@pytest.mark.parametrize(("name", "wide"), [("tiny", True), ("tiny", False), ("tiny-k3", True)])
def test_what_needs_no_padding_is_the_towers_own(name: str, wide: bool):
    for block, packed in block_pairs(name, wide=wide):
        own = [(packed.fc0, block.mlp.fc0.weight), (packed.fc1, block.mlp.fc1.weight)]
        own += [(packed.norm0.weight, block.norm0.weight), (packed.norm1.weight, block.norm1.weight)]
        if name == "tiny":
            own += [(packed.fc0_bias, block.mlp.fc0.bias), (packed.fc1_bias, block.mlp.fc1.bias)]
            own += [(packed.wo_bias, block.wo.bias), (packed.norm0.bias, block.norm0.bias)]
        if name == "tiny-k3" or not wide:
            own += [(packed.wqkv, block.wqkv.weight), (packed.wo, block.wo.weight)]
        assert [a is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in own] == [True] * len(
            own
        )
        if name == "tiny-k3":
            assert (packed.qkv_bias, packed.wo_bias, packed.fc1_bias) == (None, None, None)
            assert torch.equal(packed.fc0_bias, torch.zeros(132, dtype=torch.bfloat16))


def test_patch_embedding_is_padded_for_aligned_loads():
    tower = tower_of("tiny", torch.bfloat16).vision_tower
    patch = pack(tower).patch
    assert patch.shape == (96, 592)
    assert patch.stride(0) * patch.element_size() % 16 == 0
    assert torch.equal(patch[:, :588], tower.patch_embed.proj.weight.flatten(1))
    assert not patch[:, 588:].any()


@pytest.mark.parametrize(
    ("name", "elements"),
    [  # the patch embedding; then wqkv, its bias and wo, or fc0's bias, of two layers
        ("tiny", 96 * 592 + 2 * (3 * 4 * 32 * 96 + 3 * 4 * 32 + 96 * 4 * 32)),
        ("tiny-k3", 96 * 592 + 2 * 132),
    ],
)
def test_parameter_bytes(name: str, elements: int):
    tower = build_tower(weights_of(name), dtype=torch.bfloat16)
    assert parameter_bytes(pack(tower.vision_tower), tower.vision_tower) == 2 * elements
    fast = tower.accelerate().fast_tower()
    assert fast is not None
    assert fast.copied_bytes == 2 * elements


def test_packing_masks_only_where_heads_have_room():
    for name, masks in (("tiny", True), ("tiny-k3", False)):
        tower = tower_of(name, torch.bfloat16).vision_tower
        packed = pack(tower)
        assert packed.masks is masks
        assert not unpadded(packed, tower).masks


def test_a_wrapped_block_is_refused_and_not_left_out():
    tower = build_tower(weights_of("tiny"), dtype=torch.bfloat16)
    blocks = tower.vision_tower.encoder.blocks
    blocks[1] = nn.ModuleList([blocks[1]])
    with pytest.raises(TypeError, match="block 1 is ModuleList"):
        pack(tower.vision_tower)


def test_dtypes_of_the_fast_form():
    dtypes = torch.bfloat16, torch.float16, torch.float32, torch.float64
    assert [fits(dtype, torch.device("cpu")) for dtype in dtypes] == [1, 1, 0, 0]
    assert not fits(torch.bfloat16, torch.device("meta"))
    with pytest.raises(ValueError, match="float32"):
        FastTower(tower_of("tiny").vision_tower)
    # the smallest number that the masking has to leave finite in fp16
    assert torch.isfinite(torch.tensor(MASKED, dtype=torch.float16))


# ---------------------------------------------------------------------------------------------------- residual and norm


@pytest.mark.parametrize("bias", [True, False], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(5, 96), (3, 1000), (2, 1152)])
def test_residual_norm_equals_float64(tokens: int, width: int, dtype: torch.dtype, bias: bool):
    check_residual_norm(tokens, width, dtype, bias=bias, device="cpu")


@pytest.mark.parametrize("eps", [1e-5, 2.0**-23, 0.5])
def test_eps_is_inside_the_root(eps: float):
    """Of a row whose mean square is of eps' own size, where its place matters."""
    x = torch.tensor([[0.5, -0.5, 0.5, -0.5]]) * eps**0.5
    out = torch.empty_like(x)
    for norm in (NormWeights(torch.ones(4), None, eps), NormWeights(torch.ones(4), torch.zeros(4), eps)):
        residual_norm_(x, None, norm, out)
        # 0.5 / sqrt(0.25 + 1)
        assert torch.allclose(out, torch.tensor([[1.0, -1.0, 1.0, -1.0]]) * 0.2**0.5, rtol=1e-6)


def test_norms_are_taken_apart_as_they_are():
    layer, rms = (tower_of(name).vision_tower.encoder.blocks[0].norm0 for name in ("tiny", "tiny-k3"))
    for norm, bias in ((layer, layer.bias), (rms, None)):
        assert norm_weights(norm).weight.data_ptr() == norm.weight.data_ptr()
        assert (norm_weights(norm).bias is None) == (bias is None)
        assert bias is None or norm_weights(norm).bias.data_ptr() == bias.data_ptr()
        assert norm_weights(norm).eps == norm.eps
    with pytest.raises(TypeError, match="BatchNorm1d"):
        norm_weights(nn.BatchNorm1d(4))


# ---------------------------------------------------------------------------------------------------------------- MLP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_gelu_is_the_tanh_form(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((40, 96), (132, 96), (132,)))
    weight = weight / 96**0.5
    got = linear_gelu(x, weight, bias).double()
    inner = x.double() @ weight.double().T + bias.double()
    tanh, exact = (F.gelu(inner, approximate=form) for form in ("tanh", "none"))
    # sums of 96 products in fp32; in bf16 the sum and the result are rounded, each by at most 2^-9 and on average 0.6
    # of that, and near 0 the slope of GELU lets the first grow a little
    assert float((got - tanh).norm() / tanh.norm()) <= (1e-6 if dtype == torch.float32 else 2.0**-8)
    assert float((exact - tanh).norm() / tanh.norm()) >= 1e-4


# ---------------------------------------------------------------------------------------------------------- attention


def padded_qkv(lengths: list[int], head_dim: int, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = draw_qkv(sum(lengths), 3, head_dim, dtype, 1.5)
    spare = (0, padded - head_dim)
    return F.pad(q, spare), F.pad(k, spare), F.pad(v, spare)


def check(output: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], head_dim: int) -> None:
    """Against float64 on each item's true elements, which knows nothing of the padded head or its scale."""
    assert output.shape == (q.shape[0], 3 * q.shape[2])
    heads = output.unflatten(1, (3, -1))
    assert not heads[..., head_dim:].any()
    items = [x[..., :head_dim].split(lengths) for x in (q, k, v)]
    exact = torch.cat([attend_float64(*parts) for parts in zip(*items, strict=True)])
    found = errors_of(heads[..., :head_dim].flatten(1), exact, 3)
    assert found.within(limits_for(q.dtype, max(lengths), head_dim, 1.5))


DIMS = [(24, 32), (72, 80), (32, 32)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "padded"), DIMS)
@pytest.mark.parametrize("lengths", [[50], [36, 36, 36], [4] * 5], ids=str)
def test_attend_equal(lengths: list[int], head_dim: int, padded: int, dtype: torch.dtype):
    q, k, v = padded_qkv(lengths, head_dim, padded, dtype)
    check(attention.attend_equal(q, k, v, len(lengths), head_dim), q, k, v, lengths, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "padded"), DIMS)
@pytest.mark.parametrize("lengths", [[50], [36, 4, 60], [4, 8] * 4], ids=str)
def test_attend_unequal(lengths: list[int], head_dim: int, padded: int, dtype: torch.dtype):
    q, k, v = padded_qkv(lengths, head_dim, padded, dtype)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    output = attention.attend_unequal(q, k, v, lengths, ends, max(lengths), head_dim)
    check(output, q, k, v, lengths, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mask_row_hides_keys(dtype: torch.dtype):
    q, k, v = padded_qkv([64], 32, 32, dtype)
    k[40:], v[40:] = 50, 1e4  # seen by mistake, these would outweigh everything
    mask = torch.zeros(64, dtype=dtype)
    mask[40:] = MASKED
    output = attention.attend_equal(q, k, v, 1, 32, mask)[:40]
    check(output, q[:40], k[:40], v[:40], [40], 32)
    seen = attention.attend_equal(q, k, v, 1, 32)[:40]
    assert float((seen - output).abs().max()) > 10


def test_pytorch_settles_its_own_order_before_ours(monkeypatch: pytest.MonkeyPatch):
    """Else leaving ours would put back an order that PyTorch was about to replace, for the whole process."""
    happened: list[str] = []
    monkeypatch.setattr(attention, "_measured", lambda _: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *_: happened.append("attention"))

    def sdpa_kernel(*_: object, set_priority: bool = False) -> contextlib.AbstractContextManager[None]:
        happened.append("our order" if set_priority else "all kernels")
        return contextlib.nullcontext()

    monkeypatch.setattr(attention, "sdpa_kernel", sdpa_kernel)
    attention._let_pytorch_choose_first.cache_clear()
    for _ in range(2):
        with attention.preferred_kernels(torch.device("cpu")):
            happened.append("call")
    attention._let_pytorch_choose_first.cache_clear()
    assert happened == ["all kernels", "attention", "our order", "call", "our order", "call"]


def test_heads_are_split_only_where_that_was_measured(monkeypatch: pytest.MonkeyPatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(attention, "_capability", lambda _: (9, 0))
    assert [width for width in range(16, 289, 16) if attention.splits_heads(gpu, width)] == [80]
    assert not attention.splits_heads(torch.device("cpu"), 80)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not attention.splits_heads(gpu, 80)
    monkeypatch.setattr(torch.version, "hip", None)
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        monkeypatch.setattr(attention, "_capability", lambda _, found=capability: found)
        assert not attention.splits_heads(gpu, 80)


def test_no_kernel_is_preferred_and_no_flash_expected_on_a_cpu():
    before = torch._C._get_sdp_priority_order()
    with attention.preferred_kernels(torch.device("cpu")):
        assert torch._C._get_sdp_priority_order() == before
    assert not attention.has_varlen("cpu")


# ------------------------------------------------------------------------------------------------------------- groups


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 400), st.integers(1, 350))
def test_long_items_are_groups_of_their_own(lengths: list[int], budget: int, alone: int):
    groups = list(group_items(lengths, budget, alone))
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    assert all(len(group) == 1 or all(lengths[index] < alone for index in group) for group in groups)
    bound = max(budget, *lengths) if lengths else budget
    sizes = [sum(lengths[index] for index in group) for group in groups]
    assert all(size <= bound for size in sizes)
    for size, group, following in zip(sizes, groups, groups[1:], strict=False):
        # a group ends for a reason
        long = lengths[group.stop - 1] >= alone or lengths[following.start] >= alone
        assert long or size + lengths[following.start] > bound


def test_groups_of_the_fast_form():
    fast = build_tower(weights_of("tiny"), dtype=torch.bfloat16).accelerate().fast_tower()
    assert fast is not None
    lengths = [100, 2047, 2048, 5000, 64, 64, 2048]
    assert [list(group) for group in fast.groups(lengths)] == [[0, 1], [2], [3], [4, 5], [6]]
    assert [len(group) for group in fast.groups([1024] * 40)] == [16, 16, 8]
    assert GROUP_TOKENS == 16 * 1024
    assert list(fast.groups([])) == []
