"""The seam between the engine and whatever computes: what a model promises. Knows nothing of requests or caching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from radixrt.kernels.plan import IntArray

from .batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one forward pass gives back: logits of the rows asked for, and which rows stayed finite."""

    logits: torch.Tensor  # [R, vocab_size] float32, row i for batch.logit_rows[i]
    finite: npt.NDArray[np.bool_]  # [T] the row's last hidden state (and logits, where asked for) hold no NaN or inf


class Model(Protocol):
    """A causal language model over a paged KV pool of its own. Page 0 is the padding sink and never read."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids lie in `[0, vocab_size)`."""

    @property
    def context_len(self) -> int:
        """Most positions a sequence may have."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a sequence unless `ignore_eos`."""

    @property
    def spec(self) -> dict[str, Any]:
        """What a record says to build this model again: JSON values, `kind` among them."""

    def describe(self) -> dict[str, str]:
        """Facts for people: name, geometry, which attention runs and why."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of KV that one page of `page_size` tokens takes over all layers."""

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the KV pool, pages `0..num_pages`, in place of that of an earlier engine, which must be closed.

        MemoryError where the machine cannot give so much.
        """

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Copy whole pages, all layers: `dst[i]` becomes equal to `src[i]`. No page is in both lists."""

    def poison_slots(self, slots: IntArray) -> None:
        """Fill these slots with values that ruin any result that reads them. For tests: `Engine(poison=True)`."""

    def forward(self, batch: Batch) -> Forward:
        """Write the rows' KV and return their logits. Raises on failure; the pool's other slots are untouched."""
