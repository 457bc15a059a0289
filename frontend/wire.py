"""HTTP as the URL backend needs it: JSON goes out; JSON or a stream of it comes back; refusals are tried again.

Knows nothing of prompts or tokens. The client is asynchronous and runs on a thread of its own, because a stream that
is no longer wanted can be closed there at once. An API key is sent and never told: it is in no repr, and cut out of
what a server says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from threading import Thread, current_thread
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import finalize

import httpx2

from radixrt.runtime import InvalidRequest

from .failures import ServerError

T = TypeVar("T")
MAX_WAIT = 60.0  # seconds before a request is tried again, whatever a server asks for
MAX_ERROR_BYTES = 1 << 16  # of what a server says with an error
_CONNECT = 10.0  # seconds
_BUSY = (429, 503)  # the request was not begun


class Wire:
    """One server. `url` is where its `/v1` is; one without a path gets that."""

    def __init__(self, url: str, *, api_key: str | None, timeout: float, num_retries: int, num_open: int) -> None:
        """`timeout`: seconds without a byte. `num_open`: requests at once."""
        self.url = _checked(url)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
            raise InvalidRequest("api_key: given with what no header can hold; allowed: printable ASCII")
        self._api_key = api_key
        self._num_retries = num_retries
        self._loop = asyncio.new_event_loop()
        self._client = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key is not None else {},
            timeout=httpx2.Timeout(timeout, connect=_CONNECT, pool=None),
            limits=httpx2.Limits(max_connections=num_open),
            trust_env=False,  # proxies and passwords are what the caller says, not what the machine has
        )
        thread = Thread(target=self._loop.run_forever, name="radixrt-wire", daemon=True)
        thread.start()
        self._end = finalize(self, _end, self._loop, self._client, thread)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run this on the client's thread. Cancelling the future closes what it reads."""
        try:
            self.check_open()
        except ServerError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def check_open(self) -> None:
        if not self._end.alive:
            raise ServerError(f"{self.url}: closed; connect again")

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result()

    def close(self) -> None:
        """Break everything off. Twice is fine."""
        self._end()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The one value that the server answers."""
        async with aclosing(self.values(path, body)) as values:
            return await anext(values, None)

    async def values(self, path: str, body: Mapping[str, Any] | None = None) -> AsyncGenerator[Any]:
        """The values that the server answers: one for each event, or only one where it does not stream.

        ServerError for every other answer, and where it breaks off.
        """
        method = "POST" if body is not None else "GET"
        response = await self._sent(method, path, body)
        try:
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                is_done = False
                async for event in httpx2.EventSource(response):
                    is_done = is_done or event.data == "[DONE]"  # read on: what was read whole is used again
                    if not is_done:
                        yield self._read(path, event.data)
            else:
                yield self._read(path, await response.aread())
        except httpx2.HTTPError as error:
            raise self._error(path, f"the answer broke off: {type(error).__name__} {error}") from error
        finally:
            await response.aclose()

    async def _sent(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx2.Response:
        """The response of a request that was taken. Only what was not begun is tried again, each time later."""
        for attempt in range(self._num_retries + 1):
            wait = 0.25 * 2**attempt
            try:
                request = self._client.build_request(method, f"{self.url}{path}", json=body)
                response = await self._client.send(request, stream=True)
            except httpx2.HTTPError as error:
                failure = self._error(path, f"no answer: {type(error).__name__} {error}")
                if not isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
                    raise failure from error
            else:
                if response.is_success:
                    return response
                failure = self._error(path, await _said(response), response.status_code)
                wait = _retry_after(response, wait)
                await response.aclose()
                if response.status_code not in _BUSY:
                    raise failure
            if attempt < self._num_retries:
                await asyncio.sleep(min(wait, MAX_WAIT))
        raise failure

    def _read(self, path: str, data: str | bytes) -> Any:
        """A value, which is not the announcement of an error."""
        try:
            value = json.loads(data)
        except ValueError:
            raise self._error(path, f"no JSON: {data[:80]!r}") from None
        if (said := _error_message(value)) is not None:
            raise self._error(path, said)
        return value

    def _error(self, path: str, said: str, status: int | None = None) -> ServerError:
        what = f"{self.url}{path}: {f'answered {status}: ' if status else ''}{' '.join(said.split())[:500]}"
        return ServerError(what.replace(self._api_key, "***") if self._api_key else what, status)


def _checked(url: str) -> str:
    """Where requests go. InvalidRequest, which does not repeat a password, for what is no such URL."""
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or True)
    except (ValueError, TypeError, AttributeError):
        is_known = False
    if not is_known:
        raise InvalidRequest("url: not one of a server; allowed: http:// or https://, a host and perhaps a path")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest("url: with a user, a query or a fragment; allowed: none of them, a key goes to api_key")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"


async def _said(response: httpx2.Response) -> str:
    """What a server says of an error, in whichever of the known envelopes."""
    data = b""
    try:
        async for chunk in response.aiter_bytes():
            data += chunk
            if len(data) > MAX_ERROR_BYTES:
                break
        body = json.loads(data)
    except (httpx2.HTTPError, ValueError):
        return data[:500].decode(errors="replace")
    return _error_message(body) or str(body)


def _error_message(body: Any) -> str | None:
    """What went wrong, where a value says that something did: nested as OpenAI has it, or flat."""
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)
    if error:
        return str(error)
    if body.get("object") == "error":
        return str(body.get("message") or body)
    return None


def _retry_after(response: httpx2.Response, wait: float) -> float:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (KeyError, ValueError):  # a date is no reason to trust another machine's clock
        return wait


def _end(loop: asyncio.AbstractEventLoop, client: httpx2.AsyncClient, thread: Thread) -> None:
    async def finish() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await client.aclose()
        loop.stop()

    asyncio.run_coroutine_threadsafe(finish(), loop)
    if current_thread() is not thread:
        thread.join()
        loop.close()
