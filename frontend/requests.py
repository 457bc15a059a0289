"""The requests behind a slot or a choice, as one: waited for, cancelled, their error, and who hears of their end.

Knows nothing of what they generate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from radixrt.runtime import RadixrtError, Usage

from .driver import Driver, Ticket
from .events import Fate, SlotReport, Where
from .failures import StateMisuse, annotate


class Requests:
    """Those of one slot or choice: one for a slot, one or more for a choice. An error of one is that of all."""

    def __init__(
        self, kind: Literal["slot", "choice"], name: str | None, driver: Driver, where: Where, *, is_async: bool
    ) -> None:
        self.name = name
        self.where = where
        self.note = f"in {where}, {kind} {name or 'without a name'}"  # of an error
        self.tickets: list[Ticket] = []
        self.error: BaseException | None = None  # they came to no value
        self.was_raised = False
        self._kind = kind
        self._driver = driver
        self._is_async = is_async
        self._report: SlotReport | None = None
        self._was_cancelled = False

    @property
    def is_done(self) -> bool:
        return all(ticket.is_done for ticket in self.tickets)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """What is refused in this block never had a request, and says so."""
        try:
            yield
        except RadixrtError as error:
            annotate(error, f"{self.note}, before it had a request")
            raise

    def settle(self) -> None:
        """Wait, in a plain program, until all have ended. StateMisuse in an async one that has not awaited it yet."""
        if not self.is_done:
            if self._is_async:
                what = f"{self._kind} {self.name or 'without a name'}: not awaited yet"
                raise StateMisuse(f"{what}, in {self.where}; write `await` before it")
            for ticket in self.tickets:
                self._driver.wait(ticket)

    async def settled(self) -> None:
        """Await the end of all; a cancelled wait cancels them."""
        if not self.is_done:
            try:
                for ticket in self.tickets:
                    await self._driver.wait_async(ticket)
            except BaseException:
                self.cancel(StateMisuse(f"{self._kind}: cancelled, as was the task that awaited it"))
                self.was_raised = True
                raise

    def cancel(self, reason: BaseException) -> None:
        with self._driver.lock:
            self._was_cancelled = not self.is_done
            for ticket in self.tickets:
                self._driver.cancel(ticket, reason)

    def raise_error(self) -> None:
        """Raise their error where there is one, as itself."""
        if self.error is not None:
            self.was_raised = True
            annotate(self.error, self.note)
            raise self.error

    def tells(self, report: SlotReport) -> None:
        """From now on, before anything came of them, tell what does."""
        self._report = report
        for ticket in self.tickets:
            ticket.on_text = report.text

    def tell_end(self, came: tuple[str, Fate] | None, usage: Usage | None, *, grammar_seconds: float = 0.0) -> None:
        """All have ended. `came`: the text and how it ended, None where they came to no value."""
        if self._report is not None:
            text, fate = came or (None, "cancelled" if self._was_cancelled else "error")
            self._report.ended(text, fate, usage, self.error, grammar_seconds=grammar_seconds)
