"""Interrupts at any moment while programs run: no scope stays open, no thread is left, and the engine goes on."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

import radixrt as rx
from radixrt.frontend.driver import Driver
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from ..interrupts import Interrupter
from .conftest import audit


@rx.program
def plain(s: rx.State) -> list[Any]:
    s += "essay: "
    first = s.gen(max_tokens=4).value
    s.pin()
    with s.scratch() as aside:
        aside += "hm "
        aside.gen(max_tokens=3)
    return [first, s.choose(["yes", "no"]).value, s.gen(int, max_tokens=8).value]


@rx.program
def threads(s: rx.State) -> list[str]:
    s += "essay: "
    s.gen(max_tokens=3)

    def one(branch: rx.State, what: str) -> str:
        branch += f"its {what}: "
        return branch.gen(max_tokens=4).value

    with s.fork(["style", "facts", "length"]) as branches:
        marks = branches.map(one)
        s.adopt(branches[1])
    return [*marks, s.gen(max_tokens=2).value]


@rx.program
async def tasks(s: rx.State) -> list[str]:
    s += "essay: "

    async def one(branch: rx.State, what: str) -> str:
        branch += f"its {what}: "
        return await branch.gen(max_tokens=4)

    async with s.fork(["style", "facts", "length"]) as branches:
        marks = await branches.map(one)
        s.adopt(branches[2])
    return [*marks, await s.gen(max_tokens=2)]


def run_plain(engine: Engine, **options: Any) -> Any:
    return plain.options(**options).run(engine)


def run_threads(engine: Engine, **options: Any) -> Any:
    return threads.options(**options).run(engine)


def run_tasks(engine: Engine) -> Any:
    return asyncio.run(tasks.arun(engine))


def read_stream(engine: Engine, **options: Any) -> Any:
    [*_, last] = threads.options(**options).stream(engine)
    assert isinstance(last, rx.events.RunEnded)
    return last.value


def run_batch(engine: Engine, **options: Any) -> Any:
    results = threads.options(**options).batch(engine, [{}, {}], concurrency=2)
    return [result.ok and result.value for result in results]


RUNS: list[Callable[..., Any]] = [run_plain, run_threads, run_tasks, read_stream, run_batch]
OUTSIDE_OF_ASYNCIO = [run_plain, run_threads, read_stream, run_batch]


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """What hangs says where, and ends."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def new_engine() -> Engine:
    return Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=200, page_size=4, poison=True)


def in_thread(run: Callable[[Engine], Any], engine: Engine) -> Any:
    """What it returns on another thread, which waits for whatever this one may still hold."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run(engine)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def interrupted(run: Callable[..., Any], interrupts: AbstractContextManager[object], **options: Any) -> bool:
    """Run it beside these interrupts; whether one came."""
    expected = run(engine := new_engine())
    before = threading.enumerate()
    raised = False
    try:
        with interrupts:
            run(engine, **options)
    except KeyboardInterrupt:
        raised = True
    assert threading.enumerate() == before, "a thread was left"
    audit(engine)
    assert in_thread(run, engine) == run(engine) == expected
    audit(engine)
    engine.close()
    return raised


@pytest.mark.parametrize("run", RUNS)
def test_an_interrupt_anywhere_closes_all_and_the_engine_goes_on(run: Callable[[Engine], Any], profile: str) -> None:
    engine = new_engine()
    with Interrupter() as counted:
        run(engine)
    engine.close()
    count = min(counted.num_moments, 400 if profile == "deep" else 6)
    moments = Random(run.__name__).sample(range(counted.num_moments), count)
    assert any([interrupted(run, Interrupter(k, KeyboardInterrupt())) for k in moments])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in what a generator does at its end
@pytest.mark.parametrize("num_more", [1, 2])
@pytest.mark.parametrize("run", OUTSIDE_OF_ASYNCIO)
def test_interrupts_while_one_is_seen_to_do_as_one(run: Callable[[Engine], Any], num_more: int, profile: str) -> None:
    engine = new_engine()
    with Interrupter() as counted:
        run(engine)
    engine.close()
    random = Random(f"{run.__name__} {num_more}")
    found = [
        interrupted(run, Interrupter(k, KeyboardInterrupt(), gaps=random.choices(range(40), k=num_more)))
        for k in random.choices(range(counted.num_moments), k=300 if profile == "deep" else 6)
    ]
    assert any(found)


@pytest.mark.parametrize("has_lock", [False, True])
def test_only_what_is_half_done_costs_the_cache(*, has_lock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what runs on another thread, which hears of it at its slot."""
    engine = new_engine()
    run_plain(engine)
    is_running, may_go_on, failed = threading.Event(), threading.Event(), list[BaseException]()

    @rx.program
    def other(s: rx.State) -> None:
        s += "essay: "
        slot = s.gen(max_tokens=3)
        is_running.set()
        assert may_go_on.wait(60)
        try:
            slot.value  # noqa: B018  # raises
        except rx.GenerationFailed as error:
            failed.append(error)

    @rx.program
    def interrupted(s: rx.State) -> None:
        if has_lock:
            monkeypatch.setattr(Driver, "watch", interrupt)
            s += "essay: "
            s.gen(max_tokens=3)
        interrupt()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=other.run, args=(engine,))
    thread.start()
    assert is_running.wait(60)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(engine)
    monkeypatch.undo()
    assert (engine.stats().cache.num_cached == 0) == has_lock
    may_go_on.set()
    thread.join(60)
    said = "generation: lost when KeyboardInterrupt broke off another program on this engine; run it again"
    assert [str(error) for error in failed] == [said] * has_lock
    audit(engine)
    engine.close()


@dataclass
class Keys:
    """An observer that presses Ctrl-C at the k-th event and so many in all."""

    k: int
    num_left: int
    num_events: int = 0

    def tell(self, _: rx.events.RunEvent) -> None:
        self.num_events += 1
        if self.num_events > self.k and self.num_left:
            self.num_left -= 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def close(self) -> None:
        pass


@pytest.fixture
def hears_keys() -> Iterator[None]:
    """As in a terminal: where tests run in the background the shell has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_keys")
@pytest.mark.parametrize("is_second", [False, True])
def test_keys_are_heard_as_such_where_a_stream_has_a_loop_of_its_own(*, is_second: bool) -> None:
    """The second comes while the program sees to the first."""

    @rx.program
    async def pressed(s: rx.State) -> None:
        s += "essay: "
        slot = s.gen(max_tokens=20)
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        try:
            await slot
        finally:
            if is_second:
                asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
                await asyncio.sleep(0.01)

    engine, before = new_engine(), threading.enumerate()
    with pytest.raises(KeyboardInterrupt):
        list(pressed.stream(engine))
    assert threading.enumerate() == before
    audit(engine)
    assert run_tasks(engine) == run_tasks(new_engine())
    engine.close()


@pytest.mark.usefixtures("hears_keys")
@pytest.mark.parametrize("num_keys", [1, 2, 3])
@pytest.mark.parametrize("run", OUTSIDE_OF_ASYNCIO)
def test_keys_pressed_while_threads_go_on(run: Callable[..., Any], num_keys: int) -> None:
    """Real signals, which find the main thread wherever it waits."""
    keys = [Keys(k, num_keys) for k in (1, 4, 7)]
    assert all([interrupted(run, nullcontext(), observers=[lambda key=key: key]) for key in keys])
