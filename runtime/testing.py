"""A model without numerics for tests: `HashModel`, whose next token is a hash of what it reads through a step's plan.

Any wrong, stale or misplaced page becomes another token, in milliseconds and exactly. Knows nothing of scheduling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from radixrt.kernels import draws
from radixrt.kernels.draws import Drawer
from radixrt.kernels.plan import AttentionPlan, IntArray

from .batch import Batch
from .fences import Fence, Passed
from .logprobs import logprobs_of
from .model import Forward

_Words = npt.NDArray[np.uint64]
_POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


@dataclass(slots=True, kw_only=True)
class HashModel:
    """A `Model` of two layers. Slots of the first hold a hash of (token, position, namespace), those of the second a
    hash of everything their row read in the first: a page reused under a wrong parent is seen although its own tokens
    are right. Logits are a hash of everything read in the second.

    It reads as a kernel does, through an attention plan: a row whose nodes do not cover its positions exactly once
    yields another token, and the order in which they are merged does not matter. `planner` makes the plan of a batch
    at a page size; by default every run of pages that two segments share is one node. `before_forward` may raise, as
    a failing device would; `finite` marks rows (`[T]` bool) that came out as NaN. `copy_delay` makes copies to and from
    host memory late: it says of each how many times its fence is asked in vain, after which the copy runs, or None
    where that fails and leaves its destination ruined; it may raise, and the copy does not begin.
    """

    vocab: int = 1000
    context: int = 1 << 20
    eos: frozenset[int] = frozenset()
    planner: Callable[[Batch, int], AttentionPlan] | None = None
    before_forward: Callable[[Batch], None] | None = None
    finite: Callable[[Batch], npt.NDArray[np.bool_]] | None = None
    copy_delay: Callable[[], int | None] | None = None
    _layers: list[_Words] = field(default_factory=list)
    _host_layers: list[_Words] = field(default_factory=list)
    _page_size: int = 0
    _num_pages: int = 0

    @property
    def vocab_size(self) -> int:
        return self.vocab

    @property
    def context_len(self) -> int:
        return self.context

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.eos

    @property
    def spec(self) -> dict[str, Any]:
        return {"kind": "hash", "vocab": self.vocab, "context": self.context, "eos": sorted(self.eos)}

    def describe(self) -> dict[str, str]:
        return {"model": "hash model", "attention": "reads the whole path through the attention plan"}

    @property
    def draw(self) -> Drawer:
        return draws.draw

    def page_bytes(self, page_size: int) -> int:
        return 16 * page_size

    @property
    def copies_at_once(self) -> bool:
        return self.copy_delay is None

    def allocate(self, num_pages: int, page_size: int, num_host_pages: int = 0) -> None:
        self._page_size, self._num_pages = page_size, num_pages
        self._layers = [np.full((num_pages + 1) * page_size, _POISON) for _ in range(2)]
        self._host_layers = [np.full((num_host_pages + 1) * page_size, _POISON) for _ in range(2)]

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        self._copy(self._layers, self._layers, src, dst)

    def copy_out(self, device_pages: IntArray, host_pages: IntArray) -> Fence:
        return self._begin_copy(self._layers, self._host_layers, device_pages, host_pages - self._num_pages)

    def copy_in(self, host_pages: IntArray, device_pages: IntArray) -> Fence:
        return self._begin_copy(self._host_layers, self._layers, host_pages - self._num_pages, device_pages)

    def poison_slots(self, slots: IntArray) -> None:
        stop = (self._num_pages + 1) * self._page_size
        for layer, host_layer in zip(self._layers, self._host_layers, strict=True):
            layer[slots[slots < stop]] = _POISON
            host_layer[slots[slots >= stop] - self._num_pages * self._page_size] = _POISON

    def _begin_copy(self, source: list[_Words], target: list[_Words], src: IntArray, dst: IntArray) -> Fence:
        if self.copy_delay is None:
            self._copy(source, target, src, dst)
            return Passed()
        return _LateCopy(
            self.copy_delay(), lambda: self._copy(source, target, src, dst), lambda: self._ruin(target, dst)
        )

    def _copy(self, source: list[_Words], target: list[_Words], src: IntArray, dst: IntArray) -> None:
        for ours, theirs in zip(source, target, strict=True):
            theirs.reshape(-1, self._page_size)[dst] = ours.reshape(-1, self._page_size)[src]

    def _ruin(self, target: list[_Words], dst: IntArray) -> None:
        for layer in target:
            layer.reshape(-1, self._page_size)[dst] = _POISON

    def forward(self, batch: Batch) -> Forward:
        if self.before_forward is not None:
            self.before_forward(batch)
        plan = self._plan(batch)
        values = np.empty(batch.num_rows, dtype=np.uint64)
        rows = batch.row_indptr.tolist()
        for namespace, first, stop in zip(batch.namespaces, rows, rows[1:], strict=False):
            salt = np.frombuffer(blake2b(namespace.encode(), digest_size=8).digest(), dtype=np.uint64)
            values[first:stop] = _mix(batch.token_ids[first:stop].astype(np.uint64) ^ salt)
        values = _mix(values + batch.positions.astype(np.uint64))
        for layer in self._layers:
            layer[batch.write_slots] = values[batch.write_rows]
            values = self._read(plan, layer)
        finite = self.finite(batch) if self.finite is not None else np.ones(batch.num_rows, dtype=np.bool_)
        logprobs = logprobs_of(
            lambda rows: torch.from_numpy(self._logits(values[rows])), batch.scored_rows, batch.scored_ids
        )
        return Forward(
            logits=torch.from_numpy(self._logits(values[batch.logit_rows])), finite=finite, logprobs=logprobs
        )

    def _plan(self, batch: Batch) -> AttentionPlan:
        if self.planner is not None:
            return self.planner(batch, self._page_size)
        return batch.plan(page_size=self._page_size, exact=False, sharing_cost=1)

    def _read(self, plan: AttentionPlan, layer: _Words) -> _Words:
        """For each row a hash of `layer` at the positions `[0, its own]`: a sum over them, so in any order."""
        totals = np.zeros(plan.num_rows, dtype=np.uint64)
        pages = layer.reshape(-1, plan.page_size)
        for start, page_ids, rows in plan.nodes():
            read = pages[page_ids].reshape(-1)
            words = _mix(read + _mix(np.arange(start, start + len(read), dtype=np.uint64)))
            sums = np.cumsum(words, dtype=np.uint64)
            totals[rows] += sums[np.minimum(plan.positions[rows] - start, len(read) - 1)]
        return _mix(totals)

    def _logits(self, values: _Words) -> npt.NDArray[np.float32]:
        """[R, vocab] in [0, 8), a hash of each value and the token id."""
        words = _mix(values[:, None] ^ _mix(np.arange(self.vocab, dtype=np.uint64))[None, :])
        return ((words >> np.uint64(40)) / np.float32(1 << 21)).astype(np.float32)


@dataclass(slots=True)
class _LateCopy:
    """A copy that runs, or ruins what it should write, when its fence has been asked often enough: late as can be."""

    delay: int | None
    run: Callable[[], None]
    ruin: Callable[[], None]
    passed: bool = False

    def done(self) -> bool:
        if self.delay is None:
            self.ruin()
            raise RuntimeError("a copy between device and host failed")
        if not self.passed and self.delay == 0:
            self.run()
            self.passed = True
        self.delay = max(0, self.delay - 1)
        return self.passed

    def wait(self) -> None:
        while not self.done():
            pass

    def seconds(self) -> float | None:
        return None


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """One token per UTF-8 byte: ids `[0, 256)`. Ids past that decode to nothing."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 and token_id not in self.eos_token_ids else b""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))


def _mix(words: _Words) -> _Words:
    """A bijective scrambling of 64-bit words: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))
