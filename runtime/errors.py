"""Errors of the runtime, below the project's one error tree (drawn in radix/errors.py).

Knows nothing of what raises them.

RadixrtError
  InvalidRequest   a request that can never be served; says the field, what was given and what is allowed
  ModelError       a model that cannot be found, loaded or served faithfully
  RecordError      a line of a record that could not be written
"""

from __future__ import annotations

from radixrt.radix.errors import RadixrtError


class InvalidRequest(RadixrtError, ValueError):
    """A request refused at submit: nothing was queued or reserved."""


class ModelError(RadixrtError):
    """What was asked for as a model, what was there instead, and what to do."""


class RecordError(RadixrtError):
    """A record lacks a line from here on. Where it tells of a step, that has happened; the engine goes on."""


def first_line(error: BaseException) -> str:
    """An error's type and what it says, cut to one line: the first, and the next one where that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    return " ".join([f"{type(error).__name__}:", *said]).removesuffix(":")
