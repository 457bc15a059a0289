"""Draws of tokens from rows of logits: chance that depends on a key and a token id and on nothing else, and filters.

Knows nothing of requests or batches: whoever draws beside a sequence, and on which machine, changes nothing. What draws
here in numpy is the oracle of cpu/draw.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]
WordArray = npt.NDArray[np.uint64]

_MARGIN = 1e-4  # weights and sums in float32 are nearer than a third of it
_FEW = 512  # logits whose noise costs no more than looking for those that can win
_RARE_BITS = 7  # of 50,000 ids 400 have a first byte that begins with as many ones
_RARE = 256 - 2 ** (8 - _RARE_BITS)
# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class Draw(NamedTuple):
    """A choice by softmax(logits / temperature) among the ids that top_p and then min_p keep.

    A tuple because a step makes many: a frozen dataclass takes four times as long to make.
    """

    logits: Logits  # [n], at least one, contiguous; the largest is finite
    temperature: float = 0.0  # 0: the first of the largest
    top_p: float = 1.0
    min_p: float = 0.0
    key: int = 0  # of `draw_key`
    ids: IntArray | None = None  # [n] the tokens that these are logits of; None: 0..n


class Drawer(Protocol):
    """What draws, in any way of these."""

    def __call__(self, draws: Sequence[Draw]) -> list[int]:
        """The places in each one's logits, which are not changed. A draw depends on itself alone."""


def draw(draws: Sequence[Draw]) -> list[int]:
    """A Drawer in numpy. For n = 50,000 a greedy draw costs 20 us, others 0.1 ms, one after filters that leave little
    0.2 ms, that leave most of the vocabulary up to 0.7 ms.
    """
    return [_drawn(its) for its in draws]


def draw_key(seed: tuple[int, ...], path: tuple[int, ...], position: int) -> int:
    """128 bits; different arguments have different texts."""
    text = f"{_path_text(seed, path)}/{int(position)}"
    return int.from_bytes(blake2b(text.encode(), digest_size=16, person=b"radixrt.draw").digest(), "little")


@lru_cache(4096)
def _path_text(seed: tuple[int, ...], path: tuple[int, ...]) -> str:
    return "/".join(",".join(str(int(number)) for number in part) for part in (seed, path))


def _drawn(its: Draw) -> int:
    if its.temperature == 0:
        return int(its.logits.argmax())
    if its.top_p < 1 or its.min_p > 0:
        return _draw_from_top(its)
    return gumbel_argmax(its.logits, its.temperature, its.key, its.ids)


def _draw_from_top(its: Draw) -> int:
    """The place drawn from those that top_p (Holtzman et al., 2020) and then min_p keep.

    Nothing is sorted. What they keep outranks the rest, so an id drawn from more than that is, if they keep it, the
    one drawn from the kept alone. If not, the draw is repeated, with the same noise, among those that outrank it. In
    the mean that takes at most 1 - log(top_p) draws, from ever fewer ids.
    """
    logits, places, ids, peak = its.logits, None, its.ids, its.logits.max()
    # Float32 says what is far from a boundary. What is near one, or divided by something extreme, needs float64.
    rough = np.float32 if 1e-6 < its.temperature < 1e6 else np.float64
    weights = _weights(logits, peak, its.temperature, rough)
    total = float(weights.sum())
    floor = max(its.min_p, (1 - its.top_p) * total / len(logits))  # all below hold less than 1 - top_p together
    left = np.flatnonzero(weights >= floor * (1 - _MARGIN))
    narrowed = len(left) < len(logits) // 2  # else it costs more than it saves
    while True:
        if narrowed:
            logits, weights, places = logits[left], weights[left], left if places is None else places[left]
            ids = places if its.ids is None else its.ids[places]
        at = gumbel_argmax(logits, its.temperature, its.key, ids)
        ahead = logits > logits[at]
        ahead[:at] |= logits[:at] == logits[at]
        before, limit = float((weights * ahead).sum()), its.top_p * total
        if abs(before - limit) <= _MARGIN * limit:
            before = float(_weights(logits[ahead], peak, its.temperature, np.float64).sum())
            limit = its.top_p * float(_weights(its.logits, peak, its.temperature, np.float64).sum())
        [weight] = _weights(logits[at : at + 1], peak, its.temperature, np.float64)
        if before < limit and weight >= its.min_p:
            return at if places is None else int(places[at])
        left, narrowed = np.flatnonzero(ahead), True


def _weights(logits: Logits, peak: np.float32, temperature: float, dtype: type[np.floating]) -> npt.NDArray[Any]:
    """exp((logits - peak) / temperature), computed in `dtype`."""
    with np.errstate(over="ignore"):  # at tiny temperatures all but the best go to 0, as they should
        scores = np.subtract(logits, peak, dtype=dtype)
        scores /= temperature
    return np.exp(scores, out=scores)


def gumbel_noise(key: int, token_ids: IntArray) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise, finite, one number per id of `token_ids` (none negative).

    Adding it to log-probabilities and taking the largest draws from them (Gumbel, 1954). The noise of an id does not
    depend on the others asked for. The words behind it are the same on every machine, the logarithms to within their
    last bits.
    """
    return _gumbel(_words(key, token_ids, _first_bytes(key, token_ids)))


def gumbel_argmax(
    logits: Logits,  # [n], at least one; the largest is finite
    temperature: float,  # positive
    key: int,
    token_ids: IntArray | None = None,  # [n]; 0..n where none are given
) -> int:
    """The index at which `logits / temperature + gumbel_noise(...)`, in float64, is largest, the first of equals.

    The words and two logarithms for each would take 0.5 ms for n = 50,000, so few are scored, and it takes 0.08 ms. The
    noise -log(-log u) is at most -log(1 - u), because -log u >= 1 - u. So an id whose first byte does not begin with
    seven ones, 1 - u >= 2**-7, gets at most 7 log 2, and a logit that needs more than that to reach the best score of
    a sample is out. The first bytes of eight ids are one word.
    """
    top = int(logits.argmax())
    peak = float(logits[top])
    first = _first_bytes(key, len(logits) if token_ids is None else token_ids)

    def best_of(indices: IntArray) -> tuple[float, int]:
        words = _words(key, indices if token_ids is None else token_ids[indices], first[indices])
        scores = (logits[indices].astype(np.float64) - peak) / temperature + _gumbel(words)
        at = int(scores.argmax())
        return float(scores[at]), int(indices[at])

    with np.errstate(over="ignore"):  # to infinity: low scores at tiny temperatures, thresholds at huge ones
        if len(logits) <= _FEW:
            return best_of(np.arange(len(logits)))[1]
        some = np.arange(0, len(logits), len(logits) // _FEW)  # the best score of these and the top is not far below
        some[0] = top
        score, _ = best_of(some)
        enough = np.float32(peak + temperature * (score - _RARE_BITS * math.log(2) - 1e-6))
        able = logits >= np.nextafter(enough, np.float32(-np.inf))
        able |= first >= _RARE
        return best_of(np.flatnonzero(able))[1]


def _gumbel(words: WordArray) -> npt.NDArray[np.float64]:
    # Midpoints of 2**52 equal parts of (0, 1): never 0 or 1, so the noise lies within (-3.7, 36.8).
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _words(key: int, token_ids: IntArray, first: npt.NDArray[np.uint8]) -> WordArray:
    """A 64-bit word for each id: its first byte, which is given, and the rest from a word of its own."""
    rest = _mixed(key, token_ids.astype(np.uint64) * _STEP) >> np.uint64(8)
    return first.astype(np.uint64) << np.uint64(56) | rest


def _first_bytes(key: int, token_ids: IntArray | int) -> npt.NDArray[np.uint8]:
    """Of the words of these ids, or of so many from 0 on. One word has those of eight ids, 8j to 8j + 7."""
    if isinstance(token_ids, int):
        words = _mixed(key, _steps_back(-(-token_ids // 8)))
        return words.astype("<u8", copy=False).view(np.uint8)[:token_ids]
    ids = token_ids.astype(np.uint64)
    words = _mixed(key, ~(ids >> np.uint64(3)) * _STEP)
    return (words >> ((ids & np.uint64(7)) << np.uint64(3))).astype(np.uint8)


@lru_cache(8)
def _steps_back(count: int) -> WordArray:
    """The steps of -1, -2, ...: ids are not negative, so no id's word is one of these."""
    steps = ~np.arange(count, dtype=np.uint64) * _STEP
    steps.flags.writeable = False
    return steps


def _mixed(key: int, steps: WordArray) -> WordArray:
    """SplitMix64's words at these steps, with half of the key before it and half in its middle."""
    words = steps + np.uint64(key >> 64)
    shifted = words >> _SHIFTS[0]
    words ^= shifted
    words *= _FACTORS[0]
    words ^= np.uint64(key % 2**64)
    words ^= np.right_shift(words, _SHIFTS[1], out=shifted)
    words *= _FACTORS[1]
    words ^= np.right_shift(words, _SHIFTS[2], out=shifted)
    return words
