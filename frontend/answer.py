"""What a server answers to one request: read value by value, told as events, and checked. Knows no HTTP."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from radixrt.runtime import Choice, ChoiceEvent, Event, FinishReason, Grammar, Handle, TokenEvent, Usage

from .codec import Codec
from .failures import ServerError


@dataclass(slots=True, kw_only=True)
class Answer:
    """An answer so far. With `has_bytes` the ids are the bytes of the text, whatever the server calls its tokens."""

    handle: Handle
    has_bytes: bool
    text: str = ""
    ids: list[int] = field(default_factory=list)
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    _told_len: int = 0  # characters of the text, and ids, that events have told
    _num_told: int = 0

    def take(self, value: Any) -> None:
        """One value of a stream, or the only one: of a completion or of a chat."""
        if not isinstance(value, dict):
            raise ServerError(f"no object: {str(value)[:80]!r}")
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        choice = next(iter(value.get("choices") or ()), None)
        if not isinstance(choice, dict):
            return
        self.reason = choice.get("finish_reason") or self.reason
        message = choice.get("delta") or choice.get("message") or {}
        text = str(choice.get("text") or message.get("content") or "").encode(errors="replace")
        self.text += text.decode()
        self.ids += list(text) if self.has_bytes else map(int, choice.get("token_ids") or ())

    def news(self) -> list[Event]:
        """Events of the ids that none has told of yet, the text with the last of them."""
        ids, text = self.ids[self._num_told :], self.text[self._told_len :]
        if ids:
            self._num_told, self._told_len = len(self.ids), len(self.text)
        last = len(ids) - 1
        return [
            TokenEvent(handle=self.handle, choice=0, token_id=token_id, text=text if number == last else "")
            for number, token_id in enumerate(ids)
        ]

    def end(self, codec: Codec) -> tuple[Choice, list[Event]]:
        """What it comes to, and the last events before it is told. Ids that the server kept to itself are encoded."""
        if self.reason not in ("stop", "length"):
            ended = f"the answer ended with {self.reason}" if self.reason else "the stream ended before the answer"
            raise ServerError(ended)
        self.ids = self.ids or codec.encode(self.text, plain=True)
        reason: FinishReason = "length" if self.reason == "length" else "stop"
        events = self.news()
        rest = self.text[self._told_len :]
        events.append(ChoiceEvent(handle=self.handle, choice=0, text=rest, finish_reason=reason))
        return Choice(index=0, text=self.text, token_ids=tuple(self.ids), finish_reason=reason), events


@dataclass(slots=True)
class Count:
    """Tokens as a server counts them, over all answers to a request."""

    told: dict[str, int] = field(default_factory=dict)

    def add(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details")
        told = usage | (details if isinstance(details, dict) else {})
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            if isinstance(told.get(name), int):
                self.told[name] = self.told.get(name, 0) + max(0, told[name])

    def usage(self, prompt_len: int, output_len: int) -> Usage:
        """Where the server has not counted, what was sent and came back is, and nothing of it was cached."""
        prompt_len = self.told.get("prompt_tokens", prompt_len)
        cached = min(self.told.get("cached_tokens", 0), prompt_len)
        return Usage(
            prompt_tokens=prompt_len,
            cached_tokens=cached,
            computed_tokens=prompt_len - cached,
            recomputed_tokens=0,
            completion_tokens=self.told.get("completion_tokens", output_len),
        )


def holds(grammar: Grammar, text: str) -> bool:
    """A finished text is one of the grammar's; JSON may be laid out in any way."""
    if grammar.kind == "json_schema":
        try:
            text = json.dumps(json.loads(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            return False
    return grammar.accepts(text)
