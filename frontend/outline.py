"""What a program shares, before it runs: the text that every run begins with, and what rows have in common beyond it.

Knows no engine: it is given what it counts tokens with. Nothing of the author's is run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixrt.runtime import InvalidRequest, trie_size

from .chat import Template
from .codec import Codec
from .content import Content
from .source import Call, Closed, Opened, Prefix, Source

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSharing:
    """The known beginnings of rows. `distinct` counts nodes of the trie of their tokens: what has to be computed."""

    num_rows: int
    tokens: int
    distinct: int

    @property
    def factor(self) -> float:
        """How often a token that is computed is used."""
        return self.tokens / self.distinct if self.distinct else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of a program before it runs; None is what is not known.

    `text` begins every run, of which `tokens` are certain whatever follows; `is_whole`: a generation comes next. `end`
    says where the source stops being known. `calls` are the generations and forks that the source has.
    """

    program: str
    text: str
    tokens: int | None
    is_whole: bool
    end: str
    calls: tuple[Call, ...]
    rows: RowSharing | None

    def __str__(self) -> str:
        size = f"{self.tokens:,} tokens" if self.tokens is not None else f"{len(self.text):,} characters"
        then = "all of its first prompt" if self.is_whole else "not known from there on"
        shown = self.text if len(self.text) <= 100 else f"{self.text[:50]}…{self.text[-49:]}"
        lines = [f"{self.program} begins with {size}, up to {self.end} ({then})", f"  {shown!r}"]
        lines += [f"  {_described(call)}" for call in self.calls]
        if self.rows is not None:
            rows = f"{self.rows.num_rows:,} row{'s' if self.rows.num_rows > 1 else ''}"
            lines.append(
                f"{rows}: {self.rows.tokens:,} tokens are known of them, {self.rows.distinct:,} distinct: "
                f"each is used {self.rows.factor:.1f} times"
            )
        return "\n".join(lines)


def outline(
    function: Callable[..., Any],
    name: str,
    static: Row,
    rows: Sequence[Row],
    tools: tuple[Codec, Template] | None,
) -> Outline:
    """See `Program.plan`. With rows only what none of them gives counts as known of every run."""
    source, known = Source(function), _known(function, static)
    common = {key: value for key, value in known.items() if not any(key in row for row in rows)}
    prefix = source.prefix(common)
    sharing = None
    if rows and tools is not None:
        lists = [_tokens(source.prefix({**known, **row}), *tools) for row in rows]
        sharing = RowSharing(num_rows=len(rows), tokens=sum(map(len, lists)), distinct=trie_size(lists))
    return Outline(
        program=name,
        text=prefix.text,
        tokens=len(_tokens(prefix, *tools)) if tools is not None else None,
        is_whole=prefix.is_whole,
        end=prefix.end,
        calls=source.calls(common),
        rows=sharing,
    )


def prefix_order(function: Callable[..., Any], rows: Sequence[Row], numbers: Iterable[int]) -> list[int]:
    """These rows so that those with longer common beginnings come next to each other; else in their order."""
    source, known = Source(function), _known(function, {})
    return sorted(numbers, key=lambda number: source.prefix({**known, **rows[number]}).text)


def _known(function: Callable[..., Any], static: Row) -> dict[str, Any]:
    """Values of parameters: given, or their defaults."""
    _, *parameters = inspect.signature(function).parameters.values()
    unknown = static.keys() - {parameter.name for parameter in parameters}
    if unknown:
        raise InvalidRequest(
            f"plan: {', '.join(sorted(unknown))} given; allowed: {', '.join(one.name for one in parameters)}"
        )
    defaults = {one.name: one.default for one in parameters if one.default is not inspect.Parameter.empty}
    return defaults | dict(static)


def _tokens(prefix: Prefix, codec: Codec, template: Template) -> list[int]:
    """The ids of a prefix that no continuation changes; all of them where a generation comes next."""
    content = Content()
    for part in prefix.parts:
        match part:
            case Opened(role):
                content = content.opened(role, template.opening((*content.roles, role)), codec)
            case Closed():
                content = replace(content, is_open=False)
            case _:
                content = content.plus(part, start_ids=codec.start_ids)
    return content.tokens(codec) if prefix.is_whole else list(content.settled(codec).committed)


def _described(call: Call) -> str:
    counted = {"gen": "at most {} tokens", "fork": "{} branches", "choose": "{} options"}.get(call.method, "")
    said = f", {counted.format(call.count if call.count is not None else '?')}" if counted else ""
    return f"{call.method} on line {call.line}{said}{', perhaps several times' if call.repeats else ''}"
