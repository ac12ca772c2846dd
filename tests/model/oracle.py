"""transformers 5.24's Kimi-K2.5 vision tower, fed with a checkpoint's tensors: an implementation that is not ours.

It keeps q and k in rotate-half order, so their rows are permuted on the way in (kimi-vision.md, section 2.5).
It covers K2.5, and Kimi-VL for single frames; K3 is checked by formulas.
"""

from __future__ import annotations

import types

import torch
from torch import Tensor

from model.config import VisionConfig


def _rotate_half_rows(x: Tensor, heads: int) -> Tensor:
    half = x.shape[0] // heads // 2
    return x.reshape(heads, half, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _native_state(tensors: dict[str, Tensor], config: VisionConfig) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not name.startswith("vision_tower."):
            continue
        new = name.removeprefix("vision_tower.").removeprefix("encoder.").replace("blocks.", "layers.")
        new = new.replace("pos_emb.weight", "pos_emb.position_embeddings")
        if ".wqkv." in new:
            q, k, v = value.chunk(3)
            heads = config.num_attention_heads
            state[new.replace("wqkv", "attn.q_proj")] = _rotate_half_rows(q, heads)
            state[new.replace("wqkv", "attn.k_proj")] = _rotate_half_rows(k, heads)
            state[new.replace("wqkv", "attn.v_proj")] = v
            continue
        new = new.replace(".wo.", ".attn.proj.")
        new = new.replace(".norm1.", ".norm2.").replace(".norm0.", ".norm1.")
        new = new.replace(".fc1.", ".fc2.").replace(".fc0.", ".fc1.")
        state[new] = value
    return state


class Oracle:
    """The tower and the projector of transformers with the given tensors."""

    def __init__(self, tensors: dict[str, Tensor], config: VisionConfig, dtype: torch.dtype = torch.float32) -> None:
        from transformers import Kimi_K25VisionConfig, Kimi_K25VisionModel
        from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25MultimodalProjection

        vision = Kimi_K25VisionConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            pos_emb_height=config.pos_emb_height,
            pos_emb_width=config.pos_emb_width,
            pos_emb_time=4,
        )
        self.tower = Kimi_K25VisionModel(vision).eval()
        # the rotary table is no parameter and lives in the module's buffers, hence strict=False and a check of our own
        missing, unexpected = self.tower.load_state_dict(_native_state(tensors, config), strict=False)
        if missing or unexpected:
            raise AssertionError(f"oracle: missing {missing}, unexpected {unexpected}")
        shim = types.SimpleNamespace(
            vision_config=vision,
            projection_hidden_size=config.hidden_size,
            projection_layer_norm_eps=config.projector_ln_eps,
            text_config=types.SimpleNamespace(hidden_size=config.text_hidden_size),
        )
        self.projector = Kimi_K25MultimodalProjection(shim).eval()
        names = {"proj.0": "in_proj", "proj.2": "out_proj", "linear_1": "in_proj", "linear_2": "out_proj"}
        state = {}
        for name, value in tensors.items():
            if not name.startswith("vision_tower."):
                _, _, rest = name.partition(".")
                for old, new in names.items():
                    rest = rest.replace(old, new)
                state[rest] = value
        self.projector.load_state_dict(state, strict=True)
        self.tower.to(dtype)
        self.projector.to(dtype)

    @torch.inference_mode()
    def __call__(self, pixel_values: Tensor, grid_thws: Tensor) -> list[Tensor]:
        dtype = self.tower.dtype
        pooled = self.tower(pixel_values.to(dtype), grid_thw=grid_thws).pooler_output
        rows = self.projector(pooled).reshape(pooled.shape[0], -1)
        return list(rows.split([h * w // 4 for _, h, w in grid_thws.tolist()]))
