"""Threads of one program, stream or batch: started together, waited for, and never left behind.

Knows nothing of what they run or of how the engine is stepped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from time import monotonic, sleep

from .driver import Driver, Member

_STARTING = 1.0  # seconds; a thread whose start was interrupted has begun by then, or never does


class Crew:
    """Threads that run one target each, as threads of programs. `cancel` has to end them, and may be called again."""

    def __init__(self, driver: Driver, targets: Sequence[Callable[[], object]], cancel: Callable[[], object]) -> None:
        self._driver = driver
        self._cancel = cancel
        self._is_ending = False
        self._members = [Member() for _ in targets]
        pairs = zip(self._members, targets, strict=True)
        self._threads = [Thread(target=self._work, args=pair, daemon=True) for pair in pairs]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """They run within, and none is left after it: where that is left with an error, they are cancelled.

        However many interrupts come meanwhile, the last one is raised when all have ended.
        """
        try:
            for member in self._members:
                self._driver.expect(member)
            for thread in self._threads:
                thread.start()
            yield
            with self._driver.away():
                for thread in self._threads:
                    thread.join()
        except BaseException as error:
            interrupt = error
            while True:
                try:
                    self._end()
                    break
                except Exception:
                    raise
                except BaseException as error:  # one more: nobody outlives the caller
                    interrupt = error
            try:
                raise interrupt
            finally:
                del interrupt  # which refers to this frame

    def _end(self) -> None:
        """Cancel them and return when none is left. May be broken off by an interrupt, and called again then."""
        self._is_ending = True  # one that is just starting ends by itself
        self._driver.lock.let_go()  # they need it, and this thread may have been taking it
        self._cancel()
        self._driver.resume()  # a cancel that was broken off may have woken nobody
        _see_off(self._threads)
        for member in self._members:
            self._driver.dismiss(member)

    def _work(self, member: Member, target: Callable[[], object]) -> None:
        with self._driver.joining(member):
            if not self._is_ending:
                target()


def run_threads(driver: Driver, targets: Sequence[Callable[[], object]], cancel: Callable[[], object]) -> None:
    """Run each target on a thread of its own, as threads of programs, and return when all have ended.

    Where the caller is interrupted, `cancel` is told and has to end them; the last interrupt is raised when they have.
    """
    with Crew(driver, targets, cancel).at_work():
        pass


def _see_off(threads: Sequence[Thread]) -> None:
    """Wait until they have ended, and those whose start was interrupted may begin, for a while.

    `Thread.join` takes a thread for ended once an interrupt came while it waited (CPython 3.11).
    """
    latest = monotonic() + _STARTING
    while left := set(threading.enumerate()).intersection(threads):
        if monotonic() > latest and all(thread.ident is None for thread in left):
            return
        sleep(0.001)
