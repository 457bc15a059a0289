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
    """The pins of one engine, of which the first `num_pinned` are over. The cache bounds the pages that they hold."""

    def __init__(self, cache: RadixCache, num_pinned: int = 0) -> None:
        self.num_pinned = num_pinned
        self._cache = cache
        self._pins: dict[int, tuple[Pin, int | None]] = {}  # by number, oldest first; the step that ends each

    def pin(self, tokens: TokenArray, namespace: str, ends: int | None) -> PinnedPrefix:
        """Keep what is cached of `tokens` until step `ends` (None: until `unpin`). InvalidRequest over the budget."""
        pin = self._cache.pin(tokens, namespace)
        if pin is None:
            raise InvalidRequest(
                f"pin: a prompt of {len(tokens)} tokens given; {self._cache.stats().num_pinned} pages are pinned, and "
                "with its own they exceed the budget; unpin something, or give the engine a larger pin_budget"
            )
        self.num_pinned += 1
        self._pins[self.num_pinned] = pin, ends
        return PinnedPrefix(self.num_pinned, pin.prefix_len)

    def unpin(self, pinned: PinnedPrefix) -> None:
        """End a pin. Once it has ended by itself, a no-op."""
        if not 1 <= pinned.number <= self.num_pinned:
            raise InvalidRequest(f"pin: number {pinned.number} was never pinned in this engine")
        if pinned.number in self._pins:
            self._cache.unpin(self._pins.pop(pinned.number)[0])

    def expire(self, step: int) -> list[int]:
        """End the pins whose time is over; their numbers."""
        over = [number for number, (_, ends) in self._pins.items() if ends is not None and ends <= step]
        for number in over:
            self._cache.unpin(self._pins.pop(number)[0])
        return over

    def give_way(self) -> bool:
        """End the oldest pin, because a request could not go on otherwise; False where there is none."""
        for number in self._pins:
            self._cache.unpin(self._pins.pop(number)[0])
            return True
        return False

    def give_up(self) -> None:
        """End all."""
        while self._pins:
            self._cache.unpin(self._pins.popitem()[1][0])
