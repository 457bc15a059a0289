"""Who may still ask for which tokens although it holds no pages: what waits, and what has ended and can be forked.

Knows nothing of pages, or of how long anybody owns anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np
from sortedcontainers import SortedList

from radixrt.radix import agreement

from .sequence import Sequence, TokenArray


class Owners:
    """Token paths by owner: a sequence, or what stands for one. O(tokens + log owners) each.

    The last token that was sampled is owned as well: its owner has not fed it, but forks will, or have. Of all paths in
    an order by tokens the one that agrees furthest with another is next to it.
    """

    def __init__(self) -> None:
        self._paths: dict[Hashable, tuple[str, bytes]] = {}  # namespace, tokens
        self._sorted: dict[str, SortedList] = {}

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._paths)

    def keep(self, sequence: Sequence, num_tokens: int | None = None) -> None:
        """A sequence owns its tokens (the first `num_tokens`) as they are now."""
        self.own(sequence, sequence.tokens[:num_tokens], sequence.namespace)

    def own(self, owner: Hashable, tokens: TokenArray, namespace: str) -> None:
        """Somebody owns these tokens, and nothing any more that it did."""
        self.disown(owner)
        path = tokens.tobytes()
        self._paths[owner] = namespace, path
        self._sorted.setdefault(namespace, SortedList()).add(path)

    def disown(self, owner: Hashable) -> None:
        """Somebody will not ask any more. No error where it did not own anything."""
        if owner in self._paths:
            namespace, path = self._paths.pop(owner)
            self._sorted[namespace].remove(path)
            if not self._sorted[namespace]:
                del self._sorted[namespace]

    def owned_len(self, tokens: TokenArray, namespace: str) -> int:
        """How many leading tokens of these somebody may ask for: where one of the two paths next to them parts."""
        paths = self._sorted.get(namespace, [])
        at = paths.bisect_right(tokens.tobytes()) if paths else 0
        beside = paths[max(0, at - 1) : at + 1]
        return max((agreement(np.frombuffer(path, np.int32), tokens) for path in beside), default=0)
