"""Random lives of an engine: submit, fork, abort, step and reset in any order, in a pool that is always too small."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, note, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from radixrt.radix import BrokenInvariant, LiveTables
from radixrt.radix.testing import prefix_families
from radixrt.runtime import (
    CacheUse,
    Engine,
    FinishEvent,
    Handle,
    InvalidRequest,
    Output,
    PinnedPrefix,
    SamplingParams,
    ScoreParams,
    TokenEvent,
    replay,
)
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.testing import HashModel

from .test_scores import direct

VOCAB = 20
LENGTH, TEXT = 10, 3  # most tokens that one request generates, and that a fork appends


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens around it, each choice gets the tokens it would get alone. A failure prints its record."""

    handles = Bundle("handles")

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        slack=st.integers(0, 8),
        token_budget=st.sampled_from([2, 5, 64]),
        prefill_chunk=st.sampled_from([None, 3]),
        max_running=st.sampled_from([2, 8]),
        max_bypass=st.sampled_from([0, 2, 16]),
        num_host_pages=st.sampled_from([0, 3, 30]),
        swap=st.sampled_from(["auto", "always"]),
        prompts=prefix_families(page_size=4, max_size=5),
    )
    def start(self, page_size: int, slack: int, prompts: list[list[int]], **given_settings: Any) -> None:
        self.prompts = [prompt[:40] or [0] for prompt in prompts]
        longest = max(map(len, self.prompts)) + 2 * (LENGTH + TEXT)
        # A shorter prompt can need more than the longest: what it shares ends early in a page.
        needs = [branch_pages(shared, shared + LENGTH, 3, page_size) for shared in range(1, longest + 1)]
        self.lines: list[dict[str, Any]] = []
        self.engine = Engine(
            HashModel(vocab=VOCAB),
            num_pages=slack + max(needs),
            page_size=page_size,
            poison=True,
            record=self.lines.append,
            **given_settings,
        )
        self.live: dict[Handle, list[list[int]]] = {}  # tokens seen in events, by choice
        self.generation: dict[Handle, int] = {}
        self.pins: list[PinnedPrefix] = []
        self.released: set[Handle] = set()

    @rule(
        target=handles,
        which=st.integers(0, 4),
        length=st.integers(1, LENGTH),
        seed=st.sampled_from([None, 1]),
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 1, -1]),
        cache=st.sampled_from(["all", "all", "prompt", "none"]),
    )
    def submit(self, which: int, length: int, seed: int | None, n: int, priority: int, cache: CacheUse) -> Handle:
        params = SamplingParams(n=n, max_tokens=length, temperature=0.0 if seed is None else 1.0, seed=seed)
        prompt = self.prompts[which % len(self.prompts)]
        handle = self.engine.submit(prompt, params, priority=priority, cache=cache)
        self.live[handle], self.generation[handle] = [[] for _ in range(n)], 0
        return handle

    @rule(target=handles, which=st.integers(0, 4), start=st.integers(1, 40), priority=st.sampled_from([0, 1, -1]))
    def score(self, which: int, start: int, priority: int) -> Handle:
        prompt = self.prompts[which % len(self.prompts)]
        handle = self.engine.submit(prompt, ScoreParams(start=min(start, len(prompt))), priority=priority)
        self.live[handle], self.generation[handle] = [[]], 0
        return handle

    @rule(
        target=handles,
        parent=handles,
        length=st.integers(1, LENGTH),
        text=st.lists(st.integers(0, VOCAB - 1), max_size=TEXT),
        n=st.sampled_from([1, 1, 3]),
        data=st.data(),
    )
    def fork(self, parent: Handle, length: int, text: list[int], n: int, data: st.DataObject) -> Handle:
        params = SamplingParams(n=n, max_tokens=length, temperature=0.0)
        if parent in self.released:
            with pytest.raises(InvalidRequest, match="was released"):
                self.engine.fork(parent, params=params)
            return parent
        if self.generation[parent] == 2:  # deeper ones need not fit the pool
            return parent
        request = self.engine._loop.requests.find(parent)
        choice = data.draw(st.integers(0, len(request.paths) - 1))
        at = data.draw(st.none() | st.integers(1, request.branch(choice).num_tokens))
        (child,) = self.engine.fork(parent, params=params, text=text or None, choice=choice, at=at)
        self.live[child], self.generation[child] = [[] for _ in range(n)], self.generation[parent] + 1
        return child

    @rule(handle=handles)
    def abort(self, handle: Handle) -> None:
        self.engine.abort(handle)

    @rule(handle=handles)
    def release(self, handle: Handle) -> None:
        self.engine.release(handle)
        self.released.add(handle)

    @rule(handle=handles, data=st.data())
    def truncate(self, handle: Handle, data: st.DataObject) -> None:
        """What was told of a live one beyond is void."""
        if handle in self.released:
            return
        request = self.engine._loop.requests.find(handle)
        choice = data.draw(st.integers(0, len(request.branches) - 1))
        branch = request.branch(choice)
        kept = data.draw(st.integers(0, branch.num_output_tokens))
        self.engine.truncate(handle, branch.output_start + kept, choice=choice)
        if choice not in request.ended:
            for told in self.live[handle] if len(request.branches) == 1 else [self.live[handle][choice]]:
                del told[kept:]

    @rule(parent=handles, branch=handles)
    def adopt(self, parent: Handle, branch: Handle) -> None:
        with suppress(InvalidRequest):  # they are no parent and fork, or live
            self.engine.adopt(parent, branch)
            self.generation[parent] = self.generation[branch]
            self.released.add(branch)

    @rule(which=st.integers(0, 4), ttl=st.sampled_from([None, 3]))
    def pin(self, which: int, ttl: int | None) -> None:
        with suppress(InvalidRequest):  # over the budget
            self.pins.append(self.engine.pin(self.prompts[which % len(self.prompts)], ttl=ttl))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            self.engine.unpin(data.draw(st.sampled_from(self.pins)))

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    self.live[event.handle][event.choice].append(event.token_id)
                elif isinstance(event, FinishEvent):
                    self.ended(event)

    @rule()
    def reset(self) -> None:
        stats = self.engine.stats()
        if stats.num_running or stats.cache.num_pins:
            with pytest.raises(LiveTables):
                self.engine.reset_cache()
        else:
            self.engine.reset_cache()

    def ended(self, event: FinishEvent) -> None:
        """Its last event: all tokens were told, and they are those of a lone run."""
        choices = event.output.choices
        assert self.live.pop(event.handle) == [list(choice.token_ids) for choice in choices]
        if (score := event.output.score) is not None:
            assert choices[0].finish_reason in ("stop", "abort")
            if score.error is None:
                told = direct(list(score.token_ids), vocab=VOCAB)[score.start - 1 :]
                assert score.logprobs == pytest.approx(told, abs=1e-9)
            return
        expected = lone(event.output, self.lines)
        for choice, alone in zip(choices, expected, strict=True):
            assert choice.finish_reason in ("length", "abort")
            assert choice.token_ids == alone[: len(choice.token_ids)]
        usage = event.output.usage
        if all(choice.finish_reason == "length" for choice in choices):
            assert usage.cached_tokens + usage.computed_tokens + usage.recomputed_tokens == usage.prompt_tokens

    @invariant()
    def audited(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.engine.check()
            except Exception:
                note(f"replay with: radixrt replay {save(self.lines)}")
                raise

    def teardown(self) -> None:
        """Everything ends in a bounded number of steps, every page is free or cached, and the record replays."""
        if not hasattr(self, "engine"):
            return
        try:
            self.engine.check()
            for _ in range(2_000):
                if not self.live:
                    break
                self.step(1)
            assert not self.live, "the engine stalls"
            for pinned in self.pins:
                self.engine.unpin(pinned)
            stats = self.engine.stats().cache
            assert stats.num_free + stats.num_cached == stats.num_pages
            assert stats.num_host_free + stats.num_host_cached == stats.num_host_pages
            assert stats.num_tables == stats.num_held == 0
            assert replay(save(self.lines)).difference is None
        except BaseException:
            note(f"replay with: radixrt replay {save(self.lines)}")
            raise


def lone(output: Output, lines: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The choices of the same request in a fresh engine without a cache; forks are greedy, so a prompt tells all."""
    submitted = [line for line in lines if line["op"] in ("submit", "fork")]
    line = submitted[output.handle.number]
    with Engine(HashModel(vocab=VOCAB), num_pages=128, prefix_cache=False) as engine:
        params = SamplingParams(**line["params"])
        (whole,) = engine.generate([list(output.prompt_token_ids)], params)
        return [choice.token_ids for choice in whole.choices]


def save(lines: list[dict[str, Any]]) -> Path:
    path = Path(tempfile.gettempdir()) / "radixrt-failure.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_engine_machine(profile: str) -> None:
    deep = profile == "deep"
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(max_examples=3_000 if deep else 80, stateful_step_count=60 if deep else 30),
    )


def test_a_failure_prints_a_record_that_replays() -> None:
    class Broken(EngineMachine):
        @invariant()
        def fails(self) -> None:
            if len(getattr(self, "lines", [])) > 6:
                self.engine._loop.cache.pool.refs[1] += 1  # what a leak looks like
                self.audited()

    once = settings(max_examples=20, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises(BrokenInvariant):
        run_state_machine_as_test(Broken, settings=once)
    path = Path(tempfile.gettempdir()) / "radixrt-failure.jsonl"
    assert replay(path).difference is None
    assert replay(path).num_lines >= 6
