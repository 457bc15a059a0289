"""What a model's chat template puts between the messages of a conversation. Knows nothing of states or engines.

The template is run on placeholders, once for each sequence of roles, and never on what was really said: so what a
template would strip, re-order or forget of old messages stays as the model saw it.
"""

from __future__ import annotations

from radixrt.runtime import InvalidRequest, Tokenizer

Item = int | str  # a special token, or text
Roles = tuple[str, ...]


class Template:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._openings: dict[Roles, list[Item]] = {}

    def opening(self, roles: Roles) -> list[Item]:
        """What stands before the content of the last of these messages, from the end of the one before it.

        An assistant's is what the template ends a prompt with. InvalidRequest where the template refuses the roles.
        """
        if roles not in self._openings:
            *before, role = roles
            if role == "assistant" and before:
                items = _after(self._render(tuple(before)), len(before) - 1)
            else:
                items = _until(self._render(roles), len(before))
                items = _after(items, len(before) - 1) if before else items
            self._openings[roles] = items
        return self._openings[roles]

    def _render(self, roles: Roles) -> list[Item]:
        """A conversation of placeholders: special tokens, and all text between two of them as one."""
        messages = [{"role": role, "content": _placeholder(number)} for number, role in enumerate(roles)]
        items: list[Item] = []
        text = b""
        for token_id in self._tokenizer.chat(messages):
            if data := self._tokenizer.token_bytes(token_id):
                text += data
                continue
            items += [text.decode(errors="replace"), token_id] if text else [token_id]
            text = b""
        return [*items, text.decode(errors="replace")] if text else items


def _placeholder(number: int) -> str:
    return f"qZx{number}xZq"


def _until(items: list[Item], number: int) -> list[Item]:
    """The items before a placeholder."""
    at, text = _find(items, number)
    first = text.partition(_placeholder(number))[0]
    return items[:at] + ([first] if first else [])


def _after(items: list[Item], number: int) -> list[Item]:
    """The items behind a placeholder."""
    at, text = _find(items, number)
    last = text.partition(_placeholder(number))[2]
    return ([last] if last else []) + items[at + 1 :]


def _find(items: list[Item], number: int) -> tuple[int, str]:
    for at, item in enumerate(items):
        if isinstance(item, str) and _placeholder(number) in item:
            return at, item
    raise InvalidRequest("roles: the model's chat template does not show every message; write the prompt as plain text")
