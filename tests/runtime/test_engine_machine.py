"""Random lives of an engine: submit, fork, abort, step and reset in any order, in a pool that is always too small."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, note, settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from radixrt.radix import BrokenInvariant, LiveTables
from radixrt.radix.testing import prefix_families
from radixrt.runtime import Engine, FinishEvent, Handle, InvalidRequest, Output, SamplingParams, TokenEvent, replay
from radixrt.runtime.testing import HashModel

VOCAB = 20


class EngineMachine(RuleBasedStateMachine):
    """Whatever happens around it, each request gets the tokens it would get alone. A failure prints its record."""

    handles = Bundle("handles")

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        slack=st.integers(0, 8),
        token_budget=st.sampled_from([2, 5, 64]),
        prefill_chunk=st.sampled_from([None, 3]),
        max_running=st.sampled_from([2, 8]),
        prompts=prefix_families(page_size=4, max_size=5),
    )
    def start(self, page_size: int, slack: int, prompts: list[list[int]], **given_settings: Any) -> None:
        self.prompts = [prompt[:40] or [0] for prompt in prompts]
        longest = max(map(len, self.prompts)) + 3 * 10
        self.lines: list[dict[str, Any]] = []
        self.engine = Engine(
            HashModel(vocab=VOCAB),
            num_pages=slack + -(-longest // page_size),
            page_size=page_size,
            poison=True,
            record=self.lines.append,
            **given_settings,
        )
        self.live: dict[Handle, list[int]] = {}  # tokens seen in events
        self.generation: dict[Handle, int] = {}
        self.over: set[Handle] = set()  # ended, though the event may not have been read

    @rule(target=handles, which=st.integers(0, 4), length=st.integers(1, 10), seed=st.sampled_from([None, 1]))
    def submit(self, which: int, length: int, seed: int | None) -> Handle:
        params = SamplingParams(max_tokens=length, temperature=0.0 if seed is None else 1.0, seed=seed)
        handle = self.engine.submit(self.prompts[which % len(self.prompts)], params)
        self.live[handle], self.generation[handle] = [], 0
        return handle

    @rule(target=handles, parent=handles, length=st.integers(1, 10))
    def fork(self, parent: Handle, length: int) -> Handle:
        params = SamplingParams(max_tokens=length, temperature=0.0)
        if parent in self.over:
            with pytest.raises(InvalidRequest, match="has ended"):
                self.engine.fork(parent, params=params)
            return parent
        if self.generation[parent] == 2:  # deeper ones need not fit the pool
            return parent
        (child,) = self.engine.fork(parent, params=params)
        self.live[child], self.generation[child] = [], self.generation[parent] + 1
        return child

    @rule(handle=handles)
    def abort(self, handle: Handle) -> None:
        self.engine.abort(handle)
        self.over.add(handle)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    self.live[event.handle].append(event.token_id)
                else:
                    self.ended(event)

    @rule()
    def reset(self) -> None:
        if self.engine.stats().num_running:
            with pytest.raises(LiveTables):
                self.engine.reset_cache()
        else:
            self.engine.reset_cache()

    def ended(self, event: FinishEvent) -> None:
        """Its last event: all tokens were told, and they are those of a lone run."""
        self.over.add(event.handle)
        choice = event.output.choices[0]
        assert tuple(self.live.pop(event.handle)) == choice.token_ids
        assert choice.finish_reason in ("length", "abort")
        assert choice.token_ids == lone(event.output, self.lines)[: len(choice.token_ids)]
        usage = event.output.usage
        if choice.finish_reason == "length":
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
            stats = self.engine.stats().cache
            assert stats.num_free + stats.num_cached == stats.num_pages
            assert stats.num_tables == stats.num_held == 0
            assert replay(save(self.lines)).difference is None
        except BaseException:
            note(f"replay with: radixrt replay {save(self.lines)}")
            raise


def lone(output: Output, lines: list[dict[str, Any]]) -> tuple[int, ...]:
    """The tokens of the same request in a fresh engine without a cache; forks are greedy, so a prompt tells all."""
    submitted = [line for line in lines if line["op"] in ("submit", "fork")]
    line = submitted[output.handle.number]
    with Engine(HashModel(vocab=VOCAB), num_pages=128, prefix_cache=False) as engine:
        params = SamplingParams(**line["params"])
        return engine.generate([list(output.prompt_token_ids)], params)[0].choices[0].token_ids


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
                self.engine._cache.pool.refs[1] += 1  # what a leak looks like
                self.audited()

    once = settings(max_examples=20, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises(BrokenInvariant):
        run_state_machine_as_test(Broken, settings=once)
    path = Path(tempfile.gettempdir()) / "radixrt-failure.jsonl"
    assert replay(path).difference is None
    assert replay(path).num_lines >= 6
