"""Whether an answer depends on how it is computed: the same prompts in twelve ways, compared to the bit.

Knows nothing of why a difference arises, nor of the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from radixrt.runtime import Engine, FinishEvent, Model, Output, SamplingParams, Tokenizer, trie_size

TOP = 5  # logprobs compared at each position, beside the chosen token's

Answer = tuple[tuple[int, tuple[float, ...]], ...]  # (token id, its logprob and those of the TOP best) by position
Answers = dict[int, Answer]  # by number of the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked in every way."""

    model: Model
    tokenizer: Tokenizer | None
    prompts: Sequence[list[int]]
    max_tokens: int
    page_size: int = 16

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True, logprobs=TOP)

    @property
    def num_pages(self) -> int:
        """Pages in which all prompts and answers fit, none of them shared, and as many cached."""
        return 2 * sum(self.pages_of(prompt) for prompt in self.prompts)

    def pages_of(self, prompt: list[int]) -> int:
        return -(-(len(prompt) + self.max_tokens) // self.page_size)

    def engine(self, **settings: Any) -> Engine:
        """An engine with an empty cache."""
        settings = {"num_pages": self.num_pages, "page_size": self.page_size} | settings
        return Engine(self.model, tokenizer=self.tokenizer, **settings)


@dataclass(frozen=True, slots=True)
class Way:
    """A name, what runs, and the engine's settings. None instead of answers: it could not be tried."""

    name: str
    run: Callable[[Job, dict[str, Any]], Answers | None]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one way came out; `difference` is None where it gave the bits of the first, or was not tried."""

    name: str
    difference: str | None
    tried: bool = True


def verify(job: Job) -> Iterator[Verdict]:
    """Run every way and compare it with the first: each prompt alone, without a cache. Leaves torch's threads alone."""
    num_threads = torch.get_num_threads()
    expected = alone(job, {"prefix_cache": False})
    yield Verdict("alone, no cache", difference(expected, alone(job, {"prefix_cache": False})))
    try:
        for way in WAYS:
            answers = way.run(job, way.settings)
            found = None if answers is None else difference(expected, answers)
            yield Verdict(way.name, found, tried=answers is not None)
    finally:
        torch.set_num_threads(num_threads)


def alone(job: Job, settings: dict[str, Any]) -> Answers:
    """One prompt after the other; with a cache, each finds what earlier ones left."""
    with job.engine(**settings) as engine:
        return {i: answer(engine.generate([prompt], job.params)[0]) for i, prompt in enumerate(job.prompts)}


def batched(job: Job, settings: dict[str, Any]) -> Answers:
    """All prompts at once."""
    with job.engine(**settings) as engine:
        return _all(engine, job)


def again(job: Job, settings: dict[str, Any]) -> Answers:
    """All at once, twice: the second time everything but one token of each prompt is cached."""
    with job.engine(**settings) as engine:
        _all(engine, job)
        return _all(engine, job)


def again_alone(job: Job, settings: dict[str, Any]) -> Answers:
    """All at once, then one after the other over what that left in the cache."""
    with job.engine(**settings) as engine:
        _all(engine, job)
        return {i: answer(engine.generate([prompt], job.params)[0]) for i, prompt in enumerate(job.prompts)}


def forked(job: Job, settings: dict[str, Any]) -> Answers:
    """Every request forks halfway through its answer; what its child says takes the place of the second half."""
    half = job.max_tokens // 2
    answers: dict[int, Answer] = {}
    with job.engine(**settings) as engine:
        parents = {engine.submit(prompt, job.params): i for i, prompt in enumerate(job.prompts)}
        begun = dict.fromkeys(parents, 0)
        children: dict[Any, int] = {}
        outputs: dict[Any, Output] = {}
        while len(outputs) < len(parents) + len(children):
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    outputs[event.handle] = event.output
                elif event.handle in begun:
                    begun[event.handle] += 1
                    if begun[event.handle] == half:
                        children[engine.fork(event.handle)[0]] = parents[event.handle]
    for parent, i in parents.items():
        answers[i] = answer(outputs[parent])
    for child, i in children.items():
        answers[i] = answers[i][:half] + answer(outputs[child])
    return answers


def preempted(job: Job, settings: dict[str, Any]) -> Answers | None:
    """In the largest pool, found by trying, in which somebody has to give up pages and compute again.

    None where the answers are so short that this happens in no pool.
    """
    rivals = [[*prompt[:1] * (i + 2), *prompt[1:]] for prompt in job.prompts[:2] for i in range(2)]  # hardly shared
    prompts = [*job.prompts, *rivals]
    least = max(map(job.pages_of, prompts))
    first = trie_size(prompts) // job.page_size + 2 * len(prompts)
    for num_pages in range(max(first, least), least - 1, -max(1, (first - least) // 8)):
        with job.engine(**settings, num_pages=num_pages) as engine:
            outputs = engine.generate(prompts, job.params)
            if engine.stats().counters.preemptions:
                return {i: answer(outputs[i]) for i in range(len(job.prompts))}
    return None


def _all(engine: Engine, job: Job) -> Answers:
    return {i: answer(output) for i, output in enumerate(engine.generate(list(job.prompts), job.params))}


def answer(output: Output) -> Answer:
    """The tokens and logprobs of an output, as numbers that are equal only where all bits are."""
    choice = output.choices[0]
    assert choice.logprobs is not None, "they were asked for"
    scores = (tuple(p.logprob for p in (each.sampled, *each.top)) for each in choice.logprobs)
    return tuple(zip(choice.token_ids, scores, strict=True))


def difference(expected: Answers, got: Answers) -> str | None:
    """The first place where an answer is another."""
    for i, want in expected.items():
        have = got[i]
        for at, (one, other) in enumerate(zip(want, have, strict=False)):
            if one[0] != other[0]:
                return f"prompt {i + 1}, token {at + 1}: id {other[0]} instead of {one[0]}"
            if one[1] != other[1]:
                worst = max(abs(a - b) for a, b in zip(one[1], other[1], strict=True))
                return f"prompt {i + 1}, token {at + 1}: the same id, logprobs differ by up to {worst:.1e}"
        if len(want) != len(have):
            return f"prompt {i + 1}: {len(have)} tokens instead of {len(want)}"
    return None


WAYS = (
    Way("alone, over what others left in the cache", alone),
    Way("batched, cold", batched),
    Way("batched, hot", again),
    Way("alone, hot", again_alone),
    Way("batched, no cache", batched, {"prefix_cache": False}),
    Way("in chunks of 7", batched, {"prefill_chunk": 7}),
    Way("in chunks of 100, 130 rows a step", batched, {"prefill_chunk": 100, "token_budget": 130}),
    Way("forked", forked),
    Way("preempted", preempted),
    Way("1 thread", batched, {"threads": 1}),
    Way("2 threads", batched, {"threads": 2}),
)
