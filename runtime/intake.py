"""From what a caller asks to a `Request`, or a refusal: requests are validated here and nowhere later.

Knows nothing of queues, pages or steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import numpy as np

from .beams import BeamSearch
from .checks import integer, refuse
from .constraint import Constraint, Grammars
from .detokenizer import Detokenizer
from .errors import InvalidRequest
from .grammar import Grammar
from .model import Model
from .outputs import Handle
from .params import BeamParams, Params, SamplingParams, ScoreParams
from .prompts import checked_namespace, token_ids_of
from .request import CacheUse, Request
from .sampler import History
from .sequence import Sequence, TokenArray, with_text
from .tokenizer import Tokenizer

MAX_PRIORITY = 1_000_000
_ANYTHING = Grammar.regex("(?s:.)*")


class Intake:
    """Makes requests that one engine can run in its pool. Draws are keyed by `seed` where a request has none."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        grammars: Grammars,
        *,
        seed: int,
        num_pages: int,
        page_size: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._seed = seed
        self._num_pages = num_pages
        self._page_size = page_size

    def tokens(self, prompt: Any) -> TokenArray:
        """A prompt as token ids; InvalidRequest where it is none."""
        return token_ids_of(prompt, self._model, self._tokenizer)

    def request(
        self, handle: Handle, prompt: Any, params: Params, *, namespace: str, priority: int, cache: CacheUse
    ) -> Request:
        """A request from the start. InvalidRequest if this engine could never run it alone."""
        if cache not in get_args(CacheUse):
            refuse("cache", cache, '"all", "prompt" or "none"')
        tokens = self.tokens(prompt)
        paths = tuple((choice,) for choice in range(_checked(params).num_branches))
        sequence = self._sequence(handle, tokens, np.zeros(len(tokens), np.bool_), params, skip=_prefix(params))
        sequence.constraint = self._constraint(params, [])
        _begin_grammar(sequence)
        sequence.namespace = checked_namespace(namespace)
        sequence.priority = integer("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)
        sequence.path = paths[0]
        return Request(
            handle=handle,
            params=params,
            cache=cache,
            paths=paths,
            branches=[sequence],
            search=self._search(params, sequence),
        )

    def check_fork(self, parent: Request, choice: int, params: Params | None, *, at: int, extra_len: int) -> None:
        """InvalidRequest if this engine could never run such a fork alone."""
        if at + extra_len == 0:
            raise InvalidRequest("at: 0 given without a text; at least one token is needed")
        if params is not None or choice in parent.ended or extra_len or at < parent.branch(choice).num_tokens:
            self.max_len(at + extra_len, _fork_params(parent, params))
        self._fork_constraint(parent, choice, params, at=at, extra_len=extra_len)

    def fork(
        self, handle: Handle, parent: Request, choice: int, params: Params | None, *, at: int, extra: list[int]
    ) -> Request:
        """A request, checked before, that owns the first `at` tokens of a choice and then `extra`; without pages.

        Its limits count anew with `params`, or where it does not simply go on beside a parent that lives. Its grammar
        begins anew with `params` or `extra`.
        """
        sequence = parent.branch(choice)
        given = _fork_params(parent, params)
        if at < sequence.num_tokens or extra or not isinstance(given, SamplingParams) or sequence.scores is not None:
            tokens = np.concatenate([sequence.tokens[:at], np.array(extra, np.int32)])
            generated = np.concatenate([sequence.generated[:at], np.zeros(len(extra), np.bool_)])
            child = self._sequence(handle, tokens, generated, given, skip=_prefix(params))
            child.namespace, child.priority = sequence.namespace, sequence.priority
        else:
            child = sequence.branch(handle, _drawn_with(given))
            if params is not None or choice in parent.ended:
                self._limit(child, given, ended=choice in parent.ended, skip=_prefix(params))
        if isinstance(params, SamplingParams) and params.seed is not None:
            child.seed = (params.seed,)
        else:
            child.seed = sequence.seed
        child.high_water = min(child.high_water, at) if choice not in parent.ended else 0
        child.num_branches = given.num_branches
        child.found_len = at if choice not in parent.ended else 0  # what that kept is found again
        if at < sequence.num_tokens and at % self._page_size:
            child.cut_off = sequence.tokens[: -(-at // self._page_size) * self._page_size].copy()
        child.constraint = self._fork_constraint(parent, choice, params, at=at, extra_len=len(extra))
        start = _grammar_start(sequence, params, at=at, extra_len=len(extra))
        texts = with_text(sequence.texts, at, None, "") if extra else sequence.texts
        child.texts = with_text(texts, start, child.params.grammar, child.params.prefix)
        _begin_grammar(child)
        paths = parent.next_fork(choice, given.num_branches)
        child.path = paths[0]
        ancestors = parent.ancestors
        if parent.is_over or not parent.params.is_ranked:  # which the best are is not known before
            ancestors |= {(parent.handle.number, choice)}
        return Request(
            handle=handle,
            params=given,
            cache=parent.cache,
            paths=paths,
            branches=[child],
            search=self._search(given, child),
            ancestors=ancestors,
        )

    def _constraint(self, params: Params, token_ids: list[int]) -> Constraint | None:
        """What is asked of a text that begins with these tokens, if anything is; InvalidRequest if it cannot go on."""
        if not isinstance(params, SamplingParams):
            return None
        grammar = params.grammar
        if params.prefix and (grammar is not None or not self._have(token_ids, params.prefix)):
            grammar = (grammar or _ANYTHING).after(params.prefix)
        if grammar is None:
            return None
        ending_ids = params.ending_token_ids(self._model.eos_token_ids)
        ends_on_any = params.grammar is not None and params.grammar_end == "any"
        return self._grammars.start(grammar, ending_ids, token_ids, ends_on_any=ends_on_any)

    def _have(self, token_ids: list[int], prefix: str) -> bool:
        """These tokens of an output that begins with a prefix are all of it."""
        assert self._tokenizer is not None, "a prefix is refused where there is none"
        return sum(len(self._tokenizer.token_bytes(token_id)) for token_id in token_ids) >= len(prefix.encode())

    def _fork_constraint(
        self, parent: Request, choice: int, params: Params | None, *, at: int, extra_len: int
    ) -> Constraint | None:
        """A fork's: where nothing but the place is told, it goes on in its parent's grammar."""
        sequence, given = parent.branch(choice), _fork_params(parent, params)
        start = _grammar_start(sequence, params, at=at, extra_len=extra_len)
        return self._constraint(given, sequence.tokens[start:at].tolist())

    def _search(self, params: Params, sequence: Sequence) -> BeamSearch | None:
        if not isinstance(params, BeamParams):
            return None
        ending = params.ending_token_ids(self._model.eos_token_ids)
        return BeamSearch(params, ending_token_ids=ending, max_tokens=sequence.max_len - sequence.num_tokens)

    def _limit(self, child: Sequence, params: SamplingParams, *, ended: bool, skip: str) -> None:
        """Count a child's limits from here, and look for these stop strings; one of a text that ended begins anew."""
        child.limits_start = child.num_tokens
        child.max_len = self.max_len(child.num_tokens, params)
        if child.detokenizer is not None and self._tokenizer is not None:
            stop, min_tokens = params.stop, params.min_tokens
            if ended:
                ids = child.tokens.tolist()
                child.detokenizer = Detokenizer(self._tokenizer, stop, ids, min_tokens=min_tokens, skip=skip)
            else:
                child.detokenizer = child.detokenizer.branch(stop, min_tokens=min_tokens, skip=skip)
            child.first_detokenizer = child.detokenizer.copy()
            child.begins = bool(skip)

    def max_len(self, prompt_len: int, params: Params) -> int:
        """Tokens at which a request ends with "length"; InvalidRequest where this engine could never run it."""
        params = _checked(params)
        if isinstance(params, ScoreParams):
            if params.start > prompt_len:
                raise InvalidRequest(f"start: {params.start} given; allowed: at most {prompt_len}, the prompt's tokens")
        else:
            params.check_against(
                self._model.vocab_size, has_text=self._tokenizer is not None, eos_token_ids=self._model.eos_token_ids
            )
        context_len = self._model.context_len
        if prompt_len > context_len:
            raise InvalidRequest(f"prompt: {prompt_len} tokens given, the model's context holds {context_len}")
        prefix_len = len(_prefix(params).encode())  # tokens at most
        max_len = min(prompt_len + prefix_len + params.max_tokens, context_len + 1)
        needed = branch_pages(prompt_len, max_len - 1, params.num_branches, self._page_size)
        if needed > self._num_pages:
            asked = f"{prompt_len} + {max_len - prompt_len} tokens"
            if params.num_branches > 1:
                asked += f" in {params.num_branches} choices"
            raise InvalidRequest(
                f"prompt and max_tokens: {asked} given, which take {needed} pages of {self._page_size}; the pool holds "
                f"{self._num_pages}; give a shorter prompt, a smaller max_tokens or an engine with more kv_memory"
            )
        return max_len

    def _sequence(self, handle: Handle, tokens: TokenArray, generated: Any, params: Params, *, skip: str) -> Sequence:
        """A sequence of these tokens, all of them a prompt to its penalties and its text."""
        drawn = _drawn_with(params)
        if not len(tokens):
            raise InvalidRequest("prompt: empty; at least one token is needed")
        max_len = self.max_len(len(tokens), params)
        detokenizer = None
        if self._tokenizer is not None and not isinstance(params, ScoreParams):
            ids, min_tokens = tokens.tolist(), drawn.min_tokens
            detokenizer = Detokenizer(self._tokenizer, drawn.stop, ids, min_tokens=min_tokens, skip=skip)
        return Sequence(
            handle=handle,
            choice=0,
            num_branches=params.num_branches,
            params=drawn,
            namespace="",
            priority=0,
            seed=(drawn.seed,) if drawn.seed is not None else (self._seed, handle.number),
            path=(),
            output_start=len(tokens),
            limits_start=len(tokens),
            max_len=max_len,
            history=History(tokens),
            detokenizer=detokenizer,
            first_detokenizer=detokenizer.copy() if detokenizer is not None else None,
            constraint=None,
            texts=with_text((), len(tokens), drawn.grammar, drawn.prefix),
            score_start=params.start if isinstance(params, ScoreParams) else len(tokens),
            scores=np.full(len(tokens), np.nan) if isinstance(params, ScoreParams) else None,
            _buffer=tokens,
            _generated=generated,
            num_tokens=len(tokens),
            begins=bool(skip),
        )


def branch_pages(shared_len: int, seq_len: int, num_branches: int, page_size: int) -> int:
    """Pages that so many branches hold at `seq_len` tokens each, which have the first `shared_len` in common."""
    if seq_len <= shared_len or num_branches == 1:
        return -(-seq_len // page_size)
    shared = shared_len // page_size
    return shared + num_branches * (-(-seq_len // page_size) - shared)


def _checked(params: Params) -> Params:
    if not isinstance(params, (SamplingParams, BeamParams, ScoreParams)):
        refuse("params", params, "SamplingParams, BeamParams or ScoreParams")
    return params


def _fork_params(parent: Request, params: Params | None) -> Params:
    """A fork that is told nothing keeps its parent's parameters, as one choice."""
    if params is not None:
        return _checked(params)
    if not isinstance(parent.params, SamplingParams):
        what = "a beam search" if isinstance(parent.params, BeamParams) else "a score request"
        raise InvalidRequest(f"params: none given; a fork of {what} needs its own")
    return replace(parent.params, n=1, best_of=None)


def _prefix(params: Params | None) -> str:
    """What the output of a request with its own parameters begins with."""
    return params.prefix if isinstance(params, SamplingParams) else ""


def _grammar_start(parent: Sequence, params: Params | None, *, at: int, extra_len: int) -> int:
    """Where the text of a fork's grammar begins: with its parent's, unless more than the place is told."""
    return parent.grammar_start(at) if params is None and not extra_len else at + extra_len


def _begin_grammar(sequence: Sequence) -> None:
    """Where a grammar's text begins, a character that was left unfinished before it is no part of it."""
    begins = sequence.grammar_start(sequence.num_tokens) == sequence.num_tokens
    if sequence.constraint is not None and begins and sequence.detokenizer is not None:
        sequence.detokenizer = sequence.detokenizer.afresh()
        sequence.first_detokenizer = sequence.detokenizer.copy()


def _drawn_with(params: Params) -> SamplingParams:
    """The parameters that tokens are drawn with: choices that are ranked need log-probabilities, others nothing."""
    if not isinstance(params, SamplingParams):
        return SamplingParams(max_tokens=params.max_tokens, temperature=0.0)
    return replace(params, logprobs=0) if params.is_ranked and params.logprobs is None else params
