"""One request of a caller: its choices, which are one sequence until they differ, and how each of them ended.

Knows nothing of queues, pages or steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from .beams import BeamSearch, Continuation, Hypothesis
from .outputs import Choice, FinishReason, Handle, Output, Score, Usage
from .params import Params, SamplingParams
from .sequence import Sequence

CacheUse = Literal["all", "prompt", "none"]
Path = tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`branches[i]` is choice i. While there is one branch of several choices, it stands for them all.

    Where more are sampled than returned, they are ranked when all have ended: choice i is then the i-th best, and the
    branches that are no choice any more come last.

    `cache` says what of it is worth keeping once it has ended. Choice i draws on `paths[i]`, its k-th fork on that and
    then k. A request that has ended is kept for forks until it is released. With a `search`, the branches are its live
    beams, best first, and in the end its hypotheses.
    """

    handle: Handle
    params: Params
    cache: CacheUse
    paths: tuple[Path, ...]
    branches: list[Sequence]
    search: BeamSearch | None = None
    ancestors: frozenset[tuple[int, int]] = frozenset()  # the (number, choice) it was forked from, and those before
    num_forks: list[int] = field(default_factory=list)
    ended: dict[int, Choice] = field(default_factory=dict)  # by choice
    gone: list[Sequence] = field(default_factory=list)  # beams that were given up
    _num_beams: int = 1  # ever made

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

    def select(self, continuations: list[Continuation]) -> tuple[list[tuple[Sequence, Sequence]], list[Sequence]]:
        """Go on with these beams of the present ones, their new tokens appended.

        The new sequences, each with the one it is a fork of and shares everything but the token with; and the beams
        that are given up. The first continuation of a beam takes it over.
        """
        beams, forked = self.branches, []
        chosen: list[Sequence] = []
        for continuation in continuations:
            beam = parent = beams[continuation.parent]
            if parent in chosen:
                beam = parent.twin(self._num_beams, parent.path)
                self._num_beams += 1
                forked.append((parent, beam))
            chosen.append(beam)
        for beam, continuation in zip(chosen, continuations, strict=True):
            beam.num_branches, beam.logits = 1, None
            beam.append(continuation.token_id)
        given_up = [beam for beam in beams if beam not in chosen]
        self.branches = chosen
        self.gone += given_up
        return forked, given_up

    def end_search(self, reason: FinishReason | None, error: str | None) -> None:
        """The search is over, by itself or for `reason`: its hypotheses become the branches, if it has any."""
        assert self.search is not None
        hypotheses = self.search.hypotheses if reason is None else ()
        beams, count = self.branches, max(1, len(hypotheses))
        self.paths, self.num_forks = self.paths[:count], self.num_forks[:count]
        self.gone += beams
        self.branches = [beams[0].twin(index, path) for index, path in enumerate(self.paths)]
        for branch in self.branches:
            branch.truncate(branch.output_start)
        if reason is not None:
            self.ended = {0: self.branches[0].output(reason, error, with_logprobs=False)}
        for branch, hypothesis in zip(self.branches, hypotheses, strict=False):
            self.ended[branch.choice] = _filled(branch, hypothesis)

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None) -> list[Choice]:
        """Note how a branch ended; the choices that ended with it. The last one brings them in their order."""
        with_logprobs = isinstance(self.params, SamplingParams) and self.params.logprobs is not None
        choice = sequence.output(reason, error, with_logprobs=with_logprobs)
        indices = range(len(self.paths)) if len(self.branches) < len(self.paths) else [sequence.choice]
        choices = [replace(choice, index=index) for index in indices]
        self.ended |= {choice.index: choice for choice in choices}
        if self.is_over and isinstance(self.params, SamplingParams) and self.params.is_ranked:
            self._rank()
        return choices

    def output(self) -> Output:
        """What the caller gets in the end: all choices, or the n best of them."""
        assert self.is_over
        trunk = self.branches[0]
        return Output(
            handle=self.handle,
            prompt_token_ids=tuple(trunk.tokens[: trunk.output_start].tolist()),
            choices=tuple(self.ended[index] for index in range(len(self.paths))),
            usage=self._usage(),
            score=self._score(self.ended[0]),
        )

    def lost(self, error: str) -> Output:
        """What the caller gets where it was broken off, in whatever state: of choices that had not ended, no tokens."""
        for index in range(len(self.paths)):
            if index not in self.ended:
                self.ended[index] = Choice(index=index, text="", token_ids=(), finish_reason="error", error=error)
        return self.output()

    def _score(self, choice: Choice) -> Score | None:
        """What a score request found, if it is one and ended well."""
        trunk = self.branches[0]
        if trunk.scores is None:
            return None
        found = tuple(trunk.scores[trunk.score_start :].tolist()) if choice.finish_reason == "stop" else ()
        return Score(
            token_ids=tuple(trunk.tokens.tolist()),
            start=trunk.score_start,
            logprobs=found,
            usage=self._usage(),
            error=None if found or choice.finish_reason == "stop" else choice.error or "it was aborted",
        )

    def _rank(self) -> None:
        """Number the choices from the best on, and return no more than were asked for."""
        assert isinstance(self.params, SamplingParams)
        ranking = sorted(range(len(self.paths)), key=lambda index: -self._merit(self.ended[index]))
        best = ranking[: self.params.n]
        self.ended = {rank: replace(self.ended[index], index=rank) for rank, index in enumerate(best)}
        self.paths = tuple(self.paths[index] for index in best)
        self.num_forks = [self.num_forks[index] for index in best]
        if len(self.branches) > 1:
            self.branches = [self.branches[index] for index in ranking]
            for rank, branch in enumerate(self.branches):
                branch.choice = rank

    def _merit(self, choice: Choice) -> float:
        """Mean log-probability of a choice's tokens; what failed or was cut short comes last."""
        branch = self.branch(choice.index)
        if choice.finish_reason in ("abort", "error") or not branch.num_output_tokens:
            return float("-inf")
        return sum(token.sampled.logprob for token in branch.logprobs) / branch.num_output_tokens

    def _usage(self) -> Usage:
        paying = self.branches + self.gone
        return Usage(
            prompt_tokens=self.branches[0].output_start,
            cached_tokens=sum(branch.cached_tokens for branch in paying),
            computed_tokens=sum(branch.computed_tokens for branch in paying),
            recomputed_tokens=sum(branch.recomputed_tokens for branch in paying),
            completion_tokens=sum(branch.num_output_tokens for branch in self.branches),
        )


def _filled(branch: Sequence, hypothesis: Hypothesis) -> Choice:
    """Give a branch that has no output yet that of a hypothesis."""
    for token_id in hypothesis.token_ids:
        branch.append(token_id)
    branch.high_water = branch.num_tokens - 1  # as a beam
    if branch.detokenizer is not None:
        shown = hypothesis.token_ids[: -1 if hypothesis.finish_reason == "stop" else None]
        branch.text = [branch.detokenizer.add(token_id) for token_id in shown]
        branch.text.append(branch.detokenizer.flush())
    choice = branch.output(hypothesis.finish_reason, None, with_logprobs=False)
    return replace(choice, score=hypothesis.score)
