"""The events of some requests as an iterator, which alone receives them. Knows nothing of how a step works."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from .outputs import Event, FinishEvent, Handle


class EventStream:
    """Steps the engine as often as the next event needs; ends after the last request's FinishEvent.

    `mailbox` is where the engine puts the events of the `unfinished` requests. Closing it or leaving its `with` block
    aborts what has not ended. Dropping the last name that holds it does so too, before the engine's next step: the
    garbage collector may find it in the middle of anything, so it then only goes to the `forsaken`.
    """

    def __init__(
        self, advance: Callable[[], None], abandon: Callable[[Iterable[Handle]], None], forsaken: deque[Handle]
    ) -> None:
        self.mailbox: deque[Event] = deque()
        self.unfinished: set[Handle] = set()
        self._advance = advance
        self._abandon = abandon
        self._forsaken = forsaken

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self.mailbox:
            if not self.unfinished:
                raise StopIteration
            self._advance()
        event = self.mailbox[0]  # it stays until its end is noted: an interrupt between the two loses neither
        if isinstance(event, FinishEvent):
            self.unfinished.discard(event.handle)
        return self.mailbox.popleft()

    def close(self) -> None:
        """Abort what has not ended; no further events come. Twice is fine."""
        self._abandon(self.unfinished)
        self.unfinished.clear()
        self.mailbox.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._forsaken.extend(self.unfinished)
