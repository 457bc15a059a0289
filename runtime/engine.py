"""The engine: what callers do with requests, tokens out, one synchronous step at a time; everything above uses it.

Knows nothing of sockets, threads or clocks. It checks and records what is asked; the loop does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence as AnySequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np

from radixrt.radix import BrokenInvariant, CacheStats, Explanation

from .checks import instance, integer, refuse
from .config import EngineConfig
from .constraint import Grammars
from .counting import Counters
from .errors import InvalidRequest
from .intake import Intake
from .loading import load_model
from .loop import Loop
from .meter import Meter, Waits
from .model import Model
from .outputs import Event, FinishEvent, Handle, Output, Score
from .params import BeamParams, Params, SamplingParams, ScoreParams
from .pins import PinnedPrefix
from .prompts import checked_namespace, prompts_of
from .record import Recorder
from .request import CacheUse, Request
from .sequence import Sequence
from .stream import EventStream
from .threads import set_threads
from .tier import HostTier, Transfers
from .tokenizer import Tokenizer

MAX_THREADS = 1024
MAX_FORKS = 4096  # in one call: a typing error should not fill the memory
MAX_TTL = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the start (`counters`), what lives now, and the cache's own counts."""

    counters: Counters
    waits: Waits
    num_running: int  # sequences: each choice counts
    num_waiting: int
    cache: CacheStats
    transfers: Transfers

    @property
    def swap_rate(self) -> float:
        """Pages moved between device and host memory per step since the start. Of a while: take differences."""
        return (self.transfers.swap_outs + self.transfers.swap_ins) / max(1, self.counters.steps)


class Engine:
    """Generates for many requests at once over shared, paged KV.

    `model` is the name or path of a model (loaded in `dtype` on `device`, with its tokenizer) or an object that
    implements `Model`, then with its `tokenizer` where prompts or outputs are text. `exact` asks that nothing but a
    prompt and its parameters changes an answer, to the bit; by default it holds wherever model and machine allow it.
    `threads` are torch's, in the whole process. `clock` gives seconds, for `stats` and for what pages cost to move to
    host memory. Further settings: `EngineConfig`.
    Not thread-safe; a caller with threads gives the engine one of its own. An interrupt in the middle of an operation
    costs what lives and is cached at most: the next operation finds it and begins anew (docs/life-of-a-request.md).
    """

    def __init__(
        self,
        model: str | Path | Model = "smollm2-135m",
        *,
        tokenizer: Tokenizer | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        exact: bool | None = None,
        threads: int | None = None,
        clock: Callable[[], float] = perf_counter,
        **settings: Any,
    ) -> None:
        config = EngineConfig.of(settings)
        set_threads(None if threads is None else integer("threads", threads, 1, MAX_THREADS))
        self._recorder = Recorder(config.record)  # first: a path that cannot be written should not wait for the model
        self.model: Model
        self.tokenizer: Tokenizer | None
        if isinstance(model, (str, Path)):
            self.model, self.tokenizer = load_model(model, dtype=dtype, device=device, exact=exact)
        elif hasattr(model, "forward"):
            self.model, self.tokenizer = model, tokenizer
        else:
            refuse("model", model, "a name, a path or an object that implements Model")
        page_bytes = self.model.page_bytes(config.page_size)
        num_pages, num_host_pages = config.pages_for(page_bytes), config.host_pages_for(page_bytes)
        self.config = replace(config, num_pages=num_pages, num_host_pages=num_host_pages)
        try:
            self.model.allocate(num_pages, config.page_size, num_host_pages)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            raise InvalidRequest(
                f"kv_memory: a pool of {num_pages + num_host_pages} pages cannot be allocated: {error}"
            ) from error
        meter = Meter(clock)
        grammars = Grammars(self.tokenizer, self.model.vocab_size, meter.now)
        self._intake = Intake(
            self.model, self.tokenizer, grammars, seed=config.seed, num_pages=num_pages, page_size=config.page_size
        )
        self._loop = Loop(self.model, self.config, grammars, self._recorder, meter)
        self._closed = False
        self._recorder.start(self.model, self.config)

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: str | list[int],
        params: Params | None = None,
        namespace: str = "",
        *,
        priority: int = 0,
        cache: CacheUse = "all",
    ) -> Handle:
        """Queue one request; its events come from the steps that follow. InvalidRequest if it can never run.

        Higher priorities are started first, preempted last and stay longest in the cache. `cache` says what is worth
        keeping once it has ended: "all", the "prompt" without what was generated, or "none" of what it added. What
        other requests own stays.
        """
        return self._submit(prompt, params, namespace, priority, cache)

    def _submit(
        self,
        prompt: Any,
        params: Params | None,
        namespace: str,
        priority: int,
        cache: CacheUse,
        stream: EventStream | None = None,
    ) -> Handle:
        """With a stream its events go there alone: then nothing lives that is in none, whatever interrupts this."""
        self._require_open()
        params = params if params is not None else SamplingParams()
        handle = self._loop.requests.next_handle()
        request = self._intake.request(handle, prompt, params, namespace=namespace, priority=priority, cache=cache)
        tokens, origin = request.branches[0].tokens.tolist(), {"priority": priority, "cache": cache}
        with self._loop.changing("submit"):
            self._recorder.write("submit", tokens=tokens, params=params.to_dict(), namespace=namespace, **origin)
            if stream is not None:
                stream.unfinished.add(handle)
                self._loop.post.send_to(stream.mailbox, handle)
            self._loop.lives.start(request)
            return handle

    def fork(
        self,
        handle: Handle,
        n: int = 1,
        params: Params | None = None,
        *,
        text: str | list[int] | None = None,
        choice: int = 0,
        at: int | None = None,
    ) -> list[Handle]:
        """n new requests that own the tokens a choice has committed so far; their events start after them.

        The choice may wait, run or have ended; one that ended can be forked until it is released. Its number is the
        index that events and outputs show; of what is ranked in the end (`best_of`, beams), that of the best is 0 then,
        and before it is the order in which they were sampled, or the beams' present one. `at` takes only so many of its
        tokens, prompt included; `text` (or token ids) is appended as if it had been in the prompt. Where the parent
        holds pages they are shared, O(pages) and no copy; where it waits, the children wait too and share its rows when
        they run. A child that goes on from the very end goes on in everything: penalties, stop strings, text that was
        held back. Without `params` a child keeps the parent's, as one choice, and while the parent lives its limits
        too; without `text` either, it goes on in the parent's grammar, if the last of its tokens are text of that. Else
        the grammar begins anew. Its draws differ from the parent's and from the other children's either way.
        """
        request, sequence = self._branch(handle, choice)
        n = integer("n", n, 1, MAX_FORKS)
        at = sequence.num_tokens if at is None else integer("at", at, 0, sequence.num_tokens)
        extra = self._intake.tokens(text).tolist() if text is not None else None
        self._intake.check_fork(request, choice, params, at=at, extra_len=len(extra or ()))
        given, where = params.to_dict() if params is not None else None, {"text": extra, "choice": choice, "at": at}
        with self._loop.changing("fork"):
            self._recorder.write("fork", parent=handle.number, n=n, params=given, **where)
            return [self._fork(request, choice, params, at, extra) for _ in range(n)]

    def _fork(self, request: Request, choice: int, params: Params | None, at: int, extra: list[int] | None) -> Handle:
        handle = self._loop.requests.next_handle()
        child = self._intake.fork(handle, request, choice, params, at=at, extra=extra or [])
        [branch] = child.branches
        self._loop.lives.share(request.branch(choice), branch, min(at, branch.num_tokens - 1, branch.first_row))
        self._loop.lives.start(child)
        return handle

    def abort(self, handle: Handle) -> None:
        """End a request in whatever state; its last events come with the next step. Once it has ended, a no-op."""
        self._loop.mend()
        request = self._loop.requests.live(handle)
        with self._loop.changing("abort"):
            self._recorder.write("abort", number=handle.number)
            if request is not None:
                self._loop.lives.abort(request)

    def release(self, handle: Handle) -> None:
        """Say that a request will not be used again, which aborts it if it lives. Twice is fine.

        It can no longer be forked. What was generated for it leaves the cache at once, and for those that it was forked
        from, unless another request that was not released owns it. What callers gave stays, where it does not follow
        that.
        """
        self._loop.mend()
        live = self._loop.requests.live(handle)
        with self._loop.changing("release"):
            self._recorder.write("release", number=handle.number)
            if live is not None:
                self._loop.lives.abort(live)
            self._loop.lives.release(handle)

    def truncate(self, handle: Handle, num_tokens: int, *, choice: int = 0) -> None:
        """Keep `num_tokens` tokens of a choice, prompt included, as if what follows had not been sampled: no cost.

        At most its own output goes; `fork(at=...)` goes further back. One that lives goes on from there, and what its
        events told of later tokens is void.
        """
        request, sequence = self._branch(handle, choice)
        if request.search is not None and not request.is_over:
            raise InvalidRequest(f"truncate: request {handle.number} searches with beams; fork it (at=), or abort it")
        if sequence.params.prefix:
            raise InvalidRequest(f"truncate: request {handle.number} has a prefix; fork it (at=)")
        num_tokens = integer("num_tokens", num_tokens, sequence.output_start, sequence.num_tokens)
        with self._loop.changing("truncate"):
            self._recorder.write("truncate", number=handle.number, num_tokens=num_tokens, choice=choice)
            self._loop.lives.truncate(sequence, num_tokens)

    def adopt(self, handle: Handle, branch: Handle, *, choice: int = 0, branch_choice: int = 0) -> None:
        """Let a choice that ended own the tokens of one of its forks, as if it had gone on so. Frees the fork's handle.

        InvalidRequest unless both have ended and the branch descends from that choice and has its whole prompt. Of
        choices that are ranked in the end (`best_of`, beams) no fork descends that was made before.
        """
        request, sequence = self._branch(handle, choice)
        child, adopted = self._branch(branch, branch_choice, name="branch")
        if (handle.number, choice) not in child.ancestors:
            when = " made after that had ended" if request.params.is_ranked else ""
            raise InvalidRequest(
                f"branch: request {branch.number} given; allowed: a fork of choice {choice} of request "
                f"{handle.number}{when}"
            )
        for number, is_over in ((handle.number, request.is_over), (branch.number, child.is_over)):
            if not is_over:
                raise InvalidRequest(f"adopt: request {number} has not ended; abort it or let it finish first")
        prompt = sequence.tokens[: sequence.output_start]
        if not np.array_equal(adopted.tokens[: len(prompt)], prompt):
            raise InvalidRequest(
                f"branch: request {branch.number} given, which parts from request {handle.number} inside of its prompt "
                f"of {len(prompt)} tokens; allowed: one that keeps them"
            )
        if len(request.branches) < len(request.paths):
            raise InvalidRequest(f"adopt: request {handle.number} ended before its choices differed; fork it instead")
        choices = {"choice": choice, "branch_choice": branch_choice}
        with self._loop.changing("adopt"):
            self._recorder.write("adopt", number=handle.number, branch=branch.number, **choices)
            self._loop.lives.adopt(sequence, branch, adopted)

    def pin(self, prompt: str | list[int], namespace: str = "", *, ttl: int | None = None) -> PinnedPrefix:
        """Keep the whole pages that the cache has of a prompt, for `ttl` steps or until `unpin`.

        Computes nothing, and brings nothing back from host memory, which is not pinned: run the prompt first, which
        does both; `prefix_len` says how much was on the device, and there it stays. All pins hold at most `pin_budget`
        of the pool, else InvalidRequest; the oldest gives way where a request could never go on otherwise.
        """
        self._require_open()
        tokens = self._intake.tokens(prompt)
        ends = None if ttl is None else self._loop.step + integer("ttl", ttl, 1, MAX_TTL)
        namespace = checked_namespace(namespace)
        with self._loop.changing("pin"):
            pinned = self._loop.pins.pin(tokens, namespace, ends)
            self._recorder.write("pin", tokens=tokens.tolist(), namespace=namespace, ttl=ttl)
            return pinned

    def unpin(self, pinned: PinnedPrefix) -> None:
        """End a pin. One that has ended already is no error."""
        self._require_open()
        pinned = instance("pinned", pinned, PinnedPrefix, "what pin returned")
        with self._loop.changing("unpin"):
            self._loop.pins.unpin(pinned)
            self._recorder.write("unpin", number=pinned.number)

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: Params | None = None,
        namespace: str = "",
        *,
        priority: int = 0,
        cache: CacheUse = "all",
    ) -> list[Output]:
        """Run prompts together to their end; one Output each, in order. Events of other requests wait for `step`."""
        many = prompts_of(prompts)
        return self._together(many, [params] * len(many), namespace, priority, cache)

    def beam_search(
        self,
        prompts: str | list[str] | list[list[int]],
        params: BeamParams | None = None,
        namespace: str = "",
        *,
        priority: int = 0,
        cache: CacheUse = "all",
    ) -> list[Output]:
        """Run beam searches together to their end: `generate` with `BeamParams`; each choice carries its `score`."""
        params = params if params is not None else BeamParams()
        return self.generate(prompts, params, namespace, priority=priority, cache=cache)

    def score(
        self,
        prompts: str | list[str] | list[list[int]],
        namespace: str = "",
        *,
        start: int | AnySequence[int] = 1,
        priority: int = 0,
        cache: CacheUse = "all",
    ) -> list[Score]:
        """The log-probabilities of the tokens of prompts, given those before them; one `Score` each, in order.

        `start`, one for all or one each: of the tokens from there on, so that what comes before need not be scored.
        Prompts share rows, and what is known beside cached KV costs nothing: `submit` with `ScoreParams`, together.
        """
        many = prompts_of(prompts)
        starts = list(start) if isinstance(start, AnySequence) else [start] * len(many)
        if len(starts) != len(many):
            raise InvalidRequest(f"start: {len(starts)} given; allowed: one, or one for each of {len(many)} prompts")
        params = [ScoreParams(start=one) for one in starts]
        outputs = self._together(many, params, namespace, priority, cache)
        return [output.score for output in outputs if output.score is not None]

    def _together(
        self, prompts: list[Any], params: AnySequence[Params | None], namespace: str, priority: int, cache: CacheUse
    ) -> list[Output]:
        with self._new_stream() as stream:
            handles = [
                self._submit(prompt, given, namespace, priority, cache, stream)
                for prompt, given in zip(prompts, params, strict=True)
            ]
            outputs = {event.handle: event.output for event in stream if isinstance(event, FinishEvent)}
        return [outputs[handle] for handle in handles]

    def stream(
        self,
        prompt: str | list[int],
        params: Params | None = None,
        namespace: str = "",
        *,
        priority: int = 0,
        cache: CacheUse = "all",
    ) -> EventStream:
        """Submit now; the events of the request as they come, FinishEvent last. Closing the stream early aborts it."""
        stream = self._new_stream()
        self._submit(prompt, params, namespace, priority, cache, stream)
        return stream

    def step(self) -> list[Event]:
        """Run the model once for whatever waits or runs; the events since the last step, in order.

        Events of requests that `generate` or `stream` started go there. If the model is interrupted, the engine is as
        before the step.
        """
        self._advance()
        return self._loop.post.take()

    def _advance(self) -> None:
        self._require_open()
        with self._loop.changing("a step"):
            self._loop.advance()

    def _new_stream(self) -> EventStream:
        return EventStream(self._advance, self._abandon, self._loop.post.forsaken)

    def _abandon(self, handles: Iterable[Handle]) -> None:
        self._loop.mend()
        with self._loop.changing("the end of a stream"):
            self._loop.lives.abandon(handles)

    def _branch(self, handle: Handle, choice: int, name: str = "") -> tuple[Request, Sequence]:
        """A request that lives or can still be forked, and its choice."""
        self._require_open()
        request = self._loop.requests.find(handle)
        number = integer(f"{name}_choice" if name else "choice", choice, 0, len(request.paths) - 1)
        return request, request.branch(number)

    # -- the engine as a whole ------------------------------------------------------------------------------------

    def explain(self, prompt: str | list[int], namespace: str = "") -> Explanation:
        """What the cache has of a prompt, where and from which request it diverges, what evicted the rest."""
        self._loop.mend()
        return self._loop.cache.explain(self._intake.tokens(prompt), checked_namespace(namespace))

    def stats(self) -> EngineStats:
        self._abandon_forsaken()
        return EngineStats(
            counters=replace(self._loop.counters),
            waits=self._loop.meter.waits(),
            num_running=len(self._loop.scheduler.running),
            num_waiting=len(self._loop.scheduler.waiting),
            cache=self._loop.cache.stats(),
            transfers=self._loop.tier.totals,
        )

    @property
    def tier(self) -> HostTier:
        """The pages in host memory, and what decides about them."""
        return self._loop.tier

    def check(self) -> None:
        """The whole-state audit: pages, nodes, tables and queues from scratch. Raises if anything is off."""
        self._loop.mend()
        self._loop.check()
        num_tables = self._loop.cache.stats().num_tables
        if num_tables != len(self._loop.scheduler.running):
            raise BrokenInvariant(f"{num_tables} tables live, {len(self._loop.scheduler.running)} sequences run")

    def reset_cache(self) -> None:
        """Forget every cached page. LiveTables while a request holds pages or a prefix is pinned."""
        self._require_open()
        self._abandon_forsaken()
        with self._loop.changing("reset_cache"):
            self._loop.tier.wait()
            self._loop.cache.reset()
            self._recorder.write("reset")

    def begin_anew(self, error: BaseException) -> None:
        """Lose all that lives, is cached or pinned, in whatever state it is: after an `error` that broke off its user.

        Who lived ends with an error that says so. Of a closed engine, a no-op.
        """
        if not self._closed:
            self._loop.lose(f"{type(error).__name__} broke off a program")

    def close(self) -> None:
        """Abort what lives and give the engine up. Closing twice is fine."""
        if not self._closed:
            self._loop.mend()
            with self._loop.changing("close"):
                for request in self._loop.requests:
                    self.abort(request.handle)
                self._loop.pins.give_up()
                self._loop.tier.wait()
                self._recorder.close()
                self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        """Refuse what is asked of a closed engine; mend what an interrupt broke off."""
        if self._closed:
            raise InvalidRequest("engine: it was closed; make a new one")
        self._loop.mend()

    def _abandon_forsaken(self) -> None:
        self._loop.mend()
        with self._loop.changing("the end of a stream"):
            self._loop.abandon_forsaken()
