"""Where chance comes from: Gumbel noise that depends on (seed, path, position, token id) and on nothing else.

Knows nothing of requests, logits or batches: whoever draws beside a sequence, and on which machine, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


FloatArray = npt.NDArray[np.float64]

_FEW = 1024  # scores that cost no more than looking for those that can win
_SLACK = 1 - 1e-5  # the bound below is computed in float32


def gumbel_noise(seed: Sequence[int], path: Sequence[int], position: int, token_ids: IntArray) -> FloatArray:
    """Standard Gumbel noise, finite, one number per id of `token_ids` (none negative).

    Adding it to log-probabilities and taking the largest draws from them (Gumbel, 1954). The noise of an id does not
    depend on the others asked for. The words behind it are the same on every machine, the logarithms to within their
    last bits.
    """
    return _gumbel(_words(_key(seed, path, position), token_ids))


def gumbel_argmax(
    scores: FloatArray,  # [n] log-probabilities up to a constant, the largest of them 0
    seed: Sequence[int],
    path: Sequence[int],
    position: int,
    token_ids: IntArray,  # [n]
) -> int:
    """The index at which `scores + gumbel_noise(...)` is largest, the first of equals.

    Two logarithms for each id would be most of what a draw from a whole vocabulary costs. As -log u >= 1 - u, the
    noise is at most -log(1 - u): where even that does not reach what the best score got, the noise is not needed.
    """
    words = _words(_key(seed, path, position), token_ids)
    if len(scores) <= _FEW:
        return int(np.argmax(scores + _gumbel(words)))
    best = int(scores.argmax())
    reached = np.exp(scores[best] + _gumbel(words[best : best + 1]))
    beyond = (~words >> np.uint64(32)).astype(np.float32)  # (1 - u) * 2**32, rounded down
    with np.errstate(over="ignore"):  # a score of -inf, or nearly
        weights = np.exp(scores.astype(np.float32))
    able = np.flatnonzero(weights >= beyond * np.float32(reached * _SLACK * 2.0**-32))
    return int(able[np.argmax(scores[able] + _gumbel(words[able]))])


def _gumbel(words: npt.NDArray[np.uint64]) -> FloatArray:
    # Midpoints of 2**52 equal parts of (0, 1): never 0 or 1, so the noise lies within (-3.7, 36.8).
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: FloatArray = -np.log(-np.log(uniform))
    return noise


def _words(key: int, token_ids: IntArray) -> npt.NDArray[np.uint64]:
    """A 64-bit word for each id: SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), half of the key in its middle."""
    words = token_ids.astype(np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words += np.uint64(key >> 64)
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= np.uint64(key & (2**64 - 1))
    words ^= np.right_shift(words, np.uint64(27), out=shifted)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= np.right_shift(words, np.uint64(31), out=shifted)
    return words


def _key(seed: Sequence[int], path: Sequence[int], position: int) -> int:
    """128 bits; different arguments have different texts."""
    text = "/".join(",".join(str(int(number)) for number in part) for part in (seed, path, (position,)))
    return int.from_bytes(blake2b(text.encode(), digest_size=16, person=b"radixrt.draw").digest(), "little")
