"""A growable int32 array: amortised O(1) append, O(smaller half) split, never a small view of a huge one.

Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import numpy as np

from .tokens import EMPTY, IntArray

_SHORT = 256  # numbers: copying so many takes no longer than making the view


class IntBuffer:
    """`size` numbers at the start of an array that may have room for more.

    It keeps alive at most four times what it holds, unless growth reserved it: what is cut off or evicted is let go.
    A short array is copied to its new size at once: a view of it would take 112 bytes itself.
    """

    __slots__ = ("_data", "size")

    def __init__(self, values: IntArray = EMPTY) -> None:
        """Copy `values`."""
        self._data = values.copy() if len(values) else EMPTY
        self.size = len(values)

    @property
    def view(self) -> IntArray:
        """The numbers, `[size]`, not copied: valid until the next change."""
        return self._data[: self.size]

    def extend(self, values: IntArray) -> None:
        """Append `values`. Amortised O(len(values))."""
        if not len(values):
            return
        stop = self.size + len(values)
        if stop > len(self._data):
            grown = np.empty(max(stop, 2 * self.size), np.int32)
            grown[: self.size] = self.view
            self._data = grown
        self._data[self.size : stop] = values
        self.size = stop

    def truncate(self, size: int) -> None:
        """Keep `[0, size)`."""
        self.size = size
        self._compact()

    def split(self, at: int) -> IntBuffer:
        """Take `[0, at)` out into a new buffer and keep the rest. Copies the smaller part."""
        head = IntBuffer()
        if 2 * at <= self.size:
            head._data = self._data[:at].copy()
            self._data = self._data[at:]
        else:
            head._data = self._data
            self._data = self._data[at : self.size].copy()
        head.size, self.size = at, self.size - at
        head._compact()
        self._compact()
        return head

    def _compact(self) -> None:
        whole = self._data if self._data.base is None else self._data.base
        if 4 * self.size < len(whole) or self.size < len(whole) <= _SHORT:
            self._data = self.view.copy()
