"""A state as HTML, for notebooks: what was given, generated, and written by the chat template, told apart.

Knows no engine. Colours are translucent, so that they read on light and on dark pages.
"""

from __future__ import annotations

from html import escape
from itertools import groupby

from .chat import Template
from .choice import Choice
from .content import Content, Said

_BOX = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:ui-monospace,monospace;line-height:1.5;margin:0"
_GENERATED = "background:rgba(46,160,67,.25);border-radius:3px"
_RUNNING = "background:rgba(210,153,34,.3);border-radius:3px"
_TEMPLATE = "opacity:.5;font-style:italic"


def html_of(content: Content, template: Template, title: str) -> str:
    """Waits for nothing: of a generation that runs it says so. What hovers over a generation says which it is."""
    parts = []
    for message, things in groupby(content.things(), key=lambda said: said.message):
        parts += [] if message is None else [_opening(content, template, message)]
        parts += map(_piece, things)
    key = " ".join(
        _span(style, name) for style, name in (("", "given"), (_GENERATED, "generated"), (_TEMPLATE, "template"))
    )
    return (
        f'<pre style="{_BOX}">{"".join(parts)}</pre><div style="font-size:85%;opacity:.8">{escape(title)}: {key}</div>'
    )


def _opening(content: Content, template: Template, message: int) -> str:
    items = template.opening(content.roles[: message + 1])
    return _span(_TEMPLATE, "".join(item for item in items if isinstance(item, str)))


def _piece(said: Said) -> str:
    if isinstance(said.what, str):
        return escape(said.what)
    slot = said.what
    name = slot.name if slot.name is not None else "choose" if isinstance(slot, Choice) else "gen"
    if not slot.is_done:
        return _span(_RUNNING, f"[{name} runs]")
    how = f"one of {len(slot.options)}" if isinstance(slot, Choice) else f"{len(slot.token_ids)} tokens, {slot.finish}"
    return _span(_GENERATED, slot.text, title=f"{name}: {how}")


def _span(style: str, text: str, *, title: str = "") -> str:
    hover = f' title="{escape(title)}"' if title else ""
    return f'<span style="{style}"{hover}>{escape(text)}</span>'
