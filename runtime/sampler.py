"""From logits to tokens: penalties, masks, filters, the draw and the log-probabilities of one step's rows.

Knows nothing of sequences, steps or text. A row's token depends on that row alone, never on its neighbours.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from .draws import IntArray, gumbel_argmax
from .outputs import Logprob, TokenLogprobs
from .params import SamplingParams

FloatArray = npt.NDArray[np.float32]

_MARGIN = 1e-4  # weights and sums in float32 are nearer than a third of it


class History:
    """The tokens that penalties look at: a sequence's prompt and how often each token is in its output.

    Costs nothing until a penalty asks, then memory in the number of distinct tokens.
    """

    __slots__ = ("_counts", "_distinct", "_prompt_ids")

    def __init__(self, prompt_ids: npt.NDArray[np.integer]) -> None:
        """Keeps `prompt_ids` itself, which must not change."""
        self._prompt_ids = prompt_ids
        self._counts: Counter[int] = Counter()
        self._distinct: IntArray | None = None

    def add(self, token_id: int) -> None:
        """Take one token of output."""
        self._counts[token_id] += 1
        if self._distinct is not None:
            at = int(np.searchsorted(self._distinct, token_id))
            if token_id not in self._distinct[at : at + 1]:
                self._distinct = np.insert(self._distinct, at, token_id)

    def remove(self, token_id: int) -> None:
        """Take back one token of output."""
        self._counts[token_id] -= 1
        if not self._counts[token_id]:
            del self._counts[token_id]
        self._distinct = None

    def copy(self) -> Self:
        """One that goes on from here by itself."""
        other = copy.copy(self)
        other._counts = self._counts.copy()
        return other

    @property
    def distinct_ids(self) -> IntArray:
        """The ids in prompt or output, ascending. The first call sorts the prompt; later ones cost nothing."""
        if self._distinct is None:
            self._distinct = np.union1d(self._prompt_ids, np.fromiter(self._counts, np.int64))
        return self._distinct

    @property
    def output_counts(self) -> tuple[IntArray, IntArray]:
        """The ids in the output and how often each is there."""
        return np.fromiter(self._counts, np.int64), np.fromiter(self._counts.values(), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerRow:
    """What the choice of one row's token depends on, beside its logits. `(seed, path, position)` key the draw."""

    params: SamplingParams
    history: History
    seed: tuple[int, ...]
    path: tuple[int, ...]
    position: int
    num_generated: int  # tokens of output so far
    eos_token_ids: frozenset[int]
    allowed: npt.NDArray[np.bool_] | None = None  # [V] the tokens that may be chosen, at least one; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The chosen token and, where asked for, log-probabilities."""

    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(logits: Sequence[torch.Tensor] | torch.Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """One token for each row of `logits` (R times `[V]` float32, in the host's memory, not changed), in order.

    Equal logits are ordered by token id, lowest first. Logits must be finite: the caller checks. For V = 50,000 a
    greedy row costs 20 us, a draw 0.1 ms, one after filters that leave little 0.2 ms (those that leave most of the
    vocabulary: up to 0.7 ms), and log-probabilities 0.15 ms more.
    """
    return [_sampled(scores, row) for scores, row in zip(logits, rows, strict=True)]


def _sampled(scores: torch.Tensor, row: SamplerRow) -> Sampled:
    """The token of one row. numpy, because its argmax is ten times as fast as torch's."""
    values: FloatArray = scores.numpy()
    if _is_adjusted(row):
        values = values.copy()
        _adjust(values, row)
    token_id = int(values.argmax()) if row.params.is_greedy else _draw(values, row)
    return _with_logprobs(token_id, scores, row.params.logprobs)


def _is_adjusted(row: SamplerRow) -> bool:
    """Some logit changes before the choice."""
    params = row.params
    return (
        row.allowed is not None
        or bool(params.logit_bias)
        or row.num_generated < params.min_tokens
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _adjust(logits: FloatArray, row: SamplerRow) -> None:
    """Bias, minimum length, penalties and mask, in place, in float32 as transformers computes them."""
    params = row.params
    if bias := dict(params.logit_bias):
        logits[list(bias)] += np.array(list(bias.values()), dtype=np.float32)
    if row.num_generated < params.min_tokens:
        logits[list(params.ending_token_ids(row.eos_token_ids))] = -np.inf
    if params.repetition_penalty != 1:  # Keskar et al., CTRL, 2019
        ids, penalty = row.history.distinct_ids, np.float32(params.repetition_penalty)
        logits[ids] = np.where(logits[ids] < 0, logits[ids] * penalty, logits[ids] / penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, counts = row.history.output_counts
        logits[ids] -= (params.frequency_penalty * counts + params.presence_penalty).astype(np.float32)
    if row.allowed is not None:
        logits[~row.allowed] = -np.inf


def _draw(logits: FloatArray, row: SamplerRow) -> int:
    """Draw from softmax(logits / temperature) over the tokens that top_k, then top_p, then min_p keep."""
    params, ids = row.params, None
    if params.top_k is not None and params.top_k < len(logits):
        ids = _largest(logits, params.top_k)
        logits = logits[ids]
    if params.top_p < 1 or params.min_p > 0:
        return _draw_from_top(logits, ids, row)
    at = gumbel_argmax(logits, params.temperature, row.seed, row.path, row.position, ids)
    return at if ids is None else int(ids[at])


def _draw_from_top(logits: FloatArray, ids: IntArray | None, row: SamplerRow) -> int:
    """The id drawn from those of `ids` (0..n where None) that top_p (Holtzman et al., 2020) and then min_p keep.

    Nothing is sorted. What they keep outranks the rest, so an id drawn from more than that is, if they keep it, the
    one drawn from the kept alone. If not, the draw is repeated, with the same noise, among those that outrank it. In
    the mean that takes at most 1 - log(top_p) draws, from ever fewer ids.
    """
    params, everything, peak = row.params, logits, logits.max()
    # Float32 says what is far from a boundary. What is near one, or divided by something extreme, needs float64.
    rough = np.float32 if 1e-6 < params.temperature < 1e6 else np.float64
    weights = _weights(logits, peak, params.temperature, rough)
    total = float(weights.sum())
    floor = max(params.min_p, (1 - params.top_p) * total / len(logits))  # all below hold less than 1 - top_p together
    left = np.flatnonzero(weights >= floor * (1 - _MARGIN))
    narrowed = len(left) < len(logits) // 2  # else it costs more than it saves
    while True:
        if narrowed:
            logits, weights, ids = logits[left], weights[left], left if ids is None else ids[left]
        at = gumbel_argmax(logits, params.temperature, row.seed, row.path, row.position, ids)
        ahead = logits > logits[at]
        ahead[:at] |= logits[:at] == logits[at]
        before, limit = float((weights * ahead).sum()), params.top_p * total
        if abs(before - limit) <= _MARGIN * limit:
            before = float(_weights(logits[ahead], peak, params.temperature, np.float64).sum())
            limit = params.top_p * float(_weights(everything, peak, params.temperature, np.float64).sum())
        [weight] = _weights(logits[at : at + 1], peak, params.temperature, np.float64)
        if before < limit and weight >= params.min_p:
            return at if ids is None else int(ids[at])
        left, narrowed = np.flatnonzero(ahead), True


def _weights(logits: FloatArray, peak: np.float32, temperature: float, dtype: type[np.floating]) -> npt.NDArray[Any]:
    """exp((logits - peak) / temperature), computed in `dtype`."""
    with np.errstate(over="ignore"):  # at tiny temperatures all but the best go to 0, as they should
        scores = np.subtract(logits, peak, dtype=dtype)
        scores /= temperature
    return np.exp(scores, out=scores)


def _largest(values: FloatArray, count: int) -> IntArray:
    """Indices of the `count` largest values, ascending; of equal values the first ones. 0.1 ms for 50,000."""
    if count >= len(values):
        return np.arange(len(values))
    threshold = np.partition(values, -count)[-count] if count else np.inf
    chosen = values > threshold
    equal = np.flatnonzero(values == threshold)
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


def _with_logprobs(token_id: int, logits: torch.Tensor, count: int | None) -> Sampled:
    """`token_id` with its log-probability and the `count` largest ones of `logits` [V], equal ones by id."""
    if count is None:
        return Sampled(token_id=token_id)
    logprobs = torch.log_softmax(logits, dim=-1).numpy()  # row by row: no neighbour can change a bit
    best = _largest(logprobs, count)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    sampled, *top = (Logprob(token_id=int(i), logprob=float(logprobs[i])) for i in (token_id, *best))
    return Sampled(token_id=token_id, logprobs=TokenLogprobs(sampled=sampled, top=tuple(top)))
