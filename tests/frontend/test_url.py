"""Programs on a server: the program suite against a real one, what cannot be asked of it, and what goes wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from pydantic import Field

import radixrt as rx
from radixrt.frontend._programs import Fork, Gen, Race, Retry, Scratch
from radixrt.frontend.testing import Body, Oracle, plain, programs, tasks
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import audit
from .loopback import EOS, KEY, Habits, Server, once, serving, with_ids


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as one:
        yield one
    audit(one.engine)


def ended(server: Server) -> None:
    """Nothing runs on the server, soon."""
    deadline = time.monotonic() + 10
    while True:
        with server.lock:
            stats = server.engine.stats()
            if not stats.num_running and not stats.num_waiting:
                return
        assert time.monotonic() < deadline, "a request that nobody wants still runs"
        time.sleep(0.01)


# -- the program suite --------------------------------------------------------------------------------------------


def greedy(body: Body) -> Body:
    """The same program without draws."""
    ops: list[Any] = []
    for op in body:
        match op:
            case Gen():
                ops.append(replace(op, temperature=0.0))
            case Fork():
                ops.append(replace(op, bodies=tuple(map(greedy, op.bodies))))
            case Race():
                ops.append(replace(op, gen=replace(op.gen, temperature=0.0)))
            case Scratch() | Retry():
                ops.append(type(op)(greedy(op.body)))
            case _:
                ops.append(op)
    return tuple(ops)


def shape(values: Any) -> Any:
    """Values without what was drawn: where there are any, and what failed."""
    if isinstance(values, list):
        return [shape(value) for value in values]
    return values if values == "failed" else type(values)


@pytest.mark.parametrize("speaks", ["ids", "ids untold", "text"])
def test_random_programs_come_to_what_an_engine_says(server: Server, speaks: str, profile: str) -> None:
    oracle = Oracle(Engine(HashModel(vocab=128, eos=EOS), tokenizer=ByteTokenizer(), num_pages=512, prefix_cache=False))

    @settings(max_examples=1000 if profile == "deep" else 40, suppress_health_check=list(HealthCheck))
    @given(programs(values=False), st.sampled_from([plain, tasks]))  # which a server ends otherwise
    def check(body: Body, run: Any) -> None:
        assert run.run(backend, greedy(body)) == oracle.play(greedy(body))
        drawn = run.run(backend, body)
        assert shape(drawn[:-1]) == shape(oracle.play(body)[:-1])

    server.habits.tells_ids = speaks != "ids untold"
    with rx.connect(server.url) if speaks == "text" else with_ids(server) as backend:
        check()
        assert not backend._requests, "every request was released"
        backend.step()  # what was aborted says so
        assert backend.is_idle
    server.habits.tells_ids = True
    ended(server)


def test_whatever_fails_on_a_server_nothing_is_left(server: Server, profile: str) -> None:
    @settings(max_examples=500 if profile == "deep" else 25, suppress_health_check=list(HealthCheck))
    @given(
        programs(values=False),
        st.integers(0, 8),
        st.sampled_from([500, "cut", "error"]),
        st.sampled_from([plain, tasks]),
    )
    def check(body: Body, number: int, fault: Any, run: Any) -> None:
        numbers = count()
        server.habits.fault = lambda body: fault if next(numbers) == number else None
        with suppress(rx.GenerationFailed):
            run.run(backend, body)
        assert not backend._requests, "every request was released"

    with rx.connect(server.url) as backend:
        check()
    server.habits.fault = lambda body: None
    ended(server)


def test_a_run_on_a_server_that_is_cancelled_leaves_nothing(server: Server, profile: str) -> None:
    @settings(max_examples=500 if profile == "deep" else 25, suppress_health_check=list(HealthCheck))
    @given(programs(values=False), st.sampled_from([0.0, 0.001, 0.005, 0.02]), st.sampled_from([plain, tasks]))
    def check(body: Body, seconds: float, run: Any) -> None:
        async def main() -> None:
            task = asyncio.create_task(run.arun(backend, body))
            await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.wait([task])

        asyncio.run(main())
        assert not backend._requests, "every request was released"

    with rx.connect(server.url) as backend:
        check()
    ended(server)


def test_draws_repeat_and_branches_differ(server: Server) -> None:
    @rx.program
    def wide(s: rx.State) -> list[str]:
        s += "x"
        s.gen(max_tokens=3)
        with s.fork(4) as branches:
            return branches.map(lambda b: b.gen(max_tokens=8).value)

    with rx.connect(server.url) as backend:
        first = wide.run(backend)
        assert len(set(first)) == 4
        assert wide.run(backend) == first
        assert wide.options(seed=1).run(backend) != first
    with rx.connect(server.url) as again:
        assert wide.run(again) == first


def test_branches_run_at_once_and_share_the_server_s_cache(server: Server) -> None:
    here = threading.Barrier(3)

    def all_here(body: dict[str, Any]) -> None:
        if body["max_tokens"] == 20:
            here.wait(30)  # for the two others, or the server fails

    server.habits.fault = all_here
    text = "read by all of them, once: "

    @rx.program
    def judge(s: rx.State) -> list[int]:
        s += text
        s.gen(max_tokens=2)
        with s.fork(["a", "b", "c"]) as branches:

            def one(b: rx.State, item: str) -> int:
                b += item
                return b.gen(max_tokens=20).usage.cached_tokens

            return branches.map(one)

    with rx.connect(server.url) as backend:
        cached = judge.run(backend)
    server.habits.fault = lambda body: None
    assert all(found >= len(text) for found in cached)


def test_batches_and_event_loops(server: Server) -> None:
    rows = [{"text": f"row {number}", "max_tokens": 4} for number in range(6)]
    with rx.connect(server.url) as backend:
        results: list[Any] = once.batch(backend, rows, concurrency=3)
        assert all(result.ok for result in results)
        assert once.batch(backend, rows) == results

        async def together() -> list[str]:
            return list(await asyncio.gather(*(once.arun(backend, f"row {n}", max_tokens=4) for n in range(3))))

        assert asyncio.run(together()) == asyncio.run(together())


def test_messages_are_sent_as_messages(server: Server) -> None:
    with rx.connect(server.url) as backend, rx.session(backend, system="Be brief.") as chat:
        first = chat.send("Hi", max_tokens=5, temperature=0.0)
        assert first.value
        second = chat.send("And?", max_tokens=5, temperature=0.0)
        assert second.usage.prompt_tokens > first.usage.prompt_tokens
        sent = server.bodies[-1]["messages"]
        assert sent == chat.messages[:-1]
        assert [message["role"] for message in sent] == ["system", "user", "assistant", "user"]

        @rx.program
        def branches(s: rx.State) -> list[str]:
            with s.user():
                s += "Hi"
            with s.assistant():
                s.gen(max_tokens=4)
            with s.user():
                s += "rate its "
                with s.fork(["style", "facts"]) as found:

                    def one(b: rx.State, what: str) -> str:
                        b += what
                        return b.messages[-1]["content"]

                    return found.map(one)

        assert branches.run(backend) == ["rate its style", "rate its facts"]

        @rx.program
        def begins(s: rx.State) -> str:
            with s.user():
                s += "Hi"
            with s.assistant():
                s += "So, "
                return s.gen(max_tokens=4).value

        with pytest.raises(rx.GenerationFailed, match=r"inside of the assistant's message.*tokenizer="):
            begins.run(backend)


def test_with_a_tokenizer_a_message_may_be_begun(server: Server) -> None:
    @rx.program
    def begins(s: rx.State) -> str:
        with s.user():
            s += "Hi"
        with s.assistant():
            s += "So, "
            return s.gen(max_tokens=4, temperature=0.0).value

    with with_ids(server) as backend:
        begins.run(backend)
        assert isinstance(server.bodies[-1]["prompt"], list)


# -- cancelling ---------------------------------------------------------------------------------------------------


def test_a_cancelled_generation_closes_its_stream(server: Server) -> None:
    before = server.num_broken_off

    @rx.program
    async def timed(s: rx.State) -> str:
        s += "x"
        slot = s.gen(max_tokens=1000, ignore_eos=True)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await slot
        return s.text

    with rx.connect(server.url) as backend:
        assert timed.run(backend) == "x"
        ended(server)
    assert server.num_broken_off > before


def test_the_losers_of_a_scope_are_cancelled(server: Server) -> None:
    @rx.program
    def ends(s: rx.State) -> str:
        s += "x"
        with s.fork(3) as branches:
            slots = [b.gen(max_tokens=2 + 998 * n, ignore_eos=True) for n, b in enumerate(branches)]
            return slots[0].value

    with rx.connect(server.url) as backend:
        assert len(ends.run(backend)) == 2
    ended(server)


# -- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (400, "answered 400: fault 400"),
        (500, "answered 500: fault 500"),
        (302, "answered 302"),
        ("cut", "the stream ended before the answer"),
        ("error", "gone"),
        ("flat", "gone"),
        ("garbage", "no JSON"),
    ],
)
def test_what_goes_wrong_is_raised_at_the_slot(server: Server, fault: Any, said: str) -> None:
    @rx.program
    def goes_on(s: rx.State) -> tuple[str, str]:
        s += "x"
        server.habits.fault = lambda body: fault
        slot = s.gen(name="asked", max_tokens=20)
        with pytest.raises(rx.GenerationFailed, match=said) as caught:
            slot.value  # noqa: B018
        assert any("slot asked" in note for note in caught.value.__notes__)
        server.habits.fault = lambda body: None
        return s.text, s.gen(max_tokens=2).value

    num_asked = len(server.bodies)
    with rx.connect(server.url, model="hash") as backend:
        assert goes_on.run(backend)[0] == "x"
    ended(server)
    assert len(server.bodies) - num_asked == 2, "a request that was begun is not sent again"


def test_a_busy_server_is_asked_again(server: Server) -> None:
    faults = [429, 503, None]
    server.habits.fault = lambda body: faults.pop(0)
    server.habits.retry_after = "0"
    with rx.connect(server.url, model="hash") as backend:
        assert once.run(backend, max_tokens=3)
        assert not faults
        faults += [503] * 3
        impatient = rx.connect(server.url, model="hash", num_retries=2)
        with impatient, pytest.raises(rx.GenerationFailed, match="answered 503"):
            once.run(impatient, max_tokens=3)
        assert not faults
    server.habits.fault = lambda body: None
    server.habits.retry_after = None


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    with rx.connect(url, num_retries=0) as backend, pytest.raises(rx.ServerError, match="no answer: ConnectError"):
        once.run(backend)
    with rx.connect(url, num_retries=0, model="m") as backend, pytest.raises(rx.GenerationFailed, match="ConnectError"):
        once.run(backend)


def test_a_server_that_says_nothing_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        with rx.connect(url, model="m", timeout=0.2) as backend, pytest.raises(rx.GenerationFailed, match="Timeout"):
            once.run(backend)


def test_a_closed_connection_says_so(server: Server) -> None:
    backend = rx.connect(server.url, model="hash")
    backend.close()
    backend.close()
    with pytest.raises(rx.ServerError, match="closed"):
        once.run(backend)


def test_closing_ends_what_runs(server: Server) -> None:
    backend = rx.connect(server.url)
    threading.Timer(0.2, backend.close).start()
    with pytest.raises(rx.ServerError, match="closed"):
        once.run(backend, max_tokens=1500, ignore_eos=True)
    ended(server)


def test_forks_of_one_request_are_their_own(server: Server) -> None:
    params = rx.SamplingParams(max_tokens=4, seed=0)
    with rx.connect(server.url) as backend:
        parent = backend.submit(list(b"begin"), params, "", priority=0)
        backend.abort(parent)
        children = backend.fork(parent, 3, params, text=list(b" so"), at=5)
        while not backend.is_idle:
            backend.step()
        outputs = [bytes(backend._requests[child].tokens) for child in children]
        assert all(output.startswith(b"begin so") and len(output) <= 12 for output in outputs)
        assert len(set(outputs)) == 3


def test_a_key_is_sent_and_never_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serving(Habits(key=KEY)) as locked:
        with rx.connect(locked.url, api_key=KEY) as backend:
            assert once.run(backend, max_tokens=2, ignore_eos=True)
            assert KEY not in repr(backend) + repr(vars(backend))
        wrong = "sk-wrong"
        with rx.connect(locked.url, api_key=wrong, model="hash") as backend:
            with pytest.raises(rx.GenerationFailed, match=r"401: wrong key: Bearer \*\*\*") as caught:
                once.run(backend)
            assert wrong not in "".join([str(caught.value), *caught.value.__notes__])
        with pytest.raises(rx.InvalidRequest) as refused:
            rx.connect(locked.url, api_key="sk-\nnewline")
        assert "newline" not in str(refused.value)
    assert "/v1/completions" in caplog.text
    assert KEY not in caplog.text
    assert wrong not in caplog.text


@pytest.mark.parametrize("asked", [{"concurrency": 0}, {"validate_and_retry": True}, {"num_retries": -1}])
def test_a_wrong_count_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(rx.InvalidRequest, match=next(iter(asked))):
        rx.connect("http://127.0.0.1", **asked)


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "x", "file:///etc", "http://", "http://u:secret@x", "http://x?k=secret", "http://x:y"]
)
def test_what_is_no_server_is_refused(url: str) -> None:
    with pytest.raises(rx.InvalidRequest, match="url:") as caught:
        rx.connect(url)
    assert "secret" not in str(caught.value)


@rx.program
def facts(s: rx.State) -> list[object]:
    s += "Ann and Ben are"
    with s.fork((bool, int, Literal["old", "young"], Annotated[int, Field(ge=10, le=99)])) as branches:
        return [b.gen(kind, max_tokens=100).value for b, kind in zip(branches, branches.items, strict=True)]


def test_typed_values_are_held_to_their_types(server: Server) -> None:
    with with_ids(server) as backend:
        flag, number, age, bounded = facts.run(backend)
    assert isinstance(flag, bool)
    assert isinstance(number, int)
    assert age in ("old", "young")
    assert isinstance(bounded, int)
    assert 10 <= bounded <= 99
