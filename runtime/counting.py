"""What was computed and what was saved: the engine's running totals, charged row by row. Knows nothing of memory.

`computed` is compared with `trie_size` of the prompts: the least number of rows that computes them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as AnySequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from radixrt.radix import agreement

from .plan import Entry, StepPlan
from .sequence import Sequence


@dataclass(slots=True)
class Counters:
    """Totals since the engine started. Every row of every step is in exactly one of the five row counters."""

    steps: int = 0
    computed: int = 0  # rows of prompt or appended tokens
    decoded: int = 0  # rows of generated tokens fed back, once per branch
    recomputed_for_logits: int = 0  # the last token of a prompt that was cached whole before, or of what was cut
    recomputed_for_scores: int = 0  # cached rows that ran for log-probabilities which nobody had asked for before
    recomputed_after_preemption: int = 0  # or after a borrowed tail was given up, or a step with a copy failed
    cached: int = 0  # tokens that needed no row of their own: found in the cache or a row of another request
    preemptions: int = 0
    # Of these, the ones that have run again, by what had become of their pages until then:
    preemptions_kept: int = 0  # all were there still
    preemptions_swapped: int = 0  # what was missing came back from host memory
    preemptions_recomputed: int = 0  # some had to be computed again
    forks: int = 0  # sequences that began as another's, choices of one request included

    def add_cached(self, sequence: Sequence, stop: int) -> None:
        """`[0, stop)` of the sequence was found computed; counts what it has not had before."""
        self.cached += len(range(sequence.high_water, stop))
        sequence.cached_tokens += len(range(sequence.told_len, min(stop, sequence.output_start)))
        sequence.reach(stop)

    def add_resumed(self, sequence: Sequence, opened_len: int, *, swapped: bool) -> None:
        """A preempted sequence runs again from `opened_len` tokens on, for some of which pages were moved or not."""
        sequence.resumes = False
        if opened_len < min(sequence.high_water, sequence.num_tokens - 1):
            self.preemptions_recomputed += 1
        elif swapped:
            self.preemptions_swapped += 1
        else:
            self.preemptions_kept += 1

    def add_step(self, plan: StepPlan) -> None:
        """Charge the rows of a step that ran: a shared row to the request submitted first, cached for the others."""
        self.steps += 1
        by_age = sorted(plan.entries, key=lambda entry: entry.sequence.key)
        charged = np.empty(plan.num_rows, np.int64)
        for age, entry in reversed(list(enumerate(by_age))):
            charged[entry.rows] = age
        ages = charged.tolist()
        for age, entry in enumerate(by_age):
            self._add_entry(entry, [ages[row] == age for row in entry.rows.tolist()])

    def _add_entry(self, entry: Entry, charged: list[bool]) -> None:
        sequence = entry.sequence
        generated = sequence.generated[entry.start : entry.stop].tolist()
        for position, is_charged in enumerate(charged, entry.start):
            is_new = position >= sequence.high_water and position >= sequence.known_len
            told = sequence.told_len <= position < sequence.output_start
            if not is_charged:
                self.cached += position >= sequence.high_water
                sequence.cached_tokens += told
            elif is_new:
                self.computed += not generated[position - entry.start]
                self.decoded += generated[position - entry.start]
                sequence.computed_tokens += told
            else:
                self.recomputed_after_preemption += position < sequence.high_water
                self.recomputed_for_logits += position >= sequence.high_water and sequence.scores is None
                self.recomputed_for_scores += position >= sequence.high_water and sequence.scores is not None
                sequence.recomputed_tokens += told
        sequence.reach(entry.stop)


def trie_size(token_lists: Iterable[AnySequence[int]]) -> int:
    """Nodes of the token trie of these lists: the least number of rows that computes them all. O(total log n)."""
    ordered = sorted(np.asarray(tokens, dtype=">i4").tobytes() for tokens in token_lists)
    lists = [np.frombuffer(key, dtype=">i4").astype(np.int32) for key in ordered]
    shared = sum(agreement(a, b) for a, b in pairwise(lists))
    return sum(map(len, lists)) - shared
