"""The modules that take the place of a transformers model's own: fewer operations, the same bits per row on CPU.

Knows nothing of which class is replaced by which, or whether what replaces it agrees: that is slimming.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import SiLUActivation

from radixrt.kernels.backend import LayerShape
from radixrt.kernels.cpu.gate import NativeGate
from radixrt.kernels.cpu.layer import NativeLayer
from radixrt.kernels.cpu.native import DTYPES
from radixrt.kernels.cpu.norm import NativeNorm
from radixrt.kernels.cpu.product import Weight
from radixrt.kernels.cpu.rotation import NativeRotation

from .errors import ModelError
from .linear import Linear, Workshop, hollow

Function = Callable[[torch.Tensor], torch.Tensor]

# torch's vectorised loops take 64 elements at most at a time and compute what is left over with scalar code, whose exp
# and tanh differ in the last bit. They cut a tensor for threads in pieces of at least 16,384 (GELU) or 32,768 elements.
_LANES = 64
_GRAINS = (16_384, 32_768)


def by_rows(function: Function, x: torch.Tensor) -> torch.Tensor:
    """`function(x)` for an elementwise function and `x [..., W]`, the same bits for a row whatever stands beside it.

    Costs next to nothing unless W is no multiple of 64, or the threads would cut a row at an odd place.
    """
    if function is not F.silu:  # others, GELU in float32 for one, have a kernel of their own for contiguous input
        x = x.contiguous()
    width = x.shape[-1]
    if width % _LANES == 0 and _evenly(x.numel()):
        return function(x)
    rows = F.pad(x.reshape(-1, width), (0, -width % _LANES))
    parts = []
    while len(rows):
        fit = next((n for n in range(len(rows), 0, -1) if _evenly(n * rows.shape[1])), 1)
        parts.append(function(rows[:fit]))
        rows = rows[fit:]
    y = torch.cat(parts) if parts else rows
    return y[:, :width].reshape(x.shape)


def _evenly(num_elements: int) -> bool:
    """Whether every way in which torch cuts so many elements for its threads is a cut at multiples of 64."""
    if num_elements <= _GRAINS[0]:
        return True
    num_threads = torch.get_num_threads()
    counts = {num_threads, *(min(num_threads, -(-num_elements // grain)) for grain in _GRAINS)}
    return all(-(-num_elements // count) % _LANES == 0 for count in counts)


class ByRows(nn.Module):
    """An activation, run by rows."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(self.function, x)


class SoftCapped(nn.Module):
    """A head whose logits are bounded to `cap * tanh(logits / cap)`."""

    def __init__(self, head: nn.Module, cap: float) -> None:
        super().__init__()
        self.head = head
        self.cap = cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(torch.tanh, self.head(x) / self.cap) * self.cap


class Embedding(nn.Module):
    """Rows of the weight that a head is tied to, read out of the head's panels."""

    def __init__(self, original: nn.Embedding, packed: Weight) -> None:
        super().__init__()
        self.packed = packed
        self.weight = hollow(original.weight.detach())

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(token_ids)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, in float32 inside (Zhang and Sennrich, NeurIPS 2019)."""

    def __init__(self, original: Any, shop: Workshop) -> None:
        super().__init__()
        self.weight = original.weight
        self.eps: float = original.variance_epsilon
        self._shape = tuple(original.weight.shape)
        self._native: NativeNorm | None = None
        if shop.native is not None and original.weight.dtype in DTYPES:
            self._native = NativeNorm(shop.native.library)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is not None and x.dtype == self.weight.dtype:
            return self._native(x, self.weight, self.eps)
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class Rotation(tuple[torch.Tensor, ...]):
    """(cos, sin), each `[1, T, D]`, as a model's own attention takes them; `terms` is the same for the lean one."""

    terms: tuple[torch.Tensor, torch.Tensor]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x [T, H, D]` in place by `rotation_terms`."""
    crossed = x.roll(x.shape[-1] // 2, -1).mul_(sin)
    x.mul_(cos).add_(crossed)


def rotation_terms(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin as `[T, 1, D]`, the first half of sin negated: x rotates to `x * cos + roll(x, D / 2) * sin`."""
    low, high = sin[0, :, None].chunk(2, -1)
    return cos[0, :, None], torch.cat((-low, high), -1)


class Rotary(nn.Module):
    """A model's rotary embedding, its angles looked up in tables that grow with the longest position seen.

    They are computed by its own code in blocks of 64 positions, so that their bits depend on the position alone.
    `static=False` is for angles that depend on more: those are computed every time, in such blocks.
    """

    def __init__(self, original: nn.Module, *, static: bool) -> None:
        super().__init__()
        self.original = original
        self.static = static
        self._tables: dict[Any, tuple[torch.Tensor, ...]] = {}

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *kind: Any) -> Any:
        """`kind` is what some models add: the layer type, whose angles are of their own."""
        positions = position_ids[0]
        if not self.static:
            return self._rotation(self._compute(x, positions, kind))
        key = (x.dtype, *kind)
        needed = int(positions.max()) + 1 if len(positions) else 0
        if key not in self._tables or len(self._tables[key][0]) < needed:
            have = len(self._tables[key][0]) if key in self._tables else 0
            grown = torch.arange(max(needed, 2 * have, _LANES), device=x.device)
            self._tables[key] = self._compute(x, grown, kind)
        return self._rotation(tuple(table.index_select(0, positions) for table in self._tables[key]))

    def _compute(self, x: torch.Tensor, positions: torch.Tensor, kind: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """The original's output for these positions, `[n, D]` each."""
        short = -len(positions) % _LANES
        padded = torch.cat((positions, positions[-1:].expand(short)))
        blocks = [self.original(x[:, :1], block[None], *kind) for block in torch.split(padded, _LANES)]
        parts = zip(*blocks, strict=True) if isinstance(blocks[0], tuple) else [blocks]
        return tuple(torch.cat(part, dim=1)[0, : len(positions)] for part in parts)

    @staticmethod
    def _rotation(parts: tuple[torch.Tensor, ...]) -> Any:
        if len(parts) != 2:
            return parts[0][None] if len(parts) == 1 else tuple(part[None] for part in parts)
        rotation = Rotation(part[None] for part in parts)
        rotation.terms = rotation_terms(rotation[0], rotation[1])
        return rotation


class Attention(nn.Module):
    """Self-attention over the running step: one product for queries, keys and values, rotated in place.

    Made from a module with q_proj, k_proj, v_proj, o_proj and, for norms per head, q_norm and k_norm.
    """

    radixrt_binding: Any = None  # hung on it by `bind`, as on every module that knows its layer index

    def __init__(self, original: Any, shop: Workshop) -> None:
        super().__init__()
        self.layer_idx: int = original.layer_idx
        self.head_dim: int = original.head_dim
        self.scale: float = original.scaling
        holder = original if hasattr(original, "sliding_window") else original.config
        self.window: int | None = getattr(holder, "sliding_window", None)
        projections = (original.q_proj, original.k_proj, original.v_proj)
        self.num_heads = tuple(projection.out_features // self.head_dim for projection in projections)
        self.qkv = fused(projections, shop)
        self.out = shop.linear(original.o_proj.weight, original.o_proj.bias)
        norms = [getattr(original, name, None) for name in ("q_norm", "k_norm")]
        self.eps: float = getattr(norms[0], "variance_epsilon", 0.0)
        self.norm_weight: torch.Tensor | None = None
        if any(norm is not None for norm in norms):
            rows = [n.weight.detach().expand(num, -1) for n, num in zip(norms, self.num_heads[:2], strict=True) if n]
            self.norm_weight = torch.cat(rows)
        self._rotate = rotate
        if shop.native is not None and original.q_proj.weight.dtype in DTYPES:
            self._rotate = NativeRotation(shop.native.library)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """`[1, T, K]` to the same. `position_embeddings` rotate queries and keys; all else comes with the step."""
        step = getattr(self.radixrt_binding, "step", None)
        if step is None or attention_mask is not None:
            raise ModelError("it attends outside a radixrt step, or with a mask: use the model through its engine")
        terms = getattr(position_embeddings, "terms", None)
        cos, sin = rotation_terms(*position_embeddings) if terms is None else terms
        num_q, num_k, num_v = self.num_heads
        heads = self.qkv.forward(hidden_states).view(-1, num_q + num_k + num_v, self.head_dim)
        turned = heads.narrow(1, 0, num_q + num_k)  # not split: that is Python, 5 us
        if self.norm_weight is not None:
            turned = F.rms_norm(turned, (self.head_dim,), None, self.eps).mul_(self.norm_weight)
        self._rotate(turned, cos, sin)
        q, k, v = turned.narrow(1, 0, num_q), turned.narrow(1, num_q, num_k), heads.narrow(1, num_q + num_k, num_v)
        out = step.attend(self.layer_idx, q, k, v, scale=self.scale, window=self.window, softcap=None)
        return self.out.forward(out.view(1, out.shape[0], -1)), None


class MLP(nn.Module):
    """`down(act(gate(x)) * up(x))`, gate and up in one product (Shazeer, 2020)."""

    def __init__(self, original: Any, shop: Workshop) -> None:
        super().__init__()
        self.gate_up = fused((original.gate_proj, original.up_proj), shop)
        self.down = shop.linear(original.down_proj.weight, original.down_proj.bias)
        self.gated = gated(original.act_fn, original.gate_proj.weight.dtype, shop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down.forward(self.gated(self.gate_up.forward(x)))


def straight(layer: Any, shop: Workshop) -> Function:
    """The forward of a decoder layer whose parts are lean, without the library's wrappers: 50 us a layer.

    `[1, T, K]` to the same: norm, attention, add, norm, MLP, add; in one native call where that serves the layer and
    the step. Hooks of the parts are not called.
    """
    parts = (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
    norm, attend, second_norm, mlp = (part.forward for part in parts)
    attention, whole = layer.self_attn, _whole(parts, shop)

    def forward(
        hidden_states: torch.Tensor, position_embeddings: Any = None, attention_mask: None = None, **_: Any
    ) -> torch.Tensor:
        step, terms = getattr(attention.radixrt_binding, "step", None), getattr(position_embeddings, "terms", None)
        if whole is not None and attention_mask is None and step is not None and step.is_native and terms is not None:
            ran: torch.Tensor = step.run(attention.layer_idx, whole, hidden_states, *terms)
            return ran
        attended, _ = attend(norm(hidden_states), position_embeddings, attention_mask)
        hidden_states = attended.add_(hidden_states)
        summed: torch.Tensor = mlp(second_norm(hidden_states)).add_(hidden_states)
        return summed

    return forward


def _whole(parts: tuple[Any, ...], shop: Workshop) -> NativeLayer | None:
    """A decoder layer of these parts in the native library; None where that has not all that they do."""
    norm, attention, second_norm, mlp = parts
    if shop.native is None or not (isinstance(norm, RMSNorm) and isinstance(second_norm, RMSNorm)):
        return None
    if not isinstance(mlp, MLP) or not isinstance(mlp.gated, NativeGate) or attention.norm_weight is not None:
        return None
    _, num_k, _ = attention.num_heads
    linears = [attention.qkv, attention.out, mlp.gate_up, mlp.down]
    if any(linear.packed is None for linear in linears):
        return None
    return NativeLayer(
        shop.native.library,
        norms=[(norm.weight, norm.eps), (second_norm.weight, second_norm.eps)],
        products=[(linear.packed, linear.bias) for linear in linears],
        shape=LayerShape(num_k, attention.head_dim, attention.head_dim),
        scale=attention.scale,
        window=attention.window,
    )


class Experts(nn.Module):
    """A mixture's experts, each with its rows in one product. A row sums its experts in the order of their weight."""

    def __init__(self, original: Any, shop: Workshop) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(shop.linear(weight) for weight in original.gate_up_proj)
        self.down = nn.ModuleList(shop.linear(weight) for weight in original.down_proj)
        self._gated = gated(original.act_fn, original.gate_up_proj.dtype, shop)

    def forward(
        self,
        hidden_states: torch.Tensor,  # [T, K]
        top_k_index: torch.Tensor,  # [T, k] experts of each row
        top_k_weights: torch.Tensor,  # [T, k]
    ) -> torch.Tensor:
        num_rows, num_chosen = top_k_index.shape
        chosen = top_k_index.flatten()
        counts = chosen.bincount(minlength=len(self.down)).tolist()
        places = torch.split(chosen.argsort(stable=True), counts)
        out = hidden_states.new_empty(num_rows * num_chosen, hidden_states.shape[1])
        for expert, place in enumerate(places):
            if len(place):
                out[place] = self.down[expert](self._gated(self.gate_up[expert](hidden_states[place // num_chosen])))
        weighted = out.view(num_rows, num_chosen, -1) * top_k_weights[..., None]
        total = weighted[:, 0].to(torch.promote_types(out.dtype, torch.float32))
        for nth in range(1, num_chosen):
            total = total + weighted[:, nth]
        return total.to(hidden_states.dtype)


class Router(nn.Module):
    """Chooses the experts of a row: its logits, the weights of the best, and which they are."""

    def __init__(self, original: Any, shop: Workshop) -> None:
        super().__init__()
        self.linear = shop.linear(original.weight)
        self.num_chosen: int = original.top_k
        self.normalise: bool = getattr(original, "norm_topk_prob", True)
        self.narrows = hasattr(original, "norm_topk_prob")  # such models give the weights in the logits' dtype

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.linear(hidden_states.reshape(-1, hidden_states.shape[-1]))
        best, index = logits.softmax(-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
        if self.normalise:
            best = best / best.sum(-1, keepdim=True)
        return logits, best.to(logits.dtype) if self.narrows else best, index


def fused(layers: tuple[Any, ...], shop: Workshop) -> Linear:
    """One layer with the outputs of these, in their order."""
    biases = [layer.bias for layer in layers]
    given = [bias for bias in biases if bias is not None]
    if given and len(given) < len(biases):
        raise ModelError("some of its fused layers have a bias and some have none")
    return shop.linear(torch.cat([layer.weight.detach() for layer in layers]), torch.cat(given) if given else None)


def gated(act: Function, dtype: torch.dtype, shop: Workshop) -> Function:
    """`[..., 2 W]` to `[..., W]`: an activation of the first half times the second, by rows where the shop is exact."""
    is_silu = isinstance(act, (nn.SiLU, SiLUActivation))
    if is_silu and shop.native is not None and dtype in DTYPES:
        return NativeGate(shop.native.library)
    function = F.silu if is_silu else act
    if shop.exact:
        function = partial(by_rows, function)

    def multiplied(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return function(gate).mul_(up)

    return multiplied
