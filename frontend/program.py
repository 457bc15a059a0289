"""A program: a function over a state, and the ways to run it. Knows nothing of what states do.

A plain program runs on the thread that calls `run`, which steps the engine when it waits; an async one is a task.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial, update_wrapper
from pathlib import Path
from threading import Event
from types import NoneType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from radixrt.runtime import Engine, InvalidRequest, checks

from .backend import Backend
from .batch import Journal, in_tasks, in_threads, rows_of
from .branch import Branch
from .driver import Driver, always, driver_of
from .events import Observer, RunEnded, RunEvent, RunStarted
from .failures import BranchCancelled, StateMisuse, annotate, plain_value
from .node import Origin, seed_of
from .outline import Outline, outline, prefix_order
from .progress import Tally, has_terminal, shown
from .run import Run
from .scope import Failed, Ok
from .state import State
from .stream import Mailbox
from .trace import TraceWriter

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")  # what a call returns: R, or a coroutine of it
Runs = Engine | Backend | Driver


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a program runs, apart from its arguments. Equal seeds and arguments give equal answers.

    `trace` is a JSONL file that each run is added to. `observers` are called for one `Observer` of each run.
    """

    seed: int = 0
    namespace: str = ""
    priority: int = 0
    trace: str | Path | None = None
    observers: Sequence[Callable[[], Observer]] = ()

    def __post_init__(self) -> None:
        """InvalidRequest for what could be none of these."""
        object.__setattr__(self, "seed", checks.integer("seed", self.seed, -(2**63), 2**64 - 1))
        checks.instance("namespace", self.namespace, str, "a text")
        object.__setattr__(self, "priority", checks.integer("priority", self.priority, -(2**63), 2**63 - 1))
        checks.instance("trace", self.trace, (str, Path, NoneType), "a path")
        allowed = "a list of classes or functions, called for one of each run"
        for observer in checks.instance("observers", self.observers, Sequence, allowed):
            checks.instance("observers", observer, Callable, allowed)

    def changed(self, changes: Mapping[str, Any]) -> Options:
        """These with others of these names. InvalidRequest for a name that there is not."""
        names = [field.name for field in fields(self)]
        if unknown := sorted(changes.keys() - names):
            raise InvalidRequest(f"options: {', '.join(unknown)} given; allowed: {', '.join(names)}")
        return replace(self, **changes)

    def observing(self, stack: ExitStack) -> list[Observer]:
        """The observers of one run, which the stack closes."""
        writers: list[Callable[[], Observer]] = [partial(TraceWriter, self.trace)] if self.trace is not None else []
        return [stack.enter_context(closing(make())) for make in (*writers, *self.observers)]


@contextmanager
def root_branch(
    engine: Runs,
    options: Options,
    *,
    program: str,
    is_async: bool,
    row: int | None = None,
    mailbox: Mailbox | None = None,
) -> Iterator[Branch]:
    """A fresh branch, closed in the end. The engine object is kept until then."""
    origin = Origin(
        driver=driver_of(engine),
        namespace=options.namespace,
        priority=options.priority,
        is_wanted=mailbox.is_wanted if mailbox is not None else always,
    )
    with origin.driver.running(), ExitStack() as stack:
        observers = options.observing(stack) if mailbox is None else [*options.observing(stack), mailbox]
        run = Run(origin=origin, program=program, seed=options.seed, is_async=is_async, observers=tuple(observers))
        branch, failure = Branch(run), None
        run.tell(RunStarted(where=branch.where, seed=options.seed, row=row))
        try:
            yield branch
        except BaseException as error:
            failure = error
            if isinstance(error, Exception):
                annotate(error, f"in program {program}")
            raise
        finally:
            interrupt: BaseException | None = None
            while True:
                try:
                    branch.close()
                    break
                except Exception:
                    raise
                except BaseException as error:  # it goes on closing; what was interrupted first is told
                    interrupt = error
            run.tell(RunEnded(where=branch.where, value=branch.value, error=failure or interrupt))
            if interrupt is not None:
                raise interrupt
        for fault in run.faults.values():
            raise fault


class Program(Generic[P, R, C]):
    """A function whose first argument is a `State`. Called with one, it is a part of another program."""

    def __init__(self, function: Callable[Concatenate[State, P], C], options: Options) -> None:
        """InvalidRequest for what is no function of a state, or yields."""
        checks.instance("program", function, Callable, "a function whose first argument is a state")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            checks.refuse(
                "program", function, "a function that returns its value; `stream` gives what happens meanwhile"
            )
        self._function = function
        self._options = options
        self._is_async = inspect.iscoroutinefunction(function)
        update_wrapper(self, function)

    @property
    def name(self) -> str:
        return str(getattr(self._function, "__name__", "program"))

    def options(self, **changes: Any) -> Program[P, R, C]:
        """The same program with other `Options`: seed, namespace, priority, trace, observers."""
        return Program(self._function, self._options.changed(changes))

    def __call__(self, state: State, *args: P.args, **kwargs: P.kwargs) -> C:
        allowed = f"a state, inside of another program; {self.name}.run(engine, ...) runs it"
        checks.instance(self.name, state, State, allowed)
        return self._function(state, *args, **kwargs)

    def run(self, engine: Runs, *args: P.args, **kwargs: P.kwargs) -> R:
        """What it returns. Blocks, and steps the engine meanwhile; an async program gets an event loop of its own."""
        if self._is_async:
            self._check_no_loop("run", "write `await` and arun")
            return asyncio.run(self.arun(engine, *args, **kwargs))
        with self._root(engine) as branch:
            return self._here(branch, args, kwargs)

    async def arun(self, engine: Runs, *args: P.args, **kwargs: P.kwargs) -> R:
        """What it returns. A plain program runs in a thread; cancelling this cancels either kind."""
        with self._root(engine) as branch:
            if not self._is_async:
                return await self._in_thread(branch, args, kwargs)
            return await self._awaited(branch, args, kwargs)

    def stream(self, engine: Runs, *args: P.args, **kwargs: P.kwargs) -> Generator[RunEvent, None, None]:
        """What happens in a run, as it happens; `RunEnded` comes last, and an error is raised as itself.

        The program goes on only while the next event is waited for. Closing the iterator, or letting go of it, cancels
        the program and frees its pages. A plain program runs in a thread, an async one in an event loop of its own.
        """
        if self._is_async:
            self._check_no_loop("stream", "use astream")
            with asyncio.Runner() as runner:
                events = self.astream(engine, *args, **kwargs)
                try:
                    while (event := runner.run(_next_of(events))) is not None:
                        yield event
                except KeyboardInterrupt:  # the runner ends all, unless a second one has it stop once more
                    with suppress(RuntimeError):
                        runner.run(asyncio.sleep(0))
                    raise
                except BaseException:
                    runner.run(events.aclose())
                    raise
            return
        mailbox = Mailbox(driver := driver_of(engine))
        with self._root(driver, mailbox=mailbox) as branch:
            work = partial(self._here, branch, args, kwargs)
            yield from mailbox.during(work, cancel=lambda: branch.close(BranchCancelled()))
        yield from mailbox.rest()

    async def astream(self, engine: Runs, *args: P.args, **kwargs: P.kwargs) -> AsyncGenerator[RunEvent, None]:
        """As `stream`, in your event loop: where an async program runs too."""
        mailbox = Mailbox(driver := driver_of(engine), asyncio.get_running_loop())
        with self._root(driver, mailbox=mailbox) as branch:
            work = (self._awaited if self._is_async else self._in_thread)(branch, args, kwargs)
            async with aclosing(mailbox.during_async(work)) as events:
                async for event in events:
                    yield event
        for event in mailbox.rest():
            yield event

    def plan(self, engine: Runs | None = None, rows: Iterable[Mapping[str, Any]] = (), /, **static: Any) -> Outline:
        """What runs with these arguments will share, as far as the source says it: nothing of it is run.

        With an engine, for its tokenizer, tokens are counted. `rows` are of a batch: what they have in common then.
        """
        tools = None
        if engine is not None:
            driver = driver_of(engine)
            tools = driver.codec, driver.template
        return outline(self._function, self.name, static, rows_of(rows), tools)

    def batch(
        self,
        engine: Runs,
        rows: Iterable[Mapping[str, Any]],
        *,
        concurrency: int = 32,
        resume: str | Path | None = None,
        progress: bool = True,
    ) -> list[Ok[R] | Failed]:
        """Run once for each row, its arguments by name, so many at once; one result for each row, in order.

        Rows whose prompts are known to begin alike run next to each other. With `resume`, values are kept in that JSONL
        file as they come, and rows that are in it are not run again; what failed is. Values are what JSON makes of them
        then. Where stderr is a terminal a bar there shows the `progress`.
        """
        todo = rows_of(rows)
        concurrency = checks.integer("concurrency", concurrency, 1)
        checks.instance("resume", resume, (str, Path, NoneType), "a path")
        if self._is_async:
            self._check_no_loop("batch", "call it in a thread, as asyncio.to_thread does")
        driver = driver_of(engine)
        journal = Journal(resume, todo, program=f"{self.name}:{self._options.seed}") if resume is not None else None
        try:
            known = journal.values if journal is not None else {}
            numbers = prefix_order(self._function, todo, (n for n in range(len(todo)) if n not in known))
            tally = Tally(num_rows=len(todo), num_known=len(known))
            is_shown = progress and has_terminal()
            watched = self.options(observers=(*self._options.observers, tally.row)) if is_shown else self
            with shown(tally, self.name) if is_shown else nullcontext():
                results = watched._rows(driver, todo, numbers, journal, concurrency)
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
        concurrency: int,
    ) -> dict[int, Ok[Any] | Failed]:
        live: set[Branch] = set()
        is_stopped = Event()

        def root(number: int) -> AbstractContextManager[Branch]:
            seeded = self.options(seed=seed_of(self._options.seed, (number,)))
            return seeded._root(driver, row=number)

        def kept(number: int, value: Any) -> Any:
            return journal.add(number, value) if journal is not None else value

        async def task(number: int) -> Any:
            with root(number) as branch:
                return kept(number, await self._awaited(branch, (), rows[number]))

        def call(number: int) -> Any:
            with root(number) as branch:
                live.add(branch)
                try:
                    if is_stopped.is_set():  # after it is known to `stop`, which may have missed it
                        raise BranchCancelled
                    return kept(number, self._here(branch, (), rows[number]))
                finally:
                    live.discard(branch)

        def stop() -> None:
            is_stopped.set()
            for branch in list(live):
                branch.close(BranchCancelled())

        if self._is_async:
            return asyncio.run(in_tasks(task, numbers, concurrency=concurrency))
        with driver.running():
            return in_threads(driver, call, numbers, concurrency=concurrency, stop=stop)

    def _root(
        self, engine: Runs, *, row: int | None = None, mailbox: Mailbox | None = None
    ) -> AbstractContextManager[Branch]:
        return root_branch(engine, self._options, program=self.name, is_async=self._is_async, row=row, mailbox=mailbox)

    def _check_no_loop(self, verb: str, instead: str) -> None:
        """An event loop of its own can run here."""
        if _in_event_loop():
            raise StateMisuse(f"{verb}: an event loop runs here, and {self.name} is async; {instead}")

    async def _awaited(self, branch: Branch, args: Any, kwargs: Any) -> R:
        value: Any = await self._called(branch, args, kwargs)
        await branch.settled()
        branch.value = value
        return value  # type: ignore[no-any-return]

    def _called(self, branch: Branch, args: Any, kwargs: Any) -> Any:
        return self._function(State(branch), *args, **kwargs)

    def _here(self, branch: Branch, args: Any, kwargs: Any) -> R:
        with branch.driver.attending():
            value: Any = plain_value(self._called(branch, args, kwargs), self.name)
            branch.settle()
            branch.value = value
            return value  # type: ignore[no-any-return]

    async def _in_thread(self, branch: Branch, args: Any, kwargs: Any) -> R:
        work = asyncio.ensure_future(asyncio.to_thread(self._here, branch, args, kwargs))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            branch.close(BranchCancelled())
            await asyncio.wait([work])
            work.cancelled() or work.exception()  # seen
            raise


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _next_of(events: AsyncGenerator[RunEvent, None]) -> RunEvent | None:
    return await anext(events, None)


@overload
def program(
    function: Callable[Concatenate[State, P], Coroutine[Any, Any, R]],
) -> Program[P, R, Coroutine[Any, Any, R]]: ...


@overload
def program(function: Callable[Concatenate[State, P], R]) -> Program[P, R, R]: ...


def program(function: Callable[Concatenate[State, P], Any]) -> Program[P, Any, Any]:
    """Make a program of a function, plain or async, whose first argument is a `State`."""
    return Program(function, Options())
