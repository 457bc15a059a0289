"""The engine: requests in, tokens out, one synchronous step at a time; the face that everything above uses.

Knows nothing of sockets, threads or clocks. One step is: plan, run, commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from radixrt.radix import BrokenInvariant, CacheStats, Explanation, RadixCache

from .checks import instance, integer, refuse
from .config import EngineConfig
from .counting import Counters
from .errors import InvalidRequest
from .intake import Intake
from .loading import load_model
from .model import Forward, Model
from .outputs import Event, FinishEvent, FinishReason, Handle, Output, TokenEvent
from .params import SamplingParams
from .plan import Entry, StepPlan
from .prompts import checked_namespace, prompts_of
from .record import Recorder
from .runner import Runner
from .sampler import Sampled, sample
from .scheduler import Scheduler
from .sequence import Sequence
from .stream import EventStream
from .threads import set_threads
from .tokenizer import Tokenizer

MAX_THREADS = 1024
MAX_FORKS = 4096  # in one call: a typing error should not fill the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counts since the start (`counters`), what lives now, and the cache's own counts."""

    counters: Counters
    num_running: int
    num_waiting: int
    cache: CacheStats


class Engine:
    """Generates for many requests at once over shared, paged KV.

    `model` is the name or path of a model (loaded in `dtype` on `device`, with its tokenizer) or an object that
    implements `Model`, then with its `tokenizer` where prompts or outputs are text. `exact` asks that nothing but a
    prompt and its parameters changes an answer, to the bit; by default it holds wherever model and machine allow it.
    `threads` are torch's, in the whole process. Further settings: `EngineConfig`.
    Not thread-safe; a caller with threads gives the engine one of its own.
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
        num_pages = config.pages_for(self.model.page_bytes(config.page_size))
        self.config = replace(config, num_pages=num_pages)
        try:
            self.model.allocate(num_pages, config.page_size)
        except (MemoryError, RuntimeError) as error:  # torch raises the latter
            raise InvalidRequest(f"kv_memory: a pool of {num_pages} pages cannot be allocated: {error}") from error
        self._cache = self._new_cache()
        self._runner = Runner(self.model, self._cache, poison=config.poison)
        pool_len = num_pages * config.page_size
        self._intake = Intake(self.model, self.tokenizer, seed=config.seed, pool_len=pool_len)
        self._counters = Counters()
        self._scheduler = Scheduler(self._cache, self.config, self._counters)
        self._live: dict[int, Sequence] = {}
        self._num_submitted = 0
        self._events: list[Event] = []
        self._mailboxes: dict[Handle, deque[Event]] = {}  # of requests whose events a stream reads, not `step`
        self._freed: list[int] = []  # since the last step, for the record
        self._closed = False
        self._recorder.start(self.model, self.config)

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, prompt: str | list[int], params: SamplingParams | None = None, namespace: str = "") -> Handle:
        """Queue one request; its events come from the steps that follow. InvalidRequest if it can never run."""
        self._require_open()
        params = params if params is not None else SamplingParams()
        sequence = self._intake.sequence(Handle(self._num_submitted), prompt, params, namespace)
        tokens = sequence.tokens.tolist()
        self._recorder.write("submit", tokens=tokens, params=params.to_dict(), namespace=namespace)
        self._start(sequence)
        return sequence.handle

    def fork(self, handle: Handle, n: int = 1, params: SamplingParams | None = None) -> list[Handle]:
        """n new requests that own the tokens committed so far; their events start after them.

        Where the parent holds pages they are shared, O(pages) and no copy; where it waits, the children wait too and
        share its rows when they run. A child's text goes on where the parent's events stopped, and so begins with what
        they held back. Without `params` a child keeps the parent's, limits included; its draws differ
        from the parent's and from the other children's either way. InvalidRequest if the parent has ended.
        """
        parent = self._live_sequence(handle)
        n = integer("n", n, 1, MAX_FORKS)
        if params is not None:
            self._intake.max_len(parent.num_tokens, params)
        self._recorder.write("fork", parent=handle.number, n=n, params=params.to_dict() if params else None)
        children = []
        for _ in range(n):
            child = self._intake.child(parent, Handle(self._num_submitted), params)
            if parent.table is not None:
                child.table = self._cache.fork(parent.table, f"request {child.number}")
                self._counters.add_cached(child, child.table.seq_len)
            parent.num_forks += 1
            self._start(child)
            children.append(child.handle)
        return children

    def abort(self, handle: Handle) -> None:
        """End a request in whatever state; its FinishEvent comes with the next step. Once it has ended, a no-op."""
        self._require_known(handle)
        self._recorder.write("abort", number=handle.number)
        if handle.number in self._live:
            self._finish(self._live[handle.number], "abort")

    def generate(
        self,
        prompts: str | list[str] | list[list[int]],
        params: SamplingParams | None = None,
        namespace: str = "",
    ) -> list[Output]:
        """Run prompts together to their end; one Output each, in order. Events of other requests wait for `step`."""
        many = prompts_of(prompts)
        stream = EventStream(self._advance, self._abandon)
        try:
            handles = [self._submit_to(stream, prompt, params, namespace) for prompt in many]
            outputs = {event.handle: event.output for event in stream if isinstance(event, FinishEvent)}
        finally:
            stream.close()
        return [outputs[handle] for handle in handles]

    def stream(self, prompt: str | list[int], params: SamplingParams | None = None, namespace: str = "") -> EventStream:
        """Submit now; the events of the request as they come, FinishEvent last. Closing the stream early aborts it."""
        stream = EventStream(self._advance, self._abandon)
        self._submit_to(stream, prompt, params, namespace)
        return stream

    def _submit_to(self, stream: EventStream, prompt: Any, params: SamplingParams | None, namespace: str) -> Handle:
        handle = self.submit(prompt, params, namespace)
        stream.unfinished.add(handle)
        self._mailboxes[handle] = stream.mailbox
        return handle

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """Run the model once for whatever waits or runs; the events since the last step, in order.

        Events of requests that `generate` or `stream` started go there. If the model is interrupted, the engine is as
        before the step; if planning is, it has forgotten its cache, and no answer.
        """
        self._advance()
        events, self._events = self._events, []
        return events

    def _advance(self) -> None:
        self._require_open()
        plan = StepPlan(page_size=self.config.page_size)
        try:
            self._scheduler.plan(plan)
        except BaseException:  # an interrupt: it may have cut any of the cache's operations in two
            self._start_over()
            raise
        if plan.entries:
            self._run(plan)

    def _start_over(self) -> None:
        """Forget every page; all requests wait and recompute. Right whatever state the old cache was left in."""
        self._cache = self._new_cache()
        self._runner.start_over(self._cache)
        self._scheduler.start_over(self._cache, self._live.values())

    def _run(self, plan: StepPlan) -> None:
        """Run, sample and commit; where the device or a draw fails, the plan's requests run again one by one."""
        try:
            forward = self._runner.run(plan)
            sound = [entry for entry in plan.entries if forward.finite[entry.rows].all()]
            sampled = self._sample(plan, [entry for entry in sound if entry.samples], forward)
        except BaseException as error:
            self._runner.withdraw(plan)
            if not isinstance(error, Exception):
                raise
            if len(plan.entries) > 1:
                self._scheduler.isolate(plan)
            else:  # it failed alone: whatever was raised ends it, and nobody else
                self._finish(plan.entries[0].sequence, "error", f"the model failed: {error}")
            return
        self._commit(plan, sound, sampled)

    def _commit(self, plan: StepPlan, sound: list[Entry], sampled: list[Sampled]) -> None:
        """Charge, publish and append what the step computed; a request with a NaN ends alone and publishes nothing."""
        self._counters.add_step(plan)
        sick = set(plan.entries) - set(sound)
        for entry in plan.entries:
            self._scheduler.succeeded(entry.sequence)
            if entry in sick:
                self._cache.truncate(entry.table, entry.start)
                self._finish(entry.sequence, "error", "the model's hidden states or logits hold NaN or infinity")
            elif self.config.prefix_cache:
                self._cache.publish(entry.table)
        for entry, token in zip((entry for entry in sound if entry.samples), sampled, strict=True):
            try:
                self._append(entry.sequence, token)
            except Exception as error:  # a tokenizer that fails on one request's token must not take others along
                self._finish(entry.sequence, "error", f"its output failed: {error!r}")
        freed, self._freed = self._freed, []
        self._recorder.step(plan, [token.token_id for token in sampled], freed)

    def _sample(self, plan: StepPlan, entries: list[Entry], forward: Forward) -> list[Sampled]:
        if not entries:
            return []
        index = np.searchsorted(plan.logit_rows, [entry.rows[-1] for entry in entries])
        rows = [entry.sequence.sampler_row(self.model.eos_token_ids) for entry in entries]
        logits = forward.logits.cpu()
        return sample([logits[i] for i in index], rows)

    def _append(self, sequence: Sequence, sampled: Sampled) -> None:
        """Commit one sampled token, tell of it, and end the request where it was the last."""
        token_id = sampled.token_id
        ends = token_id in sequence.params.ending_token_ids(self.model.eos_token_ids)
        text = sequence.detokenizer.add(token_id) if sequence.detokenizer is not None and not ends else ""
        sequence.append(token_id)
        sequence.note(text, sampled.logprobs)
        self._tell(
            TokenEvent(handle=sequence.handle, choice=0, token_id=token_id, text=text, logprobs=sampled.logprobs)
        )
        if ends or (sequence.detokenizer is not None and sequence.detokenizer.stopped is not None):
            self._finish(sequence, "stop")
        elif sequence.num_tokens >= sequence.max_len:
            self._finish(sequence, "length")

    # -- beginnings and ends --------------------------------------------------------------------------------------

    def _start(self, sequence: Sequence) -> None:
        self._num_submitted += 1
        self._live[sequence.number] = sequence
        self._scheduler.enqueue(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The one way a request ends: what it has computed stays in the cache, everything else is given back."""
        if sequence.table is not None and self.config.prefix_cache and reason != "error":
            self._cache.publish(sequence.table, tail=True)
        self._scheduler.remove(sequence)
        del self._live[sequence.number]
        text = sequence.detokenizer.flush() if sequence.detokenizer is not None else ""
        sequence.note(text, None)
        self._tell(FinishEvent(handle=sequence.handle, text=text, output=sequence.output(reason, error)))

    def _abandon(self, handles: Iterable[Handle]) -> None:
        """Abort what still lives of these requests: nobody is left to read their events."""
        for handle in handles:
            if handle.number in self._live:
                self.abort(handle)
            self._mailboxes.pop(handle, None)

    def _tell(self, event: Event) -> None:
        """To the stream that reads the request, or to the next `step`."""
        self._mailboxes.get(event.handle, self._events).append(event)
        if isinstance(event, FinishEvent):
            self._mailboxes.pop(event.handle, None)

    def _live_sequence(self, handle: Handle) -> Sequence:
        self._require_open()
        self._require_known(handle)
        if handle.number not in self._live:
            raise InvalidRequest(f"handle: request {handle.number} has ended; a live one is needed")
        return self._live[handle.number]

    def _require_known(self, handle: Handle) -> None:
        number = instance("handle", handle, Handle, "what submit or fork returned").number
        if type(number) is not int or not 0 <= number < self._num_submitted:
            raise InvalidRequest(f"handle: request {number} was never submitted to this engine")

    # -- the engine as a whole ------------------------------------------------------------------------------------

    def explain(self, prompt: str | list[int], namespace: str = "") -> Explanation:
        """What the cache has of a prompt, where and from which request it diverges, what evicted the rest."""
        return self._cache.explain(self._intake.tokens(prompt), checked_namespace(namespace))

    def stats(self) -> EngineStats:
        return EngineStats(
            counters=replace(self._counters),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            cache=self._cache.stats(),
        )

    def check(self) -> None:
        """The whole-state audit: pages, nodes, tables and queues from scratch. Raises if anything is off."""
        self._cache.check()
        self._scheduler.check()
        num_tables = self._cache.stats().num_tables
        if num_tables != len(self._scheduler.running):
            raise BrokenInvariant(f"{num_tables} tables live, {len(self._scheduler.running)} sequences run")

    def reset_cache(self) -> None:
        """Forget every cached page. LiveTables while a request holds pages."""
        self._require_open()
        self._cache.reset()
        self._recorder.write("reset")

    def close(self) -> None:
        """Abort what lives and give the engine up. Closing twice is fine."""
        if not self._closed:
            for number in list(self._live):
                self.abort(Handle(number))
            self._recorder.close()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _new_cache(self) -> RadixCache:
        assert self.config.num_pages is not None, "the pool's size was resolved"
        return RadixCache(num_pages=self.config.num_pages, page_size=self.config.page_size, on_free=self._on_free)

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidRequest("engine: it was closed; make a new one")

    def _on_free(self, page_ids: npt.NDArray[np.int32]) -> None:
        self._freed.extend(page_ids.tolist())
        self._runner.forget(page_ids)
