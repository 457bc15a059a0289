"""Who steps: one driver for each engine, and how threads and tasks wait for their generations together.

Knows nothing of states or text. One lock guards the engine. Whoever waits steps: a thread that waits for a slot steps
the engine as soon as every other thread of a program waits too (or after `GRACE` seconds, where one is busy
elsewhere), so that what branches ask for together runs together. In an event loop a task of the driver's steps, on
the loop's thread, between two of its rounds, while any task of that loop waits. No thread is ever started here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock, RLock, local
from time import monotonic
from weakref import WeakKeyDictionary, proxy

from radixrt.runtime import Engine, FinishEvent, Handle, Output, TokenEvent

from .backend import Backend, EngineBackend
from .chat import Template
from .checks import refuse
from .codec import Codec
from .failures import StateMisuse

GRACE = 0.02  # seconds; waiting this long for a thread costs less than a step without it
_ROUNDS = 4  # of an event loop: a task that got its answer has asked for the next one by then

Loop = asyncio.AbstractEventLoop


def always() -> bool:
    return True


class TurnLock:
    """A re-entrant lock that who lets go of it cannot have again before those who wait: a loop of steps lets them in.

    `changed` is a condition on it.
    """

    def __init__(self) -> None:
        self._lock = RLock()
        self._next = Lock()  # of the one who is to have it next
        self._here = local()
        self.changed = Condition(self._lock)

    def __enter__(self) -> None:
        depth = getattr(self._here, "depth", 0)
        if depth:
            self._lock.acquire()
        else:
            with self._next:
                self._lock.acquire()
        self._here.depth = depth + 1

    def __exit__(self, *error: object) -> None:
        self._here.depth -= 1
        self._lock.release()


@dataclass(eq=False, slots=True)
class Ticket:
    """One request that runs. `on_text` and `on_end` are called under the driver's lock, before who waits hears of it.

    Whoever waits for it steps only while it `is_wanted`; `Driver.resume` says that this has changed.
    """

    handle: Handle
    on_end: Callable[[Output | BaseException], None]
    is_wanted: Callable[[], bool]
    on_text: Callable[[str], None] | None = None
    is_done: bool = False
    num_threads: int = 0  # that wait for it
    futures: list[tuple[Loop, asyncio.Future[None]]] = field(default_factory=list)


class Driver:
    """Everything that programs share of one backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.codec = Codec(backend.tokenizer, backend.vocab_size)
        self.template = Template(backend.tokenizer)
        self.lock = TurnLock()
        self._tickets: dict[Handle, Ticket] = {}
        self._num_busy = 0  # threads of programs that do not wait
        self._touched = 0.0  # when that last changed
        self._thread = local()
        self._pumps: dict[Loop, asyncio.Task[None]] = {}

    # -- requests -------------------------------------------------------------------------------------------------

    def watch(
        self, handle: Handle, on_end: Callable[[Output | BaseException], None], is_wanted: Callable[[], bool]
    ) -> Ticket:
        """Tell `on_end` of the request's output, or of what kept it from one."""
        with self.lock:
            self._touched = monotonic()
            ticket = self._tickets[handle] = Ticket(handle, on_end, is_wanted)
            return ticket

    def cancel(self, ticket: Ticket, reason: BaseException) -> None:
        """End a request that still runs; `reason` is what its slot raises."""
        with self.lock:
            if not ticket.is_done:
                self.backend.release(ticket.handle)
                self._end(ticket, reason)

    # -- waiting --------------------------------------------------------------------------------------------------

    @contextmanager
    def attending(self) -> Iterator[None]:
        """The caller's thread runs a program meanwhile: nobody steps before it waits. Within itself, nothing more."""
        if self._is_counted:
            yield
            return
        self.expect(1)
        with self.joining():
            yield

    def expect(self, num_threads: int) -> None:
        """So many threads are about to start, and to call `joining`."""
        self._count(num_threads)

    @contextmanager
    def joining(self) -> Iterator[None]:
        """The caller's thread is one of those expected."""
        self._thread.is_counted = True
        try:
            yield
        finally:
            self._thread.is_counted = False
            self._count(-1)

    @contextmanager
    def away(self) -> Iterator[None]:
        """The caller's thread waits for other threads of its program meanwhile."""
        change = int(self._is_counted)
        self._count(-change)
        try:
            yield
        finally:
            self._count(change)

    def wait(self, ticket: Ticket) -> None:
        """Block until the request has ended, stepping when it is this thread's turn."""
        with self.lock:
            if ticket.is_done:
                return
            change = int(self._is_counted)
            ticket.num_threads += change
            self._count(-change)
        try:
            while not ticket.is_done:
                with self.lock:
                    self._step_in_turn(ticket)
        finally:
            with self.lock:
                if not ticket.is_done:  # an interrupt
                    ticket.num_threads -= change
                    self._count(change)

    @property
    def _is_counted(self) -> bool:
        return getattr(self._thread, "is_counted", False)

    async def wait_async(self, ticket: Ticket) -> None:
        """Await the end of the request. Cancelling this leaves the request alone."""
        loop = asyncio.get_running_loop()
        with self.lock:
            if ticket.is_done:
                return
            entry = loop, loop.create_future()
            ticket.futures.append(entry)
            self._start_pump(loop)
        try:
            await entry[1]
        finally:
            with self.lock:
                if entry in ticket.futures:
                    ticket.futures.remove(entry)

    def resume(self) -> None:
        """A reader wants more: who waits for its requests may step again."""
        with self.lock:
            self.lock.changed.notify_all()
            for loop in {loop for ticket in self._tickets.values() for loop, _ in ticket.futures}:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._start_pump, loop)

    def _count(self, change: int) -> None:
        with self.lock:
            self._num_busy += change
            self._touched = monotonic()
            self.lock.changed.notify_all()

    def _step_in_turn(self, ticket: Ticket) -> None:
        """Step, or wait for the threads that are busy: they may ask for more to run together."""
        patience = self._touched + GRACE - monotonic() if self._num_busy > 0 else 0.0
        if ticket.is_done:
            return
        if not ticket.is_wanted():
            self.lock.changed.wait()
        elif patience > 0:
            self.lock.changed.wait(patience)
        else:
            self._step()

    def _start_pump(self, loop: Loop) -> None:
        """On the loop's thread."""
        with self.lock:
            if loop not in self._pumps and self._has_waiting(loop):
                self._pumps[loop] = loop.create_task(self._pump(loop))

    async def _pump(self, loop: Loop) -> None:
        """Step while tasks of this loop wait."""
        try:
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)
            while self._has_waiting(loop):
                with self.lock:
                    patience = self._touched + GRACE - monotonic() if self._num_busy > 0 else 0.0
                    has_ended = patience <= 0 and self._step()
                if patience > 0:
                    await asyncio.sleep(patience)
                for _ in range(_ROUNDS if has_ended else 1):
                    await asyncio.sleep(0)
        except BaseException as error:  # an interrupt: nobody steps for this loop any more
            with self.lock:
                for ticket in list(self._tickets.values()):
                    if any(loop is one for one, _ in ticket.futures):
                        self._end(ticket, error)
            raise
        finally:
            with self.lock:
                del self._pumps[loop]

    def _has_waiting(self, loop: Loop) -> bool:
        with self.lock:
            waiting = (ticket for ticket in self._tickets.values() if ticket.futures and ticket.is_wanted())
            return any(loop is one for ticket in waiting for one, _ in ticket.futures)

    def _step(self) -> bool:
        """Run the backend once and tell who waits; whether a request ended. What it raises ends all requests."""
        try:
            events = self.backend.step()
            if not events and self.backend.is_idle:
                raise StateMisuse(
                    "engine: its events went elsewhere; while programs run, call no step() of its own beside them"
                )
        except Exception as error:
            for ticket in list(self._tickets.values()):
                self._end(ticket, error)
            return True
        has_ended = False
        for event in events:
            heard = self._tickets.get(event.handle)
            if heard is not None and isinstance(event, FinishEvent):
                self._end(heard, event.output)
                has_ended = True
            elif heard is not None and isinstance(event, TokenEvent) and heard.on_text is not None:
                heard.on_text(event.text)
        return has_ended

    def _end(self, ticket: Ticket, outcome: Output | BaseException) -> None:
        del self._tickets[ticket.handle]
        try:
            ticket.on_end(outcome)
        except Exception as error:  # who is told must hear of it: nobody else would
            ticket.on_end(error)
        ticket.is_done = True
        self._count(ticket.num_threads)
        ticket.num_threads = 0
        for loop, future in ticket.futures:
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, future)
        ticket.futures.clear()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_drivers: WeakKeyDictionary[Engine | Backend, Driver] = WeakKeyDictionary()
_drivers_lock = Lock()


def driver_of(engine: Engine | Backend | Driver) -> Driver:
    """The driver of an engine or another backend, the same for everybody while that lives: its events have one reader.

    Who calls keeps the engine; the driver does not. InvalidRequest for what is no backend.
    """
    if isinstance(engine, Driver):
        return engine
    if isinstance(engine, type) or not all(hasattr(engine, name) for name in ("submit", "fork", "step")):
        refuse("engine", engine, "an rx.Engine, which takes a model's name, what rx.connect gives, or an rx.Yardstick")
    with _drivers_lock:
        if engine not in _drivers:
            _drivers[engine] = Driver(EngineBackend(proxy(engine)) if isinstance(engine, Engine) else proxy(engine))
        return _drivers[engine]
