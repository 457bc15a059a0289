"""How a value from outside is checked and, where it is wrong, refused in one line. Knows nothing of what it is for."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Sized
from typing import NoReturn, TypeVar

from .errors import InvalidRequest

T = TypeVar("T")


def refuse(field: str, given: object, allowed: str) -> NoReturn:
    """Raise InvalidRequest: the field, what was given, what is allowed."""
    raise InvalidRequest(f"{field}: {_show(given)} given; allowed: {allowed}")


def integer(field: str, given: object, low: int, high: int, *, or_else: str = "") -> int:
    """`given` as an int in [low, high]; numpy's integers count, bool does not."""
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        given = int(given)
        if low <= given <= high:
            return given
    refuse(field, given, f"{or_else}an integer in [{low}, {high}]")


def instance(field: str, given: object, kind: type[T], allowed: str) -> T:
    """`given`, if it is a `kind`."""
    if isinstance(given, kind):
        return given
    refuse(field, given, allowed)


def _show(given: object) -> str:
    """`given` in a few words, at a cost that does not grow with it."""
    if isinstance(given, int) and given.bit_length() > 128:
        return f"an integer of {given.bit_length()} bits"
    if given is None or isinstance(given, (int, float, str)):
        return reprlib.repr(given)
    size = f" of {len(given)} items" if isinstance(given, Sized) else ""
    return f"a value of type {type(given).__name__}{size}"
