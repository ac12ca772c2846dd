"""What the tower is compared with: its plain form, transformers' tower, and a floor of products and attention alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own idiom
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.config import VisionConfig
from model.tower import KimiVision
from model.weights import VisionWeights, read_all

Grid = tuple[int, int, int]
Call = Callable[[], Any]


def pixels_of(grids: Sequence[Grid], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Noise in [-1, 1]: [tokens, 588] on the GPU; zeros would run faster than an image does."""
    generator = torch.Generator(device="cuda").manual_seed(sum(t * h * w for t, h, w in grids))
    tokens = sum(t * h * w for t, h, w in grids)
    return (torch.rand(tokens, 588, generator=generator, device="cuda") * 2 - 1).to(dtype)


def merged_rows(tower: KimiVision, pixels: Tensor, grids: Sequence[Grid]) -> Call:
    """The tower's call from pixels to merged rows, in its fast form if it has one; the projector is left out."""
    fast = tower.fast_tower()
    run = tower.vision_tower if fast is None else fast

    def call() -> Tensor:
        with torch.inference_mode():
            rows: Tensor = run(pixels, grids)
            if fast is not None and fast.contents.changed():  # a look that is part of every call
                raise RuntimeError("the weights changed during the benchmark")
            return rows

    return call


class KeptWeights:
    """Weights drawn or read once, since several contenders want them; otherwise as their source."""

    def __init__(self, weights: VisionWeights) -> None:
        """Read all.

        Args:
            weights: an opened source.
        """
        self._weights, self._tensors = weights, dict(read_all(weights, threads=8))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._weights, name)

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU."""
        return self._tensors[name]


class Transformers:
    """transformers' Kimi-K2.5 tower with the same weights, in bf16, with its default attention (sdpa)."""

    def __init__(self, weights: VisionWeights) -> None:
        """Load weights into it.

        Args:
            weights: of a K2.5 tower.
        """
        import transformers

        # how its names and its order of q and k follow from ours is written down where the tests hold us against it
        oracle_class = importlib.import_module("tests.model.oracle").Oracle
        tensors = {name: weights.tensor(name) for name in weights.names()}
        self.version = transformers.__version__
        self.tower: Any = oracle_class(tensors, weights.config, torch.bfloat16).tower.to("cuda")
        self.attention = str(self.tower.config._attn_implementation)

    def call(self, pixels: Tensor, grids: Sequence[Grid]) -> Call:
        """Its call from pixels to merged rows."""
        patches, thw = pixels.view(-1, 3, 14, 14), torch.tensor(grids, device="cuda")

        def call() -> Any:  # noqa: ANN401  transformers' own output class
            with torch.inference_mode():
                return self.tower(patches, grid_thw=thw).pooler_output

        return call


class Floor:
    """The matrix products and the attention of all blocks and nothing else, in one CUDA graph."""

    def __init__(self, weights: VisionWeights) -> None:
        """Put the weights on the GPU.

        Args:
            weights: of a tower.
        """
        self.config: VisionConfig = weights.config
        self.blocks = [
            [
                weights.tensor(f"vision_tower.encoder.blocks.{i}.{name}.weight").to("cuda", torch.bfloat16).t()
                for name in ("wqkv", "wo", "mlp.fc0", "mlp.fc1")
            ]
            for i in range(self.config.num_hidden_layers)
        ]

    def record(self, lengths: Sequence[int]) -> Call:
        """Return the replay of a graph for items of so many tokens, an attention each."""
        config, tokens = self.config, sum(lengths)
        x = torch.randn(tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            self._run(x, lengths)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self._run(x, lengths)
        return graph.replay

    def _run(self, x: Tensor, lengths: Sequence[int]) -> None:
        heads, dim = self.config.num_attention_heads, self.config.head_dim
        for wqkv, wo, fc0, fc1 in self.blocks:
            packed = (x @ wqkv).view(-1, 3, heads, dim)
            outputs = []
            for item in torch.split(packed, list(lengths)):
                q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in item.unbind(1))
                outputs.append(F.scaled_dot_product_attention(q, k, v))
            # one product for all items: joining them is not the floor's business, so several take rows of q instead
            rows = outputs[0].transpose(1, 2) if len(outputs) == 1 else packed[:, 0]
            rows.reshape(x.shape[0], heads * dim) @ wo
            (x @ fc0) @ fc1
