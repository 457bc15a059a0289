"""Traces: what happened in runs, as a JSONL file that outlives them. Knows no terminal; `trace_view` shows them.

A file begins with a line that gives its version, and holds any number of runs: for each a line where it began, one for
each text, branch and slot when that has ended, and one where the run ended. Times are of the wall clock, in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from os import SEEK_END
from pathlib import Path
from secrets import token_hex
from threading import Lock
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from radixrt.runtime import Explanation, InvalidRequest, Usage

from .events import (
    BranchClosed,
    BranchOpened,
    Fate,
    Rewound,
    RunEnded,
    RunEvent,
    RunStarted,
    SlotEnded,
    SlotStarted,
    TextDelta,
    TextGiven,
)

VERSION = 3
BranchPath = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpan:
    """Where a run began; `row` is its number in a batch."""

    program: str
    seed: int
    row: int | None
    started: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSpan:
    """Text that was appended, in a message of this role or in none. `order` counts what began in a run."""

    order: int
    path: BranchPath
    role: str | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindSpan:
    order: int
    path: BranchPath


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSpan:
    order: int
    path: BranchPath
    adopted: bool
    started: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSpan:
    """One generation, or choice among options. `first` is when text first came of it.

    `explanation` is what the cache had when it was asked for. What started together may be cached beyond that: usage
    counts what others of the same step computed. Of the time from `started` to `ended` the engine waited
    `grammar_seconds` for the slot's grammar; 0 where it has none.
    """

    order: int
    path: BranchPath
    number: int
    name: str | None
    is_choice: bool
    request: int
    text: str
    finish: Fate
    error: str | None
    usage: Usage | None
    explanation: Explanation | None
    grammar_seconds: float
    started: float
    first: float | None
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSpan:
    """`value` is what the program returned, as JSON; objects of other kinds are named by their type."""

    value: Any
    error: str | None
    ended: float


Span = TextSpan | RewindSpan | BranchSpan | SlotSpan
_KINDS: dict[str, type[Any]] = {
    "run": RunSpan,
    "text": TextSpan,
    "rewind": RewindSpan,
    "branch": BranchSpan,
    "slot": SlotSpan,
    "end": EndSpan,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class RunTrace:
    """One run. `end` is None where the process died before the run had ended; then what was open is not there."""

    start: RunSpan
    spans: tuple[Span, ...]  # in the order in which they began
    end: EndSpan | None

    @property
    def slots(self) -> tuple[SlotSpan, ...]:
        return tuple(span for span in self.spans if isinstance(span, SlotSpan))


@dataclass(frozen=True, slots=True)
class Trace:
    """The runs of a file, in the order in which they began. `print(trace)` shows their trees."""

    runs: tuple[RunTrace, ...]

    def __str__(self) -> str:
        from .trace_view import as_text  # rich comes with it

        return as_text(self)


# -- writing ------------------------------------------------------------------------------------------------------


class TraceWriter:
    """An observer that adds one run to a file, line by line as things end: a killed process loses what was open."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """InvalidRequest where the file cannot be used or is no trace."""
        self._path = Path(path)
        self._clock = clock
        self._run = token_hex(6)
        self._num_begun = 0
        self._branches: dict[BranchPath, tuple[int, float]] = {}
        self._slots: dict[tuple[BranchPath, int], tuple[int, SlotStarted, float]] = {}
        self._first: dict[tuple[BranchPath, int], float] = {}
        try:
            with _opening:
                size = _whole_lines(self._path)
                self._file = self._path.open("ab", buffering=0)  # a line is one write: runs may share a file
                if not size:
                    self._file.write(b'{"radixrt_trace": %d}\n' % VERSION)
        except OSError as error:
            raise InvalidRequest(f"trace: {self._path} cannot be used: {error}") from error

    def tell(self, event: RunEvent) -> None:
        now, path = self._clock(), event.where.path
        match event:
            case RunStarted():
                self._add(RunSpan(program=event.where.program, seed=event.seed, row=event.row, started=now))
            case TextGiven():
                self._add(TextSpan(order=self._begin(), path=path, role=event.role, text=event.text))
            case Rewound():
                self._add(RewindSpan(order=self._begin(), path=path))
            case BranchOpened():
                self._branches[path] = self._begin(), now
            case BranchClosed():
                order, started = self._branches.pop(path)
                self._add(BranchSpan(order=order, path=path, adopted=event.adopted, started=started, ended=now))
            case SlotStarted():
                self._slots[path, event.number] = self._begin(), event, now
            case TextDelta():
                self._first.setdefault((path, event.number), now)
            case SlotEnded():
                self._add(self._slot(event, now))
            case RunEnded():
                self._add(EndSpan(value=_as_json(event.value), error=_said(event.error), ended=now))

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> int:
        self._num_begun += 1
        return self._num_begun - 1

    def _slot(self, ended: SlotEnded, now: float) -> SlotSpan:
        which = ended.where.path, ended.number
        order, begun, started = self._slots.pop(which)
        return SlotSpan(
            order=order,
            path=ended.where.path,
            number=ended.number,
            name=ended.name,
            is_choice=begun.is_choice,
            request=begun.request,
            text=ended.text,
            finish=ended.finish,
            error=_said(ended.error),
            usage=ended.usage,
            explanation=begun.explanation,
            grammar_seconds=ended.grammar_seconds,
            started=started,
            first=self._first.pop(which, None),
            ended=now,
        )

    def _add(self, span: Span | RunSpan | EndSpan) -> None:
        entry = {"run": self._run, "kind": _NAMES[type(span)], **asdict(span)}
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise InvalidRequest(f"trace: {self._path} is not complete: {error}") from error


def _as_json(value: object) -> Any:
    """What JSON can hold of a value; runs none of the author's code."""
    try:
        return json.loads(json.dumps(value, default=lambda other: f"<{type(other).__name__}>"))
    except (TypeError, ValueError, RecursionError):
        return f"<{type(value).__name__}>"


def _said(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


_opening = Lock()  # whoever opens a file has it alone: who writes lines already has mended it


def _whole_lines(path: Path) -> int:
    """Take off a last line that was cut off; the bytes that are left, 0 where nothing is there yet."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open("r+b") as file:
        _check_header(path, file.readline())
        size = file.seek(-1, SEEK_END) + 1
        if file.read() != b"\n":
            file.seek(0)
            size = file.truncate(file.read().rfind(b"\n") + 1)
        return size


# -- reading ------------------------------------------------------------------------------------------------------


def load_trace(path: str | Path) -> Trace:
    """Read a trace. A last line that was cut off is left out; InvalidRequest names any other line that is damaged."""
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise InvalidRequest(f"trace: {path} cannot be read: {error}") from error
    _check_header(path, lines[0] if lines else b"")
    runs: dict[str, list[Any]] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            entry = json.loads(line)
            run, kind = entry.pop("run"), _KINDS[entry.pop("kind")]
            span = _read(kind, entry)
            if (run in runs) == (kind is RunSpan):
                raise ValueError(f"run {run} {'began before' if run in runs else 'has no beginning'}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"trace: line {number} of {path} is damaged: {error!r}: {line[:60]!r}") from error
        runs.setdefault(run, []).append(span)
    return Trace(tuple(map(_run_of, runs.values())))


def _check_header(path: Path, line: bytes) -> None:
    try:
        version = json.loads(line)["radixrt_trace"]
    except (ValueError, KeyError, TypeError):
        raise InvalidRequest(f"trace: {path} is no trace: it begins with {line[:60]!r}; name another file") from None
    if version != VERSION:
        raise InvalidRequest(f"trace: {path} has version {version!r}; this is a reader of version {VERSION}")


def _run_of(spans: list[Any]) -> RunTrace:
    start, *rest = spans
    ends = [span for span in rest if isinstance(span, EndSpan)]
    begun = sorted((span for span in rest if not isinstance(span, EndSpan)), key=lambda span: span.order)
    return RunTrace(start, tuple(begun), ends[-1] if ends else None)


_FIELDS = {kind: get_type_hints(kind) for kind in (*_KINDS.values(), Usage, Explanation)}


def _read(hint: Any, data: Any) -> Any:
    """What JSON gave as a value of this type. TypeError where it is none."""
    if hint is Any:
        return data
    if hint in _FIELDS and isinstance(data, Mapping):
        if data.keys() != _FIELDS[hint].keys():
            raise TypeError(f"it has {sorted(data)}")
        return hint(**{name: _read(_FIELDS[hint][name], value) for name, value in data.items()})
    if get_origin(hint) is UnionType:
        options = get_args(hint)
        return None if data is None and type(None) in options else _read(options[0], data)
    if get_origin(hint) is Literal and data in get_args(hint):
        return data
    if get_origin(hint) is tuple and isinstance(data, list):
        return tuple(_read(get_args(hint)[0], item) for item in data)
    wanted = (int, float) if hint is float else hint
    if not isinstance(wanted, type | tuple) or not isinstance(data, wanted) or isinstance(data, bool) != (hint is bool):
        raise TypeError(f"{data!r} is no {hint}")
    return data
