"""The main job on the real model: requests that share a long prompt with the cache and without, and the first token.

GSM8K few-shot text in bfloat16; transformers.generate runs beside it, and the machine's limit. See
benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

from _harness import Goal, Options, Report, Variant, number, time_rounds  # before torch

# isort: split
import torch
from _limits import Machine

import radixrt as rx
from radixrt.runtime import FinishEvent, TokenEvent, Tokenizer, trie_size
from radixrt.runtime.conversion import quiet_transformers
from radixrt.runtime.loading import resolve

MODEL, DTYPE, PAGE_SIZE = "smollm2-135m", "bfloat16", 16
OWN_LEN, OUTPUT_LEN = 32, 16
LIMIT_OWN_LEN, LIMIT_OUTPUT_LEN = 60, 32  # of the run that is held against the machine's limit
PARAMETERS, BODY_PARAMETERS = 134_515_008, 106_203_456  # all, and all but the embedding's, which is the head's too
DATA = Path(__file__).parent / "data" / "gsm8k.json"


def num_pages(prompt: Sized) -> int:
    """Pages that one request with this prompt fills by itself, up to its end."""
    return -(-(len(prompt) + OUTPUT_LEN) // PAGE_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """One shared prefix, and as many suffixes of one length as anyone asks for that begin in different ways."""

    shared: list[int]
    suffixes: Iterator[list[int]]

    def take(self, n: int) -> list[list[int]]:
        return [self.shared + next(self.suffixes) for _ in range(n)]

    @classmethod
    def of(cls, tokenizer: Tokenizer, shared_len: int, own_len: int = OWN_LEN) -> Prompts:
        """Few-shot examples up to the last "Question:", cut at the front to `shared_len` tokens."""
        data = json.loads(DATA.read_text())
        shots = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n\n" for shot in data["examples"])
        shared = tokenizer.encode(f"{shots}Question:")[-shared_len:]
        assert len(shared) == shared_len, "too few examples for the prompt"
        by_first: dict[int, list[int]] = {}
        for question, next_one in itertools.pairwise(data["questions"]):
            own = tokenizer.encode(f" {question} {next_one}")[:own_len]
            if len(own) == own_len:
                by_first.setdefault(own[0], own)
        return cls(shared=shared, suffixes=iter(by_first.values()))


@dataclass(slots=True, kw_only=True)
class Load:
    """Drives one engine and keeps what the last run showed."""

    engine: rx.Engine
    params: rx.SamplingParams
    peak_pages: int = 0  # most pages that were neither free nor evictable
    answers: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, prompts: list[list[int]]) -> None:
        """Submit all prompts at once and step to the end of the last."""
        self.peak_pages = 0
        handles = [self.engine.submit(prompt, self.params) for prompt in prompts]
        answers: dict[rx.Handle, tuple[int, ...]] = {}
        while len(answers) < len(handles):
            for event in self.engine.step():
                if isinstance(event, FinishEvent):
                    answers[event.handle] = event.output.choices[0].token_ids
            cache = self.engine.stats().cache
            self.peak_pages = max(self.peak_pages, cache.num_pages - cache.num_free - cache.num_evictable)
        self.answers = [answers[handle] for handle in handles]

    def first_token(self, prompt: list[int]) -> None:
        """Submit one prompt and step until its first token."""
        self.engine.submit(prompt, rx.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        while not any(isinstance(event, TokenEvent) for event in self.engine.step()):
            pass

    def forget(self) -> None:
        self.engine.reset_cache()


def make_load(*, num_requests: int, prompt_len: int, prefix_cache: bool) -> Load:
    """An engine whose pool holds all requests unshared, over the watermark."""
    pages = num_requests * num_pages(range(prompt_len))
    engine = rx.Engine(MODEL, dtype=DTYPE, page_size=PAGE_SIZE, num_pages=pages * 21 // 20, prefix_cache=prefix_cache)
    return Load(engine=engine, params=rx.SamplingParams(max_tokens=OUTPUT_LEN, temperature=0.0, ignore_eos=True))


def make_generate() -> Callable[[list[int]], tuple[int, ...]]:
    """transformers.generate on one prompt: the tokens after it. Its own attention, greedy, as many tokens as ours."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(resolve(MODEL), dtype=getattr(torch, DTYPE))
    model.eval()

    def generate(prompt: list[int]) -> tuple[int, ...]:
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": OUTPUT_LEN, "min_new_tokens": OUTPUT_LEN, "pad_token_id": 0}
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return tuple(output[0, len(prompt) :].tolist())

    return generate


def measure_batch(report: Report, on: Load, off: Load, prompts: list[list[int]]) -> float:
    """All requests at once, cold: seconds, pages and rows with the cache and without. Returns seconds with it."""
    before = on.engine.stats().counters
    variants = {
        "on": Variant(prepare=on.forget, run=lambda _: on.run(prompts)),
        "off": Variant(run=lambda _: off.run(prompts)),
    }
    rounds = 1 if report.options.quick else 3
    times = time_rounds(variants, rounds=rounds, warmups=0, clock=report.options.clock)
    computed = (on.engine.stats().counters.computed - before.computed) / len(times["on"].seconds)
    ideal, unshared = trie_size(prompts), sum(map(num_pages, prompts))
    report.section(f"{len(prompts)} requests of {len(prompts[0])} tokens at once", "cache off")
    off_shown = f"{number(times['off'].median)} s"
    report.add(
        "seconds, cache on", times["on"].median, "s", baseline=off_shown, timing=times["on"], against=times["off"]
    )
    report.add(
        "speed-up", times["off"].ratio(times["on"]), "x", goal=None if report.options.quick else Goal.at_least(5)
    )
    # Without the cache the first requests end before the last begin, so its peak is of fewer requests.
    report.add("pages held, peak", on.peak_pages, "pages", baseline=f"{off.peak_pages:,} pages")
    share, of_all = on.peak_pages / unshared, f"{unshared:,} needed"
    goal = None if report.options.quick else Goal.at_most(0.2)
    report.add("pages held, of unshared", share, "x", goal=goal, baseline=of_all)
    rows = f"{sum(map(len, prompts)):,} rows"
    report.add("prompt rows computed", computed, "rows", goal=Goal.at_most(ideal), baseline=rows)
    same = sum(a == b for a, b in zip(on.answers, off.answers, strict=True))
    report.note(f"{same} of {len(prompts)} answers are the same token by token with the cache and without")
    return times["on"].median / len(prompts)


def measure_first_token(report: Report, load: Load, prompts: Prompts) -> None:
    """Seconds to the first token of one request whose suffix is new, with its prefix cached and with nothing cached."""
    rounds = 2 if report.options.quick else 5

    def cold() -> list[int]:
        load.forget()
        return prompts.take(1)[0]

    variants = {
        "cold": Variant(prepare=cold, run=load.first_token),
        "hot": Variant(prepare=lambda: prompts.take(1)[0], run=load.first_token),
    }
    times = time_rounds(variants, rounds=rounds, clock=report.options.clock)
    report.section(f"first token after {len(prompts.shared)} + {OWN_LEN} tokens", "cold")
    cold_shown = f"{number(times['cold'].median * 1e3)} ms"
    report.add("hot", times["hot"].median * 1e3, "ms", baseline=cold_shown, timing=times["hot"], against=times["cold"])
    report.add("hot, share", times["hot"].ratio(times["cold"]), "x", goal=Goal.at_most(0.15))


def measure_generate(report: Report, load: Load, prompts: list[list[int]], ours: float) -> None:
    """transformers.generate on the first prompts one by one, beside the seconds per request of the whole batch."""
    generate = make_generate()
    answers: list[tuple[int, ...]] = []
    remaining = iter(prompts)
    variant = Variant(prepare=lambda: next(remaining), run=lambda prompt: answers.append(generate(prompt)))
    times = time_rounds({"generate": variant}, rounds=len(prompts), warmups=0, clock=report.options.clock)["generate"]
    report.section("transformers.generate, one by one", "ours, batched")
    report.add("seconds a request", times.median, "s", baseline=f"{number(ours)} s", timing=times)
    report.add("times ours", times.median / ours, "x")
    same = sum(a == b for a, b in zip(load.answers, answers, strict=False))
    report.note(f"{same} of {len(prompts)} answers are the same; in bfloat16 near-ties may differ")


def measure_limit(report: Report, load: Load, prompts: list[list[int]]) -> None:
    """All requests at once, cold, against the least time that the machine's rates allow for products and weights.

    The prompts' trie through all weights but the embedding's, then a batch of one row each through all weights, once
    for each further token. Attention, reading KV and sampling count as nothing, so 100 % cannot be reached.
    """
    rounds = 1 if report.options.quick else 3
    load.params = replace(load.params, max_tokens=LIMIT_OUTPUT_LEN)
    machine = Machine(report.options.clock)
    seconds, bounds = [], []
    for _ in range(rounds):
        limits = machine.limits(torch.bfloat16, shape=(1024, 1536, 1536))
        prefill = 2 * trie_size(prompts) * BODY_PARAMETERS / limits.gemm
        step = limits.seconds(num_bytes=2 * PARAMETERS, flops=2 * PARAMETERS * len(prompts))
        bounds.append(prefill + (LIMIT_OUTPUT_LEN - 1) * step)
        variant = Variant(prepare=load.forget, run=lambda _: load.run(prompts))
        times = time_rounds({"ours": variant}, rounds=1, warmups=0, clock=report.options.clock)["ours"]
        seconds.append(times.median)
    report.section(f"{len(prompts)} requests of {len(prompts[0])}, {LIMIT_OUTPUT_LEN} tokens each", "limit")
    share = median(bound / taken for bound, taken in zip(bounds, seconds, strict=True))
    report.add("seconds", median(seconds), "s", baseline=f"{number(median(bounds))} s")
    goal = None if report.options.quick else Goal.at_least(0.25)
    report.add("of the limit", share, "x", goal=goal, baseline=str(limits))


def main() -> int:
    options = Options.parse(__doc__, clock="wall")
    num_requests, shared_len = (4, 500) if options.quick else (16, 2000)
    shape = {"num_requests": num_requests, "prompt_len": shared_len + OWN_LEN}
    on, off = (make_load(**shape, prefix_cache=prefix_cache) for prefix_cache in (True, False))
    assert on.engine.tokenizer is not None
    prompts = Prompts.of(on.engine.tokenizer, shared_len)
    batch = prompts.take(num_requests)
    for load in (on, off):  # what is made at the first step is not what we measure
        load.run([batch[0][:64]])
    report = Report(options=options)
    ours = measure_batch(report, on, off, batch)
    off.engine.close()
    measure_first_token(report, on, prompts)
    measure_generate(report, on, batch[:4], ours)
    measure_limit(report, on, Prompts.of(on.engine.tokenizer, shared_len, LIMIT_OWN_LEN).take(num_requests))
    on.engine.check()
    on.engine.close()
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
