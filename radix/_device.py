"""The simulated device: a KV memory in which each slot holds the path of its token, copies and writes that run late.

Does not know the cache: pages come and go by its calls, and reading back what was written is the caller's check.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .values import PageCopy, WritePlan

POISON = 0


class Device:
    """Memory `int64[num_pages + 1, page_size]`, host pages included.

    Plans are `planned` until their copies ran, then `unconfirmed`. `swaps` are copies between device and host, which
    run when they end: as late as can be.
    """

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.swaps: list[PageCopy] = []
        self.planned: list[WritePlan] = []
        self.unconfirmed: list[WritePlan] = []
        self._memory = np.full((num_pages + 1, page_size), POISON, dtype=np.int64)

    def settled(self) -> NDArray[np.int64]:
        """The memory as it is once the planned copies have run; not to be written."""
        if not self.planned:
            return self._memory
        memory = self._memory.copy()
        self._copy(memory)
        return memory

    def run_copies(self) -> None:
        """Do the planned copies in the order of their planning; they stay unconfirmed."""
        self._copy(self._memory)
        self.unconfirmed += self.planned
        self.planned = []

    def end_swaps(self, copies: Sequence[PageCopy], *, failed: bool) -> None:
        """Run some of the swaps, or ruin their destinations, and forget them."""
        for copy in copies:
            self.swaps.remove(copy)
            self._memory[copy.dst] = POISON if failed else self._memory[copy.src]

    def write(self, page_ids: Sequence[int], start: int, paths: NDArray[np.int64]) -> None:
        """Write `paths` at positions [start, start + len(paths)) of a sequence that has `page_ids`."""
        positions = np.arange(start, start + len(paths))
        pages = np.asarray(page_ids, dtype=np.int64)
        self._memory[pages[positions // self.page_size], positions % self.page_size] = paths

    def poison(self, page_ids: Iterable[int]) -> None:
        """Make what freed pages hold unreadable."""
        self._memory[list(page_ids)] = POISON

    def is_poisoned(self, page_ids: NDArray[np.intp]) -> bool:
        """Whether nothing readable is left in these pages."""
        return bool((self._memory[page_ids] == POISON).all())

    def copies(self) -> list[PageCopy]:
        """The copies between pages of the device that are not confirmed, run or not."""
        return [copy for plan in (*self.unconfirmed, *self.planned) for copy in plan.copies]

    def named(self) -> set[int]:
        """The pages that an unfinished copy names."""
        return {page for copy in (*self.copies(), *self.swaps) for page in (copy.src, copy.dst)}

    def _copy(self, memory: NDArray[np.int64]) -> None:
        for plan in self.planned:
            for copy in plan.copies:
                memory[copy.dst, : copy.num_tokens] = memory[copy.src, : copy.num_tokens]
