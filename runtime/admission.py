"""Who that waits starts next, and whether there is room: order, ageing, pages that come back from host memory.

Knows nothing of token budgets or of who makes room for whom; it asks whoever plans for rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from radixrt.radix import Match, PageTable, RadixCache, require

from .config import EngineConfig
from .counting import Counters
from .intake import branch_pages
from .plan import StepPlan
from .queues import Queues
from .scoring import Scorer
from .sequence import Sequence, TokenArray
from .tier import HostTier, Transfer


class Admission:
    """Starts waiting sequences of one engine. `schedule` adds one that was started to a plan; False where it cannot."""

    def __init__(
        self,
        cache: RadixCache,
        queues: Queues,
        tier: HostTier,
        config: EngineConfig,
        counters: Counters,
        scorer: Scorer,
        schedule: Callable[[StepPlan, Sequence], bool],
    ) -> None:
        self._queues = queues
        self._tier = tier
        self._config = config
        self._counters = counters
        self._scorer = scorer
        self._schedule = schedule
        self._cache = cache
        self._fetching: dict[Sequence, tuple[Transfer, ...]] = {}  # what was begun for the admission of waiting ones
        self._room_in_vain: int | None = None  # pages into which nobody who waits fitted; None: somebody might

    def look_again(self) -> None:
        """Something has changed but for decoding: somebody who did not fit might."""
        self._room_in_vain = None

    def forget(self, sequence: Sequence) -> None:
        """One has ended."""
        self._fetching.pop(sequence, None)
        self.look_again()

    def admit(self, plan: StepPlan) -> None:
        """Start waiting sequences in order while they fit. Who does not is passed by, until it is overdue.

        So is who waits for its pages to come back from host memory. Looks at nobody where nobody fitted before, and
        since then nothing but decoding has happened: O(num_pages).
        """
        if plan.entries and self._is_full():
            return
        room, in_vain = self._room(), plan.num_rows < self._config.token_budget
        if plan.entries and self._room_in_vain is not None and room <= self._room_in_vain:
            return
        overdue = self._first_overdue()
        for sequence, match in self._candidates():
            if match.length + match.host_len == sequence.num_tokens:
                self._queues.known.append(sequence)
                continue
            if (overdue < sequence.number or self._is_full()) and not self._must_go(plan, sequence):
                break
            has_rows = plan.num_rows < self._config.token_budget or self._shared_len(plan, sequence, match) > 0
            found = self._fetch(plan, sequence, match, room) if has_rows else None
            if found is not None and self._try_admit(plan, sequence, found, room):
                room, in_vain, overdue = self._room(), False, self._first_overdue()
        self._room_in_vain = room if in_vain and not self._fetching else None

    def start_alone(self, plan: StepPlan, sequence: Sequence) -> None:
        """Start one waiting sequence, if there is room or it must go."""
        self._try_admit(plan, sequence, self._match(sequence), self._room())

    def _try_admit(self, plan: StepPlan, sequence: Sequence, match: Match, room: int) -> bool:
        """Open and plan a waiting sequence if its prompt fits, or it must go; otherwise it waits on.

        It does too where it would compute what another computes in this step and cannot share.
        """
        if not self._must_go(plan, sequence) and not self._fits(plan, sequence, match, room):
            return False
        there = self._cache.match(sequence.tokens if self._config.prefix_cache else [], sequence.namespace)
        start = min(there.length, sequence.first_row)
        if plan.is_computing(sequence.namespace, start, there, sequence.tokens):
            return False
        table = self.open(sequence)
        self._queues.remove(sequence)
        sequence.table, opened_len = table, table.seq_len
        self._queues.add(sequence)
        if not self._schedule(plan, sequence):
            self._queues.remove(sequence)
            self._cache.close(sequence.table)
            sequence.table = None
            self._queues.add(sequence)
            return False
        if opened_len < there.length:
            plan.runs_again(there)
        if not sequence.high_water:
            sequence.found_len = max(sequence.found_len, there.length + there.host_len)
        sequence.known_len = there.length
        transfers = self._fetching.pop(sequence, ())
        if sequence.resumes:
            self._counters.add_resumed(sequence, opened_len, swapped=bool(transfers))
        sequence.bypassed = 0
        self._counters.add_cached(sequence, opened_len)
        for other in itertools.takewhile(lambda other: other.number < sequence.number, self._queues.waiting):
            other.bypassed += 1
        return True

    def open(self, sequence: Sequence) -> PageTable:
        """A table of what the cache has of it."""
        again, sequence.was_opened = sequence.was_opened, True
        known, name = self.known(sequence), sequence.namespace
        return self._cache.open(known, name, sequence.label, priority=sequence.priority, again=again)

    def known(self, sequence: Sequence) -> TokenArray:
        """What the cache may serve: all before the first row that must run, for its logits or log-probabilities."""
        if not self._config.prefix_cache:
            return sequence.tokens[:0]
        if sequence.scores is not None:
            self._scorer.look(sequence, self._cache.match(sequence.tokens, sequence.namespace))
        return sequence.tokens[: sequence.first_row]

    def _is_full(self) -> bool:
        return len(self._queues.running) >= self._config.max_running

    def _candidates(self) -> list[tuple[Sequence, Match]]:
        """Branches of the oldest running request, which may wait for them, then those overtaken often enough; then by
        priority; preempted ones first, then by merit.

        Looks at the oldest `admission_window` that were not preempted, which bounds the look-ups; ageing brings every
        one into it.
        """
        waiting = [s for s in self._queues.waiting if s.logits is None]
        preempted = [s for s in waiting if s.was_preempted]
        others = (s for s in waiting if not s.was_preempted)
        window = itertools.islice(others, self._config.admission_window)
        found = [(sequence, self._match(sequence)) for sequence in itertools.chain(preempted, window)]

        def key(candidate: tuple[Sequence, Match]) -> tuple[int, int, bool, int, tuple[int, int]]:
            sequence, match = candidate
            if self._queues.is_of_oldest(sequence):
                return 0, 0, False, 0, sequence.key
            if self._is_overdue(sequence):
                return 1, 0, False, 0, sequence.key
            return 2, -sequence.priority, not sequence.was_preempted, -self._merit(sequence, match), sequence.key

        return sorted(found, key=key)

    def _fetch(self, plan: StepPlan, sequence: Sequence, match: Match, room: int) -> Match | None:
        """Bring its pages back from host memory, begun once for each admission; None until all of that is over.

        None too where it does not fit. Otherwise what the cache has of it then.
        """
        if sequence not in self._fetching:
            if not match.host_len:
                return match
            if not self._must_go(plan, sequence) and not self._fits(plan, sequence, match, room):
                return None
            self._fetching[sequence] = self._tier.fetch(self.known(sequence), sequence.namespace, sequence.label)
        return self._match(sequence) if all(transfer.is_over for transfer in self._fetching[sequence]) else None

    def _merit(self, sequence: Sequence, match: Match) -> int:
        """Tokens of its prompt that are cached; its age is worth up to half of the prompt.

        Without age this is longest prefix first, which serves what waits depth first: each starts where the last one
        ended, so nothing is computed twice as long as the pool holds the longest. Age counts where the best that is
        left shares little: then it is time for who waits longest (benchmarks/scheduling.py).
        """
        cached_len = match.length
        if cached_len == sequence.num_tokens - 1:  # as much as is looked for; the last token may be cached too
            cached_len = self._cache.peek(sequence.tokens, sequence.namespace)
        return cached_len + sequence.num_tokens * sequence.bypassed // (2 * self._config.max_bypass)

    def _first_overdue(self) -> float:
        """The oldest request that has been overtaken as often as may be; infinity where there is none."""
        overdue = (s.number for s in self._queues.waiting if s.logits is None and self._is_overdue(s))
        return next(overdue, math.inf)

    def _must_go(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Nothing that runs can go on without it: other beams of its request wait for it, or nothing runs."""
        return not plan.entries and (not self._queues.running or self._queues.is_of_oldest(sequence))

    def _is_overdue(self, sequence: Sequence) -> bool:
        """Overtaken as often as may be: nobody goes first any more."""
        return sequence.bypassed >= self._config.max_bypass

    def _match(self, sequence: Sequence) -> Match:
        return self._cache.match(self.known(sequence), sequence.namespace)

    def _shared_len(self, plan: StepPlan, sequence: Sequence, match: Match) -> int:
        """Tokens of the sequence that are rows of this step already, counted from 0; 0 where there are none."""
        if not self._config.prefix_cache:
            return 0
        leader = plan.leader(sequence.namespace, match.length, match.page_ids, sequence.tokens)
        return leader.agreed if leader is not None else 0

    def _fits(self, plan: StepPlan, sequence: Sequence, match: Match, room: int) -> bool:
        """Whether pages for the rest of its prompt are in `room`; to the oldest request its reservation is open too."""
        size = self._config.page_size
        shared = max(match.length, self._shared_len(plan, sequence, match))
        needed = -(-sequence.num_tokens // size) - shared // size
        if sequence.num_branches > 1:
            needed += sequence.num_branches  # each goes on in a page of its own
        kept = int(np.count_nonzero(self._cache.pool.refs[match.page_ids] == 1))  # evictable until it is opened
        reserved = self._reserved() if self._queues.is_of_oldest(sequence) else 0
        return needed + kept <= room + reserved

    def _room(self) -> int:
        """Pages over the watermark and what the oldest running request has still to get. O(num_pages), vectorised."""
        watermark = max(1, self._cache.num_pages // 100)
        return self._cache.num_free + self._cache.num_evictable - watermark - self._reserved()

    def _reserved(self) -> int:
        """Pages that the oldest running request has still to get."""
        size, reserved = self._config.page_size, 0
        for branch in self._queues.branches(self._queues.running[0].number) if self._queues.running else ():
            whole = branch_pages(branch.num_tokens, branch.max_len - 1, branch.num_branches, size)
            reserved += max(0, whole - -(-branch.computed_len // size))
        return reserved

    def check(self) -> None:
        """Pages are on their way for nobody but those who wait."""
        waiting = self._queues.waiting
        require(all(s in waiting for s in self._fetching), "pages are fetched for one that does not wait")
