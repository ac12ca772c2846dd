"""Records golden sets: inputs, the live tower's fp32 output, its own error in a dtype, and wrong models."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exporter.errors import MissingRequirement
from exporter.validation.evidence import BackendInfo
from exporter.validation.golden_cases import (
    GoldenOptions,
    PlannedCase,
    case_pixels,
    default_photo,
    plan_cases,
    preprocess_rule,
)
from exporter.validation.golden_format import GoldenSettings
from exporter.validation.golden_writer import GoldenOrigin, GoldenWriter, write_golden
from exporter.validation.gpu import cuda_capability
from exporter.validation.wide_linear import WideLinear
from exporter.validation.wrong_models import WrongModel, wrong_models_for
from model.graph import GraphForm, GraphTower, Prepared
from model.tower import KimiVision, build_tower
from model.weights import VisionWeights

__all__ = [
    "GoldenOptions", "WrongRuns", "check_options", "default_photo", "describe_torch", "exact_arithmetic",
    "preprocess_rule", "record_golden", "run_live", "run_wrong",
]  # fmt: skip

Pixels = NDArray[np.float32]
Progress = Callable[[str, int, int], None]
LiveTower = Callable[[Tensor, Tensor], list[Tensor]]  # as KimiVision is called


@contextlib.contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Forbid TF32, which would put its own error into the reference."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = False, False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def describe_torch(device: str) -> BackendInfo:
    """Say what PyTorch runs on.

    Raises:
        MissingRequirement: the device is not there.
    """
    if device == "cpu":
        return BackendInfo("torch", str(torch.__version__), "cpu")
    if not torch.cuda.is_available():
        raise MissingRequirement(f"--device {device}: PyTorch {torch.__version__} sees no CUDA GPU; use --device cpu")
    return BackendInfo(
        "torch", str(torch.__version__), f"cuda: {torch.cuda.get_device_name()}", capability=cuda_capability()
    )


def run_live(tower: LiveTower, pixels: Pixels, grids: Sequence[tuple[int, int]]) -> Pixels:
    """Run the live tower on one call of the graph's interface.

    Args:
        tower: in any dtype, on any device.
        pixels: [frames, patches, 588] fp32.
        grids: (h, w) of each item.

    Returns:
        [patches/4, text_hidden_size] fp32.
    """
    rows: Pixels = live_rows(tower, pixels, grids).to(torch.float32).cpu().numpy()
    return rows


@torch.inference_mode()
def live_rows(tower: LiveTower, pixels: Pixels, grids: Sequence[tuple[int, int]]) -> Tensor:
    """The same as a tensor of the tower, in its dtype and on its device."""
    frames = pixels.shape[0]
    areas = [h * w for h, w in grids]
    # the graph's patches are frame-major over all items, the live tower's item by item
    values = torch.from_numpy(pixels)
    if len(grids) == 1:
        flat = values.flatten(0, 1)  # a view: a copy would wake all threads of the CPU before a GPU gets to work
    else:
        flat = torch.cat([item.flatten(0, 1) for item in torch.split(values, areas, dim=1)])
    thws = torch.tensor([(frames, h, w) for h, w in grids])
    return torch.cat(tower(flat, thws))


class WrongRuns:
    """Runs wrong models on one call in the exported form, where the mistakes are made.

    Mistakes that are made behind the blocks share one run of them.
    """

    def __init__(self, tower: KimiVision, pixels: Pixels, grids: Sequence[tuple[int, int]]) -> None:
        """Take the right tower and a call; shapes as in :func:`run_live`."""
        self._tower = tower
        self._form = GraphForm("plain", "plain", "packed" if len(grids) > 1 else "single")
        self._values = torch.from_numpy(pixels).to(device=tower.device, dtype=tower.dtype)
        self._grids = torch.tensor(grids, device=tower.device)
        self._behind_blocks: tuple[Tensor, Prepared] | None = None

    @torch.inference_mode()
    def run(self, wrong: WrongModel) -> Pixels:
        """Run one wrong model: [patches/4, text_hidden_size] fp32."""
        with wrong.substituted():
            graph = GraphTower(wrong.tower(self._tower), self._form)
            found = self._behind_blocks if _is_behind_blocks(wrong) else None
            if found is None:
                found = self._run_blocks(graph)
            if _is_behind_blocks(wrong):
                self._behind_blocks = found
            x, prepared = found
            rows: Pixels = graph.after_blocks(x, self._values, prepared).to(torch.float32).cpu().numpy()
        return rows

    def _run_blocks(self, graph: GraphTower) -> tuple[Tensor, Prepared]:
        x, prepared = graph.before_blocks(self._values, self._grids)
        for block in graph.tower.vision_tower.encoder.blocks:
            x = block(x, prepared.rotate, prepared.attend)
        return x, prepared


def _is_behind_blocks(wrong: WrongModel) -> bool:
    """Whether all that a wrong model changes is a function that only the part behind the blocks calls."""
    changes_more = wrong.config is not WrongModel.config or wrong.tensor is not WrongModel.tensor
    return not changes_more and wrong.function.startswith(("model.tower.final_norm", "model.projector."))


def run_wrong(tower: KimiVision, wrong: WrongModel, pixels: Pixels, grids: Sequence[tuple[int, int]]) -> Pixels:
    """Run one wrong model on one call; see :class:`WrongRuns`."""
    return WrongRuns(tower, pixels, grids).run(wrong)


def check_options(weights: VisionWeights, options: GoldenOptions) -> None:
    """Raise what :func:`record_golden` would raise about its options, before anything long begins."""
    plan_cases(weights.config, options, preprocess_rule(weights))
    describe_torch(options.device)


def record_golden(
    weights: VisionWeights,
    options: GoldenOptions,
    folder: Path,
    *,
    force: bool = False,
    progress: Progress | None = None,
    seconds: dict[str, float] | None = None,
) -> int:
    """Record a golden set.

    On a CPU, PyTorch's own error in bf16 and fp16 is measured with :class:`WideLinear`, and the set says so.

    Args:
        weights: an opened source.
        options: what to record.
        folder: appears whole.
        force: replace an existing golden set.
        progress: called before each case.
        seconds: takes the time of each part of the recording.

    Returns:
        Number of cases.

    Raises:
        Usage, ImageError, MissingRequirement: see :func:`plan_cases` and :func:`describe_torch`.
        BadInput: an output is not finite.
    """
    config, device, seconds = weights.config, options.device, {} if seconds is None else seconds
    rule = preprocess_rule(weights)
    cases = plan_cases(config, options, rule)
    widened = device == "cpu" and options.dtype != "float32"
    how = {"packing": options.packing, "linear": "widened" if widened else "native"}
    origin = GoldenOrigin(
        family=config.family,
        dtype=options.dtype,
        width=config.text_hidden_size,
        weights_sha256=weights.sha256(),
        config_sha256=config.sha256,
        recorded_by=describe_torch(device),
        settings=GoldenSettings(False, torch.get_num_threads(), options.seed, how),
    )
    with exact_arithmetic(), write_golden(folder, origin, force) as writer:
        with _timed(seconds, "towers"):
            reference = build_tower(weights, dtype=torch.float32, device=device)
            native = None
            if options.dtype != "float32":
                native = build_tower(weights, dtype=getattr(torch, options.dtype), device=device)
        recorder = _Recorder(writer, reference, native, WideLinear() if widened else contextlib.nullcontext(), seconds)
        for number, case in enumerate(cases, 1):
            if progress is not None:
                progress(case.name, number, len(cases))
            with _timed(seconds, "inputs"):
                pixels = case_pixels(case, options, rule)
            recorder.record(case, pixels)
    return len(cases)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the time of the block to that of a part."""
    start = time.perf_counter()
    yield
    seconds[part] = round(seconds.get(part, 0.0) + time.perf_counter() - start, 3)


@dataclass(frozen=True)
class _Recorder:
    """Runs the towers on one case after another.

    Attributes:
        writer: takes the cases.
        reference: the tower in fp32.
        native: the tower in the artifact's dtype; None for fp32.
        arithmetic: how the latter computes.
        seconds: takes the times.
    """

    writer: GoldenWriter
    reference: KimiVision
    native: KimiVision | None
    arithmetic: contextlib.AbstractContextManager[object]
    seconds: dict[str, float]

    def record(self, case: PlannedCase, pixels: Pixels) -> None:
        with _timed(self.seconds, "fp32 reference"):
            reference = run_live(self.reference, pixels, case.grids)
        native = None
        if self.native is not None:
            with _timed(self.seconds, "native dtype"), self.arithmetic:
                native = run_live(self.native, pixels, case.grids)
        with _timed(self.seconds, "writing and wrong models"):
            self.writer.add(
                case.name,
                case.kind,
                grid_hws=case.grids,
                pixel_values=pixels,
                reference=reference,
                native=native,
                wrong_outputs=self._wrong_outputs(case, pixels) if case.keeps_directions else (),
            )

    def _wrong_outputs(self, case: PlannedCase, pixels: Pixels) -> Iterator[tuple[str, NDArray[Any]]]:
        runs = WrongRuns(self.reference, pixels, case.grids)
        for wrong in wrong_models_for(self.reference.config, frames=case.frames, items=len(case.grids)):
            # what an image shows is recorded on images; other calls add only what needs them
            if wrong.needs == "any" and (case.frames > 1 or len(case.grids) > 1):
                continue
            with _timed(self.seconds, "wrong models"):
                output = runs.run(wrong)
            yield wrong.name, output
