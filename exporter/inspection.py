"""What an artifact holds: its interface, operators, sizes and manifest. Reads no weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.errors import BadInput
from exporter.manifest import GOLDEN_FOLDER, MANIFEST_NAME, Manifest, read_manifest
from exporter.records import encode
from exporter.trt.profiles import describe as describe_profile
from exporter.validation.external_data import read_model
from plugins.fused_qk_rope.description import FUSED_QK_ROPE

if TYPE_CHECKING:
    import onnx


def inspect_artifact(path: Path) -> dict[str, Any]:
    """Describe an artifact folder or a bare ``.onnx`` file.

    Args:
        path: either.

    Returns:
        Plain values: ``artifact``, ``inputs``, ``outputs``, ``opsets``, ``operators``, ``rope``, ``attention``,
        ``metadata``, ``files`` (bytes by name) and ``manifest`` (None for a bare file). Of an engine, which only its
        TensorRT can open, what the manifest tells: ``artifact``, ``engine``, ``operators``, ``rope``, ``attention``,
        ``files`` and ``manifest``.

    Raises:
        BadInput: it is neither, or cannot be read.
    """
    manifest = None
    if path.is_dir():
        manifest = read_manifest(path)
        if manifest.kind == "engine":
            return _inspect_engine(path, manifest)
        path = path / manifest.artifact
    model = _load(path)
    operators = Counter(
        node.op_type if not node.domain else f"{node.domain}::{node.op_type}" for node in model.graph.node
    )
    return {
        "artifact": str(path),
        "inputs": [_value(value) for value in model.graph.input],
        "outputs": [_value(value) for value in model.graph.output],
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "operators": dict(operators.most_common()),
        "rope": rope_form(operators),
        "attention": "op" if operators["Attention"] else "plain",
        "metadata": {entry.key: entry.value for entry in model.metadata_props},
        "files": _sizes(path, model),
        "manifest": None if manifest is None else encode(manifest),
    }


def _inspect_engine(folder: Path, manifest: Manifest) -> dict[str, Any]:
    sizes = {name: folder / name for name in manifest.files if not name.startswith(f"{GOLDEN_FOLDER}/")}
    plugin = "" if manifest.plugin is None else f"plugin ({manifest.plugin.kind})"
    return {
        "artifact": str(folder / manifest.artifact),
        "engine": {
            "runtime": str(manifest.runtime),
            "targets": list(manifest.targets),
            "profiles": [describe_profile(profile) for profile in manifest.profiles],
            "warnings": list(manifest.warnings),
        },
        "operators": dict(manifest.layers),
        "rope": plugin or manifest.rope,
        "attention": manifest.attention,
        "files": {name: path.stat().st_size if path.is_file() else None for name, path in sizes.items()},
        "manifest": encode(manifest),
    }


def rope_form(operators: Counter[str]) -> str:
    """Tell from its operators in which form a graph rotates."""
    if operators[f"{FUSED_QK_ROPE.domain}::{FUSED_QK_ROPE.onnx_name}"]:
        return "plugin"
    return "standard" if operators["RotaryEmbedding"] else "plain"


def _load(path: Path) -> onnx.ModelProto:
    model = read_model(path)
    if not model.graph.node:
        raise BadInput(f"{path}: holds no ONNX graph; is it an .onnx file?")
    return model


def _value(value: onnx.ValueInfoProto) -> dict[str, Any]:
    import onnx

    tensor = value.type.tensor_type
    dims = [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim]
    return {"name": value.name, "dtype": onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), "shape": dims}


def _sizes(path: Path, model: onnx.ModelProto) -> dict[str, int | None]:
    names = [path.name]
    for tensor in model.graph.initializer:
        names += [entry.value for entry in tensor.external_data if entry.key == "location"]
    files = {name: path.parent / name for name in dict.fromkeys(names)}
    return {name: file.stat().st_size if file.is_file() else None for name, file in files.items()}


def describe(found: dict[str, Any]) -> str:
    """Write what :func:`inspect_artifact` found as text."""
    if "engine" in found:
        return _describe_engine(found)
    lines = [str(found["artifact"]), ""]
    for kind in ("inputs", "outputs"):
        for value in found[kind]:
            shape = ", ".join(str(dim) for dim in value["shape"])
            lines.append(f"  {kind[:-1]:<6} {value['name']:<13} {value['dtype']:<9} [{shape}]")
    lines += ["", f"  rope {found['rope']}, attention {found['attention']}, opsets {json.dumps(found['opsets'])}"]
    lines += [f"  {name}: {'MISSING' if size is None else f'{size:,} bytes'}" for name, size in found["files"].items()]
    lines += ["", "  " + ", ".join(f"{count} {name}" for name, count in found["operators"].items()), ""]
    lines += [f"  {key} = {_short(value)}" for key, value in found["metadata"].items()]
    return "\n".join(lines + _manifest_lines(found["manifest"]))


def _describe_engine(found: dict[str, Any]) -> str:
    engine = found["engine"]
    lines = [
        str(found["artifact"]),
        "",
        f"  {engine['runtime']}, for compute capability {', '.join(engine['targets'])}",
    ]
    lines += [f"  profile {profile}" for profile in engine["profiles"]]
    lines += ["", f"  rope {found['rope']}, attention {found['attention']}"]
    lines += [f"  {name}: {'MISSING' if size is None else f'{size:,} bytes'}" for name, size in found["files"].items()]
    lines += ["", "  " + ", ".join(f"{count} {name}" for name, count in found["operators"].items())]
    lines += ["", *(f"  warning: {_short(warning)}" for warning in engine["warnings"])]
    return "\n".join(lines + _manifest_lines(found["manifest"]))


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _manifest_lines(manifest: dict[str, Any] | None) -> list[str]:
    if manifest is None:
        return ["", f"  no {MANIFEST_NAME}: the origin of this file is unknown"]
    validation = manifest["validation"]
    verdict = "NOT VALIDATED: nothing was compared"
    if validation is not None:
        verdict = f"{validation['judgement']['verdict']} on {validation['created']}"
    return [
        "",
        f"  made from {manifest['source']['given']} ({manifest['source']['family']})",
        f"  dtype {manifest['dtype']}, packing {manifest['packing']}, made with "
        + ", ".join(f"{name} {number}" for name, number in manifest["tool_versions"].items()),
        f"  verdict {verdict}",
    ]
