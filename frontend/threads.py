"""Threads of one program or batch: started together, waited for, and never left behind.

Knows nothing of what they run or of how the engine is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread

from .driver import Driver, Member


def run_threads(
    driver: Driver, targets: Sequence[Callable[[], object]], cancel: Callable[[BaseException], object]
) -> None:
    """Run each target on a thread of its own, as threads of programs, and return when all have ended.

    Where the caller is interrupted, `cancel` is told and has to end them; the interrupt is raised when they have.
    """

    def joining(member: Member, target: Callable[[], object]) -> None:
        with driver.joining(member):
            if not interrupts:
                target()

    interrupts: list[BaseException] = []
    members = [Member() for _ in targets]
    pairs = zip(members, targets, strict=True)
    threads = [Thread(target=joining, args=pair, daemon=True) for pair in pairs]
    try:
        for member in members:
            driver.expect(member)
        with driver.away():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except BaseException as error:  # an interrupt: nobody outlives the caller
        interrupts.append(error)  # one that is just starting ends by itself
        driver.lock.let_go()
        cancel(error)
        for member, thread in zip(members, threads, strict=True):
            if thread.ident is not None:
                thread.join()
            driver.dismiss(member)
        raise
