"""What a built TensorRT-RTX engine computes in fp32, by TensorRT's own list of the engine's kernels.

The engine inspector needs a loaded engine, hence a GPU. But with detailed verbosity the builder logs, at its lowest
severity, every kernel of the engine that it has made: the operations fused into it in order, the types of what it reads
and writes, and the ONNX nodes that it comes from. What happens inside fused attention, softmax included, it does not
tell.
"""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from exporter.trt import flavor as flavors
from exporter.trt.builder import _Build, make_logger
from exporter.trt.job import BuildJob
from exporter.validation.evidence import Profile, Shape
from model.graph import GraphForm
from tests.exporter.artifacts import artifact

trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: no engine was built")

PROFILE = Profile("profile", Shape(1, 4, 1), Shape(1, 64, 1), Shape(1, 256, 1))
DTYPES = {"bf16": ("bfloat16", "BFloat16"), "fp16": ("float16", "Half")}  # the second in TensorRT's words


@dataclass(frozen=True)
class Kernel:
    """One line of TensorRT's list; ``operations`` are the syllables of its name, such as Cast, Mean, Sub."""

    kind: str
    operations: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: str


def kernels_of(log: list[str]) -> list[Kernel]:
    (listed,) = [message for message in log if message.startswith("Layers:\n")]
    found = []
    for line in listed.splitlines():
        match = re.match(
            r"Name: (\S+), LayerType: (\w+), Inputs: (.*), Constants: (.*), Outputs: (.*), TacticName: (.*)", line
        )
        if match is None:
            continue
        name, kind, inputs, _, outputs, rest = match.groups()
        read, written = (tuple(re.findall(r"Datatype: (\w+)", part)) for part in (inputs, outputs))
        found.append(Kernel(kind, tuple(re.findall(r"[A-Z][a-z]+", name)), read, written, rest))
    return found


def with_log(log: list[str], base: type) -> object:
    """A logger of ours that keeps what TensorRT says at any severity."""

    class Verbose(base):
        def log(self, severity, message):
            log.append(message)
            super().log(severity, message)

    return Verbose()


def build(onnx: Path, folder: Path, dtype: str) -> list[Kernel]:
    """Build as ``kvit-export trt`` does, in this process and with RoPE from elementary operators."""
    job = BuildJob(
        flavor="tensorrt_rtx",
        onnx=str(onnx / "vision_tower.onnx"),
        engine=str(folder / "x.engine"),
        dtype=dtype,
        profiles=(PROFILE,),
        targets=("8.9",),
        opt_level=None,
        workspace=None,
        timing_cache=None,
        plugin=None,
        plugin_target="sm_89",
        plugin_layers=2,
        heads=4,
        head_dim=24,
    )
    built = _Build(job, flavors.installed("tensorrt_rtx"), types.SimpleNamespace(send=lambda _message: None))
    log: list[str] = []
    built.log = with_log(log, type(built.log))
    built.run()
    return kernels_of(log)


def narrow_statistics(kernels: list[Kernel]) -> list[Kernel]:
    """Kernels that average in half precision: neither cast before nor fed with fp32."""
    return [
        kernel
        for kernel in kernels
        if "Mean" in kernel.operations
        and "Cast" not in kernel.operations[: kernel.operations.index("Mean")]
        and "Float" not in kernel.inputs
    ]


def narrow_angles(kernels: list[Kernel]) -> list[Kernel]:
    """Kernels of cosines and sines that do not hand on both in fp32."""
    return [k for k in kernels if {"Sin", "Cos"} & set(k.operations) and k.outputs.count("Float") < 2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("tiny", "bf16"), ("tiny", "fp16"), ("tiny-k3", "bf16")])
def test_islands_are_fp32_and_products_are_not(tmp_path: Path, name: str, dtype: str) -> None:
    onnx = artifact(tmp_path / "onnx", name, dtype, GraphForm("plugin", "plain", "single"))
    dtype, half = DTYPES[dtype]
    kernels = build(onnx, tmp_path, dtype)

    # two norms a block, one behind the blocks, one of the projector
    assert sum(kernel.operations.count("Sqrt") for kernel in kernels) == 2 * 2 + 1 + 1
    assert narrow_statistics(kernels) == []

    # one kernel computes all angles, and rotates for the first block; the second block reads its cosines and sines
    assert [{"Sin", "Cos"} <= set(k.operations) for k in kernels if {"Sin", "Cos"} & set(k.operations)] == [True]
    assert narrow_angles(kernels) == []
    rotations = [k for k in kernels if "FusedQKRope" in k.nodes and "Cos" not in k.operations]
    assert len(rotations) == 2  # of q and of k
    assert all(k.inputs.count("Float") >= 2 and "Cast" in k.operations and k.outputs == (half,) for k in rotations)

    # patch embedding, four in each block, two in the projector
    linears = [k for k in kernels if k.kind == "gemm" or "Fc" in k.operations]
    assert len(linears) == 1 + 4 * 2 + 2
    fused = [k for k in kernels if "/node_softmax]" in k.nodes]
    assert len(fused) == 2
    assert {typed for k in (*linears, *fused) for typed in (*k.inputs, *k.outputs)} == {half}


def test_what_is_computed_in_bf16_is_seen() -> None:
    """The same questions of a network that averages and takes angles in bf16."""
    log: list[str] = []
    logger = with_log(log, type(make_logger(trt)))
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.bfloat16, (64, 64))
    mean = network.add_reduce(x, trt.ReduceOperation.AVG, 1 << 1, keep_dims=True).get_output(0)
    apart = network.add_elementwise(x, mean, trt.ElementWiseOperation.SUB).get_output(0)
    for operation in (trt.UnaryOperation.SIN, trt.UnaryOperation.COS):
        network.mark_output(network.add_unary(apart, operation).get_output(0))
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    assert builder.build_serialized_network(network, config) is not None
    kernels = kernels_of(log)
    assert narrow_statistics(kernels)
    assert narrow_angles(kernels)
