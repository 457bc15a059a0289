"""A conversation that stays: one state, turn after turn, pinned in the cache. Knows nothing of programs."""

from __future__ import annotations

from contextlib import ExitStack
from types import NoneType
from typing import Any, Self, TypeVar, Unpack, overload

from radixrt.runtime import Grammar, checks

from .failures import StateMisuse
from .program import Options, Runs, root_branch
from .run import Cost, Generation
from .slot import Slot
from .state import Mark, State

T = TypeVar("T")


class Session:
    """A chat: `with` in plain code, `async with` in an event loop."""

    def __init__(self, engine: Runs, *, system: str | None = None, ttl: int | None = None, **options: Any) -> None:
        """`ttl`: engine steps without a turn after which nothing is pinned any more. Further `Options` by name."""
        checks.instance("system", system, (str, NoneType), "a text")
        self._engine = engine
        self._system = system
        self._ttl = checks.optional_integer("ttl", ttl, 1)
        self._options = Options().changed(options)
        self._stack = ExitStack()
        self._state: State | None = None
        self._turn: tuple[Slot[Any], Mark] | None = None  # the last reply, and where its turn began

    @property
    def state(self) -> State:
        """The state behind it, for whatever a session does not offer."""
        if self._state is None:
            raise StateMisuse("session: not open; use it inside of `with rx.session(...) as chat:`")
        if self._turn is not None and self._turn[0].requests.error is not None:
            self._state.rewind(self._turn[1])
            self._turn = None
        return self._state

    @overload
    def send(self, text: str, kind: type[str] | Grammar = str, /, **asked: Unpack[Generation]) -> Slot[str]: ...

    @overload
    def send(self, text: str, kind: type[T], /, **asked: Unpack[Generation]) -> Slot[T]: ...

    @overload
    def send(self, text: str, kind: object, /, **asked: Unpack[Generation]) -> Slot[Any]: ...

    def send(self, text: str, kind: Any = str, /, **asked: Unpack[Generation]) -> Slot[Any]:
        """Say something as the user; the reply, as `gen`'s of at most 256 tokens unless asked otherwise.

        Only what is new is sent and computed. If the reply fails or is cancelled, the turn has not been.
        """
        state = self.state
        mark = state.mark()
        asked.setdefault("max_tokens", 256)
        try:
            with state.user():
                state += text
            with state.assistant():
                slot: Slot[Any] = state.gen(kind, **asked)
        except BaseException:
            state.rewind(mark)
            raise
        self._turn = slot, mark
        return slot

    def mark(self) -> Mark:
        """This moment, to `rewind` to."""
        return self.state.mark()

    def rewind(self, mark: Mark) -> None:
        """Unsay what was said since the mark. Computes nothing."""
        self.state.rewind(mark)

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.state.messages

    @property
    def cost(self) -> Cost:
        return self.state.cost

    def __enter__(self) -> Self:
        return self._open(is_async=False)

    async def __aenter__(self) -> Self:
        return self._open(is_async=True)

    def _open(self, *, is_async: bool) -> Self:
        if self._state is not None:
            raise StateMisuse("session: entered twice; make a new one")
        with ExitStack() as stack:
            root = root_branch(self._engine, self._options, program="session", is_async=is_async)
            self._state = State(stack.enter_context(root))
            if self._system is not None:
                with self._state.system():
                    self._state += self._system
            self._state.pin(self._ttl)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    async def __aexit__(self, *error: object) -> None:
        self._stack.close()


def session(engine: Runs, *, system: str | None = None, ttl: int | None = None, **options: Any) -> Session:
    """A chat on one state: see `Session`."""
    return Session(engine, system=system, ttl=ttl, **options)
