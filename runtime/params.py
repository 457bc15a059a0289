"""What a caller may ask of a request: `SamplingParams`, `BeamParams` and `ScoreParams`, checked once when made.

Knows nothing of models (`check_against` is told the width of the logits), of tensors or of how tokens are chosen.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from .checks import integer, is_unicode, number, optional_integer, refuse
from .errors import InvalidRequest
from .grammar import Grammar

MAX_CHOICES = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_PREFIX_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TOKEN_ID = 2**31 - 1
MAX_WIDTH = 256  # beams; a step holds a float32 for each token of each
MAX_LENGTH_PENALTY = 4.0  # up to here no power of a number of tokens leaves float32

GrammarEnd = Literal["eos", "any"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose and when to stop. Frozen, hashable, picklable; equal parameters compare equal.

    Every value is checked here and stored as a plain int, float or tuple, whatever it was given as. What is refused
    raises InvalidRequest, one line: the field, what was given, what is allowed.

    The order of effects: logit_bias, min_tokens (ids that end a sequence are masked), repetition_penalty (prompt and
    output), presence and frequency penalties (output alone), grammar, temperature, top_k, top_p, min_p, draw.

    With a grammar the ids that end a sequence can be drawn exactly where its text may end; where nothing can be added
    it ends with "stop" by itself, whatever min_tokens says. A text that max_tokens cuts ends with "length". With
    `grammar_end="any"` a text that may end does so at whatever else the model would say: all ids can be drawn there,
    and one that cannot go on with the text ends the sequence like an id that ends it.
    """

    n: int = 1  # choices, which share the prompt's pages and all that they have in common
    best_of: int | None = None  # sample so many and return the n of highest mean log-probability, told at the end
    max_tokens: int = 64
    min_tokens: int = 0  # until so many, nothing but max_tokens ends the sequence
    temperature: float = 1.0  # 0: greedy
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # stored as (id, bias) pairs, by id
    stop: str | Sequence[str] = ()  # stored as a tuple of strings
    stop_token_ids: Collection[int] = ()  # stored as a sorted tuple
    ignore_eos: bool = False
    logprobs: int | None = None  # of the chosen token and so many of the most probable
    seed: int | None = None  # None: the engine's seed and the request's number
    grammar: Grammar | None = None  # what the output may be; a mapping as `to_dict` gives it is taken too
    grammar_end: GrammarEnd = "eos"  # what ends its text: an id that ends a sequence, or any that cannot go on with it
    # What the output says first, in whichever tokens: no part of a choice's text. What follows it is free, or held to
    # the grammar; limits count, and stop strings are looked for, there.
    prefix: str = ""

    def __new__(cls, *args: object, **given: object) -> Self:
        """Refuses unknown names; the generated `__init__` would raise a TypeError that names no alternative."""
        _refuse_unknown(given, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        checked = {
            "n": integer("n", self.n, 1, MAX_CHOICES),
            "best_of": optional_integer("best_of", self.best_of, 1, MAX_CHOICES),
            "max_tokens": integer("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID),
            "min_tokens": integer("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID),
            "temperature": number("temperature", self.temperature, 0),
            "top_k": optional_integer("top_k", self.top_k, 1, MAX_TOKEN_ID),
            "top_p": number("top_p", self.top_p, math.ulp(0.0), 1.0, "a number in (0, 1]"),
            "min_p": number("min_p", self.min_p, 0.0, 1.0),
            # Wide enough for every use, narrow enough that no float32 logit overflows.
            "repetition_penalty": number("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": _bias_pairs(self.logit_bias),
            "stop": _stop_strings(self.stop),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
            "logprobs": optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "seed": optional_integer("seed", self.seed, -(2**63), 2**64 - 1),
            "grammar": _grammar(self.grammar),
            "prefix": _prefix(self.prefix),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if not isinstance(self.ignore_eos, bool):
            refuse("ignore_eos", self.ignore_eos, "True or False")
        if self.grammar_end not in ("eos", "any"):
            refuse("grammar_end", self.grammar_end, "'eos' or 'any'")
        if self.best_of is not None and self.best_of < self.n:
            refuse("best_of", self.best_of, f"at least n, which is {self.n}")
        if self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")

    @property
    def num_branches(self) -> int:
        """How many continuations are sampled."""
        return self.best_of if self.best_of is not None else self.n

    @property
    def is_ranked(self) -> bool:
        """More are sampled than returned, so that which ones are is known at the end alone."""
        return self.num_branches > self.n

    @property
    def is_greedy(self) -> bool:
        """The most probable token is taken, ties to the lowest id; nothing is drawn."""
        return self.temperature == 0 or self.top_k == 1

    def ending_token_ids(self, eos_token_ids: Set[int]) -> frozenset[int]:
        """The ids that end a sequence, given the model's own."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    def check_against(self, vocab_size: int, *, has_text: bool = True, eos_token_ids: Set[int] = frozenset()) -> None:
        """InvalidRequest where a model whose logits are `vocab_size` wide cannot serve these parameters.

        `has_text` says whether there is a tokenizer, without which stop strings cannot be found.
        """
        allowed = f"ids in [0, {vocab_size})"
        for token_id in dict(self.logit_bias):
            if token_id >= vocab_size:
                refuse("logit_bias", token_id, allowed)
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                refuse("stop_token_ids", token_id, allowed)
        if self.min_tokens and len(self.ending_token_ids(eos_token_ids)) >= vocab_size:
            refuse("min_tokens", self.min_tokens, "0 where every token ends the sequence")
        if self.stop and not has_text:
            refuse("stop", self.stop, "none where the engine has no tokenizer; use stop_token_ids")
        if self.prefix and not has_text:
            refuse("prefix", self.prefix, "none where the engine has no tokenizer")
        if self.grammar is not None and not has_text:
            refuse("grammar", self.grammar, "none where the engine has no tokenizer")

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON holds it; `SamplingParams(**params.to_dict()) == params`, through JSON too."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["logit_bias"] = [list(pair) for pair in plain["logit_bias"]]
        plain["grammar"] = self.grammar.to_dict() if self.grammar is not None else None
        return plain | {name: list(plain[name]) for name in ("stop", "stop_token_ids")}


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How wide to search and when to stop. Checked, stored and refused like `SamplingParams`.

    The answer is that of `transformers.generate(num_beams=width, do_sample=False)`: hypotheses, best first, by
    the sum of their log-probabilities over their number of tokens to the power of `length_penalty`.
    """

    width: int = 4  # num_beams; 1: greedy
    max_tokens: int = 64
    min_tokens: int = 0  # until so many, nothing but max_tokens ends a beam
    length_penalty: float = 1.0  # positive: favours long ones, negative: short ones
    # Over once `width` have finished (True), once a better one is unlikely (False) or cannot come ("never").
    early_stopping: bool | Literal["never"] = False
    num_return: int | None = None  # hypotheses; None: width
    stop_token_ids: Collection[int] = ()  # stored as a sorted tuple
    ignore_eos: bool = False

    def __new__(cls, *args: object, **given: object) -> Self:
        """Refuses unknown names, as `SamplingParams` does."""
        _refuse_unknown(given, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        checked = {
            "width": integer("width", self.width, 1, MAX_WIDTH),
            "max_tokens": integer("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID),
            "min_tokens": integer("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID),
            "length_penalty": number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
            "num_return": optional_integer("num_return", self.num_return, 1, MAX_WIDTH),
            "stop_token_ids": _stop_token_ids(self.stop_token_ids),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        early = self.early_stopping
        if not (isinstance(early, bool) or (isinstance(early, str) and early == "never")):
            refuse("early_stopping", self.early_stopping, "True, False or 'never'")
        if not isinstance(self.ignore_eos, bool):
            refuse("ignore_eos", self.ignore_eos, "True or False")
        if self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        if self.num_return is not None and self.num_return > self.width:
            refuse("num_return", self.num_return, f"at most width, which is {self.width}")

    @property
    def num_branches(self) -> int:
        """How many continuations are followed at once."""
        return self.width

    @property
    def is_ranked(self) -> bool:
        """Which continuations are returned is known at the end alone."""
        return True

    def ending_token_ids(self, eos_token_ids: Set[int]) -> frozenset[int]:
        """The ids that end a beam, given the model's own."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))

    def check_against(self, vocab_size: int, *, has_text: bool = True, eos_token_ids: Set[int] = frozenset()) -> None:
        """InvalidRequest where a model whose logits are `vocab_size` wide cannot serve these parameters."""
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                refuse("stop_token_ids", token_id, f"ids in [0, {vocab_size})")
        num_going_on = vocab_size - len(self.ending_token_ids(eos_token_ids))
        if self.width > num_going_on:  # the prompt alone could not be continued in so many ways
            refuse("width", self.width, f"at most {num_going_on}, the number of token ids that end nothing")

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON holds it; `BeamParams(**params.to_dict()) == params`, through JSON too."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"stop_token_ids": list(plain["stop_token_ids"])}


@dataclass(frozen=True, kw_only=True)
class ScoreParams:
    """Nothing is generated: the log-probabilities of the prompt's tokens are wanted. Checked like `SamplingParams`."""

    start: int = 1  # of the tokens from here on; the first has nothing before it

    num_branches: ClassVar[int] = 1
    is_ranked: ClassVar[bool] = True  # nothing is told before the end
    max_tokens: ClassVar[int] = 1  # that are never fed, as a generation's last: the prompt is all that needs room

    def __new__(cls, *args: object, **given: object) -> Self:
        """Refuses unknown names, as `SamplingParams` does."""
        _refuse_unknown(given, [field.name for field in fields(cls)])
        return super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", integer("start", self.start, 1, MAX_TOKEN_ID))

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON holds it; `ScoreParams(**params.to_dict()) == params`, through JSON too."""
        return {"start": self.start}


Params = SamplingParams | BeamParams | ScoreParams


def params_from_dict(plain: Mapping[str, Any]) -> Params:
    """The parameters of which `to_dict` made this."""
    kinds: tuple[tuple[str, type[Params]], ...] = (("width", BeamParams), ("start", ScoreParams))
    return next((kind for name, kind in kinds if name in plain), SamplingParams)(**plain)


def _refuse_unknown(given: Collection[str], known: Sequence[str]) -> None:
    """InvalidRequest, with the nearest known names, for the first name that is not known."""
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name[:64], known) or known
            raise InvalidRequest(f"{reprlib.repr(name)}: no such field; known: {', '.join(close)}")


def _grammar(given: object) -> Grammar | None:
    if isinstance(given, Mapping):
        return Grammar.from_dict(given)
    if given is not None and not isinstance(given, Grammar):
        refuse("grammar", given, "None or a Grammar")
    return given


def _prefix(given: object) -> str:
    if not isinstance(given, str) or len(given) > MAX_PREFIX_CHARS or not is_unicode(given):
        refuse("prefix", given, f"a text of at most {MAX_PREFIX_CHARS} characters without lone surrogates")
    return given


def _bias_pairs(given: object) -> tuple[tuple[int, float], ...]:
    """A mapping, or pairs, as pairs sorted by id."""
    allowed = f"a mapping of at most {MAX_LOGIT_BIAS} token ids to numbers in [-100, 100]"
    if not isinstance(given, (Mapping, list, tuple)) or len(given) > MAX_LOGIT_BIAS:
        refuse("logit_bias", given, allowed)
    pairs = list(given.items()) if isinstance(given, Mapping) else list(given)
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        refuse("logit_bias", given, allowed)
    biases = {
        integer("logit_bias", token_id, 0, MAX_TOKEN_ID): number("logit_bias", bias, -100.0, 100.0)
        for token_id, bias in pairs
    }
    if len(biases) < len(pairs):
        refuse("logit_bias", given, "each token id once")
    return tuple(sorted(biases.items()))


def _stop_strings(given: object) -> tuple[str, ...]:
    """One string or several as a tuple."""
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, Sequence) or isinstance(strings, (bytes, bytearray)) or len(strings) > MAX_STOPS:
        refuse("stop", given, f"a string or a sequence of at most {MAX_STOPS}")
    for string in strings:
        if not (isinstance(string, str) and 0 < len(string) <= MAX_STOP_CHARS and is_unicode(string)):
            refuse("stop", string, f"strings of 1 to {MAX_STOP_CHARS} characters without lone surrogates")
    return tuple(strings)


def _stop_token_ids(given: object) -> tuple[int, ...]:
    """Ids as a sorted tuple, each once."""
    if not isinstance(given, (Sequence, Set)) or isinstance(given, (str, bytes, bytearray)):
        refuse("stop_token_ids", given, "a sequence of token ids")
    if len(given) > MAX_STOP_TOKEN_IDS:
        refuse("stop_token_ids", given, f"at most {MAX_STOP_TOKEN_IDS} ids")
    return tuple(sorted({integer("stop_token_ids", token_id, 0, MAX_TOKEN_ID) for token_id in given}))
