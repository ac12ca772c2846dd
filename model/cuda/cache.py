"""A cache of tensors with a bound on their bytes; what was used least recently goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar


class HasBytes(Protocol):
    """What can be kept."""

    @property
    def nbytes(self) -> int:
        """Size in memory."""


T = TypeVar("T", bound=HasBytes)


class ByteCache(Generic[T]):
    """Values by key, at most so many bytes of them.

    Attributes:
        hits: look-ups that found something.
        misses: look-ups that did not.
    """

    def __init__(self, max_bytes: int) -> None:
        """Make an empty cache.

        Args:
            max_bytes: bound; 0 keeps nothing.

        Raises:
            ValueError: the bound is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"a cache of {max_bytes} bytes; expected 0 or more")
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        self._entries: OrderedDict[Hashable, T] = OrderedDict()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what is kept under a key, or make it and keep it; a value above the bound is returned and not kept."""
        found = self._entries.get(key)
        if found is not None:
            self.hits += 1
            self._entries.move_to_end(key)
            return found
        self.misses += 1
        value = make()
        if value.nbytes <= self.max_bytes:
            self._entries[key] = value
            self._bytes += value.nbytes
            while self._bytes > self.max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1].nbytes
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._bytes = 0
