"""What a cache should hold: a trie of single pages in plain dictionaries, slow and obvious.

Does not know RadixCache, its edges or its reference counts; the simulation compares the two.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._ranking import Path, ReferencePolicy, Uses


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
    uses: Uses
    priority: int


class ReferenceTree:
    """The cached pages by the path of their last token. Every method costs O(pages); the clock is the caller's."""

    def __init__(self, page_size: int, policy: ReferencePolicy) -> None:
        self.page_size = page_size
        self.policy = policy
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
        self,
        namespace: str,
        tokens: Sequence[int],
        page_ids: Sequence[int],
        now: int,
        *,
        start: int,
        tail: bool,
        priority: int,
    ) -> list[int]:
        """Add the pages of `tokens` from index `start` on, with `tail` the partial last one too.

        Full pages that are there already stay and are used. Returns the pages that the table must have afterwards.
        """
        parent, pages = namespace_path(namespace), list(page_ids)
        for index in range(len(page_ids)):
            page_tokens = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            if len(page_tokens) < self.page_size and not tail:
                break
            paths = follow(parent, page_tokens)
            path = int(paths[-1])
            if path in self.pages and len(page_tokens) == self.page_size:
                pages[index] = self.pages[path].page
                self.use([path] if index >= start else [], now, priority)
            elif any(agreement(child.tokens, page_tokens) == len(page_tokens) for child in self.children(parent)):
                break
            else:
                superseded = self._supersede(parent, page_tokens)
                new = CachedPage(
                    page=pages[index],
                    parent=parent,
                    tokens=page_tokens,
                    paths=paths,
                    uses=Uses(self.policy.ghosts.pop(path), now),
                    priority=priority,
                )
                for page in superseded:
                    new.uses.inherit(page.uses)
                    new.priority = max(new.priority, page.priority)
                self._add(new)
            parent = path
        return pages

    def use(self, paths: Sequence[Path], now: int, priority: int) -> None:
        """Heat these pages, and raise their priority."""
        for path in paths:
            self.pages[path].uses.again(now)
            self.pages[path].priority = max(self.pages[path].priority, priority)

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
            coldest = min(leaves, key=lambda p: self._rank(self.pages[p], freed))
            self.policy.ghosts.add(coldest, self.pages[coldest].uses.last)
            evicted.append(self._remove(coldest))
        return evicted

    def drop(self, namespace: str, tokens: Sequence[int], keep_len: int, held: Collection[int]) -> list[int]:
        """Take the pages of `tokens` past `keep_len`, from the end up to one that is held or continued."""
        found, _ = self.match(namespace, tokens)
        rest = tokens[len(found) * self.page_size :]
        tails = self.children(found[-1] if found else namespace_path(namespace))
        found += [int(tail.paths[-1]) for tail in tails if 0 < len(tail.tokens) == agreement(tail.tokens, rest)]
        dropped = []
        for path in reversed(found[-(-keep_len // self.page_size) :]):
            if self._children.get(path) or self.pages[path].page in held:
                break
            dropped.append(self._remove(path))
        return dropped

    def children(self, parent: Path) -> list[CachedPage]:
        """The pages that continue `parent`."""
        return [self.pages[path] for path in self._children.get(parent, ())]

    def num_leaves(self) -> int:
        """Pages that nothing continues."""
        return sum(not self._children.get(path) for path in self.pages)

    def _rank(self, leaf: CachedPage, freed: Collection[int]) -> tuple[int, tuple[int, ...], bool]:
        return leaf.priority, self.policy.heat(leaf.uses), leaf.page not in freed

    def _supersede(self, parent: Path, page_tokens: Sequence[int]) -> list[CachedPage]:
        """Drop the partial leaf that `page_tokens` continue, if there is one."""
        found = [child for child in self.children(parent) if child.tokens == page_tokens[: len(child.tokens)]]
        return [self._drop(int(child.paths[-1])) for child in found]

    def _remove(self, path: Path) -> int:
        """Take one leaf page; the one before it is as warm as it was."""
        gone = self._drop(path)
        if gone.parent in self.pages:
            self.pages[gone.parent].uses.inherit(gone.uses)
        return gone.page

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
