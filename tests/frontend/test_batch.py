"""Batches: one result for each row, in order, and a killed one goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import radixrt as rx
from radixrt.runtime import Engine

from .conftest import MakeEngine

ROWS = [{"word": f"word {number}"} for number in range(12)]


@rx.program
def plain(s: rx.State, word: str) -> str:
    s += f"Shared by all of them: {word}"
    if word == "word 3":
        raise ValueError(word)
    return s.gen(max_tokens=6).value


@rx.program
async def tasks(s: rx.State, word: str) -> str:
    s += f"Shared by all of them: {word}"
    if word == "word 3":
        raise ValueError(word)
    return await s.gen(max_tokens=6)


def values(results: list[Any]) -> list[Any]:
    return [result.value if result.ok else type(result.error) for result in results]


def test_results_are_in_order_and_failures_are_values(make_engine: MakeEngine) -> None:
    engine = make_engine()
    found = values(plain.batch(engine, ROWS))
    assert found[3] is ValueError
    assert len(found) == len(ROWS)
    for concurrency in (1, 3):
        assert values(plain.batch(make_engine(), ROWS, concurrency=concurrency)) == found
        assert values(tasks.batch(make_engine(), ROWS, concurrency=concurrency)) == found
    assert engine.stats().counters.computed <= len("Shared by all of them: word ") + 2 * len(ROWS) + 2
    assert plain.batch(engine, []) == []


def test_a_batch_resumes_and_runs_only_what_is_left(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    found = values(plain.batch(engine, ROWS, resume=path))
    lines = path.read_bytes().splitlines(keepends=True)
    assert sorted(json.loads(line)["row"] for line in lines) == [0, 1, 2, *range(4, 12)]
    path.write_bytes(b"".join(lines[:5]) + lines[5][:7])  # killed while it wrote
    before = engine.stats().counters.decoded
    assert values(plain.batch(engine, ROWS, resume=path)) == found
    assert engine.stats().counters.decoded - before == 6 * 5
    rows = [json.loads(line)["row"] for line in path.read_text().splitlines()]
    assert sorted(rows) == [0, 1, 2, *range(4, 12)]


def test_a_journal_of_another_batch_is_refused(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    plain.batch(engine, ROWS, resume=path)
    for program, rows in ((tasks, ROWS), (plain.options(seed=1), ROWS), (plain, ROWS[1:])):
        with pytest.raises(rx.InvalidRequest, match="resume"):
            program.batch(engine, rows, resume=path)


@pytest.mark.parametrize("found", [b"no journal\n", b'{"years of": "work"}', b"\xff\xfe\x00", b'{"row"\n', b"{}"])
def test_a_file_of_another_kind_is_refused_and_kept(engine: Engine, tmp_path: Path, found: bytes) -> None:
    """A last line that was cut off is a journal's only where it begins as one."""
    path = tmp_path / "mine.json"
    path.write_bytes(found)
    with pytest.raises(rx.InvalidRequest, match="no journal of a batch"):
        plain.batch(engine, ROWS, resume=path)
    assert path.read_bytes() == found


def test_rows_that_nothing_knows_again_are_refused_before_any_runs(engine: Engine, tmp_path: Path) -> None:
    @rx.program
    def odd(s: rx.State, word: object) -> None:
        s += "x"
        s.gen(max_tokens=1)

    with pytest.raises(rx.InvalidRequest, match=r"resume: row 1 has <object obj.* among its arguments"):
        odd.batch(engine, [{"word": "known"}, {"word": [object()]}], resume=tmp_path / "runs.jsonl")
    assert engine.stats().counters.steps == 0
    assert not (tmp_path / "runs.jsonl").exists()
    odd.batch(engine, [{"word": rx.Ok(1)}], resume=tmp_path / "runs.jsonl")
    odd.batch(engine, [{"word": rx.Ok(1)}], resume=tmp_path / "runs.jsonl")


def test_a_value_that_json_cannot_hold_fails_its_row(engine: Engine, tmp_path: Path) -> None:
    @rx.program
    def odd(s: rx.State, word: str) -> object:
        return object() if word == "word 1" else (word,)

    first, second = odd.batch(engine, ROWS[:2], resume=tmp_path / "runs.jsonl")
    assert first == rx.Ok(["word 0"])
    assert not second.ok


def test_each_row_is_called_once(engine: Engine) -> None:
    """Finding out what rows share, for their order and for a plan, calls nothing."""
    calls: list[str] = []

    @rx.program
    def noted(s: rx.State, word: str) -> str:
        calls.append(word)
        s += f"Shared by all of them, and longer than any threshold: {word}"
        return s.gen(max_tokens=2).value

    noted.plan(engine, ROWS)
    assert calls == []
    noted.batch(engine, ROWS)
    assert sorted(calls) == sorted(row["word"] for row in ROWS)


@pytest.mark.parametrize("is_async", [False, True])
def test_rows_that_begin_alike_run_next_to_each_other(make_engine: MakeEngine, is_async: bool) -> None:  # noqa: FBT001
    """A pool that holds one document: in the order of the rows each would push out the other."""
    documents = ["first " * 20, "other " * 20]
    rows = [{"document": documents[number % 2], "question": f"{number}"} for number in range(12)]

    @rx.program
    def plain(s: rx.State, document: str, question: str) -> str:
        s += f"{document}Question: {question}"
        return s.gen(max_tokens=2).value

    @rx.program
    async def tasks(s: rx.State, document: str, question: str) -> str:
        s += f"{document}Question: {question}"
        return await s.gen(max_tokens=2)

    @rx.program
    def unread(s: rx.State, document: str, question: str) -> str:
        document, question = str(document), str(question)  # a call: nothing is known behind it
        s += f"{document}Question: {question}"
        return s.gen(max_tokens=2).value

    def small() -> Engine:
        return make_engine(num_pages=48, page_size=4, eviction="lru")

    program: Any = tasks if is_async else plain
    engine, other, whole = small(), small(), make_engine()
    found = program.batch(engine, rows, concurrency=1)
    assert found == unread.batch(other, rows, concurrency=1) == program.batch(whole, rows)
    ideal = program.plan(engine, rows).rows.distinct
    assert engine.stats().counters.computed == whole.stats().counters.computed == ideal
    assert other.stats().counters.computed > 3 * ideal


def test_a_batch_in_another_order_resumes_as_ever(engine: Engine, tmp_path: Path) -> None:
    rows = [{"word": f"{number % 3} {number}"} for number in range(9)]

    @rx.program
    def ask(s: rx.State, word: str) -> str:
        s += word
        return s.gen(max_tokens=3).value

    path = tmp_path / "runs.jsonl"
    found = ask.batch(engine, rows, concurrency=1, resume=path)
    order = [json.loads(line)["row"] for line in path.read_text().splitlines()]
    assert order == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]))
    assert ask.batch(engine, rows, resume=path) == found


CHILD = """
import sys, time
import radixrt as rx
from radixrt.runtime.testing import ByteTokenizer, HashModel

@rx.program
def slow(s: rx.State, number: int) -> str:
    s += f"row {number}"
    time.sleep(0.05)
    return s.gen(max_tokens=4).value

engine = rx.Engine(HashModel(vocab=128), tokenizer=ByteTokenizer(), num_pages=64)
results = slow.batch(engine, [{"number": number} for number in range(20)], concurrency=2, resume=sys.argv[1])
print([result.value for result in results])
"""
COMMAND = [sys.executable, "-c", CHILD]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_second_batch_on_one_file_is_refused(engine: Engine, tmp_path: Path) -> None:
    """In this process and in another, and nothing of it is run; the first ends as ever, and then the file is free."""
    path = tmp_path / "runs.jsonl"
    tried: list[str] = []

    @rx.program
    def nested(s: rx.State, word: str) -> str:
        if word == "word 1":
            with pytest.raises(rx.InvalidRequest, match=r"resume: .* is in use: another batch is at it"):
                nested.batch(engine, ROWS, resume=path)
            other = subprocess.run([*COMMAND, str(path)], env=ENVIRONMENT, capture_output=True, text=True, check=False)
            tried.append(other.stderr)
        return word

    found = nested.batch(engine, ROWS, resume=path, concurrency=1)
    assert [error.count("is in use: another batch is at it") for error in tried] == [1]
    assert found == nested.batch(engine, ROWS, resume=path)


def test_a_journal_that_is_refused_is_let_go(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    plain.batch(engine, ROWS, resume=path)
    with pytest.raises(rx.InvalidRequest, match="not of this batch") as kept:
        tasks.batch(engine, ROWS, resume=path)
    assert values(plain.batch(engine, ROWS, resume=path))[0]
    del kept


def test_a_killed_batch_has_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    command = [*COMMAND, str(path)]
    killed = subprocess.Popen(command, env=ENVIRONMENT)
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    num_done = path.read_bytes().count(b"\n")
    assert 5 <= num_done < 20
    printed = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(row["row"] for row in rows) == list(range(20))
    assert printed.strip() == repr([row["value"] for row in sorted(rows, key=lambda row: row["row"])])
