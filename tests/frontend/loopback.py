"""A server on this machine that speaks OpenAI's completions and chat, for tests of the URL backend, and clients of it.

A real one over a socket, on an engine of the hash model; `Habits` say what it cannot do and how it fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

import radixrt as rx
from radixrt.frontend.url import UrlBackend
from radixrt.frontend.wire import Wire
from radixrt.runtime import ChoiceEvent, Engine, FinishEvent, Grammar, InvalidRequest, SamplingParams, TokenEvent
from radixrt.runtime.testing import ByteTokenizer, HashModel

EOS = frozenset(range(4))
KEY = "sk-secret-of-the-tests"
_PLAIN = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "seed")
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")


@dataclass(kw_only=True)
class Habits:
    """What a server does. `fault` is asked before each generation: a status, a key of `said`, or None."""

    takes_ids: bool = True
    tells_ids: bool = True
    streams: bool = True
    grammars: tuple[str, ...] = ("response_format", "structured_outputs")
    disobeys: bool = False  # checks grammars and then does not heed them
    has_extensions: bool = True
    models: tuple[str, ...] = ("hash",)
    key: str | None = None
    tokenize: Callable[[str], list[int]] | None = None
    retry_after: str | None = None
    fault: Callable[[dict[str, Any]], int | str | None] = lambda body: None


@dataclass(kw_only=True)
class Server:
    """A server that runs. `bodies` are what it was asked, in order, probes included."""

    url: str
    engine: Engine
    habits: Habits
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_broken_off: int = 0  # streams that their reader closed
    lock: Lock = field(default_factory=Lock)


def with_ids(server: Server, **settings: Any) -> UrlBackend:
    """A client that has the model's tokenizer."""
    wire = Wire(server.url, api_key=None, timeout=20.0, num_retries=0, num_open=16)
    return UrlBackend(wire, own=(ByteTokenizer(eos_token_ids=EOS), 128), **settings)


@rx.program
def once(s: rx.State, /, text: str = "x", **asked: Any) -> str:
    s += text
    return s.gen(**asked).value


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def serving(habits: Habits | None = None, model: HashModel | None = None, **settings: Any) -> Iterator[Server]:
    """A server until the block ends. Its vocabulary is ASCII by default, so that text says which ids there were."""
    given: dict[str, Any] = {"num_pages": 512, "page_size": 4, "tokenizer": ByteTokenizer()} | settings
    engine = Engine(model or HashModel(vocab=128, eos=EOS), **given)
    server = Server(url="", engine=engine, habits=habits or Habits())

    class Handler(_Handler):
        owner = server

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = False  # closing it waits for them
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: Server
    protocol_version = "HTTP/1.1"
    timeout = 10  # seconds, where a client leaves a connection open

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": name} for name in self.owner.habits.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        habits = self.owner.habits
        if habits.key is not None and self.headers.get("authorization") != f"Bearer {habits.key}":
            return self._send(401, {"error": {"message": f"wrong key: {self.headers.get('authorization')}"}})
        if self.path == "/tokenize" and habits.tokenize is not None:
            return self._send(200, {"tokens": habits.tokenize(body["prompt"])})
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self._send(404, {"error": {"message": f"no {self.path}"}})
        self.owner.bodies.append(body)
        fault = habits.fault(body)
        if isinstance(fault, int):
            return self._send(fault, {"error": {"message": f"fault {fault}"}})
        try:
            prompt, params = _prompt(body, habits), _params(body, habits)
            with self.owner.lock:
                stream = self.owner.engine.stream(prompt, params)
        except (Refused, InvalidRequest) as error:
            return self._send(getattr(error, "status", 400), {"error": {"message": str(error)}})
        try:
            if body.get("stream") and habits.streams:
                self._stream(body, stream, fault)
            else:
                self._whole(body, stream)
        except (BrokenPipeError, ConnectionResetError):
            self.owner.num_broken_off += 1
        finally:
            with self.owner.lock:
                stream.close()

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        if self.owner.habits.retry_after is not None:
            self.send_header("retry-after", self.owner.habits.retry_after)
        if status == 302:
            self.send_header("location", "/v1/models")
        self.end_headers()
        self.wfile.write(data)

    def _whole(self, body: dict[str, Any], stream: Any) -> None:
        events = []
        while True:
            with self.owner.lock:
                event = next(stream, None)
            if event is None:
                break
            events.append(event)
        output = events[-1].output
        [choice] = output.choices
        said = self._part(body, choice.text, list(choice.token_ids), choice.finish_reason, whole=True)
        self._send(200, {"object": "completion", "choices": [said], "usage": _usage(output.usage)})

    def _stream(self, body: dict[str, Any], stream: Any, fault: str | None) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("connection", "close")
        self.close_connection = True
        self.end_headers()
        self.wfile.write(b": a comment\r\n\r\n")
        for number in range(1 << 30):
            if fault is not None and number == 2:
                said = {"cut": "", "garbage": "data: {\n\n"}
                said["error"] = 'data: {"error": {"message": "gone"}}\n\n'
                said["flat"] = 'data: {"object": "error", "message": "gone"}\n\n'
                self.wfile.write(said[fault].encode())
                return
            with self.owner.lock:
                event = next(stream, None)
            match event:
                case TokenEvent():
                    self._event({"choices": [self._part(body, event.text, [event.token_id], None)]})
                case ChoiceEvent():
                    self._event({"choices": [self._part(body, event.text, [], event.finish_reason)]})
                case FinishEvent() if body["stream_options"]["include_usage"]:
                    self._event({"choices": [], "usage": _usage(event.output.usage)})
                case None:
                    break
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def _part(
        self, body: dict[str, Any], text: str, ids: list[int], reason: str | None, *, whole: bool = False
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self.path.endswith("/chat/completions"):
            part["message" if whole else "delta"] = {"role": "assistant", "content": text}
        else:
            part["text"] = text
        if body.get("return_token_ids") and self.owner.habits.tells_ids and ids:
            part["token_ids"] = ids
        return part


def _prompt(body: dict[str, Any], habits: Habits) -> str | list[int]:
    if "messages" in body:
        return ByteTokenizer().decode(ByteTokenizer().chat(body["messages"])) + "assistant: "
    prompt = body["prompt"]
    if isinstance(prompt, list) and not habits.takes_ids:
        raise Refused(400, "prompt: no ids")
    assert isinstance(prompt, (str, list))
    return prompt


def _params(body: dict[str, Any], habits: Habits) -> SamplingParams:
    names = [*_PLAIN, *(_EXTENSIONS if habits.has_extensions else ())]
    asked = {name: body[name] for name in names if body.get(name) is not None}
    asked["logit_bias"] = {int(token_id): bias for token_id, bias in body.get("logit_bias", {}).items()}
    for name in ("return_token_ids", "cache_salt"):
        if isinstance(body.get(name), dict) and habits.has_extensions and habits.tells_ids:
            raise Refused(422, f"{name}: no such value")
    grammar = _grammar({name: body[name] for name in habits.grammars if name in body})
    return SamplingParams(**asked, grammar=None if habits.disobeys else grammar)


def _grammar(asked: dict[str, Any]) -> Grammar | None:
    if "response_format" in asked:
        return Grammar.json_schema(asked["response_format"]["json_schema"]["schema"])
    spelled: dict[str, Any] = asked.get("structured_outputs", {})
    if "json" in spelled:
        return Grammar.json_schema(spelled["json"])
    pattern = spelled.get("regex", asked.get("regex", asked.get("guided_regex")))
    if pattern is not None:
        return Grammar.regex(pattern)
    return Grammar.choice(spelled["choice"]) if "choice" in spelled else None


def _usage(usage: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
