"""Runs a planned step on the model: page copies, then the forward pass, and back out where either fails.

Knows nothing of queues, sampling or events.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from radixrt.kernels.plan import IntArray
from radixrt.radix import RadixCache

from .logprobs import LogprobStore
from .model import Forward, Model
from .plan import StepPlan


class Runner:
    """The model, its pool allocated, and the cache that owns its pages. With `poison`, dead content ruins readers.

    What the store holds beside the pages changes with their content.
    """

    def __init__(self, model: Model, cache: RadixCache, store: LogprobStore, *, poison: bool) -> None:
        self._model = model
        self._store = store
        self._poison = poison
        self.start_over(cache)

    def start_over(self, cache: RadixCache) -> None:
        """Serve a fresh cache over the same pool."""
        self._cache = cache
        self.forget(np.arange(cache.num_pages + cache.num_host_pages + 1))

    def run(self, plan: StepPlan) -> Forward:
        """Run a step: the page copies, all in one call, then the forward pass."""
        copies = [copy for entry in plan.entries for copy in entry.write.copies]
        if copies:
            self._model.copy_pages(_ids(c.src for c in copies), _ids(c.dst for c in copies))
            if self._poison:
                size = self._cache.page_size
                tails = [np.arange(c.dst * size + c.num_tokens, (c.dst + 1) * size) for c in copies]
                self._model.poison_slots(np.concatenate(tails))
            self._store.copy(copies)
        self._release_copies(plan)
        batch = plan.batch()
        self._store.unset(batch.write_slots)
        return self._model.forward(batch)

    def withdraw(self, plan: StepPlan) -> None:
        """Take back the rows of a step that failed; a page whose copy may be missing goes with them."""
        self._release_copies(plan)
        for entry in plan.entries:
            kept = entry.start if not entry.write.copies else entry.start - entry.start % self._cache.page_size
            self._cache.truncate(entry.table, kept)

    def forget(self, page_ids: npt.NDArray[np.integer]) -> None:
        """The content of these pages is dead."""
        self._store.forget(page_ids)
        if self._poison:
            size = self._cache.page_size
            self._model.poison_slots((page_ids[:, None] * size + np.arange(size)).ravel())

    def _release_copies(self, plan: StepPlan) -> None:
        """What the plan's copies hold is given back, once."""
        if not plan.copies_released:
            plan.copies_released = True
            for entry in plan.entries:
                self._cache.copies_done(entry.write)


def _ids(pages: Iterable[int]) -> IntArray:
    return np.fromiter(pages, dtype=np.int64)
