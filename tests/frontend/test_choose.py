"""Choices among options: what each score says, what is computed, and that nothing else changes them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import radixrt as rx
from radixrt.frontend.backend import EngineBackend
from radixrt.frontend.driver import Driver
from radixrt.frontend.options import Options, ScoreName, options_of
from radixrt.frontend.testing import FaultyBackend, ScriptedBackend
from radixrt.runtime import Engine, trie_size
from radixrt.runtime.testing import ByteTokenizer, HashModel
from radixrt.runtime.transformer import TransformerModel

from ..runtime import tiny
from .conftest import MakeEngine, default_tokenizer

ALWAYS = {"sum", "token_mean", "byte_mean", "greedy"}


def weighed(*options: str, score: ScoreName = "sum", split: Any = list, **given: Any) -> Options:
    """Options behind one token, each a token a character, or what `split` makes of it."""
    known = {"pending": "", "end": None, "start_ids": (), "ending_ids": frozenset({1})} | given

    def encode(text: str) -> list[int]:
        return [100 + hash_of(piece) for piece in split(text)]

    return options_of(options, context=(0,), encode=encode, score=score, **known)


def hash_of(piece: str) -> int:
    return int.from_bytes(piece.encode(), "little") % 100_000


def verdict(options: Options, *logprobs: list[float], temperature: float = 0.0, seed: int = 0) -> Any:
    return options.verdict(logprobs, temperature=temperature, seed=seed)


# -- what the scores say ----------------------------------------------------------------------------------------------


def test_a_long_option_with_a_predictable_tail() -> None:
    """Public reports of a mean per token that prefers "Antidisestablishmentarianism" to "Paris"."""

    def split(text: str) -> list[str]:
        return [text[at : at + 5] for at in range(0, len(text), 5)]

    texts = ("Paris", "Antidisestablishmentarianism")
    found = [[-1.0], [-4.0, -0.01, -0.01, -0.01, -0.01, -0.01]]
    chosen = {}
    for score in ("sum", "token_mean", "byte_mean", "greedy"):
        result = verdict(weighed(*texts, score=score, split=split), *found)
        chosen[score] = texts[result.index]
        assert set(result.scores) == ALWAYS
        assert result.scores["sum"] == pytest.approx((-1.0, -4.05))
        assert result.scores["token_mean"] == pytest.approx((-1.0, -0.675))
        assert result.scores["byte_mean"] == pytest.approx((-0.2, -4.05 / 28))
        assert result.scores["greedy"] == pytest.approx((0.0, -3.0))
    assert chosen == {"sum": "Paris", "greedy": "Paris", "token_mean": texts[1], "byte_mean": texts[1]}
    ended = verdict(weighed(*texts, score="prefix_free", split=split), [-1.0, -0.5], [*found[1], -0.1])
    assert ended.scores["prefix_free"] == pytest.approx((-1.5, -4.15))
    assert ended.scores["sum"] == pytest.approx((-1.0, -4.05))
    bare = verdict(weighed(*texts, score="pmi", split=split), *found, [-2.0], [-9.0, -0.01, -0.01, -0.01, -0.01, -0.01])
    assert bare.scores["pmi"] == pytest.approx((1.0, 5.0))
    assert bare.index == 1


def test_a_certain_token_counts_in_a_mean() -> None:
    """A mean that leaves out log-probabilities of exactly 0 gives -1 here."""
    result = verdict(weighed("abc", "ab", score="token_mean"), [-1.0, 0.0, 0.0], [-1.0, -0.1])
    assert result.scores["token_mean"] == (-1.0 / 3, -0.55)
    assert result.index == 0


def test_bytes_are_not_characters() -> None:
    result = verdict(weighed("né", "ni", score="byte_mean"), [-1.0, -2.0], [-1.0, -2.0])
    assert result.scores["byte_mean"] == (-1.0, -1.5)


def test_a_tie_goes_to_the_lowest_index() -> None:
    for score in ("sum", "token_mean", "byte_mean", "greedy"):
        assert verdict(weighed("b", "a", "c", score=score), [-1.0], [-1.0], [-0.5 - 0.5]).index == 0


def test_an_option_that_begins_another() -> None:
    """By their sum it always wins; with what ends it, both can; a walk takes it for all that continues no other."""
    options = weighed("yes", "yes sir")
    likely, unlikely = [-0.1] * 4, [-3.0, -0.1, -0.1, -0.1]
    assert verdict(options, [-1.0] * 3, [-1.0] * 3 + likely).index == 0
    walks = [
        verdict(weighed("yes", "yes sir", score="greedy"), [-1.0] * 3, [-1.0] * 3 + tail) for tail in (likely, unlikely)
    ]
    assert [walk.index for walk in walks] == [1, 0]
    assert walks[0].scores["greedy"][0] == pytest.approx(math.log(1 - math.exp(-0.1)) + 0.1)
    assert walks[1].scores["greedy"][1] == pytest.approx(-3.0 - math.log(1 - math.exp(-3.0)))
    free = weighed("yes", "yes sir", score="prefix_free")
    assert verdict(free, [-1.0] * 3 + [-5.0], [-1.0] * 3 + [*likely, -0.1]).index == 1
    assert verdict(free, [-1.0] * 3 + [-0.1], [-1.0] * 3 + [*likely, -0.1]).index == 0


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6, unique=True),
    st.randoms(use_true_random=False),
)
def test_the_walk_is_the_one_by_hand(texts: list[str], random: Any) -> None:
    """Over a random model of "a", "b" and "anything else": at each node the likeliest child, as its definition says."""
    model: dict[str, list[float]] = {}

    def next_of(prefix: str) -> list[float]:
        return model.setdefault(prefix, [random.uniform(0.01, 0.49), random.uniform(0.01, 0.49)])

    def logprob(prefix: str, char: str) -> float:
        return math.log(next_of(prefix)["ab".index(char)])

    found = [[logprob(text[:at], char) for at, char in enumerate(text)] for text in texts]
    walked = ""
    while True:
        ways = [text[len(walked)] for text in texts if text.startswith(walked) and text != walked]  # the lowest first
        probs = {char: next_of(walked)["ab".index(char)] for char in ways}
        if not ways or (walked in texts and 1 - sum(probs.values()) >= max(probs.values())):
            break
        walked += max(probs, key=lambda char: probs[char])
    result = verdict(weighed(*texts, score="greedy"), *found)
    assert texts[result.index] == walked
    assert result.scores["greedy"][result.index] == 0
    assert all(value < 0 for at, value in enumerate(result.scores["greedy"]) if at != result.index)


def test_probabilities_and_draws() -> None:
    options = weighed("a", "b", "c")
    found = [[math.log(0.5)], [math.log(0.25)], [math.log(0.125)]]
    assert verdict(options, *found).probs == pytest.approx((4 / 7, 2 / 7, 1 / 7))
    assert verdict(options, *found, temperature=0.5).probs == pytest.approx((16 / 21, 4 / 21, 1 / 21))
    for cold in (1e-300, 5e-324):
        assert verdict(options, *found, temperature=cold).probs == (1.0, 0.0, 0.0)
    drawn = Counter(verdict(options, *found, temperature=1.0, seed=seed).index for seed in range(4_000))
    for index, prob in enumerate((4 / 7, 2 / 7, 1 / 7)):
        assert abs(drawn[index] / 4_000 - prob) < 4 * math.sqrt(prob / 4_000)
    assert verdict(options, *found, temperature=1.0, seed=7) == verdict(options, *found, temperature=1.0, seed=7)


# -- in programs ------------------------------------------------------------------------------------------------------


@rx.program
def pick(s: rx.State, options: list[Any], score: ScoreName = "sum", context: str = "Is it? ") -> tuple[Any, Any, Any]:
    s += context
    choice = s.choose(options, score=score)
    return choice.value, choice.scores, s.text


def test_values_keep_their_types(engine: Engine) -> None:
    class Mark(IntEnum):
        BAD = 1
        GOOD = 5

    class Colour(Enum):
        RED = "red"
        BLUE = "blue"

    @rx.program
    def typed(s: rx.State) -> None:
        s += "x"
        number: int = s.choose([1, 2, 3]).value
        assert number in (1, 2, 3)
        word: str = s.choose(["yes", "no"]).value
        assert word in ("yes", "no")
        mark: Mark = s.choose(Mark).value
        assert mark in Mark
        colour = s.choose(Colour, name="colour")
        assert isinstance(colour.value, Colour)
        assert s.text == f"x{number}{word}{mark.value}{colour.value.value}"
        assert s["colour"] is colour
        assert (str(colour), colour.text) == (colour.value.value, colour.value.value)
        truth = s.choose([True, False])
        assert truth.text == str(truth.value)
        assert truth.token_ids == tuple(truth.text.encode())

    typed.run(engine)


def test_expected_is_the_mean_by_probability(engine: Engine) -> None:
    @rx.program
    def judge(s: rx.State) -> None:
        s += "From 1 to 5: "
        mark = s.choose([1, 2, 3, 4, 5])
        assert math.isclose(sum(mark.probs), 1.0)
        assert mark.expected() == sum(prob * value for prob, value in zip(mark.probs, [1, 2, 3, 4, 5], strict=True))
        assert mark.index == int(np.argmax(mark.probs))
        with pytest.raises(rx.StateMisuse, match="an option is no number"):
            s.choose(["good", "bad"]).expected()

    judge.run(engine)


def test_the_sum_is_of_the_option_s_own_tokens(engine: Engine) -> None:
    """A public report of scores into which a neighbour's token had leaked."""
    options, context = ["yes", "no", "not now"], "Is it? "
    _, scores, _ = pick.run(engine, options, context=context)
    for option, total in zip(options, scores["sum"], strict=True):
        [whole] = engine.score(context + option)
        assert total == math.fsum(whole.logprobs[-len(option) :])
        assert whole.token_ids[-len(option) :] == tuple(option.encode())


def test_the_whole_option_is_scored_and_kept(make_engine: MakeEngine) -> None:
    """Where the tokenizer draws the end of the context into an option, too: on its own merges."""
    tokenizer = default_tokenizer()
    engine = make_engine(HashModel(vocab=49_152), tokenizer=tokenizer)
    for context, options in (
        ("The answer is", [" yes", " no", " not"]),
        ("A yes", ["terday", "ter", "!"]),
        ("It is 1", ["0", "00", "1 or 2"]),
        ("x", ["y", "yz"]),
    ):
        base = tokenizer.encode(context)
        texts = [tokenizer.encode(context + option) for option in options]
        start = min(min(shared(base, ids), len(ids) - 1) for ids in texts)
        if not start:
            with pytest.raises(rx.InvalidRequest, match="no token comes before them"):
                pick.run(engine, options, context=context)
            continue
        value, scores, text = pick.run(engine, options, context=context)
        assert text == context + value
        expected = [math.fsum(engine.score([ids], start=start)[0].logprobs) for ids in texts]
        assert scores["sum"] == tuple(expected)
        assert value == options[int(np.argmax(expected))]


def shared(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_computed_is_the_trie_of_context_and_options(make_engine: MakeEngine) -> None:
    options = ["yes", "yes sir", "no", "not now", "never"]
    context = "A rather long question, is it not? "
    for page_size in (1, 16, 32):
        for given_settings in ({}, {"token_budget": 7}, {"max_running": 1}, {"prefill_chunk": 5}):
            engine = make_engine(page_size=page_size, **given_settings)
            pick.run(engine, options, context=context)
            counters = engine.stats().counters
            assert counters.computed == trie_size([list((context + option).encode()) for option in options])
            assert counters.recomputed_for_scores == counters.recomputed_for_logits == counters.decoded == 0
            steps = counters.steps
            pick.run(engine, options, context=context)
            assert engine.stats().counters.steps == steps, "all of it was known"


def test_what_was_generated_before_is_not_computed_again(engine: Engine) -> None:
    @rx.program
    def after(s: rx.State) -> tuple[int, int]:
        s += "Say something: "
        s.gen(max_tokens=8)
        s += " Good? "
        choice = s.choose(["yes", "no"])
        first = choice.usage.computed_tokens
        s += "\n"
        s.gen(max_tokens=3)
        return first, s.cost.computed_tokens

    first, whole = after.run(engine)
    assert first == 1 + len(" Good? ") + len("yes") + len("no")  # the last generated token was never fed
    assert whole == len("Say something: ") + first + 1
    assert engine.stats().counters.recomputed_for_scores == 0


Body = Callable[[rx.State, list[str]], None]


def adopts(s: rx.State, options: list[str]) -> None:
    with s.fork(3) as branches:
        for branch in branches:
            branch.choose(options)
        s.adopt(branches[1])


def chooses_and_generates(s: rx.State, options: list[str]) -> None:
    with s.fork(2) as branches:
        for number, branch in enumerate(branches):
            branch += f"{number}"
            branch.choose(options)
            branch.gen(max_tokens=3)
        s.adopt(branches[0])


def adopts_twice(s: rx.State, options: list[str]) -> None:
    with s.fork(2) as branches:
        for number, branch in enumerate(branches):
            branch += f"{number}"
            adopts(branch, options)
        s.adopt(branches[0])


def chooses_twice(s: rx.State, options: list[str]) -> None:
    with s.fork(2) as branches:
        for number, branch in enumerate(branches):
            branch += f"{number}"
            branch.choose(options)
            assert branch.choose(options).value in options
        s.adopt(branches[0])
    s.choose(options)


def goes_back(s: rx.State, options: list[str]) -> None:
    adopts(s, options)
    mark = s.mark()
    s += "?"
    s.choose(options)
    s.rewind(mark)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "options", [["1", "2", "3"], ["alpha beta", "gamma rays", "delta wing"]], ids=["short", "long"]
)
@pytest.mark.parametrize("body", [adopts, chooses_and_generates, adopts_twice, chooses_twice, goes_back])
def test_what_was_chosen_stays_cached(make_engine: MakeEngine, body: Body, options: list[str], page_size: int) -> None:
    """Whichever it is, until its state goes on, and whatever scopes have closed since."""
    chosen: set[str] = set()

    @rx.program
    def chooses(s: rx.State, before: str) -> None:
        s += before
        s.gen(max_tokens=3)
        body(s, options)
        chosen.update(option for option in options if option in s.text)
        s += " tail"
        s.gen(max_tokens=2)

    for length in range(8, 18):
        engine = make_engine(page_size=page_size)
        yardstick = rx.Yardstick(engine)
        chooses.run(yardstick, "x" * length)
        assert yardstick.computed == yardstick.ideal
        assert not engine._loop.requests._ended, "every request was released"
    assert chosen == set(options)


def test_a_choice_may_fill_the_pool(make_engine: MakeEngine) -> None:
    """What is held for it needs no room that its own requests did not."""

    @rx.program
    def fills(s: rx.State) -> str:
        s += "x" * 12
        return s.choose(["aaaa", "bbbb"]).value

    assert fills.run(make_engine(page_size=4, num_pages=4)) in ("aaaa", "bbbb")


def test_branches_choose_together_and_alone_alike(make_engine: MakeEngine) -> None:
    what = ["style", "facts", "length", "tone"]

    def one(b: rx.State, about: str) -> tuple[int, Any]:
        b += f"The {about}: "
        mark = b.choose([1, 2, 3], temperature=1.0)
        return mark.value, mark.scores

    @rx.program
    def judge(s: rx.State) -> list[tuple[int, Any]]:
        s += "An essay. "
        with s.fork(what) as branches:
            return branches.map(one)

    @rx.program
    async def judge_async(s: rx.State) -> list[tuple[int, Any]]:
        async def of(b: rx.State, about: str) -> tuple[int, Any]:
            b += f"The {about}: "
            mark = b.choose([1, 2, 3], temperature=1.0)
            return await mark, mark.scores

        s += "An essay. "
        async with s.fork(what) as branches:
            return await branches.map(of)

    @rx.program
    def in_turn(s: rx.State) -> list[tuple[int, Any]]:
        s += "An essay. "
        with s.fork(what) as branches:
            return [one(branch, about) for branch, about in zip(branches, what, strict=True)]

    engine = make_engine()
    found = judge.run(engine)
    assert engine.stats().counters.steps <= 2
    assert engine.stats().counters.computed == trie_size(
        [list(f"An essay. The {about}: {mark}".encode()) for about in what for mark in (1, 2, 3)]
    )
    assert judge_async.run(make_engine()) == in_turn.run(make_engine()) == judge.run(engine) == found
    assert in_turn.run(make_engine(prefix_cache=False)) == found
    others = [judge.options(seed=seed).run(engine) for seed in range(1, 9)]
    assert len({str([mark for mark, _ in one]) for one in [found, *others]}) > 1, "the seed decides"
    assert all([scores for _, scores in one] == [scores for _, scores in found] for one in others)


def test_in_a_conversation(engine: Engine) -> None:
    @rx.program
    def ask(s: rx.State) -> list[dict[str, str]]:
        with s.user():
            s += "Yes or no?"
        with s.assistant():
            s.choose(["yes", "no"])
        with s.user():
            s += "Sure?"
        return s.messages

    messages = ask.run(engine)
    assert messages[1]["role"] == "assistant"
    assert messages[1]["content"] in ("yes", "no")


def test_going_back_and_choosing_anew(engine: Engine) -> None:
    @rx.program
    def again(s: rx.State) -> None:
        s += "x"
        mark = s.mark()
        first = s.choose(["a", "b"], name="it")
        scores, text = first.scores, s.text
        s.rewind(mark)
        assert s.text == "x"
        second = s.choose(["a", "b"], name="it")
        assert (second.scores, s.text) == (scores, text)
        with s.fork(2) as branches:
            assert branches[0].choose(["c"]).value == "c"
            s.adopt(branches[0])
        assert s.text == text + "c"
        with s.scratch() as probe:
            assert probe.choose(["d", "e"]).value in "de"
        assert s.text == text + "c"

    again.run(engine)


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_weighed_is_refused(engine: Engine) -> None:
    @rx.program
    def wrong(s: rx.State) -> None:
        with pytest.raises(rx.InvalidRequest, match="no token comes before them"):
            s.choose(["a", "b"])
        s += "x"
        refused: list[tuple[list[Any], dict[str, Any], str]] = [
            ([], {}, "0 given; allowed: 1 to"),
            (["a", ""], {}, "options: number 2 is empty"),
            (["a", "b", "a"], {}, "'a' given twice"),
            ([1, "1"], {}, "'1' given twice"),
            (["a"], {"score": "best"}, "'best' given; allowed: sum, token_mean"),
            (["a"], {"temperature": -1.0}, "temperature: -1.0 given"),
            (["a"], {"temperature": math.nan}, "temperature: nan given"),
            (["a"], {"end": "."}, 'allowed: with "prefix_free"'),
            (["a"], {"score": "prefix_free"}, "no token that ends a text"),
            (["a"], {"score": "pmi"}, "no token that starts or ends a text"),
        ]
        for options, asked, why in refused:
            with pytest.raises(rx.InvalidRequest, match=why):
                s.choose(options, **asked)
        assert s.choose(["a", "b"], score="prefix_free", end=".", name="it").value in "ab"
        with pytest.raises(rx.StateMisuse, match="name of an earlier slot"):
            s.choose(["a"], name="it")
        with s.fork(1), pytest.raises(rx.StateMisuse, match="its branches live"):
            s.choose(["a"])

    wrong.run(engine)


def test_one_that_never_fits_leaves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(page_size=4, num_pages=4)

    @rx.program
    def long(s: rx.State) -> str:
        s += "x"
        with pytest.raises(rx.InvalidRequest, match="the pool holds 4") as raised:
            s.choose(["a", "b" * 40], name="it")
        assert raised.value.__notes__ == [
            "in program long, choice it, before it had a request",
        ]
        return s.choose(["a", "b"], name="it").text

    assert long.run(engine) in "ab"


def test_a_failure_is_raised_at_the_choice(make_engine: MakeEngine) -> None:
    engine = make_engine(HashModel(vocab=128, finite=lambda batch: batch.token_ids != ord("!")))

    @rx.program
    def fails(s: rx.State) -> str:
        s += "x"
        choice = s.choose(["a", "b!"])
        with pytest.raises(rx.GenerationFailed, match="choice: the model's hidden states") as raised:
            choice.value  # noqa: B018
        assert raised.value.__notes__ == ["in program fails, choice without a name"]
        assert s.text == "x"
        choice = s.choose(["c!"])
        with pytest.raises(rx.GenerationFailed):  # who did not look at it is told by what comes next
            s += "y"
        return s.text

    assert fails.run(engine) == "x"


def test_a_backend_that_fails_midway(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for at in range(6):

        def fault(_: str, number: int) -> None:
            if number == at:  # noqa: B023 - used at once
                raise RuntimeError("lost")

        driver = Driver(FaultyBackend(EngineBackend(engine), fault))

        @rx.program
        def fails(s: rx.State) -> str:
            s += "x"
            try:
                return s.choose(["a", "b", "c"]).text
            except RuntimeError:
                assert s.text == "x"
                return s.choose(["a", "b", "c"]).text

        assert fails.run(driver) in "abc"


def test_leaving_a_scope_cancels(make_engine: MakeEngine) -> None:
    engine = make_engine()

    @rx.program
    async def leaves(s: rx.State) -> str:
        s += "x"
        async with s.fork(3) as branches:
            choices = [branch.choose(["aaaa", "bbbb"]) for branch in branches]
        with pytest.raises(BaseException, match="closed before this had ended"):
            await choices[1]
        async with asyncio.timeout(5):
            return await s.choose(["yes", "no"])

    assert leaves.run(engine) in ("yes", "no")

    @rx.program
    async def unawaited(s: rx.State) -> None:
        s += "x"
        choice = s.choose(["a", "b"])
        with pytest.raises(rx.StateMisuse, match="not awaited yet"):
            choice.value  # noqa: B018
        with pytest.raises(rx.StateMisuse, match="not awaited yet"):
            s += "y"
        assert f"{await choice}" == str(choice)
        task = asyncio.create_task(choosing(s))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert s.text == f"x{choice}"

    async def choosing(s: rx.State) -> str:
        return await s.choose(["cc", "dd"])

    unawaited.run(engine)


def test_a_scripted_backend_chooses_what_its_table_says() -> None:
    backend = ScriptedBackend({"sky? ": "blue", "sea? ": "green\n"}, ByteTokenizer())
    for question, colour in (("sky? ", "blue"), ("sea? ", "green")):
        for score in ("sum", "token_mean", "byte_mean", "greedy"):
            assert pick.run(backend, ["red", "green", "blue"], score, question)[0] == colour
    with pytest.raises(rx.GenerationFailed, match="no reply is scripted to 'tree"):
        pick.run(backend, ["a", "b"], context="tree? ")


# -- real models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_equals_a_direct_scorer(name: str, make_engine: MakeEngine) -> None:
    """Every score of every option, from the model's own code in float64."""
    hf_model, context, options = tiny.build(tiny.SERVED[name]()), "1 + 1 = ", ["2", "11", "TWO", "2 OR 3"]
    tokenizer = ByteTokenizer()

    def logprobs(ids: list[int]) -> list[float]:
        return tiny.logprobs(hf_model, ids)

    engine = make_engine(TransformerModel(tiny.build(tiny.SERVED[name]())), page_size=4, num_pages=64)
    [last, *_] = sorted(engine.model.eos_token_ids)
    ids = [tokenizer.encode(option) for option in options]
    own = [logprobs([*tokenizer.encode(context), *one])[-len(one) :] for one in ids]
    sums = [sum(one) for one in own]
    expected = {
        "sum": sums,
        "token_mean": [total / len(one) for total, one in zip(sums, ids, strict=True)],
        "byte_mean": [total / len(option.encode()) for total, option in zip(sums, options, strict=True)],
        "prefix_free": [sum(logprobs([*tokenizer.encode(context), *one, last])[-len(one) - 1 :]) for one in ids],
        "pmi": [total - sum(logprobs([last, *one])) for total, one in zip(sums, ids, strict=True)],
    }
    for score in expected:
        for heat in ("cold", "hot"):
            value, scores, _ = pick.run(engine, options, score, context)  # type: ignore[arg-type]
            assert value == options[int(np.argmax(expected[score]))], heat
            for one in ALWAYS - {"greedy"} | {score}:
                assert scores[one] == pytest.approx(expected[one], abs=1e-8)


@given(st.permutations(["yes", "no", "not now", "n", "maybe"]), st.integers(1, 3), st.booleans())
def test_the_order_of_options_changes_nothing(order: list[str], rounds: int, hot: bool) -> None:  # noqa: FBT001
    engine = Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=64, page_size=4, poison=True)
    expected = dict(
        zip(
            ["yes", "no", "not now", "n", "maybe"],
            pick.run(engine, ["yes", "no", "not now", "n", "maybe"])[1]["sum"],
            strict=True,
        )
    )
    if not hot:
        engine = Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=8, page_size=4, poison=True)
    for _ in range(rounds):
        value, scores, _ = pick.run(engine, order)
        assert dict(zip(order, scores["sum"], strict=True)) == expected
        assert value == max(order, key=lambda option: expected[option])


def test_observers_hear_of_choices(make_engine: MakeEngine) -> None:
    @rx.program
    def picks(s: rx.State) -> str:
        s += "a or b: "
        return s.choose(["a", "b"], name="pick").value

    heard = list(picks.stream(make_engine()))
    [started] = [event for event in heard if isinstance(event, rx.events.SlotStarted)]
    [ended] = [event for event in heard if isinstance(event, rx.events.SlotEnded)]
    [run] = [event for event in heard if isinstance(event, rx.events.RunEnded)]
    assert (started.number, started.name) == (ended.number, ended.name) == (0, "pick")
    assert ended.text == run.value
    assert (ended.finish, ended.error) == ("stop", None)
    assert ended.usage is not None
    assert ended.usage.prompt_tokens == 2 * len("a or b: a")


def test_a_state_shows_what_was_chosen(make_engine: MakeEngine) -> None:
    @rx.program
    def picks(s: rx.State) -> tuple[str, str]:
        s += "a or b: "
        return s.choose(["a", "b"], name="pick").value, s._repr_html_()

    value, html = picks.run(make_engine())
    assert "pick: one of 2" in html
    assert f">{value}</span>" in html


def test_scores_that_choose_nothing_are_its_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was appended then, and nothing is held."""

    def fails(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("no verdict")

    @rx.program
    def picks(s: rx.State) -> str:
        s += "a or b: "
        with pytest.raises(ArithmeticError, match="no verdict"):
            s.choose(["a", "b"]).value  # noqa: B018
        return s.text

    monkeypatch.setattr(Options, "verdict", fails)
    assert picks.run(engine) == "a or b: "
    assert not engine._loop.requests._ended, "every request was released"
