"""The ONNX artifacts that engines are built from; making them needs PyTorch, and by default a GPU for golden sets."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exporter.validation.golden_cases import GoldenOptions

# one mistake each in RoPE, position table and attention; each replaces a function, so that weights and config stay
WRONG = ("rope-axes-swapped", "bicubic-pillow", "attention-scale-padded")

# An engine of full depth takes long to build, so its golden set is small: images alone, which is one profile, whose
# corners it covers (4, 256 and 320 patches). The smallest clip has 8 tokens, so 4 leaves all clips out, and with them
# all images but 2x2. 16x20 and 20x16 are what directions are recorded on.
DEEP_MAX_PATCHES = 4
DEEP_SIZES = ("16x16", "16x20", "20x16")


@dataclass(frozen=True)
class Planned:
    """An artifact to be made.

    Attributes:
        name: of its folder.
        source: SOURCE of the right model.
        dtype: fp32 or fp16.
        wrong: name of the wrong model; empty for the right one.
        max_patches: bounds the default grids of the golden set.
        sizes: further calls of the golden set, as ``--golden-sizes`` takes them.
    """

    name: str
    source: str
    dtype: str
    wrong: str
    max_patches: int
    sizes: tuple[str, ...] = ()

    @property
    def right(self) -> tuple[str, str, int, tuple[str, ...]]:
        """What a golden set depends on; wrong models have that of the right one."""
        return self.source, self.dtype, self.max_patches, self.sizes


def plan(arguments: argparse.Namespace) -> list[Planned]:
    """List the artifacts: right models of few layers, wrong ones of the first preset, one of full depth."""
    planned = []
    for preset in arguments.presets:
        source = f"random:{preset}?layers={arguments.layers}"
        for dtype in arguments.dtypes:
            wrongs = arguments.wrong if preset == arguments.presets[0] else []
            for wrong in ("", *wrongs):
                name = "-".join(filter(None, [preset, f"layers{arguments.layers}", dtype, wrong]))
                planned.append(Planned(name, source, dtype, wrong, arguments.max_patches, tuple(arguments.sizes)))
    if arguments.deep:
        deep = f"{arguments.deep}-all-layers-fp16"
        bounds = arguments.deep_max_patches, tuple(arguments.deep_sizes)
        planned.append(Planned(deep, f"random:{arguments.deep}", "fp16", "", *bounds))
    if unknown := set(arguments.only) - {item.name for item in planned}:
        sys.exit(f"--only takes {', '.join(item.name for item in planned)}, not {', '.join(sorted(unknown))}")
    return [item for item in planned if not arguments.only or item.name in arguments.only]


def export(item: Planned, folder: Path) -> None:
    """Export one artifact without a golden set, in a process of its own."""
    import torch

    from exporter.onnx_artifact import OnnxRequest, make_onnx
    from exporter.validation.wrong_models import WrongModel, wrong_model

    torch.set_num_threads(2)  # the processes are the parallelism
    wrong = wrong_model(item.wrong) if item.wrong else WrongModel("", "none")
    with wrong.substituted():
        make_onnx(OnnxRequest(item.source, folder, item.dtype, golden=False), lambda _step, _done, _total: None)


def golden_options(item: Planned, device: str) -> GoldenOptions:
    """What the golden set of an artifact is recorded on."""
    from exporter.commands.options import GridSize
    from exporter.onnx_artifact import DTYPES
    from exporter.validation.golden_cases import GoldenOptions

    sizes = tuple(GridSize().convert(size, None, None) for size in item.sizes)
    dtype = DTYPES[item.dtype]
    return GoldenOptions(dtype, sizes=sizes, max_patches=item.max_patches, device=device)  # type: ignore[arg-type]


def record(item: Planned, device: str, folder: Path) -> None:
    """Record the golden set of a right model, if it is not there."""
    if folder.exists():
        return
    from exporter.validation.record import record_golden
    from model.random_weights import parse_random_source
    from scripts.gate_margins import DrawnOnce

    record_golden(DrawnOnce(parse_random_source(item.source)), golden_options(item, device), folder)


def finish(item: Planned, made: Path, golden: Path, device: str, target: Path) -> None:
    """Add the golden set to an exported artifact and let it appear under its name."""
    from exporter.files import link_or_copy
    from exporter.manifest import GOLDEN_FOLDER, read_manifest, record_files, write_manifest

    (made / GOLDEN_FOLDER).mkdir()
    for path in golden.iterdir():
        link_or_copy(path, made / GOLDEN_FOLDER / path.name)
    manifest = read_manifest(made)
    options = {**manifest.options, "golden": True, "device": device, "max_patches": item.max_patches}
    options |= {"golden_sizes": list(item.sizes), "wrong_model": item.wrong}
    write_manifest(made, dataclasses.replace(manifest, options=options, files=record_files(made)))
    os.rename(made, target)


def prepare(arguments: argparse.Namespace) -> int:
    """Make the artifacts: exports in worker processes, golden sets here meanwhile, since they use the GPU."""
    import multiprocessing
    import shutil

    from exporter.validation.wrong_models import WRONG_MODELS

    usable = {wrong.name for wrong in WRONG_MODELS if wrong.function}  # the others change the weights or the config
    if unusable := set(arguments.wrong) - usable:
        sys.exit(f"--wrong takes {', '.join(sorted(usable))}, not {', '.join(sorted(unusable))}")
    out: Path = arguments.out
    work = out / ".work"
    work.mkdir(parents=True, exist_ok=True)
    todo = [item for item in plan(arguments) if not (out / item.name).exists()]
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        exports: dict[str, Future[None]] = {}
        for item in sorted(todo, key=lambda item: "layers=" in item.source):  # the deep one takes longest
            shutil.rmtree(work / item.name, ignore_errors=True)
            exports[item.name] = pool.submit(export, item, work / item.name)
        for item in todo:
            start = time.perf_counter()
            named = ["golden", item.source.replace("?", "_"), item.dtype, str(item.max_patches), *item.sizes]
            golden = work / "-".join(named)
            record(item, arguments.device, golden)
            exports[item.name].result()
            finish(item, work / item.name, golden, arguments.device, out / item.name)
            print(f"{item.name}: made, {time.perf_counter() - start:.0f} s", flush=True)
    shutil.rmtree(work)
    return 0
