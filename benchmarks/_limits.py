"""What the machine gives at best, measured: bytes read from memory per second, and flops of a product per dtype.

Knows nothing of attention or of models. A share of the limit is the least time that these allow over the time taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_SIDE = 1024  # of the square matrices: 2 GFLOP a product


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Rates of one moment, on as many threads as torch has, in seconds of the clock they were measured by."""

    bandwidth: float  # bytes a second, read in a stream from memory
    gemm: float  # flops a second of torch.mm in the dtype measured

    def seconds(self, *, num_bytes: float, flops: float) -> float:
        """The least time for reading so much and computing so much: the larger of the two."""
        return max(num_bytes / self.bandwidth, flops / self.gemm)

    def __str__(self) -> str:
        return f"{self.bandwidth / 1e9:.1f} GB/s, {self.gemm / 1e9:.0f} GFLOP/s"


class Machine:
    """Measures `Limits` again and again, over memory that it makes once: twice the last-level cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.cache_bytes = _last_level_cache()
        self._stream = torch.ones(max(2 * self.cache_bytes, 1 << 27) // (4 * _SIDE), _SIDE)
        self._vector = torch.ones(_SIDE)

    def limits(self, dtype: torch.dtype, shape: tuple[int, int, int] = (_SIDE, _SIDE, _SIDE)) -> Limits:
        """The best of a few tries each, since a neighbour can only slow them down. Takes about a second.

        The product is of m x k by k x n for shape (m, n, k).
        """
        reads = (self._stream.sum, lambda: torch.mv(self._stream, self._vector))  # which is faster depends on the CPU
        m, n, k = shape
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        return Limits(
            bandwidth=self._stream.nbytes / min(self._best_of(5, read) for read in reads),
            gemm=2 * m * n * k / self._best_of(20, lambda: torch.mm(a, b)),
        )

    def _best_of(self, tries: int, run: Callable[[], object]) -> float:
        run()
        seconds = []
        for _ in range(tries):
            start = self._clock()
            run()
            seconds.append(self._clock() - start)
        return min(seconds)


def _last_level_cache() -> int:
    """Bytes of the largest cache that the first core sees; 32 MiB where the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) << 10 for size in sizes if size.endswith("K")), default=32 << 20)
