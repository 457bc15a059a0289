"""Where chance comes from: Gumbel noise that depends on (seed, path, position, token id) and on nothing else.

Knows nothing of requests or batches: whoever draws beside a sequence, and on which machine, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
WordArray = npt.NDArray[np.uint64]

_FEW = 512  # logits whose noise costs no more than looking for those that can win
_RARE_BITS = 7  # of 50,000 ids 400 have a first byte that begins with as many ones
_RARE = 256 - 2 ** (8 - _RARE_BITS)
# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def gumbel_noise(seed: Sequence[int], path: Sequence[int], position: int, token_ids: IntArray) -> FloatArray:
    """Standard Gumbel noise, finite, one number per id of `token_ids` (none negative).

    Adding it to log-probabilities and taking the largest draws from them (Gumbel, 1954). The noise of an id does not
    depend on the others asked for. The words behind it are the same on every machine, the logarithms to within their
    last bits.
    """
    key = _key(seed, path, position)
    return _gumbel(_words(key, token_ids, _first_bytes(key, token_ids)))


def gumbel_argmax(
    logits: npt.NDArray[np.float32],  # [n], at least one; the largest is finite
    temperature: float,  # positive
    seed: Sequence[int],
    path: Sequence[int],
    position: int,
    token_ids: IntArray | None = None,  # [n]; 0..n where none are given
) -> int:
    """The index at which `logits / temperature + gumbel_noise(...)`, in float64, is largest, the first of equals.

    The words and two logarithms for each would take 0.5 ms for n = 50,000, so few are scored, and it takes 0.08 ms. The
    noise -log(-log u) is at most -log(1 - u), because -log u >= 1 - u. So an id whose first byte does not begin with
    seven ones, 1 - u >= 2**-7, gets at most 7 log 2, and a logit that needs more than that to reach the best score of
    a sample is out. The first bytes of eight ids are one word.
    """
    key, top = _key(seed, path, position), int(logits.argmax())
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


def _gumbel(words: WordArray) -> FloatArray:
    # Midpoints of 2**52 equal parts of (0, 1): never 0 or 1, so the noise lies within (-3.7, 36.8).
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: FloatArray = -np.log(-np.log(uniform))
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


def _key(seed: Sequence[int], path: Sequence[int], position: int) -> int:
    """128 bits; different arguments have different texts."""
    text = "/".join(",".join(str(int(number)) for number in part) for part in (seed, path, (position,)))
    return int.from_bytes(blake2b(text.encode(), digest_size=16, person=b"radixrt.draw").digest(), "little")
