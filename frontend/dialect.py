"""What one server understands: its model, which fields it knows, and how it is asked for a grammar.

Knows nothing of requests that run. A field that a server ignores would change answers in silence, so each one beyond
OpenAI's is tried out once, when it is first needed, with a value that has no meaning: who knows it, refuses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from threading import Lock
from typing import Any

from radixrt.runtime import Grammar, InvalidRequest, SamplingParams

from .codec import Codec
from .failures import ServerError
from .wire import Wire

Body = dict[str, Any]
_SAMPLE = "The 12 tokens, of été?\n  日本"  # words, numbers, marks and spaces that tokenizers cut differently
_NONSENSE: dict[str, Any] = {"no": "value"}
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
_DEFAULTS = SamplingParams()


class Dialect:
    """What is known of one server so far."""

    def __init__(self, wire: Wire, model: str | None, codec: Codec, *, sends_ids: bool) -> None:
        self._wire = wire
        self._model = model
        self._codec = codec
        self._sends_ids = sends_ids
        self._known: dict[tuple[str, str], bool] = {}
        self._was_tried: set[str] = set()  # paths that take a plain request
        self._lock = Lock()

    def model(self) -> str:
        """The model that is asked: the one given, or the server's only one. InvalidRequest where it has several."""
        with self._lock:
            if self._model is None:
                listed = self._wire.wait(self._wire.ask("/models"))
                models = listed.get("data") if isinstance(listed, dict) else None
                names = [str(model["id"]) for model in models or [] if isinstance(model, dict) and "id" in model]
                if len(names) != 1:
                    there = ", ".join(names[:5]) or "none"
                    raise InvalidRequest(f"model: none given, and the server has {there}; give model=")
                self._model = names[0]
            return self._model

    def fields(self, path: str, params: SamplingParams, namespace: str) -> Body:
        """A request's fields, all but what it goes on from. InvalidRequest for what the server would not heed."""
        body: Body = {"model": self.model(), "max_tokens": params.max_tokens, "temperature": params.temperature}
        plain: Body = {"top_p": params.top_p, "presence_penalty": params.presence_penalty}
        plain |= {"frequency_penalty": params.frequency_penalty, "stop": list(params.stop)}
        plain["logit_bias"] = {str(token_id): bias for token_id, bias in dict(params.logit_bias).items()}
        body |= {name: value for name, value in plain.items() if value and (name, value) != ("top_p", 1.0)}
        beyond: Body = {name: getattr(params, name) for name in _EXTENSIONS}
        beyond = {name: value for name, value in beyond.items() if value != getattr(_DEFAULTS, name)}
        if namespace:
            beyond["cache_salt"] = namespace
        for name in beyond:
            if not self.knows(path, name):
                raise InvalidRequest(f"{name}: given, which {self._wire.url} does not know; leave it out")
        return body | beyond

    def grammar_fields(self, path: str, grammar: Grammar) -> Body | None:
        """The fields that hold an output to a grammar; None where the server has none for it."""
        for name, value, nonsense in _spellings(grammar):
            if self.knows(path, name, nonsense):
                return {name: value}
        return None

    def tells_ids(self, path: str) -> bool:
        """It gives the ids of what it generates."""
        return self._sends_ids and self.knows(path, "return_token_ids")

    def knows(self, path: str, field: str, nonsense: Any = _NONSENSE) -> bool:
        """It refuses a value of a field that has no meaning."""
        with self._lock:
            key = path, json.dumps([field, nonsense])
            if key not in self._known:
                self._try(path)
                self._known[key] = self._refuses(path, {field: nonsense})
            return self._known[key]

    def _try(self, path: str) -> None:
        """See that the server takes a request as we make them, and has the tokenizer that was given."""
        if path in self._was_tried:
            return
        self._wire.wait(self._wire.ask(path, self._smallest(path)))
        if self._sends_ids:
            body = {"model": self._model, "prompt": _SAMPLE, "add_special_tokens": False}
            try:
                told = self._wire.wait(self._wire.ask("/../tokenize", body))
            except ServerError:  # it has none, so there is nothing to compare
                told = {}
            ids = told.get("tokens") if isinstance(told, dict) else None
            if isinstance(ids, list) and ids != self._codec.encode(_SAMPLE):
                raise InvalidRequest(f"tokenizer: not that of {self._wire.url}, which encodes other ids; give its own")
        self._was_tried.add(path)

    def _refuses(self, path: str, fields: Body) -> bool:
        try:
            self._wire.wait(self._wire.ask(path, self._smallest(path) | fields))
        except ServerError as error:
            if error.status in (400, 422):
                return True
            raise
        return False

    def _smallest(self, path: str) -> Body:
        body: Body = {"model": self._model, "max_tokens": 1}
        if path == "/chat/completions":
            return body | {"messages": [{"role": "user", "content": "a"}]}
        return body | {"prompt": self._codec.encode("a") if self._sends_ids else "a"}


def _spellings(grammar: Grammar) -> list[tuple[str, Any, Any]]:
    """Ways to ask for a grammar: the field, its value, and one of its kind that no server can follow."""
    match grammar.kind:
        case "json_schema":
            schema, broken = json.loads(grammar.source), {"type": "nonsense"}
            return [
                ("response_format", _response_format(schema), _response_format(broken)),
                ("structured_outputs", {"json": schema}, {"json": broken}),
                ("guided_json", schema, broken),
            ]
        case "regex":
            return _patterns(grammar.source)
        case "choice":
            options = json.loads(grammar.source)
            return [
                ("structured_outputs", {"choice": options}, {"choice": []}),
                ("guided_choice", options, []),
                *_patterns("|".join(map(re.escape, options))),
            ]
        case "lark":  # servers disagree on the dialect
            return []


def _patterns(pattern: str) -> list[tuple[str, Any, Any]]:
    return [
        ("structured_outputs", {"regex": pattern}, {"regex": "("}),
        ("guided_regex", pattern, "("),
        ("regex", pattern, "("),
    ]


def _response_format(schema: Mapping[str, Any]) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "output", "strict": True, "schema": schema}}
