"""What a caller gets back: handles, events, outputs and usage. Frozen data; knows nothing of how it came about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Handle:
    """Names one request of one engine."""

    number: int  # in order of submission, from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Natural log-probability of a token, raw: before temperature, penalties and masks."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The sampled token's log-probability and the most probable tokens at its position, best first."""

    sampled: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. `prompt_tokens == cached + computed + recomputed` once its prompt is through the model.

    A row that several requests shared in a step is computed for the one submitted first and cached for the others.
    `recomputed_tokens` had been computed and had to run again: for their logits (the last token of a prompt that was
    cached whole), for log-probabilities that nobody had asked for, or in the fork of a preempted request. For a fork
    everything before the fork counts as prompt. A prompt counts once however many choices continue it;
    `completion_tokens` are those of all, kept or not.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One continuation. `error` says what went wrong where `finish_reason` is "error"; beam search gives a `score`.

    `grammar_seconds`: how long the engine waited for its grammar, of waits that others share its part: compiling, where
    it was new, and finding what may come next. A measure of the machine, so that equal choices may differ in it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    forced: tuple[int, ...] = ()  # indices of the `token_ids` that a grammar left no choice of
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    score: float | None = None
    grammar_seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """`logprobs[i]` is the natural log-probability of `token_ids[start + i]` given all tokens before it, in float64.

    Raw: before temperature and masks. `start` is at least 1: nothing comes before the first token, so it has none.
    Where the request failed there are none at all, and `error` says why.
    """

    token_ids: tuple[int, ...]
    start: int
    logprobs: tuple[float, ...]  # [len(token_ids) - start]
    usage: Usage
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Everything one request produced: `n` choices by index, with `best_of` and beams numbered from the best on.

    The index is what `fork`, `truncate` and `adopt` call a choice. With `ScoreParams` there is a
    `score`, and one choice without tokens that says how it ended.
    """

    handle: Handle
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    usage: Usage
    score: Score | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One token was committed. `text` is what became certain with it: valid UTF-8, perhaps empty, never taken back."""

    handle: Handle
    choice: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvent:
    """One choice ended. `text` is what was still held back: the deltas add up to the choice's text."""

    handle: Handle
    choice: int
    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEvent:
    """The request ended, all its choices with it; its last event."""

    handle: Handle
    output: Output


Event = TokenEvent | ChoiceEvent | FinishEvent
