"""The examples run, on the hash model here: what they print of sharing holds for any model."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from radixrt.runtime import Engine, trie_size

from .conftest import MakeEngine

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look theirs up
    spec.loader.exec_module(module)
    return module


def test_few_shot_computes_each_node_of_its_trie_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("few_shot")
    example.main(engine)
    shots = "".join(f"Q: {shot.question}\nA: {shot.answer}\n" for shot in example.SHOTS)
    prompts = [f"Answer with one word.\n{shots}Q: {question}\nA:" for question in example.QUESTIONS]
    ideal = trie_size([list(prompt.encode()) for prompt in prompts])
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{ideal} tokens computed")


def test_tree_of_thought(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("tree_of_thought")
    printed = []
    for _ in range(2):
        example.main(make_engine())
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].splitlines()[-1].startswith("13 generations")


def test_chat(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    load("chat").main(engine)
    said = capsys.readouterr().out
    assert said.endswith("5 messages remain\n")
    (first, whole), (second, more) = (
        map(int, found) for found in re.findall(r"(\d+) of (\d+) prompt tokens computed", said)
    )
    assert first == whole
    assert second < more - whole


def test_a_batch_over_a_file_computes_its_trie_and_resumes(
    make_engine: MakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    example = load("batch_file")
    example.main(make_engine(), tmp_path)
    first = capsys.readouterr().out.splitlines()
    head = "Rate what a review says, in one word: good, bad or nothing.\n"
    rows = [line.rsplit(",", 1) for line in example.ROWS.splitlines()[1:]]
    prompts = [f"{head}Review: {review}\nIts {aspect}:" for review, aspect in rows]
    ideal = trie_size([list(prompt.encode()) for prompt in prompts])
    assert first[-1].startswith(f"{ideal} tokens computed")
    assert any(f"{ideal:,} distinct" in line for line in first)
    journal = tmp_path / "ratings.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))
    example.main(make_engine(), tmp_path)
    second = capsys.readouterr().out.splitlines()
    assert second[:-1] == first[:-1]
    assert journal.read_bytes().count(b"\n") == 4
