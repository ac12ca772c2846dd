"""CUDA graphs of the blocks by padded size: a small input then costs one launch and not two hundred.

All graphs share one pool of memory and one set of inputs and outputs, those of the largest, so memory is bounded by
that and not by their number. Results are those of the same kernels without a graph, bit for bit.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import PATCH_VALUES
from model.cuda.placement import Fields, FieldSizes, Placement
from model.cuda.weights import PADDED_PATCH_VALUES

# One image makes at most 48 sizes up to 4096 tokens; several items of one length, or of any, make more.
MOST_GRAPHS = 128


class GraphKey(NamedTuple):
    """What a graph is recorded for.

    Attributes:
        padded: tokens with padding.
        form: of attention, as :class:`model.cuda.tower.FastTower` names it.
        segments: items of equal lengths, or, of unequal ones, how many attention has room for.
    """

    padded: int
    form: str
    segments: int


# runs the blocks on patches and fields into the last argument
Body = Callable[[Tensor, Fields, Tensor], Tensor]


class BlockGraphs:
    """Records and replays.

    Attributes:
        seconds: what the first call of each graph cost.
    """

    def __init__(self, sizes: FieldSizes, device: torch.device) -> None:
        """Allocate inputs and outputs.

        Args:
            sizes: of the largest graph.
            device: a GPU.
        """
        self._largest = sizes
        self._patches = torch.zeros(sizes.padded, PADDED_PATCH_VALUES, dtype=sizes.dtype, device=device)
        self._values: dict[int, Tensor] = {}  # the part of the inputs that so many tokens fill
        self._block = torch.zeros(sizes.nbytes, dtype=torch.uint8, device=device)
        self._out = torch.empty(sizes.padded, sizes.width, dtype=sizes.dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        # one for all, since a pool's memory goes by stream; torch.cuda.graph's own lies on whichever GPU recorded first
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: OrderedDict[GraphKey, torch.cuda.CUDAGraph] = OrderedDict()
        self._loaded: Placement | None = None
        self.seconds: dict[GraphKey, float] = {}

    def has(self, key: GraphKey) -> bool:
        """Whether a graph is recorded."""
        return key in self._graphs

    def load(self, patches: Tensor, placement: Placement) -> None:
        """Copy a call's inputs to where the graphs read them.

        Args:
            patches: [tokens, 588] in the model's dtype, on the device.
            placement: of these tokens; must fit the largest size.
        """
        padded, tokens = placement.sizes.padded, placement.tokens
        values = self._values.get(tokens)
        if values is None:
            values = self._values[tokens] = self._patches[:tokens, :PATCH_VALUES]
        values.copy_(patches)
        if tokens < padded:
            # what an earlier call left there could be NaN, and a masked NaN is still one
            self._patches[tokens:padded].zero_()
        if self._loaded is not placement:
            self._block[: placement.block.nbytes].copy_(placement.block)
            self._loaded = placement

    def replay(self, key: GraphKey) -> Tensor:
        """Run a recorded graph on what is loaded: [padded, hidden_size], overwritten by the next call."""
        self._graphs[key].replay()
        self._graphs.move_to_end(key)
        return self._out[: key.padded]

    def record(self, key: GraphKey, sizes: FieldSizes, body: Body) -> float:
        """Record a graph; of more than MOST_GRAPHS, the one used least recently goes.

        Args:
            key: of the graph.
            sizes: of its inputs.
            body: what to record.

        Returns:
            Seconds that it took.
        """
        start = time.perf_counter()
        patches, fields, out = self._patches[: sizes.padded], sizes.views(self._block), self._out[: sizes.padded]
        # once without a graph, on a stream of its own: libraries load, plan and allocate what no graph may record
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            body(patches, fields, out)
        torch.cuda.current_stream().wait_stream(self._side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            body(patches, fields, out)
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph
        self.seconds[key] = round(time.perf_counter() - start, 4)
        return self.seconds[key]

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and outputs; the pool for what lies between is the allocator's."""
        return self._patches.nbytes + self._block.nbytes + self._out.nbytes
