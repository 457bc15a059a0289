"""How many threads torch computes with, and how idle ones wait. Knows nothing of what they compute."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

# libgomp reads it once, when torch loads it: a value that is set later changes nothing.
WAIT_POLICY = os.environ.get("OMP_WAIT_POLICY")


def set_threads(threads: int | None) -> None:
    """Compute with so many threads in this whole process, or leave torch's number; warn where idle ones will spin."""
    if threads is not None:
        torch.set_num_threads(threads)
    if torch.get_num_threads() > 1 and (WAIT_POLICY or "").upper() != "PASSIVE":
        _warn()


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    """torch with this many threads inside, and as many as before after."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _warn() -> None:
    """Once in a process. On a machine that does anything else, a spinning thread costs milliseconds a layer."""
    warnings.warn(
        f"OMP_WAIT_POLICY was {WAIT_POLICY or 'not set'} when torch was loaded: idle threads spin and steal time from "
        "busy ones. Set OMP_WAIT_POLICY=PASSIVE before Python starts, or compute with threads=1",
        RuntimeWarning,
        stacklevel=4,
    )
