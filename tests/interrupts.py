"""Interrupts at any moment, for tests: what a signal's handler raises, where CPython would call one.

That is where a function begins, and behind a call: never between the end of a `with` block and the release of its lock.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import radixrt.frontend
import radixrt.radix
import radixrt.runtime

FOLDERS = tuple(
    os.path.dirname(str(package.__file__)) + os.sep for package in (radixrt.radix, radixrt.runtime, radixrt.frontend)
)


class Interrupter:
    """Raises an error at the k-th such moment, from 0, of this thread in the project, within the `with` block.

    `num_moments` counts them.
    """

    def __init__(self, k: int = -1, error: BaseException | None = None) -> None:
        self.num_moments = 0
        self._k = k
        self._error = error

    def __enter__(self) -> Interrupter:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(FOLDERS):
            self.num_moments += 1
            if self.num_moments - 1 == self._k and self._error is not None:
                raise self._error
