"""SmolLM2 as little code as runs it: the yardstick of what modelling code costs, written by hand for one architecture.

Knows the weights' names in transformers' Llama, nothing of requests. Shares the runtime's batch and attention backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from radixrt.kernels.backend import AttentionBackend, LayerShape
from radixrt.kernels.cpu.product import pack
from radixrt.runtime.backends import choose_product
from radixrt.runtime.batch import Batch
from radixrt.runtime.recipe import can_pack

Linear = Callable[[torch.Tensor], torch.Tensor]


class LeanModel:
    """q/k/v and gate/up each one product, packed as the runtime packs them: for its native product, else for oneDNN.

    The head is packed too, beside the embedding it is tied to: a fifth more memory, which the runtime does not take.
    Serves Llama's architecture without biases and with one plain RoPE; its pool holds pages `1..num_pages`.
    """

    def __init__(self, hf_model: Any, backend: AttentionBackend, *, num_pages: int, page_size: int) -> None:
        config, body = hf_model.config, hf_model.model
        self._backend, self._page_size, self._eps = backend, page_size, config.rms_norm_eps
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = config.hidden_size // self._heads
        self._embedding, self._norm = body.embed_tokens.weight, body.norm.weight
        self._head = _packed(hf_model.lm_head.weight)
        dtype, device = self._embedding.dtype, self._embedding.device
        self._cos, self._sin = _rope_tables(body.rotary_emb.inv_freq, config.max_position_embeddings, dtype)
        shape = layer_shape(config)
        self.caches = [backend.allocate(num_pages, page_size, shape, dtype, device) for _ in body.layers]
        self._layers = [
            (
                layer.input_layernorm.weight,
                _packed(layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight),
                _packed_sum(layer.self_attn.o_proj.weight),
                layer.post_attention_layernorm.weight,
                _packed(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
                _packed_sum(layer.mlp.down_proj.weight),
                kv,
            )
            for layer, kv in zip(body.layers, self.caches, strict=True)
        ]

    @torch.inference_mode()
    def forward(self, batch: Batch, *, exact: bool = False) -> torch.Tensor:
        """Logits of the rows that the batch asks for, `[R, vocab_size]` float32."""
        plan = batch.plan(page_size=self._page_size, exact=exact, sharing_cost=self._backend.sharing_cost)
        step = self._backend.prepare(plan, batch.write_rows, batch.write_slots)
        positions = torch.from_numpy(batch.positions)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden, width = F.embedding(torch.from_numpy(batch.token_ids), self._embedding), self._embedding.shape[1:]
        turned, half, scale = self._heads + self._kv_heads, self._dim // 2, self._dim**-0.5
        for norm1, qkv, add_o, norm2, gate_up, add_down, kv in self._layers:
            heads = qkv(F.rms_norm(hidden, width, norm1, self._eps)).unflatten(1, (-1, self._dim))
            qk, v = heads[:, :turned], heads[:, turned:]
            qk = torch.addcmul(qk * cos, torch.cat([qk[..., half:], qk[..., :half]], dim=-1), sin)
            out = self._backend.attend(qk[:, : self._heads], qk[:, self._heads :], v, kv, step, scale=scale)
            hidden = add_o(out.flatten(1), hidden)
            gate, up = gate_up(F.rms_norm(hidden, width, norm2, self._eps)).chunk(2, dim=1)
            hidden = add_down(F.silu(gate).mul_(up), hidden)
        wanted = hidden[torch.from_numpy(batch.logit_rows)]
        return self._head(F.rms_norm(wanted, width, self._norm, self._eps)).float()


def layer_shape(config: Any) -> LayerShape:
    """What a layer of this model stores per token."""
    dim = config.hidden_size // config.num_attention_heads
    return LayerShape(config.num_key_value_heads, dim, dim)


def _rope_tables(frequencies: torch.Tensor, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines `[length, D]`; the sines' first half is negative, as a swapped half is subtracted there."""
    angles = torch.arange(length)[:, None] * frequencies.float()
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=1).to(dtype), torch.cat([-sin, sin], dim=1).to(dtype)


def _packed(*weights: torch.Tensor) -> Linear:
    """One product with these weights, below each other."""
    weight = torch.cat([weight.detach() for weight in weights])
    if (native := choose_product(weight.dtype).native) is not None:
        packed = pack(weight)
        return lambda x: native(x, packed, None)
    if not can_pack(weight.dtype):
        return lambda x: F.linear(x, weight)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, reordered, None, "none", [], "")


def _packed_sum(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product plus the second argument; oneDNN adds it inside the product."""
    if choose_product(weight.dtype).native is not None:
        product = _packed(weight)
        return lambda x, other: product(x).add_(other)
    if not can_pack(weight.dtype):
        return lambda x, other: F.linear(x, weight).add_(other)
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return lambda x, other: torch.ops.mkldnn._linear_pointwise.binary(x, other, reordered, None, "add")
