"""Transfers between device and host memory: which pages move and when, what that costs, and the copies in flight.

Knows nothing of requests or queues. What moves may depend on measured rates; what is computed from it never does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from radixrt.kernels.plan import IntArray
from radixrt.radix import Match, PageCopy, RadixCache

from .config import Swap
from .fences import Fence
from .logprobs import LogprobStore
from .model import Model
from .sequence import TokenArray

_DECAY = 0.9  # of what a rate remembers, at each measurement
_AHEAD = 16  # one page of so many is kept free where copies are late
_RETRY = 256  # pages: so many times moving was not worth it, then one moves, to see whether that still holds
_LONGEST_PAUSE = 10  # as a power of two of steps, while every copy fails


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that a page takes to move out, to move back, and that a token takes to compute; None: not measured."""

    move_out: float | None = None
    move_in: float | None = None
    token: float | None = None

    def pays(self, num_tokens: int, *, out: bool) -> bool:
        """Whether moving a page of so many tokens (there and back, or back alone) costs no more than computing it.

        What was not measured yet counts as free, so that it is tried.
        """
        if self.token is None:
            return True
        moving = (self.move_in or 0.0) + ((self.move_out or 0.0) if out else 0.0)
        return moving <= num_tokens * self.token


@dataclass(slots=True)
class Transfers:
    """Totals since the engine started."""

    swap_outs: int = 0  # pages copied to host memory
    swap_ins: int = 0
    swap_failures: int = 0  # pages whose copy failed
    bytes_moved: int = 0


@dataclass(slots=True, eq=False)
class Transfer:
    """One batch of copies in one direction, begun together and under one fence."""

    copies: tuple[PageCopy, ...]
    fence: Fence
    begun: float | None
    is_over: bool = False  # done or failed, and the cache knows


class HostTier:
    """The host pages of a cache as a second tier; without any, every method does nothing.

    `clock` counts seconds, or says None, and is read for the rates alone. `costs` holds for one step: `poll` renews it,
    from what was measured or, in a rerun, from `recorded`.
    """

    def __init__(
        self,
        cache: RadixCache,
        model: Model,
        store: LogprobStore,
        *,
        swap: Swap = "auto",
        clock: Callable[[], float | None] = time.perf_counter,
    ) -> None:
        self.costs = Costs()
        self.recorded: Costs | None = None
        self._clock = clock
        self._model = model
        self._store = store  # of what goes with the pages
        self._swap = swap
        self._page_bytes = model.page_bytes(cache.page_size)
        self._out, self._in, self._tokens = _Rate(), _Rate(), _Rate()
        self._totals = Transfers()
        self._num_refused = 0
        self._num_failed = 0  # transfers in a row
        self._pause = 0  # polls for which nothing is begun ahead of a need
        self._transfers: list[Transfer] = []
        self._cache = cache

    @property
    def totals(self) -> Transfers:
        return replace(self._totals)

    @property
    def follows_costs(self) -> bool:
        """Whether what moves depends on what was measured."""
        return self._swap == "auto" and self._cache.num_host_pages > 0

    def start_over(self, cache: RadixCache) -> None:
        """Serve a fresh cache over the same pages, once nothing that was begun writes them any more."""
        for transfer in self._transfers:
            transfer.is_over = True
            with suppress(Exception):  # over is all that matters
                transfer.fence.wait()
        self._transfers = []
        self._cache = cache

    # -- at each step ---------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Tell the cache of the copies that have ended, in whatever order, and take the costs for the step to come.

        Where copies are late they free nothing for a need of their own step. So they are begun here, ahead of it, while
        less than a share of the pool is free; no more is ever under way to the host, and a late copy stalls nobody.
        """
        for transfer in list(self._transfers):
            self._finish(transfer)
        measured = Costs(move_out=self._out.value, move_in=self._in.value, token=self._tokens.value)
        self.costs = self.recorded or measured
        if not self._model.copies_at_once:
            self._keep_ahead()

    def wait(self) -> bool:
        """Block until every copy has ended, and tell the cache; whether there were any."""
        waited = bool(self._transfers)
        for transfer in list(self._transfers):
            with suppress(Exception):  # which `done` raises again
                transfer.fence.wait()
            self._finish(transfer)
        return waited

    def computed(self, num_rows: int, begun: float | None) -> None:
        """A step with prompt rows, begun at a time of the clock, has just ended: what a token costs to compute."""
        self._tokens.add(num_rows, self._since(begun))

    # -- what moves -----------------------------------------------------------------------------------------------

    def spill(self, num_pages: int, by: str = "", *, keep: Match | None = None) -> None:
        """`num_pages` device pages are about to be evicted: move them to host memory instead, where that pays.

        They are free on return. What `keep` has found stays. Does nothing where copies are late, see `poll`.
        """
        if not self._cache.num_host_pages or not self._model.copies_at_once:
            return
        while (num_pages := self._worth(num_pages)) > 0 and (copies := self._cache.swap_out(num_pages, by, keep=keep)):
            if self._begin(copies, self._model.copy_out) is None:
                return
            num_pages -= len(copies)

    def fetch(self, tokens: TokenArray, namespace: str = "", by: str = "") -> tuple[Transfer, ...]:
        """Begin to bring back what host memory has of `tokens`, where that pays; what brings it, over or to wait for.

        Whoever waits goes on once all of these are over, with what is cached then: a copy may fail.
        """
        match = self._cache.match(tokens, namespace)
        num_pages = self._worth_fetching(match.length + match.host_len - match.prefix_len) if match.host_len else 0
        if not num_pages:
            return ()
        missing = num_pages - self._cache.num_free
        if missing > 0:
            self.spill(missing, by, keep=match)  # what it waits for must not push out what it has
        wanted = set(match.host_ids[:num_pages].tolist())
        under_way = tuple(t for t in self._transfers if any(copy.src in wanted for copy in t.copies))
        copies = self._cache.swap_in(tokens, namespace, num_pages, by)
        begun = self._begin(copies, self._model.copy_in) if copies else None
        return under_way if begun is None else (*under_way, begun)

    def _keep_ahead(self) -> None:
        """Begin to move the coldest pages out, for what is missing of a share of free pages and not under way.

        After a failure not for two steps, after another one not for four, and so on.
        """
        if self._pause:
            self._pause -= 1
            return
        cache = self._cache
        under_way = sum(copy.dst > cache.num_pages for transfer in self._transfers for copy in transfer.copies)
        wanted = max(1, cache.num_pages // _AHEAD) - cache.num_free - under_way
        if copies := cache.swap_out(self._worth(wanted)):
            self._begin(copies, self._model.copy_out)

    def _worth(self, num_pages: int) -> int:
        """How many of `num_pages` full pages to move out: all or none, save for one now and then to measure again."""
        if self._swap == "never" or num_pages <= 0:
            return 0
        if self._swap == "always" or self.costs.pays(self._cache.page_size, out=True):
            return num_pages
        self._num_refused += num_pages
        if self._num_refused < _RETRY:
            return 0
        self._num_refused = 0
        return 1

    def _worth_fetching(self, num_tokens: int) -> int:
        """How many of the host pages to bring back that hold so many tokens; the last one is worth its part."""
        num_full, rest = divmod(num_tokens, self._cache.page_size)
        if self._swap == "never":
            return 0
        if self._swap == "always":
            return num_full + (rest > 0)
        if num_full and not self.costs.pays(self._cache.page_size, out=False):
            return 0
        return num_full + (rest > 0 and self.costs.pays(rest, out=False))

    # -- one transfer ---------------------------------------------------------------------------------------------

    def _begin(self, copies: tuple[PageCopy, ...], copy: Callable[[IntArray, IntArray], Fence]) -> Transfer | None:
        """Begin copies that the cache has planned; finish them if they have ended. None where it cannot be."""
        src, dst = (np.array([getattr(c, end) for c in copies], dtype=np.int64) for end in ("src", "dst"))
        begun = self._clock()
        try:
            fence = copy(src, dst)
        except Exception:
            self._fail(copies)
            return None
        transfer = Transfer(copies, fence, begun)
        self._transfers.append(transfer)
        if self._model.copies_at_once:
            self._finish(transfer)
        return transfer

    def _finish(self, transfer: Transfer) -> None:
        """Tell the cache of a transfer if it has ended, well or not."""
        try:
            if not transfer.fence.done():
                return
        except Exception:
            self._fail(transfer.copies)
        else:
            self._store.copy(transfer.copies)
            self._cache.swaps_done(transfer.copies)
            self._count(transfer)
            self._num_failed = 0
        transfer.is_over = True
        self._transfers.remove(transfer)

    def _fail(self, copies: tuple[PageCopy, ...]) -> None:
        self._cache.swaps_failed(copies)
        self._totals.swap_failures += len(copies)
        self._num_failed += 1
        self._pause = 2 ** min(self._num_failed, _LONGEST_PAUSE)

    def _count(self, transfer: Transfer) -> None:
        num_pages = len(transfer.copies)
        seconds = transfer.fence.seconds()
        is_out = transfer.copies[0].dst > self._cache.num_pages
        (self._out if is_out else self._in).add(num_pages, self._since(transfer.begun) if seconds is None else seconds)
        self._totals.swap_outs += num_pages if is_out else 0
        self._totals.swap_ins += 0 if is_out else num_pages
        self._totals.bytes_moved += num_pages * self._page_bytes

    def _since(self, begun: float | None) -> float | None:
        now = self._clock() if begun is not None else None
        return None if begun is None or now is None else now - begun


class _Rate:
    """Seconds for one of something: an exponential mean, in which each measurement weighs as much as it covers.

    A clock may fail, stand still, or go back: what it says then is no measurement.
    """

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    @property
    def value(self) -> float | None:
        return self._seconds / self._amount if self._amount else None

    def add(self, amount: float, seconds: float | None) -> None:
        if seconds is not None and 0 <= seconds < math.inf:
            self._amount = _DECAY * self._amount + amount
            self._seconds = _DECAY * self._seconds + seconds
