"""States: what is appended and generated, in which tokens, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import radixrt as rx
from radixrt.frontend.testing import ScriptedBackend
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit, default_tokenizer


def test_text_and_generations_follow_one_another(engine: Engine) -> None:
    @rx.program
    def two(s: rx.State) -> tuple[str, str, str]:
        s += "one "
        first = s.gen(name="first", max_tokens=4)
        s += f" then {first} and "
        return first.value, s.gen(max_tokens=3).value, s.text

    first, second, text = two.run(engine)
    assert text == f"one {first} then {first} and {second}"
    alone = engine.generate("one ", rx.SamplingParams(max_tokens=4, seed=0))[0]
    assert alone.text == first


def test_nothing_that_is_there_is_computed_again(make_engine: MakeEngine) -> None:
    @rx.program
    def chain(s: rx.State) -> rx.Cost:
        for _ in range(5):
            s += "some more text, "
            s.gen(max_tokens=6)
        return s.cost

    for page_size in (1, 16, 32):
        engine = make_engine(page_size=page_size)
        cost = chain.run(engine)
        counters = engine.stats().counters
        assert counters.computed == 5 * len("some more text, ")  # each given token once
        assert counters.recomputed_for_logits == counters.recomputed_after_preemption == 0
        assert counters.decoded == 5 * 5 + 4  # each generated token once, but for the last of all
        assert cost.generations == 5
        assert cost.completion_tokens == 30


def test_generated_ids_are_never_encoded_again(make_engine: MakeEngine) -> None:
    """Ids of bytes that are no text: decoding and encoding them would make others."""
    engine = make_engine(HashModel(vocab=300))

    @rx.program
    def odd(s: rx.State) -> tuple[tuple[int, ...], tuple[int, ...]]:
        s += "x"
        ids = s.gen(max_tokens=20).token_ids
        s += "y"
        s.gen(max_tokens=1)
        return ids, s.tokens

    ids, tokens = odd.run(engine)
    assert max(ids) > 127
    assert tokens[:22] == (ord("x"), *ids, ord("y"))


@given(st.lists(st.text("ab .", max_size=3), max_size=6), st.integers(0, 5))
def test_how_a_text_is_pieced_together_changes_nothing(pieces: list[str], fork_at: int) -> None:
    engine = Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=64)

    @rx.program
    def whole(s: rx.State) -> tuple[int, ...]:
        s += "x" + "".join(pieces)
        return s.tokens

    @rx.program
    def parts(s: rx.State) -> tuple[int, ...]:
        s += "x"
        for number, piece in enumerate(pieces):
            if number == fork_at:
                with s.fork(2) as branches:
                    s.adopt(branches[1])
            s += piece
        return s.tokens

    assert whole.run(engine) == parts.run(engine)


@settings(max_examples=settings().max_examples // 3)
@given(st.sampled_from(["a", "e", "q", "\x01", "ab", "1", "xy"]), st.integers(0, 50))
def test_a_stop_string_is_cut_off_and_what_follows_takes_its_place(stop: str, seed: int) -> None:
    engine = Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=64)

    @rx.program
    def stopped(s: rx.State) -> tuple[str, str, str, str]:
        s += "list: "
        slot = s.gen(max_tokens=60, stop=stop)
        before = s.text
        s += "!"
        s.gen(max_tokens=1)
        return slot.value, slot.finish, before, s.text

    value, finish, before, after = stopped.options(seed=seed).run(engine)
    assert before == f"list: {value}"
    assert after.startswith(f"list: {value}!")
    assert stop not in value
    [alone] = engine.generate("list: ", rx.SamplingParams(max_tokens=60, stop=stop, seed=seed))
    assert (value, finish) == (alone.text, alone.choices[0].finish_reason)


def test_a_stop_string_behind_a_character_that_was_cut_in_two_is_cut_off(make_engine: MakeEngine) -> None:
    first, second = "é".encode()

    @rx.program
    def stopped(s: rx.State, begin: str) -> tuple[str, tuple[int, ...]]:
        s += begin
        s.gen(max_tokens=1, logit_bias={first: 90.0})
        s.gen(max_tokens=9, stop="!", logit_bias={second: 60.0, ord("!"): 60.0})
        return s.text, s.tokens

    engine = make_engine(HashModel(vocab=256))
    results = {begin: stopped.run(engine, begin) for begin in "abcdefgh"}
    assert any(text.startswith(f"{begin}é") for begin, (text, _) in results.items())
    for begin, (text, tokens) in results.items():
        assert tokens[:2] == (ord(begin), first)
        assert ord("!") not in tokens
        assert "!" not in text


def test_an_ending_token_is_no_part_of_the_state(make_engine: MakeEngine) -> None:
    engine = make_engine(HashModel(vocab=40, eos=frozenset(range(10))))

    @rx.program
    def ended(s: rx.State) -> tuple[tuple[int, ...], tuple[int, ...]]:
        s += "\x0b"
        slot = s.gen(max_tokens=200)
        return slot.token_ids, s.tokens

    ids, tokens = ended.run(engine)
    assert ids[-1] < 10
    assert tokens == (0x0B, *ids[:-1])


def test_an_empty_state_forks_and_refuses_to_generate(engine: Engine) -> None:
    @rx.program
    def empty(s: rx.State) -> list[str]:
        with s.fork(2) as branches:

            def one(b: rx.State) -> str:
                b += "x"
                return b.gen(max_tokens=8).value

            return branches.map(one)

    first, second = empty.run(engine)
    assert first != second  # two branches, two draws

    @rx.program
    def nothing(s: rx.State) -> str:
        return s.gen().value

    with pytest.raises(rx.InvalidRequest, match="empty") as caught:
        nothing.run(engine)
    assert any("program nothing" in note for note in caught.value.__notes__)


def test_a_name_is_given_once(engine: Engine) -> None:
    @rx.program
    def twice(s: rx.State) -> str:
        s += "x"
        s.gen(name="a", max_tokens=1)
        assert s["a"].value is not None
        return s.gen(name="a", max_tokens=1).value

    with pytest.raises(rx.StateMisuse, match="'a'"):
        twice.run(engine)


def test_rewinding_goes_back_and_draws_anew(engine: Engine) -> None:
    @rx.program
    def again(s: rx.State) -> tuple[list[str], str, str]:
        s += "begin "
        s.gen(max_tokens=3)
        mark, begun = s.mark(), s.text
        tries = []
        for _ in range(3):
            s += "then "
            tries.append(s.gen(name="tried", max_tokens=6).value)
            s.rewind(mark)
        return tries, begun, s.text

    tries, begun, ended = again.run(engine)
    assert begun == ended
    assert len(set(tries)) == 3
    counters = engine.stats().counters
    assert counters.computed == len("begin ") + len("then ")
    assert counters.recomputed_for_logits == 2  # "then " is there whole; the last of its rows gives the logits


def test_rewinding_to_before_all_generations_draws_anew(engine: Engine) -> None:
    @rx.program
    def again(s: rx.State) -> list[str]:
        s += "begin "
        mark, tries = s.mark(), []
        for _ in range(3):
            tries.append(s.gen(max_tokens=6).value)
            s.rewind(mark)
        return tries

    assert len(set(again.run(engine))) == 3


def test_equal_seeds_repeat_and_others_do_not(engine: Engine) -> None:
    @rx.program
    def draw(s: rx.State) -> str:
        s += "x"
        s.gen(max_tokens=5)
        return s.gen(max_tokens=5).value

    assert draw.run(engine) == draw.run(engine)
    assert draw.run(engine) != draw.options(seed=1).run(engine)


def test_a_failure_surfaces_at_its_slot_and_leaves_the_state_as_it_was(make_engine: MakeEngine) -> None:
    def fail(batch: Any) -> None:
        if fails:
            raise RuntimeError("the device is gone")

    fails: list[bool] = []
    engine = make_engine(HashModel(vocab=128, before_forward=fail))

    @rx.program
    def goes_on(s: rx.State) -> tuple[str, str, str]:
        s += "x"
        s.gen(name="first", max_tokens=2)
        before = s.text
        fails.append(True)
        slot = s.gen(name="second", max_tokens=2)
        with pytest.raises(rx.GenerationFailed, match="the device is gone") as caught:
            slot.value  # noqa: B018
        assert any("program goes_on, slot second, request 1" in note for note in caught.value.__notes__)
        fails.clear()
        return before, s.text, s.gen(name="second", max_tokens=2).value

    before, after, _ = goes_on.run(engine)
    assert before == after


def test_a_failure_that_nobody_looked_at_is_raised_by_what_comes_next(make_engine: MakeEngine) -> None:
    def fail(batch: Any) -> None:
        raise RuntimeError("the device is gone")

    engine = make_engine(HashModel(vocab=128, before_forward=fail))

    @rx.program
    def unseen(s: rx.State) -> None:
        s += "x"
        s.gen(max_tokens=2)
        s += "y"

    @rx.program
    def last(s: rx.State) -> None:
        s += "x"
        s.gen(max_tokens=2)

    for program in (unseen, last):
        with pytest.raises(rx.GenerationFailed):
            program.run(engine)


def test_an_async_program_awaits_its_slots(engine: Engine) -> None:
    @rx.program
    async def hasty(s: rx.State) -> str:
        s += "x"
        return s.gen(max_tokens=2).value

    with pytest.raises(rx.StateMisuse, match="await"):
        hasty.run(engine)

    @rx.program
    async def patient(s: rx.State) -> str:
        s += "x"
        return await s.gen(max_tokens=2)

    @rx.program
    def plain(s: rx.State) -> str:
        s += "x"
        return s.gen(max_tokens=2).value

    assert patient.run(engine) == plain.run(engine) == asyncio.run(plain.arun(engine))


def test_a_cancelled_generation_leaves_the_state_as_it_was(engine: Engine) -> None:
    @rx.program
    async def timed(s: rx.State) -> tuple[str, str]:
        s += "x"
        slot = s.gen(max_tokens=2000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await slot
        text = s.text
        return text, await s.gen(max_tokens=2)

    text, after = timed.run(engine)
    assert text == "x"
    assert len(after) == 2


def test_a_state_ends_with_its_program(engine: Engine) -> None:
    kept: list[rx.State] = []

    @rx.program
    def leaks(s: rx.State) -> None:
        kept.append(s)

    leaks.run(engine)
    with pytest.raises(rx.StateMisuse, match="after its end"):
        kept[0] += "x"


def test_an_engine_that_keeps_few_requests_gives_the_same_answers(make_engine: MakeEngine) -> None:
    @rx.program
    def tree(s: rx.State, depth: int = 2) -> list[Any]:
        s += f"level {depth} "
        values: list[Any] = [s.gen(max_tokens=3).value]
        for _ in range(depth):  # the second scope's branches are the third fork of the state, and so on
            with s.fork(2) as branches:
                values += branches.map(lambda b: tree(b, depth - 1))
        if depth:
            with s.fork(3) as branches:
                s.adopt(branches[1])
        return [*values, s.gen(max_tokens=3).value]

    answers = tree.run(make_engine())
    assert tree.run(make_engine(keep_finished=0)) == answers
    assert tree.run(make_engine(keep_finished=3)) == answers


def test_a_stop_string_that_begins_inside_a_token_leaves_text() -> None:
    tokenizer = default_tokenizer()
    backend = ScriptedBackend({"count:": " one two three"}, tokenizer)

    @rx.program
    def stopped(s: rx.State) -> tuple[str, str, tuple[int, ...]]:
        s += "count:"
        value = s.gen(stop="wo thr").value
        s += "ins"
        return value, s.text, s.tokens

    value, text, tokens = stopped.run(backend)
    assert (value, text) == (" one t", "count: one tins")
    assert list(tokens) == [*tokenizer.encode("count:"), *tokenizer.encode(" one"), *tokenizer.encode(" tins")]


def test_generating_beside_the_engine_s_own_callers(engine: Engine) -> None:
    @rx.program
    def simple(s: rx.State) -> str:
        s += "x"
        return s.gen(max_tokens=8).value

    stream = engine.stream("y", rx.SamplingParams(max_tokens=4))
    value = simple.run(engine)
    assert len(list(stream)) == 6
    assert simple.run(engine) == value
    audit(engine)


@pytest.mark.parametrize("asked", ["n", "seed", "grammar", "grammar_end", "prefix", "nonsense"])
def test_a_generation_is_asked_nothing_that_it_cannot_be(engine: Engine, asked: str) -> None:
    @rx.program
    def wrong(s: rx.State) -> None:
        s += "x"
        with pytest.raises(rx.InvalidRequest, match=f"gen: {asked} given; allowed: boundary, "):
            s.gen(**{asked: 2})  # type: ignore[call-overload]
        s.gen(max_tokens=1)

    wrong.run(engine)


@pytest.mark.parametrize("thing", [None, b"x", 3, ["a"]])
def test_only_text_is_appended(engine: Engine, thing: Any) -> None:
    @rx.program
    def wrong(s: rx.State) -> str:
        s += "x"
        with pytest.raises(rx.InvalidRequest, match="appended; allowed: a text, a slot or a choice"):
            s += thing
        with pytest.raises(rx.InvalidRequest, match="<state of program wrong>"):
            s += s  # type: ignore[arg-type]
        return s.text

    assert wrong.run(engine) == "x"


def test_a_slot_as_a_condition_is_its_value(make_engine: MakeEngine) -> None:
    @rx.program
    def asks(s: rx.State, number: int) -> tuple[bool, bool]:
        s += f"{number}: "
        slot = s.gen(bool)
        choice = s.choose([0, 1], temperature=1.0)
        assert bool(choice) == bool(choice.value)
        return (True if slot else False), slot.value  # noqa: SIM210

    found = {asks.run(make_engine(), number) for number in range(20)}
    assert found == {(True, True), (False, False)}


@pytest.mark.parametrize("other", ["x", 1, None, ("a",)])
def test_a_slot_is_not_its_value(engine: Engine, other: Any) -> None:
    """Where it is compared; as itself it is in lists, sets and dicts, whether it has a value yet or not."""

    @rx.program
    def compares(s: rx.State) -> None:
        s += "x"
        slot, choice = s.gen(max_tokens=2), s.choose(["a", "b"])
        for one in (slot, choice):
            compared: list[Any] = [
                lambda one=one: one == other,
                lambda one=one: other == one,
                lambda one=one: one in [other],
            ]
            for compare in (*compared, lambda one=one: one != other):
                with pytest.raises(rx.StateMisuse, match=r"compared with .*; compare its \.value"):
                    compare()
        assert [slot, choice].index(choice) == 1
        assert len({slot, choice, slot}) == 2
        assert {slot: "slot", choice: "choice"}[choice] == "choice"
        assert slot == slot
        assert slot != choice

    compares.run(engine)


def test_slots_are_gathered(engine: Engine) -> None:
    @rx.program
    async def both(s: rx.State) -> list[Any]:
        s += "x"
        async with s.fork(2) as branches:
            slots = [branch.gen(max_tokens=2) for branch in branches]
            return list(await asyncio.gather(*slots, slots[0]))

    first, second, third = both.run(engine)
    assert first == third != second


def test_what_is_drawn_after_a_rewind_is_drawn_by_no_branch(engine: Engine) -> None:
    @rx.program
    def draws(s: rx.State) -> set[str]:
        s += "abc "
        mark, drawn = s.mark(), set()
        for _ in range(3):
            with s.scratch() as probe:
                drawn.add(probe.gen(max_tokens=8).value)
            drawn.add(s.gen(max_tokens=8).value)
            s.rewind(mark)
        return drawn

    assert len(draws.run(engine)) == 6


def test_an_output_that_a_slot_cannot_take_is_its_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits hears of it, and the others go on."""

    def fails(slot: Any, outcome: Any) -> Any:
        if slot.name == "bad" and not isinstance(outcome, BaseException):
            raise ValueError("cannot be taken")
        return take(slot, outcome)

    take = rx.Slot.take
    monkeypatch.setattr(rx.Slot, "take", fails)

    @rx.program
    def both(s: rx.State) -> str:
        s += "x"
        with s.fork(2) as branches:
            good, bad = branches[0].gen(max_tokens=3), branches[1].gen(name="bad", max_tokens=3)
            with pytest.raises(ValueError, match="cannot be taken"):
                bad.value  # noqa: B018
            return good.value

    assert len(both.run(engine)) == 3
