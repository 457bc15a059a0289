"""What goes wrong in programs, below the project's one error tree (drawn in radix/errors.py). Knows no engine.

RadixrtError
  StateMisuse        a state, slot or scope used in a way that has no meaning; says what to do instead
  GenerationFailed   a generation that the engine ended with an error or whose text is no value, raised at its slot
  ServerError        a server that a program runs on could not be asked, refused, or broke off

What was raised elsewhere (a refused request, the author's own errors) stays what it is and gets notes of where it was.
"""

from __future__ import annotations

from radixrt.runtime import RadixrtError


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


def annotate(error: BaseException, note: str) -> None:
    """Add a note of where an error came by, once."""
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
