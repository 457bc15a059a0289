"""What a generation will be: a slot of a state, which has its value once the request behind it has ended.

Knows nothing of how states use the tokens, or of types: a form reads the text.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, Literal, TypeVar, cast

from radixrt.runtime import Choice, Output, TokenLogprobs, Usage

from .driver import Driver, Ticket
from .events import Fate, SlotReport, Where
from .failures import GenerationFailed, StateMisuse, annotate, is_same
from .values import Form, shown

T_co = TypeVar("T_co", covariant=True)
Finish = Literal["stop", "length"]


class Slot(Generic[T_co]):
    """A value to come: `await slot` in async programs, `slot.value` or `f"{slot}"` in plain ones.

    What went wrong is raised there, as itself. A text that is no value is an error there too; the slot has it as
    `text` nevertheless.
    """

    def __init__(self, driver: Driver, where: Where, name: str | None, form: Form[T_co], *, is_async: bool) -> None:
        """`form` makes the value of the text."""
        self.name = name
        self._driver = driver
        self._where = where
        self._form = form
        self._is_async = is_async
        self._ticket: Ticket | None = None
        self._choice: Choice | None = None
        self._value: T_co | None = None
        self._usage: Usage | None = None
        self._error: BaseException | None = None
        self.was_raised = False
        self._report: SlotReport | None = None
        self._was_cancelled = False

    @property
    def value(self) -> T_co:
        """The value, waited for in a plain program. StateMisuse in an async one that has not awaited it yet."""
        self.settle()
        return self._result()

    @property
    def is_done(self) -> bool:
        return self._ticket is None or self._ticket.is_done

    @property
    def text(self) -> str:
        """What was generated, as text; waits as `value` does."""
        self.settle()
        return self._ended().text

    @property
    def finish(self) -> Finish:
        """Why it ended: "stop" or, cut by max_tokens or the context, "length"."""
        self.settle()
        return "stop" if self._ended().finish_reason == "stop" else "length"

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids as generated, the ending one included."""
        self.settle()
        return self._ended().token_ids

    @property
    def forced(self) -> tuple[int, ...]:
        """Indices of the `token_ids` that the type, or the grammar, left no choice of."""
        self.settle()
        return self._ended().forced

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        self.settle()
        return self._ended().logprobs

    @property
    def usage(self) -> Usage:
        self.settle()
        self._ended()
        assert self._usage is not None, "a request that ended was counted"
        return self._usage

    def __bool__(self) -> bool:
        """Of the value, so that `if` waits for it."""
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        """It is the same one. StateMisuse beside a value: compare its own."""
        return is_same(self, other)

    __hash__ = object.__hash__

    def __str__(self) -> str:
        """The value as it was written."""
        self.value  # noqa: B018  # raises
        return self.text.removeprefix(" ") if self._form.is_spaced else self.text

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name is not None else ""
        return f"<slot{name} of {self._where}: {repr(self._choice.text) if self._choice else 'no value'}>"

    def __await__(self) -> Generator[object, None, T_co]:
        yield from self.settled().__await__()
        return self._result()

    # -- for states -----------------------------------------------------------------------------------------------

    def runs(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._note = f"in {self._where}, slot {self.name or 'without a name'}, request {ticket.handle.number}"

    def tells(self, report: SlotReport) -> None:
        """From now on, before anything came of the request, tell what does."""
        assert self._ticket is not None, "it runs"
        self._report, self._ticket.on_text = report, report.text

    def settle(self) -> None:
        """Wait, in a plain program, until the request has ended."""
        if not self.is_done:
            assert self._ticket is not None, "it runs"
            if self._is_async:
                raise StateMisuse(f"slot {self.name or ''}: not awaited yet, in {self._where}; write `await` before it")
            self._driver.wait(self._ticket)

    async def settled(self) -> None:
        """Await the end of the request; a cancelled wait cancels it."""
        if not self.is_done:
            assert self._ticket is not None, "it runs"
            try:
                await self._driver.wait_async(self._ticket)
            except BaseException:
                self.cancel(StateMisuse("slot: cancelled, as was the task that awaited it"))
                self.was_raised = True
                raise

    def cancel(self, reason: BaseException) -> None:
        if self._ticket is not None:
            with self._driver.lock:
                self._was_cancelled = not self._ticket.is_done
                self._driver.cancel(self._ticket, reason)

    def take(self, outcome: Output | BaseException) -> Choice | None:
        """Keep what the request came to; its choice, None where there is no value to go on with."""
        choice = self._taken(outcome)
        if self._report is not None:
            fate: Fate = "cancelled" if self._was_cancelled else "error"
            if choice is not None:
                fate = "stop" if choice.finish_reason == "stop" else "length"
            text = choice.text if choice is not None else None
            seconds = outcome.choices[0].grammar_seconds if isinstance(outcome, Output) else 0.0
            self._report.ended(text, fate, self._usage, self._error, grammar_seconds=seconds)
        return choice

    def _taken(self, outcome: Output | BaseException) -> Choice | None:
        if isinstance(outcome, BaseException):
            self._error = outcome
            return None
        [choice] = outcome.choices
        self._usage = outcome.usage
        if choice.finish_reason not in ("stop", "length"):
            said = choice.error if choice.error is not None else "it was aborted"
            self._error = GenerationFailed(f"generation: {said}")
            return None
        self._choice = choice
        self._read(choice)
        return choice if self._error is None else None

    def _read(self, choice: Choice) -> None:
        """Make the value of the text, or the error that says why it is none."""
        form, text = self._form, choice.text
        if choice.finish_reason == "length" and not form.is_text:
            what = f"{form.name} cut after {len(choice.token_ids)} tokens: {shown(text)}"
            self._error = GenerationFailed(f"generation: {what}; give it more max_tokens")
            return
        try:
            self._value = form.read(text)
        except Exception as error:  # ValueError, or whatever the author's own validators raise
            self._error = GenerationFailed(f"generation: {shown(text)} is no {form.name}: {error}")
            self._error.__cause__ = error

    @property
    def has_failed(self) -> bool:
        """It ended without a value."""
        return self._error is not None

    @property
    def unraised(self) -> bool:
        """It failed, and nobody has been told."""
        return self._error is not None and not self.was_raised

    def _ended(self) -> Choice:
        """What was generated, whether it is a value or not."""
        if self._choice is None:
            self._raise()
        assert self._choice is not None, "it has ended"
        return self._choice

    def _result(self) -> T_co:
        self._raise()
        return cast("T_co", self._value)

    def _raise(self) -> None:
        if self._error is not None:
            self.was_raised = True
            annotate(self._error, self._note)
            raise self._error
