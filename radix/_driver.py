"""A seeded stream of cache operations for long runs, where Hypothesis would be too slow.

Does not know what is right: the simulation it drives does.
"""

from collections.abc import Callable

import numpy as np

from ._simulation import Simulation

NAMESPACES = ("", "tenant")
MAX_TABLES = 6


class Driver:
    """Random operations on a Simulation, all drawn from one numpy generator: the same seed gives the same run."""

    def __init__(self, simulation: Simulation, *, seed: int, alphabet: int = 2) -> None:
        self.simulation = simulation
        self.alphabet = alphabet
        self.rng = np.random.default_rng(seed)
        self._max_len = max(2 * simulation.page_size, simulation.num_pages * simulation.page_size // 3)
        weighted = self._weighted()
        self._verbs = [verb for verb, _ in weighted]
        weights = np.array([weight for _, weight in weighted], dtype=float)
        self._cumulative = np.cumsum(weights / weights.sum())

    def _weighted(self) -> list[tuple[Callable[[], None], int]]:
        return [
            (self._open, 12),
            (self._extend, 16),
            (self._twins, 4),
            (self._publish, 14),
            (self._close, 8),
            (self._fork, 4),
            (self._branch, 3),
            (self._truncate, 5),
            (self._match, 8),
            (self._step, 5),
            (self._copy, 2),
            (self._confirm, 2),
            (self._evict, 3),
            (self._drop, 3),
            *(
                [(self._swap_out, 5), (self._swap_in, 5), (self._end_swaps, 8)]
                if self.simulation.num_host_pages
                else []
            ),
            (self._pin, 2),
            (self._unpin, 2),
            (self._use_closed, 1),
            (self._reset, 1),
        ]

    def run(self, num_operations: int) -> None:
        """Do at least `num_operations` operations, then end everything."""
        while self.simulation.now < num_operations:
            verb = int(np.searchsorted(self._cumulative, self.rng.random(), side="right"))
            self._verbs[min(verb, len(self._verbs) - 1)]()
        self.simulation.finish()

    # Arguments --------------------------------------------------------------------------------------------------

    def _below(self, stop: int) -> int:
        return int(self.rng.integers(stop))

    def _table(self) -> int | None:
        tables = list(self.simulation.tables)
        return tables[self._below(len(tables))] if tables else None

    def _suffix(self) -> list[int]:
        """A few tokens, in runs so that sequences of one seed often agree."""
        page_size = self.simulation.page_size
        length = 1 + self._below((1, 2, page_size, 2 * page_size + 1)[self._below(4)])
        if self._below(4) == 0:
            return [self._below(self.alphabet) for _ in range(length)]
        return [self._below(self.alphabet)] * length

    def _sequence(self) -> tuple[str, list[int]]:
        """A recent sequence, cut anywhere, and mostly something new behind it."""
        recent = self.simulation.recent
        namespace, tokens = recent[self._below(len(recent))]
        if self._below(8) == 0:
            namespace = NAMESPACES[self._below(len(NAMESPACES))]
        if self._below(3):
            tokens = tokens[: self._below(len(tokens) + 1)]
        return namespace, [*tokens, *(self._suffix() if self._below(4) else ())][: self._max_len]

    # Verbs ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        namespace, tokens = self._sequence()
        if len(self.simulation.tables) >= MAX_TABLES:
            return self._close()
        priority, label = (0, 0, 0, 2, -1)[self._below(5)], f"r{self.simulation.now}"
        handle = self.simulation.open(namespace=namespace, tokens=tokens, label=label, priority=priority)
        if rest := tokens[len(self.simulation.tables[handle].tokens) :]:
            self.simulation.extend(handle=handle, tokens=rest)
        return None

    def _extend(self) -> None:
        if (handle := self._table()) is not None:
            fail_at = 1 + self._below(2) if self._below(10) == 0 else 0
            self.simulation.extend(handle=handle, tokens=self._suffix(), leader=self._table(), fail_at=fail_at)

    def _twins(self) -> None:
        if len(self.simulation.tables) > MAX_TABLES - 2:
            return
        namespace, tokens = self._sequence()
        first, second = (self.simulation.open(namespace=namespace, tokens=tokens) for _ in range(2))
        common = tokens[len(self.simulation.tables[first].tokens) :] + self._suffix()
        ours, theirs = ([*common, *self._suffix()] if self._below(2) else common for _ in range(2))
        if self.simulation.extend(handle=first, tokens=ours):
            self.simulation.extend(handle=second, tokens=theirs, leader=first)

    def _publish(self) -> None:
        if (handle := self._table()) is not None:
            self.simulation.publish(handle=handle, tail=self._below(2) == 0)

    def _close(self) -> None:
        if (handle := self._table()) is not None:
            self.simulation.close(handle=handle)

    def _fork(self) -> None:
        handle = self._table()
        if handle is not None and len(self.simulation.tables) < MAX_TABLES:
            self.simulation.fork(handle=handle)

    def _branch(self) -> None:
        """A child goes on and its parent ends, all between two steps of the device."""
        parent = self._table()
        if parent is not None and len(self.simulation.tables) < MAX_TABLES:
            child = self.simulation.fork(handle=parent)
            self.simulation.extend(handle=child, tokens=self._suffix())
            self.simulation.close(handle=parent)
            live = self.simulation.tables[child]
            self.simulation.match(namespace=live.namespace, tokens=live.tokens)

    def _truncate(self) -> None:
        if (handle := self._table()) is not None:
            seq_len = self._below(len(self.simulation.tables[handle].tokens) + 2)
            self.simulation.truncate(handle=handle, seq_len=seq_len)

    def _match(self) -> None:
        namespace, tokens = self._sequence()
        self.simulation.match(namespace=namespace, tokens=tokens)

    def _step(self) -> None:
        self.simulation.step()

    def _copy(self) -> None:
        self.simulation.copy()

    def _confirm(self) -> None:
        self.simulation.confirm()

    def _evict(self) -> None:
        self.simulation.evict(num_pages=(0, 1, 2, self.simulation.num_pages, 10**9)[self._below(5)])

    def _drop(self) -> None:
        recent = self.simulation.recent
        namespace, tokens = recent[self._below(len(recent))] if self._below(4) else self._sequence()
        keep_len = self._below(len(tokens) + 2) if self._below(2) else 0
        self.simulation.drop(namespace=namespace, tokens=tokens, keep_len=keep_len)

    def _swap_out(self) -> None:
        swapped = self.simulation.swapped()
        keep = swapped[self._below(len(swapped))] if self._below(4) == 0 else None
        self.simulation.swap_out(num_pages=(1, 1, 2, 4, 10**9)[self._below(5)], keep=keep)

    def _swap_in(self) -> None:
        swapped = self.simulation.swapped()
        namespace, tokens = swapped[self._below(len(swapped))]
        max_pages = (1, 2, None)[self._below(3)]
        self.simulation.swap_in(namespace=namespace, tokens=tokens, max_pages=max_pages)

    def _end_swaps(self) -> None:
        """Mostly all of them; else a few, the later ones before the earlier."""
        if num_swaps := len(self.simulation.device.swaps):
            first, count = (0, num_swaps) if self._below(2) else (self._below(num_swaps), 1 + self._below(3))
            self.simulation.end_swaps(first=first, count=count, failed=self._below(6) == 0)

    def _pin(self) -> None:
        if len(self.simulation.pins) < 2:
            namespace, tokens = self._sequence()
            self.simulation.pin(namespace=namespace, tokens=tokens)

    def _unpin(self) -> None:
        if self.simulation.pins:
            self.simulation.unpin(pin=next(iter(self.simulation.pins)))

    def _use_closed(self) -> None:
        self.simulation.use_closed()

    def _reset(self) -> None:
        """Mostly refused: while tables live, while pins do, while copies do; now and then everything is ended first."""
        ended = self._below(8)
        if ended == 0:
            return self.simulation.finish()
        for handle in list(self.simulation.tables) if ended <= 3 else ():
            self.simulation.close(handle=handle)
        for pin in list(self.simulation.pins) if ended <= 2 else ():
            self.simulation.unpin(pin=pin)
        return self.simulation.reset()
