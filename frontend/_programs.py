"""Random programs as values: a strategy of them, and their play through the language.

Knows no engine, and not what the values should be: that is the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hypothesis import strategies as st

from .choice import Choice
from .failures import GenerationFailed
from .options import ScoreName
from .program import program
from .scope import Ok
from .state import State


class Planned(Exception):
    """What a random program raises where it was drawn to fail."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Gen:
    max_tokens: int
    temperature: float
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a type, or what says that it was cut."""

    kind: Any
    max_tokens: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Choose:
    options: tuple[str, ...]
    score: ScoreName
    temperature: float


@dataclass(frozen=True, slots=True)
class Fork:
    """All branches to their end. One that fails ends the others or, `collects`, stands for itself."""

    bodies: tuple[Body, ...]
    adopt: int | None
    collects: bool


@dataclass(frozen=True, slots=True)
class Race:
    """Every branch generates; the first one's end cancels the others. It is adopted."""

    num_branches: int
    gen: Gen


@dataclass(frozen=True, slots=True)
class Scratch:
    body: Body


@dataclass(frozen=True, slots=True)
class Retry:
    """Go back to before it, whatever came of it."""

    body: Body


@dataclass(frozen=True, slots=True)
class Fail:
    pass


Op = Text | Gen | Value | Choose | Fork | Race | Scratch | Retry | Fail
Body = tuple[Op, ...]


def programs(*, max_ops: int = 4, max_depth: int = 2, values: bool = True) -> st.SearchStrategy[Body]:
    """Bodies of at most so many operations, which contain bodies to this depth; typed `values` and choices or none."""
    text = st.builds(Text, st.text("ab .\n", max_size=6))
    gen = st.builds(
        Gen, st.integers(1, 6), st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([(), ("a",), ("b", "aa"), ("\x10",)])
    )
    kinds = st.sampled_from([int, float, bool, Literal["a", "ab", "b a"], list[bool], int | None])
    value = st.builds(Value, kinds, st.integers(1, 6), st.sampled_from([0.0, 1.0]))
    choose = st.builds(
        Choose,
        st.lists(st.text("ab ", min_size=1, max_size=3), min_size=1, max_size=4, unique=True).map(tuple),
        st.sampled_from(get_args(ScoreName)),
        st.sampled_from([0.0, 0.0, 1.0]),
    )
    held = [value, choose] if values else []
    leaf = st.one_of(text, gen, text, gen, *held, st.builds(Race, st.integers(1, 3), gen), st.just(Fail()))
    body = st.lists(leaf, max_size=max_ops).map(tuple)
    for _ in range(max_depth):
        inner = body
        bodies = st.lists(inner, min_size=1, max_size=3).map(tuple)
        fork = bodies.flatmap(
            lambda many: st.builds(Fork, st.just(many), st.none() | st.integers(0, len(many) - 1), st.booleans())
        )
        op = st.one_of(leaf, fork, st.builds(Scratch, inner), st.builds(Retry, inner))
        body = st.lists(op, max_size=max_ops).map(tuple)
    return body.map(lambda ops: (Text("begin"), *ops))


# -- through the language -----------------------------------------------------------------------------------------


@program
def plain(s: State, body: Body) -> list[Any]:
    """Play a body as a plain program: what each operation came to, and all tokens in the end."""
    return _guarded(lambda: _play(s, body), s)


@program
async def tasks(s: State, body: Body) -> list[Any]:
    """Play a body as an async program."""
    try:
        values = await _play_async(s, body)
    except Planned:
        values = ["failed"]
    return [*values, s.tokens]


def _guarded(play: Callable[[], list[Any]], s: State) -> list[Any]:
    try:
        values = play()
    except Planned:
        values = ["failed"]
    return [*values, s.tokens]


def _play(s: State, body: Body) -> list[Any]:
    values: list[Any] = []
    for op in body:
        match op:
            case Text(text):
                s += text
            case Gen():
                slot = _gen(s, op)
                values.append((slot.value, slot.finish))
            case Value():
                slot = s.gen(op.kind, max_tokens=op.max_tokens, temperature=op.temperature)
                try:
                    values.append((slot.value, slot.text))
                except GenerationFailed:
                    values.append(("cut", slot.text))
            case Choose():
                choice = _choose(s, op)
                values.append((choice.value, choice.scores[op.score]))
            case Fork():
                try:
                    with s.fork(op.bodies) as branches:
                        found = branches.map(_play, on_error="collect") if op.collects else branches.map(_play)
                        if op.adopt is not None and _may_adopt(found[op.adopt]):
                            s.adopt(branches[op.adopt])
                    values.append([_plain(result) for result in found])
                except Planned:
                    values.append("failed")
            case Race():
                with s.fork(op.num_branches) as racers:
                    slots = [_gen(b, op.gen) for b in racers]
                    values.append(slots[0].value)
                    s.adopt(racers[0])
            case Scratch(inner):
                with s.scratch() as probe:
                    values.append(or_failed(lambda: _play(probe, inner)))  # called at once
            case Retry(inner):
                mark = s.mark()
                values.append(or_failed(lambda: _play(s, inner)))  # noqa: B023
                s.rewind(mark)
            case Fail():
                raise Planned
    return values


async def _play_async(s: State, body: Body) -> list[Any]:
    values: list[Any] = []
    for op in body:
        match op:
            case Text(text):
                s += text
            case Gen():
                slot = _gen(s, op)
                values.append((await slot, slot.finish))
            case Value():
                slot = s.gen(op.kind, max_tokens=op.max_tokens, temperature=op.temperature)
                try:
                    values.append((await slot, slot.text))
                except GenerationFailed:
                    values.append(("cut", slot.text))
            case Choose():
                choice = _choose(s, op)
                values.append((await choice, choice.scores[op.score]))
            case Fork():
                try:
                    async with s.fork(op.bodies) as branches:
                        if op.collects:
                            found: list[Any] = await branches.map(_play_async, on_error="collect")
                        else:
                            found = await branches.map(_play_async)
                        if op.adopt is not None and _may_adopt(found[op.adopt]):
                            s.adopt(branches[op.adopt])
                    values.append([_plain(result) for result in found])
                except Planned:
                    values.append("failed")
            case Race():
                async with s.fork(op.num_branches) as racers:
                    slots = [_gen(b, op.gen) for b in racers]
                    values.append(await slots[0])
                    s.adopt(racers[0])
            case Scratch(inner):
                async with s.scratch() as probe:
                    values.append(await _or_failed_async(_play_async(probe, inner)))
            case Retry(inner):
                mark = s.mark()
                values.append(await _or_failed_async(_play_async(s, inner)))
                s.rewind(mark)
            case Fail():
                raise Planned
    return values


def _gen(s: State, op: Gen) -> Any:
    return s.gen(max_tokens=op.max_tokens, temperature=op.temperature, stop=op.stop)


def _choose(s: State, op: Choose) -> Choice[str]:
    return s.choose(op.options, score=op.score, temperature=op.temperature)


def or_failed(play: Callable[[], list[Any]]) -> Any:
    try:
        return play()
    except Planned:
        return "failed"


async def _or_failed_async(playing: Coroutine[Any, Any, list[Any]]) -> Any:
    try:
        return await playing
    except Planned:
        return "failed"


def _may_adopt(result: Any) -> bool:
    return not hasattr(result, "ok") or isinstance(result, Ok)


def _plain(result: Any) -> Any:
    if not hasattr(result, "ok"):
        return result
    return result.value if isinstance(result, Ok) else "failed"
