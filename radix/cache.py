"""The prefix cache: the only owner of page lifetimes, and the face the runtime uses.

Knows token ids and page ids; nothing of tensors, models or requests.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .audit import audit
from .copies import Copies
from .errors import CacheError, ClosedTable, LiveTables
from .explain import EvictionLedger
from .host import HostPages
from .lookup import Lookup
from .node import Node
from .policy import POLICIES, EvictionPolicy
from .pool import PagePool
from .room import Room
from .table import PageTable, Pin
from .tails import LiveTails
from .tokens import EMPTY, IntArray, Tokens, agreement, as_tokens
from .tree import RadixTree, Walk
from .values import CacheStats, Explanation, Match, PageCopy, WritePlan


class RadixCache:
    """Pages shared by prefix. `count(page) = [in the tree] + tables + pins + copies in flight that name it`.

    Pages `1..num_pages` lie on the device. The `num_host_pages` after them lie in host memory, a second tier for what
    is cached and cold: on any path device pages precede host pages, and tables and pins hold device pages alone.
    `swap_out` and `swap_in` begin moves between the two, `swaps_done` and `swaps_failed` end them, in any order.

    A step of the runtime: `extend` every sequence, run the plans' copies, `copies_done`, write, `publish`; on failure
    `truncate` back. Look-ups are pure, and every other operation happens wholly or not at all. Arguments named
    `tokens` are sequences of ids in `[0, 2**31)` (`InvalidTokens`); handles must be live and of this cache
    (`ClosedTable`). `on_free` hears of pages whenever they become free. `policy` names what makes a page cold (a key
    of `POLICIES`), or is it: then for the pages of both memories. Pins hold `max_pinned` pages at most, if that is
    given.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_host_pages: int = 0,
        policy: EvictionPolicy | str = "lru",
        max_pinned: int | None = None,
        on_free: Callable[[IntArray], None] | None = None,
    ) -> None:
        if page_size < 1:
            raise CacheError(f"a page holds at least one token, got page_size={page_size}")
        self.page_size = page_size
        self.pool = PagePool(num_pages, num_host_pages)
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise CacheError(f"no eviction policy {policy!r}; there are {', '.join(POLICIES)}")
            policy = POLICIES[policy](num_pages=num_pages + num_host_pages, page_size=page_size)
        self.tree = RadixTree(page_size=page_size, refs=self.pool.refs, policy=policy)
        self.tables: set[PageTable] = set()
        self.pins: set[Pin] = set()
        self.copies = Copies()
        self.swaps = Copies()
        self.tails = LiveTails()
        self._ledger = EvictionLedger(self.pool.generations)
        self._lookup = Lookup(self.tree, self.tails, self.copies, self._ledger)
        self._room = Room(
            pool=self.pool,
            tree=self.tree,
            tables=self.tables,
            copies=self.copies,
            swaps=self.swaps,
            ledger=self._ledger,
            on_free=self._freed,
        )
        self._host = HostPages(room=self._room, lookup=self._lookup, swaps=self.swaps, page_size=page_size)
        self._on_free = on_free
        self._max_pinned = max_pinned
        self._forked_copies = self._reused_copies = 0
        self._opened = self._opened_tokens = self._hit_tokens = self._host_hit_tokens = 0

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_host_pages(self) -> int:
        return self.pool.num_host_pages

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_evictable(self) -> int:
        """Device pages that `evict` could free now. O(num_pages), vectorised."""
        return self._room.num_evictable

    # Looking.

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """Return the longest cached prefix of `tokens`, whose tail may be in a live sequence's last page. Pure."""
        return self._lookup.match(as_tokens(tokens), namespace)

    def peek(self, tokens: Tokens, namespace: str = "") -> int:
        """Return how many leading tokens are cached. Pure."""
        return self._lookup.match(as_tokens(tokens), namespace).length

    def behind(self, tokens: Tokens, namespace: str = "") -> list[IntArray]:
        """Return every cached sequence that begins with these tokens, to its end. Pure.

        In both memories; without what live sequences have beyond their full pages. O(what it returns).
        """
        return self._lookup.behind(as_tokens(tokens), namespace)

    def explain(self, tokens: Tokens, namespace: str = "") -> Explanation:
        """Say how far `tokens` hit, what continues there instead, and whether the rest was evicted. Pure."""
        return self._lookup.explain(as_tokens(tokens), namespace)

    # A sequence's life.

    def open(
        self, tokens: Tokens, namespace: str = "", label: str = "", *, priority: int = 0, again: bool = False
    ) -> PageTable:
        """Start a sequence on the longest cached prefix of `tokens`; `seq_len` says how long that is.

        Warms the path, and raises what is cached of it, now and by `publish`, to `priority` (an int32): of the leaves
        that can be evicted the lowest priority goes first, then the coldest. A priority holds until its page is evicted
        or dropped; a later use by a lower one does not lower it. `again`: this sequence was open before, so it is no
        further request to the statistics and the policy.
        Allocates nothing: a partial tail page is borrowed, and copied by the first `extend`.
        """
        wanted = as_tokens(tokens)
        if not -(2**31) <= priority < 2**31:
            raise CacheError(f"a priority is an int32, got {priority}")
        if not again and self.tree.policy.ask(wanted, namespace):
            self.tree.order.sort()
        match = self._lookup.match(wanted, namespace)
        page_ids = match.page_ids
        if match.tail_page is not None:
            page_ids = np.append(page_ids, np.int32(match.tail_page))
        self.pool.retain(page_ids)
        self._room.tick()
        cached = page_ids[self.tree.owner[page_ids] > 0]  # all but a live sequence's tail
        self.tree.use(cached, priority=priority, now=self._room.now)
        if not again:
            self._count_request(len(wanted), page_ids, match.length)
        table = PageTable(
            namespace=namespace,
            label=label,
            priority=priority,
            page_size=self.page_size,
            tokens=wanted[: match.length],
            page_ids=page_ids,
            written_len=match.length,
            borrows=match.tail_page is not None,
        )
        return self._adopt(table)

    def extend(
        self, table: PageTable, tokens: Tokens, *, leader: PageTable | None = None, shared_len: int = 0, by: str = ""
    ) -> WritePlan | None:
        """Give `table` room for `tokens` after its end, evicting if short; None, and nothing changed, if it cannot.

        If the last page has room but others read it too, the table gets a copy of its own (`WritePlan.copies`); a sole
        owner writes in place. With a `leader`, a table that is written in the same step with the same tokens on
        `[0, shared_len)`, new full pages in that range are the leader's; what the leader has written in them is there
        already and is not to be written again. Evictions are put down to `by` or the label.
        """
        self._require_live(table)
        new = as_tokens(tokens)
        start, stop = table.seq_len, table.seq_len + len(new)
        shared = self._shared_pages(table, new, leader, shared_len)
        copies_last = self._copies_last(table, len(new))
        num_needed = self._num_needed(table, len(new), len(shared), copies_last=copies_last)
        fresh = self._room.alloc(num_needed, by or table.label)
        if fresh is None:
            return None
        copies: tuple[PageCopy, ...] = ()
        if copies_last:
            copies, fresh = (self._copy_last_page(table, int(fresh[0])),), fresh[1:]
        table.borrows = table.borrows and not len(new)
        self.pool.retain(shared)
        table.page_buffer.extend(shared)
        table.page_buffer.extend(fresh)
        table.token_buffer.extend(new)
        return WritePlan(start, stop, copies)

    def num_missing(self, table: PageTable, num_tokens: int, shared_len: int = 0) -> int:
        """Return how many pages `extend` by so many tokens would have to evict, with a leader's `shared_len`. Pure."""
        self._require_live(table)
        num_shared = max(0, shared_len // self.page_size - table.page_buffer.size)
        copies_last = self._copies_last(table, num_tokens)
        return max(0, self._num_needed(table, num_tokens, num_shared, copies_last=copies_last) - self.pool.num_free)

    def copies_done(self, plan: WritePlan) -> None:
        """The device has run the copies of `plan`: let go of their pages. Twice raises `CacheError`."""
        self.copies.finish(plan.copies)
        for copy in plan.copies:
            pages = np.array([copy.src, copy.dst], np.int32)
            self._room.release(pages)
            self._room.settle(pages)

    def publish(self, table: PageTable, *, tail: bool = False) -> None:
        """All of `table` is written: share its full pages, with `tail` the partly filled last one too.

        Where the tree has a page already, the table moves to that one, which is a use of it; a host page makes way for
        the table's. A shared tail is read-only: a later `extend` copies it. Costs O(new tokens + new nodes); the path
        before is not walked.
        """
        self._require_live(table)
        tokens, page_ids = table.token_buffer.view, table.page_buffer.view
        first = table.num_tree_pages
        pending = [page for page in page_ids[first:].tolist() if page in self.copies] if self.copies else []
        if pending:
            raise CacheError(f"pages {pending} wait for a copy: call copies_done before publish")
        stop = len(tokens) if tail else len(tokens) // self.page_size * self.page_size
        if stop > first * self.page_size:
            self._room.tick()
            walk = self.tree.walk(*self._cursor(table), tokens[:stop], first * self.page_size)
            home, index = first + walk.num_device, first + len(walk.page_ids)
            self._repoint(page_ids[first:home], walk.page_ids[: walk.num_device])
            self._host.bring_home(page_ids[home:index], walk.page_ids[walk.num_device :])
            self.tree.use(page_ids[first:index], priority=table.priority, now=self._room.now)
            self._give(table, walk, index, stop)
            self._room.settle(page_ids[max(len(tokens) // self.page_size - 1, 0) : len(tokens) // self.page_size + 1])
        table.written_len = len(tokens)
        self.tails.update(table)

    def truncate(self, table: PageTable, seq_len: int) -> None:
        """Keep the first `seq_len` tokens of `table` and let go of the pages past them. O(pages dropped)."""
        self._require_live(table)
        if not 0 <= seq_len <= table.seq_len:
            raise CacheError(f"cannot truncate to {seq_len} tokens: the table has {table.seq_len}")
        num_pages, last = -(-seq_len // self.page_size), table.num_tree_pages - 1
        dropped = table.page_buffer.view[num_pages:].copy()
        table.token_buffer.truncate(seq_len)
        table.page_buffer.truncate(num_pages)
        table.written_len = min(table.written_len, seq_len)
        table.borrows = table.borrows and not len(dropped)
        self.tails.update(table)
        self._room.release(dropped)
        self._room.settle(dropped[max(last - num_pages, 0) :])

    def fork(self, table: PageTable, label: str | None = None) -> PageTable:
        """Return a second table on the same pages, tokens and namespace, `label` kept unless given. O(pages)."""
        self._require_live(table)
        page_ids = table.page_buffer.view
        self.pool.retain(page_ids)
        child = PageTable(
            namespace=table.namespace,
            label=table.label if label is None else label,
            priority=table.priority,
            page_size=self.page_size,
            tokens=table.token_buffer.view,
            page_ids=page_ids,
            written_len=table.written_len,
            borrows=table.borrows,
        )
        return self._adopt(child)

    def close(self, table: PageTable) -> None:
        """End `table`: what it published stays cached, the rest becomes free. Twice raises `ClosedTable`."""
        self._require_live(table)
        page_ids, last = table.page_buffer.view, max(table.num_tree_pages - 1, 0)
        table.closed = True
        self.tables.remove(table)
        self.tails.update(table)
        self._room.release(page_ids)
        self._room.settle(page_ids[last:])
        table.page_buffer.truncate(0)

    # Keeping and letting go.

    def pin(self, tokens: Tokens, namespace: str = "") -> Pin | None:
        """Keep the cached full pages of `tokens` from eviction until `unpin`; `prefix_len` says how much that is.

        On the device: what lies in host memory is not pinned, since a pinned page stays in its place, and one that may
        come back to the device, or make way for a page that is published anew, cannot. `swap_in` it first.
        None, and nothing changed, if pins would then hold more than `max_pinned` pages, each counted once. How long a
        pin lives is for the caller, who has a clock, to say.
        """
        match = self._lookup.match(as_tokens(tokens), namespace)
        if self._max_pinned is not None and self._num_pinned(match.page_ids) > self._max_pinned:
            return None
        pin = Pin(match.page_ids, match.prefix_len)
        self.pool.retain(pin.page_ids)
        self.pins.add(pin)
        self._room.settle(pin.page_ids[-1:])
        return pin

    def unpin(self, pin: Pin) -> None:
        """End `pin`. Twice raises `ClosedTable`."""
        if pin not in self.pins:
            raise ClosedTable(f"the pin of {pin.prefix_len} tokens was unpinned before, or is not of this cache")
        pin.closed = True
        self.pins.remove(pin)
        self._room.release(pin.page_ids)
        self._room.settle(pin.page_ids[-1:])

    def evict(self, num_pages: int, by: str = "") -> int:
        """Free up to `num_pages` device pages, from the end of the coldest leaf; return how many it found. O(each).

        Host pages that continue them are dropped.
        """
        if num_pages < 0:
            raise CacheError(f"cannot evict {num_pages} pages")
        return self._room.evict(num_pages, by)

    def drop(self, tokens: Tokens, keep_len: int = 0, namespace: str = "", *, by: str = "drop") -> int:
        """Free what is cached of `tokens` past the first `keep_len`, which the caller will not use again.

        From the end, page by page in either memory, up to what somebody holds, another sequence continues, or holds a
        token to keep, unless another cached page begins with the same ones. Returns how many pages; `explain` puts them
        down to `by`. A copy between device and host is no obstacle: its page leaves the tree, and is free when the copy
        ends. O(path, vectorised).
        """
        wanted = as_tokens(tokens)
        if not 0 <= keep_len <= len(wanted):
            raise CacheError(f"cannot keep {keep_len} tokens: {len(wanted)} were given")
        doomed, num_kept = self._lookup.path(wanted, namespace)[keep_len // self.page_size :], keep_len % self.page_size
        if num_kept and len(doomed) and not self.tree.has_like(int(doomed[0]), num_kept):
            doomed = doomed[1:]
        return self._room.drop(doomed, by)

    def reset(self) -> None:
        """Forget everything cached. Raises `LiveTables` while tables, pins or copies live."""
        if self.tables or self.pins or self.copies or self.swaps:
            num_copies = len(self.copies) + len(self.swaps)
            live = f"{len(self.tables)} tables, {len(self.pins)} pins and {num_copies} copies"
            raise LiveTables(f"cannot reset: {live} live; close, unpin and finish them first")
        self._ledger.clear()
        self._room.release(self.tree.clear())

    # Between device and host.

    def swap_out(self, num_pages: int, by: str = "", *, keep: Match | None = None) -> tuple[PageCopy, ...]:
        """Begin to move up to `num_pages` cached pages to host memory: those that `evict` would take first.

        What `keep` names stays where it is, in both memories: a match since which nothing has changed.

        The copies hold both their pages, and the device page stays matchable, until `swaps_done` or `swaps_failed`.
        Finished in their order they all take effect. They are fewer where colder pages are under way or host pages are:
        where none is free the coldest are dropped, put down to `by`. Pages before one that is under way have to wait;
        an eviction that finds nothing else goes past it, and the copy is in vain.
        """
        if num_pages < 0:
            raise CacheError(f"cannot swap out {num_pages} pages")
        return self._host.swap_out(num_pages, by, keep)

    def swap_in(
        self, tokens: Tokens, namespace: str = "", max_pages: int | None = None, by: str = ""
    ) -> tuple[PageCopy, ...] | None:
        """Begin to bring back the first `max_pages` (None: all) host pages of `Match.host_ids`; a use of their path.

        Evicts for them, put down to `by`, but nothing of this path; None, and nothing changed, if that cannot be
        enough. The copies are as those of `swap_out`. Pages that are under way already are left out.
        """
        return self._host.swap_in(as_tokens(tokens), namespace, max_pages, by)

    def swaps_done(self, copies: tuple[PageCopy, ...]) -> None:
        """These copies have run: each destination takes the place of its source in the tree, and the source is freed.

        If meanwhile somebody took hold of the source, its path was evicted or published anew, or a device page would
        come after a host page (a copy that overtook one it depends on), the destination is freed and nothing else
        changes. A copy that is not in flight raises `CacheError`.
        """
        self._host.done(copies)

    def swaps_failed(self, copies: tuple[PageCopy, ...]) -> None:
        """These copies went wrong: the sources are what they were, the destinations are freed."""
        self._host.failed(copies)

    # Reporting.

    def stats(self) -> CacheStats:
        """Return the counters. O(num_pages), vectorised."""
        stop = self.pool.num_pages + 1
        cached = self.tree.owner[:stop] > 0
        num_cached = int(np.count_nonzero(cached))
        return CacheStats(
            num_pages=self.pool.num_pages,
            page_size=self.page_size,
            num_free=self.pool.num_free,
            num_cached=num_cached,
            num_evictable=self.num_evictable,
            num_held=int(np.count_nonzero(cached & (self.pool.refs[:stop] > 1))),
            num_host_pages=self.pool.num_host_pages,
            num_host_free=self.pool.num_free_host,
            num_host_cached=self.tree.num_pages - num_cached,
            num_tables=len(self.tables),
            num_pins=len(self.pins),
            num_pinned=self._num_pinned(),
            num_copies=len(self.copies),
            num_swaps=len(self.swaps),
            num_nodes=len(self.tree.nodes) + len(self.tree.roots),
            num_leaves=self.tree.num_leaves,
            num_namespaces=len(self.tree.roots),
            policy=self.tree.policy.name,
            evicted_pages=self._room.evicted_pages,
            evicted_host_pages=self._room.evicted_host_pages,
            eviction_ages=tuple(self._room.ages.buckets),
            eviction_age_total=self._room.ages.total,
            dropped_pages=self._room.dropped_pages,
            swapped_out=self._host.swapped_out,
            swapped_in=self._host.swapped_in,
            forked_copies=self._forked_copies,
            reused_copies=self._reused_copies,
            opened=self._opened,
            opened_tokens=self._opened_tokens,
            hit_tokens=self._hit_tokens,
            host_hit_tokens=self._host_hit_tokens,
        )

    def check(self) -> None:
        """Recompute everything from scratch; raise `BrokenInvariant` at the first difference. O(all tokens)."""
        audit(self)

    # Inside.

    def _freed(self, page_ids: IntArray) -> None:
        self._host.freed(page_ids)
        if self._on_free is not None:
            self._on_free(page_ids)

    def _adopt(self, table: PageTable) -> PageTable:
        """Let a table live, whose pages were retained for it."""
        self.tables.add(table)
        self.tails.update(table)
        self._room.settle(table.page_buffer.view[max(table.num_tree_pages - 1, 0) :])
        return table

    def _count_request(self, num_tokens: int, page_ids: IntArray, length: int) -> None:
        """Count a request and its hit, and of that what host memory made possible, once for each return of a page."""
        self._opened += 1
        self._opened_tokens += num_tokens
        self._hit_tokens += length
        self._host_hit_tokens += self._host.take_hits(page_ids, length)

    def _shared_pages(self, table: PageTable, new: IntArray, leader: PageTable | None, shared_len: int) -> IntArray:
        """Return the leader's pages that lie in `[0, shared_len)` and where `table` has none yet."""
        if leader is None:
            if shared_len:
                raise CacheError(f"shared_len={shared_len} needs a leader")
            return EMPTY
        self._require_live(leader)
        start = table.seq_len
        if leader is table or leader.namespace != table.namespace:
            raise CacheError("a leader is another table of the same namespace")
        if not 0 <= shared_len <= min(start + len(new), leader.seq_len):
            raise CacheError(f"shared_len={shared_len} exceeds the table's or the leader's {leader.seq_len} tokens")
        theirs = leader.token_buffer.view[:shared_len]
        agreed = agreement(theirs, table.token_buffer.view)
        if agreed == start:
            agreed += agreement(theirs[start:], new)
        if agreed < shared_len:
            raise CacheError(f"the leader differs at token {agreed}, before shared_len={shared_len}")
        return leader.page_buffer.view[table.page_buffer.size : shared_len // self.page_size].copy()

    def _num_needed(self, table: PageTable, num_tokens: int, num_shared: int, *, copies_last: bool) -> int:
        """How many pages of its own `table` takes to grow by so many tokens."""
        num_pages = -(-(table.seq_len + num_tokens) // self.page_size)
        return num_pages - table.page_buffer.size - num_shared + copies_last

    def _copies_last(self, table: PageTable, num_tokens: int) -> bool:
        """Whether `table` grows in a last page that others read too."""
        grows = num_tokens > 0 and table.seq_len % self.page_size > 0
        return grows and self._is_shared(int(table.page_buffer.view[-1]))

    def _is_shared(self, page: int) -> bool:
        """Whether others read `page`. Copies in flight do not count: they run before the step's writes."""
        return bool(self.tree.owner[page]) or int(self.pool.refs[page]) - self.copies.naming(page) > 1

    def _copy_last_page(self, table: PageTable, dst: int) -> PageCopy:
        """Put `dst`, just allocated, in the place of `table`'s last page and note the copy."""
        last = table.page_buffer.view[-1:]
        page = int(last[0])
        copy = self.copies.begin(page, dst, table.seq_len % self.page_size)
        self.pool.retain(np.array([copy.src, dst], np.int32))
        last[0] = dst
        self._room.release(np.array([page], np.int32))
        self._reused_copies += table.borrows
        self._forked_copies += not table.borrows
        return copy

    def _cursor(self, table: PageTable) -> tuple[Node, int]:
        """Return where in the tree the published part of `table` ends: a node and tokens into it."""
        index = table.num_tree_pages
        node = self.tree.node_of(int(table.page_buffer.view[index - 1])) if index else None
        return (self.tree.root(table.namespace), 0) if node is None else (node, index * self.page_size - node.start)

    def _repoint(self, own: IntArray, cached: IntArray) -> None:
        """Make `own`, a view into a table, name the tree's pages. The order is what keeps both alive throughout."""
        changed = np.flatnonzero(own != cached)
        duplicates, canonical = own[changed], cached[changed]
        self.pool.retain(canonical)
        own[changed] = canonical
        self._room.release(duplicates)

    def _give(self, table: PageTable, walk: Walk, index: int, stop: int) -> None:
        """Let the tree continue `walk` with the pages of `table` from `index` on, up to token `stop`."""
        tokens = table.token_buffer.view[index * self.page_size : stop]
        if len(tokens):
            page_ids = table.page_buffer.view[index : -(-stop // self.page_size)]
            superseded = self.tree.insert(
                walk, tokens, page_ids, label=table.label, priority=table.priority, now=self._room.now
            )
            if superseded is not None:
                self.pool.retain(page_ids)
                self._room.release(superseded)

    def _num_pinned(self, more: IntArray = EMPTY) -> int:
        return len(np.unique(np.concatenate([more, *(pin.page_ids for pin in self.pins)])))

    def _require_live(self, table: PageTable) -> None:
        if table not in self.tables:
            state = "was closed" if table.closed else "is of another cache"
            raise ClosedTable(f"the table {table.label!r} of {table.seq_len} tokens {state}")
