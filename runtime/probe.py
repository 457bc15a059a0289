"""The fidelity probe: a model is served only if radixrt's attention gives what its own code gives.

Knows nothing of particular architectures beyond the reasons it can name: what decides is the comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from radixrt.kernels.cpu.plan import Plan

from .attention import ATTENTION_NAME, Binding, Step, run_packed
from .errors import ModelError
from .kv import KVPool, LayerShape

_NUM_TOKENS = 24
_SPLIT = 11  # tokens of the first of two chunks, so that the second starts inside a page
_PAGE_SIZE = 4

# Largest difference relative to a row's norm. float64 is not at 1e-12 because most models compute their norms and
# rotary angles in float32 in any dtype: a last-bit difference there shows as 1e-7.
_BOUNDS = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the probe learned about a model that passed."""

    vocab_size: int
    shapes: dict[int, LayerShape]


def probe(hf_model: Any, binding: Binding) -> Probed:
    """Run random tokens through the untouched model and through radixrt's attention, and compare every layer.

    The second run goes in two chunks over shuffled pages. Leaves the model switched to radixrt's attention. Raises
    ModelError with one line that names the architecture and why it is refused.
    """
    config = hf_model.config.get_text_config(decoder=True)
    name = type(hf_model).__name__
    dtype = next(hf_model.parameters()).dtype
    if hf_model.config.is_encoder_decoder:
        raise _refusal(name, "it is an encoder-decoder model, radixrt serves decoder-only models")
    if dtype not in _BOUNDS:
        raise _refusal(name, f"its weights are {dtype}, served are {', '.join(map(str, _BOUNDS))}")
    _refuse_layer_types(name, config)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(config.vocab_size, (_NUM_TOKENS,), generator=generator)
    if not hf_model._can_set_attn_implementation():
        raise _refusal(name, f"its attention does not go through transformers' attention interface{_alibi(config)}")
    pool = KVPool(-(-_NUM_TOKENS // _PAGE_SIZE), _PAGE_SIZE, dtype, token_ids.device)
    pages = torch.randperm(pool.num_pages, generator=generator) + 1
    try:
        with torch.inference_mode():
            hf_model.set_attn_implementation("eager")
            expected = hf_model(input_ids=token_ids[None], use_cache=False, output_hidden_states=True)
            hf_model.set_attn_implementation(ATTENTION_NAME)
            chunks = [
                _chunk(hf_model, binding, pool, pages, token_ids, start, stop)
                for start, stop in ((0, _SPLIT), (_SPLIT, _NUM_TOKENS))
            ]
    except ModelError as error:
        raise _refusal(name, str(error)) from error
    except Exception as error:
        raise _refusal(name, f"it fails on {_NUM_TOKENS} plain tokens ({error!r:.200})") from error
    for _, step in chunks:
        _check_calls(name, config, step)
    _compare(name, dtype, expected, [output for output, _ in chunks])
    return Probed(vocab_size=expected.logits.shape[-1], shapes=pool.shapes())


def _refusal(name: str, reason: str) -> ModelError:
    return ModelError(f"{name} cannot be served: {reason}")


def _refuse_layer_types(name: str, config: Any) -> None:
    unserved = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unserved:
        raise _refusal(name, f"its layer types {', '.join(sorted(unserved))} are not full or sliding attention")


def _alibi(config: Any) -> str:
    attention = getattr(config, "attn_config", None)
    found = config.model_type == "bloom" or getattr(config, "alibi", False) or getattr(attention, "alibi", False)
    return " (it uses ALiBi biases)" if found else ""


def _chunk(
    hf_model: Any,
    binding: Binding,
    pool: KVPool,
    pages: torch.Tensor,
    token_ids: torch.Tensor,
    start: int,
    stop: int,
) -> tuple[Any, Step]:
    """Run tokens `[start, stop)`, which read the ones before them from the pool."""
    positions = torch.arange(len(token_ids))[start:stop]
    num_rows = len(positions)
    used = pages[: int(positions[-1]) // _PAGE_SIZE + 1]
    plan = Plan(torch.tensor([0, num_rows]), torch.tensor([0, len(used)]), used, positions[:1], page_size=_PAGE_SIZE)
    slots = pages[positions // _PAGE_SIZE] * _PAGE_SIZE + positions % _PAGE_SIZE
    step = Step(pool=pool, plan=plan, write_rows=None, write_slots=slots)
    rows = torch.arange(num_rows)
    output = run_packed(hf_model, binding, step, token_ids[start:stop], positions, rows, output_hidden_states=True)
    return output, step


def _check_calls(name: str, config: Any, step: Step) -> None:
    """Each layer attends once, through us, and says its window: masks are not made for a registered function."""
    called = sorted(layer for layer, _ in step.calls)
    if called != list(range(config.num_hidden_layers)):
        reason = f"{len(set(called))} of its {config.num_hidden_layers} layers call a registered attention function"
        raise _refusal(name, f"{reason} (once per layer is needed){_alibi(config)}")
    windows = dict(step.calls)
    types = getattr(config, "layer_types", None)
    for layer, kind in enumerate(types or ()):
        if kind == "sliding_attention" and windows[layer] is None:
            raise _refusal(name, f"layer {layer} has a sliding window that it gives only as a mask")
    if not types and getattr(config, "sliding_window", None) is not None and set(windows.values()) == {None}:
        raise _refusal(name, "it has a sliding window that it gives only as a mask")


def _compare(name: str, dtype: torch.dtype, expected: Any, chunks: list[Any]) -> None:
    """Hidden states layer by layer, then the logits."""
    states = expected.hidden_states or ()
    for index, state in enumerate(states):
        ours = torch.cat([chunk.hidden_states[index] for chunk in chunks], dim=1)
        _agree(name, dtype, f"layer {index - 1}" if index else "the embedding", state, ours)
    ours = torch.cat([chunk.logits for chunk in chunks], dim=1)
    _agree(name, dtype, "the logits", expected.logits, ours)


def _agree(name: str, dtype: torch.dtype, where: str, expected: torch.Tensor, ours: torch.Tensor) -> None:
    expected, ours = expected.double(), ours.double()
    if not expected.isfinite().all():
        raise _refusal(name, f"{where} of the untouched model holds NaN or infinite values in {dtype}")
    worst = float(((expected - ours).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max())
    if not worst <= _BOUNDS[dtype]:
        allowed = f"in {dtype} {_BOUNDS[dtype]:.0e} is allowed"
        raise _refusal(name, f"{where} is the first to differ from its own code, by {worst:.1e} ({allowed})")
