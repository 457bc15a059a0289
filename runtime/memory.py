"""Memory of a model's weights, given back to the system while others still take their place.

Knows nothing of models: tensors that nobody will read again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re

import torch


class Memory:
    """Gives memory of replaced weights back to the system while the rest is still being replaced.

    Where weights are a mapped file, it stays mapped until its last tensor is gone, and its pages would count beside
    the packed copies. Where they are not, they lie in arenas of the threads that loaded them, which keep what is freed.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._files: list[tuple[int, int]] = []  # where files are mapped
        self._freed = 0
        if os.path.exists("/proc/self/maps"):  # Linux: elsewhere the system takes such pages when it needs them
            with open("/proc/self/maps") as maps:
                found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .* /", maps.read(), re.MULTILINE)
            self._files = [(int(low, 16), int(high, 16)) for low, high in found]

    def let_go(self, tensor: torch.Tensor) -> None:
        """The pages of `tensor` may be dropped: from a file they can be read again; others go with the next `trim`."""
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0 and any(low <= start and start + size <= high for low, high in self._files):
            self._libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
        self._freed += tensor.nbytes  # of a file's weight too: what was fused on the way was as large

    def trim(self, *, from_bytes: int) -> None:
        """Give back what is free, if it is worth the call (1 ms)."""
        if self._freed >= from_bytes and hasattr(self._libc, "malloc_trim"):  # glibc
            self._libc.malloc_trim(0)
            self._freed = 0
