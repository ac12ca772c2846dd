"""Who compiles ``get_rope_shape`` and who does not, and that no grid compiles anything after the first.

torch.compile runs here with a backend that counts and compiles nothing; tests/gpu has the real one.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from model import platform
from model.errors import InputError
from model.platform import ENVIRONMENT_VARIABLE, plan_rope_shape
from model.position import get_rope_shape
from tests.model.reference import resample
from tests.model.samples import Watch

# growing, shrinking, one axis each way, the table's own size, the shape that was warmed, the smallest, the longest
GRIDS = [(2, 2), (6, 512), (512, 6), (36, 46), (64, 64), (46, 36), (8, 8), (64, 8), (2, 512), (100, 100)]
ONE_SIDED = [(1, 46), (46, 1), (1, 1)]
# as in test_position: 16 products with weights of at most 1.3 in all, values up to 3.5
RESAMPLED = 3e-6


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled and nothing said before, and no setting from outside."""

    def forget() -> None:
        for cached in (platform.say_once, platform._note_once, platform.has_triton):
            cached.cache_clear()
        torch._dynamo.reset()

    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(platform, "_READY", {})
    forget()
    yield
    forget()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """Stands in for the compiler; ``frame_count`` is how often it was called."""
    counting = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counting))
    return counting


def table_of(rows: int = 8, columns: int = 8, width: int = 3) -> Tensor:
    return torch.randn(rows, columns, width, generator=torch.Generator().manual_seed(0))


def on(device: str) -> Any:
    """As much of a table as the decision looks at; no such device is here."""
    return SimpleNamespace(device=SimpleNamespace(type=device))


def plan_on(device: str, monkeypatch: pytest.MonkeyPatch, **wanted: bool) -> platform.RopeShapePlan:
    monkeypatch.setattr(platform, "being_traced", lambda table: False)
    monkeypatch.setattr(platform, "find_spec", lambda name: object())
    return plan_rope_shape(on(device), (4, 6), **wanted)


# ----------------------------------------------------------------------------------------------------------- decision


@pytest.mark.parametrize(
    ("device", "tokenwise", "compiled"),
    [
        ("cuda", False, True),
        ("cpu", False, False),
        ("meta", False, False),
        ("xla", True, False),
        ("tpu", True, False),
    ],
)
def test_known_devices(device: str, tokenwise: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_on(device, monkeypatch) == (tokenwise, compiled, False)


@pytest.mark.parametrize("device", ["cuda", "cpu", "xla", "tpu", "mps"])
@pytest.mark.parametrize(("setting", "wanted"), [("1", True), ("0", False)])
def test_variable_overrides_the_device_and_the_argument_overrides_the_variable(
    device: str, setting: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
):
    by_device, by_tokens = device == "cuda", device in ("xla", "tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, setting)
        # read at every call, not at import
        assert plan_on(device, monkeypatch) == (by_tokens and not wanted, wanted, wanted)
        assert plan_on(device, monkeypatch, compile=not wanted) == (by_tokens and wanted, not wanted, not wanted)
    if device != "mps":
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "auto")
        assert plan_on(device, monkeypatch)[1:] == (by_device, False)


@pytest.mark.parametrize("value", ["", "yes", "true", "2", "AUTO", " 1"])
def test_other_values_of_the_variable_are_refused(value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, value)
    with pytest.raises(InputError, match=f"^{ENVIRONMENT_VARIABLE} is {value!r}; set it to auto, 1, 0, or unset it$"):
        get_rope_shape(table_of(), "bicubic", (2, 2))
    assert get_rope_shape(table_of(), "bicubic", (2, 2), compile=False).shape == (4, 3)


def test_unknown_device_runs_uncompiled_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    with pytest.warns(RuntimeWarning, match="does not know device 'npu'.*KVIT_COMPILE_ROPE_SHAPE=1"):
        assert plan_on("npu", monkeypatch) == (False, False, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_on("npu", monkeypatch) == (False, False, False)
    with pytest.warns(RuntimeWarning, match="'mps'"):
        plan_on("mps", monkeypatch)


def test_gpu_without_triton_runs_uncompiled_and_says_so_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "being_traced", lambda table: False)
    monkeypatch.setattr(platform, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match="for want of Triton; pip install triton"):
        assert not plan_rope_shape(on("cuda"), (4, 6)).compiled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not plan_rope_shape(on("cuda"), (4, 6)).compiled


def test_a_cpu_compiles_nothing_by_default(counter: CompileCounter):
    for grid in GRIDS + ONE_SIDED:
        get_rope_shape(table_of(), "bicubic", grid)
    assert counter.frame_count == 0


# --------------------------------------------------------------------------------------------------- where it is not


@pytest.mark.parametrize("how", ["config", "environment", "stance"])
def test_nothing_is_compiled_where_compilation_is_off(
    how: str, counter: CompileCounter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    if how == "environment":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    stance = torch.compiler.set_stance("force_eager" if how == "stance" else "default")
    # plain setattr and back would leave the config without this entry
    with stance, torch._dynamo.config.patch(disable=how == "config"):
        for grid in GRIDS[:3]:
            get_rope_shape(table_of(), "bicubic", grid, compile=True)
    assert counter.frame_count == 0
    assert platform._READY == {}
    assert [record.message for record in caplog.records if record.name == "model.platform"] == [
        "get_rope_shape runs uncompiled: torch.compile is switched off in this process"
    ]


def forced(table: Tensor) -> Tensor:
    return get_rope_shape(table, "bicubic", (4, 6), compile=True)


class Forced(torch.nn.Module):
    def forward(self, table: Tensor) -> Tensor:
        return forced(table)


def by_compile(table: Tensor) -> Tensor:
    outer = torch.compile(forced, fullgraph=True)
    return outer(table)


def by_export(table: Tensor, *, strict: bool) -> Tensor:
    return torch.export.export(Forced(), (table,), strict=strict).module()(table)


TRACERS = {
    "outer compile": by_compile,
    "export": partial(by_export, strict=False),
    "strict export": partial(by_export, strict=True),
    "make_fx": lambda table: make_fx(forced)(table)(table),
    "symbolic make_fx": lambda table: make_fx(forced, tracing_mode="symbolic")(table)(table),
    "vmap": lambda table: torch.func.vmap(forced)(table.unsqueeze(0)).squeeze(0),
    "jvp": lambda table: torch.func.jvp(forced, (table,), (table,))[1],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tracer", TRACERS)
def test_nothing_is_compiled_inside_an_outer_tracer(tracer: str, counter: CompileCounter):
    table = table_of()
    traced = TRACERS[tracer](table)
    assert platform._READY == {}
    assert counter.frame_count == (tracer == "outer compile")
    # the tracers may decompose bicubic, in another order of summation
    assert (traced - get_rope_shape(table, "bicubic", (4, 6))).abs().max() < RESAMPLED


def test_a_fake_pass_leaves_nothing_behind(counter: CompileCounter):
    """What a compile-only pass had cached would answer garbage ever after (kimi-vision.md, pitfall 4)."""
    table = table_of()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(table)
        assert get_rope_shape(fake, "bicubic", (4, 6), compile=True).shape == (24, 3)
    get_rope_shape(fake, "bicubic", (4, 6), compile=True)
    get_rope_shape(table.to("meta"), "bicubic", (4, 6))
    with Watch() as watch:
        get_rope_shape(table, "bicubic", (4, 6), compile=True)
    assert watch.dtypes
    assert platform._READY == {}
    assert counter.frame_count == 0
    exact = resample(table.double().numpy(), "bicubic", 4, 6).reshape(24, 3)
    assert (get_rope_shape(table, "bicubic", (4, 6), compile=True).double() - torch.as_tensor(exact)).abs().max() < 3e-6


# -------------------------------------------------------------------------------------------------------- where it is


# tracing bicubic takes seconds: both modes where it matters most, the cheap one everywhere
COMBINATIONS = [
    *[("bicubic", False, torch.no_grad), ("bicubic", True, torch.enable_grad)],
    *[
        ("bilinear", grad, c)
        for grad in (False, True)
        for c in (torch.enable_grad, torch.no_grad, torch.inference_mode)
    ],
]


@pytest.mark.parametrize(("mode", "requires_grad", "context"), COMBINATIONS)
def test_no_grid_compiles_anything_after_the_first(
    mode: str, requires_grad: bool, context: Any, counter: CompileCounter
):
    table = torch.nn.Parameter(table_of(), requires_grad=requires_grad)
    with context():
        get_rope_shape(table, mode, (2, 2), compile=True)
        assert counter.frame_count == 1
        for grid in GRIDS + ONE_SIDED:
            ours = get_rope_shape(table, mode, grid, compile=True)
            assert ours.requires_grad == (requires_grad and torch.is_grad_enabled())
            # the counting backend runs PyTorch's own operations
            assert torch.equal(ours, get_rope_shape(table, mode, grid, compile=False))
    assert counter.frame_count == 1


def test_each_combination_compiles_once_and_the_limit_on_recompilations_is_never_met(counter: CompileCounter):
    """torch.compile gives up on a function after 8 variants; 9 are kept here."""
    combinations = 0
    for width in (3, 5, 7):
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            combinations += 1
            for grid in GRIDS[:3]:
                with context():
                    get_rope_shape(table_of(width=width), "bilinear", grid, compile=True)
            assert counter.frame_count == combinations
    assert combinations == 9 > torch._dynamo.config.recompile_limit


def test_one_sided_grids_do_not_reach_the_compiler(counter: CompileCounter):
    """torch.compile takes 0 and 1 for constants, so each of these would compile anew."""
    for grid in ONE_SIDED:
        ours = get_rope_shape(table_of(), "bicubic", grid, compile=True)
        assert torch.equal(ours, get_rope_shape(table_of(), "bicubic", grid, compile=False))
    assert counter.frame_count == 0


def test_the_first_call_is_warmed_at_64_by_64(monkeypatch: pytest.MonkeyPatch):
    shapes: list[tuple[int, int]] = []

    def compiler(function: Any, *, dynamic: bool) -> Any:
        assert dynamic

        def compiled(table: Tensor, mode: str, height: int, width: int) -> Tensor:
            shapes.append((height, width))
            return function(table, mode, height, width)

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    for grid in [(2, 4), (2, 4), (6, 8)]:
        get_rope_shape(table_of(), "bicubic", grid, compile=True)
    assert shapes == [(64, 64), (2, 4), (2, 4), (6, 8)]


# --------------------------------------------------------------------------------------------- when the compiler fails


def failing(graph: Any, inputs: Any) -> Any:
    raise KeyError("no such device")


def test_a_failing_compiler_is_said_once_or_is_an_error_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=failing))
    table = table_of()
    eager = get_rope_shape(table, "bilinear", (4, 6))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no such device"):
        get_rope_shape(table, "bilinear", (4, 6), compile=True)
    monkeypatch.setattr(platform, "COMPILED_DEVICES", ("cpu",))
    monkeypatch.setattr(platform, "find_spec", lambda name: object())
    with pytest.warns(RuntimeWarning, match="torch.compile failed on cpu: .*no such device"):
        assert torch.equal(get_rope_shape(table, "bilinear", (4, 6)), eager)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(get_rope_shape(table, "bilinear", (4, 6)), eager)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        get_rope_shape(table, "bilinear", (4, 6), compile=True)


# ----------------------------------------------------------------------------------------------- the table's own size


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tables_own_size_is_a_copy_and_equals_interpolate_bit_for_bit(
    mode: str, dtype: torch.dtype, counter: CompileCounter
):
    table = table_of(16, 12).to(dtype)
    before = table.clone()
    ours = get_rope_shape(table, mode, (16, 12), compile=True)
    planes = before.float().permute(2, 0, 1).unsqueeze(0)
    theirs = torch.nn.functional.interpolate(planes, size=(16, 12), mode=mode, align_corners=False)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs.squeeze(0).permute(1, 2, 0).flatten(0, 1))
    assert counter.frame_count == 0
    ours.zero_()
    assert torch.equal(table, before), "a caller may overwrite what it gets"
    turned = get_rope_shape(table, mode, (12, 16))
    assert not torch.equal(turned, before.float().flatten(0, 1))


def test_the_tables_own_size_has_its_gradient():
    table = table_of().requires_grad_()
    weights = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    (gradient,) = torch.autograd.grad((get_rope_shape(table, "bicubic", (8, 8)) * weights).sum(), table)
    assert torch.equal(gradient, weights.reshape(8, 8, 3))


# ------------------------------------------------------------------------------------------------ exporting beside XLA


@pytest.mark.slow
def test_the_exported_graph_does_not_depend_on_xla_being_loaded(monkeypatch: pytest.MonkeyPatch):
    """tests/xla has the real one, with PyTorch 2.9; this is this PyTorch with a module that only has the name."""
    pytest.importorskip("onnxscript")
    from exporter.onnx_trace import trace_one_block
    from tests.exporter import towers

    def decided(*_: Any, **__: Any) -> Any:
        raise AssertionError("an export has no device to decide by")

    options = towers.options_of()
    plain = towers.trace_of("tiny", options).proto  # made without, and shared with the tests of the exporter
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setattr(platform, "plan_rope_shape", decided)
    monkeypatch.setattr(platform, "compiled_rope_shape", decided)
    with torch.device("meta"):  # as a default device of another kind
        assert trace_one_block(towers.config_of("tiny"), options).proto == plain
