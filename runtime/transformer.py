"""A transformers causal language model behind the `Model` protocol: its own code, our paged attention.

Knows nothing of requests, caching or where the weights came from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from radixrt.kernels.draws import Drawer
from radixrt.kernels.plan import IntArray

from .attention import Step, prepare, run_packed
from .backends import Chosen, choose_backend, choose_draw, choose_product, probe_backend
from .batch import Batch
from .errors import ModelError
from .fences import Fence
from .kv import KVPool
from .logprobs import FloatArray, logprobs_of
from .model import Forward
from .probe import first_tensor, probe, run_untouched
from .slimming import slim

# Rows that a product takes at once, a step's usual budget: the shapes are probed for exactness up to here.
_MAX_ROWS = 512


class TransformerModel:
    """Serves a loaded transformers model. Making one runs the fidelity probe; ModelError if it is not faithful.

    The model is switched to radixrt's attention for good. `notes` are lines that a user should see at load.
    """

    def __init__(
        self,
        hf_model: Any,
        *,
        name: str = "",
        exact: bool | None = None,
        cpu_kernel: str | None = None,
        owned: bool = False,
    ) -> None:
        """`name` is what it was loaded by; a record rebuilds the model from that.

        `exact`: give the same bits whatever else a step holds, however it is cut and whatever was cached; None: where
        the model and the machine allow it. `cpu_kernel`: as `choose_backend` takes it. `owned`: as `slim` takes it.
        """
        self.name = name or type(hf_model).__name__
        self.dtype: torch.dtype = next(hf_model.parameters()).dtype
        self.device: torch.device = next(hf_model.parameters()).device
        self.notes: tuple[str, ...] = ()
        self._hf = hf_model.eval()
        self._cpu_kernel = cpu_kernel
        self._asked_exact = exact
        on_cpu = self.device.type == "cpu"
        wanted = on_cpu and exact is not False
        self._num_parameters = sum(parameter.numel() for parameter in hf_model.parameters())
        untouched = run_untouched(hf_model)
        self._product = choose_product(self.dtype, asked=cpu_kernel) if on_cpu else None
        self._draw = choose_draw(asked=cpu_kernel)
        self._slimmed = None
        if self._product is not None:
            self._slimmed = slim(hf_model, exact=wanted, max_rows=_MAX_ROWS, owned=owned, native=self._product.native)
        probed = probe(hf_model, untouched, probe_backend(self.device), exact=wanted)
        self._inexact = self._flaw(probed.inexact)
        if wanted and self._inexact is not None:
            self.notes += (f"answers may differ in their last bits with what else runs: {self._inexact}",)
        self._require_exact()
        self._binding, self._vocab_size, self._shapes = probed.binding, probed.vocab_size, probed.shapes
        self._layers = {(shape, probed.groups[layer]) for layer, shape in probed.shapes.items()}
        self._context_len = self._resolve_context()
        self._chosen: Chosen | None = None
        self._pool: KVPool | None = None
        self._eos_token_ids = self._resolve_eos()
        self._body = probed.body
        self._hidden: Any = None  # what the body gave last
        self._body.register_forward_hook(self._keep_hidden)

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
    def exact(self) -> bool:
        """Whether nothing but its tokens changes a row's bits."""
        return self._inexact is None

    @property
    def spec(self) -> dict[str, Any]:
        return {
            "kind": "transformers",
            "name": self.name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "exact": self.exact,
        }

    def describe(self) -> dict[str, str]:
        shapes = sorted({f"{s.num_heads} KV heads of {s.key_dim}" for s in self._shapes.values()})
        return {
            "model": f"{self.name} ({type(self._hf).__name__}, {self._num_parameters:,} parameters)",
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "layers": f"{len(self._shapes)}, {' and '.join(shapes)}",
            "attention": "not chosen yet" if self._chosen is None else str(self._chosen),
            **({} if self._product is None else {"products": str(self._product)}),
            "draws": str(self._draw),
            "modules": "as loaded" if self._slimmed is None else str(self._slimmed),
            "exact": "yes, to the bit" if self.exact else f"no: {self._inexact}",
        } | {f"note {i}": note for i, note in enumerate(self.notes, 1)}

    @property
    def draw(self) -> Drawer:
        return self._draw.draw

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.dtype.itemsize * sum(shape.token_width for shape in self._shapes.values())

    @property
    def copies_at_once(self) -> bool:
        return self.device.type != "cuda"

    def allocate(self, num_pages: int, page_size: int, num_host_pages: int = 0) -> None:
        """Replaces the pool of an earlier engine, which must be closed."""
        self._pool = None  # frees the old one before the new one is made
        self._chosen = choose_backend(self.device, self.dtype, page_size, self._shapes.values(), asked=self._cpu_kernel)
        if self.exact:
            flaws = (self._chosen.backend.inexact(self.dtype, page_size, *layer) for layer in self._layers)
            self._inexact = next(filter(None, flaws), None)
            self._require_exact()
        self._pool = KVPool(
            self._chosen.backend, num_pages, page_size, self.dtype, self.device, num_host_pages=num_host_pages
        )
        for index, shape in self._shapes.items():
            self._pool.layer(index, shape)

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        self._allocated().copy_pages(src, dst)

    def copy_out(self, device_pages: IntArray, host_pages: IntArray) -> Fence:
        return self._allocated().copy_out(device_pages, host_pages)

    def copy_in(self, host_pages: IntArray, device_pages: IntArray) -> Fence:
        return self._allocated().copy_in(host_pages, device_pages)

    def poison_slots(self, slots: IntArray) -> None:
        self._allocated().poison_slots(slots)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Forward:
        step = prepare(self._allocated(), batch, exact=self.exact)
        output = run_packed(self._hf, self._binding, step, batch)
        logits = output.logits[0].float()
        hidden = first_tensor(self._hidden)
        assert hidden is not None, "the probe saw its body give the rows"
        finite = _finite_rows(hidden[0])
        finite[torch.from_numpy(batch.logit_rows)] &= _finite_rows(logits)
        logprobs = self._logprobs(step, batch)
        self._hidden = None
        return Forward(logits=logits, finite=finite.numpy(force=True), logprobs=logprobs)

    def _logprobs(self, step: Step, batch: Batch) -> FloatArray:
        """Those of `batch.scored_ids`: a few rows at a time through the model's own head, over what its body gave."""
        if not len(batch.scored_rows):
            return np.empty(0)
        given, forward = self._hidden, self._body.forward
        self._body.forward = lambda *_, **__: given
        try:
            return logprobs_of(
                lambda rows: run_packed(self._hf, self._binding, step, replace(batch, logit_rows=rows)).logits[0],
                batch.scored_rows,
                batch.scored_ids,
            )
        finally:
            self._body.forward = forward

    def _flaw(self, seen: str | None) -> str | None:
        """Why answers are not exact, where they are not; `seen` is what the probe saw."""
        if self._asked_exact is False:
            return "it was turned off"
        if self._slimmed is None:
            return f"it is promised on the CPU, not on {self.device}"
        return next(iter(self._slimmed.flaws), seen)

    def _require_exact(self) -> None:
        if self._asked_exact and self._inexact is not None:
            raise ModelError(f"{self.name} cannot be served with exact=True: {self._inexact}")

    def _allocated(self) -> KVPool:
        if self._pool is None:
            raise ModelError(f"{self.name} has no KV pool yet: call allocate first, or use it through an engine")
        return self._pool

    def _keep_hidden(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._hidden = output

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


def _finite_rows(rows: torch.Tensor) -> torch.Tensor:
    """Which rows hold no NaN or infinity; a finite sum says so at a tenth of the cost of looking at each number."""
    finite = rows.sum(dim=-1).isfinite()
    return finite if bool(finite.all()) else rows.isfinite().all(dim=-1)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """RoPE settings, one for the model or one for each layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
