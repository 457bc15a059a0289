"""What of the cache nobody will ask for any more: dead branches leave it at once, whoever else owns them keeps them.

Knows nothing of queues or steps. It changes what is evicted when, never an answer.
"""

from __future__ import annotations

import numpy as np

from radixrt.radix import RadixCache

from .beams import Hypothesis
from .owners import Owners
from .request import Request
from .sequence import Sequence, TokenArray


class Liveness:
    """Drops from one cache what its owners have given up, and nobody else owns or holds."""

    def __init__(self, cache: RadixCache, owners: Owners) -> None:
        self._cache = cache
        self.owners = owners

    def ended(self, sequence: Sequence) -> None:
        """It holds no pages any more; what it has computed is its own until its request is forgotten."""
        self.owners.keep(sequence)
        self._drop_cut_off(sequence)

    def give_up(self, branch: Sequence) -> None:
        """Others of its request go on or were better."""
        self.owners.disown(branch)
        self._drop(branch.tokens, branch.output_start, branch.namespace)
        self._drop_cut_off(branch)

    def search_on(self, request: Request, before: tuple[Hypothesis, ...], now: tuple[Hypothesis, ...]) -> None:
        """The hypotheses that a search has now own what was computed of them; those it has given up, nothing."""
        trunk = request.branches[0]

        def tokens_of(hypothesis: Hypothesis) -> TokenArray:
            return np.concatenate([trunk.tokens[: trunk.output_start], np.array(hypothesis.token_ids, np.int32)])

        for hypothesis in now:
            if hypothesis not in before:
                self.owners.own((request.handle, hypothesis), tokens_of(hypothesis), trunk.namespace)
        for hypothesis in before:
            if hypothesis not in now:
                self.owners.disown((request.handle, hypothesis))
                self._drop(tokens_of(hypothesis), trunk.output_start, trunk.namespace)

    def search_over(self, request: Request, hypotheses: tuple[Hypothesis, ...]) -> None:
        """The branches of a request are now what its search has found, of its beams and hypotheses at the end.

        A page that a beam left long ago for a hypothesis may be one too many: a later one begins alike.
        """
        for branch in request.branches:
            self.owners.keep(branch)
        self.search_on(request, hypotheses, ())
        for beam in request.gone:
            self.give_up(beam)

    def request_over(self, request: Request) -> None:
        """Choices that are not among the best are given up, and what the caller said is not worth keeping."""
        for branch in request.branches[len(request.paths) :]:
            self.give_up(branch)
        if request.cache != "all":
            for branch in request.branches[: len(request.paths)]:
                kept = branch.output_start if request.cache == "prompt" else branch.found_len
                self.owners.keep(branch, kept)
                self._drop(branch.tokens, branch.output_start, branch.namespace)
                # Behind what it was given others may have been given more, which stays.
                kept = max(kept, self.owners.owned_len(branch.tokens, branch.namespace))
                self._cache.drop(branch.tokens, kept, branch.namespace)

    def released(self, request: Request) -> None:
        """A request that owns nothing any more: what was generated for it, or for those that it was forked from.

        What callers gave stays as long as nothing comes before it that was generated for nobody who is left.
        """
        for branch in request.branches:
            self._drop_cut_off(branch)
            owned_len = self.owners.owned_len(branch.tokens, branch.namespace)
            self._drop(branch.tokens, branch.given_len(owned_len), branch.namespace)

    def replaced(self, sequence: Sequence, old: TokenArray) -> None:
        """A sequence that had the tokens `old` owns others now, which begin alike.

        A page in which they part may be in use. It is dropped once the sequence has ended, or is cut again.
        """
        self.ended(sequence)
        self._drop(old, sequence.output_start, sequence.namespace)
        size = self._cache.page_size
        sequence.cut_off = old[: -(-sequence.num_tokens // size) * size]

    def _drop_cut_off(self, sequence: Sequence) -> None:
        if sequence.cut_off is not None:
            self._drop(sequence.cut_off, sequence.given_len(), sequence.namespace)
            sequence.cut_off = None

    def _drop(self, tokens: TokenArray, keep_len: int, namespace: str) -> None:
        """Of these tokens what nobody owns or holds after the first `keep_len` is dead, and all that lies behind it.

        The first that is dead was generated: who gives it in a prompt of his own shares its fate.
        """
        keep_len = max(keep_len, self.owners.owned_len(tokens, namespace))
        if keep_len < len(tokens):
            for dead in self._cache.behind(tokens[: keep_len + 1], namespace):
                self._cache.drop(dead, keep_len, namespace)
