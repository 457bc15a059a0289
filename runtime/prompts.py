"""From what a caller calls a prompt to token ids; prompts are validated here alone. Knows nothing of engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import InvalidRequest
from .model import Model
from .sequence import TokenArray
from .tokenizer import Tokenizer


def token_ids_of(prompt: Any, model: Model, tokenizer: Tokenizer | None) -> TokenArray:
    """A text or token ids as a fresh int32 array; InvalidRequest where it is empty or an id has no logit.

    O(tokens); nothing of the caller's object is kept.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequest("prompt: a text given, this engine has no tokenizer; give token ids")
        prompt = tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except (ValueError, OverflowError):
        ids = np.empty((0, 0))
    if ids.size == 0 and ids.ndim == 1:
        raise InvalidRequest("prompt: empty; at least one token is needed")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(f"prompt: {_short(prompt)} given, a text or a flat list of integer token ids is needed")
    wrong = np.flatnonzero((ids < 0) | (ids >= model.vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise InvalidRequest(f"prompt: token id {ids[at]} at {at} given, ids lie in [0, {model.vocab_size})")
    return ids.astype(np.int32)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
