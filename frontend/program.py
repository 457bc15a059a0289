"""A program: a function over a state, and the ways to run it. Knows nothing of what states do.

A plain program runs on the thread that calls `run`, which steps the engine when it waits; an async one is a task.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from radixrt.runtime import CacheUse, Engine, InvalidRequest

from .backend import Backend
from .batch import Journal, in_tasks, in_threads
from .driver import Driver, driver_of
from .failures import BranchCancelled, annotate
from .node import Origin, seed_of
from .run import Run
from .scope import Failed, Ok
from .state import State

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")  # what a call returns: R, or a coroutine of it
Runs = Engine | Backend | Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a program runs, apart from its arguments. Equal seeds and arguments give equal answers."""

    seed: int = 0
    namespace: str = ""
    priority: int = 0
    cache: CacheUse = "all"


@contextmanager
def root_state(engine: Runs, options: Options, *, program: str, is_async: bool) -> Iterator[State]:
    """A fresh state, closed in the end. The engine object is kept until then."""
    driver = driver_of(engine)
    origin = Origin(driver=driver, namespace=options.namespace, priority=options.priority, cache=options.cache)
    state = State(Run(origin=origin, program=program, seed=options.seed, is_async=is_async))
    try:
        yield state
    except Exception as error:
        annotate(error, f"in program {program}")
        raise
    finally:
        state.close()


class Program(Generic[P, R, C]):
    """A function whose first argument is a `State`. Called with one, it is a part of another program."""

    def __init__(self, function: Callable[Concatenate[State, P], C], options: Options) -> None:
        self._function = function
        self._options = options
        self._is_async = inspect.iscoroutinefunction(function)
        functools.update_wrapper(self, function)

    @property
    def name(self) -> str:
        return str(getattr(self._function, "__name__", "program"))

    def options(self, **changes: Any) -> Program[P, R, C]:
        """The same program with other `Options`: seed, namespace, priority, cache."""
        return Program(self._function, replace(self._options, **changes))

    def __call__(self, state: State, *args: P.args, **kwargs: P.kwargs) -> C:
        return self._function(state, *args, **kwargs)

    def run(self, engine: Runs, *args: P.args, **kwargs: P.kwargs) -> R:
        """What it returns. Blocks, and steps the engine meanwhile; an async program gets an event loop of its own."""
        if self._is_async:
            return asyncio.run(self.arun(engine, *args, **kwargs))
        with self._root(engine) as state:
            return self._here(state, args, kwargs)

    async def arun(self, engine: Runs, *args: P.args, **kwargs: P.kwargs) -> R:
        """What it returns. A plain program runs in a thread; cancelling this cancels either kind."""
        with self._root(engine) as state:
            if not self._is_async:
                return await self._in_thread(state, args, kwargs)
            return await self._awaited(state, args, kwargs)

    def batch(
        self,
        engine: Runs,
        rows: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 32,
        resume: str | Path | None = None,
    ) -> list[Ok[R] | Failed]:
        """Run once for each row, its arguments by name, so many at once; one result for each row, in order.

        With `resume`, values are kept in that JSONL file as they come, and rows that are in it are not run again; what
        failed is. Values are what JSON makes of them then.
        """
        todo = list(rows)
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidRequest(f"concurrency: {concurrency!r} given; allowed: an integer of at least 1")
        driver = driver_of(engine)
        journal = Journal(resume, todo, program=f"{self.name}:{self._options.seed}") if resume is not None else None
        live: set[State] = set()
        try:
            known = journal.values if journal is not None else {}
            numbers = [number for number in range(len(todo)) if number not in known]
            results = self._rows(driver, todo, numbers, journal, live, concurrency)
        finally:
            if journal is not None:
                journal.close()
        return [Ok(known[number]) if number in known else results[number] for number in range(len(todo))]

    def _rows(
        self,
        driver: Driver,
        rows: list[Mapping[str, Any]],
        numbers: list[int],
        journal: Journal | None,
        live: set[State],
        concurrency: int,
    ) -> dict[int, Ok[Any] | Failed]:
        def root(number: int) -> AbstractContextManager[State]:
            seeded = self.options(seed=seed_of(self._options.seed, (number,)))
            return seeded._root(driver)

        def kept(number: int, value: Any) -> Any:
            return journal.add(number, value) if journal is not None else value

        async def task(number: int) -> Any:
            with root(number) as state:
                return kept(number, await self._awaited(state, (), rows[number]))

        def call(number: int) -> Any:
            with root(number) as state:
                live.add(state)
                try:
                    return kept(number, self._here(state, (), rows[number]))
                finally:
                    live.discard(state)

        def stop() -> None:
            for state in list(live):
                state.close(BranchCancelled())

        if self._is_async:
            return asyncio.run(in_tasks(task, numbers, concurrency=concurrency))
        return in_threads(driver, call, numbers, concurrency=concurrency, stop=stop)

    def _root(self, engine: Runs) -> AbstractContextManager[State]:
        return root_state(engine, self._options, program=self.name, is_async=self._is_async)

    async def _awaited(self, state: State, args: Any, kwargs: Any) -> R:
        value: Any = await self._called(state, args, kwargs)
        await state._settled()
        return value  # type: ignore[no-any-return]

    def _called(self, state: State, args: Any, kwargs: Any) -> Any:
        return self._function(state, *args, **kwargs)

    def _here(self, state: State, args: Any, kwargs: Any) -> R:
        with state._driver.attending():
            value: Any = self._called(state, args, kwargs)
            state._settle()
            return value  # type: ignore[no-any-return]

    async def _in_thread(self, state: State, args: Any, kwargs: Any) -> R:
        work = asyncio.ensure_future(asyncio.to_thread(self._here, state, args, kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            state.close(BranchCancelled())
            await asyncio.wait([work])
            work.cancelled() or work.exception()  # seen
            raise


@overload
def program(
    function: Callable[Concatenate[State, P], Coroutine[Any, Any, R]],
) -> Program[P, R, Coroutine[Any, Any, R]]: ...


@overload
def program(function: Callable[Concatenate[State, P], R]) -> Program[P, R, R]: ...


def program(function: Callable[Concatenate[State, P], Any]) -> Program[P, Any, Any]:
    """Make a program of a function, plain or async, whose first argument is a `State`."""
    return Program(function, Options())
