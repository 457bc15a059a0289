"""A transformers causal language model behind the `Model` protocol: its own code, our paged attention.

Knows nothing of requests, caching or where the weights came from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from radixrt.kernels.cpu.plan import Plan
from radixrt.kernels.plan import IntArray

from .attention import Step, bind, run_packed
from .batch import Batch
from .errors import ModelError
from .kv import KVPool
from .model import Forward
from .probe import first_tensor, probe


class TransformerModel:
    """Serves a loaded transformers model. Making one runs the fidelity probe; ModelError if it is not faithful.

    The model is switched to radixrt's attention for good. `notes` are lines that a user should see at load.
    """

    def __init__(self, hf_model: Any, *, name: str = "") -> None:
        """`name` is what it was loaded by; a record rebuilds the model from that."""
        self.name = name or type(hf_model).__name__
        self.dtype: torch.dtype = next(hf_model.parameters()).dtype
        self.device: torch.device = next(hf_model.parameters()).device
        self.notes: tuple[str, ...] = ()
        self._hf = hf_model.eval()
        self._binding = bind(hf_model)
        probed = probe(hf_model, self._binding)
        self._vocab_size, self._shapes = probed.vocab_size, probed.shapes
        self._context_len = self._resolve_context()
        self._pool: KVPool | None = None
        self._eos_token_ids = self._resolve_eos()
        self._hidden: torch.Tensor | None = None
        probed.body.register_forward_hook(self._keep_hidden)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def context_len(self) -> int:
        return self._context_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    @property
    def spec(self) -> dict[str, Any]:
        return {
            "kind": "transformers",
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
        }

    def describe(self) -> dict[str, str]:
        shapes = sorted({f"{s.num_heads} KV heads of {s.key_dim}" for s in self._shapes.values()})
        num_parameters = sum(parameter.numel() for parameter in self._hf.parameters())
        return {
            "model": f"{self.name} ({type(self._hf).__name__}, {num_parameters:,} parameters)",
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "layers": f"{len(self._shapes)}, {' and '.join(shapes)}",
            "attention": "paged, plain torch (the one path of this version); shared runs of pages are read once",
        } | {f"note {i}": note for i, note in enumerate(self.notes, 1)}

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.dtype.itemsize * sum(shape.token_width for shape in self._shapes.values())

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Replaces the pool of an earlier engine, which must be closed."""
        self._pool = None  # frees the old one before the new one is made
        self._pool = KVPool(num_pages, page_size, self.dtype, self.device)
        for index, shape in self._shapes.items():
            self._pool.layer(index, shape)

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        self._allocated().copy_pages(src, dst)

    def poison_slots(self, slots: IntArray) -> None:
        self._allocated().poison_slots(slots)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Forward:
        step = self._step(batch)
        token_ids, positions, logit_rows = (
            torch.tensor(array, device=self.device) for array in (batch.token_ids, batch.positions, batch.logit_rows)
        )
        output = run_packed(self._hf, self._binding, step, token_ids, positions, logit_rows)
        logits = output.logits[0].float()
        assert self._hidden is not None, "the probe saw its body give the rows"
        finite = self._hidden[0].isfinite().all(dim=-1)
        finite[logit_rows] &= logits.isfinite().all(dim=-1)
        self._hidden = None
        return Forward(logits=logits, finite=finite.cpu().numpy())

    def _step(self, batch: Batch) -> Step:
        pool = self._allocated()
        starts = batch.positions[batch.row_indptr[:-1]]
        arrays = (batch.row_indptr, batch.page_indptr, batch.page_ids, starts)
        plan = Plan(*(torch.tensor(array, device=self.device) for array in arrays), page_size=pool.page_size)
        in_order = np.array_equal(batch.write_rows, np.arange(batch.num_rows))
        return Step(
            pool=pool,
            plan=plan,
            write_rows=None if in_order else torch.tensor(batch.write_rows, device=self.device),
            write_slots=torch.tensor(batch.write_slots, device=self.device),
        )

    def _allocated(self) -> KVPool:
        if self._pool is None:
            raise ModelError(f"{self.name} has no KV pool yet: call allocate first, or use it through an engine")
        return self._pool

    def _keep_hidden(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._hidden = first_tensor(output)

    def _resolve_eos(self) -> frozenset[int]:
        for config in (self._hf.generation_config, self._hf.config.get_text_config(decoder=True)):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                break
        given = frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos)
        known = given & frozenset(range(self._vocab_size))
        if given != known:
            strange = ", ".join(map(str, sorted(given - known)))
            self.notes += (f"end-of-text ids {strange} are ignored: the vocabulary has {self._vocab_size} ids",)
        return known

    def _resolve_context(self) -> int:
        """The model's context, capped where its RoPE would depend on the longest position in the step.

        One packed row holds many sequences, and there a neighbour's length would change an answer.
        """
        config = self._hf.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None)
        if not isinstance(context, int) or context < 1:
            raise ModelError(f"{self.name} cannot be served: its config gives {context!r} as max_position_embeddings")
        for rope in _rope_parameters(config):
            kind = rope.get("rope_type", "default")
            original = rope.get("original_max_position_embeddings", context)
            if ("dynamic" in kind or kind == "longrope") and original < context:
                self.notes += (f"context capped at {original} tokens: beyond, {kind} RoPE depends on the longest row",)
                context = original
        return context


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """RoPE settings, one for the model or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
