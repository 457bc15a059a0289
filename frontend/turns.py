"""One lock that threads have in turn, and whether an interrupt came while one had it. Knows not what it guards."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Lock, RLock, local
from typing import TypeVar

from .failures import BranchCancelled

T = TypeVar("T")
_NO_INTERRUPTS = Exception, GeneratorExit, CancelledError, BranchCancelled  # raised where nothing is half done


class TurnLock:
    """A re-entrant lock that who lets go of it cannot have again before those who wait: a loop of steps lets them in.

    An interrupt may keep a thread from noting that it has the lock, or from giving it back, but never makes it wait for
    itself; `let_go` makes that good. Where one came while a thread had it, the lock `is_broken`: what it guards may be
    half done, and who mends that says so.
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._lock = RLock()
        self._next = Lock()  # of the one who is to have it next
        self._here = local()
        self._changed = Condition(self._lock)

    def __enter__(self) -> None:
        depth = getattr(self._here, "depth", 0)
        self._here.depth = depth + 1  # first: whoever has the lock must not wait for `_next`
        if depth:
            self._lock.acquire()
        else:
            self._here.is_lending = False
            with self._next:
                self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, _NO_INTERRUPTS) and not self._here.is_lending:
            self.is_broken = True
        self._lock.release()
        self._here.depth -= 1

    def lend(self, function: Callable[[], T]) -> T:
        """What it returns, called by who has the lock. What an interrupt leaves half done there is the function's own
        to mend."""
        self._here.is_lending = True
        try:
            result = function()
        except Exception:
            self._here.is_lending = False
            raise
        self._here.is_lending = False
        return result

    def wait(self, timeout: float | None = None) -> None:
        """Be without it until somebody notifies, for so many seconds at most."""
        self.lend(lambda: self._changed.wait(timeout))

    def notify(self) -> None:
        """Wake all who wait, called by who has it."""
        self._changed.notify_all()

    @property
    def is_free(self) -> bool:
        """The caller's thread is outside of every `with` block."""
        return not getattr(self._here, "depth", 0)

    def let_go(self) -> None:
        """Outside of every `with` block of this thread: it has the lock no more, whatever interrupted one."""
        self.is_broken = self.is_broken or not self.is_free
        with suppress(RuntimeError):  # it has not
            while True:
                self._lock.release()
        self._here.depth = 0
