"""One branch of a request on its way through the engine: its tokens, its page table, what it has cost.

Knows nothing of other sequences, of scheduling or of how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from radixrt.radix import PageTable

from .detokenizer import Detokenizer
from .outputs import Choice, FinishReason, Handle, Output, TokenLogprobs, Usage
from .params import SamplingParams
from .sampler import History, SamplerRow

TokenArray = npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A sequence owns the tokens `[0, num_tokens)`, of which `[0, computed_len)` have KV in its table.

    `0 <= computed_len < num_tokens` while it lives: the last token is always still to be fed, since its row gives the
    logits of the next one. `[0, prompt_len)` came from the caller, `[output_start, num_tokens)` is its own output;
    the two differ in a fork, whose parent generated what lies between.
    """

    handle: Handle
    params: SamplingParams
    namespace: str
    seed: tuple[int, ...]
    path: tuple[int, ...]
    prompt_len: int
    output_start: int
    limits_start: int  # where min_tokens and max_tokens count from
    max_len: int  # tokens, prompt included; ends with "length" there
    history: History
    detokenizer: Detokenizer | None
    _buffer: TokenArray
    num_tokens: int
    table: PageTable | None = None
    high_water: int = 0  # tokens ever computed or found cached, by a parent too; below it a row is a recomputation
    told_len: int = 0  # tokens that its usage has counted
    known_len: int = 0  # tokens found cached at admission; a row below it runs for its logits alone
    borrows: bool = True  # takes a part of a cached page to copy; not where the copy was a page too many
    bypassed: int = 0  # later requests admitted before this one
    num_forks: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.handle.number

    @property
    def tokens(self) -> TokenArray:
        """The committed tokens, a read-only view."""
        view = self._buffer[: self.num_tokens]
        view.flags.writeable = False
        return view

    @property
    def computed_len(self) -> int:
        return self.table.seq_len if self.table is not None else 0

    @property
    def extend_len(self) -> int:
        """Tokens still to be fed, at least 1."""
        return self.num_tokens - self.computed_len

    @property
    def is_decoding(self) -> bool:
        """Only its last sampled token is still to be fed."""
        return self.num_tokens > self.prompt_len and self.extend_len == 1

    @property
    def was_preempted(self) -> bool:
        return self.table is None and self.high_water > 0

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.output_start

    def append(self, token_id: int) -> None:
        """Commit one generated token."""
        if self.num_tokens == len(self._buffer):
            self._buffer = np.resize(self._buffer, 2 * len(self._buffer))
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1
        self.history.add(token_id)

    def reach(self, stop: int) -> None:
        """`[0, stop)` was computed or found, and counted."""
        self.high_water = max(self.high_water, stop)
        self.told_len = max(self.told_len, stop)

    def note(self, text: str, logprobs: TokenLogprobs | None) -> None:
        """Keep what became certain of its output."""
        self.text.append(text)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def branch(self, handle: Handle, params: SamplingParams) -> Sequence:
        """A sequence under its own handle that owns the same tokens; everything after them is its output. No pages."""
        return replace(
            self,
            handle=handle,
            params=params,
            path=(*self.path, self.num_forks),
            output_start=self.num_tokens,
            history=self.history.copy(),
            detokenizer=self.detokenizer.copy() if self.detokenizer is not None else None,
            _buffer=self.tokens.copy(),
            table=None,
            high_water=0 if self.table is not None else self.high_water,
            told_len=0,
            borrows=True,
            bypassed=0,
            num_forks=0,
            cached_tokens=0,
            computed_tokens=0,
            recomputed_tokens=0,
            text=[],
            logprobs=[],
        )

    def sampler_row(self, eos_token_ids: frozenset[int]) -> SamplerRow:
        """What the sampler needs to draw the next token."""
        return SamplerRow(
            params=self.params,
            history=self.history,
            seed=self.seed,
            path=self.path,
            position=self.num_tokens,
            num_generated=self.num_tokens - self.limits_start,
            eos_token_ids=eos_token_ids,
        )

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.output_start,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed_tokens,
            completion_tokens=self.num_output_tokens,
        )

    def output(self, reason: FinishReason, error: str | None) -> Output:
        """What the caller gets when it ends for `reason`."""
        choice = Choice(
            index=0,
            text="".join(self.text),
            token_ids=tuple(self.tokens[self.output_start :].tolist()),
            finish_reason=reason,
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            error=error,
        )
        prompt = tuple(self.tokens[: self.output_start].tolist())
        return Output(handle=self.handle, prompt_token_ids=prompt, choices=(choice,), usage=self.usage())
