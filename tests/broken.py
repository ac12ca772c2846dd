"""Ways to break a good checkpoint folder, each with words that the one-line message must contain.

``good_checkpoint(folder)`` writes a tiny K2.5 checkpoint of three shards; ``BROKEN[name].apply(folder)`` breaks it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint_writer import write_checkpoint
from model.random_weights import parse_random_source

PROJECTOR_SHARD = "model-00002-of-000003.safetensors"
TOWER_SHARD = "model-00003-of-000003.safetensors"
INDEX = "model.safetensors.index.json"
WQKV = "vision_tower.encoder.blocks.0.wqkv.weight"
FC1 = "vision_tower.encoder.blocks.1.mlp.fc1.weight"


@dataclass(frozen=True)
class Breakage:
    """What to do to a good folder, and what the message has to say."""

    apply: Callable[[Path], None]
    words: tuple[str, ...]


def good_checkpoint(folder: Path) -> Path:
    """Write a tiny K2.5 checkpoint of three shards: language, projector, tower."""
    write_checkpoint(parse_random_source("random:tiny"), folder, shards=3)
    return folder


def edit_json(path: Path, edit: Callable[[Any], Any]) -> None:
    """Change a JSON file; ``edit`` changes the document in place or returns another."""
    document = json.loads(path.read_text())
    changed = edit(document)
    path.write_text(json.dumps(document if changed is None else changed))


def read_shard(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def write_shard(path: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """A safetensors file, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def rewrite_shard(path: Path, change: Callable[[dict[str, tuple[str, list[int], bytes]]], None]) -> None:
    """Change a shard's tensors (name: dtype, shape, bytes) and write a valid file with what is left."""
    header, data = read_shard(path)
    header.pop("__metadata__", None)
    tensors = {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}
    change(tensors)
    header, blob = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(raw)]}
        blob += raw
    write_shard(path, header, blob)


def _config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        edit_json(folder / "config.json", lambda document: document["vision_config"].update(changes))

    return apply


def _top(edit: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", edit)


def _text(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None


def _remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def _place(name: str, where: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / INDEX, lambda document: document["weight_map"].update({name: where}))


def _place_all(where: str) -> Callable[[Path], None]:
    def edit(document: Any) -> None:
        document["weight_map"] = dict.fromkeys(document["weight_map"], where)

    return lambda folder: edit_json(folder / INDEX, edit)


def _unplace(*names: str) -> Callable[[Path], None]:
    def edit(document: Any) -> None:
        for name in names:
            del document["weight_map"][name]

    return lambda folder: edit_json(folder / INDEX, edit)


def _keep_names(prefix: str, new: str = "") -> Callable[[Path], None]:
    def edit(document: Any) -> None:
        kept = {new + name: file for name, file in document["weight_map"].items() if name.startswith(prefix)}
        document["weight_map"] = kept

    return lambda folder: edit_json(folder / INDEX, edit)


def _cut(file: str, size: int) -> Callable[[Path], None]:
    """Keep ``size`` bytes; from the end if negative."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size]) and None


def _header(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change the tower shard's header, leaving the data as it is."""

    def apply(folder: Path) -> None:
        header, data = read_shard(folder / TOWER_SHARD)
        edit(header)
        write_shard(folder / TOWER_SHARD, header, data)

    return apply


def _retype(name: str, dtype: str, item_size: int) -> Callable[[Path], None]:
    def change(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        _, shape, raw = tensors[name]
        tensors[name] = (dtype, shape, bytes(len(raw) // 2 * item_size))

    return lambda folder: rewrite_shard(folder / TOWER_SHARD, change)


def _reshape(folder: Path) -> None:
    def change(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
        dtype, shape, raw = tensors[WQKV]
        tensors[WQKV] = (dtype, shape[::-1], raw)

    rewrite_shard(folder / TOWER_SHARD, change)


def _add(*names: str) -> Callable[[Path], None]:
    """Add one-element tensors to the tower shard and to the index."""

    def apply(folder: Path) -> None:
        rewrite_shard(folder / TOWER_SHARD, lambda tensors: tensors.update({n: ("F32", [1], bytes(4)) for n in names}))
        for name in names:
            _place(name, TOWER_SHARD)(folder)

    return apply


def _pack(folder: Path) -> None:
    """What an int4 checkpoint would hold in place of a weight."""
    rewrite_shard(folder / TOWER_SHARD, lambda tensors: tensors.pop(WQKV) and None)
    _unplace(WQKV)(folder)
    _add(f"{WQKV}_packed", f"{WQKV}_scale")(folder)


def _drop_from_shard(folder: Path) -> None:
    rewrite_shard(folder / TOWER_SHARD, lambda tensors: tensors.pop(FC1) and None)


def _folder_for(file: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return apply


def _duplicate_entry(folder: Path) -> None:
    header, data = read_shard(folder / TOWER_SHARD)
    text = json.dumps(header)
    write_shard(folder / TOWER_SHARD, (text[:-1] + f', "{WQKV}": {json.dumps(header[WQKV])}}}').encode(), data)


def _both_layouts(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((folder / TOWER_SHARD).read_bytes())


_BLOCK_0 = tuple(f"vision_tower.encoder.blocks.0.{name}.bias" for name in ("norm0", "wqkv", "wo", "norm1", "mlp.fc0"))

BROKEN: dict[str, Breakage] = {
    # ------------------------------------------------------------------------------------------------- config.json
    "config-missing": Breakage(_remove("config.json"), ("config.json", "no such file")),
    "config-not-json": Breakage(_text("config.json", b'{"vision_config": '), ("config.json", "not valid JSON")),
    "config-not-utf8": Breakage(_text("config.json", b"\xff\xfe{}"), ("config.json", "not valid JSON")),
    "config-a-list": Breakage(_text("config.json", b"[]"), ("config.json", "expected a JSON object")),
    "config-deep": Breakage(_text("config.json", b"[" * 100_000), ("config.json", "not valid JSON")),
    "config-text-only": Breakage(_top(lambda d: d.pop("vision_config") and None), ("no vision_config object",)),
    "config-no-model-type": Breakage(_top(lambda d: d.pop("model_type") and None), ("model_type is missing",)),
    "config-other-model": Breakage(_top(lambda d: d.update(model_type="qwen2_vl")), ("model_type", "'qwen2_vl'")),
    "config-merge-type": Breakage(_config(merge_type="avg"), ("merge_type", "'avg'", "not supported")),
    "config-pos-emb-type": Breakage(_config(pos_emb_type="rope3d"), ("pos_emb_type", "'rope3d'", "not supported")),
    "config-video-attn": Breakage(_config(video_attn_type="spatial"), ("video_attn_type", "'spatial'")),
    "config-projector": Breakage(_config(mm_projector_type="mlp"), ("mm_projector_type", "'mlp'")),
    "config-norm": Breakage(_config(norm_type="batchnorm"), ("norm_type", "'batchnorm'")),
    "config-activation": Breakage(_config(activation_func="silu"), ("activation_func", "'silu'")),
    "config-string-size": Breakage(_config(vt_hidden_size="96"), ("vt_hidden_size", "'96'", "a whole number")),
    "config-bool-size": Breakage(_config(vt_num_hidden_layers=True), ("vt_num_hidden_layers", "True")),
    "config-no-layers": Breakage(_config(vt_num_hidden_layers=0), ("num_hidden_layers", "0")),
    "config-heads": Breakage(_config(vt_num_attention_heads=5), ("qkv_hidden_size 96 with 5 heads",)),
    "config-kernel": Breakage(_config(merge_kernel_size=[3, 3]), ("merge_kernel_size", "(3, 3)")),
    "config-kernel-type": Breakage(_config(merge_kernel_size=2), ("merge_kernel_size", "two whole numbers")),
    "config-long-value": Breakage(_config(merge_type="x" * 10_000), ("merge_type 'xxx", "...")),
    "config-conflict": Breakage(_config(hidden_size=64), ("vt_hidden_size and hidden_size disagree", "96, 64")),
    "config-mm-width": Breakage(_config(mm_hidden_size=64), ("mm_hidden_size is 64",)),
    "config-int8": Breakage(
        _config(quantization_config={"quant_method": "int8"}), ("INT8 and FP8 vision towers are not supported",)
    ),
    "config-dtype": Breakage(_config(torch_dtype="float8_e4m3fn"), ("torch_dtype", "'float8_e4m3fn'")),
    "config-more-layers": Breakage(
        _config(vt_num_hidden_layers=3),
        (INDEX, "missing", "'vision_tower.encoder.blocks.2.norm0.weight'", "and 9 more, 12 in all", "layers: 3"),
    ),
    "config-fewer-layers": Breakage(
        _config(vt_num_hidden_layers=1), (INDEX, "unknown", "vision_tower.encoder.blocks.1.", "12 in all", "layers: 1")
    ),
    "config-wider": Breakage(
        _config(vt_intermediate_size=136), (TOWER_SHARD, "mlp.fc0.weight", "[132, 96]", "[136, 96]")
    ),
    # --------------------------------------------------------------------------------------------------- the index
    "no-weights": Breakage(_remove(INDEX), ("neither model.safetensors nor", INDEX)),
    "two-layouts": Breakage(_both_layouts, ("holds both model.safetensors and", INDEX)),
    "index-not-json": Breakage(_text(INDEX, b"<html>404</html>"), (INDEX, "not valid JSON")),
    "index-empty": Breakage(_text(INDEX, b""), (INDEX, "not valid JSON")),
    "index-no-map": Breakage(_text(INDEX, b'{"metadata": {}}'), (INDEX, "no weight_map object")),
    "index-a-list": Breakage(_text(INDEX, b'["weight_map"]'), (INDEX, "no weight_map object")),
    "index-parent": Breakage(_place(WQKV, f"../{TOWER_SHARD}"), (INDEX, WQKV, "outside the checkpoint folder")),
    "index-absolute": Breakage(_place(WQKV, "/etc/hostname"), (INDEX, WQKV, "outside the checkpoint folder")),
    "index-windows": Breakage(_place(WQKV, "C:\\shard"), (INDEX, WQKV, "outside the checkpoint folder")),
    "index-not-a-name": Breakage(_place(WQKV, 3), (INDEX, WQKV, "is 3", "expected a file name")),
    "index-nul": Breakage(_place(WQKV, "a\0b"), (INDEX, WQKV, "expected a file name")),
    "index-long-name": Breakage(_place_all("x" * 5000), (INDEX, "'xxxxx", "expected a file name")),
    "index-long-utf8-name": Breakage(_place_all("好" * 200), ("cannot be read", "File name too long")),
    "index-newline": Breakage(_place(WQKV, "a\nb"), (INDEX, WQKV, "'a\\nb'", "expected a file name")),
    "index-unreadable": Breakage(_folder_for(INDEX), (INDEX, "not a file")),
    "index-language-only": Breakage(_keep_names("language_model."), (INDEX, "no vision tensors")),
    "index-transformers-names": Breakage(_keep_names("vision_tower.", "model."), (INDEX, "as transformers saves them")),
    "index-one-missing": Breakage(_unplace(WQKV), (INDEX, "missing", WQKV, "layers: 2")),
    "index-five-missing": Breakage(_unplace(*_BLOCK_0), (INDEX, *_BLOCK_0[:3], "and 2 more, 5 in all")),
    "index-other-shard": Breakage(_place(WQKV, PROJECTOR_SHARD), (PROJECTOR_SHARD, "lacks", WQKV)),
    # -------------------------------------------------------------------------------------------------- the shards
    "shard-missing": Breakage(_remove(TOWER_SHARD), (TOWER_SHARD, "no such file", "vision_tower.")),
    "shard-empty": Breakage(_text(TOWER_SHARD, b""), (TOWER_SHARD, "truncated", "0 bytes")),
    "shard-cut-in-data": Breakage(_cut(TOWER_SHARD, -1), (TOWER_SHARD, "truncated")),
    "shard-cut-in-header": Breakage(_cut(TOWER_SHARD, 100), (TOWER_SHARD, "truncated", "100")),
    "shard-too-long": Breakage(
        lambda folder: (folder / TOWER_SHARD).open("ab").write(b"x") and None, (TOWER_SHARD, "1 bytes too long")
    ),
    "shard-lfs-pointer": Breakage(
        _text(TOWER_SHARD, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        (TOWER_SHARD, "not a safetensors file"),
    ),
    "shard-a-folder": Breakage(_folder_for(TOWER_SHARD), (TOWER_SHARD, "not a regular file")),
    "header-not-json": Breakage(
        lambda folder: write_shard(folder / TOWER_SHARD, b"{]", b""), (TOWER_SHARD, "not valid JSON")
    ),
    "header-a-list": Breakage(
        lambda folder: write_shard(folder / TOWER_SHARD, b"[]", b""), (TOWER_SHARD, "no JSON object")
    ),
    "header-deep": Breakage(
        lambda folder: write_shard(folder / TOWER_SHARD, b"[" * 100_000, b""), (TOWER_SHARD, "not valid JSON")
    ),
    "header-twice": Breakage(_duplicate_entry, (TOWER_SHARD, "twice")),
    "header-no-offsets": Breakage(
        _header(lambda h: h[WQKV].pop("data_offsets")), (TOWER_SHARD, "the header's entry for", WQKV)
    ),
    "header-negative": Breakage(
        _header(lambda h: h[WQKV].update(data_offsets=[-8, 0])), (TOWER_SHARD, "the header's entry for", WQKV)
    ),
    "header-float-shape": Breakage(
        _header(lambda h: h[WQKV].update(shape=[288.0, 96])), (TOWER_SHARD, "the header's entry for", WQKV)
    ),
    "header-overlap": Breakage(
        _header(lambda h: h[WQKV].update(data_offsets=h[FC1]["data_offsets"])), (TOWER_SHARD, "overlap or leave holes")
    ),
    "header-giant": Breakage(
        _header(lambda h: h.update(x={"dtype": "F32", "shape": [10**18], "data_offsets": [0, 4 * 10**18]})),
        (TOWER_SHARD, "overlap or leave holes"),
    ),
    # ------------------------------------------------------------------------------------------------- the tensors
    "tensor-not-in-shard": Breakage(_drop_from_shard, (TOWER_SHARD, "lacks", FC1)),
    "tensor-not-in-index": Breakage(
        lambda folder: rewrite_shard(
            folder / TOWER_SHARD, lambda tensors: tensors.update({"vision_tower.x": ("F32", [1], bytes(4))})
        ),
        (TOWER_SHARD, "'vision_tower.x'", "the index does not place there"),
    ),
    "tensor-extra": Breakage(_add("mm_projector.proj.3.weight"), (INDEX, "unknown", "'mm_projector.proj.3.weight'")),
    "tensor-extra-newline": Breakage(_add("vision_tower.a\nb"), (INDEX, "unknown", "vision_tower.a\\nb")),
    "tensor-other-projector": Breakage(
        _add("multi_modal_projector.linear_1.weight"), (INDEX, "unknown", "multi_modal_projector.linear_1.weight")
    ),
    "tensor-misshapen": Breakage(_reshape, (TOWER_SHARD, WQKV, "[96, 288]", "[288, 96]")),
    "tensor-wrong-size": Breakage(
        _header(lambda h: h[WQKV].update(dtype="F32")), (TOWER_SHARD, WQKV, "bytes, which do not fit its shape")
    ),
    "tensor-int8": Breakage(
        _retype(WQKV, "I8", 1), (TOWER_SHARD, WQKV, "'I8'", "INT8 and FP8 vision towers are not supported")
    ),
    "tensor-fp8": Breakage(
        _retype(WQKV, "F8_E4M3", 1), (TOWER_SHARD, WQKV, "F8_E4M3", "INT8 and FP8 vision towers are not supported")
    ),
    "tensor-fp64": Breakage(_retype(WQKV, "F64", 8), (TOWER_SHARD, WQKV, "'F64'", "expected BF16, F16 or F32")),
    "tensor-packed": Breakage(_pack, (INDEX, f"{WQKV}_packed", "INT8 and FP8 vision towers are not supported")),
    "tensor-scale": Breakage(
        _add(f"{FC1}_scale"), (INDEX, f"{FC1}_scale", "INT8 and FP8 vision towers are not supported")
    ),
}
