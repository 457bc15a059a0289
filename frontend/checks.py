"""How what an author gives is checked and, where it is wrong, refused in one line. Knows nothing of what it is for."""

from __future__ import annotations

import math
import numbers
import reprlib
from typing import Any, NoReturn

from radixrt.runtime import InvalidRequest


def refuse(field: str, given: object, allowed: str) -> NoReturn:
    """Raise InvalidRequest: the field, what was given, what is allowed."""
    raise InvalidRequest(f"{field}: {reprlib.repr(given)} given; allowed: {allowed}")


def integer(field: str, given: object, low: int, high: int | None = None, *, or_else: str = "") -> int:
    """`given` as an int in [low, high]; numpy's integers count, bool does not."""
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        given = int(given)
        if low <= given and (high is None or given <= high):
            return given
    refuse(field, given, f"{or_else}an integer {f'of at least {low}' if high is None else f'in [{low}, {high}]'}")


def optional_integer(field: str, given: object, low: int) -> int | None:
    """None, or as `integer`."""
    return None if given is None else integer(field, given, low, or_else="None, or ")


def number(field: str, given: object, low: float) -> float:
    """`given` as a finite float of at least `low`; bool does not count."""
    if isinstance(given, numbers.Real) and not isinstance(given, bool) and low <= float(given) < math.inf:
        return float(given)
    refuse(field, given, f"a finite number of at least {low:g}")


def check_text(field: str, given: str) -> None:
    """InvalidRequest for what no tokenizer takes: half a character of UTF-16, as broken JSON or file names have."""
    try:
        given.encode()
    except UnicodeEncodeError:
        refuse(field, given, "Unicode text without lone surrogates")


def check_kind(field: str, given: object, kind: Any, allowed: str) -> None:
    """InvalidRequest where `given` is no `kind`, a class or several."""
    if not isinstance(given, kind):
        refuse(field, given, allowed)
