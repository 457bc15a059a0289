"""The prefix cache: the only owner of page lifetimes, and the face the runtime uses.

Knows token ids and page ids; nothing of tensors, models or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .audit import audit
from .copies import Copies
from .errors import CacheError, ClosedTable, LiveTables
from .explain import Eviction, EvictionLedger
from .lookup import Lookup
from .node import Node
from .policy import POLICIES, EvictionPolicy
from .pool import PagePool
from .table import PageTable, Pin
from .tails import LiveTails
from .tokens import EMPTY, IntArray, Tokens, agreement, as_tokens
from .tree import RadixTree, Walk
from .values import CacheStats, Explanation, Match, PageCopy, WritePlan


class RadixCache:
    """Pages shared by prefix. `count(page) = [in the tree] + tables + pins + copies in flight that name it`.

    A step of the runtime: `extend` every sequence, run the plans' copies, `copies_done`, write, `publish`; on failure
    `truncate` back. Look-ups are pure, and every other operation happens wholly or not at all. Arguments named
    `tokens` are sequences of ids in `[0, 2**31)` (`InvalidTokens`); handles must be live and of this cache
    (`ClosedTable`). `on_free` hears of pages whenever they become free. `policy` names what makes a page cold (a key
    of `POLICIES`), or is it. Pins hold `max_pinned` pages at most, if that is given.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        policy: EvictionPolicy | str = "lru",
        max_pinned: int | None = None,
        on_free: Callable[[IntArray], None] | None = None,
    ) -> None:
        if page_size < 1:
            raise CacheError(f"a page holds at least one token, got page_size={page_size}")
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        if isinstance(policy, str):
            if policy not in POLICIES:
                raise CacheError(f"no eviction policy {policy!r}; there are {', '.join(POLICIES)}")
            policy = POLICIES[policy](num_pages=num_pages, page_size=page_size)
        self.tree = RadixTree(page_size=page_size, refs=self.pool.refs, policy=policy)
        self.tables: set[PageTable] = set()
        self.pins: set[Pin] = set()
        self.copies = Copies()
        self.tails = LiveTails()
        self._ledger = EvictionLedger(self.pool.generations)
        self._lookup = Lookup(self.tree, self.tails, self.copies, self._ledger)
        self._on_free = on_free
        self._max_pinned = max_pinned
        self._now = 0
        self._evicted_pages = self._dropped_pages = self._copied_pages = 0
        self._opened = self._opened_tokens = self._hit_tokens = 0

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could free now: count 1, and nobody holds what continues them. O(num_pages), vectorised.

        Who holds a page holds all before it, save for the few pages that `_stray_pages` lists.
        """
        evictable = (self.pool.refs == 1) & (self.tree.owner > 0)
        for page in self._stray_pages():
            for before in self.tree.path_to(page):
                evictable[before] = False
        return int(np.count_nonzero(evictable))

    # Looking.

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        """Return the longest cached prefix of `tokens`, whose tail may be in a live sequence's last page. Pure."""
        return self._lookup.match(as_tokens(tokens), namespace)

    def peek(self, tokens: Tokens, namespace: str = "") -> int:
        """Return how many leading tokens are cached. Pure."""
        return self._lookup.match(as_tokens(tokens), namespace).length

    def explain(self, tokens: Tokens, namespace: str = "") -> Explanation:
        """Say how far `tokens` hit, what continues there instead, and whether the rest was evicted. Pure."""
        return self._lookup.explain(as_tokens(tokens), namespace)

    # A sequence's life.

    def open(self, tokens: Tokens, namespace: str = "", label: str = "", *, priority: int = 0) -> PageTable:
        """Start a sequence on the longest cached prefix of `tokens`; `seq_len` says how long that is.

        Warms the path, and raises what is cached of it, now and by `publish`, to `priority` (an int32): of the leaves
        that can be evicted the lowest priority goes first, then the coldest. A priority holds until its page is evicted
        or dropped; a later use by a lower one does not lower it.
        Allocates nothing: a partial tail page is borrowed, and copied by the first `extend`.
        """
        wanted = as_tokens(tokens)
        if not -(2**31) <= priority < 2**31:
            raise CacheError(f"a priority is an int32, got {priority}")
        if self.tree.policy.ask(wanted, namespace):
            self.tree.rerank()
        match = self._lookup.match(wanted, namespace)
        page_ids = match.page_ids
        if match.tail_page is not None:
            page_ids = np.append(page_ids, np.int32(match.tail_page))
        self.pool.retain(page_ids)
        self._now += 1
        cached = page_ids[self.tree.owner[page_ids] > 0]  # all but a live sequence's tail
        self.tree.use(cached, priority=priority, now=self._now)
        self._opened += 1
        self._opened_tokens += len(wanted)
        self._hit_tokens += match.length
        table = PageTable(
            namespace=namespace,
            label=label,
            priority=priority,
            page_size=self.page_size,
            tokens=wanted[: match.length],
            page_ids=page_ids,
            written_len=match.length,
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
        copies_last = len(new) > 0 and start % self.page_size > 0 and self._is_shared(int(table.page_ids[-1]))
        need = -(-stop // self.page_size) - len(table.page_ids) - len(shared) + copies_last
        fresh = self._alloc(need, by or table.label)
        if fresh is None:
            return None
        copies: tuple[PageCopy, ...] = ()
        if copies_last:
            copies, fresh = (self._copy_last_page(table, int(fresh[0])),), fresh[1:]
        self.pool.retain(shared)
        table.page_buffer.extend(shared)
        table.page_buffer.extend(fresh)
        table.token_buffer.extend(new)
        return WritePlan(start, stop, copies)

    def copies_done(self, plan: WritePlan) -> None:
        """The device has run the copies of `plan`: let go of their pages. Twice raises `CacheError`."""
        self.copies.finish(plan.copies)
        for copy in plan.copies:
            pages = np.array([copy.src, copy.dst], np.int32)
            self._release(pages)
            self._settle(pages)

    def publish(self, table: PageTable, *, tail: bool = False) -> None:
        """All of `table` is written: share its full pages, with `tail` the partly filled last one too.

        Where the tree has a page already, the table moves to that one, which is a use of it. A shared tail is
        read-only: a later `extend` copies it. Costs O(new tokens + new nodes); the path before is not walked.
        """
        self._require_live(table)
        tokens, page_ids = table.token_buffer.view, table.page_buffer.view
        first = table.num_tree_pages
        pending = [page for page in page_ids[first:].tolist() if page in self.copies] if self.copies else []
        if pending:
            raise CacheError(f"pages {pending} wait for a copy: call copies_done before publish")
        stop = len(tokens) if tail else len(tokens) // self.page_size * self.page_size
        if stop > first * self.page_size:
            self._now += 1
            walk = self.tree.walk(*self._cursor(table), tokens[:stop], first * self.page_size)
            self._repoint(page_ids[first : first + len(walk.page_ids)], walk.page_ids)
            self.tree.use(walk.page_ids, priority=table.priority, now=self._now)
            self._give(table, walk, first + len(walk.page_ids), stop)
        table.written_len = len(tokens)
        self.tails.update(table)
        self._settle(page_ids[max(table.num_tree_pages - 1, 0) : table.num_tree_pages + 1])

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
        self.tails.update(table)
        self._release(dropped)
        self._settle(dropped[max(last - num_pages, 0) :])

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
        )
        return self._adopt(child)

    def close(self, table: PageTable) -> None:
        """End `table`: what it published stays cached, the rest becomes free. Twice raises `ClosedTable`."""
        self._require_live(table)
        page_ids, last = table.page_buffer.view, max(table.num_tree_pages - 1, 0)
        table.closed = True
        self.tables.remove(table)
        self.tails.update(table)
        self._release(page_ids)
        self._settle(page_ids[last:])
        table.page_buffer.truncate(0)

    # Keeping and letting go.

    def pin(self, tokens: Tokens, namespace: str = "") -> Pin | None:
        """Keep the cached full pages of `tokens` from eviction until `unpin`; `prefix_len` says how much that is.

        None, and nothing changed, if pins would then hold more than `max_pinned` pages, each counted once. How long a
        pin lives is for the caller, who has a clock, to say.
        """
        match = self._lookup.match(as_tokens(tokens), namespace)
        if self._max_pinned is not None and self._num_pinned(match.page_ids) > self._max_pinned:
            return None
        pin = Pin(match.page_ids, match.prefix_len)
        self.pool.retain(pin.page_ids)
        self.pins.add(pin)
        self._settle(pin.page_ids[-1:])
        return pin

    def unpin(self, pin: Pin) -> None:
        """End `pin`. Twice raises `ClosedTable`."""
        if pin not in self.pins:
            raise ClosedTable(f"the pin of {pin.prefix_len} tokens was unpinned before, or is not of this cache")
        pin.closed = True
        self.pins.remove(pin)
        self._release(pin.page_ids)
        self._settle(pin.page_ids[-1:])

    def evict(self, num_pages: int, by: str = "") -> int:
        """Free up to `num_pages` cached pages, from the end of the coldest leaf; return how many it found. O(each)."""
        if num_pages < 0:
            raise CacheError(f"cannot evict {num_pages} pages")
        return self._evict(num_pages, by)

    def drop(self, tokens: Tokens, keep_len: int = 0, namespace: str = "", *, by: str = "drop") -> int:
        """Free what is cached of `tokens` past the first `keep_len`, which the caller will not use again.

        From the end, page by page, up to what somebody holds, another sequence continues, or holds a token to keep.
        Returns the pages freed; `explain` puts them down to `by`. O(path, vectorised).
        """
        wanted = as_tokens(tokens)
        if not 0 <= keep_len <= len(wanted):
            raise CacheError(f"cannot keep {keep_len} tokens: {len(wanted)} were given")
        self._now += 1
        doomed = self._lookup.path(wanted, namespace)[-(-keep_len // self.page_size) :]
        leaf = self.tree.free_end(int(doomed[-1])) if len(doomed) else None
        if leaf is None:
            return 0
        page_ids = self._trim(leaf, len(doomed), by)  # where its edge begins another sequence goes on, or the root is
        self._release(page_ids)
        self._dropped_pages += len(page_ids)
        return len(page_ids)

    def reset(self) -> None:
        """Forget everything cached. Raises `LiveTables` while tables, pins or copies live."""
        if self.tables or self.pins or self.copies:
            live = f"{len(self.tables)} tables, {len(self.pins)} pins and {len(self.copies)} copies"
            raise LiveTables(f"cannot reset: {live} live; close, unpin and finish them first")
        self._ledger.clear()
        self._release(self.tree.clear())

    # Reporting.

    def stats(self) -> CacheStats:
        """Return the counters. O(num_pages), vectorised."""
        return CacheStats(
            num_pages=self.pool.num_pages,
            page_size=self.page_size,
            num_free=self.pool.num_free,
            num_cached=self.tree.num_pages,
            num_evictable=self.num_evictable,
            num_held=int(np.count_nonzero((self.tree.owner > 0) & (self.pool.refs > 1))),
            num_tables=len(self.tables),
            num_pins=len(self.pins),
            num_pinned=self._num_pinned(),
            num_copies=len(self.copies),
            num_nodes=len(self.tree.nodes) + len(self.tree.roots),
            num_leaves=self.tree.num_leaves,
            num_namespaces=len(self.tree.roots),
            policy=self.tree.policy.name,
            evicted_pages=self._evicted_pages,
            dropped_pages=self._dropped_pages,
            copied_pages=self._copied_pages,
            opened=self._opened,
            opened_tokens=self._opened_tokens,
            hit_tokens=self._hit_tokens,
        )

    def check(self) -> None:
        """Recompute everything from scratch; raise `BrokenInvariant` at the first difference. O(all tokens)."""
        audit(self)

    # Inside.

    def _adopt(self, table: PageTable) -> PageTable:
        """Let a table live, whose pages were retained for it."""
        self.tables.add(table)
        self.tails.update(table)
        self._settle(table.page_buffer.view[max(table.num_tree_pages - 1, 0) :])
        return table

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
        self._release(np.array([page], np.int32))
        self._copied_pages += 1
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
        self._release(duplicates)

    def _give(self, table: PageTable, walk: Walk, index: int, stop: int) -> None:
        """Let the tree continue `walk` with the pages of `table` from `index` on, up to token `stop`."""
        tokens = table.token_buffer.view[index * self.page_size : stop]
        if len(tokens):
            page_ids = table.page_buffer.view[index : -(-stop // self.page_size)]
            superseded = self.tree.insert(
                walk, tokens, page_ids, label=table.label, priority=table.priority, now=self._now
            )
            if superseded is not None:
                self.pool.retain(page_ids)
                self._release(superseded)

    def _alloc(self, num_pages: int, by: str) -> IntArray | None:
        """Allocate, evicting exactly what is missing; None, and nothing evicted, if that cannot be enough."""
        missing = num_pages - self.pool.num_free
        if missing > 0:
            # Each leaf in the order gives a page at least, which spares the full count in the common case.
            if missing > len(self.tree.order) and missing > self.num_evictable:
                return None
            self._evict(missing, by)
        return self.pool.alloc(num_pages)

    def _evict(self, num_pages: int, by: str) -> int:
        self._now += 1
        cuts: list[IntArray] = []
        remaining = num_pages
        while remaining and (leaf := self.tree.coldest()) is not None:
            cuts.append(self._trim(leaf, self.tree.count_as_cold(leaf, remaining), by))
            self.tree.policy.evicted(cuts[-1])
            remaining -= len(cuts[-1])
        if cuts:
            self._release(np.concatenate(cuts))
        self._evicted_pages += num_pages - remaining
        return num_pages - remaining

    def _trim(self, leaf: Node, max_pages: int, by: str) -> IntArray:
        """Take pages off the end of a leaf and write down who did; they keep their count for the caller to release."""
        cut = self.tree.trim(leaf, max_pages)
        self._ledger.record(cut.after, cut.namespace, cut.key, Eviction(by, self._now))
        return cut.page_ids

    def _num_pinned(self, more: IntArray = EMPTY) -> int:
        return len(np.unique(np.concatenate([more, *(pin.page_ids for pin in self.pins)])))

    def _release(self, page_ids: IntArray) -> None:
        freed = self.pool.release(page_ids)
        if len(freed) and self._on_free is not None:
            self._on_free(freed)

    def _settle(self, page_ids: IntArray) -> None:
        """Re-examine the leaves that end in one of these pages, whose counts moved."""
        for page in page_ids.tolist():
            self.tree.settle(page)

    def _stray_pages(self) -> Iterator[int]:
        """Yield tree pages whose holder may not hold the path to them, few and short-lived.

        They are unpublished pages of a table that another published (a fork or a leader, on a path where the tree had
        earlier pages already), and pages of copies in flight whose table moved on.
        """
        for table in self.tables:
            beyond = table.num_tree_pages + 1  # the page before it borrows or follows tree pages the table holds
            if table.page_buffer.size > beyond:
                yield from (page for page in table.page_buffer.view[beyond:].tolist() if self.tree.owner[page])
        for copy in self.copies:
            yield from (page for page in (copy.src, copy.dst) if self.tree.owner[page])

    def _require_live(self, table: PageTable) -> None:
        if table not in self.tables:
            state = "was closed" if table.closed else "is of another cache"
            raise ClosedTable(f"the table {table.label!r} of {table.seq_len} tokens {state}")
