"""What random programs should say: an interpreter that shares nothing.

Knows nothing of states or branches. It goes one generation at a time and sends each whole, on an engine without cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from radixrt.runtime import Choice as Generated, Engine, FinishEvent, Handle, Output, SamplingParams

from ._programs import Body, Choose, Fail, Fork, Gen, Planned, Race, Retry, Scratch, Text, Value, or_failed
from .codec import Codec
from .node import seed_of
from .options import options_of
from .values import form_of

_IDLE = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(slots=True)
class Point:
    """A request that others go on from: the path it draws on, and how many have."""

    path: tuple[int, ...]
    num_forks: int = 0


@dataclass(slots=True, kw_only=True)
class Line:
    """One state: its ids, text behind them that was not encoded yet, and what keys its draws."""

    ids: list[int]
    text: str
    point: Point | None
    seed: int
    path: tuple[int, ...]
    num_branches: int = 0

    def branch(self, point: Point | None, run_seed: int) -> Line:
        path = (*self.path, self.num_branches)
        self.num_branches += 1
        return Line(ids=[*self.ids], text=self.text, point=point, seed=seed_of(run_seed, path), path=path)

    def become(self, other: Line) -> None:
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
        line = Line(ids=[], text="", point=None, seed=self.seed, path=())
        values = or_failed(lambda: self._play(line, body))
        values = ["failed"] if values == "failed" else values
        return [*values, (*line.ids, *self._codec.encode(line.text))]

    def _play(self, line: Line, body: Body) -> list[Any]:
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
                    values.append(or_failed(lambda: self._play(probe, inner)))  # noqa: B023
                case Retry(inner):
                    ids, text, point = [*line.ids], line.text, line.point
                    values.append(or_failed(lambda: self._play(line, inner)))
                    line.ids, line.text, line.point = ids, text, point
                    line.seed = seed_of(line.seed, (-1,))
                case Fail():
                    raise Planned
        return values

    def _branches(self, line: Line, n: int) -> list[Line]:
        point = line.point
        if point is None or n == 1:
            return [line.branch(point, self.seed) for _ in range(n)]
        points = [Point((*point.path, point.num_forks + number)) for number in range(n)]
        point.num_forks += n
        return [line.branch(one, self.seed) for one in points]

    def _fork(self, line: Line, op: Fork) -> Any:
        branches = self._branches(line, len(op.bodies))
        found = [
            or_failed(lambda: self._play(branch, body))  # noqa: B023
            for branch, body in zip(branches, op.bodies, strict=True)
        ]
        if "failed" in found and not op.collects:
            return "failed"
        if op.adopt is not None and found[op.adopt] != "failed":
            line.become(branches[op.adopt])
        return found

    def _gen(self, line: Line, op: Gen) -> tuple[str, str]:
        params = SamplingParams(max_tokens=op.max_tokens, temperature=op.temperature, stop=op.stop, seed=line.seed)
        ids, path, choice = self._ask(line, params)
        self._go_on(line, ids, path, choice)
        return choice.text, choice.finish_reason

    def _value(self, line: Line, op: Value) -> tuple[Any, str]:
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

    def _ask(self, line: Line, params: SamplingParams) -> tuple[list[int], tuple[int, ...], Generated]:
        """What a request from here on is given, the path it draws on, and what it generates."""
        ids = [*line.ids, *self._codec.encode(line.text)]
        path: tuple[int, ...] = (0,)
        if line.point is not None:
            path = (*line.point.path, line.point.num_forks)
            line.point.num_forks += 1
        [choice] = self._draw(ids, path, params).choices
        return ids, path, choice

    def _go_on(self, line: Line, ids: list[int], path: tuple[int, ...], choice: Generated) -> None:
        kept, rest = len(choice.token_ids), ""
        if choice.finish_reason == "stop":
            ends = choice.token_ids[-1] in self.engine.model.eos_token_ids
            kept, rest = (kept - 1, "") if ends else self._codec.kept(choice.token_ids, choice.text, before=ids[-3:])
        line.ids, line.text, line.point = [*ids, *choice.token_ids[:kept]], rest, Point(path)

    def _choose(self, line: Line, op: Choose) -> tuple[str, tuple[float, ...]]:
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
