"""What the order of admission hits on few-shot queues: first come, longest cached prefix first, depth first, ours.

Ours is an engine's on `HashModel`, the others replay through the real RadixCache. See benchmarks/README.md.
"""

from __future__ import annotations

import itertools
import os
import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

from _harness import Goal, Options, Report
from _traces import Trace, bbh, gsm8k
from _workload import serve

from radixrt.radix import IntArray, RadixCache, agreement, page_key
from radixrt.runtime import Engine, FinishEvent, SamplingParams
from radixrt.runtime.testing import HashModel

WINDOW = 256
UNLIMITED = 2**31 - 1
MARGIN = 1.5  # points that bounding the wait may cost
CASES = [(bbh, 1), (bbh, 3), (gsm8k, 2)]  # capacity in % of the trace's blocks


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens hit in all, and the most requests that one was overtaken by: that came after it and ran before."""

    hit_tokens: int
    longest_wait: int


def in_order(prompts: Sequence[IntArray], order: Sequence[int], cache: RadixCache) -> Run:
    """Serve the prompts in `order`."""
    return Run(sum(serve(cache, prompts[index]) for index in order), longest_wait(order))


def longest_prefix_first(prompts: Sequence[IntArray], cache: RadixCache, window: int) -> Run:
    """Serve whichever of the `window` first that wait has the longest cached prefix; ties by arrival, nothing ages."""
    waiting, order, hit_tokens = list(range(min(window, len(prompts)))), [], 0
    arriving = iter(range(len(waiting), len(prompts)))
    while waiting:
        place = max(range(len(waiting)), key=lambda place: (cache.peek(prompts[waiting[place]]), -place))
        index = waiting.pop(place)
        waiting += [later for later in [next(arriving, None)] if later is not None]
        hit_tokens += serve(cache, prompts[index])
        order.append(index)
    return Run(hit_tokens, longest_wait(order))


def engines(prompts: Sequence[IntArray], num_waiting: int, **settings: Any) -> Run:
    """Serve them through an engine, one at a time, `num_waiting` of them in its queue as long as there are so many."""
    model = HashModel(vocab=1 + max(int(prompt.max()) for prompt in prompts))
    longest, one_token = max(map(len, prompts)), SamplingParams(max_tokens=1, temperature=0.0)
    order: list[int] = []
    with Engine(model, max_running=1, token_budget=longest, admission_window=num_waiting, **settings) as engine:
        for prompt in prompts[:num_waiting]:
            engine.submit(prompt.tolist(), one_token)
        arriving = iter(prompts[num_waiting:])
        while len(order) < len(prompts):
            for event in engine.step():
                if isinstance(event, FinishEvent):
                    order.append(event.handle.number)
                    for prompt in itertools.islice(arriving, 1):
                        engine.submit(prompt.tolist(), one_token)
        computed = engine.stats().counters.computed
    return Run(sum(map(len, prompts)) - computed, longest_wait(order))


def depth_first(prompts: Sequence[IntArray]) -> list[int]:
    """An order in which each subtree of the prompts' trie is served in one go: that of their tokens."""
    return sorted(range(len(prompts)), key=lambda index: page_key(prompts[index], 0, len(prompts[index])))


def most_hits(prompts: Sequence[IntArray]) -> int:
    """Tokens that no order can beat: all but one for each node of the prompts' trie."""
    order = depth_first(prompts)
    return sum(agreement(prompts[a], prompts[b]) for a, b in pairwise(order))


def longest_wait(order: Sequence[int]) -> int:
    """The most places by which one is overtaken, where 0, 1, 2... is the order of arrival."""
    ahead: list[int] = []  # of those that ran, ascending
    most = 0
    for index in order:
        most = max(most, len(ahead) - bisect_left(ahead, index))
        insort(ahead, index)
    return most


def measure(report: Report, trace: Trace, percent: float, num_pages: int) -> None:
    prompts = [request.tokens for request in trace.requests]
    total = trace.num_tokens

    def cache(pages: int = num_pages) -> RadixCache:
        return RadixCache(num_pages=pages, page_size=trace.page_size)

    report.section(f"{trace.name}, {percent:g} %: {num_pages:,} pages", "longest wait")
    arrival = range(len(prompts))
    runs = {
        "first come": in_order(prompts, arrival, cache()),
        f"longest prefix of {WINDOW}": longest_prefix_first(prompts, cache(), WINDOW),
    }
    for name, run in runs.items():
        report.add(name, 100 * run.hit_tokens / total, "%", baseline=f"{run.longest_wait:,} requests")
    unaged = runs[f"longest prefix of {WINDOW}"]
    bounded: dict[str, Any] = {"num_pages": num_pages, "page_size": trace.page_size, "max_bypass": WINDOW}
    for eviction in ("lru", "duel"):
        ours = engines(prompts, WINDOW, eviction=eviction, **bounded)
        goal = Goal.at_least(100 * unaged.hit_tokens / total - MARGIN)
        name = f"engine, {WINDOW} wait, {eviction}"
        report.add(name, 100 * ours.hit_tokens / total, "%", goal=goal, baseline=f"{ours.longest_wait:,} requests")
        report.add("its longest wait", ours.longest_wait, "requests", goal=Goal.at_most(WINDOW))


def measure_all_at_once(report: Report, trace: Trace) -> None:
    """Everything waits from the start, and the pool holds the longest prompt and no more."""
    prompts = [request.tokens for request in trace.requests]
    longest = max(map(len, trace.paths)) + 1  # and the copy of a page that two share in part
    most, total = most_hits(prompts), trace.num_tokens
    report.section(f"{trace.name}, all {len(prompts):,} in the queue: {longest} pages", "most possible")
    first = in_order(prompts, depth_first(prompts), RadixCache(num_pages=longest, page_size=trace.page_size))
    ours = engines(prompts, len(prompts), num_pages=longest, page_size=trace.page_size, max_bypass=UNLIMITED)
    for name, run in (("depth first", first), ("engine", ours)):
        report.add(f"{name}: tokens hit", run.hit_tokens, "", goal=Goal.at_least(most), baseline=f"{most:,}")
        report.add(f"{name}: hit rate", 100 * run.hit_tokens / total, "%")


def main() -> int:
    report = Report(options=Options.parse(__doc__, clock="cpu"))
    traces = {make: make() for make, _ in CASES}
    for make, percent in CASES:
        trace = traces[make]
        num_pages = int(trace.num_blocks * percent / 100)
        measure(report, trace.head(600) if report.options.quick else trace, percent, num_pages)
    for trace in traces.values():
        measure_all_at_once(report, trace.head(600) if report.options.quick else trace)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
