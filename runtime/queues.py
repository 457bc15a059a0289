"""Which sequences of an engine wait and which run, each queue by age.

Knows nothing of why one of them waits or runs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left

from radixrt.radix import require

from .owners import Owners
from .sequence import Sequence


class Queues:
    """Those that wait hold no pages, so that what is cached of them is noted as theirs; those that run hold a table."""

    def __init__(self, owners: Owners) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.known: list[Sequence] = []  # of either: score requests for which nothing is left to compute
        self._owners = owners

    def add(self, sequence: Sequence) -> None:
        """A new one waits, or runs where it holds pages."""
        _insert(self.waiting if sequence.table is None else self.running, sequence)
        if sequence.table is None:
            self._owners.keep(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget one. To be called before its table changes."""
        _remove(self.waiting if sequence.table is None else self.running, sequence)

    def is_of_oldest(self, sequence: Sequence) -> bool:
        """A branch of the oldest running request, to which alone pages are promised."""
        return bool(self.running) and sequence.number == self.running[0].number

    def oldest(self) -> Sequence | None:
        """The oldest running sequence that does not wait for the other beams of its request."""
        return next((s for s in self.running if s.logits is None), None)

    def branches(self, number: int) -> list[Sequence]:
        """The branches of one request, running and waiting."""
        found: list[Sequence] = []
        for queue in (self.running, self.waiting):
            start = bisect_left(queue, (number, 0), key=_age)
            found += itertools.takewhile(lambda s: s.number == number, queue[start:])
        return found

    def check(self) -> None:
        """Every sequence is in one queue, in order; those that run hold a table, those that wait hold none."""
        queued = self.waiting + self.running
        require(len({s.key for s in queued}) == len(queued), "a sequence is queued twice")
        require(all(s.table is None for s in self.waiting), "a waiting sequence holds pages")
        require(all(s.table is not None and not s.table.closed for s in self.running), "a running one holds no pages")
        for s in queued:
            fed_at_most = s.num_tokens - (s.logits is None)
            require(0 <= s.computed_len <= fed_at_most, "a sequence has nothing left to be fed")
        for queue in (self.waiting, self.running):
            require(queue == sorted(queue, key=_age), "a queue is out of order")


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    queue.insert(bisect_left(queue, sequence.key, key=_age), sequence)


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    at = bisect_left(queue, sequence.key, key=_age)
    assert queue[at] is sequence, "the sequence is in another queue"
    del queue[at]


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
