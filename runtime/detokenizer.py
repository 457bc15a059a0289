"""From one sequence's tokens to text, piece by piece: what may be shown already, and where a stop string ends it.

Knows nothing of requests, events or models.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Self

from .tokenizer import Tokenizer


class Detokenizer:
    """Text deltas of one sequence: always valid UTF-8, never taken back, the longest that no later token can change.

    Held back are the bytes of an unfinished character and the longest end of the text that begins a stop string. The
    deltas, `flush` included, add up to the decoded output, cut before the first stop string: the one that ends first
    and, of those that end together, the longest. A stop string that ends within the first `min_tokens` tokens stops
    nothing. An `add` costs the same however long the text is. State is immutable values, so copies are cheap.
    """

    __slots__ = (
        "_at_start",
        "_bytes",
        "_held",
        "_min_tokens",
        "_stop",
        "_tokenizer",
        "num_skipped",
        "num_tokens",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        skip: str = "",
    ) -> None:
        """`prompt_ids` are what the output continues: a space may not begin a text, and a character that the prompt
        leaves unfinished counts as output. Only their last few are looked at. The output begins with `skip`, which is
        no part of the text."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0  # of the text
        tail = _last_bytes(tokenizer, prompt_ids)
        self._at_start = not tail
        self._bytes = tail[codecs.utf_8_decode(tail, "replace")[1] :]  # of an unfinished character, at most 3
        self._held = ""  # begins a stop string, all of it
        self.num_skipped = len(skip.encode())  # bytes still to come that are no part of the text
        self.stopped: str | None = None  # the stop string that ended the text

    def add(self, token_id: int) -> str:
        """Take the next token; what became certain with it. Not allowed once `stopped`."""
        assert self.stopped is None, "the text has ended"
        self.num_tokens += 1
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            data = self._first(token_id, data)
            self._at_start = False
        if self.num_skipped:
            num_skipped = min(self.num_skipped, len(data))
            data, self._bytes = data[num_skipped:], b""
            self.num_skipped -= num_skipped
            self.num_tokens = int(bool(data))
        data = self._bytes + data
        text, used = codecs.utf_8_decode(data, "replace")
        self._bytes = data[used:]
        return self._release(text)

    def flush(self) -> str:
        """What was held back, now that no token follows: an unfinished character as U+FFFD."""
        text = self._release(self._bytes.decode(errors="replace")) + self._held
        self._bytes, self._held = b"", ""
        return text

    def copy(self) -> Self:
        """One that goes on from here by itself."""
        return copy.copy(self)

    def branch(self, stop: Sequence[str], *, min_tokens: int, skip: str = "") -> Self:
        """One that goes on from here with other stop strings, which may begin in what is held back."""
        other = copy.copy(self)
        other.num_skipped = len(skip.encode())
        other._stop, other._min_tokens, other.num_tokens = tuple(stop), min_tokens, 0
        return other

    def afresh(self) -> Self:
        """One whose text begins here: what was held back is no part of it."""
        other = copy.copy(self)
        other._bytes, other._held = b"", ""
        return other

    def _first(self, token_id: int, data: bytes) -> bytes:
        """What the token adds where it begins the text: some tokenizers drop its space there."""
        alone = self._tokenizer.decode([token_id])
        return data if "\N{REPLACEMENT CHARACTER}" in alone else alone.encode()

    def _release(self, text: str) -> str:
        """The part of held back and new text that may go out; sets `stopped`."""
        text, num_held = self._held + text, len(self._held)
        self._held = ""
        if self.num_tokens > self._min_tokens and (match := self._first_match(text, num_held)) is not None:
            start, self.stopped = match
            self._bytes = b""
            return text[:start]
        first = self._hold_from(text)
        self._held = text[first:]
        return text[:first]

    def _first_match(self, text: str, num_held: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first, beyond the `num_held` characters looked at before."""
        found: list[tuple[int, int, str]] = []
        for stop in self._stop:
            start = text.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _hold_from(self, text: str) -> int:
        """Where the longest end of `text` begins that is a proper prefix of a stop string."""
        longest = max(map(len, self._stop), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            end = text[start:]
            if any(len(end) < len(stop) and stop.startswith(end) for stop in self._stop):
                return start
        return len(text)


def _last_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """The end of a text, enough of it to hold an unfinished character whole; b"" if the text is empty."""
    tail = b""
    for token_id in reversed(token_ids):
        tail = tokenizer.token_bytes(int(token_id)) + tail
        if len(tail) >= 3:
            break
    return tail
