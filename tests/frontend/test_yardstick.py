"""What programs had to compute at least, counted from outside, and what they did compute."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

import radixrt as rx
from radixrt.frontend.program import Program
from radixrt.frontend.testing import Body, plain, programs
from radixrt.runtime import Engine, FinishEvent, Grammar, Handle, SamplingParams
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit


@rx.program
def tree(s: rx.State) -> None:
    s += "root "  # 5
    with s.fork(3) as branches:
        for number, branch in enumerate(branches):
            branch += f"same {number}"  # 5 shared, then a digit each
            branch.gen(max_tokens=4, temperature=0.0)
        branches[1].gen(max_tokens=4)
        s.adopt(branches[1])
    s += " end"
    s.gen(max_tokens=2)


def test_it_counts_each_given_token_of_the_tree_once(engine: Engine) -> None:
    yardstick = rx.Yardstick(engine)
    tree.run(yardstick)
    assert (yardstick.computed, yardstick.ideal) == (5 + 5 + 3 + 4, 5 + 5 + 3 + 4)
    shared = yardstick.shared
    assert str(yardstick) == f"computed 17 == ideal 17; {shared:,} tokens shared"
    tree.run(yardstick)
    assert (yardstick.computed, yardstick.ideal) == (17 + 4, 17 + 4), "what came behind generated text ended with it"
    assert yardstick.shared > shared


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_warm_cache_is_no_fault(engine: Engine, is_warm: bool) -> None:  # noqa: FBT001
    if is_warm:
        tree.run(engine)
    yardstick = rx.Yardstick(engine)
    assert str(yardstick) == "computed 0 == ideal 0; 0 tokens shared"
    tree.run(yardstick)
    said = "computed 4 <= ideal 17" if is_warm else "computed 17 == ideal 17"
    assert str(yardstick).startswith(f"{said}; ")


def test_namespaces_share_nothing(engine: Engine) -> None:
    yardstick = rx.Yardstick(engine)
    for namespace in ("", "other"):
        tree.options(namespace=namespace).run(yardstick)
    assert yardstick.computed == yardstick.ideal == 34


def test_without_a_cache_more_is_computed() -> None:
    engine = Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=64, prefix_cache=False)
    yardstick = rx.Yardstick(engine)
    tree.run(yardstick)
    assert yardstick.computed > yardstick.ideal == 17
    assert " != " in str(yardstick)


def ask(yardstick: rx.Yardstick, text: str, params: SamplingParams) -> tuple[Handle, str]:
    """A request's handle and text, once it has ended."""
    handle = yardstick.submit(list(text.encode()), params, "", priority=0)
    while True:
        for event in yardstick.step():
            if isinstance(event, FinishEvent):
                return handle, event.output.choices[0].text


class TestWhatWasGenerated:
    @pytest.mark.parametrize("has_another", [False, True])
    def test_counts_once_nobody_has_it(self, make_engine: MakeEngine, *, has_another: bool) -> None:
        """What was dropped with its request has to be computed where it is given."""
        yardstick = rx.Yardstick(make_engine(page_size=1))
        handle, text = ask(yardstick, "begin", SamplingParams(max_tokens=4, temperature=0.0))
        if has_another:
            ask(yardstick, "begin" + text[:3], SamplingParams(max_tokens=1))
        assert (yardstick.computed, yardstick.ideal) == (5, 5)
        yardstick.release(handle)
        ask(yardstick, "begin" + text[:3] + "!", SamplingParams(max_tokens=1))
        assert (yardstick.computed, yardstick.ideal) == ((6, 6) if has_another else (9, 9))

    @pytest.mark.parametrize("logprobs", [None, 0])
    def test_counts_from_the_last_that_was_drawn(self, engine: Engine, logprobs: int | None) -> None:
        """A grammar's one way on needs no logits: it is not fed unless its log-probability is asked."""
        yardstick = rx.Yardstick(engine)
        params = SamplingParams(max_tokens=9, grammar=Grammar.regex("(Yes|No!)"), logprobs=logprobs)
        _, text = ask(yardstick, "begin", params)
        assert text in ("Yes", "No!")
        ask(yardstick, f"begin{text}a", SamplingParams(max_tokens=1))
        assert (yardstick.computed, yardstick.ideal) == ((9, 9) if logprobs is None else (7, 7))


QUESTION = " Is that good, or rather bad?"


@rx.program
def asked_in_a_scratch(s: rx.State) -> None:
    with s.scratch() as aside:
        aside += QUESTION
        aside.gen(max_tokens=4)


@rx.program
def asked_and_rewound(s: rx.State) -> None:
    mark = s.mark()
    s += QUESTION
    s.gen(max_tokens=4)
    s.rewind(mark)


@rx.program
def chosen(s: rx.State) -> None:
    s.choose(["good", "bad"])


@rx.program
def pinned(s: rx.State) -> None:
    s.pin()
    s += QUESTION
    s.gen(max_tokens=4)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("behind", [asked_in_a_scratch, asked_and_rewound, chosen, pinned])
def test_nothing_stays_behind_what_a_program_generated(
    make_engine: MakeEngine, page_size: int, behind: Program[[], None, None]
) -> None:
    """Whatever ended first: the text behind it was given, but nobody will come by there again."""

    @rx.program
    def body(s: rx.State) -> None:
        s += "begin"
        s.gen(max_tokens=4)
        behind(s)

    engine = make_engine(page_size=page_size)
    body.run(engine)
    assert engine.stats().cache.num_cached == -(-len("begin") // page_size)


@given(programs(), st.sampled_from([1, 4, 16]))
def test_a_program_computes_no_more(body: Body, page_size: int) -> None:
    """Less, where it was cancelled, or gave what another branch had generated. And it leaves no more than it gave."""
    model = HashModel(vocab=128, eos=frozenset({0, 1}))
    engine = Engine(model, tokenizer=ByteTokenizer(), num_pages=512, page_size=page_size)
    yardstick = rx.Yardstick(engine)
    plain.run(yardstick, body)
    assert yardstick.computed <= yardstick.ideal
    assert not yardstick._paths, "every request was released"
    if page_size == 1:
        assert engine.stats().cache.num_cached <= len(yardstick._there), "what was given before all that was generated"
    audit(engine)
