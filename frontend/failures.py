"""What goes wrong in programs, below the project's one error tree (drawn in radix/errors.py). Knows no engine.

RadixrtError
  StateMisuse        a state, slot or scope used in a way that has no meaning; says what to do instead
  GenerationFailed   a generation that the engine ended with an error or whose text is no value, raised at its slot
  ServerError        a server that a program runs on could not be asked, refused, or broke off

What was raised elsewhere (a refused request, the author's own errors) stays what it is and gets notes of where it was.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Awaitable
from typing import TypeVar

from radixrt.runtime import RadixrtError

T = TypeVar("T")


class StateMisuse(RadixrtError):
    """A state, slot or scope was used out of turn."""


class GenerationFailed(RadixrtError):
    """A generation came to no value. The state is as it was before it."""


class ServerError(RadixrtError):
    """What a server answered instead of what was asked, or that it did not."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status`: of HTTP, where there was an answer."""
        super().__init__(message)
        self.status = status


class BranchCancelled(BaseException):
    """Ends the thread of a branch that lost. Like asyncio.CancelledError, no `except Exception` may stop it."""


def plain_value(value: T, what: str) -> T:
    """What a function of a plain program returned. StateMisuse for a coroutine, which nobody would await."""
    if inspect.iscoroutine(value):
        value.close()
        raise StateMisuse(
            f"{what}: an async function was called in a plain program; write `async def` for both or none"
        )
    return value


def is_same(coming: object, other: object) -> bool:
    """Two things that are to come, such as slots, are one. StateMisuse where the other is there: a value was meant."""
    if coming is not other and not isinstance(other, Awaitable):
        said = f"{coming!r} compared with {reprlib.repr(other)}"
        raise StateMisuse(f"{said}, which it never is; compare its .value, or what `await` gives")
    return coming is other


def annotate(error: BaseException, note: str) -> None:
    """Add a note of where an error came by, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
