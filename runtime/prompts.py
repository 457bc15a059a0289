"""From what a caller calls a prompt to token ids; prompts are validated here alone. Knows nothing of engines."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .checks import instance, refuse, text
from .errors import InvalidRequest
from .model import Model
from .sequence import TokenArray
from .tokenizer import Tokenizer

MAX_NAMESPACE = 256


def token_ids_of(prompt: Any, model: Model, tokenizer: Tokenizer | None) -> TokenArray:
    """A text or token ids as a fresh int32 array; InvalidRequest where it is empty or an id has no logit.

    O(tokens); nothing of the caller's object is kept.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt: a text given, this engine has no tokenizer; give token ids")
        prompt = tokenizer.encode(text("prompt", prompt))
    ids = _as_array(prompt)
    if ids is None or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        refuse("prompt", prompt, "a text or a flat list of integer token ids")
    if not ids.size:
        raise InvalidRequest("prompt: empty; at least one token is needed")
    for at in np.flatnonzero((ids < 0) | (ids >= model.vocab_size))[:1]:
        raise InvalidRequest(f"prompt: token id {ids[at]} at {at} given, ids lie in [0, {model.vocab_size})")
    return ids.astype(np.int32)


def prompts_of(prompts: Any) -> list[Any]:
    """What `generate` was given as a list of prompts, none of them looked at yet."""
    allowed = "a text, a list of texts or a list of token id lists"
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Iterable):
        refuse("prompts", prompts, allowed)
    many = list(prompts)
    if not many or any(isinstance(prompt, numbers.Number) for prompt in many):
        refuse("prompts", prompts, allowed)
    return many


def checked_namespace(namespace: str) -> str:
    """A namespace that can be told apart and written down."""
    if not instance("namespace", namespace, str, "a text").isprintable() or len(namespace) > MAX_NAMESPACE:
        refuse("namespace", namespace, f"at most {MAX_NAMESPACE} printable characters")
    return namespace


def _as_array(prompt: Any) -> npt.NDArray[Any] | None:
    """The prompt as an array of whatever it holds; None where it is none."""
    try:
        return np.asarray(prompt)
    except Exception:  # an object of the caller's may raise anything
        return None
