"""Where chance comes from: Gumbel noise that depends on (seed, path, position, token id) and on nothing else.

Knows nothing of requests, logits or batches: whoever draws beside a sequence, and on which machine, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


def gumbel_noise(
    seed: Sequence[int], path: Sequence[int], position: int, token_ids: IntArray
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise, finite, one number per id of `token_ids` (at least one, none negative).

    Adding it to log-probabilities and taking the largest draws from them (Gumbel, 1954). The noise of an id does not
    depend on the others asked for. Costs one word per id below the largest, about 0.5 ms for a vocabulary of 50,000;
    the words are the same on every machine, the logarithms to within their last bits.
    """
    generator = np.random.Philox(key=_key(seed, path, position))
    words = generator.random_raw(int(token_ids.max()) + 1)[token_ids]
    # Midpoints of 2**52 equal parts of (0, 1): never 0 or 1, so the noise lies within (-3.7, 36.8).
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _key(seed: Sequence[int], path: Sequence[int], position: int) -> int:
    """128 bits for a generator (Philox: Salmon et al., SC 2011); different arguments have different texts."""
    text = "/".join(",".join(str(int(number)) for number in part) for part in (seed, path, (position,)))
    return int.from_bytes(blake2b(text.encode(), digest_size=16, person=b"radixrt.draw").digest(), "little")
