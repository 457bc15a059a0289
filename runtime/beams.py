"""Which beams go on, with which tokens, and what has finished: the selection of beam search, step by step.

Knows nothing of models, pages or text. The engine owns one `BeamSearch` a request and one sequence a live beam:

1. It forwards every live beam and gives `advance` the raw logits, in the order of the beams. At the first step all
   beams are the prompt: one sequence, one row.
2. It makes the beams that the continuations name, in their order: continuation i is beam i of the next step, its
   parent's tokens and one more. A parent that several name is forked for all but one of them, which takes it over;
   one that none names can be closed, since no later step returns to it. A beam is never extended in place before the
   forks that share it are made. A token that is the last of a hypothesis is never fed.
3. When `is_done`, no continuation comes, every sequence can be closed, and `hypotheses` is the answer. It holds its own
   token ids, so no page is kept for what has finished; it may be read before that, when a request is aborted.

A beam that was preempted needs its tokens again and nothing of this class; the next `advance` waits until the logits of
all live beams are there, of one step or of several. The same logits give the same answer to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from .params import BeamParams

# What transformers scores a beam or slot with that holds nothing, and takes from what must not be chosen.
_EMPTY = -1e9


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam of the next step: the beam of this step that it continues, and its new last token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A finished beam: what follows the prompt, the id that ended it included."""

    token_ids: tuple[int, ...]
    score: float  # sum of log-probabilities / len(token_ids) ** length_penalty
    finish_reason: Literal["stop", "length"]


class BeamSearch:
    """One search. Ids, order and scores are those of `transformers.generate` 5.24 with `num_beams=width`, one prompt.

    Its details, since they decide answers: scores are float32. Of the `[width, V]` sums the best
    `max(2, 1 + number of ending ids) * width` are candidates, equal ones in the order of `torch.topk` over that layout
    (at the first step too, where all rows but the first begin at -1e9). A candidate that ends is a hypothesis only if
    it is among the first `width`; the others only make sure that `width` beams can go on. Scores are divided by
    the number of tokens after the prompt, raised to `length_penalty`. The best `width` hypotheses are kept. Once there
    are so many, the search is over with `early_stopping=True`, else when the best live beam, divided by its present
    length (for "never" and a positive penalty by the greatest), does not beat the worst of them.
    With `width=1` it is greedy, as `generate` is: the largest logit, the first of equals, until one ends.
    """

    def __init__(self, params: BeamParams, *, ending_token_ids: Collection[int], max_tokens: int) -> None:
        """`max_tokens`: those of `params`, or fewer where the context ends first. `params` suit the model (checked)."""
        self._params = params
        self._max_tokens = max_tokens
        self._ending = torch.tensor(sorted(ending_token_ids), dtype=torch.int64)
        self._num_generated = 0
        self._beams: list[tuple[int, ...]] = [()]
        self._totals = torch.full((params.width,), _EMPTY, dtype=torch.float32)  # of the live beams
        self._totals[0] = 0
        self._slots: list[Hypothesis | None] = [None] * params.width  # best first
        self._slot_scores = torch.full((params.width,), _EMPTY, dtype=torch.float32)
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """Nothing can change the answer."""
        return self._is_done

    @property
    def num_beams(self) -> int:
        """Rows that the next `advance` wants: 1 at the first step, then `width`, 0 at the end."""
        return len(self._beams)

    @property
    def scores(self) -> tuple[float, ...]:
        """The sum of log-probabilities of each live beam, best first."""
        return tuple(self._totals[: self.num_beams].tolist())

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """What has finished so far, best first, at most `num_return`."""
        finished = [slot for slot in self._slots if slot is not None]
        return tuple(finished[: self._params.num_return or self._params.width])

    def advance(self, logits: torch.Tensor) -> list[Continuation]:
        """Take one step: `logits` [num_beams, V], float32, finite, in the host's memory, not changed.

        The beams of the next step, best first; none when the search is done. 2 to 4 ms for 8 beams and V = 50,000.
        """
        assert not self._is_done, "the search is over"
        assert logits.shape[0] == self.num_beams, f"{logits.shape[0]} rows of logits for {self.num_beams} beams"
        totals, parents, token_ids = self._candidates(logits)
        self._num_generated += 1
        ends = torch.isin(token_ids, self._ending) | (self._num_generated == self._max_tokens)
        grown = [
            (*self._beams[parent], token_id)
            for parent, token_id in zip(parents.tolist(), token_ids.tolist(), strict=True)
        ]
        self._keep(totals, ends, grown)
        chosen = torch.topk(totals + ends * _EMPTY, self._params.width).indices
        self._totals = totals[chosen]
        self._is_done = bool(ends.all()) or self._is_decided()
        live = [] if self._is_done else chosen.tolist()
        self._beams = [grown[i] for i in live]
        return [Continuation(int(parents[i]), int(token_ids[i])) for i in live]

    def _candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sums, the parents and the tokens of what may go on or end, best first."""
        rows, vocab_size = logits.shape
        logprobs = torch.log_softmax(logits, dim=-1)
        if self._num_generated < self._params.min_tokens:  # after the softmax: the others gain nothing
            logprobs[:, self._ending] = -math.inf
            logits = logits.index_fill(1, self._ending, -math.inf)
        sums = (logprobs + self._totals[:, None]).view(-1)  # one row at the first step is as many as there are beams
        if self._params.width == 1:
            indices = logits.argmax(dim=-1)
            totals = sums[indices]
        else:
            count = max(2, 1 + len(self._ending)) * self._params.width
            totals, indices = torch.topk(sums, min(count, len(sums)))
        return totals, (indices // vocab_size).clamp(max=rows - 1), indices % vocab_size

    def _keep(self, totals: torch.Tensor, ends: torch.Tensor, grown: Sequence[tuple[int, ...]]) -> None:
        """Take the candidates that end, of the first `width`, among the hypotheses; the best stay."""
        width = self._params.width
        finishes = ends.clone()
        finishes[width:] = False
        scores = totals / self._length_factor(self._num_generated) + ~finishes * _EMPTY
        scores = torch.cat((self._slot_scores, scores))
        is_real = torch.cat((torch.tensor([slot is not None for slot in self._slots]), finishes))
        if bool((scores[is_real] <= _EMPTY).any()):  # long and with a negative penalty: `generate` returns padding
            scores[~is_real] = -math.inf
        best = torch.topk(scores, width).indices
        self._slot_scores = scores[best]
        self._slots = [
            None if not is_real[i] else self._slots[i] if i < width else self._hypothesis(grown[i - width], scores[i])
            for i in best.tolist()
        ]

    def _hypothesis(self, token_ids: tuple[int, ...], score: torch.Tensor) -> Hypothesis:
        stops = token_ids[-1] in self._ending.tolist()
        return Hypothesis(token_ids=token_ids, score=float(score), finish_reason="stop" if stops else "length")

    def _is_decided(self) -> bool:
        """No live beam can, or may, change the hypotheses."""
        if None in self._slots:
            return False
        if self._params.early_stopping is True:
            return True
        at_best = self._params.early_stopping == "never" and self._params.length_penalty > 0
        bound = self._totals[0] / self._length_factor(self._max_tokens if at_best else self._num_generated)
        return not bool(bound > self._slot_scores.min())

    def _length_factor(self, num_tokens: int) -> float:
        return float(num_tokens**self._params.length_penalty)

    def check(self) -> None:
        """Raise AssertionError where the parts contradict each other. O(tokens held)."""
        width, finished = self._params.width, [slot for slot in self._slots if slot is not None]
        ending = set(self._ending.tolist())
        expected = 0 if self._is_done else width if self._num_generated else 1
        assert self.num_beams == expected, f"{self.num_beams} beams live, {expected} expected"
        assert all(len(beam) == self._num_generated for beam in self._beams), "a live beam of another length"
        assert len(set(self._beams)) == len(self._beams), "two live beams are equal"
        assert all(ending.isdisjoint(beam) for beam in self._beams), "a live beam has ended"
        assert len({slot.token_ids for slot in finished}) == len(finished), "two hypotheses are equal"
        assert all(len(slot.token_ids) <= self._num_generated <= self._max_tokens for slot in finished), "too long"
        assert finished == sorted(finished, key=lambda slot: -slot.score), "hypotheses out of order"
