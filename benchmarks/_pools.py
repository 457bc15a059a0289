"""Every way to attend that benchmarks/attention.py compares, each over KV of its own that no cache still holds.

Knows shapes and plans, not goals: a `Way` runs a step's attention once in each of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from radixrt.kernels.backend import AttentionBackend, LayerShape
from radixrt.kernels.plan import AttentionPlan, IntArray, build_plan

PAGE_SIZE = 16
NEVER = 1 << 40  # as a sharing cost: every sequence reads by itself
_CPU = torch.device("cpu")
_RNG = np.random.default_rng(0)
_NOISE = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`batch` sequences that each hold `prefix` cached positions and compute `own_rows` more.

    In a decode step a sequence holds `tail` positions of its own after those that all share, the new one included.
    """

    shape: Shape
    dtype: torch.dtype
    batch: int
    prefix: int
    tail: int
    own_rows: int = 1

    @property
    def length(self) -> int:
        return self.prefix + self.tail

    @property
    def num_rows(self) -> int:
        return self.batch * self.own_rows

    def kv_bytes(self, *, shared: bool) -> int:
        """Bytes of one layer's keys and values, the prefix once or for each sequence."""
        positions = self.batch * self.tail + self.prefix * (1 if shared else self.batch)
        return 2 * positions * self.shape.num_kv_heads * self.shape.dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Of one layer: two products, each a multiplication and an addition for every element a row reads."""
        read = sum(self.length - self.own_rows + 1 + row for row in range(self.own_rows))
        return 4 * self.batch * read * self.shape.num_heads * self.shape.dim

    def rows(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q `[T, H, D]`, k and v `[T, Hkv, D]`, as the views of one fused projection that a model hands over."""
        shape = self.shape
        heads = shape.num_heads + 2 * shape.num_kv_heads
        fused = noise((self.num_rows, heads, shape.dim), self.dtype)
        return fused.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)  # type: ignore[return-value]

    def tables(self, *, shared: bool, in_order: bool = False) -> IntArray:
        """Page ids `[batch, pages]`; pages `1..max` in random order, or each sequence's one after the other."""
        num_prefix, num_own = self.prefix // PAGE_SIZE, -(-self.length // PAGE_SIZE) - self.prefix // PAGE_SIZE
        head = np.arange(num_prefix) + np.zeros((self.batch, 1), np.int64)
        own = num_prefix + np.arange(self.batch * num_own).reshape(self.batch, num_own)
        ids = np.concatenate([head, own], axis=1) if shared else np.arange(self.batch * (num_prefix + num_own))
        ids = ids.reshape(self.batch, -1) + 1
        return ids if in_order else _RNG.permutation(int(ids.max()))[ids - 1] + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to attend. `layers` are its KV, one by one; `run` attends in one of them, new keys and values written."""

    layers: list[Any]
    run: Callable[[Any], torch.Tensor]
    kv_bytes: int  # of one layer

    def run_all(self, _: object = None) -> None:
        for layer in self.layers:
            self.run(layer)


def noise(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of normal numbers, made by copying: what they are does not matter, that they are finite does."""
    made = torch.empty(size, dtype=dtype)
    fill(made)
    return made


def fill(tensor: torch.Tensor) -> None:
    for part in tensor.view(-1).split(len(_NOISE)):
        part.copy_(_NOISE[: len(part)])


def num_layers(kv_bytes: int, budget: int) -> int:
    """Layers to take turns, so that together they hold `budget` bytes; at least one."""
    return max(1, -(-budget // kv_bytes))


def plan_of(case: Case, tables: IntArray, *, sharing_cost: int, exact: bool = False) -> AttentionPlan:
    positions = np.tile(np.arange(case.length - case.own_rows, case.length), case.batch)
    return build_plan(
        positions,
        np.arange(case.batch + 1) * case.own_rows,
        np.arange(case.batch + 1) * tables.shape[1],
        tables.reshape(-1),
        page_size=PAGE_SIZE,
        exact=exact,
        sharing_cost=sharing_cost,
    )


def paged(backend: AttentionBackend, case: Case, budget: int, tables: IntArray, **planning: Any) -> Way:
    """A backend over a plan (arguments of `plan_of`), which is prepared once, as the layers of a step share it."""
    kv_bytes = case.kv_bytes(shared=tables.max() < tables.size)
    shape = LayerShape(case.shape.num_kv_heads, case.shape.dim, case.shape.dim)
    layers = [
        backend.allocate(int(tables.max()), PAGE_SIZE, shape, case.dtype, _CPU)
        for _ in range(num_layers(kv_bytes, budget))
    ]
    for kv in layers:
        fill(kv.k)
        fill(kv.v)
    plan = plan_of(case, tables, **planning)
    slots = _new_slots(case, tables)
    step = backend.prepare(plan, np.arange(case.num_rows), slots)
    q, k, v = case.rows()
    scale = case.shape.dim**-0.5
    return Way(layers=layers, run=lambda kv: backend.attend(q, k, v, kv, step, scale=scale), kv_bytes=kv_bytes)


def contiguous(case: Case, budget: int) -> Way:
    """Scaled dot product attention of torch, once for the batch, over caches `[B, Hkv, L, D]`.

    The query heads of a KV head are packed as rows of one product, which is up to 10 times as fast as `enable_gqa`.
    """
    shape, kv_bytes = case.shape, case.kv_bytes(shared=False)
    size = (case.batch, shape.num_kv_heads, case.length, shape.dim)
    layers = [[noise(size, case.dtype) for _ in "kv"] for _ in range(num_layers(kv_bytes, budget))]
    q, k, v = (part.unflatten(0, (case.batch, -1)).transpose(1, 2) for part in case.rows())
    first = case.length - case.own_rows
    mask = None
    if case.own_rows > 1:
        behind = torch.arange(case.length) > first + torch.arange(case.own_rows)[:, None]
        mask = torch.zeros(behind.shape, dtype=case.dtype).masked_fill_(behind, -torch.inf)
        mask = mask.repeat(shape.num_heads // shape.num_kv_heads, 1)

    def run(layer: list[torch.Tensor]) -> torch.Tensor:
        for cache, new in zip(layer, (k, v), strict=True):
            cache[:, :, first:] = new
        packed = q.reshape(case.batch, shape.num_kv_heads, -1, shape.dim)
        return F.scaled_dot_product_attention(packed, *layer, attn_mask=mask)

    return Way(layers=layers, run=run, kv_bytes=kv_bytes)


def gather(case: Case, budget: int, tables: IntArray) -> Way:
    """What a paged cache costs without a kernel: copy each sequence's pages together, then attend as `contiguous`."""
    shape, kv_bytes = case.shape, case.kv_bytes(shared=tables.max() < tables.size)
    size = (int(tables.max()) + 1, PAGE_SIZE, shape.num_kv_heads, shape.dim)
    layers = [[noise(size, case.dtype) for _ in "kv"] for _ in range(num_layers(kv_bytes, budget))]
    slots, pages = torch.from_numpy(_new_slots(case, tables)), torch.from_numpy(tables)
    q, k, v = case.rows()
    packed = q.view(case.batch, 1, shape.num_kv_heads, -1, shape.dim)

    def sequences(layer: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        for i in range(case.batch):
            keys, values = (cache[pages[i]].view(-1, *size[2:]).transpose(0, 1)[None] for cache in layer)
            yield F.scaled_dot_product_attention(packed[i], keys, values)

    def run(layer: list[torch.Tensor]) -> torch.Tensor:
        for cache, new in zip(layer, (k, v), strict=True):
            cache.view(-1, *size[2:]).index_copy_(0, slots, new)
        return torch.cat(list(sequences(layer)))

    return Way(layers=layers, run=run, kv_bytes=kv_bytes)


def _new_slots(case: Case, tables: IntArray) -> IntArray:
    """Where the step's rows go, `[T]`."""
    positions = np.arange(case.length - case.own_rows, case.length)
    return (tables[:, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE).reshape(-1)
