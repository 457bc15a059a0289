"""Interrupts at any moment in the runtime or the cache: what is broken off costs what lives and is cached, no more."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from radixrt.radix import LiveTables
from radixrt.runtime import (
    BeamParams,
    Engine,
    Event,
    FinishEvent,
    Grammar,
    Handle,
    InvalidRequest,
    PinnedPrefix,
    SamplingParams,
    ScoreParams,
    replay,
)
from radixrt.runtime.stream import EventStream
from radixrt.runtime.testing import ByteTokenizer, HashModel

from ..interrupts import Interrupter
from .conftest import audit

VOCAB = 60
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 7], [9] * 7]


@dataclass
class Life:
    """An engine with requests of all kinds that wait, run, were preempted and have ended, pins and a stream."""

    engine: Engine
    lines: list[dict[str, Any]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    pins: list[PinnedPrefix] = field(default_factory=list)
    streams: list[EventStream] = field(default_factory=list)
    passed: set[str] = field(default_factory=set)  # the functions that the interrupt went through

    @classmethod
    def begin(cls) -> Life:
        lines: list[dict[str, Any]] = []
        life = cls(
            Engine(
                HashModel(vocab=VOCAB, eos=frozenset([VOCAB - 1])),
                tokenizer=ByteTokenizer(),
                num_pages=22,
                page_size=2,
                num_host_pages=6,
                swap="always",
                poison=True,
                record=lines.append,
            ),
            lines,
        )
        engine = life.engine
        engine.generate([PROMPTS[0]], GREEDY)
        life.pins.append(engine.pin(PROMPTS[0]))
        for prompt, params in (
            (PROMPTS[0], GREEDY),
            (PROMPTS[0], SamplingParams(n=2, max_tokens=7)),
            (PROMPTS[1], BeamParams(width=2, max_tokens=4)),
            (PROMPTS[2], ScoreParams()),
            ([40 + i for i in range(9)], SamplingParams(max_tokens=9, grammar=Grammar.regex("[ -9]{9}"))),
        ):
            life.handles.append(engine.submit(prompt, params))
        life.step(2)
        life.streams.append(engine.stream(PROMPTS[1], GREEDY))
        life.step(2)
        return life

    def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.events += self.engine.step()


def fork_and_step(life: Life) -> None:
    life.handles += life.engine.fork(life.handles[0], n=2)
    life.handles += life.engine.fork(Handle(0), params=GREEDY, text=[5, 6])
    life.step()


def truncate(life: Life) -> None:
    life.engine.truncate(life.handles[0], len(PROMPTS[0]) + 1)
    life.engine.truncate(Handle(0), len(PROMPTS[0]) + 2)


def adopt(life: Life) -> None:
    [child] = life.engine.fork(Handle(0), params=GREEDY)
    life.engine.abort(child)
    life.engine.adopt(Handle(0), child)


def pins(life: Life) -> None:
    life.pins.append(life.engine.pin(PROMPTS[0], ttl=2))
    life.engine.unpin(life.pins[0])


def generate(life: Life) -> None:
    life.engine.generate([[1, 2, 3, 8], [1, 2]], GREEDY)


def steps(life: Life) -> None:
    life.step(3)


def release(life: Life) -> None:
    for handle in (Handle(0), *life.handles):
        life.engine.release(handle)


def abort(life: Life) -> None:
    for handle in life.handles:
        life.engine.abort(handle)


def close_stream(life: Life) -> None:
    life.streams.pop().close()


def reset(life: Life) -> None:
    abort(life)
    close_stream(life)
    life.engine.unpin(life.pins[0])
    life.engine.reset_cache()


OPERATIONS: list[Callable[[Life], None]] = [
    steps,
    fork_and_step,
    truncate,
    adopt,
    pins,
    generate,
    release,
    abort,
    close_stream,
    reset,
]


def moments(operation: Callable[[Life], None], profile: str) -> list[int]:
    """At which moments an operation is interrupted: a few, some hundreds of up to 35,000 in deep."""
    life = Life.begin()
    with Interrupter() as counted:
        operation(life)
    audit(life.engine)
    count = min(counted.num_moments, 600 if profile == "deep" else 5)
    return sorted(Random(operation.__name__).sample(range(counted.num_moments), count))


def alone(prompts: list[list[int]], params: SamplingParams) -> list[tuple[int, ...]]:
    with Engine(HashModel(vocab=VOCAB, eos=frozenset([VOCAB - 1])), num_pages=99, prefix_cache=False) as engine:
        return [output.choices[0].token_ids for output in engine.generate(prompts, params)]


def go_on(life: Life) -> None:
    """The engine is sound, tells the end of each request once, and answers as a fresh one does."""
    engine = life.engine
    engine.check()
    for pinned in life.pins:
        engine.unpin(pinned)
    for _ in range(60):
        life.step()
        engine.check()
        if not engine.stats().num_running + engine.stats().num_waiting:
            break
    terminal = [event.handle for event in life.events if isinstance(event, FinishEvent)]
    assert [terminal.count(handle) for handle in life.handles] == [1] * len(life.handles)
    assert len(terminal) == len(set(terminal))
    for stream in life.streams:
        assert [isinstance(event, FinishEvent) for event in stream][-1:] == [True]
    for params in (GREEDY, SamplingParams(max_tokens=6, seed=7)):
        outputs = engine.generate(PROMPTS, params)
        assert [output.choices[0].token_ids for output in outputs] == alone(PROMPTS, params)
    engine.check()


def interrupted(operation: Callable[[Life], None], k: int, error: BaseException) -> Life:
    """A life in which an operation met an error at its k-th moment. Where that is raised, it is as itself."""
    life = Life.begin()
    with suppress(type(error)), Interrupter(k, error):
        operation(life)
    life.passed = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    return life


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_anywhere_leaves_an_engine_that_goes_on(
    operation: Callable[[Life], None], profile: str, tmp_path: Path
) -> None:
    """Or an error that a signal's handler raises, which surfaces as itself outside of model, draws and tokenizers."""
    for k in moments(operation, profile):
        error = KeyboardInterrupt() if k % 4 else TimeoutError("an alarm")
        life = interrupted(operation, k, error)
        go_on(life)
        audit(life.engine)
        was_lost = any(line["op"] == "lost" for line in life.lines)
        # Else a step or a request's tokenizer failed, of which a record says nothing.
        if life.passed.isdisjoint({"_run", "_append"}) or was_lost:
            path = tmp_path / f"{k}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in life.lines))
            assert replay(path).difference is None


def broken() -> Life:
    life = Life.begin()
    life.engine._loop._broken_off = "an interrupt broke off a test"
    return life


def test_to_begin_anew_may_be_interrupted_too(profile: str) -> None:
    life = broken()
    with Interrupter() as counted:
        life.engine.check()
    moments = range(counted.num_moments)
    for k in moments if profile == "deep" else Random(1).sample(moments, 8):
        life = broken()
        with pytest.raises(KeyboardInterrupt), Interrupter(k, KeyboardInterrupt()):
            life.engine.check()
        go_on(life)
        audit(life.engine)


def test_what_is_lost_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In planning: who lives ends with an error, once; what had ended cannot be forked; released is released."""
    life = Life.begin()
    engine, before = life.engine, {event.handle for event in life.events if isinstance(event, FinishEvent)}

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._loop.scheduler, "plan", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    life.step()
    ended = {event.handle: event.output for event in life.events if isinstance(event, FinishEvent)}
    assert set(ended) == set(life.handles)
    assert set(ended) > before
    for handle in set(ended) - before:
        for choice in ended[handle].choices:
            assert re.fullmatch(
                "KeyboardInterrupt broke off a step in the middle, .*; submit again", choice.error or ""
            )
    with pytest.raises(InvalidRequest, match=r"before the engine was interrupted .* submit its tokens anew"):
        engine.fork(Handle(0))
    engine.abort(Handle(0))
    engine.release(Handle(0))
    assert engine.stats().cache.num_cached == engine.stats().cache.num_pins == 0
    [*_, last] = life.streams[0]
    assert isinstance(last, FinishEvent)
    assert last.output.choices[0].finish_reason == "error"
    audit(engine)


def test_who_was_broken_off_can_have_the_engine_begin_anew() -> None:
    life = Life.begin()
    life.engine.begin_anew(KeyboardInterrupt())
    assert life.engine.stats().cache.num_cached == 0
    go_on(life)
    ended = {event.handle: event.output for event in life.events if isinstance(event, FinishEvent)}
    said = {choice.error for output in ended.values() for choice in output.choices if choice.error is not None}
    assert len(said) == 1
    assert "KeyboardInterrupt broke off a program in the middle" in said.pop()
    audit(life.engine)
    life.engine.close()
    life.engine.begin_anew(KeyboardInterrupt())


def test_a_refusal_costs_nothing() -> None:
    life = Life.begin()
    cached = life.engine.stats().cache.num_cached
    for refused in (
        lambda: life.engine.submit([], GREEDY),
        lambda: life.engine.fork(Handle(0), at=99),
        life.engine.reset_cache,
    ):
        with pytest.raises((InvalidRequest, LiveTables)):
            refused()
    assert life.engine.stats().cache.num_cached == cached
    audit(life.engine)


def test_an_interrupt_while_a_grammar_is_compiled_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first takes most of a second, and nothing of the engine has changed yet."""
    life = Life.begin()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    cached = life.engine.stats().cache.num_cached
    with monkeypatch.context() as patched:
        patched.setattr(life.engine._loop.grammars, "_compile", interrupt)
        with pytest.raises(KeyboardInterrupt):
            life.engine.generate([[1]], SamplingParams(max_tokens=4, grammar=Grammar.regex("a+")))
    assert life.engine.stats().cache.num_cached == cached
    audit(life.engine)
