"""The requests of one engine by number: those that live, and those that ended lately and can still be forked.

Knows nothing of what a request is made of. Time is counted in steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .checks import instance
from .errors import InvalidRequest
from .outputs import Handle
from .owners import Owners
from .request import Request


class Registry:
    """Keeps the last `keep_finished` requests that ended, each for `finished_ttl` steps unless it is forgotten.

    What is forgotten is none of the `owners` any more. The first `num_submitted` were lost when the engine was
    interrupted.
    """

    def __init__(self, owners: Owners, *, keep_finished: int, finished_ttl: int, num_submitted: int = 0) -> None:
        self._owners = owners
        self.num_submitted = self._num_lost = num_submitted
        self._keep_finished = keep_finished
        self._finished_ttl = finished_ttl
        self._live: dict[int, Request] = {}
        self._ended: OrderedDict[int, tuple[Request, int]] = OrderedDict()  # and the step that ends it; oldest first

    def next_handle(self) -> Handle:
        return Handle(self.num_submitted)

    def add(self, request: Request) -> None:
        """A new request, under `next_handle`."""
        assert request.handle == self.next_handle()
        self.num_submitted += 1
        self._live[request.handle.number] = request

    def end(self, request: Request, step: int) -> None:
        """A live request ended in this step; it is kept for a while."""
        number = request.handle.number
        self._ended[number] = self._live.pop(number), step + self._finished_ttl
        if len(self._ended) > self._keep_finished:
            self._forget_oldest()

    def expire(self, step: int) -> None:
        """Forget the requests whose time is over. O(those)."""
        while self._ended and next(iter(self._ended.values()))[1] < step:
            self._forget_oldest()

    def forget(self, handle: Handle) -> None:
        """Forget one that ended."""
        request, _ = self._ended.pop(handle.number)
        for branch in request.branches:
            self._owners.disown(branch)

    def _forget_oldest(self) -> None:
        self.forget(next(iter(self._ended.values()))[0].handle)

    def live(self, handle: Handle) -> Request | None:
        """The request, None once it has ended. InvalidRequest where the handle is none of this engine."""
        return self._live.get(self._known(handle))

    def ended(self, handle: Handle) -> Request | None:
        """The request where it has ended and is still kept. InvalidRequest where the handle is none of this engine."""
        return self._ended.get(self._known(handle), (None, 0))[0]

    def find(self, handle: Handle) -> Request:
        """The request, live or ended. InvalidRequest where neither is there."""
        request = self.live(handle) or self.ended(handle)
        if request is None and handle.number < self._num_lost:
            raise InvalidRequest(
                f"handle: request {handle.number} is of the time before the engine was interrupted in the middle of an "
                "operation; submit its tokens anew"
            )
        if request is None:
            raise InvalidRequest(f"handle: request {handle.number} has ended and was released, or its time was over")
        return request

    def of(self, number: int) -> Request:
        """The live request of this number, which must be there."""
        return self._live[number]

    def kept(self) -> list[Request]:
        """Those that have ended and can be forked."""
        return [request for request, _ in self._ended.values()]

    def __iter__(self) -> Iterator[Request]:
        """The live ones, oldest first; may change meanwhile."""
        return iter(list(self._live.values()))

    def _known(self, handle: Handle) -> int:
        number = instance("handle", handle, Handle, "what submit or fork returned").number
        if type(number) is not int or not 0 <= number < self.num_submitted:
            raise InvalidRequest(f"handle: request {number} was never submitted to this engine")
        return number
