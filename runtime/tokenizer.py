"""Between text and token ids: the `Tokenizer` protocol and its wrapper around a transformers tokenizer.

Knows nothing of models, requests or streaming.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from .checks import refuse
from .errors import InvalidRequest, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer. A text is the concatenation of its tokens' bytes, read as UTF-8."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a text."""

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens the model expects around it. InvalidRequest if it has none."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of output, without special tokens; U+FFFD for bytes that are not UTF-8."""

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to a text that it does not begin: b"" for special and unknown ids, which add nothing."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation up to where the assistant speaks next. InvalidRequest if there is no template."""


class HFTokenizer:
    """A transformers tokenizer as `Tokenizer`. The bytes of a token are worked out once, on its first use."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)
        self._anchor_text = self.decode(self._anchor)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self._tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset([eos])

    def encode(self, text: str) -> list[int]:
        return self._ids("prompt", text)

    def decode(self, token_ids: Sequence[int]) -> str:
        # No clean-up: it moves spaces that the model wrote, and what a token adds would depend on the next one.
        text = self._tokenizer.decode(
            list(map(int, token_ids)), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int) -> bytes:
        """From what the token adds behind a letter or, where that is no whole character, from its name."""
        text = self.decode([*self._anchor, token_id]).removeprefix(self._anchor_text)
        if "\N{REPLACEMENT CHARACTER}" in text:
            name = str(self._tokenizer.convert_ids_to_tokens(token_id))
            if match := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece's byte fallback
                return bytes.fromhex(match[1])
            if all(char in _BYTE_OF for char in name):
                return bytes(_BYTE_OF[char] for char in name)
        return text.encode()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("messages: given to a model without a chat template; allowed: a prompt as plain text")
        are_mappings = isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
        if not messages or not are_mappings:
            refuse("messages", messages, "a list of at least one mapping with role and content")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template comes with the model and may fail in any way
            raise InvalidRequest(f"messages: refused by the model's chat template: {first_line(error)}") from error
        assert isinstance(text, str)
        return self._ids("messages", text, add_special_tokens=False)

    def _ids(self, field: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids
        except (TypeError, UnicodeEncodeError):  # how the Rust side refuses lone surrogates
            raise InvalidRequest(f"{field}: text that is not Unicode given; allowed: no lone surrogates") from None
        return ids


def _byte_level_alphabet() -> dict[str, int]:
    """The byte for each character in names of byte-level BPE tokens (GPT-2, Radford et al. 2019): printable Latin-1
    stands for itself, the other bytes, in order, for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
