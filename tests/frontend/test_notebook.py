"""States in notebooks: given, generated and template text told apart, nothing unescaped, and nothing waited for."""

from __future__ import annotations

from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Annotated

from pydantic import Field

import radixrt as rx
from radixrt.frontend.testing import ScriptedBackend
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine


@dataclass
class Person:
    age: Annotated[int, Field(ge=10, le=99)]


class Spans(HTMLParser):
    """The texts of the first <pre>, each with the style of its span; the tags must nest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.open: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("pre", "span", "div")
        self.open.append((tag, dict(attrs).get("style") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[0][0] == "pre":
            style = self.open[-1][1]
            marks = {"46,160,67": "generated", "56,139,253": "forced", "opacity": "template", "": ""}
            self.found.append((next(kind for mark, kind in marks.items() if mark in style), data))


def test_given_and_generated_text_are_told_apart() -> None:
    backend = ScriptedBackend({"A:": "<script>alert('x')</script> & so"}, ByteTokenizer())

    @rx.program
    def asks(s: rx.State) -> tuple[str, str]:
        s += "Q: <b>1 & 2</b>?\nA:"
        s.gen(name='an "answer"', max_tokens=100)
        return s.text, s._repr_html_()

    text, html = asks.run(backend)
    spans = Spans(html).found
    assert spans == [("", "Q: <b>1 & 2</b>?\nA:"), ("generated", "<script>alert('x')</script> & so")]
    assert "".join(piece for _, piece in spans) == text
    assert "<script>" not in html
    assert "an &quot;answer&quot;" in html


def test_what_the_template_writes_is_told_apart(engine: Engine) -> None:
    with rx.session(engine, system="Be brief.") as chat:
        reply = chat.send("Hi", max_tokens=3).value
        html = chat.state._repr_html_()
        text = chat.state.text
    spans = Spans(html).found
    assert [piece for kind, piece in spans if not kind] == ["Be brief.", "Hi"]
    assert "".join(piece for kind, piece in spans if kind == "generated") == reply
    assert "".join(piece for _, piece in spans) == text


def test_a_generation_that_runs_is_not_waited_for(engine: Engine) -> None:
    @rx.program
    async def shows(s: rx.State) -> tuple[str, str]:
        s += "x"
        slot = s.gen(name="answer", max_tokens=3)
        before = s._repr_html_()
        assert engine.stats().counters.steps == 0
        await slot
        return before, s._repr_html_()

    before, after = shows.run(engine)
    assert "[answer runs]" in before
    assert "answer: 3 tokens, length" in after


def test_what_a_type_left_no_choice_of_is_told_apart(make_engine: MakeEngine) -> None:
    engine = make_engine(HashModel(vocab=256))

    @rx.program
    def finds(s: rx.State) -> tuple[str, str, str]:
        s += "Who? "
        slot = s.gen(Person, max_tokens=60)
        forced = bytes(slot.token_ids[at] for at in slot.forced).decode()
        return s.text, s._repr_html_(), forced

    text, html, forced = finds.run(engine)
    spans = Spans(html).found
    assert "".join(piece for _, piece in spans) == text
    assert spans[:2] == [("", "Who? "), ("forced", '{"age": ')]
    assert "".join(piece for kind, piece in spans if kind == "forced") == forced
    assert any(kind == "generated" for kind, _ in spans)
