"""What a state holds at one moment, as a value: tokens, text still to be encoded, and what was said by whom.

Knows nothing of requests that run. Everything is immutable and shared: a mark or a branch is one more name for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .chat import Item
from .choice import Choice
from .codec import Codec
from .node import Node
from .slot import Slot


@dataclass(frozen=True, slots=True)
class Said:
    """One thing more that was said: a text or a slot, in the message it belongs to. A list from its end."""

    what: str | Slot[Any] | Choice[Any]
    message: int | None  # None: outside of messages
    before: Said | None

    @property
    def text(self) -> str:
        """Waits for a slot, as that does."""
        return self.what if isinstance(self.what, str) else self.what.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """The first `at` tokens of `node`, then those `committed` since, then the tokens of the `pending` text.

    `pending` begins where a tokenizer starts afresh: at the start, behind a special or a generated token, or where
    `Codec.commit` cut. In a message its text is plain: nothing in it is taken for a special token. `chosen` owns those
    committed, where a choice computed them: while it is held they stay cached.
    """

    node: Node | None = None
    at: int = 0
    committed: tuple[int, ...] = ()
    chosen: Node | None = None
    pending: str = ""
    roles: tuple[str, ...] = ()
    is_open: bool = False  # the last message
    said: Said | None = None
    slots: Mapping[str, Slot[Any] | Choice[Any]] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self.said is None and not self.roles

    @property
    def message(self) -> int | None:
        """The number of the message that is open."""
        return len(self.roles) - 1 if self.is_open else None

    def hold(self) -> tuple[Node, ...]:
        """The requests that have its tokens, held until each is dropped."""
        return tuple(node.hold() for node in (self.node, self.chosen) if node is not None)

    def plus(self, text: str, *, start_ids: tuple[int, ...]) -> Content:
        """With more text. `start_ids` come before the first."""
        committed = start_ids if self.is_empty else self.committed
        said = Said(text, self.message, self.said)
        return replace(self, committed=committed, pending=self.pending + text, said=said)

    def opened(self, role: str, items: list[Item], codec: Codec) -> Content:
        """With a message opened, which `items` lead to."""
        now = self
        for item in items:
            if isinstance(item, str):
                now = replace(now, pending=now.pending + item)
            else:
                now = replace(now, committed=(*now.flushed(codec), item), pending="")
        return replace(now, roles=(*self.roles, role), is_open=True)

    def flushed(self, codec: Codec) -> tuple[int, ...]:
        """All ids behind the node's: those of the pending text too, now that no text follows."""
        return (*self.committed, *codec.encode(self.pending, plain=bool(self.roles)))

    def healed(self, codec: Codec) -> tuple[tuple[int, ...], str]:
        """As `flushed`, but for the end of the text that a continuation could change, which comes by itself."""
        is_first = self.node is None and not self.committed
        ids, rest = codec.healed(self.pending, plain=bool(self.roles), is_first=is_first)
        return (*self.committed, *ids), rest

    def certain(self, codec: Codec) -> tuple[int, ...]:
        """All ids before the pending text. O(tokens)."""
        return (*self._sent, *(codec.start_ids if self.is_empty else self.committed))

    def settled(self, codec: Codec) -> Content:
        """The same, with as much of the pending text committed as no continuation changes."""
        ids, rest = codec.commit(self.pending, plain=bool(self.roles))
        return replace(self, committed=(*self.committed, *ids), pending=rest) if ids else self

    def tokens(self, codec: Codec) -> list[int]:
        """All ids, as a generation would send them now. O(tokens)."""
        return [*self._sent, *self.flushed(codec)]

    def text(self, codec: Codec) -> str:
        """All as text, what the chat template wrote included; special tokens add nothing. O(tokens)."""
        return codec.decode([*self._sent, *self.committed]) + self.pending

    def messages(self) -> list[dict[str, str]]:
        """The messages, as role and content. Waits for their slots."""
        parts: list[list[str]] = [[] for _ in self.roles]
        for said in self.things():
            if said.message is not None:
                parts[said.message].append(said.text)
        return [{"role": role, "content": "".join(part)} for role, part in zip(self.roles, parts, strict=True)]

    def things(self, *, since: Said | None = None) -> list[Said]:
        """What was said, in order; all of it, or what came `since`."""
        return list(reversed(list(self._backwards(since))))

    @property
    def _sent(self) -> list[int]:
        return self.node.tokens(self.at) if self.node is not None else []

    def _backwards(self, stop: Said | None) -> Iterator[Said]:
        said = self.said
        while said is not None and said is not stop:
            yield said
            said = said.before
