"""The loop of an engine: plan a step, run it, draw, commit; and how it begins anew where it was broken off.

Knows nothing of how requests begin and end, nor of what a caller may ask. One thread; a clock only measures.
"""

from __future__ import annotations

from itertools import islice
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from radixrt.kernels.draws import Logits
from radixrt.radix import LiveTables, RadixCache, require

from .config import EngineConfig
from .constraint import Grammars
from .counting import Counters
from .errors import InvalidRequest, RecordError
from .liveness import Liveness
from .lives import Lives
from .logprobs import LogprobStore
from .meter import Meter
from .model import Forward, Model
from .outputs import TokenEvent
from .owners import Owners
from .pins import Pins
from .plan import Entry, StepPlan
from .post import Post
from .record import Recorder
from .registry import Registry
from .runner import Runner
from .sampler import Sampled, sample
from .scheduler import Scheduler
from .scoring import Scorer
from .sequence import Sequence
from .tier import HostTier

_REFUSALS = InvalidRequest, LiveTables, RecordError  # nothing was changed, or all of it


class Loop:
    """Everything of one engine that a step moves."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        grammars: Grammars,
        recorder: Recorder,
        meter: Meter,
    ) -> None:
        """`config` with its number of pages resolved, and the model's pool allocated."""
        assert config.num_pages is not None, "the pool's size was resolved"
        self._model = model
        self._config = config
        self.grammars = grammars
        self._recorder = recorder
        self.counters = Counters()
        self.meter = meter
        self._store = LogprobStore(config.num_pages + (config.num_host_pages or 0), config.page_size)
        self.cache = self._new_cache()
        self.tier = HostTier(self.cache, model, self._store, swap=config.swap, clock=self.meter.now)
        self.post = Post()
        self._broken_off = ""  # what broke off which operation, while nobody has seen to it
        self._begin(num_submitted=0, num_pinned=0)

    def _begin(self, *, num_submitted: int, num_pinned: int) -> None:
        """With a fresh cache: nothing lives, after so many requests and pins."""
        config = self._config
        self._freed: list[int] = []  # since the last step, for the record
        self._is_stepping = self._is_whole = False
        self.pins = Pins(self.cache, num_pinned)
        self.scorer = Scorer(self._store)
        self.owners = Owners()
        self._liveness = Liveness(self.cache, self.owners)
        self.scheduler = Scheduler(self.cache, self.tier, config, self.counters, self.pins, self.owners, self.scorer)
        self._runner = Runner(self._model, self.cache, self._store, poison=config.poison)
        self.requests = Registry(
            self.owners,
            keep_finished=config.keep_finished,
            finished_ttl=config.finished_ttl,
            num_submitted=num_submitted,
        )
        self.lives = Lives(
            cache=self.cache,
            requests=self.requests,
            scheduler=self.scheduler,
            scorer=self.scorer,
            liveness=self._liveness,
            grammars=self.grammars,
            counters=self.counters,
            meter=self.meter,
            recorder=self._recorder,
            post=self.post,
            keeps=config.prefix_cache,
        )

    # -- interrupts -----------------------------------------------------------------------------------------------

    def changing(self, operation: str) -> Change:
        """Within, the engine changes; what is raised there, but for a refusal, may have come in the middle of that."""
        self._is_whole = False
        return Change(self, operation)

    def broken_off(self, operation: str, error: BaseException) -> None:
        """An error leaves an operation that was changing the engine."""
        if not self._is_whole and not isinstance(error, _REFUSALS):
            self._broken_off = f"{type(error).__name__} broke off {operation}"

    def lose(self, why: str) -> None:
        """Begin anew because of something that was broken off elsewhere."""
        self._broken_off = why
        self.mend()

    def mend(self) -> None:
        """To be called before anything else is asked: begin anew where a change was broken off."""
        if self._broken_off:
            self.begin_anew(num_submitted=self.requests.num_submitted, num_pinned=self.pins.num_pinned)

    def begin_anew(self, *, num_submitted: int, num_pinned: int) -> None:
        """Lose everything but events and counts, in whatever state it is; who lives ends with an error.

        May itself be broken off, and called again then.
        """
        try:
            self._recorder.write("lost", num_submitted=num_submitted, num_pinned=num_pinned)
        finally:
            error = (
                f"{self._broken_off} in the middle, so that the engine lost all that lived or was cached; submit again"
            )
            lost = list(self.requests)
            self.post.lost(lost, error)
            self.meter.start_over()
            self.cache = self._new_cache()
            self.tier.start_over(self.cache)
            self._begin(num_submitted=num_submitted, num_pinned=num_pinned)
            for request in lost:
                self.post.close(request.handle)
            self._broken_off = ""

    # -- the step -------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps that computed something: the engine's time."""
        return self.counters.steps

    def advance(self) -> None:
        """Run one step. If the model is interrupted, the engine is as before it."""
        self.abandon_forsaken()
        self._is_stepping = True
        try:
            self._advance()
        finally:
            self._is_stepping = False
        self.abandon_forsaken()

    def abandon_forsaken(self) -> None:
        """Abandon the requests of streams that were collected; in the middle of a step, after it."""
        while self.post.forsaken and not self._is_stepping:
            self.lives.abandon([self.post.forsaken[0]])
            self.post.forsaken.popleft()

    def _advance(self) -> None:
        for number in self.pins.expire(self.step):  # told, since a step that plans nothing leaves no line
            self._recorder.write("unpin", number=number)
        self.requests.expire(self.step)
        plan = StepPlan(page_size=self._config.page_size)
        self.scheduler.plan(plan)
        drawn = self._run(plan) if plan.entries else []
        known = self._end_known(plan)
        if drawn is not None and (plan.entries or known):  # a step without rows too: a rerun ends the known there
            self._record(plan, drawn)

    def _end_known(self, plan: StepPlan) -> list[Sequence]:
        """End the score requests whose last row ran, and those that need no row."""
        ran = [entry.sequence for entry in plan.entries if entry.sequence.scores is not None]
        known = self.scheduler.known + [sequence for sequence in ran if sequence.computed_len == sequence.num_tokens]
        for sequence in known:
            if self.requests.live(sequence.handle) is not None:
                self.counters.add_cached(sequence, sequence.num_tokens)
                self.lives.end(sequence, "stop")
        return known

    def _run(self, plan: StepPlan) -> list[int] | None:
        """Run, sample and commit; the tokens drawn.

        None where the device or a draw fails: the plan's requests run again one by one.
        """
        begun = self.meter.now() if self.tier.follows_costs else None
        wishes = self.scorer.ask(plan)
        batch = self._runner.prepare(plan)
        try:  # nothing changes in here but what pages hold, and which log-probabilities are known
            forward = self._runner.run(plan, batch)
            unheard = self.scorer.hear(wishes, forward)
            is_finite = bool(forward.finite.all())
            finite = [entry for entry in plan.entries if is_finite or forward.finite[entry.rows].all()]
            sound = [entry for entry in finite if entry.sequence not in unheard]
            logits = self._logits(plan, sound, forward)
            drawn = self._draw(logits)
        except BaseException as error:
            self._runner.withdraw(plan)
            if not isinstance(error, Exception):
                self._is_whole = True
                raise
            if len(plan.entries) > 1:
                self.scheduler.isolate(plan)
            else:  # it failed alone: whatever was raised ends it, and nobody else
                self.lives.end(plan.entries[0].sequence, "error", f"the model failed: {error}")
            return None
        self._runner.finish(plan)
        if any(entry.stop - entry.own_start > 1 for entry in plan.entries):
            self.tier.computed(plan.num_rows, begun)
        self._commit(plan, sound)
        going_on: list[Sequence] = []
        for (sequence, row), tokens in zip(logits, drawn, strict=True):
            if tokens:
                going_on += self._continue(sequence, tokens)
            elif sequence.table is not None:  # its request may have ended with another beam
                self._search_on(sequence, row)
        self._follow_grammars(going_on)
        return [token.token_id for tokens in drawn for token in tokens]

    def _record(self, plan: StepPlan, drawn: list[int]) -> None:
        freed, self._freed = self._freed, []
        self._recorder.step(plan, drawn, freed, self.tier.costs if self.tier.follows_costs else None)

    def _logits(self, plan: StepPlan, sound: list[Entry], forward: Forward) -> list[tuple[Sequence, Logits]]:
        """The sequences that get a next token, and its logits."""
        sampling = [entry for entry in sound if entry.samples]
        index = np.searchsorted(plan.logit_rows, [entry.rows[-1] for entry in sampling]).tolist()
        logits = forward.logits.numpy(force=True)
        return [(entry.sequence, logits[at]) for entry, at in zip(sampling, index, strict=True)]

    def _draw(self, logits: list[tuple[Sequence, Logits]]) -> list[list[Sampled]]:
        """The next token of each, or one of each choice where they begin to differ; none in a search, which waits for
        all.
        """
        counts, given, rows = [], [], []
        for sequence, its in logits:
            paths = self._paths(sequence)
            counts.append(len(paths))
            given += [its] * len(paths)
            rows += [sequence.sampler_row(path, self._model.eos_token_ids) for path in paths]
        drawn = iter(sample(given, rows, self._model.draw))
        return [list(islice(drawn, count)) for count in counts]

    def _paths(self, sequence: Sequence) -> tuple[tuple[int, ...], ...]:
        """Those on which a sequence goes on by draws."""
        request = self.requests.of(sequence.number)
        if request.search is not None:
            return ()
        return request.paths if sequence.num_branches > 1 else (sequence.path,)

    def _commit(self, plan: StepPlan, sound: list[Entry]) -> None:
        """Charge and publish what the step computed; a request with a NaN ends alone and publishes nothing."""
        self.counters.add_step(plan)
        sick = set(plan.entries) - set(sound)
        for entry in plan.entries:
            self.meter.started(entry.sequence)
            self.scheduler.succeeded(entry.sequence)
            if entry.sequence.table is None:
                continue  # ended with another beam of its request
            if entry in sick:
                self.cache.truncate(entry.table, entry.start)
                self.lives.end(entry.sequence, "error", "the model's hidden states or logits hold NaN or infinity")
            elif self._config.prefix_cache:
                self.cache.publish(entry.table)
                self.scorer.note(entry.sequence, entry.start)

    def _continue(self, sequence: Sequence, drawn: list[Sampled]) -> list[Sequence]:
        """Append what was drawn, one token to each choice; the choices that go on."""
        branches = [sequence]
        if len(drawn) > 1:
            for branch in self.requests.of(sequence.number).fan_out():
                self.lives.share(sequence, branch, sequence.computed_len)
                self.scheduler.enqueue(branch)
                branches.append(branch)
        return [branch for branch, token in zip(branches, drawn, strict=True) if self._append(branch, token)]

    def _follow_grammars(self, sequences: list[Sequence]) -> None:
        """See what may come next in those that have a grammar: end what is complete, append what is without a choice.

        Such tokens need no logits; they are fed together in the next step. Where log-probabilities are asked, they do.
        """
        while sequences := [sequence for sequence in sequences if sequence.constraint is not None]:
            self.grammars.look([sequence.constraint for sequence in sequences if sequence.constraint is not None])
            sequences = [sequence for sequence in sequences if self._append_forced(sequence)]

    def _append_forced(self, sequence: Sequence) -> bool:
        """Append the one token that a sequence's grammar allows, if it allows one; False where it stays as it is."""
        constraint = sequence.constraint
        assert constraint is not None
        if constraint.error is not None:
            self.lives.end(sequence, "error", f"its grammar cannot be followed: {constraint.error}")
        elif constraint.is_complete:
            self.lives.end(sequence, "stop")
        elif sequence.num_tokens >= sequence.max_len:
            self.lives.end(sequence, "length")
        elif constraint.forced is not None and sequence.params.logprobs is None:
            return self._append(sequence, Sampled(token_id=constraint.forced))
        return False

    def _append(self, sequence: Sequence, sampled: Sampled) -> bool:
        """Commit one token and tell of it; False where it was the last, or the tokenizer fails on it.

        A grammar that is at its end is seen later.
        """
        token_id = sampled.token_id
        ends = sequence.is_ended_by(token_id, self._model.eos_token_ids)
        try:
            text = sequence.detokenizer.add(token_id) if sequence.detokenizer is not None and not ends else ""
        except Exception as error:  # a tokenizer that fails on one request's token must not take others along
            self.lives.end(sequence, "error", f"its output failed: {error!r}")
            return False
        if sequence.constraint is not None and sequence.constraint.forced is not None:
            sequence.forced.append(sequence.num_tokens)
        sequence.append(token_id)
        sequence.note(text, sampled.logprobs)
        self.meter.sampled(sequence)
        if not sequence.params.is_ranked:
            event = TokenEvent(
                handle=sequence.handle,
                choice=sequence.choice,
                token_id=token_id,
                text=text,
                logprobs=sampled.logprobs,
            )
            self.post.tell(event)
        if ends or (sequence.detokenizer is not None and sequence.detokenizer.stopped is not None):
            self.lives.end(sequence, "stop")
        elif sequence.num_tokens >= sequence.max_len and sequence.constraint is None:
            self.lives.end(sequence, "length")
        else:
            return True
        return False

    def _search_on(self, beam: Sequence, logits: Logits) -> None:
        """Keep a beam's logits until all of its request are there; then go on with the best continuations."""
        request = self.requests.of(beam.number)
        assert request.search is not None
        beam.logits = torch.from_numpy(logits.copy())
        ready = [branch.logits for branch in request.branches if branch.logits is not None]
        if len(ready) < len(request.branches):
            return
        before = request.search.hypotheses
        continuations = request.search.advance(torch.stack(ready))
        self._liveness.search_on(request, before, request.search.hypotheses)
        if request.search.is_done:
            self.lives.end_search(request)
            return
        forked, given_up = request.select(continuations)
        for parent, child in forked:
            self.lives.share(parent, child, parent.computed_len)
            self.scheduler.enqueue(child)
        for branch in given_up:
            self.lives.give_up(branch)

    # -- the whole state ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Pages, queues, and who owns tokens, from scratch. BrokenInvariant if anything is off."""
        self.cache.check()
        self.scheduler.check()
        self.scorer.check()
        self.scorer.store.check(self.cache.pool.refs == 0)
        ended = [branch for request in self.requests.kept() for branch in request.branches[: len(request.paths)]]
        alive = [branch for request in self.requests for branch in request.branches]
        found = [
            (request.handle, hypothesis)
            for request in self.requests
            if request.search is not None
            for hypothesis in request.search.hypotheses
        ]
        owners = set(self.owners)
        require(owners.issuperset([*self.scheduler.waiting, *ended]), "what waits or was kept owns no tokens")
        require(owners.issubset([*alive, *ended, *found]), "what is forgotten owns tokens")

    # -- the cache ------------------------------------------------------------------------------------------------

    def _new_cache(self) -> RadixCache:
        assert self._config.num_pages is not None
        return RadixCache(
            num_pages=self._config.num_pages,
            page_size=self._config.page_size,
            num_host_pages=self._config.num_host_pages or 0,
            policy=self._config.eviction,
            max_pinned=int(self._config.pin_budget * self._config.num_pages),
            on_free=self._on_free,
        )

    def _on_free(self, page_ids: npt.NDArray[np.int32]) -> None:
        self._freed.extend(page_ids.tolist())
        self._runner.forget(page_ids)


class Change:
    """One operation that changes a loop. No generator: one that an interrupt dropped would end in a later operation."""

    __slots__ = ("_loop", "_operation")

    def __init__(self, loop: Loop, operation: str) -> None:
        self._loop = loop
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._loop.broken_off(self._operation, error)
