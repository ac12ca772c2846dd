"""All that a call's grids decide: padding, positions, angles, segments and merge order, made once and kept.

The tensors lie in one block of bytes, so that a CUDA graph gets them by one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from model import position, projector, rope
from model.config import VisionConfig
from model.cuda.cache import ByteCache, HasBytes
from model.cuda.weights import MASKED
from model.tower import PatchEmbed, item_positions

Grid = tuple[int, int, int]
# Items of one call, the padding at the end being one of them, that CUDA graphs have room for: flash attention starts
# programs for all segments, so few items need not pay for many.
SEGMENTS = (8, 64)
_SMALLEST_STEP = 64


def padded_tokens(tokens: int) -> int:
    """Smallest allowed number of tokens for so many: 16 steps an octave above 1024, steps of 64 below.

    At most 6 % is padding above 1024 tokens. There are 80 sizes up to 16384, hence at most so many CUDA graphs and
    attention plans (cuDNN takes 40 to 60 ms to plan each new length).
    """
    step = max(_SMALLEST_STEP, 1 << max(0, (tokens - 1).bit_length() - 5))
    return -(-tokens // step) * step


class Fields(NamedTuple):
    """What the blocks need of the grids, as views into one block of bytes.

    Attributes:
        pos: [padded, hidden_size], positions and the patch embedding's bias, in the model's dtype; 0 at padding.
        cos: [padded, padded_head/2] fp32; 1 at spare elements of the heads.
        sin: like ``cos``; 0 at spare elements, but at padding what masks it.
        mask: [padded] in the model's dtype, additive: 0 at tokens, MASKED at padding.
        ends: [segments + 1] int32: 0, the end of each item, and from then on ``padded``.
    """

    pos: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor
    ends: Tensor


@dataclass(frozen=True)
class FieldSizes:
    """Shapes of :class:`Fields`.

    Attributes:
        padded: tokens with padding; any number where items are of one length, which are not padded.
        width: hidden_size.
        pairs: half of a head as attention gets it.
        dtype: of the model.
        segments: items, and one for the padding, that ``ends`` has room for.
    """

    padded: int
    width: int
    pairs: int
    dtype: torch.dtype
    segments: int = SEGMENTS[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return sum(self._parts())

    def _parts(self) -> tuple[int, ...]:
        itemsize = self.dtype.itemsize
        angles = 4 * self.padded * self.pairs
        sizes = (itemsize * self.padded * self.width, angles, angles, itemsize * self.padded, 4 * (self.segments + 1))
        return tuple(-(-size // 16) * 16 for size in sizes)  # kernels load 16 bytes at once

    def views(self, block: Tensor) -> Fields:
        """Look at the beginning of a block of bytes as fields.

        Args:
            block: uint8, at least ``nbytes``.
        """
        pos, cos, sin, mask, ends = torch.split(block[: self.nbytes], [*self._parts()])
        count = self.padded * self.pairs
        return Fields(
            pos.view(self.dtype)[: self.padded * self.width].view(self.padded, self.width),
            cos.view(torch.float32)[:count].view(self.padded, self.pairs),
            sin.view(torch.float32)[:count].view(self.padded, self.pairs),
            mask.view(self.dtype)[: self.padded],
            ends.view(torch.int32)[: self.segments + 1],
        )


@dataclass(frozen=True)
class Placement:
    """What one list of grids decides.

    Attributes:
        lengths: tokens of each item.
        sizes: of the fields.
        block: the fields, as bytes.
        fields: views into ``block``.
        merge: [4 * rows] int64, order of the tokens at the merge, after the mean over frames.
    """

    lengths: tuple[int, ...]
    sizes: FieldSizes
    block: Tensor
    fields: Fields
    merge: Tensor

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return sum(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.block.nbytes + self.merge.nbytes


@dataclass(frozen=True)
class _Positions:
    rows: Tensor  # [tokens, hidden_size]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


class Placements:
    """Makes placements, and keeps the positions of single items for calls that mix them anew.

    They are of the tensors that the tower had then, like packed weights: also while others stand in their place for a
    call, as ``torch.func.functional_call`` puts them. Who changes weights for good makes other placements, as
    :class:`model.tower.KimiVision` does.
    """

    def __init__(self, config: VisionConfig, embed: PatchEmbed, cache: ByteCache[HasBytes]) -> None:
        """Prepare.

        Args:
            config: the tower's config.
            embed: has the position table and the bias.
            cache: for positions of single items, which it holds under their grids.
        """
        self._config, self._cache = config, cache
        self._table = embed.pos_emb.weight.detach()
        self._bias = None if embed.proj.bias is None else embed.proj.bias.detach()

    def make(self, grids: Sequence[Grid], padded: int, pairs: int) -> Placement:
        """Make the placement of items.

        Args:
            grids: (t, h, w) of each item.
            padded: tokens of all, padding included.
            pairs: half of a head as attention gets it.
        """
        config, table = self._config, self._table
        lengths = tuple(t * h * w for t, h, w in grids)
        tokens, device = sum(lengths), table.device
        segments = next((size for size in SEGMENTS if len(grids) < size), len(grids) + 1)
        sizes = FieldSizes(padded, config.hidden_size, pairs, table.dtype, segments)
        block = torch.zeros(sizes.nbytes, dtype=torch.uint8, device=device)
        fields = sizes.views(block)
        if len(grids) == 1:
            fields.pos[:tokens] = self._item_positions(grids[0])  # kept as part of this placement
        else:
            torch.cat([self._positions(grid) for grid in grids], out=fields.pos[:tokens])
        self._fill_angles(fields, grids, tokens)
        fields.mask[tokens:] = MASKED
        ends = [0, *accumulate(lengths)]
        fields.ends.copy_(torch.tensor([*ends, *[padded] * (segments + 1 - len(ends))], dtype=torch.int32))
        stills = torch.tensor([grid[1:] for grid in grids], device=device)
        merge = projector.merge_index(position.token_layout(stills, sum(h * w for _, h, w in grids)))
        return Placement(lengths, sizes, block, fields, merge)

    def _fill_angles(self, fields: Fields, grids: Sequence[Grid], tokens: int) -> None:
        config = self._config
        # every frame is laid out like an item of its own: rotary positions know nothing of time
        frames = torch.tensor([[h, w] for t, h, w in grids for _ in range(t)], device=fields.cos.device)
        layout = position.token_layout(frames, tokens)
        angles = rope.rope_angles(layout.y, layout.x, config.head_dim, config.rope_theta)
        half = config.head_dim // 2
        fields.cos.fill_(1)
        fields.cos[:tokens, :half] = angles.cos()
        fields.sin[:tokens, :half] = angles.sin()
        if fields.sin.shape[1] > half:
            fields.sin[tokens:, half] = -MASKED

    def _item_positions(self, grid: Grid) -> Tensor:
        """Positions of one item with the bias of the patch embedding: computed in fp32, rounded once."""
        rows = item_positions(self._table, self._config, grid)
        return (rows if self._bias is None else rows + self._bias).to(self._table.dtype)

    def _positions(self, grid: Grid) -> Tensor:
        """The same, kept, for calls that mix items anew."""
        found = self._cache.get(grid, lambda: _Positions(self._item_positions(grid)))
        if not isinstance(found, _Positions):
            raise TypeError("a key of positions holds something else")
        if found.rows.is_cuda:
            # made on another stream, perhaps, and dropped while this one still copies it
            found.rows.record_stream(torch.cuda.current_stream())
        return found.rows
