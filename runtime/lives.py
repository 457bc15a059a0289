"""How requests begin, change hands and end, and the events that say so.

Knows nothing of steps, nor of what a caller may ask: requests come checked.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixrt.radix import RadixCache

from .constraint import Grammars
from .counting import Counters
from .liveness import Liveness
from .meter import Meter
from .outputs import ChoiceEvent, FinishEvent, FinishReason, Handle
from .post import Post
from .record import Recorder
from .registry import Registry
from .request import Request
from .scheduler import Scheduler
from .scoring import Scorer
from .sequence import Sequence


class Lives:
    """The requests of one engine, from `start` to the one FinishEvent of each, and until they are released.

    `keeps`: what an ended sequence has computed stays in the cache.
    """

    def __init__(
        self,
        *,
        cache: RadixCache,
        requests: Registry,
        scheduler: Scheduler,
        scorer: Scorer,
        liveness: Liveness,
        grammars: Grammars,
        counters: Counters,
        meter: Meter,
        recorder: Recorder,
        post: Post,
        keeps: bool,
    ) -> None:
        self._cache = cache
        self._requests = requests
        self._scheduler = scheduler
        self._scorer = scorer
        self._liveness = liveness
        self._grammars = grammars
        self._counters = counters
        self._meter = meter
        self._recorder = recorder
        self._post = post
        self._keeps = keeps

    def start(self, request: Request) -> None:
        self._requests.add(request)
        for branch in request.branches:
            self._scorer.add(branch)
            self._meter.submitted(branch)
            self._scheduler.enqueue(branch)

    def share(self, parent: Sequence, child: Sequence, max_len: int) -> None:
        """Give a child the parent's pages of up to `max_len` tokens, O(pages), if there are any. No copy."""
        self._counters.forks += 1
        stop = min(parent.computed_len, max_len)
        if parent.table is not None and stop:
            child.table = self._cache.fork(parent.table, child.label)
            self._cache.truncate(child.table, stop)
            self._counters.add_cached(child, stop)

    def abort(self, request: Request) -> None:
        """End what lives of a request."""
        if request.search is not None:
            self.end_search(request, "abort")
        else:
            for branch in request.live:
                self.end(branch, "abort")

    def abandon(self, handles: Iterable[Handle]) -> None:
        """Abort what still lives of these requests: nobody is left to read their events."""
        for handle in handles:
            if (request := self._requests.live(handle)) is not None:
                self._recorder.write("abort", number=handle.number)
                self.abort(request)
            self._post.close(handle)

    def release(self, handle: Handle) -> None:
        """Forget a request that ended, and drop what was generated for it, or for what it forked, and nobody owns."""
        request = self._requests.ended(handle)
        if request is not None:
            self._requests.forget(handle)
            self._liveness.released(request)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Cut a sequence, alive or not, and its table."""
        old = sequence.tokens.copy()
        if sequence.table is not None and sequence.table.seq_len >= num_tokens:
            self._cache.truncate(sequence.table, num_tokens - 1)
        sequence.truncate(num_tokens)
        if sequence.constraint is not None:
            self._grammars.look([sequence.constraint])
        self._liveness.replaced(sequence, old)

    def adopt(self, sequence: Sequence, branch: Handle, adopted: Sequence) -> None:
        """Let a sequence that ended take over one of the request `branch`, which is released."""
        old = sequence.tokens
        sequence.take_over(adopted)
        self._liveness.replaced(sequence, old)
        self.release(branch)

    def end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The one way a choice ends: what it has computed stays in the cache, everything else is given back."""
        request = self._requests.of(sequence.number)
        if request.search is not None:
            self.end_search(request, reason, error)
            return
        self._leave(sequence, reason)
        self._liveness.ended(sequence)
        self._meter.ended(sequence)
        sequence.follow(None)  # a constraint holds memory; a fork follows the grammar anew
        text = sequence.detokenizer.flush() if sequence.detokenizer is not None else ""
        sequence.note(text, None)
        for choice in request.end(sequence, reason, error):
            if not request.params.is_ranked:
                self._post.tell(
                    ChoiceEvent(handle=request.handle, choice=choice.index, text=text, finish_reason=reason)
                )
        if request.is_over:
            self._finish(request)

    def end_search(self, request: Request, reason: FinishReason | None = None, error: str | None = None) -> None:
        """A search ends as a whole, by itself or for `reason`."""
        assert request.search is not None
        hypotheses = request.search.hypotheses
        for beam in request.branches:
            self._leave_search(beam, reason)
        request.end_search(reason, error)
        self._liveness.search_over(request, hypotheses)
        self._finish(request)

    def give_up(self, beam: Sequence) -> None:
        """A search goes on without this beam; its hypotheses keep what they have of it."""
        self._leave_search(beam, None)
        self._liveness.give_up(beam)

    def _leave_search(self, beam: Sequence, reason: FinishReason | None) -> None:
        """Before a beam leaves it is cut, so that no page that ends for a hypothesis holds more than that."""
        owners = self._liveness.owners
        owners.disown(beam)
        kept = max(beam.output_start, owners.owned_len(beam.tokens, beam.namespace))
        if beam.computed_len > kept:
            assert beam.table is not None
            self._cache.truncate(beam.table, kept)
        self._leave(beam, reason)

    def _leave(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """A sequence gives its pages up; where nothing is wrong with them, the cache keeps them."""
        if sequence.table is not None and self._keeps and reason != "error":
            self._cache.publish(sequence.table, tail=True)
            if sequence.scores is not None:
                self._scorer.leave(sequence, self._cache.match(sequence.table.tokens, sequence.namespace))
        self._scheduler.remove(sequence)
        self._scorer.remove(sequence)

    def _finish(self, request: Request) -> None:
        """All choices have ended."""
        self._meter.finished(request.handle.number)
        self._liveness.request_over(request)
        self._post.tell(FinishEvent(handle=request.handle, output=request.output()))
        self._requests.end(request, self._counters.steps)
        self._post.close(request.handle)
