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
    borrows: bool  # its last page is a partly filled one that it found

    @property
    def waits(self) -> bool:
        """Whether tokens of this table wait for a step."""
        return self.written < len(self.tokens)

    @property
    def end(self) -> int:
        """The path of the whole sequence."""
        return int(self.paths[-1]) if self.tokens else namespace_path(self.namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class Longest:
    """What of a sequence is cached: full device pages, how far a page after them may agree (there may be several equal
    ones, of which the cache finds one), the full host pages after them, and the tokens in both memories."""

    page_ids: list[int]
    tail_lens: set[int]
    host_ids: list[int]
    total_len: int


@dataclass(slots=True, kw_only=True)
class Expected:
    """The whole expected state; `totals` counts what the statistics count since the start."""

    page_size: int
    tree: ReferenceTree
    device: Device
    tables: dict[int, Live] = field(default_factory=dict)
    pins: dict[int, tuple[Pin, list[int]]] = field(default_factory=dict)
    totals: Counter[str] = field(default_factory=Counter)
    came_back: set[int] = field(default_factory=set)  # from host memory, and no table was opened on them since

    def longest(self, namespace: str, tokens: list[int]) -> Longest:
        """What is cached of `tokens`.

        The page of a live table counts with what is known written of it, unless it waits for a copy. A cached page in
        part counts for the device if none in host memory agrees further.
        """
        tree, size = self.tree, self.page_size
        paths = tree.match(namespace, tokens)
        pages = [tree.pages[path].page for path in paths]
        index = sum(not tree.is_host(page) for page in pages)
        live_len = self._live_tail(namespace, tokens, paths[:index])
        rest, after = tokens[len(paths) * size :], paths[-1] if paths else namespace_path(namespace)
        agreed = {False: 0, True: 0}  # by whether it is in host memory
        for child in tree.children(after):
            is_host = tree.is_host(child.page)
            agreed[is_host] = max(agreed[is_host], agreement(child.tokens, rest))
        tail_lens = {live_len} if index < len(paths) or agreed[True] >= agreed[False] else set()
        if index == len(paths) and agreed[False] >= agreed[True]:
            tail_lens.add(max(live_len, agreed[False]))
        total_len = max(len(paths) * size + max(agreed.values()), index * size + live_len)
        return Longest(page_ids=pages[:index], tail_lens=tail_lens, host_ids=pages[index:], total_len=total_len)

    def _live_tail(self, namespace: str, tokens: list[int], paths: list[int]) -> int:
        """How far the written part of a live table's last page agrees, where it follows the pages of `paths`."""
        best, index, prefix_len = 0, len(paths), len(paths) * self.page_size
        incomplete = {copy.dst for copy in self.device.copies()}
        for live in self.tables.values():
            tail = live.tokens[prefix_len : live.known] if live.known < prefix_len + self.page_size else []
            if tail and live.namespace == namespace and live.page_ids[index] not in incomplete:
                same = not paths or int(live.paths[prefix_len - 1]) == paths[-1]
                best = max(best, agreement(tail, tokens[prefix_len:]) if same else 0)
        return best

    def held(self) -> set[int]:
        """The pages that a table, a pin or a copy holds."""
        return {page for page_ids in self._holders() for page in page_ids}

    def held_but_for_swaps(self) -> set[int]:
        """The pages that a table, a pin or a copy on the device holds."""
        return {page for page_ids in self._users() for page in page_ids}

    def pinned(self) -> set[int]:
        """The pages that a pin holds."""
        return {page for _, page_ids in self.pins.values() for page in page_ids}

    def moving(self) -> list[int]:
        """The device pages that only the tree and a copy to the host hold, in the order of the copies."""
        held = Counter(page for page_ids in self._holders() for page in page_ids)
        return [copy.src for copy in self.device.swaps if held[copy.src] == 1 and not self.tree.is_host(copy.src)]

    def need(self, live: Live, seq_len: int, shared_len: int) -> tuple[int, range, bool]:
        """How many pages an extend to `seq_len` allocates, which it takes from its leader, whether it copies one."""
        has = len(live.page_ids)
        shared = range(has, max(has, shared_len // self.page_size))
        copies = len(live.tokens) % self.page_size > 0 and seq_len > len(live.tokens) and self._shares_last(live)
        return -(-seq_len // self.page_size) - has - len(shared) + copies, shared, copies

    def _shares_last(self, live: Live) -> bool:
        """Others read its last page. A swap does too, at any time; a copy on the device runs before the writes."""
        last = live.page_ids[-1]
        others = [other.page_ids for other in self.tables.values() if other is not live]
        swaps = [(copy.src, copy.dst) for copy in self.device.swaps]
        return last in self.tree.owner or any(last in page_ids for page_ids in [*others, *swaps])

    def _holders(self) -> list[list[int]]:
        return [*self._users(), *([copy.src, copy.dst] for copy in self.device.swaps)]

    def _users(self) -> list[list[int]]:
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
        equal(cache.num_free, sum(free <= cache.num_pages), "num_free")
        holds(self.device.is_poisoned(free), "a page became free without on_free")

    def _audit_stats(self, cache: RadixCache) -> None:
        stats, held = cache.stats(), self.held()
        cached = {page for page in self.tree.owner if not self.tree.is_host(page)}
        swapping = {page for copy in self.device.swaps for page in (copy.src, copy.dst)}
        expected = {
            "num_pages": cache.num_pages,
            "page_size": self.page_size,
            "num_free": cache.num_free,
            "num_cached": len(cached),
            "num_evictable": self.tree.evictable(held, self.moving()),
            "num_held": len(held & cached),
            "num_active": len({page for page in held if not self.tree.is_host(page)} - swapping),
            "num_host_cached": len(self.tree.pages) - len(cached),
            "num_tables": len(self.tables),
            "num_pins": len(self.pins),
            "num_pinned": len(self.pinned()),
            "policy": self.tree.policy.name,
            "num_copies": len(self.device.copies()),
            "num_swaps": len(self.device.swaps),
            "num_leaves": self.tree.num_leaves(),
            "host_hit_tokens": self.totals["host_hit_tokens"],
        }
        for name, value in (*expected.items(), *self.totals.items()):
            equal(getattr(stats, name), value, name)
        equal(cache.num_evictable, stats.num_evictable, "num_evictable")
        holds(stats.num_nodes <= 2 * stats.num_leaves + stats.num_namespaces, f"nodes did not merge: {stats}")
