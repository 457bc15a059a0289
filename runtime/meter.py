"""How long requests wait: queue, first token, between tokens. Histograms over a clock that is told from outside.

Knows nothing of queues or steps, decides nothing, and never raises: a clock that fails is counted, not passed on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from .sequence import Sequence

# Bounds of the buckets in seconds: 1 us to 1,000 s in steps of 2 ** (1/4), so a quantile is at most 19 % too high.
_BOUNDS = tuple(1e-6 * 2 ** (i / 4) for i in range(121))


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of many waits: how many, their sum, and counts by bucket (`bounds[i]` is the upper bound of bucket i)."""

    count: int = 0
    total: float = 0.0
    buckets: tuple[int, ...] = field(default=(), repr=False)
    bounds: tuple[float, ...] = field(default=_BOUNDS, repr=False)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def quantile(self, q: float) -> float:
        """An upper bound of the q-quantile, at most 19 % above it; NaN where nothing was counted."""
        below = 0
        for bound, count in zip((*self.bounds, math.inf), self.buckets, strict=False):
            below += count
            if self.count and below >= q * self.count:
                return bound
        return math.nan


@dataclass(slots=True)
class _Histogram:
    count: int = 0
    total: float = 0.0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.buckets[bisect_left(_BOUNDS, seconds)] += 1

    def durations(self) -> Durations:
        return Durations(count=self.count, total=self.total, buckets=tuple(self.buckets))


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What callers waited for, in seconds. `num_failures`: times that the clock failed and nothing was noted."""

    queue: Durations  # from submit to the first row, once a request
    first_token: Durations  # from submit to the first token, once a choice
    between_tokens: Durations  # between tokens of a choice; preemption counts
    num_failures: int


class Meter:
    """Notes moments of sequences. O(1) each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue, self._first_token, self._between_tokens = _Histogram(), _Histogram(), _Histogram()
        self._num_failures = 0
        self._submitted: dict[int, float] = {}  # by request
        self._queued: set[int] = set()
        self._last: dict[tuple[int, int], float] = {}  # by choice: when it had its last token

    def now(self) -> float | None:
        """The clock's time; None, and counted, where it fails or says no number."""
        with suppress(Exception):
            if math.isfinite(now := float(self._clock())):
                return now
        self._num_failures += 1
        return None

    def submitted(self, sequence: Sequence) -> None:
        if (now := self.now()) is not None:
            self._submitted[sequence.number] = now
            self._queued.add(sequence.number)

    def started(self, sequence: Sequence) -> None:
        """A row of it ran; later starts, after a preemption, count nowhere."""
        if sequence.number in self._queued and (now := self.now()) is not None:
            self._queued.remove(sequence.number)
            self._queue.add(now - self._submitted[sequence.number])

    def sampled(self, sequence: Sequence) -> None:
        """It has one more token."""
        if (now := self.now()) is None:
            return
        if sequence.key in self._last:
            self._between_tokens.add(now - self._last[sequence.key])
        elif sequence.number in self._submitted:
            self._first_token.add(now - self._submitted[sequence.number])
        self._last[sequence.key] = now

    def ended(self, sequence: Sequence) -> None:
        """A choice has ended."""
        self._last.pop(sequence.key, None)

    def finished(self, number: int) -> None:
        """A request has ended."""
        self._submitted.pop(number, None)
        self._queued.discard(number)

    def start_over(self) -> None:
        """Nobody lives any more."""
        self._submitted, self._queued, self._last = {}, set(), {}

    def waits(self) -> Waits:
        return Waits(
            queue=self._queue.durations(),
            first_token=self._first_token.durations(),
            between_tokens=self._between_tokens.durations(),
            num_failures=self._num_failures,
        )
