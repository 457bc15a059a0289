"""Who waits for log-probabilities: the live score requests by their tokens, and what the rows of a step tell them.

Knows nothing of queues or memory. A row tells all of them, whoever computes it and whether they run or wait: so one
that starts later, behind rows that were computed, needs none of them again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixrt.kernels.plan import IntArray
from radixrt.radix import Match, agreement, page_key, require

from .errors import ModelError
from .logprobs import FloatArray, LogprobStore
from .model import Forward
from .plan import Entry, StepPlan
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Wish:
    """The tokens at `positions` of a sequence, whose log-probabilities `rows` of the step give."""

    sequence: Sequence
    positions: IntArray
    rows: IntArray


@dataclass(frozen=True, slots=True)
class Wishes:
    """What one step is asked for: `index` says which of the plan's (row, token id) answers each position."""

    wishes: list[_Wish]
    index: IntArray


class Scorer:
    """The score requests of one engine, and the store of what is known beside the pages."""

    def __init__(self, store: LogprobStore) -> None:
        self.store = store
        self._live: dict[str, list[tuple[bytes, int, Sequence]]] = defaultdict(list)  # of a namespace, by their tokens

    def add(self, sequence: Sequence) -> None:
        """It lives from now on, and knows at once what its neighbours have learnt, with whom it agrees longest."""
        if sequence.scores is None:
            return
        live, entry = self._live[sequence.namespace], (_key(sequence), sequence.number, sequence)
        at = bisect_left(live, entry)
        for _, _, other in live[max(0, at - 1) : at + 1]:
            agreed = agreement(other.tokens, sequence.tokens)
            assert other.scores is not None
            _learn(sequence, other.scores[:agreed])
        live.insert(at, entry)

    def remove(self, sequence: Sequence) -> None:
        """It ended."""
        if sequence.scores is not None:
            live = self._live[sequence.namespace]
            del live[bisect_left(live, (_key(sequence), sequence.number))]
            if not live:
                del self._live[sequence.namespace]

    def look(self, sequence: Sequence, match: Match) -> None:
        """Take what the store knows of its cached tokens, `match`; on the host too, without bringing them back."""
        _learn(sequence, self.store.read(_device_pages(match), match.length))
        pages = np.concatenate([match.page_ids, match.host_ids])
        _learn(sequence, self.store.read(pages, match.length + match.host_len))

    def ask(self, plan: StepPlan) -> Wishes:
        """Have the plan say which rows of the step are to give which tokens' log-probabilities."""
        wishes = [wish for entry in plan.entries if self._live for wish in self._wishes(entry)]
        if not wishes:
            return Wishes([], np.empty(0, np.int64))
        rows = np.concatenate([wish.rows for wish in wishes])
        ids = np.concatenate([wish.sequence.tokens[wish.positions] for wish in wishes])
        pairs, index = np.unique(rows << 32 | ids, return_inverse=True)  # twins ask for the same
        plan.scored_rows, plan.scored_ids = pairs >> 32, pairs & 0xFFFF_FFFF
        return Wishes(wishes, index)

    def hear(self, wishes: Wishes, forward: Forward) -> list[Sequence]:
        """The step ran: everybody learns what it asked for; those who could not, since a row came out as NaN."""
        told, unheard = 0, []
        num_asked = len(np.unique(wishes.index))
        if len(forward.logprobs) != num_asked:
            raise ModelError(f"it gave {len(forward.logprobs)} log-probabilities where {num_asked} were asked for")
        for wish in wishes.wishes:
            index = wishes.index[told : told + len(wish.rows)]
            told += len(wish.rows)
            sound = forward.finite[wish.rows] & ~np.isnan(forward.logprobs[index])
            assert wish.sequence.scores is not None
            wish.sequence.scores[wish.positions[sound]] = forward.logprobs[index[sound]]
            if not sound.all():
                unheard.append(wish.sequence)
        return unheard

    def note(self, sequence: Sequence, start: int) -> None:
        """Keep with its pages what is known of its computed tokens from `start` on."""
        if sequence.scores is not None and sequence.table is not None:
            self.store.note(sequence.table.page_ids, start, sequence.scores[start : sequence.computed_len])

    def leave(self, sequence: Sequence, match: Match) -> None:
        """Keep what it knows with what stays cached of it: where others had its last page already, in theirs."""
        assert sequence.scores is not None
        self.store.note(_device_pages(match), 0, sequence.scores[: match.length])

    def _wishes(self, entry: Entry) -> Iterator[_Wish]:
        """What the entry's own rows tell: each who agrees with it up to a row, the log-probability of its next token.

        O(log live) and, for each who agrees with the first of these rows, O(tokens).
        """
        if entry.own_start == entry.stop:
            return
        tokens = entry.sequence.tokens[: entry.stop]
        for sequence in self._beginning(entry.sequence.namespace, page_key(tokens, 0, entry.own_start + 1)):
            assert sequence.scores is not None
            start = max(entry.own_start + 1, sequence.score_start)
            unknown = np.isnan(sequence.scores[start : agreement(tokens, sequence.tokens) + 1])
            positions = start + np.flatnonzero(unknown)
            if len(positions):
                yield _Wish(sequence, positions, entry.rows[positions - 1 - entry.start])

    def _beginning(self, namespace: str, key: bytes) -> Iterator[Sequence]:
        """The live ones whose tokens begin so."""
        live = self._live.get(namespace, [])
        for at in range(bisect_left(live, (key, -1)), len(live)):
            found, _, sequence = live[at]
            if not found.startswith(key):
                return
            yield sequence

    def check(self) -> None:
        """They are in order, each once, and whoever runs knows what its computed rows have told."""
        for live in self._live.values():
            keys = [(key, number) for key, number, _ in live]
            require(keys == sorted(set(keys)), "live score requests are out of order")
            for key, _, sequence in live:
                require(key == _key(sequence), "a score request has other tokens than it came with")
                told = sequence.scores[sequence.score_start : sequence.computed_len + 1]  # type: ignore[index]
                require(not np.isnan(told).any(), "a score request has missed what a row of its told")


def _device_pages(match: Match) -> IntArray:
    """The pages that hold what was found on the device."""
    tail = [] if match.tail_page is None else [match.tail_page]
    return np.concatenate([match.page_ids, np.array(tail, np.int32)]).astype(np.int64)


def _learn(sequence: Sequence, found: FloatArray) -> None:
    """Take what is found of the first tokens where nothing is known."""
    assert sequence.scores is not None
    scores = sequence.scores[: len(found)]
    scores[:] = np.where(np.isnan(scores), found, scores)


def _key(sequence: Sequence) -> bytes:
    return page_key(sequence.tokens, 0, sequence.num_tokens)
