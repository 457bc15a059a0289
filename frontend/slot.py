"""What a generation will be: a slot of a state, which has its value once the request behind it has ended.

Knows nothing of how states use the tokens, or of types: a form reads the text.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, Literal, TypeVar, cast

from radixrt.runtime import Choice, Output, TokenLogprobs, Usage

from .driver import Ticket
from .failures import GenerationFailed, is_same
from .requests import Requests
from .values import Form, shown

T_co = TypeVar("T_co", covariant=True)
Finish = Literal["stop", "length"]


class Slot(Generic[T_co]):
    """A value to come: `await slot` in async programs, `slot.value` or `f"{slot}"` in plain ones.

    What went wrong is raised there, as itself. A text that is no value is an error there too; the slot has it as
    `text` nevertheless.
    """

    def __init__(self, form: Form[T_co], requests: Requests) -> None:
        """`form` makes the value of the text."""
        self.name = requests.name
        self.requests = requests  # for states; there is one
        self._form = form
        self._choice: Choice | None = None
        self._value: T_co | None = None
        self._usage: Usage | None = None

    @property
    def value(self) -> T_co:
        """The value, waited for in a plain program. StateMisuse in an async one that has not awaited it yet."""
        self.requests.settle()
        self.requests.raise_error()
        return cast("T_co", self._value)

    @property
    def is_done(self) -> bool:
        return self.requests.is_done

    @property
    def text(self) -> str:
        """What was generated, as text; waits as `value` does."""
        return self._ended().text

    @property
    def finish(self) -> Finish:
        """Why it ended: "stop" or, cut by max_tokens or the context, "length"."""
        return _finish_of(self._ended())

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids as generated, the ending one included."""
        return self._ended().token_ids

    @property
    def forced(self) -> tuple[int, ...]:
        """Indices of the `token_ids` that the type, or the grammar, left no choice of."""
        return self._ended().forced

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self._ended().logprobs

    @property
    def usage(self) -> Usage:
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
        return f"<slot{name} of {self.requests.where}: {repr(self._choice.text) if self._choice else 'no value'}>"

    def __await__(self) -> Generator[object, None, T_co]:
        yield from self.requests.settled().__await__()
        return self.value

    # -- for states -----------------------------------------------------------------------------------------------

    def runs(self, ticket: Ticket) -> None:
        self.requests.tickets.append(ticket)
        self.requests.note += f", request {ticket.handle.number}"

    def take(self, outcome: Output | BaseException) -> Choice | None:
        """Keep what the request came to; its choice, None where there is no value to go on with."""
        choice = self._taken(outcome)
        came = (choice.text, _finish_of(choice)) if choice is not None else None
        seconds = outcome.choices[0].grammar_seconds if isinstance(outcome, Output) else 0.0
        self.requests.tell_end(came, self._usage, grammar_seconds=seconds)
        return choice

    def _taken(self, outcome: Output | BaseException) -> Choice | None:
        if isinstance(outcome, BaseException):
            self.requests.error = outcome
            return None
        [choice] = outcome.choices
        self._usage = outcome.usage
        if choice.finish_reason not in ("stop", "length"):
            said = choice.error if choice.error is not None else "it was aborted"
            self.requests.error = GenerationFailed(f"generation: {said}")
            return None
        self._choice = choice
        self._read(choice)
        return choice if self.requests.error is None else None

    def _read(self, choice: Choice) -> None:
        """Make the value of the text, or the error that says why it is none."""
        form, text = self._form, choice.text
        if choice.finish_reason == "length" and not form.is_text:
            what = f"{form.name} cut after {len(choice.token_ids)} tokens: {shown(text)}"
            self.requests.error = GenerationFailed(f"generation: {what}; give it more max_tokens")
            return
        try:
            self._value = form.read(text)
        except Exception as error:  # ValueError, or whatever the author's own validators raise
            self.requests.error = GenerationFailed(f"generation: {shown(text)} is no {form.name}: {error}")
            self.requests.error.__cause__ = error

    def _ended(self) -> Choice:
        """What was generated, whether it is a value or not; waits for it."""
        self.requests.settle()
        if self._choice is None:
            self.requests.raise_error()
        assert self._choice is not None, "it has ended"
        return self._choice


def _finish_of(choice: Choice) -> Finish:
    return "stop" if choice.finish_reason == "stop" else "length"
