"""The arithmetic of a pool that is always full: how many sessions run at once, by each way to give out its slots.

Knows nothing of models or bytes: slots, pages and the lengths of requests alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .lengths import IntArray, Lengths
from .reservation import replay

FloatArray = npt.NDArray[np.float64]

_WATERMARK = 100  # an engine keeps this part of its pool, one page at least, for what runs to grow into


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to give out the pool. `sessions`, the requests that run at once, and the rest are averages over time.

    A session holds `session_pages` pages (of its own, where a prefix is shared). `live_share` is the part of all the
    pool's slots that holds tokens, those that sessions share counted once.
    """

    name: str
    sessions: float
    session_pages: float
    live_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Pages of a size, and what requests may ask of them."""

    num_pages: int
    page_size: int
    max_len: int
    shared_prefix: int = 0  # tokens before every prompt, which lengths do not count

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def fitting(self, lengths: Lengths) -> Lengths:
        """Those that `max_len` and the pool hold."""
        sizes = lengths.prompt + lengths.output + self.shared_prefix
        return lengths.where(sizes <= min(self.max_len, self.num_slots))

    def ways(self, lengths: Lengths) -> tuple[Way, ...]:
        """Maximum length, power of two, paging and, where there is a prefix, shared pages, for requests that fit.

        A request of p prompt tokens (prefix included) and o of output runs for o steps and holds p, p + 1, ...,
        p + o - 1 tokens in them, so what is met running is a request with a chance in proportion to o.
        """
        whole = Lengths(lengths.prompt + self.shared_prefix, lengths.output)
        live = _running_mean(whole, whole.prompt + (whole.output - 1) / 2)
        ways = [self._reserve_most(live), self._reserve_power(whole), self._page("paged", whole, live, 0)]
        if self.shared_prefix:
            ways.append(self._page("paged, prefix shared", whole, live, self.shared_prefix // self.page_size))
        return tuple(ways)

    def _reserve_most(self, live: float) -> Way:
        """Slots for the maximum length, whatever a request will need: what is done without pages."""
        return self._way(f"reserve {self.max_len:,} tokens", self.num_slots // self.max_len, self.max_len, live)

    def _reserve_power(self, whole: Lengths) -> Way:
        """Neighbouring slots for the prompt and the power of two that the output fits in, which an oracle foresees:
        Orca (Pow2) in Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023."""
        power = np.exp2(np.ceil(np.log2(whole.output))).astype(np.int64)
        sizes = np.minimum(whole.prompt + power, self.num_slots)
        sessions, live = replay(whole, sizes, self.num_slots)
        held = _running_mean(whole, sizes)
        return self._way("reserve a power of two", sessions, held, live / sessions)

    def _page(self, name: str, whole: Lengths, live: float, shared_pages: int) -> Way:
        """Pages as they are needed, admission as the engine does it; `shared_pages` are held once for all."""
        size, shared = self.page_size, shared_pages * self.page_size
        before, after = whole.prompt - 1, whole.prompt + whole.output - 1
        steps = int(whole.output.sum())
        held = float((_page_sum(after, size) - _page_sum(before, size)).sum()) / steps - shared
        opening = -(-whole.prompt // size) * size - shared
        watermark = max(1, self.num_pages // _WATERMARK) * size
        room = self.num_slots - shared - watermark - _left_free(opening)
        sessions = max(1.0, room / held)
        for _ in range(3):  # the oldest one's need falls with their number, slowly
            sessions = max(1.0, (room - _oldest_need(whole.output, sessions)) / held)
        return self._way(name, sessions, held, live, shared)

    def _way(self, name: str, sessions: float, held: float, live: float, shared: int = 0) -> Way:
        in_use = shared + sessions * (live - shared)
        return Way(
            name=name,
            sessions=float(sessions),
            session_pages=held / self.page_size,
            live_share=in_use / self.num_slots,
        )


def _running_mean(whole: Lengths, values: IntArray | FloatArray) -> float:
    """The mean over requests met running, so weighted by their steps."""
    return float(np.average(values, weights=whole.output))


def _left_free(sizes: IntArray | FloatArray) -> float:
    """Slots that stay free because the next request, of one of these sizes, does not fit: half of its size, and it is
    met in proportion to its size (the inspection paradox)."""
    mean = float(sizes.mean())
    return float(np.square(sizes, dtype=np.float64).mean()) / (2 * mean) if mean else 0.0


def _page_sum(length: IntArray, size: int) -> IntArray:
    """Slots of the pages for 1, 2, ..., `length` tokens, added up."""
    full, rest = length // size, length % size
    return size * (size * full * (full + 1) // 2 + rest * (full + 1))


def _oldest_need(output: IntArray, sessions: float) -> float:
    """Tokens that the oldest of `sessions` running requests has yet to generate, on average.

    With starts at random times, those older than a step count a are Poisson with mean g(a) = starts a step times
    E[max(0, output - a)]; so the oldest one's age has density -d(exp(-g)), and its mean rest is the sum of g exp(-g).
    """
    alive = 1 - np.cumsum(np.bincount(output))[:-1] / len(output)  # [a] share with an output longer than a
    older = np.cumsum(alive[::-1])[::-1] * (sessions / output.mean())
    return float((older * np.exp(-older)).sum())
