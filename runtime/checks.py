"""How a value from outside is checked and, where it is wrong, refused in one line. Knows nothing of what it is for."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable, Sized
from types import FunctionType
from typing import Any, NoReturn

from .errors import InvalidRequest

_SHOWN = (type(None), int, float, str, type, FunctionType)  # for at most so much as one can read


def refuse(field: str, given: object, allowed: str) -> NoReturn:
    """Raise InvalidRequest: the field, what was given, what is allowed."""
    raise InvalidRequest(f"{field}: {_show(given)} given; allowed: {allowed}")


def integer(field: str, given: object, low: int, high: int | None = None, *, or_else: str = "") -> int:
    """`given` as an int in [low, high]; numpy's integers count, bool does not."""
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        given = int(given)
        if low <= given and (high is None or given <= high):
            return given
    refuse(field, given, f"{or_else}an integer {f'of at least {low}' if high is None else f'in [{low}, {high}]'}")


def optional_integer(field: str, given: object, low: int, high: int | None = None) -> int | None:
    """None, or as `integer`."""
    return None if given is None else integer(field, given, low, high, or_else="None or ")


def number(field: str, given: object, low: float, high: float = math.inf, allowed: str = "") -> float:
    """`given` as a finite float in [low, high]; integers and numpy's numbers count, bool does not."""
    if isinstance(given, numbers.Real) and not isinstance(given, bool):
        try:
            value = float(given)
        except OverflowError:
            value = math.inf
        if low <= value <= high and math.isfinite(value):
            return value
    limits = f"finite number of at least {low:g}" if high == math.inf else f"number in [{low:g}, {high:g}]"
    refuse(field, given, allowed or f"a {limits}")


def text(field: str, given: object) -> str:
    """`given`, a text that tokenizers take: without half a character of UTF-16, as broken JSON or file names have."""
    if isinstance(given, str) and is_unicode(given):
        return given
    refuse(field, given, "Unicode text without lone surrogates")


def is_unicode(text: str) -> bool:
    """It has no half characters of UTF-16."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def instance(field: str, given: Any, kind: Any, allowed: str) -> Any:
    """`given`, if it is a `kind`: a class, or one of several."""
    if isinstance(given, kind):
        return given
    refuse(field, given, allowed)


def items(field: str, given: object, allowed: str) -> list[Any]:
    """The items of `given` in its order: a set has none, and the letters of a text are seldom meant."""
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, set, frozenset)):
        return list(given)
    refuse(field, given, allowed)


def _show(given: object) -> str:
    """`given` in a few words, at a cost that does not grow with it."""
    if isinstance(given, int) and given.bit_length() > 128:
        return f"an integer of {given.bit_length()} bits"
    if isinstance(given, _SHOWN):
        return reprlib.repr(given)
    size = f" of {len(given)} items" if isinstance(given, Sized) else ""
    return f"a value of type {type(given).__name__}{size}"
