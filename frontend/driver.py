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
from threading import Lock, local
from time import monotonic
from weakref import WeakKeyDictionary, proxy

from radixrt.runtime import Engine, FinishEvent, Handle, Output, TokenEvent, checks

from .backend import Backend, EngineBackend
from .chat import Template
from .codec import Codec
from .failures import GenerationFailed, StateMisuse
from .turns import TurnLock

GRACE = 0.02  # seconds; waiting this long for a thread costs less than a step without it
_ROUNDS = 4  # of an event loop: a task that got its answer has asked for the next one by then

Loop = asyncio.AbstractEventLoop


def always() -> bool:
    return True


@dataclass(eq=False, slots=True)
class Member:
    """A thread of a program, from before it starts."""

    is_busy: bool = True  # it does not wait


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
    waiting: list[Member] = field(default_factory=list)
    futures: list[tuple[Loop, asyncio.Future[None]]] = field(default_factory=list)


class Driver:
    """Everything that programs share of one backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.codec = Codec(backend.tokenizer, backend.vocab_size)
        self.template = Template(backend.tokenizer)
        self.lock = TurnLock()
        self._tickets: dict[Handle, Ticket] = {}
        self._members: set[Member] = set()
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
        if self._member is not None:
            yield
            return
        member = Member()
        try:
            self.expect(member)
            with self.joining(member):
                yield
        finally:
            self.dismiss(member)

    def expect(self, member: Member) -> None:
        """A thread is about to start, and to call `joining`."""
        with self.lock:
            self._members.add(member)
            self._note()

    def dismiss(self, member: Member) -> None:
        """It has ended, or never started. Twice is fine."""
        with self.lock:
            self._members.discard(member)
            self._note()

    @contextmanager
    def joining(self, member: Member) -> Iterator[None]:
        """The caller's thread is this one of those expected."""
        self._thread.member = member
        try:
            yield
        finally:
            self._thread.member = None
            self.dismiss(member)

    @contextmanager
    def away(self) -> Iterator[None]:
        """The caller's thread waits for other threads of its program meanwhile."""
        member = self._member
        try:
            self._set_busy(member, is_busy=False)
            yield
        finally:
            self._set_busy(member, is_busy=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A program runs on the caller's thread, which has no more of the driver after it than before.

        Where an interrupt came while it took the lock, had it or gave it back, everything begins anew, unless that was
        in a step or while it waited.
        """
        before, was_free = self._member, self.lock.is_free
        try:
            yield
        except GeneratorExit:  # of the garbage collector, perhaps in a block that has the lock
            raise
        except BaseException as error:
            interrupt = error
            while True:
                try:
                    if was_free:
                        self.lock.let_go()
                    if self.lock.is_broken:
                        self._begin_anew(interrupt)
                    if (member := self._member) is not before and member is not None:
                        self.dismiss(member)
                        self._thread.member = before
                    break
                except BaseException as error:  # one more
                    interrupt = error
            try:
                raise interrupt
            finally:
                del interrupt  # which refers to this frame

    def _begin_anew(self, error: BaseException) -> None:
        """End everything that runs, for everybody. May be broken off, and called again then."""
        with self.lock:
            self.backend.begin_anew(error)
            what = f"{type(error).__name__} broke off another program on this engine"
            lost = GenerationFailed(f"generation: lost when {what}; run it again")
            for ticket in list(self._tickets.values()):
                self._end(ticket, lost)
            self.lock.is_broken = False

    def wait(self, ticket: Ticket) -> None:
        """Block until the request has ended, stepping when it is this thread's turn."""
        member = self._member
        try:
            with self.lock:
                if not ticket.is_done and member is not None:
                    ticket.waiting.append(member)
                    self._set_busy(member, is_busy=False)
            while not ticket.is_done:
                with self.lock:
                    self._step_in_turn(ticket)
        finally:
            self._set_busy(member, is_busy=True)

    @property
    def _member(self) -> Member | None:
        """The caller's thread, if it is one of a program."""
        return getattr(self._thread, "member", None)

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
            self.lock.notify()
            for loop in {loop for ticket in self._tickets.values() for loop, _ in ticket.futures}:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(self._start_pump, loop)

    def _set_busy(self, member: Member | None, *, is_busy: bool) -> None:
        with self.lock:
            if member is not None and member.is_busy != is_busy:
                member.is_busy = is_busy
                self._note()

    def _note(self) -> None:
        """Somebody waits who did not, or the other way round."""
        self._touched = monotonic()
        self.lock.notify()

    @property
    def _patience(self) -> float:
        """Seconds to wait for threads that are busy: they may ask for more to run together. 0 where none is."""
        is_any_busy = any(member.is_busy for member in self._members)
        return max(0.0, self._touched + GRACE - monotonic()) if is_any_busy else 0.0

    def _step_in_turn(self, ticket: Ticket) -> None:
        """Step, or wait for the threads that are busy."""
        patience = self._patience
        if ticket.is_done:
            return
        if not ticket.is_wanted():
            self.lock.wait()
        elif patience > 0:
            self.lock.wait(patience)
        else:
            self._step()

    def _start_pump(self, loop: Loop) -> None:
        """On the loop's thread."""
        with self.lock:
            if loop not in self._pumps and self._has_waiting(loop):
                self._pumps[loop] = pump = loop.create_task(self._pump(loop))
                pump.add_done_callback(_heard)

    async def _pump(self, loop: Loop) -> None:
        """Step while tasks of this loop wait."""
        try:
            for _ in range(_ROUNDS):
                await asyncio.sleep(0)
            while self._has_waiting(loop):
                with self.lock:
                    patience = self._patience
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
            events = self.lock.lend(self.backend.step)
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
        try:
            self._tickets.pop(ticket.handle, None)  # an interrupt may have come before it was done
            ticket.on_end(outcome)
        except BaseException as error:  # who is told must hear of it: nobody else would
            ticket.on_end(error)
            if not isinstance(error, Exception):
                raise
        finally:
            ticket.is_done = True
            for member in ticket.waiting:  # before it wakes: nobody steps until it has gone on
                member.is_busy = True
            self._note()
            for loop, future in ticket.futures:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(_resolve, future)
            ticket.futures.clear()


def _heard(pump: asyncio.Task[None]) -> None:
    """Who waits was told of its error: the loop need not tell of it once more."""
    if not pump.cancelled():
        pump.exception()


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
        checks.refuse(
            "engine", engine, "an rx.Engine, which takes a model's name, what rx.connect gives, or an rx.Yardstick"
        )
    with _drivers_lock:
        if engine not in _drivers:
            _drivers[engine] = Driver(EngineBackend(proxy(engine)) if isinstance(engine, Engine) else proxy(engine))
        return _drivers[engine]
