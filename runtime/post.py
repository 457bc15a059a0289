"""Where the events of an engine wait for whoever reads them. Knows nothing of what they tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .outputs import Event, FinishEvent, Handle
from .request import Request


class Post:
    """Each event is in one place: the mailbox of the stream that reads its request, or what `take` gives next."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._mailboxes: dict[Handle, deque[Event]] = {}
        self.forsaken: deque[Handle] = deque()  # requests whose stream was collected: nobody reads their events

    def send_to(self, mailbox: deque[Event], handle: Handle) -> None:
        """Put the events of a request there from now on."""
        self._mailboxes[handle] = mailbox

    def tell(self, event: Event) -> None:
        self._mailboxes.get(event.handle, self._events).append(event)

    def take(self) -> list[Event]:
        """What was told since the last call and is in no mailbox, in order."""
        try:
            return self._events
        finally:
            self._events = []  # last: an interrupt before it loses none

    def close(self, handle: Handle) -> None:
        """Nothing more will be told of a request, or nobody reads it."""
        self._mailboxes.pop(handle, None)

    def lost(self, requests: Iterable[Request], error: str) -> None:
        """Tell of requests that they ended with `error`, but for those of which an end was told. Twice is fine."""
        for request in requests:
            told = self._mailboxes.get(request.handle, self._events)
            if not any(isinstance(event, FinishEvent) and event.handle == request.handle for event in told):
                told.append(FinishEvent(handle=request.handle, output=request.lost(error)))
