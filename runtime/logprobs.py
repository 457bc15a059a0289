"""Log-probabilities: of the token in each slot of the KV pool, and how a model finds those of a step's rows.

Knows nothing of requests, or of who owns a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch

from radixrt.kernels.plan import IntArray
from radixrt.radix import PageCopy, require

FloatArray = npt.NDArray[np.float64]

_ROWS = 64  # whose logits are in memory at once: 50 MB for a vocabulary of 50,000


class LogprobStore:
    """`log p(token in the slot | the tokens before it)` for the slots of both memories; NaN: not known.

    Float64, 8 bytes beside the kilobytes of a token's KV, so that what is read back is what was computed, to the bit:
    in float32 a log-probability below -32 would be off by more than 1e-6. Content moves with its page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """`num_pages` of both memories, without page 0."""
        self._values = np.full((num_pages + 1, page_size), np.nan)

    def read(self, page_ids: npt.NDArray[np.integer], stop: int) -> FloatArray:
        """What is known of the first `stop` tokens in these pages, a copy."""
        found: FloatArray = self._values[page_ids].reshape(-1)[:stop]
        return found

    def note(self, page_ids: npt.NDArray[np.integer], start: int, logprobs: FloatArray) -> None:
        """The tokens from `start` on have these, in the pages of one sequence. What is known already stays."""
        size = self._values.shape[1]
        positions = np.arange(start, start + len(logprobs))
        slots = page_ids[positions // size].astype(np.int64) * size + positions % size
        values = self._values.reshape(-1)
        values[slots] = np.where(np.isnan(values[slots]), logprobs, values[slots])

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """These copies of pages run."""
        for copy in copies:
            self._values[copy.dst, : copy.num_tokens] = self._values[copy.src, : copy.num_tokens]

    def unset(self, slots: IntArray) -> None:
        """Other tokens come into these slots."""
        self._values.reshape(-1)[slots] = np.nan

    def forget(self, page_ids: npt.NDArray[np.integer]) -> None:
        """The content of these pages is dead."""
        self._values[page_ids] = np.nan

    def check(self, free: npt.NDArray[np.bool_]) -> None:
        """Nothing is known of pages that are free (`[page]`), or of the padding."""
        require(bool(np.isnan(self._values[free]).all()), "a free page has log-probabilities")
        require(bool(np.isnan(self._values[0]).all()), "the padding page has log-probabilities")


def logprobs_of(logits_of: Callable[[IntArray], torch.Tensor], rows: IntArray, token_ids: IntArray) -> FloatArray:
    """The log-probability of each (row, token id), in float64; NaN where the row's logits hold NaN or infinity.

    `logits_of(rows)` gives `[R, V]` in any dtype; `rows` ascend and may repeat. Few rows are asked for at a time. Each
    row is a sum of its own, in an order that no neighbour changes.
    """
    distinct, index = np.unique(rows, return_inverse=True)
    found = np.empty(len(rows), np.float64)
    for first in range(0, len(distinct), _ROWS):
        chunk = distinct[first : first + _ROWS]
        logprobs = torch.log_softmax(logits_of(chunk).double(), dim=-1)
        asked = slice(*np.searchsorted(index, [first, first + len(chunk)]))
        where = (torch.from_numpy(of[asked]).to(logprobs.device) for of in (index - first, token_ids))
        found[asked] = logprobs[tuple(where)].numpy(force=True)
    return found
