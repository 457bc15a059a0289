"""Records: a run on paper, run again line by line."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from radixrt.radix import LiveTables
from radixrt.runtime import Engine, FinishEvent, Handle, InvalidRequest, Output, RecordError, SamplingParams, replay
from radixrt.runtime.testing import ByteTokenizer, HashModel


def record(path: Path) -> None:
    """A run with sharing, forks, an abort, preemption and a reset."""
    with Engine(HashModel(vocab=300), num_pages=9, page_size=4, token_budget=6, record=path) as engine:
        handles = [engine.submit([1, 2, 3, 4, 5, i], SamplingParams(max_tokens=20, seed=i)) for i in range(4)]
        for _ in range(3):
            engine.step()
        engine.fork(handles[0], n=2, params=SamplingParams(max_tokens=3))
        engine.step()
        engine.abort(handles[1])
        while engine.stats().num_running + engine.stats().num_waiting:
            engine.step()
        assert engine.stats().counters.preemptions > 0
        engine.reset_cache()
        engine.generate([[7, 8, 9]], SamplingParams(max_tokens=2))


def test_a_record_is_replayed(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl")
    result = replay(tmp_path / "run.jsonl")
    assert result.difference is None
    assert result.num_steps > 10
    ops = [json.loads(line)["op"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert set(ops) == {"engine", "submit", "fork", "abort", "reset", "step"}


def test_refusals_and_stop_strings_replay(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with Engine(HashModel(vocab=120), tokenizer=ByteTokenizer(), num_pages=20, page_size=4, record=path) as engine:
        engine.submit("hello", SamplingParams(max_tokens=30, temperature=0.0, stop=["a", "b", "c"]))
        engine.step()
        with pytest.raises(LiveTables):
            engine.reset_cache()
        with pytest.raises(InvalidRequest):
            engine.submit([], SamplingParams())
        while engine.stats().num_running:
            engine.step()
    assert replay(path).difference is None


def test_pins_that_end_by_themselves_replay(tmp_path: Path) -> None:
    """Where a step that computes nothing ends the pin too: what follows may need that it has ended."""
    path = tmp_path / "run.jsonl"
    with Engine(HashModel(), num_pages=20, page_size=2, record=path) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        pinned = engine.pin([1, 2, 3], ttl=2)
        engine.generate([[4]], SamplingParams(max_tokens=2))
        with pytest.raises(LiveTables):
            engine.reset_cache()
        engine.step()
        engine.reset_cache()
        engine.unpin(pinned)  # which has ended
    assert replay(path).difference is None


def test_a_sink_may_hold_anything() -> None:
    class Log:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # cannot be copied
            self.lines: list[dict[str, object]] = []

        def add(self, line: dict[str, object]) -> None:
            self.lines.append(line)

    log = Log()
    with Engine(HashModel(), num_pages=4, record=log.add) as engine:
        engine.generate([[1, 2]], SamplingParams(max_tokens=2))
    assert [line["op"] for line in log.lines] == ["engine", "submit", "step", "step"]


def test_a_full_disk_loses_no_request() -> None:
    """The line that cannot be written raises; the step it tells of has happened, and the engine goes on."""
    lines: list[dict[str, object]] = []

    def add(line: dict[str, object]) -> None:
        lines.append(line)
        if len(lines) == 5:
            raise OSError(28, "No space left on device")

    with Engine(HashModel(), num_pages=20, page_size=4, record=add, poison=True) as engine:
        handles = [engine.submit(prompt, SamplingParams(max_tokens=4, temperature=0.0)) for prompt in ([1, 2], [3] * 9)]
        ended: dict[Handle, Output] = {}
        for _ in range(10):
            try:
                ended |= {event.handle: event.output for event in engine.step() if isinstance(event, FinishEvent)}
            except RecordError:
                engine.check()
        assert [len(ended[handle].choices[0].token_ids) for handle in handles] == [4, 4]


@pytest.mark.parametrize("field", ["drawn", "entries", "freed"])
def test_the_first_difference_is_named(tmp_path: Path, field: str) -> None:
    record(tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    at = max(i for i, line in enumerate(lines) if line["op"] == "step" and line[field])
    lines[at][field] = lines[at][field][:-1]
    (tmp_path / "run.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = replay(tmp_path / "run.jsonl")
    assert result.difference is not None
    assert result.difference.startswith(f"line {at + 1}: recorded ")


NO_RECORDS = [
    "",
    "{}",
    "no json",
    "[1]",
    '{"op": "step"}',
    '{"op": "engine", "version": 99}',
    '{"op": "engi',
    "[" * 100_000,
    "1" * 5_000,
    "\x00\udcff",
]


@pytest.mark.parametrize("text", NO_RECORDS, ids=lambda text: repr(text[:20]))
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequest, match=r"^record: "):
        replay(tmp_path / "run.jsonl")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^record: .* cannot be read"):
        replay(tmp_path / "none.jsonl")


def test_a_closed_engine_takes_what_is_left_to_do(tmp_path: Path) -> None:
    with Engine(HashModel(), num_pages=8, record=tmp_path / "record.jsonl") as engine:
        handle = engine.generate([[1, 2]], SamplingParams(max_tokens=2))[0].handle
    engine.abort(handle)
    engine.release(handle)
    engine.close()
