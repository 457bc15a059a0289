"""Who computes what in the next step: the order, the token budget, and preemption when pages run short.

Knows nothing of models, sampling or text. Its decisions depend on tokens and counts alone, never on a clock.
"""

from __future__ import annotations

from radixrt.radix import PageTable, RadixCache, WritePlan, require

from .admission import Admission
from .config import EngineConfig
from .counting import Counters
from .owners import Owners
from .pins import Pins
from .plan import Leader, StepPlan
from .queues import Queues
from .scoring import Scorer
from .sequence import Sequence, TokenArray
from .tier import HostTier


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
        scorer: Scorer,
    ) -> None:
        self.cache = cache
        self.tier = tier
        self.counters = counters
        self.config = config
        self.pins = pins
        self.isolated: list[Sequence] = []  # were in a step that failed: each runs alone until one step succeeds
        self._queues = Queues(owners)
        self._admission = Admission(cache, self._queues, tier, config, counters, scorer, self._schedule)

    @property
    def waiting(self) -> list[Sequence]:
        """By age."""
        return self._queues.waiting

    @property
    def running(self) -> list[Sequence]:
        """By age."""
        return self._queues.running

    @property
    def known(self) -> list[Sequence]:
        """Of the last plan: score requests for which nothing is left to compute."""
        return self._queues.known

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait, or run at once where it already holds pages (a fork)."""
        self._admission.look_again()
        self._queues.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, in whatever state, and close its table."""
        self._admission.forget(sequence)
        self.succeeded(sequence)
        self._queues.remove(sequence)
        if sequence.table is not None:
            self.cache.close(sequence.table)
            sequence.table = None

    def plan(self, plan: StepPlan) -> None:
        """Fill the next step: decode rows, then prompts under way, then new requests, up to the token budget.

        The oldest running goes first and, if it is a prompt, leaves a row to each that decodes; then higher priorities.
        Afterwards every planned sequence has its pages, and neither it nor what it reads is given away before the step
        has run. Stays empty where nothing runs or waits. Blocks on copies to and from host memory only where nothing
        can be planned before they end.
        """
        self.known.clear()
        self.tier.poll()
        self._fill(plan)
        if not plan.entries and not self.known and (self.running or self.waiting) and self.tier.wait():
            self._fill(plan)

    def _fill(self, plan: StepPlan) -> None:
        self._plan_alone(plan)
        if plan.entries:
            return
        ready = [s for s in self.running if s.logits is None]
        others = sorted(ready[1:], key=lambda s: -s.priority)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in others:
            (decoding if sequence.is_decoding else prefilling).append(sequence)
        may_share = bool(prefilling) or any(not s.is_decoding for s in ready[:1])
        for sequence in ready[:1]:
            self._catch_up(sequence)
            self._schedule(plan, sequence, kept_rows=len(decoding))
        for sequence in decoding:
            self._schedule(plan, sequence)
        for sequence in prefilling:
            self._catch_up(sequence)
            self._schedule(plan, sequence)
        if self.waiting and (may_share or plan.num_rows < self.config.token_budget):
            self._admission.admit(plan)
        if may_share:
            self._admission.look_again()  # what these prompts compute makes others fit

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
        self._queues.remove(sequence)
        self.cache.close(sequence.table)
        sequence.table = None
        self._queues.add(sequence)
        self._admission.look_again()
        sequence.resumes = True
        self.counters.preemptions += 1

    def check(self) -> None:
        """The queues are in order, and nobody is kept in mind who is in none."""
        self._queues.check()
        self._admission.check()
        require(all(s in self.waiting + self.running for s in self.isolated), "an ended sequence is kept for a rerun")

    # -- one sequence ---------------------------------------------------------------------------------------------

    def _plan_alone(self, plan: StepPlan) -> None:
        """Plan the first isolated sequence that has room; it leaves the list when its step has succeeded."""
        for sequence in self.isolated:
            if sequence.table is not None:
                self._schedule(plan, sequence)
            else:
                self._admission.start_alone(plan, sequence)
            if plan.entries:
                return

    def _schedule(self, plan: StepPlan, sequence: Sequence, *, kept_rows: int = 0) -> bool:
        """Add as many of the sequence's next positions as rows are free or shared; False where that is none.

        Leaves `kept_rows` of the budget to others, but for the first row of the step.
        """
        if sequence.table is None or sequence in self.known:
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
        if self.cache.num_host_pages:
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
        known = self._admission.known(sequence)
        cached_len = self.cache.peek(known, sequence.namespace)
        if cached_len == sequence.num_tokens:
            self.known.append(sequence)
        elif cached_len > sequence.computed_len:
            ahead = self._admission.open(sequence)
            self.cache.close(sequence.table)
            sequence.table = ahead
            self.counters.add_cached(sequence, ahead.seq_len)

    def _make_room(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Free pages for a sequence that eviction alone could not serve; False where it has to sit this step out."""
        victim = self._victim(plan, sequence)
        if victim is not None:
            self.preempt(victim)
            return True
        if plan.entries or sequence is not self._queues.oldest():
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
            if other is self.running[0] or (
                self._queues.is_of_oldest(other) and not self._queues.is_of_oldest(sequence)
            ):
                return False
            ranks_lower = (other.priority, sequence.key) < (sequence.priority, other.key)
            return sequence is self._queues.oldest() or ranks_lower

        others = filter(yields, self.running)
        return min(others, key=lambda s: (s.number == sequence.number, s.priority, -s.number, -s.choice), default=None)
