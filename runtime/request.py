"""One request of a caller: its choices, which are one sequence until they differ, and how each of them ended.

Knows nothing of queues, pages or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from .outputs import Choice, FinishReason, Handle, Output, Usage
from .params import SamplingParams
from .sequence import Sequence

CacheUse = Literal["all", "prompt", "none"]
Path = tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`branches[i]` is choice i. While there is one branch of several choices, it stands for them all.

    `cache` says what of it is worth keeping once it has ended. Choice i draws on `paths[i]`, its k-th fork on that and
    then k. A request that has ended is kept for forks until it is released.
    """

    handle: Handle
    params: SamplingParams
    cache: CacheUse
    paths: tuple[Path, ...]
    branches: list[Sequence]
    ancestors: frozenset[tuple[int, int]] = frozenset()  # the (number, choice) it was forked from, and those before
    num_forks: list[int] = field(default_factory=list)
    ended: dict[int, Choice] = field(default_factory=dict)  # by choice

    def __post_init__(self) -> None:
        self.num_forks = [0] * len(self.paths)

    @property
    def is_over(self) -> bool:
        return len(self.ended) == len(self.paths)

    @property
    def live(self) -> list[Sequence]:
        """The branches that have not ended."""
        return [branch for branch in self.branches if branch.choice not in self.ended]

    def branch(self, choice: int) -> Sequence:
        """What choice `choice` is now; before the choices differ, what they have in common."""
        return self.branches[choice] if len(self.branches) > 1 else self.branches[0]

    def next_fork(self, choice: int, num_branches: int) -> tuple[Path, ...]:
        """The paths of the next fork of a choice, which has so many branches itself."""
        path = (*self.paths[choice], self.num_forks[choice])
        self.num_forks[choice] += 1
        return (path,) if num_branches == 1 else tuple((*path, i) for i in range(num_branches))

    def fan_out(self) -> list[Sequence]:
        """Make one branch per choice of the first; returns the new ones, without pages."""
        (trunk,) = self.branches
        trunk.num_branches = 1
        self.branches += [trunk.twin(choice, path) for choice, path in enumerate(self.paths[1:], 1)]
        return self.branches[1:]

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None) -> list[Choice]:
        """Note how a branch ended; the choices that ended with it."""
        choice = sequence.output(reason, error, with_logprobs=self.params.logprobs is not None)
        indices = range(len(self.paths)) if len(self.branches) < len(self.paths) else [sequence.choice]
        choices = [replace(choice, index=index) for index in indices]
        self.ended |= {choice.index: choice for choice in choices}
        return choices

    def output(self) -> Output:
        """What the caller gets in the end: all choices, or the n best of them."""
        assert self.is_over
        choices = [self.ended[index] for index in range(len(self.paths))]
        if self.params.is_ranked:
            choices.sort(key=lambda choice: -self._merit(choice))
            choices = [replace(choice, index=index) for index, choice in enumerate(choices[: self.params.n])]
        trunk = self.branches[0]
        return Output(
            handle=self.handle,
            prompt_token_ids=tuple(trunk.tokens[: trunk.output_start].tolist()),
            choices=tuple(choices),
            usage=self._usage(),
        )

    def _merit(self, choice: Choice) -> float:
        """Mean log-probability of a choice's tokens; what failed or was cut short comes last."""
        branch = self.branch(choice.index)
        if choice.finish_reason in ("abort", "error") or not branch.num_output_tokens:
            return float("-inf")
        return branch.total_logprob / branch.num_output_tokens

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.branches[0].output_start,
            cached_tokens=sum(branch.cached_tokens for branch in self.branches),
            computed_tokens=sum(branch.computed_tokens for branch in self.branches),
            recomputed_tokens=sum(branch.recomputed_tokens for branch in self.branches),
            completion_tokens=sum(branch.num_output_tokens for branch in self.branches),
        )
