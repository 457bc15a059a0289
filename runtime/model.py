"""The seam between the engine and whatever computes: what a model promises. Knows nothing of requests or caching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from radixrt.kernels.draws import Drawer
from radixrt.kernels.plan import IntArray

from .batch import Batch
from .fences import Fence


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What one forward pass gives back: logits of the rows asked for, and which rows stayed finite."""

    logits: torch.Tensor  # [R, vocab_size] float32, row i for batch.logit_rows[i]
    finite: npt.NDArray[np.bool_]  # [T] the row's last hidden state (and logits, where asked for) hold no NaN or inf
    logprobs: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))  # [Q] of batch.scored_rows, raw


class Model(Protocol):
    """A causal language model over a paged KV pool of its own. Page 0 is the padding sink and never read.

    Pages `1..num_pages` lie on the device. The `num_host_pages` after them lie in host memory: no row reads or writes
    those.
    """

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

    @property
    def draw(self) -> Drawer:
        """What draws tokens from its logits."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of KV that one page of `page_size` tokens takes over all layers."""

    @property
    def copies_at_once(self) -> bool:
        """Whether `copy_out` and `copy_in` have copied when they return."""

    def allocate(self, num_pages: int, page_size: int, num_host_pages: int = 0) -> None:
        """Make the KV pool, page 0 included, in place of that of an earlier engine, which must be closed.

        MemoryError where the machine cannot give so much.
        """

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Copy whole pages, all layers: `dst[i]` becomes equal to `src[i]`. No page is in both lists."""

    def copy_out(self, device_pages: IntArray, host_pages: IntArray) -> Fence:
        """Begin to copy whole pages, all layers, from the device to host memory, behind all that was begun before.

        The pages are left alone until the fence has passed. Raises, with nothing begun, where it cannot be.
        """

    def copy_in(self, host_pages: IntArray, device_pages: IntArray) -> Fence:
        """As `copy_out`, from host memory to the device."""

    def poison_slots(self, slots: IntArray) -> None:
        """Fill these slots, of either memory, with values that ruin any result that reads them.

        For tests: `Engine(poison=True)`.
        """

    def forward(self, batch: Batch) -> Forward:
        """Write the rows' KV and return their logits. Raises on failure; the pool's other slots are untouched."""
