"""Programs on a server: `connect`, and a `Backend` over any URL that speaks OpenAI's completions.

Knows nothing of HTTP or of which fields a server knows. There are two ways to speak of text. With the model's own
tokenizer, prompts go as token ids, and a state is what it is on an engine. Without one, text is the only thing that
both sides know: ids are its bytes, prompts go as text or, where a state has messages, as messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from radixrt.runtime import (
    Choice,
    Event,
    FinishEvent,
    Handle,
    InvalidRequest,
    Output,
    PinnedPrefix,
    SamplingParams,
    ScoreParams,
    Tokenizer,
    checks,
    load_tokenizer,
)

from .answer import Answer, Count, holds
from .backend import Asked
from .codec import Codec
from .dialect import Body, Dialect
from .failures import ServerError
from .node import seed_of
from .plaintext import NUM_IDS, TextTokenizer
from .wire import Wire

__all__ = ["UrlBackend", "connect"]

POLL = 0.01  # seconds that a step waits for something to happen: others who want the driver's lock wait as long
TEXT, CHAT = "/completions", "/chat/completions"


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request: `tokens` are its prompt and, once it has ended, its output."""

    handle: Handle
    tokens: list[int]
    params: SamplingParams
    namespace: str
    path: tuple[int, ...]
    fields: Body  # of what it asks, all but what it goes on from and the seed
    is_held: bool  # to its grammar, by the server
    num_forks: int = 0


class UrlBackend:
    """A server as a `Backend`. Sends a request when the driver next steps; many at once, each on a stream of its own.

    A draw's path becomes part of the seed, so programs repeat on a server that honours `seed`. Priorities and pins are
    not for a client to give: they do nothing.
    """

    def __init__(
        self,
        wire: Wire,
        *,
        model: str | None = None,
        own: tuple[Tokenizer, int] | None = None,
        num_tries: int | None = None,
    ) -> None:
        """`own`: the model's tokenizer and its number of ids. `num_tries`: where a server cannot hold to a grammar."""
        self.tokenizer: Tokenizer
        self.tokenizer, self.vocab_size = own if own is not None else (TextTokenizer(), NUM_IDS)
        self.eos_token_ids = self.tokenizer.eos_token_ids
        self._wire = wire
        self._codec = Codec(self.tokenizer, self.vocab_size)
        self._dialect = Dialect(wire, model, self._codec, sends_ids=own is not None)
        self._num_tries = num_tries
        self._numbers = count()
        self._requests: dict[Handle, _Request] = {}
        self._waiting: list[Handle] = []
        self._running: dict[Handle, Future[None]] = {}
        self._events: SimpleQueue[Event] = SimpleQueue()

    def __repr__(self) -> str:
        return f"<server {self._wire.url}>"

    def close(self) -> None:
        """Break off what runs. Twice is fine."""
        self._wire.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, tokens: list[int], params: Asked, namespace: str, *, priority: int) -> Handle:
        if isinstance(params, ScoreParams):
            raise InvalidRequest(
                f"choose: {self._wire.url} tells no log-probabilities of options; use s.gen(Literal[...])"
            )
        return self._new(tokens, params, namespace, (0,))

    def fork(self, handle: Handle, n: int, params: SamplingParams, *, text: list[int] | None, at: int) -> list[Handle]:
        parent = self._requests.get(handle)
        if parent is None:
            raise InvalidRequest(f"handle: request {handle.number} was released")
        tokens, first = [*parent.tokens[:at], *(text or ())], parent.num_forks
        children = [self._new(tokens, params, parent.namespace, (*parent.path, first + k)) for k in range(n)]
        parent.num_forks += n
        return children

    def _new(self, tokens: list[int], params: SamplingParams, namespace: str, path: tuple[int, ...]) -> Handle:
        if not tokens:
            raise InvalidRequest("prompt: empty; at least one token is needed")
        params.check_against(self.vocab_size, eos_token_ids=self.eos_token_ids)
        self._refuse_what_has_no_meaning(params)
        where = CHAT if self._messages(tokens) else TEXT
        fields = self._dialect.fields(where, params, namespace)
        if not self._is_text and self._dialect.tells_ids(where):
            fields["return_token_ids"] = True
        grammar = self._dialect.grammar_fields(where, params.grammar) if params.grammar is not None else None
        if params.grammar is not None and grammar is None and self._num_tries is None:
            raise InvalidRequest(
                f"grammar: {params.grammar.kind} given, to which {self._wire.url} cannot hold an output; allowed: "
                "connect(validate_and_retry=3), which checks what comes"
            )
        handle = Handle(next(self._numbers))
        self._requests[handle] = _Request(
            handle=handle,
            tokens=list(tokens),
            params=params,
            namespace=namespace,
            path=path,
            fields=fields | (grammar or {}),
            is_held=grammar is not None,
        )
        self._waiting.append(handle)
        return handle

    def _refuse_what_has_no_meaning(self, params: SamplingParams) -> None:
        if params.num_branches > 1:
            raise InvalidRequest(f"n: {params.num_branches} choices of one request given; allowed: forks of the state")
        if params.prefix:
            raise InvalidRequest('prefix: asked of a server, which chooses tokens itself; allowed: boundary="raw"')
        if params.logprobs is not None:
            raise InvalidRequest("logprobs: asked of a server, which tells no ids with them; allowed: None")
        if self._is_text and (params.logit_bias or params.stop_token_ids):
            raise InvalidRequest("logit_bias, stop_token_ids: given without a tokenizer; give connect(tokenizer=)")

    @property
    def _is_text(self) -> bool:
        return isinstance(self.tokenizer, TextTokenizer)

    def _messages(self, tokens: Sequence[int]) -> list[dict[str, str]]:
        return self.tokenizer.messages(tokens) if isinstance(self.tokenizer, TextTokenizer) else []

    def abort(self, handle: Handle) -> None:
        if handle in self._waiting:
            self._waiting.remove(handle)
        elif handle in self._running:
            self._running.pop(handle).cancel()
        else:
            return
        request = self._requests[handle]
        choice = Choice(index=0, text="", token_ids=(), finish_reason="abort")
        self._events.put(FinishEvent(handle=handle, output=_output(request, choice, Count())))

    def release(self, handle: Handle) -> None:
        self.abort(handle)
        self._requests.pop(handle, None)

    def pin(self, tokens: list[int], namespace: str, *, ttl: int | None) -> PinnedPrefix:
        return PinnedPrefix(0, 0)

    def unpin(self, pinned: PinnedPrefix) -> None:
        pass

    def begin_anew(self, error: BaseException) -> None:
        for handle in list(self._requests):
            self.release(handle)

    def explain(self, tokens: list[int], namespace: str) -> None:
        """A server does not say what it has cached."""

    # -- running --------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running and self._events.empty()

    def step(self) -> list[Event]:
        """Send what waits, and wait for a moment that something happens. ServerError where it was closed meanwhile."""
        self._wire.check_open()
        for handle in self._waiting:
            self._running[handle] = self._wire.start(self._run(self._requests[handle]))
        self._waiting.clear()
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=POLL) if self._running else self._events.get_nowait())
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            pass
        return [event for event in events if self._takes(event)]

    def _takes(self, event: Event) -> bool:
        """Whether to tell of it: not of what comes after an abort."""
        if not isinstance(event, FinishEvent):
            return event.handle in self._running
        [choice] = event.output.choices
        if choice.finish_reason == "abort":
            return True
        if self._running.pop(event.handle, None) is None:
            return False
        self._requests[event.handle].tokens += choice.token_ids
        return True

    async def _run(self, request: _Request) -> None:
        """Ask, and tell of it; whatever happens, one event ends the request."""
        counted = Count()
        try:
            choice = await self._asked(request, counted)
        except Exception as error:
            said = str(error) if isinstance(error, ServerError) else f"{type(error).__name__}: {error}"
            choice = Choice(index=0, text="", token_ids=(), finish_reason="error", error=said)
        self._tell([FinishEvent(handle=request.handle, output=_output(request, choice, counted))])

    async def _asked(self, request: _Request, counted: Count) -> Choice:
        """What the first answer comes to that holds; one without a grammar does."""
        grammar, text = request.params.grammar, ""
        num_tries = (self._num_tries or 1) if grammar is not None and not request.is_held else 1
        for attempt in range(num_tries):
            answer = await self._answer(request, attempt)
            counted.add(answer.usage)
            choice, events = answer.end(self._codec)
            is_cut = request.is_held and choice.finish_reason == "length"
            if grammar is None or is_cut or holds(grammar, choice.text):
                self._tell(events)
                return choice
            text = choice.text
        assert grammar is not None, "what has none was returned"
        raise ServerError(
            f"{self._wire.url}: {num_tries} answers, none of which is of the {grammar.kind}; the last: {text[:80]!r}"
        )

    async def _answer(self, request: _Request, attempt: int) -> Answer:
        """One whole answer, told as it comes where it cannot be refused in the end."""
        path, body = self._body(request, attempt)
        answer = Answer(handle=request.handle, has_bytes=self._is_text)
        async with aclosing(self._wire.values(path, body)) as values:
            async for value in values:
                answer.take(value)
                if request.params.grammar is None:
                    self._tell(answer.news())
        return answer

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            self._events.put(event)

    def _body(self, request: _Request, attempt: int) -> tuple[str, Body]:
        """Where to and what. ServerError for messages of which none is the assistant's to begin."""
        given, messages = request.params.seed, self._messages(request.tokens)
        seed = seed_of(given if given is not None else request.handle.number, request.path)
        body = dict(request.fields)
        body["seed"] = (seed_of(seed, (attempt,)) if attempt else seed) & 0x7FFFFFFF  # what all servers can hold
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if messages:
            *before, last = messages
            if last != {"role": "assistant", "content": ""}:
                raise ServerError(
                    f"{self._wire.url}: asked to go on inside of the {last['role']}'s message; allowed without a "
                    "tokenizer: at the beginning of the assistant's; give connect(tokenizer=)"
                )
            return CHAT, body | {"messages": before}
        return TEXT, body | {"prompt": self.tokenizer.decode(request.tokens) if self._is_text else request.tokens}


def _output(request: _Request, choice: Choice, counted: Count) -> Output:
    return Output(
        handle=request.handle,
        prompt_token_ids=tuple(request.tokens),
        choices=(choice,),
        usage=counted.usage(len(request.tokens), len(choice.token_ids)),
    )


def connect(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    tokenizer: str | Path | None = None,
    validate_and_retry: int | None = None,
    concurrency: int = 64,
    timeout: float = 600.0,
    num_retries: int = 4,
) -> UrlBackend:
    """A server to run programs on, such as "http://127.0.0.1:8000": close it, or use `with`. Sends nothing yet.

    `model`: what the server calls it; not needed where it has one. `tokenizer`: the model's, by path or name; without
    it prompts go as text. `validate_and_retry`: ask so often, with other seeds, for what a server cannot hold to a
    grammar. `concurrency`: requests at once. `timeout`: seconds without a byte. `num_retries`: how often to ask again
    a server that is busy (429, 503) or not there yet.
    """
    counts = (("validate_and_retry", validate_and_retry, 1), ("concurrency", concurrency, 1))
    for name, value, low in (*counts, ("num_retries", num_retries, 0)):
        checks.optional_integer(name, value, low)
    own = load_tokenizer(tokenizer) if tokenizer is not None else None
    wire = Wire(url, api_key=api_key, timeout=timeout, num_retries=num_retries, num_open=concurrency)
    return UrlBackend(wire, model=model, own=own, num_tries=validate_and_retry)
