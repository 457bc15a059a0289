"""What the cache itself costs: matching, inserting, evicting, touching, forking, and the memory of a cached page.

Uses the public face of radixrt.radix alone, and no model. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import os
import sys
import tracemalloc
from itertools import cycle, islice

sys.path.append(os.path.dirname(__file__))  # python -P leaves it out

import numpy as np
from _harness import Goal, Options, Report, Timing, Variant, keep_memory, number, time_rounds
from _workload import (
    PAGE_SIZE,
    RNG,
    chain_pieces,
    churn,
    extend,
    insert,
    insert_chain,
    insert_fan,
    insert_over,
    make_cache,
    population,
    random_tokens,
)

from radixrt.radix import IntArray, PageTable, RadixCache

NUM_TOKENS = 1_000_000


def measure_path(report: Report, name: str, num_tokens: int, num_edges: int, floor: float) -> None:
    """Match and insert tokens that lie in `num_edges` edges; `floor` is the goal of match, a third of it of insert."""
    tokens = random_tokens(num_tokens)
    pieces, other = chain_pieces(tokens, num_edges), tokens.copy()
    num_pages = sum(len(piece) for piece, _ in pieces) // PAGE_SIZE
    cache = make_cache(num_pages + num_tokens // PAGE_SIZE)
    insert_chain(cache, pieces)
    assert cache.peek(tokens) == num_tokens
    assert cache.stats().num_nodes == 2 * num_edges  # the root, the edges and their siblings
    bare = Variant(run=lambda _: np.array_equal(tokens, other))
    variants = {
        "match": Variant(run=lambda _: cache.match(other)),
        "insert again": Variant(run=lambda _: insert(cache, other)),
        "insert over": Variant(run=lambda _: insert_over(cache, other)),
    }
    rounds = 15 if num_edges < num_tokens // PAGE_SIZE else 5
    times = time_rounds({"bare": bare} | variants, rounds=rounds, clock=report.options.clock)
    new = Variant(prepare=lambda: cache.evict(num_pages), run=lambda _: insert_chain(cache, pieces))
    rounds = 2 if report.options.quick and num_edges > 1000 else rounds
    times |= time_rounds({"bare, new": bare, "insert new": new}, rounds=rounds, clock=report.options.clock)
    report.section(f"{num_tokens:,} tokens as {name}", "array_equal is")
    for what in (*variants, "insert new"):
        given = num_pages * PAGE_SIZE if what == "insert new" else num_tokens
        base = times["bare, new" if what == "insert new" else "bare"]
        slower = times[what].ratio(base) * num_tokens / given
        report.add(
            what,
            given / times[what].median / 1e6,
            "M tokens/s",
            goal=Goal.at_least(floor if what == "match" else floor / 3),
            baseline=f"{number(slower)}x as fast",
            timing=times[what],
            against=base,
        )


def measure_children(report: Report) -> None:
    """Match and insert under a node of 10 and of 100,000 children; both trees have 49 such nodes of 10 beside it."""
    prefixes = random_tokens(50, PAGE_SIZE)
    caches, queries, parents = {}, {}, {}
    for num_children in (10, 100_000):
        cache = make_cache(num_children + 10_000)
        for prefix in prefixes[1:]:
            insert_fan(cache, prefix, random_tokens(10, PAGE_SIZE))
        children = random_tokens(num_children, PAGE_SIZE)
        insert_fan(cache, prefixes[0], children)
        chosen = RNG.permutation(num_children)[np.arange(500) % num_children]
        caches[num_children] = cache
        queries[num_children] = [np.concatenate([prefixes[0], children[i]]) for i in chosen]
        parents[num_children] = prefixes if num_children == 10 else prefixes[[0] * 50]

    def look_up(cache: RadixCache, wanted: list[IntArray]) -> None:
        for tokens in wanted:
            cache.match(tokens)

    def add(cache: RadixCache, new: list[IntArray]) -> None:
        for tokens in new:
            insert(cache, tokens)

    def variants(n: int) -> dict[str, Variant]:
        def new() -> list[IntArray]:
            return [
                np.concatenate([prefix, child]) for prefix, child in zip(parents[n], random_tokens(50, 16), strict=True)
            ]

        return {
            f"match {n}": Variant(run=lambda _: look_up(caches[n], queries[n]), operations=500),
            f"match absent {n}": Variant(prepare=new, run=lambda absent: look_up(caches[n], absent), operations=50),
            f"insert {n}": Variant(prepare=new, run=lambda fresh: add(caches[n], fresh), operations=50),
        }

    # Few rounds: each adds a child to the nodes that are to have about 10.
    times = time_rounds(variants(10) | variants(100_000), rounds=5, clock=report.options.clock)
    report.section("under a node of 100,000 children", "of 10")
    for what in ("match", "match absent", "insert"):
        add_growth(report, what, times[f"{what} 10"], times[f"{what} 100000"], Goal.at_most(2))


def add_growth(report: Report, name: str, base: Timing, timing: Timing, goal: Goal | None) -> None:
    """The time per operation, then its ratio to the base's beside the goal."""
    report.add(name, timing.median * 1e6, "us", baseline=f"{number(base.median * 1e6)} us")
    report.add(f"{name}, growth", timing.ratio(base), "x", goal=goal, timing=timing, against=base)


def grow_leaves(num_leaves: int) -> tuple[RadixCache, list[IntArray]]:
    """A cache of that many leaves of two pages under one node, with room for 10^4 more, and the sequences."""
    cache, prefix, children = (
        make_cache(2 * num_leaves + 21_000),
        random_tokens(PAGE_SIZE),
        random_tokens(num_leaves, 32),
    )
    insert_fan(cache, prefix, children)
    return cache, [np.concatenate([prefix, child]) for child in children]


def measure_leaves(report: Report) -> None:
    """One-page evictions and touches among 10^3 to 10^5 leaves, and evictions past 10^4 cold leaves that are held."""
    per_round, rounds = 100, 5 if report.options.quick else 15
    forests = {"10^3": grow_leaves(1000), "10^4": grow_leaves(10_000), "10^5": grow_leaves(100_000)}

    def touch(cache: RadixCache, sequences: list[IntArray]) -> Variant:
        remaining = cycle(RNG.permutation(len(sequences)).tolist())

        def run(_: object) -> None:
            for index in islice(remaining, per_round):
                cache.close(cache.open(sequences[index]))

        return Variant(run=run, operations=per_round)

    touches = {name: touch(*forest) for name, forest in forests.items()}
    times = time_rounds(touches, rounds=rounds, clock=report.options.clock)
    report.section("touch (open and close) among leaves", "among 10^3")
    for name in ("10^4", "10^5"):
        add_growth(report, name, times["10^3"], times[name], Goal.at_most(3))

    cache, cold = grow_leaves(10_000)
    held = [cache.open(sequence) for sequence in cold]
    insert_fan(cache, random_tokens(PAGE_SIZE), random_tokens(1000, 2 * PAGE_SIZE))
    forests["held"] = cache, cold

    def evict(cache: RadixCache) -> Variant:
        def refill() -> None:
            insert_fan(cache, random_tokens(PAGE_SIZE), random_tokens(per_round // 2, 2 * PAGE_SIZE))

        def run(_: object) -> None:
            for _ in range(per_round):
                assert cache.evict(1) == 1

        return Variant(prepare=refill, run=run, operations=per_round)

    evictions = {name: evict(forest[0]) for name, forest in forests.items()}
    times = time_rounds(evictions, rounds=rounds, clock=report.options.clock)
    assert all(cache.peek(sequence) == len(sequence) for sequence in cold), "what is held stays"
    report.section("evict one page among leaves", "among 10^3")
    for name, shown in (("10^4", "10^4"), ("10^5", "10^5"), ("held", "past 10^4 held")):
        add_growth(report, shown, times["10^3"], times[name], Goal.at_most(2))
    report.note(f"{len(held):,} tables held the cold leaves")


def measure_fork(report: Report) -> None:
    """Fork and close a table of 8,192 tokens: cached in full, and in the middle of a page with its end unpublished."""
    cache = make_cache(2000)
    tokens = random_tokens(8192)
    insert(cache, tokens)
    cached, decoding = cache.open(tokens), cache.open(tokens[:8000])
    extend(cache, decoding, tokens[8000:] ^ 1)
    cache.truncate(decoding, 8185)

    def fork(table: PageTable) -> Variant:
        def run(_: object) -> None:
            for _ in range(100):
                cache.close(cache.fork(table))

        return Variant(run=run, operations=100)

    pages = np.asarray(cached.page_ids).copy()

    def copy(_: object) -> None:
        for _ in range(100):
            tokens.copy()
            pages.copy()

    variants = {"cached": fork(cached), "decoding": fork(decoding), "copy": Variant(run=copy, operations=100)}
    times = time_rounds(variants, rounds=20, clock=report.options.clock)
    report.section("fork and close 8,192 tokens", "bare copies")
    for name in ("cached", "decoding"):
        bare = f"{number(times['copy'].median * 1e6)} us"
        us, goal = times[name].median * 1e6, Goal.at_most(60)
        report.add(name, us, "us", goal=goal, baseline=bare, timing=times[name], against=times["copy"])


def measure_memory(report: Report) -> None:
    """What tracemalloc finds per cached page in a full cache of edges of 4 pages, the pool's arrays included."""
    num_edges = 2000 if report.options.quick else 20_000
    report.section("memory a cached page, 4 an edge", "tokens, page id")
    for fan_out in (2, 4, 16):
        edges = random_tokens(num_edges, 4 * PAGE_SIZE)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        cache = make_cache(4 * num_edges)
        paths: list[IntArray] = [edges[0][:0]]
        for number_of_edge, edge in enumerate(edges):
            path = np.concatenate([paths[number_of_edge // fan_out], edge])
            insert(cache, path)
            if len(paths) <= num_edges // fan_out + 1:
                paths.append(path)
        del path, paths
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        stats = cache.stats()
        assert stats.num_cached == 4 * num_edges
        per_page = used / stats.num_cached
        report.add(
            f"{fan_out} children a node",
            per_page,
            "bytes",
            goal=Goal.at_most(400),
            baseline=f"{4 * PAGE_SIZE + 4} bytes",
        )


def measure_age(report: Report) -> None:
    """Match after many mixed operations, against a tree built at once with the same content."""
    num_operations = 100_000 if report.options.quick else 1_000_000
    sequences = population(10)
    total = 10 * (1 + 4 + 20 + 100) * 80 // PAGE_SIZE
    aged, fresh = make_cache(total // 2), make_cache(2 * total)
    churn(aged, sequences, num_operations)
    lengths = [aged.peek(tokens) for tokens in sequences]
    for tokens, length in zip(sequences, lengths, strict=True):
        insert(fresh, tokens[:length], tail=True)
    assert lengths == [fresh.peek(tokens) for tokens in sequences]

    def look_up(cache: RadixCache) -> Variant:
        def run(_: object) -> None:
            for tokens in sequences:
                cache.match(tokens)

        return Variant(run=run)

    times = time_rounds({"aged": look_up(aged), "fresh": look_up(fresh)}, rounds=15, clock=report.options.clock)
    rates = {name: sum(lengths) / timing.median / 1e6 for name, timing in times.items()}
    report.section(f"match after {num_operations:,} mixed operations", "built at once")
    report.add("aged", rates["aged"], "M tokens/s", baseline=f"{number(rates['fresh'])} M/s")
    share = times["fresh"].ratio(times["aged"])
    report.add("aged, share", share, "x", goal=Goal.at_least(0.8), timing=times["aged"], against=times["fresh"])
    counts = (aged.stats(), fresh.stats())
    report.note(
        "nodes, pages: {:,}, {:,}; built at once {:,}, {:,}".format(
            *(n for s in counts for n in (s.num_nodes, s.num_cached))
        )
    )


def main() -> int:
    report = Report(options=Options.parse(__doc__, clock="cpu"))
    keep_memory()
    measure_path(report, "one edge", NUM_TOKENS, 1, 1000)
    measure_path(report, "1,000 edges", NUM_TOKENS, 1000, 150)
    num_tokens = 128_000 if report.options.quick else NUM_TOKENS
    measure_path(report, "one-page edges", num_tokens, num_tokens // PAGE_SIZE, 3)
    measure_children(report)
    measure_leaves(report)
    measure_fork(report)
    measure_memory(report)
    measure_age(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
