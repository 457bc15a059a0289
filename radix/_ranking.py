"""What eviction policies should say, slow and obvious: every use of a page by hand, every shadow page by page.

Does not know the policies of the cache, nor prefix ids: a page is known by the path of its last token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

GHOSTS = 4
DECAY, LEAD = 0.9995, 1.01
Path: TypeAlias = int
"""A whole token path (namespace included) as one number; what a slot of the simulated device memory holds."""


@dataclass(slots=True)
class Uses:
    """When a page was used last, and the time before (0: never)."""

    before: int
    last: int

    def again(self, now: int) -> None:
        self.before, self.last = self.last, now

    def inherit(self, gone: "Uses") -> None:
        self.before, self.last = max(self.before, gone.before), max(self.last, gone.last)


class Ghosts:
    """The last uses of the paths that were evicted latest."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._last: list[tuple[Path, int]] = []

    def add(self, path: Path, last: int) -> None:
        self.pop(path)
        self._last = [*self._last, (path, last)][-self._max_size :]

    def pop(self, path: Path) -> int:
        """The last use of `path`, which is forgotten here; 0 if it is not known."""
        last = dict(self._last).get(path, 0)
        self._last = [entry for entry in self._last if entry[0] != path]
        return last


class ReferenceShadow:
    """The paths that a cache would hold if each request took its whole path in at once."""

    def __init__(self, num_pages: int, policy: str) -> None:
        self.num_pages, self.policy = num_pages, policy
        self.uses: dict[Path, tuple[int, Uses]] = {}  # depth, uses
        self.ghosts = Ghosts(GHOSTS * num_pages)
        self.now = 0

    def ask(self, paths: Sequence[Path]) -> int:
        """How many leading paths hit."""
        self.now += 1
        wanted = paths[: self.num_pages]
        missing = [path for path in wanted if path not in self.uses]
        hits = len(wanted) - len(missing)
        while len(self.uses) + len(missing) > self.num_pages:
            others = [path for path in self.uses if path not in wanted]
            coldest = min(others, key=lambda path: (heat(self.policy, self.uses[path][1]), -self.uses[path][0]))
            self.ghosts.add(coldest, self.uses.pop(coldest)[1].last)
        for depth, path in enumerate(wanted):
            if path in self.uses:
                self.uses[path][1].again(self.now)
            else:
                self.uses[path] = depth, Uses(self.ghosts.pop(path), self.now)
        return hits


class ReferencePolicy:
    """`lru`, `lru2` or `duel`, which looks at its shadows each `interval` requests."""

    def __init__(self, name: str, *, num_pages: int, interval: int) -> None:
        self._interval = interval
        self._shadows = {policy: ReferenceShadow(num_pages, policy) for policy in ("lru", "lru2")}
        self._hits = dict.fromkeys(self._shadows, 0.0)
        self._num_asked = 0
        self._duels = name == "duel"
        self.ghosts = Ghosts(GHOSTS * num_pages)
        self.ranking = "lru" if self._duels else name

    @property
    def name(self) -> str:
        return f"duel: {self.ranking}" if self._duels else self.ranking

    def ask(self, paths: Sequence[Path]) -> None:
        """A request for the full pages `paths`."""
        if not paths or not self._duels:
            return
        for policy, shadow in self._shadows.items():
            self._hits[policy] = self._hits[policy] * DECAY + shadow.ask(paths)
        self._num_asked += 1
        if self._num_asked % self._interval == 0:
            if self.ranking == "lru" and self._hits["lru2"] > LEAD * self._hits["lru"]:
                self.ranking = "lru2"
            elif self.ranking == "lru2" and self._hits["lru"] > self._hits["lru2"]:
                self.ranking = "lru"

    def heat(self, uses: Uses) -> tuple[int, ...]:
        return heat(self.ranking, uses)


def heat(policy: str, uses: Uses) -> tuple[int, ...]:
    """Colder sorts first."""
    return (uses.last,) if policy == "lru" else (uses.before, uses.last)
