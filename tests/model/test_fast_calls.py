"""When the fast form answers and when the plain one does; what is noticed, copied, loaded and imported."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import model
from exporter.validation.wrong_models import WRONG_MODELS
from model.errors import ImageError, InputError
from model.platform import say_once
from model.tower import MLP, KimiVision, build_tower
from tests.model.samples import Grid, Watch, note_fast_calls, pixels_of, relative_error, run, tower_of, weights_of

ROOT = Path(__file__).resolve().parents[2]
GRIDS: list[Grid] = [(1, 4, 6), (1, 6, 2)]
# twice bf16's own error on two layers of a tiny tower, which is 0.6 %
TWO_ROUNDINGS = 0.012


def fast_tower(dtype: torch.dtype = torch.bfloat16, name: str = "tiny") -> KimiVision:
    return build_tower(weights_of(name), dtype=dtype).accelerate()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every call that the fast form answers."""
    return note_fast_calls(monkeypatch, len)


# --------------------------------------------------------------------------------------------- which form answers


def test_a_tower_is_plain_until_it_is_asked(calls: list[int]):
    tower = build_tower(weights_of("tiny"), dtype=torch.bfloat16)
    assert tower.fast_tower() is None
    run(tower, GRIDS)
    assert calls == []
    assert tower.accelerate() is tower
    run(tower, GRIDS)
    assert calls == [2]
    assert tower.fast_tower() is tower.fast_tower() is not None


def test_fp32_stays_plain(calls: list[int]):
    tower = fast_tower(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(run(tower, GRIDS), run(tower_of("tiny"), GRIDS), strict=True))
    assert tower.fast_tower() is None
    assert calls == []


def test_gradient_of_the_pixels_arrives(calls: list[int]):
    plain, tower = build_tower(weights_of("tiny"), dtype=torch.bfloat16), fast_tower()
    run(tower, GRIDS)
    assert len(calls) == 1
    gradients = []
    for model_ in (plain, tower):
        pixels = pixels_of(GRIDS).to(torch.bfloat16).requires_grad_()
        torch.cat(run(model_, GRIDS, pixels)).float().square().sum().backward()
        gradients.append(pixels.grad)
    assert len(calls) == 1
    assert gradients[0] is not None
    assert float(gradients[0].abs().sum()) > 0
    assert torch.equal(*gradients)
    with torch.no_grad():
        run(tower, GRIDS, pixels_of(GRIDS).requires_grad_())
    assert len(calls) == 2


@pytest.mark.parametrize("part", ["patch_embed.pos_emb.weight", "encoder.blocks.1.wqkv.bias"])
def test_gradient_of_a_weight_arrives(part: str, calls: list[int]):
    tower = fast_tower()
    weight = tower.vision_tower.get_parameter(part).requires_grad_()
    torch.cat(run(tower, GRIDS)).float().square().sum().backward()
    assert calls == []
    assert weight.grad is not None
    assert float(weight.grad.abs().sum()) > 0


def test_the_projector_is_trained_on_the_fast_forms_rows(calls: list[int]):
    """No gradient has to pass the vision tower, so the fast form may answer; the projector still gets its own."""
    tower, plain = fast_tower(), build_tower(weights_of("tiny"), dtype=torch.bfloat16)
    gradients = []
    for model_ in (tower, plain):
        model_.mm_projector.requires_grad_()
        torch.cat(run(model_, GRIDS)).float().square().sum().backward()
        gradients.append(model_.mm_projector.proj[0].weight.grad)
    assert calls == [2]
    assert relative_error(gradients[:1], gradients[1:]) < 2 * TWO_ROUNDINGS  # it is twice linear in the rows
    assert float(gradients[0].abs().sum()) > 0


class Constant:
    """Grids that a tracer need not follow."""

    def tolist(self) -> list[list[int]]:
        return [list(grid) for grid in GRIDS]


class OnGrids(nn.Module):
    def __init__(self, tower: KimiVision) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, pixels: Tensor) -> Tensor:
        return torch.cat(self.tower(pixels, Constant()))


def by_export(module: nn.Module, pixels: Tensor) -> Any:
    return torch.export.export(module, (pixels,), strict=False).module()


def by_trace(module: nn.Module, pixels: Tensor) -> Any:
    return torch.jit.trace(module, (pixels,), check_trace=False)


def by_make_fx(module: nn.Module, pixels: Tensor) -> Any:
    return make_fx(module)(pixels)


@pytest.mark.filterwarnings("ignore")  # the tracer's own deprecation, and its doubts about constants
@pytest.mark.parametrize("trace", [by_export, by_trace, by_make_fx])
def test_tracers_see_the_plain_form(trace: Any, calls: list[int]):
    tower = fast_tower()
    pixels = pixels_of(GRIDS).to(torch.bfloat16)
    run(tower, GRIDS, pixels)  # what is kept of the grids must not become a constant of the trace
    with torch.no_grad():
        traced = trace(OnGrids(tower), pixels)
        assert calls == [2]
        want = torch.cat(run(tower_of("tiny", torch.bfloat16), GRIDS, pixels))
        assert torch.equal(traced(pixels), want)


def test_a_watching_mode_sees_the_plain_form(calls: list[int]):
    tower = fast_tower()
    with Watch():
        run(tower, GRIDS)
    assert calls == []


def test_inference_mode_and_autocast_change_nothing(calls: list[int]):
    grids = [(1, 6, 6), (1, 6, 6)]
    results = []
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
        for tower in (fast_tower(), fast_tower(name="tiny-k3")):
            with mode:
                first = run(tower, grids)
            results.append(all(torch.equal(a, b) for a, b in zip(first, run(tower, grids), strict=True)))
    assert results == [True] * 6
    assert len(calls) == 12
    fast = fast_tower().fast_tower()
    assert fast is not None
    patches = pixels_of(grids).to(torch.bfloat16).flatten(1)
    with torch.autocast("cpu", dtype=torch.float16):
        rows = fast(patches, grids)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, fast(patches, grids))


def test_weights_made_in_inference_mode_can_be_used_outside(calls: list[int]):
    with torch.inference_mode():
        tower = fast_tower()
        first = run(tower, GRIDS)
    assert all(torch.equal(a, b) for a, b in zip(first, run(tower, GRIDS), strict=True))
    assert calls == [2, 2]


def test_what_is_kept_in_inference_mode_is_made_of_ordinary_tensors():
    """Buffers of CUDA graphs are written to outside of it, which inference tensors refuse."""
    tower = build_tower(weights_of("tiny"), dtype=torch.bfloat16).accelerate()
    with torch.inference_mode():
        run(tower, GRIDS)
        fast = tower.fast_tower()
    assert fast is not None
    placement = fast._plan(GRIDS).placement
    assert fast.cache.hits > 0
    block = fast.packed.blocks[0]
    kept = [placement.block, placement.merge, *placement.fields, fast.packed.patch, block.wqkv, block.wo]
    assert not any(tensor.is_inference() for tensor in kept)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_run_and_those_within_the_vision_tower_keep_it_plain(when: str, calls: list[int]):
    tower = build_tower(weights_of("tiny"), dtype=torch.bfloat16).accelerate()
    seen: list[str] = []
    tower.register_forward_hook(lambda *_: seen.append("tower"))
    tower.mm_projector.register_forward_hook(lambda *_: seen.append("projector"))
    if when == "after":
        run(tower, GRIDS)
        assert calls == [2]
    seen.clear()
    say_once.cache_clear()
    hook = tower.vision_tower.encoder.blocks[0].register_forward_hook(lambda *_: seen.append("block"))
    with pytest.warns(RuntimeWarning, match=r"plain form: encoder.blocks.0 has hooks"):
        run(tower, GRIDS)
    assert seen[-3:] == ["block", "projector", "tower"]
    hook.remove()
    before = len(calls)
    run(tower, GRIDS)
    assert len(calls) == before  # plain until it is asked again
    run(tower.accelerate(), GRIDS)
    assert len(calls) == before + 1


def test_options_below_zero_are_refused_at_once():
    tower = fast_tower()
    with pytest.raises(ValueError, match="cache_bytes is -1"):
        tower.accelerate(cache_bytes=-1)
    assert tower.fast_tower() is not None


def test_moving_the_tower_lets_its_old_weights_go():
    tower = fast_tower()
    seen = weakref.ref(tower.fast_tower())
    tower.to(torch.float16)
    assert seen() is None


def test_grids_are_checked_and_pixels_cast_as_by_the_plain_form():
    tower = fast_tower()
    with pytest.raises(ImageError):
        tower(torch.zeros(23, 588), torch.tensor([(1, 4, 6)]))
    assert tower(torch.empty(0, 588), torch.empty(0, 3, dtype=torch.int64)) == []
    pixels = pixels_of(GRIDS)
    half = run(tower, GRIDS, pixels.to(torch.bfloat16))
    for given in (pixels, pixels.to(torch.bfloat16).double(), pixels.flatten(1)):
        assert all(torch.equal(a, b) for a, b in zip(run(tower, GRIDS, given), half, strict=True))


def test_options_reach_the_fast_form():
    tower = build_tower(weights_of("tiny"), dtype=torch.bfloat16).accelerate(cache_bytes=0)
    fast = tower.fast_tower()
    assert fast is not None
    run(tower, GRIDS)
    assert len(fast.cache) == 0
    again = tower.accelerate().fast_tower()
    assert again is not fast
    run(tower, GRIDS)
    assert again is not None
    assert len(again.cache) > 0


# ---------------------------------------------------------------------------------------------------- other weights


def other_state(tower: KimiVision) -> dict[str, Tensor]:
    """Values of every kind that the fast form copies, shares or keeps."""
    changed = ("wqkv", ".wo.", "fc0", "pos_emb", "patch_embed.proj")
    state = tower.state_dict()
    return {
        name: value.flip(0) if any(part in name for part in changed) else value.clone() for name, value in state.items()
    }


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_loading_other_weights_is_noticed(name: str, assign: bool, calls: list[int]):
    tower = fast_tower(name=name)
    grids = [(1, 4, 6)]
    before = run(tower, grids)
    state = other_state(tower)
    tower.load_state_dict(state, assign=assign)
    tower.requires_grad_(requires_grad=False)
    after = run(tower, grids)
    plain = build_tower(weights_of(name), dtype=torch.bfloat16)
    plain.load_state_dict(state)
    assert calls == [1, 1, 1]  # the second found out when it was done, and was done again
    assert relative_error(before, after) > 0.1
    assert relative_error(after, run(plain, grids)) < TWO_ROUNDINGS


def test_casting_is_noticed(calls: list[int]):
    tower = fast_tower()
    run(tower, GRIDS)
    tower.to(torch.float16)
    rows = run(tower, GRIDS)
    assert rows[0].dtype == torch.float16
    assert calls == [2, 2]
    # fp16 of bf16 weights: closer to fp32 than bf16 can be
    assert relative_error(rows, run(tower_of("tiny"), GRIDS)) < 0.0025
    tower.float()
    run(tower, GRIDS)
    assert calls == [2, 2]
    tower.bfloat16()
    run(tower, GRIDS)
    assert calls == [2, 2, 2]


def test_casting_a_model_that_holds_the_tower_is_noticed(calls: list[int]):
    tower = fast_tower()
    parent = nn.Sequential(tower)
    run(tower, GRIDS)
    parent.half()
    assert run(tower, GRIDS)[0].dtype == torch.float16
    assert calls == [2, 2]


# ------------------------------------------------------------------------------------------------------------- copies


def through_pickle(tower: KimiVision) -> Any:
    return pickle.loads(pickle.dumps(tower))


def through_file(tower: KimiVision) -> Any:
    buffer = io.BytesIO()
    torch.save(tower, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, through_pickle, through_file])
def test_copies_are_plain_and_can_be_accelerated(duplicate: Any, calls: list[int]):
    tower = fast_tower()
    fast_rows = run(tower, GRIDS)
    duplicated = duplicate(tower)
    assert duplicated.fast_tower() is None
    plain_rows = run(duplicated, GRIDS)
    assert calls == [2]
    want = run(tower_of("tiny", torch.bfloat16), GRIDS)
    assert all(torch.equal(a, b) for a, b in zip(plain_rows, want, strict=True))
    accelerated = run(duplicated.accelerate(), GRIDS)
    assert calls == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(accelerated, fast_rows, strict=True))
    run(tower, GRIDS)
    assert calls == [2, 2, 2]  # the original stays fast


def test_wrong_models_are_plain(calls: list[int]):
    """Their substitutions are of functions that the fast form does not call, so it must not answer for them."""
    right = fast_tower()
    run(right, GRIDS)
    applicable = [wrong for wrong in WRONG_MODELS if wrong.applies(right.config)]
    assert len(applicable) > 10
    assert [wrong.name for wrong in applicable if wrong.tower(right).fast_tower() is not None] == []
    one = next(wrong for wrong in applicable if wrong.function == "model.rope.rope_angles")
    with one.substituted():
        rows = run(one.tower(right), GRIDS)
    assert len(calls) == 1
    assert relative_error(rows, run(right, GRIDS)) > 0.05


# ------------------------------------------------------------------------------------------------------- model.load


def test_load_on_a_cpu_gives_a_plain_fp32_tower():
    tower = model.load("random:tiny?seed=1&layers=2")
    assert tower.dtype == torch.float32
    assert tower.device.type == "cpu"
    assert not tower.training
    assert not any(p.requires_grad for p in tower.parameters())
    assert all(torch.equal(a, b) for a, b in zip(run(tower, GRIDS), run(tower_of("tiny"), GRIDS), strict=True))
    half = model.load("random:tiny?seed=1&layers=1", dtype=torch.bfloat16, device=torch.device("cpu"))
    assert half.dtype == torch.bfloat16
    assert half.fast_tower() is None
    assert half.accelerate().fast_tower() is not None


def test_package_has_load_and_nothing_else():
    assert model.__all__ == ["load"]
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        model.laod  # noqa: B018
    assert not hasattr(model, "KimiVision")


def test_importing_the_package_imports_no_torch():
    code = (
        "import sys, model, model.config; assert 'torch' not in sys.modules; "
        "from model import load; assert 'torch' in sys.modules; assert load.__module__ == 'model.live'; "
        "assert 'triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------ weights that change later


def negate(tower: KimiVision, name: str) -> None:
    tower.get_parameter(name).mul_(-1)


def load_part(tower: KimiVision) -> None:
    state = {name: -value if "wqkv" in name else value for name, value in tower.vision_tower.state_dict().items()}
    tower.vision_tower.load_state_dict(state)


def load_around(tower: KimiVision) -> None:
    model_around = nn.ModuleDict({"vision": tower})
    state = {name: -value if "wqkv" in name else value for name, value in model_around.state_dict().items()}
    model_around.load_state_dict(state)


def exchange_data(tower: KimiVision) -> None:
    weight = tower.vision_tower.encoder.blocks[0].mlp.fc0.weight
    weight.data = -weight.data


CHANGES = {
    "wqkv in place": lambda tower: negate(tower, "vision_tower.encoder.blocks.0.wqkv.weight"),
    "patches in place": lambda tower: negate(tower, "vision_tower.patch_embed.proj.weight"),
    "patch bias in place": lambda tower: negate(tower, "vision_tower.patch_embed.proj.bias"),
    "a part is loaded": load_part,
    "a model around it is loaded": load_around,
    "data exchanged": exchange_data,
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_in_any_way_are_noticed(change: str, calls: list[int]):
    tower = fast_tower()
    before = run(tower, GRIDS)
    CHANGES[change](tower)
    after = run(tower, GRIDS)
    assert len(calls) >= 2
    plain = run(copy.copy(tower), GRIDS)
    assert relative_error(after, plain) <= TWO_ROUNDINGS
    assert relative_error(after, before) > 5 * TWO_ROUNDINGS


def test_functional_calls_use_the_weights_they_are_given(calls: list[int]):
    tower = fast_tower()
    before = run(tower, GRIDS)
    other = {name: -value if "wqkv" in name else value for name, value in tower.state_dict().items()}
    pixels, grids = pixels_of(GRIDS), torch.tensor(GRIDS)
    given = torch.func.functional_call(tower, other, (pixels, grids))
    plain = torch.func.functional_call(copy.copy(tower), other, (pixels, grids))
    assert relative_error(given, plain) <= TWO_ROUNDINGS
    assert relative_error(given, before) > 5 * TWO_ROUNDINGS
    assert all(torch.equal(a, b) for a, b in zip(run(tower, GRIDS), before, strict=True))


def test_replaced_layers_leave_it_plain_and_it_says_so(calls: list[int]):
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    tower = build_tower(weights_of("tiny"), dtype=torch.bfloat16)
    old = tower.vision_tower.encoder.blocks[1].wo
    new = Adapted(old.in_features, old.out_features).to(torch.bfloat16).requires_grad_(requires_grad=False)
    new.load_state_dict(old.state_dict())
    tower.vision_tower.encoder.blocks[1].wo = new
    tower.accelerate()
    with pytest.warns(RuntimeWarning, match="plain form: encoder.blocks.1.wo is a Adapted"):
        rows = run(tower, GRIDS)
    assert calls == []
    assert relative_error(rows, run(tower_of("tiny", torch.bfloat16), GRIDS)) > 0.05


class Doubled(nn.Module):
    """A layer in a wrapping, as adapters put it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.base(x) * 2
        return rows


def other_block(tower: KimiVision) -> None:
    blocks = tower.vision_tower.encoder.blocks
    blocks[0] = copy.deepcopy(blocks[1])


def other_tower(tower: KimiVision) -> None:
    other = build_tower(weights_of("tiny"), dtype=torch.bfloat16)
    negate(other, "vision_tower.encoder.blocks.0.wqkv.weight")
    tower.vision_tower = other.vision_tower


def wrapped_layer(tower: KimiVision) -> None:
    block = tower.vision_tower.encoder.blocks[1]
    block.wo = Doubled(block.wo)


def derived_mlp(tower: KimiVision) -> None:
    class Derived(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    tower.vision_tower.encoder.blocks[1].mlp.__class__ = Derived
    tower.accelerate()  # a class is nothing that every call looks at


def parametrized(tower: KimiVision) -> None:
    layer = tower.vision_tower.encoder.blocks[1].mlp.fc1
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled(nn.Identity()))


@pytest.mark.parametrize("exchange", [other_block, other_tower])
def test_modules_that_are_exchanged_later_are_noticed(exchange: Any, calls: list[int]):
    tower = fast_tower()
    before = run(tower, GRIDS)
    exchange(tower)
    count = len(calls)
    after = run(tower, GRIDS)
    assert len(calls) > count
    assert relative_error(after, run(copy.copy(tower), GRIDS)) <= TWO_ROUNDINGS
    assert relative_error(after, before) > 5 * TWO_ROUNDINGS


@pytest.mark.parametrize("wrap", [wrapped_layer, derived_mlp, parametrized])
def test_modules_that_are_wrapped_later_leave_it_plain(wrap: Any):
    tower = fast_tower()
    before = run(tower, GRIDS)
    wrap(tower)
    with pytest.warns(RuntimeWarning, match=r"plain form: encoder\.blocks\.1\."):
        after = run(tower, GRIDS)
    assert all(torch.equal(a, b) for a, b in zip(after, run(copy.copy(tower), GRIDS), strict=True))
    assert relative_error(after, before) > 5 * TWO_ROUNDINGS


def test_a_bias_that_comes_later_is_noticed(calls: list[int]):
    tower = fast_tower(name="tiny-k3")
    before = run(tower, GRIDS)
    layer = tower.vision_tower.encoder.blocks[1].mlp.fc1
    assert layer.bias is None
    layer.bias = nn.Parameter(torch.full((layer.out_features,), 3.0).to(torch.bfloat16), requires_grad=False)
    layer.bias.data[::2] = -3
    after = run(tower, GRIDS)
    assert relative_error(after, run(copy.copy(tower), GRIDS)) <= TWO_ROUNDINGS
    assert relative_error(after, before) > 5 * TWO_ROUNDINGS


def test_replicas_of_data_parallel_are_plain(calls: list[int]):
    tower = fast_tower()
    run(tower, GRIDS)
    replica = tower._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    count = len(calls)
    run(replica, GRIDS)
    assert len(calls) == count


def test_a_tower_that_nobody_holds_is_gone_at_once():
    """Without the garbage collector: its memory is a GPU's."""
    tower = fast_tower()
    run(tower, GRIDS)
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(tower)
        del tower
        assert seen() is None
    finally:
        gc.enable()


def test_many_small_items_are_not_laid_out_at_once():
    fast = fast_tower().fast_tower()
    assert fast is not None
    groups = list(fast.groups([4] * 1000))
    assert [len(group) for group in groups] == [256, 256, 256, 232]
    assert [index for group in groups for index in group] == list(range(1000))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_named():
    with pytest.raises(InputError, match="sees no GPU here"):
        model.load("random:tiny", device="cuda")


@pytest.mark.parametrize("dtype", ["bf16", torch.int8, torch.complex64])
def test_a_dtype_that_no_tower_computes_in_is_refused(dtype: object):
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16"):
        model.load("random:tiny", dtype=dtype)  # type: ignore[arg-type]
