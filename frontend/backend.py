"""What the language needs of whatever generates: the `Backend` protocol, and an engine in this process behind it.

Knows nothing of programs, states or text: token ids go in, events come out.
"""

from __future__ import annotations

from typing import Protocol

from radixrt.runtime import (
    Engine,
    Event,
    Explanation,
    Handle,
    InvalidRequest,
    PinnedPrefix,
    SamplingParams,
    ScoreParams,
    Tokenizer,
)

Asked = SamplingParams | ScoreParams


class Backend(Protocol):
    """Requests that continue token ids, and forks of requests. One caller at a time: the driver sees to that.

    The k-th fork of a request draws on the request's path and then k; a request that is submitted, on (0,). A request
    that was aborted before it ran owns its prompt and can be forked like any other that ended.
    """

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int) -> Handle:
        """Queue a request: to go on, or for log-probabilities, which its output's `score` has. InvalidRequest if it can
        never run."""

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        """n requests that own the first `at` tokens of one that ended, then `text`. InvalidRequest if it is gone."""

    def abort(self, handle: Handle) -> None:
        """End a request; once it has ended, a no-op."""

    def release(self, handle: Handle) -> None:
        """Say that a request will not be forked again, which aborts it if it lives. Twice is fine."""

    def step(self) -> list[Event]:
        """Go on with everything for a while; what happened since the last step, one FinishEvent per request."""

    def pin(self, tokens: list[int], namespace: str, *, ttl: int | None) -> PinnedPrefix:
        """Keep what is cached of these tokens, for `ttl` steps or until `unpin`."""

    def unpin(self, pinned: PinnedPrefix) -> None:
        """End a pin. One that has ended is no error."""

    def begin_anew(self, error: BaseException) -> None:
        """Lose every request and pin, in whatever state they are: an `error` broke off who cared for them."""

    def explain(self, tokens: list[int], namespace: str) -> Explanation | None:
        """What the cache has of these tokens and why no more. None where that is not known."""

    @property
    def is_idle(self) -> bool:
        """No request waits or runs, so no event is to come."""


class EngineBackend:
    """An engine in this process, which this keeps alive or, given a weak proxy of it, does not."""

    def __init__(self, engine: Engine) -> None:
        if engine.tokenizer is None:
            raise InvalidRequest("engine: it has no tokenizer, programs speak in text; give Engine a tokenizer")
        self._engine = engine
        self.tokenizer: Tokenizer = engine.tokenizer
        self.vocab_size = engine.model.vocab_size
        self.eos_token_ids = engine.model.eos_token_ids

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int) -> Handle:
        return self._engine.submit(tokens, params, namespace, priority=priority)

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        return self._engine.fork(handle, n, params, text=text, at=at)

    def abort(self, handle: Handle) -> None:
        self._engine.abort(handle)

    def release(self, handle: Handle) -> None:
        self._engine.release(handle)

    def step(self) -> list[Event]:
        return self._engine.step()

    def pin(self, tokens: list[int], namespace: str, *, ttl: int | None) -> PinnedPrefix:
        return self._engine.pin(tokens, namespace, ttl=ttl)

    def unpin(self, pinned: PinnedPrefix) -> None:
        self._engine.unpin(pinned)

    def begin_anew(self, error: BaseException) -> None:
        self._engine.begin_anew(error)

    def explain(self, tokens: list[int], namespace: str) -> Explanation | None:
        return self._engine.explain(tokens, namespace)

    @property
    def is_idle(self) -> bool:
        stats = self._engine.stats()
        return not stats.num_running and not stats.num_waiting
