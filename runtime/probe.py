"""The fidelity probe: a model is served only if radixrt's attention gives what its own code gives.

Knows nothing of particular architectures beyond the reasons it can name: what decides is the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.utils.generic import ModelOutput

from radixrt.kernels.backend import AttentionBackend, LayerShape

from .attention import ATTENTION_NAME, Binding, Call, bind, prepare, run_packed
from .batch import Batch
from .errors import ModelError
from .kv import KVPool
from .threads import threads

_NUM_TOKENS = 24
_SPLIT = 11  # tokens of the first of two chunks, so that the second starts inside a page
_PAGE_SIZE = 4
_COPIES = (3, 23)  # of all tokens but one: 69 and 529 rows

# Largest difference relative to a row's norm. float64 is not at 1e-12 because most models compute their norms and
# rotary angles in float32 in any dtype: a last-bit difference there shows as 1e-7.
_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Untouched:
    """What a model's own code gives for the probe's tokens."""

    token_ids: torch.Tensor
    dtype: torch.dtype  # of the model's first parameter
    output: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the probe learned about a model that passed."""

    binding: Binding
    vocab_size: int
    shapes: dict[int, LayerShape]
    groups: dict[int, int]  # query heads for each KV head, by layer
    body: Any  # the module whose output is the last one with a row per token; what follows sees the rows asked for
    inexact: str | None  # where a row's bits depend on the rows beside it, looked for where exactness is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """What one of the chunks gave."""

    output: Any
    rows: torch.Tensor  # [R] the rows whose logits were asked for, counted in the whole row
    calls: list[Call]
    body: Any


def run_untouched(hf_model: Any) -> Untouched:
    """Run random tokens through the model before anything of it is changed. Raises ModelError as `probe` does."""
    with _refusing(hf_model):
        config = hf_model.config.get_text_config(decoder=True)
        parameter = next(hf_model.parameters())
        if hf_model.config.is_encoder_decoder:
            raise ModelError("it is an encoder-decoder model, radixrt serves decoder-only models")
        if parameter.dtype not in _BOUNDS:
            raise ModelError(f"its weights are {parameter.dtype}, served are {', '.join(map(str, _BOUNDS))}")
        _refuse_config(config)
        if not hf_model._can_set_attn_implementation():
            raise ModelError(f"its attention does not go through transformers' attention interface{_alibi(config)}")
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(config.vocab_size, (_NUM_TOKENS,), generator=generator).to(parameter.device)
        hf_model.set_attn_implementation("eager")
        return Untouched(
            token_ids=token_ids,
            dtype=parameter.dtype,
            output=hf_model(input_ids=token_ids[None], use_cache=False, output_hidden_states=True),
        )


def probe(hf_model: Any, untouched: Untouched, backend: AttentionBackend, *, exact: bool) -> Probed:
    """Run the same tokens through radixrt's attention, over shuffled pages in two chunks, and compare every layer.

    Whatever else of the model was replaced meanwhile is compared with it. Leaves the model switched to radixrt's
    attention. Raises ModelError with one line that names the architecture and why it is refused.
    """
    with _refusing(hf_model):
        dtype, device = untouched.dtype, untouched.token_ids.device
        pool = KVPool(backend, -(-_NUM_TOKENS // _PAGE_SIZE), _PAGE_SIZE, dtype, device)
        binding = bind(hf_model)
        hf_model.set_attn_implementation(ATTENTION_NAME)
        chunks = [
            _chunk(hf_model, binding, pool, untouched.token_ids, start, stop, exact=exact)
            for start, stop in ((0, _SPLIT), (_SPLIT, _NUM_TOKENS))
        ]
        for chunk in chunks:
            _check_calls(hf_model.config.get_text_config(decoder=True), chunk.calls)
        _compare(dtype, untouched.output, chunks)
        body = chunks[0].body
        if body is None or any(chunk.body is not body for chunk in chunks):
            raise ModelError("no part of it behind its attention gives one row for each token")
        return Probed(
            binding=binding,
            vocab_size=untouched.output.logits.shape[-1],
            shapes=pool.shapes,
            groups={call.layer: call.group for call in chunks[0].calls},
            body=body,
            inexact=_inexact(hf_model, binding, pool, untouched.token_ids, chunks[1].output) if exact else None,
        )


def _inexact(hf_model: Any, binding: Binding, pool: KVPool, token_ids: torch.Tensor, together: Any) -> str | None:
    """Where a row's bits depend on the rows beside it: the first place that is seen, None where there is none."""
    return _differs_from_alone(hf_model, binding, pool, token_ids, together) or _differs_among_many(
        hf_model, binding, pool, token_ids
    )


def _differs_among_many(hf_model: Any, binding: Binding, pool: KVPool, token_ids: torch.Tensor) -> str | None:
    """Run a short prompt many times over in one step, up to a step's usual budget of rows, and compare the copies.

    So many rows show what a few cannot: a function that torch cuts for its threads, and computes the ends of otherwise.
    Both counts are odd, as is the prompt's length, so that whatever the width, it is not all cut evenly.
    """
    length = _NUM_TOKENS - 1
    num_pages = -(-length // _PAGE_SIZE)
    for copies in _COPIES:
        many = KVPool(pool.backend, copies * num_pages, _PAGE_SIZE, pool.dtype, token_ids.device)
        tables = 1 + np.arange(copies * num_pages).reshape(copies, num_pages)
        prompts = np.tile(token_ids[:length].numpy(force=True), (copies, 1))
        batch = Batch.side_by_side(prompts, start=0, tables=tables, page_size=_PAGE_SIZE)
        output = run_packed(hf_model, binding, prepare(many, batch, exact=True), batch, output_hidden_states=True)
        for index, state in enumerate(output.hidden_states or ()):
            its = state.unflatten(-2, (copies, length))
            if not torch.equal(its, its.narrow(-3, 0, 1).expand_as(its)):
                return f"in {_place(index)} a row's bits depend on its place among {copies * length}"
        if not torch.equal(output.logits, output.logits[:, :1].expand_as(output.logits)):
            return f"the bits of a row's logits depend on its place among {copies}"
    return None


def _differs_from_alone(
    hf_model: Any, binding: Binding, pool: KVPool, token_ids: torch.Tensor, together: Any
) -> str | None:
    """Run the second chunk again, each row alone and on one thread, and say where the bits first differ."""
    with threads(1):
        alone = [
            _chunk(hf_model, binding, pool, token_ids, row, row + 1, exact=True).output
            for row in range(_SPLIT, _NUM_TOKENS)
        ]
    for index, whole in enumerate(together.hidden_states or ()):
        if not torch.equal(whole, torch.cat([output.hidden_states[index] for output in alone], dim=-2)):
            return f"in {_place(index)} a row's bits depend on the rows beside it"
    if not torch.equal(together.logits, torch.cat([output.logits for output in alone[::2]], dim=-2)):
        return "the bits of a row's logits depend on the rows beside it"
    return None


@contextmanager
def _refusing(hf_model: Any) -> Iterator[None]:
    """Whatever is raised inside refuses the model; a ModelError there says the reason alone."""
    try:
        with torch.inference_mode():
            yield
    except Exception as error:
        told = (
            str(error) if isinstance(error, ModelError) else f"it fails on {_NUM_TOKENS} plain tokens ({error!r:.200})"
        )
        raise ModelError(f"{type(hf_model).__name__} cannot be served: {told}") from error


def _refuse_config(config: Any) -> None:
    """What a config asks for that cannot be served, where the comparison would not see it."""
    if config.num_hidden_layers < 1:
        raise ModelError(f"its config gives {config.num_hidden_layers} layers")
    unserved = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unserved:
        raise ModelError(f"its layer types {', '.join(sorted(unserved))} are not full or sliding attention")
    if getattr(config, "attn_temperature_tuning", False):
        raise ModelError("its attn_temperature_tuning scales by the place in a step, not by the position in a sequence")


def _alibi(config: Any) -> str:
    attention = getattr(config, "attn_config", None)
    found = config.model_type == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False)
    return " (it uses ALiBi biases)" if found else ""


def _chunk(
    hf_model: Any, binding: Binding, pool: KVPool, token_ids: torch.Tensor, start: int, stop: int, *, exact: bool
) -> _Chunk:
    """Run tokens `[start, stop)`, which read the ones before them from the pool; logits of every second row."""
    pages = np.random.default_rng(0).permutation(pool.num_pages) + 1
    table = pages[: (stop - 1) // _PAGE_SIZE + 1]
    rows = np.arange(0, stop - start, 2)
    chunk = token_ids[start:stop].numpy(force=True)
    batch = Batch.side_by_side(chunk[None], start=start, tables=table[None], page_size=_PAGE_SIZE)
    batch = replace(batch, logit_rows=rows)
    step = prepare(pool, batch, exact=exact)
    with _body(hf_model, batch.num_rows) as body:
        output = run_packed(hf_model, binding, step, batch, output_hidden_states=True)
    return _Chunk(output=output, rows=torch.from_numpy(start + rows), calls=step.calls, body=body[-1] if body else None)


@contextmanager
def _body(hf_model: Any, num_rows: int) -> Iterator[list[Any]]:
    """Collects the modules that give `[1, num_rows, width]` after the last attention, in the order they end.

    Watched rather than asked for by name: not every model calls its `base_model`, and some have none.
    """
    found: list[Any] = []

    def ended(module: Any, _inputs: Any, output: Any) -> None:
        if hasattr(module, "radixrt_binding"):
            found.clear()
        elif (hidden := first_tensor(output)) is not None and hidden.dim() == 3 and hidden.shape[:2] == (1, num_rows):
            found.append(module)

    hooks = [module.register_forward_hook(ended) for module in hf_model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def first_tensor(output: Any) -> torch.Tensor | None:
    """A module's output, or the first part of it: the hidden states, by transformers' convention."""
    parts = output.to_tuple() if isinstance(output, ModelOutput) else output
    first = parts[0] if isinstance(parts, (tuple, list)) and parts else parts
    return first if isinstance(first, torch.Tensor) else None


def _check_calls(config: Any, calls: list[Call]) -> None:
    """Each layer attends once, through us, and says its window: masks are not made for a registered function."""
    called = sorted(call.layer for call in calls)
    if called != list(range(config.num_hidden_layers)):
        reason = f"{len(set(called))} of its {config.num_hidden_layers} layers call a registered attention function"
        raise ModelError(f"{reason} (once per layer is needed){_alibi(config)}")
    windows = {call.layer: call.window for call in calls}
    types = getattr(config, "layer_types", None)
    window, context = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    if window is not None and context is not None and window >= context:
        return  # nothing is ever outside it
    for layer, kind in enumerate(types or ()):
        if kind == "sliding_attention" and windows[layer] is None:
            raise ModelError(f"layer {layer} has a sliding window that it gives only as a mask")
    if not types and window is not None and set(windows.values()) == {None}:
        raise ModelError("it has a sliding window that it gives only as a mask")


def _compare(dtype: torch.dtype, expected: Any, chunks: list[_Chunk]) -> None:
    """Hidden states layer by layer (`[..., T, width]`), then the logits of the rows asked for."""
    for index, state in enumerate(expected.hidden_states or ()):
        ours = torch.cat([chunk.output.hidden_states[index] for chunk in chunks], dim=-2)
        _agree(dtype, _place(index), state, ours)
    rows = torch.cat([chunk.rows for chunk in chunks])
    ours = torch.cat([chunk.output.logits for chunk in chunks], dim=-2)
    if ours.shape[-2] != len(rows):
        raise ModelError("it does not serve logits_to_keep: it gives logits of rows that were not asked for")
    _agree(dtype, "the logits", expected.logits[:, rows], ours)


def _place(index: int) -> str:
    """What hidden states number `index` come from."""
    return f"layer {index - 1}" if index else "the embedding"


def _agree(dtype: torch.dtype, where: str, expected: torch.Tensor, ours: torch.Tensor) -> None:
    expected, ours = expected.double(), ours.double()
    if not expected.isfinite().all():
        wider = "; load it in bfloat16 or float32" if dtype == torch.float16 else ""
        raise ModelError(f"{where} of the untouched model holds NaN or infinite values in {dtype}{wider}")
    worst = float(((expected - ours).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max())
    if not worst <= _BOUNDS[dtype]:
        allowed = f"in {dtype} {_BOUNDS[dtype]:.0e} is allowed"
        raise ModelError(f"{where} is the first to differ from its own code, by {worst:.1e} ({allowed})")
