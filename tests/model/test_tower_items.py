"""Items, frames and grids of the live tower: who sees whom, in which order, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model import projector
from model import tower as tower_module
from model.errors import ImageError
from tests.model.samples import (
    TINY,
    UNIT_SCALE,
    graph_of,
    largest_error,
    pixels_of,
    relative_error,
    run,
    run_graph,
    token_count,
    tower_of,
)


@pytest.mark.parametrize("budget", [4096, 200])
@pytest.mark.parametrize("name", TINY)
def test_item_alone_equals_item_in_a_batch(name: str, budget: int, monkeypatch: pytest.MonkeyPatch):
    """Pitfall 18. All items in one group; and in three, the middle one being an item above the budget."""
    grids = [(1, 4, 6), (1, 16, 6), (1, 2, 2), (1, 16, 14), (1, 6, 4)]
    monkeypatch.setattr(tower_module, "GROUP_TOKENS", budget)
    pixels = pixels_of(grids)
    together = run(tower_of(name), grids, pixels)
    parts = pixels.split([token_count([grid]) for grid in grids])
    alone = [run(tower_of(name), [grid], part)[0] for grid, part in zip(grids, parts, strict=True)]
    # not bit-equal: the matrix products are shared, and split their sums by the number of rows (measured 1.1e-6)
    assert largest_error(together, alone) <= 5e-6


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_other_items_change_nothing(name: str):
    grids = [(2, 4, 6), (1, 8, 6), (4, 2, 4)]
    pixels = pixels_of(grids)
    before = run(tower_of(name), grids, pixels)
    pixels[48:96] = 1e4  # the middle item; huge, so that no weight in a softmax could hide it
    after = run(tower_of(name), grids, pixels)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])
    assert not torch.allclose(before[1], after[1], atol=0.1)


def test_order_of_items_is_kept_across_groups(monkeypatch: pytest.MonkeyPatch):
    grids = [(1, 2, 4), (2, 4, 4), (1, 6, 6), (1, 2, 2), (4, 2, 2)]
    expected = run(tower_of("tiny"), grids)
    for budget in (1, 20, 40, 60):
        monkeypatch.setattr(tower_module, "GROUP_TOKENS", budget)
        assert largest_error(run(tower_of("tiny"), grids), expected) <= 5e-6  # as above


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_clip_of_one_still_is_not_the_image(name: str):
    """The first row of the time embedding is not zero, and an image gets none of it."""
    still = pixels_of([(1, 4, 6)])
    image = run(tower_of(name), [(1, 4, 6)], still)
    clip = run(tower_of(name), [(4, 4, 6)], still.repeat(4, 1, 1, 1))
    assert clip[0].shape == image[0].shape
    assert relative_error(clip, image) > 0.1


def test_frames_attend_to_each_other(monkeypatch: pytest.MonkeyPatch):
    """A later frame changes what leaves the *first* frame, before the mean over frames."""
    seen: list[Tensor] = []
    good = projector.mean_over_frames
    monkeypatch.setattr(projector, "mean_over_frames", lambda x: seen.append(x) or good(x))
    pixels = pixels_of([(3, 4, 6)])
    run(tower_of("tiny"), [(3, 4, 6)], pixels)
    pixels[48:] = -pixels[48:]
    run(tower_of("tiny"), [(3, 4, 6)], pixels)
    assert (seen[0][0] - seen[1][0]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_image_is_the_mean_of_its_one_frame(name: str):
    """An image leaves the live tower unaveraged, and the graph form always averages: a mean of one changes nothing."""
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    averaged = projector.mean_over_frames(x.unsqueeze(0))
    grids = [(1, 6, 4)]
    assert torch.equal(tower_module.merge(x, grids), tower_module.merge(averaged, grids))
    pixels = pixels_of(grids)
    assert largest_error(run_graph(graph_of(name), grids, pixels), run(tower_of(name), grids, pixels)) <= UNIT_SCALE


def test_zero_items_give_an_empty_list():
    for pixels in (torch.empty(0, 3, 14, 14), torch.empty(0, 588)):
        assert tower_of("tiny")(pixels, torch.empty(0, 3, dtype=torch.int64)) == []


def test_flat_patches_are_accepted():
    grids = [(1, 4, 6)]
    pixels = pixels_of(grids)
    assert torch.equal(run(tower_of("tiny"), grids, pixels)[0], run(tower_of("tiny"), grids, pixels.flatten(1))[0])


@pytest.mark.parametrize(
    ("name", "grids", "patches", "words"),
    [
        ("tiny", [(1, 4, 6), (1, 5, 4)], 44, ["item 1", "5 rows", "even", "512"]),
        ("tiny", [(1, 4, 7)], 28, ["item 0", "7 columns", "even"]),
        ("tiny", [(1, 2, 513)], 1026, ["513 columns", "512"]),
        ("tiny", [(1, 514, 2)], 1028, ["514 rows", "512"]),
        ("tiny", [(1, 0, 2)], 0, ["0 rows"]),
        ("tiny", [(1, -2, -2)], 4, ["-2 rows"]),
        ("tiny", [(5, 2, 2)], 20, ["5 frames", "1 to 4"]),
        ("tiny", [(0, 2, 2)], 0, ["0 frames"]),
        ("tiny-vl", [(2, 2, 2)], 8, ["2 frames", "kimi_vl", "1 to 1"]),
        ("tiny", [(1, 4, 6)], 23, ["24", "23"]),
        ("tiny", [(1, 4, 6)], 25, ["24", "25"]),
        ("tiny", [], 4, ["0 patches", "4"]),
    ],
)
def test_grids_refused(name: str, grids: list[tuple[int, int, int]], patches: int, words: list[str]):
    table = torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)
    with pytest.raises(ImageError) as error:
        tower_of(name)(torch.zeros(patches, 3, 14, 14), table)
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_two_column_grids_are_refused():
    """Kimi-VL's own processor gives (rows, columns); read as (frames, rows) they would go wrong silently."""
    with pytest.raises(ImageError, match="not \\(frames, rows, columns\\)"):
        tower_of("tiny-vl")(torch.zeros(24, 588), torch.tensor([[4, 6]]))


@pytest.mark.parametrize("shape", [(1, 24, 588), (24, 589), (24, 3, 14, 15), (588,)])
def test_pixels_of_another_shape_are_refused_by_their_shape(shape: tuple[int, ...]):
    with pytest.raises(ImageError, match=r"expected \[patches, 588\]") as caught:
        tower_of("tiny")(torch.zeros(shape), torch.tensor([(1, 4, 6)]))
    assert str(shape) in str(caught.value)
