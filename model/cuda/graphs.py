"""CUDA graphs of the blocks by padded size: a small input then costs one launch and not two hundred.

All graphs share one pool of memory and one set of inputs and outputs, those of the largest, so memory is bounded by
that and not by their number. Results are those of the same kernels without a graph, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from model.cuda.placement import Fields, FieldSizes, Placement
from model.cuda.weights import PADDED_PATCH_VALUES, PATCH_VALUES


class GraphKey(NamedTuple):
    """What a graph is recorded for.

    Attributes:
        padded: tokens with padding.
        form: of attention, as :class:`model.cuda.tower.FastTower` names it.
        segments: that attention has room for, where items are of unequal lengths; otherwise 0.
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
        self._block = torch.zeros(sizes.nbytes, dtype=torch.uint8, device=device)
        self._out = torch.empty(sizes.padded, sizes.width, dtype=sizes.dtype, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._loaded: Placement | None = None
        self.seconds: dict[GraphKey, float] = {}

    def run(self, key: GraphKey, patches: Tensor, placement: Placement, body: Body) -> Tensor:
        """Replay the graph of a key on a call's inputs, after recording it if it is not there.

        Args:
            key: of the graph.
            patches: [tokens, 588] in the model's dtype, on the device.
            placement: of these tokens.
            body: what to record.

        Returns:
            [padded, hidden_size], overwritten by the next call.
        """
        padded, tokens = placement.sizes.padded, placement.tokens
        self._patches[:tokens, :PATCH_VALUES].copy_(patches)
        if tokens < padded:
            # what an earlier call left there could be NaN, and a masked NaN is still one
            self._patches[tokens:padded].zero_()
        if self._loaded is not placement:
            self._block[: placement.block.nbytes].copy_(placement.block)
            self._loaded = placement
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._record(key, placement.sizes, body)
        graph.replay()
        return self._out[:padded]

    def _record(self, key: GraphKey, sizes: FieldSizes, body: Body) -> torch.cuda.CUDAGraph:
        start = time.perf_counter()
        patches, fields, out = self._patches[: sizes.padded], sizes.views(self._block), self._out[: sizes.padded]
        # once without a graph, on a stream of its own: libraries load, plan and allocate what no graph may record
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            body(patches, fields, out)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # other threads of the process may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            body(patches, fields, out)
        self.seconds[key] = round(time.perf_counter() - start, 4)
        return graph

    @property
    def nbytes(self) -> int:
        """Bytes of inputs and outputs; the pool for what lies between is the allocator's."""
        return self._patches.nbytes + self._block.nbytes + self._out.nbytes
