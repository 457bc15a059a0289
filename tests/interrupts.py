"""Interrupts at any moment, for tests: what a signal's handler raises, where CPython would call one.

That is where a function begins, and behind a call: never between the end of a `with` block and the release of its lock.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from itertools import cycle
from types import FrameType

import radixrt.frontend
import radixrt.radix
import radixrt.runtime

FOLDERS = tuple(
    os.path.dirname(str(package.__file__)) + os.sep for package in (radixrt.radix, radixrt.runtime, radixrt.frontend)
)


class Interrupter:
    """Raises an error at the k-th such moment, from 0, of this thread in the project, within the `with` block.

    Then a KeyboardInterrupt after each of the `gaps`, which count moments of programs (`radixrt.frontend`) in between;
    every other one where a function begins only. `num_moments` counts them all.
    """

    def __init__(self, k: int = -1, error: BaseException | None = None, *, gaps: Sequence[int] = ()) -> None:
        self.num_moments = 0
        self._k = k
        self._error = error
        self._gaps = list(gaps)
        self._folders = FOLDERS
        self._hooks = cycle((sys.settrace, sys.setprofile))  # what raises in one of them ends that one alone

    def __enter__(self) -> Interrupter:
        self._tracer = sys.gettrace()
        sys.setprofile(self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(self._tracer)

    def _counts(self, frame: FrameType, event: str) -> bool:
        """Later ones leave out where a generator goes on: in CPython no handler runs where `throw` enters one."""
        is_later = self._folders is not FOLDERS
        is_generator = bool(frame.f_code.co_flags & inspect.CO_GENERATOR)
        is_here = frame.f_code.co_filename.startswith(self._folders)
        return is_here and (event == "c_return" or (event == "call" and not (is_later and is_generator)))

    def _hear(self, frame: FrameType, event: str, _: object) -> None:
        if self._counts(frame, event):
            self.num_moments += 1
            if self.num_moments - 1 == self._k and self._error is not None:
                error = self._error
                if self._gaps:
                    self._k, self._error = self.num_moments + self._gaps.pop(0), KeyboardInterrupt()
                    self._folders = FOLDERS[-1:]
                    next(self._hooks)(self._hear)
                raise error
