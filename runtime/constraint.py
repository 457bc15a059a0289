"""Where sequences stand in their grammars and which tokens may come next; grammars compiled for one tokenizer.

Knows nothing of queues, pages or logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from time import perf_counter
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper

from .errors import InvalidRequest
from .grammar import Grammar, limits
from .tokenizer import Tokenizer

MAX_COMPILED = 64  # grammars kept for the next request; those in use come on top

BoolArray = npt.NDArray[np.bool_]
_WordArray = npt.NDArray[np.int32]


class _Vocabulary:
    """A tokenizer as llguidance asks for it: the bytes of each id, and an id past them that ends a text.

    Ids that add nothing to a text are never part of one.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b"<end>"]
        self._ids: dict[bytes, int] = {}
        for token_id, token in enumerate(self.tokens[:-1]):
            self._ids.setdefault(token, token_id)
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """The ids that llguidance asks for where a grammar forces this text.

        A tokenizer may normalise, or put a space in front. What does not come back as it was is cut greedily into the
        longest tokens: a mask must never hold an id that the grammar then refuses (llguidance issue 377).
        """
        known = range(self.eos_token_id)  # a model may have fewer ids than its tokenizer
        ids = [token_id for token_id in self._tokenizer.encode(text) if token_id in known and self.tokens[token_id]]
        wanted = text.encode()
        if b"".join(self.tokens[token_id] for token_id in ids) == wanted:
            return ids
        ids, at = [], 0
        while at < len(wanted):
            sizes = range(min(self._longest, len(wanted) - at), 0, -1)
            size = next((size for size in sizes if wanted[at : at + size] in self._ids), 0)
            if not size:
                break  # no token for this byte: what comes before it is all that can be forced
            ids.append(self._ids[wanted[at : at + size]])
            at += size
        return ids


class _Compiled:
    """A grammar for one vocabulary, at its beginning; `users` are the constraints that follow it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher = matcher
        self.vocab_size = vocab_size
        self.users: WeakSet[Constraint] = WeakSet()


class Constraint:
    """One sequence's place in its grammar. What comes next is known once it was looked at (`Grammars.look`)."""

    __slots__ = (
        "__weakref__",
        "_allowed",
        "_compiled",
        "_continuing",
        "_ending_ids",
        "_ends_on_any",
        "error",
        "forced",
        "is_complete",
        "matcher",
        "seconds",
    )

    def __init__(
        self, compiled: _Compiled, matcher: LLMatcher, ending_ids: frozenset[int], *, ends_on_any: bool
    ) -> None:
        """`ends_on_any`: where its text may end, every id that cannot go on with it ends it, not `ending_ids` alone."""
        self.matcher = matcher
        self.is_complete = False  # the text is one of the grammar's, and nothing can be added
        self.forced: int | None = None  # the only token that may come next, where the text may not end
        self.error: str | None = None  # why it cannot be followed further
        self.seconds = 0.0  # what `Grammars` took for it
        self._allowed: BoolArray | None = None
        self._continuing: BoolArray | None = None
        self._compiled = compiled
        self._ending_ids = ending_ids
        self._ends_on_any = ends_on_any
        compiled.users.add(self)

    @property
    def is_seen(self) -> bool:
        """It was looked at since the last token."""
        return self._allowed is not None

    @property
    def allowed(self) -> BoolArray:
        """[V] the tokens that may come next, those that end the text included."""
        assert self._allowed is not None, "looked at after each token"
        return self._allowed

    @property
    def continuing(self) -> BoolArray:
        """[V] the tokens that go on with the text."""
        assert self._continuing is not None, "looked at after each token"
        return self._continuing

    def is_ended_by(self, token_id: int) -> bool:
        """The text is over with this token, which is no part of it."""
        return not self.continuing[token_id]

    def copy(self) -> Constraint:
        """One that goes on from here by itself. About 10 us."""
        other = self._at(self.matcher.deep_copy())
        other._allowed, other._continuing = self._allowed, self._continuing
        other.is_complete, other.forced, other.error = self.is_complete, self.forced, self.error
        return other

    def advance(self, token_id: int) -> None:
        """Take one token, unless it ends the text."""
        if not self.is_ended_by(token_id):
            self.matcher.consume_token(token_id)
            self._allowed = self._continuing = self.forced = None

    def rebuilt(self, token_ids: list[int]) -> Constraint | None:
        """One that has taken these tokens from the grammar's beginning; None where they are not all of its text."""
        matcher = self._compiled.matcher.deep_copy()
        if not self._ending_ids.isdisjoint(token_ids) or matcher.try_consume_tokens(token_ids) < len(token_ids):
            return None
        return self._at(matcher)

    def _at(self, matcher: LLMatcher) -> Constraint:
        return Constraint(self._compiled, matcher, self._ending_ids, ends_on_any=self._ends_on_any)

    def see(self, mask: _WordArray) -> None:
        """Take the matcher's mask: a bit for each id, then one that says whether the text may end.

        What ends it is allowed exactly there.
        """
        size, ending = self._compiled.vocab_size, list(self._ending_ids)
        bits = np.unpackbits(mask.view(np.uint8), count=size + 1, bitorder="little").view(np.bool_)
        continuing, may_end = bits[:size], bool(bits[size])
        continuing[ending] = False
        num_continuing = int(np.count_nonzero(continuing))
        said = " ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())[:200]
        if said.startswith("NoExtension") or not (said or num_continuing or may_end):
            said = "no token of the vocabulary continues the text"
        self.error = said or None
        self.is_complete = may_end and not num_continuing and self.error is None
        self.forced = int(continuing.argmax()) if num_continuing == 1 and not may_end else None
        self._continuing = self._allowed = continuing
        if may_end:
            self._allowed = np.ones(size, np.bool_) if self._ends_on_any else continuing.copy()
            self._allowed[ending] = True


class Grammars:
    """Compiles grammars for one engine's tokenizer and keeps the latest, those in use whatever their number.

    Nothing is built until the first grammar comes; the vocabulary then takes 0.7 s for 50,000 ids, once.

    `clock` counts seconds, or says None where it fails, and decides nothing. `Constraint.seconds` are those that
    its caller waited: at the start for all that it took, and at each look for a share of what the look at several took
    together, as much for each. So they add up, on however many threads masks are found. Taking a token (2 us) is not
    counted.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, clock: Callable[[], float | None] = perf_counter
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._clock = clock
        self._environment: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()  # the latest used last

    def start(
        self, grammar: Grammar, ending_ids: frozenset[int], token_ids: list[int], *, ends_on_any: bool = False
    ) -> Constraint:
        """A constraint, looked at, that has taken these tokens of output.

        InvalidRequest where the grammar cannot be compiled for this vocabulary, allows no token, or does not go on
        after these.
        """
        begun = self._clock()
        compiled = self._compile(grammar)
        first = Constraint(compiled, compiled.matcher.deep_copy(), ending_ids, ends_on_any=ends_on_any)
        constraint = first.rebuilt(token_ids)
        if constraint is not None:
            self.look([constraint])
            if constraint.error is not None:
                raise InvalidRequest(f"grammar: {grammar.kind} given that cannot be followed: {constraint.error}")
        if constraint is None or constraint.is_complete:
            what = f"the {len(token_ids)} tokens so far" if token_ids else "the empty text"
            raise InvalidRequest(f"grammar: {grammar.kind} given that does not go on after {what}; give another")
        constraint.seconds = self._since(begun)
        return constraint

    def look(self, constraints: Iterable[Constraint]) -> None:
        """Find out what comes next for each that has advanced, several at once on torch's number of threads.

        About 0.1 ms each for 50,000 ids; limits bound the worst at some 10 ms.
        """
        unseen = [constraint for constraint in constraints if not constraint.is_seen]
        if not unseen:
            return
        begun = self._clock()
        masks = np.zeros((len(unseen), self._vocab_size // 32 + 1), np.int32)
        num_threads = torch.get_num_threads()
        if len(unseen) > 1 and num_threads > 1:
            if self._executor is None:
                self._executor = LLExecutor(num_threads)
            numbered = [(constraint.matcher, i) for i, constraint in enumerate(unseen)]
            self._executor.unsafe_compute_mask_ptr(numbered, masks.ctypes.data, masks.strides[0], len(unseen))
        else:
            for constraint, mask in zip(unseen, masks, strict=True):
                constraint.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        for constraint, mask in zip(unseen, masks, strict=True):
            constraint.see(mask)
        share = self._since(begun) / len(unseen)
        for constraint in unseen:
            constraint.seconds += share

    def _since(self, begun: float | None) -> float:
        """Seconds; none where the clock failed, or went back."""
        now = self._clock() if begun is not None else None
        return max(0.0, now - begun) if now is not None and begun is not None else 0.0

    def _compile(self, grammar: Grammar) -> _Compiled:
        """The compiled grammar, which becomes the latest used; the oldest go that nobody follows."""
        if grammar not in self._compiled:
            if self._environment is None:
                self._environment = self._new_environment()
            matcher = LLMatcher(self._environment, grammar.compilable(), log_level=0, limits=limits())
            if matcher.is_error():
                said = " ".join(matcher.get_error().split())[:200]
                raise InvalidRequest(f"grammar: {grammar.kind} given that cannot be compiled: {said}")
            self._compiled[grammar] = _Compiled(matcher, self._vocab_size)
        self._compiled.move_to_end(grammar)
        unused = [key for key, compiled in self._compiled.items() if not compiled.users and key is not grammar]
        for key in unused[: max(0, len(self._compiled) - MAX_COMPILED)]:
            del self._compiled[key]
        return self._compiled[grammar]

    def _new_environment(self) -> LLTokenizer:
        assert self._tokenizer is not None, "a grammar is refused where there is none"
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size)), n_vocab=self._vocab_size + 1
        )
