"""When a copy of pages between device and host has ended: what a model gives back at its start.

Knows nothing of pages or of who waits.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Fence(Protocol):
    """The end of one copy. Until it has passed, nothing that the copy reads or writes may change or be used."""

    def done(self) -> bool:
        """Whether the copy has ended. Never blocks. Raises, and goes on raising, where the copy failed."""

    def wait(self) -> None:
        """Block until `done` is true; raises as it does."""

    def seconds(self) -> float | None:
        """How long the copy took, once it is done, where the device has measured it."""


class Passed:
    """The fence of a copy that had ended when it was given back."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds(self) -> float | None:
        return None


class CudaFence:
    """A copy between two events of one stream; both record times."""

    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._begin: Any = begin  # torch.cuda has no types
        self._end: Any = end

    def done(self) -> bool:
        return bool(self._end.query())

    def wait(self) -> None:
        self._end.synchronize()

    def seconds(self) -> float | None:
        return float(self._begin.elapsed_time(self._end)) / 1000
