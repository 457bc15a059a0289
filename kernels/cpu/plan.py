"""Which rows read which slots together: one step's attention, cut into dense jobs that all layers reuse.

Knows page tables and positions only: no keys, no values, no model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

# A job costs about 120 us a layer whatever its size: the time in which the CPU reads 2,000 tokens again (3 KV heads
# of 64, two threads). Sharing a read must save more than that, and padding a batch of tails may waste no more.
JOB_COST_TOKENS = 2048
MAX_BATCH_TOKENS = 16384  # bounds the gathered copy of a job that batches tails
MAX_MASK_ROWS = 1024  # bounds the mask of a windowed job


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """b groups of n rows; all rows of group i read the same L slots, `slots[i]`.

    If `causal`, row j reads only the first j + 1 of them; if `mask`, only those where it is 0 and not -inf.
    """

    rows: torch.Tensor  # [b, n] int64
    slots: torch.Tensor  # [b, L] int64
    causal: bool = False  # then b == 1 and n == L
    mask: torch.Tensor | None = None  # float32: [b, 1, 1, L] with n == 1, or [1, 1, n, L] with b == 1
    fresh: bool  # no earlier job holds any of these rows; otherwise an earlier one holds each


@dataclass(frozen=True, slots=True)
class _Segment:
    rows: range
    start: int  # position of the first row
    pages: torch.Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)

    @property
    def shareable(self) -> int:
        """Positions `[0, shareable)` are read by every row in full; of a chunk, only those before it."""
        return self.stop if len(self.rows) == 1 else self.start


class Plan:
    """The jobs of one step, over segments of rows at consecutive positions (arguments as in `reference.attend`).

    Runs of pages that several segments start with become one job for all their rows; what is left of each segment
    becomes a batched tail (one row) or a chunk. Making it costs O(pages), using it again in a layer nothing.
    """

    def __init__(
        self,
        row_indptr: torch.Tensor,  # [S + 1]
        page_indptr: torch.Tensor,  # [S + 1]
        page_ids: torch.Tensor,  # [page_indptr[-1]]
        starts: torch.Tensor,  # [S]
        *,
        page_size: int,
    ) -> None:
        self._page_size = page_size
        self._offsets = torch.arange(page_size)
        rows, pages = row_indptr.tolist(), page_indptr.tolist()
        self._segments = [
            _Segment(range(rows[i], rows[i + 1]), start, page_ids[pages[i] : pages[i + 1]])
            for i, start in enumerate(starts.tolist())
        ]
        self._jobs: dict[int | None, list[Job]] = {}
        self._scratch: dict[tuple[str, int, torch.dtype], torch.Tensor] = {}

    def jobs(self, window: int | None) -> list[Job]:
        """The jobs of a layer with this sliding window, in the order in which they must run."""
        if window is not None and window >= max((segment.stop for segment in self._segments), default=0):
            window = None
        if window not in self._jobs:
            self._jobs[window] = list(self._full() if window is None else self._windowed(window))
        return self._jobs[window]

    def scratch(self, name: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer `[largest b * L of any job so far, width]` to gather into: fresh memory in each layer faults."""
        tokens = max(job.slots.numel() for jobs in self._jobs.values() for job in jobs)
        buffer = self._scratch.get((name, width, dtype))
        if buffer is None or len(buffer) < tokens:
            buffer = self._scratch[name, width, dtype] = torch.empty(tokens, width, dtype=dtype)
        return buffer

    def _slots(self, segment: _Segment, start: int, stop: int) -> torch.Tensor:
        """Slots of positions `[start, stop)`."""
        first = start // self._page_size
        pages = segment.pages[first : -(-stop // self._page_size)]
        slots = (pages[:, None] * self._page_size + self._offsets).view(-1)
        return slots[start - first * self._page_size : stop - first * self._page_size]

    def _full(self) -> Iterator[Job]:
        done = [0] * len(self._segments)
        yield from self._shared(list(range(len(self._segments))), 0, 0, done)
        tails = []
        for segment, start in zip(self._segments, done, strict=True):
            if len(segment.rows) == 1:
                tails.append((segment, start))
                continue
            rows = torch.tensor([segment.rows])
            if start < segment.start:
                yield Job(rows=rows, slots=self._slots(segment, start, segment.start)[None], fresh=start == 0)
            own = self._slots(segment, segment.start, segment.stop)[None]
            yield Job(rows=rows, slots=own, causal=True, fresh=segment.start == 0)
        yield from self._tails([tail for tail in tails if tail[1] == 0], fresh=True)
        yield from self._tails([tail for tail in tails if 0 < tail[1] < tail[0].stop], fresh=False)

    def _shared(self, members: list[int], depth: int, start: int, done: list[int]) -> Iterator[Job]:
        """Jobs for runs of pages that several of `members` share from page `depth` on.

        All members agree on pages `[0, depth)`, and earlier jobs cover their positions `[0, start)`. Sets `done[i]`
        to how far the jobs reach for segment i.
        """
        branches: dict[int, list[int]] = {}
        for i in members:
            if self._segments[i].shareable // self._page_size > depth:
                branches.setdefault(int(self._segments[i].pages[depth]), []).append(i)
        for branch in branches.values():
            if len(branch) == 1:
                continue
            limit = min(self._segments[i].shareable // self._page_size for i in branch)
            pages = torch.stack([self._segments[i].pages[depth:limit] for i in branch])
            agreed = depth + int((pages == pages[0]).all(dim=0).cumprod(dim=0).sum())
            stop = agreed * self._page_size
            covered = start
            if (stop - start) * (len(branch) - 1) >= JOB_COST_TOKENS:
                rows = torch.tensor([row for i in branch for row in self._segments[i].rows])[None]
                yield Job(rows=rows, slots=self._slots(self._segments[branch[0]], start, stop)[None], fresh=start == 0)
                covered = stop
                for i in branch:
                    done[i] = stop
            yield from self._shared(branch, agreed, covered, done)

    def _tails(self, tails: Iterable[tuple[_Segment, int]], *, fresh: bool) -> Iterator[Job]:
        """Single rows, each reading `[start, stop)` of its own: those of similar length run together."""
        batch: list[torch.Tensor] = []
        rows: list[int] = []
        padding = 0
        for segment, start in sorted(tails, key=lambda tail: tail[1] - tail[0].stop):
            slots = self._slots(segment, start, segment.stop)
            if batch:
                longest = len(batch[0])
                padding += longest - len(slots)
                if padding > JOB_COST_TOKENS or longest * (len(batch) + 1) > MAX_BATCH_TOKENS:
                    yield _tail_job(rows, batch, fresh=fresh)
                    batch, rows, padding = [], [], 0
            batch.append(slots)
            rows.append(segment.rows[0])
        if batch:
            yield _tail_job(rows, batch, fresh=fresh)

    def _windowed(self, window: int) -> Iterator[Job]:
        tails = []
        for segment in self._segments:
            if len(segment.rows) == 1:
                tails.append((segment, max(0, segment.stop - window)))
                continue
            for row in range(0, len(segment.rows), MAX_MASK_ROWS):
                rows = segment.rows[row : row + MAX_MASK_ROWS]
                first = segment.start + row
                low, stop = max(0, first - window + 1), first + len(rows)
                behind = torch.arange(first, stop)[:, None] - torch.arange(low, stop)
                mask = torch.zeros(behind.shape).masked_fill_((behind < 0) | (behind >= window), -torch.inf)
                slots = self._slots(segment, low, stop)[None]
                yield Job(rows=torch.tensor([rows]), slots=slots, mask=mask[None, None], fresh=True)
        yield from self._tails(tails, fresh=True)


def _tail_job(rows: list[int], batch: list[torch.Tensor], *, fresh: bool) -> Job:
    """One job over tails of falling length. Padding repeats a tail's own first slot: other memory may hold NaN."""
    longest = len(batch[0])
    slots = torch.stack([torch.cat([tail, tail[:1].expand(longest - len(tail))]) for tail in batch])
    mask = None
    if len(batch[-1]) < longest:
        lengths = torch.tensor([len(tail) for tail in batch])[:, None]
        mask = torch.zeros(slots.shape).masked_fill_(torch.arange(longest) >= lengths, -torch.inf)[:, None, None]
    return Job(rows=torch.tensor(rows)[:, None], slots=slots, mask=mask, fresh=fresh)
