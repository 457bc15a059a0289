"""A RadixCache under test: recorded operations, each compared with what is expected, over a simulated device.

Does not know who chooses the operations: a Hypothesis machine, a seeded driver or a recorded file.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from ._device import Device
from ._expected import Disagreement, Expected, Live, equal, holds
from ._ranking import ReferencePolicy
from ._reference import ReferenceTree, agreement, follow, namespace_path
from .cache import RadixCache
from .errors import CacheError, ClosedTable, LiveTables
from .policy import Duel
from .table import PageTable
from .values import Match, PageCopy, WritePlan

P = ParamSpec("P")
R = TypeVar("R")
OPERATIONS: set[str] = set()
NUM_RECENT = 24
DUEL_INTERVAL = 5  # requests between two looks at the shadows: short runs should see the ranking change


def operation(method: Callable[Concatenate["Simulation", P], R]) -> Callable[Concatenate["Simulation", P], R]:
    """Record a call, whose arguments are keywords, and afterwards check what it touched, or everything when due."""
    OPERATIONS.add(method.__name__)

    @wraps(method)
    def recorded(self: "Simulation", /, *args: P.args, **arguments: P.kwargs) -> R:
        self.operations.append({"op": method.__name__, **arguments})
        self.freed.clear()
        self.now += 1
        result = method(self, *args, **arguments)
        handle = arguments.get("handle")
        if self.short or self.now % self.check_every == 0:
            self.check()
        elif isinstance(handle, int) and handle in self.tables:
            self.expected.audit_table(self.tables[handle], self.device.settled())
        return result

    return recorded


@contextmanager
def failing_alloc(cache: RadixCache, fail_at: int) -> Iterator[list[int]]:
    """While this lasts, the `fail_at`-th allocation of the cache's pool finds nothing; yields the sizes refused."""
    alloc, calls = cache.pool.alloc, count(1)
    refused: list[int] = []

    def failing(num_pages: int) -> NDArray[np.int32] | None:
        if next(calls) != fail_at:
            return alloc(num_pages)
        refused.append(num_pages)
        return None

    with patch.object(cache.pool, "alloc", failing):
        yield refused


class Simulation:
    """Every public operation of a cache, each compared with `Expected` and with a memory whose slots hold paths.

    Tables and pins are named by the number they got when opened. With `check_every=n` the whole state is compared
    after every n-th operation and every shortage only; in between, just the table that was touched. `make_cache` is
    the class under test, such as a subclass of your own. `policy` is what is to rank pages for eviction.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        policy: str = "lru",
        num_host_pages: int = 0,
        check_every: int = 1,
        make_cache: Callable[..., RadixCache] = RadixCache,
    ) -> None:
        sizes = {"num_pages": num_pages, "page_size": page_size, "num_host_pages": num_host_pages}
        self.max_pinned = num_pages // 2
        self.cache = make_cache(
            **sizes,
            policy=_duel(num_pages + num_host_pages, page_size) if policy == "duel" else policy,
            max_pinned=self.max_pinned,
            on_free=self._on_free,
        )
        self.device = Device(num_pages=num_pages + num_host_pages, page_size=page_size)
        self.page_size, self.num_pages, self.num_host_pages = page_size, num_pages, num_host_pages
        self.policy, self.check_every = policy, check_every
        self.expected = Expected(page_size=page_size, tree=self._new_tree(), device=self.device)
        self.tables, self.pins = self.expected.tables, self.expected.pins
        self.operations: list[dict[str, Any]] = [{"op": "start", **sizes, "policy": policy}]
        self.recent: list[tuple[str, list[int]]] = [("", [])]
        self.freed: list[int] = []
        self.now = 0
        self.short = False
        self._closed: PageTable | None = None
        self._publishing = False
        self._names = count(1)

    # Look-ups ---------------------------------------------------------------------------------------------------

    @operation
    def match(self, *, namespace: str, tokens: list[int]) -> None:
        """match, peek and explain: the longest agreement, and nothing changes."""
        before = self.snapshot()
        longest = self.expected.longest(namespace, tokens)
        match = self.cache.match(tokens, namespace=namespace)
        prefix_len, num_host = len(longest.page_ids) * self.page_size, len(longest.host_ids)
        equal(match.page_ids.tolist(), longest.page_ids, "match.page_ids")
        holds(match.tail_len in longest.tail_lens, f"match.tail_len {match.tail_len} is not in {longest.tail_lens}")
        equal((match.prefix_len, match.length), (prefix_len, prefix_len + match.tail_len), "match")
        equal(match.tail_page is None, match.tail_len == 0, "match.tail_page is None")
        equal(match.length + match.host_len, longest.total_len, "match.length + match.host_len")
        equal(bool(len(match.host_ids)), match.host_len > 0, "match.host_ids, where there is match.host_len")
        if match.host_len:
            equal(match.host_ids[:num_host].tolist(), longest.host_ids, "match.host_ids")
            num_pages = -(-longest.total_len // self.page_size) - len(longest.page_ids)
            equal(len(match.host_ids), num_pages, "length of match.host_ids")
            holds(match.host_ids.min() > self.num_pages, f"match.host_ids {match.host_ids} has device pages")
        self._content(namespace, tokens[: match.length], match.page_ids.tolist(), match.tail_page)
        if match.host_len:
            whole = tokens[: longest.total_len]
            self._content(namespace, whole, [*match.page_ids.tolist(), *match.host_ids.tolist()], None)
        equal(self.cache.peek(tokens, namespace=namespace), match.length, "peek")
        self._explain(namespace, tokens, match)
        equal(self.snapshot(), before, "snapshot after look-ups")

    def _content(self, namespace: str, tokens: list[int], page_ids: list[int], tail_page: int | None) -> None:
        pages = page_ids if tail_page is None else [*page_ids, tail_page]
        content = self.device.settled()[pages].reshape(-1)[: len(tokens)]
        equal(content.tolist(), follow(namespace_path(namespace), tokens).tolist(), "content of a match")

    def _explain(self, namespace: str, tokens: list[int], match: Match) -> None:
        explanation, stop = self.cache.explain(tokens, namespace=namespace), match.length + match.host_len
        equal((explanation.matched, explanation.host_len), (match.length, match.host_len), "explain.matched, host_len")
        if explanation.diverged_at is not None:
            equal((explanation.diverged_at, explanation.got), (stop, tokens[stop]), "explain.diverged_at, got")
            if explanation.expected is None:
                raise Disagreement("explain names a divergence without the token that was there")
            longest = self.expected.longest(namespace, [*tokens[:stop], explanation.expected])
            equal(longest.total_len, stop + 1, "what is cached of explain.expected")
        known = (None, "evict", "extend", "drop", "swap_out", "swap_in")
        holds(explanation.evicted_by in known, f"explain.evicted_by: {explanation.evicted_by}")

    # Tables -----------------------------------------------------------------------------------------------------

    @operation
    def open(self, *, namespace: str, tokens: list[int], label: str = "", priority: int = 0) -> int:
        """Open a table; the number that names it from now on."""
        longest, tree = self.expected.longest(namespace, tokens), self.expected.tree
        page_ids, paths = longest.page_ids, follow(namespace_path(namespace), tokens)
        touched = tree.match(namespace, tokens)[: len(page_ids)]
        tree.policy.ask(paths[self.page_size - 1 :: self.page_size].tolist())
        table = self.cache.open(tokens, namespace=namespace, label=label, priority=priority)
        length, tail_len = table.seq_len, table.seq_len - len(page_ids) * self.page_size
        holds(tail_len in longest.tail_lens, f"open: a tail of {tail_len} tokens is not in {longest.tail_lens}")
        equal((table.label, table.priority), (label, priority), "open: label, priority")
        equal(table.page_ids[: len(page_ids)].tolist(), page_ids, "open: full pages")
        tail_path = tree.owner.get(int(table.page_ids[-1])) if tail_len else None
        tree.use(touched if tail_path is None else [*touched, tail_path], self.now, priority)
        self.expected.totals.update(opened=1, opened_tokens=len(tokens), hit_tokens=length)
        for index, page in enumerate(table.page_ids.tolist()):
            if page in self.expected.came_back:
                self.expected.came_back.remove(page)
                self.expected.totals["host_hit_tokens"] += min(self.page_size, length - index * self.page_size)
        self._remember(namespace, tokens)
        return self._adopt(
            Live(
                table=table,
                namespace=namespace,
                tokens=tokens[:length],
                paths=paths[:length],
                page_ids=table.page_ids.tolist(),
                known=length,
                written=length,
                priority=priority,
                borrows=tail_len > 0,
            )
        )

    @operation
    def extend(self, *, handle: int, tokens: list[int], leader: int | None = None, fail_at: int = 0) -> bool:
        """Extend a table, beside `leader` if the same step writes it; whether there was room.

        With `fail_at` > 0 the n-th allocation from now on finds nothing, where no eviction is needed.
        """
        live, first = self.tables[handle], self._leader(leader, handle)
        result = [*live.tokens, *tokens]
        shared_len = agreement(first.tokens, result) if first is not None else 0
        need, shared, copies = self.expected.need(live, len(result), shared_len)
        free, held = self.cache.num_free, self.expected.held()
        possible = need <= free + self.expected.tree.evictable(held, self.expected.moving())
        before = None if possible and not fail_at else self.snapshot()
        with failing_alloc(self.cache, fail_at if need <= free else 0) as refused:
            chief = first.table if first is not None else None
            plan = self.cache.extend(live.table, tokens, leader=chief, shared_len=shared_len, by="extend")
        if plan is None:
            holds(refused or not possible, f"extend found no room for {need} pages; there was")
            equal(self.snapshot(), before, "snapshot after an extend that found no room")
            self.short = True
            return False
        holds(possible and not refused, f"extend found room for {need} pages; there was none")
        self._evict_expected(need - free, held)
        self._check_plan(plan, live, len(result), num_copies=int(copies))
        page_ids, kept = live.table.page_ids.tolist(), len(live.page_ids) - copies
        equal(page_ids[:kept], live.page_ids[:kept], "extend: the pages before")
        if first is not None:
            equal([page_ids[i] for i in shared], [first.page_ids[i] for i in shared], "extend: pages of the leader")
        live.paths = np.concatenate([live.paths, follow(live.end, tokens)])
        live.tokens, live.page_ids, live.borrows = result, page_ids, live.borrows and not tokens
        self._remember(live.namespace, result)
        return True

    def _leader(self, leader: int | None, follower: int) -> Live | None:
        """The leader, if what it could share is written by the step to come: none of it is in the tree already."""
        if leader is None or leader == follower or leader not in self.tables:
            return None
        first, live = self.tables[leader], self.tables[follower]
        fresh = first.waits and first.written < (len(live.page_ids) + 1) * self.page_size
        return first if fresh and first.namespace == live.namespace else None

    def _check_plan(self, plan: WritePlan, live: Live, seq_len: int, *, num_copies: int) -> None:
        equal((plan.start, plan.stop), (len(live.tokens), seq_len), "plan.start, plan.stop")
        equal(len(plan.copies), num_copies, "copies in the plan")
        origins = {copy.dst: copy.src for copy in self.device.copies()}
        for copy in plan.copies:
            src, dst = live.page_ids[-1], int(live.table.page_ids[len(live.page_ids) - 1])
            expected = (origins.get(src, src), dst, len(live.tokens) % self.page_size)
            equal((copy.src, copy.dst, copy.num_tokens), expected, "copy.src, dst, num_tokens")
        self.expected.totals["reused_copies" if live.borrows else "forked_copies"] += num_copies
        if num_copies:
            self.device.planned.append(plan)
        else:
            self.cache.copies_done(plan)

    @operation
    def publish(self, *, handle: int, tail: bool) -> None:
        """Run the device, then publish what it wrote; refused while the table waits for a copy."""
        live = self.tables[handle]
        if {copy.dst for copy in self.device.copies()} & set(live.page_ids[live.known // self.page_size :]):
            self._refused(CacheError, lambda: self.cache.publish(live.table, tail=tail))
        self._run_device()
        pages = self.expected.tree.publish(
            live.namespace,
            live.tokens,
            live.page_ids,
            self.now,
            start=live.known // self.page_size,
            tail=tail,
            priority=live.priority,
        )
        self._publishing = True
        self.cache.publish(live.table, tail=tail)
        self._publishing = False
        equal(live.table.page_ids.tolist(), pages, "pages after publish")
        live.page_ids, live.known = pages, len(live.tokens)

    @operation
    def fork(self, *, handle: int) -> int:
        """Fork a table; the number of the child."""
        live = self.tables[handle]
        table = self.cache.fork(live.table)
        equal((table.label, table.priority), (live.table.label, live.priority), "label and priority of a fork")
        return self._adopt(replace(live, table=table, page_ids=list(live.page_ids)))

    @operation
    def truncate(self, *, handle: int, seq_len: int) -> None:
        """Cut a table; past its end is refused."""
        live = self.tables[handle]
        if seq_len > len(live.tokens):
            self._refused(CacheError, lambda: self.cache.truncate(live.table, seq_len))
            return
        self.cache.truncate(live.table, seq_len)
        live.tokens, live.paths = live.tokens[:seq_len], live.paths[:seq_len]
        num_pages = -(-seq_len // self.page_size)
        live.borrows = live.borrows and num_pages == len(live.page_ids)
        live.page_ids = live.page_ids[:num_pages]
        live.known, live.written = min(live.known, seq_len), min(live.written, seq_len)

    @operation
    def close(self, *, handle: int) -> None:
        """Close a table."""
        live = self.tables.pop(handle)
        self.cache.close(live.table)
        holds(live.table.closed, "a table is open after close")
        self._closed = live.table

    @operation
    def use_closed(self) -> None:
        """Whatever one does with the table closed last is refused, closing it above all."""
        if (table := self._closed) is not None:
            cache = self.cache
            self._refused(ClosedTable, lambda: cache.close(table))
            self._refused(ClosedTable, lambda: cache.fork(table))
            self._refused(ClosedTable, lambda: cache.extend(table, [0]))
            self._refused(ClosedTable, lambda: cache.truncate(table, 0))
            self._refused(ClosedTable, lambda: cache.publish(table))

    # The device -------------------------------------------------------------------------------------------------

    @operation
    def step(self) -> None:
        """The device's turn: planned copies, their confirmation, then every waiting write."""
        self._run_device()

    @operation
    def copy(self) -> None:
        """The device runs the planned copies and has not told yet."""
        self.device.run_copies()

    @operation
    def confirm(self) -> None:
        """The device tells of the oldest copy it ran, and once more, which is refused."""
        if self.device.unconfirmed:
            plan = self.device.unconfirmed.pop(0)
            self.cache.copies_done(plan)
            self._refused(CacheError, lambda: self.cache.copies_done(plan))

    def _run_device(self) -> None:
        self.device.run_copies()
        while self.device.unconfirmed:
            self.cache.copies_done(self.device.unconfirmed.pop(0))
        for live in self.tables.values():
            if live.waits:
                self._may_write(live)
                self.device.write(live.page_ids, live.written, live.paths[live.written :])
                live.written = len(live.tokens)

    def _may_write(self, live: Live) -> None:
        """No page of the tree is written, and no slot that means something else to another table."""
        for index in range(live.written // self.page_size, len(live.page_ids)):
            page = live.page_ids[index]
            holds(page not in self.expected.tree.owner, f"page {page} of the tree is written")
            holds(page not in self.device.named(), f"page {page} is written while a copy names it")
            start, stop = max(live.written, index * self.page_size), (index + 1) * self.page_size
            for other in self.tables.values():
                if other is not live and page in other.page_ids:
                    theirs = other.paths[start:stop]
                    ours = live.paths[start : min(stop, start + len(theirs))]
                    holds(np.array_equal(ours, theirs[: len(ours)]), f"two tables write to page {page}")

    def _on_free(self, page_ids: NDArray[np.int32]) -> None:
        freed = set(page_ids.tolist())
        equal(freed & self.device.named(), set(), "pages freed while a copy names them")
        if self._publishing:
            listed = {page for live in self.tables.values() for page in live.table.page_ids.tolist()}
            equal(freed & listed, set(), "pages freed before the table that lists them was re-pointed")
        self.freed.extend(page_ids.tolist())
        self.expected.came_back -= freed
        self.device.poison(freed)

    # Between device and host -------------------------------------------------------------------------------------

    def swapped(self) -> list[tuple[str, list[int]]]:
        """The recent sequences of which a part is in host memory, or all recent ones."""
        found = [(name, tokens) for name, tokens in self.recent if self.cache.match(tokens, name).host_len]
        return found or self.recent

    @operation
    def swap_out(self, *, num_pages: int, keep: tuple[str, list[int]] | None = None) -> None:
        """Begin to swap out; the coldest pages, as many as find a host page, for which the coldest are dropped.

        Nothing of the sequence `keep`, a namespace and tokens, is among either.
        """
        tree, held = self.expected.tree, self.expected.held()
        num_free = self.cache.pool.num_free_host
        match = None if keep is None else self.cache.match(keep[1], keep[0])
        if match is not None:
            held |= {*match.page_ids.tolist(), *match.host_ids.tolist()}
        copies = self.cache.swap_out(num_pages, by="swap_out", keep=match)
        src = tree.coldest(num_pages, held, [copy.src for copy in copies])
        dropped = tree.evict_host(max(0, len(src) - num_free), held, self.freed)
        self._dropped(dropped)
        self.device.swaps += copies
        num_possible = num_free + len(dropped)
        equal([copy.src for copy in copies], src[:num_possible], "pages that swap out")
        holds(all(tree.is_host(copy.dst) for copy in copies), "a page swaps out to the device")
        self._check_swaps(copies)

    @operation
    def swap_in(self, *, namespace: str, tokens: list[int], max_pages: int | None) -> None:
        """Begin to swap in; the first pages of the path that are in host memory and not under way, or none at all."""
        tree, held = self.expected.tree, self.expected.held()
        match = self.cache.match(tokens, namespace=namespace)
        src = [page for page in match.host_ids.tolist()[:max_pages] if page not in self.device.named()]
        touched = [*match.page_ids.tolist(), *match.host_ids.tolist()[:max_pages]]
        held |= set(match.page_ids.tolist())
        num_missing = len(src) - self.cache.num_free
        moving = [page for page in self.expected.moving() if page not in match.page_ids]
        possible = num_missing <= tree.evictable(held, moving)
        before = self.snapshot()
        copies = self.cache.swap_in(tokens, namespace, max_pages, by="swap_in")
        if copies is None:
            holds(not possible, f"swap_in found no room for {len(src)} pages; there was")
            equal(self.snapshot(), before, "snapshot after a swap_in that found no room")
            return
        holds(possible, f"swap_in found room for {len(src)} pages; there was none")
        equal([copy.src for copy in copies], src, "pages that swap in")
        self._evict_expected(num_missing, held, moving)
        self.device.swaps += copies
        if src:
            tree.use([tree.owner[page] for page in touched], self.now)
        self._check_swaps(copies)

    def _check_swaps(self, copies: tuple[PageCopy, ...]) -> None:
        dst = [copy.dst for copy in copies]
        equal(len({*dst}), len(dst), "distinct destinations")
        holds(not {*dst} & self.expected.tree.owner.keys(), f"swaps to pages {dst} of the tree")
        equal({copy.num_tokens for copy in copies} - {self.page_size}, set(), "tokens in a swap")

    @operation
    def end_swaps(self, *, first: int, count: int, failed: bool) -> None:
        """Some of the copies end, in any order, well or not; telling it twice is refused."""
        copies = tuple(self.device.swaps[first : first + count])
        self.device.end_swaps(copies, failed=failed)
        if failed:
            self.cache.swaps_failed(copies)
        else:
            self.cache.swaps_done(copies)
        tree = self.expected.tree
        for copy in copies:
            moves = not failed and copy.src not in self.expected.held() and tree.move(copy.src, copy.dst)
            if moves:
                self.expected.totals["swapped_out" if tree.is_host(copy.dst) else "swapped_in"] += 1
                self.expected.came_back |= set() if tree.is_host(copy.dst) else {copy.dst}
            holds((copy.src if moves else copy.dst) in self.freed, f"a page of {copy} is not free after it ended")
        if copies:
            self._refused(CacheError, lambda: self.cache.swaps_done(copies))

    # The whole cache --------------------------------------------------------------------------------------------

    @operation
    def evict(self, *, num_pages: int) -> None:
        """Evict; exactly as many as asked or possible, the coldest first."""
        held = self.expected.held()
        expected = min(num_pages, self.expected.tree.evictable(held, self.expected.moving()))
        equal(self.cache.evict(num_pages, by="evict"), expected, f"pages evicted of {num_pages}")
        self._evict_expected(expected, held)

    def _evict_expected(self, num_pages: int, held: set[int], moving: list[int] | None = None) -> None:
        """Take from the expected tree what was to be evicted, and compare it with the pages that became free."""
        moving = self.expected.moving() if moving is None else moving
        evicted = self.expected.tree.evict(max(0, num_pages), held, moving, self.freed)
        self._dropped(evicted)
        self.short = self.short or bool(evicted)

    def _dropped(self, page_ids: list[int]) -> None:
        """These pages left the tree: they are free, unless a swap names them."""
        equal(sorted(self.freed), sorted(set(page_ids) - self.device.named()), "pages evicted")
        num_host = sum(map(self.expected.tree.is_host, page_ids))
        self.expected.totals.update(evicted_pages=len(page_ids) - num_host, evicted_host_pages=num_host)

    @operation
    def drop(self, *, namespace: str, tokens: list[int], keep_len: int) -> None:
        """Drop what is cached of `tokens` past `keep_len`; past their end is refused."""
        if keep_len > len(tokens):
            self._refused(CacheError, lambda: self.cache.drop(tokens, keep_len, namespace))
            return
        dropped = self.expected.tree.drop(namespace, tokens, keep_len, self.expected.held_but_for_swaps())
        equal(self.cache.drop(tokens, keep_len, namespace), len(dropped), "number of pages dropped")
        equal(sorted(self.freed), sorted(set(dropped) - self.device.named()), "pages dropped")
        self.expected.totals["dropped_pages"] += len(dropped)

    @operation
    def pin(self, *, namespace: str, tokens: list[int]) -> int | None:
        """Pin the full pages of `tokens`; the number of the pin, None if pins would hold too many pages."""
        page_ids = self.expected.longest(namespace, tokens).page_ids
        before = self.snapshot()
        pin = self.cache.pin(tokens, namespace=namespace)
        if len(self.expected.pinned() | set(page_ids)) > self.max_pinned:
            equal((pin, self.snapshot()), (None, before), "a pin over the budget, snapshot after it")
            return None
        if pin is None:
            raise Disagreement("a pin within the budget was refused")
        equal(pin.prefix_len, len(page_ids) * self.page_size, "pin.prefix_len")
        name = next(self._names)
        self.pins[name] = (pin, page_ids)
        return name

    @operation
    def unpin(self, *, pin: int) -> None:
        """Unpin, and once more, which is refused."""
        held, _ = self.pins.pop(pin)
        self.cache.unpin(held)
        self._refused(ClosedTable, lambda: self.cache.unpin(held))

    @operation
    def reset(self) -> None:
        """Reset; refused while anything lives."""
        if self.tables or self.pins or self.device.named():
            self._refused(LiveTables, self.cache.reset)
            return
        self.cache.reset()
        self.expected.tree = self._new_tree()
        equal(self.cache.num_free, self.num_pages, "free pages after reset")

    def finish(self) -> None:
        """End everything: all pages are free or cached; then reset: all are free."""
        self.step()
        if self.device.swaps:
            self.end_swaps(first=0, count=len(self.device.swaps), failed=False)
        for pin in list(self.pins):
            self.unpin(pin=pin)
        for handle in list(self.tables):
            self.close(handle=handle)
        self.check()
        stats = self.cache.stats()
        equal(stats.num_free + stats.num_cached, self.num_pages, "free and cached pages at the end")
        self.reset()
        self.check()

    # State ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the whole state."""
        self.short = False
        self.expected.audit(self.cache)

    def snapshot(self) -> object:
        """Everything that must be as before where nothing may change, the shape of the tree and its heats included."""
        nodes = [
            (node.id, node.start, node.rank, node.host_rank, node.tokens.view.tolist(), node.pages.view.tolist())
            for node in self.cache.tree.nodes.values()
        ]
        heats = [self.cache.tree.policy.heat(page) for page in self.expected.tree.owner]
        tables = [
            (t.seq_len, t.written_len, t.num_tree_pages, t.closed, t.tokens.tolist(), t.page_ids.tolist())
            for t in (live.table for live in self.tables.values())
        ]
        return (
            self.cache.stats(),
            list(self.cache.swaps),
            self.cache.pool.refs.tolist(),
            self.cache.pool.free_pages().tolist(),
            nodes,
            heats,
            tables,
        )

    def save(self, path: Path) -> None:
        """Write the operations so far as JSON lines, for `replay_operations`."""
        path.write_text("".join(json.dumps(entry) + "\n" for entry in self.operations))

    def _refused(self, error: type[Exception], misuse: Callable[[], object]) -> None:
        before = self.snapshot()
        try:
            misuse()
        except error:
            equal(self.snapshot(), before, f"snapshot after {error.__name__}")
            return
        raise Disagreement(f"a misuse went through that should raise {error.__name__}")

    def _adopt(self, live: Live) -> int:
        name = next(self._names)
        self.tables[name] = live
        return name

    def _new_tree(self) -> ReferenceTree:
        num_pages = self.num_pages + self.num_host_pages
        policy = ReferencePolicy(self.policy, num_pages=num_pages, interval=DUEL_INTERVAL)
        return ReferenceTree(self.page_size, self.num_pages, policy)

    def _remember(self, namespace: str, tokens: list[int]) -> None:
        self.recent.append((namespace, tokens))
        del self.recent[:-NUM_RECENT]


def _duel(num_pages: int, page_size: int) -> Duel:
    return Duel(num_pages=num_pages, page_size=page_size, interval=DUEL_INTERVAL)
