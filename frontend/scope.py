"""Branches of a state, as a scope: made together, ended together, whatever ends them.

Knows nothing of tokens. In plain programs `map` runs its function in threads, in async ones in tasks.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

from radixrt.runtime import checks

from .branch import Branch
from .content import Content
from .events import BranchOpened
from .failures import BranchCancelled, StateMisuse, annotate, plain_value
from .state import State
from .threads import run_threads

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
OnError = Literal["raise", "collect"]
MAX_BRANCHES = 4096
MAX_THREADS = 64  # of one `map`; more branches take their turns


@dataclass(frozen=True, slots=True)
class Failed:
    """Where a result would be: what was raised instead."""

    error: Exception
    ok: Literal[False] = False


@dataclass(frozen=True, slots=True)
class Ok(Generic[R_co]):
    value: R_co
    ok: Literal[True] = True


class Scope:
    """The states of a scope, from where its parent stands when it is entered."""

    def __init__(self, parent: Branch, n: int) -> None:
        self._parent = parent
        self._n = n
        self._states: tuple[State, ...] = ()
        self._winner: Branch | None = None

    def choose(self, branch: State) -> None:
        if branch not in self._states:
            raise StateMisuse(f"adopt: {branch!r} is no branch of the scope that is open; choose one of that")
        self._winner = branch._branch

    def _open(self) -> None:
        parent = self._parent
        parent.take_turn()
        if self._states:
            raise StateMisuse(f"scope: entered twice, in {parent.where}; call fork again")
        with parent.driver.lock:
            parent.check_open()
            parent.content = content = parent.content.settled(parent.codec)
            first, parent.num_branches = parent.num_branches, parent.num_branches + self._n
            self._states = tuple(
                State(Branch(parent.run, content=one, parent=parent, path=(*parent.where.path, first + index)))
                for index, one in enumerate(self._contents(content))
            )
            parent.scope = self
            parent.tell_given(content)
            for state in self._states:
                parent.run.tell(BranchOpened(where=state._branch.where))

    def _contents(self, content: Content) -> list[Content]:
        """What each branch begins with: a node of its own, but where it is alone or nothing was generated yet."""
        if content.node is None or self._n <= 1:
            return [content] * self._n
        nodes = content.node.branches(self._n, at=content.at, text=content.committed)
        return [replace(content, node=node, at=node.num_tokens, committed=(), chosen=None) for node in nodes]

    def _leave(self) -> None:
        """The scope ended well: the winner, if there is one, has ended too, and the parent goes on as it."""
        if self._winner is not None:
            self._parent.go_on_as(self._winner.settle(), told=self._winner.told)
            self._winner.close(adopted=True)
        self.close(None)

    def close(self, reason: BaseException | None) -> None:
        """End every branch and let go of its pages. The parent is its own again."""
        with self._parent.driver.lock:
            for state in self._states:
                state.close(reason)
            self._parent.scope = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._leave()
        finally:
            self.close(None)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self._winner is not None:
                    await self._winner.settled()
                self._leave()
        finally:
            self.close(None)


class Scratch(Scope):
    """A scope of one branch, which the `with` statement names."""

    def __init__(self, parent: Branch) -> None:
        super().__init__(parent, 1)

    def __enter__(self) -> State:
        self._open()
        return self._states[0]

    async def __aenter__(self) -> State:
        return self.__enter__()


class Branches(Scope, Sequence[State]):
    """The branches of a scope, in order."""

    def __init__(self, parent: Branch, n: int) -> None:
        super().__init__(parent, checks.integer("fork", n, 0, MAX_BRANCHES, or_else="a sequence of items, or "))

    def __enter__(self) -> Self:
        self._open()
        return self

    async def __aenter__(self) -> Self:
        return self.__enter__()

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> State: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[State]: ...

    def __getitem__(self, index: int | slice) -> State | Sequence[State]:
        if not self._states and self._n:
            raise StateMisuse(f"branches: there are none yet, in {self._parent.where}; go into their scope by `with`")
        try:
            return self._states[index]
        except IndexError:
            raise IndexError(f"branches: [{index}] of {self._n}, in {self._parent.where}") from None

    def __setitem__(self, index: int, state: State) -> None:
        """For `branches[0] += "..."`, which gives back the branch that is there. StateMisuse for any other."""
        if self[index] is not state:
            raise StateMisuse(f"branches: {state!r} put in place of {self[index]!r}; branches stay, append to them")

    @overload
    def map(self, function: Callable[[State], Coroutine[Any, Any, R]]) -> Awaitable[list[R]]: ...  # type: ignore[overload-overlap]

    @overload
    def map(self, function: Callable[[State], R]) -> list[R]: ...

    @overload
    def map(  # type: ignore[overload-overlap]
        self, function: Callable[[State], Coroutine[Any, Any, R]], *, on_error: Literal["collect"]
    ) -> Awaitable[list[Ok[R] | Failed]]: ...

    @overload
    def map(self, function: Callable[[State], R], *, on_error: Literal["collect"]) -> list[Ok[R] | Failed]: ...

    def map(self, function: Callable[[State], Any], *, on_error: OnError = "raise") -> Any:
        """Run a function on each branch, all at once; its results, in order and complete.

        The first error cancels the other branches and is raised as itself. With "collect" nothing is cancelled, and
        each result is `Ok` or `Failed`.
        """
        checks.instance("map", function, Callable, "a function of a branch")
        return _map_all(self, self._states, function, on_error)


class ItemBranches(Branches, Generic[T]):
    """The branches of a scope, one for each item."""

    def __init__(self, parent: Branch, items: Sequence[T]) -> None:
        super().__init__(parent, len(items))
        self.items = items

    @overload  # type: ignore[override]  # the function gets the item too
    def map(self, function: Callable[[State, T], Coroutine[Any, Any, R]]) -> Awaitable[list[R]]: ...  # type: ignore[overload-overlap]

    @overload
    def map(self, function: Callable[[State, T], R]) -> list[R]: ...

    @overload
    def map(  # type: ignore[overload-overlap]
        self, function: Callable[[State, T], Coroutine[Any, Any, R]], *, on_error: Literal["collect"]
    ) -> Awaitable[list[Ok[R] | Failed]]: ...

    @overload
    def map(self, function: Callable[[State, T], R], *, on_error: Literal["collect"]) -> list[Ok[R] | Failed]: ...

    def map(self, function: Callable[[State, T], Any], *, on_error: OnError = "raise") -> Any:
        """As `Branches.map`; the function gets the branch and its item."""
        checks.instance("map", function, Callable, "a function of a branch and its item")
        items = dict(zip(self._states, self.items, strict=True))
        return _map_all(self, self._states, lambda state: function(state, items[state]), on_error)


def _map_all(scope: Scope, states: Sequence[State], function: Callable[[State], Any], on_error: OnError) -> Any:
    if on_error not in ("raise", "collect"):
        checks.refuse("on_error", on_error, '"raise" or "collect"')
    parent = scope._parent
    parent.check_open()
    if parent.scope is not scope:
        raise StateMisuse(f"map: the scope is not open, in {parent.where}; call it inside of `with`")
    if parent.run.is_async:
        return _in_tasks(states, function, on_error)
    return _in_threads(parent, states, function, on_error)


async def _in_tasks(
    states: Sequence[State], function: Callable[[State], Awaitable[Any]], on_error: OnError
) -> list[Any]:
    async def one(state: State) -> Any:
        try:
            result = function(state)
            if not inspect.isawaitable(result):
                raise StateMisuse(
                    "map: a plain function was called in an async program; write `async def` for both or none"
                )
            value = await result
        except Exception as error:
            annotate(error, f"in {state._branch.where}")
            if on_error == "raise":
                raise
            return Failed(error)
        return Ok(value) if on_error == "collect" else value

    if not states:
        return []
    tasks = [asyncio.ensure_future(one(state)) for state in states]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        first = next((task for task in tasks if task in done and not task.cancelled() and task.exception()), None)
        return [task.result() for task in (tasks if first is None else [first])]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_threads(parent: Branch, states: Sequence[State], function: Callable[[State], Any], on_error: OnError) -> Any:
    results: list[Any] = [None] * len(states)
    errors: list[tuple[int, BaseException]] = []  # in the order in which they came
    numbers, lock = iter(range(len(states))), Lock()

    def next_number() -> int | None:
        with lock:
            return next(numbers, None)

    def work() -> None:
        while (number := next_number()) is not None:
            try:
                value = plain_value(function(states[number]), "map")
                results[number] = Ok(value) if on_error == "collect" else value
            except Exception as error:
                annotate(error, f"in {states[number]._branch.where}")
                results[number] = Failed(error)
                if on_error == "raise":
                    errors.append((number, error))
                    cancel()
            except BaseException as error:  # a cancelled branch, or an interrupt
                errors.append((number, error))
                cancel()

    def cancel() -> None:
        for state in states:
            state.close(BranchCancelled())

    num_threads = min(len(states), MAX_THREADS)
    run_threads(parent.driver, [partial(copy_context().run, work) for _ in range(num_threads)], cancel)
    if errors:
        raise errors[0][1]
    return results
