"""A state as HTML, for notebooks: what was given, generated, forced, and written by the chat template, told apart.

Knows no engine. Colours are translucent, so that they read on light and on dark pages.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

from .chat import Template
from .choice import Choice
from .codec import Codec
from .content import Content, Said

_BOX = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:ui-monospace,monospace;line-height:1.5;margin:0"
_GENERATED = "background:rgba(46,160,67,.25);border-radius:3px"
_FORCED = "background:rgba(56,139,253,.2);border-radius:3px"
_RUNNING = "background:rgba(210,153,34,.3);border-radius:3px"
_TEMPLATE = "opacity:.5;font-style:italic"


def html_of(content: Content, template: Template, codec: Codec, title: str) -> str:
    """Waits for nothing: of a generation that runs it says so. What hovers over a generation says which it is."""
    parts = []
    for message, things in groupby(content.things(), key=lambda said: said.message):
        parts += [] if message is None else [_opening(content, template, message)]
        parts += (_piece(said, codec) for said in things)
    names = ("", "given"), (_GENERATED, "generated"), (_FORCED, "forced"), (_TEMPLATE, "template")
    key = " ".join(_span(style, name) for style, name in names)
    return (
        f'<pre style="{_BOX}">{"".join(parts)}</pre><div style="font-size:85%;opacity:.8">{escape(title)}: {key}</div>'
    )


def _opening(content: Content, template: Template, message: int) -> str:
    items = template.opening(content.roles[: message + 1])
    return _span(_TEMPLATE, "".join(item for item in items if isinstance(item, str)))


def _piece(said: Said, codec: Codec) -> str:
    if isinstance(said.what, str):
        return escape(said.what)
    slot = said.what
    name = slot.name if slot.name is not None else "choose" if isinstance(slot, Choice) else "gen"
    if not slot.is_done:
        return _span(_RUNNING, f"[{name} runs]")
    if isinstance(slot, Choice):
        return _span(_GENERATED, slot.text, title=f"{name}: one of {len(slot.options)}")
    title = f"{name}: {len(slot.token_ids)} tokens, {slot.finish}"
    runs = [
        (is_forced, codec.decode(slot.token_ids[at] for at in indices))
        for is_forced, indices in groupby(range(len(slot.token_ids)), key=set(slot.forced).__contains__)
    ]
    if not "".join(text for _, text in runs).startswith(slot.text):  # a run ends in the middle of a character
        return _span(_GENERATED, slot.text, title=title)
    spans, left = [], slot.text
    for is_forced, text in runs:
        shown, left = left[: len(text)], left[len(text) :]
        spans += [_span(_FORCED if is_forced else _GENERATED, shown, title=title)] if shown else []
    return "".join(spans)


def _span(style: str, text: str, *, title: str = "") -> str:
    hover = f' title="{escape(title)}"' if title else ""
    return f'<span style="{style}"{hover}>{escape(text)}</span>'
