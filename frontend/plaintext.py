"""Text as token ids where nobody has the model's tokenizer: its bytes, and marks between messages. Knows no servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from radixrt.runtime import checks

ROLES = ("system", "user", "assistant", "tool")
NUM_BYTES = 256
NUM_IDS = NUM_BYTES + len(ROLES)


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Text as its UTF-8 bytes, and one id for the beginning of a message of each role."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(checks.text("prompt", text).encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < NUM_BYTES else b""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids: list[int] = []
        for message in [*messages, {"role": "assistant", "content": ""}]:
            ids += [NUM_BYTES + ROLES.index(message["role"]), *self.encode(message["content"])]
        return ids

    def messages(self, token_ids: Sequence[int]) -> list[dict[str, str]]:
        """The messages of which `chat` made these ids, the one that is open included; none where it is plain text."""
        starts = [at for at, token_id in enumerate(token_ids) if token_id >= NUM_BYTES]
        stops = [*starts, len(token_ids)][1:]
        return [
            {"role": ROLES[token_ids[start] - NUM_BYTES], "content": self.decode(token_ids[start:stop])}
            for start, stop in zip(starts, stops, strict=True)
        ]
