"""From the text of a state to token ids, and how much of a text no continuation can change. Knows no states.

Two facts carry the boundary policies `exact` and `heal`. Where no token of the vocabulary holds a byte followed by a
space, no token ever spans the two, whatever comes later. And tokenizers that split at a space start afresh behind the
split, which is tried out once for each tokenizer.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable
from functools import cached_property

from radixrt.runtime import Tokenizer, checks

_SPACE = ord(" ")
_TRIALS = ("a b", "a. b", "1 2", "é b", "a  b", "(a) \n b")


class Codec:
    """One tokenizer as the language uses it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        around, one = tokenizer.encode(""), tokenizer.encode("a")
        num_first = next((at for at, (x, y) in enumerate(zip(around, one, strict=False)) if x != y), len(around))
        self.start_ids = tuple(around[:num_first])  # what the model expects before a text, such as BOS
        self._num_last = len(around) - num_first

    def encode(self, text: str, *, plain: bool = False) -> list[int]:
        """The ids of a text by itself: none around it. With `plain`, nothing in it is taken for a special token.

        InvalidRequest where the text is not Unicode.
        """
        ids: list[int] = []
        todo = [text] if text else []
        while todo:
            piece = todo.pop()
            found = self._encode(piece)
            special = next((n for n, one in enumerate(found) if not self._tokenizer.token_bytes(one)), None)
            if not plain or special is None or len(piece) == 1:
                ids += found
                continue
            # No special token is left where a text is cut behind the first character of what looks like one.
            at = min(len(self.decode(found[:special])) + 1, len(piece) - 1)
            todo += [piece[at:], piece[:at]]
        return ids

    def _encode(self, text: str) -> list[int]:
        checks.text("text", text)
        ids = self._tokenizer.encode(text)
        return ids[len(self.start_ids) : len(ids) - self._num_last]

    def commit(self, text: str, *, plain: bool = False) -> tuple[list[int], str]:
        """The ids that no continuation changes, and the text that is left, as much committed as can be.

        For every b, `encode(text + b) == ids + encode(rest + b)`. Special tokens are taken to hold no white space.
        """
        at = len(text)
        while (at := text.rfind(" ", 1, at)) > 0:
            before = text[at - 1]
            if not before.isspace() and before.encode(errors="replace")[-1] not in self._spanned:
                return self.encode(text[:at], plain=plain), text[at:]
        return [], text

    def healed(self, text: str, *, plain: bool = False, is_first: bool = False) -> tuple[list[int], str]:
        """The ids of a text up to where a continuation could change them, and the rest, for the model to begin with.

        What a continuation could change ends at a special token at the latest. With `is_first` there is an id at
        least: a model has to have one to go on from.
        """
        ids, rest = self.commit(text, plain=plain)
        found = self.encode(rest, plain=plain)
        pieces = list(map(self._tokenizer.token_bytes, found))
        num_kept = max((at for at, piece in enumerate(pieces, 1) if not piece), default=int(is_first and not ids))
        while True:
            try:
                return ids + found[:num_kept], b"".join(pieces[num_kept:]).decode()
            except UnicodeDecodeError:  # inside of a character
                num_kept += 1

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids: special ones add nothing, bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self._tokenizer.token_bytes, token_ids)).decode(errors="replace")

    def kept(self, token_ids: tuple[int, ...], text: str, *, before: Iterable[int] = ()) -> tuple[int, str]:
        """How many of the ids lie within `text`, which is their beginning, and the rest of it: a part of a token.

        A last id that adds nothing lies behind it. A character that the ids `before` leave unfinished may begin the
        text. (all, "") where the text is not the beginning of what the ids say.
        """
        if b"".join(map(self._tokenizer.token_bytes, token_ids[:-1])) == text.encode(errors="replace"):
            return max(0, len(token_ids) - 1), ""
        decoder = getincrementaldecoder("utf-8")("replace")
        for token_id in before:
            decoder.decode(self._tokenizer.token_bytes(token_id))
        said, best, rest = "", 0, text
        for n, token_id in enumerate(token_ids, 1):
            unfinished = decoder.getstate()[0].decode(errors="replace")
            start, said = len(said), said + decoder.decode(self._tokenizer.token_bytes(token_id))
            if unfinished and said.startswith(unfinished, start) and text.startswith(unfinished, start):
                best, rest = n - 1, text[start + len(unfinished) :]  # it was never finished
            if len(said) > len(text):
                break
            if not decoder.getstate()[0]:
                best, rest = n, text[len(said) :]
        return (best, rest) if said.startswith(text) else (len(token_ids), "")

    @cached_property
    def _spanned(self) -> frozenset[int]:
        """Bytes that some token holds just before a space; all bytes where text does not start afresh at a space."""
        spanned = frozenset(
            token[at - 1]
            for token in map(self._tokenizer.token_bytes, range(self._vocab_size))
            for at in range(1, len(token))
            if token[at] == _SPACE
        )
        for text in _TRIALS:
            at = text.index(" ")
            if text[:at].encode()[-1] in spanned:
                continue
            if self.encode(text) != self.encode(text[:at]) + self.encode(text[at:]):
                return frozenset(range(256))
        return spanned
