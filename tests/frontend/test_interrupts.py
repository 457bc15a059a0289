"""Interrupts at any moment while programs run: no scope stays open, no thread is left, and the engine goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

import radixrt as rx
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


def run_plain(engine: Engine) -> Any:
    return plain.run(engine)


def run_threads(engine: Engine) -> Any:
    return threads.run(engine)


def run_tasks(engine: Engine) -> Any:
    return asyncio.run(tasks.arun(engine))


def read_stream(engine: Engine) -> Any:
    [*_, last] = threads.stream(engine)
    assert isinstance(last, rx.events.RunEnded)
    return last.value


def run_batch(engine: Engine) -> Any:
    return [result.ok and result.value for result in threads.batch(engine, [{}, {}], concurrency=2)]


RUNS: list[Callable[[Engine], Any]] = [run_plain, run_threads, run_tasks, read_stream, run_batch]


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


def interrupted(run: Callable[[Engine], Any], k: int) -> bool:
    """Interrupt a run at the main thread's k-th moment; whether it came so far."""
    expected = run(engine := new_engine())
    num_threads = threading.active_count()
    raised = False
    try:
        with Interrupter(k, KeyboardInterrupt()):
            run(engine)
    except KeyboardInterrupt:
        raised = True
    for _ in range(200):  # one that has just told of its end may still be there
        if threading.active_count() <= num_threads:
            break
        time.sleep(0.01)
    assert threading.active_count() == num_threads, "a thread was left"
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
    assert any([interrupted(run, k) for k in moments])
