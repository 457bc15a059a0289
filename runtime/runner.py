"""Runs a planned step on the model: page copies, then the forward pass, and back out where either fails.

Knows nothing of queues, sampling or events.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from radixrt.kernels.plan import IntArray
from radixrt.radix import RadixCache

from .batch import Batch
from .logprobs import LogprobStore
from .model import Forward, Model
from .plan import StepPlan


class Runner:
    """The model, its pool allocated, and the cache that owns its pages. With `poison`, dead content ruins readers.

    What the store holds beside the pages changes with their content.
    """

    def __init__(self, model: Model, cache: RadixCache, store: LogprobStore, *, poison: bool) -> None:
        """What was in the pool before is dead."""
        self._model = model
        self._cache = cache
        self._store = store
        self._poison = poison
        self.forget(np.arange(cache.num_pages + cache.num_host_pages + 1))

    def prepare(self, plan: StepPlan) -> Batch:
        """What the model is to run, once what lies beside the pages follows what will be in them."""
        batch = plan.batch()
        self._store.copy(plan.copies)
        self._store.unset(batch.write_slots)
        return batch

    def run(self, plan: StepPlan, batch: Batch) -> Forward:
        """The page copies, all in one call, then the forward pass: what pages hold changes, and nothing else."""
        copies = plan.copies
        if copies:
            self._model.copy_pages(_ids(c.src for c in copies), _ids(c.dst for c in copies))
            if self._poison:
                size = self._cache.page_size
                tails = [np.arange(c.dst * size + c.num_tokens, (c.dst + 1) * size) for c in copies]
                self._model.poison_slots(np.concatenate(tails))
        return self._model.forward(batch)

    def finish(self, plan: StepPlan) -> None:
        """A step ran well: what its copies held is given back."""
        for entry in plan.entries:
            if entry.write.copies:
                self._cache.copies_done(entry.write)

    def withdraw(self, plan: StepPlan) -> None:
        """Take back the rows of a step that failed; a page whose copy may be missing goes with them."""
        self.finish(plan)
        for entry in plan.entries:
            kept = entry.start if not entry.write.copies else entry.start - entry.start % self._cache.page_size
            self._cache.truncate(entry.table, kept)

    def forget(self, page_ids: npt.NDArray[np.integer]) -> None:
        """The content of these pages is dead."""
        self._store.forget(page_ids)
        if self._poison:
            size = self._cache.page_size
            self._model.poison_slots((page_ids[:, None] * size + np.arange(size)).ravel())


def _ids(pages: Iterable[int]) -> IntArray:
    return np.fromiter(pages, dtype=np.int64)
