"""Scopes of branches: order, errors, cancellation, adoption, and that nothing is held when they close."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import radixrt as rx
from radixrt.runtime import Engine, trie_size

from .conftest import MakeEngine, audit


def held(engine: Engine) -> int:
    return engine.stats().cache.num_held + engine.stats().num_running + engine.stats().num_waiting


def test_results_are_in_order_and_complete(engine: Engine) -> None:
    def word(b: rx.State, item: str) -> str:
        b += item
        return f"{item}:{b.gen(max_tokens=2 + len(item) * 3).value}"

    async def word_async(b: rx.State, item: str) -> str:
        b += item
        return f"{item}:{await b.gen(max_tokens=2 + len(item) * 3)}"

    @rx.program
    def plain(s: rx.State) -> list[str]:
        s += "words: "
        with s.fork(["long", "a", "bcd", ""]) as branches:
            return branches.map(word)

    @rx.program
    async def tasks(s: rx.State) -> list[str]:
        s += "words: "
        async with s.fork(["long", "a", "bcd", ""]) as branches:
            return await branches.map(word_async)

    results = plain.run(engine)
    assert [result.split(":")[0] for result in results] == ["long", "a", "bcd", ""]
    assert tasks.run(engine) == results


def test_branches_share_everything_and_compute_nothing_twice(make_engine: MakeEngine) -> None:
    """One row for each node of the trie of given tokens, at any page size."""

    @rx.program
    def judge(s: rx.State) -> rx.Cost:
        s += "an essay that all of them read, "
        with s.fork(["style", "facts", "length"]) as branches:

            def one(b: rx.State, what: str) -> str:
                b += f"judge its {what}: "
                return b.gen(max_tokens=4).value

            branches.map(one)
        return s.cost

    prompts = [f"an essay that all of them read, judge its {what}: ".encode() for what in ("style", "facts", "length")]
    for page_size in (1, 16, 32):
        engine = make_engine(page_size=page_size)
        cost = judge.run(engine)
        assert engine.stats().counters.computed == trie_size([list(prompt) for prompt in prompts])
        assert cost.computed_tokens == engine.stats().counters.computed
        assert engine.stats().counters.recomputed_for_logits == 0


def test_forking_behind_a_generation_computes_only_what_branches_add(engine: Engine) -> None:
    @rx.program
    def wide(s: rx.State) -> list[str]:
        s += "start "
        s.gen(max_tokens=9)
        with s.fork(4) as branches:
            return branches.map(lambda b: b.gen(max_tokens=5).value)

    values = wide.run(engine)
    assert len(set(values)) == 4
    counters = engine.stats().counters
    assert counters.computed == len("start ")
    assert counters.decoded == 8 + 4 * 5  # in each branch the last token of the parent, which was never fed


def test_rounds_of_forks_do_not_mix(engine: Engine) -> None:
    """The second round's values are its own, and so are its draws."""

    @rx.program
    def rounds(s: rx.State) -> list[list[str]]:
        s += "start "
        found = []
        for _ in range(2):
            with s.fork(3) as branches:
                found.append(branches.map(lambda b: b.gen(name="a", max_tokens=6).value))
        return found

    first, second = rounds.run(engine)
    assert len({*first, *second}) == 6


def test_the_first_error_is_raised_as_itself_and_cancels_the_others(engine: Engine) -> None:
    class Odd(Exception):
        pass

    ended: list[int] = []

    def one(b: rx.State, number: int) -> None:
        b += f"{number}"
        b.gen(max_tokens=2).value  # noqa: B018
        if number == 1:
            raise Odd
        b.gen(max_tokens=3000).value  # noqa: B018
        ended.append(number)

    async def one_async(b: rx.State, number: int) -> None:
        b += f"{number}"
        await b.gen(max_tokens=2)
        if number == 1:
            raise Odd
        await b.gen(max_tokens=3000)
        ended.append(number)

    @rx.program
    def plain(s: rx.State) -> str:
        s += "x"
        with pytest.raises(Odd) as caught, s.fork([0, 1, 2]) as branches:
            branches.map(one)
        assert any("program plain, branch 1" in note for note in caught.value.__notes__)
        assert held(engine) == 0
        return s.gen(max_tokens=2).value

    @rx.program
    async def tasks(s: rx.State) -> str:
        s += "x"
        with pytest.raises(Odd) as caught:
            async with s.fork([0, 1, 2]) as branches:
                await branches.map(one_async)
        assert any("program tasks, branch 1" in note for note in caught.value.__notes__)
        assert held(engine) == 0
        return await s.gen(max_tokens=2)

    assert plain.run(engine) == tasks.run(engine)
    assert not ended


def test_collected_errors_stand_where_results_would(engine: Engine) -> None:
    def one(b: rx.State, number: int) -> int:
        if number == 1:
            raise ValueError("no")
        b += "x"
        b.gen(max_tokens=number + 1).value  # noqa: B018
        return number

    @rx.program
    def plain(s: rx.State) -> list[Any]:
        with s.fork([0, 1, 2]) as branches:
            return branches.map(one, on_error="collect")

    first, second, third = plain.run(engine)
    assert (first, third) == (rx.Ok(0), rx.Ok(2))
    assert isinstance(second, rx.Failed)
    assert isinstance(second.error, ValueError)

    @rx.program
    async def tasks(s: rx.State) -> list[Any]:
        async def one_async(b: rx.State, number: int) -> int:
            if number == 1:
                raise ValueError("no")
            b += "x"
            await b.gen(max_tokens=number + 1)
            return number

        async with s.fork([0, 1, 2]) as branches:
            return await branches.map(one_async, on_error="collect")

    assert [result.ok for result in tasks.run(engine)] == [True, False, True]


def test_leaving_a_scope_early_cancels_what_runs(engine: Engine) -> None:
    @rx.program
    def best_of(s: rx.State) -> str:
        s += "x"
        with s.fork(3) as branches:
            slots = [b.gen(max_tokens=2 if number == 1 else 3000) for number, b in enumerate(branches)]
            slots[1].value  # noqa: B018
            assert held(engine) > 0
            s.adopt(branches[1])
        assert held(engine) == 0
        with pytest.raises(rx.StateMisuse, match="closed"):
            slots[0].value  # noqa: B018
        return s.text

    assert len(best_of.run(engine)) == 3


def test_a_timeout_frees_everything(engine: Engine) -> None:
    @rx.program
    async def slow(s: rx.State) -> str:
        s += "x"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), s.fork(3) as branches:
                await branches.map(endless)
        assert held(engine) == 0
        return await s.gen(max_tokens=2)

    async def endless(b: rx.State) -> None:
        async with b.fork(2) as branches:
            await branches.map(lambda c: run(c))

    async def run(c: rx.State) -> None:
        await c.gen(max_tokens=3000)

    assert len(slow.run(engine)) == 2


def test_cancelling_a_run_ends_it_in_a_task_and_in_threads(engine: Engine) -> None:
    @rx.program
    async def task(s: rx.State) -> None:
        s += "x"
        await s.gen(max_tokens=3000)

    @rx.program
    def thread(s: rx.State) -> None:
        s += "x"
        with s.fork(2) as branches:
            branches.map(lambda b: b.gen(max_tokens=3000).value)

    async def main(program: Any) -> None:
        run = asyncio.create_task(program.arun(engine))
        while not held(engine):
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    for program in (task, thread):
        asyncio.run(main(program))
        audit(engine)
    assert threading.active_count() <= 3  # asyncio's own


def test_the_parent_is_frozen_while_branches_live(engine: Engine) -> None:
    @rx.program
    def busy(s: rx.State) -> str:
        s += "x"
        with s.fork(2) as branches:
            for use in (lambda: s.gen(), lambda: s.fork(2), lambda: s.mark(), lambda: s.user().__enter__()):
                with pytest.raises(rx.StateMisuse, match="branches live"):
                    use()
            assert s.text == "x"
            branches[0].gen(max_tokens=1)
        return s.gen(max_tokens=1).value

    assert len(busy.run(engine)) == 1


def test_the_parent_goes_on_as_the_branch_it_adopts(engine: Engine) -> None:
    @rx.program
    def adopts(s: rx.State) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        s += "start "
        s.gen(max_tokens=3)
        with s.fork(3) as branches:

            def one(b: rx.State) -> None:
                b += " so "
                b.gen(name="found", max_tokens=4)

            branches.map(one)
            tokens = branches[2].tokens
            s.adopt(branches[2])
        return tokens, s.tokens, s["found"].value

    tokens, adopted, found = adopts.run(engine)
    assert tokens == adopted
    assert len(found) == 4


def test_an_adoption_is_void_where_the_scope_fails(engine: Engine) -> None:
    @rx.program
    def fails(s: rx.State) -> tuple[str, str]:
        s += "x"
        with pytest.raises(ValueError, match="no"), s.fork(2) as branches:  # noqa: PT012
            branches[0].gen(max_tokens=3)
            s.adopt(branches[0])
            raise ValueError("no")
        return s.text, s.gen(max_tokens=1).value

    assert fails.run(engine)[0] == "x"


def test_only_a_branch_of_the_open_scope_is_adopted(engine: Engine) -> None:
    @rx.program
    def wrong(s: rx.State) -> None:
        with s.fork(1) as old:
            pass
        with s.fork(1) as branches, branches[0].fork(1) as inner:
            for other in (old[0], inner[0], s):
                with pytest.raises(rx.StateMisuse, match="no branch of the scope"):
                    s.adopt(other)
        with pytest.raises(rx.StateMisuse, match="no branches live"):
            s.adopt(branches[0])

    wrong.run(engine)


def test_scratch_leaves_nothing_behind(engine: Engine) -> None:
    @rx.program
    def asks(s: rx.State) -> tuple[str, str, str]:
        s += "x"
        s.gen(max_tokens=3)
        before = s.text
        with s.scratch() as probe:
            probe += " good? "
            answer = probe.gen(max_tokens=2).value
        return before, s.text, answer

    before, after, answer = asks.run(engine)
    assert before == after
    assert len(answer) == 2


def test_draws_do_not_depend_on_who_comes_first(engine: Engine) -> None:
    @rx.program
    async def races(s: rx.State, slow: int) -> list[str]:
        s += "x"
        await s.gen(max_tokens=2)

        async def one(b: rx.State, number: int) -> str:
            if number == slow:
                with b.scratch() as probe:
                    await probe.gen(max_tokens=30)
                await asyncio.sleep(0.01)
            return await b.gen(max_tokens=6)

        async with s.fork([0, 1, 2]) as branches:
            return await branches.map(one)

    first, second = races.run(engine, 5), races.run(engine, 0)
    assert first[1:] == second[1:]  # branch 0 had a branch of its own meanwhile
    assert races.run(engine, 0) == second


def test_threads_ask_together(engine: Engine) -> None:
    """Branches in threads share steps: eight of them take the steps of one."""

    @rx.program
    def wide(s: rx.State, n: int) -> list[str]:
        s += "x"
        with s.fork(n) as branches:
            return branches.map(lambda b: b.gen(max_tokens=20).value)

    wide.run(engine, 1)
    alone = engine.stats().counters.steps
    wide.run(engine, 8)
    assert engine.stats().counters.steps <= 2 * alone + 1


def test_a_busy_thread_does_not_hold_up_the_others(engine: Engine) -> None:
    done: list[int] = []

    def one(b: rx.State, number: int) -> None:
        b += "x"
        if number == 0:
            while len(done) < 2:
                time.sleep(0.001)
        b.gen(max_tokens=3).value  # noqa: B018
        done.append(number)

    @rx.program
    def waits(s: rx.State) -> None:
        with s.fork([0, 1, 2]) as branches:
            branches.map(one)

    waits.run(engine)
    assert done[-1] == 0


def test_programs_of_several_loops_and_threads_share_an_engine(engine: Engine) -> None:
    @rx.program
    async def task(s: rx.State, name: str) -> str:
        s += name
        return await s.gen(max_tokens=30)

    @rx.program
    def thread(s: rx.State, name: str) -> str:
        s += name
        return s.gen(max_tokens=30).value

    async def many() -> list[str]:
        return list(await asyncio.gather(*(task.arun(engine, f"{n}") for n in range(3)), thread.arun(engine, "3")))

    results: dict[int, list[str]] = {}
    workers = [threading.Thread(target=lambda n=n: results.update({n: asyncio.run(many())})) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results[0] == results[1] == results[2] == [thread.run(engine, f"{n}") for n in range(4)]


def test_a_branch_is_appended_to_in_its_place(engine: Engine) -> None:
    @rx.program
    def places(s: rx.State) -> list[str]:
        s += "x"
        with s.fork(2) as branches:
            branches[0] += "a"
            branches[-1] += "b"
            others: list[Any] = [branches[1], s, "text"]
            for other in others:
                with pytest.raises(rx.StateMisuse, match="branches stay, append to them"):
                    branches[0] = other
            with branches[0].fork(["c"]) as inner:
                inner[0] += inner.items[0]
                assert inner[0].text == "xac"
            return [branch.text for branch in branches]

    assert places.run(engine) == ["xa", "xb"]


async def of_async(*_: Any) -> None:
    raise AssertionError("it is never run")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("items", [2, ["a", "b"]], ids=["count", "items"])
def test_a_plain_program_maps_no_async_function(engine: Engine, items: Any) -> None:
    @rx.program
    def plain(s: rx.State) -> None:
        with s.fork(items) as branches:
            branches.map(of_async)

    with pytest.raises(rx.StateMisuse, match="map: an async function was called in a plain program"):
        plain.run(engine)


@pytest.mark.parametrize("items", [2, ["a", "b"]], ids=["count", "items"])
def test_an_async_program_maps_no_plain_function(engine: Engine, items: Any) -> None:
    @rx.program
    async def tasks(s: rx.State) -> list[Any]:
        async with s.fork(items) as branches:
            with pytest.raises(rx.StateMisuse, match="map: a plain function was called in an async program"):
                await branches.map(lambda *_: 1)
        s += "x"
        async with s.fork(items) as branches:
            found: list[Any] = await branches.map(
                lambda b, *_: b.gen(max_tokens=2)
            )  # a slot is awaited as a coroutine is
            return found

    assert [len(text) for text in tasks.run(engine)] == [2, 2]


@pytest.mark.filterwarnings("error")
def test_a_plain_program_is_no_async_one_s_face(engine: Engine) -> None:
    @rx.program
    def plain(s: rx.State) -> Any:
        return of_async(s)

    with pytest.raises(rx.StateMisuse, match="plain: an async function was called in a plain program"):
        plain.run(engine)


@pytest.mark.parametrize("n", [-1, True, 5000])
def test_a_wrong_number_of_branches_is_refused(engine: Engine, n: int) -> None:
    @rx.program
    def wrong(s: rx.State) -> None:
        s.fork(n)

    with pytest.raises(rx.InvalidRequest, match="fork"):
        wrong.run(engine)


def test_no_items_give_no_results(engine: Engine) -> None:
    def one(b: rx.State, item: str) -> str:
        return item

    async def one_async(b: rx.State, item: str) -> str:
        return item

    @rx.program
    def plain(s: rx.State, items: list[str]) -> list[str]:
        s += "x"
        s.gen(max_tokens=1)
        with s.fork(items) as branches:
            return branches.map(one)

    @rx.program
    async def tasks(s: rx.State, items: list[str]) -> list[str]:
        async with s.fork(items) as branches:
            return await branches.map(one_async)

    assert plain.run(engine, []) == tasks.run(engine, []) == []
    assert plain.run(engine, ["a"]) == tasks.run(engine, ["a"]) == ["a"]


def test_map_is_called_while_the_scope_is_open(engine: Engine) -> None:
    @rx.program
    def late(s: rx.State) -> None:
        with s.fork(2) as branches:
            pass
        branches.map(lambda b: b.text)

    with pytest.raises(rx.StateMisuse, match="not open"):
        late.run(engine)


def test_spliced_branches_are_text_of_the_parent(engine: Engine) -> None:
    @rx.program
    def skeleton(s: rx.State) -> tuple[str, list[str], str]:
        s += "points: "
        s.gen(max_tokens=3)
        before = s.text
        with s.fork(["one", "two"]) as branches:

            def one(b: rx.State, point: str) -> None:
                b += f"({point}) "
                b.gen(max_tokens=4)
                b += "."

            branches.map(one)
        for branch in branches:
            s.splice(branch)
        s += " so "
        s.gen(max_tokens=2)
        return before, [branch.text for branch in branches], s.text

    before, texts, after = skeleton.run(engine)
    assert all(text.startswith(before) for text in texts)
    spliced = "".join(text.removeprefix(before) for text in texts)
    assert after.startswith(f"{before}{spliced} so ")
    assert len(after) == len(before) + len(spliced) + len(" so ") + 2


def test_a_spliced_text_is_computed_anew_and_an_adopted_one_is_not(make_engine: MakeEngine) -> None:
    """The cost that the docstring names, in tokens."""

    @rx.program
    def joins(s: rx.State, how: str) -> tuple[int, int]:
        s += "start "
        s.gen(max_tokens=3)
        with s.fork(2) as branches:
            branches.map(lambda b: b.gen(max_tokens=9).value)
            if how == "adopt":
                s.adopt(branches[1])
        if how == "splice":
            s += "."
            s.splice(branches[1])
        slot = s.gen(max_tokens=1)
        return slot.usage.computed_tokens, slot.usage.prompt_tokens

    computed, prompt = joins.run(make_engine(), "adopt")
    assert (computed, prompt) == (1, len("start ") + 3 + 9)  # the last token of the branch had not been fed
    computed, prompt = joins.run(make_engine(), "splice")
    assert prompt == len("start ") + 3 + 1 + 9
    assert computed >= 1 + 9


def test_a_splice_of_something_else_is_refused(engine: Engine) -> None:
    @rx.program
    def wrong(s: rx.State) -> None:
        s += "x"
        with s.fork(1) as branches, branches[0].fork(1) as inner:
            with pytest.raises(rx.StateMisuse, match="branches live"):
                s.splice(branches[0])
            inner[0].gen(max_tokens=2000)
        with pytest.raises(rx.StateMisuse, match="no branch of"):
            s.splice(inner[0])
        with pytest.raises(rx.StateMisuse, match="no branch of"):
            s.splice(s)
        s.splice(branches[0])
        assert s.text == "x"

    wrong.run(engine)

    @rx.program
    def unfinished(s: rx.State) -> str:
        s += "x"
        with s.fork(1) as branches:
            branches[0].gen(max_tokens=2000)
        with pytest.raises(rx.StateMisuse, match="closed before"):
            s.splice(branches[0])
        return s.text

    assert unfinished.run(engine) == "x"

    @rx.program
    def chats(s: rx.State) -> list[dict[str, str]]:
        with s.user():
            s += "a"
            with s.fork(2) as branches:
                branches[0].__iadd__("b")
                branches[1].__iadd__("c")
            s.splice(branches[1])
        with s.fork(1) as others, others[0].assistant():
            others[0].gen(max_tokens=1)
        with s.assistant(), pytest.raises(rx.StateMisuse, match="messages of its own"):
            s.splice(others[0])
        return s.messages

    assert chats.run(engine)[0] == {"role": "user", "content": "ac"}


def test_a_branch_that_is_not_there_is_named(engine: Engine) -> None:
    @rx.program
    def asks(s: rx.State) -> None:
        with s.fork(2) as branches, pytest.raises(IndexError, match=r"branches: \[2\] of 2, in program asks"):
            branches[2]

    asks.run(engine)
