"""Wrong towers, by name: the mistakes that people have made with this model, each as one substitution.

They serve as directions in golden sets and as mutants in tests. A wrong model replaces one function of the model, or
changes the config or the weights; the tower itself has no switch for any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from model.config import VisionConfig
from model.tower import KimiVision, module_name
from model.weights import VisionWeights, weights_sha256

Function = Callable[..., Any]
Call = Literal["any", "clip", "several"]


@dataclass(frozen=True)
class WrongModel:
    """One mistake.

    Attributes:
        name: short, as it stands in golden sets and reports.
        fault: what somebody got wrong, for a person.
        function: ``module.function`` that is replaced; empty if none.
        replace: makes the wrong function from the right one.
        config: makes the wrong config.
        tensor: makes a wrong tensor of the given name.
        families: where the mistake exists; empty for everywhere.
        needs: the calls that show it: any, clips only, or several items only.
    """

    name: str
    fault: str
    function: str = ""
    replace: Callable[[Function], Function] = lambda right: right
    config: Callable[[VisionConfig], VisionConfig] = lambda config: config
    tensor: Callable[[str, Tensor, VisionConfig], Tensor] = lambda _name, tensor, _config: tensor
    families: tuple[str, ...] = ()
    needs: Call = "any"

    def applies(self, config: VisionConfig) -> bool:
        """Whether the mistake can be made with this tower."""
        return not self.families or config.family in self.families

    def visible(self, frames: int, items: int) -> bool:
        """Whether a call of these sizes can show it."""
        return {"any": True, "clip": frames > 1, "several": items > 1}[self.needs]

    @contextlib.contextmanager
    def substituted(self) -> Iterator[None]:
        """Make the mistake within a block; the right function is back afterwards, whatever happens."""
        if not self.function:
            yield
            return
        module_path, _, attribute = self.function.rpartition(".")
        module = importlib.import_module(module_path)
        right = getattr(module, attribute)
        setattr(module, attribute, self.replace(right))
        try:
            yield
        finally:
            setattr(module, attribute, right)

    def tower(self, right: KimiVision) -> KimiVision:
        """Return the tower with the wrong config and weights; unchanged tensors are shared with the right one."""
        config = self.config(right.config)
        with torch.device("meta"):
            wrong = KimiVision(config)
        state = {name: self.tensor(name, tensor, config) for name, tensor in right.state_dict().items()}
        wrong.load_state_dict(state, strict=True, assign=True)
        return wrong.requires_grad_(requires_grad=False).eval()

    def weights(self, right: VisionWeights) -> VisionWeights:
        """Return the weights with the wrong config and tensors, for an export of the wrong model."""
        return _WrongWeights(right, self)


@dataclass(frozen=True)
class _WrongWeights:
    """A source of weights seen through a mistake."""

    right: VisionWeights
    mistake: WrongModel

    @property
    def config(self) -> VisionConfig:
        return self.mistake.config(self.right.config)

    @property
    def source(self) -> str:
        return f"{self.right.source} with {self.mistake.name}"

    def names(self) -> tuple[str, ...]:
        return self.right.names()

    def dtype(self, name: str) -> str:
        return self.right.dtype(name)

    def tensor(self, name: str) -> Tensor:
        return self.mistake.tensor(module_name(name), self.right.tensor(name), self.config)

    def raw(self, name: str) -> NDArray[np.uint8]:
        bits: NDArray[np.uint8] = self.tensor(name).contiguous().flatten().view(torch.uint8).numpy()
        return bits

    def sha256(self) -> str:
        import hashlib

        return weights_sha256(self, lambda name: hashlib.sha256(self.raw(name).tobytes()).hexdigest())


# ------------------------------------------------------------------------------------------------- the mistakes

_LAYER_NORM = ("kimi_vl", "kimi_k25")
_MOVING = ("kimi_k25", "kimi_k3")
_BF16_EPS = 2.0**-7  # torch.finfo(bfloat16).eps, which a public port of K3 took


def _half_split(name: str, tensor: Tensor, config: VisionConfig) -> Tensor:
    """Reorder rows of q and k so that the operator's adjacent pairs are elements m and m + d/2 of the checkpoint.

    Logits are sums over a head, so a common order of q and k changes nothing but the pairing.
    """
    if ".wqkv." not in name:
        return tensor
    heads, half = config.num_attention_heads, config.head_dim // 2
    q, k, v = tensor.chunk(3)
    q, k = (part.reshape(heads, 2, half, *part.shape[1:]).transpose(1, 2).reshape(part.shape) for part in (q, k))
    return torch.cat([q, k, v])


def _align_corners(position: Tensor, size: Tensor, table_size: int) -> tuple[Tensor, Tensor]:
    numerator, denominator = position * (table_size - 1), size - 1
    floor = torch.div(numerator, denominator, rounding_mode="trunc")
    remainder = numerator - floor * denominator
    return floor, remainder.to(torch.float32) / denominator.to(torch.float32)


def _not_resampled(position: Tensor, _size: Tensor, _table_size: int) -> tuple[Tensor, Tensor]:
    return position, torch.zeros(position.shape, dtype=torch.float32, device=position.device)


def _column_major(local: Tensor, height: Tensor, _width: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.div(local, height, rounding_mode="trunc")
    return local - x * height, x


def _norm_of_flattened(members: Tensor, norm: torch.nn.LayerNorm | None) -> Tensor:
    flat = members.flatten(1)
    if norm is None:
        return flat
    return F.layer_norm(flat, flat.shape[1:], norm.weight.repeat(4), norm.bias.repeat(4), norm.eps)


def _no_norm(norm: torch.nn.Module, x: Tensor) -> Tensor:
    """Leave a norm out; 0 times its weights stays, since the exporter refuses a graph that lacks a tensor."""
    for weight in norm.parameters():
        x = x + weight * 0
    return x


def _padded(head_dim: int) -> int:
    """Next head size that fused kernels are built for; a size that is one of them already takes the one above."""
    return next(size for size in (32, 64, 80, 96, 128, 160, 192, 256, 512, 1 << 20) if size > head_dim)


WRONG_MODELS: tuple[WrongModel, ...] = (
    WrongModel(
        "rope-axes-swapped",
        "rotary angles take the row where the column belongs",
        "model.rope.rope_angles",
        lambda right: lambda y, x, *rest: right(x, y, *rest),
    ),
    WrongModel(
        "rope-half-split",
        "rotary pairs are elements m and m + d/2, not adjacent ones (rotate-half)",
        tensor=_half_split,
    ),
    WrongModel(
        "rope-angles-bf16",
        "rotary angles are rounded to bf16",
        "model.rope.rope_angles",
        lambda right: lambda *args: right(*args).to(torch.bfloat16).to(torch.float32),
    ),
    WrongModel(
        "positions-from-one",
        "rows and columns are counted from 1 when the position table is sampled",
        "model.position.source_position",
        lambda right: lambda position, *rest: right(position + 1, *rest),
    ),
    WrongModel(
        "grid-column-major",
        "tokens are taken to run down the columns",
        "model.position.raster",
        lambda _right: _column_major,
    ),
    WrongModel(
        "merge-order-transposed",
        "the members of a 2x2 square are taken column by column",
        "model.projector.member_offsets",
        lambda right: lambda member: right(member)[::-1],
    ),
    WrongModel(
        "bicubic-pillow",
        "the position table is resampled with Pillow's kernel (a = -0.5)",
        "model.position.kernel_polynomials",
        lambda right: lambda mode, *_a: right(mode, -0.5),
        families=_LAYER_NORM,
    ),
    WrongModel(
        "interpolation-swapped",
        "the position table is resampled bilinearly for bicubically, or the other way round",
        config=lambda config: dataclasses.replace(
            config,
            pos_emb_interpolation_mode="bilinear" if config.pos_emb_interpolation_mode == "bicubic" else "bicubic",
        ),
    ),
    WrongModel(
        "align-corners",
        "the position table is resampled with align_corners",
        "model.position.source_position",
        lambda _right: _align_corners,
    ),
    WrongModel(
        "table-not-resampled",
        "the position table is cropped, not resampled",
        "model.position.source_position",
        lambda _right: _not_resampled,
    ),
    WrongModel(
        "time-embedding-missing",
        "the frames of a clip get no time embedding",
        "model.position.is_clip",
        lambda right: lambda frame: right(frame) * 0,
        families=_MOVING,
        needs="clip",
    ),
    WrongModel(
        "time-embedding-on-images",
        "an image gets the time embedding of frame 0",
        "model.position.is_clip",
        lambda right: lambda frame: right(frame) * 0 + 1,
        families=_MOVING,
    ),
    WrongModel(
        "first-frame-only",
        "the merge takes the first frame, not the mean over frames",
        "model.projector.mean_over_frames",
        lambda _right: lambda x: x[0],
        families=_MOVING,
        needs="clip",
    ),
    WrongModel(
        "final-norm-missing",
        "there is no norm after the last block",
        "model.tower.final_norm",
        lambda _right: _no_norm,
    ),
    WrongModel(
        "norm-eps-bf16",
        "the tower's norms take bf16's epsilon, 2^-7",
        config=lambda config: dataclasses.replace(config, norm_eps=_BF16_EPS),
    ),
    WrongModel(
        "mlp-gelu-exact",
        "the blocks use the exact GELU where the tanh form belongs",
        "model.tower.mlp_activation",
        lambda _right: F.gelu,
    ),
    WrongModel(
        "projector-gelu-tanh",
        "the projector uses the tanh GELU where the exact one belongs",
        "model.projector.projector_activation",
        lambda _right: lambda x: F.gelu(x, approximate="tanh"),
    ),
    WrongModel(
        "attention-scale-padded",
        "logits are scaled by the head size that a kernel pads to",
        "model.attention.attention_scale",
        lambda right: lambda head_dim: right(_padded(head_dim)),
    ),
    WrongModel(
        "items-leak",
        "items of one call attend to each other",
        "model.attention.segment_mask",
        lambda right: lambda item: right(item * 0),
        needs="several",
    ),
    WrongModel(
        "projector-norm-flattened",
        "the projector's norm runs over the four members at once",
        "model.projector.flatten_members",
        lambda _right: _norm_of_flattened,
        families=_LAYER_NORM,
    ),
)


def wrong_model(name: str) -> WrongModel:
    """Look up a wrong model.

    Raises:
        KeyError: there is none of that name.
    """
    return {wrong.name: wrong for wrong in WRONG_MODELS}[name]


def wrong_models_for(config: VisionConfig, *, frames: int, items: int) -> list[WrongModel]:
    """Wrong models that can be made with a tower and that a call of these sizes can show."""
    return [wrong for wrong in WRONG_MODELS if wrong.applies(config) and wrong.visible(frames, items)]
