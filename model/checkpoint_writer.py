"""Writes vision weights as a checkpoint folder in the layout of the family's hub repository.

Language tensors and a quantisation config stand beside, as in the released files: what reads a Kimi checkpoint has to
find the vision tensors among others. The language part is a token of a few kilobytes, not a working model.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from model.checkpoint import INDEX_FILE, SINGLE_FILE
from model.config import VisionConfig, tensor_shapes
from model.errors import CheckpointError
from model.weights import ITEM_SIZES, VisionWeights, in_order

Raw = NDArray[np.uint8]

_FORMAT_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_NUMPY_TYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
_VOCABULARY, _EXPERT_WIDTH = 64, 64


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be written; ``raw`` makes its bytes when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    raw: Callable[[], Raw]


def write_checkpoint(weights: VisionWeights, folder: Path, *, shards: int = 1, dtype: str | None = None) -> None:
    """Write config.json, preprocessor_config.json and the weights.

    The projector goes into the last shard but one and the tower into the last, as in the released files.

    Args:
        weights: either source.
        folder: must not exist, or be empty; appears whole or not at all.
        shards: 1 for ``model.safetensors``, more for shards with an index.
        dtype: a key of ITEM_SIZES for all vision tensors; as they are by default.

    Raises:
        ValueError: ``shards`` or ``dtype`` is out of range.
        CheckpointError: the folder exists already or cannot be written.
    """
    if not 1 <= shards <= 99_999:
        raise ValueError(f"shards is {shards}; expected 1 to 99999")
    if dtype is not None and dtype not in ITEM_SIZES:
        raise ValueError(f"dtype is {dtype!r}; expected one of {', '.join(ITEM_SIZES)}")
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists already; choose another folder")
    folder = folder.resolve()  # "." has no name to derive another from
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        partial.mkdir(parents=True)
        _write_json(partial / "config.json", hub_config(weights.config, dtype or "bfloat16"))
        _write_json(partial / "preprocessor_config.json", hub_preprocessor_config(weights.config.family))
        _write_weights(partial, weights, shards, dtype)
        partial.replace(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_weights(folder: Path, weights: VisionWeights, shards: int, dtype: str | None) -> None:
    groups = _distribute(weights, shards, dtype)
    if shards == 1:
        _write_safetensors(folder / SINGLE_FILE, groups[0])
        return
    # the released files count to five digits and give the total in six
    files = [f"model-{i:05d}-of-{shards:06d}.safetensors" for i in range(1, shards + 1)]
    for file, group in zip(files, groups, strict=True):
        _write_safetensors(folder / file, group)
    total = sum(tensor.size for group in groups for tensor in group)
    placed = {tensor.name: file for file, group in zip(files, groups, strict=True) for tensor in group}
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))})


def _distribute(weights: VisionWeights, shards: int, dtype: str | None) -> list[list[_Tensor]]:
    vision = [_vision_tensor(weights, name, shape, dtype) for name, shape in tensor_shapes(weights.config).items()]
    tower = [tensor for tensor in vision if tensor.name.startswith("vision_tower.")]
    projector = [tensor for tensor in vision if not tensor.name.startswith("vision_tower.")]
    language_shards = max(1, shards - 2)
    layers = [_language_layer(weights.config, i) for i in range(language_shards)]
    layers[0] = [*_language_ends(weights.config), *layers[0]]
    if shards == 1:
        return [layers[0] + projector + tower]
    if shards == 2:
        return [layers[0] + projector, tower]
    return [*layers, projector, tower]


def _vision_tensor(weights: VisionWeights, name: str, shape: tuple[int, ...], dtype: str | None) -> _Tensor:
    stored = weights.dtype(name)
    wanted = dtype or stored
    count = int(np.prod(shape))

    def raw() -> Raw:
        data = weights.raw(name)
        if wanted == stored:
            return data
        converted: Raw = data.view(_NUMPY_TYPES[stored]).astype(_NUMPY_TYPES[wanted]).view(np.uint8)
        return converted

    return _Tensor(name, _FORMAT_NAMES[wanted], shape, count * ITEM_SIZES[wanted], raw)


def _write_safetensors(path: Path, tensors: list[_Tensor]) -> None:
    """Write one file, a tensor at a time, so that memory does not grow with the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.size]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data
    by_name = {tensor.name: tensor for tensor in tensors}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, raw in in_order(by_name, lambda name: by_name[name].raw()):
            file.write(raw.data)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ the language part


def _zeros(name: str, dtype: str, shape: tuple[int, ...], item_size: int) -> _Tensor:
    size = int(np.prod(shape)) * item_size
    return _Tensor(name, dtype, shape, size, lambda: np.zeros(size, np.uint8))


def _language_ends(config: VisionConfig) -> Iterable[_Tensor]:
    width = config.text_hidden_size
    yield _zeros("language_model.model.embed_tokens.weight", "BF16", (_VOCABULARY, width), 2)
    yield _zeros("language_model.model.norm.weight", "BF16", (width,), 2)
    yield _zeros("language_model.lm_head.weight", "BF16", (_VOCABULARY, width), 2)


def _language_layer(config: VisionConfig, layer: int) -> list[_Tensor]:
    """One norm and one expert's projection; the latter packed to four bits in groups of 32, except in Kimi-VL."""
    root, width = f"language_model.model.layers.{layer}", config.text_hidden_size
    expert = f"{root}.mlp.experts.0.down_proj.weight"
    norm = _zeros(f"{root}.input_layernorm.weight", "BF16", (width,), 2)
    if config.family == "kimi_vl":
        return [norm, _zeros(expert, "BF16", (width, _EXPERT_WIDTH), 2)]
    return [
        norm,
        _zeros(f"{expert}_packed", "I32", (width, _EXPERT_WIDTH // 8), 4),
        _zeros(f"{expert}_scale", "BF16", (width, _EXPERT_WIDTH // 32), 2),
        _zeros(f"{expert}_shape", "I32", (2,), 4),
    ]


# --------------------------------------------------------------------------------------------------- hub spellings


def hub_config(config: VisionConfig, dtype: str = "bfloat16") -> dict[str, Any]:
    """The config.json of the family's hub repository, with the sizes of ``config``.

    It has no field for ``norm_eps`` and ``rope_theta``, as the released files have none.

    Args:
        config: the tower.
        dtype: of the vision tensors.
    """
    common = {"media_placeholder_token_id": 163605, "ignore_index": -100, "tie_word_embeddings": False}
    text: dict[str, Any] = {"hidden_size": config.text_hidden_size, "vocab_size": _VOCABULARY}
    if config.family == "kimi_vl":
        vision = {"model_type": "moonvit", **_plain_sizes(config), "torch_dtype": dtype}
        top = {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "torch_dtype": dtype}
        return {**top, **common, "text_config": {"model_type": "deepseek_v3", **text}, "vision_config": vision}
    vision = {"model_type": "", **_vt_sizes(config)}
    architecture, text_type = "KimiK25ForConditionalGeneration", "kimi_k2"
    if config.family == "kimi_k3":
        del vision["model_type"]
        vision |= _k3_fields(config)
        architecture, text_type = "KimiK3ForConditionalGeneration", "kimi_linear"
    text = {"model_type": text_type, **text, "quantization_config": _quantization_config(config.family)}
    top = {"architectures": [architecture], "model_type": config.family, "dtype": dtype}
    return {**top, **common, "text_config": text, "vision_config": vision}


def _plain_sizes(config: VisionConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "init_pos_emb_height": config.pos_emb_height,
        "init_pos_emb_width": config.pos_emb_width,
        "merge_kernel_size": list(config.merge_kernel_size),
        "patch_size": config.patch_size,
    }


def _vt_sizes(config: VisionConfig) -> dict[str, Any]:
    renamed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {f"vt_{name}" if name in renamed else name: value for name, value in _plain_sizes(config).items()}
    return {
        **sizes,
        "init_pos_emb_time": config.pos_emb_time,
        "merge_type": "sd2_tpool",
        "mm_hidden_size": config.hidden_size,
        "mm_projector_type": config.mm_projector_type,
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": config.projector_ln_eps,
        "text_hidden_size": config.text_hidden_size,
        "video_attn_type": "spatial_temporal",
    }


def _k3_fields(config: VisionConfig) -> dict[str, Any]:
    copied = ("qkv_hidden_size", "norm_type", "attn_bias", "linear_bias", "patch_embed_proj_bias")
    return {
        **{name: getattr(config, name) for name in (*copied, "pos_emb_interpolation_mode")},
        "mlp_type": "mlp2",
        "activation_func": "gelu_pytorch_tanh",
        "_attn_implementation": "flash_attention_2",
    }


def _quantization_config(family: str) -> dict[str, Any]:
    """What stands in the released text_config. K2.5's list of exceptions names no vision tensor, K3's does."""
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    if family == "kimi_k3":
        ignore += ["re:.*vision_tower.*", "re:.*mm_projector.*"]
    weights = {"num_bits": 4, "type": "float" if family == "kimi_k3" else "int", "group_size": 32, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized" if family == "kimi_k3" else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}},
    }


_KIMI_VL_MEDIA = {"in_token_limit": 4096, "num_pooled_tokens": 1024, "pad_input": True}
_K25_MEDIA = {
    "in_patch_limit": 16384,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
_K3_MEDIA = {
    **_K25_MEDIA,
    "in_patch_limit": 65536,
    "in_patch_limit_each_frame": 16384,
    "in_patch_limit_video": 655360,
    "sample_fps": 8.0,
    "transparent_bg_config": {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
}


def hub_preprocessor_config(family: str) -> dict[str, Any]:
    """The preprocessor_config.json of the family's hub repository; nested in ``media_proc_cfg`` from K2.5 on.

    Args:
        family: one of :data:`model.config.FAMILIES`.
    """
    common = {"patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    if family == "kimi_vl":
        return {**common, **_KIMI_VL_MEDIA, "merge_kernel_size": [2, 2]}
    media = _K3_MEDIA if family == "kimi_k3" else _K25_MEDIA
    return {"media_proc_cfg": {**common, **media, "merge_kernel_size": 2}}
