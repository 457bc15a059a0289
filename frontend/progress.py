"""How far a batch is, on a terminal: rate, time left, what rows do now, how much was cached. Knows no states.

An observer of every row; what it hears is all that it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .events import Observer, RunEnded, RunEvent, RunStarted, SlotEnded, SlotStarted, TextDelta
from .run import Cost


@dataclass(slots=True)
class Tally:
    """Counts of one batch: of its rows, of generations that wait for their first text or go on, and of tokens."""

    num_rows: int
    num_known: int = 0  # from the file that the batch resumes
    num_begun: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_waiting: int = 0
    num_generating: int = 0
    cost: Cost = field(default_factory=Cost)
    began: float = field(default_factory=monotonic)

    def row(self) -> Observer:
        return _Row(self)

    def describe(self, now: float) -> str:
        """The line behind the bar, what matters most first."""
        rate = self.num_done / max(now - self.began, 1e-9)
        left = self.num_rows - self.num_known - self.num_done
        parts = [f"{self.num_failed} failed"] if self.num_failed else []
        parts += [f"{rate:.3g} rows/s"] if self.num_done else []
        parts += [f"{_clock(left / rate)} left"] if self.num_done and left else []
        if self.cost.prompt_tokens:
            parts.append(f"{self.cost.cached_tokens / self.cost.prompt_tokens:.0%} cached")
        if left:
            parts.append(f"{self.num_generating} generate, {self.num_waiting} wait")
        else:
            parts.append(f"{_clock(now - self.began)} in all")
        return ", ".join(parts)


@dataclass(slots=True)
class _Row:
    """The observer of one row. Events of a batch come one at a time, so the tally needs no lock of its own."""

    tally: Tally
    started: set[tuple[tuple[int, ...], int]] = field(default_factory=set)  # slots without text so far

    def tell(self, event: RunEvent) -> None:
        tally = self.tally
        match event:
            case RunStarted():
                tally.num_begun += 1
            case SlotStarted():
                self.started.add((event.where.path, event.number))
                tally.num_waiting += 1
            case TextDelta() | SlotEnded() if (which := (event.where.path, event.number)) in self.started:
                self.started.remove(which)
                tally.num_waiting -= 1
                tally.num_generating += 1
            case RunEnded():
                tally.num_done += 1
                tally.num_failed += event.error is not None
        if isinstance(event, SlotEnded):
            tally.num_generating -= 1
            tally.cost = tally.cost.plus(event.usage) if event.usage is not None else tally.cost

    def close(self) -> None:
        pass


def has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def shown(tally: Tally, name: str, *, console: Console | None = None) -> Iterator[None]:
    """A bar in this block, on stderr or elsewhere."""
    screen = console if console is not None else Console(stderr=True)

    def line() -> Table:
        num_done = tally.num_known + tally.num_done
        table = Table.grid(padding=(0, 1))
        counted = f"{num_done:>{len(f'{tally.num_rows:,}')},}/{tally.num_rows:,}"
        bar = ProgressBar(tally.num_rows, num_done, width=20 if screen.width >= 80 else 8)
        table.add_row(Text(name), counted, bar, Text(tally.describe(monotonic()), no_wrap=True, overflow="ellipsis"))
        return table

    is_redirected = sys.stdout is not None and sys.stdout.isatty()  # what programs print goes above the bar then
    with Live(get_renderable=line, console=screen, refresh_per_second=8, redirect_stdout=is_redirected):
        yield


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
