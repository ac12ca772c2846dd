"""The tower as a graph: the live tower's parts over symbolic sizes, everything but pixels computed from ``grid_hws``.

No dimension depends on a value, so a runtime needs no shape inputs: tokens find their item, row and column by
arithmetic on their index, and rows of tables are looked up with ``index_select`` (a Gather).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model import attention, position, projector, rope, tower
from model.tower import Attend, KimiVision, Rotate
from plugins.fused_qk_rope.reference import fused_qk_rope_reference
from plugins.fused_qk_rope.torch_op import fused_qk_rope

ROPE_FORMS = ("plugin", "standard", "plain")
ATTENTION_FORMS = ("plain", "op")
PACKINGS = ("single", "packed")


@dataclass(frozen=True)
class GraphForm:
    """Which of several equal graphs to make.

    Attributes:
        rope: ``plugin`` (one FusedQKRope node a block), ``standard`` (ONNX RotaryEmbedding) or ``plain``.
        attention: ``plain`` (matrix products and softmax) or ``op`` (one ONNX Attention node a block).
        packing: ``single`` (one item, no mask) or ``packed`` (any number of items, masked by segment).
    """

    rope: str = "plugin"
    attention: str = "plain"
    packing: str = "single"

    def __post_init__(self) -> None:
        """Refuse unknown forms.

        Raises:
            ValueError: names the field and the allowed values.
        """
        for field, allowed in (("rope", ROPE_FORMS), ("attention", ATTENTION_FORMS), ("packing", PACKINGS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} {getattr(self, field)!r} is none of {', '.join(allowed)}")


class GraphTower(nn.Module):
    """The exported form of a live tower; shares its modules and weights."""

    def __init__(self, live: KimiVision, form: GraphForm) -> None:
        super().__init__()
        self.tower = live
        self.form = form

    def forward(self, pixel_values: Tensor, grid_hws: Tensor) -> Tensor:
        """Embed items that share their number of frames.

        Args:
            pixel_values: [frames, patches, 588] in the dtype of the weights.
            grid_hws: [items, 2] int64; areas sum to ``patches``. The graph cannot check that.

        Returns:
            [patches/4, text_hidden_size], rows of item 0, item 1, ... in merge order.
        """
        x, prepared = self.before_blocks(pixel_values, grid_hws)
        for block in self.tower.vision_tower.encoder.blocks:
            x = block(x, prepared.rotate, prepared.attend)
        return self.after_blocks(x, pixel_values, prepared)

    def before_blocks(self, pixel_values: Tensor, grid_hws: Tensor) -> tuple[Tensor, Prepared]:
        """Compute what the blocks share: tokens [frames * patches, hidden_size], angles, mask, merge order."""
        config, embed = self.tower.config, self.tower.vision_tower.patch_embed
        frames, patches = pixel_values.shape[:2]
        layout = position.token_layout(grid_hws, patches)
        still = position.sample_table(embed.pos_emb.weight, config.pos_emb_interpolation_mode, layout)
        pos = position.add_time(still, frames, config.pos_emb_time).flatten(0, 1)
        x = embed(pixel_values.flatten(0, 1)) + pos.to(pixel_values.dtype)
        angles = rope.rope_angles(layout.y, layout.x, config.head_dim, config.rope_theta)
        cos, sin = (_repeat(part, frames) for part in (angles.cos(), angles.sin()))
        rotate = _rotation(self.form.rope, cos, sin)
        return x, Prepared(layout, rotate, self._attention(layout.item, frames, x.dtype))

    def after_blocks(self, x: Tensor, pixel_values: Tensor, prepared: Prepared) -> Tensor:
        """Norm, mean over frames, merge, projector: [frames * patches, hidden_size] -> [patches/4, text width]."""
        frames, patches = pixel_values.shape[:2]
        x = tower.final_norm(self.tower.vision_tower.encoder.final_layernorm, x)
        still = projector.mean_over_frames(x.reshape(frames, patches, -1))
        members = still.index_select(0, projector.merge_index(prepared.layout)).reshape(-1, 4, x.shape[-1])
        rows: Tensor = self.tower.mm_projector(members)
        return rows

    def _attention(self, item: Tensor, frames: int, dtype: torch.dtype) -> Attend:
        plain = self.form.attention == "plain"
        mask: Tensor | None = None
        if self.form.packing == "packed":
            mask = attention.segment_mask(_repeat(item, frames))
            mask = attention.additive_mask(mask, dtype) if plain else mask
        attend = attention.attend_plain if plain else attention.attend_fused
        return lambda q, k, v: attend(q, k, v, mask)


@dataclass(frozen=True)
class Prepared:
    """What every block and the merge share."""

    layout: position.TokenLayout
    rotate: Rotate
    attend: Attend


def _repeat(x: Tensor, frames: int) -> Tensor:
    """[patches, ...] -> [frames * patches, ...]."""
    return x.unsqueeze(0).expand(frames, *x.shape).flatten(0, 1)


def _rotation(form: str, cos: Tensor, sin: Tensor) -> Rotate:
    if form == "plugin":
        return lambda q, k: fused_qk_rope(q, k, cos, sin)
    if form == "plain":
        return lambda q, k: fused_qk_rope_reference(q, k, cos, sin)
    return lambda q, k: (standard_rotation(q, cos, sin), standard_rotation(k, cos, sin))


def standard_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate by ONNX's own RotaryEmbedding (opset 23), in fp32: its cos and sin share the type of its data.

    Args:
        x: [tokens, heads, d].
        cos: [tokens, d/2] fp32.
        sin: [tokens, d/2] fp32.

    Returns:
        Like ``x``.
    """
    rotated = torch.onnx.ops.rotary_embedding(
        x.to(torch.float32).flatten(1).unsqueeze(0),
        cos.unsqueeze(0),
        sin.unsqueeze(0),
        interleaved=True,
        num_heads=x.shape[1],
    )
    return rotated.squeeze(0).reshape(x.shape).to(x.dtype)
