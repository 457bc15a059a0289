"""Random programs: the same values whatever is cached, runs beside them or fails, and nothing held in the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import radixrt as rx
from radixrt.frontend.backend import EngineBackend
from radixrt.frontend.driver import Driver
from radixrt.frontend.testing import Body, FaultyBackend, Oracle, ScriptedBackend, plain, programs, tasks
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import audit

EOS = frozenset(range(4))
LONGEST = 160  # tokens that one generation of a random program ends at; asserted below


def engine_of(**settings: Any) -> Engine:
    given: dict[str, Any] = {"num_pages": 512, "page_size": 4, "poison": True} | settings
    return Engine(HashModel(vocab=128, eos=EOS), tokenizer=ByteTokenizer(), **given)


def count(profile: str) -> settings:
    return settings(max_examples=20_000 if profile == "deep" else 300, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def oracle_engine() -> Engine:
    return engine_of(prefix_cache=False)


def test_values_are_the_oracle_s(profile: str, oracle_engine: Engine) -> None:
    @count(profile)
    @given(programs(), st.sampled_from([1, 4, 16]), st.integers(0, 2), st.data())
    def check(body: Body, page_size: int, seed: int, data: st.DataObject) -> None:
        oracle = Oracle(oracle_engine, seed)
        expected = oracle.play(body)
        assert len(expected[-1]) <= LONGEST
        way = data.draw(st.sampled_from(["cold and hot", "off", "pressure", "batched", "few kept"]))
        run: Any = data.draw(st.sampled_from([plain, tasks]))
        run = run.options(seed=seed)
        match way:
            case "cold and hot":
                engine = engine_of(page_size=page_size)
                assert run.run(engine, body) == expected
                assert engine.stats().counters.computed <= oracle.computed
                assert run.run(engine, body) == expected
            case "off":
                engine = engine_of(page_size=page_size, prefix_cache=False)
                assert run.run(engine, body) == expected
            case "pressure":
                engine = engine_of(page_size=page_size, num_pages=LONGEST // page_size + 1, token_budget=16)
                assert run.run(engine, body) == expected
                assert engine.stats().counters.computed <= oracle.computed
            case "few kept":
                engine = engine_of(page_size=page_size, keep_finished=data.draw(st.integers(0, 3)))
                assert run.run(engine, body) == expected
            case "batched":
                engine = engine_of(page_size=page_size)
                assert asyncio.run(together(engine, body, seed)) == [expected] * 3
        audit(engine)
        assert not engine._loop.requests._ended, "every request was released"

    check()


async def together(engine: Engine, body: Body, seed: int) -> list[Any]:
    """The same program three times at once, and another beside it."""
    runs: list[Any] = [
        tasks.options(seed=seed),
        plain.options(seed=seed),
        tasks.options(seed=seed),
        tasks.options(seed=seed + 1),
    ]
    results = await asyncio.gather(*(run.arun(engine, body) for run in runs))
    return list(results[:3])


def test_whatever_fails_or_is_cancelled_nothing_is_held(profile: str) -> None:
    class Interrupted(BaseException):
        pass

    errors = [RuntimeError("device"), rx.InvalidRequest("refused"), Interrupted(), MemoryError()]

    @count(profile)
    @given(programs(), st.integers(0, 40), st.sampled_from(errors), st.sampled_from([plain, tasks]), st.booleans())
    def check(body: Body, number: int, error: BaseException, run: Any, once: bool) -> None:  # noqa: FBT001
        def fault(name: str, at: int) -> None:
            if name != "finish" and (at == number or (at > number and not once)):
                raise error

        engine = engine_of()
        driver = Driver(FaultyBackend(EngineBackend(engine), fault))
        try:
            run.run(driver, body)
        except BaseException as raised:
            if raised is not error:
                raise
        audit(engine)
        assert not engine._loop.requests._ended, "every request was released"

    check()


def test_a_generation_that_is_cut_off_is_the_failure_of_one_branch() -> None:
    ended = iter(range(100))

    def fault(name: str, number: int) -> None:
        if name == "finish" and next(ended) == 2:
            raise TimeoutError("the line is dead")

    @rx.program
    def wide(s: rx.State) -> list[Any]:
        s += "begin"
        with s.fork(4) as branches:
            return branches.map(lambda b: b.gen(max_tokens=4 + b.path[0]).value, on_error="collect")

    engine = engine_of()
    results = wide.run(Driver(FaultyBackend(EngineBackend(engine), fault)))
    [failed] = [result.error for result in results if isinstance(result, rx.Failed)]
    assert isinstance(failed, rx.GenerationFailed)
    assert "the line is dead" in str(failed)
    audit(engine)


def test_a_run_that_is_cancelled_holds_nothing(profile: str) -> None:
    @count(profile)
    @given(programs(), st.integers(0, 40), st.sampled_from([plain, tasks]))
    def check(body: Body, rounds: int, run: Any) -> None:
        engine = engine_of()

        async def main() -> None:
            task = asyncio.create_task(run.arun(engine, body))
            for _ in range(rounds):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            audit(engine)

        asyncio.run(main())

    check()


def test_a_scripted_backend_answers_from_its_table() -> None:
    backend = ScriptedBackend({"Q: sky?\nA:": " blue\nQ:", "A:": " what?"}, ByteTokenizer())

    @rx.program
    def ask(s: rx.State, question: str) -> str:
        s += f"Q: {question}\nA:"
        answer = s.gen(stop="\n").value
        s += " sure?"
        with pytest.raises(rx.GenerationFailed, match="no reply is scripted"):
            s.gen().value  # noqa: B018
        return answer

    assert ask.run(backend, "sky?") == " blue"
    assert ask.run(backend, "sea?") == " what?"
    assert backend.asked[-1] == "Q: sea?\nA: what? sure?"


def test_threads_of_programs_end_with_their_runs(oracle_engine: Engine) -> None:
    before = threading.active_count()

    @rx.program
    def fails(s: rx.State) -> None:
        s += "x"
        with s.fork(5) as branches:
            branches.map(lambda b: 1 / 0 if b.path == (2,) else b.gen(max_tokens=50).value)

    with pytest.raises(ZeroDivisionError):
        fails.run(oracle_engine)
    assert threading.active_count() == before
