"""Who computes what in the next step: queues, admission, the token budget, and preemption when pages run short.

Knows nothing of models, sampling or text. Its decisions depend on tokens and counts alone, never on a clock.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable

import numpy as np

from radixrt.radix import Match, PageTable, RadixCache, WritePlan, require

from .config import EngineConfig
from .counting import Counters
from .intake import branch_pages
from .owners import Owners
from .pins import Pins
from .plan import Leader, StepPlan
from .sequence import Sequence, TokenArray
from .tier import HostTier, Transfer


class Scheduler:
    """Waiting and running sequences of one engine, and the cache that holds their pages.

    Progress: the oldest running sequence that has something to compute is planned first and never preempted, every
    other can be, pins give way, and what could never fit alone was refused at submit; so each step computes a row of it
    (docs/life-of-a-request.md says within how many steps a request ends).
    """

    def __init__(
        self,
        cache: RadixCache,
        tier: HostTier,
        config: EngineConfig,
        counters: Counters,
        pins: Pins,
        owners: Owners,
    ) -> None:
        self.cache = cache
        self.tier = tier
        self.counters = counters
        self.config = config
        self.pins = pins
        self._owners = owners
        self.waiting: list[Sequence] = []  # by age
        self.running: list[Sequence] = []  # by age
        self.fetching: dict[Sequence, tuple[Transfer, ...]] = {}  # of waiting ones: what was begun for their admission
        self.isolated: list[Sequence] = []  # were in a step that failed: each runs alone until one step succeeds
        self._room_in_vain: int | None = None  # pages into which nobody who waits fitted; None: somebody might

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait, or run at once where it already holds pages (a fork)."""
        self._room_in_vain = None
        if sequence.table is None:
            self._wait(sequence)
        else:
            _insert(self.running, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, in whatever state, and close its table."""
        self._room_in_vain = None
        self.succeeded(sequence)
        self.fetching.pop(sequence, None)
        _remove(self.waiting if sequence.table is None else self.running, sequence)
        if sequence.table is not None:
            self.cache.close(sequence.table)
            sequence.table = None

    def start_over(self, cache: RadixCache, live: Iterable[Sequence]) -> None:
        """Let every live sequence wait, without pages, for a fresh cache."""
        self.cache = cache
        self.waiting, self.running, self.isolated = [], [], []
        self.fetching, self._room_in_vain = {}, None
        for sequence in live:
            sequence.table = None
            self._wait(sequence)

    def plan(self, plan: StepPlan) -> None:
        """Fill the next step: decode rows, then prompts under way, then new requests, up to the token budget.

        The oldest running goes first and, if it is a prompt, leaves a row to each that decodes; then higher priorities.
        Afterwards every planned sequence has its pages, and neither it nor what it reads is given away before the step
        has run. Stays empty where nothing runs or waits. Blocks on copies to and from host memory only where nothing
        can be planned before they end.
        """
        self.tier.poll()
        self._fill(plan)
        if not plan.entries and (self.running or self.waiting) and self.tier.wait():
            self._fill(plan)

    def _fill(self, plan: StepPlan) -> None:
        self._plan_alone(plan)
        if plan.entries:
            return
        ready = [s for s in self.running if s.logits is None]
        others = sorted(ready[1:], key=lambda s: -s.priority)
        decoding = [s for s in others if s.is_decoding]
        prefilling = [s for s in others if not s.is_decoding]
        may_share = any(not s.is_decoding for s in ready)
        for sequence in ready[:1]:
            self._catch_up(sequence)
            self._schedule(plan, sequence, kept_rows=len(decoding))
        for sequence in decoding:
            self._schedule(plan, sequence)
        for sequence in prefilling:
            self._catch_up(sequence)
            self._schedule(plan, sequence)
        if self.waiting and (may_share or plan.num_rows < self.config.token_budget):
            self._admit(plan)
        if may_share:
            self._room_in_vain = None  # what these prompts compute makes others fit

    def isolate(self, plan: StepPlan) -> None:
        """After a failed step: its sequences run one by one until each has succeeded or failed alone."""
        self.isolated = [entry.sequence for entry in plan.entries]

    def succeeded(self, sequence: Sequence) -> None:
        """A step with this sequence ran."""
        if sequence in self.isolated:
            self.isolated.remove(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it waits, and recomputes what the cache has lost when it runs again."""
        assert sequence.table is not None
        if self.config.prefix_cache:
            self.cache.publish(sequence.table, tail=True)
        self.cache.close(sequence.table)
        sequence.table = None
        _remove(self.running, sequence)
        self._wait(sequence)
        self._room_in_vain = None
        sequence.resumes = True
        self.counters.preemptions += 1

    def _wait(self, sequence: Sequence) -> None:
        """Let a sequence that holds no pages wait; what is cached of it is still its own."""
        _insert(self.waiting, sequence)
        self._owners.keep(sequence)

    # -- one sequence ---------------------------------------------------------------------------------------------

    def _plan_alone(self, plan: StepPlan) -> None:
        """Plan the first isolated sequence that has room; it leaves the list when its step has succeeded."""
        for sequence in self.isolated:
            if sequence.table is not None:
                self._schedule(plan, sequence)
            else:
                self._try_admit(plan, sequence, self._match(sequence), self._room())
            if plan.entries:
                return

    def _schedule(self, plan: StepPlan, sequence: Sequence, *, kept_rows: int = 0) -> bool:
        """Add as many of the sequence's next positions as rows are free or shared; False where that is none.

        Leaves `kept_rows` of the budget to others, but for the first row of the step.
        """
        if sequence.table is None:
            return False
        leader = self._leader(plan, sequence)
        stop = self._stop(plan, sequence, leader, kept_rows)
        start = sequence.computed_len
        if stop == start:
            return False
        tokens = sequence.tokens[start:stop]
        ahead = leader.entry.sequence.table if leader is not None else None
        shared_len = min(leader.shared_stop, stop) if leader is not None else 0
        while (write := self._extend(sequence.table, tokens, ahead, shared_len)) is None:
            if not self._make_room(plan, sequence):
                return False
            if sequence.computed_len != start:  # its borrowed tail was given up: plan it anew
                return self._schedule(plan, sequence, kept_rows=kept_rows)
        plan.add(sequence, write, leader)
        return True

    def _extend(
        self, table: PageTable, tokens: TokenArray, leader: PageTable | None, shared_len: int
    ) -> WritePlan | None:
        """Room for `tokens`; what has to make way goes to host memory where that pays, and is evicted otherwise."""
        self.tier.spill(self.cache.num_missing(table, len(tokens), shared_len), table.label)
        return self.cache.extend(table, tokens, leader=leader, shared_len=shared_len)

    def _stop(self, plan: StepPlan, sequence: Sequence, leader: Leader | None, kept_rows: int) -> int:
        """Where the sequence's rows of this step end: all shared ones, and own ones up to budget and chunk."""
        own_start = sequence.computed_len
        if leader is not None:
            own_start = min(leader.shared_stop, sequence.num_tokens)
            if leader.entry.stop < leader.agreed:
                return own_start  # the leader goes on with tokens of ours in a later step: stay beside it
        left = max(self.config.token_budget - plan.num_rows - kept_rows, 0 if plan.num_rows else 1)
        num_own = min(left, self.config.prefill_chunk or sequence.num_tokens)
        return min(own_start + num_own, sequence.num_tokens)

    def _leader(self, plan: StepPlan, sequence: Sequence) -> Leader | None:
        if not self.config.prefix_cache or sequence.is_decoding or sequence.table is None:
            return None
        table = sequence.table
        return plan.leader(sequence.namespace, table.seq_len, table.page_ids, sequence.tokens)

    def _catch_up(self, sequence: Sequence) -> None:
        """Where others have meanwhile computed more of a prompt under way, take theirs."""
        if not self.config.prefix_cache or sequence.table is None or not sequence.borrows or sequence.is_decoding:
            return
        known = self._known(sequence)
        if self.cache.peek(known, sequence.namespace) > sequence.computed_len:
            ahead = self._open(sequence)
            self.cache.close(sequence.table)
            sequence.table = ahead
            self.counters.add_cached(sequence, ahead.seq_len)

    def _make_room(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Free pages for a sequence that eviction alone could not serve; False where it has to sit this step out."""
        victim = self._victim(plan, sequence)
        if victim is not None:
            self.preempt(victim)
            return True
        if plan.entries or sequence is not self._oldest():
            return False
        assert sequence.table is not None
        full_len = sequence.computed_len - sequence.computed_len % self.config.page_size
        if full_len < sequence.computed_len:
            self.cache.truncate(sequence.table, full_len)  # copying its borrowed tail takes a page more than it needs
            sequence.borrows = False
            return True
        return self.pins.give_way()

    def _victim(self, plan: StepPlan, sequence: Sequence) -> Sequence | None:
        """Who is preempted for a sequence: the lowest priority, then the youngest, and never the oldest running.

        It must have a lower priority or be younger; for the oldest, which has to go on, anybody will do. Branches of
        one request yield to each other last, and those of the oldest to nobody else; a beam that waits for `sequence`
        does whatever its age.
        """

        def yields(other: Sequence) -> bool:
            if other is sequence or other in plan:
                return False
            if other.number == sequence.number and other.logits is not None:
                return True
            if other is self.running[0] or (self._is_of_oldest(other) and not self._is_of_oldest(sequence)):
                return False
            ranks_lower = (other.priority, sequence.key) < (sequence.priority, other.key)
            return sequence is self._oldest() or ranks_lower

        others = filter(yields, self.running)
        return min(others, key=lambda s: (s.number == sequence.number, s.priority, -s.number, -s.choice), default=None)

    def _oldest(self) -> Sequence | None:
        """The oldest running sequence that does not wait for the other beams of its request."""
        return next((s for s in self.running if s.logits is None), None)

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting sequences in order while they fit. Who does not is passed by, until it is overdue.

        So is who waits for its pages to come back from host memory. Looks at nobody where nobody fitted before, and
        since then nothing but decoding has happened: O(num_pages).
        """
        if plan.entries and self._is_full():
            return
        room, in_vain = self._room(), plan.num_rows < self.config.token_budget
        if plan.entries and self._room_in_vain is not None and room <= self._room_in_vain:
            return
        overdue = self._first_overdue()
        for sequence, match in self._candidates():
            if (overdue < sequence.number or self._is_full()) and not self._must_go(plan, sequence):
                break
            has_rows = plan.num_rows < self.config.token_budget or self._shared_len(plan, sequence, match) > 0
            found = self._fetch(plan, sequence, match, room) if has_rows else None
            if found is not None and self._try_admit(plan, sequence, found, room):
                room, in_vain, overdue = self._room(), False, self._first_overdue()
        self._room_in_vain = room if in_vain and not self.fetching else None

    def _is_full(self) -> bool:
        return len(self.running) >= self.config.max_running

    def _candidates(self) -> list[tuple[Sequence, Match]]:
        """Branches of the oldest running request, which may wait for them, then those overtaken often enough; then by
        priority; preempted ones first, then by merit.

        Looks at the oldest `admission_window` that were not preempted, which bounds the look-ups; ageing brings every
        one into it.
        """
        waiting = [s for s in self.waiting if s.logits is None]
        preempted = [s for s in waiting if s.was_preempted]
        others = (s for s in waiting if not s.was_preempted)
        window = itertools.islice(others, self.config.admission_window)
        found = [(sequence, self._match(sequence)) for sequence in itertools.chain(preempted, window)]

        def key(candidate: tuple[Sequence, Match]) -> tuple[int, int, bool, int, tuple[int, int]]:
            sequence, match = candidate
            if self._is_of_oldest(sequence):
                return 0, 0, False, 0, sequence.key
            if self._is_overdue(sequence):
                return 1, 0, False, 0, sequence.key
            return 2, -sequence.priority, not sequence.was_preempted, -self._merit(sequence, match), sequence.key

        return sorted(found, key=key)

    def _fetch(self, plan: StepPlan, sequence: Sequence, match: Match, room: int) -> Match | None:
        """Bring its pages back from host memory, begun once for each admission; None until all of that is over.

        None too where it does not fit. Otherwise what the cache has of it then.
        """
        if sequence not in self.fetching:
            if not match.host_len:
                return match
            if not self._must_go(plan, sequence) and not self._fits(plan, sequence, match, room):
                return None
            self.fetching[sequence] = self.tier.fetch(self._known(sequence), sequence.namespace, sequence.label)
        return self._match(sequence) if all(transfer.is_over for transfer in self.fetching[sequence]) else None

    def _merit(self, sequence: Sequence, match: Match) -> int:
        """Tokens of its prompt that are cached; its age is worth up to half of the prompt.

        Without age this is longest prefix first, which serves what waits depth first: each starts where the last one
        ended, so nothing is computed twice as long as the pool holds the longest. Age counts where the best that is
        left shares little: then it is time for who waits longest (benchmarks/scheduling.py).
        """
        cached_len = match.length
        if cached_len == sequence.num_tokens - 1:  # as much as is looked for; the last token may be cached too
            cached_len = self.cache.peek(sequence.tokens, sequence.namespace)
        return cached_len + sequence.num_tokens * sequence.bypassed // (2 * self.config.max_bypass)

    def _first_overdue(self) -> float:
        """The oldest request that has been overtaken as often as may be; infinity where there is none."""
        overdue = (s.number for s in self.waiting if s.logits is None and self._is_overdue(s))
        return next(overdue, math.inf)

    def _must_go(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Nothing that runs can go on without it: other beams of its request wait for it, or nothing runs."""
        return not plan.entries and (not self.running or self._is_of_oldest(sequence))

    def _is_overdue(self, sequence: Sequence) -> bool:
        """Overtaken as often as may be: nobody goes first any more."""
        return sequence.bypassed >= self.config.max_bypass

    def _try_admit(self, plan: StepPlan, sequence: Sequence, match: Match, room: int) -> bool:
        """Open and plan a waiting sequence if its prompt fits, or it must go; otherwise it waits on."""
        if not self._must_go(plan, sequence) and not self._fits(plan, sequence, match, room):
            return False
        there = self.cache.match(sequence.tokens if self.config.prefix_cache else [], sequence.namespace)
        sequence.table = self._open(sequence)
        _remove(self.waiting, sequence)
        _insert(self.running, sequence)
        opened_len = sequence.table.seq_len
        if not self._schedule(plan, sequence):
            self.cache.close(sequence.table)
            sequence.table = None
            _remove(self.running, sequence)
            _insert(self.waiting, sequence)
            return False
        if not sequence.high_water:
            sequence.found_len = max(sequence.found_len, there.length + there.host_len)
        sequence.known_len = there.length
        transfers = self.fetching.pop(sequence, ())
        if sequence.resumes:
            self.counters.add_resumed(sequence, opened_len, swapped=bool(transfers))
        sequence.bypassed = 0
        self.counters.add_cached(sequence, opened_len)
        for other in itertools.takewhile(lambda other: other.number < sequence.number, self.waiting):
            other.bypassed += 1
        return True

    def _open(self, sequence: Sequence) -> PageTable:
        """A table of what the cache has of it."""
        again, sequence.was_opened = sequence.was_opened, True
        known, name = self._known(sequence), sequence.namespace
        return self.cache.open(known, name, sequence.label, priority=sequence.priority, again=again)

    def _known(self, sequence: Sequence) -> TokenArray:
        """What the cache may serve: all but the last token, whose row must run for its logits."""
        return sequence.tokens[: -1 if self.config.prefix_cache else 0]

    def _match(self, sequence: Sequence) -> Match:
        return self.cache.match(self._known(sequence), sequence.namespace)

    def _shared_len(self, plan: StepPlan, sequence: Sequence, match: Match) -> int:
        """Tokens of the sequence that are rows of this step already, counted from 0; 0 where there are none."""
        if not self.config.prefix_cache:
            return 0
        leader = plan.leader(sequence.namespace, match.length, match.page_ids, sequence.tokens)
        return leader.agreed if leader is not None else 0

    def _fits(self, plan: StepPlan, sequence: Sequence, match: Match, room: int) -> bool:
        """Whether pages for the rest of its prompt are in `room`; to the oldest request its reservation is open too."""
        size = self.config.page_size
        shared = max(match.length, self._shared_len(plan, sequence, match))
        needed = -(-sequence.num_tokens // size) - shared // size
        if sequence.num_branches > 1:
            needed += sequence.num_branches  # each goes on in a page of its own
        kept = int(np.count_nonzero(self.cache.pool.refs[match.page_ids] == 1))  # evictable until it is opened
        reserved = self._reserved() if self._is_of_oldest(sequence) else 0
        return needed + kept <= room + reserved

    def _is_of_oldest(self, sequence: Sequence) -> bool:
        """A branch of the oldest running request, to which alone pages are promised."""
        return bool(self.running) and sequence.number == self.running[0].number

    def _room(self) -> int:
        """Pages over the watermark and what the oldest running request has still to get. O(num_pages), vectorised."""
        watermark = max(1, self.cache.num_pages // 100)
        return self.cache.num_free + self.cache.num_evictable - watermark - self._reserved()

    def _reserved(self) -> int:
        """Pages that the oldest running request has still to get."""
        size, reserved = self.config.page_size, 0
        for branch in self._branches(self.running[0].number) if self.running else ():
            whole = branch_pages(branch.num_tokens, branch.max_len - 1, branch.num_branches, size)
            reserved += max(0, whole - -(-branch.computed_len // size))
        return reserved

    def _branches(self, number: int) -> list[Sequence]:
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
        require(all(s in queued for s in self.isolated), "an ended sequence is kept for a rerun")
        require(all(s in self.waiting for s in self.fetching), "pages are fetched for one that does not wait")


def _insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Put a sequence into a queue kept by age."""
    queue.insert(bisect_left(queue, sequence.key, key=_age), sequence)


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a queue kept by age."""
    at = bisect_left(queue, sequence.key, key=_age)
    assert queue[at] is sequence, "the sequence is in another queue"
    del queue[at]


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
