"""Errors of the runtime, below the project's one error tree (drawn in radix/errors.py).

Knows nothing of what raises them.

RadixrtError
  InvalidRequest   a request that can never be served; says the field, what was given and what is allowed
  ModelError       a model that cannot be found, loaded or served faithfully
"""

from __future__ import annotations

from radixrt.radix.errors import RadixrtError


class InvalidRequest(RadixrtError, ValueError):
    """A request refused at submit: nothing was queued or reserved."""


class ModelError(RadixrtError):
    """What was asked for as a model, what was there instead, and what to do."""
