"""Records: a run on paper, run again line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from radixrt.runtime import Engine, InvalidRequest, SamplingParams, replay
from radixrt.runtime.testing import HashModel


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


@pytest.mark.parametrize("text", ["", "{}", "no json", '{"op": "step"}', '{"op": "engine", "version": 99}', "[1]"])
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.jsonl").write_text(text)
    with pytest.raises(InvalidRequest, match=r"^record: "):
        replay(tmp_path / "run.jsonl")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"^record: .*cannot be read"):
        replay(tmp_path / "none.jsonl")
