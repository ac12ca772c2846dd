"""Hub configs of the three families, as kimi-vision.md (sections 1.1 to 1.4) lists them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from model.checkpoint_writer import hub_config
from model.config import (
    FAMILY_DEFAULTS,
    PRESETS,
    VisionConfig,
    load_hub_config,
    parameter_count,
    parse_hub_config,
    preset,
    projector_shapes,
    tensor_shapes,
)
from model.errors import ConfigError

# Written from the specification, not by the code under test.
KIMI_VL: dict[str, Any] = {
    "model_type": "kimi_vl",
    "media_placeholder_token_id": 163605,
    "ignore_index": -100,
    "pad_token_id": 0,
    "text_config": {"hidden_size": 2048},
    "vision_config": {
        "model_type": "moonvit",
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "merge_kernel_size": [2, 2],
        "torch_dtype": "bfloat16",
    },
}
K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "text_config": {"hidden_size": 7168, "quantization_config": {"quant_method": "compressed-tensors"}},
    "vision_config": {
        "model_type": "",
        "vt_hidden_size": 1152,
        "vt_intermediate_size": 4304,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 16,
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "projector_hidden_act": "gelu",
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "video_attn_type": "spatial_temporal",
        "pos_emb_type": "divided_fixed",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": 1152,
        "text_hidden_size": 7168,
        "projector_ln_eps": 1e-5,
    },
}
K3: dict[str, Any] = {
    "model_type": "kimi_k3",
    "text_config": {"hidden_size": 7168},
    "vision_config": {
        **{
            name: value for name, value in K25["vision_config"].items() if name not in ("model_type", "video_attn_type")
        },
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "mm_hidden_size": 1024,
        "mm_projector_type": "patchmergerv2",
        "qkv_hidden_size": 1536,
        "norm_type": "rmsnorm",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "mlp_type": "mlp2",
        "activation_func": "gelu_pytorch_tanh",
        "pos_emb_interpolation_mode": "bilinear",
        "_attn_implementation": "flash_attention_2",
    },
}
FILES = {"kimi-vl": KIMI_VL, "kimi-k2.5": K25, "kimi-k3": K3}


def changed(document: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The file with other fields in vision_config; None removes one."""
    vision = {**document["vision_config"], **fields}
    return {**document, "vision_config": {name: value for name, value in vision.items() if value is not None}}


@pytest.mark.parametrize("name", FILES)
def test_released_file_is_the_preset(name: str):
    assert parse_hub_config(FILES[name]) == PRESETS[name]


@pytest.mark.parametrize("name", FILES)
def test_absent_fields_take_the_familys_default(name: str):
    document = {"model_type": FILES[name]["model_type"], "vision_config": {}}
    assert parse_hub_config(document) == PRESETS[name]
    assert parse_hub_config({**document, "text_config": {"hidden_size": 512}}).text_hidden_size == 512


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("field", sorted(set(K3["vision_config"]) | set(KIMI_VL["vision_config"])))
def test_null_is_absent(name: str, field: str):
    document = FILES[name]
    assert parse_hub_config({**document, "vision_config": {**document["vision_config"], field: None}}) == PRESETS[name]


def test_expected_values_of_each_family():
    k25, k3, vl = (parse_hub_config(FILES[name]) for name in ("kimi-k2.5", "kimi-k3", "kimi-vl"))
    assert (k25.head_dim, k3.head_dim, vl.head_dim) == (72, 128, 72)
    assert (k25.merged_size, k3.merged_size) == (4608, 4096)
    assert (k25.max_frames, k3.max_frames, vl.max_frames) == (4, 4, 1)
    assert (k25.norm_eps, k3.norm_eps, k3.projector_ln_eps) == (1e-5, 2.0**-23, 1e-5)
    assert (k25.norm_type, k3.norm_type) == ("layernorm", "rmsnorm")
    assert (k25.pos_emb_interpolation_mode, k3.pos_emb_interpolation_mode) == ("bicubic", "bilinear")
    assert (k25.attn_bias, k25.linear_bias, k25.patch_embed_proj_bias) == (True, True, True)
    assert (k3.attn_bias, k3.linear_bias, k3.patch_embed_proj_bias) == (False, False, False)
    assert k25.patch_pixels == 588


@pytest.mark.parametrize(
    ("top", "vision", "family"),
    [
        ("kimi_vl", "moonvit", "kimi_vl"),
        ("kimi_k25", "", "kimi_k25"),
        ("kimi_k25", "kimi_k25_vision", "kimi_k25"),
        ("kimi_k3", None, "kimi_k3"),
        (None, "moonvit3d", "kimi_k3"),
        (None, "moonvit", "kimi_vl"),
    ],
)
def test_family_from_model_type(top: str | None, vision: str | None, family: str):
    document = {"model_type": top, "vision_config": {"model_type": vision}}
    assert parse_hub_config(document).family == family


def test_plain_names_are_read_as_the_vt_names():
    """transformers' own class writes the plain names, and drops the vt_ names without a word."""
    plain = {"hidden_size": 96, "intermediate_size": 132, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain |= {"pos_emb_height": 8, "pos_emb_width": 9, "pos_emb_time": 3}
    vt = {f"vt_{name}" if not name.startswith("pos") else f"init_{name}": value for name, value in plain.items()}
    configs = [parse_hub_config({"model_type": "kimi_k25", "vision_config": fields}) for fields in (plain, vt)]
    assert configs[0] == configs[1]
    assert (configs[1].hidden_size, configs[1].qkv_hidden_size) == (96, 96)
    assert (configs[1].pos_emb_height, configs[1].pos_emb_width, configs[1].pos_emb_time) == (8, 9, 3)
    both = {"model_type": "kimi_k25", "vision_config": {**plain, **vt}}
    assert parse_hub_config(both) == configs[0]


def test_text_hidden_size_of_the_vision_config_comes_first():
    document = changed(K25, text_hidden_size=512)
    assert parse_hub_config(document).text_hidden_size == 512
    assert parse_hub_config(changed(K25, text_hidden_size=None)).text_hidden_size == 7168


def test_kimi_vl_has_no_time_axis_whatever_its_file_says():
    assert parse_hub_config(changed(KIMI_VL, init_pos_emb_time=4)).max_frames == 1


def test_k25_with_k3_fields():
    """A shared tower reads the eight fields in either family."""
    config = parse_hub_config(changed(K25, qkv_hidden_size=1536, norm_type="rmsnorm", attn_bias=False))
    assert (config.family, config.qkv_hidden_size, config.norm_type, config.attn_bias) == (
        "kimi_k25",
        1536,
        "rmsnorm",
        False,
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"merge_type": "avg"}, "merge_type 'avg' is not supported"),
        ({"pos_emb_type": "learned"}, "pos_emb_type 'learned' is not supported"),
        ({"video_attn_type": "spatial"}, "video_attn_type 'spatial' is not supported"),
        ({"mm_projector_type": "identity"}, "mm_projector_type 'identity' is not supported"),
        ({"mm_projector_type": "mlp"}, "mm_projector_type 'mlp' is not supported"),
        ({"norm_type": "batchnorm"}, "norm_type 'batchnorm' is not supported"),
        ({"activation_func": "gelu"}, "activation_func 'gelu' is not supported"),
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act 'relu' is not supported"),
        ({"mlp_type": "glu"}, "mlp_type 'glu' is not supported"),
        ({"pos_emb_interpolation_mode": "nearest"}, "pos_emb_interpolation_mode 'nearest' is not supported"),
        ({"patch_size": 16}, "patch_size 16 is not supported"),
        ({"merge_kernel_size": [1, 1]}, r"merge_kernel_size \(1, 1\) is not supported"),
        ({"merge_kernel_size": [2, 2, 2]}, "merge_kernel_size is .* two whole numbers"),
        ({"merge_kernel_size": [2, 2.0]}, "merge_kernel_size is .* two whole numbers"),
        ({"hidden_size": 1024}, "vt_hidden_size and hidden_size disagree: 1152, 1024"),
        ({"pos_emb_height": 32}, "init_pos_emb_height and pos_emb_height disagree: 64, 32"),
        ({"vt_hidden_size": 1152.0}, "vt_hidden_size is 1152.0; expected a whole number"),
        ({"vt_hidden_size": "1152"}, "vt_hidden_size is '1152'; expected a whole number"),
        ({"vt_num_hidden_layers": True}, "vt_num_hidden_layers is True; expected a whole number"),
        ({"attn_bias": 0}, "attn_bias is 0; expected true or false"),
        ({"norm_type": 1}, "norm_type is 1; expected a string"),
        ({"projector_ln_eps": "1e-5"}, "projector_ln_eps is '1e-5'; expected a number"),
        ({"projector_ln_eps": 0}, "projector_ln_eps is 0; expected a positive number"),
        ({"projector_ln_eps": float("nan")}, "projector_ln_eps is nan; expected a positive number"),
        ({"vt_num_hidden_layers": 0}, "num_hidden_layers is 0; expected 1 to 1024"),
        ({"vt_num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected 1 to 1024"),
        ({"vt_intermediate_size": -1}, "intermediate_size is -1; expected 1 to"),
        ({"init_pos_emb_time": 8}, "pos_emb_time is 8; expected 1 to 4"),
        ({"vt_num_attention_heads": 7}, "qkv_hidden_size 1152 with 7 heads"),
        ({"vt_num_attention_heads": 64}, "qkv_hidden_size 1152 with 64 heads"),  # head size 18: no two rotary axes
        ({"mm_hidden_size": 1024}, "mm_hidden_size is 1024"),
        ({"quantization_config": {"bits": 8}}, "INT8 and FP8 vision towers are not supported"),
        ({"torch_dtype": "int8"}, "torch_dtype 'int8' is not supported"),
        ({"dtype": "float8_e5m2"}, "dtype 'float8_e5m2' is not supported"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        parse_hub_config(changed(K25, **fields))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "no vision_config object"),
        ({"vision_config": []}, "no vision_config object"),
        ({"vision_config": {}}, "model_type is missing"),
        ({"model_type": "", "vision_config": {"model_type": ""}}, "model_type is missing"),
        ({"model_type": "qwen3_vl", "vision_config": {}}, "model_type 'qwen3_vl' is not supported"),
        ({"model_type": 3, "vision_config": {}}, "model_type 3 is not supported"),
        (
            {"model_type": "kimi_k25", "vision_config": {}, "text_config": {"hidden_size": "1"}},
            "text_config.hidden_size",
        ),
    ],
)
def test_documents_that_are_no_kimi_config(document: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        parse_hub_config(document)


def test_quantisation_of_the_language_part_is_no_obstacle():
    assert (
        parse_hub_config({**K25, "quantization_config": {"quant_method": "compressed-tensors"}}) == PRESETS["kimi-k2.5"]
    )


def test_norm_eps_is_an_option():
    assert parse_hub_config(K3, norm_eps=2.0**-7) == dataclasses.replace(PRESETS["kimi-k3"], norm_eps=2.0**-7)
    for wrong in (0.0, -1e-5, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="norm_eps"):
            parse_hub_config(K3, norm_eps=wrong)


@pytest.mark.parametrize("name", PRESETS)
def test_written_config_is_read_back(name: str):
    assert parse_hub_config(json.loads(json.dumps(hub_config(PRESETS[name])))) == PRESETS[name]


def test_load_names_the_file(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(K25))
    assert load_hub_config(tmp_path) == PRESETS["kimi-k2.5"]
    (tmp_path / "config.json").write_text(json.dumps(changed(K25, merge_type="a//b")))
    with pytest.raises(ConfigError) as caught:
        load_hub_config(tmp_path)
    assert str(caught.value) == f"{tmp_path}/config.json: merge_type 'a//b' is not supported; expected 'sd2_tpool'"
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hub_config(tmp_path)


# --------------------------------------------------------------------------------------------------- tensors of a tower


@pytest.mark.parametrize(
    ("name", "tower", "projector", "tensors"),
    [
        ("kimi-vl", 416_866_032, 30_679_808, 329 + 6),
        ("kimi-k2.5", 416_866_032, 54_277_888, 329 + 6),
        ("kimi-k3", 401_214_464, 46_144_512, 165 + 3),
    ],
)
def test_parameter_counts_of_the_specification(name: str, tower: int, projector: int, tensors: int):
    assert parameter_count(PRESETS[name]) == (tower, projector)
    assert len(tensor_shapes(PRESETS[name])) == tensors


@pytest.mark.parametrize(
    ("name", "tensor", "shape"),
    [
        ("kimi-k2.5", "vision_tower.patch_embed.proj.weight", (1152, 3, 14, 14)),
        ("kimi-k2.5", "vision_tower.patch_embed.pos_emb.weight", (64, 64, 1152)),
        ("kimi-k2.5", "vision_tower.encoder.blocks.26.wqkv.bias", (3456,)),
        ("kimi-k2.5", "vision_tower.encoder.blocks.0.mlp.fc0.weight", (4304, 1152)),
        ("kimi-k2.5", "vision_tower.encoder.final_layernorm.bias", (1152,)),
        ("kimi-k2.5", "mm_projector.pre_norm.weight", (1152,)),
        ("kimi-k2.5", "mm_projector.proj.2.weight", (7168, 4608)),
        ("kimi-k3", "vision_tower.encoder.blocks.26.wqkv.weight", (4608, 1024)),
        ("kimi-k3", "vision_tower.encoder.blocks.0.wo.weight", (1024, 1536)),
        ("kimi-k3", "mm_projector.proj.0.weight", (4096, 4096)),
        ("kimi-k3", "mm_projector.post_norm.weight", (7168,)),
        ("kimi-vl", "multi_modal_projector.pre_norm.bias", (1152,)),
        ("kimi-vl", "multi_modal_projector.linear_1.weight", (4608, 4608)),
        ("kimi-vl", "multi_modal_projector.linear_2.bias", (2048,)),
    ],
)
def test_names_and_shapes_of_the_specification(name: str, tensor: str, shape: tuple[int, ...]):
    assert tensor_shapes(PRESETS[name])[tensor] == shape


def test_k3_has_no_bias_and_no_pre_norm():
    names = tensor_shapes(PRESETS["kimi-k3"])
    assert not [name for name in names if name.endswith(".bias") or "pre_norm" in name]
    assert list(projector_shapes(PRESETS["kimi-k3"])) == [name for name in names if name.startswith("mm_projector.")]


def test_preset_layers_and_unknown_preset():
    assert preset("tiny", layers=5) == dataclasses.replace(PRESETS["tiny"], num_hidden_layers=5)
    assert preset("tiny") is PRESETS["tiny"]
    with pytest.raises(ConfigError, match="preset 'huge' does not exist; choose 'kimi-vl'"):
        preset("huge")
    with pytest.raises(ConfigError, match="num_hidden_layers is 0"):
        preset("tiny", layers=0)


def test_config_hash_sees_every_field():
    base = PRESETS["kimi-k3"]
    others = {
        "family": "kimi_k25",
        "norm_type": "layernorm",
        "pos_emb_interpolation_mode": "bicubic",
        "mm_projector_type": "patchmerger",
        "num_attention_heads": 6,
        "pos_emb_time": 2,
    }
    hashes = {base.sha256}
    fields = [
        field.name
        for field in dataclasses.fields(VisionConfig)
        if field.name not in ("patch_size", "merge_kernel_size")
    ]
    for field in fields:
        value = getattr(base, field)
        other = others.get(field, not value if isinstance(value, bool) else value * 2)
        hashes.add(dataclasses.replace(base, **{field: other}).sha256)
    assert len(hashes) == len(fields) + 1
    assert base.sha256 == dataclasses.replace(base).sha256


def test_family_defaults_are_the_presets():
    assert {config.family: config for config in map(PRESETS.get, FILES) if config} == FAMILY_DEFAULTS
