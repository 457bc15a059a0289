"""The Triton backend: caches on one GPU, a step's arrays sent there once, and the launches of each layer.

Knows nothing of models. Under TRITON_INTERPRET=1, set before triton is imported, it runs on CPU tensors, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import e, gcd, log2

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend import LayerKV, LayerShape
from ..plan import AttentionPlan, IntArray
from .attention import attend_tiles, merge_partials
from .config import Config, configs, pad_dim
from .pages import copy_pages, write_pairs
from .schedule import build_schedule

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16}
_BLOCK_PAIRS = 16
_BLOCK_PARTIALS = 16
_BLOCK_WORDS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A `Schedule` on the device."""

    items: tuple[torch.Tensor, ...]  # for each config
    entry_partials: torch.Tensor
    partial_indptr: torch.Tensor
    num_partials: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step's arrays on the device, and its work for each kind of layer, cut when the first of the kind asks."""

    plan: AttentionPlan
    positions: torch.Tensor
    page_ids: torch.Tensor
    row_ids: torch.Tensor
    write_rows: torch.Tensor
    write_slots: torch.Tensor
    work: dict[tuple[tuple[Config, ...], int, int, int | None], _Work] = field(default_factory=dict)


class TritonAttention:
    """`AttentionBackend` for float16, bfloat16 and float32, heads of 1 to 256 numbers, any page size and GQA ratio.

    Caches are `[num_pages + 1, page_size, Hkv, D]`. Sums are float32. `exact` in a plan has no effect: the same step
    gives the same bits, another plan or batch may round otherwise. Launches go to the current stream of the current
    CUDA device, which must be `device`. ValueError for what is not served.
    """

    name = "triton"
    # Not measured, no GPU having run this: vLLM's rule for cascade attention, 8 readers of 256 tokens. In bytes a
    # shared node pays much earlier (writing and reading a partial of Llama-8B is worth 8 tokens of its KV), but it
    # also costs a launch of tall tiles.
    sharing_cost = (8 - 1) * 256

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._capability, num_sms = (properties.major, properties.minor), properties.multi_processor_count
        elif triton.knobs.runtime.interpret:
            self._capability, num_sms = (9, 0), 132  # as an H200
        else:
            raise ValueError(f"the Triton kernels need a CUDA device, not {device}; or TRITON_INTERPRET=1, for tests")
        self._num_programs = 4 * num_sms  # one wave of low tiles, two of tall ones (docs/kernels.md)

    def inexact(self, dtype: torch.dtype, page_size: int, shape: LayerShape, group: int) -> str | None:
        return "the Triton kernels cut a row's positions by what else is in the step"

    def allocate(
        self, num_pages: int, page_size: int, shape: LayerShape, dtype: torch.dtype, device: torch.device
    ) -> LayerKV:
        configs(dtype, max(shape.key_dim, shape.value_dim), self._capability)  # raises for what is not served
        return LayerKV.by_slot(num_pages, page_size, shape, dtype, device)

    def prepare(self, plan: AttentionPlan, write_rows: IntArray, write_slots: IntArray) -> Step:
        positions, page_ids, row_ids, rows, slots = self._send(
            plan.positions, plan.page_ids, plan.row_ids, write_rows, write_slots
        )
        return Step(plan, positions, page_ids, row_ids, rows, slots)

    def attend(
        self,
        q: torch.Tensor,  # [T, H, D]
        k: torch.Tensor,  # [T, Hkv, D]
        v: torch.Tensor,  # [T, Hkv, Dv]
        kv: LayerKV,
        step: Step,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """`[T, H, Dv]`. Partial results take `4 * H * Dv` bytes for each row and chunk that it reads, for the call."""
        num_rows, num_heads, key_dim = q.shape
        num_kv_heads, value_dim = v.shape[1:]
        group = num_heads // num_kv_heads
        out = q.new_empty(num_rows, num_heads, value_dim)
        if not num_rows:
            return out
        self._write(k, v, kv, step)
        kinds = configs(q.dtype, max(key_dim, value_dim), self._capability)
        work = self._work(step, kinds, group, num_kv_heads, window)
        partials = q.new_empty(work.num_partials, num_heads, value_dim, dtype=torch.float32)
        stats = q.new_empty(work.num_partials, num_heads, 2, dtype=torch.float32)
        # Logarithms are to base 2 in the kernel, and tanh(x) is 1 - 2 / (exp(2 x) + 1).
        factor, cap = scale * log2(e), None
        if softcap is not None:
            factor, cap = 2 * factor / softcap, softcap * log2(e)
        upcast = q.dtype == torch.bfloat16 and triton.knobs.runtime.interpret  # triton issue 11584
        for kind, items in zip(kinds, work.items, strict=True):
            if not len(items):
                continue
            constants = kind.constants(group=group, key_dim=key_dim, value_dim=value_dim, page_size=kv.k.shape[1])
            attend_tiles[(len(items), num_kv_heads)](
                partials, stats, q, kv.k, kv.v, items, step.page_ids, step.row_ids, work.entry_partials, step.positions,
                *q.stride()[:2], factor, cap, window, **constants, UPCAST=upcast,
            )  # fmt: skip
        merge_partials[(num_rows, num_heads)](
            out, partials, stats, work.partial_indptr,
            VALUE_DIM=value_dim, BLOCK_PARTIALS=_BLOCK_PARTIALS, BLOCK_VALUE=pad_dim(value_dim),
        )  # fmt: skip
        return out

    def copy_pages(self, source: Sequence[LayerKV], target: Sequence[LayerKV], src: IntArray, dst: IntArray) -> None:
        """One launch for all layers."""
        caches = [cache for kv in source for cache in (kv.k, kv.v)]
        others = [cache for kv in target for cache in (kv.k, kv.v)]
        if not caches or not len(src):
            return
        page_bytes = [cache.stride(0) * cache.itemsize for cache in caches]
        word_bytes = gcd(max(_WORDS), *page_bytes)
        table = [
            (cache.data_ptr(), other.data_ptr(), size // word_bytes)
            for cache, other, size in zip(caches, others, page_bytes, strict=True)
        ]
        (pairs,) = self._send(np.stack([src, dst], axis=1).ravel())
        copy_pages[(len(src), len(caches))](
            torch.tensor(table, device=self._device), pairs, WORD=_WORDS[word_bytes], BLOCK=_BLOCK_WORDS
        )

    def fill_slots(self, layers: Sequence[LayerKV], slots: IntArray, value: float) -> None:
        for kv in layers:
            kv.fill_slots(slots, value)

    def unpack(self, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        return kv.k.clone(), kv.v.clone()

    def _write(self, k: torch.Tensor, v: torch.Tensor, kv: LayerKV, step: Step) -> None:
        num_pairs = len(step.write_rows)
        if num_pairs:
            write_pairs[(triton.cdiv(num_pairs, _BLOCK_PAIRS), k.shape[1])](
                kv.k, kv.v, k, v, step.write_rows, step.write_slots, num_pairs, *k.stride()[:2], *v.stride()[:2],
                KEY_DIM=k.shape[2], VALUE_DIM=v.shape[2], BLOCK_PAIRS=_BLOCK_PAIRS,
                BLOCK_KEY=pad_dim(k.shape[2]), BLOCK_VALUE=pad_dim(v.shape[2]),
            )  # fmt: skip

    def _work(self, step: Step, kinds: tuple[Config, ...], group: int, num_kv_heads: int, window: int | None) -> _Work:
        key = (kinds, group, num_kv_heads, window)
        if key not in step.work:
            schedule = build_schedule(
                step.plan,
                heights=tuple(kind.block_rows for kind in kinds),
                block_tokens=max(kind.block_tokens for kind in kinds),
                group=group,
                num_kv_heads=num_kv_heads,
                window=window,
                num_programs=self._num_programs,
            )
            entry_partials, partial_indptr, *items = self._send(
                schedule.entry_partials, schedule.partial_indptr, *(items.ravel() for items in schedule.items)
            )
            step.work[key] = _Work(
                items=tuple(tensor.view(found.shape) for tensor, found in zip(items, schedule.items, strict=True)),
                entry_partials=entry_partials,
                partial_indptr=partial_indptr,
                num_partials=int(schedule.partial_indptr[-1]),
            )
        return step.work[key]

    def _send(self, *arrays: IntArray) -> list[torch.Tensor]:
        """The arrays on the device as int32, in one transfer. Each begins at a multiple of 16 bytes, as Triton compiles
        a kernel anew for pointers that do not.
        """
        *begins, end = np.cumsum([0, *(-(-len(array) // 4) * 4 for array in arrays)]).tolist()
        buffer = torch.empty(end, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        for begin, array in zip(begins, arrays, strict=True):
            buffer.numpy()[begin : begin + len(array)] = array
        sent = buffer.to(self._device, non_blocking=True)
        return [sent[begin : begin + len(array)] for begin, array in zip(begins, arrays, strict=True)]
