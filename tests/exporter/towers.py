"""Small towers and their exports, shared by the tests of the exporter."""

from __future__ import annotations

import dataclasses
import os
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import torch

from exporter.onnx_export import MODEL_FILE, export_onnx
from exporter.onnx_trace import OnnxOptions, Trace, trace_one_block
from exporter.validation.record import run_live
from model.config import VisionConfig, preset
from model.graph import GraphForm
from model.random_weights import RandomWeights, random_weights
from model.tower import KimiVision, build_tower

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@cache
def config_of(name: str, layers: int | None = None) -> VisionConfig:
    """A preset, or ``tiny-vl``: the tiny tower as Kimi-VL has it."""
    if name == "tiny-vl":
        return dataclasses.replace(preset("tiny"), family="kimi_vl", pos_emb_time=1)
    return preset(name, layers=layers)


def weights_of(name: str, seed: int = 0, layers: int | None = None) -> RandomWeights:
    return random_weights(config_of(name, layers), seed, name)


@cache
def tower_of(name: str, dtype: str = "fp32", seed: int = 0, layers: int | None = None) -> KimiVision:
    return build_tower(weights_of(name, seed, layers), dtype=TORCH[dtype])


@cache
def trace_of(name: str, options: OnnxOptions) -> Trace:
    """Tracing takes ten seconds and depends on neither weights nor depth, so all workers of a test run share traces."""
    shared = os.environ.get("KVIT_TEST_TRACES")
    if not shared:
        return trace_one_block(config_of(name), options)
    form = options.form
    key = f"{name}-{options.dtype}-{form.rope}-{form.attention}-{form.packing}-{options.opset}.pickle"
    path = Path(shared) / key
    if not path.exists():
        trace = trace_one_block(config_of(name), options)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(trace))
        part.replace(path)
    loaded: Trace = pickle.loads(path.read_bytes())
    return loaded


def options_of(
    dtype: str = "fp32", rope: str = "plugin", attention: str = "plain", packing: str = "packed"
) -> OnnxOptions:
    opset = 23 if rope == "standard" or attention == "op" else 20
    return OnnxOptions(dtype, GraphForm(rope, attention, packing), opset)


def export_to(folder: Path, name: str, options: OnnxOptions, seed: int = 0, layers: int | None = None) -> Path:
    export_onnx(weights_of(name, seed, layers), options, folder, version="test", trace=trace_of(name, options))
    return folder / MODEL_FILE


def noise(frames: int, grids: list[tuple[int, int]], dtype: str, seed: int = 0) -> np.ndarray:
    """Uniform pixels, rounded to a dtype; [frames, patches, 588] fp32."""
    patches = sum(h * w for h, w in grids)
    values = np.random.default_rng(seed).random((frames, patches, 588), dtype=np.float32) * 2 - 1
    return torch.from_numpy(values).to(TORCH[dtype]).float().numpy()


def live(
    name: str, dtype: str, pixels: np.ndarray, grids: list[tuple[int, int]], layers: int | None = None
) -> np.ndarray:
    return run_live(tower_of(name, dtype, layers=layers), pixels, grids)


def relative(y: np.ndarray, r: np.ndarray) -> float:
    """Relative L2 error in float64."""
    y64, r64 = y.astype(np.float64), r.astype(np.float64)
    return float(np.linalg.norm(y64 - r64) / np.linalg.norm(r64))
