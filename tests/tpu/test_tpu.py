"""PyTorch with torch-tpu loaded, on a machine without a TPU: nothing here asks for dynamic compilation.

torch-tpu loads itself with PyTorch. Without a TPU there is no device "tpu", so the tensors are on the CPU; its compiler
is there all the same, and refuses ``dynamic=True`` before it looks at a device. On a TPU it replaces ``torch.compile``
by a function that hands every TPU tensor to that compiler; the fixture ``tpu_compiler`` does the same for CPU tensors.
"""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: nothing was run beside torch-tpu")
pytest.importorskip("torch_tpu", reason="torch-tpu is not installed: nothing was run beside it")

from torch import Tensor  # noqa: E402
from torch._dynamo.exc import BackendCompilerFailed  # noqa: E402

from model import platform  # noqa: E402
from model.position import get_rope_shape  # noqa: E402
from model.tower import build_tower  # noqa: E402
from tests.model.reference import resample  # noqa: E402
from tests.model.samples import UNIT_SCALE, largest_error, reference_rows, run, weights_of  # noqa: E402

pytestmark = [pytest.mark.tpu]

REFUSAL = "TPU backend does not support torch.compile\\(..., dynamic=True, ...\\)"
BATCH = [(1, 4, 6), (2, 8, 6), (1, 2, 2)]
# as in test_position: sums of 16 products with weights of at most 1.3 in all, values up to 4
RESAMPLED = 3e-6


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled before, and no setting from outside."""
    monkeypatch.delenv(platform.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(platform, "_READY", {})
    platform.say_once.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def tpu_compiler(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every compilation goes to torch-tpu's compiler; the list grows by one for each that is asked for."""
    asked: list[bool] = []
    compiler = torch.compile

    def compile_for_tpu(function: Any, **options: Any) -> Any:
        asked.append(options.get("dynamic", False))
        return compiler(function, **{**options, "backend": "tpu"})

    monkeypatch.setattr(torch, "compile", compile_for_tpu)
    return asked


def table_of(width: int = 3) -> Tensor:
    return torch.randn(8, 8, width, generator=torch.Generator().manual_seed(0))


def test_torch_tpu_came_with_pytorch():
    assert "torch_tpu._loader" in sys.modules
    assert "tpu" in torch._dynamo.list_backends()


def test_plain_dynamic_compilation_is_refused_even_for_a_cpu_tensor():
    """The same with no code of this project in between."""

    def interpolate(x: Tensor, height: int, width: int) -> Tensor:
        return torch.nn.functional.interpolate(x, size=(height, width), mode="bicubic", align_corners=False)

    planes = table_of().permute(2, 0, 1).unsqueeze(0)
    with pytest.raises(BackendCompilerFailed, match=REFUSAL):
        torch.compile(interpolate, dynamic=True, backend="tpu")(planes, 4, 6)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 6), (6, 4), (8, 8), (3, 40), (1, 5)], ids=str)
def test_get_rope_shape_asks_for_no_compilation(mode: str, shape: tuple[int, int], tpu_compiler: list[bool]):
    table = table_of()
    ours = get_rope_shape(table, mode, shape)
    exact = torch.as_tensor(resample(table.double().numpy(), mode, *shape)).flatten(0, 1)
    assert (ours.double() - exact).abs().max() <= RESAMPLED
    assert tpu_compiler == []


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_the_tower_asks_for_no_compilation_and_is_right(name: str, tpu_compiler: list[bool]):
    with torch.no_grad():
        rows = run(build_tower(weights_of(name)), BATCH)
    assert largest_error(rows, reference_rows(name, BATCH)) <= UNIT_SCALE
    assert tpu_compiler == []


def test_a_tpu_is_planned_token_by_token_and_uncompiled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "being_traced", lambda table: False)
    on_tpu: Any = SimpleNamespace(device=SimpleNamespace(type="tpu"))
    assert platform.plan_rope_shape(on_tpu, (4, 6)) == (True, False, False)
    assert platform.plan_rope_shape(table_of(), (4, 6)) == (False, False, False)


@pytest.mark.parametrize("how", ["argument", "variable"])
def test_forced_compilation_is_refused_by_torch_tpu(
    how: str, tpu_compiler: list[bool], monkeypatch: pytest.MonkeyPatch
):
    """Why the device decides: what a GPU does by default would end here."""
    if how == "variable":
        monkeypatch.setenv(platform.ENVIRONMENT_VARIABLE, "1")
        call = partial(get_rope_shape, table_of(), "bicubic", (4, 6))
    else:
        call = partial(get_rope_shape, table_of(), "bicubic", (4, 6), compile=True)
    with pytest.raises(BackendCompilerFailed, match=REFUSAL):
        call()
    assert tpu_compiler == [True]


def test_the_tower_forced_to_compile_is_refused_and_runs_again_when_it_is_not(
    tpu_compiler: list[bool], monkeypatch: pytest.MonkeyPatch
):
    tower = build_tower(weights_of("tiny"))
    monkeypatch.setenv(platform.ENVIRONMENT_VARIABLE, "1")
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=REFUSAL):
        run(tower, BATCH)
    assert tpu_compiler == [True]
    monkeypatch.setenv(platform.ENVIRONMENT_VARIABLE, "auto")
    with torch.no_grad():
        assert largest_error(run(tower, BATCH), reference_rows("tiny", BATCH)) <= UNIT_SCALE
    assert tpu_compiler == [True]


def test_a_device_listed_as_compiled_by_mistake_is_said_and_goes_on(
    tpu_compiler: list[bool], monkeypatch: pytest.MonkeyPatch
):
    """The second guard: unforced, the refusal becomes a warning and the eager answer."""
    monkeypatch.setattr(platform, "COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(platform, "has_triton", lambda: True)
    table = table_of()
    with pytest.warns(RuntimeWarning, match=f"torch.compile failed on cpu: .*{REFUSAL}"):
        ours = get_rope_shape(table, "bicubic", (4, 6))
    assert tpu_compiler == [True]
    assert torch.equal(ours, get_rope_shape(table, "bicubic", (4, 6), compile=False))
