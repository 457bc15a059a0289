"""The demo: eight few-shot questions behind one prompt and a live fork, run with the cache and again without.

Knows nothing of how a model is found and loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixrt.runtime import Engine, FinishEvent, Handle, Output, SamplingParams, TokenEvent, Tokenizer, trie_size

from .terminal import note, printable

FORKED = 7  # the question that forks: its answer takes two products and a sum
FORK_AFTER = 8  # tokens of its answer
# The forked question has to be alive when it forks, whatever the model.
GREEDY = SamplingParams(max_tokens=32, min_tokens=FORK_AFTER + 1, temperature=0.0, stop="\n\n")
SAMPLED = tuple(SamplingParams(max_tokens=24, temperature=0.8, seed=seed, stop="\n\n") for seed in range(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one pass over the program wrote and what it cost."""

    answers: list[str]
    stem: str  # what the forked question had said by then
    branches: list[str]
    prompt_tokens: int
    computed: int
    reused: int
    fed_back: int  # by forks: the parent's last token, once a branch
    pages_held: int  # at most, at any time
    seconds: float


def run(engine: Engine, console: Console) -> bool:
    """Play the program with this engine, which is closed then, and without a cache on the same model; show both.

    True where no more was computed than each node of the prompts' token trie once. The forks add nothing to that.
    """
    with engine:
        assert engine.tokenizer is not None, "the demo speaks in text"
        prompts = few_shot_prompts(engine.tokenizer)
        note("running with the cache")
        shared = play(engine, prompts, sharing=True)
        engine.check()
    model, tokenizer, kv_memory = engine.model, engine.tokenizer, engine.config.kv_memory
    with Engine(model, tokenizer=tokenizer, kv_memory=kv_memory, prefix_cache=False) as engine:
        note("running again without")
        unshared = play(engine, prompts, sharing=False)
    ideal = trie_size(prompts)
    show(console, shared, unshared, ideal)
    return shared.computed == ideal


def few_shot_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """One prompt a question, equal up to where the question begins."""
    shots = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in _data()["shots"])
    return [tokenizer.encode(f"{shots}Question: {question}\nAnswer:") for question in _questions()]


def play(engine: Engine, prompts: Sequence[list[int]], *, sharing: bool) -> Run:
    """Answer all prompts together and, once one of them has begun, continue it in four more ways.

    With `sharing` the continuations are forks of the live request; else its tokens are submitted again, as they have
    to be where nothing forks.
    """
    started = perf_counter()
    handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
    forked = handles[FORKED]
    begun: list[int] = []
    stem = ""
    pages_held = 0
    outputs: dict[Handle, Output] = {}
    while len(outputs) < len(handles):
        for event in engine.step():
            if isinstance(event, FinishEvent):
                outputs[event.handle] = event.output
            elif isinstance(event, TokenEvent) and event.handle == forked and len(begun) < FORK_AFTER:
                begun.append(event.token_id)
                stem += event.text
        pages_held = max(pages_held, _pages_held(engine))
        if len(begun) == FORK_AFTER and len(handles) == len(prompts):
            for params in SAMPLED:
                resent = [*prompts[FORKED], *begun]
                handles += engine.fork(forked, params=params) if sharing else [engine.submit(resent, params)]
    done = [outputs[handle] for handle in handles]
    computed = engine.stats().counters.computed
    return Run(
        answers=[output.text for output in done[: len(prompts)]],
        stem=stem,
        branches=[output.text for output in done[len(prompts) :]],
        prompt_tokens=sum(output.usage.prompt_tokens for output in done),
        computed=computed,
        reused=sum(output.usage.cached_tokens for output in done),
        fed_back=sum(output.usage.computed_tokens for output in done) - computed,
        pages_held=pages_held,
        seconds=perf_counter() - started,
    )


def show(console: Console, shared: Run, unshared: Run, ideal: int) -> None:
    """The texts, each cut to a line, and the table."""
    console.print("\nEight questions behind one few-shot prompt, answered together\n", style="bold")
    for number, (question, answer) in enumerate(zip(_questions(), shared.answers, strict=True), 1):
        console.print(Text(_line(f" {number} {question}"), style="dim"))
        console.print(Text(_line(f"   {answer.strip()}") + "\n"))
    console.print(f"Question {FORKED + 1}, forked while live into {len(SAMPLED)} sampled continuations\n", style="bold")
    console.print(Text(_line(f"   {shared.stem.strip()}") + " …", style="dim"))
    for number, branch in enumerate(shared.branches, 1):
        console.print(Text(_line(f" {number} … {branch}")))
    console.print("\nWhat it took\n", style="bold")
    console.print(_table(shared, unshared, ideal))
    same = sum(one == other for one, other in zip(shared.answers, unshared.answers, strict=True))
    if shared.computed == ideal:
        console.print("\ncomputed == ideal: no shared token was computed twice", style="bold green")
    else:
        console.print(f"\ncomputed != ideal: {shared.computed - ideal} rows too many", style="bold red")
    console.print(f"{same} of {len(shared.answers)} greedy answers are the same without the cache")


def _table(shared: Run, unshared: Run, ideal: int) -> Table:
    table = Table("", box=None, padding=(0, 0, 0, 3), show_edge=False)
    for heading in ("with the cache", "without"):
        table.add_column(heading, justify="right")
    rows = {
        "prompt tokens": (shared.prompt_tokens, unshared.prompt_tokens),
        "computed": (shared.computed, unshared.computed),
        "ideal": (ideal,),
        "reused": (shared.reused, unshared.reused),
        "fed back by forks": (shared.fed_back, unshared.fed_back),
        "pages held": (shared.pages_held, unshared.pages_held),
        "pages shared": (unshared.pages_held - shared.pages_held,),
    }
    for name, values in rows.items():
        table.add_row(name, *(f"{value:,}" for value in values))
    table.add_row("seconds", f"{shared.seconds:.1f}", f"{unshared.seconds:.1f}")
    return table


def _line(text: str, width: int = 78) -> str:
    """One line of at most `width` characters that keeps its indent."""
    line = text[: len(text) - len(text.lstrip())] + " ".join(printable(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _pages_held(engine: Engine) -> int:
    """Pages that live requests hold, each once."""
    cache = engine.stats().cache
    return cache.num_pages - cache.num_free - cache.num_evictable


def _data() -> dict[str, Any]:
    """`shots`: questions with answers; `questions`: texts."""
    text = files("radixrt.frontend").joinpath("data/gsm8k.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def _questions() -> list[str]:
    return list(_data()["questions"])
