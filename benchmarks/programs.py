"""Programs of many calls on the real model: with forks, as prompts to the same cache, and as prompts without one.

The language's own cost beside it, on the hash model. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

from _harness import Goal, Options, Report, Variant, time_rounds

# isort: split
from pydantic import BaseModel

import radixrt as rx
from radixrt.frontend.backend import Asked, EngineBackend
from radixrt.runtime import Event, FinishEvent, Handle, SamplingParams, load_model
from radixrt.runtime.testing import ByteTokenizer, HashModel

MODEL = "smollm2-135m"
QUESTIONS = Path(__file__).parent / "data" / "gsm8k.json"
FORKS, PROMPTS, UNCACHED = "forks", "prompts, cached", "prompts, no cache"
ASPECTS = ("style", "facts", "length", "logic", "tone", "depth", "order", "grammar")
DEPTH = 100  # generations of one state whose overhead is measured
MARKS = (1, 2, 3, 4, 5)


class Person(BaseModel):
    name: str
    age: int


@rx.program
async def tree_of_thought(s: rx.State, *, branching: int, depth: int) -> None:
    """A whole tree: every node thinks on, all of them at once."""
    s += "Task: plan a small garden for a balcony that faces north, with herbs, for little money.\n"

    async def grow(state: rx.State, level: int) -> None:
        if level == depth:
            return
        async with state.fork(branching) as branches:

            async def step(branch: rx.State) -> None:
                branch += f"Step {level + 1}, idea {branch.path[-1] + 1}:"
                await branch.gen(max_tokens=12, temperature=0.0, ignore_eos=True)
                await grow(branch, level + 1)

            await branches.map(step)

    await grow(s, 0)


@rx.program
async def judge(s: rx.State, *, essay: str, aspects: Sequence[str]) -> list[float]:
    s += f"Essay: {essay}\nMarks from 1 (poor) to 5 (excellent).\n"

    async def mark(branch: rx.State, aspect: str) -> float:
        branch += f"A word on its {aspect}:"
        await branch.gen(max_tokens=12, temperature=0.0, ignore_eos=True)
        branch += f"\nIts {aspect} deserves "
        choice = branch.choose(MARKS)
        await choice
        return choice.expected()

    async with s.fork(aspects) as branches:
        return await branches.map(mark)


@rx.program
async def few_shot(s: rx.State, *, shots: str, question: str) -> str:
    s += f"{shots}Question: {question}\nAnswer:"
    return await s.gen(max_tokens=24, temperature=0.0, ignore_eos=True)


@rx.program
async def extract(s: rx.State, *, shots: str, text: str) -> Person:
    s += f'{shots}Text: {text}\nWho is it, as JSON such as {{"name": "Ann", "age": 3}}?\n'
    return await s.gen(Person, max_tokens=60, temperature=0.0)


@rx.program
async def chat(s: rx.State, *, turns: list[str]) -> None:
    with s.system():
        s += "Answer in one short sentence."
    for turn in turns:
        with s.user():
            s += turn
        with s.assistant():
            await s.gen(max_tokens=24, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Workload:
    """What one row of the table runs on a backend."""

    name: str
    run: Callable[[Any], object]


class AsPrompts:
    """An engine to which every generation is a prompt of its own: what a client sends that has no forks.

    Text is tokenised anew each time, between the special tokens, as a server does with what it is sent.
    """

    def __init__(self, engine: rx.Engine) -> None:
        self._backend = backend = EngineBackend(engine)
        self._tokens: dict[Handle, list[int]] = {}
        self.tokenizer, self.vocab_size, self.eos_token_ids = (
            backend.tokenizer,
            backend.vocab_size,
            backend.eos_token_ids,
        )
        self.abort, self.pin, self.unpin, self.explain = backend.abort, backend.pin, backend.unpin, backend.explain
        self.begin_anew = backend.begin_anew

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int) -> Handle:
        handle = self._backend.submit(self._anew(tokens), params, namespace, priority=priority)
        self._tokens[handle] = list(tokens)
        return handle

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        tokens = [*self._tokens[handle][:at], *(text or ())]
        return [self.submit(tokens, params, "", priority=0) for _ in range(n)]

    def release(self, handle: Handle) -> None:
        self._backend.release(handle)

    def step(self) -> list[Event]:
        events = self._backend.step()
        for event in events:
            if isinstance(event, FinishEvent) and event.handle in self._tokens:  # else a program's before this
                self._tokens[event.handle] += event.output.choices[0].token_ids
        return events

    @property
    def is_idle(self) -> bool:
        return self._backend.is_idle

    def _anew(self, tokens: list[int]) -> list[int]:
        """The ids of the text of these."""
        ids: list[int] = []
        text = b""
        for token_id in [*tokens, None]:
            data = self.tokenizer.token_bytes(token_id) if token_id is not None else b""
            text += data
            if not data:
                ids += self.tokenizer.encode(text.decode(errors="replace"))
                ids += [token_id] if token_id is not None else []
                text = b""
        return ids


def workloads(*, quick: bool) -> list[Workload]:
    data = json.loads(QUESTIONS.read_text())
    examples = data["examples"][: 2 if quick else 8]
    shots = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in examples)
    questions = data["questions"][: 4 if quick else 20]
    people = [
        f"{name} turned {age} last week. {question}"
        for name, age, question in zip(
            ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal"),
            range(20, 60, 5),
            data["questions"],
            strict=False,
        )
    ][: 2 if quick else 8]
    essay = " ".join(data["questions"][: 1 if quick else 8])
    aspects = ASPECTS[: 3 if quick else 8]
    branching, depth = (2, 2) if quick else (4, 3)
    return [
        Workload(
            f"tree of thought, {branching} branches, depth {depth}",
            lambda engine: tree_of_thought.run(engine, branching=branching, depth=depth),
        ),
        Workload(
            f"judge of {len(aspects)} aspects",
            lambda engine: judge.run(engine, essay=essay, aspects=aspects),
        ),
        Workload(
            f"{len(questions)} questions after {len(examples)} examples",
            lambda engine: check(few_shot.batch(engine, [{"shots": shots, "question": one} for one in questions])),
        ),
        Workload(
            f"JSON from {len(people)} texts",
            lambda engine: check(extract.batch(engine, [{"shots": shots, "text": one} for one in people])),
        ),
        Workload(
            f"chat of {2 if quick else 8} turns",
            lambda engine: chat.run(engine, turns=data["questions"][: 2 if quick else 8]),
        ),
    ]


def check(results: Sequence[rx.Ok[Any] | rx.Failed]) -> None:
    """Raise what kept a row from being generated; a value that max_tokens cut was generated."""
    for result in results:
        if isinstance(result, rx.Failed) and not isinstance(result.error, rx.GenerationFailed):
            raise result.error


def measure(report: Report, workload: Workload, engine: rx.Engine, uncached: rx.Engine) -> None:
    """One program in each of the ways, every time from an empty cache."""
    backends = {FORKS: engine, PROMPTS: AsPrompts(engine), UNCACHED: AsPrompts(uncached)}
    computed = dict.fromkeys(backends, 0)

    def run(name: str, counted: rx.Engine) -> None:
        before = counted.stats().counters.computed
        workload.run(backends[name])
        computed[name] = counted.stats().counters.computed - before

    def variant(name: str) -> Variant:
        counted = uncached if name == UNCACHED else engine
        return Variant(prepare=counted.reset_cache, run=lambda _: run(name, counted))

    engine.reset_cache()
    yardstick = rx.Yardstick(engine)
    workload.run(yardstick)
    rounds, warmups = (1, 0) if report.options.quick else (3, 1)
    variants = {name: variant(name) for name in backends}
    times = time_rounds(variants, rounds=rounds, warmups=warmups, clock=report.options.clock)
    report.section(workload.name, "over forks")
    for name, timing in times.items():
        shown = f"{timing.ratio(times[FORKS]):.2f} x" if name != FORKS else ""
        report.add(f"{name}, seconds", timing.median, "s", baseline=shown, timing=timing, against=times[FORKS])
    for name, count in computed.items():
        goal = Goal.at_most(yardstick.ideal) if name == FORKS else None
        shown = f"ideal {yardstick.ideal:,}" if name == FORKS else f"{count / computed[FORKS]:.2f} x"
        report.add(f"{name}, computed", count, "tokens", goal=goal, baseline=shown)


@rx.program
def long_chain(s: rx.State, *, depth: int) -> None:
    for _ in range(depth):
        s += "a step:"
        s.gen(max_tokens=1, temperature=0.0)


def chain_by_hand(engine: rx.Engine, depth: int) -> None:
    """The requests of `long_chain`, without the language."""
    params = rx.SamplingParams(max_tokens=1, temperature=0.0)
    text = list(b"a step:")
    handle = engine.submit(text, params)
    for number in range(depth):
        while not any(isinstance(event, FinishEvent) for event in engine.step()):
            pass
        if number < depth - 1:
            [child] = engine.fork(handle, 1, params, text=text)
            engine.release(handle)
            handle = child
    engine.release(handle)


@rx.program
def many_appends(s: rx.State, *, count: int) -> None:
    for _ in range(count):
        s += "a few words more, "


def measure_language(report: Report) -> None:
    """What the language itself takes: a model that costs next to nothing under it."""
    engine = rx.Engine(HashModel(vocab=256), tokenizer=ByteTokenizer(), num_pages=1024, page_size=16)
    variants = {
        "by hand": Variant(prepare=engine.reset_cache, run=lambda _: chain_by_hand(engine, DEPTH)),
        "language": Variant(prepare=engine.reset_cache, run=lambda _: long_chain.run(engine, depth=DEPTH)),
        "80": Variant(run=lambda _: many_appends.run(engine, count=80)),
        "800": Variant(run=lambda _: many_appends.run(engine, count=800)),
    }
    rounds = 5 if report.options.quick else 21
    times = time_rounds(variants, rounds=rounds, warmups=1, clock=report.options.clock)
    report.section(f"the language on the hash model, {DEPTH} generations deep")
    extra = times["language"].median - times["by hand"].median
    report.add("overhead of a generation", 1e3 * extra / DEPTH, "ms", goal=Goal.at_most(1))
    report.add("800 appends over 80", times["800"].ratio(times["80"]), "x", goal=Goal.at_most(10))
    engine.close()


def main() -> int:
    report = Report(options=Options.parse(__doc__, clock="wall"))
    measure_language(report)
    engine, uncached = (
        rx.Engine(model, tokenizer=tokenizer, num_pages=1024, prefix_cache=prefix_cache)
        for prefix_cache in (True, False)
        for model, tokenizer in [load_model(MODEL)]
    )
    for workload in workloads(quick=report.options.quick):
        measure(report, workload, engine, uncached)
    engine.close()
    uncached.close()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
