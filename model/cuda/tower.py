"""The fast form of a vision tower on a GPU: the same weights, the same numbers within their roundings."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom

from model.config import PATCH_VALUES
from model.cuda import attention
from model.cuda.cache import ByteCache, HasBytes
from model.cuda.encoder import Attend, encode
from model.cuda.graphs import BlockGraphs, GraphKey
from model.cuda.placement import SEGMENTS, Fields, FieldSizes, Grid, Placement, Placements, padded_tokens
from model.cuda.weights import (
    PADDED_PATCH_VALUES,
    Contents,
    PackedTower,
    fits,
    pack,
    parameter_bytes,
    unpadded,
)
from model.tower import VisionTower, gather_members, group_items, mean_of_clips

CACHE_BYTES = 256 << 20  # positions and angles: 44 MB for 16384 tokens, 2.7 MB for 1024
# Up to so many tokens a call's launches take longer than its kernels: 8 ms of an H200's host for 27 layers.
GRAPH_TOKENS = 4096
# Items are run in groups of at most this many tokens; the plain tower's smaller groups would leave a GPU idle.
GROUP_TOKENS = 16384
GROUP_ITEMS = 256  # laying out tokens takes memory by tokens times items

# One for all towers: which attention kernels PyTorch prefers is a setting of the process.
_RUNNING = threading.RLock()

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call of some grids does.

    Attributes:
        placement: of its tokens.
        form: of attention: ``whole`` for one item whose padding, if any, its keys mask; ``masked`` for one with a mask;
            ``equal`` for items of one length; ``unequal`` for any others.
        key: of its CUDA graph; None if it has none.
    """

    placement: Placement
    form: str
    key: GraphKey | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.placement.nbytes


class FastTower:
    """Runs a vision tower; made by :meth:`model.tower.KimiVision.accelerate`.

    It shares the tower's weights but for copies of wqkv, wo and the patch embedding, made here once.
    """

    def __init__(self, tower: VisionTower, *, cache_bytes: int = CACHE_BYTES, graph_tokens: int = GRAPH_TOKENS) -> None:
        """Pack the weights.

        Args:
            tower: in bf16 or fp16, where it shall run.
            cache_bytes: bound of what is kept of grids.
            graph_tokens: up to how many tokens, padding included, a call runs as a CUDA graph; 0 for no graphs.

        Raises:
            ValueError: the tower is in another dtype.
        """
        weight = tower.patch_embed.proj.weight
        if not fits(weight.dtype, weight.device):
            raise ValueError(f"the fast form computes in bf16 and fp16, not in {weight.dtype} on {weight.device}")
        self.dtype, self.device = weight.dtype, weight.device
        with _kept():
            self.packed: PackedTower = pack(tower)
            # several items: short ones, for which wider heads cost the products more than attention gains
            self.unpadded = unpadded(self.packed, tower) if self.packed.masks else self.packed
        self.contents = Contents(tower)
        self.copied_bytes = parameter_bytes(self.packed, tower)
        pairs, width = self.packed.padded // 2, weight.shape[0]
        self.cache: ByteCache[HasBytes] = ByteCache(cache_bytes)
        self._placements = Placements(tower.config, tower.patch_embed, self.cache)
        self._largest = FieldSizes(graph_tokens, width, pairs, self.dtype)
        self._graphs: BlockGraphs | None = None
        self._stream: torch.cuda.Stream | None = None
        self._address: int | None = None
        self._streams = 0
        self._done: torch.cuda.Event | None = None

    def __call__(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Run one group of items.

        Args:
            patches: [tokens, 588], of the tower's dtype and device.
            grids: (t, h, w) of each item.

        Returns:
            [sum of h * w / 4, 4, hidden_size], final norm applied.

        Raises:
            RuntimeError: the caller records a CUDA graph.
        """
        # until the first launch the GPU has nothing to do, and after a rest a line of Python takes three times as long
        # as in a loop: hence few lines, no stream objects and no context for gradients
        if patches.requires_grad:
            patches = patches.detach()
        with _RUNNING, self._on_device():
            address, stream = self._wait_for_others()
            try:
                plan = self._plan(grids)
                placement = plan.placement
                if self._streams > 1 and stream is not None:
                    # it may be dropped from what is kept while this stream still reads it
                    placement.block.record_stream(stream)
                    placement.merge.record_stream(stream)
                normed = self._encode(patches, plan)
                return gather_members(mean_of_clips(normed[: placement.tokens], grids), placement.merge)
            finally:
                # also after an error, such as no memory left: a part of the call is on the stream
                if stream is not None:
                    self._done = self._done or torch.cuda.Event()  # type: ignore[no-untyped-call]
                    self._done.record(stream)
                    self._stream, self._address = stream, address

    def warm_up(self, tokens: Sequence[int]) -> dict[int, float]:
        """Run an image of each size now, so that no later single image of that size has a first-call cost.

        Args:
            tokens: of the images, before padding; each a multiple of 4.

        Returns:
            Seconds by padded size.

        Raises:
            ValueError: no image has so many tokens.
        """
        if wrong := [count for count in tokens if count < 4 or count % 4]:
            raise ValueError(f"an image of {wrong[0]} tokens; expected multiples of 4")
        seconds = {}
        for count in sorted({self._padded(n) for n in tokens}):
            start = time.perf_counter()
            # where a mask hides the padding, a size without any has another graph
            for area in (count,) if self.packed.masks or count > self._graph_tokens else (count, count - 4):
                # as square as it goes; any grid would do
                rows = next(rows for rows in range(2 * (math.isqrt(area) // 2), 0, -2) if area % (2 * rows) == 0)
                self(self.packed.patch.new_zeros(area, PATCH_VALUES), [(1, rows, area // rows)])
            self.wait()
            seconds[count] = round(time.perf_counter() - start, 4)
        return seconds

    def wait(self) -> None:
        """Wait until nothing of it runs, as before it is dropped."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def first_call_seconds(self) -> dict[GraphKey, float]:
        """What recording each graph cost so far."""
        return {} if self._graphs is None else dict(self._graphs.seconds)

    def groups(self, lengths: Sequence[int]) -> Iterator[range]:
        """Split items into groups: long ones alone, short ones together within GROUP_TOKENS and GROUP_ITEMS."""
        for group in group_items(lengths, GROUP_TOKENS, attention.ALONE_TOKENS):
            for start in range(group.start, group.stop, GROUP_ITEMS):
                yield range(start, min(start + GROUP_ITEMS, group.stop))

    # -------------------------------------------------------------------------------------------------- what runs

    @property
    def _graph_tokens(self) -> int:
        return self._largest.padded if self.device.type == "cuda" else 0

    def _plan(self, grids: Sequence[Grid]) -> Plan:
        """What a call of these grids does: of the same grids, the same for as long as it is kept."""
        found = self.cache.get(tuple(grids), lambda: self._new_plan(grids))
        if not isinstance(found, Plan):
            raise TypeError("a key of plans holds something else")
        return found

    def _new_plan(self, grids: Sequence[Grid]) -> Plan:
        with _kept():
            padded = self._padded_call([t * h * w for t, h, w in grids])
            placement = self._placements.make(grids, padded, self._weights(len(grids)).padded // 2)
            form = self._form(placement)
            if not self._has_graph(form, placement):
                return Plan(placement, form, None)
            segments = {"equal": len(placement.lengths), "unequal": placement.sizes.segments}.get(form, 1)
            return Plan(placement, form, GraphKey(padded, form, segments))

    def _padded_call(self, lengths: Sequence[int]) -> int:
        """Tokens with padding of a call.

        Padding where that bounds the number of graphs and plans and costs less than it saves. Several items of one
        length are planned and recorded as they are. Without a graph, unequal ones need no plan, and a mask is not worth
        its cost (half of attention's time): such a length is planned by itself, once.
        """
        tokens = sum(lengths)
        if len(lengths) == 1:
            return self._padded(tokens)
        padded = padded_tokens(tokens)
        if len(set(lengths)) == 1 or padded > self._graph_tokens or len(lengths) >= SEGMENTS[-1]:
            return tokens
        return padded

    def _padded(self, tokens: int) -> int:
        """Tokens with padding of one item."""
        padded = padded_tokens(tokens)
        return padded if self.packed.masks or padded <= self._graph_tokens else tokens

    def _weights(self, items: int) -> PackedTower:
        return self.packed if items == 1 else self.unpadded

    def _encode(self, patches: Tensor, plan: Plan) -> Tensor:
        placement, key = plan.placement, plan.key
        if key is None:
            spare = (0, PADDED_PATCH_VALUES - PATCH_VALUES, 0, placement.sizes.padded - placement.tokens)
            return self._body(plan.form, placement, F.pad(patches, spare), placement.fields, None)
        if self._graphs is None:
            with _kept():
                self._graphs = BlockGraphs(self._largest, self.device)
        self._graphs.load(patches, placement)
        if not self._graphs.has(key):
            with _kept():
                seconds = self._graphs.record(key, placement.sizes, partial(self._body, plan.form, placement))
            _LOG.info("recorded a CUDA graph of %d tokens in %.3f s", key.padded, seconds)
        return self._graphs.replay(key)

    def _has_graph(self, form: str, placement: Placement) -> bool:
        if placement.sizes.padded > self._graph_tokens or placement.sizes.segments > SEGMENTS[-1]:
            return False
        if form != "unequal":
            return True
        return attention.has_varlen(self.device.type) and max(placement.lengths) <= attention.ALONE_TOKENS

    def _form(self, placement: Placement) -> str:
        """Name the form of attention, as :class:`Plan` describes it."""
        padding = placement.sizes.padded > placement.tokens
        if len(placement.lengths) == 1:
            return "masked" if padding and not self.packed.masks else "whole"
        return "equal" if len(set(placement.lengths)) == 1 and not padding else "unequal"

    def _body(self, form: str, placement: Placement, patches: Tensor, fields: Fields, out: Tensor | None) -> Tensor:
        attend: Attend
        library: contextlib.AbstractContextManager[None]
        if self._splits_heads(form):
            attend = partial(attention.attend_split_heads, head_dim=self.packed.head_dim)
            library = contextlib.nullcontext()
        else:
            attend, library = self._attend(form, placement, fields), attention.preferred_kernels(self.device)
        with library, torch.autocast(self.device.type, enabled=False):
            return encode(self._weights(len(placement.lengths)), patches, fields, attend, out)

    def _splits_heads(self, form: str) -> bool:
        return form == "whole" and self.packed.sums and attention.splits_heads(self.device, self.packed.padded)

    def _attend(self, form: str, placement: Placement, fields: Fields) -> Attend:
        """PyTorch's attention of a form; a graph that is recorded with it serves other placements of its key too."""
        dim, padded = self.packed.head_dim, placement.sizes.padded
        if form != "unequal":
            items = len(placement.lengths) if form == "equal" else 1
            mask = fields.mask if form == "masked" else None
            return partial(attention.attend_equal, items=items, head_dim=dim, mask=mask)
        longest = max(placement.lengths)
        if longest <= attention.ALONE_TOKENS:
            longest = min(padded, attention.ALONE_TOKENS)  # a bound for all placements of a graph
        return partial(
            attention.attend_unequal,
            lengths=[length for length in (*placement.lengths, padded - placement.tokens) if length],
            ends=fields.ends,
            longest=longest,
            head_dim=dim,
        )

    # -------------------------------------------------------------------------------------------------- around it

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return contextlib.nullcontext()
        return torch.cuda.device(self.device)

    def _wait_for_others(self) -> tuple[int, torch.cuda.Stream | None]:
        """Let a call on another stream wait for the one before: they share inputs, outputs and what is kept.

        Returns:
            The current stream's address, and itself; 0 and None on a CPU.
        """
        if self.device.type != "cuda":
            return 0, None
        if torch.cuda.is_current_stream_capturing():
            # it would hold addresses of positions that are not kept for ever, and of inputs that other calls overwrite
            raise RuntimeError("the fast form cannot be recorded in a CUDA graph; it records its own for small inputs")
        address = _stream_address(self.device.index)
        if self._stream is not None and address == self._address:
            return address, self._stream
        stream = torch.cuda.current_stream()
        if self._done is not None:
            stream.wait_event(self._done)
        self._streams += 1
        return address, stream


def _stream_address(device: int) -> int:
    """The current stream's cudaStream_t; PyTorch's own object of it takes 90 us to make and compare after a rest."""
    address: int = torch._C._cuda_getCurrentRawStream(device)
    return address


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Make tensors that outlive the call: ordinary ones, which serve callers in and out of inference mode."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
