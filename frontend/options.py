"""The options of a choice as token ids, and what log-probabilities say of them: named scores, and the draw.

Knows nothing of states or requests. Float64 throughout; ties go to the lowest index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from types import NoneType
from typing import Any, Literal, get_args

import numpy as np

from radixrt.runtime import InvalidRequest, checks

ScoreName = Literal["sum", "token_mean", "byte_mean", "greedy", "prefix_free", "pmi"]
MAX_OPTIONS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids, of which those from `start` on are to be scored."""

    tokens: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The option chosen, every score that was asked for or cost nothing, and the probabilities it was chosen by."""

    index: int
    scores: dict[ScoreName, tuple[float, ...]]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Texts that may follow a context, each encoded together with what of the context was not encoded yet.

    All are scored from the first token in which one of them differs from the context alone, so that one whose first
    letters change the context's last token is compared on the same ground.
    """

    score: ScoreName
    texts: tuple[str, ...]
    context: tuple[int, ...]  # ids that no option changes, as many as are certain before they are encoded
    ids: tuple[tuple[int, ...], ...]  # of the rest of the context and the option
    start: int  # into `context` and ids, of what is scored
    end_ids: tuple[int, ...]  # behind an option, for "prefix_free"
    bare: tuple[Prompt, ...]  # the options without the context, for "pmi"

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """What has to be scored: each option behind the context, for "pmi" then each without it."""
        return tuple(Prompt(tokens=self.context + ids + self.end_ids, start=self.start) for ids in self.ids) + self.bare

    def verdict(self, logprobs: Sequence[Sequence[float]], *, temperature: float, seed: int) -> Verdict:
        """Weigh the options by the log-probabilities of `prompts`; with a temperature, draw one.

        The draw is keyed by the seed, the number of tokens before the options, and the option's index.
        """
        n = len(self.ids)
        cut = len(self.end_ids)
        own = [tuple(found[: len(found) - cut]) for found in logprobs[:n]]
        sums = [math.fsum(one) for one in own]
        scores: dict[ScoreName, tuple[float, ...]] = {
            "sum": tuple(sums),
            "token_mean": tuple(total / len(one) for total, one in zip(sums, own, strict=True)),
            "byte_mean": tuple(total / len(text.encode()) for total, text in zip(sums, self.texts, strict=True)),
            "greedy": self._greedy(own),
        }
        if self.end_ids:
            scores["prefix_free"] = tuple(math.fsum(found) for found in logprobs[:n])
        if self.bare:
            scores["pmi"] = tuple(total - math.fsum(bare) for total, bare in zip(sums, logprobs[n:], strict=True))
        weights = np.array(scores[self.score])
        drawn = weights
        if temperature > 0:
            with np.errstate(over="ignore"):  # -inf is what is meant
                weights = (weights - weights.max()) / temperature
            drawn = weights + [_gumbel(seed, self.start, index) for index in range(n)]
        probs = np.exp(weights - weights.max())
        return Verdict(index=int(drawn.argmax()), scores=scores, probs=tuple((probs / probs.sum()).tolist()))

    def _greedy(self, own: list[tuple[float, ...]]) -> tuple[float, ...]:
        """Walk the trie of the options, at each node to the most probable of its tokens; 0 for where that ends.

        For another option, by how much its token was less probable (in log) where it left the walk. Where an option
        ends and others go on, it stands for every token that continues none of them.
        """
        tails = [ids[self.start - len(self.context) :] for ids in self.ids]
        left = list(range(len(tails)))
        scores = [0.0] * len(tails)
        depth = 0
        while len(left) > 1:
            ways: dict[int | None, float] = {}  # None: the option ends here
            for index in left:
                if depth < len(tails[index]):
                    ways[tails[index][depth]] = own[index][depth]
            ended = [index for index in left if depth == len(tails[index])]
            if ended and ways:
                ways[None] = math.log(max(1.0 - math.fsum(map(math.exp, ways.values())), math.ulp(0.0)))
            if not ways:  # options of the same tokens
                break
            steps = {index: None if index in ended else tails[index][depth] for index in left}
            best = max(ways.values())
            way = next(steps[index] for index in left if ways[steps[index]] == best)
            for index in left:
                if steps[index] != way:
                    scores[index] = ways[steps[index]] - best or -math.ulp(0.0)  # a tie that the lower index won
            left = [index for index in left if steps[index] == way]
            depth += 1
        return tuple(scores)


def options_of(
    options: Iterable[Any],
    *,
    context: tuple[int, ...],
    pending: str,
    encode: Callable[[str], list[int]],
    score: ScoreName,
    end: str | None,
    start_ids: tuple[int, ...],
    ending_ids: frozenset[int],
) -> Options:
    """These options behind `context` and the text `pending`. InvalidRequest where they cannot be weighed.

    `end` marks an option's end for "prefix_free"; without it the lowest of the `ending_ids` does. For "pmi" an option
    without its context stands behind `start_ids` or, where there are none, that token.
    """
    checks.instance("end", end, (str, NoneType), "a text")
    texts = tuple(map(text_of, options))
    if not 0 < len(texts) <= MAX_OPTIONS:
        raise InvalidRequest(f"options: {len(texts)} given; allowed: 1 to {MAX_OPTIONS}")
    if "" in texts:
        raise InvalidRequest(
            f"options: number {texts.index('') + 1} is empty; allowed: texts of at least one character"
        )
    for text in texts:
        checks.text("options", text)
    twice = next((text for at, text in enumerate(texts) if text in texts[:at]), None)
    if twice is not None:
        raise InvalidRequest(f"options: {twice!r} given twice; allowed: each once")
    if score not in get_args(ScoreName):
        checks.refuse("score", score, ", ".join(get_args(ScoreName)))
    if end is not None and score != "prefix_free":
        raise InvalidRequest(f'end: {end!r} given with score {score!r}; allowed: with "prefix_free", which it ends')
    before = encode(pending)
    ids = tuple(tuple(encode(pending + text)) for text in texts)
    start = len(context) + min(min(_agreement(before, one), len(one) - 1) for one in ids)
    if not start:
        raise InvalidRequest("options: no token comes before them; append text first that no option changes")
    last = tuple(sorted(ending_ids)[:1])
    end_ids = () if score != "prefix_free" else last if end is None else tuple(encode(end))
    bare_start = start_ids or last
    if score == "prefix_free" and not end_ids:
        raise InvalidRequest(
            "end: none given, and the model has no token that ends a text; give a text such as end='.'"
        )
    if score == "pmi" and not bare_start:
        raise InvalidRequest(
            'score: "pmi" given; this model has no token that starts or ends a text; use another score'
        )
    bare = tuple(Prompt(tokens=(*bare_start, *encode(text)), start=len(bare_start)) for text in texts)
    return Options(
        score=score,
        texts=texts,
        context=context,
        ids=ids,
        start=start,
        end_ids=end_ids,
        bare=bare if score == "pmi" else (),
    )


def text_of(option: Any) -> str:
    """An option as the model would write it: an Enum member by its value, anything else as `str` has it."""
    return str(option.value if isinstance(option, Enum) else option)


def number_of(option: Any) -> float:
    """What an option counts in a mean; TypeError or ValueError where it is no number."""
    return float(option.value if isinstance(option, Enum) else option)


def _agreement(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _gumbel(seed: int, position: int, index: int) -> float:
    """Gumbel noise, the same wherever and whenever it is drawn."""
    digest = blake2b(f"{seed}:{position}:{index}".encode(), digest_size=8, person=b"radixrt.choose").digest()
    uniform = (int.from_bytes(digest, "little") + 0.5) / 2**64
    return -math.log(-math.log(min(uniform, 1 - 2**-53)))
