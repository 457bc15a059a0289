"""Cached prefixes that callers keep from eviction: for how long, and how many pages in all.

Knows nothing of requests; time is counted in steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.radix import Pin, RadixCache

from .errors import InvalidRequest
from .sequence import TokenArray


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Names one pinned prefix of one engine, of which `prefix_len` tokens were cached: whole pages."""

    number: int
    prefix_len: int


class Pins:
    """The pins of one engine. They hold at most `budget` pages together; a page that two hold counts twice."""

    def __init__(self, cache: RadixCache, budget: int) -> None:
        self.budget = budget
        self.num_given_way = 0
        self._last = 0
        self.start_over(cache)

    def start_over(self, cache: RadixCache) -> None:
        """Serve a fresh cache, in which nothing is pinned."""
        self._cache = cache
        self._pins: dict[int, tuple[Pin, int | None]] = {}  # by number, oldest first; the step that ends each

    @property
    def num_pages(self) -> int:
        return sum(len(pin.page_ids) for pin, _ in self._pins.values())

    def pin(self, tokens: TokenArray, namespace: str, ends: int | None) -> PinnedPrefix:
        """Keep what is cached of `tokens` until step `ends` (None: until `unpin`). InvalidRequest over the budget."""
        pin = self._cache.pin(tokens, namespace)
        left = self.budget - self.num_pages
        if len(pin.page_ids) > left:
            self._cache.unpin(pin)
            raise InvalidRequest(
                f"pin: {len(pin.page_ids)} pages asked for, {left} of the {self.budget} that pins may hold are left; "
                "unpin something, or give the engine a larger pin_budget"
            )
        self._last += 1
        self._pins[self._last] = pin, ends
        return PinnedPrefix(self._last, pin.prefix_len)

    def unpin(self, pinned: PinnedPrefix) -> None:
        """End a pin. Once it has ended by itself, a no-op."""
        if not 1 <= pinned.number <= self._last:
            raise InvalidRequest(f"pin: number {pinned.number} was never pinned in this engine")
        if pinned.number in self._pins:
            self._cache.unpin(self._pins.pop(pinned.number)[0])

    def expire(self, step: int) -> None:
        """End the pins whose time is over."""
        for number in [number for number, (_, ends) in self._pins.items() if ends is not None and ends <= step]:
            self._cache.unpin(self._pins.pop(number)[0])

    def give_way(self) -> bool:
        """End the oldest pin, because a request could not go on otherwise; False where there is none."""
        for number in self._pins:
            self._cache.unpin(self._pins.pop(number)[0])
            self.num_given_way += 1
            return True
        return False

    def give_up(self) -> None:
        """End all."""
        while self._pins:
            self._cache.unpin(self._pins.popitem()[1][0])
