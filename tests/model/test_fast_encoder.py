"""The packed encoder in fp32, in which it differs from the plain tower by the order of sums alone: padding is nothing.

The fast form itself refuses fp32; its parts do not, and in fp32 a key that is seen by mistake shows at any length.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from model.cuda import attention
from model.cuda.cache import ByteCache
from model.cuda.encoder import Attend, encode
from model.cuda.placement import Fields, Placement, Placements, padded_tokens
from model.cuda.weights import MASKED, PADDED_PATCH_VALUES, PATCH_VALUES, PackedTower, pack, unpadded
from model.tower import gather_members, mean_of_clips
from tests.model.samples import UNIT_SCALE, Grid, pixels_of, token_count, tower_of

ONE = [[(1, 2, 2)], [(1, 6, 6)], [(3, 4, 6)], [(1, 36, 46)]]
# head size 24 padded to 32, whose spare elements mask; head size 32 and a mask row
MASKS = [("tiny", "spare"), ("tiny-k3", "row")]


class Call:
    """One call of the encoder: everything that a test may spoil before it runs."""

    def __init__(self, name: str, grids: list[Grid], padded: int, *, wide: bool = True) -> None:
        self.tower = tower_of(name).vision_tower
        packed = pack(self.tower)
        self.packed: PackedTower = packed if wide else unpadded(packed, self.tower)
        self.grids = grids
        kept = Placements(self.tower.config, self.tower.patch_embed, ByteCache(0))
        self.placement: Placement = kept.make(grids, padded, self.packed.padded // 2)
        self.fields: Fields = self.placement.fields
        self.tokens = self.placement.tokens
        patches = pixels_of(grids).flatten(1)
        self.patches = F.pad(patches, (0, PADDED_PATCH_VALUES - PATCH_VALUES, 0, padded - self.tokens))

    def run(self, attend: Attend) -> Tensor:
        """[sum of h * w, hidden_size]; the mean over frames applied."""
        return encode(self.packed, self.patches, self.fields, attend)[: self.tokens]

    def one(self, mask: str) -> Tensor:
        bias = self.fields.mask if mask == "row" else None
        return self.run(partial(attention.attend_equal, items=1, head_dim=self.packed.head_dim, mask=bias))

    def members(self, rows: Tensor) -> Tensor:
        return gather_members(mean_of_clips(rows, self.grids), self.placement.merge)

    def plain(self) -> Tensor:
        return self.tower(self.patches[: self.tokens, :PATCH_VALUES], self.grids)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("grids", ONE, ids=str)
@pytest.mark.parametrize(("name", "mask"), MASKS)
def test_padded_call_equals_the_plain_tower(name: str, mask: str, grids: list[Grid]):
    call = Call(name, grids, padded_tokens(token_count(grids)))
    got, want = call.members(call.one(mask)), call.plain()
    assert got.shape == want.shape
    assert 0.5 < float(want.square().mean().sqrt()) < 2, "the tolerance is meant for unit scale"
    assert float((got - want).abs().max()) <= UNIT_SCALE
    bare = Call(name, grids, token_count(grids))
    assert float((bare.members(bare.one("spare")) - got).abs().max()) <= UNIT_SCALE


@pytest.mark.parametrize("grids", ONE, ids=str)
@pytest.mark.parametrize(("name", "mask"), MASKS)
def test_values_in_padding_change_no_bit(name: str, mask: str, grids: list[Grid]):
    """A masked key's weight is exactly 0 and every other operation is by row."""
    padded = padded_tokens(token_count(grids))
    want = Call(name, grids, padded).one(mask)
    for patches, positions in ((1e4, 0.0), (0.0, -1e4), (-3e3, 1e4)):
        call = Call(name, grids, padded)
        call.patches[call.tokens :] = patches
        call.fields.pos[call.tokens :] = positions
        assert torch.equal(call.one(mask), want)


@pytest.mark.parametrize(("name", "mask"), MASKS)
@pytest.mark.parametrize("grids", ONE, ids=str)
def test_without_its_mask_padding_is_seen(name: str, mask: str, grids: list[Grid]):
    """The control of the two tests above. Measured: 6e-3 at 1656 tokens with 8 of padding, 0.65 at 4 with 60."""
    call = Call(name, grids, padded_tokens(token_count(grids)))
    want = call.one(mask)
    call.fields.mask[call.tokens :] = 0
    call.fields.sin[call.tokens :] = 0
    call.fields.cos[call.tokens :] = 1
    apart = call.one(mask) - want
    assert float(apart.norm() / want.norm()) > 2e-3


def test_spare_elements_are_the_mask():
    """q.k is MASKED for a token's query and padding's key, and what the heads say for two tokens."""
    call = Call("tiny", [(1, 6, 6)], 64)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q.clone(), k.clone(), v.clone()))
        return v.flatten(1)

    call.run(attend)
    assert len(seen) == 2
    for q, k, v in seen:
        assert q.shape == (64, 4, 32)
        spare = torch.einsum("qhd,khd->hqk", q[..., 24:], k[..., 24:])
        assert torch.equal(spare[:, :36, :36], torch.zeros(4, 36, 36))
        assert torch.equal(spare[:, :36, 36:], torch.full((4, 36, 28), MASKED))
        # the last one sums the softmax, where a kernel makes use of it
        assert torch.equal(v[..., 24:], torch.tensor([0.0] * 7 + [1.0]).expand(64, 4, 8))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_equal_items_are_a_batch(name: str, wide: bool):
    for grids in ([(1, 6, 6)] * 3, [(1, 2, 6), (3, 2, 2), (1, 6, 2)]):
        call = Call(name, grids, token_count(grids), wide=wide)
        attend = partial(attention.attend_equal, items=3, head_dim=call.packed.head_dim)
        assert float((call.members(call.run(attend)) - call.plain()).abs().max()) <= UNIT_SCALE


@pytest.mark.parametrize("padding", [0, 4, 60])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("name", ["tiny", "tiny-k3"])
def test_unequal_items_and_their_padding_see_themselves_alone(name: str, wide: bool, padding: int):
    grids = [(1, 6, 6), (2, 2, 4), (1, 2, 2)]
    tokens = token_count(grids)
    lengths = [36, 16, 4, padding] if padding else [36, 16, 4]
    results = []
    for value in (0.0, 1e4):
        call = Call(name, grids, tokens + padding, wide=wide)
        call.patches[tokens:] = value
        attend = partial(
            attention.attend_unequal, lengths=lengths, ends=call.fields.ends, longest=64, head_dim=call.packed.head_dim
        )
        results.append(call.run(attend))
    assert torch.equal(*results)
    assert float((call.members(results[0]) - call.plain()).abs().max()) <= UNIT_SCALE


def test_result_is_written_where_it_is_wanted():
    """What a CUDA graph needs: nothing is left of what was there, and inputs stay as they are."""
    call = Call("tiny", [(1, 6, 6)], 64)
    attend = partial(attention.attend_equal, items=1, head_dim=24)
    want = call.run(attend)
    before = [call.patches.clone(), call.placement.block.clone()]
    out = torch.full((64, 96), float("nan"))
    got = encode(call.packed, call.patches, call.fields, attend, out)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out[:36], want)
    assert bool(torch.isfinite(out).all())
    assert torch.equal(call.patches, before[0])
    assert torch.equal(call.placement.block, before[1])


def test_spare_pair_of_q_and_k_are_not_interchangeable():
    """With the two columns swapped tokens see padding and padding sees itself: the mask has a direction."""
    call = Call("tiny", [(1, 6, 6)], 64)
    want = call.one("spare")

    def swapped(bias: Tensor | None) -> Tensor:
        assert bias is not None
        packed = bias.view(3, 4, 32).clone()
        packed[:2] = packed[[1, 0]].where(torch.arange(32) >= 24, packed[:2])
        return packed.flatten()

    blocks = tuple(replace(block, qkv_bias=swapped(block.qkv_bias)) for block in call.packed.blocks)
    call.packed = replace(call.packed, blocks=blocks)
    assert float((call.one("spare") - want).norm() / want.norm()) > 0.05
