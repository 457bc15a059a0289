"""States in notebooks: given, generated and template text told apart, nothing unescaped, and nothing waited for."""

from __future__ import annotations

from html.parser import HTMLParser

import radixrt as rx
from radixrt.frontend.testing import ScriptedBackend
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer


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
            kind = (
                "generated" if "background" in self.open[-1][1] else "template" if "opacity" in self.open[-1][1] else ""
            )
            self.found.append((kind, data))


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
