"""The preprocessing constants of each family, and of a checkpoint whose preprocessor_config.json sets its own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from model.config import FAMILIES, MAX_FRAMES, MAX_SIDE, PATCH_SIZE
from model.errors import ConfigError, ImageError
from model.json_file import read_json_object


@dataclass(frozen=True)
class PreprocessRule:
    """The preprocessing constants of one checkpoint.

    Attributes:
        family: one of FAMILIES.
        patch_budget: patches of an image before padding; a padded grid can have more.
        side_limit: patches of one side.
        frame_budget: patches of one video frame before padding; None where the family takes no video.
        video_budget: patches of all frames of a clip together, or None.
        sample_fps: frames taken from a second of video.
        max_video_frames: frames taken from one video, or None.
        chessboard: transparent pixels are laid over a chessboard after resizing; otherwise alpha is dropped.
    """

    family: str
    patch_budget: int
    side_limit: int = MAX_SIDE
    frame_budget: int | None = None
    video_budget: int | None = None
    sample_fps: float = 2.0
    max_video_frames: int | None = None
    chessboard: bool = False

    @property
    def max_frames(self) -> int:
        """Frames that one item may have."""
        return 1 if self.frame_budget is None else MAX_FRAMES

    def for_frames(self, frames: int) -> PreprocessRule:
        """The rule for each frame of a clip.

        Args:
            frames: frames of the clip.

        Raises:
            ImageError: the family takes no video.
        """
        if self.frame_budget is None:
            raise ImageError(f"{self.family} takes images only; pass each frame as an image of its own")
        budget = self.frame_budget
        if self.video_budget is not None:
            budget = max(1, min(round(self.video_budget / frames), budget))
        return dataclasses.replace(self, patch_budget=budget)


# Kimi-VL: the Instruct release. The Thinking release has a larger budget in its preprocessor_config.json.
RULES: dict[str, PreprocessRule] = {
    "kimi_vl": PreprocessRule("kimi_vl", patch_budget=4096),
    "kimi_k25": PreprocessRule("kimi_k25", patch_budget=16384, frame_budget=4096),
    "kimi_k3": PreprocessRule(
        "kimi_k3", 65536, frame_budget=16384, video_budget=655360, sample_fps=8.0, chessboard=True
    ),
}


# -------------------------------------------------------------------------------------- preprocessor_config.json

_BUDGET_FIELD = {"kimi_vl": "in_token_limit", "kimi_k25": "in_patch_limit", "kimi_k3": "in_patch_limit"}
# A file with another family's or transformers' own budget field is not the file of this checkpoint; ignoring the field
# would leave the default budget in force without a word.
_BUDGET_FIELDS = ("in_token_limit", "in_patch_limit", "max_patches")

# Fields with one supported value: another one would give other pixels or another grid. null counts as absent.
_FIXED: dict[str, tuple[Any, ...]] = {
    "patch_size": (PATCH_SIZE,),
    "merge_kernel_size": (2, [2, 2]),
    "merge_size": (2,),
    "temporal_merge_kernel_size": (MAX_FRAMES,),
    "image_mean": ([0.5, 0.5, 0.5],),
    "image_std": ([0.5, 0.5, 0.5],),
    "pad_input": (True,),
    "do_resize": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
    "resample": (int(Image.Resampling.BICUBIC),),
    "fixed_output_tokens": (None,),
    "fixed_output_tokens_each_frame": (None,),
}
# K3's released board, under the file's own names and under those that descriptions of it use
_BOARD_CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    },
    {"pattern": "chessboard", "square_size": 8, "square_on_top_left": True, "white": 255, "gray": 180},
)


def load_rule(folder: Path, family: str) -> PreprocessRule:
    """Read ``preprocessor_config.json`` in a checkpoint folder; without one, the family's released values hold.

    Raises:
        ConfigError: the file is no JSON object, or :func:`parse_rule` refuses it.
    """
    document = read_json_object(folder / "preprocessor_config.json") or {}
    try:
        return parse_rule(document, family)
    except ConfigError as error:
        raise ConfigError(f"{folder / str(error)}") from error


def parse_rule(document: Mapping[str, Any], family: str) -> PreprocessRule:
    """Read the preprocessor_config.json of a hub repository.

    Args:
        document: the whole file; K2.5 and K3 keep their fields in its ``media_proc_cfg``.
        family: one of FAMILIES, from config.json.

    Raises:
        ConfigError: an unknown family, a value of another type, or one that is not supported.
    """
    if family not in RULES:
        raise ConfigError(f"family {family!r} is not supported; expected {' or '.join(map(repr, FAMILIES))}")
    rule = RULES[family]
    fields = document.get("media_proc_cfg", document)
    if not isinstance(fields, Mapping):
        raise _refused("media_proc_cfg", fields, "an object")
    for field, allowed in _FIXED.items():
        if fields.get(field) is not None and fields[field] not in allowed:
            raise _refused(field, fields[field], " or ".join(json.dumps(value) for value in allowed))
    for field in _BUDGET_FIELDS:
        if field != _BUDGET_FIELD[family] and fields.get(field) is not None:
            raise ConfigError(
                f"preprocessor_config.json: {field} is no field of {family}, which has {_BUDGET_FIELD[family]}; "
                "use the file of the checkpoint's own hub repository"
            )
    rule = dataclasses.replace(rule, patch_budget=_whole(fields, _BUDGET_FIELD[family], rule.patch_budget))
    return rule if rule.frame_budget is None else _with_video_fields(rule, fields)


def _with_video_fields(rule: PreprocessRule, fields: Mapping[str, Any]) -> PreprocessRule:
    side = _whole(fields, "patch_limit_on_one_side", rule.side_limit)
    if side % 2 or side > MAX_SIDE:
        raise _refused("patch_limit_on_one_side", side, f"an even number up to {MAX_SIDE}")
    fps = fields.get("sample_fps", rule.sample_fps)
    if type(fps) not in (int, float) or not 0 < fps < math.inf:
        raise _refused("sample_fps", fps, "a positive number")
    # in the hub code null means: as many as an image has
    frame = rule.patch_budget if fields.get("in_patch_limit_each_frame", 0) is None else rule.frame_budget
    return dataclasses.replace(
        rule,
        side_limit=side,
        sample_fps=float(fps),
        frame_budget=_whole(fields, "in_patch_limit_each_frame", frame),
        video_budget=_whole_or_none(fields, "in_patch_limit_video", rule.video_budget),
        max_video_frames=_whole_or_none(fields, "max_num_frames_each_video", rule.max_video_frames),
        chessboard=_chessboard(fields, rule.chessboard),
    )


def _chessboard(fields: Mapping[str, Any], default: bool) -> bool:
    if "transparent_bg_config" not in fields:
        return default
    board, stage = fields["transparent_bg_config"], fields.get("transparent_bg_fill_stage")
    if board is None:
        return False
    if board not in _BOARD_CONFIGS:
        raise _refused("transparent_bg_config", board, f"{json.dumps(_BOARD_CONFIGS[0])} or null")
    if stage != "after_resize":  # the hub code takes an absent stage for before_resize
        raise _refused("transparent_bg_fill_stage", stage, '"after_resize"')
    return True


def _whole(fields: Mapping[str, Any], field: str, default: int | None) -> int:
    value = fields.get(field)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise _refused(field, value, "a whole number from 1 up")
    return value


def _whole_or_none(fields: Mapping[str, Any], field: str, default: int | None) -> int | None:
    return None if fields.get(field, default) is None else _whole(fields, field, default)


def _refused(field: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"preprocessor_config.json: {field} {value!r} is not supported; expected {expected}")
