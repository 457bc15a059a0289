"""The examples run, on the hash model here: what they print of sharing holds for any model."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixrt.runtime import Engine, ModelError, trie_size

from .conftest import MakeEngine, audit

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look theirs up
    spec.loader.exec_module(module)
    return module


def play(path: Path, engine: Engine, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run an example: what it computed was its ideal."""
    load(path.stem).main(*([engine, folder] if path.stem == "batch_file" else [engine]))
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"computed ([\d,]+) == ideal \1; [\d,]+ tokens shared", last)


PROGRAMS = sorted(path for path in EXAMPLES.glob("*.py") if path.stem != "first_program")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_example_computes_its_ideal(
    path: Path, engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    play(path, engine, tmp_path, capsys)


@pytest.fixture(scope="module")
def default_engine() -> Iterator[Engine]:
    try:
        engine = Engine("smollm2-135m")
    except ModelError:
        pytest.skip("the default model is not installed")
    with engine:
        yield engine


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_every_example_computes_its_ideal_on_the_default_model(
    path: Path, default_engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    default_engine.reset_cache()
    play(path, default_engine, tmp_path, capsys)
    audit(default_engine)


def test_few_shot_computes_each_node_of_its_trie_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("few_shot")
    example.main(engine)
    shots = "".join(f"Q: {shot.question}\nA: {shot.answer}\n" for shot in example.SHOTS)
    prompts = [f"Answer with one word.\n{shots}Q: {question}\nA:" for question in example.QUESTIONS]
    ideal = trie_size([list(prompt.encode()) for prompt in prompts])
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"computed {ideal:,} == ideal {ideal:,}; ")


def test_tree_of_thought(make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("tree_of_thought")
    printed = []
    for _ in range(2):
        example.main(make_engine())
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].splitlines()[-2] == "13 generations"


def test_self_consistency(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("self_consistency")
    example.main(engine)
    prompt = f"Question: {example.QUESTION}\nThink step by step and end with the number.\nAnswer:"
    assert engine.stats().counters.computed == len(prompt) + 5 * len("\nSo the number is")
    assert capsys.readouterr().out.splitlines()[-2] == "10 generations"


def test_skeleton_of_thought_expands_all_points_at_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("skeleton_of_thought")
    points, texts, cost = example.skeleton_of_thought.run(engine, example.TOPIC)
    assert cost.generations == len(points) + len(texts) == 6
    outline = f"user: Give 3 tips on {example.TOPIC}, of three words each.\n1.\n2.\n3.\n"
    asked = [f"\nuser: Explain tip {number} in one sentence: {point}.\n" for number, point in enumerate(points, 1)]
    branches = [text.encode() for text in asked]
    assert engine.stats().counters.computed == len(outline) + trie_size([list(branch) for branch in branches])
    example.main(engine)
    assert capsys.readouterr().out.splitlines()[-2] == "6 generations"


def test_a_long_document_is_computed_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("long_document_qa")
    example.main(engine)
    begin = f"{example.DOCUMENT}\n\nQuestions about this text, with short answers.\n"
    prompts = [f"{begin}Question: {question}\nAnswer:" for question in example.QUESTIONS]
    ideal = trie_size([list(prompt.encode()) for prompt in prompts])
    total = sum(map(len, prompts))
    *_, asked, said = capsys.readouterr().out.splitlines()
    assert asked == f"{total} prompt tokens"
    assert said == f"computed {ideal:,} == ideal {ideal:,}; {total - ideal:,} tokens shared"


def test_judge_computes_each_node_of_its_trie_once(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("judge")
    example.main(engine)
    start = f"Essay: {example.ESSAY}\n\nMarks from 1 (poor) to 5 (excellent).\n"
    prompts = [f"{start}{dimension}: {mark}" for dimension in example.DIMENSIONS for mark in example.MARKS]
    ideal = trie_size([list(prompt.encode()) for prompt in prompts])
    *marks, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"computed {ideal:,} == ideal {ideal:,}; ")
    assert len(marks) == len(example.DIMENSIONS)
    assert all(1 <= float(line.split()[1]) <= 5 for line in marks)


def test_chat(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    load("chat").main(engine)
    said = capsys.readouterr().out
    assert said.splitlines()[-2] == "5 messages remain"
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
    assert first[-1].startswith(f"computed {ideal:,} == ideal {ideal:,}; ")
    assert any(f"{ideal:,} distinct" in line for line in first)
    journal = tmp_path / "ratings.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:2]))
    example.main(make_engine(), tmp_path)
    second = capsys.readouterr().out.splitlines()
    assert second[:-1] == first[:-1]
    assert journal.read_bytes().count(b"\n") == 4


def test_json_extraction_computes_each_node_of_its_trie_once(
    make_engine: MakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("json_extraction")
    engine = make_engine()
    example.main(engine)
    said = capsys.readouterr().out.splitlines()
    assert [line.startswith("  name=") for line in said[1:-1:2]] == [True] * len(example.DOCUMENTS)
    prompts = [f"{example.INSTRUCTION}Text: {document}\nJSON:\n" for document in example.DOCUMENTS]
    ideal = trie_size([list(prompt.encode()) for prompt in prompts])
    assert said[-1].startswith(f"computed {ideal:,} == ideal {ideal:,}; ")


def test_react(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("react")
    example.main(engine)
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if not line.startswith("  ")][:-1] == list(example.QUESTIONS)
    assert example.react.options(seed=3).name == "react"
    assert re.fullmatch(r"computed ([\d,]+) == ideal \1; [\d,]+ tokens shared", said[-1])
