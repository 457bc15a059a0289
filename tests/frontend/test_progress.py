"""The progress of batches: what is counted, what a terminal shows, and that nothing is shown elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

import radixrt as rx
from radixrt.frontend.progress import Tally, shown
from radixrt.runtime import Engine, Usage

from .conftest import MakeEngine

ROWS = [{"word": f"{number}"} for number in range(12)]


@rx.program
def ask(s: rx.State, word: str) -> str:
    s += f"Shared by all: {word}"
    if word == "3":
        raise ValueError(word)
    return s.gen(max_tokens=4).value


@rx.program
async def ask_async(s: rx.State, word: str) -> str:
    s += f"Shared by all: {word}"
    if word == "3":
        raise ValueError(word)
    return await s.gen(max_tokens=4)


@pytest.mark.parametrize("program", [ask, ask_async], ids=["plain", "tasks"])
def test_rows_and_tokens_are_counted(make_engine: MakeEngine, program: Any) -> None:
    engine, tally = make_engine(), Tally(num_rows=len(ROWS))
    program.options(observers=[tally.row]).batch(engine, ROWS, concurrency=3)
    assert (tally.num_begun, tally.num_done, tally.num_failed) == (12, 12, 1)
    assert tally.num_waiting == tally.num_generating == 0
    counters = engine.stats().counters
    assert (tally.cost.generations, tally.cost.computed_tokens) == (11, counters.computed)
    assert tally.cost.completion_tokens == 44


def test_what_the_line_says() -> None:
    ev, where = rx.events, rx.events.Where(program="p", path=())
    tally = Tally(num_rows=4, num_known=1, began=100.0)
    assert tally.describe(100.0) == "0 generate, 0 wait"
    rows = [tally.row() for _ in range(3)]
    for row in rows:
        row.tell(ev.RunStarted(where=where, seed=0))
        row.tell(ev.SlotStarted(where=where, number=0, name=None, is_choice=False, request=0, explanation=None))
    assert tally.describe(101.0) == "0 generate, 3 wait"
    for row in rows[:2]:
        row.tell(ev.TextDelta(where=where, number=0, name=None, text="x"))
        row.tell(ev.TextDelta(where=where, number=0, name=None, text="y"))
    assert tally.describe(101.0) == "2 generate, 1 wait"
    usage = Usage(prompt_tokens=10, cached_tokens=8, computed_tokens=2, recomputed_tokens=0, completion_tokens=2)
    for number, row in enumerate(rows[:2]):
        row.tell(ev.SlotEnded(where=where, number=0, name=None, text="xy", finish="stop", usage=usage, error=None))
        row.tell(ev.RunEnded(where=where, value=None, error=ValueError() if number else None))
    assert tally.describe(104.0) == "1 failed, 0.5 rows/s, 0:02 left, 80% cached, 0 generate, 1 wait"
    rows[2].tell(
        ev.SlotEnded(where=where, number=0, name=None, text="", finish="cancelled", usage=None, error=ValueError())
    )
    rows[2].tell(ev.RunEnded(where=where, value=None, error=None))
    assert tally.describe(3800.0) == "1 failed, 0.000811 rows/s, 80% cached, 1:01:40 in all"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_shows_a_bar_of_one_line(engine: Engine, width: int) -> None:
    out, tally = io.StringIO(), Tally(num_rows=len(ROWS))
    console = Console(file=out, force_terminal=True, width=width)
    with shown(tally, "ask", console=console):
        ask.options(observers=[tally.row]).batch(engine, ROWS, progress=False)
    lines = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", out.getvalue()).splitlines() if line.strip()]
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()[-1]
    assert lines
    assert last.startswith("ask 12/12 ━")
    assert len(last) <= width
    assert width < 80 or "1 failed" in last


CHILD = """
import sys
import radixrt as rx
from radixrt.runtime.testing import ByteTokenizer, HashModel

@rx.program
def ask(s: rx.State, number: int) -> str:
    s += f"row {number}"
    return s.gen(max_tokens=4).value

engine = rx.Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=64)
rows = [{"number": number} for number in range(20)]
ask.batch(engine, rows, progress=False)
print("no bar so far", file=sys.stderr, flush=True)
ask.batch(engine, rows)
"""


def stderr_of(child: str, *, terminal: bool) -> str:
    """What it writes to stderr, which is a pseudo-terminal or a pipe."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", child]
    if not terminal:
        return subprocess.run(command, env=environment, check=True, stderr=subprocess.PIPE, text=True).stderr
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            written += piece
    os.close(ours)
    assert process.returncode == 0
    return written.decode()


def test_the_bar_is_on_terminals_and_can_be_turned_off() -> None:
    before, _, after = stderr_of(CHILD, terminal=True).partition("no bar so far")
    assert before == ""
    assert "ask 20/20" in after
    assert stderr_of(CHILD, terminal=False) == "no bar so far\n"
