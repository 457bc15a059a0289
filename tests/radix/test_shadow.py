"""Prefix ids, and the shadow caches against a slow and obvious one.

Does not know the tree or real pages.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from radixrt.radix import BrokenInvariant, as_tokens
from radixrt.radix._ranking import ReferenceShadow
from radixrt.radix.prefixes import PrefixIds
from radixrt.radix.shadow import GHOSTS_PER_PAGE, Shadow

# Paths of a trie whose nodes have at most three children: each node is known by the choices that lead to it.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=40)


def ids_of(choices: list[int]) -> list[int]:
    return [hash(tuple(choices[: depth + 1])) for depth in range(len(choices))]


@given(paths=PATHS, capacity=st.integers(1, 12), policy=st.sampled_from(["lru", "lru2"]))
def test_a_shadow_hits_what_a_cache_would(paths: list[list[int]], capacity: int, policy: str) -> None:
    shadow, reference = Shadow(capacity, looks_back=policy == "lru2"), ReferenceShadow(capacity, policy)
    for choices in paths:
        ids = ids_of(choices)
        assert shadow.ask(ids) == reference.ask(ids)
        shadow.check()


@given(paths=st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=30), looks_back=st.booleans())
def test_colliding_ids_break_nothing(paths: list[list[int]], looks_back: bool) -> None:  # noqa: FBT001
    """Ids may come back anywhere, even twice on a path: counts suffer, but nothing raises or grows."""
    shadow = Shadow(4, looks_back=looks_back)
    for path in paths:
        assert 0 <= shadow.ask(path) <= len(path)
        assert len(shadow._coldest) <= 2 * 4 + 66
        assert len(shadow._ghosts) <= GHOSTS_PER_PAGE * 4


def test_a_shadow_of_hot_paths_alone_does_not_grow() -> None:
    shadow = Shadow(10, looks_back=True)
    for _ in range(1000):
        assert shadow.ask([1, 2, 3]) in (0, 3)
    assert len(shadow._coldest) <= 2 * 10 + 66


def test_check_sees_a_lost_id() -> None:
    shadow = Shadow(4, looks_back=False)
    shadow.ask([1, 2])
    shadow._key_of.clear()
    with pytest.raises(BrokenInvariant, match="other times"):
        shadow.check()


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40),
    cut=st.integers(0, 40),
    page_size=st.sampled_from([1, 2, 4, 16]),
    namespace=st.text(max_size=3),
)
def test_ids_are_the_same_in_one_go_and_in_pieces(tokens: list[int], cut: int, page_size: int, namespace: str) -> None:
    prefixes = PrefixIds(page_size)
    whole = prefixes.of(as_tokens(tokens), namespace)
    assert len(whole) == len(tokens) // page_size
    index = min(cut, len(tokens)) // page_size
    before = int(whole[index - 1]) if index else prefixes.root(namespace)
    rest = prefixes.after(before, index, as_tokens(tokens[index * page_size : len(whole) * page_size]))
    assert rest.tolist() == whole[index:].tolist()


def test_ids_tell_prefixes_apart() -> None:
    """Order, place, namespace, length and trailing zeros all count: no two of many thousand prefixes collide."""
    rng = np.random.default_rng(0)
    for page_size in (1, 2, 16):
        prefixes = PrefixIds(page_size)
        seen: dict[int, tuple[str, list[int]]] = {}
        for namespace in ("", "a", "b", "\ud800"):
            for _ in range(300):
                tokens = rng.integers(0, 2, 4 * page_size, dtype=np.int32)
                tokens = tokens[: rng.integers(len(tokens) + 1)]
                for index, number in enumerate(prefixes.after(prefixes.root(namespace), 0, tokens).tolist()):
                    prefix = namespace, tokens[: (index + 1) * page_size].tolist()
                    assert seen.setdefault(number, prefix) == prefix
        assert len(seen) > 50
