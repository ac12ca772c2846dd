"""Exporting to ONNX in a process where XLA is loaded, or is even the default device, writes the same bytes."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: nothing was exported under XLA")
pytest.importorskip("torch_xla", reason="torch_xla is not installed: nothing was exported under XLA")
onnx = pytest.importorskip("onnx", reason="onnx is not installed: nothing was exported under XLA")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: nothing was exported under XLA")

from exporter.onnx_export import DATA_FILE, MODEL_FILE  # noqa: E402

pytestmark = [pytest.mark.xla, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
EXPORT = """
import sys
from pathlib import Path
from exporter.onnx_export import export_onnx
from exporter.onnx_trace import OnnxOptions
from model.random_weights import parse_random_source
export_onnx(parse_random_source("random:tiny?seed=1&layers=2"), OnnxOptions(), Path(sys.argv[1]), version="test")
"""
SETTINGS = {
    "no XLA": "",
    "XLA with a tower on it": """
import torch, torch_xla
from model.random_weights import parse_random_source
from model.tower import build_tower
tower = build_tower(parse_random_source("random:tiny?seed=1&layers=2"), device=torch_xla.device())
with torch.no_grad():
    tower(torch.zeros(24, 588), torch.tensor([[1, 4, 6]]))
torch_xla.sync()
""",
    "XLA as the default device": """
import torch, torch_xla
torch.set_default_device(torch_xla.device())
assert torch.zeros(1).device.type == "xla"
""",
}


@cache
def files_of(setting: str) -> tuple[bytes, bytes]:
    """The model and its weights, exported by a process of its own."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SETTINGS[setting] + EXPORT, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return (Path(folder) / MODEL_FILE).read_bytes(), (Path(folder) / DATA_FILE).read_bytes()


def test_the_plain_export_is_a_whole_model():
    model = onnx.load_from_string(files_of("no XLA")[0])
    sizes = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in model.graph.input
    }
    assert sizes == {"pixel_values": ["frames", "patches", 588], "grid_hws": ["items", 2]}
    assert sum(node.op_type == "FusedQKRope" for node in model.graph.node) == 2


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "no XLA"])
def test_same_bytes_as_without_xla(setting: str):
    ours, plain = files_of(setting), files_of("no XLA")
    assert ours[0] == plain[0], "the graph"
    assert ours[1] == plain[1], "the weights"
