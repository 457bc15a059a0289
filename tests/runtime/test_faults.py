"""Allocations, copies and forward passes that fail, callers that give up: no answer changes, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from radixrt.radix.testing import prefix_families
from radixrt.runtime import (
    BeamParams,
    CacheUse,
    Engine,
    FinishEvent,
    Handle,
    Output,
    Params,
    SamplingParams,
    TokenEvent,
)
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.testing import HashModel

VOCAB = 30
MAX_TOKENS = 5


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request, and when it is given up: after so many steps, None for never."""

    prompt: list[int]
    params: Params
    priority: int
    cache: CacheUse
    aborted_at: int | None

    def pages(self, page_size: int) -> int:
        """The most it holds alone."""
        prompt_len = len(self.prompt)
        return branch_pages(prompt_len, prompt_len + self.params.max_tokens - 1, self.params.num_branches, page_size)

    def expected(self) -> list[tuple[int, ...]]:
        """Its choices in an engine with room, without a cache and without faults."""
        with Engine(HashModel(vocab=VOCAB), num_pages=2048, page_size=2, prefix_cache=False) as engine:
            return [choice.token_ids for choice in engine.generate([self.prompt], self.params)[0].choices]


@dataclass(kw_only=True)
class Faults:
    """Which allocations and forward passes fail, by their number, and what becomes of each copy in turn."""

    allocations: set[int]
    forwards: set[int]
    copies: list[int | str]  # asked in vain so often; "fails", "raises"
    num_allocations: int = 0
    num_forwards: int = 0
    num_copies: int = 0
    seen: set[str] = field(default_factory=set)

    def forward(self, _: Any) -> None:
        self.num_forwards += 1
        if self.num_forwards in self.forwards:
            self.seen.add("forward")
            raise RuntimeError("the device failed")

    def copy(self) -> int | None:
        fate = self.copies[self.num_copies % len(self.copies)]
        self.num_copies += 1
        self.seen.add("copy")
        if fate == "raises":
            raise RuntimeError("a copy that cannot begin")
        return fate if isinstance(fate, int) else None

    def allocate(self, alloc: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*given: Any) -> Any:
            self.num_allocations += 1
            if self.num_allocations in self.allocations:
                self.seen.add("allocation")
                return None
            return alloc(*given)

        return failing


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    prompts = draw(prefix_families(page_size=2, max_size=5))
    made = []
    for prompt in prompts:
        max_tokens = draw(st.integers(1, MAX_TOKENS))
        params: Params = SamplingParams(n=draw(st.sampled_from([1, 1, 3])), max_tokens=max_tokens, seed=1)
        if draw(st.integers(0, 3)) == 0:
            params = BeamParams(width=draw(st.integers(1, 3)), max_tokens=max_tokens)
        made.append(
            Job(
                prompt=prompt[:16] or [0],
                params=params,
                priority=draw(st.sampled_from([0, 0, 2])),
                cache=draw(st.sampled_from(["all", "prompt", "none"])),
                aborted_at=draw(st.none() | st.none() | st.integers(0, 12)),
            )
        )
    return made


@st.composite
def faults(draw: st.DrawFn) -> Faults:
    numbers = st.sets(st.integers(1, 40), max_size=6)
    fates: st.SearchStrategy[int | str] = st.sampled_from([0, 0, 1, 3, 9, "fails", "raises"])
    copies: list[int | str] = draw(st.lists(fates, min_size=1, max_size=6))
    return Faults(allocations=draw(numbers), forwards=draw(numbers), copies=copies)


@given(
    work=jobs(),
    plan=faults(),
    page_size=st.sampled_from([1, 2, 4]),
    slack=st.integers(0, 4),
    num_host_pages=st.sampled_from([0, 3, 40]),
    token_budget=st.sampled_from([2, 7, 512]),
    prefill_chunk=st.sampled_from([None, 3]),
    max_running=st.sampled_from([1, 3, 64]),
    swap=st.sampled_from(["always", "auto"]),
)
def test_no_fault_changes_an_answer_or_leaks(
    work: list[Job], plan: Faults, page_size: int, slack: int, **given_settings: Any
) -> None:
    """Each request ends exactly once, in a bounded number of steps, with what it would get alone or the start of it."""
    expected = [job.expected() for job in work]
    model = HashModel(vocab=VOCAB, before_forward=plan.forward, copy_delay=plan.copy)
    num_pages = slack + max(job.pages(page_size) for job in work)
    with Engine(model, num_pages=num_pages, page_size=page_size, poison=True, **given_settings) as engine:
        cache = engine._loop.cache
        cache.pool.alloc = plan.allocate(cache.pool.alloc)  # type: ignore[method-assign]
        handles = [engine.submit(job.prompt, job.params, priority=job.priority, cache=job.cache) for job in work]
        outputs: dict[Handle, Output] = {}
        told: dict[tuple[Handle, int], list[int]] = {}
        for step in range(num_steps(work, plan)):
            for handle, job in zip(handles, work, strict=True):
                if job.aborted_at == step:
                    engine.abort(handle)
            for event in engine.step():
                assert event.handle not in outputs, "an event after the last"
                if isinstance(event, TokenEvent):
                    told.setdefault((event.handle, event.choice), []).append(event.token_id)
                elif isinstance(event, FinishEvent):
                    outputs[event.handle] = event.output
            engine.check()
            if len(outputs) == len(work):
                break
        assert len(outputs) == len(work), "the engine stalls"
        for handle, job, answers in zip(handles, work, expected, strict=True):
            choices = outputs[handle].choices
            reasons = {choice.finish_reason for choice in choices}
            if reasons <= {"length", "stop"}:
                assert [choice.token_ids for choice in choices] == answers
            else:
                assert "abort" not in reasons or job.aborted_at is not None
                assert "error" not in reasons or "forward" in plan.seen
            if not job.params.is_ranked:
                for choice, answer in zip(choices, answers, strict=True):
                    assert choice.token_ids == answer[: len(choice.token_ids)]
                    assert told.get((handle, choice.index), []) == list(choice.token_ids)
        settle(engine)
        engine.reset_cache()
        assert engine.stats().cache.num_free == num_pages
    engine.check()


def num_steps(work: list[Job], plan: Faults) -> int:
    """A bound on the steps until all have ended: one a row if nobody shares and nobody runs beside another, for each
    time that it may have to be computed again after a fault, and the steps in which a fault lets nothing run."""
    rows = sum((len(job.prompt) + job.params.max_tokens) * job.params.num_branches for job in work)
    num_faults = len(plan.allocations) + len(plan.forwards)
    return rows * (2 + num_faults) + 50


def settle(engine: Engine) -> None:
    """Let copies that are under way end; then nothing is held."""
    for _ in range(100):
        engine.step()
    stats = engine.stats().cache
    assert stats.num_tables == stats.num_copies == stats.num_held == 0
    assert stats.num_free + stats.num_cached == stats.num_pages


@pytest.mark.parametrize("num_host_pages", [0, 16])
def test_aborts_at_any_state_leak_nothing(profile: str, num_host_pages: int) -> None:
    """Requests of all kinds are given up at random moments, thousands of them, in a pool that is always short."""
    random = Random(num_host_pages)
    num_aborts = 50_000 if profile == "deep" else 800
    model = HashModel(vocab=VOCAB)
    if num_host_pages:
        model.copy_delay = lambda: random.choice([0, 0, 1, 4, None])
    aborted = finished = 0
    with Engine(
        model, num_pages=40, page_size=2, num_host_pages=num_host_pages, swap="always", poison=True, max_bypass=4
    ) as engine:
        live: list[Handle] = []
        while aborted < num_aborts:
            while len(live) < 12:
                live.append(submit_any(engine, random, live))
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    live.remove(event.handle)
                    finished += 1
            for _ in range(random.choice([0, 1, 1, 3])):
                if live:
                    engine.abort(random.choice(live))
                    aborted += 1
            if random.random() < 0.05:
                engine.check()
        for handle in live:
            engine.abort(handle)
        settle(engine)
        engine.check()
        engine.reset_cache()
        assert engine.stats().cache.num_free == 40
    assert finished > 100


def submit_any(engine: Engine, random: Random, live: list[Handle]) -> Handle:
    """A request of some kind, or a fork of one that lives."""
    if live and random.random() < 0.3:
        params = SamplingParams(max_tokens=random.randint(1, 6), n=random.choice([1, 2]))
        parent = random.choice(live)
        try:
            return engine.fork(parent, params=params, text=random.choice([None, [1, 2]]))[0]
        except ValueError:  # it would be too long for the pool
            pass
    prompt = [random.randint(0, 1) for _ in range(random.randint(1, 14))]
    kinds: list[Params] = [
        SamplingParams(max_tokens=random.randint(1, 20)),
        SamplingParams(max_tokens=random.randint(1, 6), n=random.randint(2, 4)),
        SamplingParams(max_tokens=4, n=1, best_of=3),
        BeamParams(width=random.randint(1, 3), max_tokens=random.randint(1, 6)),
    ]
    return engine.submit(
        prompt, random.choice(kinds), priority=random.choice([0, 0, 1]), cache=random.choice(["all", "prompt", "none"])
    )


def test_the_faults_do_happen() -> None:
    """The plans above are not vacuous: an engine under pressure meets each kind."""
    plan = Faults(allocations={3, 5, 9}, forwards={4, 7}, copies=[0, "fails", 2, "raises"])
    model = HashModel(vocab=VOCAB, before_forward=plan.forward, copy_delay=plan.copy)
    with Engine(model, num_pages=12, page_size=2, num_host_pages=20, swap="always") as engine:
        cache = engine._loop.cache
        cache.pool.alloc = plan.allocate(cache.pool.alloc)  # type: ignore[method-assign]
        for i in range(6):
            engine.generate([[i] * 8, [i, 1, 2]], SamplingParams(max_tokens=5, n=2))
        assert plan.seen == {"forward", "copy", "allocation"}
