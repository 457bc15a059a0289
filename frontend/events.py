"""What happens in a run, as values in order, and who hears of it. Knows no states, files or readers.

Streams, traces, OpenTelemetry and the progress of batches are observers, and nothing else listens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from radixrt.runtime import Explanation, Usage

Fate = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where in a run something happens, for errors and events."""

    program: str
    path: tuple[int, ...]  # of branches, from the root

    def __str__(self) -> str:
        branch = f", branch {'.'.join(map(str, self.path))}" if self.path else ""
        return f"program {self.program}{branch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A program, or a session, began. `row` is its number in a batch."""

    where: Where
    seed: int
    row: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGiven:
    """Text was appended, in a message of this role or in none. Told when it is sent, branched or marked."""

    where: Where
    role: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewound:
    """The state went back to a mark: what is told from now on follows that."""

    where: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchOpened:
    where: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchClosed:
    """`adopted`: its parent goes on as it."""

    where: Where
    adopted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStarted:
    """A generation, or a choice among options, was asked for.

    `number` counts the slots of its state; with the path it names one slot of a run. `explanation` is what the cache
    had of the prompt just then, None where the backend cannot say.
    """

    where: Where
    number: int
    name: str | None
    is_choice: bool
    request: int
    explanation: Explanation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """More text of a slot: valid UTF-8, never taken back. Those of a slot add up to its text."""

    where: Where
    number: int
    name: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotEnded:
    """`error` is what the slot raises where it has no value, `text` then what had come.

    `usage` is None where the request has no output: it was cancelled, or a step failed. `grammar_seconds` is how long
    the engine waited for the slot's grammar (`runtime.Choice`), 0 where there is none or no output.
    """

    where: Where
    number: int
    name: str | None
    text: str
    finish: Fate
    usage: Usage | None
    error: BaseException | None
    grammar_seconds: float = field(default=0.0, compare=False)  # equal runs differ in it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The last event. `value` is what the program returned, `error` what it raised instead."""

    where: Where
    value: object
    error: BaseException | None


RunEvent = (
    RunStarted | TextGiven | Rewound | BranchOpened | BranchClosed | SlotStarted | TextDelta | SlotEnded | RunEnded
)


class Observer(Protocol):
    """Hears the events of one run, one at a time. The engine waits meanwhile: be quick, call nothing of it.

    What it raises is raised when the run has ended, unless that failed by itself; it hears nothing more until then.
    """

    def tell(self, event: RunEvent) -> None: ...

    def close(self) -> None:
        """No event follows. Called whatever happened."""


@dataclass(slots=True)
class SlotReport:
    """Tells of one slot."""

    tell: Callable[[RunEvent], None]
    where: Where
    number: int
    name: str | None
    _told: str = ""

    def started(self, request: int, explanation: Explanation | None, *, is_choice: bool) -> None:
        self.tell(SlotStarted(**self._which(), is_choice=is_choice, request=request, explanation=explanation))

    def text(self, text: str) -> None:
        if text:
            self._told += text
            self.tell(TextDelta(**self._which(), text=text))

    def ended(
        self,
        text: str | None,
        fate: Fate,
        usage: Usage | None,
        error: BaseException | None,
        *,
        grammar_seconds: float = 0.0,
    ) -> None:
        """`text`: all of it, None where the slot failed. What had been held back comes as a last delta."""
        self.text(text[len(self._told) :] if text is not None else "")
        self.tell(
            SlotEnded(
                **self._which(),
                text=self._told,
                finish=fate,
                usage=usage,
                error=error,
                grammar_seconds=grammar_seconds,
            )
        )

    def _which(self) -> Any:
        return {"where": self.where, "number": self.number, "name": self.name}
