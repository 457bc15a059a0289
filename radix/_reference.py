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
    """The cached pages by the path of their last token. Every method costs O(pages); the clock is the caller's.

    Pages above `num_pages` are host pages; on any path they come last.
    """

    def __init__(self, page_size: int, num_pages: int, policy: ReferencePolicy) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.policy = policy
        self.pages: dict[Path, CachedPage] = {}
        self.owner: dict[int, Path] = {}
        self._children: dict[Path, set[Path]] = {}

    def is_host(self, page: int) -> bool:
        return page > self.num_pages

    def match(self, namespace: str, tokens: Sequence[int]) -> list[Path]:
        """The cached full pages of `tokens`, in either memory."""
        parent, found = namespace_path(namespace), list[Path]()
        for start in range(0, len(tokens), self.page_size):
            page = tokens[start : start + self.page_size]
            path = int(follow(parent, page)[-1])
            if len(page) < self.page_size or path not in self.pages:
                break
            parent = path
            found.append(path)
        return found

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

        Full pages that are there already stay and are used; host pages make way for the table's. Returns the pages that
        the table must have afterwards.
        """
        parent, pages = namespace_path(namespace), list(page_ids)
        for index in range(len(page_ids)):
            page_tokens = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
            if len(page_tokens) < self.page_size and not tail:
                break
            paths = follow(parent, page_tokens)
            path = int(paths[-1])
            if path in self.pages and self.is_host(self.pages[path].page):
                self._replace(path, pages[index])
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

    def use(self, paths: Sequence[Path], now: int, priority: int | None = None) -> None:
        """Heat these pages, and raise their priority."""
        for path in paths:
            self.pages[path].uses.again(now)
            if priority is not None:
                self.pages[path].priority = max(self.pages[path].priority, priority)

    def evictable(self, held: Collection[int], moving: Collection[int]) -> int:
        """How many device pages eviction can free: `moving` ones, on their way to the host, are no obstacle."""
        blocked: set[Path] = set()
        for page in {*held} - {*moving}:
            path = None if self.is_host(page) else self.owner.get(page)
            while path is not None and path not in blocked:
                blocked.add(path)
                parent = self.pages[path].parent
                path = parent if parent in self.pages else None
        freeable = {path for page, path in self.owner.items() if not self.is_host(page) and page not in moving}
        return len(freeable - blocked)

    def evict(self, num_pages: int, held: Collection[int], moving: Sequence[int], freed: Collection[int]) -> list[int]:
        """Take `num_pages` evictable device pages, tail of the coldest first, and the host pages that continue them.

        Between equals one goes that is in `freed`. Where all are held, those in `moving` leave in their order until
        one can go.
        """
        evicted = []
        num_taken = 0
        while num_taken < num_pages:
            ends = [p for p, cached in self.pages.items() if self._ends_device(p) and cached.page not in held]
            if ends:
                path = self._coldest(ends, freed)
            else:
                path = next(self.owner[p] for p in moving if p in self.owner and self._ends_device(self.owner[p]))
            num_taken += bool(ends)
            evicted += [self._evict(below) for below in self._below(path)]
        return evicted

    def evict_host(self, num_pages: int, held: Collection[int], freed: Collection[int]) -> list[int]:
        """Take up to `num_pages` host pages that nothing continues, the coldest first, as `evict` does."""
        evicted = []
        for _ in range(num_pages):
            ends = [p for p, cached in self.pages.items() if self.is_host(cached.page) and not self._children.get(p)]
            ends = [p for p in ends if self.pages[p].page not in held]
            if not ends:
                break
            evicted.append(self._evict(self._coldest(ends, freed)))
        return evicted

    def drop(self, namespace: str, tokens: Sequence[int], keep_len: int, held: Collection[int]) -> list[int]:
        """Take the pages of `tokens` past `keep_len`, from the end up to one that is held or continued.

        One that holds tokens to keep goes where another page beside it begins with them.
        """
        found = self.match(namespace, tokens)
        rest = tokens[len(found) * self.page_size :]
        tails = self.children(found[-1] if found else namespace_path(namespace))
        found += [int(tail.paths[-1]) for tail in tails if 0 < len(tail.tokens) == agreement(tail.tokens, rest)]
        dropped = []
        first, num_kept = divmod(keep_len, self.page_size)
        for index in reversed(range(first, len(found))):
            page = self.pages[path := found[index]]
            others = [child for child in self.children(page.parent) if child is not page]
            is_like = any(agreement(child.tokens, page.tokens) >= num_kept for child in others)
            is_kept = index == first and num_kept and not is_like
            if is_kept or self._children.get(path) or page.page in held:
                break
            dropped.append(self._remove(path))
        return dropped

    def coldest(self, num_pages: int, held: Collection[int], chosen: Collection[int]) -> list[int]:
        """Up to `num_pages` device pages to swap out, in order: as `evict` would take them.

        Between equals one goes that is in `chosen`. Pages that several continue have to wait.
        """
        found: list[int] = []
        while len(found) < num_pages:
            ends = [p for p in self.pages if self._ends_device(p) or self._ends_device_but_for(p, found)]
            ends = [p for p in ends if self.pages[p].page not in (*held, *found)]
            if not ends:
                break
            found.append(self.pages[self._coldest(ends, chosen)].page)
        return found

    def move(self, src: int, dst: int) -> bool:
        """Put `dst` in the place of `src`, a page of the other memory, if device pages still come before host pages.

        What it followed on the device is as warm as it was, where it leaves.
        """
        path = self.owner.get(src)
        if path is None:
            return False
        parent = self.pages.get(self.pages[path].parent)
        fits = self._ends_device(path) if self.is_host(dst) else parent is None or not self.is_host(parent.page)
        if fits:
            self._replace(path, dst)
            if self.is_host(dst) and parent is not None:
                parent.uses.inherit(self.pages[path].uses)
        return fits

    def children(self, parent: Path) -> list[CachedPage]:
        """The pages that continue `parent`."""
        return [self.pages[path] for path in self._children.get(parent, ())]

    def num_leaves(self) -> int:
        """Pages that nothing continues."""
        return sum(not self._children.get(path) for path in self.pages)

    def _rank(self, end: CachedPage, chosen: Collection[int]) -> tuple[int, tuple[int, ...], bool]:
        return end.priority, self.policy.heat(end.uses), end.page not in chosen

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

    def _evict(self, path: Path) -> int:
        """Take one leaf page, and remember when it was used."""
        self.policy.ghosts.add(path, self.pages[path].uses.last)
        return self._remove(path)

    def _ends_device(self, path: Path) -> bool:
        """Whether this is a device page that no device page continues."""
        after = (child.page for child in self.children(path))
        return not self.is_host(self.pages[path].page) and all(map(self.is_host, after))

    def _ends_device_but_for(self, path: Path, pages: Collection[int]) -> bool:
        """Whether this is a device page whose only child, on the same edge, is one of `pages`."""
        return [child.page in pages for child in self.children(path)] == [True]

    def _coldest(self, paths: Iterable[Path], chosen: Collection[int]) -> Path:
        return min(paths, key=lambda path: self._rank(self.pages[path], chosen))

    def _below(self, path: Path) -> list[Path]:
        """This page and all that continues it, the last first."""
        children = sorted(self.children(path), key=lambda child: child.tokens)
        return [*(below for child in children for below in self._below(int(child.paths[-1]))), path]

    def _replace(self, path: Path, page: int) -> None:
        del self.owner[self.pages[path].page]
        self.pages[path].page = page
        self.owner[page] = path

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
