"""A choice among options, to come: it has its value once the requests that score the options have ended.

Knows nothing of how states use the tokens; what the scores say is in options.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Generic, TypeVar

from radixrt.runtime import Output, ScoreParams, Usage

from .failures import GenerationFailed, StateMisuse, is_same
from .node import Node, Origin, root, watch
from .options import Options, ScoreName, Verdict, number_of
from .requests import Requests

T_co = TypeVar("T_co", covariant=True)


class Choice(Generic[T_co]):
    """The option chosen, once it is: `await choice` in async programs, `choice.value` or `f"{choice}"` in plain ones.

    Waits, and raises what went wrong, as a slot does.
    """

    def __init__(self, values: Sequence[T_co], options: Options, requests: Requests) -> None:
        self.name = requests.name
        self.options = tuple(values)
        self.requests = requests  # for states; by number of the prompt
        self.nodes: list[Node] = []  # of the requests
        self._options = options
        self._found: dict[int, Output] = {}
        self._heard: set[int] = set()  # prompts whose request has ended
        self._verdict: Verdict | None = None

    @property
    def value(self) -> T_co:
        """The option, waited for in a plain program. StateMisuse in an async one that has not awaited it yet."""
        return self.options[self.index]

    @property
    def index(self) -> int:
        """Which option it is, from 0."""
        return self._ended().index

    @property
    def text(self) -> str:
        """The option as text."""
        return self._options.texts[self.index]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the option, from where the options begin to differ from their context."""
        options = self._options
        return options.ids[self.index][options.start - len(options.context) :]

    @property
    def scores(self) -> dict[ScoreName, tuple[float, ...]]:
        """Every score by name, one number for each option; "prefix_free" and "pmi" only where they were asked for."""
        return dict(self._ended().scores)

    @property
    def probs(self) -> tuple[float, ...]:
        """The softmax of the score that chose, over its temperature where there is one."""
        return self._ended().probs

    def expected(self) -> float:
        """The mean of the options, numbers, by their probabilities. StateMisuse where one is no number."""
        probs = self.probs
        try:
            numbers = [number_of(option) for option in self.options]
        except (TypeError, ValueError) as error:
            raise StateMisuse(f"expected: an option is no number, {self.requests.note}: {error}") from error
        return sum(prob * number for prob, number in zip(probs, numbers, strict=True))

    @property
    def usage(self) -> Usage:
        """The sum over the requests of all options."""
        self._ended()
        cost = self.cost
        assert cost is not None, "a choice that ended was counted"
        return cost

    @property
    def is_done(self) -> bool:
        return self.requests.is_done

    def __bool__(self) -> bool:
        """Of the value, so that `if` waits for it."""
        return bool(self.value)

    def __eq__(self, other: object) -> bool:
        """It is the same one. StateMisuse beside a value: compare its own."""
        return is_same(self, other)

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<choice of {self.requests.where}: {self.text if self._verdict is not None else 'no value'!r}>"

    def __await__(self) -> Generator[object, None, T_co]:
        yield from self.requests.settled().__await__()
        return self.value

    # -- for states -----------------------------------------------------------------------------------------------

    def runs(self, origin: Origin, *, temperature: float, seed: int, on_end: Callable[[], None]) -> None:
        """Ask for the scores. `on_end` hears of it when all have ended. The caller holds the driver's lock.

        InvalidRequest, with nothing left of it, where one could never run.
        """

        def told(number: int, outcome: Output | BaseException) -> None:
            self._take(number, outcome)
            if len(self._heard) == len(self.nodes):
                if self.requests.error is None:
                    found = [self._found[at].score for at in range(len(self.nodes))]
                    logprobs = [score.logprobs for score in found if score is not None]
                    self._verdict = self._options.verdict(logprobs, temperature=temperature, seed=seed)
                on_end()
                verdict = self._verdict if self.requests.error is None else None
                text = self._options.texts[verdict.index] if verdict is not None else None
                self.requests.tell_end((text, "stop") if text is not None else None, self.cost)
                for node in self.nodes:
                    node.drop()

        try:
            for prompt in self._options.prompts:
                self.nodes.append(root(origin, prompt.tokens, ScoreParams(start=prompt.start)).hold())
        except BaseException:
            for node in self.nodes:
                node.drop()
            raise
        for number, node in enumerate(self.nodes):
            self.requests.tickets.append(watch(node, partial(told, number)))

    @property
    def committed(self) -> tuple[int, ...] | None:
        """All ids up to the option's end that a state's own request does not hold; None where nothing was chosen."""
        if self._verdict is None or self.requests.error is not None:
            return None
        return self._options.ids[self._verdict.index]

    def _take(self, number: int, outcome: Output | BaseException) -> None:
        """Keep what one request came to. The first error counts."""
        self._heard.add(number)
        if isinstance(outcome, BaseException):
            self.requests.error = self.requests.error or outcome
            return
        self._found[number] = outcome
        if outcome.score is None or outcome.score.error is not None:
            said = outcome.score.error if outcome.score is not None else "the backend gave no scores"
            self.requests.error = self.requests.error or GenerationFailed(f"choice: {said}")

    @property
    def cost(self) -> Usage | None:
        """The usage of the requests that came to an output, None where none did."""
        if not self._found:
            return None
        usages = [output.usage for output in self._found.values()]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
            computed_tokens=sum(usage.computed_tokens for usage in usages),
            recomputed_tokens=sum(usage.recomputed_tokens for usage in usages),
            completion_tokens=0,
        )

    def _ended(self) -> Verdict:
        self.requests.settle()
        self.requests.raise_error()
        assert self._verdict is not None, "all have ended"
        return self._verdict
