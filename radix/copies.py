"""Page copies that the device has still to run.

Knows nothing of reference counts: whoever begins a copy holds its pages until it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .errors import CacheError
from .values import PageCopy


class Copies:
    """Copies in flight by destination. All of them run before any page is written in their step."""

    def __init__(self) -> None:
        self._by_dst: dict[int, PageCopy] = {}
        self._naming: Counter[int] = Counter()

    def __contains__(self, page: int) -> bool:
        """Whether `page` still waits for its content."""
        return page in self._by_dst

    def __iter__(self) -> Iterator[PageCopy]:
        return iter(self._by_dst.values())

    def __len__(self) -> int:
        return len(self._by_dst)

    def naming(self, page: int) -> int:
        """Return how many copies in flight name `page`."""
        return self._naming[page]

    def begin(self, src: int, dst: int, num_tokens: int) -> PageCopy:
        """Plan a copy. If `src` itself waits for one, read what that one reads: so copies may run in any order."""
        if src in self._by_dst:
            src = self._by_dst[src].src
        copy = PageCopy(src, dst, num_tokens)
        self._by_dst[dst] = copy
        self._naming.update((src, dst))
        return copy

    def finish(self, copies: tuple[PageCopy, ...]) -> None:
        """Forget copies that have run. Raises `CacheError`, changing nothing, if one is not in flight."""
        for copy in copies:
            if self._by_dst.get(copy.dst) is not copy:
                raise CacheError(f"the copy of page {copy.src} to page {copy.dst} was done before")
        for copy in copies:
            del self._by_dst[copy.dst]
            for page in (copy.src, copy.dst):
                self._naming[page] -= 1
                if not self._naming[page]:
                    del self._naming[page]
