"""A step's attention cut into dense jobs for torch's own attention: which rows read which slots together.

Knows positions and page tables only: no keys, no values, no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..plan import AttentionPlan, IntArray

# A job costs about 120 us a layer whatever its size: the time in which the CPU reads 2,000 tokens again (3 KV heads
# of 64, two threads). Padding a batch of tails may waste no more.
JOB_COST_TOKENS = 2048
MAX_BATCH_TOKENS = 16384  # bounds the gathered copy of a job that batches tails
MAX_MASK_ROWS = 1024  # bounds the mask of a job


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """b groups of n rows, no row twice; all rows of group i read the same L slots, `slots[i]`.

    If `causal`, row j reads only the first j + 1 of them; if `mask`, only those where it is 0 and not -inf.
    """

    rows: torch.Tensor  # [b, n] int64
    slots: torch.Tensor  # [b, L] int64
    causal: bool = False  # then b == 1 and n == L
    mask: torch.Tensor | None = None  # float32: [b, 1, 1, L] with n == 1, or [1, 1, n, L] with b == 1


@dataclass(frozen=True, slots=True)
class _Tail:
    """A run of slots that one row reads alone; runs of a row that come later have another `turn`."""

    turn: int
    row: int
    slots: IntArray


def jobs(plan: AttentionPlan, window: int | None) -> Iterator[Job]:
    """The jobs of a layer with this sliding window, in any order: nodes of several rows, then tails, batched."""
    offsets = np.arange(plan.page_size)
    turns = [0] * plan.num_rows
    tails = []
    for start, pages, rows in plan.nodes():
        slots = (pages[:, None] * plan.page_size + offsets).reshape(-1)
        stop = plan.positions[rows] + 1 - start
        low = np.zeros_like(stop) if window is None else np.maximum(stop - window, 0)
        high = np.minimum(stop, len(slots))
        some = low < high
        if len(rows) > 1:
            yield from _shared(rows[some], slots, low[some], high[some])
        elif some[0]:
            tails.append(_Tail(turns[rows[0]], int(rows[0]), slots[low[0] : high[0]]))
            turns[rows[0]] += 1
    yield from _batched(sorted(tails, key=lambda tail: (tail.turn, -len(tail.slots))))


def _shared(rows: IntArray, slots: IntArray, low: IntArray, high: IntArray) -> Iterator[Job]:
    """Row `rows[i]` reads `slots[low[i]:high[i]]`."""
    if not len(rows):
        return
    first, own = int(low[0]), int(high[0]) - 1
    everyone = torch.from_numpy(rows)[None]
    if (low == first).all() and (high == own + 1).all():
        yield Job(rows=everyone, slots=torch.from_numpy(slots[first : own + 1])[None])
    elif (low == first).all() and (np.diff(high) == 1).all():
        if first < own:
            yield Job(rows=everyone, slots=torch.from_numpy(slots[first:own])[None])
        yield Job(rows=everyone, slots=torch.from_numpy(slots[own : high[-1]])[None], causal=True)
    else:
        for start in range(0, len(rows), MAX_MASK_ROWS):
            part = slice(start, start + MAX_MASK_ROWS)
            read = np.arange(low[part].min(), high[part].max())
            outside = (read < low[part, None]) | (read >= high[part, None])
            mask = torch.zeros(outside.shape).masked_fill_(torch.from_numpy(outside), -torch.inf)
            yield Job(rows=everyone[:, part], slots=torch.from_numpy(slots[read])[None], mask=mask[None, None])


def _batched(tails: list[_Tail]) -> Iterator[Job]:
    """Consecutive tails of one turn run together while that wastes and holds little."""
    start = padding = 0
    for i, tail in enumerate(tails):
        longest = len(tails[start].slots)
        padding += longest - len(tail.slots)
        full = padding > JOB_COST_TOKENS or longest * (i + 1 - start) > MAX_BATCH_TOKENS
        if i > start and (full or tail.turn != tails[start].turn):
            yield _tail_job(tails[start:i])
            start, padding = i, 0
    if tails:
        yield _tail_job(tails[start:])


def _tail_job(tails: list[_Tail]) -> Job:
    """One job over tails of falling length. Padding repeats a tail's own first slot: other memory may hold NaN."""
    lengths = np.array([len(tail.slots) for tail in tails])
    slots = np.repeat([tail.slots[:1] for tail in tails], lengths[0], axis=1)
    outside = np.arange(lengths[0]) >= lengths[:, None]
    slots[~outside] = np.concatenate([tail.slots for tail in tails])
    mask = None
    if outside.any():
        mask = torch.zeros(outside.shape).masked_fill_(torch.from_numpy(outside), -torch.inf)[:, None, None]
    rows = torch.tensor([[tail.row] for tail in tails])
    return Job(rows=rows, slots=torch.from_numpy(slots), mask=mask)
