"""A tower small enough to be computed twice: in NumPy, as the reference, and as an ONNX file, as the artifact.

It has the contract's inputs and output: the frames are averaged, four neighbouring patches become one row, and two
layers follow. ``WRONG`` lists ways to compute it wrongly.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from exporter.manifest import (
    SCHEMA_VERSION,
    Manifest,
    PluginRecord,
    Runtime,
    Source,
    Validation,
    record_files,
    write_manifest,
)
from exporter.validation.evidence import (
    BackendInfo,
    CaseEvidence,
    DirectionScore,
    DType,
    Errors,
    Evidence,
    Measured,
    Profile,
    Sensitivity,
    expected_pairs,
)
from exporter.validation.gate import judge
from exporter.validation.golden import open_golden
from exporter.validation.golden_format import GoldenSettings
from exporter.validation.golden_writer import GoldenOrigin, GoldenWriter, write_golden

WIDTH, HIDDEN = 96, 128
SHA = "ab" * 32
TORCH = BackendInfo("torch", "2.13.0", "cpu")
ORT = BackendInfo("onnxruntime", "1.32.0", "cpu", ("CPUExecutionProvider",))
TENSORRT = BackendInfo("tensorrt", "10.13.2.6", "NVIDIA H200", (), "9.0")
SETTINGS = GoldenSettings(tf32=False, threads=1, seed=0, other={})
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
ROUNDED = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

GRIDS = (((2, 2),), ((18, 18),), ((4, 6), (8, 4)))  # 324 patches are enough for directions


def rounded(values: Any, dtype: DType) -> Any:
    """Values of a dtype, held in fp32."""
    return np.asarray(values).astype(ROUNDED[dtype]).astype(np.float32)


def weights(dtype: DType) -> tuple[Any, Any]:
    random = np.random.default_rng(7)
    first = random.standard_normal((4 * 588, HIDDEN)) / np.sqrt(4 * 588)
    second = random.standard_normal((HIDDEN, WIDTH)) * 2 / np.sqrt(HIDDEN)
    return rounded(first, dtype), rounded(second, dtype)


def tower(pixels: Any, compute: DType = "float32", dtype: DType = "float32", wrong: str = "") -> Any:
    """The tower with the weights of ``dtype``, every intermediate result rounded to ``compute``."""
    first, second = weights(dtype)
    rows = rounded(pixels.mean(axis=0), compute)
    if wrong == "merge_order":
        rows = rows.reshape(-1, 2, 2, 588).swapaxes(1, 2)
    hidden = rounded(rows.reshape(-1, 4 * 588).astype(np.float32) @ first, compute)
    softsign = hidden / (1 + np.abs(hidden))
    hidden = rounded(softsign if wrong == "softsign" else np.tanh(hidden), compute)
    return rounded(hidden @ second, compute) * (1.02 if wrong == "scale" else 1)


WRONG = ("merge_order", "softsign", "scale")


def pixels_of(grids: Any, frames: int, seed: int, dtype: DType) -> Any:
    patches = sum(h * w for h, w in grids)
    return rounded(np.random.default_rng(seed).standard_normal((frames, patches, 588)), dtype)


def origin_of(dtype: DType) -> GoldenOrigin:
    return GoldenOrigin("kimi_k25", dtype, WIDTH, SHA, "cd" * 32, TORCH, SETTINGS)


def add_case(writer: GoldenWriter, name: str, grids: Any, frames: int, seed: int, *, directions: bool) -> None:
    dtype = writer.origin.dtype
    pixels = pixels_of(grids, frames, seed, dtype)
    writer.add(
        name,
        "noise" if seed % 2 else "photo",
        grid_hws=grids,
        pixel_values=pixels,
        reference=tower(pixels, dtype=dtype),
        native=tower(pixels, dtype, dtype),
        wrong_outputs=[(wrong, tower(pixels, dtype=dtype, wrong=wrong)) for wrong in WRONG if directions],
    )


def write_sample_golden(folder: Path, dtype: DType = "bfloat16", inputs: int = 2) -> Path:
    """A golden set of three grids with ``inputs`` inputs each; the grid of 324 patches has directions."""
    with write_golden(folder, origin_of(dtype)) as writer:
        for index, grids in enumerate(GRIDS):
            for seed in range(inputs):
                large = sum(h * w for h, w in grids) >= 300
                add_case(writer, f"grid{index}-{seed}", grids, 1 + index % 2, 10 * index + seed, directions=large)
    return folder


def write_sample_onnx(path: Path, dtype: DType = "float32", external: bool = False, scale: float = 1.0) -> Path:
    """The tower as an ONNX file; ``scale`` other than 1 makes it a wrong one."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    element = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}[dtype]
    first, second = weights(dtype)
    tensors = [
        numpy_helper.from_array((array * factor).astype(ROUNDED[dtype]), name)
        for array, factor, name in ((first, 1.0, "first"), (second, scale, "second"))
    ]
    constants = [
        numpy_helper.from_array(np.array([-1, 4 * 588], np.int64), "merged"),
        numpy_helper.from_array(np.array([0], np.int64), "axis"),
    ]
    nodes = [
        helper.make_node("ReduceMean", ["pixel_values", "axis"], ["mean"], keepdims=0),
        helper.make_node("Reshape", ["mean", "merged"], ["rows"]),
        helper.make_node("MatMul", ["rows", "first"], ["hidden"]),
        helper.make_node("Tanh", ["hidden"], ["active"]),
        helper.make_node("MatMul", ["active", "second"], ["image_embeds"]),
    ]
    inputs = [
        helper.make_tensor_value_info("pixel_values", element, ["frames", "patches", 588]),
        helper.make_tensor_value_info("grid_hws", TensorProto.INT64, ["items", 2]),
    ]
    outputs = [helper.make_tensor_value_info("image_embeds", element, ["rows", WIDTH])]
    graph = helper.make_graph(nodes, "tower", inputs, outputs, tensors + constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save_model(model, str(path), save_as_external_data=external, location=path.name + ".data", size_threshold=99)
    return path


class ArrayBackend:
    """A backend that computes the tower in NumPy and then does to the output what a test says."""

    name = "array"

    def __init__(self, dtype: DType, change: Any = None, info: BackendInfo = ORT) -> None:
        self.dtype = dtype
        self.change = change or (lambda output: output)
        self.info = info

    def describe(self) -> BackendInfo:
        return self.info

    def run(self, pixel_values: Any, grid_hws: Any) -> Any:
        return self.change(tower(pixel_values, self.dtype, self.dtype))

    def __enter__(self) -> ArrayBackend:
        return self

    def __exit__(self, *_: object) -> None:
        pass


FLOOR = Errors(relative_l2=1e-2, worst_token=2e-2, worst_angle=1.5e-2, largest_over_rms=6e-2)
GOOD = Measured(
    relative_l2=9e-3, worst_token=2e-2, worst_angle=1e-2, largest_over_rms=5e-2, norm=1e-4, worst_token_norm=-1e-3
)


def case_evidence(name: str = "a", side: int = 20, **changes: Any) -> CaseEvidence:
    case = CaseEvidence(
        name=name,
        kind="photo",
        frames=1,
        grid_hws=((side, side),),
        floor=FLOOR,
        status="compared",
        note="",
        measured=GOOD,
        directions=(DirectionScore("merge-order", 0.02, 0.01),),
    )
    return dataclasses.replace(case, **changes)


def evidence_of(*cases: CaseEvidence, **changes: Any) -> Evidence:
    """Evidence in which all is well, unless ``cases`` or ``changes`` say otherwise."""
    cases = cases or (case_evidence("a"), case_evidence("b"))
    pairs = tuple(Sensitivity(first.name, second.name, 1.0) for first, second in expected_pairs(cases))
    evidence = Evidence("bfloat16", 1.0, TORCH, ORT, (), tuple(cases), pairs)
    return dataclasses.replace(evidence, **changes)


def with_case(evidence: Evidence, index: int = 0, **changes: Any) -> Evidence:
    """The evidence with one case changed."""
    cases = list(evidence.cases)
    cases[index] = dataclasses.replace(cases[index], **changes)
    return dataclasses.replace(evidence, cases=tuple(cases))


def measured(**changes: float | None) -> Measured:
    return dataclasses.replace(GOOD, **changes)


def manifest_of(folder: Path, kind: str, validation: Validation | None = None, **changes: Any) -> Manifest:
    """A manifest over the files that lie in a folder."""
    engine = kind == "engine"
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        kind=kind,
        artifact="vision_tower.engine" if engine else "vision_tower.onnx",
        source=Source("random:tiny", None, "kimi_k25", SHA, {"hidden_size": 1152}, "cd" * 32, SHA if engine else None),
        options={"rope": "plugin", "seed": 0},
        tool_versions={"python": "3.11.2"},
        dtype="bfloat16",
        opset=20,
        rope="plugin",
        attention="plain",
        packing="packed",
        plugin=PluginRecord("FusedQKRope", "1", "function", None),
        runtime=Runtime("tensorrt", "10.13.2.6") if engine else None,
        profiles=(),
        targets=("9.0",) if engine else (),
        warnings=("a warning",),
        seconds={"export": 1.5},
        peak_memory_bytes=1 << 30,
        layers={"MATRIX_MULTIPLY HALF": 15} if engine else {},
        files=record_files(folder),
        validation=validation,
    )
    return dataclasses.replace(manifest, **changes)


def golden_evidence(folder: Path, backend: BackendInfo, profiles: tuple[Profile, ...] = ()) -> Evidence:
    """Evidence of a perfect run over the golden set in a folder."""
    header = open_golden(folder).header
    cases = tuple(
        CaseEvidence(
            case.name,
            case.kind,
            case.frames,
            case.grid_hws,
            case.floor,
            "compared",
            "",
            Measured(0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
            tuple(DirectionScore(entry.fault, 0.0, entry.spread) for entry in case.directions),
        )
        for case in header.cases
    )
    return evidence_of(*cases, backend=backend, dtype=header.dtype, profiles=profiles)


def write_artifact(folder: Path, kind: str, evidence: Evidence | None = None, **changes: Any) -> Manifest:
    """A validated artifact on the disk, with a main file of some bytes; returns its manifest."""
    folder.mkdir(exist_ok=True)
    (folder / ("vision_tower.engine" if kind == "engine" else "vision_tower.onnx")).write_bytes(b"artifact" * 1000)
    if not (folder / "golden").exists():
        write_sample_golden(folder / "golden")
    profiles = changes.get("profiles", ())
    backend = TENSORRT if kind == "engine" else ORT
    evidence = evidence or golden_evidence(folder / "golden", backend, profiles)
    bare = manifest_of(folder, kind, **changes)
    validation = Validation(
        "2025-01-01T00:00:00+00:00", bare.artifact_sha256, bare.golden_sha256, evidence, judge(evidence)
    )
    manifest = dataclasses.replace(bare, **({"validation": validation} | changes))
    write_manifest(folder, manifest)
    return manifest
