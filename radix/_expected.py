"""What is expected of a whole cache: its tree, live tables, pins, counts and statistics, and the audit against it.

Does not know in which order things happened, nor who asked for them.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ._device import Device
from ._reference import ReferenceTree, agreement, namespace_path
from .cache import RadixCache
from .table import PageTable, Pin


class Disagreement(AssertionError):
    """The cache did something else than was expected of it."""


def equal(actual: object, expected: object, what: str) -> None:
    """Raise Disagreement unless both are equal."""
    if actual != expected:
        raise Disagreement(f"{what}: the cache says {actual!r}, expected is {expected!r}")


def holds(condition: object, what: str) -> None:
    """Raise Disagreement unless `condition` is true."""
    if not condition:
        raise Disagreement(what)


@dataclass(slots=True, kw_only=True)
class Live:
    """One live table. Tokens in [0, known) are known written, [written, len) wait for a step of the device."""

    table: PageTable
    namespace: str
    tokens: list[int]
    paths: NDArray[np.int64]
    page_ids: list[int]
    known: int
    written: int
    priority: int

    @property
    def waits(self) -> bool:
        """Whether tokens of this table wait for a step."""
        return self.written < len(self.tokens)

    @property
    def end(self) -> int:
        """The path of the whole sequence."""
        return int(self.paths[-1]) if self.tokens else namespace_path(self.namespace)


@dataclass(slots=True, kw_only=True)
class Expected:
    """The whole expected state; `totals` counts what the cache's statistics count since the start."""

    page_size: int
    tree: ReferenceTree
    device: Device
    tables: dict[int, Live] = field(default_factory=dict)
    pins: dict[int, tuple[Pin, list[int]]] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)

    def longest(self, namespace: str, tokens: list[int]) -> tuple[list[int], int]:
        """The cached full pages of `tokens` and how far the best page after them, cached or live, agrees.

        The page of a live table counts with what is known written of it, unless it waits for a copy.
        """
        paths, tail_len = self.tree.match(namespace, tokens)
        index, prefix_len = len(paths), len(paths) * self.page_size
        incomplete = {copy.dst for copy in self.device.copies()}
        for live in self.tables.values():
            tail = live.tokens[prefix_len : live.known] if live.known < prefix_len + self.page_size else []
            if tail and live.namespace == namespace and live.page_ids[index] not in incomplete:
                same = not paths or int(live.paths[prefix_len - 1]) == paths[-1]
                tail_len = max(tail_len, agreement(tail, tokens[prefix_len:]) if same else 0)
        return [self.tree.pages[path].page for path in paths], tail_len

    def held(self) -> set[int]:
        """The pages that a table, a pin or a copy holds."""
        return {page for page_ids in self._holders() for page in page_ids}

    def pinned(self) -> set[int]:
        """The pages that a pin holds."""
        return {page for _, page_ids in self.pins.values() for page in page_ids}

    def need(self, live: Live, seq_len: int, shared_len: int) -> tuple[int, range, bool]:
        """How many pages an extend to `seq_len` allocates, which it takes from its leader, whether it copies one."""
        has = len(live.page_ids)
        shared = range(has, max(has, shared_len // self.page_size))
        copies = len(live.tokens) % self.page_size > 0 and seq_len > len(live.tokens) and self._shares_last(live)
        return -(-seq_len // self.page_size) - has - len(shared) + copies, shared, copies

    def _shares_last(self, live: Live) -> bool:
        last = live.page_ids[-1]
        others = (other for other in self.tables.values() if other is not live)
        return last in self.tree.owner or any(last in other.page_ids for other in others)

    def _holders(self) -> list[list[int]]:
        tables = [live.page_ids for live in self.tables.values()]
        copies = [[copy.src, copy.dst] for copy in self.device.copies()]
        return [*tables, *(page_ids for _, page_ids in self.pins.values()), *copies]

    # The audit --------------------------------------------------------------------------------------------------

    def audit(self, cache: RadixCache) -> None:
        """Compare everything: the cache's own check, counts, statistics, and what each slot holds."""
        cache.check()
        self._audit_counts(cache)
        self._audit_stats(cache)
        memory = self.device.settled()
        for page in self.tree.pages.values():
            equal(cache.tree.priority[page.page], page.priority, f"priority of page {page.page}")
            equal(memory[page.page, : len(page.paths)].tolist(), page.paths.tolist(), f"content of page {page.page}")
        for live in self.tables.values():
            self.audit_table(live, memory)

    def audit_table(self, live: Live, memory: NDArray[np.int64]) -> None:
        """Compare one table with what is expected of it, and its written tokens with `memory`."""
        table = live.table
        equal((table.namespace, table.closed), (live.namespace, False), "namespace, closed")
        equal((table.seq_len, table.written_len), (len(live.tokens), live.known), "seq_len, written_len")
        equal(table.tokens.tolist(), live.tokens, "tokens of a table")
        equal(table.page_ids.tolist(), live.page_ids, "pages of a table")
        content, paths = memory[live.page_ids].reshape(-1)[: live.written], live.paths[: live.written]
        holds(np.array_equal(content, paths), f"a table on pages {live.page_ids} reads other tokens than it wrote")

    def _audit_counts(self, cache: RadixCache) -> None:
        refs = np.zeros_like(cache.pool.refs)
        refs[list(self.tree.owner)] += 1
        for page_ids in self._holders():
            refs[page_ids] += 1
        equal(cache.pool.refs.tolist(), refs.tolist(), "reference counts")
        free = np.flatnonzero(refs[1:] == 0) + 1
        equal(cache.num_free, len(free), "num_free")
        holds(self.device.is_poisoned(free), "a page became free without on_free")

    def _audit_stats(self, cache: RadixCache) -> None:
        stats, held = cache.stats(), self.held()
        expected = {
            "num_pages": cache.num_pages,
            "page_size": self.page_size,
            "num_free": cache.num_free,
            "num_cached": len(self.tree.pages),
            "num_evictable": self.tree.evictable(held),
            "num_held": len(held & self.tree.owner.keys()),
            "num_tables": len(self.tables),
            "num_pins": len(self.pins),
            "num_pinned": len(self.pinned()),
            "policy": self.tree.policy.name,
            "num_copies": len(self.device.copies()),
            "num_leaves": self.tree.num_leaves(),
        }
        for name, value in (*expected.items(), *self.totals.items()):
            equal(getattr(stats, name), value, name)
        equal(cache.num_evictable, stats.num_evictable, "num_evictable")
        holds(stats.num_nodes <= 2 * stats.num_leaves + stats.num_namespaces, f"nodes did not merge: {stats}")
