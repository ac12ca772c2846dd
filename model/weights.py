"""What every source of vision weights offers, and the hash that identifies them."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import VisionConfig, tensor_shapes

if TYPE_CHECKING:
    import torch

VISION_PREFIXES = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}  # bytes

T = TypeVar("T")


class VisionWeights(Protocol):
    """The tensors of one vision tower and its projector, read or drawn when they are asked for."""

    @property
    def config(self) -> VisionConfig:
        """The tower that the tensors belong to."""

    @property
    def source(self) -> str:
        """What the user gave, for the manifest."""

    def names(self) -> tuple[str, ...]:
        """Checkpoint names, in the order of :func:`model.config.tensor_shapes`."""

    def dtype(self, name: str) -> str:
        """A key of ITEM_SIZES."""

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, little-endian, as the safetensors format stores them."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its own dtype; the source keeps no copy."""

    def sha256(self) -> str:
        """Hash over names, dtypes, shapes and bytes; the same for every way to shard them."""


def in_order(names: Iterable[str], fetch: Callable[[str], T], threads: int = 2) -> Iterator[tuple[str, T]]:
    """Fetch by name on several threads, in order, at most ``threads`` results ahead of the consumer.

    Args:
        names: what to fetch.
        fetch: called with one name; should release the GIL for most of its time.
        threads: at least 1.

    Yields:
        Each name with its result.
    """
    waiting: deque[tuple[str, Future[T]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name in names:
            waiting.append((name, pool.submit(fetch, name)))
            if len(waiting) > threads:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()


def read_all(weights: VisionWeights, threads: int = 2) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors with their names, in order; the way to fill a tower.

    Args:
        weights: either source.
        threads: at least 1; the numbers do not depend on it.
    """
    return in_order(weights.names(), weights.tensor, threads)


def as_tensor(raw: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """View bytes as a tensor, without a copy where they are aligned.

    Args:
        raw: contiguous bytes.
        dtype: a key of ITEM_SIZES.
        shape: of the result.
    """
    import torch

    if raw.ctypes.data % ITEM_SIZES[dtype]:
        raw = raw.copy()  # the format allows odd offsets, vector instructions do not
    return torch.from_numpy(np.asarray(raw)).view(getattr(torch, dtype)).view(shape)


def weights_sha256(weights: VisionWeights, digest: Callable[[str], str], threads: int = 2) -> str:
    """Hash of the tensors' own hashes, one line a tensor, in the order of ``names()``.

    The two levels let several threads hash at once, and tell which tensor differs when two towers do.

    Args:
        weights: either source.
        digest: sha256 of one tensor's bytes, in hexadecimal.
        threads: at least 1.
    """
    shapes = tensor_shapes(weights.config)
    total = hashlib.sha256()
    for name, value in in_order(shapes, digest, threads):
        total.update(f"{name} {weights.dtype(name)} {list(shapes[name])} {value}\n".encode())
    return total.hexdigest()
