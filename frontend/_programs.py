"""Random programs as values: a strategy of them, their play through the language, and an oracle that shares nothing.

Knows no engine of its own. The oracle goes one generation at a time and sends each whole, on an engine without cache.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hypothesis import strategies as st

from radixrt.runtime import Choice as Generated, Engine, FinishEvent, Handle, Output, SamplingParams

from .choice import Choice
from .codec import Codec
from .failures import GenerationFailed
from .node import seed_of
from .options import ScoreName, options_of
from .program import program
from .scope import Ok
from .state import State
from .values import form_of

_IDLE = SamplingParams(max_tokens=1, temperature=0.0)


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
                    values.append(_or_failed(lambda: _play(probe, inner)))  # called at once
            case Retry(inner):
                mark = s.mark()
                values.append(_or_failed(lambda: _play(s, inner)))  # noqa: B023
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


def _or_failed(play: Callable[[], list[Any]]) -> Any:
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


# -- the oracle ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Point:
    """A request that others go on from: the path it draws on, and how many have."""

    path: tuple[int, ...]
    num_forks: int = 0


@dataclass(slots=True, kw_only=True)
class _Line:
    """One state: its ids, text behind them that was not encoded yet, and what keys its draws."""

    ids: list[int]
    text: str
    point: _Point | None
    seed: int
    path: tuple[int, ...]
    num_branches: int = 0

    def branch(self, point: _Point | None, run_seed: int) -> _Line:
        path = (*self.path, self.num_branches)
        self.num_branches += 1
        return _Line(ids=[*self.ids], text=self.text, point=point, seed=seed_of(run_seed, path), path=path)

    def become(self, other: _Line) -> None:
        self.ids, self.text, self.point = other.ids, other.text, other.point


@dataclass(slots=True)
class Oracle:
    """Interprets bodies on an engine that was made without prefix cache, which nobody else uses.

    What the language would cancel is run to its end here, so `computed` bounds what the language may compute.
    """

    engine: Engine
    seed: int = 0
    computed: int = 0
    _codec: Codec = field(init=False)

    def __post_init__(self) -> None:
        assert self.engine.tokenizer is not None, "programs speak in text"
        self._codec = Codec(self.engine.tokenizer, self.engine.model.vocab_size)

    def play(self, body: Body) -> list[Any]:
        """What `plain` and `tasks` return."""
        line = _Line(ids=[], text="", point=None, seed=self.seed, path=())
        values = _or_failed(lambda: self._play(line, body))
        values = ["failed"] if values == "failed" else values
        return [*values, (*line.ids, *self._codec.encode(line.text))]

    def _play(self, line: _Line, body: Body) -> list[Any]:
        values: list[Any] = []
        for op in body:
            match op:
                case Text(text):
                    line.text += text
                case Gen():
                    values.append(self._gen(line, op))
                case Value():
                    values.append(self._value(line, op))
                case Choose():
                    values.append(self._choose(line, op))
                case Fork():
                    values.append(self._fork(line, op))
                case Race():
                    racers = self._branches(line, op.num_branches)
                    found = [self._gen(one, op.gen) for one in racers]
                    values.append(found[0][0])
                    line.become(racers[0])
                case Scratch(inner):
                    [probe] = self._branches(line, 1)
                    values.append(_or_failed(lambda: self._play(probe, inner)))  # noqa: B023
                case Retry(inner):
                    ids, text, point = [*line.ids], line.text, line.point
                    values.append(_or_failed(lambda: self._play(line, inner)))
                    line.ids, line.text, line.point = ids, text, point
                    line.seed = seed_of(line.seed, (-1,))
                case Fail():
                    raise Planned
        return values

    def _branches(self, line: _Line, n: int) -> list[_Line]:
        point = line.point
        if point is None or n == 1:
            return [line.branch(point, self.seed) for _ in range(n)]
        points = [_Point((*point.path, point.num_forks + number)) for number in range(n)]
        point.num_forks += n
        return [line.branch(one, self.seed) for one in points]

    def _fork(self, line: _Line, op: Fork) -> Any:
        branches = self._branches(line, len(op.bodies))
        found = [
            _or_failed(lambda: self._play(branch, body))  # noqa: B023
            for branch, body in zip(branches, op.bodies, strict=True)
        ]
        if "failed" in found and not op.collects:
            return "failed"
        if op.adopt is not None and found[op.adopt] != "failed":
            line.become(branches[op.adopt])
        return found

    def _gen(self, line: _Line, op: Gen) -> tuple[str, str]:
        params = SamplingParams(max_tokens=op.max_tokens, temperature=op.temperature, stop=op.stop, seed=line.seed)
        ids, path, choice = self._ask(line, params)
        self._go_on(line, ids, path, choice)
        return choice.text, choice.finish_reason

    def _value(self, line: _Line, op: Value) -> tuple[Any, str]:
        form = form_of(op.kind)
        params = SamplingParams(
            max_tokens=op.max_tokens,
            temperature=op.temperature,
            seed=line.seed,
            grammar=form.grammar,
            grammar_end="any",
        )
        ids, path, choice = self._ask(line, params)
        if choice.finish_reason == "length":
            return "cut", choice.text
        self._go_on(line, ids, path, choice)
        return form.read(choice.text), choice.text

    def _ask(self, line: _Line, params: SamplingParams) -> tuple[list[int], tuple[int, ...], Generated]:
        """What a request from here on is given, the path it draws on, and what it generates."""
        ids = [*line.ids, *self._codec.encode(line.text)]
        path: tuple[int, ...] = (0,)
        if line.point is not None:
            path = (*line.point.path, line.point.num_forks)
            line.point.num_forks += 1
        [choice] = self._draw(ids, path, params).choices
        return ids, path, choice

    def _go_on(self, line: _Line, ids: list[int], path: tuple[int, ...], choice: Generated) -> None:
        kept, rest = len(choice.token_ids), ""
        if choice.finish_reason == "stop":
            ends = choice.token_ids[-1] in self.engine.model.eos_token_ids
            kept, rest = (kept - 1, "") if ends else self._codec.kept(choice.token_ids, choice.text, before=ids[-3:])
        line.ids, line.text, line.point = [*ids, *choice.token_ids[:kept]], rest, _Point(path)

    def _choose(self, line: _Line, op: Choose) -> tuple[str, tuple[float, ...]]:
        known = options_of(
            op.options,
            context=tuple(line.ids),
            pending=line.text,
            encode=self._codec.encode,
            score=op.score,
            end=None,
            start_ids=self._codec.start_ids,
            ending_ids=self.engine.model.eos_token_ids,
        )
        logprobs = []
        for prompt in known.prompts:
            [score] = self.engine.score([list(prompt.tokens)], start=prompt.start)
            logprobs.append(score.logprobs)
            self.computed += len(prompt.tokens)
        verdict = known.verdict(logprobs, temperature=op.temperature, seed=line.seed)
        line.ids, line.text = [*line.ids, *known.ids[verdict.index]], ""
        return op.options[verdict.index], verdict.scores[op.score]

    def _draw(self, ids: list[int], path: tuple[int, ...], params: SamplingParams) -> Output:
        """What a request of these ids generates on this path. Only it computes anything."""
        engine = self.engine
        handles = [engine.submit(ids, params if path == (0,) else _IDLE)]
        for depth, number in enumerate(path[1:], 2):
            parent = handles[-1]
            if number:
                handles += engine.fork(parent, number, _IDLE)
            handles += engine.fork(parent, 1, params if depth == len(path) else _IDLE)
        for handle in handles[:-1]:
            engine.release(handle)
        output = self._finished(handles[-1])
        engine.release(handles[-1])
        self.computed += len(ids)
        return output

    def _finished(self, handle: Handle) -> Output:
        while True:
            for event in self.engine.step():
                if isinstance(event, FinishEvent) and event.handle == handle:
                    return event.output
