"""The vision tower with its projector: patches and grids in, rows for the language model out.

One module tree for the three families, named as the checkpoints name it. :class:`KimiVision` is the live form; the
exported form in :mod:`model.graph` runs the same parts over symbolic sizes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from model import attention, position, projector, rope
from model.config import PATCH_VALUES, VisionConfig
from model.errors import ImageError
from model.grids import check_grids
from model.norm import tower_norm
from model.platform import being_traced, say_once
from model.weights import VisionWeights, read_all
from plugins.fused_qk_rope.torch_op import fused_qk_rope

if TYPE_CHECKING:
    from model.cuda.tower import FastTower

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

# Items are run in groups of at most this many tokens, or one by one where they are longer: memory then follows the
# longest item and not the sum, while small images still share their matrix products.
GROUP_TOKENS = 4096
_MAKING = threading.Lock()  # of fast forms


class KimiVision(nn.Module):
    """A vision tower and its projector."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(config)
        self.mm_projector = projector.Projector(config)
        self._fast_options: dict[str, int] | None = None
        self._fast: FastTower | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, of the residual stream and of the output."""
        return self.vision_tower.patch_embed.proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.vision_tower.patch_embed.proj.weight.device

    def forward(self, pixel_values: Tensor, grid_thws: Tensor) -> list[Tensor]:
        """Embed images and clips.

        Args:
            pixel_values: [L, 3, 14, 14] or [L, 588], any floating dtype; patches of item after item, frame-major.
            grid_thws: [items, 3] whole numbers: frames, rows and columns of each item; L is the sum of their products.

        Returns:
            One [rows * columns / 4, text_hidden_size] per item, in the dtype of the weights.

        Raises:
            ImageError: ``pixel_values`` of another shape; grids that do not fit them or that the family does not allow.
        """
        grids = [tuple(grid) for grid in grid_thws.tolist()]
        shape = tuple(pixel_values.shape)
        if math.prod(shape[1:]) != PATCH_VALUES:
            raise ImageError(f"pixel_values are {shape}; expected [patches, 588] or [patches, 3, 14, 14] of all frames")
        check_grids(grids, shape[0], self.config)
        patches = pixel_values.flatten(1)
        lengths = [t * h * w for t, h, w in grids]
        outputs: list[Tensor] = []
        fast = self._fast_form(pixel_values)
        groups = group_items(lengths, GROUP_TOKENS) if fast is None else fast.groups(lengths)
        for group in groups:
            start = sum(lengths[: group.start])
            part = patches[start : start + sum(lengths[group.start : group.stop])]
            # cast group by group: a copy of all pixels would grow with the sum of the items
            part = part.to(device=self.device, dtype=self.dtype)
            outputs += self._run_group(fast or self.vision_tower, part, grids[group.start : group.stop])
        # looked at when all is launched, for a look takes the CPU 0.1 ms in which a GPU already computes
        if fast is not None and not self._is_of_now(fast):
            self.fast_tower()
            return self.forward(pixel_values, grid_thws)
        return outputs

    def _run_group(
        self,
        tower: Callable[[Tensor, Sequence[tuple[int, int, int]]], Tensor],
        patches: Tensor,
        grids: Sequence[tuple[int, int, int]],
    ) -> list[Tensor]:
        rows = self.mm_projector(tower(patches, grids))
        return list(rows.split([h * w // 4 for _, h, w in grids]))

    # ------------------------------------------------------------------------------------------------ the fast form

    def accelerate(self, *, cache_bytes: int | None = None, graph_tokens: int | None = None) -> KimiVision:
        """Run the vision tower in its fast form from now on, wherever that can be: see :mod:`model.cuda`.

        Calls that need gradients, are traced or compiled, or come when the tower is in fp32 take the plain form as
        before. Weights are packed at the first call, and again when they have changed. The fast form does not call
        modules: where the vision tower has hooks, or parts of it were replaced, it says so and stays plain until this
        is called again. Call this again also after writing to weights through ``.data``, or in inference mode to
        weights made in it: PyTorch does not count that.

        Args:
            cache_bytes: bound of what is kept of grids; None for :data:`model.cuda.tower.CACHE_BYTES`.
            graph_tokens: up to how many tokens a call runs as a CUDA graph, 0 for no graphs; None for
                :data:`model.cuda.tower.GRAPH_TOKENS`.

        Returns:
            The tower itself.

        Raises:
            ValueError: a number below 0.
        """
        given = {"cache_bytes": cache_bytes, "graph_tokens": graph_tokens}
        options = {name: value for name, value in given.items() if value is not None}
        for name, value in options.items():
            if value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more")
        self._fast_options = options
        self._drop_fast()
        return self

    def _drop_fast(self) -> None:
        if self._fast is not None:
            self._fast.wait()
            self._fast = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KimiVision:
        self._drop_fast()  # `to` and the like make other tensors, and these would be held until the next call
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def fast_tower(self) -> FastTower | None:
        """Return the fast form of the present weights, made now if it is due; None where this dtype has none."""
        from model.cuda.tower import FastTower
        from model.cuda.weights import fits

        with _MAKING:
            if self._fast is not None and not self._is_of_now(self._fast):
                self._drop_fast()
            if self._fast is None and self._fast_options is not None and fits(self.dtype, self.device):
                try:
                    self._fast = FastTower(self.vision_tower, **self._fast_options)
                except TypeError as error:
                    say_once(f"the tower runs in its plain form: {error}")
                    self._fast_options = None
            return self._fast

    def _is_of_now(self, fast: FastTower) -> bool:
        return fast.contents.tower is self.vision_tower and not fast.contents.changed()

    def _fast_form(self, pixel_values: Tensor) -> FastTower | None:
        if self._fast_options is None or being_traced(self.vision_tower.patch_embed.proj.weight):
            return None
        if getattr(self, "_is_replica", False):
            return None  # one of torch.nn.DataParallel's, which lives for a call and holds the first one's fast form
        if torch.is_grad_enabled() and pixel_values.requires_grad:
            return None
        fast = self._fast
        if fast is None or (fast.dtype, fast.device) != (self.dtype, self.device):
            fast = self.fast_tower()
        trained = fast is not None and torch.is_grad_enabled() and fast.contents.need_gradient()
        return None if trained else fast

    def __getstate__(self) -> dict[str, Any]:
        """Leave the fast form, with its graphs and locks, out of copies; a copy is accelerated anew."""
        return {**self.__dict__, "_fast": None, "_fast_options": None}


class VisionTower(nn.Module):
    """Patch embedding, blocks and merge."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """[tokens, 588] and grids (t, h, w) -> [sum of h * w / 4, 4, hidden_size], final norm applied."""
        lengths = [t * h * w for t, h, w in grids]
        x = self.patch_embed(patches) + self.patch_embed.positions(grids)
        # every frame is laid out like an item of its own: rotary positions know nothing of time
        frames = torch.tensor([[h, w] for t, h, w in grids for _ in range(t)], device=patches.device)
        layout = position.token_layout(frames, sum(lengths))
        angles = rope.rope_angles(layout.y, layout.x, self.config.head_dim, self.config.rope_theta)
        cos, sin = angles.cos(), angles.sin()
        x = self.encoder(
            x,
            lambda q, k: fused_qk_rope(q, k, cos, sin),
            lambda q, k, v: attention.attend_items(q, k, v, lengths),
        )
        return merge(x, grids)


def merge(x: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
    """Average each item over its frames and regroup its tokens by 2x2 squares.

    Args:
        x: [tokens, width].
        grids: (t, h, w) of each item.

    Returns:
        [sum of h * w / 4, 4, width].
    """
    still = mean_of_clips(x, grids)
    layout = position.token_layout(torch.tensor([grid[1:] for grid in grids], device=x.device), still.shape[0])
    return gather_members(still, projector.merge_index(layout))


def mean_of_clips(x: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
    """Average each item (t, h, w) over its frames: [tokens, width] -> [sum of h * w, width]."""
    if all(t == 1 for t, _, _ in grids):
        return x
    items = torch.split(x, [t * h * w for t, h, w in grids])
    return torch.cat([_still(item, grid[0]) for item, grid in zip(items, grids, strict=True)])


def _still(item: Tensor, frames: int) -> Tensor:
    """[frames * patches, width] -> [patches, width]; an image is its own mean."""
    return item if frames == 1 else projector.mean_over_frames(item.reshape(frames, -1, item.shape[-1]))


def gather_members(still: Tensor, order: Tensor) -> Tensor:
    """Take tokens in merge order, four a row: [patches, width] -> [patches / 4, 4, width]."""
    return still.index_select(0, order).reshape(-1, 4, still.shape[-1])


class PatchEmbed(nn.Module):
    """Linear embedding of 14x14 patches, and the learned position table."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        size = config.patch_size
        # a convolution whose kernel is its stride: only its tensors are used, as one matrix product
        self.proj = nn.Conv2d(3, config.hidden_size, size, size, bias=config.patch_embed_proj_bias)
        self.pos_emb = PositionTable(config)

    def forward(self, patches: Tensor) -> Tensor:
        """[..., 588] -> [..., hidden_size]."""
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)

    def positions(self, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Position embedding of every token of items (t, h, w): [tokens, hidden_size], computed in fp32, cast once."""
        table = self.pos_emb.weight
        return torch.cat([item_positions(table, self.config, grid).to(table.dtype) for grid in grids])


def item_positions(table: Tensor, config: VisionConfig, grid: tuple[int, int, int]) -> Tensor:
    """Position embedding of one item from a table.

    Args:
        table: [rows, columns, hidden_size], any floating dtype.
        config: of the tower: how tables are resampled, and the frames' part.
        grid: (t, h, w) of the item.

    Returns:
        [t * h * w, hidden_size] fp32.
    """
    t, h, w = grid
    still = position.get_rope_shape(table, config.pos_emb_interpolation_mode, (h, w))
    return position.add_time(still, t, config.pos_emb_time).flatten(0, 1)


class PositionTable(nn.Module):
    """Holder of the position table under the checkpoint's name."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(config.pos_emb_height, config.pos_emb_width, config.hidden_size))


class Encoder(nn.Module):
    """The blocks and the norm after the last."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = tower_norm(config)

    def forward(self, x: Tensor, rotate: Rotate, attend: Attend) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        for block in self.blocks:
            x = block(x, rotate, attend)
        return final_norm(self.final_layernorm, x)


def final_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm between the last block and the merge."""
    normed: Tensor = norm(x)
    return normed


class Block(nn.Module):
    """Attention and MLP, each on the normed residual stream."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        inner, width = config.qkv_hidden_size, config.hidden_size
        self.heads = config.num_attention_heads
        self.norm0 = tower_norm(config)
        self.wqkv = nn.Linear(width, 3 * inner, bias=config.attn_bias)
        self.wo = nn.Linear(inner, width, bias=config.attn_bias)
        self.norm1 = tower_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotate: Rotate, attend: Attend) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        # rows of wqkv are [q | k | v], each head-major
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        q, k = rotate(q, k)
        x = x + self.wo(attend(q, k, v))
        mlp: Tensor = self.mlp(self.norm1(x))
        return x + mlp


class MLP(nn.Module):
    """Two linear layers with tanh GELU between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.linear_bias)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.linear_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden_size] -> the same."""
        out: Tensor = self.fc1(mlp_activation(self.fc0(x)))
        return out


def mlp_activation(x: Tensor) -> Tensor:
    """GELU in the tanh form; the projector uses the exact one."""
    return F.gelu(x, approximate="tanh")


def group_items(lengths: Sequence[int], budget: int, alone: int | None = None) -> Iterator[range]:
    """Split items into runs of neighbours whose tokens fit a budget; an item above it is a run of its own.

    Args:
        lengths: tokens of each item.
        budget: tokens of a run; the longest item where that is more.
        alone: items of so many tokens are a run of their own each.
    """
    budget = max(budget, *lengths) if lengths else budget
    start, total = 0, 0
    for index, length in enumerate(lengths):
        apart = alone is not None and (length >= alone or (total and lengths[index - 1] >= alone))
        if total and (apart or total + length > budget):
            yield range(start, index)
            start, total = index, 0
        total += length
    if lengths:
        yield range(start, len(lengths))


def module_name(checkpoint_name: str) -> str:
    """Name of a checkpoint tensor in the module tree: only Kimi-VL's projector is called otherwise there."""
    renames = {
        "multi_modal_projector.linear_1.": "mm_projector.proj.0.",
        "multi_modal_projector.linear_2.": "mm_projector.proj.2.",
        "multi_modal_projector.": "mm_projector.",
    }
    for old, new in renames.items():
        if checkpoint_name.startswith(old):
            return new + checkpoint_name.removeprefix(old)
    return checkpoint_name


def build_tower(
    weights: VisionWeights, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> KimiVision:
    """Build the live tower from a checkpoint or a random source.

    Args:
        weights: an opened source; each tensor is read once.
        dtype: dtype of the tower.
        device: where it runs.

    Returns:
        The tower in evaluation mode, without gradients.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    with torch.device("meta"):
        tower = KimiVision(weights.config)
    state = {module_name(name): tensor.to(device=device, dtype=dtype) for name, tensor in read_all(weights)}
    tower.load_state_dict(state, strict=True, assign=True)
    return tower.requires_grad_(requires_grad=False).eval()
