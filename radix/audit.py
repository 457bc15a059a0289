"""The invariants of the cache, recomputed from scratch from the handles and the edges.

Knows nothing of how the state came about: each function takes one structure and raises `BrokenInvariant`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .errors import require
from .node import Node, Rank
from .tails import anchor_of
from .tokens import EMPTY, IntArray, page_key
from .tree import RadixTree

if TYPE_CHECKING:
    from .cache import RadixCache


def audit(cache: RadixCache) -> None:
    """Raise `BrokenInvariant`, with the ids, unless the whole state of `cache` is consistent. O(all tokens)."""
    cache.pool.check()
    paths = _paths(cache.tree)
    _check_owners(cache.tree)
    _check_tiers(cache)
    _check_orders(cache.tree, cache.pool.refs)
    _check_counts(cache)
    _check_tables(cache, paths)
    _check_tails(cache)


def _paths(tree: RadixTree) -> dict[int, tuple[str, bytes]]:
    """Check every node on its own and against its parent; return each page's namespace and tokens up to its end."""
    paths: dict[int, tuple[str, bytes]] = {}
    seen = []
    for namespace, root in tree.roots.items():
        require(root.namespace == namespace, f"root of {root.namespace!r} is filed under {namespace!r}")
        require(not root.tokens.size and not root.pages.size, f"the root of {namespace!r} holds tokens")
        require(bool(root.children), f"the root of {namespace!r} has no children")
        below = [(child, root, b"") for child in root.children or ()]
        while below:
            node, parent, path = below.pop()
            _check_node(tree, node, parent, len(path) // 4)
            seen.append(node.id)
            tokens = path + page_key(node.tokens.view, 0, node.tokens.size)
            for index, page in enumerate(node.pages.view.tolist()):
                paths[page] = (namespace, tokens[: len(path) + 4 * tree.page_size * (index + 1)])
            below += [(child, node, tokens) for child in node.children or ()]
            _check_siblings(node)
        _check_siblings(root)
    require(
        sorted(seen) == sorted(tree.nodes), f"nodes in the table but not in the tree: {set(tree.nodes) ^ set(seen)}"
    )
    return paths


def _check_node(tree: RadixTree, node: Node, parent: Node, start: int) -> None:
    name, num_tokens, num_pages = f"node {node.id}", node.tokens.size, node.pages.size
    require(tree.nodes.get(node.id) is node, f"{name} is not in the node table")
    require(node.parent is parent, f"{name} names another parent than {parent.id}")
    require(node.start == start, f"{name} says it starts at {node.start}, not {start}")
    require(num_pages > 0, f"{name} is empty")
    require(num_pages == -(-num_tokens // tree.page_size), f"{name}: {num_tokens} tokens in {num_pages} pages")
    require(node.key == page_key(node.tokens.view, 0, tree.page_size), f"{name} is filed under another first page")
    if node.children is not None:
        require(num_tokens % tree.page_size == 0, f"{name} has children and a partly filled page")
        require(len(node.children) > 1, f"{name} has one child and was not merged with it")


def _check_siblings(node: Node) -> None:
    """Children are filed under their own keys, and none of these begins another (neighbours in order suffice)."""
    if node.children is None:
        return
    keys = node.children.sorted_keys()
    filed = sorted(child.key for child in node.children)
    require(keys == filed, f"node {node.id}: children are filed under other keys than theirs")
    for key, following in pairwise(keys):
        require(not following.startswith(key), f"node {node.id}: a partly filled child begins its sibling")


def _check_owners(tree: RadixTree) -> None:
    owner = np.zeros_like(tree.owner)
    listed: Counter[int] = Counter()
    for node in tree.nodes.values():
        owner[node.pages.view] = node.id
        listed.update(node.pages.view.tolist())
    twice = sorted(page for page, count in listed.items() if count > 1)
    require(not twice, f"pages {twice} belong to several edges")
    wrong = np.flatnonzero(owner != tree.owner)
    require(not len(wrong), f"owners of pages {wrong} are {tree.owner[wrong]}, not {owner[wrong]}")
    require(tree.num_pages == len(listed), f"the tree counts {tree.num_pages} pages and has {len(listed)}")
    leaves = sum(node.children is None for node in tree.nodes.values())
    require(tree.num_leaves == leaves, f"the tree counts {tree.num_leaves} leaves and has {leaves}")


def _check_tiers(cache: RadixCache) -> None:
    """On every path device pages precede host pages, and nodes know where one ends and the other begins."""
    stop = cache.pool.num_pages
    for node in cache.tree.nodes.values():
        name, pages, parent = f"node {node.id}", node.pages.view, node.parent
        wrong = (pages <= stop) != (np.arange(len(pages)) < node.num_device)
        require(not wrong.any(), f"{name} says that {node.num_device} of its pages {pages} lie on the device")
        warm = sum(child.num_device > 0 for child in node.children or ())
        require(node.num_warm == warm, f"{name} counts {node.num_warm} children on the device and has {warm}")
        cold_parent = parent is not None and parent.num_device < parent.pages.size
        require(not (node.num_device and cold_parent), f"{name} has device pages below host pages")
    for copy in cache.swaps:
        name = f"the swap of page {copy.src} to page {copy.dst}"
        require((copy.src > stop) != (copy.dst > stop), f"{name} is not between device and host")
        require(not cache.tree.owner[copy.dst], f"{name} would overwrite a page of the tree")
        require(cache.swaps.naming(copy.src) == cache.swaps.naming(copy.dst) == 1, f"{name} is not the only one")


def _check_orders(tree: RadixTree, refs: IntArray) -> None:
    """Who may lose pages: nodes whose last device page has count 1 and no device page below; leaves of host pages.

    No page has a higher priority than the page before it.
    """
    ranks: list[Rank] = []
    host_ranks: list[Rank] = []
    for node in tree.nodes.values():
        pages, stop = node.pages.view, node.num_device
        before = node.parent.pages.view[-1:] if node.parent is not None else EMPTY
        priorities = tree.priority[np.concatenate([before, pages])]
        require(bool((np.diff(priorities) <= 0).all()), f"node {node.id} has pages of priorities {priorities}")
        free = stop > 0 and refs[pages[stop - 1]] == 1 and all(not child.num_device for child in node.children or ())
        free_host = node.children is None and stop < len(pages) and refs[pages[-1]] == 1
        rank = tree.order.rank_at(node, stop - 1) if free else None
        host_rank = tree.order.rank_at(node, len(pages) - 1) if free_host else None
        ranks += [rank] if rank is not None else []
        host_ranks += [host_rank] if host_rank is not None else []
        expected = (rank, host_rank)
        require((node.rank, node.host_rank) == expected, f"node {node.id} has ranks {node.rank}, {node.host_rank}")
    device, host = list(tree.order.device), list(tree.order.host)
    require(device == sorted(ranks), f"the eviction order is {device}, not {sorted(ranks)}")
    require(host == sorted(host_ranks), f"the order of host pages is {host}, not {sorted(host_ranks)}")


def _holds(cache: RadixCache) -> Iterator[list[int]]:
    yield np.flatnonzero(cache.tree.owner).tolist()
    for table in cache.tables:
        yield table.page_ids.tolist()
    for pin in cache.pins:
        yield pin.page_ids.tolist()
    for copy in (*cache.copies, *cache.swaps):
        yield [copy.src, copy.dst]


def _check_counts(cache: RadixCache) -> None:
    """count(page) = [in the tree] + tables + pins + copies that name it, and nobody names a page twice."""
    counts: Counter[int] = Counter()
    for pages in _holds(cache):
        require(len(set(pages)) == len(pages), f"a holder lists a page twice: {pages}")
        counts.update(pages)
    refs = cache.pool.refs
    differing = {page: (int(refs[page]), counts[page]) for page in range(len(refs)) if refs[page] != counts[page]}
    require(not differing, f"counts differ from holders, page: (count, holders) = {differing}")
    named = Counter(page for copy in cache.copies for page in (copy.src, copy.dst))
    wrong = {page: count for page, count in named.items() if cache.copies.naming(page) != count}
    require(not wrong, f"copies in flight name pages otherwise than counted: {wrong}")


def _check_tables(cache: RadixCache, paths: dict[int, tuple[str, bytes]]) -> None:
    """The published pages of a table are the tree's, on the path of its own tokens; lengths are ordered."""
    for table in cache.tables:
        require(not table.closed, f"{table} is closed but listed")
        require(0 <= table.written_len <= table.seq_len, f"{table} has more written than there is")
        require(
            table.page_buffer.size == -(-table.seq_len // cache.page_size), f"{table} has too many or too few pages"
        )
        require(all(page <= cache.num_pages for page in table.page_ids), f"{table} holds host pages")
        tokens = page_key(table.tokens, 0, table.seq_len)
        for index in range(table.num_tree_pages):
            page = int(table.page_ids[index])
            path = (table.namespace, tokens[: 4 * cache.page_size * (index + 1)])
            require(paths.get(page) == path, f"{table}: page {page} at index {index} is not the tree's for its tokens")
    for pin in cache.pins:
        require(not pin.closed, "a pin is closed but listed")
        held = all(int(page) in paths and page <= cache.num_pages for page in pin.page_ids)
        require(held, f"pinned pages {pin.page_ids} left the tree or the device")


def _check_tails(cache: RadixCache) -> None:
    """Tables with written tokens past their full pages are found where those continue, and no others."""
    expected = {table: anchor for table in cache.tables if (anchor := anchor_of(table)) is not None}
    found = {table: anchor for anchor, tables in cache.tails.tables.items() for table in tables}
    require(found == expected, f"live tails are filed as {found}, not {expected}")
