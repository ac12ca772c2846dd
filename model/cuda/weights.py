"""The tower's weights as the fast form wants them: heads padded for the attention kernels, patches for aligned loads.

Everything that needs no padding is the tower's own tensor and not a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from model.config import PATCH_VALUES
from model.cuda.residual_norm import NormWeights, norm_weights
from model.norm import RMSNorm
from model.platform import say_once
from model.tower import MLP, Block, Encoder, PatchEmbed, PositionTable, VisionTower

# Rows of 588 values are no multiple of 16 bytes, for which cuBLAS has only kernels that take four times as long.
PADDED_PATCH_VALUES = 592
# What a padded key's logit is before scaling, exact in bf16 and in fp16. Times the scale of any head size up to 128 it
# is below -2600, whose exponential is 0 in fp32 whatever the other logits of a sane tower are.
MASKED = -29952.0
_HEAD_MULTIPLE = 16


def padded_head(head_dim: int) -> int:
    """Head size that attention kernels run at full speed: 72 becomes 80 (6 % faster at 16384 tokens on an H200)."""
    return -(-head_dim // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


@dataclass(frozen=True)
class BlockWeights:
    """Weights of one block; see :class:`PackedTower`. A bias is None where the family has none."""

    norm0: NormWeights
    wqkv: Tensor
    qkv_bias: Tensor | None
    wo: Tensor
    wo_bias: Tensor | None
    norm1: NormWeights
    fc0: Tensor
    fc0_bias: Tensor
    fc1: Tensor
    fc1_bias: Tensor | None


@dataclass(frozen=True)
class PackedTower:
    """Weights of a tower.

    Attributes:
        heads: of attention.
        head_dim: the model's; the scale of the logits follows it.
        padded: elements of a head in wqkv's output and wo's input.
        patch: [hidden_size, 592] of the patch embedding, whose bias is part of the positions.
        blocks: one an encoder block; wqkv [3 * heads * padded, hidden_size], wo [hidden_size, heads * padded].
        final: the norm after the last block.
    """

    heads: int
    head_dim: int
    padded: int
    patch: Tensor
    blocks: tuple[BlockWeights, ...]
    final: NormWeights

    @property
    def masks(self) -> bool:
        """Whether heads have room for the elements by which padded keys are masked; see :func:`_pad_qkv_bias`."""
        return self.padded > self.head_dim

    @property
    def sums(self) -> bool:
        """Whether the last element of each head of v is 1, so that a product sums the softmax beside the rest."""
        return self.padded > self.head_dim + 2


def pack(tower: VisionTower) -> PackedTower:
    """Pack a tower's weights; copies are made of the patch embedding and, with padded heads, of wqkv and wo.

    Raises:
        TypeError: a part was replaced or wrapped, so that its tensors are not all it computes with.
    """
    _check_parts(tower)
    config = tower.config
    weight = tower.patch_embed.proj.weight.detach().flatten(1)
    patch = weight.new_zeros(weight.shape[0], PADDED_PATCH_VALUES)
    patch[:, :PATCH_VALUES] = weight
    dim = config.head_dim
    padded = padded_head(dim)
    return PackedTower(
        config.num_attention_heads,
        dim,
        padded,
        patch,
        _pack_blocks(tower, padded),
        norm_weights(tower.encoder.final_layernorm),
    )


def unpadded(packed: PackedTower, tower: VisionTower) -> PackedTower:
    """Return the same with heads as they are, for calls that neither mask nor gain by padding: no copies."""
    return replace(packed, padded=packed.head_dim, blocks=_pack_blocks(tower, packed.head_dim))


# What a tower is made of. Exactly these: a class derived from one, as sharding and parametrisations make it, computes
# something else than the tensors say.
_PARTS = (VisionTower, PatchEmbed, nn.Conv2d, PositionTable, Encoder, nn.ModuleList, Block, MLP, nn.Linear)
_NORMS = (nn.LayerNorm, RMSNorm)


def _check_parts(tower: VisionTower) -> None:
    """Refuse a tower whose parts are not all its own, have hooks, or hold other tensors than plain ones."""
    for name, module in tower.named_modules():
        if any(_hooks(module)):
            raise TypeError(f"{name or 'the tower'} has hooks, which the fast form would not run")
        if type(module) not in _PARTS + _NORMS:
            kind = type(module).__name__
            raise TypeError(f"{name or 'the tower'} is a {kind}, of which the fast form knows nothing")
        for key, tensor in module._parameters.items():
            if tensor is not None and type(tensor) not in (nn.Parameter, Tensor):
                raise TypeError(f"{name}.{key} is a {type(tensor).__name__} and no plain tensor")


def _hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    return module._forward_hooks, module._forward_pre_hooks


def _pack_blocks(tower: VisionTower, padded: int) -> tuple[BlockWeights, ...]:
    packed = []
    for index, block in enumerate(tower.encoder.blocks):
        if not isinstance(block, Block):
            raise TypeError(f"block {index} is {type(block).__name__}: the fast form packs only the tower's own blocks")
        packed.append(_pack_block(block, padded))
    return tuple(packed)


def _pack_block(block: Block, padded: int) -> BlockWeights:
    heads = block.heads
    dim = block.wqkv.weight.shape[0] // (3 * heads)
    fc0 = block.mlp.fc0
    # bias and activation are one epilogue of the product, which has no form without the bias
    fc0_bias = fc0.weight.new_zeros(fc0.weight.shape[0]) if fc0.bias is None else fc0.bias
    wqkv, wo = block.wqkv.weight.detach(), block.wo.weight.detach()
    qkv_bias: Tensor | None = block.wqkv.bias
    if padded > dim:
        wqkv = _pad(wqkv.view(3, heads, dim, -1), 2, padded).flatten(0, 2)
        wo = _pad(wo.view(-1, heads, dim), 2, padded).flatten(1)
        qkv_bias = _pad_qkv_bias(block.wqkv.weight, qkv_bias, heads, padded)
    # detached tensors share the memory and keep it, also when a parameter gets another: a graph may still read it
    return BlockWeights(
        norm_weights(block.norm0),
        wqkv,
        _detached(qkv_bias),
        wo,
        _detached(block.wo.bias),
        norm_weights(block.norm1),
        fc0.weight.detach(),
        fc0_bias.detach(),
        block.mlp.fc1.weight.detach(),
        _detached(block.mlp.fc1.bias),
    )


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _pad(x: Tensor, axis: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[axis] = size
    padded = x.new_zeros(shape)
    padded.narrow(axis, 0, x.shape[axis]).copy_(x.detach())
    return padded


def _pad_qkv_bias(weight: Tensor, bias: Tensor | None, heads: int, padded: int) -> Tensor:
    """Bias with the first two spare elements of a head set to (1, 0) in q and (0, 1) in k, and the last of v to 1.

    The two are one more pair for the rotation, with cos 1 and sin 0 at a token, which leaves their product 0, and with
    sin -MASKED at padding, which turns the key to (MASKED, 1): no query sees it, at no cost. What comes of the 1, which
    :mod:`model.cuda.split_head_kernel` wants, meets a 0 in wo.
    """
    dim = weight.shape[0] // (3 * heads)
    packed = weight.new_zeros(3, heads, padded)
    if bias is not None:
        packed[:, :, :dim] = bias.detach().view(3, heads, dim)
    packed[0, :, dim] = 1
    packed[1, :, dim + 1] = 1
    if padded > dim + 2:
        packed[2, :, -1] = 1
    return packed.flatten()


def parameter_bytes(packed: PackedTower, tower: VisionTower) -> int:
    """Bytes of the copies that the packing made."""
    own = {p.data_ptr() for p in tower.parameters()}
    tensors = [packed.patch]
    for block in packed.blocks:
        tensors += [t for t in (block.wqkv, block.qkv_bias, block.wo, block.fc0_bias) if t is not None]
    return sum(t.nbytes for t in tensors if t.data_ptr() not in own)


class Contents:
    """What a tower computes with: its modules, and address and version counter of their parameters.

    It sees what changes weights where they lie (an optimiser, ``load_state_dict`` of a part or of a model around the
    tower), what exchanges them (``to``, ``torch.func.functional_call``), what exchanges or wraps modules (LoRA), and
    new hooks.
    It does not see writing through ``.data`` or into inference tensors, for PyTorch does not count that.

    Attributes:
        tower: that it looks at.
    """

    def __init__(self, tower: VisionTower) -> None:
        """Remember a tower."""
        self.tower = tower
        # the modules' dictionaries, since walking the modules takes ten times as long
        self._modules = [module._modules for module in tower.modules() if module._modules]
        self._parameters = [module._parameters for module in tower.modules() if not module._modules]
        self._hooks = [hooks for module in tower.modules() for hooks in _hooks(module)]
        self._seen = self._look()
        # kept, for what is freed may leave its address to what takes its place
        self._kept = [tensor.detach() for tensor in self._tensors()]

    def changed(self) -> bool:
        """Whether it computes something else than it did."""
        return any(self._hooks) or self._look() != self._seen

    def need_gradient(self) -> bool:
        """Whether any of them is to be trained."""
        return any(tensor.requires_grad for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [tensor for held in self._parameters for tensor in held.values() if tensor is not None]

    def _look(self) -> tuple[list[nn.Module | None], list[int], list[int]]:
        modules = [module for held in self._modules for module in held.values()]
        tensors = self._tensors()
        try:
            versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
            return modules, [tensor.data_ptr() for tensor in tensors], versions
        except RuntimeError:  # tensors without memory of their own, for which the tower is not packed
            return modules, [], []


def fits(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the fast form computes so, which needs Triton on a GPU.

    fp32 stays with the plain tower, which is the reference.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    return device.type == "cpu" or (device.type == "cuda" and _compiles_for(device))


@lru_cache(maxsize=64)
def _compiles_for(device: torch.device) -> bool:
    try:
        from model.cuda.residual_norm_kernel import compiles_for
    except ImportError:
        say_once("the tower runs in its plain form on this GPU for want of Triton; pip install triton")
        return False
    return compiles_for(device)
