"""From what a caller asks to a `Sequence`, or a refusal: requests are validated here and nowhere later.

Knows nothing of queues, pages or steps.
"""

from __future__ import annotations

from typing import Any

from .checks import instance
from .detokenizer import Detokenizer
from .errors import InvalidRequest
from .model import Model
from .outputs import Handle
from .params import SamplingParams
from .prompts import checked_namespace, token_ids_of
from .sampler import History
from .sequence import Sequence, TokenArray
from .tokenizer import Tokenizer


class Intake:
    """Makes sequences that one engine can run: `pool_len` tokens of KV, draws keyed by `seed` where none is given."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None, *, seed: int, pool_len: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._seed = seed
        self._pool_len = pool_len

    def tokens(self, prompt: Any) -> TokenArray:
        """A prompt as token ids; InvalidRequest where it is none."""
        return token_ids_of(prompt, self._model, self._tokenizer)

    def sequence(self, handle: Handle, prompt: Any, params: SamplingParams, namespace: str) -> Sequence:
        """A request from the start. InvalidRequest if this engine could never run it alone."""
        tokens = self.tokens(prompt)
        max_len = self.max_len(len(tokens), params)
        detokenizer = None
        if self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, params.stop, tokens.tolist(), min_tokens=params.min_tokens)
        return Sequence(
            handle=handle,
            params=params,
            namespace=checked_namespace(namespace),
            seed=(params.seed,) if params.seed is not None else (self._seed, handle.number),
            path=(0,),
            prompt_len=len(tokens),
            output_start=len(tokens),
            limits_start=len(tokens),
            max_len=max_len,
            history=History(tokens),
            detokenizer=detokenizer,
            _buffer=tokens,
            num_tokens=len(tokens),
        )

    def child(self, parent: Sequence, handle: Handle, params: SamplingParams | None) -> Sequence:
        """One that goes on from the parent's committed tokens, without pages; its limits count anew with `params`."""
        if params is None:
            return parent.branch(handle, parent.params)
        child = parent.branch(handle, params)
        child.limits_start = child.num_tokens
        child.max_len = self.max_len(child.num_tokens, params)
        if child.detokenizer is not None:
            child.detokenizer = child.detokenizer.branch(params.stop, min_tokens=params.min_tokens)
        if params.seed is not None:
            child.seed = (params.seed,)
        return child

    def max_len(self, prompt_len: int, params: SamplingParams) -> int:
        """Tokens at which a request ends with "length"; InvalidRequest where this engine could never run it."""
        instance("params", params, SamplingParams, "SamplingParams").check_against(
            self._model.vocab_size, has_text=self._tokenizer is not None, eos_token_ids=self._model.eos_token_ids
        )
        context_len = self._model.context_len
        if prompt_len > context_len:
            raise InvalidRequest(f"prompt: {prompt_len} tokens given, the model's context holds {context_len}")
        max_len = min(prompt_len + params.max_tokens, context_len + 1)
        if max_len - 1 > self._pool_len:  # the last token is never fed
            raise InvalidRequest(
                f"prompt and max_tokens: {prompt_len} + {max_len - prompt_len} tokens given, the pool holds "
                f"{self._pool_len}; give a shorter prompt, a smaller max_tokens or an engine with more kv_memory"
            )
        return max_len
