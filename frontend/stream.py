"""The events of one run on their way to one reader, who drives the run by reading. Knows no programs.

What the run generates is wanted only while its reader waits: nobody steps the engine for it otherwise. So the engine
runs ahead of a slow reader by a step, or by what others on the same engine step meanwhile, never by more than the
generations that were asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import copy_context
from typing import Any

from .driver import Driver
from .events import RunEvent
from .threads import Crew


class Mailbox:
    """An observer that keeps events until they are read, by a thread or, with its `loop`, by a task."""

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._driver = driver
        self._loop = loop
        self._bell = asyncio.Event()
        self._events: deque[RunEvent] = deque()
        self._is_awaited = False

    def is_wanted(self) -> bool:
        return self._is_awaited

    def tell(self, event: RunEvent) -> None:
        self._events.append(event)
        self._ring()

    def close(self) -> None:
        pass

    def rest(self) -> list[RunEvent]:
        """What was told since the last event was read."""
        events, self._events = list(self._events), deque()
        return events

    def during(self, work: Callable[[], object], *, cancel: Callable[[], object]) -> Generator[RunEvent, None, None]:
        """Call it in a thread; the events until it has ended, then its error. Closing this cancels it, and waits.

        Interrupts cancel it too, and the last one is raised when the thread has ended.
        """
        outcome: list[BaseException | None] = []

        def run() -> None:
            try:
                context.run(work)
                outcome.append(None)
            except BaseException as error:
                outcome.append(error)
            self._ring()

        context = copy_context()
        with Crew(self._driver, [run], cancel).at_work():
            while (event := self._next(lambda: bool(outcome))) is not None:
                yield event
        if outcome[0] is not None:
            raise outcome[0]

    async def during_async(self, work: Coroutine[Any, Any, object]) -> AsyncGenerator[RunEvent, None]:
        """As `during`, for a coroutine."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._ring())
        try:
            while (event := await self._next_async(task.done)) is not None:
                yield event
            task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])
            task.cancelled() or task.exception()  # seen

    def _next(self, is_over: Callable[[], bool]) -> RunEvent | None:
        with self._driver.away(), self._driver.lock:
            while not self._events and not is_over():
                self._ask()
                self._driver.lock.wait()
            return self._events.popleft() if self._events else None

    async def _next_async(self, is_over: Callable[[], bool]) -> RunEvent | None:
        while True:
            with self._driver.lock:
                if self._events:
                    return self._events.popleft()
                if is_over():
                    return None
                self._bell.clear()
                self._ask()
            await self._bell.wait()

    def _ask(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            self._driver.resume()

    def _ring(self) -> None:
        """Something is to be read: no more is wanted until it was."""
        with self._driver.lock:
            self._is_awaited = False
            self._driver.lock.notify()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bell.set)
