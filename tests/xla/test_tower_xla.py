"""The live tower on a real XLA device (PJRT_DEVICE=CPU): same rows as on the CPU, no host fallback, few programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest

os.environ.setdefault("PJRT_DEVICE", "CPU")
torch = pytest.importorskip("torch", reason="PyTorch is not installed: the tower was NOT run under XLA")
torch_xla = pytest.importorskip("torch_xla", reason="torch_xla is not installed: the tower was NOT run under XLA")

import torch_xla.debug.metrics as met  # noqa: E402
from torch import Tensor  # noqa: E402

from model import position  # noqa: E402
from model.position import get_rope_shape  # noqa: E402
from model.tower import KimiVision, build_tower  # noqa: E402
from plugins.fused_qk_rope.torch_op import fused_qk_rope, fused_qk_rope_  # noqa: E402
from tests.model.reference import resample  # noqa: E402
from tests.model.samples import UNIT_SCALE, largest_error, pixels_of, run, tower_of, weights_of  # noqa: E402

pytestmark = [pytest.mark.xla]

Grids = Sequence[tuple[int, int, int]]
IMAGE, TURNED, LONG, LARGER = [(1, 4, 6)], [(1, 6, 4)], [(1, 2, 12)], [(1, 8, 8)]
CLIP, TURNED_CLIP = [(3, 4, 6)], [(3, 6, 4)]
BATCH, TURNED_BATCH = [(1, 4, 6), (2, 8, 6), (1, 2, 2)], [(1, 6, 4), (2, 6, 8), (1, 2, 2)]
CASES = [
    *[(name, grids) for name in ("tiny", "tiny-k3") for grids in (IMAGE, CLIP, BATCH)],
    *[("kimi-k2.5", grids) for grids in (IMAGE, CLIP)],  # two layers of real width
]
# as in test_position: sums of 16 products with weights of at most 1.3 in all, values up to 4
RESAMPLED = 3e-6
# fp32 ``interpolate`` itself: its source coordinates, up to 64, carry some ulps of 3.8e-6, times slopes of about 1.5
INTERPOLATE_FP32 = 2e-5


@lru_cache(maxsize=1)  # a wide one holds half a gigabyte
def tower_on_xla(name: str) -> KimiVision:
    return build_tower(weights_of(name), device=torch_xla.device())


def rows_on_xla(name: str, grids: Grids) -> list[Tensor]:
    """All items' rows, computed by as few programs as XLA needs for one call."""
    with torch.no_grad():
        rows = run(tower_on_xla(name), grids)
        torch_xla.sync()
        return [part.cpu() for part in rows]


def programs() -> int:
    """Programs compiled since the last ``clear_all``."""
    data = met.metric_data("CompileTime")
    return data[0] if data else 0


def fallbacks() -> dict[str, int]:
    """Operations that ran on the host instead, since the last ``clear_all``."""
    return {name: met.counter_value(name) for name in met.counter_names() if name.startswith("aten::")}


@pytest.fixture(autouse=True)
def from_zero() -> None:
    """Each test counts its own, whatever was compiled before."""
    torch_xla.sync()
    met.clear_all()


def compiled_by(name: str, grids: Grids) -> int:
    met.clear_all()
    rows_on_xla(name, grids)
    assert fallbacks() == {}
    return programs()


# ------------------------------------------------------------------------------------------------------------ the tower


@pytest.mark.parametrize(("name", "grids"), CASES, ids=str)
def test_equals_the_cpu_and_nothing_runs_on_the_host(name: str, grids: Grids):
    ours = rows_on_xla(name, grids)
    assert fallbacks() == {}
    theirs = run(tower_of(name), grids)
    assert largest_error(ours, theirs) <= UNIT_SCALE
    # the limit is meant for rows of about unit scale
    assert 0.5 < float(torch.cat(theirs).square().mean().sqrt()) < 2


def test_counters_would_show_a_fallback(monkeypatch: pytest.MonkeyPatch):
    """What the tower did before: bicubic ``interpolate`` runs on the host, once an item."""
    monkeypatch.setattr(
        position,
        "get_rope_shape",
        lambda table, mode, shape: position._resample_grid(table, mode, *shape),
    )
    rows_on_xla("tiny", IMAGE)
    assert fallbacks() == {"aten::upsample_bicubic2d": 1}


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_programs_follow_the_number_of_tokens_and_not_the_grid(name: str):
    """The whole tower is one program; its shapes are the items' numbers of tokens and of frames, nothing else."""
    rows_on_xla(name, IMAGE)
    assert compiled_by(name, IMAGE) == 0, "the same grid again"
    assert compiled_by(name, TURNED) == 0, "another grid of as many tokens"
    assert compiled_by(name, LONG) == 0, "a third"
    assert compiled_by(name, [(1, 6, 6)]) == 1, "another number of tokens"
    rows_on_xla(name, CLIP)
    assert compiled_by(name, TURNED_CLIP) == 0, "another grid of a clip"
    rows_on_xla(name, BATCH)
    assert compiled_by(name, TURNED_BATCH) == 0, "other grids in a batch"


def test_resampling_by_grid_would_compile_the_tower_for_every_grid(monkeypatch: pytest.MonkeyPatch):
    """Even where the operation itself stays on the device, as bilinear does: why the form by tokens was chosen."""
    monkeypatch.setattr(
        position,
        "get_rope_shape",
        lambda table, mode, shape: position._resample_grid(table, mode, *shape),
    )
    rows_on_xla("tiny-k3", LARGER)
    assert compiled_by("tiny-k3", [(1, 4, 16)]) == 1


def test_same_rows_as_the_cpu_when_the_program_was_made_for_another_grid():
    for grids in (IMAGE, TURNED, LONG):
        assert largest_error(rows_on_xla("tiny", grids), run(tower_of("tiny"), grids)) <= UNIT_SCALE


# ------------------------------------------------------------------------------------------------------- get_rope_shape


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(2, 2), (6, 512), (36, 46), (64, 64), (46, 36), (1, 46), (46, 1), (1, 1)], ids=str)
def test_get_rope_shape_equals_interpolate_and_float64(mode: str, shape: tuple[int, int]):
    table = torch.randn(64, 64, 5, generator=torch.Generator().manual_seed(1))
    ours = get_rope_shape(table.to(torch_xla.device()), mode, shape).cpu()
    assert fallbacks() == {}
    assert ours.dtype == torch.float32
    assert (ours - get_rope_shape(table, mode, shape)).abs().max() <= INTERPOLATE_FP32
    planes = table.double().permute(2, 0, 1).unsqueeze(0)
    exact = torch.nn.functional.interpolate(planes, size=shape, mode=mode, align_corners=False)
    assert (ours.double() - exact.squeeze(0).permute(1, 2, 0).flatten(0, 1)).abs().max() <= RESAMPLED
    formula = torch.as_tensor(resample(table.double().numpy(), mode, *shape)).flatten(0, 1)
    assert (ours.double() - formula).abs().max() <= RESAMPLED


def test_compiling_it_with_dynamic_shapes_fails_here(monkeypatch: pytest.MonkeyPatch):
    """Why the device decides: PyTorch's compiler knows no device "xla"."""
    table = torch.randn(8, 8, 3, device=torch_xla.device())
    with pytest.raises(torch._inductor.exc.InductorError, match="KeyError: 'xla'"):
        get_rope_shape(table, "bicubic", (4, 6), compile=True)
    monkeypatch.setenv("KVIT_COMPILE_ROPE_SHAPE", "1")
    with torch.no_grad(), pytest.raises(torch._inductor.exc.InductorError, match="KeyError: 'xla'"):
        run(tower_on_xla("tiny"), IMAGE)
    monkeypatch.setenv("KVIT_COMPILE_ROPE_SHAPE", "auto")
    assert get_rope_shape(table, "bicubic", (4, 6)).cpu().isfinite().all()


def test_plain_dynamic_compilation_of_interpolate_fails_here_and_works_when_disabled():
    """The same with no code of this project in between."""
    planes = torch.randn(1, 3, 8, 8, device=torch_xla.device())

    def interpolate(x: Tensor, height: int, width: int) -> Tensor:
        return torch.nn.functional.interpolate(x, size=(height, width), mode="bicubic", align_corners=False)

    with pytest.raises(torch._inductor.exc.InductorError, match="KeyError: 'xla'"):
        torch.compile(interpolate, dynamic=True)(planes, 4, 6)
    assert torch.compile(interpolate, dynamic=True, disable=True)(planes, 4, 6).shape == (1, 3, 4, 6)


# --------------------------------------------------------------------------------------------------------- the operator


def operands(dtype: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    packed = torch.randn(7, 3, 2, 72, generator=generator).to(dtype)
    angle = torch.rand(7, 36, generator=generator) * 600 - 300
    return packed[:, 0], packed[:, 1], angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_runs_on_xla_tensors(dtype: Any):
    on_cpu = operands(dtype)
    exact = [
        torch.view_as_real(
            torch.view_as_complex(x.double().reshape(7, 2, 36, 2)) * torch.complex(*on_cpu[2:]).unsqueeze(1)
        ).flatten(-2)
        for x in on_cpu[:2]
    ]
    on_xla = [x.to(torch_xla.device()) for x in on_cpu]
    with torch.no_grad():
        rotated = fused_qk_rope(*on_xla)
    # one rounding to bf16 of values below 8 is 2^-7; fp32's few roundings are 1e-6
    limit = 2.0**-6 if dtype == torch.bfloat16 else 2e-6
    for ours, wanted in zip(rotated, exact, strict=True):
        assert ours.device.type == "xla"
        assert (ours.cpu().double() - wanted).abs().max() <= limit
    assert fallbacks() == {}


def test_the_operator_in_place_is_refused_here():
    """PyTorch has no functional form of it to hand to XLA; the tower calls the other one."""
    on_xla = [x.to(torch_xla.device()) for x in operands(torch.float32)]
    with torch.no_grad(), pytest.raises(RuntimeError, match="whose output has alias annotations: kvit::fused_qk_rope_"):
        fused_qk_rope_(*on_xla)


def test_the_operator_has_its_gradient_on_xla_tensors():
    q, k, cos, sin = (x.to(torch_xla.device()) for x in operands(torch.float32))
    q = q.detach().requires_grad_()
    rotated, _ = fused_qk_rope(q, k, cos, sin)
    (gradient,) = torch.autograd.grad((rotated * rotated).sum(), q)
    # a rotation keeps lengths: the gradient of |Rq|^2 is 2q, here to a few fp32 roundings of values below 10
    assert (gradient - 2 * q).abs().max().item() <= 1e-5


def test_a_fake_pass_on_the_cpu_changes_nothing_here():
    before = rows_on_xla("tiny", IMAGE)
    with torch.device("meta"):
        KimiVision(weights_of("tiny").config)
    run(tower_of("tiny"), IMAGE, pixels_of(IMAGE, seed=3))
    assert all(torch.equal(a, b) for a, b in zip(before, rows_on_xla("tiny", IMAGE), strict=True))
