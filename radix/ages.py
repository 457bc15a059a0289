"""How long evicted pages had not been used: a histogram in the cache's own count of time.

Knows nothing of what a use is.
"""

from __future__ import annotations


class Ages:
    """`buckets[i]` counts the ages in `[2**i, 2**(i + 1))`; an age is at least 1."""

    def __init__(self) -> None:
        self.total = 0
        self.buckets: list[int] = []

    def add(self, ages: list[int]) -> None:
        """O(ages)."""
        self.total += sum(ages)
        for age in ages:
            self.buckets += [0] * (age.bit_length() - len(self.buckets))
            self.buckets[age.bit_length() - 1] += 1
