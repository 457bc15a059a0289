"""The test kit of the language: backends that say what a test wants, and random programs with an oracle.

For a model of random but fixed answers, make an engine on `radixrt.runtime.testing.HashModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from radixrt.runtime import (
    Choice,
    Event,
    Explanation,
    FinishEvent,
    FinishReason,
    Handle,
    InvalidRequest,
    Output,
    PinnedPrefix,
    SamplingParams,
    Score,
    ScoreParams,
    Tokenizer,
    Usage,
)

from ._oracle import Oracle
from ._programs import Body, Planned, plain, programs, tasks
from .backend import Asked, Backend

__all__ = ["Body", "FaultyBackend", "Oracle", "Planned", "ScriptedBackend", "plain", "programs", "tasks"]

_LIKELY, _UNLIKELY = math.log(0.9), math.log(0.01)


class ScriptedBackend:
    """Answers from a table: to a text that ends with a key, its value; the longest key counts. Computes nothing.

    GenerationFailed where no key fits. Stop strings and max_tokens cut answers as an engine does. Of the options of a
    choice, tokens that go on as the answer does are likely, all others are not. `asked` has every text.
    """

    def __init__(self, replies: Mapping[str, str], tokenizer: Tokenizer, *, vocab_size: int = 1 << 20) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_token_ids: frozenset[int] = frozenset()
        self.asked: list[str] = []
        self._replies = dict(replies)
        self._tokens: list[list[int]] = []  # of each request, its answer included once it has ended
        self._live: dict[Handle, tuple[int, Asked]] = {}
        self._released: set[Handle] = set()

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int) -> Handle:
        handle = Handle(len(self._tokens))
        self._tokens.append(list(tokens))
        self._live[handle] = len(tokens), params
        return handle

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        if handle in self._released:
            raise InvalidRequest(f"handle: request {handle.number} was released")
        tokens = [*self._tokens[handle.number][:at], *(text or ())]
        return [self.submit(tokens, params, "", priority=0) for _ in range(n)]

    def abort(self, handle: Handle) -> None:
        self._live.pop(handle, None)

    def release(self, handle: Handle) -> None:
        self.abort(handle)
        self._released.add(handle)

    def step(self) -> list[Event]:
        events: list[Event] = [self._finish(handle, *asked) for handle, asked in self._live.items()]
        self._live.clear()
        return events

    def pin(self, tokens: list[int], namespace: str, *, ttl: int | None) -> PinnedPrefix:
        return PinnedPrefix(0, 0)

    def unpin(self, pinned: PinnedPrefix) -> None:
        pass

    def begin_anew(self, error: BaseException) -> None:
        for handle in list(self._live):
            self.release(handle)

    def explain(self, tokens: list[int], namespace: str) -> Explanation | None:
        return None

    @property
    def is_idle(self) -> bool:
        return not self._live

    def _finish(self, handle: Handle, prompt_len: int, params: Asked) -> FinishEvent:
        prompt = self._tokens[handle.number]
        prefix = "" if isinstance(params, ScoreParams) else params.prefix
        asked_len = params.start if isinstance(params, ScoreParams) else prompt_len
        said = b"".join(map(self.tokenizer.token_bytes, prompt[:asked_len])).decode(errors="replace") + prefix
        self.asked.append(said)
        keys = [key for key in self._replies if said.endswith(key)]
        error = None if keys else f"no reply is scripted to {said[-80:]!r}"
        reply = self._replies[max(keys, key=len)] if keys else ""
        ids = self.tokenizer.encode(prefix + reply)
        reason: FinishReason = "stop" if keys else "error"
        if isinstance(params, ScoreParams):
            return FinishEvent(handle=handle, output=self._scored(handle, prompt, asked_len, ids, reason, error))
        most = params.max_tokens + len(self.tokenizer.encode(prefix))
        if len(ids) > most:
            ids, reason = ids[:most], "length"
        text = b"".join(map(self.tokenizer.token_bytes, ids)).decode(errors="replace").removeprefix(prefix)
        stops = [text.index(stop) for stop in params.stop if stop in text]
        if stops:
            text, reason = text[: min(stops)], "stop"
        prompt += ids
        output = self._output(handle, prompt[:prompt_len], ids, text, reason, error)
        return FinishEvent(handle=handle, output=output)

    def _scored(
        self, handle: Handle, prompt: list[int], start: int, ids: list[int], reason: FinishReason, error: str | None
    ) -> Output:
        options = prompt[start:]
        num_likely = next((n for n, pair in enumerate(zip(options, ids, strict=False)) if pair[0] != pair[1]), len(ids))
        logprobs = [_LIKELY if n < num_likely else _UNLIKELY for n in range(len(options))]
        output = self._output(handle, prompt, [], "", reason, error)
        found = Score(
            token_ids=tuple(prompt),
            start=start,
            logprobs=tuple(logprobs) if error is None else (),
            usage=output.usage,
            error=error,
        )
        return replace(output, score=found)

    def _output(
        self, handle: Handle, prompt: list[int], ids: list[int], text: str, reason: FinishReason, error: str | None
    ) -> Output:
        choice = Choice(index=0, text=text, token_ids=tuple(ids), finish_reason=reason, error=error)
        usage = Usage(
            prompt_tokens=len(prompt),
            cached_tokens=0,
            computed_tokens=len(prompt),
            recomputed_tokens=0,
            completion_tokens=len(ids),
        )
        return Output(handle=handle, prompt_token_ids=tuple(prompt), choices=(choice,), usage=usage)


class FaultyBackend:
    """Another backend that fails where a plan says so: `fault(name, number)` may raise.

    `name` is "submit", "fork" or "step", asked before the call, or "finish", asked of each request that has ended: an
    error there is that request's alone, as if it had been cut off. `number` counts all of those together, from 0.
    """

    def __init__(self, backend: Backend, fault: Callable[[str, int], None]) -> None:
        self._backend = backend
        self._fault = fault
        self.num_calls = 0
        self.tokenizer, self.vocab_size = backend.tokenizer, backend.vocab_size
        self.eos_token_ids = backend.eos_token_ids
        self.abort, self.release, self.begin_anew = backend.abort, backend.release, backend.begin_anew
        self.pin, self.unpin, self.explain = backend.pin, backend.unpin, backend.explain

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int) -> Handle:
        self._may_fail("submit")
        return self._backend.submit(tokens, params, namespace, priority=priority)

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        self._may_fail("fork")
        return self._backend.fork(handle, n, params, text=text, at=at)

    def step(self) -> list[Event]:
        self._may_fail("step")
        return [self._cut(event) if isinstance(event, FinishEvent) else event for event in self._backend.step()]

    @property
    def is_idle(self) -> bool:
        return self._backend.is_idle

    def _cut(self, event: FinishEvent) -> FinishEvent:
        """The end of a request or, if the plan says so, its failure."""
        try:
            self._may_fail("finish")
        except Exception as error:
            choice = Choice(index=0, text="", token_ids=(), finish_reason="error", error=str(error))
            return replace(event, output=replace(event.output, choices=(choice,)))
        return event

    def _may_fail(self, name: str) -> None:
        number, self.num_calls = self.num_calls, self.num_calls + 1
        self._fault(name, number)
