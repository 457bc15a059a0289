"""One request of a backend as a place that programs go on from: what it holds, where it came from, who needs it.

Knows nothing of text or states. The caller holds the driver's lock.

A draw is keyed by the seed of its state and by the path of its request, so paths must not depend on who came first:
the forks of one node are numbered by the program's order alone. Where branches begin, each gets a request of its own,
aborted before it runs: it computes nothing, owns the tokens, and is what the branch then forks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from radixrt.runtime import Handle, InvalidRequest, Output, SamplingParams, ScoreParams

from .driver import Driver, Ticket, always

_IDLE = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What all requests of one run have in common."""

    driver: Driver
    namespace: str
    priority: int
    is_wanted: Callable[[], bool] = always  # what is generated; else nobody steps for it


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """A request: the first `at` tokens of its parent, those `given`, and its `output` once it has ended."""

    origin: Origin
    parent: Node | None
    at: int
    given: tuple[int, ...]
    path: tuple[int, ...]
    handle: Handle
    output: tuple[int, ...] = ()
    num_forks: int = 0
    num_holders: int = 0

    @property
    def num_tokens(self) -> int:
        return self.at + len(self.given) + len(self.output)

    def tokens(self, stop: int) -> list[int]:
        """The first `stop` tokens. O(tokens)."""
        pieces: list[tuple[int, ...]] = []
        node: Node | None = self
        while node is not None:
            own = node.given + node.output
            pieces.append(own[: max(0, stop - node.at)])
            stop, node = min(stop, node.at), node.parent
        return [token_id for piece in reversed(pieces) for token_id in piece]

    def last_tokens(self, stop: int, n: int) -> list[int]:
        """The last n of the first `stop` tokens, or all of those."""
        last: list[int] = []
        node: Node | None = self
        while node is not None and len(last) < n:
            own = (node.given + node.output)[: max(0, stop - node.at)]
            last[:0] = own[max(0, len(own) - n + len(last)) :]
            stop, node = min(stop, node.at), node.parent
        return last

    def hold(self) -> Node:
        """Somebody goes on from here, until `drop`."""
        self.num_holders += 1
        return self

    def drop(self) -> None:
        """Somebody does not any more; the last one releases the request."""
        self.num_holders -= 1
        if not self.num_holders:
            self.origin.driver.backend.release(self.handle)

    def forks(self, n: int, params: SamplingParams, *, at: int, text: tuple[int, ...]) -> list[Node]:
        """n children that own the first `at` tokens and then `text`. InvalidRequest where they could never run."""
        given = list(text) or None
        fork = self.origin.driver.backend.fork
        try:
            handles = fork(self.handle, n, params, text=given, at=at)
        except InvalidRequest:  # perhaps because the engine keeps only so many requests that ended
            self._revive()
            try:
                handles = fork(self.handle, n, params, text=given, at=at)
            finally:
                self.origin.driver.backend.abort(self.handle)
        children = [
            Node(
                origin=self.origin,
                parent=self,
                at=at,
                given=text,
                path=(*self.path, self.num_forks + number),
                handle=handle,
            )
            for number, handle in enumerate(handles)
        ]
        self.num_forks += n
        return children

    def branches(self, n: int, *, at: int, text: tuple[int, ...]) -> list[Node]:
        """n children that have computed and will compute nothing: for branches to go on from."""
        children = self.forks(n, _IDLE, at=at, text=text)
        for child in children:
            self.origin.driver.backend.abort(child.handle)
        return children

    def _revive(self) -> None:
        """Let a request of these tokens and this path stand in for one that the backend has forgotten. It lives."""
        backend, length = self.origin.driver.backend, self.num_tokens
        backend.release(self.handle)
        self.handle = _submit(self.origin, self.tokens(length), _IDLE)
        for number in self.path[1:]:
            *others, last = backend.fork(self.handle, number + 1, _IDLE, text=None, at=length)
            for other in (self.handle, *others):
                backend.release(other)
            self.handle = last
        if self.num_forks:
            for fork in backend.fork(self.handle, self.num_forks, _IDLE, text=None, at=length):
                backend.release(fork)


def root(origin: Origin, tokens: tuple[int, ...], params: SamplingParams | ScoreParams) -> Node:
    """A request from the start."""
    return Node(origin=origin, parent=None, at=0, given=tokens, path=(0,), handle=_submit(origin, list(tokens), params))


def owner(origin: Origin, tokens: list[int]) -> Node:
    """A request that owns these tokens, at least two, and computes nothing: while held they stay cached. O(tokens).

    It asks for scores, which need no room for a token more.
    """
    node = root(origin, tuple(tokens), ScoreParams(start=len(tokens) - 1))
    origin.driver.backend.abort(node.handle)
    return node


def watch(node: Node, on_end: Callable[[Output | BaseException], None]) -> Ticket:
    return node.origin.driver.watch(node.handle, on_end, node.origin.is_wanted)


def seed_of(seed: int, path: tuple[int, ...]) -> int:
    """The seed of a branch; the run's own for the root."""
    if not path:
        return seed
    text = f"{seed}:{','.join(map(str, path))}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"radixrt.seed").digest(), "little")


def _submit(origin: Origin, tokens: list[int], params: SamplingParams | ScoreParams) -> Handle:
    return origin.driver.backend.submit(tokens, params, origin.namespace, priority=origin.priority)
