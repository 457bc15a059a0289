"""Traces: what a run told is in the file, is read back as it was, and damage is named; and how they are shown."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

import radixrt as rx
from radixrt.frontend import cli
from radixrt.frontend.scope import Failed
from radixrt.frontend.testing import Body, plain, programs, tasks
from radixrt.frontend.trace import BranchSpan, RewindSpan, SlotSpan, TextSpan, TraceWriter
from radixrt.frontend.trace_view import as_text
from radixrt.runtime import Engine
from radixrt.runtime.testing import ByteTokenizer, HashModel

from .conftest import MakeEngine, audit

ev = rx.events


@rx.program
def judge(s: rx.State, essay: str) -> dict[str, str]:
    s += f"Essay: {essay}. "
    s.gen(name="summary", max_tokens=3)
    with s.fork(["style", "facts"]) as branches:

        def one(b: rx.State, what: str) -> str:
            b += f"Its {what}:\n"
            return b.gen(name=what, max_tokens=4).value

        marks = branches.map(one)
        s.adopt(branches[1])
    s += "so "
    s.gen(max_tokens=2)
    return dict(zip(("style", "facts"), marks, strict=True))


class Kept:
    """An observer that keeps what it hears."""

    def __init__(self, into: list[Any]) -> None:
        self._into = into

    def tell(self, event: Any) -> None:
        self._into.append(event)

    def close(self) -> None:
        self._into.append("closed")


def test_a_trace_reads_back_what_the_run_told(make_engine: MakeEngine, tmp_path: Path) -> None:
    path, told = tmp_path / "runs.jsonl", list[Any]()
    value = judge.options(trace=path, observers=[lambda: Kept(told)], seed=3).run(make_engine(), "on cats")
    [run] = rx.load_trace(path).runs
    assert (run.start.program, run.start.seed, run.start.row) == ("judge", 3, None)
    assert run.end is not None
    assert run.end.value == value
    assert run.end.error is None
    assert told.pop() == "closed"
    ends = [event for event in told if isinstance(event, ev.SlotEnded)]
    starts = [event for event in told if isinstance(event, ev.SlotStarted)]
    assert [(slot.path, slot.number, slot.name) for slot in run.slots] == [
        (one.where.path, one.number, one.name) for one in starts
    ]
    by_slot = {(end.where.path, end.number): end for end in ends}
    for slot, start in zip(run.slots, starts, strict=True):
        end = by_slot[slot.path, slot.number]
        assert (slot.text, slot.finish, slot.usage, slot.error) == (end.text, end.finish, end.usage, None)
        assert (slot.request, slot.explanation) == (start.request, start.explanation)
        assert slot.started <= (slot.first or 0) <= slot.ended
    texts = [span.text for span in run.spans if isinstance(span, TextSpan)]
    assert texts == [event.text for event in told if isinstance(event, ev.TextGiven)]
    branches = {span.path: span.adopted for span in run.spans if isinstance(span, BranchSpan)}
    assert branches == {(0,): False, (1,): True}


def test_a_trace_tells_the_time_of_grammars_where_one_was_used(make_engine: MakeEngine, tmp_path: Path) -> None:
    @rx.program
    def ask(s: rx.State, kind: type[Any]) -> Any:
        s += "how many? "
        return s.gen(kind, name="it", max_tokens=8).value

    told = list[Any]()
    traced = ask.options(trace=tmp_path / "t", observers=[lambda: Kept(told)])
    engine = make_engine(clock=map(float, itertools.count()).__next__)
    for kind in (bool, str):
        traced.run(engine, kind)
    held, free = ([slot] for run in rx.load_trace(tmp_path / "t").runs for slot in run.slots)
    seconds = [event.grammar_seconds for event in told if isinstance(event, ev.SlotEnded)]
    assert [slot.grammar_seconds for slot in (*held, *free)] == seconds
    assert seconds[0] >= 3 > seconds[1] == 0, "a start takes three"
    first, second = as_text(rx.load_trace(tmp_path / "t")).split("\n\n")[:2]
    assert "grammar s" in first
    assert f" {seconds[0]:.3f}" in first
    assert "grammar s" not in second


def test_a_choice_is_told_apart_from_a_generation(engine: Engine, tmp_path: Path) -> None:
    @rx.program
    def ask(s: rx.State) -> None:
        s += "good or bad? "
        s.choose(["good", "bad"])
        s.gen(max_tokens=1)

    told = list[Any]()
    ask.options(trace=tmp_path / "t", observers=[lambda: Kept(told)]).run(engine)
    assert [event.is_choice for event in told if isinstance(event, ev.SlotStarted)] == [True, False]
    trace = rx.load_trace(tmp_path / "t")
    assert [slot.is_choice for run in trace.runs for slot in run.slots] == [True, False]
    assert "choose " in str(trace)
    assert "gen " in str(trace)


def test_a_trace_adds_up_to_the_cost(engine: Engine, tmp_path: Path) -> None:
    @rx.program
    def costs(s: rx.State) -> int:
        judge(s, "on dogs")
        return s.cost.computed_tokens

    costs.options(trace=tmp_path / "t").run(engine)
    [run] = rx.load_trace(tmp_path / "t").runs
    assert run.end is not None
    assert sum(slot.usage.computed_tokens for slot in run.slots if slot.usage) == run.end.value
    for slot in run.slots:
        assert slot.usage is not None
        assert slot.usage.prompt_tokens == (
            slot.usage.cached_tokens + slot.usage.computed_tokens + slot.usage.recomputed_tokens
        )


def test_a_slot_explains_what_the_cache_had_of_its_prompt(engine: Engine, tmp_path: Path) -> None:
    @rx.program
    def ask(s: rx.State, text: str) -> str:
        s += text
        return s.gen(max_tokens=1).value

    traced = ask.options(trace=tmp_path / "t")
    for text in ("the same beginning, then this", "the same beginning, then that", "other"):
        traced.run(engine, text)
    first, second, third = (run.slots[0].explanation for run in rx.load_trace(tmp_path / "t").runs)
    assert first is not None and second is not None and third is not None  # noqa: PT018
    assert first.matched == third.matched == 0
    assert second.matched == second.diverged_at == len("the same beginning, then th")
    assert (second.expected, second.got) == (ord("i"), ord("a"))
    assert second.diverged_from is not None


def test_runs_of_a_batch_share_a_file(make_engine: MakeEngine, tmp_path: Path) -> None:
    @rx.program
    async def task(s: rx.State, word: str) -> str:
        s += f"Shared: {word}"
        if word == "3":
            raise ValueError(word)
        return await s.gen(max_tokens=3)

    @rx.program
    def plain(s: rx.State, word: str) -> str:
        s += f"Shared: {word}"
        if word == "3":
            raise ValueError(word)
        return s.gen(max_tokens=3).value

    programs: list[Any] = [plain, task]
    for number, program in enumerate(programs):
        path = tmp_path / f"{number}"
        results = program.options(trace=path).batch(make_engine(), [{"word": str(n)} for n in range(8)])
        runs = {run.start.row: run for run in rx.load_trace(path).runs}
        assert sorted(row for row in runs if row is not None) == list(range(8))
        for row, result in enumerate(results):
            end = runs[row].end
            assert end is not None
            assert end.error == ("ValueError: 3" if isinstance(result, Failed) else None)
            assert isinstance(result, Failed) or end.value == result.value


def test_sessions_are_traced(engine: Engine, tmp_path: Path) -> None:
    with rx.session(engine, system="Be brief.", trace=tmp_path / "chat") as chat:
        chat.send("Hi", max_tokens=4)
        mark = chat.mark()
        chat.send("Again", max_tokens=4)
        chat.rewind(mark)
        chat.send("Bye", max_tokens=4)
    [run] = rx.load_trace(tmp_path / "chat").runs
    said = [(span.role, span.text) for span in run.spans if isinstance(span, TextSpan)]
    assert said == [("system", "Be brief."), ("user", "Hi"), ("user", "Again"), ("user", "Bye")]
    assert [type(span).__name__ for span in run.spans].count("RewindSpan") == 1
    assert len(run.slots) == 3


def test_what_was_cancelled_or_failed_says_so(engine: Engine, tmp_path: Path) -> None:
    class Odd(Exception):
        pass

    @rx.program
    def races(s: rx.State) -> None:
        s += "x"
        with s.fork(2) as branches:
            slots = [b.gen(max_tokens=2 if number else 2000) for number, b in enumerate(branches)]
            slots[1].value  # noqa: B018
        raise Odd

    with pytest.raises(Odd):
        races.options(trace=tmp_path / "t").run(engine)
    [run] = rx.load_trace(tmp_path / "t").runs
    assert run.end is not None
    assert run.end.error == "Odd"
    finished = {slot.path: slot for slot in run.slots}
    assert finished[0,].finish == "cancelled"
    assert finished[0,].usage is None
    assert finished[0,].text  # what had come
    assert finished[1,].finish == "length"

    @rx.program
    def chooses(s: rx.State) -> None:
        s += "x"
        with s.scratch() as aside:
            aside.choose(["yes", "no"])
        assert s.cost.generations == 0
        raise Odd

    with pytest.raises(Odd):
        chooses.options(trace=tmp_path / "c").run(engine)
    trace = rx.load_trace(tmp_path / "c")
    assert [(slot.finish, slot.usage) for run in trace.runs for slot in run.slots] == [("cancelled", None)]
    assert "cancelled" in str(trace)

    with pytest.raises(TimeoutError):
        asyncio.run(timed_out(engine, tmp_path / "u"))
    [run] = rx.load_trace(tmp_path / "u").runs
    assert [slot.finish for slot in run.slots] == ["cancelled"]
    assert run.end is not None
    assert run.end.error == "CancelledError"
    audit(engine)


async def timed_out(engine: Engine, path: Path) -> None:
    @rx.program
    async def slow(s: rx.State) -> None:
        s += "x"
        await s.gen(max_tokens=4000)

    async with asyncio.timeout(0.05):
        await slow.options(trace=path).arun(engine)


def test_values_that_are_no_json_are_named(engine: Engine, tmp_path: Path) -> None:
    class Odd:
        def __repr__(self) -> str:
            raise AssertionError("runs code of the author's")

    circle: list[Any] = []
    circle.append(circle)
    values: list[Any] = [Odd(), {"a": Odd()}, circle, {(1, 2): 3}]

    @rx.program
    def gives(s: rx.State, number: int) -> Any:
        return values[number]

    for number in range(len(values)):
        gives.options(trace=tmp_path / "t").run(engine, number)
    found = [run.end.value for run in rx.load_trace(tmp_path / "t").runs if run.end is not None]
    assert found == ["<Odd>", {"a": "<Odd>"}, "<list>", "<dict>"]


def test_a_file_that_was_cut_off_is_read_and_added_to(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t"
    judge.options(trace=path).run(engine, "on cats")
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 7), len(whole) - 1, len(whole)):
        path.write_bytes(whole[:size])
        if b"\n" not in whole[:size]:
            with pytest.raises(rx.InvalidRequest, match="is no trace"):
                rx.load_trace(path)
            continue
        runs = rx.load_trace(path).runs
        assert len(runs) <= 1
        if size < len(whole):
            assert all(run.end is None for run in runs)
    path.write_bytes(whole[:-10])
    judge.options(trace=path).run(engine, "on dogs")
    first, second = rx.load_trace(path).runs
    assert first.end is None
    assert second.end is not None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"finish": "length"', b'"finish": "odd"', "line 4"),
        (b'"finish": "length"', b'"finish": 3', "line 4"),
        (b'"order": 1', b'"order": "1"', "line 4"),
        (b'"order": 1', b'"order": true', "line 4"),
        (b'"prompt_tokens"', b'"prompts"', "line 4"),
        (b'"kind": "slot"', b'"kind": "thing"', "line 4"),
        (b'{"run"', b'{"run', "line 2"),
        (b'"kind": "run"', b'"kind": "end"', "line 2"),
        (b'"radixrt_trace": 3', b'"radixrt_trace": 2', "version 2"),
        (b'{"radixrt_trace"', b'{"trace"', "is no trace"),
    ],
)
def test_damage_is_named(engine: Engine, tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    path = tmp_path / "t"
    judge.options(trace=path).run(engine, "on cats")
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, 1))
    with pytest.raises(rx.InvalidRequest, match=words):
        rx.load_trace(path)


def test_other_files_are_not_written_to(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(rx.InvalidRequest, match="is no trace"):
        judge.options(trace=path).run(engine, "x")
    assert path.read_text() == "my notes"
    with pytest.raises(rx.InvalidRequest, match="cannot be used"):
        judge.options(trace=tmp_path).run(engine, "x")
    with pytest.raises(rx.InvalidRequest, match="cannot be read"):
        rx.load_trace(tmp_path / "absent")


def test_a_disk_that_is_full_is_told_when_the_run_has_ended(engine: Engine, tmp_path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    def broken() -> TraceWriter:
        writer = TraceWriter(tmp_path / "t")
        writer._file.close()
        writer._file = Full()  # type: ignore[assignment]
        return writer

    with pytest.raises(rx.InvalidRequest, match=r"not complete.*No space"):
        judge.options(observers=[broken]).run(engine, "x")
    audit(engine)


def test_an_observer_that_fails_is_heard_of_when_the_run_has_ended(engine: Engine) -> None:
    class Odd(Exception):
        pass

    @dataclass
    class Fails:
        num_left: int
        is_closed: bool = False

        def tell(self, event: rx.events.RunEvent) -> None:
            self.num_left -= 1
            if not self.num_left:
                raise Odd

        def close(self) -> None:
            self.is_closed = True

    events: list[Any] = []
    judge.options(observers=[lambda: Kept(events)]).run(engine, "x")
    for number in range(1, len(events) + 1):
        observer, told = Fails(number), list[Any]()
        program = judge.options(observers=[lambda one=observer: one, lambda into=told: Kept(into)])
        if number < len(events):
            with pytest.raises(Odd):
                program.run(engine, "x")
        else:
            program.run(engine, "x")
        assert observer.is_closed
        assert observer.num_left == (number == len(events))  # it heard nothing more
        assert isinstance(told[-2], ev.RunEnded)
        assert told[-2].error is None
        audit(engine)


def test_times_are_the_clock_s(engine: Engine, tmp_path: Path) -> None:
    now = iter(range(1000))
    writer = TraceWriter(tmp_path / "t", clock=lambda: float(next(now)))
    judge.options(observers=[lambda: writer]).run(engine, "x")
    [run] = rx.load_trace(tmp_path / "t").runs
    assert run.start.started == 0.0
    first = next(span for span in run.spans if isinstance(span, SlotSpan))
    assert (first.started, first.first, first.ended) == (2.0, 3.0, 6.0)  # three tokens between


def test_the_tree_of_a_run(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t"
    judge.options(trace=path).run(engine, "on cats")
    shown = str(rx.load_trace(path)).splitlines()
    assert shown[0].startswith("judge  seed 0  ")
    labels = [line[:30].split("  ")[0].rstrip() for line in shown[2:-2]]
    starts = ["├ Essay: on cats.", "├ summary", "├ branch 0", "│ ├ Its style:↵", "│ └ style", "├ branch 1 adopted"]
    starts += ["│ ├ Its facts:↵", "│ └ facts", "├ so", "└ gen", "4 slots"]
    assert len(labels) == len(starts)
    assert all(label.startswith(start) for label, start in zip(labels, starts, strict=True)), labels
    assert shown[-1].startswith("1 run, 0 failed, 4 slots: ")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_tree_fits_its_width(engine: Engine, tmp_path: Path, width: int) -> None:
    path = tmp_path / "t"
    judge.options(trace=path).run(engine, "on cats, " * 50)
    text = as_text(rx.load_trace(path), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "summary" in text


def test_the_command_shows_a_trace(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "t"
    judge.options(trace=path).batch(engine, [{"essay": essay} for essay in ("a", "b")])
    result = CliRunner().invoke(cli.app, ["trace", str(path)])
    assert result.exit_code == 0
    assert "judge, row 1" in result.stdout
    assert "2 runs, 0 failed" in result.stdout
    path.write_text(json.dumps({"what": 1}) + "\n")
    result = CliRunner().invoke(cli.app, ["trace", str(path)])
    assert result.exit_code == 2
    assert "is no trace" in result.stderr


def test_random_programs_are_traced_whole(profile: str, tmp_path: Path) -> None:
    @settings(max_examples=2_000 if profile == "deep" else 50, suppress_health_check=list(HealthCheck))
    @given(programs(), st.sampled_from([plain, tasks]), st.integers(20, 200))
    def check(body: Body, program: Any, width: int) -> None:
        model = HashModel(vocab=256, eos=frozenset(range(4)))
        engine = Engine(model, tokenizer=ByteTokenizer(), num_pages=512, page_size=4, poison=True)
        path, told = tmp_path / "t", list[Any]()
        path.unlink(missing_ok=True)
        program.options(trace=path, observers=[lambda: Kept(told)]).run(engine, body)
        trace = rx.load_trace(path)
        [run] = trace.runs
        assert run.end is not None
        by_kind = {
            SlotSpan: ev.SlotEnded,
            TextSpan: ev.TextGiven,
            RewindSpan: ev.Rewound,
            BranchSpan: ev.BranchClosed,
        }
        for kind, event in by_kind.items():
            assert sum(isinstance(span, kind) for span in run.spans) == sum(isinstance(one, event) for one in told)
        text = as_text(trace, width=width)
        assert max(map(cell_len, text.splitlines())) <= width
        assert sum(line.lstrip("│├└ ").startswith("branch ") for line in text.splitlines()) == sum(
            isinstance(one, ev.BranchOpened) for one in told
        )

    check()


def test_text_of_a_model_does_not_steer_the_terminal(engine: Engine, tmp_path: Path) -> None:
    @rx.program
    def asks(s: rx.State) -> str:
        s += "\x1b[31mred [bold]"
        return s.gen(max_tokens=40).value

    asks.options(trace=tmp_path / "t").run(engine)
    shown = str(rx.load_trace(tmp_path / "t"))
    assert "\x1b" not in shown
    assert "[bold]" in shown
