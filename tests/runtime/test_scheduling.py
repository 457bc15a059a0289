"""The order in which requests start and go on: what it computes twice, who waits how long, and that nobody stalls."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, strategies as st

from radixrt.radix import Match, Tokens
from radixrt.radix.testing import prefix_families
from radixrt.runtime import BeamParams, Engine, FinishEvent, Handle, InvalidRequest, Params, SamplingParams
from radixrt.runtime.counting import trie_size
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.testing import HashModel

from .conftest import MakeEngine

VOCAB = 30
UNLIMITED = 2**31 - 1
FORKED = SamplingParams(max_tokens=4, temperature=0.0)


@given(
    prompts=prefix_families(page_size=4, alphabet=3, max_size=12),
    page_size=st.sampled_from([1, 2, 3, 4, 16]),
    settings=st.fixed_dictionaries(
        {
            "eviction": st.sampled_from(["lru", "lru2", "duel"]),
            "token_budget": st.sampled_from([1, 5, 512]),
            "prefill_chunk": st.sampled_from([None, 3]),
        }
    ),
)
def test_a_queue_is_served_depth_first(prompts: list[list[int]], page_size: int, settings: dict[str, Any]) -> None:
    """Nothing is computed twice in a pool that holds the longest request, and the copy of a page shared in part."""
    prompts = [prompt or [0] for prompt in prompts]
    num_pages = max(-(-len(prompt) // page_size) for prompt in prompts) + (page_size > 1)
    with Engine(
        HashModel(vocab=VOCAB),
        num_pages=num_pages,
        page_size=page_size,
        max_running=1,
        max_bypass=UNLIMITED,
        admission_window=len(prompts),
        poison=True,
        **settings,
    ) as engine:
        engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
        engine.check()
        assert engine.stats().counters.computed == trie_size(prompts)
        assert engine.stats().counters.recomputed_after_preemption == 0


@dataclass
class Life:
    """An engine that is watched: who was planned in each step, who overtook whom, and when each request must end."""

    engine: Engine
    lines: list[dict[str, Any]]  # its record
    patience: int  # most steps between the ends of two sequences each of which was the oldest
    now: int = 0
    live: dict[int, int] = field(default_factory=dict)  # requests, and the step by which each must have ended
    waiting: dict[int, int] = field(default_factory=dict)  # submitted but not started: by how many later ones overtaken

    def submit(self, prompt: list[int], params: Params, priority: int) -> None:
        handle = self.engine.submit(prompt, params, priority=priority)
        self.live[handle.number] = self.waiting[handle.number] = 0
        self._promise(handle.number)

    def fork(self, number: int) -> None:
        (handle,) = self.engine.fork(Handle(number), params=FORKED, at=1)
        self.live[handle.number] = 0
        self._promise(handle.number)

    def pin(self, prompt: list[int]) -> None:
        with suppress(InvalidRequest):
            self.engine.pin(prompt)

    def _promise(self, number: int) -> None:
        """The bound of docs/life-of-a-request.md."""
        older = [self.engine._loop.requests.find(Handle(other)) for other in self.live if other <= number]
        self.live[number] = self.now + self.patience * sum(request.params.num_branches for request in older)

    def step(self) -> None:
        """One step, in which something is computed, the oldest goes on, and nobody is overtaken too often."""
        running = self.engine._loop.scheduler.running
        oldest = running[0] if running and not is_beam(self.engine, running[0].handle) else None
        self.now += 1
        self.lines.clear()
        ended = [event.handle.number for event in self.engine.step() if isinstance(event, FinishEvent)]
        self.engine.check()
        entries = [entry for line in self.lines if line["op"] == "step" for entry in line["entries"]]
        assert not self.live or any(own_start < stop for *_, own_start, stop in entries), "a step computes nothing"
        if oldest is not None:
            assert list(oldest.key) in [entry[:2] for entry in entries], "the oldest that runs does not go on"
        self._note_starts({number for number, *_ in entries})
        for number in ended:
            assert self.now <= self.live.pop(number), "it took too long"

    def _note_starts(self, planned: set[int]) -> None:
        started = planned & self.waiting.keys()
        for number in started:
            del self.waiting[number]
        for number in self.waiting:
            self.waiting[number] += sum(number < other for other in started)
            assert self.waiting[number] <= self.engine.config.max_bypass, "overtaken too often"


def is_beam(engine: Engine, handle: Handle) -> bool:
    return isinstance(engine._loop.requests.find(handle).params, BeamParams)


@st.composite
def any_params(draw: st.DrawFn) -> Params:
    max_tokens = draw(st.integers(1, 8))
    if draw(st.integers(0, 4)) == 0:
        return BeamParams(width=draw(st.integers(1, 3)), max_tokens=max_tokens)
    return SamplingParams(max_tokens=max_tokens, n=draw(st.sampled_from([1, 1, 2, 3])), seed=draw(st.integers(0, 3)))


@given(data=st.data())
def test_everything_ends_in_time(data: st.DataObject) -> None:
    """Requests of all kinds and priorities, forks and pins in a pool that just holds the largest of them."""
    page_size = data.draw(st.sampled_from([1, 2, 4]))
    prompts = [prompt[:24] or [0] for prompt in data.draw(prefix_families(page_size=4, max_size=6))]
    works = data.draw(st.lists(st.tuples(st.sampled_from(prompts), any_params()), min_size=1, max_size=8))
    largest = [branch_pages(len(p), len(p) + s.max_tokens - 1, s.num_branches, page_size) for p, s in works]
    lines: list[dict[str, Any]] = []
    with Engine(
        HashModel(vocab=VOCAB),
        num_pages=max(*largest, FORKED.max_tokens) + data.draw(st.sampled_from([0, 0, 1, 4, 16])),
        page_size=page_size,
        token_budget=data.draw(st.sampled_from([1, 2, 4, 64])),
        prefill_chunk=data.draw(st.sampled_from([None, 3])),
        max_running=data.draw(st.sampled_from([1, 2, 4, 64])),
        max_bypass=data.draw(st.sampled_from([0, 1, 3, 16])),
        pin_budget=1.0,
        poison=True,
        record=lines.append,
    ) as engine:
        actions = data.draw(st.lists(st.sampled_from(["submit", "submit", "step", "step", "fork", "pin"])))
        branches = max(params.num_branches for _, params in works)
        rows = max(most_rows(len(prompt), params) for prompt, params in [*works, ([0], FORKED)])
        patience = (len(actions) * branches + branches + branches * engine.config.max_bypass) * rows
        life = Life(engine, lines, patience)
        for action in actions:
            match action:
                case "submit":
                    prompt, asked = data.draw(st.sampled_from(works))
                    life.submit(prompt, asked, data.draw(st.sampled_from([0, 0, 1, 5])))
                case "step":
                    life.step()
                case "fork" if life.live:
                    life.fork(data.draw(st.sampled_from(sorted(life.live))))
                case "pin":
                    life.pin(data.draw(st.sampled_from(prompts)))
        while life.live:
            life.step()


@pytest.mark.parametrize("max_running", [1, 64])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_pins_give_way_to_any_beam(make_engine: MakeEngine, page_size: int, max_running: int) -> None:
    """The first beam has its logits and waits for the others, which have no room."""
    search = BeamParams(width=4, max_tokens=8)
    prompt, pinned = [1] * 4, [2] * 20
    num_pages = branch_pages(4, 11, 4, page_size)
    engine = make_engine(num_pages=num_pages, page_size=page_size, max_running=max_running, pin_budget=1.0)
    expected = make_engine(page_size=page_size).beam_search([prompt], search)[0].choices
    engine.generate([pinned], SamplingParams(max_tokens=1))
    engine.pin(pinned)
    engine.submit(prompt, search)
    ended = [event for _ in range(1_000) for event in engine.step() if isinstance(event, FinishEvent)]
    assert ended, "the search stalls"
    assert ended[0].output.choices == expected


@pytest.mark.parametrize("num_pages", range(28, 34))
def test_no_branch_of_the_oldest_request_is_preempted(make_engine: MakeEngine, num_pages: int) -> None:
    """Pages are kept back for all of it, so it ends first even beside one of higher priority."""
    engine = make_engine(num_pages=num_pages, page_size=1)
    oldest = engine.submit([1] * 4, SamplingParams(n=2, max_tokens=12))
    engine.step()
    engine.submit([2] * 2, SamplingParams(max_tokens=20), priority=5)
    waiting: set[int] = set()
    while oldest in {request.handle for request in engine._loop.requests}:
        waiting |= {sequence.number for sequence in engine._loop.scheduler.waiting}
        engine.step()
    assert oldest.number not in waiting


def test_nobody_who_waits_is_looked_at_while_others_only_decode(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep queue costs nothing in steps that cannot start anybody."""
    engine = make_engine(num_pages=40, page_size=4)
    for i in range(100):
        engine.submit([i] * 20, SamplingParams(max_tokens=20, temperature=0.0))
    looked_up: list[int] = []
    match = engine._loop.cache.match

    def watched(tokens: Tokens, namespace: str = "") -> Match:
        looked_up.append(engine._loop.step)
        return match(tokens, namespace)

    monkeypatch.setattr(engine._loop.cache, "match", watched)
    ends = [engine._loop.step for _ in range(100) for event in engine.step() if isinstance(event, FinishEvent)]
    preempted = engine.stats().counters.preemptions
    assert 0 < len(set(looked_up)) <= 3 * (len(set(ends)) + preempted + 1), "only where one began, ended or gave way"


def most_rows(prompt_len: int, params: Params) -> int:
    """Rows that one branch computes at most; a beam may be computed anew for each token."""
    longest = prompt_len + params.max_tokens - 1
    return longest * (params.max_tokens if isinstance(params, BeamParams) else 1)


def test_a_request_counts_once_however_often_it_is_admitted(make_engine: MakeEngine) -> None:
    """Preempted ones come back, and prompts under way take over what others have computed: no further requests."""
    engine = make_engine(num_pages=14, page_size=4, prefill_chunk=3)
    prompts = [[i] * 5 for i in range(4)] + [[7] * 12] * 3
    engine.generate(prompts, SamplingParams(max_tokens=20, temperature=0.0))
    stats = engine.stats()
    assert stats.counters.preemptions
    assert stats.cache.opened == len(prompts)
    assert stats.cache.opened_tokens == sum(len(prompt) - 1 for prompt in prompts)
    assert stats.cache.hit_tokens <= 2 * 11
