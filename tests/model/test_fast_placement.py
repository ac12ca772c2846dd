"""What the fast form makes of a call's grids, against formulas; how long it keeps it, and when it makes it anew."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from model.config import VisionConfig
from model.cuda import placement
from model.cuda.cache import ByteCache
from model.cuda.placement import SEGMENTS, FieldSizes, Placement, Placements, padded_tokens
from model.cuda.tower import FastTower
from model.cuda.weights import MASKED
from tests.model.samples import Grid, pixels_of, reference_of, relative_error, run, token_count, tower_of

GRIDS: list[list[Grid]] = [
    [(1, 2, 2)],
    [(1, 6, 10), (1, 2, 4)],
    [(3, 4, 6), (1, 8, 8), (2, 2, 12)],
    [(1, 2, 2)] * 9,
    [(1, 6, 512)],
]


def placements_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Placements:
    tower = copy.deepcopy(tower_of(name, dtype)).vision_tower
    return Placements(tower.config, tower.patch_embed, ByteCache(1 << 24))


def fast_of(name: str, max_bytes: int = 1 << 24) -> FastTower:
    tower = copy.deepcopy(tower_of(name, torch.bfloat16)).accelerate(cache_bytes=max_bytes).fast_tower()
    assert tower is not None
    return tower


# -------------------------------------------------------------------------------------------------------------- sizes


@given(st.integers(1, 1 << 18))
def test_padded_sizes(tokens: int):
    padded = padded_tokens(tokens)
    assert padded >= tokens
    assert padded % 64 == 0
    assert padded_tokens(padded) == padded
    assert padded <= padded_tokens(tokens + 1)
    assert padded - tokens < 64 if tokens <= 1024 else 16 * (padded - tokens) < tokens


def test_padded_sizes_are_few():
    sizes = sorted({padded_tokens(tokens) for tokens in range(4, 16385, 4)})
    assert len(sizes) == 80
    assert (sizes[0], sizes[-1]) == (64, 16384)
    assert sum(size <= 4096 for size in sizes) == 48
    assert all(b - a <= max(64, a / 16) for a, b in pairwise(sizes))


# ------------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [1, 4, 37, 64, 131])
@pytest.mark.parametrize("segments", [8, 64, 70])
def test_fields_do_not_overlap_and_are_aligned(padded: int, dtype: torch.dtype, segments: int):
    sizes = FieldSizes(padded, 90, 13, dtype, segments)
    block = torch.full((sizes.nbytes + 48,), 0xEE, dtype=torch.uint8)
    fields = sizes.views(block)
    shapes = [(padded, 90), (padded, 13), (padded, 13), (padded,), (segments + 1,)]
    assert [tuple(field.shape) for field in fields] == shapes
    assert [field.dtype for field in fields] == [dtype, torch.float32, torch.float32, dtype, torch.int32]
    assert all(field.is_contiguous() for field in fields)
    assert [(field.data_ptr() - block.data_ptr()) % 16 for field in fields] == [0] * 5
    for number, field in enumerate(fields, 1):
        field.fill_(number)
    assert [bool((field == number).all()) for number, field in enumerate(fields, 1)] == [True] * 5
    assert bool((block[sizes.nbytes :] == 0xEE).all())
    assert sizes.nbytes % 16 == 0
    assert 0 <= sizes.nbytes - sum(field.nbytes for field in fields) < 5 * 16


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_hold_the_bias_and_are_rounded_once(name: str, grids: list[Grid], dtype: torch.dtype):
    reference, tokens = reference_of(name), token_count(grids)
    bias = 0 if name == "tiny-k3" else reference.tensors["vision_tower.patch_embed.proj.bias"]
    exact = torch.from_numpy(np.concatenate([reference.positions(grid) for grid in grids]) + bias)
    pos = placements_of(name, dtype).make(grids, tokens + 28, 16).fields.pos
    assert pos.dtype == dtype
    # half a unit in the last place, and the roundings of the fp32 sum before it (16 taps of about unit size)
    assert bool(((pos[:tokens].double() - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 2e-6).all())
    assert torch.equal(pos[tokens:], torch.zeros(28, 96, dtype=dtype))


def places(grids: list[Grid]) -> list[tuple[int, int]]:
    """Row and column of every token, by loops."""
    return [(y, x) for t, h, w in grids for _ in range(t) for y in range(h) for x in range(w)]


@pytest.mark.parametrize("grids", GRIDS, ids=str)
@pytest.mark.parametrize(("name", "head_dim"), [("tiny", 24), ("tiny-k3", 32)])
def test_angles(name: str, head_dim: int, grids: list[Grid]):
    tokens, half, pairs = token_count(grids), head_dim // 2, 16
    fields = placements_of(name).make(grids, tokens + 12, pairs).fields
    at = np.array(places(grids), dtype=np.float64)
    frequency = np.array([10000.0 ** (-4 * i / head_dim) for i in range(head_dim // 4)])
    angle = np.empty((tokens, half))
    angle[:, 0::2] = at[:, 1:] * frequency  # columns first
    angle[:, 1::2] = at[:, :1] * frequency
    # the frequency and its product with a column are rounded to fp32, then the cosine is
    allowed = torch.from_numpy(2.0**-23 * angle + 1.2e-7)
    for field, exact in ((fields.cos, np.cos(angle)), (fields.sin, np.sin(angle))):
        assert field.dtype == torch.float32
        assert bool(((field[:tokens, :half].double() - torch.from_numpy(exact)).abs() <= allowed).all())
    spare = pairs - half
    assert torch.equal(fields.cos[:tokens, half:], torch.ones(tokens, spare))
    assert torch.equal(fields.sin[:tokens, half:], torch.zeros(tokens, spare))
    assert torch.equal(fields.cos[tokens:], torch.ones(12, pairs))
    masking = torch.zeros(12, pairs)
    if spare:
        masking[:, half] = -MASKED
    assert torch.equal(fields.sin[tokens:], masking)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mask_is_exact_and_hides_everything(dtype: torch.dtype):
    mask = placements_of("tiny-k3", dtype).make([(1, 2, 6)], 64, 16).fields.mask
    assert torch.equal(mask, torch.tensor([0.0] * 12 + [MASKED] * 52).to(dtype))
    assert float(torch.tensor(MASKED, dtype=dtype)) == MASKED
    # after the smallest scale of the released towers, against another key's logit of -2000
    assert float(torch.tensor(MASKED * 128**-0.5 + 2000).exp()) == 0


def test_ends():
    placements = placements_of("tiny")
    ends = placements.make([(1, 2, 2), (2, 2, 6), (1, 4, 4)], 64, 12).fields.ends
    assert ends.tolist() == [0, 4, 28, 44, 64, 64, 64, 64, 64]
    for items, segments in ((1, 8), (7, 8), (8, 64), (63, 64), (64, 65), (100, 101)):
        placement = placements.make([(1, 2, 2)] * items, 4 * items + 60, 12)
        assert placement.sizes.segments == segments
        ends = placement.fields.ends
        assert ends.dtype == torch.int32
        assert ends.tolist() == [*range(0, 4 * items + 1, 4), *[4 * items + 60] * (segments - items)]
    assert SEGMENTS == (8, 64)


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_merge_order(grids: list[Grid]):
    """By slicing: which token stands at each of a row's four places, after the mean over frames."""
    order, start = [], 0
    for _, h, w in grids:
        square = np.arange(h * w).reshape(h, w) + start
        members = [square[0::2, 0::2], square[0::2, 1::2], square[1::2, 0::2], square[1::2, 1::2]]
        order += np.stack([member.ravel() for member in members], 1).ravel().tolist()
        start += h * w
    placement = placements_of("tiny").make(grids, token_count(grids), 12)
    assert placement.merge.dtype == torch.int64
    assert placement.merge.tolist() == order
    assert placement.tokens == token_count(grids)
    assert placement.lengths == tuple(t * h * w for t, h, w in grids)
    assert placement.nbytes == placement.sizes.nbytes + 8 * len(order)


# -------------------------------------------------------------------------------------------------------------- cache


class Sized:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_cache_drops_what_was_used_least_recently():
    cache: ByteCache[Sized] = ByteCache(100)
    made: list[str] = []

    def get(key: str, nbytes: int = 40) -> Sized:
        return cache.get(key, lambda: made.append(key) or Sized(nbytes))

    first = get("a")
    get("b")
    assert get("a") is first  # now "b" is the one used least recently
    get("c")
    assert (len(cache), cache.nbytes, cache.hits, cache.misses) == (2, 80, 1, 3)
    assert get("a") is first
    get("b")
    assert made == ["a", "b", "c", "b"]  # and "c" had to go
    get("c")
    assert made == ["a", "b", "c", "b", "c"]


def test_cache_returns_and_does_not_keep_what_is_above_its_bound():
    cache: ByteCache[Sized] = ByteCache(100)
    kept = cache.get("kept", lambda: Sized(100))
    assert cache.get("large", lambda: Sized(101)).nbytes == 101
    assert (len(cache), cache.nbytes) == (1, 100)
    assert cache.get("kept", lambda: Sized(1)) is kept
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)
    assert cache.get("kept", lambda: Sized(1)) is not kept
    nothing: ByteCache[Sized] = ByteCache(0)
    assert nothing.get("a", lambda: Sized(1)) is not nothing.get("a", lambda: Sized(1))
    with pytest.raises(ValueError, match="-1 bytes"):
        ByteCache(-1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=60), st.integers(0, 150))
def test_cache_counts_its_bytes(calls: list[tuple[int, int]], bound: int):
    cache: ByteCache[Sized] = ByteCache(bound)
    for key, nbytes in calls:
        cache.get((key, nbytes), lambda nbytes=nbytes: Sized(nbytes))
        assert cache.nbytes <= bound
        assert cache.nbytes == sum(value.nbytes for value in cache._entries.values())
    assert cache.hits + cache.misses == len(calls)


def test_a_failing_maker_leaves_no_entry():
    cache: ByteCache[Sized] = ByteCache(100)

    def fail() -> Sized:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cache.get("a", fail)
    assert (len(cache), cache.nbytes) == (0, 0)
    assert cache.get("a", lambda: Sized(7)).nbytes == 7


# ----------------------------------------------------------------------------------------------------- kept placements


def test_the_same_grids_get_the_same_plan():
    fast = fast_of("tiny")
    first = fast._plan([(1, 4, 6)])
    assert fast._plan([(1, 4, 6)]) is first
    others = [fast._plan(grids) for grids in ([(1, 6, 4)], [(1, 4, 6)] * 2, [(2, 4, 6)])]
    assert len({id(plan) for plan in (first, *others)}) == 4
    assert [plan.placement.lengths for plan in others] == [(24,), (24, 24), (48,)]


def change_table(embed: torch.nn.Module) -> None:
    embed.pos_emb.weight.mul_(-1)


def ramp(embed: torch.nn.Module) -> Tensor:
    """No constant: the norms would take that away again."""
    return torch.linspace(-2, 2, len(embed.proj.bias)).to(embed.proj.bias.dtype)


def change_bias(embed: torch.nn.Module) -> None:
    embed.proj.bias.add_(ramp(embed))


def replace_table(embed: torch.nn.Module) -> None:
    embed.pos_emb.weight.data = -embed.pos_emb.weight.data


def replace_bias(embed: torch.nn.Module) -> None:
    embed.proj.bias = torch.nn.Parameter(embed.proj.bias + ramp(embed), requires_grad=False)


@pytest.mark.parametrize("change", [change_table, change_bias, replace_table, replace_bias])
def test_other_positions_are_noticed(change: object):
    """By the tower, which then makes another fast form; no call looks for it beforehand."""
    tower = copy.deepcopy(tower_of("tiny", torch.bfloat16)).accelerate()
    grids = [(1, 4, 6)]
    before = run(tower, grids)
    with torch.no_grad():
        change(tower.vision_tower.patch_embed)  # type: ignore[operator]
    after, fresh = run(tower, grids), run(copy.deepcopy(tower).accelerate(), grids)
    assert torch.equal(after[0], fresh[0])
    assert relative_error(after, before) > 0.1


@pytest.mark.parametrize("grids", [[(1, 4, 6)], [(1, 4, 6), (1, 2, 2)]])
def test_positions_of_a_call_that_failed_with_other_weights_are_not_kept(grids: list[Grid]):
    """What was in the weights' place during that call is gone afterwards, and nothing tells of it."""
    tower = copy.deepcopy(tower_of("tiny", torch.bfloat16)).accelerate()
    run(tower, [(1, 2, 4)])  # packs the weights
    want = run(copy.deepcopy(tower).accelerate(), grids)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    hook = tower.mm_projector.register_forward_pre_hook(fail)
    other = {"vision_tower.patch_embed.pos_emb.weight": -tower.vision_tower.patch_embed.pos_emb.weight}
    with pytest.raises(KeyboardInterrupt):
        torch.func.functional_call(tower, other, (pixels_of(grids), torch.tensor(grids)))
    hook.remove()
    assert all(torch.equal(got, rows) for got, rows in zip(run(tower, grids), want, strict=True))


def test_kept_bytes_are_bounded_and_results_do_not_depend_on_them():
    bounded, nothing = fast_of("tiny", max_bytes=60_000), fast_of("tiny", max_bytes=0)
    calls: list[list[Grid]] = [[(1, h, w), (2, 2, 2)] for h in (2, 4, 6) for w in (2, 8, 14)]
    for grids in calls + calls[::-1]:
        got, want = bounded._plan(grids).placement, nothing._plan(grids).placement
        assert torch.equal(got.block, want.block)
        assert torch.equal(got.merge, want.merge)
        assert bounded.cache.nbytes <= 60_000
    assert bounded.cache.hits > 0
    # fewer than there were: calls, and single items for calls that mix them anew
    assert 0 < len(bounded.cache) < len(calls) + len({grid for grids in calls for grid in grids})
    assert (len(nothing.cache), nothing.cache.hits) == (0, 0)


def test_positions_of_an_item_are_shared_by_calls_that_mix_it(monkeypatch: pytest.MonkeyPatch):
    placements = placements_of("tiny")
    made: list[Grid] = []
    right = placement.item_positions

    def item_positions(table: Tensor, config: VisionConfig, grid: Grid) -> Tensor:
        made.append(grid)
        return right(table, config, grid)

    monkeypatch.setattr(placement, "item_positions", item_positions)
    a, b, c = (1, 4, 6), (2, 4, 6), (1, 6, 4)
    first: Placement = placements.make([a, b], 72, 12)
    second = placements.make([b, c, a, a], 144, 12)
    assert made == [a, b, c]
    assert torch.equal(first.fields.pos[:24], second.fields.pos[96:120])
    assert torch.equal(first.fields.pos[24:72], second.fields.pos[:48])
