"""How a problem is cut into one launch of the Triton kernel, by sizes that were measured and not tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

VECTOR_BYTES = 16  # the widest load and store that all GPUs have which we compile for
INT32_END = 1 << 31


@dataclass(frozen=True)
class LaunchConfig:
    """How one program of the kernel is cut.

    Attributes:
        threads: per program; a power of two.
        vectors_per_thread: vectors of q (and as many of k) that one thread rotates; a power of two.
    """

    threads: int
    vectors_per_thread: int = 1

    @property
    def block(self) -> int:
        """Vectors of q that one program rotates."""
        return self.threads * self.vectors_per_thread


class LaunchPlan(NamedTuple):
    """Everything about a launch that follows from shapes and strides.

    Attributes:
        copied: which of q, k, cos and sin the kernel cannot address, so that they must be made contiguous first.
        grid: number of programs.
        scalars: the kernel's int32 arguments: tokens, then the strides of q, k, cos and sin in vectors.
        constants: heads, head dimension, elements per vector, vectors per program.
        threads: per program.
        tokens_per_launch: 0, or where the vectors of one launch are not countable in int32, how many tokens to pass.
    """

    copied: tuple[bool, bool, bool, bool]
    grid: tuple[int, int, int]
    scalars: tuple[int, ...]
    constants: tuple[int, int, int, int]
    threads: int
    tokens_per_launch: int


LAUNCH = LaunchConfig(threads=128)
"""What every launch uses.

Measured on an H200 at 34 shapes (64 to 16384 tokens, 3 to 16 heads of 64 to 128, all dtypes) against 32 to 512 threads
with one or two vectors each: at most 2 % slower than the best of them, so no shape needs an entry of its own. As no
thread is padding, nothing depends on the head dimension. docs/benchmarks.md has the numbers.
"""


def vector_width(itemsize: int, *multiples: int) -> int:
    """Elements that one thread loads at once: the largest power of two that divides every one of ``multiples``.

    Args:
        itemsize: bytes of one element.
        multiples: the head dimension and all strides, in elements.

    Returns:
        At most 16 bytes' worth; 1 where something is odd, which the kernel cannot pair up.
    """
    bits = VECTOR_BYTES // itemsize
    for multiple in multiples:
        bits |= multiple
    return bits & -bits


def plan_launch(
    shape: tuple[int, int, int],
    strides: tuple[tuple[int, ...], ...],
    itemsize: int,
    config: LaunchConfig = LAUNCH,
) -> LaunchPlan:
    """Plan one launch.

    Args:
        shape: [tokens, heads, d] of q and k, none of them 0.
        strides: of q, k, cos and sin, in elements.
        itemsize: bytes of one element of q.
        config: launch sizes.
    """
    tokens, heads, head_dim = shape
    dense = {2: (heads * head_dim, head_dim), 1: (head_dim // 2,)}
    copied, outer = [], []
    for *given, last in strides:
        # a stride over one element is never used, and PyTorch leaves it at any value
        used = tuple(stride if size > 1 else 0 for stride, size in zip(given, shape, strict=False))
        addressable = last == 1 and _are_addressable(used)
        copied.append(not addressable)
        outer.append(used if addressable else dense[len(used)])
    multiples = [*outer[0], *outer[1], 2 * outer[2][0], 2 * outer[3][0]]
    vector = vector_width(itemsize, head_dim, *multiples)
    row = heads * head_dim // vector
    limit = (INT32_END - config.block) // row
    return LaunchPlan(
        copied=(copied[0], copied[1], copied[2], copied[3]),
        grid=(-(-min(tokens, limit) * row // config.block), 1, 1),
        scalars=(tokens, *(multiple // vector for multiple in multiples)),
        constants=(heads, head_dim, vector, config.block),
        threads=config.threads,
        tokens_per_launch=limit if tokens > limit else 0,
    )


def _are_addressable(strides: tuple[int, ...]) -> bool:
    """Whether the kernel can step by ``strides``: int32, and over whole pairs of q or k (angles are not paired)."""
    paired = len(strides) == 2
    return all(stride < INT32_END and not (paired and stride % 2) for stride in strides)
