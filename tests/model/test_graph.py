"""The graph form equals the live form, in every way that it can be written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model import graph as graph_module
from model.graph import ATTENTION_FORMS, PACKINGS, ROPE_FORMS, GraphForm, GraphTower, standard_rotation
from plugins.fused_qk_rope.reference import rotate_pairs
from tests.model.samples import (
    TINY,
    UNIT_SCALE,
    graph_of,
    largest_error,
    pixels_of,
    relative_error,
    run,
    run_graph,
    tower_of,
)

ONE_ITEM = [[(1, 4, 6)], [(4, 6, 4)]]
THREE_ITEMS = [[(1, 4, 6), (1, 2, 2), (1, 6, 10)], [(4, 2, 4), (4, 4, 4), (4, 6, 2)]]
# patches congruent to 4 modulo 8, each side and their products among them; the smallest; the longest sides
AWKWARD = [[(1, 2, 2)], [(1, 2, 6)], [(1, 6, 6)], [(1, 10, 2)], [(3, 2, 2)], [(1, 2, 512)], [(1, 512, 2)]]


def ids(value: object) -> str | None:
    return "+".join("x".join(map(str, grid)) for grid in value) if isinstance(value, list) else None


def allowed_by(name: str, grids: list[tuple[int, int, int]]) -> bool:
    return name != "tiny-vl" or all(t == 1 for t, _, _ in grids)


@pytest.mark.parametrize("attention", ATTENTION_FORMS)
@pytest.mark.parametrize("rope", ROPE_FORMS)
@pytest.mark.parametrize("name", TINY)
def test_equals_the_live_form(name: str, rope: str, attention: str):
    """Every form, both packings, one and three items, one and four frames."""
    for packing, cases in (("single", ONE_ITEM), ("packed", ONE_ITEM + THREE_ITEMS)):
        graph = graph_of(name, rope=rope, attention=attention, packing=packing)
        for grids in cases:
            if allowed_by(name, grids):
                pixels = pixels_of(grids)
                ours = run_graph(graph, grids, pixels)
                assert largest_error(ours, run(tower_of(name), grids, pixels)) <= UNIT_SCALE, (packing, grids)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("grids", AWKWARD, ids=ids)
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_awkward_sizes(name: str, grids: list[tuple[int, int, int]], packing: str):
    """Pitfall 21, and both axes at their longest."""
    pixels = pixels_of(grids)
    ours = run_graph(graph_of(name, packing=packing), grids, pixels)
    assert largest_error(ours, run(tower_of(name), grids, pixels)) <= UNIT_SCALE


@pytest.mark.parametrize("name", ["kimi-k2.5", "kimi-k3"])
def test_equals_the_live_form_at_real_width(name: str):
    grids = [(2, 4, 6), (2, 2, 2)]
    pixels = pixels_of(grids)
    expected = run(tower_of(name), grids, pixels)
    for form in ({}, {"rope": "standard", "attention": "op"}):
        ours = run_graph(graph_of(name, packing="packed", **form), grids, pixels)
        assert largest_error(ours, expected) <= UNIT_SCALE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_half_precision_is_as_good_as_the_live_form(name: str, dtype: torch.dtype):
    """Rounded at other places, so compared by error against fp32: at most 1.5 times the live form's (design)."""
    for grids in ([(1, 6, 10), (1, 4, 6)], [(4, 4, 6), (4, 2, 4)]):
        pixels = pixels_of(grids).to(dtype)
        exact = run(tower_of(name), grids, pixels.float())
        live = relative_error(run(tower_of(name, dtype), grids, pixels), exact)
        for rope in ROPE_FORMS:
            for attention in ATTENTION_FORMS:
                graph = graph_of(name, dtype, rope=rope, attention=attention, packing="packed")
                rows = run_graph(graph, grids, pixels)
                assert {item.dtype for item in rows} == {dtype}
                assert 0.5 * live < relative_error(rows, exact) < 1.5 * live


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ATTENTION_FORMS)
def test_packed_items_do_not_see_each_other(attention: str, dtype: torch.dtype):
    """Pitfall 18, to the bit: the shapes are the same, so nothing may change at all."""
    graph = graph_of("tiny", dtype, attention=attention, packing="packed")
    grids = [(2, 4, 6), (2, 2, 2), (2, 6, 4)]
    pixels = pixels_of(grids).to(dtype)
    before = run_graph(graph, grids, pixels)
    pixels[48:56] = 100
    after = run_graph(graph, grids, pixels)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.equal(before[1], after[1])


def test_single_packing_has_no_mask(monkeypatch: pytest.MonkeyPatch):
    """And for that reason must not be given several items: all tokens attend to each other."""
    monkeypatch.setattr(graph_module.attention, "segment_mask", lambda item: pytest.fail("a mask was made"))
    grids = [(1, 4, 6)]
    run_graph(graph_of("tiny"), grids, pixels_of(grids))
    monkeypatch.undo()
    grids = [(1, 4, 6), (1, 6, 4)]
    pixels = pixels_of(grids)
    assert largest_error(run_graph(graph_of("tiny"), grids, pixels), run(tower_of("tiny"), grids, pixels)) > 0.1


def test_forms_use_what_they_say(monkeypatch: pytest.MonkeyPatch):
    """Equal numbers would hide a form that quietly is another one."""
    calls: list[str] = []

    def spy(module: Any, name: str) -> None:
        good = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: calls.append(name) or good(*args))

    for name in ("fused_qk_rope", "fused_qk_rope_reference", "standard_rotation"):
        spy(graph_module, name)
    for name in ("attend_plain", "attend_fused", "attend_items"):
        spy(graph_module.attention, name)
    rotations = {
        "plugin": ["fused_qk_rope"],
        "plain": ["fused_qk_rope_reference"],
        "standard": ["standard_rotation"] * 2,
    }
    attends = {"plain": "attend_plain", "op": "attend_fused"}
    for rope in ROPE_FORMS:
        for attention in ATTENTION_FORMS:
            calls.clear()
            run_graph(graph_of("tiny", rope=rope, attention=attention), [(1, 2, 2)], pixels_of([(1, 2, 2)]))
            assert calls == [*rotations[rope], attends[attention]] * 2  # two blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_standard_rotation_computes_in_fp32(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, 24, generator=generator).to(dtype)
    angles = 100 * torch.rand(20, 12, generator=generator)
    rotated = standard_rotation(x, angles.cos(), angles.sin())
    exact = rotate_pairs(x.double(), angles.double().cos(), angles.double().sin())
    assert rotated.dtype == dtype
    assert rotated.shape == x.shape
    # one rounding to the dtype, and a few of fp32 of values up to 6
    assert ((rotated.double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 2e-6).all()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"rope": "triton"}, ["rope", "'triton'", "plugin", "standard", "plain"]),
        ({"attention": "flash"}, ["attention", "'flash'", "plain", "op"]),
        ({"packing": "both"}, ["packing", "'both'", "single", "packed"]),
    ],
)
def test_unknown_forms_are_refused(form: dict[str, str], words: list[str]):
    with pytest.raises(ValueError, match="is none of") as error:
        GraphForm(**form)
    assert [word for word in words if word not in str(error.value)] == []


def test_shares_the_weights():
    """Exporting a tower of 0.9 GB must not copy it."""
    tower = tower_of("tiny")
    theirs = {p.data_ptr() for p in GraphTower(tower, GraphForm()).parameters()}
    assert theirs == {p.data_ptr() for p in tower.parameters()}


@pytest.mark.slow
def test_traces_with_symbolic_sizes_and_runs_on_others():
    """Pitfalls 20 and 21 before any ONNX: one trace, then grids that it has not seen, of one and of three items.

    The tracer takes it for granted that no size is 0 or 1, and hence refuses fewer than 8 patches before the graph
    starts; a runtime does not, so 2x2 is checked there.
    """
    graph = graph_of("tiny-k3", packing="packed")
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(
        graph,
        (torch.randn(2, 40, 588), torch.tensor([[4, 6], [4, 4]])),
        dynamic_shapes=({0: dynamic, 1: dynamic}, {0: dynamic}),
    ).module()
    for grids in ([(1, 2, 4)], [(1, 6, 2)], [(4, 4, 6)], [(1, 64, 2)], [(3, 2, 2), (3, 6, 2), (3, 4, 10)]):
        pixels = pixels_of(grids)
        assert largest_error(run_graph(program, grids, pixels), run(tower_of("tiny-k3"), grids, pixels)) <= UNIT_SCALE
