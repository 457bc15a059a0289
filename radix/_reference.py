"""What a cache should hold: a trie of single pages in plain dictionaries, slow and obvious.

Does not know RadixCache, its edges or its reference counts; the simulation compares the two.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Path = int
"""A whole token path (namespace included) as one number; what a slot of the simulated device memory holds."""


def namespace_path(namespace: str) -> Path:
    """The path of the empty sequence of `namespace`; the same in every process."""
    encoded = namespace.encode()
    return hash((len(encoded), *encoded))


def follow(path: Path, tokens: Iterable[int]) -> NDArray[np.int64]:
    """The path after each of `tokens`, starting behind `path`: int64[len(tokens)]."""
    paths = []
    for token in tokens:
        path = hash((path, token))
        paths.append(path)
    return np.array(paths, dtype=np.int64)


def agreement(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens two sequences have in common."""
    length = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        length += 1
    return length


@dataclass(slots=True, kw_only=True)
class CachedPage:
    """One page of the tree. `tokens` are its own tokens, fewer than a page only in a partial leaf."""

    page: int
    parent: Path
    tokens: tuple[int, ...]
    paths: NDArray[np.int64]
    heat: int


class ReferenceTree:
    """The cached pages by the path of their last token. Every method costs O(pages); the clock is the caller's."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[Path, CachedPage] = {}
        self.owner: dict[int, Path] = {}
        self._children: dict[Path, set[Path]] = {}

    def match(self, namespace: str, tokens: Sequence[int]) -> tuple[list[Path], int]:
        """The cached full pages of `tokens`, and how many tokens of one more cached page agree."""
        parent, found = namespace_path(namespace), list[Path]()
        for start in range(0, len(tokens), self.page_size):
            page = tokens[start : start + self.page_size]
            path = int(follow(parent, page)[-1])
            if len(page) < self.page_size or path not in self.pages:
                break
            parent = path
            found.append(path)
        rest = tokens[len(found) * self.page_size :]
        return found, max((agreement(child.tokens, rest) for child in self.children(parent)), default=0)

    def publish(
        self, namespace: str, tokens: Sequence[int], page_ids: Sequence[int], now: int, *, tail: bool
    ) -> list[int]:
        """Add the pages of `tokens`, with `tail` the partial last one too; what is there already stays as it is.

        Returns the pages that the table must have afterwards. Heats the path if something was added.
        """
        parent, pages, touched, grown = namespace_path(namespace), list(page_ids), list[Path](), False
        for index in range(len(page_ids)):
            page_tokens = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            if len(page_tokens) < self.page_size and not tail:
                break
            paths = follow(parent, page_tokens)
            path = int(paths[-1])
            if path in self.pages and len(page_tokens) == self.page_size:
                pages[index] = self.pages[path].page
            elif any(agreement(child.tokens, page_tokens) == len(page_tokens) for child in self.children(parent)):
                break
            else:
                self._supersede(parent, page_tokens)
                self._add(CachedPage(page=pages[index], parent=parent, tokens=page_tokens, paths=paths, heat=now))
                grown = True
            touched.append(path)
            parent = path
        if grown:
            self.touch(touched, now)
        return pages

    def touch(self, paths: Sequence[Path], now: int) -> None:
        """Heat the edges that `paths`, one path from the root, lies on; the last edge as a whole."""
        for path in (*paths, *(self._edge(paths[-1]) if paths else ())):
            self.pages[path].heat = now

    def evictable(self, held: Collection[int]) -> int:
        """How many pages tail-first eviction can reach past the pages in `held`."""
        blocked: set[Path] = set()
        for page in held:
            path = self.owner.get(page)
            while path is not None and path not in blocked:
                blocked.add(path)
                parent = self.pages[path].parent
                path = parent if parent in self.pages else None
        return len(self.pages) - len(blocked)

    def evict(self, num_pages: int, held: Collection[int], freed: Collection[int]) -> list[int]:
        """Take `num_pages` evictable pages, tail of the coldest leaf first; between equals one that is in `freed`."""
        evicted = []
        for _ in range(num_pages):
            leaves = (p for p, cached in self.pages.items() if not self._children.get(p) and cached.page not in held)
            coldest = min(leaves, key=lambda p: (self.pages[p].heat, self.pages[p].page not in freed))
            evicted.append(self.pages[coldest].page)
            self._remove(coldest)
        return evicted

    def children(self, parent: Path) -> list[CachedPage]:
        """The pages that continue `parent`."""
        return [self.pages[path] for path in self._children.get(parent, ())]

    def num_leaves(self) -> int:
        """Pages that nothing continues."""
        return sum(not self._children.get(path) for path in self.pages)

    def _supersede(self, parent: Path, page_tokens: Sequence[int]) -> None:
        """Drop the partial leaf that `page_tokens` continue, if there is one."""
        for child in self.children(parent):
            if child.tokens == page_tokens[: len(child.tokens)]:
                self._drop(int(child.paths[-1]))

    def _edge(self, path: Path) -> list[Path]:
        """The unbranched run of pages that `path` lies on: what a compressed tree keeps in one node."""
        edge = [path]
        while (parent := self.pages[edge[0]].parent) in self.pages and len(self._children[parent]) == 1:
            edge.insert(0, parent)
        while len(children := self._children.get(edge[-1], set())) == 1:
            edge.extend(children)
        return edge

    def _remove(self, path: Path) -> None:
        """Evict one leaf page; where that ends an edge, the parent (merged with an only child) takes the hottest."""
        parent = self.pages[path].parent
        heat = self._drop(path).heat
        if parent in self.pages and self._children[parent]:
            edge = self._edge(parent)
            heat = max(heat, *(self.pages[p].heat for p in edge))
            for p in edge:
                self.pages[p].heat = heat

    def _add(self, cached: CachedPage) -> None:
        path = int(cached.paths[-1])
        self.pages[path] = cached
        self.owner[cached.page] = path
        self._children.setdefault(cached.parent, set()).add(path)

    def _drop(self, path: Path) -> CachedPage:
        cached = self.pages.pop(path)
        del self.owner[cached.page]
        siblings = self._children[cached.parent]
        siblings.discard(path)
        if not siblings and cached.parent not in self.pages:
            del self._children[cached.parent]
        self._children.pop(path, None)
        return cached
