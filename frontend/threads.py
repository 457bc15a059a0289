"""Threads of one program or batch: started together, waited for, and never left behind.

Knows nothing of what they run or of how the engine is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread

from .driver import Driver


def run_threads(
    driver: Driver, targets: Sequence[Callable[[], object]], cancel: Callable[[BaseException], object]
) -> None:
    """Run each target on a thread of its own, as threads of programs, and return when all have ended.

    Where the caller is interrupted, `cancel` is told and has to end them; the interrupt is raised when they have.
    """

    def joining(target: Callable[[], object]) -> None:
        with driver.joining():
            target()

    threads = [Thread(target=joining, args=(target,), daemon=True) for target in targets]
    driver.expect(len(threads))
    try:
        with driver.away():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except BaseException as error:  # an interrupt: nobody outlives the caller
        cancel(error)
        for thread in threads:
            thread.join()
        raise
