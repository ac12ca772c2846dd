"""Small ONNX artifact folders, made by the real stage from shared traces."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest import mock

from exporter import onnx_export
from exporter.onnx_artifact import OnnxRequest, make_onnx
from model.graph import GraphForm
from tests.exporter import towers

_MADE: dict[tuple[object, ...], Path] = {}


def artifact(
    folder: Path,
    name: str = "tiny",
    dtype: str = "fp32",
    form: GraphForm | None = None,
    *,
    golden: bool = False,
    max_patches: int = 16,
) -> Path:
    """Make an artifact folder; the exporter's trace is the shared one of the tests."""
    form = form or GraphForm("plugin", "plain", "packed")
    opset = 23 if form.rope == "standard" or form.attention == "op" else 20
    request = OnnxRequest(
        source=f"random:{name}",
        output=folder,
        dtype=dtype,
        form=form,
        opset=opset,
        golden=golden,
        max_patches=max_patches,
    )
    with mock.patch.object(onnx_export, "trace_one_block", lambda _config, options: towers.trace_of(name, options)):
        make_onnx(request, lambda *_: None)
    return folder


def shared_artifact(tmp_path_factory, folder: Path, **options: object) -> Path:
    """A copy of an artifact that is made once in this process."""
    key = tuple(sorted(options.items(), key=str))
    if key not in _MADE:
        _MADE[key] = artifact(tmp_path_factory.mktemp("artifact") / "onnx", **options)
    shutil.copytree(_MADE[key], folder)
    return folder
