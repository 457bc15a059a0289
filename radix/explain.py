"""The ledger of evictions: what once continued a path and who pushed it out, so that a miss can be explained.

Knows nothing of the tree: a place in it is named by the last page that survived, in this life of it, or a namespace.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .tokens import key_agreement

Place = tuple[int, int] | str  # (page, generation), or the namespace at whose root it was
_LEDGER_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Eviction:
    """Pages went to make room for `by` at time `at`."""

    by: str
    at: int


class EvictionLedger:
    """The last 4,096 evictions, a leaf's share each. Recording is O(1); finding reads them all."""

    def __init__(self, generations: npt.NDArray[np.int64]) -> None:
        self._generations = generations
        self._evictions: OrderedDict[tuple[Place, bytes], Eviction] = OrderedDict()

    def record(self, after: int, namespace: str, key: bytes, eviction: Eviction) -> None:
        """Remember that what followed page `after` (0: the root of `namespace`) and began with `key` was evicted."""
        name = (self._place(after, namespace), key)
        self._evictions[name] = eviction
        self._evictions.move_to_end(name)
        if len(self._evictions) > _LEDGER_SIZE:
            self._evictions.popitem(last=False)

    def find(self, after: int, namespace: str, key: bytes, agreed: int) -> Eviction | None:
        """Return the latest eviction after page `after` that agrees with `key` in more than `agreed` tokens, if any."""
        wanted = self._place(after, namespace)
        for (place, evicted), eviction in reversed(self._evictions.items()):
            if place == wanted and key_agreement(evicted, key) > agreed:
                return eviction
        return None

    def clear(self) -> None:
        self._evictions.clear()

    def _place(self, after: int, namespace: str) -> Place:
        return (after, int(self._generations[after])) if after else namespace
