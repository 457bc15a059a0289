"""Token sequences, and caches filled with them in the shapes that the benchmark of the tree needs.

Uses the public face of radixrt.radix alone, and times nothing.
"""

from __future__ import annotations

import random

import numpy as np

from radixrt.radix import IntArray, PageTable, RadixCache

PAGE_SIZE = 16
VOCAB = 50_000
RNG = np.random.default_rng(0)


def random_tokens(*shape: int) -> IntArray:
    return RNG.integers(0, VOCAB, shape, dtype=np.int32)


def make_cache(num_pages: int) -> RadixCache:
    return RadixCache(num_pages=num_pages, page_size=PAGE_SIZE)


def extend(cache: RadixCache, table: PageTable, tokens: IntArray) -> None:
    """Room for `tokens`, which must be there, and the copy of a borrowed page."""
    plan = cache.extend(table, tokens)
    assert plan is not None, "the pool was sized for this"
    cache.copies_done(plan)


def insert(cache: RadixCache, tokens: IntArray, *, tail: bool = False) -> None:
    """What a finished request does: open, extend by what is not cached, publish, close."""
    table = cache.open(tokens)
    if table.seq_len < len(tokens):
        extend(cache, table, tokens[table.seq_len :])
    cache.publish(table, tail=tail)
    cache.close(table)


def serve(cache: RadixCache, tokens: IntArray) -> int:
    """A prompt from open to close in a cache of any size, admitted whatever it displaces; return the tokens it hit.

    One that is longer than the cache runs on its beginning.
    """
    tokens = tokens[: cache.num_pages * cache.page_size]
    table = cache.open(tokens)
    hit_len = table.seq_len
    plan = cache.extend(table, tokens[hit_len:])
    if plan is None:  # the copy of a borrowed page is one page too many
        cache.truncate(table, hit_len // cache.page_size * cache.page_size)
        plan = cache.extend(table, tokens[table.seq_len :])
    assert plan is not None, "everything else can be evicted"
    cache.copies_done(plan)
    cache.publish(table, tail=True)
    cache.close(table)
    return hit_len


def insert_over(cache: RadixCache, tokens: IntArray) -> None:
    """Publish a copy that was computed apart: a full walk that finds everything, and moves the table over to it."""
    table = cache.open(tokens[:0])
    extend(cache, table, tokens)
    cache.publish(table)
    cache.close(table)


def insert_fan(cache: RadixCache, prefix: IntArray, children: IntArray) -> None:
    """Each row of `children` as a continuation of `prefix`, which is whole pages: siblings under one node."""
    table = cache.open(prefix)
    extend(cache, table, prefix[table.seq_len :])
    for child in children:
        extend(cache, table, child)
        cache.publish(table)
        cache.truncate(table, len(prefix))
    cache.close(table)


def chain_pieces(tokens: IntArray, num_edges: int) -> list[tuple[IntArray, int]]:
    """What `insert_chain` feeds: each edge but the last with one more page, where a sibling diverges; where it ends."""
    ends = np.arange(1, num_edges + 1) * (len(tokens) // PAGE_SIZE) // num_edges * PAGE_SIZE
    siblings = tokens.reshape(-1, PAGE_SIZE)[ends[:-1] // PAGE_SIZE] ^ 1
    edges = np.split(tokens, ends[:-1])
    pieces = [np.concatenate(parts) for parts in zip(edges[:-1], siblings, strict=True)]
    return list(zip([*pieces, edges[-1]], ends.tolist(), strict=True))


def insert_chain(cache: RadixCache, pieces: list[tuple[IntArray, int]]) -> None:
    """One path of as many edges as there are pieces, with a sibling of one page at each end but the last."""
    table = cache.open(pieces[0][0][:0])
    for piece, end in pieces:
        extend(cache, table, piece)
        cache.publish(table)
        cache.truncate(table, end)
    cache.close(table)


def population(num_stems: int) -> list[IntArray]:
    """Sequences of 4 pieces of 40 to 120 tokens that branch in 4, 5 and 5 after the first, at any offset in a page."""

    def grow(path: IntArray, fan_outs: tuple[int, ...]) -> list[IntArray]:
        if not fan_outs:
            return [path]
        pieces = [random_tokens(int(RNG.integers(40, 120))) for _ in range(fan_outs[0])]
        return [leaf for piece in pieces for leaf in grow(np.concatenate([path, piece]), fan_outs[1:])]

    return grow(np.empty(0, np.int32), (num_stems, 4, 5, 5))


def churn(cache: RadixCache, sequences: list[IntArray], num_operations: int) -> None:
    """Any operation on prefixes of `sequences`, with up to 32 tables at once, in a pool too small for everything."""
    chance = random.Random(0)
    live: list[tuple[PageTable, IntArray]] = []
    for _ in range(num_operations):
        action = chance.random()
        if action < 0.2 or not live:
            tokens = chance.choice(sequences)
            if action < 0.05:
                cache.peek(tokens)
                continue
            if len(live) == 32:
                cache.close(live.pop(chance.randrange(32))[0])
            live.append((cache.open(tokens), tokens))
            continue
        index = chance.randrange(len(live))
        table, tokens = live[index]
        if action < 0.55:
            plan = cache.extend(table, tokens[table.seq_len : table.seq_len + chance.randrange(1, 160)])
            if plan is not None:
                cache.copies_done(plan)
        elif action < 0.75:
            cache.publish(table, tail=action < 0.6)
        elif action < 0.82:
            cache.truncate(table, chance.randrange(table.seq_len + 1))
        elif action < 0.87 and len(live) < 32:
            live.append((cache.fork(table), tokens))
        elif action < 0.88:
            cache.evict(chance.randrange(4))
        elif action < 0.9:
            cache.unpin(cache.pin(tokens))
        elif action < 0.96:
            cache.match(tokens)
        else:
            cache.close(table)
            del live[index]
    for table, _ in live:
        cache.close(table)
