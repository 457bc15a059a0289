"""A trace as the terminal shows it: the tree of each run, and for each slot a bar of what was cached and computed.

Knows nothing of files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from io import StringIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from .run import Cost
from .terminal import printable
from .trace import BranchPath, BranchSpan, RewindSpan, RunTrace, SlotSpan, Span, TextSpan, Trace

BAR = 16  # cells, for the longest prompt of a run
_CACHED, _COMPUTED = "░", "█"  # told apart without colours too
_COLUMNS = ("prompt", "cached", "computed", "out", "s", "grammar s", "")  # of a slot; the last is a note
_STYLES = {"cached": "green", "computed": "yellow", "given": "dim", "slot": "bold", "error": "red"}


def as_text(trace: Trace, *, width: int = 110) -> str:
    """Without colours, in lines of at most this width."""
    console = Console(file=StringIO(), width=width, color_system=None, highlight=False)
    console.print(TraceView(trace))
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip("\n").splitlines())


class TraceView:
    """All runs of a trace, and their sums, as rich prints them: a line for each text, branch and slot."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        for run in self._trace.runs:
            yield _fitted(_heading(run), width)
            yield from _body(run, width)
            yield Text("")
        yield _sums(self._trace)


@dataclass(slots=True)
class _Branch:
    """What is shown below a branch, in order."""

    path: BranchPath
    span: BranchSpan | None = None
    items: list[tuple[int, Span | _Branch]] = field(default_factory=list)


def _tree(run: RunTrace) -> _Branch:
    branches: dict[BranchPath, _Branch] = {(): _Branch(())}

    def branch(path: BranchPath, order: int) -> _Branch:
        if path not in branches:
            branches[path] = _Branch(path)
            branch(path[:-1], order).items.append((order, branches[path]))
        return branches[path]

    for span in run.spans:
        if isinstance(span, BranchSpan):
            branch(span.path, span.order).span = span
        else:
            branch(span.path, span.order).items.append((span.order, span))
    return branches[()]


def _lines(branch: _Branch, indent: str = "") -> Iterator[tuple[str, Span | _Branch]]:
    """Everything below a branch, each with the guide that leads to it."""
    items = [item for _, item in sorted(branch.items, key=lambda pair: pair[0])]
    for number, item in enumerate(items, 1):
        is_last = number == len(items)
        yield indent + ("└ " if is_last else "├ "), item
        if isinstance(item, _Branch):
            yield from _lines(item, indent + ("  " if is_last else "│ "))


def _heading(run: RunTrace) -> Text:
    row = f", row {run.start.row}" if run.start.row is not None else ""
    text = Text(f"{run.start.program}{row}", style="bold")
    text.append(f"  seed {run.start.seed}", style="not bold dim")
    if run.end is None:
        return text.append("  did not end", style=f"not bold {_STYLES['error']}")
    text.append(f"  {run.end.ended - run.start.started:.2f} s", style="not bold dim")
    if run.end.error is not None:
        return text.append(f"  {_one_line(run.end.error)}", style=f"not bold {_STYLES['error']}")
    if run.end.value is None:
        return text
    return text.append(f"  -> {_one_line(json.dumps(run.end.value, ensure_ascii=False))}", style="not bold")


def _body(run: RunTrace, width: int) -> Iterator[Text]:
    """The lines of a run: texts take the whole width, slots have what they cost behind them."""
    if not run.spans:
        return
    longest = max((slot.usage.prompt_tokens for slot in run.slots if slot.usage is not None), default=1)
    lines = [(_label(guide, item, width), item) for guide, item in _lines(_tree(run))]
    rows = [_columns(item, longest) for _, item in lines if isinstance(item, SlotSpan)]
    total = _numbers(_cost([run]))
    names = [Text(name, style="dim") for name in _COLUMNS]
    cells = [names, *rows, [Text(""), *total, Text(""), Text(""), Text("")]]
    hidden = {"prompt"} if width < 72 else set()  # a narrow terminal has no room for bars
    hidden |= {"grammar s"} if not any(slot.grammar_seconds for slot in run.slots) else set()
    shown = [column for column, name in enumerate(_COLUMNS) if name not in hidden]
    widths = {column: max(row[column].cell_len for row in cells) for column in shown}
    room = width - sum(widths.values()) - len(shown)
    behind = iter(_joined(row, widths) for row in cells)
    yield _joined_with(Text(""), next(behind), room)
    for label, item in lines:
        yield _joined_with(label, next(behind), room) if isinstance(item, SlotSpan) else _fitted(label, width)
    yield _joined_with(Text(_counted(len(run.slots), "slot"), style="dim"), next(behind), room)
    if run.slots and (why := _explained(run.slots[0])):
        yield _fitted(Text(why, style="dim italic"), width)


def _explained(first: SlotSpan) -> str:
    """Why the cache had no more of a run's first prompt, where it had some once or has another that begins alike."""
    found = first.explanation
    if found is None or (found.diverged_at is None and found.evicted_by is None):
        return ""
    parts = [f"the cache had {found.matched + found.host_len:,} tokens of the first prompt"]
    if found.diverged_at is not None:
        parts.append(f"there {found.diverged_from or 'another'} goes on differently")
    if found.evicted_by is not None:
        parts.append(f"the rest was evicted by {found.evicted_by}")
    return ", ".join(parts)


def _joined(row: list[Text], widths: dict[int, int]) -> Text:
    """The columns of a slot; all but the first and the last are numbers."""
    text = Text()
    for column, width in widths.items():
        cell = row[column].copy()
        cell.align("left" if column in (0, len(_COLUMNS) - 1) else "right", width)
        text.append(" ").append_text(cell)
    return text


def _joined_with(label: Text, behind: Text, room: int) -> Text:
    label.truncate(max(room, 8), overflow="ellipsis", pad=True)
    return label.append_text(behind)


def _fitted(text: Text, width: int) -> Text:
    text.truncate(width, overflow="ellipsis")
    return text


def _label(guide: str, item: Span | _Branch, width: int) -> Text:
    text = Text(guide, style="dim")
    match item:
        case TextSpan():
            said = f"{item.role}: {item.text}" if item.role is not None else item.text
            return text.append(_middle(said, width - len(guide)), style=_STYLES["given"])
        case RewindSpan():
            return text.append("rewound", style="dim italic")
        case SlotSpan():
            verb = "choose" if item.is_choice else "gen"
            text.append(item.name if item.name is not None else verb, style=f"not dim {_STYLES['slot']}")
            return text.append(f" {_one_line(item.text)}", style="not dim")
        case _Branch():
            text.append(f"branch {'.'.join(map(str, item.path))}", style="not dim cyan")
            is_adopted = item.span is not None and item.span.adopted
            return text.append(" adopted" if is_adopted else "", style="not dim green")
    raise AssertionError("a tree has its branches as such")


def _columns(slot: SlotSpan, longest: int) -> list[Text]:
    """What `_COLUMNS` names, and a note."""
    cost = _numbers(Cost().plus(slot.usage)) if slot.usage is not None else [Text("")] * 3
    seconds = [f"{slot.ended - slot.started:.2f}", f"{slot.grammar_seconds:.3f}" if slot.grammar_seconds else ""]
    return [_bar(slot, longest), *cost, *map(Text, seconds), _note(slot)]


def _bar(slot: SlotSpan, longest: int) -> Text:
    """As long as the prompt; at least one cell of what there is any of."""
    if slot.usage is None:
        return Text("")
    prompt, cached = slot.usage.prompt_tokens, slot.usage.cached_tokens
    num_cells = max(2, round(BAR * prompt / longest))
    num_cached = round(num_cells * cached / max(prompt, 1))
    num_cached = min(max(num_cached, int(cached > 0)), num_cells - int(cached < prompt))
    bar = Text(_CACHED * num_cached, style=_STYLES["cached"])
    return bar.append(_COMPUTED * (num_cells - num_cached), style=_STYLES["computed"])


def _note(slot: SlotSpan) -> Text:
    """How it ended, where that is not by itself, and why no more of its prompt was cached."""
    if slot.error is not None and slot.finish == "error":
        return Text(_cut(slot.error, 40), style=_STYLES["error"])
    if slot.finish in ("cancelled", "length"):
        return Text("cut" if slot.finish == "length" else "cancelled", style="dim")
    return Text("")


def _numbers(cost: Cost) -> list[Text]:
    computed = cost.computed_tokens + cost.recomputed_tokens
    return [Text(f"{number:,}") for number in (cost.cached_tokens, computed, cost.completion_tokens)]


def _sums(trace: Trace) -> Text:
    cost = _cost(trace.runs)
    num_slots = sum(len(run.slots) for run in trace.runs)
    failed = sum(run.end is None or run.end.error is not None for run in trace.runs)
    share = f" ({cost.cached_tokens / cost.prompt_tokens:.0%})" if cost.prompt_tokens else ""
    again = f" + {cost.recomputed_tokens:,} computed again" if cost.recomputed_tokens else ""
    return Text(
        f"{_counted(len(trace.runs), 'run')}, {failed} failed, {_counted(num_slots, 'slot')}: "
        f"{cost.prompt_tokens:,} prompt tokens = {cost.cached_tokens:,} cached {_CACHED}{share} + "
        f"{cost.computed_tokens:,} computed {_COMPUTED}{again}; {cost.completion_tokens:,} generated"
    )


def _cost(runs: Iterable[RunTrace]) -> Cost:
    cost = Cost()
    for run in runs:
        for slot in run.slots:
            cost = cost.plus(slot.usage) if slot.usage is not None else cost
    return cost


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "↵").replace("\t", " ")


def _cut(text: str, length: int) -> str:
    text = _one_line(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _middle(text: str, length: int) -> str:
    """Its beginning and its end: of a prompt the end says most."""
    text, half = _one_line(text), max(length - 1, 8) // 2
    return text if len(text) <= length else f"{text[:half]}…{text[-half:]}"
