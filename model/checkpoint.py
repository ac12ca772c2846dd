"""Vision weights from a folder in hub layout.

Only the vision tensors are looked at. They are found by name through the index, never by file name, so that of a
checkpoint with 64 shards only those that hold vision tensors are opened. Everything that can be wrong with them is
found when the checkpoint is opened, from the headers alone; the data stays on disk until a tensor is asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from model.config import VisionConfig, load_hub_config, tensor_shapes
from model.errors import CheckpointError
from model.random_weights import parse_random_source
from model.safetensors_header import TensorEntry, read_header, short
from model.weights import ITEM_SIZES, VISION_PREFIXES, VisionWeights, as_tensor, weights_sha256

if TYPE_CHECKING:
    import torch

__all__ = ["CheckpointWeights", "VisionWeights", "open_checkpoint", "open_source"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 1 << 29  # the largest released index, with a name for every expert, has some ten megabytes

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_QUANTISED_DTYPE = re.compile(r"[IU]\d+$|F[468](_|$)|E8M0")
# Last part of the names that compressed-tensors, modelopt, GPTQ, AWQ and bitsandbytes put beside a weight.
_QUANTISED_NAMES = frozenset(
    (
        *("weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale", "weight_shape"),
        *("weight_zero_point", "input_scale", "input_global_scale", "input_zero_point"),
        *("qweight", "qzeros", "scales", "g_idx", "SCB", "absmax"),
    )
)
_NO_QUANTISED = "INT8 and FP8 vision towers are not supported; use a checkpoint whose vision tensors are bf16"


@dataclass(frozen=True)
class CheckpointWeights:
    """Vision tensors of a checkpoint folder.

    Attributes:
        config: the tower, from config.json.
        source: the folder as it was given.
        entries: where each tensor lies, by name.
    """

    config: VisionConfig
    source: str
    entries: Mapping[str, TensorEntry]
    _hashes: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def names(self) -> tuple[str, ...]:
        """Checkpoint names, in the order of :func:`model.config.tensor_shapes`."""
        return tuple(self.entries)

    def dtype(self, name: str) -> str:
        """``bfloat16``, ``float16`` or ``float32``; tensors of one checkpoint may differ."""
        return _DTYPES[self.entries[name].dtype]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, mapped from the file; writing to them does not reach the file.

        Raises:
            CheckpointError: the file has changed since the checkpoint was opened.
        """
        entry = self.entries[name]
        try:
            return np.memmap(entry.file, np.uint8, mode="c", offset=entry.offset, shape=(entry.size,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{entry.file}: {name} can no longer be read ({error}); start again") from error

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU as stored, mapped from the file."""
        return as_tensor(self.raw(name), self.dtype(name), self.entries[name].shape)

    def sha256(self) -> str:
        """Hash over names, dtypes, shapes and bytes of the vision tensors, whatever shards they are in."""
        if "" not in self._hashes:
            self._hashes[""] = weights_sha256(self, lambda name: hashlib.sha256(self.raw(name).data).hexdigest())
        return self._hashes[""]


def open_source(text: str, *, norm_eps: float | None = None) -> VisionWeights:
    """Open ``random:...`` or a checkpoint folder.

    Args:
        text: what the user gave. A hub id is fetched by the caller, which then passes the folder.
        norm_eps: see :func:`model.config.parse_hub_config`.

    Raises:
        ConfigError: the random source or the config cannot be used.
        CheckpointError: the folder does not exist, or its files cannot be used.
    """
    if text.startswith("random:"):
        return parse_random_source(text, norm_eps=norm_eps)
    folder = Path(text)
    if not os.path.exists(folder) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        raise CheckpointError(f"{text}: no such folder; it looks like a hub id, whose files must be fetched first")
    return open_checkpoint(folder, norm_eps=norm_eps)


def open_checkpoint(folder: Path, *, norm_eps: float | None = None) -> CheckpointWeights:
    """Open a folder that holds config.json and either one safetensors file or an index with shards.

    Args:
        folder: the checkpoint.
        norm_eps: see :func:`model.config.parse_hub_config`.

    Raises:
        ConfigError: config.json is missing or describes no supported tower.
        CheckpointError: a file or a vision tensor is missing, unreadable, extra, misshapen or quantised.
    """
    if not os.path.isdir(folder):  # unlike Path.is_dir, does not raise for names that no file can have
        what = "not a folder" if os.path.exists(folder) else "no such folder"
        raise CheckpointError(f"{folder}: {what}; SOURCE is a checkpoint folder in hub layout or random:PRESET")
    config = load_hub_config(folder, norm_eps=norm_eps)
    shapes = tensor_shapes(config)
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(
            f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date"
        )
    if index.exists():
        placed = _read_index(index)
        _check_names(index, placed, config)
        found = _read_shards(index, placed)
    elif single.exists():
        found = _vision(read_header(single))
        _check_names(single, found, config)
    else:
        raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}; download the checkpoint's weights")
    for name, shape in shapes.items():
        _check_entry(name, found[name], shape)
    return CheckpointWeights(config, str(folder), {name: found[name] for name in shapes})


def _vision(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    if not any(name.startswith(VISION_PREFIXES) for name in entries) and entries:
        _refuse_other_names(next(iter(entries.values())).file, entries)
    return {name: entry for name, entry in entries.items() if name.startswith(VISION_PREFIXES)}


def _read_index(path: Path) -> dict[str, str]:
    """Read which shard each vision tensor is in."""
    try:
        if path.stat().st_size > MAX_INDEX_BYTES or not path.is_file():
            raise CheckpointError(f"{path}: not a file of at most {MAX_INDEX_BYTES} bytes; download it again")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not valid JSON ({error}); download it again") from error
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict):
        raise CheckpointError(f"{path}: no weight_map object; download it again")
    placed = {name: _shard_name(path, name, file) for name, file in files.items() if name.startswith(VISION_PREFIXES)}
    if not placed:
        _refuse_other_names(path, files)
    return placed


def _shard_name(index: Path, tensor: str, file: object) -> str:
    # A checkpoint is downloaded, so its index must not be able to name any other file of this machine. Links are
    # followed: the hub's own cache consists of links into its blob folder.
    if not isinstance(file, str) or not file.isprintable() or not 1 <= len(file) <= 255:
        raise CheckpointError(f"{index}: weight_map[{short(tensor)}] is {short(file)}; expected a file name")
    for path in (PurePosixPath(file), PureWindowsPath(file)):
        if path.is_absolute() or path.drive or ".." in path.parts:
            raise CheckpointError(
                f"{index}: weight_map[{short(tensor)}] is {short(file)}, which points outside the checkpoint folder; "
                "expected a file name beside the index"
            )
    return file


def _refuse_other_names(path: Path, names: Iterable[str]) -> None:
    if any(name.startswith("model.vision_tower.") for name in names):
        raise CheckpointError(
            f"{path}: the tensors are named as transformers saves them (model.vision_tower...), with permuted q and k; "
            "use the checkpoint from the hub"
        )
    raise CheckpointError(f"{path}: no vision tensors (vision_tower.*); use a vision-language checkpoint")


def _read_shards(index: Path, placed: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Read the headers of the shards that hold vision tensors.

    A shard's header must agree with the index in both directions; otherwise one of the two is out of date and
    nothing tells which.
    """
    found: dict[str, TensorEntry] = {}
    for file in dict.fromkeys(placed.values()):
        path = index.parent / file
        wanted = [name for name, where in placed.items() if where == file]
        header = read_header(path, f"the index places {wanted[0]} in this shard")
        entries = {name: entry for name, entry in header.items() if name.startswith(VISION_PREFIXES)}
        for name in wanted:
            if name not in entries:
                raise CheckpointError(
                    f"{path}: lacks {name}, which the index places there; download shard and index again"
                )
        for name in entries:
            if placed.get(name) != file:
                raise CheckpointError(
                    f"{path}: holds {short(name)}, which the index does not place there; download shard and index again"
                )
        found |= entries
    return found


def _check_names(path: Path, found: Collection[str], config: VisionConfig) -> None:
    expected = tensor_shapes(config)
    extra = [name for name in found if name not in expected]
    for name in extra:
        if name.rpartition(".")[2] in _QUANTISED_NAMES:
            raise CheckpointError(f"{path}: {short(name)}: {_NO_QUANTISED}")
    missing = [name for name in expected if name not in found]
    tower = f"the tower of config.json ({config.family}, layers: {config.num_hidden_layers})"
    if missing:
        raise CheckpointError(
            f"{path}: vision tensors are missing: {_some(missing)}; {tower} needs them, "
            "download config and weights again"
        )
    if extra:
        raise CheckpointError(
            f"{path}: unknown vision tensors: {_some(extra)}; {tower} has none of that name, "
            "so config and weights do not belong together"
        )


def _some(names: list[str]) -> str:
    listed = ", ".join(short(name) for name in names[:3])
    return f"{listed} and {len(names) - 3} more, {len(names)} in all" if len(names) > 3 else listed


def _check_entry(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.dtype not in _DTYPES:
        if _QUANTISED_DTYPE.match(entry.dtype):
            raise CheckpointError(f"{entry.file}: {name} is {short(entry.dtype)}: {_NO_QUANTISED}")
        raise CheckpointError(f"{entry.file}: {name} is {short(entry.dtype)}; expected BF16, F16 or F32")
    if entry.shape != shape:
        raise CheckpointError(
            f"{entry.file}: {name} has shape {short(list(entry.shape))}; config.json calls for {list(shape)}"
        )
    if entry.size != math.prod(shape) * ITEM_SIZES[_DTYPES[entry.dtype]]:
        raise CheckpointError(
            f"{entry.file}: {name} has {entry.size} bytes, which do not fit its shape; download it again"
        )
