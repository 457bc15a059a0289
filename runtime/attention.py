"""The attention function that transformers' models call, and the step context it finds on their attention modules.

Knows nothing of requests or of which model calls it. This is the one place where transformers' loose types come in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from radixrt.kernels.backend import LayerShape
from radixrt.kernels.cpu.layer import NativeLayer
from radixrt.kernels.cpu.native import NativeAttention

from .batch import Batch
from .errors import ModelError
from .kv import KVPool

ATTENTION_NAME = "radixrt_paged"

# Keywords that models pass on to every attention function and that do not change what is computed here: positions
# and masks come with the step, and the rest asks for outputs that the runtime does not use.
_IGNORED = frozenset(
    {
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Call:
    """A layer that attended, with how many query heads for each KV head, and its sliding window."""

    layer: int
    group: int
    window: int | None


@dataclass(slots=True, kw_only=True)
class Step:
    """The attention of one forward pass: its plan and writes, prepared once for all layers."""

    pool: KVPool
    prepared: Any  # of the pool's backend
    calls: list[Call] = field(default_factory=list)  # as they come

    def attend(
        self,
        layer: int,
        q: torch.Tensor,  # [T, H, D]
        k: torch.Tensor,  # [T, Hkv, D]
        v: torch.Tensor,  # [T, Hkv, Dv]
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Write the rows' keys and values into the pool, then attend through the step's plan: `[T, H, Dv]`."""
        self.calls.append(Call(layer, q.shape[1] // k.shape[1], window))
        kv = self.pool.layer(layer, LayerShape(k.shape[1], k.shape[2], v.shape[2]))
        return self.pool.backend.attend(q, k, v, kv, self.prepared, scale=scale, window=window, softcap=softcap)

    @property
    def is_native(self) -> bool:
        """Whether it can `run` whole layers."""
        return isinstance(self.pool.backend, NativeAttention)

    def run(
        self, layer: int, whole: NativeLayer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """As `attend`, for a whole decoder layer: `x` and the angles as that takes them."""
        self.calls.append(Call(layer, whole.num_heads // whole.shape.num_heads, whole.window))
        return whole(x, cos, sin, self.pool.layer(layer, whole.shape), self.prepared)


def prepare(pool: KVPool, batch: Batch, *, exact: bool) -> Step:
    """The step of this batch over this pool, its attention planned once for all layers."""
    backend = pool.backend
    plan = batch.plan(page_size=pool.page_size, exact=exact, sharing_cost=backend.sharing_cost)
    return Step(pool=pool, prepared=backend.prepare(plan, batch.write_rows, batch.write_slots))


class Binding:
    """Ties a model's attention modules to the step that is running."""

    step: Step | None = None


def bind(hf_model: Any) -> Binding:
    """Hang a new binding on each module that knows its layer index: the state belongs to this model, none is global."""
    binding = Binding()
    for module in hf_model.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.radixrt_binding = binding
    return binding


def run_packed(hf_model: Any, binding: Binding, step: Step, batch: Batch, **options: Any) -> Any:
    """The model's output for the batch as one packed row of tokens; its logits are `[1, R, vocab_size]`."""
    device = step.pool.device
    token_ids, positions, logit_rows = (
        torch.from_numpy(array).to(device) for array in (batch.token_ids, batch.positions, batch.logit_rows)
    )
    binding.step = step
    try:
        return hf_model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            **options,
        )
    finally:
        binding.step = None


def paged_attention(
    module: Any,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """`Step.attend` for transformers' attention modules: `[1, T, H, Dv]`.

    Raises ModelError on any keyword that would change the result and is not served.
    """
    unserved = sorted(name for name, given in keywords.items() if given is not None and name not in _IGNORED)
    if attention_mask is not None:
        unserved.append("attention_mask")
    if unserved:
        raise ModelError(f"its attention asks for {', '.join(unserved)}, which radixrt does not serve")
    binding: Binding | None = getattr(module, "radixrt_binding", None)
    if binding is None or binding.step is None:
        raise ModelError(f"{type(module).__name__} attends outside a radixrt step: use the model through its engine")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = q.shape[2] ** -0.5 if scaling is None else scaling
    out = binding.step.attend(module.layer_idx, q, k, v, scale=scale, window=sliding_window, softcap=softcap)
    return out[None], None


# In the attention interface only, never in the mask interface: an implementation without a mask entry gets no mask.
AttentionInterface.register(ATTENTION_NAME, paged_attention)
