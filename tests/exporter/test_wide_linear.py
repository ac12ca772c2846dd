"""PyTorch's own error, measured by fp32 products that are rounded once: the same arithmetic, and the same floor."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
import towers
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from exporter.validation import metrics, record
from exporter.validation.golden import open_golden
from exporter.validation.record import GoldenOptions, record_golden, run_live
from exporter.validation.wide_linear import WideLinear
from exporter.validation.wrong_models import WRONG_MODELS
from tests.exporter.samples import DTYPES

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LOW)
def test_a_product_is_rounded_exactly_once(name: str, bias: bool) -> None:
    """float64 rounded once is the oracle; bias added after a first rounding would differ in a third of the elements."""
    generator, dtype = torch.Generator().manual_seed(0), LOW[name]
    x, w, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((64, 1152), (96, 1152), (96,)))
    expected = F.linear(x.double(), w.double(), b.double() if bias else None).to(dtype)
    with WideLinear():
        found = F.linear(x, w, b if bias else None)
        assert torch.equal(F.linear(input=x, weight=w, bias=b if bias else None), found)
        module = torch.nn.Linear(1152, 96, bias=bias, dtype=dtype)
        module.load_state_dict({"weight": w, "bias": b} if bias else {"weight": w})
        assert torch.equal(module(x), found)
    assert found.dtype == dtype
    # fp32 sums of 1152 terms err by some 1e-6, and so cross the middle of two fp16 numbers (2^-11) once in a thousand
    assert (found != expected).double().mean() < 0.01


@pytest.mark.parametrize("name", LOW)
def test_it_is_really_used_and_nothing_else_changes(name: str, monkeypatch) -> None:
    x = torch.ones(2, 4, dtype=LOW[name])
    seen = []
    monkeypatch.setattr("exporter.validation.wide_linear._wide", lambda *args: seen.append(args) or args[0])
    with WideLinear():
        F.linear(x, x)
        assert len(seen) == 1
        F.linear(x.float(), x.float())
        F.linear(x.to("meta"), x.to("meta"))  # another device than the CPU
        torch.matmul(x, x.T)
        F.gelu(x)
    F.linear(x, x)
    assert len(seen) == 1


def floors(name: str, dtype: str, layers: int | None, grids, widened: bool):
    """Floors of noise on several grids, as the recorder takes them."""
    found = []
    for index, grid in enumerate(grids):
        pixels = towers.noise(1, [grid], dtype, seed=index)
        right = run_live(towers.tower_of(name, layers=layers), pixels, [grid])
        with WideLinear() if widened else contextlib.nullcontext():
            own = run_live(towers.tower_of(name, dtype, layers=layers), pixels, [grid])
        found.append(dataclasses.astuple(metrics.floor_of(own, right)))
    return np.array(found)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    ("name", "layers", "grids"),
    [("tiny", None, [(6, 12), (16, 16), (16, 20), (30, 34)]), ("kimi-k2.5", 2, [(4, 6), (8, 10)])],
    ids=["tiny", "real width"],
)
def test_the_floor_is_that_of_pytorchs_own_kernels(name: str, layers: int | None, grids, dtype: str) -> None:
    own, wide = (floors(name, dtype, layers, grids, widened) for widened in (False, True))
    assert not np.array_equal(own, wide)  # two orders of summation
    relative_l2 = wide[:, 0] / own[:, 0]
    # Errors of two orders of summation are two draws of one distribution. Over a whole output they scatter by 3 % at
    # width 96 and 1 % at 1152; the worst token and the largest element are extremes and scatter by up to 25 %.
    assert np.abs(relative_l2 - 1).max() < (0.05 if name == "tiny" else 0.02)
    assert relative_l2.mean() < 1.02  # limits are multiples of it: it must not grow
    assert np.abs(wide / own - 1).max() < 0.4
    assert (wide / own).mean() < 1.08


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_set_says_how_it_was_recorded_and_where_the_time_went(dtype: str, tmp_path, monkeypatch) -> None:
    used = []
    monkeypatch.setattr(WideLinear, "__enter__", lambda self: used.append(self))  # noqa: PLW0108 - binds as a method
    monkeypatch.setattr(WideLinear, "__exit__", lambda *_: None)
    seconds: dict[str, float] = {}
    options = GoldenOptions(dtype, max_patches=4)
    assert record_golden(towers.weights_of("tiny"), options, tmp_path / "golden", seconds=seconds) == 2
    widened = dtype != "float32"
    other = open_golden(tmp_path / "golden").header.settings.other
    assert other == {"packing": "single", "linear": "widened" if widened else "native"}
    assert len(used) == (2 if widened else 0)
    parts = {"towers", "inputs", "fp32 reference", "writing and wrong models"}
    assert set(seconds) == parts | ({"native dtype"} if widened else set())
    assert all(value >= 0 for value in seconds.values())


def test_on_a_gpu_pytorchs_own_kernels_are_used(tmp_path, monkeypatch) -> None:
    """No GPU here: the towers stay on the CPU, the recorder is told that they do not."""
    real = record.build_tower
    monkeypatch.setattr(record, "build_tower", lambda weights, *, dtype, device: real(weights, dtype=dtype))
    monkeypatch.setattr(record, "describe_torch", lambda device: record.BackendInfo("torch", "0", device))
    monkeypatch.setattr(WideLinear, "__enter__", lambda self: pytest.fail("entered"))
    options = GoldenOptions("bfloat16", max_patches=4, device="cuda")
    record_golden(towers.weights_of("tiny"), options, tmp_path / "golden")
    assert open_golden(tmp_path / "golden").header.settings.other["linear"] == "native"


@pytest.mark.parametrize(("frames", "grids"), [(1, [(16, 20)]), (4, [(4, 6)]), (1, [(4, 6), (6, 4)])])
@pytest.mark.parametrize("preset", ["tiny", "tiny-k3"])
def test_sharing_the_blocks_changes_no_wrong_model(preset: str, frames: int, grids) -> None:
    right = towers.tower_of(preset)
    pixels = towers.noise(frames, grids, "fp32")
    wrongs = [wrong for wrong in WRONG_MODELS if wrong.applies(right.config)]
    runs = record.WrongRuns(right, pixels, grids)
    calls = []
    real = runs._run_blocks
    runs._run_blocks = lambda graph: calls.append(graph) or real(graph)  # type: ignore[method-assign]
    for wrong in wrongs:
        assert np.array_equal(runs.run(wrong), record.run_wrong(right, wrong, pixels, grids)), wrong.name
    behind = {
        "merge-order-transposed", "first-frame-only", "final-norm-missing", "projector-gelu-tanh",
        "projector-norm-flattened",
    }  # fmt: skip
    assert len(calls) == len(wrongs) - len(behind & {wrong.name for wrong in wrongs}) + 1
