"""What all states of one run have in common, what generations may be asked, and what they cost. Knows no states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from radixrt.runtime import Usage

from .driver import Driver
from .events import Observer, RunEvent
from .node import Origin

Boundary = Literal["raw", "heal", "exact"]  # between a text and what is generated behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all states of one run have in common."""

    origin: Origin
    program: str
    seed: int
    is_async: bool
    observers: tuple[Observer, ...] = ()
    faults: dict[int, Exception] = field(default_factory=dict)  # of observers, by their place

    def tell(self, event: RunEvent) -> None:
        """Tell every observer; events of threads come one after the other. Raises nothing, but for an interrupt."""
        if self.observers:
            with self.driver.lock:
                for place, observer in enumerate(self.observers):
                    if place not in self.faults:
                        try:
                            observer.tell(event)
                        except Exception as error:  # generations of others may depend on what follows
                            self.faults[place] = error

    @property
    def driver(self) -> Driver:
        return self.origin.driver


class Sampling(TypedDict, total=False):
    """What `gen` passes on to `SamplingParams`, where each is explained."""

    min_tokens: int
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop_token_ids: Collection[int]
    ignore_eos: bool
    logprobs: int | None


class Generation(Sampling, total=False):
    """What a generation may be asked, beside what its value is."""

    name: str | None  # to find the slot again, as `state[name]`
    max_tokens: int
    stop: str | Sequence[str]
    temperature: float
    boundary: Boundary  # by default "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Tokens of the generations that ended, choices among them, in a state and its branches: sums of their `Usage`."""

    generations: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, usage: Usage) -> Cost:
        return Cost(
            generations=self.generations + 1,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            computed_tokens=self.computed_tokens + usage.computed_tokens,
            recomputed_tokens=self.recomputed_tokens + usage.recomputed_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
        )
