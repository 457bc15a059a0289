"""What a pool holds whose requests each take a run of neighbouring slots when they start: a replay, request by request.

Knows nothing of pages: this is how memory is given out without them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from itertools import cycle

import numpy as np

from .lengths import IntArray, Lengths

_NUM_REQUESTS = 2000  # replayed: more change the last digit
_MIN_SPANS = 50  # and so many changes, where many requests are short
_SESSIONS = 100  # at once in a replay: a larger pool is as many of this size, gaps and all
_WARM_UP = 0.2  # of the replay: its first requests start together and are younger than those that run later


class Gaps:
    """The free runs `[start, start + length)` of a pool, in order, no two of which touch; first fit."""

    def __init__(self, num_slots: int) -> None:
        self._runs = [(0, num_slots)]

    def take(self, size: int) -> int | None:
        """The start of `size` slots that are free no more, or None where no run has as many. O(runs)."""
        for index, (start, length) in enumerate(self._runs):
            if length >= size:
                self._runs[index : index + 1] = [(start + size, length - size)] if length > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """`[start, start + size)` is free again."""
        at = bisect_left(self._runs, (start, 0))
        stop, first, last = start + size, at, at
        if at < len(self._runs) and self._runs[at][0] == stop:
            stop, last = stop + self._runs[at][1], at + 1
        if at and sum(self._runs[at - 1]) == start:
            start, first = self._runs[at - 1][0], at - 1
        self._runs[first:last] = [(start, stop - start)]


def replay(lengths: Lengths, sizes: IntArray, num_slots: int) -> tuple[float, float]:
    """Requests at once and live tokens, averaged over steps, where request i takes `sizes[i]` neighbouring slots.

    Served in order, over and over, from a queue that never runs empty; of a long list so many, evenly. No size exceeds
    the pool.
    """
    scale = max(1.0, num_slots / max(_SESSIONS * float(sizes.mean()), 4 * int(sizes.max())))
    gaps = Gaps(int(num_slots / scale))
    num_chosen = min(len(sizes), _NUM_REQUESTS)
    chosen = np.arange(num_chosen) * len(sizes) // num_chosen
    coming = cycle(zip(*(column[chosen].tolist() for column in (lengths.prompt, lengths.output, sizes)), strict=True))
    prompt, output, size = next(coming)
    running: list[tuple[int, int, int, int]] = []  # (last step, start, size, prompt - first step)
    spans: list[tuple[int, int, float]] = []  # steps in which nothing began or ended, requests, live tokens
    now = num_started = 0
    while num_started < _NUM_REQUESTS or len(spans) < _MIN_SPANS:
        while (start := gaps.take(size)) is not None:
            heapq.heappush(running, (now + output, start, size, prompt - now))
            num_started += 1
            prompt, output, size = next(coming)
        until = running[0][0]
        middle = (now + until - 1) / 2
        spans.append((until - now, len(running), sum(middle + offset for *_, offset in running)))
        now = until
        while running and running[0][0] == now:
            _, freed, num_freed, _ = heapq.heappop(running)
            gaps.give(freed, num_freed)
    steps, at_once, live = np.array(spans[int(_WARM_UP * len(spans)) :]).T
    return float(np.average(at_once, weights=steps)) * scale, float(np.average(live, weights=steps)) * scale
