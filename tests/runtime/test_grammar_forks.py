"""Grammars beside forks, adopt, truncate and preemption: the place is that of the tokens which are owned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from radixrt.runtime import Engine, FinishEvent, Grammar, Handle, InvalidRequest, Output, SamplingParams
from radixrt.runtime.constraint import Grammars
from radixrt.runtime.intake import branch_pages
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import finish

VOCAB = 128
GRAMMARS = [Grammar.regex("[a-f]{3}(x[0-9]){2,9}"), Grammar.regex("(ab|[c-k]{2})*z"), None]


@dataclass
class Told:
    """A request by hand: its tokens, the text that each belongs to (and of which grammar), and the grammar it has."""

    handle: Handle
    tokens: list[int]
    texts: list[tuple[int, Grammar | None]]
    grammar: Grammar | None
    ancestors: list[Handle]

    def own(self, at: int) -> tuple[int, Grammar | None]:
        """The text that goes on behind its first `at` tokens, if one of its grammar does."""
        last = self.texts[at - 1] if at else (0, None)
        return last if self.grammar is not None and last[1] == self.grammar else (0, self.grammar)


class Family:
    """One engine, and its requests by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.told: dict[Handle, Told] = {}
        self._last = 0

    def live(self, told: Told) -> bool:
        return self.engine._loop.requests.live(told.handle) is not None

    def add(self, handle: Handle, parent: Told | None, prompt: list[int], **given: Any) -> None:
        begun: list[tuple[int, Grammar | None]] = given.pop("texts", [])
        texts = begun + [(0, None)] * (len(prompt) - len(begun))
        ancestors = [*parent.ancestors, parent.handle] if parent is not None else []
        self.told[handle] = Told(handle, prompt, texts, ancestors=ancestors, **given)
        self.follow()

    def follow(self) -> None:
        """Take what the live ones have generated, and compare each one's place with that of its tokens."""
        for told in self.told.values():
            sequence = self.engine._loop.requests.find(told.handle).branch(0)
            tokens = sequence.tokens.tolist()
            assert tokens[: len(told.tokens)] == told.tokens
            while len(told.texts) < len(tokens):
                number, _ = told.own(len(told.texts))
                if not number:
                    self._last += 1
                    number = self._last
                told.texts.append((number, told.grammar))
            told.tokens = tokens
            if sequence.constraint is not None:
                expected = self.place(told, len(tokens))
                assert expected is not None
                assert (sequence.constraint.allowed == expected.allowed).all()

    def place(self, told: Told, at: int) -> Any:
        """The place behind the first `at` tokens in its grammar, by hand; None where it does not go on."""
        number, grammar = told.own(at)
        text = [token for token, of in zip(told.tokens[:at], told.texts[:at], strict=True) if of == (number, grammar)]
        assert grammar is not None
        try:
            return Grammars(ByteTokenizer(), VOCAB).start(grammar, frozenset(), text if number else [])
        except InvalidRequest:
            return None

    def fork(self, parent: Told, at: int, extra: list[int], params: SamplingParams | None) -> None:
        grammar = parent.grammar if params is None else params.grammar
        goes_on = grammar is None or extra or params is not None or self.place(parent, at) is not None
        if not goes_on:
            with pytest.raises(InvalidRequest, match="does not go on"):
                self.engine.fork(parent.handle, at=at)
            return
        (handle,) = self.engine.fork(parent.handle, params=params, at=at, text=extra or None)
        texts = parent.texts[:at]
        if params is not None and not extra:
            texts = [(number, None) if of == grammar else (number, of) for number, of in texts]  # begins anew
        self.add(handle, parent, parent.tokens[:at] + extra, texts=texts, grammar=grammar)

    def adopt(self, parent: Told, child: Told) -> None:
        self.engine.adopt(parent.handle, child.handle)
        parent.tokens, parent.texts = child.tokens, child.texts
        del self.told[child.handle]


@given(data=st.data())
def test_the_place_is_that_of_the_tokens(data: st.DataObject) -> None:
    """After any forks at any positions, adoptions and truncations."""

    def drawn(grammar: Grammar | None) -> SamplingParams:
        return SamplingParams(grammar=grammar, max_tokens=data.draw(st.integers(1, 12)), logit_bias={122: 2.0})

    with Engine(HashModel(vocab=VOCAB), tokenizer=ByteTokenizer(), num_pages=500, page_size=4, poison=True) as engine:
        family = Family(engine)
        grammar = data.draw(st.sampled_from(GRAMMARS[:2]))
        family.add(engine.submit([1, 2, 3], drawn(grammar)), None, [1, 2, 3], grammar=grammar)
        for _ in range(data.draw(st.integers(4, 16))):
            one = data.draw(st.sampled_from(list(family.told.values())))
            own = engine._loop.requests.find(one.handle).branch(0).output_start
            match data.draw(st.sampled_from(["step", "step", "fork", "text", "params", "adopt", "truncate"])):
                case "step":
                    engine.step()
                case "fork":
                    family.fork(one, data.draw(st.integers(1, len(one.tokens))), [], None)
                case "text":
                    family.fork(one, data.draw(st.integers(0, len(one.tokens))), [100, 101], None)
                case "params":
                    others = [other for other in GRAMMARS if other is None or other not in [g for _, g in one.texts]]
                    family.fork(one, len(one.tokens), [], drawn(data.draw(st.sampled_from(others))))
                case "adopt":
                    child = data.draw(st.sampled_from(list(family.told.values())))
                    descends = one.handle in child.ancestors and child.tokens[:own] == one.tokens[:own]
                    if descends and not family.live(one) and not family.live(child):
                        family.adopt(one, child)
                case "truncate":
                    length = data.draw(st.integers(own, len(one.tokens)))
                    engine.truncate(one.handle, length)
                    one.tokens, one.texts = one.tokens[:length], one.texts[:length]
            family.follow()
            engine.check()


def texts_of(outputs: dict[Handle, Output]) -> list[list[tuple[Any, ...]]]:
    return [
        [(choice.token_ids, choice.text, choice.finish_reason) for choice in outputs[handle].choices]
        for handle in sorted(outputs, key=lambda handle: handle.number)
    ]


class Pressed:
    """Runs the same requests with plenty of pages and with too few; counts the preemptions of the latter."""

    num_preemptions = 0

    @classmethod
    def both(cls, few: int, page_size: int, run: Any) -> None:
        answers = []
        for num_pages in (1_000, few):
            settings: dict[str, Any] = {"num_pages": num_pages, "page_size": page_size, "token_budget": 16}
            with Engine(HashModel(vocab=VOCAB), tokenizer=ByteTokenizer(), poison=True, **settings) as engine:
                answers.append(run(engine))
                cls.num_preemptions += engine.stats().counters.preemptions
        assert answers[0] == answers[1]


def test_choices_with_a_grammar_under_preemption() -> None:
    class Pool(Pressed):
        pass

    @settings(max_examples=settings().max_examples // 2)
    @given(
        grammar=st.sampled_from(GRAMMARS[:2]),
        n=st.integers(2, 4),
        page_size=st.sampled_from([1, 2, 4]),
        slack=st.integers(0, 2),
        num_requests=st.integers(2, 3),
    )
    def run(grammar: Grammar, n: int, page_size: int, slack: int, num_requests: int) -> None:
        params = SamplingParams(n=n, grammar=grammar, max_tokens=20, logit_bias={122: -3.0}, seed=5)

        def choices(engine: Engine) -> Any:
            for i in range(num_requests):
                engine.submit([1, 2, i], params)
            return texts_of(finish(engine, num_steps=2_000))

        Pool.both(branch_pages(3, 22, n, page_size) + slack, page_size, choices)

    run()
    assert Pool.num_preemptions > 20, "the pool is short on purpose"


def test_forks_with_a_grammar_under_preemption() -> None:
    """Forks at given tokens draw alike whenever they are made; their parents, and they, go on in the same text."""

    class Pool(Pressed):
        pass

    @settings(max_examples=settings().max_examples // 2)
    @given(
        grammar=st.sampled_from(GRAMMARS[:2]),
        page_size=st.sampled_from([1, 2, 4]),
        slack=st.integers(0, 2),
        cuts=st.lists(st.integers(0, 6), min_size=2, max_size=5),
    )
    def run(grammar: Grammar, page_size: int, slack: int, cuts: list[int]) -> None:
        params = SamplingParams(grammar=grammar, max_tokens=20, min_tokens=12, logit_bias={122: -3.0}, seed=5)

        def forks(engine: Engine) -> Any:
            parents = [engine.submit([1, 2, i], replace(params, seed=i)) for i in range(3)]
            outputs: dict[Handle, Output] = {}
            for cut in cuts:  # once the parent has been that far, however far that is by now
                for parent in parents:
                    while engine._loop.requests.find(parent).branch(0).num_tokens <= 3 + cut:
                        outputs |= {e.handle: e.output for e in engine.step() if isinstance(e, FinishEvent)}
                        engine.check()
                    engine.fork(parent, at=3 + cut)
            return texts_of(outputs | finish(engine, num_steps=2_000))

        Pool.both(branch_pages(3, 29, 1, page_size) + slack, page_size, forks)

    run()
    assert Pool.num_preemptions > 20, "the pool is short on purpose"
