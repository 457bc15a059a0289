"""Exact attention in plain torch: a row's bits are the same in every plan, batch, chunk and number of threads.

Knows nothing of models, nor which rows share a tile: a row's result is the left fold, in order of position, of partials
(largest score, sums) over fixed groups of positions, each from products of a few fixed shapes.

What it rests on was measured with torch 2.13: `bmm` and `baddbmm` in float32 and float64, contracting 128 numbers or
fewer, give a row the same bits at any place of its tile, in any batch of tiles and with any number of threads, and in
tiles of any number of rows from 6 on (which `row_counts` probes); exp and tanh give a number the same bits at any place
of a tensor. Not so: longer products (from 192), those of 1 to 5 rows, torch's own attention, sigmoid.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ..backend import LayerKV
from ..plan import AttentionPlan
from .scratch import Scratch
from .torch_tiles import Batch, batches, lengths

_ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_PACKED_ROWS = 8  # a tile's rows times query heads of a KV head are padded to a multiple of this
_MAX_PACKED_ROWS = 512
_DEPTH = 128  # numbers that one product contracts


class ExactAttention:
    """One step's attention, prepared once for all layers."""

    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan
        self._batches: dict[tuple[int | None, tuple[int, ...]], list[Batch]] = {}
        self._scratch = Scratch()

    def attend(
        self, q: torch.Tensor, kv: LayerKV, *, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """`AttentionBackend.attend` after its writes. Narrow dtypes are widened to float32 before any product."""
        num_kv_heads, key_dim, value_dim = kv.k.shape[2], kv.k.shape[3], kv.v.shape[3]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        counts = row_counts(wide, q.shape[1] // num_kv_heads, key_dim, value_dim, self._plan.page_size)
        if (window, counts) not in self._batches:
            self._batches[window, counts] = list(batches(self._plan, window, counts))
        scaled = q.to(wide) * scale
        tops = torch.full(q.shape[:2], torch.finfo(wide).min, dtype=wide)
        sums = torch.zeros(*q.shape[:2], value_dim + 1, dtype=wide)  # of weighted values and, last, of weights
        for batch in self._batches[window, counts]:
            _fold(tops, sums, batch, *self._partials(scaled, kv, batch, softcap))
        return (sums[..., :-1] / sums[..., -1:]).to(q.dtype)

    def _partials(
        self, q: torch.Tensor, kv: LayerKV, batch: Batch, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest score of each row of each tile, `[b * n, H]`, and its sums against that, `[b * n, H, Dv + 1]`."""
        (num_tiles, num_rows), length = batch.rows.shape, batch.slots.shape[1]
        num_kv_heads, value_dim = kv.k.shape[2], kv.v.shape[3]
        group = q.shape[1] // num_kv_heads
        by_row = (num_tiles, num_kv_heads, num_rows, group, -1)
        packed = q.index_select(0, batch.rows.view(-1)).view(num_tiles, num_rows, num_kv_heads, group, -1)
        packed = _pad(packed.transpose(1, 2).reshape(num_tiles * num_kv_heads, num_rows * group, -1))
        index = batch.slots[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]
        k, v = (self._gather(name, cache, index, q.dtype) for name, cache in (("k", kv.k), ("v", kv.v)))
        scores = self._scratch("scores", (*packed.shape[:2], length), q.dtype)
        _product(packed, k.transpose(1, 2), scores)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        if batch.unread is not None:
            scores[:, : num_rows * group].view(by_row).masked_fill_(batch.unread, -torch.inf)
        top = scores.amax(dim=2, keepdim=True).clamp_(min=torch.finfo(q.dtype).min)
        weights = scores.sub_(top).exp_()
        values = _product(weights, v, self._scratch("values", (*packed.shape[:2], value_dim), q.dtype))
        top, weight, values = (
            part[:, : num_rows * group].view(by_row).transpose(1, 2)
            for part in (top, weights.sum(dim=2, keepdim=True), values)
        )
        sums = q.new_empty(*values.shape[:4], value_dim + 1)
        sums[..., :-1], sums[..., -1:] = values, weight
        return top.reshape(-1, q.shape[1]), sums.view(-1, q.shape[1], value_dim + 1)

    def _gather(self, name: str, cache: torch.Tensor, index: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        """Rows `index` `[b, Hkv, L]` of the cache's slots times heads, as `[b * Hkv, L, width]`, in scratch memory."""
        gathered = self._scratch.gather(name, cache.view(-1, cache.shape[3]), index.view(-1), wide)
        return gathered.view(-1, index.shape[2], cache.shape[3])


def _pad(packed: torch.Tensor) -> torch.Tensor:
    """`[B, m, D]` with zero rows up to a multiple of `_PACKED_ROWS`."""
    return F.pad(packed, (0, 0, 0, -packed.shape[1] % _PACKED_ROWS))


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out = a @ b`, in pieces that contract `_DEPTH` numbers at most: 3 % of the whole at 256 positions."""
    torch.bmm(a[:, :, :_DEPTH], b[:, :_DEPTH], out=out)
    for start in range(_DEPTH, a.shape[2], _DEPTH):
        piece = slice(start, start + _DEPTH)
        torch.baddbmm(out, a[:, :, piece], b[:, piece], out=out)
    return out


def _fold(
    tops: torch.Tensor,  # [T, H]
    sums: torch.Tensor,  # [T, H, Dv + 1]
    batch: Batch,
    new_tops: torch.Tensor,  # [b * n, H]
    new_sums: torch.Tensor,  # [b * n, H, Dv + 1]
) -> None:
    """Fold partials into their rows' states, each row's in order. One that is absent adds 0 to 1 times the state."""
    users, num_places = batch.users, batch.depth * len(batch.users)
    if batch.picks is not None and batch.places is not None:
        picked = (part.index_select(0, batch.picks) for part in (new_tops, new_sums))
        least = tops.new_full((num_places, *tops.shape[1:]), torch.finfo(tops.dtype).min)
        new_tops = least.index_copy_(0, batch.places, next(picked))
        new_sums = sums.new_zeros(num_places, *sums.shape[1:]).index_copy_(0, batch.places, next(picked))
    new_tops = new_tops.view(batch.depth, *users.shape, -1)
    reached = torch.cat([tops.index_select(0, users)[None], new_tops]).cummax(dim=0).values
    kept = torch.exp(reached[:-1] - reached[1:])[..., None]
    new_sums = new_sums.view(*new_tops.shape, -1).mul_(torch.exp(new_tops - reached[1:])[..., None])
    state = sums.index_select(0, users)
    for i in range(batch.depth):
        state.mul_(kept[i]).add_(new_sums[i])  # two roundings: a fused one would depend on the vector width
    sums.index_copy_(0, users, state)
    tops.index_copy_(0, users, reached[-1])


@functools.cache
def row_counts(wide: torch.dtype, group: int, key_dim: int, value_dim: int, page_size: int) -> tuple[int, ...]:
    """Numbers of rows that a tile may have: 1, and those that give each row the bits it has in a tile of its own.

    `group` is the query heads of a KV head. Runs the products themselves: some 10 ms, once.
    """
    counts = [n for n in _ROW_COUNTS if n == 1 or n * group <= _MAX_PACKED_ROWS]
    last, sample = counts[-1], torch.arange(counts[-1] - 1, -1, -5)  # at all places of a vector's width
    for length in lengths(page_size):
        q, k, v = _operands(wide, last, group, key_dim, value_dim, length)
        alone = _products(q[sample], k, v)
        for n in counts[1:]:
            tile = _products(q[last - n :].reshape(1, n * group, key_dim), k, v).view(n, group, value_dim)
            if not torch.equal(tile[sample[sample >= last - n] - (last - n)], alone[sample >= last - n]):
                counts.remove(n)
    return tuple(counts)


def exact_here(dtype: torch.dtype, group: int, key_dim: int, value_dim: int, page_size: int) -> bool:
    """Whether a tile of one row has the same bits on this machine in any batch of tiles, with 1 thread or all."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    num_threads = torch.get_num_threads()
    try:
        for length in lengths(page_size):
            tiles, k, v = _operands(wide, 24, group, key_dim, value_dim, length)
            expected = _products(tiles, k, v)
            for threads in (1, num_threads):
                torch.set_num_threads(threads)
                for part in (slice(24), slice(5, 12), slice(23, 24)):
                    if not torch.equal(_products(tiles[part], k, v), expected[part]):
                        return False
    finally:
        torch.set_num_threads(num_threads)
    return True


def _operands(
    wide: torch.dtype, num_rows: int, group: int, key_dim: int, value_dim: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((num_rows, group, key_dim), (length, key_dim), (length, value_dim))
    q, k, v = (torch.randn(size, dtype=wide, generator=generator) for size in sizes)
    return q, k, v


def _products(tiles: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """What `_partials` multiplies, `[B, m, Dv]` for tiles `[B, m, D]` over one group's keys and values."""
    k, v = (part.expand(len(tiles), -1, -1).contiguous() for part in (k, v))
    packed = _pad(tiles)
    scores = _product(packed, k.transpose(1, 2), packed.new_empty(*packed.shape[:2], k.shape[1]))
    return _product(scores, v, packed.new_empty(*packed.shape[:2], v.shape[2]))[:, : tiles.shape[1]]
