"""Hub configs of the three families, read into the one description that the tower is built from.

The families are one tower. Kimi-VL and K2.5/K2.6 differ only in names and in the time axis; K3 sets the eight fields
that K2.5 configs leave out. A field that is absent takes its family's default; a value that this tower does not
compute is refused by name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.errors import ConfigError
from model.json_file import read_json_object

FAMILIES = ("kimi_vl", "kimi_k25", "kimi_k3")
PATCH_SIZE = 14
PATCH_VALUES = 3 * PATCH_SIZE * PATCH_SIZE  # of three colours
MAX_SIDE = 512  # patches; the hub code's RoPE table and its processor end there
MAX_FRAMES = 4  # temporal_merge_kernel_size; a longer clip is several items

# torch.finfo(float32).eps. The hub code builds RMSNorm without an eps, which PyTorch reads as fp32's epsilon even for
# bf16 (pytorch/pytorch#142848); older builds took 2**-7. The config has no field for it, so it is an option here.
K3_RMS_EPS = 1.1920928955078125e-07


@dataclass(frozen=True)
class VisionConfig:
    """Sizes and choices of one vision tower with its projector.

    Attributes:
        family: one of FAMILIES; decides tensor names, preprocessing and which frames are allowed.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_hidden_layers: blocks.
        num_attention_heads: heads.
        qkv_hidden_size: heads times head size; not ``hidden_size`` in K3.
        text_hidden_size: width of the rows that leave the projector.
        pos_emb_height: rows of the learned position table.
        pos_emb_width: columns of the learned position table.
        pos_emb_time: frames that have a time embedding; 1 means none.
        norm_type: ``layernorm`` or ``rmsnorm`` in the tower.
        norm_eps: eps of the tower's norms.
        attn_bias: biases of wqkv and wo.
        linear_bias: biases of the MLP and of the projector.
        patch_embed_proj_bias: bias of the patch embedding.
        pos_emb_interpolation_mode: ``bicubic`` or ``bilinear``.
        mm_projector_type: ``patchmerger`` (norm first) or ``patchmergerv2`` (RMSNorm last).
        projector_ln_eps: eps of the projector's norm.
        patch_size: pixels; 14.
        merge_kernel_size: 2 by 2 patches become one row.
        rope_theta: base of the rotary frequencies.
    """

    family: str
    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    qkv_hidden_size: int = 1152
    text_hidden_size: int = 7168
    pos_emb_height: int = 64
    pos_emb_width: int = 64
    pos_emb_time: int = 4
    norm_type: str = "layernorm"
    norm_eps: float = 1e-5
    attn_bias: bool = True
    linear_bias: bool = True
    patch_embed_proj_bias: bool = True
    pos_emb_interpolation_mode: str = "bicubic"
    mm_projector_type: str = "patchmerger"
    projector_ln_eps: float = 1e-5
    patch_size: int = PATCH_SIZE
    merge_kernel_size: tuple[int, int] = (2, 2)
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        """Refuse sizes and choices that the formulas do not cover.

        Raises:
            ConfigError: names the field and its value.
        """
        _check_choices(self)
        _check_sizes(self)

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.qkv_hidden_size // self.num_attention_heads

    @property
    def patch_pixels(self) -> int:
        """Values of one patch: three channels of patch_size by patch_size."""
        return 3 * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of one merged row before the projector."""
        return self.hidden_size * self.merge_kernel_size[0] * self.merge_kernel_size[1]

    @property
    def max_frames(self) -> int:
        """Frames that one item may have."""
        return self.pos_emb_time

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        return {**dataclasses.asdict(self), "merge_kernel_size": list(self.merge_kernel_size)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> VisionConfig:
        """Make a config from what :meth:`to_dict` gave.

        Raises:
            ConfigError: a field is unknown, missing or has a value that is not supported.
        """
        names = {field.name for field in dataclasses.fields(VisionConfig)}
        if wrong := sorted(names.symmetric_difference(values)):
            raise ConfigError(f"config: {wrong[0]!r} is unknown or missing")
        return VisionConfig(**{**values, "merge_kernel_size": _pair("merge_kernel_size", values["merge_kernel_size"])})

    @property
    def sha256(self) -> str:
        """Hash of everything that decides what the tower computes, apart from its weights."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()


def _check_choices(config: VisionConfig) -> None:
    choices = {
        "family": FAMILIES,
        "norm_type": ("layernorm", "rmsnorm"),
        "pos_emb_interpolation_mode": ("bicubic", "bilinear"),
        "mm_projector_type": ("patchmerger", "patchmergerv2"),
        "patch_size": (PATCH_SIZE,),
        "merge_kernel_size": ((2, 2),),
    }
    for field, allowed in choices.items():
        value = getattr(config, field)
        if value not in allowed:
            raise ConfigError(f"config: {field} {value!r} is not supported; expected {_either(allowed)}")


def _check_sizes(config: VisionConfig) -> None:
    limits = {"num_hidden_layers": 1024, "pos_emb_height": 4096, "pos_emb_width": 4096, "pos_emb_time": MAX_FRAMES}
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "qkv_hidden_size", "text_hidden_size")
    for field in (*sizes, *limits):
        value, limit = getattr(config, field), limits.get(field, 1 << 20)
        if not 1 <= value <= limit:
            raise ConfigError(f"config: {field} is {value}; expected 1 to {limit}")
    if config.qkv_hidden_size % config.num_attention_heads or config.head_dim % 4:
        raise ConfigError(
            f"config: qkv_hidden_size {config.qkv_hidden_size} with {config.num_attention_heads} heads gives no head "
            "size that is divisible by 4, as rotary positions in two axes need; expected the sizes of a released tower"
        )
    for field in ("norm_eps", "projector_ln_eps", "rope_theta"):
        value = getattr(config, field)
        if not 0 < value < float("inf"):
            raise ConfigError(f"config: {field} is {value}; expected a positive number")
    if config.hidden_size % 2:
        raise ConfigError(f"config: hidden_size {config.hidden_size} is odd; the time embedding needs halves")


# ------------------------------------------------------------------------------------------------- family defaults

_KIMI_VL = VisionConfig(family="kimi_vl", text_hidden_size=2048, pos_emb_time=1)
_KIMI_K25 = VisionConfig(family="kimi_k25")
_KIMI_K3 = VisionConfig(
    family="kimi_k3",
    hidden_size=1024,
    intermediate_size=4096,
    num_attention_heads=12,
    qkv_hidden_size=1536,
    norm_type="rmsnorm",
    norm_eps=K3_RMS_EPS,
    attn_bias=False,
    linear_bias=False,
    patch_embed_proj_bias=False,
    pos_emb_interpolation_mode="bilinear",
    mm_projector_type="patchmergerv2",
)
FAMILY_DEFAULTS = {config.family: config for config in (_KIMI_VL, _KIMI_K25, _KIMI_K3)}

# The tiny towers keep every feature of their family; head size 32 and grid 8x8 only make them fast.
_TINY_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 132,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "text_hidden_size": 56,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
}
PRESETS: dict[str, VisionConfig] = {
    "kimi-vl": _KIMI_VL,
    "kimi-k2.5": _KIMI_K25,
    "kimi-k3": _KIMI_K3,
    "tiny": dataclasses.replace(_KIMI_K25, **_TINY_SIZES, qkv_hidden_size=96),
    "tiny-k3": dataclasses.replace(_KIMI_K3, **_TINY_SIZES, qkv_hidden_size=128),
}


def preset(name: str, *, layers: int | None = None) -> VisionConfig:
    """Look up a preset.

    Args:
        name: a key of PRESETS.
        layers: another number of blocks.

    Raises:
        ConfigError: no such preset, or a number of layers outside 1 to 1024.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} does not exist; choose {_either(tuple(PRESETS))}")
    return PRESETS[name] if layers is None else dataclasses.replace(PRESETS[name], num_hidden_layers=layers)


# ------------------------------------------------------------------------------------------------- reading hub files

# Our field: the names under which a vision_config may hold it. K2.5 and K3 files use the vt_ and init_ names, Kimi-VL
# and transformers' own class the plain ones. transformers drops the vt_ names silently, which is why both are known.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("vt_hidden_size", "hidden_size"),
    "intermediate_size": ("vt_intermediate_size", "intermediate_size"),
    "num_hidden_layers": ("vt_num_hidden_layers", "num_hidden_layers"),
    "num_attention_heads": ("vt_num_attention_heads", "num_attention_heads"),
    "pos_emb_height": ("init_pos_emb_height", "pos_emb_height"),
    "pos_emb_width": ("init_pos_emb_width", "pos_emb_width"),
    "pos_emb_time": ("init_pos_emb_time", "pos_emb_time"),
    "qkv_hidden_size": ("qkv_hidden_size",),
    "norm_type": ("norm_type",),
    "attn_bias": ("attn_bias",),
    "linear_bias": ("linear_bias",),
    "patch_embed_proj_bias": ("patch_embed_proj_bias",),
    "pos_emb_interpolation_mode": ("pos_emb_interpolation_mode",),
    "mm_projector_type": ("mm_projector_type",),
    "projector_ln_eps": ("projector_ln_eps",),
    "patch_size": ("patch_size",),
    "merge_kernel_size": ("merge_kernel_size",),
    "text_hidden_size": ("text_hidden_size",),
}

# Fields that this tower has no switch for: any other value would be another network.
_FIXED: dict[str, tuple[Any, ...]] = {
    "merge_type": ("sd2_tpool",),
    "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",),
    "activation_func": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "mlp_type": ("mlp2",),
    "projector_hidden_act": ("gelu",),
}

_MODEL_TYPES = {
    "kimi_vl": "kimi_vl",
    "moonvit": "kimi_vl",
    "kimi_k25": "kimi_k25",
    "kimi_k25_vision": "kimi_k25",
    "kimi_k3": "kimi_k3",
    "moonvit3d": "kimi_k3",
}


def parse_hub_config(document: Mapping[str, Any], *, norm_eps: float | None = None) -> VisionConfig:
    """Read the config.json of a hub repository.

    Args:
        document: the whole file; its ``vision_config`` holds the tower.
        norm_eps: eps of the tower's norms where the config has no field for it (K3's RMSNorm).

    Raises:
        ConfigError: no vision_config, an unknown family, a value of another type, or one that is not supported.
    """
    vision = document.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ConfigError("config.json: no vision_config object; this is not a Kimi vision-language checkpoint")
    family = _family(document, vision)
    default = FAMILY_DEFAULTS[family]
    _refuse_quantised(vision)
    for field, allowed in _FIXED.items():
        if vision.get(field) is not None and vision[field] not in allowed:
            raise ConfigError(f"config.json: {field} {vision[field]!r} is not supported; expected {_either(allowed)}")
    values = {field: value for field in _SPELLINGS if (value := _read(vision, field, default)) is not None}
    values.setdefault("text_hidden_size", _text_width(document, default))
    if "qkv_hidden_size" not in values and family != "kimi_k3":
        values["qkv_hidden_size"] = values.get("hidden_size", default.hidden_size)
    if family == "kimi_vl":
        values["pos_emb_time"] = 1
    if norm_eps is not None:
        values["norm_eps"] = norm_eps
    config = dataclasses.replace(default, **values)
    width = vision.get("mm_hidden_size")
    if width is not None and width != config.hidden_size:
        raise ConfigError(f"config.json: mm_hidden_size is {width}; expected hidden_size, {config.hidden_size}")
    return config


def load_hub_config(folder: Path, *, norm_eps: float | None = None) -> VisionConfig:
    """Read ``config.json`` in a checkpoint folder.

    Raises:
        ConfigError: the file is missing, is no JSON object, or :func:`parse_hub_config` refuses it.
    """
    path = folder / "config.json"
    document = read_json_object(path)
    if document is None:
        raise ConfigError(f"{path}: no such file; SOURCE must be a checkpoint folder in hub layout")
    try:
        return parse_hub_config(document, norm_eps=norm_eps)
    except ConfigError as error:
        reason = str(error).removeprefix("config.json: ").removeprefix("config: ")
        # the reason may quote a value from the file, however long it is
        raise ConfigError(f"{path}: {reason if len(reason) <= 400 else reason[:397] + '...'}") from error


def _family(document: Mapping[str, Any], vision: Mapping[str, Any]) -> str:
    # K2.5's hub file has an empty model_type inside vision_config, so the top level decides first.
    for value in (document.get("model_type"), vision.get("model_type")):
        if value:
            family = _MODEL_TYPES.get(value) if isinstance(value, str) else None
            if family is None:
                raise ConfigError(f"config.json: model_type {value!r} is not supported; expected {_either(FAMILIES)}")
            return family
    raise ConfigError(f"config.json: model_type is missing; expected {_either(FAMILIES)}")


def _read(vision: Mapping[str, Any], field: str, default: VisionConfig) -> Any:  # noqa: ANN401 - JSON
    present = {name: vision[name] for name in _SPELLINGS[field] if vision.get(name) is not None}
    if not present:
        return None
    name, value = next(iter(present.items()))
    if any(other != value for other in list(present.values())[1:]):
        values = ", ".join(map(repr, present.values()))
        raise ConfigError(f"config.json: {' and '.join(present)} disagree: {values}; remove the one that is wrong")
    if field == "merge_kernel_size":
        return _pair(name, value)
    expected = type(getattr(default, field))
    # bool is an int in Python, and JSON writes 1e-5 as a float but 1 as an int
    fits = isinstance(value, expected) and isinstance(value, bool) == (expected is bool)
    if not (fits or (expected is float and isinstance(value, int) and not isinstance(value, bool))):
        raise ConfigError(f"config.json: {name} is {value!r}; expected {_type_names[expected]}")
    return value


_type_names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def _pair(name: str, value: object) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(side) is int for side in value):
        return value[0], value[1]
    raise ConfigError(f"config.json: {name} is {value!r}; expected two whole numbers")


def _text_width(document: Mapping[str, Any], default: VisionConfig) -> int:
    text = document.get("text_config")
    width = text.get("hidden_size") if isinstance(text, Mapping) else None
    if width is None:
        return default.text_hidden_size
    if type(width) is not int:
        raise ConfigError(f"config.json: text_config.hidden_size is {width!r}; expected a whole number")
    return width


def _refuse_quantised(vision: Mapping[str, Any]) -> None:
    # A quantization_config at the root or in text_config says nothing about vision: released K2.5 files name no vision
    # tensors in it, yet keep them in bf16. The tensors themselves are looked at when they are read.
    if vision.get("quantization_config"):
        raise ConfigError(
            "config.json: vision_config.quantization_config: INT8 and FP8 vision towers are not supported"
        )
    for field in ("dtype", "torch_dtype"):
        value = vision.get(field)
        if value is not None and value not in ("bfloat16", "float16", "float32"):
            raise ConfigError(f"config.json: {field} {value!r} is not supported; expected bfloat16, float16 or float32")


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) if isinstance(value, str) else str(value) for value in values)


# --------------------------------------------------------------------------------------------- the tensors of a tower


def tensor_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Names, as the checkpoint has them, and shapes of every tensor of tower and projector, in checkpoint order."""
    width, inner, mlp = config.hidden_size, config.qkv_hidden_size, config.intermediate_size
    tower = "vision_tower."
    shapes = _linear(
        f"{tower}patch_embed.proj", width, (3, config.patch_size, config.patch_size), bias=config.patch_embed_proj_bias
    )
    shapes[f"{tower}patch_embed.pos_emb.weight"] = (config.pos_emb_height, config.pos_emb_width, width)
    for i in range(config.num_hidden_layers):
        block = f"{tower}encoder.blocks.{i}."
        shapes |= _norm(f"{block}norm0", width, config.norm_type)
        shapes |= _linear(f"{block}wqkv", 3 * inner, (width,), bias=config.attn_bias)
        shapes |= _linear(f"{block}wo", width, (inner,), bias=config.attn_bias)
        shapes |= _norm(f"{block}norm1", width, config.norm_type)
        shapes |= _linear(f"{block}mlp.fc0", mlp, (width,), bias=config.linear_bias)
        shapes |= _linear(f"{block}mlp.fc1", width, (mlp,), bias=config.linear_bias)
    shapes |= _norm(f"{tower}encoder.final_layernorm", width, config.norm_type)
    return shapes | projector_shapes(config)


def projector_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the projector's tensors."""
    first, last = projector_linears(config)
    merged = config.merged_size
    linears = _linear(first, merged, (merged,), bias=config.linear_bias)
    linears |= _linear(last, config.text_hidden_size, (merged,), bias=config.linear_bias)
    if config.mm_projector_type == "patchmergerv2":
        return linears | _norm("mm_projector.post_norm", config.text_hidden_size, "rmsnorm")
    root = first.partition(".")[0]
    return _norm(f"{root}.pre_norm", config.hidden_size, "layernorm") | linears


def projector_linears(config: VisionConfig) -> tuple[str, str]:
    """Checkpoint names of the projector's two linear layers."""
    if config.family == "kimi_vl":
        return "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
    return "mm_projector.proj.0", "mm_projector.proj.2"


def _linear(name: str, out: int, inputs: tuple[int, ...], *, bias: bool) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (out, *inputs)}
    return weight | ({f"{name}.bias": (out,)} if bias else {})


def _norm(name: str, width: int, norm_type: str) -> dict[str, tuple[int, ...]]:
    weight: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
    return weight | ({f"{name}.bias": (width,)} if norm_type == "layernorm" else {})


def parameter_count(config: VisionConfig) -> tuple[int, int]:
    """Parameters of the tower and of the projector."""
    shapes = tensor_shapes(config)
    tower = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("vision_tower."))
    return tower, sum(map(math.prod, shapes.values())) - tower
