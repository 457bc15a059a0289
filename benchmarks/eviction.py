"""What eviction policies hit on real traces: LRU, LRU-2, their duel, LRU with liveness hints, and the offline optimum.

Replays through the real RadixCache, without a model. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import cycle, takewhile

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

import numpy as np
from _harness import Goal, Options, Report, Variant, number, time_rounds
from _traces import Request, Trace, agents, bbh, conversation, gsm8k
from _workload import serve

from radixrt.radix import POLICIES, Duel, RadixCache

NEVER = 1 << 60
Hint = Callable[[int], int]

# trace, and by capacity in % of its blocks the least token hit rate of the duel in %, and of LRU with hints
CASES: list[tuple[Callable[[], Trace], dict[float, tuple[float, float]]]] = [
    (conversation, {1: (9.8, 0), 3: (16.9, 30), 10: (0, 0)}),
    (bbh, {1: (0, 0), 3: (0, 0), 10: (0, 0)}),
    (gsm8k, {3: (0, 0), 10: (0, 0), 30: (0, 0)}),
    (agents, {3: (0, 0), 10: (0, 0), 30: (0, 0)}),
]
BBH_GAIN = 6.0  # points of the duel over LRU at 3 %
QUICK_REQUESTS = 1000  # too few for the goals
TOLERANCE = 0.2  # points that the duel may lose to LRU


def replay(trace: Trace, cache: RadixCache, hint: Hint | None = None) -> float:
    """One request at a time; return the share of tokens hit, in %.

    With a `hint`, the number of leading ids that somebody will ask for again after request i, the rest is dropped once
    the request is through.
    """
    hits = 0
    for index, request in enumerate(trace.requests):
        hits += _tokens_of(trace, request, serve(cache, request.tokens))
        if hint is not None:
            cache.drop(request.tokens, min(hint(index), len(request.tokens)))
    return 100 * hits / trace.num_tokens


def optimum(trace: Trace, num_pages: int) -> float:
    """Belady on the tree: evict the leaf whose next use is furthest, the deepest of those never used again; in %.

    A page is used whenever what continues it is, so the furthest, deepest page is always a leaf.
    """
    uses = next_uses(trace)
    cached: dict[int, int] = {}
    furthest: list[tuple[int, int, int]] = []
    hits = 0
    for index, request in enumerate(trace.requests):
        path = trace.paths[index][:num_pages]
        found = sum(1 for _ in takewhile(cached.__contains__, path))
        hits += _tokens_of(trace, request, found * trace.page_size)
        while len(cached) + len(path) - found > num_pages:
            use, _, node = heappop(furthest)
            if cached.get(node) == -use:
                del cached[node]
        for depth, (node, use) in enumerate(zip(path, uses[index], strict=False)):
            cached[node] = use
            heappush(furthest, (-use, -depth, node))
    return 100 * hits / trace.num_tokens


def next_uses(trace: Trace) -> list[list[int]]:
    """For each request and page of it, the next request that uses the page, or NEVER."""
    following: dict[int, int] = {}
    uses = []
    for index in reversed(range(len(trace.requests))):
        uses.append([following.get(node, NEVER) for node in trace.paths[index]])
        following.update(dict.fromkeys(trace.paths[index], index))
    return uses[::-1]


def _tokens_of(trace: Trace, request: Request, num_ids: int) -> int:
    """Tokens that `num_ids` leading ids of a request stand for."""
    return min(num_ids * trace.block_len // trace.page_size, request.num_tokens)


def truthful(trace: Trace) -> Hint:
    """The hint that keeps what a later request of the trace uses."""
    kept = [sum(use < NEVER for use in uses) * trace.page_size for uses in next_uses(trace)]
    return kept.__getitem__


def measure_trace(report: Report, trace: Trace, goals: dict[float, tuple[float, float]]) -> None:
    hint = truthful(trace)
    longest = max(map(len, trace.paths))
    for percent, (duel_floor, hint_floor) in goals.items():
        num_pages = int(trace.num_blocks * percent / 100)
        report.section(f"{trace.name}, {percent:g} %: {num_pages:,} pages", "points over LRU")

        def run(policy: str, hint: Hint | None = None) -> float:
            return replay(trace, RadixCache(num_pages=num_pages, page_size=trace.page_size, policy=policy), hint)  # noqa: B023

        rates = {policy: run(policy) for policy in POLICIES} | {"lru, hints": run("lru", hint)}
        rates["optimum"] = optimum(trace, num_pages)
        lru = rates["lru"]
        floors = {"duel": max(duel_floor, lru - TOLERANCE), "lru, hints": hint_floor}
        if trace.name == "bbh" and percent == 3:
            floors["duel"] = lru + BBH_GAIN
        for name, rate in rates.items():
            goal = Goal.at_least(floors[name]) if floors.get(name) and not report.options.quick else None
            report.add(name, rate, "%", goal=goal, baseline=f"{rate - lru:+.2f}" if name != "lru" else "")
        if longest > num_pages:
            report.note(f"the longest request has {longest:,} pages and runs on its beginning")


def measure_cost(report: Report) -> None:
    """What the shadows add to a request: `Duel.ask` beside opening and closing a cached sequence."""
    report.section("the duel's look at a request", "open and close")
    rng = np.random.default_rng(0)
    for num_pages in (100, 4000):
        sequences = rng.integers(0, 50_000, (8, 16 * num_pages), dtype=np.int32)
        cache = RadixCache(num_pages=8 * num_pages, page_size=16)
        for tokens in sequences:
            table = cache.open(tokens)
            cache.extend(table, tokens)
            cache.publish(table)
            cache.close(table)
        half = Duel(num_pages=4 * num_pages, page_size=16)  # so that it evicts half of what it sees
        turns = {name: cycle(sequences) for name in ("ask", "open")}
        variants = {
            "ask": Variant(run=lambda _, half=half, turn=turns["ask"]: half.ask(next(turn), "")),
            "open": Variant(run=lambda _, cache=cache, turn=turns["open"]: cache.close(cache.open(next(turn)))),
        }
        times = time_rounds(variants, rounds=40, warmups=16, clock=report.options.clock)
        shown = f"{number(times['open'].median * 1e6)} us"
        report.add(f"{num_pages:,} pages", times["ask"].median * 1e6, "us", baseline=shown, timing=times["ask"])


def main() -> int:
    report = Report(options=Options.parse(__doc__, clock="cpu"))
    for make, goals in CASES:
        trace = make()
        if report.options.quick:
            trace, goals = trace.head(QUICK_REQUESTS), dict(list(goals.items())[1:2])
        measure_trace(report, trace, goals)
    measure_cost(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
